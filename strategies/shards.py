"""State as flat intervals: the one idea that lets any strategy and world size load what any other wrote."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A run of elements of one tensor of the training state, in flat row-major order.

    name: `model/<parameter or buffer>` or `optim.<state>/<parameter>`; names are those of the unwrapped model.
    shape: the whole tensor's shape; () for a scalar.
    dtype: the type on disk (float32 master weights where there are any).
    start: index of the first element of this run in the flat whole tensor.
    data: 1-D, the run itself; on save a tensor to copy from, on load the place to write to. It is a view of the
        live state wherever the strategy's memory allows.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    data: torch.Tensor

    @property
    def length(self) -> int:
        """Number of elements."""
        return self.data.numel()
