"""The watch over one attempt: samples go into the metrics, and what they mean is said once."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rung.cluster.group import Group
from rung.cluster.local import Workers
from rung.launcher.messages import CutBack, Ready, Saved, StepRecord
from rung.launcher.watch import bottleneck, pressure
from rung.launcher.watch.bottleneck import Setting, Split
from rung.launcher.watch.metrics import Metrics
from rung.launcher.watch.resources import Resources, Sampler, allowed_cpus
from rung.strategies.findings import Finding
from rung.strategies.plan import Plan

#: How often a row goes into the metrics, and how long a stretch is that is judged for a bottleneck, in seconds.
ROW_S, STRETCH_S = 10.0, 60.0


class Monitor:
    """Call `tick` often; it says what there is to say through `found(finding, step)`, and sends what workers must know.
    A context manager, which ends the looking.

    A bottleneck that shows in two stretches in a row is told while it trains, one that held for the whole at the end.
    """

    def __init__(
        self, workers: Group, plan: Plan, metrics: Metrics, folder: Path, found: Callable[[Finding, int], None]
    ) -> None:
        self._workers, self._metrics, self._found, self._plan = workers, metrics, found, plan
        self._sampler = Sampler(
            pids=workers.pids if isinstance(workers, Workers) else dict,  # elsewhere these numbers mean nothing
            memory=workers.memory.samples,
            folder=folder,
            gpus=plan.device == "cuda",
        ).start()
        self._pressure = pressure.Pressure(devices=plan.devices)
        self._setting = Setting(devices=plan.devices)
        self._whole, self._stretch, self._row = Split(), Split(), Split()
        self._first = True
        self._step = 0
        self._checkpoint_bytes = 0
        self._newest: Resources | None = None
        self._busy: list[float] = []
        self._row_at = time.monotonic() - ROW_S + 1.0
        self._stretch_at = time.monotonic()
        self._before = ""
        self._told: set[str] = set()

    def ready(self, ready: Ready) -> None:
        """The workers are about to take their first step."""
        plan, cpus = self._plan, int(allowed_cpus())
        taken = plan.threads * plan.devices if plan.device == "cpu" else plan.devices
        free = max(0, (cpus - taken) // plan.devices - ready.loader_workers)
        self._setting = replace(self._setting, loader_workers=ready.loader_workers, free_cores=free)
        self._pressure = replace(self._pressure, loader_workers=ready.loader_workers)
        self._step = ready.step

    def steps(self, records: tuple[StepRecord, ...]) -> None:
        """Steps were taken. The first one of an attempt is left out: it waits for loaders to start, and compiles."""
        self._step = records[-1].step
        if self._first:
            self._first, records = False, records[1:]
        self._add(lambda split: split.plus(records))

    def saved(self, saved: Saved) -> None:
        """A rank's part of a checkpoint is in the store."""
        if saved.part.rank == 0:
            self._checkpoint_bytes = saved.part.total_bytes * saved.part.world
            self._add(lambda split: replace(split, save_s=split.save_s + saved.blocked_s))

    def validated(self, seconds: float) -> None:
        """A validation took so long."""
        self._add(lambda split: replace(split, validation_s=split.validation_s + seconds))

    def tick(self) -> None:
        """Takes what was sampled, and judges it."""
        for seen in self._sampler.take():
            self._newest = seen
            self._busy += [d.busy for d in seen.devices]
            self._pressure, findings, cut = pressure.judge(
                self._pressure, seen, checkpoint_bytes=self._checkpoint_bytes
            )
            for finding in findings:
                self._found(finding, self._step)
            if cut is not None:
                self._workers.send(None, CutBack(loader_workers=cut))
                self._setting = replace(self._setting, loader_workers=cut)
        now = time.monotonic()
        if self._newest is not None and now - self._row_at >= ROW_S:
            self._write_row(now)
        if now - self._stretch_at >= STRETCH_S:
            self._judge_stretch(now)

    def __enter__(self) -> "Monitor":
        return self

    def __exit__(self, *_: object) -> None:
        self._sampler.close()

    def conclude(self) -> None:
        """The attempt is over: a last row, and what held it up."""
        if self._newest is not None and self._row.steps:
            self._write_row(time.monotonic())
        finding = bottleneck.bottleneck(self._whole, self._set())
        if finding is not None and finding.subject not in self._told:
            self._found(finding, self._step)

    def _add(self, more: Callable[[Split], Split]) -> None:
        self._whole, self._stretch, self._row = more(self._whole), more(self._stretch), more(self._row)

    def _set(self) -> Setting:
        busy = sum(self._busy) / len(self._busy) if self._busy else None
        return replace(self._setting, device_busy=busy)

    def _write_row(self, now: float) -> None:
        assert self._newest is not None
        self._metrics.resources(self._step, {**self._newest.to_row(), **self._row.shares()})
        self._row, self._row_at = Split(), now

    def _judge_stretch(self, now: float) -> None:
        finding = bottleneck.bottleneck(self._stretch, self._set())
        subject = finding.subject if finding is not None else ""
        if finding is not None and subject == self._before and subject not in self._told:
            self._told.add(subject)
            self._found(finding, self._step)
        self._before, self._stretch, self._stretch_at = subject, Split(), now
