"""A worker's numbers on their way to the launcher: collected step by step, sent a few times a second, by rank 0."""

import time

from rung.cluster.link import Link
from rung.launcher.messages import StepRecord, Steps
from rung.strategies.measure import Memory

#: How often a worker tells its numbers, in seconds.
REPORT_S = 0.25


class Reporter:
    """Every rank beats its heart with it; rank 0 also sends records."""

    def __init__(self, link: Link, memory: Memory) -> None:
        self._link, self._memory = link, memory
        self._records: list[StepRecord] = []
        self._sent_s = 0.0
        self._at = (0, "starting")

    def add(self, record: StepRecord) -> None:
        """One completed step. Costs a few microseconds, but when it is time to send."""
        self._records.append(record)
        self._at = (record.step, "training")
        self.beat()
        if time.monotonic() - self._sent_s >= REPORT_S:
            self.flush()

    def enter(self, step: int, phase: str) -> None:
        """Another phase begins (`validating`, `saving`): what is known so far is shown first."""
        self._at = (step, phase)
        self.beat()
        if phase == "saving":
            self._memory.settle()
        self.flush()

    def beat(self) -> None:
        """This rank is getting on, within the step and phase that it is in."""
        self._link.beat(*self._at)

    def flush(self) -> None:
        """Sends what has not been sent."""
        if self._link.rank == 0 and self._records:
            memory = self._memory
            self._link.send(
                Steps(records=tuple(self._records), memory_bytes=memory.peak(), memory_limit_bytes=memory.limit)
            )
        self._records.clear()
        self._sent_s = time.monotonic()
