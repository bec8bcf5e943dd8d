"""What each worker runs: build, restore, try ten samples, step, validate, save, close.

Read `Trainer.run` from top to bottom. Every rank runs it in step with the others; what one rank alone knows is agreed
on first, in `launcher/exchange.py`. Out of memory on a single device is answered in `launcher/shrink.py`, any other
failure by `launcher/rescue.py`.
"""

import math
import os
import signal
import time
from functools import partial
from typing import Any

import torch

from rung.cluster.link import Link, Stop, beyond_memory_cap
from rung.launcher import cadence, shrink, smoke
from rung.launcher.balancing import Balancer
from rung.launcher.data.loader import Loader, Step, auto_workers
from rung.launcher.data.prepare import prepare_run, refuse_other_filter
from rung.launcher.data.rng import seed_everything
from rung.launcher.exchange import Exchange
from rung.launcher.folder import scratch_folder
from rung.launcher.job import Job
from rung.launcher.lossguard import LossGuard
from rung.launcher.messages import Assignment, CutBack, Finished, Note, Ready, StepRecord, Validated
from rung.launcher.rescue import Rescuer
from rung.launcher.saving import Progress, Saving, check_learning_rate
from rung.launcher.schedule import schedule_factor
from rung.launcher.task import load_task, make_optimizer
from rung.launcher.validate import validate
from rung.launcher.watch import health
from rung.launcher.watch.reporter import Reporter
from rung.strategies import zero_ops
from rung.strategies.errors import DataError, HealthError
from rung.strategies.make import make_strategy
from rung.strategies.measure import Memory

#: How long the workers of a group may take to come together, in seconds: the slowest may be reading its data.
GROUP_S = 600.0


def main(link: Link, assignment: Assignment) -> None:
    """Entry point of a worker process."""
    trainer = Trainer(link, assignment)
    signal.signal(signal.SIGTERM, trainer.on_sigterm)
    trainer.run()


