"""A manifest as JSON text and back. Reading trusts nothing: a hostile or damaged file gives an error, never more."""

import itertools
import json
import math
import re
from collections.abc import Mapping
from json.encoder import encode_basestring_ascii as quoted
from typing import Any, TypeVar

import numpy as np
import xxhash

from rung.launcher.checkpoint.manifest import HASH_BYTES, LIMIT_BYTES, FileEntry, Manifest
from rung.launcher.checkpoint.pieces import (
    COUNT,
    FILE,
    FILE_STEP,
    ITEM_BYTES,
    LENGTH,
    OFFSET,
    START,
    Ints,
    Tensors,
    check_runs,
    without_collector,
)

VERSION = 1
_FORMAT = "rung checkpoint"
_HEAD = '{"xxh3_64": "%s", "manifest": '
_HEAD_PATTERN = re.compile(rb'\{"xxh3_64": "([0-9a-f]{16})", "manifest": ')
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
_MOST_FILES = 1 << 20
_MOST_TENSORS = 1 << 22
_MOST_PIECES = 1 << 26
_MOST_BYTES = 1 << 50
_MOST_COUNT = 1 << 53
_NUMBERS = ("step", "epoch", "position", "global_batch", "seed", "world_size")
_TEXTS = ("job_digest", "task_digest", "strategy")

Kind = TypeVar("Kind")


def dump(manifest: Manifest) -> bytes:
    """The manifest as JSON, with a hash of its own text in front."""
    body = {
        "format": _FORMAT,
        "version": VERSION,
        **{name: getattr(manifest, name) for name in (*_NUMBERS, *_TEXTS)},
        "created_s": manifest.created_s,
        "healthy": manifest.healthy,
        "metrics": dict(manifest.metrics),
        "trainer": dict(manifest.trainer),
        "aliases": dict(manifest.aliases),
        "files": [[f.name, f.size, f.block_bytes, f.hashes.hex()] for f in manifest.files],
    }
    text = json.dumps(body, separators=(",", ":"))
    whole = f'{text[:-1]},"tensors":{_tensors_text(manifest.tensors)}}}'.encode()
    return (_HEAD % xxhash.xxh3_64_hexdigest(whole)).encode() + whole + b"}\n"


def _tensors_text(tensors: Tensors) -> str:
    """The tensors as JSON: name to shape, dtype and pieces. Kept with them, as saves of a run seldom differ in it."""
    if tensors.text is None:
        columns = [tensors.runs[:, which].tolist() for which in (FILE, START, LENGTH, OFFSET, COUNT, FILE_STEP)]
        # Put together by hand: 100,000 tensors take json.dumps, and the objects that it wants, five times as long.
        pieces = [
            f"[{file},{start},{length},{offset}]"
            if count == 1
            else f"[{file},{start},{length},{offset},{count},{step}]"
            for file, start, length, offset, count, step in zip(*columns, strict=True)
        ]
        first = tensors.first.tolist()
        if len(pieces) != len(tensors) or first != list(range(len(tensors) + 1)):
            pieces = [",".join(pieces[a:b]) for a, b in itertools.pairwise(first)]
        shapes = {shape: json.dumps(shape, separators=(",", ":")) for shape in set(tensors.shapes)}
        entries = [
            f'{quoted(name)}:{{"shape":{shapes[shape]},"dtype":"{dtype}","pieces":[{each}]}}'
            for name, shape, dtype, each in zip(tensors.names, tensors.shapes, tensors.dtypes, pieces, strict=True)
        ]
        tensors.text = "{" + ",".join(entries) + "}"
    return tensors.text


