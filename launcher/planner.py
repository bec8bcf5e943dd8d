"""Job, machines and profile in; a ladder of plans out, fastest first, each with reasons, and what was rejected and why.

Pure: reads nothing, starts nothing, imports no torch. `rung plan` prints what this says; `rung launch` runs its first
rung and goes down it when reality disagrees.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from rung.cluster.catalog import Inventory
from rung.launcher.machines import Choice, Pool, inventory_of
from rung.launcher.pins import Pins, check_count, check_offload, choose_precision, pins_of
from rung.launcher.steptime import StepTime, step_time
from rung.launcher.ways import micro_batches, nodes_of, ways
from rung.strategies.errors import DoesNotFit, JobError
from rung.strategies.memory import GIB, MIB, Account, Factors, accumulation, predict
from rung.strategies.plan import Plan, Precision, StrategyName
from rung.strategies.profile import Profile

# Host memory of a worker before it has a model: Python and torch, most of it shared with the forkserver.
WORKER_HOST_BYTES = 200 * MIB
# How much slower ZeRO is taken to be where DDP fits too.
ZERO_HANDICAP = 1.1
# The same for several processes on one CPU, which hold everything as many times.
PROCESSES_HANDICAP = 1.1
_SIMPLEST = {"single": 0, "ddp": 1, "zero1": 2, "zero2": 3, "zero3": 4}


@dataclass(frozen=True, kw_only=True, slots=True)
class Rung:
    """One plan with what was predicted for it; no account or time where there is no profile. `per_node`: its workers
    on one machine."""

    plan: Plan
    account: Account | None = None
    time: StepTime | None = None
    per_node: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejected:
    """A plan that was looked at and not taken. `short_bytes` is what misses on the tightest memory, 0 if senseless."""

    plan: Plan
    reason: str
    short_bytes: int = 0
    account: Account | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Ladder:
    """`rungs` fit, fastest first. `plans` are their plans. `notes` say what the choice rests on. `hopes` are over the
    limit, or fitted no longer when the prediction was corrected, by less than predictions err: for when no rung is
    left."""

    rungs: tuple[Rung, ...]
    rejected: tuple[Rejected, ...] = ()
    hopes: tuple[Rung, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans of all rungs, in order."""
        return tuple(rung.plan for rung in self.rungs)

    @property
    def best(self) -> Plan:
        """The first rung's plan."""
        return self.rungs[0].plan


@dataclass(frozen=True, kw_only=True, slots=True)
class _Query:
    batch: int
    pins: Pins
    pool: Pool
    profile: Profile | None
    factors: Factors
    precision: Precision
    reasons: dict[str, str] = field(default_factory=dict)


def plan_ladder(job: Any, hardware: Any, profile: Profile | None = None, *, factors: Factors | None = None) -> Ladder:
    """All ways to train `job` on `hardware` (a Hardware or an Inventory) that fit, fastest first.

    Without a profile nothing is known of memory: the ladder then goes from the simplest plan to the most frugal, and
    running it finds the rung that fits. Raises JobError when a pinned choice cannot be, DoesNotFit when no plan fits.
    """
    query = _query(job, inventory_of(hardware), profile, factors or Factors())
    rungs: list[Rung] = []
    rejected: list[Rejected] = []
    hopes: list[Rung] = []
    for plan, choice in _candidates(query):
        verdict = _judge(query, plan, choice)
        (rungs if isinstance(verdict, Rung) else rejected).append(verdict)  # type: ignore[arg-type]
        if isinstance(verdict, Rejected) and _narrowly(verdict):
            again = _judge(query, plan, choice, sure=False)
            hopes += [again] if isinstance(again, Rung) else []
    hopes.sort(key=_predicted)
    if not rungs and not hopes:
        raise _nothing_fits(query, rejected)
    if not rungs:
        why = "no plan is sure to fit; this one is the nearest to it"
        best = replace(hopes[0], plan=hopes[0].plan.with_(reasons={**hopes[0].plan.reasons, "strategy": why}))
        return Ladder(rungs=(best, *hopes[1:]), rejected=tuple(rejected), notes=_notes(query))
    ample = {rung.plan.devices for rung in rungs if rung.plan.strategy in ("single", "ddp")}
    rungs.sort(key=lambda rung: _order(query, rung, ample))
    rejected.sort(key=lambda entry: (_SIMPLEST[entry.plan.strategy], entry.short_bytes))
    rungs[0] = replace(rungs[0], plan=_explained(query, rungs))
    return Ladder(rungs=tuple(rungs), rejected=tuple(rejected), hopes=tuple(hopes), notes=_notes(query))


