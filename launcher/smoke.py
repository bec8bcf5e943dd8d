"""Ten samples first: before the loop, ten samples go through the real model on the real device, and are checked.

Nothing of it stays: gradients are dropped, buffers put back, random state is set anew by the next step.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from rung.launcher.data.loader import Step
from rung.launcher.task import TaskAdapter
from rung.launcher.watch.health import BatchFacts
from rung.strategies.base import Strategy
from rung.strategies.errors import DataError, HealthError
from rung.strategies.plan import Plan, cut

TEN = 10
#: How long the search for the longest sample may take, in seconds.
SEARCH_S = 1.0


def tensors(value: object, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors in nested dicts, lists, tuples and dataclasses, with a path such as `['image']` or `[0]`."""
    if isinstance(value, torch.Tensor):
        yield path or "sample", value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors(item, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from tensors(item, f"{path}[{i}]")
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from tensors(getattr(value, name), f"{path}.{name}")


def batch_facts(batch: object) -> BatchFacts:
    """Counts NaN/Inf and finds the largest magnitude over a batch's floating tensors."""
    bad, largest = 0, 0.0
    for _, t in tensors(batch):
        if t.is_floating_point() and t.numel():
            finite = torch.isfinite(t)
            bad += int(t.numel() - finite.sum())
            largest = max(largest, float(t.where(finite, 0).abs().max()))
    return BatchFacts(non_finite_values=bad, largest=largest)


def check_samples(samples: Sequence[object], indices: Sequence[int], *, own_collate: bool) -> None:
    """Compares samples with the first one: same fields, dtypes, and (unless the task collates) shapes; no NaN/Inf.

    Raises DataError naming the sample's index and field.
    """
    first = dict(tensors(samples[0]))
    for index, sample in zip(indices, samples, strict=True):
        here = dict(tensors(sample))
        if here.keys() != first.keys():
            odd = sorted(here.keys() ^ first.keys())
            raise DataError(
                f"sample {index} does not have the same fields as sample {indices[0]}: {', '.join(odd)}",
                samples=(index,), hint="make __getitem__ return the same structure for every index",
            )  # fmt: skip
        for path, t in here.items():
            _compare(index, indices[0], path, t, first[path], own_collate)


def _compare(index: int, first_index: int, path: str, t: torch.Tensor, first: torch.Tensor, own_collate: bool) -> None:
    if t.dtype != first.dtype:
        raise DataError(
            f"sample {index}, {path}: dtype {_short(t.dtype)}, but sample {first_index} has {_short(first.dtype)}",
            samples=(index,), hint="return one dtype for all samples",
        )  # fmt: skip
    if t.shape != first.shape and not own_collate:
        raise DataError(
            f"sample {index}, {path}: shape {tuple(t.shape)}, but sample {first_index} has {tuple(first.shape)}",
            samples=(index,), hint="pad or crop in __getitem__, or give the task a collate(samples) that does",
        )  # fmt: skip
    if t.is_floating_point() and not torch.isfinite(t).all():
        bad = int((~torch.isfinite(t)).sum())
        raise DataError(
            f"sample {index}, {path}: {bad} of {t.numel()} values are NaN or Inf",
            samples=(index,), hint="clean the data, or see `rung check`",
        )  # fmt: skip


class RangeCheck(TorchFunctionMode):
    """While active, looks at every embedding look-up and classification loss, and checks ids and labels.

    On a GPU these mistakes end in an assertion inside a kernel that poisons the process; here they name the sample.
    `indices` are those of the batch that is going through.
    """

    def __init__(self) -> None:
        super().__init__()
        self.indices: Sequence[int] = ()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.embedding and len(args) >= 2:
            self._check(args[0], args[1].shape[0], "token id", "rows in the embedding")
        elif func in (F.cross_entropy, F.nll_loss) and len(args) >= 2 and not args[1].is_floating_point():
            classes = args[0].shape[1] if args[0].dim() > 1 else args[0].shape[0]
            self._check(args[1], classes, "label", "classes in the model's output", kwargs.get("ignore_index", -100))
        return func(*args, **kwargs)

    def _check(self, ids: torch.Tensor, size: int, what: str, of: str, ignored: int | None = None) -> None:
        wrong = (ids < 0) | (ids >= size)
        if ignored is not None:
            wrong &= ids != ignored
        if size == 0 or not bool(wrong.any()):  # size 0: a partitioned weight whose real size is not known here
            return
        position = int(wrong.flatten().nonzero()[0])
        value = int(ids.flatten()[position])
        sample = self._sample(position, ids.numel())
        raise DataError(
            f"sample {'?' if sample is None else sample}: {what} {value} is outside 0..{size - 1} ({size} {of})",
            samples=() if sample is None else (sample,),
            hint=f"mend the {what}s in the data, or make the model large enough",
        )

    def _sample(self, position: int, total: int) -> int | None:
        """Ids are laid out sample by sample, so the position in the flat tensor tells the sample."""
        count = len(self.indices)
        return int(self.indices[position * count // total]) if count and total % count == 0 else None


def own_samples(batch: Step, plan: Plan, rank: int) -> list[int]:
    """Dataset indices of what one rank takes of a global batch."""
    return [int(i) for a, b in cut(batch.count, plan).slices[rank] for i in batch.indices[a:b]]


def longest(dataset: Any, size: Callable[[object], int] | None) -> int | None:
    """The index of the longest sample among those that can be looked at in a second, or None without sizes."""
    if size is None:
        return None
    until, best, best_size = time.monotonic() + SEARCH_S, None, -1
    count = len(dataset)
    stride = max(1, count // 10_000)
    for index in range(0, count, stride):
        if (s := int(size(dataset[index]))) > best_size:
            best, best_size = index, s
        if time.monotonic() > until:
            break
    return best


def try_ten(
    task: TaskAdapter, strategy: Strategy, dataset: Any, indices: Sequence[int], to_device: Callable[[Any], Any]
) -> None:
    """Takes the samples of `indices` (ten, or what there is) through fetch, checks, forward and backward.

    Raises DataError or HealthError naming the sample's index, or TaskError with the user's traceback. All ranks call
    it with the same indices. The longest sample, if the task can tell sizes, fills one micro-batch of its own.
    """
    samples = [task.fetch(dataset, i) for i in indices]
    check_samples(samples, indices, own_collate=task.has_collate)
    buffers = {name: b.clone() for name, b in strategy.model.named_buffers()}
    micro = min(strategy.plan.micro_batch, len(indices))
    groups = [(indices[i : i + micro], samples[i : i + micro]) for i in range(0, len(indices), micro)]
    tail = longest(dataset, task.size if task.has_size else None)
    if tail is not None:
        full = strategy.plan.micro_batch
        groups.append(([tail] * full, [task.fetch(dataset, tail)] * full))
    with RangeCheck() as ranges:
        for n, (group, group_samples) in enumerate(groups):
            ranges.indices = group
            batch = to_device(task.collate(group_samples))
            with strategy.micro(last=n == len(groups) - 1):
                loss = task.loss(strategy.model, batch)
                check_loss(loss, group)
                strategy.backward(loss)
    strategy.step(None, healthy=False)
    with torch.no_grad():
        for name, b in strategy.model.named_buffers():
            if name in buffers:
                b.copy_(buffers[name])


def check_loss(loss: object, indices: Sequence[int]) -> None:
    """A loss is a finite floating scalar tensor that depends on the weights."""
    if not isinstance(loss, torch.Tensor):
        raise HealthError(f"loss() returned {type(loss).__name__}, not a tensor", hint="return a scalar torch.Tensor")
    if loss.numel() != 1 or not loss.is_floating_point():
        raise HealthError(
            f"loss() returned a {_short(loss.dtype)} tensor of shape {tuple(loss.shape)}, not one floating number",
            hint="return the mean over the batch, as in F.cross_entropy(...)",
        )
    if not loss.requires_grad:
        raise HealthError(
            "the loss does not depend on any weight that can be trained",
            hint="do not detach it or compute it under torch.no_grad(), and leave some weights unfrozen",
        )
    if not torch.isfinite(loss):
        named = ", ".join(map(str, dict.fromkeys(indices)))
        raise HealthError(
            f"the loss of the first samples is {loss.item()} (samples {named})", samples=tuple(indices),
            hint="check their values with `rung check`; very large inputs need normalising",
        )  # fmt: skip


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
