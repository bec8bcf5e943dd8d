"""One attempt: a plan is run on a set of workers until they end; what they say is shown, stored and committed."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rung.cluster.failures import Cause, Ended, culprits
from rung.cluster.link import Stop
from rung.cluster.local import Message, WorkerSpec
from rung.launcher.checkpoint.lease import Lease
from rung.launcher.fallback import GiveUp, Retry, Tried
from rung.launcher.folder import RunFolder
from rung.launcher.job import Job
from rung.launcher.keeper import Gathering, Keeper
from rung.launcher.messages import (
    Assignment,
    Finished,
    Leave,
    Note,
    Noticed,
    OutOfMemory,
    Position,
    Ready,
    Replan,
    Saved,
    SaveFailed,
    Spiked,
    Steps,
    Validated,
    WhereAreYou,
    WriteState,
)
from rung.launcher.salvage import salvage
from rung.launcher.signals import Signals
from rung.launcher.storage import Store
from rung.launcher.watch.findings import finding_lines
from rung.launcher.watch.metrics import Metrics
from rung.launcher.watch.monitor import Monitor
from rung.launcher.watch.output import Output
from rung.launcher.watch.progress import Status, View, duration
from rung.launcher.workers import Fleet
from rung.strategies.errors import RungError, RunLocked, StorageError, WorkersFailed
from rung.strategies.findings import Finding
from rung.strategies.plan import Plan

ENTRY = "rung.launcher.train:main"
#: How long one look for messages lasts; signals are answered within it.
POLL_S = 0.2
#: How long workers may take to be forked and to have loaded their libraries.
START_S = 300.0
#: How long survivors of a failure may take to say where they stand, and to write their state.
ANSWER_S, WRITE_S = 15.0, 240.0
#: How long workers that have finished may take to go away, in seconds.
END_S = 10.0


@dataclass(kw_only=True, slots=True)
class Outcome:
    """How an attempt ended: `done`, `stopped`, `rollback` (see `spiked`), `cut short` or `failed`. `plan` is the last
    one it ran; `decision` is what follows, if that was decided already; `moved` says why it was stopped to go on with
    other machines; `step_s` is the median of the last steps in seconds.
    """

    plan: Plan
    reason: str = ""
    step: int = 0
    first_step: int = 0
    peak_bytes: int = 0
    step_s: float = 0.0
    cause: Cause | None = None
    error: RungError | None = None
    explanation: str = ""
    headline: str = ""
    decision: Retry | GiveUp | None = None
    spiked: Spiked | None = None
    moved: str = ""
    last_loss: float | None = None
    last_metrics: dict[str, float] = field(default_factory=dict)


@dataclass(kw_only=True, slots=True)
class Context:
    """What all attempts of a launch share."""

    job: Job
    folder: RunFolder
    keeper: Keeper
    metrics: Metrics
    view: View
    signals: Signals
    fleet: Fleet
    decide: Callable[[Tried], Retry | GiveUp]


class Attempt:
    """Runs one plan. `run` returns an Outcome and leaves no process behind."""

    def __init__(self, context: Context, *, plan: Plan, number: int, resume: str | None) -> None:
        self.job, self.folder, self.keeper = context.job, context.folder, context.keeper
        self.metrics, self.view, self.signals = context.metrics, context.view, context.signals
        self.decide, self.fleet = context.decide, context.fleet
        self.plan, self.number, self.resume = plan, number, resume
        self.status = Status(devices=plan.devices, memory_limit_bytes=plan.memory_cap_bytes)
        self.finished: dict[int, Finished] = {}
        self.ended: dict[int, Ended] = {}
        self.parts = Gathering()
        self.positions: dict[int, Position] = {}
        self.outcome = Outcome(plan=plan)
        self._recent: list[tuple[float, int]] = []
        self._asked_to_stop = False
        self._storage_error: RungError | None = None
        self._hung: dict[int, str] = {}
        self._finished_s = 0.0

    def run(self) -> Outcome:
        """Starts the workers, serves them until all have ended, and says how."""
        assignment = Assignment(
            job=self.job.to_dict(), source=self.job.source, plan=self.plan, attempt=self.number, resume=self.resume,
            passed_over=self.keeper.passed_over,
        )  # fmt: skip
        logs = self.folder.logs(self.number)
        cap = self.plan.memory_cap_bytes if self.plan.device == "cpu" else None
        specs = [
            WorkerSpec(rank=rank, payload=assignment, log=logs / f"rank-{rank}.log", threads=self.plan.threads,
                       memory_cap_bytes=cap)
            for rank in range(self.plan.devices)
        ]  # fmt: skip
        self.output = Output([spec.log for spec in specs], self.view.echo)
        try:
            group = self.fleet.start(ENTRY, specs, device=self.plan.device, deadline_s=START_S)
        except WorkersFailed as error:
            if not self.fleet.elastic:
                raise
            return self._not_started(error)
        self.folder.event("workers", placed=self.fleet.placed, threads=group.specs[0].threads)
        with (
            group as workers,
            Monitor(workers, self.plan, self.metrics, self.folder.local, self._on_finding) as monitor,
        ):
            self.workers, self.monitor = workers, monitor
            while len(self.ended) < self.plan.devices:
                self._serve_all(POLL_S)
                self.output.look()
                self.monitor.tick()
                if self._storage_error is not None:
                    self._save_elsewhere(self._storage_error)
                    break
                if self._failed():
                    self.output.look(last=True)  # what libraries say when their peers go helps nobody
                    self._rescue()
                    break
                if self._out_of_patience() or self._lingers():
                    break
                self._move_if_changed()
            self._close()
        return self.outcome

    def _not_started(self, error: WorkersFailed) -> Outcome:
        """A machine can go between the look at it and the start: that is a worker lost before its first step."""
        outcome = self.outcome
        outcome.reason, outcome.cause = "failed", Cause.LOST_WORKER
        outcome.headline, outcome.explanation = error.message, str(error)
        outcome.first_step = outcome.step = max(self.keeper.committed_step, 0)
        return outcome

    # ---------------------------------------------------------------- events

    def _serve_all(self, timeout_s: float) -> None:
        for event in self.workers.poll(timeout_s):
            self._serve(event)

    def _serve(self, event: Message | Ended) -> None:
        if isinstance(event, Ended):
            self.ended[event.rank] = event
            return
        match event.value:
            case Steps() as steps:
                self._on_steps(steps)
            case Ready() as ready if event.rank == 0:
                self._on_ready(ready)
            case Validated() as result:
                self._on_validated(result)
            case Saved() as saved:
                self._on_saved(saved)
            case SaveFailed(error=error):
                self._storage_error = error
            case Note() | Noticed() | Spiked() as said:
                self._on_said(said)
            case OutOfMemory() as short:
                self._on_out_of_memory(event.rank, short)
            case Position() as position:
                before = self.positions.get(event.rank)
                if before is None or not before.failing:  # a worker that fails has said all there is to say
                    self.positions[event.rank] = position
            case Finished() as finished:
                self.finished[event.rank] = finished

    def _on_ready(self, ready: Ready) -> None:
        self.outcome.first_step = self.outcome.step = ready.step
        self.monitor.ready(ready)
        self.status.step, self.status.total_steps = ready.step, ready.total_steps
        frozen = ready.parameters - ready.trainable
        self.view.say(
            f"training   {ready.parameters:,} parameters{f' ({frozen:,} frozen)' if frozen else ''}, "
            f"{ready.samples:,} samples, {ready.steps_per_epoch:,} steps an epoch, {ready.total_steps:,} steps in all"
        )
        self.folder.event("ready", step=ready.step, total_steps=ready.total_steps, parameters=ready.parameters)

    def _on_steps(self, steps: Steps) -> None:
        last = steps.records[-1]
        now = time.monotonic()
        self.metrics.steps(steps.records)
        self.monitor.steps(steps.records)
        self._recent = [(t, n) for t, n in [*self._recent, (now, last.samples_seen)] if now - t <= 10.0]
        (_, n0), span = self._recent[0], now - self._recent[0][0]
        s = self.status
        s.samples_per_s = (last.samples_seen - n0) / span if span > 0 else self.job.batch / max(last.seconds, 1e-9)
        s.step, s.epoch, s.loss, s.samples_seen = last.step, last.epoch, last.loss, last.samples_seen
        s.memory_bytes, s.memory_limit_bytes = steps.memory_bytes, steps.memory_limit_bytes or s.memory_limit_bytes
        left = (s.total_steps - s.step) * self.job.batch
        s.seconds_left = left / s.samples_per_s if s.samples_per_s else None
        self.outcome.step, self.outcome.last_loss = last.step, last.loss
        self.outcome.step_s = statistics.median(r.seconds for r in steps.records)
        self.view.update(s)

    def _on_validated(self, result: Validated) -> None:
        self.metrics.validated(result)
        self.monitor.validated(result.seconds)
        self.outcome.last_metrics = result.metrics
        shown = "  ".join(f"{name} {value:.4f}" for name, value in result.metrics.items())
        self.view.say(f"validation step {result.step:,}: {shown}  ({duration(result.seconds)})")

    def _on_saved(self, saved: Saved) -> None:
        part = saved.part
        self.monitor.saved(saved)
        if (parts := self.parts.add(part)) is None:
            return
        try:
            name = self.keeper.commit(parts, self.plan, self.outcome.last_metrics)
        except RungError as error:
            self._storage_error = error
            return
        self.folder.event("checkpoint", step=part.step, name=name, blocked_s=round(saved.blocked_s, 4))
        self.metrics.flush()
        self.folder.sync()

    def _on_said(self, said: Note | Noticed | Spiked) -> None:
        match said:
            case Note(text=text, warning=warning):
                self.folder.event("note", text=text)
                self.view.say(f"{'warning' if warning else 'note':<10} {text}", style="yellow" if warning else "")
            case Noticed(finding=finding, step=step, samples=samples):
                self._on_finding(finding, step, samples)
            case Spiked():
                self.outcome.spiked = said

    def _on_finding(self, finding: Finding, step: int, samples: tuple[int, ...] = ()) -> None:
        """Shows and keeps what was noticed while it trains."""
        text, style = finding_lines(finding)
        named = ", ".join(map(str, samples[:8])) + (f" and {len(samples) - 8} more" if len(samples) > 8 else "")
        self.view.say(text + (f"\n           samples of that step: {named}" if samples else ""), style=style)
        self.folder.event("finding", step=step, subject=finding.subject, level=finding.level.value, fact=finding.fact,
                          why=finding.why, fix=finding.fix, samples=list(samples))  # fmt: skip

    def _on_out_of_memory(self, rank: int, said: OutOfMemory) -> None:
        """A single device asks for a smaller plan; one that it can take on without a new process is sent at once."""
        peak = max(said.peak_bytes, self.plan.memory_cap_bytes or 0)
        tried = Tried(
            plan=self.plan, cause=Cause.DEVICE_OOM, first_step=self.outcome.first_step, step=said.step, peak_bytes=peak
        )
        decision = self.decide(tried)
        if isinstance(decision, GiveUp) or not in_process(self.plan, decision.plan):
            self.workers.send(rank, Leave())
            return
        self.view.say(f"fallback   step {said.step + 1:,}: {decision.reason}; no step is lost", style="yellow")
        self.folder.event(
            "fallback", step=said.step, reason=decision.reason, what=said.what, plan=decision.plan.describe()
        )
        self.plan = self.outcome.plan = decision.plan
        self.outcome.first_step = said.step
        self.workers.send(rank, Replan(plan=decision.plan))

    # ---------------------------------------------------------------- failures and ends

    def _failed(self) -> bool:
        """A worker went away without having finished, or says that it is about to, or hangs."""
        gone = any(rank not in self.finished for rank in self.ended)
        return gone or any(p.failing for p in self.positions.values()) or self._hangs()

    def _hangs(self) -> bool:
        silent_s = self.job.hang_s
        late = {r: b for r, b in self.workers.heartbeats().items() if b[2] > silent_s and r not in self.finished}
        if late:
            # Ranks that wait in a collective for a hanging one stand still too; their stacks tell them apart.
            stacks = {rank: self.workers.stacks(rank) for rank in late}
            self._hung = {rank: stacks[rank] for rank in culprits({r: b[0] for r, b in late.items()}, stacks)}
            for rank, text in stacks.items():
                (self.folder.logs(self.number) / f"rank-{rank}.stacks").write_text(text)
        return bool(late)

    def _lingers(self) -> bool:
        """All is done, but a worker does not go away: a thread of the task's may never end."""
        if len(self.finished) < self.plan.devices:
            self._finished_s = time.monotonic()
        return time.monotonic() - self._finished_s > END_S

    def _save_elsewhere(self, failure: RungError) -> None:
        """The run's store fails for good: the state goes to a folder on another disk, and the error names it."""
        if isinstance(failure, RunLocked):
            return  # the store is well; another launcher goes on from what is there
        folder = self.folder.elsewhere()
        self.view.say(f"storage    {failure.message}; saving to {folder} instead", style="red")
        self._storage_error = None
        store = Store.open(str(folder))
        with Lease.acquire(store) as lease:
            self.keeper = Keeper(store, self.job, self.view, lease)
            self._rescue(elsewhere=str(folder))
        saved = self.keeper.committed_step
        self._storage_error = failure if saved < 0 else StorageError(
            f"{failure.message}; the state of step {saved:,} is saved in {folder}",
            url=getattr(failure, "url", ""), hint=f"mend the store and launch again, or go on with --set run={folder}",
        )  # fmt: skip

    def _rescue(self, elsewhere: str | None = None) -> None:
        """Gets the state of the last completed step out of those that still have it, then lets them go."""
        self.workers.send(None, WhereAreYou())
        self._until(ANSWER_S, lambda: set(self.workers.alive) <= set(self.positions))
        alive = {rank: p for rank, p in self.positions.items() if rank in self.workers.alive}
        found = salvage(self.plan, alive, self.keeper.committed_step)
        if found is not None:
            for rank in found.writers:
                self.workers.send(rank, WriteState(whole=found.whole, elsewhere=elsewhere))
            self._until(WRITE_S, lambda: self.keeper.committed_step >= found.step or self._storage_error is not None
                        or not set(found.writers) <= set(self.workers.alive))  # fmt: skip
        self.workers.send(None, Leave())
        failing = {rank for rank, p in self.positions.items() if p.failing}
        self._until(5.0, lambda: not failing & set(self.workers.alive))

    def _until(self, seconds: float, reached: Callable[[], bool]) -> None:
        until = time.monotonic() + seconds
        while not reached() and time.monotonic() < until and not self.signals.again:
            self._serve_all(0.05)

    def _out_of_patience(self) -> bool:
        """Passes a signal on as a wish to stop; true when grace is over or the user insists."""
        signals = self.signals
        if signals.first is None:
            return False
        if not self._asked_to_stop:
            self._asked_to_stop = True
            grace = f"at most {self.job.grace_s:g} s; once more: leave now"
            self.view.say(f"{signals.name}: finishing the step and saving ({grace})")
            self.workers.send(None, Stop(reason=signals.name))
        return signals.again or time.monotonic() - signals.since_s > self.job.grace_s

    def _move_if_changed(self) -> None:
        """Machines have come or are about to go: the workers save and leave, and the next attempt is planned anew."""
        if self.outcome.moved or not self.status.total_steps or self.signals.first is not None:
            return
        self.outcome.moved = self.fleet.changed()
        if self.outcome.moved:
            self.view.say(f"cluster    {self.outcome.moved}: saving, then going on with what is there", style="yellow")
            self.folder.event("cluster changed", step=self.outcome.step, reason=self.outcome.moved)
            self.workers.send(None, Stop(reason=self.outcome.moved))

    def _close(self) -> None:
        """Ends what still runs, and fills in the outcome from the first failure in time."""
        left = len(self.ended) < self.plan.devices
        self.monitor.conclude()
        self.workers.stop(grace_s=0.0 if self.signals.again or self.positions else 3.0)
        self._serve_all(0.0)
        self.output.look(last=True)
        outcome = self.outcome
        outcome.peak_bytes = max([outcome.peak_bytes, *(f.peak_bytes for f in self.finished.values())])
        if self._storage_error is not None:
            outcome.reason, outcome.error, outcome.cause = "failed", self._storage_error, Cause.STORAGE
        elif len(self.finished) == self.plan.devices:
            outcome.reason, outcome.step = self.finished[0].reason, self.finished[0].step
        elif self.signals.first is not None and left and not self.positions:
            outcome.reason = "cut short"
        else:
            self._explain()

    def _explain(self) -> None:
        """Fills in cause, error and explanation from the failure that came first."""
        outcome = self.outcome
        outcome.reason = "failed"
        outcome.step = max([outcome.step, *(p.step for p in self.positions.values())])
        said = self.workers.verdict(device=self.plan.device, hung=self._hung)
        if said is None:
            outcome.headline = outcome.explanation = "the workers ended before they had finished"
            outcome.cause = Cause.LOST_WORKER
            return
        outcome.cause, outcome.explanation, outcome.headline = said.cause, said.text, said.line
        outcome.peak_bytes = max(outcome.peak_bytes, self.plan.memory_cap_bytes or 0)
        if said.first.failure is not None:
            outcome.error = said.first.failure.error


def in_process(old: Plan, new: Plan) -> bool:
    """Whether a running single-device worker can go from one plan to the other."""
    keys = ("strategy", "devices", "precision", "offload_optimizer", "offload_parameters")
    same = all(getattr(old, key) == getattr(new, key) for key in keys)
    return old.strategy == "single" and same and new.activation_checkpointing >= old.activation_checkpointing
