"""A worker's side of checkpoints: what is saved beside tensors, when, and how a run is taken up again."""

import math
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rung.cluster.link import Link, beyond_memory_cap
from rung.launcher.checkpoint.load import Loader as StateLoader
from rung.launcher.checkpoint.manifest import Manifest, Part
from rung.launcher.checkpoint.save import Saver, writers
from rung.launcher.job import Job
from rung.launcher.messages import Assignment, Note, Saved, SaveFailed
from rung.launcher.storage import Store
from rung.launcher.watch.losses import WINDOW, Trend
from rung.strategies.base import Strategy
from rung.strategies.errors import RungError, StorageError
from rung.strategies.state import aliases, shapes

#: How long a save may hold up a worker before its silence counts as a hang, in seconds.
SLOW_SAVE_S = 3600.0


@dataclass(kw_only=True, slots=True)
class Progress:
    """How far a training is. `step`: optimizer steps done. `epoch`, `position`: of the next sample in the order.

    losses: the last ones, oldest first. skipped: non-finite steps in a row, up to now. units_seen: summed weights.
    trend: what the loss has done so far. passed_over: batches that no step has learnt from, after a rollback.
    """

    step: int = 0
    epoch: int = 0
    position: int = 0
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    skipped: int = 0
    units_seen: float = 0.0
    trend: Trend = field(default_factory=Trend)
    passed_over: list[tuple[int, int]] = field(default_factory=list)

    def to_trainer_state(self) -> dict[str, Any]:
        """What goes into a manifest's `trainer`; the rest has fields of its own there."""
        return {
            "losses": list(self.losses), "skipped": self.skipped, "units_seen": self.units_seen,
            "trend": self.trend.to_json(), "passed_over": self.passed_over,
        }  # fmt: skip

    def take_up(self, manifest: Manifest) -> None:
        """Goes on where a checkpoint was made."""
        self.step, self.epoch, self.position = manifest.step, manifest.epoch, manifest.position
        state = manifest.trainer
        self.losses.extend(float(x) for x in state["losses"])
        self.skipped, self.units_seen = int(state["skipped"]), float(state["units_seen"])
        if "trend" in state:
            self.trend = Trend.from_json(state["trend"])
        self.passed_over = [(int(e), int(p)) for e, p in state.get("passed_over", ())]


