"""What `rung checkpoint ls|verify|show|prune|export` does. No torch: these answer at once, anywhere."""

import json
import mmap
import struct
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import IO, Any

import numpy as np

from rung.launcher.checkpoint.find import CheckpointInfo, find, find_all
from rung.launcher.checkpoint.manifest import Manifest
from rung.launcher.checkpoint.pieces import ITEM_BYTES, Ints
from rung.launcher.checkpoint.reads import VerifiedFiles, plan_reads
from rung.launcher.checkpoint.retention import prune
from rung.launcher.storage import Store
from rung.strategies.errors import CheckpointDamaged, ObjectMissing, StorageError

__all__ = ["Check", "choose", "export", "find", "find_all", "prune", "show", "verify"]

EXPORT_FILE_BYTES = 1 << 30
_PREFIX = "model/"


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """Whether one checkpoint is whole: `damage` holds one line for each thing that is not."""

    folder: str
    step: int
    verified_bytes: int
    damage: tuple[str, ...]

    @property
    def whole(self) -> bool:
        return not self.damage


def choose(store: Store, step: int | None = None) -> CheckpointInfo:
    """The checkpoint of a step, or the newest. Raises `ObjectMissing` listing the steps there are."""
    infos = find(store)
    for info in infos:
        if step is None or info.step == step:
            return info
    steps = ", ".join(str(i.step) for i in infos[:20]) or "none"
    wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
    raise ObjectMissing(f"{store.url} has {wanted}; steps: {steps}", url=store.url, hint="check the run folder")


def verify(store: Store, info: CheckpointInfo) -> Check:
    """Reads every byte of a checkpoint and compares it with the hashes. Names all damage, not only the first."""
    try:
        manifest = Manifest.read(store, info.folder)
    except (CheckpointDamaged, ObjectMissing) as error:
        return Check(folder=info.folder, step=info.step, verified_bytes=0, damage=(error.message,))
    files = VerifiedFiles(store, manifest)
    windows = [
        (number, first, min(file.window(store.window_bytes), file.size - first))
        for number, file in enumerate(manifest.files)
        for first in range(0, file.size, file.window(store.window_bytes))
    ]

    def one(window: tuple[int, int, int]) -> str | None:
        number, first, count = window
        try:
            files.read(number, first // manifest.files[number].block_bytes, [memoryview(bytearray(count))])
        except CheckpointDamaged as error:
            return error.message
        return None

    with ThreadPoolExecutor(max_workers=store.parallel) as pool:
        damage = [message for message in pool.map(one, windows) if message is not None]
    return Check(
        folder=info.folder,
        step=info.step,
        verified_bytes=manifest.total_bytes,
        damage=tuple(dict.fromkeys(damage)),
    )


def show(store: Store, info: CheckpointInfo) -> dict[str, Any]:
    """What a checkpoint says about itself, as plain values; tensors as name to {shape, dtype, pieces}."""
    manifest = Manifest.read(store, info.folder)
    tensors = manifest.tensors
    pieces = [int(tensors.runs[a:b, 2].sum()) for a, b in zip(tensors.first[:-1], tensors.first[1:], strict=True)]
    facts = ("step", "epoch", "position", "global_batch", "seed", "world_size", "strategy", "healthy", "created_s")
    return {
        **{name: getattr(manifest, name) for name in facts},
        "metrics": dict(manifest.metrics),
        "files": len(manifest.files),
        "bytes": manifest.total_bytes,
        "aliases": dict(manifest.aliases),
        "trainer": dict(manifest.trainer),
        "tensors": {
            name: {"shape": list(shape), "dtype": dtype, "pieces": count}
            for name, shape, dtype, count in zip(tensors.names, tensors.shapes, tensors.dtypes, pieces, strict=True)
        },
    }


def export(store: Store, info: CheckpointInfo, target: Store, *, config: Mapping[str, Any] | None = None) -> list[str]:
    """Writes the model (no optimizer) as plain safetensors that any tool reads; returns the names of the files.

    Whole tensors under the model's own names, in `model.safetensors`, or in numbered files of about 1 GiB with
    `model.safetensors.index.json`. `config` is written as `config.json`, which makes it the layout that Hugging Face's
    `from_pretrained` reads. Every byte is verified on its way; in memory is a chunk of some MiB, whatever the size of
    a tensor.
    """
    manifest = Manifest.read(store, info.folder)
    tensors = manifest.tensors
    names = [n for n in tensors.names if n.startswith(_PREFIX)]
    if not names:
        raise StorageError(f"{store.url_of(info.folder)} holds no model", url=store.url, hint="check the run folder")
    groups = list(_grouped(manifest, names))
    written: list[str] = []
    where: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        name = "model.safetensors" if len(groups) == 1 else f"model-{number:05}-of-{len(groups):05}.safetensors"
        target.write_from(name, partial(_write, store, manifest, group))
        written.append(name)
        where |= {n.removeprefix(_PREFIX): name for n in group}
    if len(groups) > 1:
        total = sum(_bytes_of(manifest, n) for n in names)
        index = {"metadata": {"total_size": total}, "weight_map": where}
        target.write_atomic("model.safetensors.index.json", json.dumps(index, indent=1).encode())
        written.append("model.safetensors.index.json")
    if config is not None:
        target.write_atomic("config.json", json.dumps(dict(config), indent=2).encode())
        written.append("config.json")
    return written


def _grouped(manifest: Manifest, names: list[str]) -> Iterator[list[str]]:
    group: list[str] = []
    size = 0
    for name in names:
        nbytes = _bytes_of(manifest, name)
        if group and size + nbytes > EXPORT_FILE_BYTES:
            yield group
            group, size = [], 0
        group.append(name)
        size += nbytes
    yield group


def _bytes_of(manifest: Manifest, name: str) -> int:
    i = manifest.tensors.index[name]
    return int(np.prod(manifest.tensors.shapes[i], dtype=np.int64)) * ITEM_BYTES[manifest.tensors.dtypes[i]]


def _write(store: Store, manifest: Manifest, names: list[str], file: IO[bytes]) -> None:
    """A safetensors file of whole tensors: first its header, then the data a chunk at a time."""
    tensors = manifest.tensors
    names = sorted(names, key=lambda n: -ITEM_BYTES[tensors.dtypes[tensors.index[n]]])
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in names:
        i, nbytes = tensors.index[name], _bytes_of(manifest, name)
        entries[name.removeprefix(_PREFIX)] = {
            "dtype": tensors.dtypes[i],
            "shape": list(tensors.shapes[i]),
            "data_offsets": [offset, offset + nbytes],
        }
        offset += nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)
    file.write(struct.pack("<Q", len(text)) + text)
    # Over a network several reads at a time pay; of a disk one window is read about as fast as it is written.
    most = store.window_bytes * (4 if store.remote else 1)
    memory, files = bytearray(min(most, offset)), VerifiedFiles(store, manifest)
    for chunk in _chunks(manifest, names, most):
        sizes = (chunk.length * chunk.item).tolist()
        stops = list(accumulate(sizes))
        view = memoryview(memory)
        _gather(files, manifest, chunk, [view[b - size : b] for b, size in zip(stops, sizes, strict=True)], store)
        file.write(view[: stops[-1]])


