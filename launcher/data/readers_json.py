"""JSON Lines files of any size: one object on each line."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rung.launcher.data.readers_csv import line_at, row_edges
from rung.launcher.data.readers_rows import Paths, Row, Rows, row_mapping
from rung.launcher.storage_files import find_files
from rung.strategies.errors import DataError


class Jsonl(Rows):
    """Rows of one or more JSON Lines files; see `Rows` for what a sample is. Empty lines are no rows.

    `required` columns have to be in every row; those of `features` and `label` always have to.
    """

    def __init__(
        self,
        paths: Paths,
        *,
        required: Sequence[str] = (),
        features: Sequence[str] | None = None,
        label: str | None = None,
        classes: Sequence[Any] | None = None,
        transform: Callable[[Any], Any] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        files = find_files(paths, (".jsonl", ".ndjson", ".json"), options)
        self._edges = [row_edges(file, quotes=False) for file in files]
        counts = [len(edges) - 1 for edges in self._edges]
        super().__init__(
            files, counts, columns=None, features=features, label=label, classes=classes, transform=transform
        )
        self.required = [*required, *(features or ()), *([label] if label is not None else [])]
        if len(self) == 0:
            raise DataError(f"{files[0].url} has no rows")

    def row(self, number: int, row: int) -> Row:
        """One row."""
        edges = self._edges[number]
        data = self.files[number].read(int(edges[row]), int(edges[row + 1]))
        index = sum(len(e) - 1 for e in self._edges[:number]) + row
        try:
            value = json.loads(data)
        except UnicodeDecodeError as error:
            what = f"byte 0x{data[error.start]:02x} at character {error.start + 1} is not UTF-8"
            raise self.error(index, number, row, "", what) from None
        except ValueError as error:
            at = getattr(error, "colno", 0)
            said = getattr(error, "msg", str(error))
            text = data[max(0, at - 20) : at + 20].decode("utf-8", "replace").strip()
            raise self.error(index, number, row, "", f"character {at}: {said}, near {text!r}") from None
        if not isinstance(value, dict):
            kind = type(value).__name__
            raise self.error(index, number, row, "", f"a row has to be an object in braces, this is a {kind}")
        for name in self.required:
            if name not in value:
                raise self.error(index, number, row, name, "missing")
        return row_mapping(value)

    def place(self, number: int, row: int) -> str:
        """File and line."""
        return f"{self.files[number].url}:{line_at(self.files[number], int(self._edges[number][row]))}"
