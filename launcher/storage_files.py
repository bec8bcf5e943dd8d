"""Reading data files by place, from a path or any fsspec URL: what data set readers stand on."""

import bisect
import fnmatch
import io
import mmap
import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rung.launcher.storage import Store
from rung.strategies.errors import DataError, ObjectMissing

_BLOCK_BYTES = 1 << 20
_BLOCKS = 16  # of a remote file that are kept, per process


class DataFile:
    """One file of data: `read` gives any range of its bytes. Safe to pickle and to fork; each process opens its own.

    A local file is mapped into memory, so that what is read often comes from the page cache; of a remote one the last
    16 MiB are kept, in blocks.
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        self._options = dict(options or {})
        folder, _, name = url.rpartition("/")
        self._folder, self._name = (folder or ("/" if url.startswith("/") else ".")), name
        store = Store.open(self._folder, self._options)
        self.url = store.url_of(name)
        self.name = name
        self.size = store.size(name)
        self._forget()

    def _forget(self) -> None:
        self._pid = os.getpid()
        self._store: Store | None = None
        self._map: mmap.mmap | None = None
        self._blocks: OrderedDict[int, bytes] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        keep = ("_options", "_folder", "_name", "url", "name", "size")
        return {name: getattr(self, name) for name in keep}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def __repr__(self) -> str:
        return f"DataFile({self.url!r})"

    def read(self, start: int, stop: int) -> bytes:
        """Bytes start..stop-1; less at the end of the file. Raises StorageError."""
        stop = min(stop, self.size)
        if stop <= start:
            return b""
        if self._pid != os.getpid():
            self._forget()
        if self._store is None:
            self._store = Store.open(self._folder, self._options)
            path = self._store.local_path(self._name)
            if path is not None:
                with path.open("rb") as file:
                    self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if self._map is not None:
            return self._map[start:stop]
        if stop - start > _BLOCK_BYTES * _BLOCKS // 2:
            return self._fetch(start, stop)
        first, last = start // _BLOCK_BYTES, (stop - 1) // _BLOCK_BYTES
        data = b"".join(self._block(number) for number in range(first, last + 1))
        return data[start - first * _BLOCK_BYTES : stop - first * _BLOCK_BYTES]

    def _block(self, number: int) -> bytes:
        found = self._blocks.get(number)
        if found is None:
            found = self._fetch(number * _BLOCK_BYTES, min(self.size, (number + 1) * _BLOCK_BYTES))
            self._blocks[number] = found
            while len(self._blocks) > _BLOCKS:
                self._blocks.popitem(last=False)
        self._blocks.move_to_end(number)
        return found

    def _fetch(self, start: int, stop: int) -> bytes:
        assert self._store is not None
        buffer = bytearray(stop - start)
        self._store.read_into(self._name, start, [memoryview(buffer)])
        return bytes(buffer)

    def open(self) -> io.BufferedReader:
        """A file object for libraries that want one."""
        return io.BufferedReader(_Raw(self), buffer_size=1 << 16)

    def local_path(self) -> Path | None:
        """Where it lies on this machine's file system; None for a remote one."""
        return Store.open(self._folder, self._options).local_path(self._name)


class _Raw(io.RawIOBase):
    def __init__(self, file: DataFile) -> None:
        self._file = file
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0, /) -> int:
        self._place = offset + (0, self._place, self._file.size)[whence]
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, buffer: Any, /) -> int:
        data = self._file.read(self._place, self._place + len(buffer))
        buffer[: len(data)] = data
        self._place += len(data)
        return len(data)


def find_files(
    urls: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    endings: Sequence[str],
    options: Mapping[str, Any] | None = None,
) -> list[DataFile]:
    """The files that one or more paths or URLs name: a file, a pattern with * or ? in its last part, or a folder, of
    which all files below it with one of `endings` are taken, in order of name.

    Raises DataError where there is none, StorageError where the store refuses.
    """
    listed = [urls] if isinstance(urls, str | os.PathLike) else list(urls)
    found: list[DataFile] = []
    for path in listed:
        url = os.fspath(path)
        found += _expand(url.rstrip("/") or "/", tuple(endings), options)
    if not found:
        raise DataError("no data files were named", hint="give a path or URL, or several")
    return found


def _expand(url: str, endings: tuple[str, ...], options: Mapping[str, Any] | None) -> list[DataFile]:
    folder, _, last = url.rpartition("/")
    if "*" in last or "?" in last:
        names = [n for n in sorted(list_files(folder or ".", options)) if fnmatch.fnmatchcase(n, last)]
        top = folder or "."
    else:
        try:
            return [DataFile(url, options)]
        except ObjectMissing:
            names = [n for n in sorted(list_files(url, options)) if n.lower().endswith(endings)]
            top = url
    if not names:
        raise DataError(
            f"{Store.open(top, options).url}: no file here matches {last if top != url else ' or '.join(endings)}",
            hint="check the path, and that the data is there on this machine",
        )
    return [DataFile(f"{top}/{name}", options) for name in names]


def list_files(url: str, options: Mapping[str, Any] | None = None) -> list[str]:
    """Paths of all files below a folder, relative to it; none if there is no such folder."""
    return sorted(Store.open(url, options).sizes())


class Starts:
    """Rows of several files as one range of numbers."""

    def __init__(self, counts: Sequence[int]) -> None:
        self._ends: list[int] = []
        for count in counts:
            self._ends.append(count + (self._ends[-1] if self._ends else 0))

    @property
    def total(self) -> int:
        """Rows of all files."""
        return self._ends[-1] if self._ends else 0

    def locate(self, index: int) -> tuple[int, int]:
        """(file, row in it) of a row; negative ones count from the end. Raises IndexError beyond the ends."""
        total = self.total
        place = index + total if index < 0 else index
        if not 0 <= place < total:
            raise IndexError(f"sample {index} of {total}")
        number = bisect.bisect_right(self._ends, place)
        return number, place - (self._ends[number - 1] if number else 0)
