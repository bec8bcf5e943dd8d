"""What the user reads about a run: findings, the plan, where it starts, how it ended."""

import sys

from rung.launcher.attempt import Outcome
from rung.launcher.checkpoint.manifest import Manifest
from rung.launcher.fallback import Recovery
from rung.launcher.folder import RunFolder
from rung.launcher.planner import Ladder
from rung.launcher.watch.findings import finding_lines
from rung.launcher.watch.progress import View, duration, size
from rung.strategies.errors import Interrupted, RungError
from rung.strategies.findings import Finding, Level
from rung.strategies.plan import Plan


def show_findings(view: View, findings: list[Finding]) -> None:
    """Prints warnings and errors; what is well is left unsaid."""
    for finding in findings:
        if finding.level is not Level.OK:
            text, style = finding_lines(finding)
            view.say(text, style=style)


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


def show_end(
    outcome: Outcome, recovery: Recovery, folder: RunFolder, view: View, seconds: float, predicted: str
) -> None:
    """The last lines of a good run."""
    if outcome.last_loss is None:
        view.say(
            f"done       step {outcome.step:,} is the last of this job: nothing to do; raise steps or epochs to go on"
        )
        folder.event("done", step=outcome.step, seconds=round(seconds, 1))
        return
    parts = [f"done       step {outcome.step:,}", f"loss {outcome.last_loss:.4f}"]
    parts += [f"valid {name} {value:.4f}" for name, value in outcome.last_metrics.items()]
    parts.append(f"in {duration(seconds)}")
    if outcome.peak_bytes:
        parts.append(f"peak memory {size(outcome.peak_bytes)}")
    view.say("  ".join(parts), style="bold green")
    if predicted:
        view.say(f"           {predicted}")
    view.say(f"           everything is in {folder.url}")
    if recovery.history:
        times = len(recovery.history)
        sets = " ".join(f"--set {text}" for text in pins(outcome.plan, recovery.history[0].plan))
        view.say(f"           it fell back {times} time{'s' * (times != 1)}; to start with what worked: {sets}")
    folder.event(
        "done",
        step=outcome.step,
        seconds=round(seconds, 1),
        peak_bytes=outcome.peak_bytes,
        predicted_bytes=outcome.plan.predicted_device_peak_bytes,
    )


def pins(plan: Plan, first: Plan) -> list[str]:
    """The settings that ask for `plan`, of a run that began with the plan `first`."""
    found = [f"strategy.name={plan.strategy}", f"strategy.micro_batch={plan.micro_batch}"]
    if plan.activation_checkpointing:
        found.append("strategy.checkpointing=true")
    if plan.offload_optimizer != "none":
        found.append(f"strategy.offload_optimizer={plan.offload_optimizer}")
    if plan.offload_parameters != "none":
        found.append(f"strategy.offload_parameters={plan.offload_parameters}")
    if plan.node_ranks:
        found.append("strategy.within_nodes=true")
    if plan.devices != first.devices:
        found.append(f"devices.count={plan.devices}")
    return found


def exit_code(error: RungError) -> int:
    """The process's exit code for an error."""
    return error.code if isinstance(error, Interrupted) else error.exit_code


def show_error(error: RungError) -> None:
    """Prints an error to standard error: the user's traceback if there is one, the message, the way out."""
    text = getattr(error, "traceback_text", "")
    if text:
        sys.stderr.write(text.rstrip() + "\n")
    sys.stderr.write(f"rung: {error}\n")
