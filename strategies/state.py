"""Model and optimizer state as flat intervals, for strategies that hold the whole state on every rank.

Names: `model/<parameter or buffer>`, `optim.<state>/<parameter>`; a tied weight appears once, under the first of its
names (`aliases` gives the others). Numbers that belong to no parameter are scalars `optim.<what>/all` (loss scale) or
`optim.<key>/group<i>` (a number in a parameter group that the optimizer itself changes, such as a step counter).

A parameter that never had a gradient has no optimizer state, so a checkpoint may lack any `optim.` name that a loader
asks for. Such a destination is to be left alone: `restored` sees that it was not filled and takes the state away again,
and the optimizer starts afresh for that parameter, just as it would have.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from rung.strategies.errors import JobError
from rung.strategies.precision import LossScale
from rung.strategies.shards import Interval

# A scheduler owns these; they are not the optimizer's state.
_SCHEDULED = ("lr", "initial_lr")


def parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Each parameter once, under its first name."""
    return dict(model.named_parameters())


def buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Each persistent buffer once (those that `state_dict` holds), under its first name."""
    seen: set[int] = set()
    found: dict[str, torch.Tensor] = {}
    for prefix, module in model.named_modules():
        for name, tensor in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set and id(tensor) not in seen:
                seen.add(id(tensor))
                found[f"{prefix}.{name}" if prefix else name] = tensor
    return found


def shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """Whole shape of each parameter and persistent buffer by name, also where ZeRO-3 keeps only a part here."""
    found = {**parameters(model), **buffers(model)}
    return {name: tuple(getattr(tensor, "ds_shape", tensor.shape)) for name, tensor in found.items()}


def aliases(model: torch.nn.Module) -> dict[str, str]:
    """Every further name of a tied weight or buffer -> the name under which it is saved."""
    first = {id(tensor): name for name, tensor in (*parameters(model).items(), *buffers(model).items())}
    found: dict[str, str] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        for short, tensor in own:
            name = f"{prefix}.{short}" if prefix else short
            saved = first.get(id(tensor))
            if saved is not None and saved != name:
                found[name] = saved
    return found


def trained_parameters(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """What `optimizer` trains, in its order. Raises JobError for what rung cannot train or save:
    a parameter that is not the model's, an optimizer that needs a closure, sparse gradients."""
    known = {id(p) for p in model.parameters()}
    found = [p for group in optimizer.param_groups for p in group["params"]]
    kind = type(optimizer).__name__
    for index, parameter in enumerate(found):
        if id(parameter) not in known:
            raise JobError(
                f"optimizer {kind}: parameter {index} (shape {tuple(parameter.shape)}) does not belong to the model",
                hint="make the optimizer from model.parameters(), and put extra weights into the model",
            )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise JobError(
            "optimizer LBFGS evaluates the loss several times in one step, which fits no fixed global batch",
            hint="choose a first-order optimizer, such as adamw",
        )
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) and isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag):
            raise JobError(
                f"{name or type(module).__name__}: sparse gradients cannot be clipped, averaged and sharded alike "
                "under every strategy",
                hint="make the embedding without sparse=True",
            )
    return found


