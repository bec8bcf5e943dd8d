"""The run folder: what lies where, and how a remote one is kept up to date.

    RUN/job.json                     the job as it was first launched
    RUN/plans/attempt-001.json       the plan of each attempt, with its reasons
    RUN/events.jsonl                 what happened, one line each
    RUN/metrics.jsonl, tensorboard/  numbers of each step and validation
    RUN/logs/attempt-001/rank-0.log  what each worker printed
    RUN/checkpoints/step-000000120/  see launcher/checkpoint/manifest.py

Logs and metrics are appended to, which object stores cannot do: for a remote run they are written to a local folder
and copied whole when a checkpoint is committed and at the end.
"""

import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rung.launcher.job import Job
from rung.launcher.storage import Store
from rung.strategies.plan import Plan


def cache_folder() -> Path:
    """Where results are kept between launches: `$XDG_CACHE_HOME/rung`, else `~/.cache/rung`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rung"


def keep_whole(path: Path, text: str) -> None:
    """Writes a file of the cache whole or not at all; a cache that cannot be written is done without."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as f:
            f.write(text)
        os.replace(f.name, path)  # noqa: PTH105 - the temporary file is a name
    except OSError as error:
        print(f"rung: {path.name} is not kept: {error}", file=sys.stderr)


def scratch_folder(job: Job) -> Path:
    """Where a plan's offload to disk puts its files: in a local run folder, else among the temporary files."""
    here = Store.open(job.run, job.checkpoint.options).local_path()
    return (here or Path(tempfile.gettempdir()) / f"rung-{job.digest()}") / "offload"


APPENDED = ("events.jsonl", "metrics.jsonl")


class RunFolder:
    """Reads and writes everything of a run but its checkpoints. Use as a context manager."""

    def __init__(self, job: Job) -> None:
        self.store = Store.open(job.run, job.checkpoint.options)
        self.url = self.store.url
        self._scratch = scratch_folder(job)
        self._staging: tempfile.TemporaryDirectory[str] | None = None
        if (here := self.store.local_path()) is not None:
            self.local = here
        else:
            self._staging = tempfile.TemporaryDirectory(prefix="rung-run-")
            self.local = Path(self._staging.name)
        self._copied: dict[Path, tuple[int, int]] = {}

    def open(self) -> None:
        """Makes the folder; for a remote run, fetches the files that will be appended to."""
        self.local.mkdir(parents=True, exist_ok=True)
        if self._staging is not None:
            for name in APPENDED:
                if self.store.exists(name):
                    (self.local / name).write_bytes(self.store.read(name))

    def event(self, kind: str, **facts: Any) -> None:
        """Appends one line to events.jsonl."""
        row = {"time": round(time.time(), 3), "event": kind, **facts}
        # On a full disk the state is what matters; it is saved elsewhere, and what failed is said on the terminal.
        with contextlib.suppress(OSError), (self.local / "events.jsonl").open("a", encoding="utf-8") as f:
            f.write(json.dumps(row, default=str) + "\n")

    def stored_job(self) -> dict[str, Any] | None:
        """The job that this run was started with, if it was."""
        if not self.store.exists("job.json"):
            return None
        stored: dict[str, Any] = json.loads(self.store.read("job.json"))
        return stored

    def store_job(self, job: Job) -> None:
        """Keeps the job for later launches, without secrets."""
        self.store.write_atomic("job.json", json.dumps(job.public_dict(), indent=1, sort_keys=True).encode())

    def store_plan(self, attempt: int, plan: Plan) -> None:
        """Keeps the plan of an attempt."""
        self.store.write_atomic(f"plans/attempt-{attempt:03}.json", plan.to_json().encode())

    def attempts(self) -> int:
        """How many attempts this run has seen, over all launches."""
        return sum(1 for name in self.store.sizes("plans") if name.endswith(".json"))

    def elsewhere(self) -> Path:
        """A new folder for a checkpoint that the run's own store does not take: on another disk where there is one,
        with the most room."""
        own = self.local.stat().st_dev if self.store.local_path() is not None else -1
        candidates = [p for p in (Path.cwd(), Path(tempfile.gettempdir()), Path.home()) if os.access(p, os.W_OK)]
        best = max(candidates, key=lambda p: (p.stat().st_dev != own, shutil.disk_usage(p).free))
        return Path(tempfile.mkdtemp(prefix="rung-saved-", dir=best))

    def clear_scratch(self) -> None:
        """Deletes what was offloaded to disk: a killed worker leaves its files behind."""
        shutil.rmtree(self._scratch, ignore_errors=True)

    def logs(self, attempt: int) -> Path:
        """Where the workers of an attempt write their logs."""
        folder = self.local / "logs" / f"attempt-{attempt:03}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def sync(self) -> None:
        """Copies what has changed since the last time to a remote run folder; nothing to do for a local one."""
        if self._staging is None:
            return
        for file in self.local.rglob("*"):
            if not file.is_file():
                continue
            stat = file.stat()
            if self._copied.get(file) != (stat.st_size, stat.st_mtime_ns):
                self.store.write(file.relative_to(self.local).as_posix(), file.read_bytes())
                self._copied[file] = (stat.st_size, stat.st_mtime_ns)

    def close(self) -> None:
        """A last sync; scratch files and the local copy of a remote run go away."""
        self.clear_scratch()
        self.sync()
        if self._staging is not None:
            self._staging.cleanup()
