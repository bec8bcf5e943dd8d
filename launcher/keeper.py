"""Keeps the checkpoints of a run: commits complete ones, deletes old ones, finds the one to go on from."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Resume:
    """Where training goes on."""

    name: str
    step: int
    epoch: int
    position: int
