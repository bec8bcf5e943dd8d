"""Measurements that are kept from call to call."""

import json
from pathlib import Path


class Rows:
    """What was measured so far, one JSON object a line; only in memory if there is no file."""

    def __init__(self, file: Path | None) -> None:
        self.file = file
        self.rows: list[dict[str, object]] = []
        self.look()

    def look(self) -> None:
        """Reads what is there: other calls may be measuring at the same time."""
        if self.file is not None and self.file.is_file():
            self.rows = [json.loads(line) for line in self.file.read_text().splitlines()]

    def add(self, **row: object) -> None:
        """Keeps one measurement."""
        self.rows.append(row)
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("a") as f:
                f.write(json.dumps(row) + "\n")
