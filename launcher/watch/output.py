"""What the user's code prints in the workers, shown as it comes: read back from their logs, so that no worker ever
waits for a terminal, and a worker on another machine is shown the same way."""

import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rung.cluster.failures import LAST_WORDS
from rung.launcher.watch.progress import size

#: How often logs are looked at, in seconds, and the most that is read of one at a time, in bytes.
LOOK_S, MOST_BYTES = 0.2, 1 << 16
#: Lines that all workers together may print at once, and in each second in the long run. What is more is in the log.
BURST, LINES_PER_S = 1000, 100
#: How much may wait to be shown, in bytes; of more only the end is. And the longest line, in characters.
MOST_WAITING, LONGEST = 1 << 18, 2000
#: How often it is said that something was not shown, in seconds.
TELL_S = 5.0
#: After these a log holds what the launcher tells in its own words.
_ENDS = (LAST_WORDS.encode(), b"Fatal Python error: ")
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-_])|[\x00-\x08\x0b-\x1f\x7f]")


@dataclass(slots=True)
class _Log:
    """One worker's. `at`: how far it was read; `rest`: the line that is not at its end yet."""

    path: Path
    at: int
    allowed: float
    rest: bytes = b""
    ragged: bool = False  # what comes next begins in the middle of a line
    passed_over: int = 0
    over: bool = False


class Output:
    """Call `look` often. Lines of several workers come with their rank in front, those of one worker as they are.

    What it costs does not grow with what is printed: of a flood, a share is read and the rest passed over.
    """

    def __init__(self, logs: Sequence[Path], show: Callable[[str], None]) -> None:
        self._show = show
        self._share = 1.0 / max(1, len(logs))
        self._logs = [_Log(path=path, at=_size(path), allowed=BURST * self._share) for path in logs]
        self._looked_s = time.monotonic()
        self._told_s = 0.0
        self._over = False

    def look(self, *, last: bool = False) -> None:
        """Shows what has come since; at the `last` look also what has not come to the end of its line. A look after
        that shows nothing."""
        now = time.monotonic()
        if self._over or (now - self._looked_s < LOOK_S and not last):
            return
        self._over = last
        more, self._looked_s = LINES_PER_S * self._share * (now - self._looked_s), now
        lines = []
        for rank, log in enumerate(self._logs):
            log.allowed = min(BURST * self._share, log.allowed + more)
            prefix = f"[rank {rank}] " if len(self._logs) > 1 else ""
            lines += [prefix + line for line in _read(log, last=last)]
        if last or now - self._told_s >= TELL_S:
            lines += self._untold()
            self._told_s = now
        if lines:
            self._show("\n".join(lines))

    def _untold(self) -> list[str]:
        told = []
        for rank, log in enumerate(self._logs):
            if log.passed_over:
                who = f"[rank {rank}] " if len(self._logs) > 1 else ""
                told.append(f"{who}... {size(log.passed_over)} more than is shown: {log.path}")
                log.passed_over = 0
        return told


def _read(log: _Log, *, last: bool) -> list[str]:
    """The lines of one log that may be shown now."""
    end = _size(log.path)
    if log.over or (end <= log.at and not (last and log.rest)):
        return []
    if log.allowed < 1 or end - log.at > MOST_WAITING:
        skip = max(0, end - log.at - (MOST_BYTES if log.allowed >= 1 else 0))
        log.passed_over += skip + len(log.rest)
        log.at, log.rest, log.ragged = log.at + skip, b"", log.ragged or skip > 0
    data = b"" if log.allowed < 1 else _bytes(log.path, log.at, MOST_WAITING if last else MOST_BYTES)
    log.at += len(data)
    *whole, log.rest = (log.rest + data).split(b"\n")
    if log.ragged and whole:
        log.ragged = False
        log.passed_over += len(whole.pop(0)) + 1
    if last or len(log.rest) > LONGEST:
        whole, log.rest = [*whole, log.rest], b""
    shown: list[str] = []
    for line in whole:
        if line.startswith(_ENDS):
            log.over, log.rest = True, b""
            break
        if log.allowed < 1:
            log.passed_over += len(line) + 1
        elif text := _plain(line):
            shown.append(text)
            log.allowed -= 1
    return shown


def _plain(line: bytes) -> str:
    """As a terminal would show it in the end: a progress bar that was drawn over and over leaves its last state; and
    without the codes that would move the cursor about in ours."""
    text = line.decode(errors="replace").rstrip("\r\n ").rpartition("\r")[2]
    text = _ESCAPES.sub("", text)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # not made yet
        return 0


def _bytes(path: Path, at: int, most: int) -> bytes:
    try:
        with path.open("rb", buffering=0) as file:
            return os.pread(file.fileno(), most, at)
    except OSError:  # a log that is gone is nothing to stop a training for
        return b""
