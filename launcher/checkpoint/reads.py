"""Which bytes of which files a set of intervals needs, and reading them so that nothing unverified is handed on.

Reads are cut at the edges of windows of whole blocks: a window is read by one call, verified block by block, and only
then counts. Planning is done on columns of numbers, so that 100,000 tensors or four million pieces are no burden.
numpy only; no torch.
"""

import threading
from collections.abc import Sequence

import numpy as np

from rung.launcher.checkpoint.manifest import OLDER, FileEntry, Manifest
from rung.launcher.checkpoint.pieces import COUNT, FILE, FILE_STEP, LENGTH, OFFSET, START, Ints, Tensors, expand
from rung.launcher.checkpoint.vectors import Segments, Vectors, first_bad_block, of_buffers
from rung.launcher.storage import Store
from rung.launcher.storage_errors import Trouble
from rung.strategies.errors import CheckpointDamaged, ObjectMissing, StorageError

_FILES_LISTED = 1000  # what object stores list by one request


def plan_reads(
    tensors: Tensors,
    files: Sequence[FileEntry],
    which: Ints,
    start: Ints,
    length: Ints,
    *,
    item_bytes: Ints,
    window_bytes: int,
) -> Segments:
    """What must be read for intervals of `length` elements from `start` on of tensors `which`, in calls of about
    `window_bytes`."""
    first = tensors.first
    counts = first[which + 1] - first[which]
    if len(counts) and counts.min() == counts.max() == 1:
        owner, run = np.arange(len(which)), tensors.runs[first[which]]
    else:
        owner, nth = expand(counts)
        run = tensors.runs[first[which[owner]] + nth]
    low = np.maximum(start[owner], run[:, START])
    high = np.minimum(start[owner] + length[owner], run[:, START] + run[:, LENGTH] * run[:, COUNT])
    keep = high > low
    if not keep.all():
        owner, run, low, high = owner[keep], run[keep], low[keep], high[keep]
    file, begin = run[:, FILE], run[:, START]
    if np.any(run[:, COUNT] > 1):
        first_piece = (low - begin) // run[:, LENGTH]
        group, nth = expand((high - 1 - begin) // run[:, LENGTH] - first_piece + 1)
        piece = first_piece[group] + nth
        owner, run = owner[group], run[group]
        begin = run[:, START] + piece * run[:, LENGTH]
        low, high = np.maximum(low[group], begin), np.minimum(high[group], begin + run[:, LENGTH])
        file = run[:, FILE] + run[:, FILE_STEP] * piece
    item = item_bytes[owner]
    offset = run[:, OFFSET] + (low - begin) * item
    window = np.array([f.window(window_bytes) for f in files], dtype=np.int64)
    return _cut_at_windows(files, window, owner, file, offset, (high - low) * item, (low - start[owner]) * item)


def _cut_at_windows(
    files: Sequence[FileEntry], window: Ints, owner: Ints, file: Ints, offset: Ints, nbytes: Ints, place: Ints
) -> Segments:
    block = np.array([f.block_bytes for f in files], dtype=np.int64)
    width = window[file]
    first_window = offset // width
    counts = (offset + nbytes - 1) // width - first_window + 1
    begin, end = offset, offset + nbytes
    if np.any(counts > 1):
        group, nth = expand(counts)
        owner, file, width = owner[group], file[group], width[group]
        low, high = begin[group], end[group]
        edge = (first_window[group] + nth) * width
        begin, end = np.maximum(low, edge), np.minimum(high, edge + width)
        place = place[group] + begin - low
    if np.any((file[1:] < file[:-1]) | ((file[1:] == file[:-1]) & (begin[1:] < begin[:-1]))):
        order = np.lexsort((begin, file))
        owner, file, begin, end, place, width = (c[order] for c in (owner, file, begin, end, place, width))
    size = block[file]
    last = (end - 1) // size
    blocks_before = np.cumsum([0] + [-(-f.size // f.block_bytes) + 2 for f in files])[file]
    reached = np.maximum.accumulate(blocks_before + last)
    breaks = np.ones(len(file), dtype=bool)
    breaks[1:] = (
        (file[1:] != file[:-1])
        | (begin[1:] // width[1:] != begin[:-1] // width[:-1])
        | ((blocks_before + begin // size)[1:] > reached[:-1] + 1)  # blocks in between that nobody needs
    )
    return Segments(owner=owner, file=file, offset=begin, nbytes=end - begin, place=place, tasks=np.flatnonzero(breaks))


class VerifiedFiles:
    """The files of one checkpoint, read by whole blocks; every read is verified before it returns."""

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self._store, self._manifest = store, manifest
        self._sizes: dict[str, int] | None = None  # of a listing: one request for all files of a remote store
        self._size_checked: set[int] = set()
        self._lock = threading.Lock()

    def path(self, file: int) -> str:
        """Path of a file, relative to the store."""
        return f"{self._manifest.folder}/{self._manifest.files[file].name}".lstrip("/")

    def expect(self, file: int, begin: int, end: int) -> None:
        """Says which bytes will be read soon, so that the disk works while others are verified."""
        self._store.expect(self.path(file), begin, end - begin)

    def read(self, file: int, first_block: int, buffers: Sequence[memoryview]) -> None:
        """Fills the buffers as `read_vectors` does the runs of memory that it is given."""
        self.read_vectors(file, first_block, of_buffers(buffers, self._manifest.files[file].block_bytes))

    def read_vectors(self, file: int, first_block: int, vectors: Vectors) -> None:
        """Fills runs of memory, one after the other, from the start of a block; they end at a block's end.

        Raises `CheckpointDamaged` naming the file, the block, and the hash expected and found.
        """
        entry, path = self._manifest.files[file], self.path(file)
        self._check_size(file, entry, path)
        for again in (True, False):
            try:
                self._store.read_vectors(path, first_block * entry.block_bytes, vectors.table)
            except StorageError as error:
                # Changed between the look at its size and the read.
                if isinstance(error, ObjectMissing) or Trouble.SHORT.value in error.message:
                    raise self._damaged(path, str(error.message)) from None
                raise
            bad = first_bad_block(entry, first_block, vectors)
            if bad is None:
                return
            # Once more if it came over a network: the object may be whole and the transfer not.
            if not (again and self._store.remote):
                block, expected, found = bad
                begin = block * entry.block_bytes
                raise self._damaged(
                    path,
                    f"block {block} (bytes {begin:,} to {min(begin + entry.block_bytes, entry.size):,}) "
                    f"has hash {found}, expected {expected}",
                )

    def _check_size(self, file: int, entry: FileEntry, path: str) -> None:
        if file in self._size_checked:
            return
        with self._lock:  # the others wait for the listing instead of asking for themselves
            if self._sizes is None and self._store.remote and len(self._manifest.files) <= _FILES_LISTED:
                self._sizes = self._store.sizes(self._manifest.folder)
        try:
            size = self._store.size(path) if self._sizes is None else self._sizes.get(entry.name)
        except ObjectMissing:
            size = None
        if size is None:
            raise self._damaged(path, f"it is missing; {entry.size:,} bytes were written")
        if size != entry.size:
            raise self._damaged(path, f"it has {size:,} bytes, {entry.size:,} were written")
        self._size_checked.add(file)

    def _damaged(self, path: str, what: str) -> CheckpointDamaged:
        url = self._store.url_of(path)
        return CheckpointDamaged(f"{url} is damaged: {what}", url=url, hint=OLDER)
