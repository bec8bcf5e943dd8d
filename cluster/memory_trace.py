"""Host memory of the workers over the last seconds of their lives, so that a kill by the kernel can be explained."""

import contextlib
import os
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rung.cluster.limits import oom_kill_count, read_limits

KEPT = 240
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Memory at one moment, in bytes. `by_rank` counts resident pages of a worker and all below it that are not
    shared with a file or shared memory; `free` is what the machine or the control group, whichever is tighter, can
    still give."""

    at: float
    by_rank: dict[int, int]
    free: int | None
    limit: int | None


class MemoryTrace:
    """A ring of samples. Resident pages come from /proc/<pid>/statm, some ten microseconds a process; the exact share
    of each page (PSS) would have the kernel walk the page tables and hold up the worker."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=KEPT)
        self._kills_before = oom_kill_count()

    def sample(self, pids: Mapping[int, int]) -> None:
        """Takes one sample of the workers with these processes by rank."""
        by_rank = {rank: sum(_private(p) for p in process_tree(pid)) for rank, pid in pids.items()}
        limits = read_limits()
        available, total = _machine()
        free = min((n for n in (limits.memory_free_bytes, available) if n is not None), default=None)
        limit = min((n for n in (limits.memory_bytes, total) if n is not None), default=None)
        self._samples.append(Sample(at=time.time(), by_rank=by_rank, free=free, limit=limit))

    def samples(self) -> tuple[Sample, ...]:
        """All kept samples, oldest first."""
        return tuple(self._samples)

    def oom_kills(self) -> int | None:
        """Processes that the kernel killed for memory since this trace began; None if it keeps no readable count."""
        now = oom_kill_count()
        return None if now is None or self._kills_before is None else now - self._kills_before


def _private(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
        return (int(resident) - int(shared)) * _PAGE
    return 0


def process_tree(pid: int) -> list[int]:
    """The process and all below it, as far as they can be seen."""
    found, queue = [], [pid]
    while queue:
        current = queue.pop()
        found.append(current)
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{current}/task").iterdir():
                with contextlib.suppress(OSError):
                    queue += map(int, (task / "children").read_text().split())
    return found


def _machine() -> tuple[int | None, int | None]:
    """(available, total) memory of the machine."""
    values: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines()[:3]:
            name, number, *_ = line.replace(":", " ").split()
            values[name] = int(number) * 1024
    return values.get("MemAvailable"), values.get("MemTotal")