@without_collector()
def parse(data: bytes, folder: str) -> Manifest:
    """The manifest in `data`. Raises `ValueError` saying what is wrong with it."""
    if len(data) > LIMIT_BYTES:
        raise ValueError(f"it has {len(data):,} bytes, more than the {LIMIT_BYTES:,} allowed")
    head = _HEAD_PATTERN.match(data)
    if head is None or not data.endswith(b"}\n"):
        raise ValueError("it is not a whole manifest")
    text = memoryview(data)[head.end() : -2]
    expected, found = head.group(1).decode(), xxhash.xxh3_64_hexdigest(text)
    if expected != found:
        raise ValueError(f"it was altered (its hash should be {expected} and is {found})")
    try:
        body = json.loads(bytes(text))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON ({type(error).__name__})") from None
    body = _typed(body, dict, "the manifest")
    if body.get("format") != _FORMAT:
        raise ValueError("it is not a manifest of rung")
    if body.get("version") != VERSION:
        raise ValueError(f"its version is {body.get('version')!r}; this rung reads version {VERSION}")
    files = _files(_typed(body.get("files"), list, "files"))
    tensors = _tensors(_typed(body.get("tensors"), dict, "tensors"), files)
    values: dict[str, Any] = {name: _number(body.get(name), name, _MOST_COUNT) for name in _NUMBERS}
    values |= {name: _typed(body.get(name), str, name) for name in _TEXTS}
    return Manifest(
        **values,
        created_s=_real(body.get("created_s"), "created_s"),
        healthy=_typed(body.get("healthy"), bool, "healthy"),
        metrics=_metrics(_typed(body.get("metrics"), dict, "metrics")),
        trainer=_typed(body.get("trainer"), dict, "trainer"),
        aliases=_aliases(_typed(body.get("aliases"), dict, "aliases"), tensors),
        tensors=tensors,
        files=files,
        folder=folder,
    )


