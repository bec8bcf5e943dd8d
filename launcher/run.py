"""One run from start to end. Read `launch` from top to bottom."""

import signal
import sys
import time
from dataclasses import dataclass
from typing import Any

from rung.cluster.hardware import Hardware, probe
from rung.cluster.local import warm
from rung.launcher import doctor
from rung.launcher.attempt import Attempt, Outcome, Signals
from rung.launcher.checkpoint.lease import Lease
from rung.launcher.folder import RunFolder
from rung.launcher.job import Job, changes
from rung.launcher.keeper import Keeper, Resume
from rung.launcher.planner import Ladder, plan_ladder
from rung.launcher.watch.metrics import Metrics
from rung.launcher.watch.progress import View, duration, size
from rung.strategies.errors import Interrupted, JobError, RungError, WorkersFailed
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
            with Metrics(folder.local) as metrics, Signals().watched() as signals:
                outcome = run_attempts(job, ladder, folder, metrics, view, signals, lease)
            report(job, outcome, folder, view, time.monotonic() - began)
        finally:
            folder.close()


def run_attempts(
    job: Job, ladder: Ladder, folder: RunFolder, metrics: Metrics, view: View, signals: Signals, lease: Lease
) -> Outcome:
    """Runs the ladder's first plan. Returns the outcome of a good end; raises what a bad one means."""
    plan = ladder.plans[0]
    keeper = Keeper(folder.store, job)
    keeper.sweep()
    start = keeper.newest(view)
    number = folder.attempts() + 1
    folder.store_plan(number, plan)
    folder.event("attempt", number=number, plan=plan.describe(), resume=start.name if start else None)
    show_start(view, start)
    if start is not None:
        metrics.rewind(start.step)
    outcome = Attempt(
        job=job, plan=plan, number=number, resume=start.name if start else None, folder=folder, keeper=keeper,
        metrics=metrics, view=view, signals=signals,
    ).run()  # fmt: skip
    view.pause()
    folder.event(
        "outcome", reason=outcome.reason, step=outcome.step, cause=outcome.cause, peak_bytes=outcome.peak_bytes
    )
    lease.check()
    match outcome.reason:
        case "done":
            return outcome
        case "stopped" | "cut short":
            raise interrupted(outcome, signals, keeper)
        case _:
            raise outcome.error or WorkersFailed(outcome.explanation)


def interrupted(outcome: Outcome, signals: Signals, keeper: Keeper) -> Interrupted:
    """What to say when a signal ended the run."""
    number = signals.first or signal.SIGTERM
    name = signal.Signals(number).name
    newest = keeper.newest_name()
    saved = f"checkpoint {newest} is saved" if newest else "no checkpoint was saved"
    how = "stopped" if outcome.reason == "stopped" else "cut short"
    return Interrupted(
        f"{how} by {name} after step {outcome.step:,}; {saved}", signal_number=number,
        hint="the same command goes on from there",
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


def show_start(view: View, start: Resume | None) -> None:
    """Says where training starts from."""
    if start is not None:
        view.say(f"resume     step {start.step:,}, epoch {start.epoch}, sample {start.position:,} (from {start.name})")


def show_hardware(view: View, hardware: Hardware) -> None:
    """Prints what the machine has, one line each."""
    from rung.cluster.hardware import describe

    for text in describe(hardware):
        view.say(text)


def report(job: Job, outcome: Outcome, folder: RunFolder, view: View, seconds: float) -> None:
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
