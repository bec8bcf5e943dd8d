"""Which part of which parameter this rank's optimizer holds under ZeRO, and how the optimizer is made to see it so.

DeepSpeed lays the parameters of a group end to end in one flat fp32 tensor, and gives the optimizer its partition of
that as one parameter. The optimizer then cannot tell where one parameter ends: one step counter serves all, and a
parameter that a step did not use is decayed and moved by its momentum all the same, where every other strategy leaves
it alone. So, for the length of each `optimizer.step()`, the flat partition is replaced by its fragments: one parameter
each, views of the same memory. State then belongs to fragments, which is also what a checkpoint is made of.

A partition that is swapped to disk stays flat, since DeepSpeed swaps flat state: there an unused parameter is treated
as one whose gradient is zero.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Fragment:
    """Elements `start` to `start + length` of `parameter` (flat), which lie at `offset` in partition number `index`.

    `view` is what the optimizer steps; None for a partition on disk.
    """

    name: str
    parameter: torch.nn.Parameter
    shape: tuple[int, ...]
    start: int
    length: int
    index: int
    offset: int
    view: torch.nn.Parameter | None


def shape_of(parameter: torch.Tensor) -> tuple[int, ...]:
    """The whole parameter's shape, also where ZeRO-3 has cut it up."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def partitions(zero: Any) -> list[torch.Tensor]:
    """The flat fp32 partitions of DeepSpeed's optimizer `zero`; those on disk are empty tensors."""
    for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition"):
        if hasattr(zero, name):
            return list(getattr(zero, name))
    raise AssertionError(f"{type(zero).__name__} is not an optimizer of ZeRO")


def on_disk(zero: Any, index: int) -> bool:
    """Whether partition `index` is swapped to disk between steps."""
    return hasattr(zero, "fp16_groups") and bool(zero._swappable_optimizer_subgroup(index))


def fragments(zero: Any, names: Mapping[torch.nn.Parameter, str]) -> list[Fragment]:
    """This rank's fragments in the order in which they lie in the partitions."""
    return sorted(
        _stage3(zero, names) if hasattr(zero, "fp16_groups") else _stage12(zero, names),
        key=lambda fragment: (fragment.index, fragment.offset),
    )


def _stage3(zero: Any, names: Mapping[torch.nn.Parameter, str]) -> Iterator[Fragment]:
    flats = partitions(zero)
    for group in zero.fp16_groups:
        for parameter in group:
            index, offset, part = zero.grad_position[zero.get_param_id(parameter)]
            start = part * parameter.ds_zero_partition_rank
            length = min(part, parameter.ds_numel - start)  # the last rank's part is padded
            if length <= 0:
                continue
            yield Fragment(
                name=names[parameter],
                parameter=parameter,
                shape=shape_of(parameter),
                start=start,
                length=length,
                index=index,
                offset=offset,
                view=None if on_disk(zero, index) else _view(flats[index], offset, length),
            )


def _stage12(zero: Any, names: Mapping[torch.nn.Parameter, str]) -> Iterator[Fragment]:
    flats = partitions(zero)
    for index, group in enumerate(getattr(zero, "bit16_groups", None) or zero.bf16_groups):
        for parameter in group:
            mapping = parameter._hp_mapping
            if mapping is None:
                continue
            whole, flat = mapping.lp_fragment_address, mapping.hp_fragment_address
            yield Fragment(
                name=names[parameter],
                parameter=parameter,
                shape=tuple(parameter.shape),
                start=int(whole.start),
                length=int(whole.numel),
                index=index,
                offset=int(flat.start),
                view=_view(flats[index], int(flat.start), int(whole.numel)),
            )


def _view(flat: torch.Tensor, offset: int, length: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(flat.detach().narrow(0, offset, length))


def _on_gradient(parameter: Any, note: Any) -> Any:
    return parameter.register_post_accumulate_grad_hook(note)


class Fragmented:
    """Makes `optimizer` step fragments where DeepSpeed gives it flat partitions."""

    def __init__(self, optimizer: torch.optim.Optimizer, flats: list[torch.Tensor], parts: list[Fragment]) -> None:
        self.used: set[torch.nn.Parameter] = set()
        self._optimizer = optimizer
        self._of: dict[int, list[Fragment]] = {
            id(flat): [part for part in parts if part.index == index]
            for index, flat in enumerate(flats)
            if all(part.view is not None for part in parts if part.index == index)
        }
        self._flat_lists: list[tuple[dict[str, Any], list[torch.Tensor]]] = []
        self._held = False
        self._hooks = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
            *(_on_gradient(p, self.used.add) for p in {part.parameter: None for part in parts}),
        ]
        for flat in flats:
            self._split_state(flat)

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG002
        if not self._held:
            self._expand(optimizer, with_gradients=True)

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG002
        if not self._held:
            self._collapse()

    @contextlib.contextmanager
    def expanded(self) -> Iterator[None]:
        """The optimizer's groups hold fragments, without gradients, inside this context."""
        self._expand(self._optimizer, with_gradients=False)
        self._held = True
        try:
            yield
        finally:
            self._held = False
            self._collapse()

    def _expand(self, optimizer: torch.optim.Optimizer, *, with_gradients: bool) -> None:
        for group in optimizer.param_groups:
            flats = group["params"]
            if not any(id(flat) in self._of for flat in flats):
                continue
            self._flat_lists.append((group, flats))
            group["params"] = [view for flat in flats for view in self._views(flat, with_gradients)]

    def _views(self, flat: torch.Tensor, with_gradients: bool) -> Iterator[torch.Tensor]:
        if id(flat) not in self._of:
            yield flat
            return
        for part in self._of[id(flat)]:
            assert part.view is not None
            if with_gradients:
                assert flat.grad is not None
                gradient = flat.grad.narrow(0, part.offset, part.length)
                # Not used here, but perhaps on another rank: then the average is not zero.
                part.view.grad = gradient if part.parameter in self.used or bool(gradient.any()) else None
            yield part.view

    def _collapse(self) -> None:
        for group, flats in self._flat_lists:
            for view in group["params"]:
                if not any(view is flat for flat in flats):
                    view.grad = None
            group["params"] = flats
        self._flat_lists.clear()

    def _split_state(self, flat: torch.Tensor) -> None:
        """State that the optimizer made for the flat partition when it was constructed (Adagrad) goes to fragments."""
        state = self._optimizer.state.pop(flat, {}) if id(flat) in self._of else {}
        for part in self._of[id(flat)] if state else []:
            assert part.view is not None
            self._optimizer.state[part.view] = {
                key: value.narrow(0, part.offset, part.length) if value.numel() == flat.numel() else value.clone()
                for key, value in state.items()
            }

    def close(self) -> None:
        """Takes all hooks away."""
        for hook in self._hooks:
            hook.remove()
        self._of.clear()
        self.used.clear()
