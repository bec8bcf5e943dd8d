"""Guards over loss and gradient norm: pure functions from numbers to a verdict. What acts on them is train.py."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

#: Inputs this far from zero are called "not normalised": a layer with weights of order 1/sqrt(n) then gives
#: outputs of the same order, and squared or exponentiated losses leave float32 within a few steps.
UNNORMALISED = 1e3
#: Learning rates above this are high for every optimizer whose update has unit scale (Adam and its kin).
HIGH_LR = 1e-2


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """What the job's `guard` says. `first_steps` counts optimizer steps from the start of the training."""

    first_steps: int = 10
    non_finite: Literal["stop", "skip"] = "stop"
    negative_loss: Literal["stop", "allow"] = "stop"


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchFacts:
    """What is in a batch: the number of NaN/Inf values in floating tensors and the largest finite magnitude."""

    non_finite_values: int = 0
    largest: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """`action`: go on; skip (the step did not reach the weights, training goes on); stop (exit code 4)."""

    action: Literal["ok", "skip", "stop"]
    reason: str = ""


OK = Verdict(action="ok")

#: So many non-finite steps in a row are a broken run, even where single ones are skipped.
MOST_SKIPPED_IN_A_ROW = 20


def judge(*, step: int, loss: float, norm: float, rules: Rules, skipped_in_a_row: int, precision: str) -> Verdict:
    """Judges one optimizer step (counted from 1) by its global mean loss and global gradient norm.

    A non-finite step never reaches the weights, whatever the verdict. Within the first steps it stops the run if
    the rules say so; afterwards it is skipped, unless too many follow each other. Under fp16 an infinite norm is how
    loss scaling finds its scale, so it alone never stops the run.
    """
    if not math.isfinite(loss):
        what = f"the loss is {_name(loss)} at step {step}"
    elif not math.isfinite(norm):
        what = f"the gradient norm is {_name(norm)} at step {step} (loss {loss:.4g})"
    elif loss < 0 and rules.negative_loss == "stop" and step <= rules.first_steps:
        return Verdict(
            action="stop", reason=f"the loss is negative at step {step}: {loss:.4g} (a loss that can be negative by "
            "right is switched on by `guard: {negative_loss: allow}`)"
        )  # fmt: skip
    else:
        return OK
    scaling = precision == "fp16" and math.isfinite(loss)
    if skipped_in_a_row >= MOST_SKIPPED_IN_A_ROW:
        return Verdict(action="stop", reason=f"{what}, and so were the {skipped_in_a_row} steps before it")
    if rules.non_finite == "stop" and step <= rules.first_steps and not scaling:
        return Verdict(action="stop", reason=what)
    return Verdict(action="skip", reason=what)


def likely_cause(*, facts: BatchFacts, lr: float, precision: str, losses: Sequence[float]) -> str:
    """The most likely reason for a non-finite step, in words that say what to change.

    `losses` are those of the steps before, oldest first. Causes are tried from the surest to the vaguest.
    """
    if facts.non_finite_values:
        return f"the batch itself holds {facts.non_finite_values} NaN or Inf values: clean the data"
    if facts.largest > UNNORMALISED:
        return f"the inputs are not normalised (values up to {facts.largest:.3g}): scale them to about -1..1"
    rising = len(losses) >= 2 and losses[-1] > 2 * min(losses)
    if rising or lr > HIGH_LR:
        grew = f" (the loss grew from {min(losses):.3g} to {losses[-1]:.3g})" if rising else ""
        return f"the learning rate {lr:.3g} is too high{grew}: lower optimizer.lr or lengthen schedule.warmup"
    if precision == "fp16":
        return "fp16 overflowed: use precision: bf16 or fp32"
    return "the loss function gives it for this batch (a log or division of zero, an empty mask): see the samples"


def _name(value: float) -> str:
    return "NaN" if math.isnan(value) else "Inf"
