"""Where state is kept: one folder on a local disk or on any store that fsspec knows. The only home of fsspec.

Every method of `Store` blocks, may be called from many threads at once, tries transient failures again until a
deadline, and raises nothing but `StorageError` (`ObjectMissing` where there is no such object). Parallelism is the
caller's: it runs `Store.parallel` calls at a time. No torch here: the launcher process uses this too.
"""

import importlib
import io
import logging
import os
import random
import secrets as random_secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rung.launcher.storage_errors import Trouble, classify, clean_url, secrets_of, storage_error
from rung.launcher.storage_local import LocalDisk
from rung.strategies.errors import DependencyError, JobError, ObjectMissing, RungError, StorageError

PATIENCE_S = 120.0  # how long one operation is tried again before its failure counts
STALL_S = 30.0  # how long a connection may be silent
SMALL_BYTES = 64 << 20  # the most that `read` returns unless told otherwise
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 10.0
_SLOWEST_BYTES_PER_S = 256 << 10  # an operation that moves data slower than this has stalled
_PART_BYTES = 32 << 20  # one part of a multi-part upload; objects of less than three go up whole
_PARTS_AT_ONCE = 4  # of each object
_LOCAL_WINDOW_BYTES, _REMOTE_WINDOW_BYTES = 8 << 20, 16 << 20  # of one read
_REMOTE_PARALLEL = 16
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "abfs": "azure", "abfss": "azure", "az": "azure"}

Result = TypeVar("Result")


class Backend(Protocol):
    """What `Store` needs of a kind of store. Paths are relative to the store's folder."""

    remote: bool
    parallel: int

    def url(self, path: str) -> str: ...
    def read(self, path: str, limit_bytes: int) -> bytes: ...
    def read_into(self, path: str, offset: int, buffers: Sequence[memoryview]) -> None: ...
    def write(self, path: str, data: memoryview) -> None: ...
    def write_atomic(self, path: str, data: bytes) -> None: ...
    def create_exclusive(self, path: str, data: bytes) -> bool: ...
    def sizes(self, path: str) -> dict[str, int]: ...
    def size(self, path: str) -> int: ...
    def delete(self, path: str) -> None: ...
    def delete_folder(self, path: str) -> None: ...
    def free_bytes(self) -> int | None: ...


