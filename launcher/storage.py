"""Where state is kept: one folder on a local disk or on any store that fsspec knows.

Every method of `Store` blocks, may be called from many threads at once, tries transient failures again until a
deadline, and raises nothing but `StorageError` (`ObjectMissing` where there is no such object). Parallelism is the
caller's: it runs `Store.parallel` calls at a time. No torch here: the launcher process uses this too.
"""

import random
import secrets as random_secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol, TypeVar

from rung.launcher.storage_errors import Trouble, classify, clean_url, secrets_of, storage_error
from rung.launcher.storage_fsspec import STALL_S, open_folder
from rung.launcher.storage_local import MEMORY, LocalDisk
from rung.strategies.errors import ObjectMissing, RungError, StorageError

if TYPE_CHECKING:
    from rung.launcher.storage_local import Vectors

PATIENCE_S = 120.0  # how long one operation is tried again before its failure counts
PROBE_PATIENCE_S = 15.0
SMALL_BYTES = 64 << 20  # the most that `read` returns unless told otherwise
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 10.0
_LOCAL_WINDOW_BYTES, _REMOTE_WINDOW_BYTES = 8 << 20, 16 << 20  # of one read

Result = TypeVar("Result")


class Backend(Protocol):
    """What `Store` needs of a kind of store. Paths are relative to the store's folder."""

    remote: bool
    parallel: int

    def url(self, path: str) -> str: ...
    def read(self, path: str, limit_bytes: int) -> bytes: ...
    def read_into(self, path: str, offset: int, buffers: Sequence[memoryview]) -> None: ...
    def write(self, path: str, data: memoryview) -> None: ...
    def write_from(self, path: str, fill: Callable[[IO[bytes]], None]) -> None: ...
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
        return cls(open_folder(url, scheme, options or {}, stall_s), secrets=secrets, patience_s=patience_s)

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

    def read_vectors(self, path: str, offset: int, vectors: "Vectors") -> None:
        """The same for runs of this process's memory: rows of address and bytes, which the caller keeps alive."""
        if isinstance(self._backend, LocalDisk):
            disk = self._backend
            self._try("reading", path, lambda: disk.read_vectors(path, offset, vectors))
        else:
            self.read_into(path, offset, [MEMORY[begin : begin + count] for begin, count in vectors.tolist()])

    def expect(self, path: str, offset: int, count: int) -> None:
        """Says that these bytes will be read soon. Only a hint, which a disk can use: nothing is raised."""
        if isinstance(self._backend, LocalDisk):
            self._backend.expect(path, offset, count)

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

    def write_from(self, path: str, fill: Callable[[IO[bytes]], None]) -> None:
        """Writes a whole object out of what `fill` writes into the file that it is given: it is never in memory as a
        whole, and it appears when it is complete. What goes to a remote store is collected in a temporary file first.
        """
        self._try("writing", path, lambda: self._backend.write_from(path, fill))

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

        Somebody waits for the answer: a store that does not answer gets `PROBE_PATIENCE_S`, not its usual patience.
        Raises `StorageError` saying which of the three failed and why.
        """
        if self.patience_s > PROBE_PATIENCE_S:
            Store(self._backend, secrets=self._secrets, patience_s=PROBE_PATIENCE_S).probe()
            return
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


def _unless_missing(act: Callable[[str], None], path: str) -> None:
    try:
        act(path)
    except Exception as error:
        if classify(error) is not Trouble.MISSING:
            raise
