"""Weights from outside, name by name: safetensors (one file or many with an index), torch files, runs of rung.

Nothing here is trusted: headers are bounded and checked before anything is allocated, and torch files are read with
`weights_only`, which runs no code.
"""

import json
import math
import struct
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from rung.launcher.checkpoint.find import newest_valid
from rung.launcher.checkpoint.layout import TORCH_DTYPES
from rung.launcher.checkpoint.load import Loader
from rung.launcher.checkpoint.manifest import NAME, ROOT, Manifest
from rung.launcher.storage import Store
from rung.strategies.errors import ObjectMissing, StorageError
from rung.strategies.shards import Interval

HEADER_LIMIT_BYTES = 100 << 20  # safetensors' own limit
INDEX_LIMIT_BYTES = 100 << 20
_READ_BYTES = 32 << 20
_TORCH_ENDINGS = (".pt", ".pth", ".bin", ".ckpt")
_WRAPPERS = ("module.", "_orig_mod.", "model/")
_NESTED = ("state_dict", "model_state_dict", "model", "module")

Shapes = Mapping[str, tuple[int, ...]]


class Weights(Protocol):
    """Named tensors that can be read in part."""

    @property
    def shapes(self) -> Shapes:
        """Shape by name."""
        ...

    def read(self, name: str, start: int, into: torch.Tensor) -> None:
        """Fills the 1-D tensor `into` with elements `start`, `start + 1`, ... of a tensor, converted if need be."""
        ...


def open_weights(url: str, options: Mapping[str, Any] | None = None) -> Weights:
    """The weights at a path or URL. Raises `StorageError` saying what was looked for if there are none."""
    folder, _, last = url.rstrip("/").rpartition("/")
    if last.endswith((".safetensors", ".json", *_TORCH_ENDINGS)):
        store = Store.open(folder or ("/" if url.startswith("/") else "."), options)
        if last == NAME:
            return RunWeights(store, Manifest.read(store, ""))
        return _open_file(store, last)
    return _open_folder(Store.open(url, options))


def _open_file(store: Store, name: str) -> Weights:
    if name.endswith(".json"):
        return _open_index(store, name)
    if name.endswith(".safetensors"):
        return SafetensorsWeights(store, [name])
    return TorchWeights(store, [name])


def _open_folder(store: Store) -> Weights:
    if store.exists(NAME):
        return RunWeights(store, Manifest.read(store, ""))
    if any(path.endswith(f"/{NAME}") for path in store.sizes(ROOT)):
        manifest, rejected = newest_valid(store)
        if manifest is None:
            raise StorageError(f"no checkpoint of {store.url} is whole: {rejected[0][1]}", url=store.url)
        return RunWeights(store, manifest)
    names = sorted(name for name in store.sizes() if "/" not in name)
    for ending in (".safetensors.index.json", ".bin.index.json"):
        for name in names:
            if name.endswith(ending):
                return _open_index(store, name)
    if tensors := [n for n in names if n.endswith(".safetensors")]:
        return SafetensorsWeights(store, tensors)
    if files := [n for n in names if n.endswith(_TORCH_ENDINGS)]:
        return TorchWeights(store, files)
    raise ObjectMissing(
        f"{store.url} holds no weights: no checkpoint of rung, no .safetensors, no {', no '.join(_TORCH_ENDINGS)}",
        url=store.url,
        hint="give a file, a folder with such files, or the folder of another run",
    )


def _open_index(store: Store, name: str) -> Weights:
    url = store.url_of(name)
    try:
        index = json.loads(store.read(name, limit_bytes=INDEX_LIMIT_BYTES))
        files = sorted(set(index["weight_map"].values()))
        outside = [f for f in files if "/" in f or "\\" in f or f.startswith(".")]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StorageError(f"{url} is not an index of weights: {error!r}", url=url, hint="check the file") from None
    if outside:
        raise StorageError(f"{url} names {outside[0][:80]!r}, outside its folder", url=url, hint="check the file")
    return SafetensorsWeights(store, files) if ".safetensors" in name else TorchWeights(store, files)


class RunWeights:
    """The `model/` tensors of a checkpoint of rung, verified as they are read."""

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self._loader = Loader(store, manifest)
        tensors = manifest.tensors
        self._stored = {n: (s, d) for n, s, d in zip(tensors.names, tensors.shapes, tensors.dtypes, strict=True)}
        names = {n: n for n in tensors.names} | dict(manifest.aliases)
        self._target = {n.removeprefix("model/"): t for n, t in names.items() if n.startswith("model/")}
        self.shapes = {n: self._stored[t][0] for n, t in self._target.items()}

    def read(self, name: str, start: int, into: torch.Tensor) -> None:
        target = self._target[name]
        shape, dtype = self._stored[target]
        interval = Interval(name=target, shape=shape, dtype=TORCH_DTYPES[dtype], start=start, data=into)
        self._loader.fill([interval])


