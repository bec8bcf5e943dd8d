"""What to do when an attempt has failed: pure functions from cause, ladder and history to a decision.

The cause decides. Out of memory changes the plan. A lost or hung worker keeps it, a few times, with a pause that grows;
then it goes on with fewer devices, where the job allows that. Everything else would only fail again, and stops.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rung.cluster.failures import Cause
from rung.launcher.job import Job
from rung.launcher.planner import Ladder, corrected, gib
from rung.strategies.plan import Plan

#: Out of memory this often without getting any further is a broken job, not a tight one.
MOST_RUNGS = 12
#: A worker lost this often without one completed step in between will be lost again; and so will one that is lost this
#: often before the run has got further than ever before.
MOST_RESTARTS, MOST_REPEATS = 3, 10
#: The pause before the n-th restart without progress, in seconds.
PAUSES_S = (1.0, 4.0, 15.0)

_OUT_OF_MEMORY = (Cause.DEVICE_OOM, Cause.HOST_OOM)
_LOST = (Cause.LOST_WORKER, Cause.HUNG)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """One attempt that failed: where it began, how far it got, and why it ended.

    `peak_bytes` is the most memory that a device was seen to hold, 0 if nobody saw. `pressed`: what other programs hold
    of the devices' memory, in words, if that is why the plan did not fit.
    """

    plan: Plan
    cause: Cause
    first_step: int
    step: int
    peak_bytes: int = 0
    pressed: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Retry:
    """Go on with this plan after a pause. `ladder` is what is left of it, corrected by what was seen."""

    plan: Plan
    ladder: Ladder
    reason: str
    pause_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class GiveUp:
    """Stop. `fits_nowhere` tells exit 3 (no rung is left) from exit 5 (workers fail)."""

    reason: str
    fits_nowhere: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """What the job allows. `allow` names what may change: `strategy`, `micro_batch`, `checkpointing`, `offload`,
    `devices`; None allows all. `fewest_devices` is the least that it may run on."""

    enabled: bool = True
    allow: tuple[str, ...] | None = None
    fewest_devices: int = 1


def rules_of(job: Job) -> Rules:
    """The rules that a job gives."""
    count = job.devices.count
    fewest = count[0] if isinstance(count, tuple) else 1 if count == "auto" else count
    return Rules(enabled=job.fallback.enabled, allow=job.fallback.allow, fewest_devices=fewest)


class Recovery:
    """The plan that is being run, what is left of the ladder, and what has been tried."""

    def __init__(self, ladder: Ladder, rules: Rules) -> None:
        self.ladder, self.rules = ladder, rules
        self.plan = ladder.best
        self.history: list[Tried] = []

    def replan(self, ladder: Ladder) -> None:
        """Takes up the ladder for other machines; what was seen of memory still holds, if that leaves any rung."""
        for tried in self.history:
            if tried.cause in _OUT_OF_MEMORY:
                left = corrected(ladder, tried.plan, tried.peak_bytes or tried.plan.predicted_device_peak_bytes or 0)
                ladder = left if left.rungs else ladder
        self.ladder, self.plan = ladder, ladder.best

    def decide(self, tried: Tried) -> Retry | GiveUp:
        """Adds a failure to the history and decides what follows."""
        self.history.append(tried)
        decision = decide(self.history, self.ladder, self.rules)
        if isinstance(decision, Retry):
            self.ladder, self.plan = decision.ladder, decision.plan
        return decision


def decide(history: Sequence[Tried], ladder: Ladder, rules: Rules) -> Retry | GiveUp:
    """What to do after the last entry of `history`, with what is left of the ladder."""
    last = history[-1]
    if last.cause in _OUT_OF_MEMORY:
        return _smaller(history, ladder, rules)
    if last.cause in _LOST:
        return _again(history, ladder, rules)
    if last.cause is Cause.DEPENDENCY and len(history) > 1:
        return _without_what_is_missing(history, ladder, rules)
    return GiveUp(reason=f"{last.cause.value.replace('_', ' ')} would only happen again")


def _smaller(history: Sequence[Tried], ladder: Ladder, rules: Rules) -> Retry | GiveUp:
    last = history[-1]
    where = "host memory" if last.cause is Cause.HOST_OOM else "device memory"
    if not rules.enabled:
        return GiveUp(reason=f"out of {where}, and the job says fallback: off", fits_nowhere=True)
    if _without_progress(history, _OUT_OF_MEMORY) > MOST_RUNGS:
        return GiveUp(reason=f"out of {where} {MOST_RUNGS} times without getting any further", fits_nowhere=True)
    if last.pressed and not any(t.pressed and t.plan.rung == last.plan.rung for t in history[:-1]):
        # Others may be gone in a minute; whoever starts the workers waits for that.
        return Retry(plan=last.plan, ladder=ladder, reason=f"out of {where}, but not by itself: {last.pressed}")
    known = {p.rung: p for p in ladder.plans}
    left = corrected(ladder, last.plan, last.peak_bytes or last.plan.predicted_device_peak_bytes or 0)
    choices = [p for p in left.plans if p.rung in known and _may_ease(last.plan, known[p.rung], last.cause)]
    if not choices:
        left, choices = _hopes(history, ladder, left)
    for plan in choices:
        if allowed(last.plan, plan, rules):
            said = f"out of {where}{_at(last.peak_bytes)}: {difference(last.plan, plan)}"
            return Retry(plan=plan, ladder=left, reason=said)
    return GiveUp(reason=f"out of {where}, and no rung of the ladder is left that takes less", fits_nowhere=True)


def _hopes(history: Sequence[Tried], ladder: Ladder, left: Ladder) -> tuple[Ladder, list[Plan]]:
    """The prediction cannot explain what was seen: what is left of the ladder then, and its plans in the order in which
    they are to be tried.

    After steps that went well it was one sample or a neighbour, and the next smaller rung will do. At the first step
    the one that needs least by what was seen comes first; so does, in the end, what only hope speaks for.
    """
    last = history[-1]
    tried = {t.plan.rung for t in history if t.cause in _OUT_OF_MEMORY}
    untried = [r for r in (*ladder.rungs, *ladder.hopes) if r.plan.rung not in tried]
    smaller = [r.plan for r in ladder.rungs if r in untried and _frugality(r.plan) > _frugality(last.plan)]
    if last.step > last.first_step and smaller:
        return replace(ladder, rungs=tuple(r for r in ladder.rungs if r.plan.rung != last.plan.rung)), smaller
    easier = [r for r in untried if _may_ease(last.plan, r.plan, last.cause)]
    needs = {r.plan.rung: r.plan.predicted_device_peak_bytes or 0 for r in (*left.rungs, *left.hopes)}
    easier.sort(key=lambda r: (needs.get(r.plan.rung, 0), *_thrift(r.plan)))
    return replace(ladder, rungs=tuple(easier), hopes=()), [r.plan for r in easier]


def _without_what_is_missing(history: Sequence[Tried], ladder: Ladder, rules: Rules) -> Retry | GiveUp:
    """A rung that was fallen back to needs something that this machine lacks: the next one that does without it."""
    last, before = history[-1].plan, history[-2].plan
    missing = _places(last) - _places(before)
    rungs = tuple(r for r in ladder.rungs if r.plan.rung != last.rung and not _places(r.plan) & missing)
    for plan in (rung.plan for rung in rungs):
        if _frugality(plan) > _frugality(before) and allowed(before, plan, rules):
            reason = f"what {last.strategy} with offload needs is missing here: {difference(before, plan)}"
            return Retry(plan=plan, ladder=replace(ladder, rungs=rungs), reason=reason)
    return GiveUp(reason="what the next rung needs is missing here, and no other is left")


def _places(plan: Plan) -> set[str]:
    """Where it offloads to: what it needs beyond PyTorch and DeepSpeed depends on that."""
    return {str(where) for where in (plan.offload_optimizer, plan.offload_parameters) if where != "none"}


def _again(history: Sequence[Tried], ladder: Ladder, rules: Rules) -> Retry | GiveUp:
    last = history[-1]
    what = "a worker hung" if last.cause is Cause.HUNG else "a worker was lost"
    count, repeats = _without_a_step(history), _without_progress(history, _LOST)
    if count <= MOST_RESTARTS and repeats <= MOST_REPEATS:
        which = f"{count} of {MOST_RESTARTS}"
        if repeats > max(count, MOST_RESTARTS):
            which = f"{repeats} of {MOST_REPEATS} without getting any further"
        pause = PAUSES_S[min(count, len(PAUSES_S)) - 1]
        return Retry(plan=last.plan, ladder=ladder, reason=f"{what}: same plan, restart {which}", pause_s=pause)
    fewer = [p for p in ladder.plans if rules.fewest_devices <= p.devices < last.plan.devices]
    fewer = [p for p in fewer if rules.enabled and allowed(last.plan, p, rules)]
    if fewer:
        plan = max(fewer, key=lambda p: p.devices)
        return Retry(plan=plan, ladder=ladder, reason=f"{what} {repeats} times: {difference(last.plan, plan)}")
    return GiveUp(reason=f"{what} {repeats} times without getting any further")


def _without_a_step(history: Sequence[Tried]) -> int:
    """How many losses stand at the end of the history since the last completed step."""
    count = 0
    for tried in reversed(history):
        count += tried.cause in _LOST
        if tried.step > tried.first_step:
            break
    return count


def _without_progress(history: Sequence[Tried], causes: tuple[Cause, ...]) -> int:
    """How many failures of such a cause stand at the end of the history since the run last got anywhere: further than
    ever before, or to a later start. Steps that are taken again and lost again are no progress."""
    count = 0
    for index in range(len(history) - 1, -1, -1):
        tried, before = history[index], history[:index]
        if tried.cause in causes:
            count += 1
        furthest = max((t.step for t in before), default=tried.first_step)
        latest = max((t.first_step for t in before), default=tried.first_step)
        if tried.step > furthest or tried.first_step > latest:
            break
    return count


def allowed(old: Plan, new: Plan, rules: Rules) -> bool:
    """Whether the job lets `old` become `new`."""
    if rules.allow is None:
        return True
    return all(change in rules.allow for change in changes(old, new))


def changes(old: Plan, new: Plan) -> list[str]:
    """Names of what differs, in the words that `fallback: {allow: [...]}` uses."""
    found: list[str] = []
    other_way = old.strategy != new.strategy or bool(old.node_ranks) != bool(new.node_ranks)
    if other_way and (old.strategy, new.strategy) != ("ddp", "single"):
        found.append("strategy")
    if old.micro_batch != new.micro_batch and old.devices == new.devices:
        found.append("micro_batch")
    if old.activation_checkpointing != new.activation_checkpointing:
        found.append("checkpointing")
    if (old.offload_optimizer, old.offload_parameters) != (new.offload_optimizer, new.offload_parameters):
        found.append("offload")
    if old.devices != new.devices:
        found.append("devices")
    return found


def eases(old: Plan, new: Plan, cause: Cause) -> bool:
    """Whether `new` takes less of the memory that ran out than `old`: by prediction if both have one, else by kind."""
    if cause is Cause.HOST_OOM and old.device != "cpu":
        before, after = old.predicted_host_peak_bytes, new.predicted_host_peak_bytes
    else:
        before, after = old.predicted_device_peak_bytes, new.predicted_device_peak_bytes
    if before is not None and after is not None and after != before:
        return after < before
    return _frugality(new) > _frugality(old)


def _may_ease(old: Plan, new: Plan, cause: Cause) -> bool:
    """Whether it does by prediction, or at least by kind: what was predicted has just been wrong. Of host memory, what
    is frugal with the device's takes more."""
    by_kind = cause is Cause.DEVICE_OOM or old.device == "cpu"
    return eases(old, new, cause) or (by_kind and _frugality(new) > _frugality(old))


