"""ZeRO's state as flat intervals: fragments of partitions, frozen weights, buffers, and the loss scale.

Names are those of `state.py`. Nothing here communicates; `ZeroState.restored` only does what belongs to this rank.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from rung.strategies.precision import LossScale
from rung.strategies.shards import Interval
from rung.strategies.state import buffers, materialise, parameters
from rung.strategies.zero_disk import DiskState, weight_part
from rung.strategies.zero_parts import Fragment, Fragmented, fragments, on_disk, partitions, shape_of


def verify_owned(
    owned: Iterable[tuple[str, tuple[int, ...], int, int]], expected: Mapping[str, int] | None = None
) -> list[str]:
    """What is wrong with the intervals (name, whole shape, start, length) that all ranks together are about to save.

    Empty if each tensor is covered exactly once and, with `expected` (name -> elements of each parameter), none is
    missing and none has another size: a ZeRO-3 model saved as its empty placeholders is caught here.
    """
    runs: dict[str, list[tuple[int, int]]] = defaultdict(list)
    shapes: dict[str, tuple[int, ...]] = {}
    problems = []
    for name, shape, start, length in owned:
        if shapes.setdefault(name, shape) != shape:
            problems.append(f"{name}: shape {shapes[name]} on one rank, {shape} on another")
        runs[name].append((start, length))
    for name, pieces in runs.items():
        at = 0
        for start, length in sorted(pieces):
            if start != at:
                problems.append(f"{name}: elements {min(at, start)} to {max(at, start)} are {_fault(start, at)}")
            at = max(at, start + length)
        if at != _count(shapes[name]):
            problems.append(f"{name}: {at} elements saved of {_count(shapes[name])}")
    for name, count in (expected or {}).items():
        if name not in shapes:
            problems.append(f"{name}: not saved by any rank")
        elif _count(shapes[name]) != count:
            problems.append(f"{name}: {_count(shapes[name])} elements saved of {count}")
    return problems


def _fault(start: int, at: int) -> str:
    return "owned by no rank" if start > at else "owned by two ranks"


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


class ZeroState:
    """What this rank holds of a model under DeepSpeed's optimizer `zero`, around the torch optimizer `inner`."""

    def __init__(
        self,
        *,
        zero: Any,
        inner: torch.optim.Optimizer,
        module: torch.nn.Module,
        rank: int,
        world: int,
        loss_scale: LossScale | None,
    ) -> None:
        self.names = {parameter: name for name, parameter in parameters(module).items()}
        self._zero, self._inner, self._module = zero, inner, module
        self._rank, self._world = rank, world
        self._loss_scale = loss_scale
        self.parts: list[Fragment] = fragments(zero, self.names)
        self.fragmented = Fragmented(inner, partitions(zero), self.parts)
        self._disk = DiskState(zero, inner)
        self._expecting: list[torch.nn.Parameter] = []
        self._staged: list[tuple[torch.Tensor, Callable[[torch.Tensor], None]]] = []

    def expected(self) -> dict[str, int]:
        """`model/<parameter or buffer>` -> its elements, for `verify_owned`."""
        found = {f"model/{name}": _count(shape_of(parameter)) for parameter, name in self.names.items()}
        return found | {f"model/{name}": tensor.numel() for name, tensor in buffers(self._module).items()}

    def save(self, *, alone: bool = False) -> list[Interval]:
        """What this rank owns: views of the live state, of swap files for what is on disk. `alone`: with all that it
        has in full, as if there were no other rank."""
        found = []
        if self._rank == 0 or alone:
            found += [_whole(f"model/{name}", tensor) for name, tensor in buffers(self._module).items()]
            found += [_whole(name, torch.tensor(value, dtype=torch.float64)) for name, value in self._numbers().items()]
        found += self._frozen(full=alone)
        for part in self.parts:
            found += self._fragment(part, loading=False)
        return found

    def load(self) -> list[Interval]:
        """What this rank needs: destinations to fill."""
        self._staged.clear()
        self._materialise()
        found = [_whole(f"model/{name}", tensor) for name, tensor in buffers(self._module).items()]
        for name, value in self._numbers().items():
            staging = torch.full((1,), torch.nan, dtype=torch.float64)
            self._staged.append((staging, _number_setter(self._loss_scale, name, type(value))))
            found.append(Interval(name=name, shape=(), dtype=staging.dtype, start=0, data=staging))
        found += self._frozen(full=True)
        for part in self.parts:
            found += self._fragment(part, loading=True)
        return found

    def restored(self) -> None:
        """Writes staged numbers back, and takes away optimizer state that was not filled: it starts afresh."""
        for staging, write_back in self._staged:
            if not bool(staging.isnan().any()):
                write_back(staging)
        self._staged.clear()
        for view in self._expecting:
            state = self._inner.state[view]
            if any(_unfilled(value) for value in state.values()):
                del self._inner.state[view]
        self._expecting.clear()
        self._disk.restored()

    def _numbers(self) -> dict[str, float]:
        scale = self._loss_scale
        return {} if scale is None else {f"optim.loss_{key}/all": getattr(scale, key) for key in _SCALE_KEYS}

    def _frozen(self, *, full: bool) -> list[Interval]:
        """Weights that are not trained. Stages 1 and 2 hold them whole: each rank needs all and saves a share."""
        found = []
        for parameter, name in self.names.items():
            if parameter.requires_grad:
                continue
            count = _count(shape_of(parameter))
            part = -(-count // self._world)
            start = min(part * self._rank, count)
            length = min(part, count - start)
            if hasattr(parameter, "ds_id"):
                data = weight_part(parameter, shared=full).narrow(0, 0, length)
            elif full:
                start, data = 0, parameter.detach().view(-1)
            else:
                data = parameter.detach().reshape(-1).narrow(0, start, length)
            if data.numel():
                found.append(
                    Interval(name=f"model/{name}", shape=shape_of(parameter), dtype=data.dtype, start=start, data=data)
                )
        return found

    def _fragment(self, part: Fragment, *, loading: bool) -> list[Interval]:
        if part.view is None:
            return self._disk.fragment(part, loading=loading)
        found = [_run(f"model/{part.name}", part, part.view.detach())]
        state = self._inner.state.get(part.view, {})
        for key in sorted(state):
            value = state[key]
            name = f"optim.{key}/{part.name}"
            if isinstance(value, torch.Tensor) and value.dim() == 1 and value.numel() == part.length:
                found.append(_run(name, part, value.detach()))
            elif value is not None and (loading or part.start == 0):
                found.append(self._scalar(name, state, key, loading=loading))
        return found

    def _scalar(self, name: str, state: dict[str, Any], key: str, *, loading: bool) -> Interval:
        value = state[key]
        if isinstance(value, torch.Tensor):
            return Interval(name=name, shape=(), dtype=value.dtype, start=0, data=value.detach().view(-1))
        data = torch.full((1,), torch.nan if loading else float(value), dtype=torch.float64)
        if loading:
            kind = type(value)
            self._staged.append((data, lambda staging: state.__setitem__(key, kind(staging.item()))))
        return Interval(name=name, shape=(), dtype=data.dtype, start=0, data=data)

    def _materialise(self) -> None:
        with self.fragmented.expanded():
            if hasattr(self._zero, "fp16_groups"):
                self._materialise_stage3()
            else:
                materialise(self._inner)
        self._expecting = [part.view for part in self.parts if part.view is not None and part.view in self._inner.state]
        for view in self._expecting:
            for value in self._inner.state[view].values():
                _mark(value)

    def _materialise_stage3(self) -> None:
        # DeepSpeed keeps the groups empty between steps.
        for index, flat in enumerate(partitions(self._zero)):
            group = self._inner.param_groups[self._zero.sub_group_to_group_id[index]]
            disk = on_disk(self._zero, index)
            if disk:
                self._zero._optimizer_states_and_gradient_swap_in(index)
            group["params"] = [flat] if disk else [part.view for part in self.parts if part.index == index]
            try:
                materialise(self._inner)
            finally:
                group["params"] = []
            if disk:
                self._zero._optimizer_states_and_gradient_swap_out(index)


_SCALE_KEYS = ("scale", "clean_steps")


def _whole(name: str, tensor: torch.Tensor) -> Interval:
    return Interval(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype, start=0, data=tensor.detach().view(-1))


def _run(name: str, part: Fragment, data: torch.Tensor) -> Interval:
    return Interval(name=name, shape=part.shape, dtype=data.dtype, start=part.start, data=data)


def _mark(value: object) -> None:
    """Puts a value that no healthy state holds into the first element: whoever fills the tensor overwrites it."""
    if isinstance(value, torch.Tensor) and value.numel() and value.is_floating_point():
        value.detach().view(-1)[0] = torch.nan


def _unfilled(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and bool(value.detach().view(-1)[0].isnan())


def _number_setter(scale: LossScale | None, name: str, kind: type) -> Callable[[torch.Tensor], None]:
    key = name.removeprefix("optim.loss_").removesuffix("/all")
    return lambda staging: setattr(scale, key, kind(staging.item()))
