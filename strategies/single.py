"""One device holds everything."""

import contextlib
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch

from rung.strategies import checkpointing
from rung.strategies.base import MakeModel, MakeOptimizer, Purpose, Strategy
from rung.strategies.collectives import Collectives, device_of
from rung.strategies.plan import Plan
from rung.strategies.precision import Amp
from rung.strategies.shards import Interval
from rung.strategies.state import FlatState, trained_parameters

_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()


class SingleStrategy(Strategy):
    """Trains on one device.

    It does what an Accelerator does for one process, without loading Accelerate: with one device and fp32 that would
    do nothing but `model.to(device)`, and importing it costs 0.25 s of the 0.5 s that rung may add to a plain script's
    start. What mixed precision takes lives in `precision.Amp`, and a test holds the two equal bit for bit. A step
    calls torch directly; what rung adds to it is a few tens of microseconds.
    """

    def __init__(self, plan: Plan, rank: int = 0) -> None:
        self.plan = plan
        self.rank = rank
        self.device = device_of(plan, rank)
        self.collectives = Collectives()
        self._amp = Amp(plan.precision, plan.device)

    def build(self, make_model: MakeModel, make_optimizer: MakeOptimizer) -> None:
        module = make_model()
        if self.plan.activation_checkpointing:
            checkpointing.enable(module)
        module.to(self.device)
        self.optimizer = make_optimizer(module)
        self._trained = trained_parameters(module, self.optimizer)
        self._all = list(module.parameters())
        self._fp32 = all(p.dtype == torch.float32 for p in self._trained)
        self._state = FlatState(module, self.optimizer, self._amp.loss_scale)
        self._amp.patch(module)
        self.module = module
        self.model = self._wrap(module)

    def _wrap(self, module: torch.nn.Module) -> torch.nn.Module:
        return module

    def micro(self, *, last: bool, empty: bool = False) -> AbstractContextManager[None]:  # noqa: ARG002  (no peers)
        return self._amp.autocast() if self._amp.enabled else _NOTHING

    def backward(self, loss: torch.Tensor) -> None:
        self._amp.backward(loss)

    def step(self, clip: float | None, *, healthy: bool = True) -> float:
        gradients = [g for p in self._trained if (g := p.grad) is not None]
        norm, factor = self._amp.settle(self._norm(gradients))
        if healthy and math.isfinite(norm):
            if clip is not None and norm > clip:
                factor *= clip / (norm + 1e-6)  # as torch.nn.utils.clip_grad_norm_ has it
            if factor != 1.0:
                torch._foreach_mul_(gradients, factor)
            self.optimizer.step()
        for parameter in self._all:
            parameter.grad = None
        return norm

    def _norm(self, gradients: list[torch.Tensor]) -> float:
        """L2 norm over all gradients. Reading it is the one synchronisation of a step."""
        return float(torch.linalg.vector_norm(self._norms(gradients)).item()) if gradients else 0.0

    def _norms(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """The L2 norm of each gradient, on the CPU; shape (len(gradients),)."""
        if self._fp32:
            norms = torch._foreach_norm(gradients)
        else:
            # Half precision is too coarse to sum squares in, and float64 must not be narrowed.
            wide = (torch.promote_types(g.dtype, torch.float32) for g in gradients)
            norms = tuple(
                torch.linalg.vector_norm(g, dtype=dtype).double() for g, dtype in zip(gradients, wide, strict=True)
            )
        return torch.stack(norms).cpu()

    def intervals(self, purpose: Purpose) -> list[Interval]:
        match purpose:
            case "load":
                return self._state.load()
            case "whole":
                return self._state.save()
            case "save":
                return self._state.save(self.rank, self.plan.devices)

    def restored(self) -> None:
        self._state.restored()

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._state.full():
            yield name, tensor if self.rank == 0 else tensor.new_empty(0)

    def close(self) -> None:
        for name in ("module", "model", "optimizer", "_trained", "_all", "_state"):
            self.__dict__.pop(name, None)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.collectives.close()