def corrected(ladder: Ladder, plan: Plan, observed_peak_bytes: int) -> Ladder:
    """The ladder after `plan` ran out of memory at `observed_peak_bytes` on a device (at least that much it needed).

    What was not foreseen is put down to activations, since weights and optimizer are known exactly: every prediction
    is raised in proportion to its activations or, where that is less (buckets count as activations, and do not shrink
    with it), to its micro-batch. What then does not stay below the observed peak is rejected, and kept as a hope.
    """
    tried = next((rung for rung in ladder.rungs if rung.plan.rung == plan.rung), None)
    predicted = plan.predicted_device_peak_bytes or 0
    excess = max(0, observed_peak_bytes - predicted) if predicted else 0
    rungs: list[Rung] = []
    rejected: list[Rejected] = []
    hopes = [rung for rung in ladder.hopes if rung.plan.rung != plan.rung]
    for rung in ladder.rungs:
        peak = rung.plan.predicted_device_peak_bytes
        if rung.plan.rung == plan.rung:
            rejected.append(Rejected(plan=rung.plan, reason="ran out of memory", account=rung.account))
            continue
        needs = None if peak is None else peak + int(excess * _part(rung, tried, plan))
        if needs is None or needs < observed_peak_bytes:
            again = rung.plan if needs is None else rung.plan.with_(predicted_device_peak_bytes=needs)
            rungs.append(replace(rung, plan=again))
        else:
            reason = f"needs {gib(needs)} by what was seen; {plan.strategy} failed at {gib(observed_peak_bytes)}"
            rejected.append(Rejected(plan=rung.plan, reason=reason, account=rung.account))
            hopes.append(replace(rung, plan=rung.plan.with_(predicted_device_peak_bytes=needs)))
    hopes.sort(key=_predicted)
    return replace(ladder, rungs=tuple(rungs), rejected=(*ladder.rejected, *rejected), hopes=tuple(hopes))


def _part(rung: Rung, tried: Rung | None, plan: Plan) -> float:
    """How much of what `plan` needed beyond its prediction another rung is taken to need."""
    own = _activation_bytes(tried)
    by_bytes = _activation_bytes(rung) / own if own else 1.0
    return min(by_bytes, rung.plan.micro_batch / plan.micro_batch)


def _predicted(rung: Rung) -> int:
    return rung.plan.predicted_device_peak_bytes or 0


def _activation_bytes(rung: Rung | None) -> int:
    items = rung.account.items if rung is not None and rung.account is not None else ()
    return sum(item.device_bytes for item in items if item.name == "activations")


def with_threads(ladder: Ladder, most: int) -> Ladder:
    """The ladder with at most so many threads for each worker, as OMP_NUM_THREADS says."""
    most = max(1, most)

    def fewer(plan: Plan) -> Plan:
        why = f"{most} for each worker, as OMP_NUM_THREADS says"
        return plan.with_(threads=most, reasons={**plan.reasons, "threads": why}) if plan.threads > most else plan

    return with_each(ladder, fewer)


def with_each(ladder: Ladder, change: Callable[[Plan], Plan]) -> Ladder:
    """The ladder with the plan of each rung and hope changed."""
    rungs, hopes = (tuple(replace(r, plan=change(r.plan)) for r in some) for some in (ladder.rungs, ladder.hopes))
    return replace(ladder, rungs=rungs, hopes=hopes)


def gib(size: float) -> str:
    """Bytes as people read them: `9.1 GiB`, `310 MiB`."""
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / MIB:.0f} MiB"


# --- the question --------------------------------------------------------------------------------------------------


def _query(job: Any, inventory: Inventory, profile: Profile | None, factors: Factors) -> _Query:
    pins = pins_of(job)
    pool = Pool.of(inventory, pins.kind)
    if not pool.runs:
        raise JobError(f"devices.type: no {pins.kind} device is there", hint="set devices.type to auto")
    if pins.strategy is not None and pins.strategy not in get_args(StrategyName):
        raise JobError(f"strategy: {pins.strategy!r} is not one of {', '.join(get_args(StrategyName))}")
    check_count(pins, pool, job.batch)
    check_offload(pins, pool)
    precision, why = choose_precision(pins, pool, profile)
    return _Query(
        batch=job.batch,
        pins=pins,
        pool=pool,
        profile=profile,
        factors=factors,
        precision=precision,
        reasons={"precision": why},
    )


# --- candidates ---------------------------------------------------------------------------------------------------


