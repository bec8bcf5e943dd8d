"""Where the elements of each tensor lie in the files of a checkpoint, as columns of numbers.

A piece is `length` elements of one tensor, from element `start` on, at byte `offset` of a file. Workers report pieces.
A manifest keeps runs: `count` pieces of equal length that follow each other in the tensor and lie at the same offset
of files `file, file + file_step, ...`. Under ZeRO-3 each of 4,096 workers holds a piece of each of 1,000 tensors: four
million pieces, but about a thousand runs. numpy only; no torch.
"""

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

# Bytes per element of safetensors' type names, for the types whose elements are whole bytes.
ITEM_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1),
}

# The columns of `Tensors.runs`.
START, LENGTH, COUNT, FILE, FILE_STEP, OFFSET = range(6)


@contextmanager
def without_collector() -> Iterator[None]:
    """No garbage collection for a moment. Each 100,000 new lists make it look at every object there is, several times:
    reading the manifest of as many tensors takes twice as long with it, and leaves nothing for it to find."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class BadPieces(ValueError):
    """The pieces do not make up the tensors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pieces:
    """What one worker wrote; equally long columns. `tensor` and `file` count within that worker's own lists."""

    tensor: npt.NDArray[np.int32]
    file: npt.NDArray[np.int32]
    start: Ints
    length: Ints
    offset: Ints

    def __len__(self) -> int:
        return len(self.tensor)


class Tensors:
    """All tensors of a checkpoint, by columns. `runs[first[i] : first[i + 1]]` are those of tensor i, by start.

    origin: a digest of the parts that they were merged from; empty if they were not. text: their JSON, once made.
    """

    __slots__ = ("_index", "dtypes", "first", "names", "origin", "runs", "shapes", "text")

    def __init__(
        self,
        names: Sequence[str],
        shapes: Sequence[tuple[int, ...]],
        dtypes: Sequence[str],
        runs: Ints,
        first: Ints,
        *,
        origin: bytes = b"",
    ) -> None:
        self.names = tuple(names)
        self.shapes = tuple(shapes)
        self.dtypes = tuple(dtypes)
        self.runs = runs
        self.first = first
        self.origin = origin
        self.text: str | None = None
        self._index: dict[str, int] | None = None

    @property
    def index(self) -> dict[str, int]:
        """The number of each tensor, by name."""
        if self._index is None:
            self._index = dict(zip(self.names, range(len(self.names)), strict=True))
        return self._index

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self.index

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Tensors)
            and (self.names, self.shapes, self.dtypes) == (other.names, other.shapes, other.dtypes)
            and np.array_equal(self.runs, other.runs)
            and np.array_equal(self.first, other.first)
        )

    __hash__ = None  # type: ignore[assignment]

    def runs_of(self, name: str) -> Ints:
        """The runs of one tensor, shape (runs, 6)."""
        i = self.index[name]
        return self.runs[self.first[i] : self.first[i + 1]]

    @property
    def total_bytes(self) -> int:
        """Bytes of all elements."""
        return sum(math.prod(shape) * ITEM_BYTES[dtype] for shape, dtype in zip(self.shapes, self.dtypes, strict=True))


