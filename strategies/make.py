"""From a plan to the strategy that carries it out. Loads only what that strategy needs."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rung.strategies.base import Strategy
from rung.strategies.collectives import DEADLINE_S
from rung.strategies.plan import Plan

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


def make_strategy(
    plan: Plan, rank: int, store: "Store | None", *, scratch: Callable[[], Path] | None = None,
    deadline_s: float = DEADLINE_S,
) -> Strategy:  # fmt: skip
    """The strategy of `plan` for worker `rank`; `store` is where the workers meet (None where there is only one).
    `scratch` names a local folder for what a plan offloads to disk; it is called only for such a plan. `deadline_s` is
    how long a collective may wait for a peer.

    With several workers this forms their process group, so it blocks until all have called it. Raises WorkersFailed
    if one does not come in time.
    """
    match plan.strategy:
        case "single":
            from rung.strategies.single import SingleStrategy

            return SingleStrategy(plan, rank)
        case "ddp":
            from rung.strategies.ddp import DdpStrategy

            return DdpStrategy(plan, rank, store, deadline_s=deadline_s)
        case "zero1" | "zero2" | "zero3":
            from rung.strategies.zero import ZeroStrategy

            to_disk = "disk" in (plan.offload_optimizer, plan.offload_parameters)
            folder = scratch() if to_disk and scratch is not None else None
            return ZeroStrategy(plan, rank, store, folder=folder, deadline_s=deadline_s)
