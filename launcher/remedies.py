"""What to say when nothing fits: the nearest rung, and what would make it fit. Pure."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rung.launcher.machines import Pool
from rung.strategies.errors import DoesNotFit
from rung.strategies.memory import GIB, Factors, predict
from rung.strategies.plan import Plan
from rung.strategies.profile import Profile, highest

if TYPE_CHECKING:
    from rung.launcher.planner import Rejected

# More devices than this are not worth proposing.
MOST_PROPOSED = 4096


def nothing_fits(profile: Profile | None, factors: Factors, pool: Pool, rejected: "Sequence[Rejected]") -> DoesNotFit:
    """The error for an empty ladder. `rejected` are all candidates."""
    from rung.launcher.planner import gib

    short = [entry for entry in rejected if entry.short_bytes]
    if not short or profile is None:
        reasons = "; ".join(dict.fromkeys(entry.reason for entry in rejected)) or "no device to train on"
        return DoesNotFit(f"no plan is left: {reasons}", hint="loosen what the job pins under strategy and devices")
    nearest = min(short, key=lambda entry: entry.short_bytes)
    message = (
        f"nothing fits. The nearest is {nearest.plan.describe()}: {nearest.reason.split(': ', 1)[-1]}, "
        f"{gib(nearest.short_bytes)} too much"
    )
    return DoesNotFit(message, hint="; or ".join(_remedies(profile, factors, pool, nearest, rejected)))


def _remedies(
    profile: Profile, factors: Factors, pool: Pool, nearest: "Rejected", rejected: "Sequence[Rejected]"
) -> list[str]:
    plan, found = nearest.plan, []
    there = pool.choose(plan.devices).device_bytes(plan.memory_cap_bytes)
    if count := devices_that_fit(profile, plan, there, factors):
        found.append(f"use {count} devices like these with zero3")
    if "host memory" in nearest.reason and nearest.account and nearest.account.device_bytes_with_headroom <= there:
        host = pool.choose(plan.devices).setting.host.free_bytes + nearest.short_bytes
        found.append(f"have {-(-host // GIB)} GiB of host memory free on each machine")
    if plan.memory_cap_bytes is not None and nearest.account:
        needed = nearest.account.device_bytes_with_headroom
        if needed <= pool.choose(plan.devices).free_bytes:
            found.append(f"raise devices.memory to {-(-needed // 2**20)}MiB")
    state = profile.weight_bytes + profile.gradient_bytes + profile.optimizer_bytes
    activity = profile.checkpointed or profile.plain
    one_sample = highest(activity.again, 1)
    least = min(entry.plan.micro_batch for entry in rejected)
    if least > 1:
        found.append("let the micro-batch be smaller (strategy.micro_batch: auto)")
    elif one_sample > 0.3 * state:
        found.append(f"shorten the samples (context, resolution): one alone takes {one_sample / 2**20:.0f} MiB")
    if profile.optimizer_bytes + profile.gradient_bytes > 0.3 * (state + one_sample):
        trained = profile.optimizer_bytes + profile.gradient_bytes
        found.append(
            f"train fewer weights (LoRA, frozen layers): gradients and optimizer take {trained / 2**20:.0f} MiB"
        )
    return found or ["use a smaller model or a device with more memory"]


def devices_that_fit(profile: Profile, plan: Plan, device_bytes: int, factors: Factors) -> int | None:
    """The least power of two of devices with `device_bytes` each on which ZeRO-3 fits at micro-batch 1, with nothing on
    the host, whose memory is not known to grow; None if none does, or if the batch has fewer samples."""
    count = 2
    while count <= min(MOST_PROPOSED, plan.global_batch):
        if count > plan.devices:
            bigger = plan.with_(
                strategy="zero3",
                devices=count,
                micro_batch=1,
                activation_checkpointing=True,
                offload_optimizer="none",
                offload_parameters="none",
                shares=(),
                node_ranks=0,
                reasons={},
            )
            if predict(profile, bigger, factors).device_bytes_with_headroom <= device_bytes:
                return count
        count *= 2
    return None
