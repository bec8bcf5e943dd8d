"""Loading state: only the bytes that are needed, in parallel, verified, straight into where they belong."""

import ctypes
import itertools
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import torch

from rung.launcher.checkpoint.layout import TORCH_DTYPES
from rung.launcher.checkpoint.manifest import Manifest
from rung.launcher.checkpoint.pieces import ITEM_BYTES, Ints
from rung.launcher.checkpoint.reads import Segments, VerifiedFiles, plan_reads
from rung.launcher.storage import Store
from rung.strategies.errors import StorageError
from rung.strategies.shards import Interval

DIRECT_BYTES = 1 << 10  # runs from this size on are read straight into place; smaller ones are gathered first


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
        asked = set(numbers)
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
        if [i.shape for i in intervals] == [shapes[n] for n in numbers]:
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
        tensors = self._manifest.tensors
        which = np.arange(len(numbers)) if isinstance(numbers, range) else np.array(numbers, dtype=np.int64)
        start = _column([i.start for i in intervals])
        length = _column([i.data.numel() for i in intervals])
        segments = plan_reads(
            tensors,
            self._manifest.files,
            which,
            start,
            length,
            item_bytes=_column([ITEM_BYTES[d] for d in tensors.dtypes])[which],
            window_bytes=self._store.window_bytes,
        )
        scatter = _Scatter(self._files, self._manifest, segments, intervals, which, length)
        if len(segments.tasks):
            with ThreadPoolExecutor(max_workers=max(1, min(self._threads, len(segments.tasks)))) as pool:
                try:
                    for _ in pool.map(scatter.run, range(len(segments.tasks))):
                        pass
                except BaseException:
                    pool.shutdown(wait=True, cancel_futures=True)
                    raise
        return int(segments.nbytes.sum())


def _column(values: list[int]) -> Ints:
    """The values as numbers of a column; fast where they are all the same, which among many tensors is usual."""
    if values and values.count(values[0]) == len(values):
        return np.full(len(values), values[0], dtype=np.int64)
    return np.array(values, dtype=np.int64)


class _Scatter:
    """Runs the reads of one load: `run(task)` from any thread. Columns, not loops: there may be 100,000 tensors."""

    def __init__(
        self,
        files: VerifiedFiles,
        manifest: Manifest,
        segments: Segments,
        intervals: Sequence[Interval],
        which: Ints,
        lengths: Ints,
    ) -> None:
        self._files, self._entries = files, manifest.files
        self._segments = segments
        self._data = [i.data for i in intervals]
        self._lengths = lengths
        self._dtype_names = sorted(set(manifest.tensors.dtypes))
        number = {name: i for i, name in enumerate(self._dtype_names)}
        codes = _column([number[d] for d in manifest.tensors.dtypes])[which]
        self._code = codes[segments.owner]  # of each segment
        self._stops = np.append(segments.tasks[1:], len(segments.file))
        self._on_cpu = all(map(attrgetter("is_cpu"), self._data))
        self._on_cuda = not self._on_cpu and any(map(attrgetter("is_cuda"), self._data))
        self._local = threading.local()
        self._find_direct(codes)

    def _find_direct(self, codes: Ints) -> None:
        """Which segments can be read straight into place, and where that is: `_direct`, `_place` in `_memory`."""
        data, segments = self._data, self._segments
        number = {TORCH_DTYPES[name]: i for i, name in enumerate(self._dtype_names)}
        # On the CPU, in order, of the type on disk.
        direct = _column([number.get(d.dtype, -1) for d in data]) == codes
        if not all(map(torch.Tensor.is_contiguous, data)):
            direct &= np.array([d.is_contiguous() for d in data])
        if not self._on_cpu:
            direct &= np.array([d.is_cpu for d in data])
        self._direct = direct[segments.owner] & (segments.nbytes >= DIRECT_BYTES)
        self._memory, self._place = memoryview(b""), segments.place
        if not self._direct.any():
            return
        address = np.array([d.data_ptr() for d in data], dtype=np.int64)
        place = address[segments.owner] + segments.place
        low = int(place[self._direct].min())
        high = int((place + segments.nbytes)[self._direct].max())
        # One view of this process's memory from the first destination to the last: a slice of it costs a tenth of what
        # a view of a tensor does. Only slices that lie within destinations are taken.
        self._memory = memoryview((ctypes.c_char * (high - low)).from_address(low)).cast("B")
        self._place = place - low

    def run(self, task: int) -> None:
        """Reads one window's worth of segments, verifies it, and brings it to its destinations."""
        rows = slice(int(self._segments.tasks[task]), int(self._stops[task]))
        file = int(self._segments.file[rows.start])
        block = self._entries[file].block_bytes
        offsets, counts = self._segments.offset[rows], self._segments.nbytes[rows]
        stops = offsets + counts
        first_block = int(offsets[0]) // block
        begin, end = first_block * block, min(-(-int(stops.max()) // block) * block, self._entries[file].size)
        staging = self._staging(end - begin)
        buffers, staged = self._buffers(rows, staging.numpy().data, begin, end)
        self._files.read(file, first_block, buffers)
        if not len(staged):
            return
        # Neighbours of one type are copied by one call.
        code = self._code[rows][staged]
        breaks = np.flatnonzero((code[1:] != code[:-1]) | (stops[staged][:-1] != offsets[staged][1:])) + 1
        with torch.no_grad():
            for low, high in itertools.pairwise((0, *breaks.tolist(), len(staged))):
                self._copy(staging, begin, rows.start + staged[low:high])

    def _buffers(self, rows: slice, staging: memoryview, begin: int, end: int) -> tuple[list[memoryview], Ints]:
        """Where the bytes from `begin` to `end` go: destinations that can be read into, `staging` for the rest.

        Returns the buffers in order, and which of the rows must be copied out of `staging` afterwards.
        """
        offsets, counts = self._segments.offset[rows], self._segments.nbytes[rows]
        direct = np.flatnonzero(self._direct[rows])
        if not len(direct) or np.any(offsets[:-1] + counts[:-1] > offsets[1:]):  # two want the same bytes
            return [staging[: end - begin]], np.arange(len(offsets), dtype=np.int64)
        first, stop = offsets[direct], (offsets + counts)[direct]
        place = self._place[rows][direct]
        memory = self._memory
        runs = zip(place.tolist(), (place + stop - first).tolist(), strict=True)
        targets = [memory[low:high] for low, high in runs]
        # What lies between two of them goes to the staging buffer, at its place.
        before = np.concatenate(([begin], stop))
        after = np.concatenate((first, [end]))
        buffers: list[memoryview] = []
        done = 0
        for k in np.flatnonzero(after > before).tolist():
            buffers += targets[done:k]
            buffers.append(staging[int(before[k]) - begin : int(after[k]) - begin])
            done = k
        return buffers + targets[done:], np.flatnonzero(~self._direct[rows])

    def _copy(self, staging: torch.Tensor, begin: int, rows: Ints) -> None:
        """Copies verified bytes of neighbouring segments of one type out of `staging`."""
        dtype = TORCH_DTYPES[self._dtype_names[int(self._code[rows[0]])]]
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
