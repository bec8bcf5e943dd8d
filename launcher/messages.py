"""What workers tell the launcher, and what it tells them. Plain values; none needs torch to be unpickled."""

from dataclasses import dataclass
from pathlib import Path

from rung.launcher.checkpoint.manifest import Part
from rung.strategies.errors import RungError
from rung.strategies.findings import Finding
from rung.strategies.plan import Plan, Precision


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """What one worker needs to know: everything else it finds out by itself.

    `job` is `Job.to_dict()`, `source` the file it came from; `resume` is a checkpoint's folder, relative to the run, or
    None for a fresh start. `passed_over`: batches that no step may take, by (epoch, position) of their first sample.
    """

    job: dict[str, object]
    source: Path
    plan: Plan
    attempt: int
    resume: str | None = None
    passed_over: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileRequest:
    """What the throw-away process that profiles a task needs to know; it answers with a Profile or a reason."""

    job: dict[str, object]
    source: Path
    precision: Precision
    digest: str


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
    `data_s` what of it rank 0 waited for data, `exchange_s` what it waited for the other ranks."""

    step: int
    epoch: float
    samples_seen: int
    loss: float
    norm: float
    lr: float
    weight: float
    seconds: float
    data_s: float
    exchange_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """The steps since the last message, and the most memory that the device of this rank has held, and may."""

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
    """One rank's part of a checkpoint is in the store. When every rank's is there, the launcher commits.

    blocked_s: how long training stood still for it.
    """

    part: Part
    blocked_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveFailed:
    """One rank could not write its part, for good."""

    step: int
    error: RungError


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """Something a user wants to read once."""

    text: str
    warning: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Noticed:
    """A guard noticed something at `step` that does not stop the run. `samples`: indices of the batch, where one is
    meant."""

    finding: Finding
    step: int
    samples: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Spiked:
    """The loss of `step` jumped, and the job wants to go back. The weights are those of the step before.

    `suspects`: the batch of that step and the one before it, as (epoch, position).
    """

    step: int
    suspects: tuple[tuple[int, int], ...]
    reason: str
    samples: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """A worker left the loop in good order: `reason` is `done`, `stopped` (asked to) or `rollback` (see Spiked)."""

    step: int
    reason: str
    peak_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class OutOfMemory:
    """A single device ran out of memory in the step after `step`; nothing is lost. Asks for a smaller plan."""

    step: int
    peak_bytes: int
    what: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """Where a worker stands in a rescue. `sound`: its state is that of `step`, whole. `failing`: it said so unasked."""

    step: int
    sound: bool
    failing: bool


# ---------------------------------------------------------------- launcher to worker (and `rung.cluster.link.Stop`)


@dataclass(frozen=True, kw_only=True, slots=True)
class Replan:
    """The answer to OutOfMemory: do the step again under this plan."""

    plan: Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class CutBack:
    """Host memory runs out: go on with at most so many loader workers."""

    loader_workers: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WhereAreYou:
    """A peer has failed: freeze the state and answer with a Position."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteState:
    """Write the frozen state: your own intervals, or the `whole` of it; to another folder than the run's, if one is
    given."""

    whole: bool
    elsewhere: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Leave:
    """There is nothing left to do for a worker that failed."""
