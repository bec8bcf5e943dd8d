"""Every device holds everything, and gradients are averaged: PyTorch's DDP, prepared by Accelerate."""

import contextlib
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
from torch.nn.parallel import DistributedDataParallel

from rung.strategies import batchnorm
from rung.strategies.collectives import DEADLINE_S, Collectives, naming_peers
from rung.strategies.plan import Plan
from rung.strategies.single import SingleStrategy

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Reducer, Store


class DdpStrategy(SingleStrategy):
    """Trains one replica on each device.

    `model` is the task's own module, not the wrapper: only the wrapper's reducer is used, which `backward` tells what
    comes, from the loss. So a task may read the model's attributes, call it several times for one loss, or use a
    weight outside `forward`, as under `single`; a forward pass costs nothing extra; and a micro-batch that is not the
    last is left local by not telling.

    Buffers are each rank's own (BatchNorm without sync: statistics of the samples it saw); rank 0's are saved. What
    `plan.sync_batchnorm` and a SyncBatchNorm that the model brings do is in `batchnorm.py`.
    """

    def __init__(self, plan: Plan, rank: int, store: "Store | None" = None, *, deadline_s: float = DEADLINE_S) -> None:
        super().__init__(plan, rank)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self._deadline_s = deadline_s
        self._last = True
        self._sharing = batchnorm.Peers(rank=rank, world=plan.devices, deadline_s=deadline_s)
        self._reduced: list[torch.nn.Parameter] = []
        self._unused: set[torch.nn.Parameter] = set()
        self._wrapper: DistributedDataParallel | None = None
        self.collectives = Collectives.form(plan, rank, store, deadline_s=deadline_s)

    def _wrap(self, module: torch.nn.Module) -> torch.nn.Module:
        if self.plan.devices > 1:
            batchnorm.adapt(module, self._sharing, together=self.plan.sync_batchnorm)
        if self.plan.devices > 1 and any(p.requires_grad for p in module.parameters()):
            self._reduced = [p for p in module.parameters() if p.requires_grad]
            with self._peers("while the replicas were made equal"), batchnorm.unrecognised(module):
                self._wrapper = _prepare(module, self.plan, self.rank, self.device)
        return module

    def micro(self, *, last: bool, empty: bool = False) -> AbstractContextManager[None]:
        self._last, self._sharing.empty = last, empty
        return super().micro(last=last)

    def backward(self, loss: torch.Tensor) -> None:
        if self._wrapper is None or not self._last:
            super().backward(loss)
            return
        with self._peers("while gradients were averaged"):
            reducer = self._wrapper.reducer
            reducer.prepare_for_forward()
            # Once, after the first step: buckets in the order in which gradients really come.
            reducer._rebuild_buckets()
            reducer.prepare_for_backward([])
            local = [p.grad for p in self._reduced]
            super().backward(loss)
            self._unused.clear()
            if not _finished(reducer):
                self._complete(loss, local)

    def _complete(self, loss: torch.Tensor, local: list[torch.Tensor | None]) -> None:
        """Hands the reducer the parameters that `loss` did not use here; it waits for all of them.

        What they hand over is -0.0, the one number that changes no sum: if others used the parameter, theirs stands,
        and only if nobody did is the average -0.0 again, which `_norm` looks for.
        """
        # A gradient that was handed over has become a view of the reducer's bucket.
        untouched = [p for p, before in zip(self._reduced, local, strict=True) if p.grad is before]
        reached = _leaves(loss) if untouched else set()
        missing = [p for p in untouched if p not in reached]
        self._unused.update(p for p in missing if p.grad is None)
        torch.autograd.backward(missing, [torch.full_like(p, -0.0) for p in missing])

    def _norm(self, gradients: list[torch.Tensor]) -> float:
        if self._wrapper is None or not gradients:
            return super()._norm(gradients)
        norms = self._norms(gradients)
        if not norms.all():
            self._forget_unused([g for g, norm in zip(gradients, norms.tolist(), strict=True) if norm == 0])
        return float(torch.linalg.vector_norm(norms).item())

    def _forget_unused(self, zeros: list[torch.Tensor]) -> None:
        """Of gradients that are zero, takes away those of parameters that no rank used: an optimizer decays and
        counts a parameter whose gradient is zero, but leaves one alone that has none.

        Averages are the same on all ranks, so all find the same candidates and come to the exchange, or none does.
        """
        candidates = {id(g) for g in zeros if torch.signbit(g).all()}
        parameters = [p for p in self._reduced if id(p.grad) in candidates]
        if not parameters:
            return
        used = self.collectives.agree([float(p not in self._unused) for p in parameters], "max")
        for parameter, by_some in zip(parameters, used, strict=True):
            if not by_some:
                parameter.grad = None

    def close(self) -> None:
        self._wrapper = None
        super().close()

    def _peers(self, when: str) -> AbstractContextManager[None]:
        return naming_peers(self.rank, self.plan.devices, when, self._deadline_s)


def _prepare(module: torch.nn.Module, plan: Plan, rank: int, device: torch.device) -> DistributedDataParallel:
    """DDP around `module`, by Accelerate, which joins the process group that is there."""
    from accelerate import Accelerator, DistributedDataParallelKwargs
    from accelerate.state import AcceleratorState

    options = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    # A plan that ran before in this process may have left its own (frozen) state behind.
    AcceleratorState._reset_state(reset_partial_state=True)
    threads = torch.get_num_threads()
    world = plan.devices
    with _environment(
        # One "node": else Accelerate wants an address, which it does not use as the group exists.
        RANK=rank,
        WORLD_SIZE=world,
        LOCAL_RANK=device.index or 0,
        LOCAL_WORLD_SIZE=world,
        OMP_NUM_THREADS=threads,
    ):
        accelerator = Accelerator(mixed_precision="no", cpu=plan.device == "cpu", kwargs_handlers=[options])
        wrapper = accelerator.prepare_model(module)
    assert isinstance(wrapper, DistributedDataParallel)
    return wrapper


def _finished(reducer: "Reducer") -> bool:
    """Whether every bucket has been averaged."""
    try:
        reducer._check_reducer_finalized()
    except RuntimeError:
        return False
    return True


def _leaves(loss: torch.Tensor) -> set[torch.Tensor]:
    """The leaves that the graph of `loss` ends in."""
    found: set[torch.Tensor] = set()
    seen = set()
    todo = [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            found.add(leaf)
        todo.extend(following for following, _ in node.next_functions)
    return found


@contextlib.contextmanager
def _environment(**values: int) -> Iterator[None]:
    """Accelerate is configured through the environment: what it is to see, and nothing that it left or a user set."""
    before = dict(os.environ)
    for name in before:
        if name.startswith("ACCELERATE_") or name in ("MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
    os.environ.update({name: str(value) for name, value in values.items()})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
