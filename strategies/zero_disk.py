"""Partitions that DeepSpeed swaps to disk between steps: their files, seen as tensors, and their gradients.

A file holds the elements of one tensor as they are in memory, padded at the end. Mapping it makes an interval of it
that costs no memory: pages come and go as they are read or written. DeepSpeed reads and writes past the page cache
(O_DIRECT); the kernel keeps the two views of a file in step.
"""

import contextlib
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from rung.strategies.shards import Interval
from rung.strategies.zero_parts import Fragment, partitions


class DiskState:
    """Intervals of the fragments whose partition is on disk."""

    def __init__(self, zero: Any, inner: torch.optim.Optimizer) -> None:
        self._zero, self._inner = zero, inner
        # A flat partition has one step counter for all its fragments.
        self._staged: dict[tuple[int, str], list[torch.Tensor]] = defaultdict(list)
        self._marked: list[torch.Tensor] = []

    def fragment(self, part: Fragment, *, loading: bool) -> list[Interval]:
        """Weight and optimizer state of `part`."""
        found = []
        files = self._files(part.index)
        for key, path in files.items():
            data = self._mapped(path, part, shared=loading)
            if loading and key:
                data[0] = torch.nan
                self._marked.append(data)
            name = f"optim.{key}/{part.name}" if key else f"model/{part.name}"
            found.append(Interval(name=name, shape=part.shape, dtype=data.dtype, start=part.start, data=data))
        for key, value in sorted(self._state(part.index).items()):
            if key not in files and value is not None and (loading or part.start == 0):
                data = torch.full((1,), torch.nan if loading else float(value))
                if loading:
                    self._staged[part.index, key].append(data)
                found.append(Interval(name=f"optim.{key}/{part.name}", shape=(), dtype=data.dtype, start=0, data=data))
        return found

    def restored(self) -> None:
        """What was not filled starts at zero."""
        for data in self._marked:
            if bool(data[0].isnan()):
                data.zero_()
        self._marked.clear()
        for (index, key), numbers in self._staged.items():
            filled = [float(number) for number in numbers if not bool(number.isnan())]
            state, value = self._state(index), max(filled, default=0.0)
            if isinstance(state[key], torch.Tensor):
                state[key].fill_(value)
            else:
                state[key] = type(state[key])(value)
        self._staged.clear()

    def _state(self, index: int) -> dict[str, Any]:
        state: dict[str, Any] = self._inner.state.get(partitions(self._zero)[index], {})
        return state

    def _files(self, index: int) -> dict[str, str]:
        """Name of the state tensor ("" for the weights) -> its file."""
        swapped = _swap_info(self._zero, index)
        names = {id(value): key for key, value in self._state(index).items()}
        weights, *others = swapped.tensors
        return {"": weights.swap_path} | {names[id(other.compute_tensor)]: other.swap_path for other in others}

    def _mapped(self, path: str, part: Fragment, *, shared: bool) -> torch.Tensor:
        count = self._zero.fp16_partitioned_groups_flat_numel[part.index]
        return torch.from_file(path, shared=shared, size=count, dtype=torch.float32).narrow(0, part.offset, part.length)


def weight_part(parameter: Any, *, shared: bool) -> torch.Tensor:
    """This rank's part of a weight that ZeRO-3 has cut up, wherever it lies."""
    if parameter.ds_tensor.status.name == "AVAILABLE":
        part: torch.Tensor = parameter.ds_tensor.detach().view(-1)
        return part
    path = parameter.nvme_swapper.get_path(parameter, must_exist=True)
    return torch.from_file(path, shared=shared, size=parameter.ds_tensor.ds_numel, dtype=parameter.dtype)


def mend(zero: Any) -> None:
    """Keeps DeepSpeed from two of its mistakes.

    It would write large gradients to files too, and read them back into a buffer at offsets that O_DIRECT cannot serve
    unless every weight's size is a multiple of a disk block: the gradients that come back are then wrong. They are in
    host memory already, in the buffer that they were added up in, so they are taken from there.

    And it fetches weights ahead from disk twice if two modules use them, which it then refuses.
    """
    swapper = zero.optimizer_swapper

    def keep(parameter: Any, gradient_offsets: list[int], gradient_tensors: list[torch.Tensor]) -> None:
        kept = swapper.swap_params_info[parameter.ds_id].unswapped_gradients
        kept.update(zip(gradient_offsets, (tensor.cpu() for tensor in gradient_tensors), strict=True))

    swapper.swap_out_gradients = keep
    zero.parameter_offload.param_coordinator._PartitionedParameterCoordinator__prefetch_nvme = False


def fill_missing_gradients(zero: Any) -> None:
    """DeepSpeed reads a swapped partition's gradients into a used buffer, so each fragment needs one: zeros for what
    no micro-batch used."""
    for index, group in enumerate(zero.fp16_groups):
        if not zero._swappable_optimizer_subgroup(index):
            continue
        swapped = _swap_info(zero, index)
        for parameter in group:
            _, offset, count = zero.grad_position[zero.get_param_id(parameter)]
            if offset not in swapped.unswapped_gradients:
                swapped.unswapped_gradients[offset] = torch.zeros(count)


def forget_gradients(zero: Any) -> None:
    """Forgets this step's gradients of swapped partitions."""
    for swapped in zero.optimizer_swapper.swap_params_info.values():
        swapped.release_unswapped_gradients()


def _swap_info(zero: Any, index: int) -> Any:
    return zero.optimizer_swapper.swap_params_info[zero.fp32_partitioned_groups_flat[index].ds_id]


def remove_files(folder: Path, rank: int) -> None:
    """Deletes what DeepSpeed put under `folder` for this rank, and folders that are empty then."""
    root = folder / "zero_stage_3"
    for own in root.glob(f"*/rank{rank}"):
        for file in own.iterdir():
            file.unlink(missing_ok=True)
        own.rmdir()
    for empty in (*root.glob("*"), root):
        with contextlib.suppress(OSError):  # another rank's files are still there
            empty.rmdir()
