"""Validation: weighted means of the loss and the task's metrics over the `valid` split, the same on every rank."""

from collections.abc import Callable
from typing import Any

import torch

from rung.launcher.data.loader import eval_batches
from rung.launcher.task import TaskAdapter
from rung.strategies.base import Strategy


def validate(
    task: TaskAdapter,
    strategy: Strategy,
    dataset: Any,
    most_batches: int | None,
    to_device: Callable[[Any], Any],
    *,
    beat: Callable[[], bool],
) -> dict[str, float] | None:
    """Runs all ranks through their part of the data set, at most `most_batches` micro-batches each.

    `beat` is called between batches and says whether this rank was told to stop; if any was, all leave and None comes
    back. Weights are those of `task.weight`. The model is put into evaluation mode and back.
    """
    sums: dict[str, float] = {}
    total = 0.0
    model = strategy.model
    model.eval()
    # DeepSpeed's engine only hands it on; a loss that asks `model.training` is to see it too.
    model.training = False
    try:
        with torch.no_grad():
            for count, micro in enumerate(eval_batches(dataset, task.collate, strategy.plan, strategy.rank)):
                if most_batches is not None and count >= most_batches:
                    break
                [stop] = strategy.collectives.agree([float(beat())])
                if stop:
                    return None
                weight = 0.0 if micro.filler else float(task.weight(micro.batch))
                batch = to_device(micro.batch)
                with strategy.micro(last=False):
                    values = {"loss": task.loss(model, batch), **task.metrics(model, batch)}
                total += weight
                for name, value in values.items():
                    sums[name] = sums.get(name, 0.0) + (float(value) * weight if weight else 0.0)
    finally:
        model.train()
        model.training = True
    names = sorted(sums)
    *all_sums, total = strategy.collectives.agree([*(sums[n] for n in names), total])
    return {n: s / total for n, s in zip(names, all_sums, strict=True)} if total > 0 else None
