"""What a checkpoint is: its manifest, and the commit that makes it one. No torch here: the launcher runs this.

    RUN/checkpoints/step-000000120/shard-<attempt>-<rank>-<n>.safetensors    written by the workers, under unique names
    RUN/checkpoints/step-000000120/manifest.json                             written last, by the launcher

A checkpoint exists when its manifest does. Files in the folder that the manifest does not list are leftovers.
"""

import json
import math
import re
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from rung.launcher.checkpoint.pieces import BadPieces, Pieces, Tensors, join, without_collector
from rung.launcher.storage import Store
from rung.strategies.errors import CheckpointDamaged, StorageError

ROOT = "checkpoints"
NAME = "manifest.json"
LIMIT_BYTES = 256 << 20  # a manifest is not read if it is larger: about 16 TB of state
HASH_BYTES = 8  # xxh3_64 of each block, big-endian
_FOLDER = re.compile(r"step-([0-9]{9,15})")


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    """One file: its size, and the hashes of its blocks of `block_bytes` (the last may be shorter), back to back."""

    name: str
    size: int
    block_bytes: int
    hashes: bytes

    def window(self, wanted_bytes: int) -> int:
        """Bytes that one call reads of it: whole blocks, about `wanted_bytes`, so that no call is left with a crumb."""
        calls = max(1, round(self.size / wanted_bytes))
        return max(1, -(-self.size // (calls * self.block_bytes))) * self.block_bytes


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Part:
    """What one worker wrote for one checkpoint: everything about it that the launcher needs. Plain, small, picklable.

    table: JSON list of [name, shape, dtype] that `pieces.tensor` counts in. Workers that hold pieces of the same
        tensors have equal tables, which are kept once.
    meta: whatever was given to `Saver.snapshot`.
    """

    step: int
    rank: int
    world: int
    attempt: str
    files: tuple[FileEntry, ...]
    table: str
    pieces: Pieces
    meta: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "table", sys.intern(self.table))

    def __reduce__(self) -> tuple[object, ...]:
        return _part, ({name: getattr(self, name) for name in self.__slots__},)

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return sum(f.size for f in self.files)


def _part(values: dict[str, Any]) -> Part:
    return Part(**values)


@dataclass(frozen=True, kw_only=True, slots=True)
class Meta:
    """What a checkpoint says about the training besides its tensors.

    position: samples of the epoch that are done. trainer: schedule, guard windows and the like, as JSON values.
    aliases: tied names, each to the name that is stored. healthy: the guards had no doubt about these weights.
    metrics: those of the last validation. created_s: Unix time.
    """

    step: int
    epoch: int = 0
    position: int = 0
    global_batch: int = 1
    seed: int = 0
    job_digest: str = ""
    task_digest: str = ""
    world_size: int = 1
    strategy: str = "single"
    healthy: bool = True
    metrics: Mapping[str, float] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    trainer: Mapping[str, Any] = field(default_factory=dict)
    created_s: float = field(default_factory=time.time)


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest(Meta):
    """The whole of a checkpoint but its bytes. `folder` is where it was read from, relative to the store."""

    tensors: Tensors
    files: tuple[FileEntry, ...]
    folder: str = field(compare=False)

    @property
    def total_bytes(self) -> int:
        """Bytes of all its files."""
        return sum(f.size for f in self.files)

    def resolve(self, name: str) -> str:
        """The name under which a tensor is stored."""
        return self.aliases.get(name, name)

    def to_bytes(self) -> bytes:
        """The file's content."""
        from rung.launcher.checkpoint.manifest_json import dump

        return dump(self)

    @classmethod
    def from_bytes(cls, data: bytes, *, folder: str) -> "Manifest":
        """The inverse of `to_bytes`; raises `ValueError` saying what is wrong with bytes that nobody vouches for."""
        from rung.launcher.checkpoint.manifest_json import parse

        return parse(data, folder)

    @classmethod
    def read(cls, store: Store, folder: str) -> "Manifest":
        """Reads the manifest of a checkpoint folder (relative to the store).

        Raises `ObjectMissing` if there is none, `CheckpointDamaged` if it is not one that can be used.
        """
        path = f"{folder}/{NAME}" if folder else NAME
        data = store.read(path, limit_bytes=LIMIT_BYTES)
        url = store.url_of(path)
        try:
            manifest = cls.from_bytes(data, folder=folder)
        except ValueError as error:
            raise CheckpointDamaged(f"{url} cannot be used: {error}", url=url, hint=OLDER) from None
        expected = step_of(folder.rpartition("/")[2])
        if expected is not None and manifest.step != expected:
            raise CheckpointDamaged(
                f"{url} is of step {manifest.step}, its folder of step {expected}", url=url, hint=OLDER
            )
        return manifest


OLDER = "an older checkpoint of the run may be whole: rung checkpoint verify tells"


def folder_of(step: int) -> str:
    """The folder of a step's checkpoint, relative to the run."""
    return f"{ROOT}/step-{step:09d}"


def step_of(folder_name: str) -> int | None:
    """The step that a folder's name stands for; None if it is not the name of a checkpoint."""
    match = _FOLDER.fullmatch(folder_name)
    return int(match.group(1)) if match else None


def merge(parts: Sequence[Part], meta: Meta, *, last: Manifest | None = None) -> Manifest:
    """One manifest from what all workers wrote.

    last: what the save before was merged to. Where the workers wrote the same tensors in the same way, as they do
    from save to save, its tensors are taken over: they have been checked, and their text is there.

    Raises `StorageError` if a worker's part is missing, or if the parts together do not hold each element of each
    tensor exactly once; it names the tensor and the elements.
    """
    parts = sorted(parts, key=lambda p: p.rank)
    _check_ranks(parts, meta)
    values = {name: getattr(meta, name) for name in Meta.__dataclass_fields__}
    origin = _origin(parts)
    tensors = last.tensors if last is not None and last.tensors.origin == origin else _join(parts, meta, origin)
    files = tuple(file for part in parts for file in part.files)
    return Manifest(**values, tensors=tensors, files=files, folder=folder_of(meta.step))


def _origin(parts: Sequence[Part]) -> bytes:
    """A digest of what the parts say about their tensors; names and hashes of files do not count."""
    hasher = xxhash.xxh3_128()
    tables = {table: xxhash.xxh3_128_digest(table.encode()) for table in {part.table for part in parts}}
    for part in parts:
        pieces = part.pieces
        hasher.update(struct.pack("<QQ", len(part.files), len(pieces)) + tables[part.table])
        for column in (pieces.tensor, pieces.file, pieces.start, pieces.length, pieces.offset):
            hasher.update(np.ascontiguousarray(column).data)
    return hasher.digest()


@without_collector()
def _join(parts: Sequence[Part], meta: Meta, origin: bytes) -> Tensors:
    ids: dict[str, int] = {}
    shapes: list[tuple[int, ...]] = []
    dtypes: list[str] = []
    tables: dict[str, np.ndarray[Any, np.dtype[np.int32]]] = {}
    first_files: list[int] = []
    files = 0
    for part in parts:
        first_files.append(files)
        files += len(part.files)
        if part.table not in tables:
            tables[part.table] = _register(part, ids, shapes, dtypes)
    names = list(ids)
    try:
        runs, first = join(
            [p.pieces for p in parts],
            [tables[p.table] for p in parts],
            first_files,
            names,
            [math.prod(shape) for shape in shapes],
        )
    except BadPieces as error:
        raise StorageError(f"the checkpoint of step {meta.step} is not whole: {error}", hint=_BUG) from None
    return Tensors(names, shapes, dtypes, runs, first, origin=origin)


_BUG = "this should not happen; the previous checkpoint stays valid"


def _check_ranks(parts: Sequence[Part], meta: Meta) -> None:
    world = parts[0].world if parts else 0
    if [p.rank for p in parts] != list(range(world)):
        missing = sorted(set(range(world)) - {p.rank for p in parts})
        raise StorageError(
            f"the checkpoint of step {meta.step} is not whole: of {world} workers, {missing or 'some'} "
            f"{'did not save' if missing else 'saved twice'}",
            hint=_BUG,
        )
    for part in parts:
        if (part.step, part.world) != (meta.step, world):
            raise StorageError(
                f"rank {part.rank} saved step {part.step} of {part.world} workers where step {meta.step} of {world} "
                "was expected",
                hint=_BUG,
            )


def _register(
    part: Part, ids: dict[str, int], shapes: list[tuple[int, ...]], dtypes: list[str]
) -> "np.ndarray[Any, np.dtype[np.int32]]":
    """Adds the tensors of a part's table to the lists; returns their numbers there."""
    numbers: list[int] = []
    known: dict[tuple[int, ...], tuple[int, ...]] = {}  # equal shapes are one object: quickly compared
    for name, listed, dtype in json.loads(part.table):
        i = ids.setdefault(name, len(ids))
        shape = tuple(listed)
        if i == len(shapes):
            shapes.append(known.setdefault(shape, shape))
            dtypes.append(dtype)
        elif (shapes[i], dtypes[i]) != (shape, dtype):
            raise StorageError(
                f"rank {part.rank} holds {name} as {dtype}{list(shape)}, another as {dtypes[i]}{list(shapes[i])}",
                hint=_BUG,
            )
        numbers.append(i)
    return np.array(numbers, dtype=np.int32)


def commit(store: Store, manifest: Manifest) -> str:
    """Makes the checkpoint real: sees that each file is there with its size, then writes the manifest.

    Returns the folder. Raises `StorageError` if a file is missing or has another size; nothing is committed then.
    On a local disk the names in the folder are durable before the manifest is, and the manifest's after it.
    """
    try:
        check_files(store, manifest)
    except CheckpointDamaged as error:  # not the checkpoint that a run goes on from: no reason to go back before that
        raise StorageError(
            f"the checkpoint of step {manifest.step} was not committed: {error.message}",
            url=error.url, hint="somebody deletes or alters files of this run while it trains",
        ) from None  # fmt: skip
    store.write_atomic(f"{manifest.folder}/{NAME}", manifest.to_bytes())
    return manifest.folder


def check_files(store: Store, manifest: Manifest) -> None:
    """Raises `CheckpointDamaged` unless each file of a checkpoint is there with its size. One listing, no reads."""
    found = store.sizes(manifest.folder)
    for file in manifest.files:
        size = found.get(file.name)
        if size != file.size:
            url = store.url_of(f"{manifest.folder}/{file.name}")
            what = "is missing" if size is None else f"has {size:,} bytes"
            raise CheckpointDamaged(f"{url} {what}, {file.size:,} bytes were written", url=url, hint=OLDER)
