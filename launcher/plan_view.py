"""A ladder as rows of text, for whoever prints or stores it. Pure; tables are made in the command line."""

from dataclasses import asdict
from typing import Any

from rung.launcher.planner import Ladder, Rejected, Rung, gib
from rung.strategies.plan import Plan

HEADER = ("", "strategy", "devices", "micro x steps", "checkpointing", "offload", "device", "host", "step", "fits")


def rows(ladder: Ladder, *, all_rungs: bool = False) -> list[tuple[str, ...]]:
    """One row for each way of training, under `HEADER`: its fastest micro-batch, the chosen one marked with `->`; then
    what was rejected, at its most frugal. `all_rungs` gives every micro-batch."""
    from rung.strategies.memory import accumulation

    seen: set[tuple[object, ...]] = set()
    found: list[tuple[str, ...]] = []
    entries: list[Rung | Rejected] = [*ladder.rungs, *sorted(ladder.rejected, key=lambda entry: entry.short_bytes)]
    for entry in entries:
        plan, key = entry.plan, _way(entry.plan)
        senseless = isinstance(entry, Rejected) and not entry.short_bytes  # whatever its micro-batch
        if key in seen and (senseless or not all_rungs):
            continue
        seen.add(key)
        account = entry.account
        offload = [f"{what} on {where}" for what, where in _offloads(plan) if where != "none"]
        fits = "yes" if isinstance(entry, Rung) else entry.reason
        step = f"{plan.predicted_step_s:.3g} s" if plan.predicted_step_s is not None else ""
        found.append(
            (
                "->" if entry is ladder.rungs[0] else "",
                plan.strategy + (f", {plan.node_ranks} a node" if plan.node_ranks else ""),
                f"{plan.devices} x {plan.device}",
                f"{plan.micro_batch} x {accumulation(plan)}",
                "yes" if plan.activation_checkpointing else "no",
                ", ".join(offload) or "no",
                gib(account.device_peak_bytes) if account else "",
                gib(account.host_peak_bytes) if account else "",
                step,
                fits if account or not isinstance(entry, Rung) else "not known",
            )
        )
    return found


def account_rows(rung: Rung) -> list[tuple[str, str, str, str]]:
    """(item, on the device, on the host, how it was found) of a rung's account."""
    if rung.account is None:
        return []
    return [(i.name, gib(i.device_bytes), gib(i.host_bytes), i.source) for i in rung.account.items]


def as_json(ladder: Ladder) -> dict[str, Any]:
    """All of it as plain values, for `rung plan --json`."""
    return {
        "plans": [
            {
                "plan": asdict(rung.plan),
                "items": [asdict(item) for item in rung.account.items] if rung.account else [],
                "seconds": asdict(rung.time) if rung.time else {},
            }
            for rung in ladder.rungs
        ],
        "rejected": [
            {"plan": asdict(entry.plan), "reason": entry.reason, "short_bytes": entry.short_bytes}
            for entry in ladder.rejected
        ],
        "notes": list(ladder.notes),
    }


def _way(plan: Plan) -> tuple[object, ...]:
    where = plan.offload_optimizer, plan.offload_parameters
    return plan.strategy, plan.node_ranks, plan.devices, plan.activation_checkpointing, *where


def _offloads(plan: Plan) -> tuple[tuple[str, str], ...]:
    return ("optimizer", plan.offload_optimizer), ("parameters", plan.offload_parameters)
