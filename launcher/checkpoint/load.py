"""Loading state: only the bytes that are needed, in parallel, verified, straight into where they belong."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from operator import attrgetter
from typing import TypeVar

import numpy as np
import torch

from rung.launcher.checkpoint.layout import TORCH_DTYPES
from rung.launcher.checkpoint.manifest import FileEntry, Manifest
from rung.launcher.checkpoint.pieces import FILE, ITEM_BYTES, OFFSET, Ints
from rung.launcher.checkpoint.reads import VerifiedFiles, plan_reads
from rung.launcher.checkpoint.vectors import Destinations, Segments
from rung.launcher.storage import Store
from rung.strategies.errors import StorageError
from rung.strategies.shards import Interval

DIRECT_BYTES = 1 << 10  # runs from this size on are read straight into place; smaller ones are gathered first


PORTION = 12_500  # intervals that are planned at a time
AHEAD = 6  # reads: so far before its turn a disk is told of one


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """What a load did. `missing`: asked for but not in the checkpoint; `unexpected`: in it but not asked for."""

    wanted_bytes: int
    seconds: float
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


class Loader:
    """Fills intervals from one checkpoint below `store`, the folder of a run."""

    def __init__(self, store: Store, manifest: Manifest, *, threads: int | None = None) -> None:
        self._store, self._manifest = store, manifest
        self._threads = threads or store.parallel
        self._files = VerifiedFiles(store, manifest)

    def fill(self, intervals: Sequence[Interval], *, allow_missing: bool = False) -> LoadReport:
        """Brings each interval's elements into its `data`, converted if its type is another.

        Raises `CheckpointDamaged` when any byte read is not what was written; what the destinations hold then must
        not be used. Raises `StorageError` for a shape that differs, and for a missing name unless `allow_missing`.
        """
        began = time.perf_counter()
        tensors, aliases = self._manifest.tensors, self._manifest.aliases
        numbers = self._numbers_of(tuple([i.name for i in intervals]))
        if aliases:
            index = tensors.index
            numbers = [
                n if n >= 0 else index.get(aliases.get(i.name, ""), -1) for n, i in zip(numbers, intervals, strict=True)
            ]
        missing: tuple[str, ...] = ()
        if -1 in numbers:
            missing = tuple(dict.fromkeys(i.name for i, n in zip(intervals, numbers, strict=True) if n < 0))
            if not allow_missing:
                raise self._refused(f"{len(missing)} names are not in it: {', '.join(missing[:5])}")
            intervals = [i for i, n in zip(intervals, numbers, strict=True) if n >= 0]
            numbers = [n for n in numbers if n >= 0]
        self._check_shapes(intervals, numbers)
        wanted = self._read(intervals, numbers)
        asked = numbers if isinstance(numbers, range) else set(numbers)
        return LoadReport(
            wanted_bytes=wanted,
            seconds=time.perf_counter() - began,
            missing=missing,
            unexpected=()
            if len(asked) == len(tensors)
            else tuple(name for i, name in enumerate(tensors.names) if i not in asked),
        )

    def _numbers_of(self, names: tuple[str, ...]) -> Sequence[int]:
        """The number of each tensor in the manifest, -1 where it has no such name."""
        if names == self._manifest.tensors.names:
            return range(len(names))
        index = self._manifest.tensors.index
        return [index.get(name, -1) for name in names]

    def full_tensor(self, name: str) -> torch.Tensor:
        """One whole tensor, on the CPU, in its type on disk. Raises as `fill` does."""
        stored = self._manifest.resolve(name)
        tensors = self._manifest.tensors
        if stored not in tensors:
            raise self._refused(f"{name} is not in it")
        shape = tensors.shapes[tensors.index[stored]]
        dtype = TORCH_DTYPES[tensors.dtypes[tensors.index[stored]]]
        whole = torch.empty(shape, dtype=dtype)
        self.fill([Interval(name=name, shape=shape, dtype=dtype, start=0, data=whole.view(-1))])
        return whole

    def _check_shapes(self, intervals: Sequence[Interval], numbers: Sequence[int]) -> None:
        shapes = self._manifest.tensors.shapes
        stored = shapes if isinstance(numbers, range) else tuple([shapes[n] for n in numbers])
        if tuple([i.shape for i in intervals]) == stored:
            return
        wrong = [
            f"{i.name} is {list(i.shape)}, in the checkpoint {list(shapes[n])}"
            for i, n in zip(intervals, numbers, strict=True)
            if i.shape != shapes[n]
        ]
        if wrong:
            raise self._refused(f"{len(wrong)} shapes differ: {'; '.join(wrong[:5])}")

    def _refused(self, why: str) -> StorageError:
        url = self._store.url_of(self._manifest.folder)
        return StorageError(f"{url} does not fit this model: {why}", url=url, hint="use the model that wrote it")

    def _read(self, intervals: Sequence[Interval], numbers: Sequence[int]) -> int:
        """Plans the reads of some intervals while others are being read. Returns the bytes wanted."""
        tensors = self._manifest.tensors
        which = np.arange(len(numbers)) if isinstance(numbers, range) else np.array(numbers, dtype=np.int64)
        types = sorted(set(tensors.dtypes))
        code = _column(tensors.dtypes, {name: i for i, name in enumerate(types)}.__getitem__)
        local, wanted, futures = threading.local(), 0, []
        with ThreadPoolExecutor(max_workers=self._threads) as pool:
            try:
                for rows in self._portions(which):
                    scatter = self._plan(intervals[rows], which[rows], types, code[which[rows]], local)
                    if scatter is not None:
                        wanted += scatter.wanted_bytes
                        futures += [pool.submit(scatter.run, task) for task in range(scatter.tasks)]
                for future in futures:
                    future.result()
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
        return wanted

    def _portions(self, which: Ints) -> Iterator[slice]:
        """The intervals in portions, planned one by one. A block that two of them need is read by both: that is worth
        it only where there are many tensors that follow each other in the files."""
        first, runs = self._manifest.tensors.first, self._manifest.tensors.runs
        each = PORTION
        if len(which) > PORTION:
            place = (
                runs[first[which], FILE] * (1 << 50) + runs[first[which], OFFSET]
                if len(runs) == len(first) - 1
                else None
            )
            if place is None or np.any(place[1:] < place[:-1]):
                each = len(which)
        return (slice(low, low + each) for low in range(0, len(which), max(each, 1)))

    def _plan(
        self, intervals: Sequence[Interval], which: Ints, types: list[str], code: Ints, local: threading.local
    ) -> "_Scatter | None":
        data = [i.data for i in intervals]
        length = _column(list(map(torch.Tensor.numel, data)))
        segments = plan_reads(
            self._manifest.tensors,
            self._manifest.files,
            which,
            _column([i.start for i in intervals]),
            length,
            item_bytes=np.array([ITEM_BYTES[name] for name in types], dtype=np.int64)[code],
            window_bytes=self._store.window_bytes,
        )
        if not len(segments.tasks):
            return None
        return _Scatter(self._files, self._manifest.files, segments, data, length, types, code, local)


Value = TypeVar("Value")


def _column(values: Sequence[Value], code: Callable[[Value], int] = int) -> Ints:  # type: ignore[assignment]
    """The values as numbers of a column; fast where they are all the same, which among many tensors is usual."""
    if values and values.count(values[0]) == len(values):
        return np.full(len(values), code(values[0]), dtype=np.int64)
    return np.fromiter(map(code, values), dtype=np.int64, count=len(values))


class _Scatter:
    """Runs the reads of one load: `run(task)` from any thread. Columns, not loops: there may be 100,000 tensors.

    types: names of types on disk; code: which of them each destination's tensor is of.
    """

    def __init__(
        self,
        files: VerifiedFiles,
        entries: Sequence[FileEntry],
        segments: Segments,
        data: list[torch.Tensor],
        lengths: Ints,
        types: list[str],
        code: Ints,
        local: threading.local,
    ) -> None:
        self.tasks = len(segments.tasks)
        self.wanted_bytes = int(segments.nbytes.sum())
        self._files, self._entries, self._segments = files, entries, segments
        self._data, self._lengths = data, lengths
        self._types = [TORCH_DTYPES[name] for name in types]
        self._code = code[segments.owner]  # of each segment
        self._on_cpu = all(map(attrgetter("is_cpu"), self._data))
        self._on_cuda = not self._on_cpu and any(map(attrgetter("is_cuda"), self._data))
        self._local = local  # the staging buffer of each thread
        self._destinations = Destinations(segments, entries, self._addresses(code))

    def _addresses(self, code: Ints) -> Ints:
        """Where each segment can be read straight into place; -1 if it cannot."""
        data, segments = self._data, self._segments
        # On the CPU, in order, of the type on disk.
        number = {dtype: i for i, dtype in enumerate(self._types)}
        direct = _column([d.dtype for d in data], lambda dtype: number.get(dtype, -1)) == code
        if not all(map(torch.Tensor.is_contiguous, data)):
            direct &= np.array([d.is_contiguous() for d in data])
        if not self._on_cpu:
            direct &= np.array([d.is_cpu for d in data])
        place = np.fromiter(map(torch.Tensor.data_ptr, data), dtype=np.int64, count=len(data))
        return np.where(
            direct[segments.owner] & (segments.nbytes >= DIRECT_BYTES), place[segments.owner] + segments.place, -1
        )

    def run(self, task: int) -> None:
        """Reads one window's worth of segments, verifies it, and brings it to its destinations."""
        places = self._destinations
        if (later := task + AHEAD) < self.tasks:
            self._files.expect(int(places.file[later]), int(places.begin[later]), int(places.end[later]))
        file, begin = int(places.file[task]), int(places.begin[task])
        staging = self._staging(int(places.end[task]) - begin if places.needs_staging(task) else 0)
        self._files.read_vectors(file, begin // self._entries[file].block_bytes, places.of(task, staging.data_ptr()))
        rows = places.staged_of(task)
        if not len(rows):
            return
        # Neighbours of one type are copied by one call.
        code, offsets = self._code[rows], self._segments.offset[rows]
        stops = offsets + self._segments.nbytes[rows]
        breaks = np.flatnonzero((code[1:] != code[:-1]) | (stops[:-1] != offsets[1:])) + 1
        with torch.no_grad():
            for low, high in itertools.pairwise((0, *breaks.tolist(), len(rows))):
                self._copy(staging, begin, rows[low:high])

    def _copy(self, staging: torch.Tensor, begin: int, rows: Ints) -> None:
        """Copies verified bytes of neighbouring segments of one type out of `staging`."""
        dtype = self._types[int(self._code[rows[0]])]
        offsets, counts = self._segments.offset[rows], self._segments.nbytes[rows]
        lengths: list[int] = (counts // dtype.itemsize).tolist()
        firsts = self._segments.place[rows] // dtype.itemsize
        run = staging[int(offsets[0]) - begin : int(offsets[-1] + counts[-1]) - begin]
        sources = run.view(dtype).split_with_sizes(lengths)
        owners = self._segments.owner[rows]
        targets = [self._data[owner] for owner in owners.tolist()]
        for k in np.flatnonzero(counts // dtype.itemsize != self._lengths[owners]).tolist():
            targets[k] = targets[k][int(firsts[k]) : int(firsts[k]) + lengths[k]]
        if self._on_cuda:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
        else:
            torch._foreach_copy_(targets, list(sources))

    def _staging(self, needed: int) -> torch.Tensor:
        staging: torch.Tensor | None = getattr(self._local, "staging", None)
        if staging is None or staging.numel() < needed:
            staging = torch.empty(needed, dtype=torch.uint8, pin_memory=self._on_cuda)
            self._local.staging = staging
        return staging
