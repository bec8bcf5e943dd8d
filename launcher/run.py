"""One run from start to end. Read `launch` from top to bottom."""

import signal
import textwrap
import time
from dataclasses import dataclass

from rung.cluster.failures import Cause
from rung.cluster.hardware import Hardware, probe
from rung.launcher import calibrations, doctor, rollback
from rung.launcher.attempt import Attempt, Context, Outcome
from rung.launcher.checkpoint.lease import Lease
from rung.launcher.fallback import GiveUp, Recovery, Tried, rules_of
from rung.launcher.folder import RunFolder
from rung.launcher.job import Job, changes
from rung.launcher.keeper import Keeper
from rung.launcher.ladder import make_ladder, replan
from rung.launcher.preload import PRELOAD
from rung.launcher.report import show_end, show_findings, show_plan, show_start
from rung.launcher.signals import Signals
from rung.launcher.version import VERSION
from rung.launcher.watch.metrics import Metrics
from rung.launcher.watch.progress import View
from rung.launcher.workers import Fleet, fleet_of
from rung.strategies.errors import (
    CheckpointDamaged,
    DoesNotFit,
    HealthError,
    Interrupted,
    JobError,
    RungError,
    WorkersFailed,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What the command line adds to the job file."""

    dry_run: bool = False
    force: bool = False


def launch(job: Job, options: Options, view: View) -> None:
    """Trains the job to its end, resuming what is there. Returns when done; raises a RungError otherwise."""
    with fleet_of(job, view, PRELOAD) as fleet:
        train(job, options, view, fleet)


def train(job: Job, options: Options, view: View, fleet: Fleet) -> None:
    """The run on the machines of `fleet`."""
    began = time.monotonic()
    machines = fleet.machines()
    here = machines if isinstance(machines, Hardware) else probe(folder=job.folder)
    show_findings(view, doctor.quick(job, here))
    ladder = make_ladder(fleet.planned(job), machines, view)
    show_plan(view, ladder)
    if options.dry_run:
        view.say("dry run: nothing was started")
        return
    folder = RunFolder(job)
    folder.store.probe()
    with Lease.acquire(folder.store) as lease:
        folder.open()
        try:
            fleet.verify(folder.store)
            check_same_job(folder, job, options, view)
            recovery = Recovery(ladder, rules_of(job))
            folder.event("launch", version=VERSION)
            with Metrics(folder.local) as metrics, Signals().watched() as signals:
                context = Context(
                    job=job, folder=folder, keeper=Keeper(folder.store, job, view, lease), metrics=metrics, view=view,
                    signals=signals, fleet=fleet, decide=recovery.decide,
                )  # fmt: skip
                outcome = run_attempts(context, recovery, lease)
            predicted = calibrations.record(job, outcome.plan, outcome.peak_bytes, outcome.step_s)
            show_end(outcome, recovery, folder, view, time.monotonic() - began, predicted)
        finally:
            folder.close()


def run_attempts(context: Context, recovery: Recovery, lease: Lease) -> Outcome:
    """Runs plans until one gets the job done. Returns the good end; raises what a bad one means."""
    keeper, folder, view = context.keeper, context.folder, context.view
    keeper.sweep()
    keeper.passed_over = rollback.passed_over(rollback.read(folder.store))
    while True:
        folder.clear_scratch()
        start = keeper.newest()
        number = folder.attempts() + 1
        folder.store_plan(number, recovery.plan)
        folder.event("attempt", number=number, plan=recovery.plan.describe(), resume=start and start.folder)
        if start is not None:
            show_start(view, start)
            context.metrics.rewind(start.step)
        attempt = Attempt(context, plan=recovery.plan, number=number, resume=start.folder if start else None)
        outcome = attempt.run()
        view.pause()
        folder.event("outcome", reason=outcome.reason, step=outcome.step, cause=outcome.cause,
                     peak_bytes=outcome.peak_bytes, headline=outcome.headline,
                     explanation=said_by(outcome),
                     samples=list(getattr(outcome.error, "samples", ())[:64]))  # fmt: skip
        lease.check()
        if outcome.reason == "done":
            return outcome
        if outcome.reason == "rollback":
            go_back(context, outcome)
            if context.signals.first is None:
                continue
        if outcome.moved and outcome.reason == "stopped" and context.signals.first is None:
            replan(context, recovery)
            continue
        if outcome.reason != "failed" or context.signals.first is not None:
            raise interrupted(outcome, context.signals, keeper)
        if start is not None and isinstance(outcome.error, CheckpointDamaged):
            view.say(f"warning    {outcome.error.message}; going back to the one before it", style="yellow")
            keeper.reject(start.folder)
            continue
        fall_back(context, recovery, outcome)


def go_back(context: Context, outcome: Outcome) -> None:
    """The loss jumped: gives up what has learnt from the batches under suspicion, and puts these aside.

    Raises HealthError if that has been done too often in this run.
    """
    keeper, store, spiked = context.keeper, context.folder.store, outcome.spiked
    assert spiked is not None
    before = rollback.read(store)
    if len(before) >= rollback.MOST_ROLLBACKS:
        raise HealthError(
            f"{spiked.reason}; the run has gone back {len(before)} times already", samples=spiked.samples,
            step=spiked.step, hint="lower optimizer.lr or clip; or look for what these samples have in common",
        )  # fmt: skip
    made = rollback.Rollback(step=spiked.step, batches=spiked.suspects, reason=spiked.reason)
    rollback.write(store, [*before, made])
    keeper.passed_over = rollback.passed_over([*before, made])
    start = keeper.go_back()
    step = start.step if start is not None else 0
    context.metrics.rewind(step)
    said = f"back to step {step:,}; {len(spiked.suspects)} batches are passed over from now on"
    context.view.say(f"rollback   {spiked.reason}\n           {said}", style="yellow")
    context.folder.event("rollback", step=spiked.step, to=step, batches=spiked.suspects, reason=spiked.reason)


def fall_back(context: Context, recovery: Recovery, outcome: Outcome) -> None:
    """Decides what follows from a failure and says so. Raises the failure if nothing does."""
    assert outcome.cause is not None
    tried = Tried(
        plan=outcome.plan, cause=outcome.cause, first_step=outcome.first_step, step=outcome.step,
        peak_bytes=outcome.peak_bytes,
        pressed=context.fleet.pressed(outcome.plan) if outcome.cause is Cause.DEVICE_OOM else "",
    )  # fmt: skip
    decision = outcome.decision or recovery.decide(tried)
    if isinstance(decision, GiveUp):
        raise failure(outcome, decision)
    kept = max(context.keeper.committed_step, 0)
    lost = (
        f"no step is lost (step {kept:,})" if kept >= outcome.step else f"from step {outcome.step:,} back to {kept:,}"
    )
    view = context.view
    view.say(f"failed     {outcome.headline or outcome.cause.value}", style="yellow")
    if outcome.cause is Cause.HUNG:  # it goes on, but whoever wrote what hangs wants to see where
        view.say(textwrap.indent(outcome.explanation, " " * 11), style="yellow")
    view.say(f"fallback   {decision.reason}; {lost}", style="yellow")
    context.folder.event("fallback", step=kept, reason=decision.reason, plan=decision.plan.describe(),
                         explanation=outcome.explanation)  # fmt: skip
    until = time.monotonic() + decision.pause_s
    while time.monotonic() < until and context.signals.first is None:
        time.sleep(0.05)
    recovery.plan = decision.plan
    if outcome.cause in (Cause.LOST_WORKER, Cause.HUNG):
        replan(context, recovery)


def said_by(outcome: Outcome) -> str:
    """What the run's events keep about a failure: its own error where it has one, else the verdict."""
    if outcome.reason != "failed":
        return ""
    text = getattr(outcome.error, "traceback_text", "")
    return (f"{text.rstrip()}\n" if text else "") + str(outcome.error) if outcome.error else outcome.explanation


def failure(outcome: Outcome, decision: GiveUp) -> RungError:
    """The error that a failed attempt ends a run with: the cause's own where it has one."""
    if outcome.error is not None and outcome.cause not in (Cause.LOST_WORKER, Cause.HUNG):
        return outcome.error
    if decision.fits_nowhere:
        return DoesNotFit(
            decision.reason + (f"\n{outcome.explanation}" if outcome.explanation else ""),
            hint="a smaller batch or model, more memory (devices.memory) or more devices would make it fit",
        )
    return WorkersFailed(f"{outcome.explanation or outcome.headline}\n{decision.reason}")


def interrupted(outcome: Outcome, signals: Signals, keeper: Keeper) -> Interrupted:
    """What to say when a signal, to the launcher or to a worker, ended the run."""
    number = signals.first or signal.SIGTERM
    saved = (
        f"checkpoint of step {keeper.committed_step:,} is saved" if keeper.committed_step >= 0 else "nothing is saved"
    )
    how = "stopped" if outcome.reason == "stopped" else "cut short"
    return Interrupted(
        f"{how} by {signals.name or 'SIGTERM to a worker'} after step {outcome.step:,}; {saved}",
        signal_number=number, hint="the same command goes on from there",
    )  # fmt: skip


def check_same_job(folder: RunFolder, job: Job, options: Options, view: View) -> None:
    """Compares the job with the one that the run folder was made for.

    Raises JobError naming the fields that must not change within a run, unless forced.
    """
    stored = folder.stored_job()
    if stored is None:
        folder.store_job(job)
        return
    found = changes(stored, job.public_dict())
    refused = [c for c in found if not c.allowed]
    if refused and not options.force:
        listed = "\n".join(f"  {c.field}: {c.old!r} -> {c.new!r}  ({c.reason})" for c in refused)
        raise JobError(
            f"the run in {folder.url} was started with another job:\n{listed}",
            hint="give the new job another `run` folder, or add --force to continue with the change",
        )
    for c in found:
        view.say(f"changed    {c.field}: {c.old!r} -> {c.new!r}  ({c.reason})", style="yellow")
    if found:
        folder.event("job changed", fields={c.field: [c.old, c.new] for c in found})
        folder.store_job(job)
