"""Watches the loss after the first steps: a spike, a divergence, a plateau. Pure: numbers in, findings out.

Spikes are told by the median and the median absolute deviation (MAD) of the last losses, which one outlier does not
move; 1.4826 MAD is the standard deviation of a normal distribution (Rousseeuw and Croux, "Alternatives to the Median
Absolute Deviation", 1993). Slow changes are told by medians of whole blocks of steps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from rung.strategies.findings import Finding, Level

#: How many losses are remembered. A heavy-tailed loss shows its tail within so many steps.
WINDOW = 128
#: Fewer losses than this say nothing about what is usual.
ENOUGH = 32
#: Steps whose median is one point of the trend.
BLOCK = 32
#: A spike stands this many deviations above the median, and so many times as high above it as any loss in the window:
#: the second rule keeps losses with a heavy tail (a batch of one sample) from giving false alarms.
DEVIATIONS, TIMES_THE_LARGEST = 10.0, 4.0
#: And it undoes at least this part of what the training has gained. Deviations below this part of the median are noise
#: of a loss that hardly varies.
PART_OF_GAIN, FLOOR = 0.1, 0.02
#: A plateau: no better block for this many steps, and for this part of all steps so far.
PLATEAU_STEPS, PLATEAU_PART = 500, 0.5
#: An improvement smaller than this part of the best is none.
BETTER = 1e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class Trend:
    """Block medians so far: of the first block (None before its end), the best and the step it ended at. `block` holds
    the losses of the block that is not full yet; `told` what has been said."""

    start: float | None = None
    best: float = 0.0
    best_step: int = 0
    block: tuple[float, ...] = ()
    told: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain values; `from_json` is the inverse."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Trend":
        """A trend from a manifest."""
        return cls(**{**values, "block": tuple(values["block"]), "told": tuple(values["told"])})


def deviation(values: Sequence[float], middle: float) -> float:
    """A robust standard deviation about `middle`, never below a small part of it."""
    return max(1.4826 * median(abs(v - middle) for v in values), FLOOR * abs(middle))


def spike(recent: Sequence[float], loss: float, *, step: int, start: float | None) -> Finding | None:
    """Whether the loss of `step` (counted from 1) stands far above the `recent` ones, oldest first.

    `start` is what the loss was in the beginning, if that is known. Costs a few microseconds unless the loss is the
    highest of its window.
    """
    if len(recent) < ENOUGH or loss <= (largest := max(recent)):
        return None
    middle = median(recent)
    sigma = deviation(recent, middle)
    gain = abs(start - middle) if start is not None else 0.0
    above = loss - middle
    if above < max(DEVIATIONS * sigma, TIMES_THE_LARGEST * (largest - middle), PART_OF_GAIN * gain):
        return None
    usual = f"{middle:.4g} (the median of the last {len(recent)} steps)"
    return Finding(
        level=Level.WARNING,
        subject="loss.spike",
        fact=f"the loss jumped to {loss:.4g} at step {step:,}, from {usual}",
        why="a bad batch, or a learning rate that is too high for these weights; some runs never come back from it",
        fix="look at the samples named; guard.on_spike: rollback goes back and passes over the batch; lower "
        "optimizer.lr or clip if it happens again",
    )


def follow(trend: Trend, loss: float, *, step: int) -> tuple[Trend, Finding | None]:
    """The trend with one more loss (that of `step`), and what there is to say about it; each thing is said once."""
    block = (*trend.block, loss)
    if len(block) < BLOCK:
        return replace(trend, block=block), None
    middle = median(block)
    trend = replace(trend, block=())
    if trend.start is None:
        return replace(trend, start=middle, best=middle, best_step=step), None
    if middle < trend.best - BETTER * abs(trend.best):
        # What was said of a loss that did not fall is not true any more.
        return replace(trend, best=middle, best_step=step, told=()), None
    finding = _divergence(trend, middle, deviation(block, middle), step) or _plateau(trend, middle, step)
    if finding is None or finding.subject in trend.told:
        return trend, None
    return replace(trend, told=(*trend.told, finding.subject)), finding


def _divergence(trend: Trend, middle: float, sigma: float, step: int) -> Finding | None:
    """A whole block lies above where the training began, or has lost half of what was gained."""
    assert trend.start is not None
    above_start = middle - trend.start > max(5 * sigma, 0.2 * abs(trend.start))
    gain = trend.start - trend.best
    lost_half = gain > 5 * sigma and middle - trend.best > max(5 * sigma, 0.5 * gain)
    if not above_start and not lost_half:
        return None
    return Finding(
        level=Level.WARNING,
        subject="loss.divergence",
        fact=f"the loss rises: {middle:.4g} over the {BLOCK} steps up to {step:,}, {trend.best:.4g} at step "
        f"{trend.best_step:,}",
        why="the training is losing what it had learnt",
        fix="lower optimizer.lr, lengthen schedule.warmup, or clip: 1.0; the checkpoints before that step are sound",
    )


def _plateau(trend: Trend, middle: float, step: int) -> Finding | None:
    since = step - trend.best_step
    if since < max(PLATEAU_STEPS, PLATEAU_PART * step):
        return None
    never = trend.best_step <= 2 * BLOCK
    return Finding(
        level=Level.WARNING,
        subject="loss.plateau",
        fact=f"the loss has not fallen for {since:,} steps: {middle:.4g} at step {step:,}, {trend.best:.4g} at step "
        f"{trend.best_step:,}",
        why="it never learnt anything" if never else "more steps like these change nothing",
        fix="another optimizer.lr (ten times higher or lower), labels that match their samples, weights that are not "
        "frozen"
        if never
        else "stop here (the checkpoints are there), lower optimizer.lr, or a larger model",
    )