def _candidates(query: _Query) -> Iterator[tuple[Plan, Choice]]:
    """Every combination that the pins allow, senseless ones included: they are rejected with a reason."""
    pins = query.pins
    counts = [pins.devices] if pins.devices else query.pool.counts(query.batch, pins.least_devices, pins.most_devices)
    for count in counts:
        choice = query.pool.choose(count, balanced=pins.balanced)
        for strategy, optimizer, parameters in ways(count):
            if pins.strategy not in (None, strategy) and not _stands_in(pins, strategy):
                continue
            if pins.offload_optimizer not in (None, optimizer) or pins.offload_parameters not in (None, parameters):
                continue
            for checkpointing in (False, True):
                if pins.activation_checkpointing not in (None, checkpointing):
                    continue
                sizes = micro_batches(query.batch, count, pins.micro_batch)
                for micro, node_ranks in itertools.product(sizes, _nodes(query, choice, count, strategy, parameters)):
                    yield (
                        Plan(
                            strategy=strategy,
                            device=query.pool.kind,
                            devices=count,
                            global_batch=query.batch,
                            micro_batch=micro,
                            precision=query.precision,
                            activation_checkpointing=checkpointing,
                            offload_optimizer=optimizer,
                            offload_parameters=parameters,
                            node_ranks=node_ranks,
                            memory_cap_bytes=pins.memory_cap_bytes,
                            sync_batchnorm=pins.sync_batchnorm,
                            threads=choice.threads,
                        ),
                        choice,
                    )


def _nodes(query: _Query, choice: Choice, count: int, strategy: str, parameters: str) -> list[int]:
    """Whether the weights are held a second time within each node. What that costs is not known without a profile."""
    possible = strategy == "zero3" and parameters == "none" and query.profile is not None
    within = nodes_of(count, choice.setting.per_node, choice.setting.nodes) if possible else 0
    wanted = query.pins.within_nodes
    return [size for size in dict.fromkeys((0, within)) if wanted is None or not within or wanted == bool(size)]


def _stands_in(pins: Pins, strategy: StrategyName) -> bool:
    """Where a job says ddp and may go down to one device, `single` is what ddp is there."""
    return (pins.strategy, strategy) == ("ddp", "single")


def _senseless(query: _Query, plan: Plan) -> str:
    """Why no one should run this plan, whatever its memory; empty if it may be worth it."""
    pinned, profile = query.pins, query.profile
    if plan.activation_checkpointing and pinned.activation_checkpointing is None:
        if profile is None:
            return "whether there are blocks to checkpoint is not known without a profile"
        if profile.checkpointed is None:
            return "the model has no repeated blocks to checkpoint"
    offloads = {plan.offload_optimizer, plan.offload_parameters} - {"none"}
    if plan.device == "cpu" and "host" in offloads:
        return "on a CPU the device is the host: offload to it gains nothing"
    if plan.device == "mps" and plan.zero_stage:
        return "DeepSpeed does not run on MPS"
    if "disk" in offloads and not query.pool.disk_bytes:
        return "no disk to offload to"
    if plan.zero_stage and plan.devices == 1 and not offloads and pinned.strategy is None:
        return "one device has nothing to divide: ZeRO only adds work"
    frozen = query.profile is not None and query.profile.trainable_count == 0
    return "nothing trains: every parameter is frozen" if frozen else ""


def _narrowly(rejected: Rejected) -> bool:
    """Whether it is short by less than the prediction may be wrong."""
    account = rejected.account
    return account is not None and rejected.short_bytes <= 2 * account.error * account.device_peak_bytes


def _judge(query: _Query, plan: Plan, choice: Choice, *, sure: bool = True) -> Rung | Rejected:
    """Whether a plan fits: surely, or else (`sure=False`) if the prediction errs to the good side."""
    if reason := _senseless(query, plan):
        return Rejected(plan=plan, reason=f"{plan.strategy}: {reason}")
    if query.profile is None:
        return Rung(plan=plan.with_(reasons=_reasons(query, plan, None)))
    account = predict(query.profile, plan, query.factors)
    needed = account.device_bytes_with_headroom if sure else int(account.device_peak_bytes * (1 - account.error))
    host = choice.setting.per_node * (account.host_peak_bytes + WORKER_HOST_BYTES)
    disk = _disk_bytes(query.profile, plan) * choice.setting.per_node
    limits = (
        (needed, choice.device_bytes(plan.memory_cap_bytes), ""),
        (host, choice.setting.host.free_bytes, " host memory"),
        (disk, choice.setting.host.disk_bytes, " disk"),
    )
    # What misses most: mending a smaller want alone would not make it fit.
    wanted, there, what = max(limits, key=lambda limit: limit[0] - limit[1])
    if wanted > there:
        reason = f"{plan.strategy}: needs {gib(wanted)} of {gib(there)}{what}"
        return Rejected(plan=plan, reason=reason, short_bytes=wanted - there, account=account)
    time = step_time(query.profile, plan, choice.setting, query.factors)
    plan = plan.with_(
        predicted_device_peak_bytes=account.device_peak_bytes,
        predicted_host_peak_bytes=account.host_peak_bytes,
        predicted_step_s=time.total_s,
        reasons=_reasons(query, plan, account),
    )
    return Rung(plan=plan, account=account, time=time, per_node=choice.setting.per_node)


