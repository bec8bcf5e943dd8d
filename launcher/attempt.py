"""One attempt: a plan is run on a set of workers until they end; what they say is shown, stored and committed."""

import contextlib
import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType

from rung.cluster.failures import Cause, Ended
from rung.cluster.link import Stop
from rung.cluster.local import Message, Workers, WorkerSpec
from rung.launcher.checkpoint.manifest import Part
from rung.launcher.checkpoint.retention import Keeper
from rung.launcher.folder import RunFolder
from rung.launcher.job import Job
from rung.launcher.messages import Assignment, Finished, Note, Ready, Saved, Steps, Validated
from rung.launcher.watch.metrics import Metrics
from rung.launcher.watch.progress import Status, View, duration
from rung.strategies.errors import RungError
from rung.strategies.plan import Plan

ENTRY = "rung.launcher.train:main"
#: How long one look for messages lasts; signals are answered within it.
POLL_S = 0.2
#: How long workers may take to be forked and to have loaded their libraries.
START_S = 300.0


@dataclass(kw_only=True, slots=True)
class Outcome:
    """How an attempt ended. `cause` and `error` are None if the workers ended well."""

    reason: str
    step: int
    first_step: int = 0
    peak_bytes: int = 0
    cause: Cause | None = None
    error: RungError | None = None
    explanation: str = ""
    last_loss: float | None = None
    last_metrics: dict[str, float] = field(default_factory=dict)


class Signals:
    """SIGINT and SIGTERM during a run: the first asks for a clean stop, a second SIGINT leaves at once."""

    def __init__(self) -> None:
        self.first: int | None = None
        self.again = False
        self.since_s = 0.0

    def _on(self, number: int, _frame: FrameType | None) -> None:
        if self.first is not None and number == signal.SIGINT:
            self.again = True
        elif self.first is None:
            self.first, self.since_s = number, time.monotonic()

    @contextlib.contextmanager
    def watched(self) -> Iterator["Signals"]:
        """Handlers are ours inside, and the old ones again after."""
        old = {number: signal.signal(number, self._on) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)