class Saving:
    """Saves and restores the state of one worker. `extra` is what else a resumed run must compare or know."""

    def __init__(
        self, link: Link, job: Job, assignment: Assignment, strategy: Strategy, progress: Progress,
        extra: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self._link, self._job, self._strategy, self._progress = link, job, strategy, progress
        self._attempt, self._extra = assignment.attempt, dict(extra)
        self._aliases = aliases(strategy.module)
        self._weights = shapes(strategy.module)
        self._store = Store.open(job.run, job.checkpoint.options)
        self._saver = Saver(
            self._store, rank=link.rank, world=assignment.plan.devices, attempt=assignment.attempt,
            on_part=self._part_written, on_failure=self._failed,
        )  # fmt: skip
        self._saved_step = -1
        self._saved_s = time.monotonic()
        self._first = True
        self._blocked_s: dict[int, float] = {}

    @property
    def minutes_since_last(self) -> float:
        """Minutes since the last save began, or since the start."""
        return (time.monotonic() - self._saved_s) / 60

    def start_from_given_weights(self) -> None:
        """Loads the job's `init_from`, if there is one, into the model."""
        if self._job.init_from is None:
            return
        from rung.launcher.checkpoint.init_from import load_weights

        intervals = self._strategy.intervals("load")
        with beyond_memory_cap():
            load_weights(
                self._job.init_from, intervals, self._job.allow_mismatch,
                options=self._job.checkpoint.options, model=self._weights, aliases=self._aliases,
            )  # fmt: skip
        self._strategy.restored()

    def resume(self, folder: str) -> Manifest:
        """Fills the strategy's state and the progress from a checkpoint. Raises CheckpointDamaged, or StorageError
        if it is of another model."""
        manifest = Manifest.read(self._store, folder)
        intervals = self._strategy.intervals("load")  # what the optimizer keeps is device memory, and made here
        with beyond_memory_cap():  # buffers and threads of the reader are not
            found = StateLoader(self._store, manifest).fill(intervals, allow_missing=True)
        if lacking := [name for name in found.missing if name.startswith("model/")]:
            raise StorageError(
                f"{folder} lacks {len(lacking)} weights of this model: {', '.join(lacking[:5])}",
                url=self._store.url, hint="the model's code has changed since; start a new run with init_from",
            )  # fmt: skip
        self._strategy.restored()
        self._progress.take_up(manifest)
        self._saved_step = manifest.step
        return manifest

    def save(self, lr_factor: float) -> None:
        """Copies the state to host memory and goes on; a thread brings it to the store. Once a step."""
        step = self._progress.step
        if self._saved_step == step:
            return
        waited_s = self._let_end()
        # The copy lies in host memory; on a CPU device only the accounting tells it from the device's.
        threads = 2 + writers(self._store)  # one that saves, its writers, and one of the store's
        with beyond_memory_cap(threads=threads if self._first else 0):
            blocked = self._saver.snapshot(step, self._strategy.intervals("save"), self._meta(lr_factor))
        self._first = False
        waited_s += blocked.waited_s
        self._blocked_s[step] = waited_s + blocked.copied_s
        self._saved_s, self._saved_step = time.monotonic(), step
        if waited_s > 1.0:
            said = f"rank {self._link.rank} waited {waited_s:.1f} s for the save before: the store is slow"
            self._link.send(Note(text=said, warning=True))

    def rescue(self, whole: bool, elsewhere: str | None, lr_factor: float) -> None:
        """Writes the state as of the last completed step, in the calling thread, which need not be the main one: to
        the run's store, or to the folder `elsewhere`."""
        step, meta = self._progress.step, self._meta(lr_factor)
        try:
            saver = self._saver
            if whole or elsewhere is not None:
                store = self._store if elsewhere is None else Store.open(elsewhere)
                rank, world = (0, 1) if whole else (self._link.rank, self._strategy.plan.devices)
                saver = Saver(store, rank=rank, world=world, attempt=self._attempt, on_part=self._part_written)
            part = saver.emergency(step, self._strategy.intervals("whole" if whole else "save"), meta)
        except Exception as error:  # a thread has nobody to raise to, and the launcher waits for an answer
            known = error if isinstance(error, RungError) else StorageError(f"saving step {step} failed: {error!r}")
            self._failed(step, known)
            return
        self._part_written(part)

    def wait(self) -> None:
        """Until the last save is durable. Raises what it failed with."""
        self._let_end()
        self._saver.wait()

    def _let_end(self) -> float:
        """Waits for the save under way, with a heartbeat: a slow store is no hang. Returns for how many seconds."""
        began = time.monotonic()
        while not self._saver.wait(1.0) and time.monotonic() - began < SLOW_SAVE_S:
            self._link.beat(self._progress.step, "saving")
        return time.monotonic() - began

    def close(self) -> None:
        """Never raises."""
        self._saver.close()

    def _meta(self, lr_factor: float) -> dict[str, Any]:
        p = self._progress
        return {
            "epoch": p.epoch, "position": p.position, "aliases": self._aliases, "healthy": p.skipped == 0,
            "weights": list(self._weights),
            "trainer": {**p.to_trainer_state(), **self._extra, "lr_factor": lr_factor},
        }  # fmt: skip

    def _part_written(self, part: Part) -> None:
        self._link.send(Saved(part=part, blocked_s=self._blocked_s.pop(part.step, 0.0)))

    def _failed(self, step: int, error: RungError) -> None:
        self._link.send(SaveFailed(step=step, error=error))


def check_learning_rate(manifest: Manifest, total_steps: int, factor: float) -> None:
    """The first resumed step must have the rate that it would have had. Raises RungError if it has not, unless the
    length of the training was changed."""
    stored = manifest.trainer
    if stored["total_steps"] == total_steps and not math.isclose(factor, stored["lr_factor"]):
        raise RungError(
            f"the schedule gives {factor} after step {manifest.step}, the checkpoint says {stored['lr_factor']}",
            hint="the schedule of the job was changed by force; take it back, or start a new run",
        )