def _disk_bytes(profile: Profile, plan: Plan) -> int:
    part = profile.trainable_count // plan.devices
    state = (4 * part + profile.optimizer_bytes // plan.devices) if plan.offload_optimizer == "disk" else 0
    weights = 4 * profile.parameter_count // plan.devices if plan.offload_parameters == "disk" else 0
    return state + weights


def _order(query: _Query, rung: Rung, ample: set[int]) -> tuple[float, ...]:
    """Fastest first; within 1% the simpler one. Without a profile: most devices, simplest, largest micro-batch.

    `ample`: device counts at which DDP fits. There ZeRO must promise a good deal more to come first: it moves as much
    as DDP, with more work in Python, and its gain is memory that is there anyway.
    """
    plan = rung.plan
    offloads = sum(("none", "host", "disk").index(w) for w in (plan.offload_optimizer, plan.offload_parameters))
    stands_in = float(_stands_in(query.pins, plan.strategy))
    simple = (_SIMPLEST[plan.strategy], plan.node_ranks, offloads, plan.activation_checkpointing, -plan.micro_batch)
    if rung.time is None:
        frugal = (offloads, plan.zero_stage, plan.activation_checkpointing, -plan.micro_batch)
        devices = plan.devices if query.pool.kind == "cpu" else -plan.devices
        return (stands_in, devices, *map(float, frugal))
    handicap = ZERO_HANDICAP if plan.zero_stage and plan.devices in ample else 1.0
    if plan.device == "cpu" and rung.per_node > 1 and 1 in ample:
        handicap *= PROCESSES_HANDICAP
    return (stands_in, round(_log(rung.time.total_s * handicap)), *map(float, simple))


def _log(seconds: float) -> float:
    """In steps of 1%."""
    return math.log(max(seconds, 1e-9)) / math.log(1.01)


# --- reasons ------------------------------------------------------------------------------------------------------


def _reasons(query: _Query, plan: Plan, account: Account | None) -> dict[str, str]:
    pins = query.pins
    reasons = dict(query.reasons)
    reasons["strategy"] = "set in the job" if pins.strategy else ""
    if _stands_in(pins, plan.strategy):
        reasons["strategy"] = "what ddp is on one device"
    reasons["devices"] = "set in the job" if pins.devices else query.pool.why(plan.devices)
    share, slots = -(-plan.global_batch // plan.devices), accumulation(plan)
    if pins.micro_batch:
        reasons["micro_batch"] = "set in the job"
    elif slots == 1:
        reasons["micro_batch"] = "the whole share of a device at once"
    else:
        reasons["micro_batch"] = f"a device's {share} samples in {slots} parts"
    if plan.devices > 1:
        reasons["threads"] = f"{plan.threads} for each worker: all share a machine's cores"
    if account:
        reasons["memory"] = f"predicted {gib(account.device_peak_bytes)} ±{account.error:.0%} on a device"
    return {name: reason for name, reason in reasons.items() if reason}


def _explained(query: _Query, rungs: list[Rung]) -> Plan:
    """The first plan, with why its strategy came first."""
    plan = rungs[0].plan
    if query.pins.strategy:
        return plan
    others = [rung.plan for rung in rungs if rung.plan.strategy != plan.strategy]
    if query.profile is None:
        why = "the simplest that uses all devices; memory is not known without a profile"
    elif not others or others[0].predicted_step_s is None or plan.predicted_step_s is None:
        why = "the only one that fits"
    else:
        why = (
            f"fastest that fits: {plan.predicted_step_s:.3g} s a step, "
            f"then {others[0].strategy} with {others[0].predicted_step_s:.3g} s"
        )
    return plan.with_(reasons={**plan.reasons, "strategy": why})


def _notes(query: _Query) -> tuple[str, ...]:
    profile = query.profile
    if profile is None:
        return ("No profile: plans are in order of simplicity, memory was not checked.",)
    how = {"traced": "traced on fake tensors", "measured": "measured in a throw-away process", "given": "given"}
    notes = [f"Profile {how[profile.method]}, {profile.precision}, {profile.optimizer}.", profile.note]
    if profile.longest:
        notes.append(f"Sizes are those of {profile.longest}.")
    if query.factors.runs:
        notes.append(f"Corrected by {query.factors.runs} measured runs.")
    return tuple(note for note in notes if note)


def _nothing_fits(query: _Query, rejected: list[Rejected]) -> DoesNotFit:
    from rung.launcher.remedies import nothing_fits

    return nothing_fits(query.profile, query.factors, query.pool, rejected)
