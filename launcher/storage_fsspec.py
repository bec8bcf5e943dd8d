"""A folder of any store that fsspec knows, as `storage.Store` needs it. The only home of fsspec."""

import contextlib
import importlib
import io
import logging
import mmap
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

from rung.launcher.storage_errors import clean_url, secrets_of, storage_error
from rung.strategies.errors import DependencyError, JobError

STALL_S = 30.0  # how long a connection may be silent
_SLOWEST_BYTES_PER_S = 256 << 10  # an operation that moves data slower than this has stalled
_PART_BYTES = 32 << 20  # one part of a multi-part upload; objects of less than three go up whole
_PARTS_AT_ONCE = 4  # of each object
_REMOTE_PARALLEL = 16
_LARGE_BYTES = 1 << 20
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "abfs": "azure", "abfss": "azure", "az": "azure"}


class ShortRead(OSError):
    """A remote store sent fewer bytes than were asked for."""


class FsspecFolder:
    """A folder of an fsspec file system. Asynchronous ones are driven on fsspec's own loop, with a deadline each."""

    remote = True

    def __init__(self, filesystem: Any, root: str) -> None:
        self._fs = filesystem
        self._root = root.rstrip("/")
        self._asynchronous = bool(getattr(filesystem, "async_impl", False))
        self._protocols = set(filesystem.protocol if isinstance(filesystem.protocol, tuple) else (filesystem.protocol,))
        # Nothing says that a synchronous file system is safe to use from several threads.
        self._lock = threading.Lock()
        self.parallel = _REMOTE_PARALLEL if self._asynchronous else 2

    def url(self, path: str) -> str:
        return str(self._fs.unstrip_protocol(self._at(path)))

    def read(self, path: str, limit_bytes: int) -> bytes:
        size = self.size(path)
        if size > limit_bytes:
            raise ValueError(f"the object has {size} bytes, more than the {limit_bytes} allowed for it")
        data = bytes(self._call("cat_file", self._at(path), moves_bytes=size))
        if len(data) != size:
            raise ShortRead(f"{len(data)} bytes came instead of {size}")
        return data

    def read_into(self, path: str, offset: int, buffers: Sequence[memoryview]) -> None:
        count = sum(map(len, buffers))
        if count == 0:
            return
        data = self._call("cat_file", self._at(path), start=offset, end=offset + count, moves_bytes=count)
        if len(data) != count:
            raise ShortRead(f"{len(data)} bytes came instead of {count}")
        view, start = memoryview(data), 0
        for buffer in buffers:
            _copy(buffer, view[start : start + len(buffer)])
            start += len(buffer)

    def write(self, path: str, data: memoryview) -> None:
        protocols, body = self._protocols, _Body(data)
        if "s3" in protocols and len(data) >= 3 * _PART_BYTES:
            parts = {"chunksize": _PART_BYTES, "max_concurrency": _PARTS_AT_ONCE}
            self._call("pipe_file", self._at(path), body, moves_bytes=len(data), **parts)
        elif "abfs" in protocols:
            self._call("pipe_file", self._at(path), body, moves_bytes=len(data))
        else:
            if not self._asynchronous:
                self._call("makedirs", self._fs._parent(self._at(path)), exist_ok=True)
            whole = _copy_of(data) if "s3" in protocols else bytes(data)
            self._call("pipe_file", self._at(path), whole, moves_bytes=len(data))

    def write_from(self, path: str, fill: Callable[[IO[bytes]], None]) -> None:
        with _collected(fill) as (file, size):
            if {"s3", "abfs"} & self._protocols:  # of which `write` uploads part by part
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content, memoryview(content) as view:
                    self.write(path, view)
            else:
                self._call("put_file", file.name, self._at(path), moves_bytes=size)

    def write_atomic(self, path: str, data: bytes) -> None:
        self.write(path, memoryview(data))  # an object appears whole or not at all

    def create_exclusive(self, path: str, data: bytes) -> bool:
        if self._fs.exists(self._at(path)):
            return False
        try:
            self._call("pipe_file", self._at(path), data, mode="create")
        except FileExistsError:
            return False
        return True

    def sizes(self, path: str) -> dict[str, int]:
        top = self._at(path)
        found = self._call("find", top, detail=True)
        skip = len(self._fs._strip_protocol(top)) + 1
        return {str(name)[skip:]: int(info.get("size") or 0) for name, info in found.items() if len(name) >= skip}

    def size(self, path: str) -> int:
        info = self._call("info", self._at(path))
        if info.get("type") == "directory":
            raise FileNotFoundError(f"{path} is a folder")
        return int(info["size"])

    def delete(self, path: str) -> None:
        self._call("rm_file", self._at(path))

    def delete_folder(self, path: str) -> None:
        top = self._at(path)
        if not (names := list(self._call("find", top))):
            raise FileNotFoundError(path)
        if self._asynchronous:
            self._call("rm", names)
        else:
            self._call("rm", top, recursive=True)

    def free_bytes(self) -> int | None:
        return None

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def _call(self, name: str, *args: Any, moves_bytes: int = 0, **kwargs: Any) -> Any:
        if not self._asynchronous:
            with self._lock:
                return getattr(self._fs, name)(*args, **kwargs)
        from fsspec.asyn import sync

        return sync(self._fs.loop, getattr(self._fs, f"_{name}"), *args, timeout=_seconds(moves_bytes), **kwargs)