class Attempt:
    """Runs one plan. `run` returns an Outcome and leaves no process behind."""

    def __init__(
        self, *, job: Job, plan: Plan, number: int, resume: str | None, folder: RunFolder, keeper: Keeper,
        metrics: Metrics, view: View, signals: Signals,
    ) -> None:  # fmt: skip
        self.job, self.plan, self.number, self.resume = job, plan, number, resume
        self.folder, self.keeper, self.metrics, self.view, self.signals = folder, keeper, metrics, view, signals
        self.status = Status(devices=plan.devices, memory_limit_bytes=plan.memory_cap_bytes)
        self.ready: dict[int, Ready] = {}
        self.finished: dict[int, Finished] = {}
        self.ended: dict[int, Ended] = {}
        self.parts: dict[int, dict[int, Part]] = defaultdict(dict)
        self._recent: list[tuple[float, int]] = []
        self._asked_to_stop = False
        self._commit_error: RungError | None = None
        self.outcome = Outcome(reason="", step=0)

    def run(self) -> Outcome:
        """Starts the workers, serves them until all have ended, and says how."""
        assignment = Assignment(job=self.job.to_dict(), plan=self.plan, attempt=self.number, resume=self.resume)
        logs = self.folder.logs(self.number)
        specs = [
            WorkerSpec(rank=rank, payload=assignment, log=logs / f"rank-{rank}.log", threads=self.plan.threads,
                       memory_cap_bytes=self.plan.memory_cap_bytes if self.plan.device == "cpu" else None)
            for rank in range(self.plan.devices)
        ]  # fmt: skip
        with Workers.start(ENTRY, specs, deadline_s=START_S) as workers:
            while len(self.ended) < self.plan.devices:
                for event in workers.poll(POLL_S):
                    self._serve(event)
                if self._failed() or self._commit_error is not None or self._out_of_patience(workers):
                    break
            self._close(workers)
        return self.outcome

    # ---------------------------------------------------------------- events

    def _serve(self, event: Message | Ended) -> None:
        if isinstance(event, Ended):
            self.ended[event.rank] = event
            return
        match event.value:
            case Ready() as ready:
                self._on_ready(event.rank, ready)
            case Steps() as steps:
                self._on_steps(steps)
            case Validated() as result:
                self._on_validated(result)
            case Saved() as saved:
                self._on_saved(event.rank, saved)
            case Note(text=text, warning=warning):
                self.folder.event("note", text=text)
                self.view.say(text, style="yellow" if warning else "")
            case Finished() as finished:
                self.finished[event.rank] = finished

    def _on_ready(self, rank: int, ready: Ready) -> None:
        self.ready[rank] = ready
        if rank != 0:
            return
        self.outcome.first_step = self.outcome.step = ready.step
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
        self._recent = [(t, n) for t, n in [*self._recent, (now, last.samples_seen)] if now - t <= 10.0]
        (_, n0), span = self._recent[0], now - self._recent[0][0]
        s = self.status
        s.samples_per_s = (last.samples_seen - n0) / span if span > 0 else self.job.batch / max(last.seconds, 1e-9)
        s.step, s.epoch, s.loss, s.samples_seen = last.step, last.epoch, last.loss, last.samples_seen
        s.memory_bytes, s.memory_limit_bytes = steps.memory_bytes, steps.memory_limit_bytes or s.memory_limit_bytes
        left = (s.total_steps - s.step) * self.job.batch
        s.seconds_left = left / s.samples_per_s if s.samples_per_s else None
        self.outcome.step, self.outcome.last_loss = last.step, last.loss
        self.view.update(s)

    def _on_validated(self, result: Validated) -> None:
        self.metrics.validated(result)
        self.outcome.last_metrics = result.metrics
        shown = "  ".join(f"{name} {value:.4f}" for name, value in result.metrics.items())
        self.view.say(f"validation step {result.step:,}: {shown}  ({duration(result.seconds)})")

    def _on_saved(self, rank: int, saved: Saved) -> None:
        self.parts[saved.step][rank] = saved.part
        if len(self.parts[saved.step]) < self.plan.devices:
            return
        parts = self.parts.pop(saved.step)
        try:
            name = self.keeper.commit(
                [parts[r] for r in sorted(parts)], saved.meta, self.plan, self.outcome.last_metrics
            )
        except RungError as error:
            self._commit_error = error
            return
        self.folder.event("checkpoint", step=saved.step, name=name, blocked_s=saved.blocked_s)
        self.metrics.flush()
        self.folder.sync()

    # ---------------------------------------------------------------- ends

    def _failed(self) -> bool:
        return any(rank not in self.finished for rank in self.ended)

    def _out_of_patience(self, workers: Workers) -> bool:
        """Passes a signal on as a wish to stop; true when grace is over or the user insists."""
        if self.signals.first is None:
            return False
        if not self._asked_to_stop:
            self._asked_to_stop = True
            name = signal.Signals(self.signals.first).name
            self.view.say(
                f"{name}: finishing the step and saving (at most {self.job.grace_s:g} s; once more: leave now)"
            )
            workers.send(None, Stop(reason=name))
        return self.signals.again or time.monotonic() - self.signals.since_s > self.job.grace_s

    def _close(self, workers: Workers) -> None:
        """Ends what still runs, and fills in the outcome from the first failure in time."""
        left = len(self.ended) < self.plan.devices
        workers.stop(grace_s=0.0 if self.signals.again else 3.0)
        for event in workers.poll():
            self._serve(event)
        all_well = len(self.finished) == self.plan.devices
        self.outcome.peak_bytes = max((f.peak_bytes for f in self.finished.values()), default=0)
        if self._commit_error is not None:
            self.outcome.reason, self.outcome.error = "failed", self._commit_error
            self.outcome.cause = Cause.STORAGE
        elif all_well:
            self.outcome.reason = self.finished[0].reason
            self.outcome.step = self.finished[0].step
        elif self.signals.first is not None and left:
            self.outcome.reason = "cut short"
        else:
            self._explain(workers)

    def _explain(self, workers: Workers) -> None:
        """Fills in cause, error and explanation from the failure that came first."""
        self.outcome.reason = "failed"
        said = workers.verdict(device=self.plan.device)
        if said is None:
            self.outcome.explanation = "the workers ended before they had finished"
            self.outcome.cause = Cause.LOST_WORKER
            return
        self.outcome.cause, self.outcome.explanation = said.cause, said.text
        if said.first.failure is not None:
            self.outcome.error = said.first.failure.error
