"""A question that a throw-away process answers, so that the launcher need not load torch or run the task's code."""

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rung.cluster.failures import Ended
from rung.cluster.local import Message, Workers, WorkerSpec
from rung.strategies.errors import RungError


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """`value`: what the process sent; None if it ended instead, with `error` if it raised one, and `line` to say so."""

    value: object = None
    error: RungError | None = None
    line: str = ""


def ask(entry: str, payload: object, *, deadline_s: float, threads: int = 1) -> Answer | None:
    """The first message of a worker that runs `entry` with `payload`, or how it ended; None after `deadline_s`."""
    until = time.monotonic() + deadline_s
    with tempfile.TemporaryDirectory(prefix="rung-aside-") as folder:
        spec = WorkerSpec(rank=0, payload=payload, log=Path(folder) / "worker.log", threads=threads)
        with Workers.start(entry, [spec]) as workers:
            while time.monotonic() < until:
                for event in workers.poll(0.1):
                    match event:
                        case Message(value=value):
                            return Answer(value=value)
                        case Ended(failure=failure):
                            said = workers.verdict()
                            error = failure.error if failure is not None else None
                            return Answer(error=error, line=said.line if said else "the process ended")
            workers.stop(0.0)
    return None
