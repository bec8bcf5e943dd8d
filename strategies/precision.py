"""Which number format the matrix products run in, why, and the two things that follow: autocast and loss scaling."""

import math
from collections.abc import Mapping
from typing import Literal

import torch

from rung.strategies.errors import JobError
from rung.strategies.plan import DeviceType, Precision

_DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


def choose(
    requested: Literal["auto", "fp32", "bf16", "fp16"],
    *,
    kind: DeviceType,
    bf16: bool,
    capability: tuple[int, int] | None = None,
) -> tuple[Precision, str]:
    """The precision to train in, and the reason.

    kind: the device type; bf16: whether the device computes in bfloat16 by itself; capability: CUDA's compute
    capability, None elsewhere. Raises JobError for a request that the device cannot serve.
    """
    name = {"cpu": "CPU", "cuda": "GPU", "mps": "Apple GPU"}[kind]
    if capability is not None:
        name += f" of compute capability {capability[0]}.{capability[1]}"
    if requested == "bf16" and not bf16 and kind != "cpu":
        raise JobError(
            f"precision: bf16 was asked for, but this {name} does not compute in bfloat16",
            hint="set precision: fp16 or fp32, or auto",
        )
    if requested != "auto":
        return requested, "set in the job"
    match kind:
        case "cpu":
            return "fp32", "on a CPU fp32 is exact, and bf16 is seldom faster" + (
                " (this one has bf16 instructions: precision: bf16 may be worth a try)" if bf16 else ""
            )
        case "mps":
            return "fp32", "on an Apple GPU mixed precision gains little and loses accuracy"
        case "cuda" if bf16:
            return "bf16", f"this {name} computes in bfloat16, which needs no loss scaling"
        case "cuda" if capability is None or capability >= (7, 0):
            return "fp16", f"this {name} has fp16 tensor cores but no bfloat16; the loss is scaled"
        case _:
            return "fp32", f"this {name} has neither bfloat16 nor fp16 tensor cores"


class LossScale:
    """Keeps fp16 gradients from underflowing: the loss is multiplied by `scale`, the gradients divided by it.

    The rule is that of `torch.amp.GradScaler` (start at 2^16, halve on overflow, double after 2000 clean steps), kept
    in Python numbers: every step reads the gradient norm anyway, so the check costs no extra synchronisation, works on
    every device, and is the same on every rank because the norm is. A power of two scales without rounding.
    """

    FLOOR = 2.0**-10
    GROWTH_INTERVAL_STEPS = 2000

    def __init__(self) -> None:
        self.scale = 2.0**16
        self.clean_steps = 0

    def update(self, *, overflow: bool) -> None:
        """Takes note of one step."""
        if overflow:
            self.scale = max(self.scale / 2, self.FLOOR)
            self.clean_steps = 0
            return
        self.clean_steps += 1
        if self.clean_steps == self.GROWTH_INTERVAL_STEPS:
            self.scale *= 2
            self.clean_steps = 0

    @property
    def exhausted(self) -> bool:
        """True when lowering the scale further cannot help: what is not finite then is not a matter of scale."""
        return self.scale <= self.FLOOR


class Amp:
    """Mixed precision for one device: weights stay as they are, matrix products run in the lower format.

    Equal to what Accelerate does for one device (autocast around the forward pass, outputs back to fp32, gradients
    unscaled before clipping; a test compares the two bit for bit), without loading it: importing Accelerate costs
    0.25 s, a sixth of a plain script's whole start-up, and its per-call wrappers cost more than ours. It also covers
    fp16 on a CPU, which Accelerate refuses.
    """

    def __init__(self, precision: Precision, device: DeviceType) -> None:
        self.device_type = device
        self.dtype = _DTYPES.get(precision)
        self.loss_scale = LossScale() if precision == "fp16" else None

    @property
    def enabled(self) -> bool:
        """False for fp32: then nothing here is on the path of a step."""
        return self.dtype is not None

    def autocast(self) -> torch.autocast:
        """The context for a forward pass."""
        return torch.autocast(self.device_type, dtype=self.dtype, enabled=self.enabled)

    def patch(self, model: torch.nn.Module) -> None:
        """Makes `model`'s own forward run under autocast and return fp32, so that evaluation computes as training
        does. The method is replaced on the instance, not wrapped in a module: names of parameters stay."""
        if not self.enabled:
            return
        forward = model.forward

        def mixed(*args: object, **kwargs: object) -> object:
            if torch.is_autocast_enabled(self.device_type):
                return _to_fp32(forward(*args, **kwargs))
            with self.autocast():
                return _to_fp32(forward(*args, **kwargs))

        model.forward = mixed

    def backward(self, loss: torch.Tensor) -> None:
        """Gradients of the scaled loss, outside autocast: operations of the backward pass run in the formats that the
        forward pass chose."""
        if self.dtype is None:
            loss.backward()  # type: ignore[no-untyped-call]
            return
        if self.loss_scale is not None:
            loss = loss * self.loss_scale.scale
        with torch.autocast(self.device_type, enabled=False):
            loss.backward()  # type: ignore[no-untyped-call]

    def settle(self, scaled_norm: float) -> tuple[float, float]:
        """From the norm of the gradients as they are: the true norm, and what to multiply the gradients with.

        Lowers the loss scale after an overflow; the norm is then inf, or NaN once no lower scale is left to try.
        """
        if self.loss_scale is None:
            return scaled_norm, 1.0
        scale = self.loss_scale.scale
        if math.isfinite(scaled_norm):
            self.loss_scale.update(overflow=False)
            return scaled_norm / scale, 1.0 / scale
        exhausted = self.loss_scale.exhausted
        self.loss_scale.update(overflow=True)
        return (math.nan if exhausted else math.inf), 1.0


def _to_fp32(output: object) -> object:
    """`output` with every half-precision tensor in it as fp32; containers keep their type."""
    match output:
        case torch.Tensor() if output.dtype in (torch.float16, torch.bfloat16):
            return output.float()
        case tuple() if hasattr(output, "_fields"):
            return type(output)(*map(_to_fp32, output))  # type: ignore[arg-type]
        case tuple() | list():
            return type(output)(_to_fp32(item) for item in output)
        case Mapping():
            # transformers' ModelOutput is a Mapping too, built from keyword-like pairs.
            return type(output)({key: _to_fp32(value) for key, value in output.items()})  # type: ignore[call-arg]
        case _:
            return output
