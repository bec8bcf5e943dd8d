"""SIGINT and SIGTERM during a run: the first asks for a clean stop, a second SIGINT leaves at once."""

import contextlib
import signal
import time
from collections.abc import Iterator
from types import FrameType


class Signals:
    """`first` is the first signal's number, `since_s` when it came (monotonic), `again` whether SIGINT came after."""

    def __init__(self) -> None:
        self.first: int | None = None
        self.again = False
        self.since_s = 0.0

    @property
    def name(self) -> str:
        """`SIGINT` or `SIGTERM`; empty while none has come."""
        return signal.Signals(self.first).name if self.first is not None else ""

    def _on(self, number: int, _frame: FrameType | None) -> None:
        if self.first is not None and number == signal.SIGINT:
            self.again = True
        elif self.first is None:
            self.first, self.since_s = number, time.monotonic()

    @contextlib.contextmanager
    def watched(self) -> Iterator["Signals"]:
        """Handlers are ours inside, and the old ones again after."""
        old = {number: signal.signal(number, self._on) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)
