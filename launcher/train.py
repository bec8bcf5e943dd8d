"""What each worker runs: build, restore, try ten samples, step, validate, save, close.

Read `Trainer.run` from top to bottom. Every rank runs it in step with the others; what one rank alone decides is
agreed by `_agree` first.
"""

import math
import time
from collections import deque
from typing import Any

import torch

from rung.cluster.link import Link, Stop
from rung.launcher import cadence, smoke
from rung.launcher.checkpoint.load import Loader as StateLoader
from rung.launcher.checkpoint.manifest import Manifest, Part
from rung.launcher.checkpoint.save import Saver
from rung.launcher.data.loader import Loader, Step, eval_batches
from rung.launcher.data.order import Order
from rung.launcher.data.rng import seed_everything
from rung.launcher.job import Job
from rung.launcher.messages import Assignment, Finished, Note, Ready, Saved, StepRecord, Steps, Validated
from rung.launcher.schedule import schedule_factor
from rung.launcher.storage import Store
from rung.launcher.task import load_task, make_optimizer
from rung.launcher.watch import health
from rung.strategies.errors import DataError, HealthError
from rung.strategies.make import make_strategy
from rung.strategies.measure import Memory

#: How often a worker tells its numbers, in seconds.
REPORT_S = 0.25
#: How long the workers of a group may take to come together, in seconds: the slowest may be reading its data.
GROUP_S = 600.0
#: How many losses the guard remembers, to tell a rising one.
WINDOW = 32


def main(link: Link, assignment: Assignment) -> None:
    """Entry point of a worker process."""
    Trainer(link, assignment).run()


