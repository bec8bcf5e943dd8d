"""`--measure`: the first few rungs run for a few real steps each, in throw-away processes; the fastest is taken."""

import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rung.launcher.attempt import Attempt, Context
from rung.launcher.checkpoint.lease import Lease
from rung.launcher.fallback import GiveUp
from rung.launcher.folder import RunFolder
from rung.launcher.job import Job
from rung.launcher.keeper import Keeper
from rung.launcher.planner import Ladder
from rung.launcher.signals import Signals
from rung.launcher.watch.metrics import Metrics
from rung.launcher.watch.progress import View
from rung.launcher.workers import Fleet
from rung.strategies.plan import Plan

#: Rungs that are tried, and optimizer steps that each takes; the first ones warm up.
CANDIDATES, STEPS, WARM_UP = 3, 8, 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What a plan took: the median step, the most memory on a device; or why it did not run."""

    plan: Plan
    step_s: float | None
    peak_bytes: int
    failure: str = ""


def measure(job: Job, ladder: Ladder, fleet: Fleet) -> tuple[Ladder, list[Measured]]:
    """The ladder with the measured best first, and what was measured. Nothing of it is kept in the job's run."""
    with Signals().watched() as signals:
        found = [_run(job, plan, fleet, signals) for plan in candidates(ladder) if signals.first is None]
    ran = [m for m in found if m.step_s is not None]
    if not ran:
        return ladder, found
    best = min(ran, key=lambda m: m.step_s or 0.0)
    first = next(r for r in ladder.rungs if _same(r.plan, best.plan))
    why = f"fastest of {len(ran)} that were measured: {best.step_s:.3g} s a step"
    chosen = replace(first, plan=first.plan.with_(reasons={**first.plan.reasons, "strategy": why}))
    rest = tuple(r for r in ladder.rungs if r is not first)
    return replace(ladder, rungs=(chosen, *rest)), found


def candidates(ladder: Ladder) -> Sequence[Plan]:
    """The best rung of each of the first few ways of training, so that unlike ones are compared."""
    ways: dict[tuple[object, ...], Plan] = {}
    for plan in ladder.plans:
        ways.setdefault((plan.strategy, plan.devices, plan.activation_checkpointing, plan.node_ranks), plan)
    return list(ways.values())[:CANDIDATES]


def _run(job: Job, plan: Plan, fleet: Fleet, signals: Signals) -> Measured:
    with tempfile.TemporaryDirectory(prefix="rung-measure-") as scratch:
        short = {
            **job.to_dict(), "run": scratch, "steps": STEPS, "epochs": None, "checkpoint": {"every": "none"},
            "validation": {"every": "none"}, "init_from": None,
        }  # fmt: skip
        trial = Job.from_dict(short, source=job.source)
        folder = RunFolder(trial)
        folder.open()
        quiet = View(every_s=1e9, force_plain=True, silent=True)
        with Lease.acquire(folder.store) as lease, Metrics(folder.local) as metrics:
            context = Context(
                job=trial, folder=folder, keeper=Keeper(folder.store, trial, quiet, lease), metrics=metrics, view=quiet,
                signals=signals, fleet=fleet, decide=lambda _: GiveUp(reason="this plan only"),
            )  # fmt: skip
            outcome = Attempt(context, plan=plan, number=1, resume=None).run()
        rows = [json.loads(line) for line in (folder.local / "metrics.jsonl").read_text().splitlines()]
    seconds = [r["seconds"] for r in rows if r["kind"] == "step" and r["step"] > WARM_UP]
    if outcome.reason != "done" or not seconds:
        return Measured(
            plan=plan, step_s=None, peak_bytes=outcome.peak_bytes, failure=outcome.headline or outcome.reason
        )
    return Measured(plan=plan, step_s=statistics.median(seconds), peak_bytes=outcome.peak_bytes)


def _same(one: Plan, other: Plan) -> bool:
    return replace(one, reasons={}) == replace(other, reasons={})