def _frugality(plan: Plan) -> tuple[int, int, bool, bool, int]:
    """More of it takes less memory: what the ladder without a profile is ordered by."""
    offloads = sum(("none", "host", "disk").index(w) for w in (plan.offload_optimizer, plan.offload_parameters))
    return offloads, plan.zero_stage, not plan.node_ranks, plan.activation_checkpointing, -plan.micro_batch


def _thrift(plan: Plan) -> tuple[int, ...]:
    """The most frugal first."""
    return tuple(-int(part) for part in _frugality(plan))


def difference(old: Plan, new: Plan) -> str:
    """What changes, in words."""
    words = []
    if old.strategy != new.strategy or old.devices != new.devices:
        words.append(f"{old.strategy} on {old.devices} -> {new.strategy} on {new.devices}")
    if old.micro_batch != new.micro_batch:
        words.append(f"micro-batch {old.micro_batch} -> {new.micro_batch} (x {new.accumulation} accumulated)")
    if old.activation_checkpointing != new.activation_checkpointing:
        words.append(f"activation checkpointing {'on' if new.activation_checkpointing else 'off'}")
    if bool(old.node_ranks) != bool(new.node_ranks):
        words.append("weights a second time in each node" if new.node_ranks else "weights only once over all nodes")
    for what in ("optimizer", "parameters"):
        before, after = getattr(old, f"offload_{what}"), getattr(new, f"offload_{what}")
        if before != after:
            words.append(f"{what} on {after}" if after != "none" else f"{what} back on the device")
    return ", ".join(words) or "the same plan"


def _at(peak_bytes: int) -> str:
    return f" at {gib(peak_bytes)}" if peak_bytes else ""
