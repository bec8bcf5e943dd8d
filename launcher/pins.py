"""What a job fixes of its plan, and whether that can be. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rung.launcher.machines import Pool
from rung.strategies.errors import JobError
from rung.strategies.plan import DeviceType, Offload, Precision, StrategyName
from rung.strategies.profile import Profile


@dataclass(frozen=True, kw_only=True, slots=True)
class Pins:
    """What the job fixes; None is the planner's choice. `devices` is an exact count, the other two a range.
    `balanced`: shares of unequal devices may follow their speeds."""

    strategy: StrategyName | None = None
    devices: int | None = None
    least_devices: int = 1
    most_devices: int | None = None
    micro_batch: int | None = None
    activation_checkpointing: bool | None = None
    offload_optimizer: Offload | None = None
    offload_parameters: Offload | None = None
    precision: Precision | None = None
    memory_cap_bytes: int | None = None
    sync_batchnorm: bool = False
    kind: DeviceType | None = None
    balanced: bool = True
    within_nodes: bool | None = None


def pins_of(job: Any) -> Pins:
    """The choices that a job fixes, from its `strategy`, `precision` and `devices`."""
    wanted = job.strategy
    if isinstance(wanted, str):
        wanted = {"name": wanted}
    elif not isinstance(wanted, Mapping):
        names = ("name", "micro_batch", "checkpointing", "offload_optimizer", "offload_parameters", "devices",
                 "sync_batchnorm", "within_nodes")  # fmt: skip
        wanted = {name: getattr(wanted, name, None) for name in names}
    count = _unless_auto(job.devices.count)
    least, most = count if isinstance(count, tuple | list) else (count, count)
    exact = _unless_auto(wanted.get("devices")) or (count if isinstance(count, int) else None)
    return Pins(
        strategy=_unless_auto(wanted.get("name")),
        devices=exact,
        least_devices=1 if exact or least is None else least,
        most_devices=None if exact else most,
        micro_batch=_unless_auto(wanted.get("micro_batch")),
        activation_checkpointing=_unless_auto(wanted.get("checkpointing")),
        offload_optimizer=_unless_auto(wanted.get("offload_optimizer")),
        offload_parameters=_unless_auto(wanted.get("offload_parameters")),
        precision=_unless_auto(job.precision),
        memory_cap_bytes=_unless_auto(job.devices.memory),
        within_nodes=_unless_auto(wanted.get("within_nodes")),
        sync_batchnorm=bool(wanted.get("sync_batchnorm")),
        kind=_unless_auto(getattr(job.devices, "type", None)),
        balanced=getattr(job.devices, "balance", "auto") is not False,
    )


def _unless_auto(value: Any) -> Any:
    return None if value in (None, "auto") else value


def check_count(pins: Pins, pool: Pool, batch: int) -> None:
    """Raises JobError for a count that is not there, or that the batch cannot be shared by."""
    wanted, most = pins.devices or pins.least_devices, pool.most(pinned=True)
    if wanted > most:
        raise JobError(
            f"devices.count: {wanted} asked for, {most} there ({pool.describe()})",
            hint=f"set devices.count to at most {most}, or to auto",
        )
    if wanted > batch:
        raise JobError(f"devices.count: {wanted} devices cannot share a batch of {batch} samples")
    if pins.strategy == "single" and wanted != 1:
        raise JobError(f"strategy: single runs on one device, devices.count is {wanted}", hint="use ddp")


def check_offload(pins: Pins, pool: Pool) -> None:
    """Raises JobError for an offload that the strategy or the devices cannot do."""
    offload = {pins.offload_optimizer or "none", pins.offload_parameters or "none"} - {"none"}
    if not offload:
        return
    if pins.strategy in ("single", "ddp", "zero1"):
        raise JobError(f"strategy: {pins.strategy} cannot offload", hint="offload needs zero2 or zero3")
    if pins.offload_parameters not in (None, "none") and pins.strategy == "zero2":
        raise JobError("strategy: zero2 keeps whole parameters on the device", hint="parameter offload needs zero3")
    if "host" in offload and pool.kind == "cpu":
        raise JobError(
            "strategy: offload to host gains nothing on a CPU device: its memory is the host's",
            hint="use disk, or leave the offload out",
        )


def choose_precision(pins: Pins, pool: Pool, profile: Profile | None) -> tuple[Precision, str]:
    """The precision and the reason for it."""
    if pins.precision is not None:
        return pins.precision, "set in the job"
    chosen, why = _fastest_precision(pool)
    if profile is not None and profile.precision != chosen:
        return profile.precision, "as profiled"
    return chosen, why


def _fastest_precision(pool: Pool) -> tuple[Precision, str]:
    if pool.kind == "cuda" and pool.bf16:
        return "bf16", "all devices have fast bf16, and it needs no loss scaling"
    if pool.kind == "cuda" and pool.fp16:
        return "fp16", "not all devices have bf16, but all have fp16 tensor cores; the loss is scaled"
    if pool.kind == "cpu":
        return "fp32", "on a CPU fp32 is exact, and lower precision seldom faster"
    return "fp32", "no lower precision is fast on these devices"
