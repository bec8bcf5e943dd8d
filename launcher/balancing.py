"""Each rank measures its own compute; all together decide on the shares of a batch, at a step boundary.

What is timed is what waits for no other rank. Alone and under ddp: the forward pass, the backward pass up to where this
rank's own gradients are complete (their average may come later), and the update. Under ZeRO-1 and 2: the forward pass,
since in the backward pass gradients are exchanged on the way. Under ZeRO-3 forward passes wait too (they gather
parameters), so nothing is measured and shares stay equal.

With `devices.balance: auto`, shares follow speed where the devices are of different kinds. Among devices of one kind a
slow one is only named: shares that depend on measured time make a run that cannot be repeated bit for bit, and such
devices are slow for a while at most. `on` has shares follow speed always.
"""

import contextlib
import platform
import socket
import time
import zlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch.autograd import Variable

from rung.cluster import balance
from rung.cluster.host import cpu_kind
from rung.launcher.messages import Note, Noticed
from rung.strategies.findings import Finding, Level

if TYPE_CHECKING:
    from rung.launcher.train import Trainer

#: Steps at the start of an attempt that are not looked at: they compile, allocate and fill caches.
WARM_UP = 3
#: How long a slow rank is not named again, in seconds.
NAMED_S = 300.0


class Balancer:
    """In each step: `timing()` around forward passes and the update, `follow(loss)` before backward passes, `tell()`
    and `hear()` in the step's exchange, and `after_step()` at its end."""

    def __init__(self, trainer: "Trainer") -> None:
        plan = trainer.plan
        self._trainer = trainer
        self._wanted = trainer.job.devices.balance
        can = plan.devices > 1 and plan.zero_stage < 3 and plan.global_batch >= 2 * plan.devices
        self.active = can and self._wanted is not False
        self._adapts = self._wanted is True
        self._whole = plan.zero_stage == 0
        self._balance = balance.equal(plan.global_batch, plan.devices, plan.micro_batch)
        self._skip = WARM_UP
        self._seconds = 0.0
        self._untold = 0.0
        self._heard: list[float] = []
        self._began = 0.0
        self._cuda = plan.device == "cuda"
        self._events: list[tuple[torch.Event, torch.Event]] = []
        self._named: dict[int, float] = {}

    def meet(self) -> None:
        """All ranks call it once the group is there: do their devices differ?"""
        if self.active and self._wanted == "auto":
            trainer = self._trainer
            kinds = [0.0] * trainer.plan.devices
            kinds[trainer.link.rank] = float(
                zlib.crc32(device_kind(trainer.strategy.device, trainer.plan.threads).encode())
            )
            self._adapts = len(set(trainer.strategy.collectives.agree(kinds))) > 1

    @contextlib.contextmanager
    def timing(self, *, update: bool = False) -> Iterator[None]:
        """Inside is compute of this rank alone; an update is that only under ddp."""
        if not self.active or (update and not self._whole):
            yield
            return
        self._start()
        yield
        self._stop()

    def follow(self, loss: torch.Tensor) -> None:
        """Has the backward pass from `loss` counted, up to where this rank's own gradients are complete."""
        if self.active and self._whole and loss.requires_grad:
            loss.register_hook(self._begin_backward)  # type: ignore[no-untyped-call]

    def _begin_backward(self, _gradient: torch.Tensor) -> None:
        # What the engine calls at the end, in order: this comes before DDP's own, in which it waits for the others.
        Variable._execution_engine.queue_callback(self._stop)
        self._start()

    def _start(self) -> None:
        if self._cuda:
            pair = (torch.Event("cuda", enable_timing=True), torch.Event("cuda", enable_timing=True))
            pair[0].record()
            self._events.append(pair)
        else:
            self._began = time.perf_counter()

    def _stop(self) -> None:
        if self._cuda:
            self._events[-1][1].record()
        else:
            self._seconds += time.perf_counter() - self._began

    def tell(self) -> list[float]:
        """What this rank adds to the step's exchange: its seconds of the step before, in its own place."""
        if not self.active:
            return []
        told = [0.0] * self._trainer.plan.devices
        told[self._trainer.link.rank], self._untold = self._untold, 0.0
        return told

    def hear(self, seconds: Sequence[float]) -> None:
        """What all have told."""
        self._heard = list(seconds)

    def after_step(self, *, full: bool) -> None:
        """A step is done, over a `full` global batch or a part of one. All ranks judge alike what they have heard."""
        if not self.active:
            return
        for start, end in self._events:
            end.synchronize()
            self._seconds += start.elapsed_time(end) / 1e3
        self._events.clear()
        seconds, self._seconds = self._seconds, 0.0
        if self._skip > 0 and full:
            self._skip -= 1
        elif full:
            self._untold = seconds
        before, heard, self._heard = self._balance, self._heard, []
        if not heard or min(heard) <= 0.0:
            return
        now = balance.observe(before, heard)
        if now.shares == before.shares:
            self._balance = now
            return
        self._name_slowest(now)
        if self._adapts:
            self._balance = now
            self._adopt()
        else:
            # Looked at afresh: what is slow for good will be found slow again.
            self._balance = balance.equal(sum(before.shares), len(before.shares), before.micro_batch)

    def _adopt(self) -> None:
        """The next step is cut anew; what was fetched ahead is fetched again."""
        trainer = self._trainer
        trainer.plan = trainer.strategy.plan = trainer.plan.with_(shares=self._balance.shares)
        if trainer.loader is not None and not trainer.done:
            trainer.open_loader()
        self._skip, self._untold = 1, 0.0  # the first step with other sizes allocates anew
        if trainer.link.rank == 0:
            trainer.link.send(Note(text=f"balance: {balance.describe(self._balance)}"))

    def _name_slowest(self, seen: balance.Balance) -> None:
        """By the slow rank itself, which knows where it runs."""
        trainer, rank, now = self._trainer, seen.slowest, time.monotonic()
        again = now - self._named.get(rank, -NAMED_S) >= NAMED_S
        if rank != trainer.link.rank or seen.lag < balance.SLOW or not again:
            return
        self._named[rank] = now
        speed, share = seen.speeds[rank], seen.shares[rank]
        finding = Finding(
            level=Level.WARNING,
            subject=f"rank {rank} on {socket.gethostname()}",
            fact=f"computes {speed:.3g} samples/s, {seen.lag:.0%} less than the median of all ranks",
            why="heat, a noisy neighbour or a slower device; "
            + (f"its share is {share} of {sum(seen.shares)} samples now" if self._adapts else "the others wait for it"),
            fix="" if self._adapts else "devices.balance: on, which gives it fewer samples; or mend the machine",
        )
        trainer.link.send(Noticed(finding=finding, step=trainer.progress.step))


def device_kind(device: torch.device, threads: int) -> str:
    """What devices of equal speed have in common: model and memory, of a CPU its model and the threads used."""
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        return f"{found.name} {found.total_memory >> 30}"
    return f"{device.type} {platform.machine()} {cpu_kind()[0]} {threads}"
