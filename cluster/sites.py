"""The machines of a group, as `rung.cluster.remote` keeps account of them."""

import socket
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from rung.cluster.agent import Pulse
from rung.cluster.link import Frames
from rung.cluster.local import WorkerSpec
from rung.cluster.memory_trace import KEPT, Sample


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """One machine of a group: what to call it, the address by which the others reach it, and its workers."""

    name: str
    host: str
    specs: tuple[WorkerSpec, ...]


@dataclass(slots=True, eq=False)
class Line:
    """One agent. Only the talking thread touches its socket."""

    number: int
    site: Site
    sock: socket.socket | None = None
    frames: Frames = field(default_factory=Frames)
    outbox: bytearray = field(default_factory=bytearray)
    waiting: list[bytes] = field(default_factory=list)
    heard: float = 0.0
    started: bool = False
    door: int = 0
    met: bool = False
    over: bool = False
    pulse: Pulse | None = None
    samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=KEPT))

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those that run there."""
        return tuple(spec.rank for spec in self.site.specs)


def neighbours(lines: Sequence[Line], line: Line) -> tuple[tuple[str, str, int], ...]:
    """(name, host, port) of those that a machine is to try: the first one, where ranks meet, and the next two of the
    ring. Trying all would take the square of their number."""
    count = len(lines)
    numbers = {0, (line.number + 1) % count, (line.number + 2) % count} - {line.number}
    return tuple((lines[n].site.name, lines[n].site.host, lines[n].door) for n in sorted(numbers))


class Memory:
    """Samples of the machine that has the least memory left."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self._lines = lines

    def samples(self) -> tuple[Sample, ...]:
        """All kept ones of that machine, oldest first."""
        known = [line for line in self._lines if line.samples]
        least = min(known, key=lambda line: _free(line.samples[-1]), default=None)
        return tuple(least.samples) if least is not None else ()


def _free(sample: Sample) -> float:
    return float("inf") if sample.free is None else sample.free