class Trainer:
    """One worker's training. What survives in checkpoints is the strategy's state and `progress`."""

    def __init__(self, link: Link, assignment: Assignment) -> None:
        self.link = link
        self.plan = assignment.plan
        self.assignment = assignment
        self.job = Job.from_dict(assignment.job, source=assignment.source)
        self.rules = health.Rules(
            first_steps=self.job.guard.first_steps,
            non_finite=self.job.guard.non_finite,
            negative_loss=self.job.guard.negative_loss,
        )
        self.progress = Progress()
        self.wish_to_stop = ""  # this rank's own; `stop_reason` is what all have agreed on
        self.stop_reason = ""
        self.save_now = False  # as all have agreed
        self.going_back = False
        self.loader: Loader | None = None
        self.most_loader_workers: int | None = None

    def run(self) -> None:
        """The whole of it. Data is prepared before the process group forms, since others would wait for it."""
        with beyond_memory_cap():  # what the task's module imports and its data are not the device's memory
            self.task = load_task(self.job)
            self.train_data: Any = self.task.dataset("train")
            self.valid_data = self.task.dataset("valid")
        self._count_steps()
        self.balancer = Balancer(self)
        self._build()
        self._restore()
        self.rescuer = Rescuer(
            self.link,
            lambda: self.progress.step,
            lambda whole, elsewhere: self.saving.rescue(whole, elsewhere, self._lr_factor()),
        )
        try:
            if not self.done:
                shrink.until_it_fits(self, self._try_ten)
                self.open_loader()
                self._announce()
                self._loop()
            self.saving.wait()
        except BaseException as error:
            self.reporter.flush()
            self.rescuer.hold(error)
            raise
        finally:
            self.rescuer.retire()
            self._close()
        reason = "rollback" if self.going_back else "stopped" if self.stop_reason else "done"
        self.link.send(Finished(step=self.progress.step, reason=reason, peak_bytes=self.memory.peak()))

    @property
    def done(self) -> bool:
        """All steps are taken."""
        return self.progress.step >= self.total_steps

    def on_sigterm(self, _number: int, _frame: object) -> None:
        """Preemption of one worker stops all, after the step and a save."""
        self.wish_to_stop = "SIGTERM"

    def _count_steps(self) -> None:
        if self.train_data is None:
            raise DataError("dataset('train') returned None", hint="return a torch Dataset")
        resumes = self.assignment.resume is not None
        self.prepared = prepare_run(self.job, self.task, self.train_data, self.link, resumes=resumes)
        self.order = self.prepared.order
        self.per_epoch = cadence.steps_per_epoch(self.order.length, self.job.batch)
        self.total_steps = cadence.total_steps(steps=self.job.steps, epochs=self.job.epochs, per_epoch=self.per_epoch)

    def _build(self) -> None:
        plan, rank = self.plan, self.link.rank
        group = self.link.store(GROUP_S) if plan.devices > 1 else None
        deadline_s = max(GROUP_S, self.job.hang_s + 60.0)  # the heartbeat is to find who hangs first
        with beyond_memory_cap():  # a compiler that inherits the cap of a device does not get far
            zero_ops.build(plan, deadline_s=deadline_s)
        scratch = partial(scratch_folder, self.job)
        self.strategy = make_strategy(plan, rank, group, scratch=scratch, deadline_s=deadline_s)
        self.exchange = Exchange(self)
        self.balancer.meet()
        self.memory = Memory(self.strategy.device, plan.memory_cap_bytes)
        self.reporter = Reporter(self.link, self.memory)
        seed_everything(self.job.seed, 0, 0)  # the same weights on every rank and under every strategy
        self.strategy.build(
            self.task.model,
            lambda model: make_optimizer(self.job.optimizer, self.task.parameters(model), self.job.folder),
        )
        if self.prepared.class_weights is not None:
            self.task.use_class_weights(self.prepared.class_weights.to(self.strategy.device))
        self.base_lrs = [group["lr"] for group in self.strategy.optimizer.param_groups]
        extra: dict[str, Any] = {
            "total_steps": self.total_steps,
            "order": self.order.fingerprint,
            "filter": self.prepared.filter,
        }
        if (hf_config := getattr(self.task.task, "hf_config", None)) is not None:
            extra["hf_config"] = hf_config() if callable(hf_config) else hf_config
        self.saving = Saving(self.link, self.job, self.assignment, self.strategy, self.progress, extra)
        self.lossguard = LossGuard(
            self.link, self.job, self.progress, length=self.order.length, passed_over=self.assignment.passed_over
        )

    def _restore(self) -> None:
        if self.assignment.resume is None:
            self.saving.start_from_given_weights()
            return
        manifest = self.saving.resume(self.assignment.resume)
        refuse_other_filter(str(manifest.trainer.get("filter", "")), self.prepared.filter)
        check_learning_rate(manifest, self.total_steps, self._lr_factor())

    def _try_ten(self) -> None:
        self.reporter.enter(self.progress.step, "first samples")
        first = [int(i) for i in self.order.indices(self.progress.epoch, 0, min(smoke.TEN, self.order.length))]
        smoke.try_ten(self.task, self.strategy, self.train_data, first, self.to_device)

    def open_loader(self) -> None:
        """A loader from the next sample on. Whatever was fetched ahead is fetched again."""
        if self.loader is not None:
            self.loader.close()
        wanted = self.job.data.workers
        workers = self._auto_workers() if wanted == "auto" else wanted
        if self.most_loader_workers is not None:
            workers = min(workers, self.most_loader_workers)
        self.loader = Loader(
            self.train_data, self.task.collate, self.order, self.plan, self.link.rank,
            epoch=self.progress.epoch, position=self.progress.position, workers=workers, told=self._without_workers,
        )  # fmt: skip

    def _without_workers(self, why: str) -> None:
        self.most_loader_workers = 0
        self.link.send(Note(text=why, warning=True))

    def _auto_workers(self) -> int:
        """As many as the cores that training leaves free can feed, judged by one micro-batch fetched here."""
        count = min(self.plan.micro_batch, self.order.length)
        indices = [int(i) for i in self.order.indices(self.progress.epoch, 0, count)]
        began = time.perf_counter()
        self.task.collate([self.task.fetch(self.train_data, i) for i in indices])
        fetch_s = time.perf_counter() - began
        # Those of the process it was forked from: a worker may be bound to some, its peers then to the others.
        cpus = len(os.sched_getaffinity(os.getppid())) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        # A device that is the CPU itself leaves only the cores that its threads do not use.
        spared = cpus - self.plan.threads * self.plan.devices if self.plan.device == "cpu" else cpus
        workers, _why = auto_workers(max(1, spared), self.plan.devices, fetch_s, None)
        return workers

    def _announce(self) -> None:
        assert self.loader is not None
        parameters = list(self.strategy.model.parameters())
        self.link.send(
            Ready(
                step=self.progress.step,
                total_steps=self.total_steps,
                steps_per_epoch=self.per_epoch,
                samples=self.order.length,
                parameters=sum(getattr(p, "ds_numel", p.numel()) for p in parameters),
                trainable=sum(getattr(p, "ds_numel", p.numel()) for p in parameters if p.requires_grad),
                loader_workers=len(self.loader.worker_pids),
            )
        )

    # ---------------------------------------------------------------- the loop

    def _loop(self) -> None:
        while not self.done and not self.stop_reason:
            shrink.until_it_fits(self, self._one_step)
            if self.going_back:
                return
            if self.done or self._due(self.job.validation.every):
                self._validate()
            if self.done or self.stop_reason or self.save_now or self._due(self.job.checkpoint.every):
                self.reporter.enter(self.progress.step, "saving")
                self.saving.save(self._lr_factor())

    def _one_step(self) -> None:
        """One optimizer step over one global batch: gradients, agreement, guard, update."""
        assert self.loader is not None
        if self.most_loader_workers is not None and len(self.loader.worker_pids) > self.most_loader_workers:
            self.open_loader()
        began = time.perf_counter()
        batch = next(self.loader)
        if self.lossguard.passes_over(batch):
            self._pass_over(batch)
            return
        lr = self._set_lr()
        loss_sum, weight, data_s = self._gradients(batch, began)
        before_s = time.perf_counter()
        loss = self.exchange.end(loss_sum) / weight if weight else 0.0
        exchange_s = time.perf_counter() - before_s
        if math.isfinite(loss) and self.lossguard.goes_back(batch, loss):
            self.going_back = True
            return
        with self.rescuer.changing():
            with self.balancer.timing(update=True):
                norm = self.strategy.step(self.job.clip, healthy=math.isfinite(loss) and weight > 0)
            verdict = health.judge(
                step=self.progress.step + 1, loss=loss, norm=norm, rules=self.rules,
                skipped_in_a_row=self.progress.skipped, precision=self.plan.precision,
            )  # fmt: skip
            if verdict.action != "stop":
                self._advance(batch, loss, weight, verdict)
        if verdict.action == "stop":
            raise self._health_error(batch, verdict.reason, loss_sum)
        p = self.progress
        self.reporter.add(
            StepRecord(
                step=p.step, epoch=p.step / self.per_epoch, samples_seen=p.epoch * self.order.length + p.position,
                loss=loss, norm=norm, lr=lr, weight=weight, seconds=time.perf_counter() - began, data_s=data_s,
                exchange_s=exchange_s,
            )
        )  # fmt: skip
        self.balancer.after_step(full=batch.count == self.plan.global_batch)

    def _gradients(self, batch: Step, began: float) -> tuple[float, float, float]:
        """Accumulates the gradient of the weighted mean loss over the whole global batch.

        Returns this rank's weighted sum of losses, the weight of the whole global batch, and the seconds that were
        spent waiting for data.
        """
        strategy, task, devices = self.strategy, self.task, self.plan.devices
        own: list[float] | None = None
        total, whole = float(batch.count), None
        if task.has_weight:
            batch = batch.materialise()
            own = [0.0 if m.filler else task.weight(m.batch) for m in batch.micro]
            whole = strategy.collectives.begin([sum(own)])  # on its way during the first forward pass
        micros = iter(batch.micro)
        micro = next(micros)
        data_s = time.perf_counter() - began
        seed_everything(self.job.seed, self.progress.step + 1, self.link.rank)
        loss_sum: torch.Tensor | float = 0.0
        for slot in range(batch.slots):
            weight = own[slot] if own is not None else (0.0 if micro.filler else float(len(micro.indices)))
            on_device = self.to_device(micro.batch)
            with strategy.micro(last=slot == batch.slots - 1, empty=micro.filler):
                with self.balancer.timing():
                    loss = task.loss(strategy.model, on_device)
                if whole is not None:
                    [total], whole = whole(), None
                factor = weight * devices / total if total > 0 else 0.0
                if weight:
                    loss_sum = loss_sum + loss.detach() * weight
                if self.exchange.early and slot == batch.slots - 1:
                    self.exchange.begin(float(loss_sum))
                self.balancer.follow(loss)
                strategy.backward(loss if factor == 1.0 else loss * factor)
            if slot < batch.slots - 1:
                before = time.perf_counter()
                micro = next(micros)
                data_s += time.perf_counter() - before
        return float(loss_sum), total, data_s

    def told_to_stop(self) -> bool:
        """Whether this rank was asked to stop. Reads what the launcher has sent."""
        while (message := self.link.poll()) is not None:
            if isinstance(message, Stop):
                self.wish_to_stop = message.reason or "asked to stop"
            elif isinstance(message, CutBack):
                self.most_loader_workers = message.loader_workers
        return bool(self.wish_to_stop)

    def _lr_factor(self) -> float:
        return schedule_factor(self.job.schedule, self.progress.step, self.total_steps)

    def _set_lr(self) -> float:
        factor = self._lr_factor()
        groups = self.strategy.optimizer.param_groups
        for group, base in zip(groups, self.base_lrs, strict=True):
            group["lr"] = base * factor
        return float(self.base_lrs[0] * factor)

    def _advance(self, batch: Step, loss: float, weight: float, verdict: health.Verdict) -> None:
        """The step is complete, whether it was applied or skipped."""
        p = self.progress
        p.step += 1
        p.epoch, p.position = batch.resume
        p.units_seen += weight
        if verdict.action == "ok":
            p.skipped = 0
            self.lossguard.follow(batch, loss)
            return
        p.skipped += 1
        # Many in a row are said now and then: the log is for reading.
        if self.link.rank == 0 and (p.skipped <= 3 or p.skipped % 10 == 0):
            self.link.send(Note(text=f"{verdict.reason}: skipped, the weights are as before", warning=True))

    def _pass_over(self, batch: Step) -> None:
        """A step over a batch that a rollback has put aside: it counts, and the weights stay as they are."""
        self.exchange.end(0.0)
        p = self.progress
        with self.rescuer.changing():
            p.step += 1
            p.epoch, p.position = batch.resume
            p.passed_over.append((batch.epoch, batch.position))
        self.link.beat(p.step, "training")

    def _health_error(self, batch: Step, reason: str, loss_sum: float) -> HealthError:
        """Names the samples: those of the ranks whose loss is bad, else those of the whole global batch. All ranks
        come here and say the same, since any of them may be heard first."""
        indices = [int(i) for i in batch.indices]
        devices = range(self.plan.devices)
        own = [float(rank == self.link.rank and not math.isfinite(loss_sum)) for rank in devices]
        bad = [rank for rank, told in zip(devices, self.strategy.collectives.agree(own), strict=True) if told]
        if bad and len(devices) > 1:
            indices = [i for rank in bad for i in smoke.own_samples(batch, self.plan, rank)]
            reason += f" on rank{'s' * (len(bad) > 1)} {', '.join(map(str, bad))}"
        facts = smoke.batch_facts([self.train_data[i] for i in indices])
        if facts.non_finite_values:
            indices = [i for i in indices if smoke.batch_facts(self.train_data[i]).non_finite_values]
        lr = self.base_lrs[0] * self._lr_factor()
        cause = health.likely_cause(
            facts=facts, lr=lr, precision=self.plan.precision, losses=list(self.progress.losses)
        )
        shown = ", ".join(map(str, indices[:8])) + (f" and {len(indices) - 8} more" if len(indices) > 8 else "")
        return HealthError(
            f"{reason}; samples {shown}",
            samples=tuple(indices),
            step=self.progress.step + 1,
            hint=f"likely cause: {cause}",
        )

    # ---------------------------------------------------------------- at intervals

    def _due(self, every: cadence.Interval | None) -> bool:
        if every is None or every.unit == "minutes":
            return False  # the clock is agreed on in the step's exchange
        return cadence.due(every, step=self.progress.step, per_epoch=self.per_epoch, minutes_since_last=0.0)

    def _validate(self) -> None:
        if self.valid_data is None:
            return
        began = time.perf_counter()
        self.reporter.enter(self.progress.step, "validating")
        metrics = validate(self.task, self.strategy, self.valid_data, self.job.validation.batches, self.to_device,
                           beat=self.told_to_stop)  # fmt: skip
        if metrics is not None and self.link.rank == 0:
            self.link.send(Validated(step=self.progress.step, metrics=metrics, seconds=time.perf_counter() - began))

    def to_device(self, batch: Any) -> Any:
        """The batch on this worker's device. Every micro-batch comes by here, so the heart beats with it."""
        self.reporter.beat()
        return batch if self.strategy.device.type == "cpu" else move(batch, self.strategy.device)

    def _close(self) -> None:
        if self.loader is not None:
            self.loader.close()
        self.saving.close()
        self.strategy.close()


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