def join(
    parts: Sequence[Pieces],
    tensor_ids: Sequence[npt.NDArray[np.int32]],
    first_files: Sequence[int],
    names: Sequence[str],
    sizes: Sequence[int],
) -> tuple[Ints, Ints]:
    """The runs, and the index of each tensor's first, from the pieces of all workers.

    `tensor_ids[i]` maps part i's tensor numbers to those of `names`; `first_files[i]` is added to its file numbers;
    `sizes` are elements per tensor. Raises `BadPieces` naming the tensor unless the pieces cover each tensor exactly.
    """
    tensor = np.concatenate([ids[p.tensor] for ids, p in zip(tensor_ids, parts, strict=True)])
    order = _order(tensor, lambda: np.concatenate([p.start for p in parts]), len(names))

    def column(get: Callable[[int], npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
        whole = np.concatenate([get(i) for i in range(len(parts))])
        return whole if order is None else whole[order]

    if order is not None:
        tensor = tensor[order]
    start = column(lambda i: parts[i].start)
    length = column(lambda i: parts[i].length)
    _check_cover(tensor, start, start + length, names, sizes)
    file = column(lambda i: parts[i].file + np.int32(first_files[i]))
    offset = column(lambda i: parts[i].offset)
    runs = _encode(tensor, file, start, length, offset)
    first = np.searchsorted(tensor[runs[0]], np.arange(len(names) + 1))
    return runs[1], first.astype(np.int64)


def _order(tensor: npt.NDArray[np.int32], starts: Callable[[], Ints], count: int) -> npt.NDArray[np.int64] | None:
    """What sorts pieces by tensor, then by start; None if they are sorted."""
    # Sixteen bits are sorted by radix, and ranks in order usually bring rising starts: four million take 50 ms.
    narrow = tensor.astype(np.uint16) if count < 2**16 else tensor
    order = np.argsort(narrow, kind="stable")
    start = starts()
    by_tensor, by_start = tensor[order], start[order]
    if np.any((by_tensor[1:] == by_tensor[:-1]) & (by_start[1:] < by_start[:-1])):
        return np.lexsort((start, tensor))
    return order


def _check_cover(
    tensor: npt.NDArray[np.int32], start: Ints, stop: Ints, names: Sequence[str], sizes: Sequence[int]
) -> None:
    size = np.asarray(sizes, dtype=np.int64)
    present = np.zeros(len(names), dtype=bool)
    present[tensor] = True
    if (absent := np.flatnonzero(~present & (size > 0))).size:
        raise BadPieces(f"tensor {names[absent[0]]}: nobody wrote any of its {size[absent[0]]:,} elements")
    if not len(tensor):
        return
    begins = np.concatenate(([True], tensor[1:] != tensor[:-1]))
    expected = np.where(begins, 0, np.concatenate(([0], stop[:-1])))
    if (bad := np.flatnonzero(start != expected)).size:
        k = bad[0]
        what = "nobody wrote elements" if start[k] > expected[k] else "two workers wrote elements"
        low, high = sorted((int(start[k]), int(expected[k])))
        raise BadPieces(f"tensor {names[tensor[k]]}: {what} {low:,} to {high:,}")
    ends = np.concatenate((begins[1:], [True]))
    if (bad := np.flatnonzero(ends & (stop != size[tensor]))).size:
        k = bad[0]
        raise BadPieces(f"tensor {names[tensor[k]]}: its pieces end at element {stop[k]:,}, it has {size[tensor[k]]:,}")


def _encode(
    tensor: npt.NDArray[np.int32], file: Ints, start: Ints, length: Ints, offset: Ints
) -> tuple[npt.NDArray[np.int64], Ints]:
    """(index of the first piece of each run, the runs), from sorted pieces without gaps."""
    count = len(tensor)
    if count == 0:
        return np.zeros(0, dtype=np.int64), np.zeros((0, 6), dtype=np.int64)
    step = np.diff(file, prepend=file[:1])
    follows = np.zeros(count, dtype=bool)  # could be in one run with the piece before
    follows[1:] = (
        (tensor[1:] == tensor[:-1]) & (length[1:] == length[:-1]) & (offset[1:] == offset[:-1]) & (step[1:] != 0)
    )
    breaks = ~follows
    breaks[1:] |= follows[:-1] & (step[1:] != step[:-1])
    at = np.flatnonzero(breaks)
    counts = np.diff(at, append=count)
    steps = np.where(counts > 1, step[np.minimum(at + 1, count - 1)], 0)
    runs = np.stack((start[at], length[at], counts, file[at], steps, offset[at]), axis=1)
    return at, runs.astype(np.int64)


def check_runs(tensors: Tensors, file_bytes: Ints, most_pieces: int) -> None:
    """Raises `BadPieces` unless the runs cover each tensor exactly and lie within files that exist.

    For numbers from a file that nobody vouches for: nothing is expanded before its extent is known to be sound.
    """
    runs, first = tensors.runs, tensors.first
    sizes = [math.prod(shape) for shape in tensors.shapes]
    if runs.size and (int(runs.min(initial=0, where=np.arange(6) != FILE_STEP)) < 0 or np.abs(runs).max() > 2**53):
        raise BadPieces("a number of a piece is out of range")
    start, length, count, file, step, offset = runs.T
    if np.any((length < 1) | (count < 1) | ((count > 1) & (step == 0))):
        raise BadPieces("a piece is empty, or repeats itself")
    if runs.size and (float(count.astype(float).sum()) > most_pieces or (length.astype(float) * count).max() > 2**60):
        raise BadPieces(f"there are more than {most_pieces:,} pieces, or one is too long")
    tensor = np.repeat(np.arange(len(tensors), dtype=np.int32), np.diff(first))
    _check_cover(tensor, start, start + length * count, tensors.names, sizes)
    last = file + step * (count - 1)
    if np.any((file >= len(file_bytes)) | (last < 0) | (last >= len(file_bytes))):
        raise BadPieces("a piece lies in a file that is not listed")
    item = np.array([ITEM_BYTES[d] for d in tensors.dtypes], dtype=np.int64)[tensor] if len(tensors) else length
    if np.any(offset % item):
        raise BadPieces("a piece does not lie at a multiple of its element's size")
    stop = offset + length * item
    for low in range(0, len(runs), 1 << 16):
        which, nth = expand(count[low : low + (1 << 16)])
        which += low
        if np.any(stop[which] > file_bytes[file[which] + step[which] * nth]):
            raise BadPieces("a piece ends behind the end of its file")


def expand(counts: Ints) -> tuple[Ints, Ints]:
    """For `counts` of items in each group: (the group of each item, its number within the group)."""
    group = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    begins = np.cumsum(counts) - counts
    return group, np.arange(len(group), dtype=np.int64) - begins[group]
