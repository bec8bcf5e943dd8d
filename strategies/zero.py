"""State partitioned over the devices: DeepSpeed's ZeRO, stages 1 to 3, with offload to host memory and to disk."""

import contextlib
import gc
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rung.strategies import batchnorm, checkpointing, zero_disk, zero_ops, zero_runtime
from rung.strategies.base import MakeModel, MakeOptimizer, Purpose, Strategy
from rung.strategies.collectives import DEADLINE_S, Collectives, device_of, naming_peers
from rung.strategies.errors import JobError
from rung.strategies.plan import Plan
from rung.strategies.precision import Amp
from rung.strategies.shards import Interval
from rung.strategies.state import buffers, trained_parameters
from rung.strategies.zero_config import deepspeed_config
from rung.strategies.zero_init import partitioned, whole_shapes
from rung.strategies.zero_limits import WEIGHT_DTYPES, refusals
from rung.strategies.zero_parts import shape_of
from rung.strategies.zero_paths import Paths
from rung.strategies.zero_state import ZeroState

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


class ZeroStrategy(Strategy):
    """Trains with DeepSpeed ZeRO. `model` is DeepSpeed's engine, which passes attributes of the task's module on.

    Two things are taken over from DeepSpeed, so that a plan changes nothing but speed and memory: the loss scale under
    fp16 (precision.LossScale), and what the optimizer sees (zero_parts.Fragmented). Under bf16 and fp16 the weights
    are held in that format, with fp32 masters in the partitions; the first masters are the rounded initial weights.

    Every rank must use the same trainable parameters in a micro-batch (`paths` tells whether they did), and call `step`
    with the same `healthy`.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        store: "Store | None" = None,
        *,
        folder: Path | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self.plan = plan
        self.rank = rank
        self.device = device_of(plan, rank)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self._amp = Amp(plan.precision, plan.device)
        self._deadline_s = deadline_s
        self._folder = folder
        self._sharing = batchnorm.Peers(rank=rank, world=plan.devices, deadline_s=deadline_s)
        self._undo = contextlib.ExitStack()
        self.collectives = Collectives.form(plan, rank, store, deadline_s=deadline_s)

    def build(self, make_model: MakeModel, make_optimizer: MakeOptimizer) -> None:
        self._undo.enter_context(zero_runtime.started(self.plan, self.rank, self.device))
        zero_ops.build(self.plan, deadline_s=self._deadline_s)
        with self._peers("while the model was partitioned"):
            self._build(make_model, make_optimizer)

    def _build(self, make_model: MakeModel, make_optimizer: MakeOptimizer) -> None:
        module = self._make(make_model)
        self._refuse(refusals(module, self.plan))
        if self.plan.activation_checkpointing:
            checkpointing.enable(module)
        if self.plan.devices > 1:
            batchnorm.adapt(module, self._sharing, together=self.plan.sync_batchnorm)
        with whole_shapes():
            optimizer = make_optimizer(module)
        self._refuse(refusals(module, self.plan, optimizer))
        trained = trained_parameters(module, optimizer)
        zero_runtime.prepare_optimizer(optimizer)
        counts = [math.prod(shape_of(p)) for p in trained]
        config = deepspeed_config(self.plan, elements=sum(counts), largest=max(counts), folder=self._folder)
        for tensor in module.buffers():
            tensor.data = tensor.data.to(self.device)
        self._amp.patch(module)
        self._engine = zero_runtime.initialize(module, optimizer, config)
        self._zero: Any = self._engine.optimizer
        if self.plan.offload_optimizer == "disk":
            zero_disk.mend(self._zero)
        for tensor in buffers(module).values():
            if self.plan.devices > 1:
                dist.broadcast(tensor, 0)
        self.module, self.model = module, self._engine
        self.optimizer = self._zero.optimizer
        if self._amp.loss_scale is not None:
            # DeepSpeed's own scale moves in the middle of a step, between the norm and the division.
            self._zero._update_scale = _nothing
        self._state = ZeroState(
            zero=self._zero,
            inner=self.optimizer,
            module=module,
            rank=self.rank,
            world=self.plan.devices,
            loss_scale=self._amp.loss_scale,
        )
        if self.plan.devices > 1:
            self.paths = Paths(self._state.names, self.plan.strategy)
            self._undo.callback(self.paths.close)

    def _refuse(self, reasons: list[str]) -> None:
        if reasons:
            raise JobError(
                f"{self.plan.strategy} cannot train this: " + "; ".join(reasons),
                hint="use strategy: ddp or single, or change the model or the optimizer",
            )

    def _make(self, make_model: MakeModel) -> torch.nn.Module:
        if self.plan.zero_stage < 3:
            return make_model()
        config = deepspeed_config(self.plan, folder=self._folder)
        built: list[torch.nn.Module] = []
        with partitioned(config, built, dtype=WEIGHT_DTYPES[self.plan.precision]):
            built.append(make_model())
        return built[0]

    @contextlib.contextmanager
    def micro(self, *, last: bool, empty: bool = False) -> Iterator[None]:
        self._sharing.empty = empty
        self._engine.set_gradient_accumulation_boundary(last)
        evaluating = self.plan.zero_stage == 3 and not self.module.training
        with self._amp.autocast(), zero_runtime.frugal(self._zero) if evaluating else contextlib.nullcontext():
            yield

    def backward(self, loss: torch.Tensor) -> None:
        if self._amp.loss_scale is not None:
            self._zero.override_loss_scale(self._amp.loss_scale.scale)
        with self._peers("while averaging gradients"), torch.autocast(self.device.type, enabled=False):
            self._engine.backward(loss, scale_wrt_gas=False)

    def step(self, clip: float | None, *, healthy: bool = True) -> float:
        self._zero.clip_grad = clip or 0.0
        if self.plan.offload_optimizer == "disk":
            zero_disk.fill_missing_gradients(self._zero)
        with self._peers("while updating weights"), contextlib.nullcontext() if healthy else _rejecting(self._zero):
            self._engine.step()
        self._forget_gradients()
        if not healthy:
            return math.nan
        norm = float(self._engine.get_global_grad_norm())
        if self._amp.loss_scale is None:
            return norm
        overflow = not math.isfinite(norm)
        exhausted = overflow and self._amp.loss_scale.exhausted
        self._amp.loss_scale.update(overflow=overflow)
        return math.nan if exhausted else norm

    def _forget_gradients(self) -> None:
        """DeepSpeed leaves old gradients where a parameter that the next step does not use would find them."""
        zero_runtime.forget_gradients(self._zero)
        if self.paths is not None:
            self.paths.forget()
        self._state.fragmented.used.clear()

    def intervals(self, purpose: Purpose) -> list[Interval]:
        """As the base class says; "whole" adds what every rank has in full (buffers, under stages 1 and 2 frozen
        weights) to this rank's part: of what is partitioned, no rank holds more."""
        match purpose:
            case "load":
                return self._state.load()
            case "whole":
                return self._state.save(alone=True)
            case "save":
                return self._state.save()

    def restored(self) -> None:
        self._state.restored()
        with self._peers("while weights were spread"):
            zero_runtime.spread_weights(self._zero)

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for parameter, name in self._state.names.items():
            with self._peers("while gathering weights"):
                whole = zero_runtime.gathered(self._zero, parameter, keep=self.rank == 0)
            yield name, whole
            del whole
        for name, tensor in buffers(self._engine.module).items():
            yield name, tensor.detach().cpu() if self.rank == 0 else tensor.new_empty(0, device="cpu")

    def close(self) -> None:
        engine, state = self.__dict__.pop("_engine", None), self.__dict__.pop("_state", None)
        for name in ("module", "model", "optimizer", "_zero"):
            self.__dict__.pop(name, None)
        if state is not None:
            state.fragmented.close()
        if engine is not None:
            zero_runtime.destroy(engine)
        del engine, state
        with contextlib.suppress(Exception):  # restores globals; a broken group must not hide the first error
            self._undo.close()
        gc.collect()
        if self._folder is not None:
            with contextlib.suppress(OSError):  # what is left lies in the run's scratch folder
                zero_disk.remove_files(self._folder, self.rank)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.collectives.close()

    def _peers(self, when: str) -> AbstractContextManager[None]:
        return naming_peers(self.rank, self.plan.devices, when, self._deadline_s)


def _nothing(*args: object, **kwargs: object) -> None:
    """Stands in for a step of DeepSpeed's that is taken elsewhere."""


@contextlib.contextmanager
def _rejecting(zero: Any) -> Iterator[None]:
    """Makes DeepSpeed take the gradient norm for invalid, and so drop this step on its own path for that."""
    invalid = torch.tensor(-1.0, device=zero_runtime.norm_device(zero))
    name, answer = {
        "DeepSpeedZeroOptimizer": ("scaled_global_norm", invalid),
        "DeepSpeedZeroOptimizer_Stage3": ("_get_norm_groups", [invalid]),
        "BF16_Optimizer": ("get_grads_for_norm", ([invalid * math.nan], {})),
    }[type(zero).__name__]
    setattr(zero, name, lambda: answer)
    try:
        yield
    finally:
        delattr(zero, name)
