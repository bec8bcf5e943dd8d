"""The user's Task behind one door: found, built, checked, and each of its optional methods given a default."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from rung.launcher.job_types import shown
from rung.launcher.job_values import Job
from rung.launcher.nearest import did_you_mean
from rung.launcher.optimizers import make_optimizer
from rung.launcher.user_code import reraise, user_code
from rung.launcher.user_import import import_object
from rung.strategies.errors import JobError, TaskError

if TYPE_CHECKING:
    import torch

__all__ = ["MapDataset", "TaskAdapter", "load_task", "make_optimizer", "user_code"]

_REQUIRED = ("model", "dataset", "loss")


class MapDataset(Protocol):
    """What `dataset` gives: a length, and a sample for each index."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


def load_task(job: Job) -> "TaskAdapter":
    """Imports and builds the job's task.

    Raises JobError where the job names something that is not there or takes other arguments, TaskError with the
    user's traceback for whatever their code raises.
    """
    key = f"{job.source.name}: task"
    kind = import_object(job.task, job.folder, key)
    if not isinstance(kind, type):
        raise JobError(
            f"{key}: {job.task} is a {type(kind).__name__}, not a class",
            hint="name the class itself; rung calls it with task_args",
        )
    missing = [name for name in _REQUIRED if not callable(getattr(kind, name, None))]
    if missing:
        methods = [name for name in dir(kind) if not name.startswith("_")]
        near = "; ".join(name + did_you_mean(name, methods) for name in missing)
        raise JobError(f"{key}: {job.task} lacks {near}", hint="a task has the methods model, dataset(split) and loss")
    _check_arguments(kind, job.task_args, f"{job.source.name}: task_args")
    with user_code(f"{kind.__name__}.__init__"):
        task = kind(**job.task_args)
    return TaskAdapter(task)


def _check_arguments(kind: type, given: Mapping[str, Any], key: str) -> None:
    """Says which argument is wrong, before the call would in Python's words."""
    try:
        signature = inspect.signature(kind)
    except (TypeError, ValueError):  # no signature to be had: the call itself will tell
        return
    parameters = [
        p
        for p in signature.parameters.values()
        if p.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    ]
    names = [p.name for p in parameters if p.kind is not inspect.Parameter.POSITIONAL_ONLY]
    lines = []
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values()):
        lines = [
            f"{key}.{name}: not an argument of {kind.__name__}{did_you_mean(name, names)}"
            for name in given
            if name not in names
        ]
    lines += [
        f"{key}.{p.name}: missing; {kind.__name__} needs it"
        for p in parameters
        if p.default is inspect.Parameter.empty and p.name not in given
    ]
    if lines:
        raise JobError("\n".join(lines), hint=f"its signature is {kind.__name__}{signature}")