class Store:
    """A folder in a store. Made by `Store.open`; holds no connection that a fork could break until first used."""

    def __init__(self, backend: Backend, *, secrets: tuple[str, ...] = (), patience_s: float = PATIENCE_S) -> None:
        self._backend = backend
        self._secrets = secrets
        self.patience_s = patience_s
        self.remote = backend.remote
        self.parallel = backend.parallel
        self.window_bytes = _REMOTE_WINDOW_BYTES if backend.remote else _LOCAL_WINDOW_BYTES
        self.url = clean_url(backend.url(""))

    @classmethod
    def open(
        cls,
        url: str,
        options: Mapping[str, Any] | None = None,
        *,
        patience_s: float = PATIENCE_S,
        stall_s: float = STALL_S,
    ) -> "Store":
        """Opens a path or any fsspec URL; makes nothing there and, for most stores, does not connect yet.

        `options` go to the file system's constructor; credentials that are not given come from the environment, as
        the backend has it. Raises `DependencyError` when the backend's package is missing, `JobError` for a kind of
        URL that nobody knows, `StorageError` when the backend refuses the options.
        """
        secrets = secrets_of(options)
        scheme = url.partition("://")[0].lower() if "://" in url else "file"
        if scheme in ("file", "local"):
            path = url.partition("://")[2] if "://" in url else url
            return cls(LocalDisk(path), secrets=secrets, patience_s=patience_s)
        return cls(_open_fsspec(url, scheme, dict(options or {}), stall_s), secrets=secrets, patience_s=patience_s)

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    def url_of(self, path: str) -> str:
        """The full URL or path of an object, without credentials."""
        return clean_url(self._backend.url(path))

    def local_path(self, path: str = "") -> Path | None:
        """The path on this machine's file system; None for a remote store."""
        return None if self.remote else Path(self._backend.url(path))

    def read(self, path: str, *, limit_bytes: int = SMALL_BYTES) -> bytes:
        """A whole small object. One that is larger than `limit_bytes` is refused before it is read."""
        return self._try("reading", path, lambda: self._backend.read(path, limit_bytes))

    def read_into(self, path: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fills `buffers`, one after the other, with the bytes from `offset` on. Short data is an error."""
        self._try("reading", path, lambda: self._backend.read_into(path, offset, buffers))

    def read_ranges(self, path: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Fills each buffer with the bytes from its offset on, `parallel` ranges at a time."""
        from concurrent.futures import ThreadPoolExecutor

        if len(ranges) == 1:
            self.read_into(path, ranges[0][0], [ranges[0][1]])
            return
        with ThreadPoolExecutor(max_workers=max(1, min(self.parallel, len(ranges)))) as pool:
            for _ in pool.map(lambda r: self.read_into(path, r[0], [r[1]]), ranges):
                pass

    def write(self, path: str, data: memoryview | bytes) -> None:
        """Writes a whole object and returns when it is durable. A large one goes up in parts, in parallel.

        On a local disk an interrupted write leaves a short file: name it so that nobody looks for it before a commit.
        """
        view = memoryview(data).cast("B")
        self._try("writing", path, lambda: self._backend.write(path, view))

    def write_atomic(self, path: str, data: bytes) -> None:
        """Replaces a small object: every reader, at any time, sees the old one or the new one."""
        self._try("writing", path, lambda: self._backend.write_atomic(path, data))

    def create_exclusive(self, path: str, data: bytes) -> bool:
        """Creates a small object unless there is one; true if this call did.

        Some object stores ignore the condition, so two callers may both be told yes: read back after a moment to
        see who was last.
        """
        return self._try("creating", path, lambda: self._backend.create_exclusive(path, data))

    def exists(self, path: str) -> bool:
        """Whether there is such an object (not a folder)."""
        try:
            self.size(path)
        except ObjectMissing:
            return False
        return True

    def size(self, path: str) -> int:
        """Size of an object in bytes."""
        return self._try("looking up", path, lambda: self._backend.size(path))

    def sizes(self, path: str = "") -> dict[str, int]:
        """Sizes in bytes of all objects below a folder, by path relative to it; empty if there is no such folder."""

        def listing() -> dict[str, int]:
            try:
                return self._backend.sizes(path)
            except FileNotFoundError:
                return {}

        return self._try("listing", path, listing)

    def list(self, path: str = "") -> list[str]:
        """Paths of all objects below a folder, relative to it, sorted."""
        return sorted(self.sizes(path))

    def delete(self, path: str) -> None:
        """Deletes an object; one that is gone already is fine."""
        self._try("deleting", path, lambda: _unless_missing(self._backend.delete, path))

    def delete_folder(self, path: str) -> None:
        """Deletes a folder with all that is in it; one that is gone already is fine."""
        self._try("deleting", path, lambda: _unless_missing(self._backend.delete_folder, path))

    def free_bytes(self) -> int | None:
        """Bytes that may still be written; None where the store cannot tell."""
        return self._try("measuring", "", self._backend.free_bytes)

    def require_free(self, needed_bytes: int) -> None:
        """Raises `StorageError` if the store can tell that it has less room than `needed_bytes`."""
        free = self.free_bytes()
        if free is not None and free < needed_bytes:
            raise StorageError(
                f"{self.url} has {free / 2**20:,.1f} MiB free, {needed_bytes / 2**20:,.1f} MiB are needed",
                url=self.url,
                hint="free some space, lower checkpoint.keep, or choose another run folder",
            )

    def probe(self) -> None:
        """Writes, reads and deletes a small object, so that a store that cannot be used is known before training.

        Raises `StorageError` saying which of the three failed and why.
        """
        name = f".probe-{random_secrets.token_hex(8)}"
        content = random_secrets.token_bytes(64)
        self.write(name, content)
        try:
            found = self.read(name)
        finally:
            self.delete(name)
        if found != content:
            raise StorageError(
                f"{self.url_of(name)} was written, but other bytes were read back", url=self.url, hint="check the store"
            )

    def _try(self, doing: str, path: str, act: Callable[[], Result]) -> Result:
        """Runs `act`, again after transient failures, until `patience_s` has passed since the first of them."""
        deadline: float | None = None
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return act()
            except RungError:
                raise
            except Exception as error:
                now = time.monotonic()
                deadline = now + self.patience_s if deadline is None else deadline
                if classify(error) is not Trouble.TRANSIENT or now + pause_s >= deadline:
                    raise storage_error(error, doing=doing, url=self.url_of(path), secrets=self._secrets) from None
            time.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


class ShortRead(OSError):
    """A remote store sent fewer bytes than were asked for."""


class FsspecFolder:
    """A folder of an fsspec file system. Asynchronous ones are driven on fsspec's own loop, with a deadline each."""

    remote = True

    def __init__(self, filesystem: Any, root: str) -> None:
        self._fs = filesystem
        self._root = root.rstrip("/")
        self._asynchronous = bool(getattr(filesystem, "async_impl", False))
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
            buffer[:] = view[start : start + len(buffer)]
            start += len(buffer)

    def write(self, path: str, data: memoryview) -> None:
        protocols = self._fs.protocol if isinstance(self._fs.protocol, tuple) else (self._fs.protocol,)
        if "s3" in protocols and len(data) >= 3 * _PART_BYTES:
            body: Any = _Body(data)
            parts = {"chunksize": _PART_BYTES, "max_concurrency": _PARTS_AT_ONCE}
            self._call("pipe_file", self._at(path), body, moves_bytes=len(data), **parts)
        elif "abfs" in protocols:
            self._call("pipe_file", self._at(path), _Body(data), moves_bytes=len(data))
        else:
            if not self._asynchronous:
                self._call("makedirs", self._fs._parent(self._at(path)), exist_ok=True)
            self._call("pipe_file", self._at(path), bytes(data), moves_bytes=len(data))

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


def _unless_missing(act: Callable[[str], None], path: str) -> None:
    try:
        act(path)
    except Exception as error:
        if classify(error) is not Trouble.MISSING:
            raise


def _open_fsspec(url: str, scheme: str, options: dict[str, Any], stall_s: float) -> FsspecFolder:
    import fsspec

    if scheme in ("s3", "s3a"):
        # Silent connections end early, and repeating is left to the one place that knows the deadline.
        config = {"connect_timeout": stall_s, "read_timeout": stall_s, "retries": {"total_max_attempts": 2}}
        options["config_kwargs"] = {**config, **options.get("config_kwargs", {})}
    if scheme in _EXTRAS:
        options = {"use_listings_cache": False, "skip_instance_cache": True, **options}
    try:
        if _EXTRAS.get(scheme) == "gcs":
            return FsspecFolder(*_open_gcs(url, options))
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


def _open_gcs(url: str, options: dict[str, Any]) -> tuple[Any, str]:
    import fsspec

    if "GCSFS_DEBUG" not in os.environ:
        # It logs each failure with its traceback; what matters of it is raised, and said by us without secrets.
        logging.getLogger("gcsfs").setLevel(logging.CRITICAL + 1)
    if options.get("endpoint_url") or os.environ.get("STORAGE_EMULATOR_HOST"):
        # Not Google itself. gcsfs's usual class asks for the kind of the bucket by gRPC, which only Google answers: it
        # waits for a minute.
        filesystem = importlib.import_module("gcsfs.core").GCSFileSystem(**options)
        return filesystem, str(filesystem._strip_protocol(url))
    filesystem, root = fsspec.core.url_to_fs(url, **options)
    return filesystem, root
