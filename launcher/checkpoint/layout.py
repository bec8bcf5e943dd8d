"""How the intervals of one worker are laid out in safetensors files, header and all, before a byte is copied.

The host buffer of a save holds the files back to back, exactly as they are written, so that writing needs no copy.
"""

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii as quoted

import numpy as np
import torch

from rung.launcher.checkpoint.pieces import Pieces, without_collector
from rung.strategies.shards import Interval

BLOCK_BYTES = 1 << 20  # hashed, and so verified, as one
LARGEST_FILE_BYTES = 256 << 20
SMALLEST_FILE_BYTES = 16 << 20
FILES_WANTED = 16  # a save that is large enough is cut into as many: while one is synced, others are written
SMALL_BYTES = 256 << 10  # tensors below this are copied together, by one call
_ALIGN_BYTES = 4096  # where files begin in the buffer

DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}

Signature = list[tuple[str, tuple[int, ...], torch.dtype, int, int]]
Columns = tuple[list[str], list[tuple[int, ...]], list[torch.dtype], list[int], list[int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Neighbours in one file, of one type: either one large run of elements, or many small ones copied together.

    `items` are (interval, first element within it, elements); `begin` is a byte of the buffer.
    """

    dtype: torch.dtype
    begin: int
    nbytes: int
    items: tuple[tuple[int, int, int], ...]
    whole: bool  # each item is the whole of its interval


@dataclass(frozen=True, kw_only=True, slots=True)
class FileLayout:
    """One file: where it lies in the buffer, its header (length prefix included), what is copied behind it."""

    begin: int
    size: int
    header: bytes
    groups: tuple[Group, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """All files of one worker. `table` and `pieces` are what the manifest needs to know."""

    files: tuple[FileLayout, ...]
    buffer_bytes: int
    table: str
    pieces: Pieces


def columns_of(intervals: Sequence[Interval]) -> Columns:
    """What a layout depends on, by columns: quickly taken, and quickly compared with those of the save before."""
    return (
        [i.name for i in intervals],
        [i.shape for i in intervals],
        [i.dtype for i in intervals],
        [i.start for i in intervals],
        [i.data.numel() for i in intervals],
    )


def signature(columns: Columns) -> Signature:
    """The same, by intervals."""
    return list(zip(*columns, strict=True))


@without_collector()
def lay_out(wanted: Signature) -> Layout:
    """The layout for intervals with this signature. Raises `ValueError` for a type that safetensors has no name for."""
    for name, _, dtype, _, _ in wanted:
        if dtype not in DTYPES:
            raise ValueError(f"{name} is of type {dtype}, which a checkpoint cannot hold")
    tables: dict[str, int] = {}
    entries: list[tuple[str, list[int], str]] = []
    for name, shape, dtype, _, _ in wanted:
        if name not in tables:
            tables[name] = len(entries)
            entries.append((name, list(shape), DTYPES[dtype]))
    cuts = _cut(wanted)
    files: list[FileLayout] = []
    rows: list[tuple[int, int, int, int, int]] = []
    begin = 0
    for number, items in enumerate(cuts):
        file = _file(wanted, items, begin)
        offset = len(file.header)
        for i, first, count in items:
            rows.append((tables[wanted[i][0]], number, wanted[i][3] + first, count, offset))
            offset += count * wanted[i][2].itemsize
        files.append(file)
        begin += -(-file.size // _ALIGN_BYTES) * _ALIGN_BYTES
    columns = np.array(rows, dtype=np.int64).reshape(-1, 5).T
    pieces = Pieces(
        tensor=columns[0].astype(np.int32),
        file=columns[1].astype(np.int32),
        start=columns[2].copy(),
        length=columns[3].copy(),
        offset=columns[4].copy(),
    )
    table = json.dumps(entries, separators=(",", ":"))
    return Layout(files=tuple(files), buffer_bytes=begin, table=table, pieces=pieces)


def _cut(wanted: Signature) -> list[list[tuple[int, int, int]]]:
    """(interval, first element, elements) of each file. Wide types first, so that every element is aligned."""
    order = sorted((i for i in range(len(wanted)) if wanted[i][4] > 0), key=lambda i: -wanted[i][2].itemsize)
    total = sum(wanted[i][4] * wanted[i][2].itemsize for i in order)
    limit = max(SMALLEST_FILE_BYTES, min(LARGEST_FILE_BYTES, math.ceil(total / FILES_WANTED)))
    files: list[list[tuple[int, int, int]]] = []
    room = 0
    for i in order:
        itemsize, length, first = wanted[i][2].itemsize, wanted[i][4], 0
        while first < length:
            if room < itemsize:
                files.append([])
                room = limit
            count = min(length - first, room // itemsize)
            files[-1].append((i, first, count))
            room -= count * itemsize
            first += count
    return files


def _file(wanted: Signature, items: list[tuple[int, int, int]], begin: int) -> FileLayout:
    entries = ['"__metadata__":{"format":"pt","rung":"intervals; manifest.json places them"}']
    keys: set[str] = set()
    offset = 0
    for i, first, count in items:
        name, _, dtype, start, _ = wanted[i]
        key = name if name not in keys else f"{name}#{start + first}"
        keys.add(key)
        stop = offset + count * dtype.itemsize
        # Put together by hand: 100,000 tensors take json.dumps, and the objects that it wants, several times as long.
        entries.append(
            f'{quoted(key)}:{{"dtype":"{DTYPES[dtype]}","shape":[{count}],"data_offsets":[{offset},{stop}]}}'
        )
        offset = stop
    text = ("{" + ",".join(entries) + "}").encode()
    text += b" " * (-(len(text) + 8) % 64)
    header = struct.pack("<Q", len(text)) + text
    groups = _groups(wanted, items, begin + len(header))
    return FileLayout(begin=begin, size=len(header) + offset, header=header, groups=groups)


def _groups(wanted: Signature, items: list[tuple[int, int, int]], begin: int) -> tuple[Group, ...]:
    groups: list[Group] = []
    pending: list[tuple[int, int, int]] = []
    place = begin

    def close() -> None:
        nonlocal begin
        if pending:
            dtype = wanted[pending[0][0]][2]
            whole = all(count == wanted[i][4] for i, _, count in pending)
            groups.append(Group(dtype=dtype, begin=begin, nbytes=place - begin, items=tuple(pending), whole=whole))
            pending.clear()
        begin = place

    for item in items:
        dtype = wanted[item[0]][2]
        nbytes = item[2] * dtype.itemsize
        if pending and (
            wanted[pending[0][0]][2] != dtype or nbytes >= SMALL_BYTES or place - begin >= 64 * SMALL_BYTES
        ):
            close()
        pending.append(item)
        place += nbytes
        if nbytes >= SMALL_BYTES:
            close()
    close()
    return tuple(groups)
