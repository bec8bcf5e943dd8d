"""What the model can take: how many classes and ids it knows, found by one forward pass that computes nothing.

The model is built and run on torch's meta device: shapes only, no memory and no arithmetic. Which field of a sample
ends up as ids of an embedding, or as the labels of a loss, is followed through the operations that only move values.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from rung.launcher.task import TaskAdapter

_MOVES = frozenset(
    {"__getitem__", "view", "reshape", "flatten", "squeeze", "unsqueeze", "transpose", "permute", "contiguous", "clone",
     "to", "long", "int", "type", "detach", "expand", "narrow", "select", "cpu", "cuda", "t", "T", "view_as"}
)  # fmt: skip


LABEL = "<label>"


@dataclass(frozen=True, slots=True)
class Limit:
    """Values of a field lie within 0..size-1. `what` is "label" or "id"; `ignored` is a value that stands for none."""

    size: int
    what: str
    ignored: int | None = None

    @property
    def words(self) -> str:
        """`0..9 (10 classes in the model's output)`."""
        of = "classes in the model's output" if self.what == "label" else "rows in the model's embedding"
        return f"0..{self.size - 1} ({self.size} {of})"


class _Follow(TorchFunctionMode):
    """Keeps, for each tensor that holds a field's values, the field's name."""

    def __init__(self, fields: Mapping[int, str], alive: list[torch.Tensor]) -> None:
        super().__init__()
        self.names = dict(fields)
        self.alive = alive  # keeps ids from being used again
        self.limits: dict[str, Limit] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.embedding and len(args) >= 2:
            self._note(args[0], args[1].shape[0], "id", None)
        elif func in (F.cross_entropy, F.nll_loss):
            target = args[1] if len(args) > 1 else kwargs.get("target")
            given = args[0] if args else kwargs.get("input")
            if target is not None and given is not None and not target.is_floating_point():
                classes = given.shape[1] if given.dim() > 1 else given.shape[0]
                self._note(target, classes, "label", kwargs.get("ignore_index", -100))
        out = func(*args, **kwargs)
        if getattr(func, "__name__", "") in _MOVES and args and isinstance(out, torch.Tensor):
            name = self.names.get(id(args[0]))
            if name is not None:
                self.names[id(out)] = name
                self.alive.append(out)
        return out

    def _note(self, ids: Any, size: int, what: str, ignored: int | None) -> None:
        name = self.names.get(id(ids))
        if what == "label":
            self._least(LABEL, size, what, ignored)
        if name is not None:
            self._least(name, size, what, ignored)

    def _least(self, name: str, size: int, what: str, ignored: int | None) -> None:
        known = self.limits.get(name)
        if size > 0 and (known is None or size < known.size):
            self.limits[name] = Limit(size, what, ignored)


def find_limits(task: "TaskAdapter", samples: list[Any]) -> dict[str, Limit]:
    """Limits by field, and under LABEL that of the label, as far as they can be known; {} where the model does not run
    without values, or does not classify.

    Fields of a batch are those of a sample only if the task does not collate by itself.
    """
    from rung.launcher.smoke import tensors

    try:
        batch = task.collate(samples)
        with torch.device("meta"):
            model = task.model()
        alive: list[torch.Tensor] = []
        on_meta = _to_meta(batch)
        fields = {}
        for path, tensor in tensors(on_meta):
            alive.append(tensor)
            if not task.has_collate:
                fields[id(tensor)] = "" if path == "sample" else path
        follow = _Follow(fields, alive)
        with torch.device("meta"), torch.no_grad(), follow:
            task.loss(model.to("meta"), on_meta)
    except Exception:  # whatever stops it, stops it: the limits are then not known, and the first ten samples tell
        return {}
    return follow.limits


def _to_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to("meta")
    if isinstance(value, dict):
        return {key: _to_meta(inner) for key, inner in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_to_meta, value))
    if isinstance(value, list | tuple):
        return type(value)(map(_to_meta, value))
    return value