class TaskAdapter:
    """The user's task as the rest of rung sees it: the methods of the task contract, the optional ones with defaults.

    `has_weight`, `has_label`, `has_metrics`, `has_collate`, `has_parameters` and `has_size` tell which optional
    methods the user wrote; `takes_class_weights`, whether `loss` has an argument `class_weights`. Whatever the
    user's code raises comes out as TaskError (see `user_code`). `task` is the user's object.
    """

    def __init__(self, task: Any) -> None:
        import torch
        from torch.utils.data import default_collate

        self.task = task
        self.class_weights: torch.Tensor | None = None
        self._tensor = torch.Tensor
        self._loss: Callable[..., Any] = task.loss
        self._collate: Callable[[Any], Any] = getattr(task, "collate", None) or default_collate
        for name in ("weight", "label", "metrics", "collate", "parameters", "size"):
            given = getattr(task, name, None)
            if given is not None and not callable(given):
                raise JobError(f"{type(task).__name__}.{name} is {shown(given)}, but rung calls {name}() as a method")
        self.has_weight = hasattr(task, "weight")
        self.has_label = hasattr(task, "label")
        self.has_metrics = hasattr(task, "metrics")
        self.has_collate = hasattr(task, "collate")
        self.has_parameters = hasattr(task, "parameters")
        self.has_size = hasattr(task, "size")
        self.takes_class_weights = "class_weights" in _argument_names(task.loss)

    def model(self) -> "torch.nn.Module":
        """A new model, on whatever device and dtype the caller has set as the default."""
        import torch

        with user_code("model"):
            made = self.task.model()
        if not isinstance(made, torch.nn.Module):
            raise TaskError(f"model() returned {shown(made)}, not a torch.nn.Module")
        return made

    def dataset(self, split: str) -> MapDataset | None:
        """The samples of "train", "valid" or another split. None where there are none such: the user's method then
        returned None, or looked the split up and raised KeyError for it. "train" is never None.
        """
        with user_code(f"dataset({split!r})"):
            try:
                made = self.task.dataset(split)
            except KeyError as error:
                if split == "train" or error.args != (split,):
                    raise
                return None
        if made is None and split != "train":
            return None
        if not hasattr(made, "__len__") or not hasattr(made, "__getitem__"):
            raise TaskError(
                f"dataset({split!r}) returned {shown(made)}, which lacks a length or cannot be indexed",
                hint="return a Dataset with __len__ and __getitem__; a stream has no positions to resume from",
            )
        with user_code(f"len(dataset({split!r}))"):
            count = len(made)
        if count == 0:
            raise TaskError(f"dataset({split!r}) is empty", hint="check the path and filter that the task reads from")
        return made  # type: ignore[no-any-return]

    def fetch(self, dataset: MapDataset, index: int) -> Any:
        """Sample `index`."""
        with user_code(f"sample {index}"):
            return dataset[index]

    def loss(self, model: Any, batch: Any) -> "torch.Tensor":
        """The mean loss over the batch's units: a scalar tensor."""
        try:
            if self.class_weights is not None:
                value = self._loss(model, batch, class_weights=self.class_weights)
            else:
                value = self._loss(model, batch)
        except (Exception, SystemExit) as error:  # not `with user_code`: this is the hot path
            reraise(error, "loss")
        if not isinstance(value, self._tensor):
            raise TaskError(f"loss() returned {shown(value)}, not a tensor")
        if value.dim():
            raise TaskError(
                f"loss() returned a tensor of shape {tuple(value.shape)}, not a scalar",
                hint="return its mean over the batch",
            )
        return value

    def use_class_weights(self, weights: "torch.Tensor") -> None:
        """From now on `loss` is given these, of shape (classes,). Raises TaskError if it has no place for them."""
        if not self.takes_class_weights:
            raise TaskError(
                "data.imbalance: weights needs a loss that takes them, and loss(model, batch) does not",
                hint="write def loss(self, model, batch, class_weights=None), or use data.imbalance: resample",
            )
        self.class_weights = weights

    def weight(self, batch: Any) -> float:
        """How many units the batch's mean loss is over; by default its samples. Finite and not negative."""
        if not self.has_weight:
            return float(count_samples(batch, self._tensor))
        with user_code("weight"):
            weight = float(self.task.weight(batch))
        if not (math.isfinite(weight) and weight >= 0):
            raise TaskError(f"weight() returned {weight}; it must be finite and not negative")
        return weight

    def collate(self, samples: Sequence[Any]) -> Any:
        """A batch from samples; by default torch's default_collate."""
        with user_code("collate"):
            return self._collate(samples)

    def parameters(self, model: Any) -> list[dict[str, Any]]:
        """Parameter groups for the optimizer, frozen parameters left out; by default one group of all."""
        if self.has_parameters:
            with user_code("parameters"):
                given = list(self.task.parameters(model))
        else:
            given = list(model.parameters())
        groups = given if given and all(isinstance(group, dict) for group in given) else [{"params": given}]
        cleaned = []
        for group in groups:
            params = group.get("params", ())
            params = [params] if isinstance(params, self._tensor) else list(params)
            # (name, parameter) pairs are what named_parameters gives; torch takes those too, here plain ones will do.
            params = [p[1] if isinstance(p, tuple) and len(p) == 2 else p for p in params]
            if odd := next((p for p in params if not isinstance(p, self._tensor)), None):
                raise TaskError(f"parameters() gave {shown(odd)} where a parameter or a group should be")
            cleaned.append({**group, "params": [p for p in params if p.requires_grad]})
        cleaned = [group for group in cleaned if group["params"]]
        if not cleaned:
            raise TaskError("the model has no parameter to train", hint="does the task freeze all of them?")
        return cleaned

    def label(self, sample: Any) -> int:
        """The sample's class."""
        with user_code("label"):
            return int(self.task.label(sample))

    def metrics(self, model: Any, batch: Any) -> dict[str, "torch.Tensor"]:
        """Further means over the batch's units, for validation; by default none."""
        if not self.has_metrics:
            return {}
        with user_code("metrics"):
            values = self.task.metrics(model, batch)
        if not isinstance(values, Mapping):
            raise TaskError(f"metrics() returned {shown(values)}, not a mapping of names to values")
        return {str(name): value for name, value in values.items()}

    def size(self, sample: Any) -> int:
        """How long a sample is, in the task's own measure; 0 where it does not tell."""
        if not self.has_size:
            return 0
        with user_code("size"):
            return int(self.task.size(sample))


def count_samples(batch: Any, tensor: type) -> int:
    """The first dimension of the first tensor in the batch; without one, its length.

    Looks into mappings, lists, tuples and dataclasses, in order. Raises TaskError where neither is there.
    """
    found = _first_length(batch, tensor)
    if found is not None:
        return found
    if hasattr(batch, "__len__"):
        return len(batch)
    raise TaskError(
        f"no tensor in the batch {shown(batch)} tells how many samples it has", hint="give the task a weight(batch)"
    )


def _first_length(value: Any, tensor: type) -> int | None:
    if isinstance(value, tensor):
        return int(value.shape[0]) if value.dim() else None  # type: ignore[attr-defined]
    inner: Sequence[Any] = ()
    if isinstance(value, Mapping):
        inner = list(value.values())
    elif isinstance(value, list | tuple):
        inner = value
    elif hasattr(value, "__dataclass_fields__"):
        inner = [getattr(value, name) for name in value.__dataclass_fields__]
    return next((found for part in inner if (found := _first_length(part, tensor)) is not None), None)


def _argument_names(method: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(method).parameters)
    except (TypeError, ValueError):  # a builtin without a signature
        return []
