"""The local disk (or a mounted network disk) as a store: plain system calls, no copies, durable writes."""

import ctypes
import errno
import os
import secrets
import shutil
import stat
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Vectors = npt.NDArray[np.int64]  # shape (runs, 2): address, bytes
from typing import IO

CHUNK_BYTES = 8 << 20
_IOV_MAX = 1024  # the limit of Linux and of macOS
_HAS_PREADV = hasattr(os, "preadv")


class LocalDisk:
    """Files below one folder. Every method takes paths relative to it and raises plain `OSError`."""

    remote = False

    def __init__(self, root: str) -> None:
        self.root = Path(root).expanduser().absolute()
        self.parallel = min(8, max(2, 2 * (os.cpu_count() or 1)))

    def url(self, path: str) -> str:
        """The path as a user would write it."""
        return str(self.root / path) if path else str(self.root)

    def read(self, path: str, limit_bytes: int) -> bytes:
        """The whole file, which must not be larger than `limit_bytes`."""
        with (self.root / path).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > limit_bytes:
                raise ValueError(f"the file has {size} bytes, more than the {limit_bytes} allowed for it")
            return file.read(size)  # Python takes as much memory as it is asked to read, before it reads

    def read_into(self, path: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fills the buffers, one after the other, from one run of bytes; straight from the page cache, no copy."""
        descriptor = os.open(self.root / path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        try:
            pending = list(buffers)
            while pending:
                count = _read_some(descriptor, pending[:_IOV_MAX], offset)
                if count == 0:
                    raise EndOfFile(f"the file ends at byte {offset}, {sum(map(len, pending))} more were expected")
                offset += count
                pending = _drop(pending, count)
        finally:
            os.close(descriptor)

    def read_vectors(self, path: str, offset: int, vectors: "Vectors") -> None:
        """Fills runs of memory, given by address and bytes, as `read_into` fills buffers. The kernel goes through the
        table by itself: for small runs, a view of each would take longer than the read."""
        if _PREADV is None:
            self.read_into(path, offset, [MEMORY[begin : begin + count] for begin, count in vectors.tolist()])
            return
        descriptor = os.open(self.root / path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        try:
            pending = vectors
            while len(pending):
                part = pending[:_IOV_MAX]
                count = _PREADV(descriptor, part.ctypes.data, len(part), offset)
                if count < 0:
                    if (number := ctypes.get_errno()) == errno.EINTR:
                        continue
                    raise OSError(number, os.strerror(number), str(self.root / path))
                if count == 0:
                    raise EndOfFile(f"the file ends at byte {offset}, {pending[:, 1].sum()} more were expected")
                offset += count
                ends = part[:, 1].cumsum()
                done = int(ends.searchsorted(count, side="right"))
                pending = pending[done:]
                if done < len(part) and (filled := count - (int(ends[done - 1]) if done else 0)):
                    pending = pending.copy()
                    pending[0] += (filled, -filled)
        finally:
            os.close(descriptor)

    def expect(self, path: str, offset: int, count: int) -> None:
        """Sets the disk to work for a read that is to come, unless the bytes are in the page cache. Only a hint."""
        if not hasattr(os, "RWF_NOWAIT"):
            return
        with suppress(OSError):  # a file that is not there, or a file system that cannot tell, is told by the read
            descriptor = os.open(self.root / path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            try:
                os.preadv(descriptor, [bytearray(1)], offset + count - 1, os.RWF_NOWAIT)
            except BlockingIOError:
                os.posix_fadvise(descriptor, offset, count, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(descriptor)

    def write(self, path: str, data: memoryview) -> None:
        """Writes a whole new file and returns when its content is on the disk. Its name is durable after the next
        `write_atomic` into the same folder, which is how a checkpoint is committed."""
        self._write(self.root / path, data)

    def _write(self, target: Path, data: memoryview) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_CLOEXEC", 0), 0o644)
        try:
            start = 0
            while start < len(data):
                count = os.write(descriptor, data[start : start + CHUNK_BYTES])
                _start_writeback(descriptor, start, count)
                start += count
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def write_from(self, path: str, fill: Callable[[IO[bytes]], None]) -> None:
        """Replaces a file by what `fill` writes, once that is complete and on the disk."""
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._temporary(target)
        try:
            with temporary.open("xb") as file:
                fill(file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        self.sync_folder(target.parent)

    def write_atomic(self, path: str, data: bytes) -> None:
        """Replaces a small file: at any moment, also after a power cut, it has the old content or the new."""
        target = self.root / path
        temporary = self._temporary(target)
        try:
            self._write(temporary, memoryview(data))
            temporary.replace(target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        self.sync_folder(target.parent)
        self.sync_folder(target.parent.parent)  # the folder may be new

    def create_exclusive(self, path: str, data: bytes) -> bool:
        """Creates a small file, content and all, unless it exists. True if this call created it."""
        target = self.root / path
        temporary = self._temporary(target)
        try:
            self._write(temporary, memoryview(data))
            os.link(temporary, target)  # unlike open(O_EXCL), nobody can see the file without its content
        except FileExistsError:
            return False
        finally:
            temporary.unlink(missing_ok=True)
        self.sync_folder(target.parent)
        return True

    def sizes(self, path: str) -> dict[str, int]:
        """Sizes in bytes of all files at or below a folder, by path relative to that folder."""
        top = self.root / path
        found: dict[str, int] = {}
        for folder, _, names in os.walk(top):
            for name in names:
                file = Path(folder) / name
                with suppress(FileNotFoundError):  # another process may delete while we list
                    found[str(file.relative_to(top))] = file.stat().st_size
        return found

    def size(self, path: str) -> int:
        """Size of a file in bytes; a folder is not one."""
        facts = (self.root / path).stat()
        if stat.S_ISDIR(facts.st_mode):
            raise FileNotFoundError(f"{path} is a folder")
        return facts.st_size

    def delete(self, path: str) -> None:
        """Deletes one file."""
        (self.root / path).unlink()

    def delete_folder(self, path: str) -> None:
        """Deletes what is left of a folder, empty folders too."""
        shutil.rmtree(self.root / path)

    def free_bytes(self) -> int | None:
        """Bytes that this user may still write here."""
        folder = self.root
        while not folder.exists():
            folder = folder.parent
        facts = os.statvfs(folder)
        return facts.f_bavail * facts.f_frsize

    def sync_folder(self, folder: Path) -> None:
        """Makes the names in a folder durable."""
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            with suppress(OSError):  # some network file systems have no fsync for folders; their names are durable
                os.fsync(descriptor)
        finally:
            os.close(descriptor)

    @staticmethod
    def _temporary(target: Path) -> Path:
        return target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")


class EndOfFile(OSError):
    """The file is shorter than the read."""


def _find_sync_file_range() -> Callable[[int, int, int, int], int] | None:
    try:
        found = ctypes.CDLL(None, use_errno=True).sync_file_range
    except (OSError, AttributeError):  # not Linux
        return None
    found.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return found


_SYNC_FILE_RANGE = _find_sync_file_range()
_SYNC_FILE_RANGE_WRITE = 2  # begins to write what is dirty, and does not wait


def _start_writeback(descriptor: int, offset: int, count: int) -> None:
    """Sets the disk to work while the next bytes are copied. Only a hint: what goes wrong is told by fsync."""
    if _SYNC_FILE_RANGE is not None and count >= CHUNK_BYTES:
        _SYNC_FILE_RANGE(descriptor, offset, count, _SYNC_FILE_RANGE_WRITE)


def _find_preadv() -> Callable[[int, int, int, int], int] | None:
    try:
        found = ctypes.CDLL(None, use_errno=True).preadv
    except (OSError, AttributeError):
        return None
    if ctypes.sizeof(ctypes.c_void_p) != 8:  # a row of the table is not a `struct iovec` there
        return None
    found.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]
    found.restype = ctypes.c_ssize_t
    return found


_PREADV = _find_preadv()
# This process's memory, by address. Only slices that lie in what the caller owns and keeps alive are taken; one costs a
# tenth of what a new view of a tensor or an array does.
MEMORY = memoryview((ctypes.c_char * sys.maxsize).from_address(0)).cast("B")


def _read_some(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
    if _HAS_PREADV:
        return os.preadv(descriptor, buffers, offset)
    data = os.pread(descriptor, len(buffers[0]), offset)
    buffers[0][: len(data)] = data
    return len(data)


def _drop(buffers: list[memoryview], count: int) -> list[memoryview]:
    """The buffers without their first `count` bytes."""
    for i, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[i + 1 :]]
        count -= len(buffer)
    return []