@contextlib.contextmanager
def _collected(fill: Callable[[IO[bytes]], None]) -> Iterator[tuple[IO[bytes], int]]:
    """What `fill` writes as a temporary file, and its size: an upload that is broken off half-way may leave an object
    that looks whole."""
    folder = tempfile.gettempdir()
    with tempfile.NamedTemporaryFile(dir=folder, prefix="rung-upload-") as file:
        try:
            fill(file)
            file.flush()
        except OSError as error:
            failed = storage_error(error, doing="collecting an object in", url=folder)
            failed.hint = "TMPDIR names another folder for temporary files"
            raise failed from None
        yield file, file.tell()


def _copy(target: memoryview, source: memoryview) -> None:
    """Large ones by numpy, which lets other threads run meanwhile: the one that sends and receives, above all."""
    if len(source) < _LARGE_BYTES:
        target[:] = source
        return
    import numpy as np

    np.copyto(np.frombuffer(target, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))


def _copy_of(data: memoryview) -> bytearray:
    copy = bytearray(len(data))
    _copy(memoryview(copy), data)
    return copy


class _Body(io.RawIOBase):
    """A view of memory that s3fs (by slices) and adlfs (as a file) upload part by part, without a copy of the whole."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._place = 0

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, which: slice) -> bytes:
        return bytes(self._data[which])

    def read(self, count: int | None = -1, /) -> bytes:
        stop = len(self._data) if count is None or count < 0 else self._place + count
        part = bytes(self._data[self._place : stop])
        self._place += len(part)
        return part

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._place = offset + (0, self._place, len(self._data))[whence]
        return self._place

    def tell(self) -> int:
        return self._place

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


def _seconds(moves_bytes: int) -> float:
    """How long an operation that moves so many bytes may take before it counts as stalled."""
    return 2 * STALL_S + moves_bytes / _SLOWEST_BYTES_PER_S


def open_folder(url: str, scheme: str, options: Mapping[str, Any], stall_s: float) -> FsspecFolder:
    """The folder at a URL. `stall_s`: how long a connection may be silent. Raises as `Store.open` does."""
    import fsspec

    options = dict(options)
    if scheme in ("s3", "s3a"):
        # Silent connections end early, and repeating is left to the one place that knows the deadline.
        config = {"connect_timeout": stall_s, "read_timeout": stall_s, "retries": {"total_max_attempts": 2}}
        options["config_kwargs"] = {**config, **options.get("config_kwargs", {})}
    if scheme in _EXTRAS:
        options = {"use_listings_cache": False, "skip_instance_cache": True, **options}
    try:
        if _EXTRAS.get(scheme) == "gcs":
            return FsspecFolder(*_open_gcs(url, options, stall_s))
        return FsspecFolder(*fsspec.core.url_to_fs(url, **options))
    except ImportError as error:
        package = _EXTRAS.get(scheme)
        raise DependencyError(
            f"{scheme}:// needs a package that is not installed ({error})",
            hint=f'pip install "rung[{package}]"' if package else f"install the fsspec backend for {scheme}://",
        ) from None
    except ValueError as error:
        if "not known" not in str(error):
            raise storage_error(error, doing="opening", url=url, secrets=secrets_of(options)) from None
        raise JobError(
            f"{clean_url(url)}: no store is known for {scheme}://",
            hint="use a path, or a URL such as s3://bucket/folder, gs://bucket/folder, abfs://container/folder",
        ) from None
    except Exception as error:
        raise storage_error(error, doing="opening", url=url, secrets=secrets_of(options)) from None


def _open_gcs(url: str, options: dict[str, Any], stall_s: float) -> tuple[Any, str]:
    import fsspec
    from aiohttp import ClientTimeout

    if "GCSFS_DEBUG" not in os.environ:
        # It logs each failure with its traceback; what matters of it is raised, and said by us without secrets.
        logging.getLogger("gcsfs").setLevel(logging.CRITICAL + 1)
    # Silent connections end early, as with the other stores.
    options = {"requests_timeout": ClientTimeout(total=None, sock_connect=stall_s, sock_read=stall_s), **options}
    if options.get("endpoint_url") or os.environ.get("STORAGE_EMULATOR_HOST"):
        # Not Google itself. gcsfs's usual class asks for the kind of the bucket by gRPC, which only Google answers: it
        # waits for a minute.
        filesystem = importlib.import_module("gcsfs.core").GCSFileSystem(**options)
        root = str(filesystem._strip_protocol(url))
    else:
        filesystem, root = fsspec.core.url_to_fs(url, **options)
    once = getattr(type(filesystem)._request, "__wrapped__", None)
    if once is not None:
        # It tries each request six times in half a minute. Repeating is left to the one place that knows the deadline.
        filesystem._request = once.__get__(filesystem)
    return filesystem, root