class Trainer:
    """One worker's training. State that survives in checkpoints: `step`, `epoch`, `position`, `losses`, `skipped`."""

    def __init__(self, link: Link, assignment: Assignment) -> None:
        self.link = link
        self.plan = assignment.plan
        self.assignment = assignment
        self.job = Job.from_dict(assignment.job)
        self.rules = health.Rules(
            first_steps=self.job.guard.first_steps,
            non_finite=self.job.guard.non_finite,
            negative_loss=self.job.guard.negative_loss,
        )
        self.step = 0
        self.epoch = 0
        self.position = 0
        self.losses: deque[float] = deque(maxlen=WINDOW)
        self.skipped = 0
        self.stop_reason = ""
        self.units_seen = 0.0
        self._records: list[StepRecord] = []
        self._reported_s = 0.0
        self._saved_s = time.monotonic()

    def run(self) -> None:
        """The whole of it. Data is prepared before the process group forms, since others would wait for it."""
        torch.set_num_threads(self.plan.threads)
        self.task = load_task(self.job)
        self.train_data = self.task.dataset("train")
        self.valid_data = self.task.dataset("valid")
        self._count_steps()
        self._build()
        self._restore()
        try:
            if self.step < self.total_steps:
                self._try_ten()
                self._announce()
                self._loop()
            self.saver.wait()
            self._report(force=True)
            reason = "stopped" if self.stop_reason else "done"
            peak = self.memory.peak()
            self.link.send(Finished(step=self.step, reason=reason, peak_bytes=peak))
        finally:
            self.saver.close()
            self.strategy.close()

    # ---------------------------------------------------------------- before the loop

    def _count_steps(self) -> None:
        if self.train_data is None:
            raise DataError("dataset('train') returned None", hint="return a torch Dataset")
        self.order = Order(size=len(self.train_data), seed=self.job.seed)
        self.per_epoch = cadence.steps_per_epoch(self.order.length, self.job.batch)
        self.total_steps = cadence.total_steps(steps=self.job.steps, epochs=self.job.epochs, per_epoch=self.per_epoch)

    def _build(self) -> None:
        plan, rank = self.plan, self.link.rank
        store = self.link.store(GROUP_S) if plan.devices > 1 else None
        self.strategy = make_strategy(plan, rank, store)
        seed_everything(self.job.seed, 0, 0)  # the same weights on every rank and under every strategy
        self.strategy.build(
            self.task.model, lambda model: make_optimizer(self.job.optimizer, self.task.parameters(model))
        )
        self.base_lrs = [group["lr"] for group in self.strategy.optimizer.param_groups]
        self.memory = Memory(self.strategy.device, plan.memory_cap_bytes)
        self.run_store = Store.open(self.job.run, self.job.checkpoint.options)
        self.saver = Saver(self.run_store, rank=rank, world=plan.devices, attempt=self.assignment.attempt,
                           on_part=self._part_written)  # fmt: skip

    def _restore(self) -> None:
        if self.assignment.resume is None:
            return
        manifest = Manifest.read(self.run_store, self.assignment.resume)
        StateLoader(self.run_store, manifest).fill(self.strategy.intervals("load"))
        self.strategy.restored()
        self.step, self.epoch, self.position = manifest.step, manifest.epoch, manifest.position
        state = manifest.trainer
        self.losses.extend(float(x) for x in state["losses"])
        self.skipped = int(state["skipped"])
        self.units_seen = float(state["units_seen"])

    def _try_ten(self) -> None:
        count = min(smoke.TEN, self.order.length)
        first = [int(i) for i in self.order.indices(self.epoch, 0, count)]
        smoke.try_ten(self.task, self.strategy, self.train_data, first, self._to_device)

    def _announce(self) -> None:
        self.loader = Loader(
            self.train_data, self.task.collate, self.order, self.plan, self.link.rank,
            epoch=self.epoch, position=self.position, workers=self._loader_workers(),
        )  # fmt: skip
        parameters = list(self.strategy.model.parameters())
        self.link.send(
            Ready(
                step=self.step,
                total_steps=self.total_steps,
                steps_per_epoch=self.per_epoch,
                samples=self.order.size,
                parameters=sum(p.numel() for p in parameters),
                trainable=sum(p.numel() for p in parameters if p.requires_grad),
                loader_workers=len(self.loader.worker_pids),
            )
        )

    def _loader_workers(self) -> int:
        return 0 if self.job.data.workers == "auto" else self.job.data.workers

    # ---------------------------------------------------------------- the loop

    def _loop(self) -> None:
        while self.step < self.total_steps and not self.stop_reason:
            began = time.perf_counter()
            batch = next(self.loader)
            self._set_lr()
            loss, norm, weight, data_s, save_now = self._one_step(batch, began)
            self.step += 1
            self.epoch, self.position = batch.resume
            self._guard(batch, loss, norm)
            self.units_seen += weight
            self._records.append(
                StepRecord(
                    step=self.step, epoch=self.step / self.per_epoch, samples_seen=self._samples_seen(), loss=loss,
                    norm=norm, lr=self.strategy.optimizer.param_groups[0]["lr"], weight=weight,
                    seconds=time.perf_counter() - began, data_s=data_s,
                )
            )  # fmt: skip
            self._report()
            last = self.step >= self.total_steps or bool(self.stop_reason)
            if self._due(self.job.validation.every) or (self.step >= self.total_steps):
                self._validate()
            if save_now or last or self._due(self.job.checkpoint.every):
                self._save()

    def _one_step(self, batch: Step, began: float) -> tuple[float, float, float, float, bool]:
        """One optimizer step over one global batch. Returns the global loss and norm, the global weight, the time
        spent waiting for data, and whether a save is due by the clock."""
        strategy, task, devices = self.strategy, self.task, self.plan.devices
        own: list[float] | None = None
        total = float(batch.count)
        if task.has_weight:
            batch = batch.materialise()
            own = [0.0 if m.filler else task.weight(m.batch) for m in batch.micro]
            [total] = strategy.collectives.agree([sum(own)])
        micros = iter(batch.micro)
        micro = next(micros)
        data_s = time.perf_counter() - began
        seed_everything(self.job.seed, self.step + 1, self.link.rank)
        scale = devices / total if total > 0 else 0.0
        loss_sum: torch.Tensor | float = 0.0
        for slot in range(batch.slots):
            weight = own[slot] if own is not None else (0.0 if micro.filler else float(len(micro.indices)))
            on_device = self._to_device(micro.batch)
            with strategy.micro(last=slot == batch.slots - 1):
                loss = task.loss(strategy.model, on_device)
                factor = weight * scale
                strategy.backward(loss if factor == 1.0 else loss * factor)
            if weight:
                loss_sum = loss_sum + loss.detach() * weight
            if slot < batch.slots - 1:
                began = time.perf_counter()
                micro = next(micros)
                data_s += time.perf_counter() - began
        local = float(loss_sum)
        loss_all, stop, save_now = self._agree(local)
        self._local_bad = not math.isfinite(local)
        mean = loss_all / total if total > 0 else 0.0
        norm = strategy.step(self.job.clip, healthy=math.isfinite(mean) and total > 0)
        if stop:
            self.stop_reason = self.stop_reason or "asked to stop"
        return mean, norm, total, data_s, save_now

    def _agree(self, loss_sum: float) -> tuple[float, bool, bool]:
        """The one small all-reduce of a step: the summed loss, whether any rank was told to stop, and whether rank
        0's clock calls for a save."""
        told = self._told_to_stop()
        every = self.job.checkpoint.every
        clock = every is not None and every.unit == "minutes" and self.link.rank == 0
        timed = clock and self._minutes_since_save() >= every.amount  # type: ignore[union-attr]
        loss, stop, save = self.strategy.collectives.agree([loss_sum, float(told), float(timed)])
        return loss, stop > 0, save > 0

    def _told_to_stop(self) -> bool:
        while (message := self.link.poll()) is not None:
            if isinstance(message, Stop):
                self.stop_reason = message.reason
        return bool(self.stop_reason)

    def _set_lr(self) -> None:
        factor = schedule_factor(self.job.schedule, self.step, self.total_steps)
        for group, base in zip(self.strategy.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = base * factor

    def _guard(self, batch: Step, loss: float, norm: float) -> None:
        verdict = health.judge(
            step=self.step, loss=loss, norm=norm, rules=self.rules, skipped_in_a_row=self.skipped,
            precision=self.plan.precision,
        )  # fmt: skip
        if verdict.action == "ok":
            self.skipped = 0
            self.losses.append(loss)
            return
        if verdict.action == "skip":
            self.skipped += 1
            if self.link.rank == 0:
                self.link.send(
                    Note(text=f"{verdict.reason}: the step was skipped, the weights are as before", warning=True)
                )
            return
        raise self._health_error(batch, verdict.reason)

    def _health_error(self, batch: Step, reason: str) -> HealthError:
        """Names the samples: those of this rank if its own loss is bad, else those of the whole global batch."""
        indices = [int(i) for i in batch.indices]
        facts = smoke.batch_facts([self.train_data[i] for i in indices[:256]])
        cause = health.likely_cause(
            facts=facts, lr=self.strategy.optimizer.param_groups[0]["lr"], precision=self.plan.precision,
            losses=list(self.losses),
        )  # fmt: skip
        shown = ", ".join(map(str, indices[:8])) + (f" and {len(indices) - 8} more" if len(indices) > 8 else "")
        return HealthError(
            f"{reason}; samples {shown}", samples=tuple(indices), step=self.step, hint=f"likely cause: {cause}"
        )

    # ---------------------------------------------------------------- at intervals

    def _due(self, every: cadence.Interval | None) -> bool:
        return every is not None and every.unit != "minutes" and cadence.due(
            every, step=self.step, per_epoch=self.per_epoch, minutes_since_last=0.0
        )  # fmt: skip

    def _validate(self) -> None:
        if self.valid_data is None:
            return
        began = time.perf_counter()
        model = self.strategy.model
        sums: dict[str, float] = {}
        total = 0.0
        model.eval()
        with torch.no_grad():
            for micro in eval_batches(
                self.valid_data, self.task.collate, self.plan, self.link.rank, limit=self.job.validation.batches
            ):
                batch = self._to_device(micro.batch)
                weight = 0.0 if micro.filler else float(self.task.weight(micro.batch))
                with self.strategy.micro(last=False):
                    values = {"loss": self.task.loss(model, batch), **self.task.metrics(model, batch)}
                total += weight
                for name, value in values.items():
                    sums[name] = sums.get(name, 0.0) + (float(value) * weight if weight else 0.0)
        model.train()
        names = sorted(sums)
        *all_sums, total = self.strategy.collectives.agree([*(sums[n] for n in names), total])
        if self.link.rank == 0 and total > 0:
            metrics = {n: s / total for n, s in zip(names, all_sums, strict=True)}
            self._report(force=True)
            self.link.send(Validated(step=self.step, metrics=metrics, seconds=time.perf_counter() - began))

    def _save(self) -> None:
        began = time.perf_counter()
        self.saver.snapshot(self.step, self.strategy.intervals("save"))
        self._saved_s = time.monotonic()
        self._blocked_s = time.perf_counter() - began

    def _part_written(self, part: Part) -> None:
        """Called by the saver's thread once this rank's part is in the store."""
        self.link.send(Saved(step=part.step, part=part, meta=self._meta(), blocked_s=self._blocked_s))

    def _meta(self) -> dict[str, object]:
        return {
            "step": self.step, "epoch": self.epoch, "position": self.position, "losses": list(self.losses),
            "skipped": self.skipped, "units_seen": self.units_seen,
        }  # fmt: skip

    # ---------------------------------------------------------------- small things

    def _minutes_since_save(self) -> float:
        return (time.monotonic() - self._saved_s) / 60

    def _samples_seen(self) -> int:
        return self.epoch * self.order.length + self.position

    def _report(self, *, force: bool = False) -> None:
        now = time.monotonic()
        self.link.beat(self.step, "step")
        if self.link.rank == 0 and self._records and (force or now - self._reported_s >= REPORT_S):
            self.link.send(
                Steps(
                    records=tuple(self._records), memory_bytes=self.memory.now(), memory_limit_bytes=self.memory.limit
                )
            )
            self._records.clear()
            self._reported_s = now

    def _to_device(self, batch: Any) -> Any:
        return batch if self.strategy.device.type == "cpu" else move(batch, self.strategy.device)


def move(value: Any, device: torch.device) -> Any:
    """Copies all tensors in nested dicts, lists and tuples to `device`, without waiting where memory is pinned."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {k: move(v, device) for k, v in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(move(v, device) for v in value))
    if isinstance(value, list | tuple):
        return type(value)(move(v, device) for v in value)
    return value.to(device, non_blocking=True) if hasattr(value, "to") else value
