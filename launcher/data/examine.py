"""Looks at samples a chunk at a time, inside the processes that read them: only what is seen travels, not samples."""

import mmap
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from rung.launcher.data.fetch import MapStyle, passes
from rung.launcher.data.fields import Fields
from rung.launcher.data.limits import LABEL, Limit
from rung.launcher.data.seen import NO_LABEL, Ints, Seen, tally
from rung.launcher.user_code import task_error
from rung.strategies.errors import DataError

_BLOCK, _BLOCK_BYTES = 256, 16 << 20  # samples held at a time
_MOST_COLUMNS = 4096
_PLACES = 256  # reading processes whose place is kept
_NUMBERS = (bool, int, float, np.generic)


class Places:
    """Which sample each reading process is at, in memory that they share: what a process died of can be named."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 8 * _PLACES)
        self.at = memoryview(self._memory).cast("q")
        for slot in range(_PLACES):
            self.at[slot] = -1

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("places are shared by forking only")


class Examiner:
    """Called with the indices of a chunk; gives a `Seen`. `label` is the task's own method, or None. With `deep` false
    only hashes, missing values and what cannot be read are looked for, as cleaning needs; with `labels_only`, labels.

    `limits` hold what the model can take for a field of whole numbers, and for the label (`limits.LABEL`).
    `careful` keeps the place of each sample, not only of a block, at the price of speed.
    """

    def __init__(
        self,
        dataset: MapStyle,
        *,
        label: Callable[[Any], Any] | None = None,
        limits: Mapping[str, Limit] | None = None,
        deep: bool = True,
        labels_only: bool = False,
    ) -> None:
        self.dataset = dataset
        self.label = label
        self.limits = dict(limits or {})
        # Where the task tells labels, the field that holds them would only say the same again.
        of_fields = {path: lim for path, lim in self.limits.items() if label is None or lim.what != "label"}
        self.labels_only = labels_only
        self.places = Places()
        self.careful = False
        self._block = 64
        self._fields = Fields(of_fields, deep=deep)

    def __call__(self, _epoch: int, indices: list[int], *, preserve: bool) -> Seen:  # noqa: ARG002
        """`_epoch` and `preserve` are what the loader's processes pass; a check needs neither."""
        began = time.perf_counter()
        whole = Seen()
        parts: list[Seen] = []
        at = 0
        while at < len(indices):
            block = indices[at : at + self._block]
            at += len(block)
            part = self._block_seen(block)
            whole.merge(part)
            parts.append(part)
        if len(parts) > 1:
            whole.exact, whole.near = (np.concatenate([getattr(p, n) for p in parts]) for n in ("exact", "near"))
            whole.indices, whole.labels = (
                np.concatenate([getattr(p, n) for p in parts]) for n in ("indices", "labels")
            )
        elif parts:
            whole.exact, whole.near, whole.indices, whole.labels = (
                parts[0].exact, parts[0].near, parts[0].indices, parts[0].labels,
            )  # fmt: skip
        whole.unreadable = [i for p in parts for i in p.unreadable]
        whole.missing = [i for p in parts for i in p.missing]
        whole.seconds = time.perf_counter() - began
        return whole

    # ---------------------------------------------------------------- reading

    def _block_seen(self, indices: list[int]) -> Seen:
        seen = Seen()
        samples, read = self._read(indices, seen)
        seen.read = len(samples)
        seen.indices = np.array(read, dtype=np.int64)
        if not samples:
            return seen
        seen.labels = self._labels(samples, seen)
        if self.labels_only:
            return seen
        seen.exact = np.zeros(len(samples), dtype=np.uint64)
        seen.near = np.zeros(len(samples), dtype=np.uint64)
        bad = np.zeros(len(samples), dtype=bool)
        self._fields.bytes = 0
        self._fields.walk("", samples, np.arange(len(samples)), seen, bad)
        self._block = min(_BLOCK, max(1, _BLOCK_BYTES * len(samples) // max(1, self._fields.bytes)))
        seen.missing = seen.indices[bad].tolist()
        return seen

    def _read(self, indices: list[int], seen: Seen) -> tuple[list[Any], list[int]]:
        if not self.careful:
            try:
                return self._read_all(indices), indices
            except (Exception, SystemExit) as error:  # on its own, each broken sample names itself below
                if passes(error) and not isinstance(error, DataError):
                    raise
        worker = torch.utils.data.get_worker_info()
        slot = worker.id % _PLACES if worker is not None else 0
        samples, read = [], []
        for index in indices:
            self.places.at[slot] = index
            try:
                sample = self.dataset[index]
            except (Exception, SystemExit) as error:
                if passes(error) and not isinstance(error, DataError):
                    raise
                tally(seen.problems, "sample.unreadable", [index], _words(error, index))
                seen.unreadable.append(index)
                continue
            samples.append(sample)
            read.append(index)
        return samples, read

    def _read_all(self, indices: list[int]) -> list[Any]:
        dataset = self.dataset
        many = getattr(dataset, "__getitems__", None)
        if many is not None:
            samples = list(many(indices))
            if len(samples) == len(indices):
                return samples
        return [dataset[index] for index in indices]

    def _labels(self, samples: list[Any], seen: Seen) -> Ints:
        if self.label is None:
            return np.full(len(samples), NO_LABEL, dtype=np.int64)
        limit = self.limits.get(LABEL)
        labels = self._label_all(samples)
        if labels is None:
            labels = self._label_each(samples, seen)
        known = labels[labels != NO_LABEL]
        for value, count in zip(*(a.tolist() for a in np.unique(known, return_counts=True)), strict=True):
            seen.histogram[value] = count
        high = limit.size if limit is not None else np.iinfo(np.int64).max
        outside = (labels != NO_LABEL) & ((labels < 0) | (labels >= high))
        if limit is not None and limit.ignored is not None:
            outside &= labels != limit.ignored
        if outside.any():
            text = f"label {int(labels[outside][0])} is outside {limit.words if limit is not None else '0, 1, 2, ...'}"
            tally(seen.problems, "label.range", seen.indices[outside].tolist(), text)
        return labels

    def _label_all(self, samples: list[Any]) -> Ints | None:
        """All labels, if all are whole numbers of Python's own."""
        assert self.label is not None
        label = self.label
        try:
            given = [label(sample) for sample in samples]
        except (Exception, SystemExit) as error:
            if passes(error):
                raise
            return None
        labels = np.asarray(given) if set(map(type, given)) == {int} else None
        return labels if labels is not None and labels.dtype == np.int64 else None

    def _label_each(self, samples: list[Any], seen: Seen) -> Ints:
        assert self.label is not None
        labels = np.full(len(samples), NO_LABEL, dtype=np.int64)
        for row, sample in enumerate(samples):
            index = int(seen.indices[row])
            try:
                given = self.label(sample)
                value = int(given)
                whole = value == given
            except (Exception, SystemExit) as error:
                if passes(error):
                    raise
                tally(seen.problems, "label.unknown", [index], _words(error, index))
                continue
            if whole:
                labels[row] = value
            else:
                tally(seen.problems, "label.type", [index], f"label {float(given):g} is not a whole number")
        return labels


def _words(error: BaseException, index: int) -> str:
    """A reader's own message says it all; anything else comes with the user's file and line."""
    if isinstance(error, DataError):
        return error.message
    return task_error(error, f"sample {index}").message
