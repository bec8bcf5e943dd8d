"""Whether all ranks take the same way through the model, which ZeRO needs.

DeepSpeed packs gradients into buckets as they come and averages these over the ranks, place by place. A rank that
leaves out a parameter (an expert that none of its samples went to, a branch not taken) or has its gradients in another
order adds numbers that do not belong together: where sizes happen to fit, without a word.
"""

import zlib
from collections.abc import Mapping
from functools import partial

import torch

from rung.strategies.collectives import Collectives
from rung.strategies.errors import JobError

#: Bits of the number that is compared: its square, summed over thousands of ranks, is exact in float64.
_BITS = 20


class Paths:
    """Follows the gradients of one rank through a step. `names` are those of all parameters."""

    def __init__(self, names: Mapping[torch.nn.Parameter, str], strategy: str) -> None:
        trained = {parameter: name for parameter, name in names.items() if parameter.requires_grad}
        self._names, self._strategy = list(trained.values()), strategy
        self._counts = [0] * len(trained)
        self._path = 0
        self._handles = [
            parameter.register_post_accumulate_grad_hook(partial(self._passed, index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(trained)
        ]

    def _passed(self, index: int, _parameter: torch.Tensor) -> None:
        self._counts[index] += 1
        self._path = zlib.crc32(index.to_bytes(4, "little"), self._path)

    def tell(self) -> list[float]:
        """What goes into the step's exchange, to be summed over the ranks."""
        path = self._path % (1 << _BITS)
        return [float(path), float(path * path)]

    def hear(self, summed: list[float], collectives: Collectives, step: int) -> None:
        """All ranks call it with the sums. Raises JobError on all unless their gradients came alike: n numbers are
        equal if and only if n times the sum of their squares is the square of their sum (Cauchy and Schwarz)."""
        first, second = (int(value) for value in summed)
        if collectives.world * second == first * first:
            return
        counts = [float(count) for count in self._counts]
        most = collectives.agree(counts, "max")
        least = [-value for value in collectives.agree([-count for count in counts], "max")]
        names = [name for name, a, b in zip(self._names, most, least, strict=True) if a != b]
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        what = f"{', '.join(names[:4])}{more} had a gradient on some ranks only" if names else "their order differed"
        raise JobError(
            f"{self._strategy} needs all ranks to use the same parameters in the same order; in step {step:,} {what}",
            hint="a branch or an expert that only some samples take is trained by strategy: ddp or single",
        )

    def forget(self) -> None:
        """A step is over."""
        self._counts = [0] * len(self._counts)
        self._path = 0

    def close(self) -> None:
        """Takes the hooks off again."""
        for handle in self._handles:
            handle.remove()
