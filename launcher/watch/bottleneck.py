"""Where the time of a run goes, and what holds it up, in plain words. Pure."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from rung.launcher.messages import StepRecord
from rung.strategies.findings import Finding, Level

#: What is lost must be worth a word: at least so many seconds.
WORTH_S = 5.0
#: And at least this part of the time.
DATA, SAVE, EXCHANGE, VALIDATION = 0.15, 0.10, 0.25, 0.35
#: A device that computes less than this part of the time is not kept busy.
IDLE = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """Seconds of rank 0 in a stretch of training. `data`: waited for samples; `exchange`: waited for other ranks in the
    step's exchange (what the backward pass communicates by itself counts as compute); `save`: stood still for saves;
    `validation`; `step`: all of the steps, data and exchange included."""

    steps: int = 0
    step_s: float = 0.0
    data_s: float = 0.0
    exchange_s: float = 0.0
    save_s: float = 0.0
    validation_s: float = 0.0

    @property
    def total_s(self) -> float:
        """All of the time."""
        return self.step_s + self.save_s + self.validation_s

    @property
    def compute_s(self) -> float:
        """What is left of the steps: the work itself."""
        return max(0.0, self.step_s - self.data_s - self.exchange_s)

    def plus(self, records: tuple[StepRecord, ...]) -> "Split":
        """With more steps."""
        return replace(
            self, steps=self.steps + len(records), step_s=self.step_s + sum(r.seconds for r in records),
            data_s=self.data_s + sum(r.data_s for r in records),
            exchange_s=self.exchange_s + sum(r.exchange_s for r in records),
        )  # fmt: skip

    def shares(self) -> dict[str, float]:
        """Parts of the time, which sum to 1; empty where no time has passed."""
        parts = {"data": self.data_s, "compute": self.compute_s, "exchange": self.exchange_s, "save": self.save_s,
                 "validation": self.validation_s}  # fmt: skip
        total = sum(parts.values())
        return {f"{name}_share": round(part / total, 4) for name, part in parts.items()} if total > 0 else {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What can be turned: loader workers of each device, and the cores that are still free for more of them.

    `device_busy`: part of the time that the GPUs computed; None where nobody tells.
    """

    loader_workers: int = 0
    free_cores: int = 0
    devices: int = 1
    device_busy: float | None = None


def bottleneck(split: Split, setting: Setting, *, worth_s: float = WORTH_S) -> Finding | None:
    """The one thing that costs most time without being the work itself; None if nothing is worth a word."""
    total = split.total_s
    if total <= 0:
        return None
    costs: list[tuple[float, float, Callable[[float], Finding]]] = [
        (split.data_s, DATA, lambda share: _data(share, split, setting)),
        (split.save_s, SAVE, _save),
        (split.exchange_s, EXCHANGE, _exchange),
        (split.validation_s, VALIDATION, _validation),
    ]
    found = [(cost, say) for cost, part, say in costs if cost >= max(part * total, worth_s)]
    if found:
        cost, say = max(found, key=lambda item: item[0])
        return say(cost / total)
    if setting.device_busy is not None and setting.device_busy < IDLE and split.compute_s >= worth_s:
        return Finding(
            level=Level.WARNING, subject="bottleneck.device",
            fact=f"the GPUs compute only {setting.device_busy:.0%} of the time, and wait for no data",
            why="many small operations: starting them takes longer than doing them",
            fix="a larger strategy.micro_batch, or fewer and larger operations in the model",
        )  # fmt: skip
    return None


def _data(share: float, split: Split, setting: Setting) -> Finding:
    wanted = wanted_workers(split, setting)
    if wanted > setting.loader_workers:
        fix = f"data.workers {setting.loader_workers} -> {wanted}, or cache the data set"
    else:
        fix = "no core is free for more loader workers: make __getitem__ cheaper, or cache what it computes"
    why = "the device stands idle meanwhile"
    return _costs("bottleneck.data", f"{share:.0%} of the time waits for data", why, fix)


def _save(share: float) -> Finding:
    fix = "checkpoint.every less often, or a store that is nearer"
    return _costs("bottleneck.save", f"{share:.0%} of the time goes into saves", "training stands still meanwhile", fix)


def _exchange(share: float) -> Finding:
    why = "all go at the pace of the slowest"
    fix = "one device is slower or busy with something else; `rung doctor` looks at clocks and processes"
    return _costs("bottleneck.exchange", f"{share:.0%} of the time waits for other devices", why, fix)


def _validation(share: float) -> Finding:
    fix = "validation.every less often, or validation.batches to look at a part of it"
    fact = f"{share:.0%} of the time goes into validation"
    return _costs("bottleneck.validation", fact, "nothing is learnt meanwhile", fix)


def _costs(subject: str, fact: str, why: str, fix: str) -> Finding:
    return Finding(level=Level.WARNING, subject=subject, fact=fact, why=why, fix=fix)


def wanted_workers(split: Split, setting: Setting) -> int:
    """How many loader workers would keep up, with a quarter to spare, as far as cores allow.

    Without workers the wait is the fetching itself. With w of them a step comes as fast as they fetch, so one alone
    would need w times as long.
    """
    workers = setting.loader_workers
    fetch_s = split.data_s if workers == 0 else workers * (split.data_s + split.compute_s)
    wanted = math.ceil(1.25 * fetch_s / max(split.compute_s, 1e-3 * split.step_s, 1e-9))
    return min(max(wanted, workers + 1), workers + setting.free_cores)
