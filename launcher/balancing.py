"""Each rank measures its own compute; all together decide on the shares of a batch, at a step boundary.

What is timed is the forward pass: it waits for no other rank, unlike the backward pass, in which gradients are
exchanged. Under ZeRO-3 forward passes wait too (they gather parameters), so there nothing is measured and shares stay
equal.
"""

import contextlib
import statistics
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from rung.cluster import balance
from rung.launcher.messages import Note

if TYPE_CHECKING:
    from rung.launcher.train import Trainer

#: Steps at the start of an attempt that are not looked at: they compile, allocate and fill caches.
WARM_UP = 3


class Balancer:
    """Call `timing()` around each forward pass and `after_step()` once a step."""

    def __init__(self, trainer: "Trainer") -> None:
        plan = trainer.plan
        self._trainer = trainer
        wanted = trainer.job.devices.balance
        self.active = wanted and plan.devices > 1 and plan.zero_stage < 3 and plan.global_batch >= 2 * plan.devices
        self._balance = balance.equal(plan.global_batch, plan.devices)
        self._steps = -WARM_UP
        self._seconds = 0.0
        self._stretch: list[float] = []
        self._cuda = plan.device == "cuda"
        self._events: list[tuple[torch.Event, torch.Event]] = []

    @contextlib.contextmanager
    def timing(self) -> Iterator[None]:
        """Inside is compute of this rank alone."""
        if not self.active:
            yield
        elif self._cuda:
            pair = (torch.Event("cuda", enable_timing=True), torch.Event("cuda", enable_timing=True))
            pair[0].record()
            yield
            pair[1].record()
            self._events.append(pair)
        else:
            began = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - began

    def after_step(self) -> None:
        """A step over a full global batch is done. Now and then all ranks exchange their times and judge alike."""
        if not self.active:
            return
        self._steps += 1
        for start, end in self._events:
            end.synchronize()
            self._seconds += start.elapsed_time(end) / 1e3
        self._events.clear()
        seconds, self._seconds = self._seconds, 0.0
        if self._steps <= 0:
            return
        self._stretch.append(seconds)
        if self._steps % balance.STRETCH == 0:
            self._exchange()

    def _exchange(self) -> None:
        trainer = self._trainer
        rank, devices = trainer.link.rank, trainer.plan.devices
        told = [0.0] * (2 * devices)
        told[rank], told[devices + rank] = sum(self._stretch), statistics.median(self._stretch)
        told = trainer.strategy.collectives.agree(told)
        if max(told[:devices]) < balance.STRETCH_S:
            return
        self._stretch.clear()
        before = self._balance
        self._balance = balance.judge(before, told[devices:])
        if self._balance.shares != before.shares:
            self._adopt()

    def _adopt(self) -> None:
        """The next step is cut anew; what was fetched ahead is fetched again."""
        trainer = self._trainer
        trainer.plan = trainer.strategy.plan = trainer.plan.with_(shares=self._balance.shares)
        if trainer.loader is not None and not trainer.done:
            trainer.open_loader()
        self._steps = -1  # the first step with other sizes allocates anew
        if trainer.link.rank == 0:
            trainer.link.send(Note(text=f"balance: {balance.describe(self._balance)}"))
