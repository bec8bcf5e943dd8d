"""The learning rate of each step, as a share of the optimizer's own. Pure; nothing to save or restore."""

import math

from rung.launcher.job_values import Schedule


def schedule_factor(schedule: Schedule, step: int, total_steps: int) -> float:
    """What the learning rate is multiplied by in step `step` (0 is the first) of `total_steps`.

    Warm-up takes w = round(warmup * total_steps) steps and rises linearly: (step + 1) / (w + 1), so that the first
    step already trains and step w is at 1. From there, with p = (step - w) / (total_steps - w) and f = `final`:
    linear 1 - (1 - f) p; cosine f + (1 - f) (1 + cos(pi p)) / 2 (Loshchilov and Hutter 2017, without restarts);
    constant 1. `final` is reached at step `total_steps`, the one after the last, so that no step is wasted on a rate
    of zero. Beyond that the rate stays there.
    """
    warmup = round(schedule.warmup * total_steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if schedule.name == "constant":
        return 1.0
    if step >= total_steps:
        return schedule.final
    progress = (step - warmup) / (total_steps - warmup)
    if schedule.name == "cosine":
        return schedule.final + (1 - schedule.final) * (1 + math.cos(math.pi * progress)) / 2
    return 1 - (1 - schedule.final) * progress
