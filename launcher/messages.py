"""What workers tell the launcher. Plain values; none needs torch to be unpickled."""

from dataclasses import dataclass, field

from rung.launcher.checkpoint.manifest import Part
from rung.strategies.plan import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """What one worker needs to know: everything else it finds out by itself.

    `job` is `Job.to_dict()`; `resume` names a checkpoint folder, or is None for a fresh start.
    """

    job: dict[str, object]
    plan: Plan
    attempt: int
    resume: str | None = None
    skip_smoke: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """A worker has built everything and is about to take its first step."""

    step: int
    total_steps: int
    steps_per_epoch: int
    samples: int
    parameters: int
    trainable: int
    loader_workers: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One optimizer step, as every rank sees it. `step` counts from 1; `seconds` is its wall time on rank 0,
    `data_s` what of it rank 0 waited for data."""

    step: int
    epoch: float
    samples_seen: int
    loss: float
    norm: float
    lr: float
    weight: float
    seconds: float
    data_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """The steps since the last message, and the memory that the device of this rank has taken and may take."""

    records: tuple[StepRecord, ...]
    memory_bytes: int
    memory_limit_bytes: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Validated:
    """Weighted means over the validation split after `step`. `metrics` holds `loss` and what the task adds."""

    step: int
    metrics: dict[str, float]
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """One rank's part of a checkpoint is in the store. When every rank's is there, the launcher commits."""

    step: int
    part: Part
    meta: dict[str, object]
    blocked_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """Something a user wants to read once."""

    text: str
    warning: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """A worker left the loop in good order: `reason` is `done` or `stopped` (asked to)."""

    step: int
    reason: str
    peak_bytes: int
    totals: dict[str, float] = field(default_factory=dict)
