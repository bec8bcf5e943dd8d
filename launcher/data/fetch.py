"""One micro-batch out of the user's data set: the same bits wherever and in whatever company it is fetched."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from rung.launcher.data import rng
from rung.launcher.data.order import Order
from rung.launcher.user_code import task_error
from rung.strategies.errors import RungError, TaskError
from rung.strategies.oom import is_out_of_memory

Collate = Callable[[list[Any]], Any]

_PROBED = 4  # samples looked at to see whether a data set draws random numbers


class MapStyle(Protocol):
    """A data set as torch has it. `__getitems__`, taking a list of indices, is used where there is one."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Randomness:
    """What of a data set draws from the global random generators, and is seeded for that before each use."""

    samples: bool = False
    collate: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetch:
    """Fetches and collates. Each sample is seeded by (seed, epoch, index) where `random.samples` says that it draws
    random numbers, so that augmentation depends neither on ranks nor on micro-batches nor on loader workers; collating
    is seeded by (seed, epoch, first index, count) where it draws.

    The user's exceptions come out as TaskError, with the sample's index and their traceback; what `passes` does not.
    """

    dataset: MapStyle
    collate: Collate
    seed: int
    random: Randomness

    def __call__(self, epoch: int, indices: list[int], *, preserve: bool) -> Any:
        """The batch of these samples. `preserve` puts the global generators back as they were."""
        draws = self.random.samples or self.random.collate
        with rng.preserved() if draws and preserve else nullcontext():
            samples = self._samples(epoch, indices)
            if self.random.collate:
                rng.seed_collate(self.seed, epoch, indices[0], len(indices))
            return self._collated(samples, indices)

    def _samples(self, epoch: int, indices: list[int]) -> list[Any]:
        many = getattr(self.dataset, "__getitems__", None)
        if self.random.samples or many is None:
            return [self._sample(epoch, index) for index in indices]
        try:
            samples = list(many(indices))
        except (Exception, SystemExit) as error:
            if passes(error):
                raise
            for index in indices:  # on its own, the broken one names itself
                self._sample(epoch, index)
            raise task_error(error, f"__getitems__ of the data set, for samples {_few(indices)}") from None
        if len(samples) != len(indices):
            raise TaskError(
                f"the data set's __getitems__ returned {len(samples)} samples for {len(indices)} indices",
                hint="it has to return one sample for each index, in that order",
            )
        return samples

    def _sample(self, epoch: int, index: int) -> Any:
        if self.random.samples:
            rng.seed_sample(self.seed, epoch, index)
        try:
            return self.dataset[index]
        except (Exception, SystemExit) as error:
            if passes(error):
                raise
            raise task_error(error, f"sample {index} of the data set") from None

    def _collated(self, samples: list[Any], indices: Sequence[int]) -> Any:
        try:
            return self.collate(samples)
        except TaskError as error:  # the task's own collate comes with its border around it, which knows no samples
            message = f"{error.message} of samples {_few(indices)}"
            raise TaskError(message, traceback_text=error.traceback_text, hint=error.hint) from None
        except (Exception, SystemExit) as error:
            if passes(error):
                raise
            raise task_error(error, f"collate of samples {_few(indices)}") from None


def passes(error: BaseException) -> bool:
    """Whether an exception from the user's code goes on as it is: errors of rung's own, and memory that ran out, which
    is no mistake of theirs and has others to deal with it."""
    return isinstance(error, RungError) or is_out_of_memory(error)


def probe(dataset: MapStyle, collate: Collate, order: Order) -> Randomness:
    """Whether samples, and collating them, draw from the global generators: tried on the first few of epoch 0, which
    are the same on every rank."""
    fetch = Fetch(dataset=dataset, collate=collate, seed=order.seed, random=Randomness())
    indices: list[int] = order.indices(0, 0, min(_PROBED, order.length)).tolist()
    samples: list[Any] = []
    draws = rng.draws_randomness(lambda: samples.extend(fetch._sample(0, index) for index in indices))
    collating = rng.draws_randomness(lambda: fetch._collated(samples, indices))
    return Randomness(samples=draws, collate=collating)


def _few(indices: Sequence[int]) -> str:
    shown = ", ".join(str(index) for index in indices[:8])
    return shown if len(indices) <= 8 else f"{shown} and {len(indices) - 8} more"
