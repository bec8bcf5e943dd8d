"""One run from start to end. Read `launch` from top to bottom."""

import signal
import sys
import time
from dataclasses import dataclass
from typing import Any

from rung.cluster.failures import Cause
from rung.cluster.hardware import probe
from rung.cluster.local import warm
from rung.launcher import doctor
from rung.launcher.attempt import Attempt, Context, Outcome
from rung.launcher.checkpoint.lease import Lease
from rung.launcher.checkpoint.manifest import Manifest
from rung.launcher.fallback import GiveUp, Recovery, Tried, rules_of
from rung.launcher.folder import RunFolder
from rung.launcher.job import Job, changes
from rung.launcher.keeper import Keeper
from rung.launcher.planner import Ladder, plan_ladder
from rung.launcher.signals import Signals
from rung.launcher.watch.metrics import Metrics
from rung.launcher.watch.progress import View, duration, size
from rung.strategies.errors import CheckpointDamaged, DoesNotFit, Interrupted, JobError, RungError, WorkersFailed
from rung.strategies.findings import Level

#: What the process that workers are forked from imports while the launcher reads the job and looks at the hardware.
PRELOAD = ("torch", "rung.launcher.train")


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What the command line adds to the job file."""

    dry_run: bool = False
    force: bool = False


def prepare() -> None:
    """Starts the process that workers are forked from. Call it as early as can be; it returns at once."""
    warm(PRELOAD, {})


def launch(job: Job, options: Options, view: View) -> None:
    """Trains the job to its end, resuming what is there. Returns when done; raises a RungError otherwise."""
    began = time.monotonic()
    hardware = probe(folder=job.folder)
    show_findings(view, doctor.quick(job, hardware))
    ladder = plan_ladder(job, hardware, None)
    show_plan(view, ladder)
    if options.dry_run:
        view.say("dry run: nothing was started")
        return
    folder = RunFolder(job)
    folder.store.probe()
    with Lease.acquire(folder.store) as lease:
        folder.open()
        try:
            check_same_job(folder, job, options, view)
            recovery = Recovery(ladder, rules_of(job))
            with Metrics(folder.local) as metrics, Signals().watched() as signals:
                context = Context(
                    job=job, folder=folder, keeper=Keeper(folder.store, job, view, lease), metrics=metrics, view=view,
                    signals=signals, decide=recovery.decide,
                )  # fmt: skip
                outcome = run_attempts(context, recovery, lease)
            report(outcome, recovery, folder, view, time.monotonic() - began)
        finally:
            folder.close()


def run_attempts(context: Context, recovery: Recovery, lease: Lease) -> Outcome:
    """Runs plans until one gets the job done. Returns the good end; raises what a bad one means."""
    keeper, folder, view = context.keeper, context.folder, context.view
    keeper.sweep()
    while True:
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
                     peak_bytes=outcome.peak_bytes, headline=outcome.headline)  # fmt: skip
        lease.check()
        if outcome.reason == "done":
            return outcome
        if outcome.reason != "failed" or context.signals.first is not None:
            raise interrupted(outcome, context.signals, keeper)
        if start is not None and isinstance(outcome.error, CheckpointDamaged):
            view.say(f"warning    {outcome.error.message}", style="yellow")
            keeper.reject(start.folder)
            continue
        fall_back(context, recovery, outcome)


def fall_back(context: Context, recovery: Recovery, outcome: Outcome) -> None:
    """Decides what follows from a failure and says so. Raises the failure if nothing does."""
    assert outcome.cause is not None
    tried = Tried(
        plan=outcome.plan, cause=outcome.cause, first_step=outcome.first_step, step=outcome.step,
        peak_bytes=outcome.peak_bytes,
    )  # fmt: skip
    decision = outcome.decision or recovery.decide(tried)
    if isinstance(decision, GiveUp):
        raise failure(outcome, decision)
    kept = max(context.keeper.committed_step, 0)
    lost = (
        f"no step is lost (step {kept:,})" if kept == outcome.step else f"from step {outcome.step:,} back to {kept:,}"
    )
    view = context.view
    view.say(f"failed     {outcome.headline or outcome.cause.value}", style="yellow")
    view.say(f"fallback   {decision.reason}; {lost}", style="yellow")
    context.folder.event("fallback", step=kept, reason=decision.reason, plan=decision.plan.describe(),
                         explanation=outcome.explanation)  # fmt: skip
    until = time.monotonic() + decision.pause_s
    while time.monotonic() < until and context.signals.first is None:
        time.sleep(0.05)
    recovery.plan = decision.plan


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


# -------------------------------------------------------------------- what the user reads


def show_findings(view: View, findings: list[Any]) -> None:
    """Prints warnings and errors; what is well is left unsaid."""
    for f in findings:
        if f.level is not Level.OK:
            style = "red" if f.level is Level.ERROR else "yellow"
            more = f"\n           {f.why}" if f.why else ""
            more += f"\n           → {f.fix}" if f.fix else ""
            view.say(f"{f.level.value:<10} {f.subject}: {f.fact}{more}", style=style)


def show_plan(view: View, ladder: Ladder) -> None:
    """Prints the chosen plan and the reason of each choice."""
    plan = ladder.plans[0]
    view.say(f"plan       {plan.describe()}", style="bold")
    for name, reason in plan.reasons.items():
        view.say(f"           {name}: {reason}", style="dim")


def show_start(view: View, start: Manifest) -> None:
    """Says where training goes on."""
    by = f"{start.strategy} on {start.world_size}"
    view.say(
        f"resume     step {start.step:,}, epoch {start.epoch}, sample {start.position:,} ({start.folder}, by {by})"
    )


def report(outcome: Outcome, recovery: Recovery, folder: RunFolder, view: View, seconds: float) -> None:
    """The last lines of a good run."""
    steps = outcome.step - outcome.first_step
    parts = [f"done       step {outcome.step:,}"]
    if outcome.last_loss is not None and steps:
        parts.append(f"loss {outcome.last_loss:.4f}")
    parts += [f"valid {name} {value:.4f}" for name, value in outcome.last_metrics.items()]
    parts.append(f"in {duration(seconds)}")
    if outcome.peak_bytes:
        parts.append(f"peak memory {size(outcome.peak_bytes)}")
    view.say("  ".join(parts), style="bold green")
    view.say(f"           everything is in {folder.url}")
    if recovery.history:
        plan = outcome.plan
        view.say(
            f"           it fell back {len(recovery.history)} times; to start with what worked: "
            f"--set strategy.name={plan.strategy} --set strategy.micro_batch={plan.micro_batch}"
            + (" --set strategy.checkpointing=true" if plan.activation_checkpointing else "")
        )
    folder.event("done", step=outcome.step, seconds=round(seconds, 1), peak_bytes=outcome.peak_bytes)


def exit_code(error: RungError) -> int:
    """The process's exit code for an error."""
    return error.code if isinstance(error, Interrupted) else error.exit_code


def show_error(error: RungError) -> None:
    """Prints an error to standard error: the user's traceback if there is one, the message, the way out."""
    text = getattr(error, "traceback_text", "")
    if text:
        sys.stderr.write(text.rstrip() + "\n")
    sys.stderr.write(f"rung: {error}\n")
