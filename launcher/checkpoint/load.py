"""Loading state: only the bytes that are needed, in parallel, verified, straight into where they belong."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from rung.launcher.checkpoint.layout import TORCH_DTYPES
from rung.launcher.checkpoint.manifest import Manifest
from rung.launcher.checkpoint.pieces import ITEM_BYTES
from rung.launcher.checkpoint.reads import Segments, VerifiedFiles, plan_reads
from rung.launcher.storage import Store
from rung.strategies.errors import StorageError
from rung.strategies.shards import Interval

DIRECT_BYTES = 64 << 10  # runs from this size on are read straight into place; smaller ones are gathered first


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
        index = tensors.index
        numbers = [index.get(i.name, -1) for i in intervals]
        if aliases:
            numbers = [
                n if n >= 0 else index.get(aliases.get(i.name, ""), -1) for n, i in zip(numbers, intervals, strict=True)
            ]
        missing = tuple(dict.fromkeys(i.name for i, n in zip(intervals, numbers, strict=True) if n < 0))
        if missing:
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
            unexpected=tuple(name for i, name in enumerate(tensors.names) if i not in asked),
        )

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
        item = np.array([ITEM_BYTES[d] for d in tensors.dtypes] or [1], dtype=np.int64)
        which = np.array(numbers, dtype=np.int64)
        start = np.array([i.start for i in intervals], dtype=np.int64)
        length = np.array([i.data.numel() for i in intervals], dtype=np.int64)
        segments = plan_reads(
            tensors,
            self._manifest.files,
            which,
            start,
            length,
            item_bytes=item[which],
            window_bytes=self._store.window_bytes,
        )
        scatter = _Scatter(self._files, self._manifest, segments, intervals, numbers)
        if len(segments.tasks):
            with ThreadPoolExecutor(max_workers=max(1, min(self._threads, len(segments.tasks)))) as pool:
                try:
                    for _ in pool.map(scatter.run, range(len(segments.tasks))):
                        pass
                except BaseException:
                    pool.shutdown(wait=True, cancel_futures=True)
                    raise
        return int(segments.nbytes.sum())


class _Scatter:
    """Runs the reads of one load: `run(task)` from any thread."""

    def __init__(
        self,
        files: VerifiedFiles,
        manifest: Manifest,
        segments: Segments,
        intervals: Sequence[Interval],
        numbers: Sequence[int],
    ) -> None:
        self._files, self._entries = files, manifest.files
        self._segments, self._intervals = segments, intervals
        self._dtypes = [TORCH_DTYPES[manifest.tensors.dtypes[n]] for n in numbers]
        self._stops = np.append(segments.tasks[1:], len(segments.file))
        self._on_cuda = any(i.data.is_cuda for i in intervals)
        self._local = threading.local()

    def run(self, task: int) -> None:
        """Reads one window's worth of segments, verifies it, and brings it to its destinations."""
        low, high = int(self._segments.tasks[task]), int(self._stops[task])
        file = int(self._segments.file[low])
        entry = self._entries[file]
        owners = self._segments.owner[low:high].tolist()
        offsets = self._segments.offset[low:high].tolist()
        counts = self._segments.nbytes[low:high].tolist()
        places = self._segments.place[low:high].tolist()
        first_block = offsets[0] // entry.block_bytes
        begin = first_block * entry.block_bytes
        stop = max(o + n for o, n in zip(offsets, counts, strict=True))
        end = min(-(-stop // entry.block_bytes) * entry.block_bytes, entry.size)
        staging = self._staging(end - begin)
        memory = staging.numpy().data
        buffers: list[memoryview] = []
        staged: list[int] = []
        at = begin
        overlap = any(a + n > b for a, n, b in zip(offsets, counts, offsets[1:], strict=False))
        for k, (owner, offset, count, place) in enumerate(zip(owners, offsets, counts, places, strict=True)):
            target = None if overlap or count < DIRECT_BYTES else self._view(owner)
            if target is None:
                staged.append(k)
                continue
            if offset > at:
                buffers.append(memory[at - begin : offset - begin])
            buffers.append(target[place : place + count])
            at = offset + count
        if end > at:
            buffers.append(memory[at - begin : end - begin])
        self._files.read(file, first_block, buffers)
        if staged:
            with torch.no_grad():
                self._place(staging, begin, staged, owners, offsets, counts, places)

    def _place(
        self,
        staging: torch.Tensor,
        begin: int,
        staged: list[int],
        owners: list[int],
        offsets: list[int],
        counts: list[int],
        places: list[int],
    ) -> None:
        """Copies verified bytes out of `staging`: neighbours of one type by one call."""
        group: list[int] = []
        for k in staged:
            if group:
                last = group[-1]
                same = self._dtypes[owners[k]] == self._dtypes[owners[last]]
                if not same or offsets[last] + counts[last] != offsets[k]:
                    self._place_group(staging, begin, group, owners, offsets, counts, places)
                    group = []
            group.append(k)
        self._place_group(staging, begin, group, owners, offsets, counts, places)

    def _place_group(
        self,
        staging: torch.Tensor,
        begin: int,
        group: list[int],
        owners: list[int],
        offsets: list[int],
        counts: list[int],
        places: list[int],
    ) -> None:
        dtype = self._dtypes[owners[group[0]]]
        size = dtype.itemsize
        low, high = offsets[group[0]] - begin, offsets[group[-1]] + counts[group[-1]] - begin
        lengths = [counts[k] // size for k in group]
        sources = staging[low:high].view(dtype).split_with_sizes(lengths)
        targets = []
        for k, length in zip(group, lengths, strict=True):
            data = self._intervals[owners[k]].data
            first = places[k] // size
            targets.append(data if length == data.numel() else data[first : first + length])
        if self._on_cuda:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
        else:
            torch._foreach_copy_(targets, list(sources))

    def _view(self, owner: int) -> memoryview | None:
        """The destination's bytes, if they can be read into: on the CPU, in order, of the type on disk."""
        data = self._intervals[owner].data
        if not (data.device.type == "cpu" and data.is_contiguous() and data.dtype == self._dtypes[owner]):
            return None
        view: memoryview = data.detach().view(torch.uint8).numpy().data
        return view

    def _staging(self, needed: int) -> torch.Tensor:
        staging: torch.Tensor | None = getattr(self._local, "staging", None)
        if staging is None or staging.numel() < needed:
            staging = torch.empty(needed, dtype=torch.uint8, pin_memory=self._on_cuda)
            self._local.staging = staging
        return staging
