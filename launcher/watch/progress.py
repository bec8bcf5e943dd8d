"""What a person sees of a run: a live line on a terminal, a plain line every few seconds in a log file."""

import sys
import time
from dataclasses import dataclass, field
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text


@dataclass(kw_only=True, slots=True)
class Status:
    """The numbers of the moment. Bytes and seconds; `samples_per_s` over the last few seconds."""

    step: int = 0
    total_steps: int = 0
    epoch: float = 0.0
    loss: float | None = None
    samples_per_s: float | None = None
    samples_seen: int = 0
    units_seen: float | None = None
    memory_bytes: int | None = None
    memory_limit_bytes: int | None = None
    seconds_left: float | None = None
    phase: str = ""
    devices: int = field(default=1)


def size(count: float) -> str:
    """`8.0 GiB`, `512 MiB`: binary units, since memory comes in them."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit in ("B", "KiB", "MiB") else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def duration(seconds: float) -> str:
    """`8.4 s`, `2:05`, `3:07:12`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, s = divmod(int(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"


def line(status: Status) -> str:
    """One plain line; every part is left out while it is unknown."""
    parts = [f"step {status.step:,}/{status.total_steps:,}", f"epoch {status.epoch:.2f}"]
    if status.loss is not None:
        parts.append(f"loss {status.loss:.4f}")
    if status.samples_per_s:
        parts.append(f"{status.samples_per_s:,.0f} samples/s")
    parts.append(f"{status.samples_seen:,} samples")
    if status.units_seen is not None and status.units_seen != status.samples_seen:
        parts.append(f"{status.units_seen:,.0f} weight seen")
    if status.memory_bytes is not None:
        limit = f" of {size(status.memory_limit_bytes)}" if status.memory_limit_bytes else ""
        parts.append(f"memory {size(status.memory_bytes)}{limit}")
    if status.seconds_left is not None:
        parts.append(f"{duration(status.seconds_left)} left")
    if status.phase:
        parts.append(status.phase)
    return "  ".join(parts)


class View:
    """Prints lines and keeps a progress display. Use as a context manager."""

    def __init__(
        self, *, every_s: float = 5.0, stream: TextIO | None = None, force_plain: bool = False, silent: bool = False
    ) -> None:
        self.console = Console(file=stream or sys.stdout, highlight=False, soft_wrap=True, quiet=silent)
        self.live_wanted = self.console.is_terminal and not force_plain
        self._echoes = not force_plain and not silent
        self.every_s = every_s
        self._live: Live | None = None
        self._last_plain_s = 0.0
        self._last_step = -1

    def __enter__(self) -> "View":
        return self

    def __exit__(self, *_: object) -> None:
        self.pause()

    def say(self, text: str, *, style: str = "") -> None:
        """Prints one or more lines above the progress display. Markup in `text` is not interpreted."""
        self.console.print(Text(text, style=style))

    def echo(self, text: str) -> None:
        """Prints lines of the user's own code; not where rung itself reads what is shown (`force_plain`)."""
        if self._echoes:
            self.say(text)

    def table(self, table: object) -> None:
        """Prints any rich renderable."""
        self.console.print(table)

    def update(self, status: Status) -> None:
        """Shows the newest numbers: at once on a terminal, at most every `every_s` seconds in a log file."""
        if self.live_wanted:
            if self._live is None:
                self._live = Live(console=self.console, refresh_per_second=8, transient=True)
                self._live.start()
            self._live.update(_render(status, self.console.width))
            return
        now = time.monotonic()
        if now - self._last_plain_s >= self.every_s and status.step != self._last_step:
            self._last_plain_s, self._last_step = now, status.step
            self.say(line(status))

    def progress(self, done: int, total: int, text: str) -> None:
        """Shows how much of something other than training is done."""
        if self.live_wanted:
            if self._live is None:
                self._live = Live(console=self.console, refresh_per_second=8, transient=True)
                self._live.start()
            grid = Table.grid(padding=(0, 1))
            bar = ProgressBar(total=max(1, total), completed=done, width=24)
            grid.add_row(bar, Text(f"{text}  {done:,}/{total:,}"))
            self._live.update(grid)
            return
        now = time.monotonic()
        if now - self._last_plain_s >= self.every_s:
            self._last_plain_s = now
            self.say(f"{text}  {done:,}/{total:,}")

    def pause(self) -> None:
        """Takes the live display off the terminal."""
        if self._live is not None:
            self._live.stop()
            self._live = None


def _render(status: Status, width: int) -> Table:
    grid = Table.grid(padding=(0, 1))
    text = Text(line(status), no_wrap=True, overflow="ellipsis")
    if width - len(text) > 10:
        grid.add_row(
            ProgressBar(total=max(1, status.total_steps), completed=status.step, width=min(24, width - len(text) - 2)),
            text,
        )
    else:
        grid.add_row(text)
    return grid
