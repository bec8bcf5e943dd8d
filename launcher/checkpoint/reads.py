"""Which bytes of which files a set of intervals needs, and reading them so that nothing unverified is handed on.

Reads are cut at the edges of windows of whole blocks: a window is read by one call, verified block by block, and only
then counts. Planning is done on columns of numbers, so that 100,000 tensors or four million pieces are no burden.
numpy only; no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from rung.launcher.checkpoint.manifest import HASH_BYTES, OLDER, FileEntry, Manifest
from rung.launcher.checkpoint.pieces import COUNT, FILE, FILE_STEP, LENGTH, OFFSET, START, Ints, Tensors, expand
from rung.launcher.storage import Store
from rung.launcher.storage_errors import Trouble
from rung.strategies.errors import CheckpointDamaged, ObjectMissing, StorageError


@dataclass(frozen=True, kw_only=True, slots=True)
class Segments:
    """Runs of bytes to be read, sorted by file and offset; equally long columns.

    owner: which interval. offset: in the file. place: byte within the interval, counted in the type on disk.
    tasks: index of the first segment of each read; the segments of a read lie in one window of one file.
    """

    owner: Ints
    file: Ints
    offset: Ints
    nbytes: Ints
    place: Ints
    tasks: Ints


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
    owner, nth = expand(first[which + 1] - first[which])
    run = tensors.runs[first[which[owner]] + nth]
    low = np.maximum(start[owner], run[:, START])
    high = np.minimum(start[owner] + length[owner], run[:, START] + run[:, LENGTH] * run[:, COUNT])
    keep = high > low
    owner, run, low, high = owner[keep], run[keep], low[keep], high[keep]

    first_piece = (low - run[:, START]) // run[:, LENGTH]
    group, nth = expand((high - 1 - run[:, START]) // run[:, LENGTH] - first_piece + 1)
    piece = first_piece[group] + nth
    owner, run = owner[group], run[group]
    begin = run[:, START] + piece * run[:, LENGTH]
    low, high = np.maximum(low[group], begin), np.minimum(high[group], begin + run[:, LENGTH])
    item = item_bytes[owner]
    file = run[:, FILE] + run[:, FILE_STEP] * piece
    offset = run[:, OFFSET] + (low - begin) * item
    window = np.array([f.window(window_bytes) for f in files], dtype=np.int64)
    return _cut_at_windows(files, window, owner, file, offset, (high - low) * item, (low - start[owner]) * item)


def _cut_at_windows(
    files: Sequence[FileEntry], window: Ints, owner: Ints, file: Ints, offset: Ints, nbytes: Ints, place: Ints
) -> Segments:
    block = np.array([f.block_bytes for f in files], dtype=np.int64)
    first_window = offset // window[file]
    group, nth = expand((offset + nbytes - 1) // window[file] - first_window + 1)
    owner, file, width = owner[group], file[group], window[file[group]]
    low, high = offset[group], (offset + nbytes)[group]
    edge = (first_window[group] + nth) * width
    begin, end = np.maximum(low, edge), np.minimum(high, edge + width)
    place = place[group] + begin - low

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
        self._size_checked: set[int] = set()

    def path(self, file: int) -> str:
        """Path of a file, relative to the store."""
        return f"{self._manifest.folder}/{self._manifest.files[file].name}".lstrip("/")

    def read(self, file: int, first_block: int, buffers: Sequence[memoryview]) -> None:
        """Fills the buffers, one after the other, from the start of a block; they end at a block's end.

        Raises `CheckpointDamaged` naming the file, the block, and the hash expected and found.
        """
        entry, path = self._manifest.files[file], self.path(file)
        self._check_size(file, entry, path)
        for again in (True, False):
            try:
                self._store.read_into(path, first_block * entry.block_bytes, buffers)
            except StorageError as error:
                # Changed between the look at its size and the read.
                if isinstance(error, ObjectMissing) or Trouble.SHORT.value in error.message:
                    raise self._damaged(path, str(error.message)) from None
                raise
            bad = first_bad_block(entry, first_block, buffers)
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
        try:
            size = self._store.size(path)
        except ObjectMissing:
            raise self._damaged(path, f"it is missing; {entry.size:,} bytes were written") from None
        if size != entry.size:
            raise self._damaged(path, f"it has {size:,} bytes, {entry.size:,} were written")
        self._size_checked.add(file)

    def _damaged(self, path: str, what: str) -> CheckpointDamaged:
        url = self._store.url_of(path)
        return CheckpointDamaged(f"{url} is damaged: {what}", url=url, hint=OLDER)


def first_bad_block(entry: FileEntry, first_block: int, buffers: Sequence[memoryview]) -> tuple[int, str, str] | None:
    """(block, expected hash, found hash) of the first block that differs from what was written; None if none does."""
    block, left, hasher = first_block, entry.block_bytes, None
    for buffer in buffers:
        if hasher is not None and len(buffer) < left:  # the usual case among many small ones
            hasher.update(buffer)
            left -= len(buffer)
            continue
        at = 0
        while at < len(buffer):
            part = buffer[at : at + left]
            at += len(part)
            left -= len(part)
            if hasher is None and left == 0:
                digest = xxhash.xxh3_64_digest(part)
            else:
                hasher = hasher or xxhash.xxh3_64()
                hasher.update(part)
                if left:
                    continue
                digest = hasher.digest()
            if (bad := _differs(entry, block, digest)) is not None:
                return bad
            block, left, hasher = block + 1, entry.block_bytes, None
    return _differs(entry, block, hasher.digest()) if hasher is not None else None


def _differs(entry: FileEntry, block: int, digest: bytes) -> tuple[int, str, str] | None:
    expected = entry.hashes[block * HASH_BYTES : (block + 1) * HASH_BYTES]
    return None if digest == expected else (block, expected.hex(), digest.hex())