@dataclass(frozen=True, kw_only=True, slots=True)
class _Chunk:
    """Runs of elements that are written one after the other; columns: tensor, first element, elements, their width."""

    which: Ints
    start: Ints
    length: Ints
    item: Ints


def _chunks(manifest: Manifest, names: list[str], most_bytes: int) -> Iterator[_Chunk]:
    """The tensors in this order, cut into chunks of at most so many bytes: many small ones or a part of a large one."""
    rows: list[tuple[int, int, int, int]] = []
    room = most_bytes
    for name in names:
        i = manifest.tensors.index[name]
        item, at = ITEM_BYTES[manifest.tensors.dtypes[i]], 0
        left = _bytes_of(manifest, name) // item
        while left:
            count = min(left, room // item)
            if count == 0:  # wider elements than what is left of a chunk
                yield _chunk(rows)
                rows, room = [], most_bytes
                continue
            rows.append((i, at, count, item))
            at, left, room = at + count, left - count, room - count * item
    if rows:
        yield _chunk(rows)


def _chunk(rows: list[tuple[int, int, int, int]]) -> _Chunk:
    which, start, length, item = np.array(rows, dtype=np.int64).T
    return _Chunk(which=which, start=start, length=length, item=item)


def _gather(files: VerifiedFiles, manifest: Manifest, chunk: _Chunk, targets: list[memoryview], store: Store) -> None:
    """Brings a chunk into memory, verified."""
    segments = plan_reads(
        manifest.tensors,
        manifest.files,
        chunk.which,
        chunk.start,
        chunk.length,
        item_bytes=chunk.item,
        window_bytes=store.window_bytes,
    )
    stops = np.append(segments.tasks[1:], len(segments.file))

    def one(task: int) -> None:
        rows = slice(int(segments.tasks[task]), int(stops[task]))
        number = int(segments.file[rows.start])
        entry = manifest.files[number]
        first = int(segments.offset[rows.start]) // entry.block_bytes
        begin = first * entry.block_bytes
        stop = int((segments.offset[rows] + segments.nbytes[rows]).max())
        end = min(-(-stop // entry.block_bytes) * entry.block_bytes, entry.size)
        memory = memoryview(mmap.mmap(-1, end - begin))  # given back at once: the allocator keeps it for each thread
        files.read(number, first, [memory])
        columns = (segments.owner, segments.offset, segments.nbytes, segments.place)
        for owner, offset, count, place in zip(*(c[rows].tolist() for c in columns), strict=True):
            targets[owner][place : place + count] = memory[offset - begin : offset - begin + count]

    with ThreadPoolExecutor(max_workers=store.parallel) as pool:
        for _ in pool.map(one, range(len(segments.tasks))):
            pass