class SafetensorsWeights:
    """One or more safetensors files."""

    def __init__(self, store: Store, files: list[str]) -> None:
        self._store = store
        self._place: dict[str, tuple[str, int, torch.dtype]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file in files:
            self._add(file)

    def read(self, name: str, start: int, into: torch.Tensor) -> None:
        file, begin, dtype = self._place[name]
        most = max(1, _READ_BYTES // dtype.itemsize)
        for first in range(0, into.numel(), most):
            run = into[first : first + most]
            staging = torch.empty(run.numel(), dtype=dtype)
            self._store.read_into(
                file, begin + (start + first) * dtype.itemsize, [staging.view(torch.uint8).numpy().data]
            )
            with torch.no_grad():
                run.copy_(staging)

    def _add(self, file: str) -> None:
        url = self._store.url_of(file)
        size = self._store.size(file)
        try:
            header, begin = self._header(file, size)
            for name, entry in header.items():
                if name != "__metadata__":
                    self._add_tensor(file, name, entry, begin, size)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise StorageError(
                f"{url} is not a sound safetensors file: {error}", url=url, hint="check the file"
            ) from None

    def _header(self, file: str, size: int) -> tuple[dict[str, Any], int]:
        if size < 8:
            raise ValueError(f"it has {size} bytes")
        prefix = bytearray(8)
        self._store.read_into(file, 0, [memoryview(prefix)])
        (length,) = struct.unpack("<Q", prefix)
        if not 2 <= length <= min(HEADER_LIMIT_BYTES, size - 8):
            raise ValueError(f"it says that its header has {length:,} bytes")
        text = bytearray(length)
        self._store.read_into(file, 8, [memoryview(text)])
        header = json.loads(text)
        if type(header) is not dict:
            raise ValueError("its header is not a mapping")
        return header, 8 + length

    def _add_tensor(self, file: str, name: str, entry: dict[str, Any], begin: int, size: int) -> None:
        shape, (low, high) = tuple(entry["shape"]), entry["data_offsets"]
        if not all(type(x) is int and 0 <= x <= 2**53 for x in (*shape, low, high)) or len(shape) > 64:
            raise ValueError(f"the entry of {name[:80]} is out of range")
        dtype = TORCH_DTYPES.get(entry["dtype"])
        if dtype is None:
            raise ValueError(f"{name[:80]} is of unknown type {str(entry['dtype'])[:20]}")
        if high - low != math.prod(shape) * dtype.itemsize or begin + high > size:
            raise ValueError(f"the bytes of {name[:80]} do not fit its shape, or end behind the file")
        self.shapes[name] = shape
        self._place[name] = (file, begin + low, dtype)


class TorchWeights:
    """One or more files of torch.save, whole in memory (mapped, where the file is local)."""

    def __init__(self, store: Store, files: list[str]) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        for file in files:
            self._tensors |= _tensors_of(_load_torch(store, file), store.url_of(file))
        self.shapes = {name: tuple(t.shape) for name, t in self._tensors.items()}

    def read(self, name: str, start: int, into: torch.Tensor) -> None:
        with torch.no_grad():
            into.copy_(self._tensors[name].reshape(-1)[start : start + into.numel()])


def _load_torch(store: Store, file: str) -> object:
    import pickle

    url = store.url_of(file)
    local = store.local_path(file)
    with tempfile.TemporaryDirectory(prefix="rung-weights-") as folder:
        path = local if local is not None else _download(store, file, Path(folder) / "weights")
        if not path.exists():
            raise ObjectMissing(f"{url} does not exist", url=url, hint="check init_from")
        try:
            return _torch_load(path, mapped=local is not None)
        except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, OSError) as error:
            said = str(error).split("\n")[0][:300]
            raise StorageError(
                f"{url} cannot be read as weights: {said}",
                url=url,
                hint="rung reads tensors only (weights_only=True), never code; save the state_dict, or use safetensors",
            ) from None


def _torch_load(path: Path, *, mapped: bool) -> object:
    import zipfile

    # Files older than torch 1.6 are no zip archives and cannot be mapped.
    return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped and zipfile.is_zipfile(path))


def _download(store: Store, file: str, target: Path) -> Path:
    size = store.size(file)
    with target.open("wb") as out:
        for begin in range(0, size, _READ_BYTES):
            part = bytearray(min(_READ_BYTES, size - begin))
            store.read_into(file, begin, [memoryview(part)])
            out.write(part)
    return target


def _tensors_of(content: object, url: str) -> dict[str, torch.Tensor]:
    """The tensors of a state_dict, which may be nested one level deep in a training checkpoint."""
    for _ in range(2):
        if not isinstance(content, Mapping):
            break
        tensors = {str(k): v for k, v in content.items() if isinstance(v, torch.Tensor)}
        if tensors:
            return {_unwrapped(name): tensor for name, tensor in tensors.items()}
        content = next((content[key] for key in _NESTED if isinstance(content.get(key), Mapping)), None)
    raise StorageError(f"{url} holds no tensors by name", url=url, hint="save model.state_dict()")


def _unwrapped(name: str) -> str:
    """A parameter's name without what DDP and torch.compile put in front."""
    while True:
        shorter = name
        for prefix in _WRAPPERS:
            shorter = shorter.removeprefix(prefix)
        if shorter == name:
            return name
        name = shorter