def materialise(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """Makes the state that `optimizer` would make in its first step, without changing a weight.

    One parameter at a time is replaced by a copy with zero gradients, stepped in a copy of its group, and the state
    that this made is handed to the real one: any optimizer with state by parameter works, and no more than one copy
    is held. Returns the parameters whose state was made here; its values are to be overwritten.
    """
    made: list[torch.nn.Parameter] = []
    groups = optimizer.param_groups
    # Listed first: a step hook may exchange what a group holds (ZeRO's does).
    wanted = [(group, p) for group in groups for p in group["params"] if p.requires_grad and not optimizer.state.get(p)]
    try:
        for group, parameter in wanted:
            stand_in = torch.nn.Parameter(parameter.detach().clone())
            stand_in.grad = torch.zeros_like(stand_in)
            optimizer.param_groups = [{**group, "params": [stand_in]}]
            optimizer.step()
            if state := optimizer.state.pop(stand_in, None):
                optimizer.state[parameter] = state
                made.append(parameter)
    finally:
        optimizer.param_groups = groups
    return made


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    """One tensor of the state. `local`: differs from rank to rank, and rank 0's is the one that is saved."""

    name: str
    tensor: torch.Tensor
    local: bool = False
    write_back: Callable[[torch.Tensor], None] | None = None


class FlatState:
    """The whole state of one model and its optimizer, as intervals.

    `world` ranks that each hold all of it own, on saving, one contiguous run each of the concatenation of all tensors,
    equal in bytes; buffers go to rank 0, whose running statistics are the ones that count (each rank's differ).
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, loss_scale: LossScale | None = None
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._loss_scale = loss_scale
        self._names = {parameter: name for name, parameter in parameters(model).items()}
        self._initial_numbers = [_numbers(group) for group in optimizer.param_groups]
        self._made: list[torch.nn.Parameter] = []
        self._staged: list[tuple[torch.Tensor, Callable[[torch.Tensor], None]]] = []

    def save(self, rank: int = 0, world: int = 1) -> list[Interval]:
        """The intervals that `rank` of `world` owns: views of the live state."""
        entries = list(self._entries())
        sizes = [entry.tensor.numel() * entry.tensor.element_size() for entry in entries]
        local_bytes = sum(size for entry, size in zip(entries, sizes, strict=True) if entry.local)
        first, last = _byte_range(sum(sizes), local_bytes, rank, world)
        owned = []
        offset = 0
        for entry, size in zip(entries, sizes, strict=True):
            width = entry.tensor.element_size()
            # An element belongs to the rank in whose run its first byte lies.
            start = min(max(-(-(first - offset) // width), 0), entry.tensor.numel())
            stop = min(max(-(-(last - offset) // width), 0), entry.tensor.numel())
            if start < stop:
                owned.append(_interval(entry, entry.tensor.reshape(-1)[start:stop], start))
            offset += size
        return owned

    def load(self) -> list[Interval]:
        """The destinations of all of the state; what cannot be written in place is staged until `restored`."""
        self._made += materialise(self._optimizer)
        self._staged.clear()
        for parameter in self._made:
            for value in self._optimizer.state[parameter].values():
                _mark_unfilled(value)
        return [self._destination(entry) for entry in self._entries(loading=True)]

    def restored(self) -> None:
        """Writes staged values back, and takes away again the state that was made for loading but not filled."""
        for staging, write_back in self._staged:
            if not _is_unfilled(staging):
                write_back(staging)
        self._staged.clear()
        for parameter in self._made:
            if any(_is_unfilled(value) for value in self._optimizer.state[parameter].values()):
                del self._optimizer.state[parameter]
        self._made.clear()

    def full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each parameter and buffer, whole, on the CPU: the live tensor itself if it lives there."""
        for name, tensor in (*parameters(self._model).items(), *buffers(self._model).items()):
            yield name, tensor.detach().cpu()

    def _destination(self, entry: _Entry) -> Interval:
        if entry.write_back is None and entry.tensor.is_contiguous():
            return _interval(entry, entry.tensor.view(-1), 0)
        staging = entry.tensor.reshape(-1) if entry.write_back else torch.empty_like(entry.tensor).reshape(-1)
        _mark_unfilled(staging)
        self._staged.append((staging, entry.write_back or _copier(entry.tensor)))
        return _interval(entry, staging, 0)

    def _entries(self, *, loading: bool = False) -> Iterator[_Entry]:
        for name, buffer in buffers(self._model).items():
            yield _Entry(name=f"model/{name}", tensor=buffer.detach(), local=True)
        for name, parameter in parameters(self._model).items():
            yield _Entry(name=f"model/{name}", tensor=parameter.detach())
        for parameter, name in self._names.items():
            state = self._optimizer.state.get(parameter, {})
            for key in sorted(state):
                if state[key] is not None:
                    yield self._optimizer_entry(f"optim.{key}/{name}", state, key)
        for index, group in enumerate(self._optimizer.param_groups):
            for key, value in _numbers(group).items():
                if loading or value != self._initial_numbers[index].get(key):
                    yield _number_entry(f"optim.{key}/group{index}", value, _item_setter(group, key, type(value)))
        if self._loss_scale is not None:
            for key in ("scale", "clean_steps"):
                value = getattr(self._loss_scale, key)
                setter = _attribute_setter(self._loss_scale, key, type(value))
                yield _number_entry(f"optim.loss_{key}/all", value, setter)

    def _optimizer_entry(self, name: str, state: dict[str, object], key: str) -> _Entry:
        value = state[key]
        if isinstance(value, torch.Tensor):
            return _Entry(name=name, tensor=value.detach())
        if isinstance(value, int | float) and not isinstance(value, bool):
            return _number_entry(name, value, _item_setter(state, key, type(value)))
        raise JobError(
            f"optimizer {type(self._optimizer).__name__} keeps a {type(value).__name__} as {name!r}, which is neither "
            "a tensor nor a number and cannot be saved",
            hint="choose an optimizer whose state is made of tensors and numbers",
        )


def _interval(entry: _Entry, data: torch.Tensor, start: int) -> Interval:
    return Interval(name=entry.name, shape=tuple(entry.tensor.shape), dtype=entry.tensor.dtype, start=start, data=data)


def _byte_range(total: int, local: int, rank: int, world: int) -> tuple[int, int]:
    """The run of `rank` in `total` bytes, of which the first `local` must all go to rank 0."""
    if local * world <= total:
        return total * rank // world, total * (rank + 1) // world
    if rank == 0:
        return 0, local
    rest, others = total - local, world - 1
    return local + rest * (rank - 1) // others, local + rest * rank // others


def _numbers(group: dict[str, object]) -> dict[str, float]:
    """The numbers of a parameter group that an optimizer might count in."""
    return {
        key: value
        for key, value in group.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and key not in _SCHEDULED
    }


def _number_entry(name: str, value: float, setter: Callable[[torch.Tensor], None]) -> _Entry:
    # float64 holds every integer that counts steps or samples exactly (up to 2^53).
    return _Entry(name=name, tensor=torch.tensor(float(value), dtype=torch.float64), write_back=setter)


def _item_setter(target: dict[str, object], key: str, kind: type) -> Callable[[torch.Tensor], None]:
    return lambda staging: target.__setitem__(key, kind(staging.item()))


def _attribute_setter(target: object, key: str, kind: type) -> Callable[[torch.Tensor], None]:
    return lambda staging: setattr(target, key, kind(staging.item()))


def _copier(target: torch.Tensor) -> Callable[[torch.Tensor], None]:
    def copy(staging: torch.Tensor) -> None:
        target.copy_(staging.view(target.shape))

    return copy


def _first(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach()[(0,) * tensor.dim()]


def _mark(dtype: torch.dtype) -> float | None:
    """A value that no healthy state holds."""
    if dtype.is_floating_point or dtype.is_complex:
        return math.nan
    return None if dtype == torch.bool else torch.iinfo(dtype).min


def _mark_unfilled(value: object) -> None:
    """Marks the first element: whoever fills the tensor overwrites it."""
    if isinstance(value, torch.Tensor) and value.numel() and (mark := _mark(value.dtype)) is not None:
        _first(value).fill_(mark)


def _is_unfilled(value: object) -> bool:
    if not isinstance(value, torch.Tensor) or not value.numel() or (mark := _mark(value.dtype)) is None:
        return False
    first = _first(value).item()
    return first == mark or (math.isnan(mark) and first != first)
