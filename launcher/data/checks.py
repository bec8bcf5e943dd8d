"""`rung check`, the part that touches the data: one worker reads the splits in parallel processes and says what it saw.

The other part, `launcher/check.py`, starts it, shows its progress and stores the result, and never loads torch.
"""

import time
from collections.abc import Callable
from typing import Any

import torch

from rung.cluster.link import Link
from rung.launcher.data.examine import Examiner
from rung.launcher.data.judge import Split, judge
from rung.launcher.data.limits import Limit, find_limits
from rung.launcher.data.messages import CheckRequest, CheckResult, Progress
from rung.launcher.data.order import Order
from rung.launcher.data.scan import Deaths, processes, scan
from rung.launcher.job import Job
from rung.launcher.task import TaskAdapter, load_task
from rung.strategies.errors import RungError

#: Without --full, so many samples of a split are looked at, and for so long, in seconds.
SAMPLE, SAMPLE_S = 100_000, 60.0
#: And for a quick look.
QUICK, QUICK_S = 2_000, 8.0


def main(link: Link, request: CheckRequest) -> None:
    """Entry point of the worker. Sends Progress, and CheckResult at the end."""
    torch.set_num_threads(1)
    job = Job.from_dict(request.job, source=request.source)
    task = load_task(job)

    def progress(split: str, done: int, total: int) -> None:
        link.beat(done, f"checking {split}")
        link.send(Progress(split=split, done=done, total=total))

    splits = check_task(task, seed=job.seed, full=request.full, quick=request.quick, progress=progress)
    link.send(CheckResult(findings=tuple(judge(splits)), splits=tuple(map(facts, splits))))


def check_task(
    task: TaskAdapter, *, seed: int, full: bool, quick: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[Split]:  # fmt: skip
    """Looks at `train`, and at `valid` where there is one."""
    most, most_s = (QUICK, QUICK_S) if quick else (SAMPLE, SAMPLE_S)
    splits: list[Split] = []
    for name in ("train", "valid"):
        dataset = task.dataset(name)
        if dataset is None:
            continue
        size = len(dataset)
        if full or size <= most:
            indices = Order(size=size, shuffle=False).indices(0, 0, size)
        else:
            indices = Order(size=size, seed=seed).indices(0, 0, most)
        split = Split(name=name, size=size, own_collate=task.has_collate)
        splits.append(split)
        examiner = Examiner(
            dataset, label=task.task.label if task.has_label else None, limits=model_limits(task, dataset)
        )
        deaths = Deaths()

        def told(done: int, name: str = name, total: int = len(indices)) -> None:
            if progress is not None:
                progress(name, done, total)

        until = None if full or size <= 1000 else time.monotonic() + most_s
        for seen in scan(examiner, indices, workers=processes(), deaths=deaths, progress=told, until=until):
            split.seen.merge(seen)
            split.hashes.add(seen.exact, seen.near, seen.indices, seen.labels)
            split.looked_at += seen.read + len(seen.unreadable)
        split.deaths, split.gave_up = deaths.samples, deaths.gave_up
        split.looked_at += len(deaths.samples)
    return splits


def model_limits(task: TaskAdapter, dataset: Any) -> dict[str, Limit]:
    """What the model can take, tried with the first sample that can be read among the first few."""
    for index in range(min(4, len(dataset))):
        try:
            sample = task.fetch(dataset, index)
        except RungError:  # told of by the pass itself, with all others like it
            continue
        limits = find_limits(task, [sample, sample])
        if limits:
            return limits
    return {}


def facts(split: Split) -> dict[str, Any]:
    """What is stored of a split, beside the findings: plain JSON values."""
    seen = split.seen
    fields = {
        path or "sample": {
            "kinds": {name: some.count for name, some in f.kinds.items()},
            "dtypes": {name: some.count for name, some in f.dtypes.items()},
            "shapes": {name: some.count for name, some in f.shapes.items()},
            "low": f.low[0] if f.low[1] >= 0 else None,
            "high": f.high[0] if f.high[1] >= 0 else None,
            "mean": f.mean if f.count else None,
            "deviation": f.deviation if f.count else None,
            "longest": f.longest[0] if f.longest[1] >= 0 else None,
        }
        for path, f in seen.fields.items()
    }
    problems = {
        name: {"count": some.count, "samples": some.indices, "first": some.text} for name, some in seen.problems.items()
    }
    return {
        "split": split.name, "samples": split.size, "looked_at": split.looked_at, "readable": seen.read,
        "fields": fields, "problems": problems, "labels": {str(k): v for k, v in sorted(seen.histogram.items())},
    }  # fmt: skip
