"""The interface that every way of training implements."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Literal

import torch

from rung.strategies.collectives import Collectives
from rung.strategies.plan import Plan
from rung.strategies.shards import Interval

if TYPE_CHECKING:
    from rung.strategies.zero_paths import Paths

MakeModel = Callable[[], torch.nn.Module]
Purpose = Literal["save", "load", "whole"]
MakeOptimizer = Callable[[torch.nn.Module], torch.optim.Optimizer]


class Strategy(ABC):
    """How one worker holds the model, computes gradients, and owns state. Call order:

    1. `build`: once. The model is made, placed and wrapped, the optimizer made over it.
    2. `intervals("load")`, fill them, `restored()`: when resuming or starting from given weights.
    3. for each micro-batch: `with micro(last=..., empty=...)`: forward, then `backward(loss)` inside it.
    4. `step(clip)`: once per global batch. Then 3 again.
    5. `intervals("save")`: at any step boundary.
    6. `full_parameters()`: at any step boundary, on all ranks together.
    7. `close()`: once, also after a failure.

    Attributes set by `build`: `module` (the task's own, whose names count), `model` (call it for the forward pass; in
    evaluation too; it may wrap `module`), `optimizer` (write
    learning rates into its `param_groups`), `device`; from the constructor `plan`, `rank`, and `collectives` (the CPU
    group of all ranks, for small exchanges).

    The gradient: a caller multiplies each micro-batch's mean loss by `weight * devices / global_weight`. Strategies
    average over ranks, so the sum over micro-batches and the mean over ranks is the gradient of the weighted mean
    over the global batch. No strategy scales by the number of micro-batches.
    """

    plan: Plan
    rank: int
    collectives: Collectives
    device: torch.device
    module: torch.nn.Module
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    paths: "Paths | None" = None
    """Where all ranks have to take the same way through the model: to be heard before `step`."""

    @abstractmethod
    def build(self, make_model: MakeModel, make_optimizer: MakeOptimizer) -> None:
        """Makes the model where and as the strategy needs it (ZeRO-3: already partitioned), wraps it, makes the
        optimizer. Every rank ends with the same weights: those of rank 0."""

    @abstractmethod
    def micro(self, *, last: bool, empty: bool = False) -> AbstractContextManager[None]:
        """Surrounds the forward and backward of one micro-batch: autocast, and gradients stay local unless `last`.
        `empty`: it is a filler of weight zero, whose samples count in no batch statistics."""

    @abstractmethod
    def backward(self, loss: torch.Tensor) -> None:
        """Accumulates gradients of `loss` (a scalar, already weighted)."""

    @abstractmethod
    def step(self, clip: float | None, *, healthy: bool = True) -> float:
        """Clips the global gradient norm to `clip`, updates the weights, clears gradients.

        Returns the global L2 norm before clipping, the same on every rank. If it is not finite, or `healthy` is false
        (the caller saw a non-finite loss), no weight and no optimizer state changes; gradients are cleared.
        Under fp16 a norm that overflowed lowers the loss scale, and inf is returned.
        """

    @abstractmethod
    def intervals(self, purpose: Purpose) -> list[Interval]:
        """What this rank owns of the state ("save": each element of the state is owned by exactly one rank), all that
        it holds ("whole": for when the other ranks are gone), or what it needs of it ("load": the destinations to
        fill). Communicates nothing."""

    @abstractmethod
    def restored(self) -> None:
        """The "load" intervals have been filled: brings everything derived from them up to date."""

    @abstractmethod
    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and whole fp32-or-original tensor of each parameter and buffer, one at a time, on the CPU, on rank 0;
        other ranks iterate in step and see empty tensors. Never holds more than one whole tensor."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of model, optimizer and device memory. Never raises."""
