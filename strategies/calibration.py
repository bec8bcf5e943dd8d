"""What measured runs teach about predictions. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from rung.strategies.memory import Factors

# Fewer runs than this say nothing about how far the next one may be off.
ENOUGH_RUNS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """One run of a plan: predicted and measured peak of a device, and of a step's time (0 where not known)."""

    predicted_bytes: int
    measured_bytes: int
    predicted_s: float = 0.0
    measured_s: float = 0.0


def calibrate(history: Sequence[Seen]) -> Factors:
    """Corrections for predictions of the same task on the same kind of device.

    Memory is off by an amount (libraries, contexts), so the median difference is added, but only upwards: a run that
    took less may have met shorter samples, and too little kept free costs more than too much. Time is off by a factor,
    so the median ratio is applied. The error band is the largest that a run took beyond its corrected prediction, once
    there are enough runs. A run that was predicted with corrections must be given here without them.
    """
    runs = [seen for seen in history if seen.predicted_bytes > 0 and seen.measured_bytes > 0]
    ratios = [seen.measured_s / seen.predicted_s for seen in history if seen.predicted_s > 0 and seen.measured_s > 0]
    extra = max(0, round(median(seen.measured_bytes - seen.predicted_bytes for seen in runs))) if runs else 0
    error = None
    if len(runs) >= ENOUGH_RUNS:
        error = max(0.0, *(seen.measured_bytes / (seen.predicted_bytes + extra) - 1 for seen in runs))
    return Factors(device_bytes=extra, time=median(ratios) if ratios else 1.0, error=error, runs=len(runs))
