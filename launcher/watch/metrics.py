"""Metrics of a run as JSON lines and as TensorBoard files, written by the launcher, without torch."""

import json
import math
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from rung.launcher.messages import StepRecord, Validated


class Metrics:
    """Appends to `metrics.jsonl` and to `tensorboard/` in a local folder. Use as a context manager.

    A full disk costs lines here, never the run: the state is what matters, and is saved elsewhere then.
    A run that resumes from step k may have written steps after k before; `rewind` says so in the file, so that a
    reader keeps the last line of each step.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._lines = (folder / "metrics.jsonl").open("a", encoding="utf-8")
        self._board_folder = folder / "tensorboard"
        self._board: Any = None

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with suppress(OSError):
            self._lines.close()
        if self._board is not None:
            with suppress(OSError):
                self._board.close()

    def steps(self, records: tuple[StepRecord, ...]) -> None:
        """Adds one line for each optimizer step; TensorBoard gets the last of them, a few points a second."""
        for r in records:
            self._write({"kind": "step", **asdict(r)})
        r = records[-1]
        self._scalars(r.step, {"loss/train": r.loss, "gradient_norm": r.norm, "learning_rate": r.lr,
                               "seconds/step": r.seconds, "seconds/data": r.data_s,
                               "seconds/exchange": r.exchange_s})  # fmt: skip

    def validated(self, result: Validated) -> None:
        """Adds the weighted means of one validation."""
        self._write({"kind": "validation", "step": result.step, "seconds": result.seconds, **result.metrics})
        self._scalars(result.step, {f"{name}/valid": value for name, value in result.metrics.items()})

    def resources(self, step: int, values: dict[str, float]) -> None:
        """Adds what the machine gave since the last such line, and where the time went."""
        self._write({"kind": "resources", "step": step, "time": round(time.time(), 3), **values})
        self._scalars(step, {f"resources/{name}": value for name, value in values.items()})

    def rewind(self, step: int) -> None:
        """Says that the next lines go on from `step`; lines of later steps above are void."""
        self._write({"kind": "resume", "step": step})

    def flush(self) -> None:
        """Brings both files up to date on disk."""
        with suppress(OSError):
            self._lines.flush()
            if self._board is not None:
                self._board.flush()

    def _write(self, row: dict[str, Any]) -> None:
        # JSON has no NaN or Inf: they are written as null-safe strings, which every reader can parse.
        safe = {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        with suppress(OSError):
            self._lines.write(json.dumps(safe) + "\n")

    def _scalars(self, step: int, values: dict[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._board is None:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

            self._board = EventFileWriter(str(self._board_folder))
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=v) for tag, v in values.items()])
        with suppress(OSError):
            self._board.add_event(Event(wall_time=time.time(), step=step, summary=summary))
