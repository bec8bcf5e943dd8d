"""One pass over a data set in parallel processes, each sending back what it saw; a process that dies is survived."""

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import psutil

from rung.launcher.data.examine import Examiner
from rung.launcher.data.order import Indices
from rung.launcher.data.seen import Seen
from rung.launcher.data.workers import Workers
from rung.strategies.errors import WorkersFailed

_FIRST, _MOST = 16, 1024  # samples in a chunk: at first, and at most
_CHUNK_S = 0.5  # how long a chunk is to take, so that progress shows and a limit in time is kept
_DEATHS = 5
_BEAT_S = 0.25


@dataclass(kw_only=True, slots=True)
class Deaths:
    """Samples whose reading ended the process that read them, with how it ended."""

    samples: list[tuple[int, str]] = field(default_factory=list)
    gave_up: bool = False


def processes() -> int:
    """How many processes read: one for each core that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def scan(
    examiner: Examiner,
    indices: Indices,
    *,
    workers: int,
    deaths: Deaths,
    progress: Callable[[int], None] | None = None,
    until: float | None = None,
) -> Iterator[Seen]:
    """What is seen of each chunk of `indices`, in their order. `progress` is told how many samples are done, about
    four times a second; the pass ends early at `until` (of time.monotonic).

    A sample whose reading ends its process is left out and put into `deaths`; at the fifth one the pass gives up.
    """
    done, lost, told_s = 0, set[int](), 0.0
    rate = _Rate()
    while done < len(indices):
        sizes: deque[int] = deque()

        def tasks(start: int = done, sizes: deque[int] = sizes) -> Iterator[tuple[int, list[int]]]:
            while start < len(indices):
                chunk = np.sort(indices[start : start + rate.chunk(len(indices) // (4 * workers))])
                start += len(chunk)
                sizes.append(len(chunk))
                listed: list[int] = chunk.tolist()
                yield 0, [i for i in listed if i not in lost] if lost else listed

        for slot in range(workers):
            examiner.places.at[slot] = -1
        readers = Workers(examiner, tasks, workers, pin=False)
        pids = readers.pids
        try:
            while done < len(indices):
                seen = next(readers)
                assert isinstance(seen, Seen)
                done += sizes.popleft()
                rate.add(seen.seconds, seen.read)
                yield seen
                now = time.monotonic()
                if progress is not None and (now - told_s > _BEAT_S or done == len(indices)):
                    told_s = now
                    progress(done)
                if until is not None and now > until:
                    return
        except WorkersFailed as error:
            if not examiner.careful:  # once more, and this time the sample will be known
                examiner.careful = True
                continue
            culprits = [examiner.places.at[slot] for slot, pid in enumerate(pids) if not psutil.pid_exists(pid)]
            found = [index for index in culprits if index >= 0 and index not in lost]
            deaths.samples += [(index, error.message) for index in found]
            lost.update(found)
            if not found or len(deaths.samples) >= _DEATHS:
                deaths.gave_up = True
                return
        finally:
            readers.close()


class _Rate:
    """How many samples make a chunk of about half a second, by those seen so far."""

    def __init__(self) -> None:
        self._sample_s: float | None = None

    def add(self, seconds: float, samples: int) -> None:
        if samples:
            self._sample_s = max(seconds / samples, 1e-7)

    def chunk(self, most: int) -> int:
        if self._sample_s is None:
            return _FIRST if most > _FIRST else max(1, most)
        return max(1, min(_MOST, most, int(_CHUNK_S / self._sample_s)))