def _files(rows: list[Any]) -> tuple[FileEntry, ...]:
    if len(rows) > _MOST_FILES:
        raise ValueError(f"it lists {len(rows):,} files, more than {_MOST_FILES:,}")
    files: list[FileEntry] = []
    for row in rows:
        if type(row) is not list or len(row) != 4:
            raise ValueError("an entry of files is not [name, size, block, hashes]")
        name, size, block, hashes = row
        if type(name) is not str or not _FILE_NAME.fullmatch(name):
            raise ValueError(f"{str(name)[:80]!r} is not the name of a file in the folder of the checkpoint")
        size = _number(size, f"the size of {name}", _MOST_BYTES)
        block = _number(block, f"the block size of {name}", 1 << 30)
        if block < 1 << 16 or block % (1 << 16):
            raise ValueError(f"the block size of {name} is {block}, not a multiple of 64 KiB")
        count = -(-size // block)
        if type(hashes) is not str or len(hashes) != 2 * HASH_BYTES * count:
            raise ValueError(f"the hashes of {name} are not those of {count} blocks")
        digest = bytes.fromhex(hashes)  # a ValueError by itself, but it skips blanks
        if len(digest) != HASH_BYTES * count:
            raise ValueError(f"the hashes of {name} are not those of {count} blocks")
        files.append(FileEntry(name=name, size=size, block_bytes=block, hashes=digest))
    if len({f.name for f in files}) != len(files):
        raise ValueError("it lists a file twice")
    return tuple(files)


def _tensors(entries: dict[str, Any], files: tuple[FileEntry, ...]) -> Tensors:
    if len(entries) > _MOST_TENSORS:
        raise ValueError(f"it lists {len(entries):,} tensors, more than {_MOST_TENSORS:,}")
    names = list(entries)
    if names and not 0 < min(map(len, names)) <= max(map(len, names)) <= 4096:
        raise ValueError("the name of a tensor is empty, or longer than 4,096 characters")
    known: dict[Any, tuple[int, ...]] = {}  # equal shapes are checked once, and are one object
    shapes: list[tuple[int, ...]] = []
    dtypes: list[str] = []
    rows: list[list[int]] = []
    counts: list[int] = []
    for name, entry in entries.items():
        if type(entry) is not dict:
            raise ValueError(f"the entry of tensor {name[:80]!r} cannot be read")
        shape, dtype, pieces = entry.get("shape"), entry.get("dtype"), entry.get("pieces")
        try:
            shapes.append(known[tuple(shape) if type(shape) is list else ...])
        except (KeyError, TypeError):
            checked = _shape(shape, name)
            shapes.append(known.setdefault(checked, checked))
        if type(dtype) is not str or dtype not in ITEM_BYTES:
            raise ValueError(f"tensor {name[:80]} is of unknown type {str(dtype)[:20]!r}")
        dtypes.append(dtype)
        if type(pieces) is not list:
            raise ValueError(f"tensor {name[:80]} has no list of pieces")
        rows += pieces
        counts.append(len(pieces))
    table = _piece_table(rows, names, counts)
    first = [0, *itertools.accumulate(counts)]
    runs = np.empty_like(table)
    runs[:, [FILE, START, LENGTH, OFFSET, COUNT, FILE_STEP]] = table
    tensors = Tensors(names, shapes, dtypes, runs, np.array(first, dtype=np.int64))
    check_runs(tensors, np.array([f.size for f in files], dtype=np.int64), _MOST_PIECES)
    return tensors


def _piece_table(rows: list[list[int]], names: list[str], counts: list[int]) -> Ints:
    """The pieces of all tensors, shape (pieces, 6): checked all at once, and one by one to name what is not sound."""
    simple = set(map(type, rows)) <= {list} and set(map(len, rows)) <= {4, 6}
    if not (simple and set(map(type, itertools.chain.from_iterable(rows))) <= {int}):
        owners = itertools.chain.from_iterable(itertools.repeat(name, n) for name, n in zip(names, counts, strict=True))
        for name, piece in zip(owners, rows, strict=True):
            if type(piece) is not list or len(piece) not in (4, 6) or not all(type(x) is int for x in piece):
                raise ValueError(f"a piece of tensor {name[:80]} cannot be read")
    try:
        if set(map(len, rows)) == {4}:
            flat = np.fromiter(itertools.chain.from_iterable(rows), dtype=np.int64, count=4 * len(rows))
            return np.hstack((flat.reshape(-1, 4), np.tile(np.array([[1, 0]]), (len(rows), 1))))
        return np.array([row if len(row) == 6 else [*row, 1, 0] for row in rows], dtype=np.int64).reshape(-1, 6)
    except OverflowError:
        raise ValueError("a number of a piece is out of range") from None


def _shape(value: object, name: str) -> tuple[int, ...]:
    if type(value) is not list or len(value) > 64:
        raise ValueError(f"the shape of tensor {name[:80]} cannot be read")
    shape = tuple(_number(size, f"a size of tensor {name[:80]}", _MOST_COUNT) for size in value)
    if math.prod(shape) > _MOST_COUNT:
        raise ValueError(f"tensor {name[:80]} is too large")
    return shape


def _aliases(entries: dict[str, Any], tensors: Tensors) -> Mapping[str, str]:
    for name, target in entries.items():
        if type(target) is not str or target not in tensors or name in tensors:
            raise ValueError(f"the alias {name[:80]!r} does not stand for a tensor")
    return entries


def _metrics(entries: dict[str, Any]) -> Mapping[str, float]:
    return {name: _real(value, f"the metric {name[:80]}") for name, value in entries.items()}


def _number(value: object, what: str, most: int) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{what} is {str(value)[:40]!r}, not a whole number from 0 to {most}")
    return value


def _typed(value: object, kind: type[Kind], what: str) -> Kind:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{what} is missing or of the wrong type")
    return value


def _real(value: object, what: str) -> float:
    if type(value) not in (int, float):
        raise ValueError(f"{what} is not a number")
    try:
        return float(value)  # type: ignore[arg-type]
    except OverflowError:
        raise ValueError(f"{what} is out of range") from None
