"""When something is due: saves and validations at an interval of epochs, steps or minutes. Pure functions."""

import math
from typing import Literal, Protocol


class Interval(Protocol):
    """What a job's `every: 5 epochs` becomes."""

    @property
    def amount(self) -> float: ...
    @property
    def unit(self) -> Literal["epochs", "steps", "minutes"]: ...


def steps_per_epoch(samples: int, batch: int) -> int:
    """Optimizer steps in an epoch; the last may have a smaller global batch."""
    return -(-samples // batch)


def total_steps(*, steps: int | None, epochs: float | None, per_epoch: int) -> int:
    """Optimizer steps of the whole training: as given, or enough to pass `epochs` epochs (at least one step)."""
    if steps is not None:
        return steps
    return max(1, math.ceil(round((epochs or 1) * per_epoch, 6)))


def due(every: Interval | None, *, step: int, per_epoch: int, minutes_since_last: float) -> bool:
    """Whether the interval ends with optimizer step `step` (counted from 1, just completed).

    Epochs may be fractions: `0.5 epochs` is due when a multiple of half an epoch has been passed by this step.
    """
    if every is None:
        return False
    if every.unit == "minutes":
        return minutes_since_last >= every.amount
    length = every.amount * (per_epoch if every.unit == "epochs" else 1)
    # A tiny slack keeps 3 * (1/3) epochs from falling just short of a whole one.
    return math.floor(step / length + 1e-9) > math.floor((step - 1) / length + 1e-9)
