"""Which ranks write what when a group has failed: a pure function of where each surviving rank stands."""

from collections.abc import Mapping
from dataclasses import dataclass

from rung.launcher.messages import Position
from rung.strategies.plan import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Salvage:
    """Ranks of `writers` write the state of `step`: each its own intervals, or one of them the whole."""

    step: int
    writers: tuple[int, ...]
    whole: bool


def salvage(plan: Plan, positions: Mapping[int, Position], committed_step: int) -> Salvage | None:
    """What can be had from the ranks that answered; None if nothing newer than `committed_step`.

    Under single and ddp every rank holds everything, so one sound survivor is enough; if all are there, each writes
    its share. Under ZeRO each rank holds what no other does: all have to be sound and at the same step.
    """
    sound = {rank: p.step for rank, p in positions.items() if p.sound}
    if not sound:
        return None
    step = max(sound.values())
    at_step = tuple(sorted(rank for rank, s in sound.items() if s == step))
    everyone = len(at_step) == plan.devices
    if step <= committed_step or step < 1 or (plan.zero_stage and not everyone):
        return None
    if everyone:
        return Salvage(step=step, writers=at_step, whole=False)
    return Salvage(step=step, writers=at_step[:1], whole=True)
