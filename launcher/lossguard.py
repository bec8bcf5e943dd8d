"""A worker's watch over its loss: tells the launcher what it notices, and answers a spike as `guard.on_spike` says.

Every rank sees the same global loss and decides alike; rank 0 alone speaks. Judging is in `launcher/watch/losses.py`,
going back in `launcher/rollback.py`.
"""

from rung.cluster.link import Link
from rung.launcher.data.loader import Step
from rung.launcher.job import Job
from rung.launcher.messages import Noticed, Spiked
from rung.launcher.rollback import Batch, batch_before
from rung.launcher.saving import Progress
from rung.launcher.watch import losses
from rung.strategies.errors import HealthError
from rung.strategies.findings import Finding

#: So many spikes are told of in one attempt; a run that has more is known by then.
MOST_TOLD = 5


class LossGuard:
    """`passed_over` are the batches that no step may take; `length` is that of an epoch, in samples."""

    def __init__(
        self, link: Link, job: Job, progress: Progress, *, length: int, passed_over: tuple[Batch, ...]
    ) -> None:
        self._link, self._job, self._progress, self._length = link, job, progress, length
        self._passed_over = set(passed_over)
        self._told = 0

    def passes_over(self, batch: Step) -> bool:
        """Whether the step of this batch changes no weight."""
        return (batch.epoch, batch.position) in self._passed_over

    def goes_back(self, batch: Step, loss: float) -> bool:
        """Judges the loss of a step before it reaches the weights; true if the run has to go back.

        Raises HealthError where a spike stops the run; the state is then that of the step before.
        """
        p, answer = self._progress, self._job.guard.on_spike
        if p.step < self._job.guard.first_steps:
            return False
        found = losses.spike(p.losses, loss, step=p.step + 1, start=p.trend.start)
        if found is None:
            return False
        if answer == "stop":
            raise HealthError(
                f"{found.fact}; samples {_named(batch)}", samples=tuple(int(i) for i in batch.indices), step=p.step + 1,
                hint=found.fix,
            )  # fmt: skip
        if answer == "rollback":
            self._ask_to_go_back(batch, found)
            return True
        self._told += 1
        if self._told <= MOST_TOLD:
            self._say(found, batch)
        return False

    def follow(self, batch: Step, loss: float) -> None:
        """Takes the loss of a step that has reached the weights."""
        p = self._progress
        p.losses.append(loss)
        p.trend, found = losses.follow(p.trend, loss, step=p.step)
        if found is not None:
            self._say(found, batch)

    def _ask_to_go_back(self, batch: Step, found: Finding) -> None:
        if self._link.rank != 0:
            return
        # Weights that the batch before has spoilt show it only now.
        this = (batch.epoch, batch.position)
        before = batch_before(*this, length=self._length, batch=self._job.batch)
        self._link.send(
            Spiked(
                step=self._progress.step + 1, suspects=(this,) if before is None else (before, this),
                reason=f"{found.fact}; samples {_named(batch)}", samples=tuple(int(i) for i in batch.indices),
            )
        )  # fmt: skip

    def _say(self, found: Finding, batch: Step) -> None:
        if self._link.rank == 0:
            samples = tuple(int(i) for i in batch.indices)
            self._link.send(Noticed(finding=found, step=self._progress.step, samples=samples))


def _named(batch: Step) -> str:
    shown = ", ".join(str(int(i)) for i in batch.indices[:8])
    return shown + (f" and {batch.count - 8} more" if batch.count > 8 else "")
