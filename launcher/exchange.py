"""The one small exchange of every step: what each rank knows alone, and all must act on alike."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from rung.launcher import cadence

if TYPE_CHECKING:
    from rung.launcher.train import Trainer


class Exchange:
    """The loss, summed; whether any rank was told to stop; whether rank 0's clock calls for a save; which way each rank
    took through the model, where that matters; how long each computed. In each step `begin`, where `early`, and `end`.

    Under ddp on CPUs it travels beside the last backward pass, which waits for all ranks anyway: a rank that fails in
    between leaves its peers waiting for gradients, so none of them goes on. Under ZeRO a peer might, and be torn from
    its state in the middle of the update; and on a GPU reading the loss would hold up the backward pass. There it comes
    after it.
    """

    def __init__(self, trainer: "Trainer") -> None:
        plan = trainer.plan
        self.early = plan.strategy == "ddp" and plan.device == "cpu" and plan.devices > 1
        self._trainer = trainer
        self._end: Callable[[], list[float]] | None = None

    def begin(self, loss_sum: float) -> None:
        """Sends what this rank knows; `loss_sum` is its weighted sum of losses. Does not wait."""
        trainer = self._trainer
        every = trainer.job.checkpoint.every
        clock = every is not None and every.unit == "minutes" and trainer.link.rank == 0
        minutes = trainer.saving.minutes_since_last
        timed = clock and cadence.due(every, step=0, per_epoch=1, minutes_since_last=minutes)
        paths = trainer.strategy.paths
        path = paths.tell() if paths is not None else []
        told = [loss_sum, float(trainer.told_to_stop()), float(timed), *path, *trainer.balancer.tell()]
        self._end = trainer.strategy.collectives.begin(told)

    def end(self, loss_sum: float) -> float:
        """The sum of all ranks' losses, once all have sent theirs; what else they said is passed on. Raises JobError
        where ranks took ways through the model that do not go together."""
        if self._end is None:
            self.begin(loss_sum)
        assert self._end is not None
        end, self._end = self._end, None
        loss, stop, save, *seconds = end()
        trainer = self._trainer
        paths = trainer.strategy.paths
        if paths is not None:
            path, seconds = seconds[:2], seconds[2:]
            paths.hear(path, trainer.strategy.collectives, trainer.progress.step + 1)
        trainer.balancer.hear(seconds)
        if stop:
            trainer.stop_reason = trainer.wish_to_stop or "a peer was told to stop"
        trainer.save_now = save > 0
        return loss
