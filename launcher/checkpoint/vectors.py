"""Where the bytes of one read go: a table of addresses, in the order of the file, that the kernel fills by itself.

There may be 100,000 tensors of some kilobytes. What is done for each of them in Python is done while nothing is read,
so it is kept to one slice and one call for its hash; everything else is columns of numbers. numpy only; no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from rung.launcher.checkpoint.manifest import HASH_BYTES, FileEntry
from rung.launcher.checkpoint.pieces import Ints, expand
from rung.launcher.storage_local import MEMORY


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Vectors:
    """Runs of this process's memory, in the order of a file; none reaches over the edge of a block.

    table: address and bytes of each. edges: number of the first run of each block, and of all runs at the end.
    """

    table: Ints
    edges: list[int]


def of_buffers(buffers: Sequence[memoryview], block_bytes: int) -> Vectors:
    """Writable buffers, to be filled one after the other from the start of a block."""
    views = [np.frombuffer(buffer, dtype=np.uint8) for buffer in buffers if len(buffer)]
    address = np.array([view.ctypes.data for view in views], dtype=np.int64)
    nbytes = np.array([len(view) for view in views], dtype=np.int64)
    which, address, nbytes, block = cut_at_blocks(address, np.cumsum(nbytes) - nbytes, nbytes, block_bytes)
    firsts = np.flatnonzero(np.diff(block, prepend=-1))
    return Vectors(table=np.stack((address, nbytes), axis=1), edges=[*firsts.tolist(), len(which)])


def cut_at_blocks(address: Ints, offset: Ints, nbytes: Ints, block_bytes: int | Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """(number of the run that each comes from, address, bytes, block) of runs that are cut at the edges of blocks."""
    first = offset // block_bytes
    counts = (offset + nbytes - 1) // block_bytes - first + 1
    if len(counts) and counts.max() == 1:
        return np.arange(len(counts)), address, nbytes, first
    which, nth = expand(counts)
    block = first[which] + nth
    width = block_bytes if isinstance(block_bytes, int) else block_bytes[which]
    begin = np.maximum(offset[which], block * width)
    end = np.minimum((offset + nbytes)[which], (block + 1) * width)
    return which, address[which] + begin - offset[which], end - begin, block


def first_bad_block(entry: FileEntry, first_block: int, vectors: Vectors) -> tuple[int, str, str] | None:
    """(block, expected hash, found hash) of the first block that differs from what was written; None if none does."""
    address, memory = vectors.table[:, 0], MEMORY
    begins, ends = address.tolist(), (address + vectors.table[:, 1]).tolist()
    low = vectors.edges[0]
    for block, high in enumerate(vectors.edges[1:], start=first_block):
        if high == low + 1:
            digest = xxhash.xxh3_64_digest(memory[begins[low] : ends[low]])
        else:
            hasher = xxhash.xxh3_64()
            update = hasher.update
            for begin, end in zip(begins[low:high], ends[low:high]):  # noqa: B905
                update(memory[begin:end])
            digest = hasher.digest()
        expected = entry.hashes[block * HASH_BYTES : (block + 1) * HASH_BYTES]
        if digest != expected:
            return block, expected.hex(), digest.hex()
        low = high
    return None


class Destinations:
    """Where each read of a load puts its bytes, for all reads at once; `of(task)` gives one of them.

    What can be filled in place is; what lies between (headers, what nobody wants, what must be converted) goes to a
    staging buffer of the reader, at its place in the read. `begin` and `end` are bytes of the file: whole blocks.
    """

    def __init__(self, segments: Segments, files: Sequence[FileEntry], address: Ints) -> None:
        """`address` is that of each segment, -1 for those that are to be staged."""
        offset, stop = segments.offset, segments.offset + segments.nbytes
        tasks = segments.tasks
        task_of = np.repeat(np.arange(len(tasks)), np.diff(tasks, append=len(offset)))
        self.file: Ints = segments.file[tasks]
        size = np.array([f.size for f in files], dtype=np.int64)[self.file]
        block = np.array([f.block_bytes for f in files], dtype=np.int64)[self.file]
        self.begin: Ints = offset[tasks] // block * block
        self.end: Ints = np.minimum(-(-np.maximum.reduceat(stop, tasks) // block) * block, size)
        twice = np.zeros(len(tasks), dtype=bool)  # two want the same bytes
        twice[task_of[1:][(task_of[1:] == task_of[:-1]) & (stop[:-1] > offset[1:])]] = True
        direct = (address >= 0) & ~twice[task_of]
        self.staged = np.flatnonzero(~direct)
        self._staged_edges = np.searchsorted(self.staged, np.append(tasks, len(offset)))

        which = np.flatnonzero(direct) if len(self.staged) else slice(None)
        task, low, high, place = task_of[which], offset[which], stop[which], address[which]
        opens = np.diff(task, prepend=-1) != 0
        before = self.begin[task]
        before[1:][~opens[1:]] = high[:-1][~opens[1:]]
        gap = np.flatnonzero(low > before)
        reached = self.begin.copy()
        reached[task] = high  # the last one stays
        tail = np.flatnonzero(self.end > reached)
        filler = np.full(len(gap) + len(tail), -1, dtype=np.int64)
        task = np.concatenate((task, task[gap], tail))
        high = np.concatenate((high, low[gap], self.end[tail]))
        low = np.concatenate((low, before[gap], reached[tail]))
        place = np.concatenate((place, filler))
        order = np.lexsort((low, task))
        task, low, nbytes, place = task[order], low[order], (high - low)[order], place[order]
        staging = place < 0
        place = np.where(staging, low - self.begin[task], place)
        which, place, nbytes, number = cut_at_blocks(place, low, nbytes, block[task])
        task, self._in_staging = task[which], staging[which]
        self._table = np.stack((place, nbytes), axis=1)
        edges = np.flatnonzero((np.diff(task, prepend=-1) != 0) | (np.diff(number, prepend=-1) != 0))
        numbers = np.arange(len(tasks) + 1)
        self._rows: list[int] = np.searchsorted(task, numbers).tolist()
        self._blocks: list[int] = np.searchsorted(task[edges], numbers).tolist()
        self._edges: list[int] = [*edges.tolist(), len(task)]
        self._stages: list[bool] = np.logical_or.reduceat(self._in_staging, self._rows[:-1]).tolist()

    def needs_staging(self, task: int) -> bool:
        """Whether any byte of this read goes to the staging buffer."""
        return self._stages[task]

    def of(self, task: int, staging: int) -> Vectors:
        """The table of one read; `staging` is the address of a buffer of `end - begin` bytes."""
        low, high = self._rows[task], self._rows[task + 1]
        table = self._table[low:high]
        if self._stages[task]:
            table = table.copy()
            table[self._in_staging[low:high], 0] += staging
        edges = self._edges[self._blocks[task] : self._blocks[task + 1] + 1]
        return Vectors(table=table, edges=[edge - low for edge in edges])

    def staged_of(self, task: int) -> Ints:
        """The segments of one read that must be copied out of the staging buffer."""
        return self.staged[self._staged_edges[task] : self._staged_edges[task + 1]]
