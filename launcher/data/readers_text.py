"""Plain text as windows of bytes or tokens, for language models."""

import hashlib
import os
import tempfile
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rung.launcher.data.readers_csv import line_at
from rung.launcher.data.readers_rows import Paths
from rung.launcher.storage_files import DataFile, Starts, find_files
from rung.strategies.errors import DataError

if TYPE_CHECKING:
    import torch

_PIECE_BYTES = 4 << 20
ENDINGS = (".txt", ".text", ".md", ".py")


class Text:
    """Windows of `context` + 1 ids, one beginning where the one before ended but for its last: int64 tensors of shape
    (context + 1,).

    Without a tokenizer, ids are the bytes of the files, one file after the other. `tokenizer` is a callable from text
    to ids, or an object with `encode`; the ids are then computed once and kept in a file that is mapped into memory (in
    `cache`, by default the folder for temporary files). `tokenizer_name` has to change when the tokenizer does.
    """

    def __init__(
        self,
        paths: Paths,
        context: int,
        *,
        tokenizer: Any = None,
        tokenizer_name: str = "",
        cache: str | os.PathLike[str] | None = None,
        endings: Sequence[str] = ENDINGS,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if context < 1:
            raise DataError(f"context is {context}; a window needs at least one id and the one that follows")
        self.files = find_files(paths, endings, options)
        self.context = context
        self._ids: Any = None
        if tokenizer is None:
            self._starts = Starts([file.size for file in self.files])
            total = self._starts.total
        else:
            encode: Callable[[str], Sequence[int]] = getattr(tokenizer, "encode", tokenizer)
            self._ids = _tokenized(self.files, encode, tokenizer_name or _name_of(tokenizer), cache)
            total = len(self._ids)
        self._count = (total - 1) // context
        if self._count < 1:
            raise DataError(
                f"{self.files[0].url}: {total} ids are less than one window of {context} + 1", hint="lower context"
            )

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> "torch.Tensor":
        import torch

        place = index + self._count if index < 0 else index
        if not 0 <= place < self._count:
            raise IndexError(f"sample {index} of {self._count}")
        start = place * self.context
        stop = start + self.context + 1
        if self._ids is not None:
            return torch.from_numpy(self._ids[start:stop].astype(np.int64))
        return torch.frombuffer(bytearray(self._bytes(start, stop)), dtype=torch.uint8).long()

    def _bytes(self, start: int, stop: int) -> bytes:
        parts = []
        while start < stop:
            number, offset = self._starts.locate(start)
            part = self.files[number].read(offset, offset + stop - start)
            parts.append(part)
            start += len(part)
        return b"".join(parts)


def _name_of(tokenizer: Any) -> str:
    kind = type(tokenizer)
    name = getattr(tokenizer, "name_or_path", "") or getattr(tokenizer, "__qualname__", "") or kind.__qualname__
    return f"{getattr(tokenizer, '__module__', kind.__module__)}.{name}"


def _tokenized(
    files: Sequence[DataFile],
    encode: Callable[[str], Sequence[int]],
    name: str,
    cache: str | os.PathLike[str] | None,
) -> Any:
    """All ids as a uint32 array in a file. Several processes may make it at once; the last one to finish wins, and all
    have the same."""
    folder = Path(cache) if cache is not None else Path(tempfile.gettempdir()) / f"rung-tokens-{os.getuid()}"
    folder.mkdir(parents=True, exist_ok=True)
    facts = [name, *(f"{file.url} {file.size} {_changed(file)}" for file in files)]
    target = folder / f"{hashlib.blake2b(chr(10).join(facts).encode(), digest_size=16).hexdigest()}.u32"
    if not target.exists():
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as out:
            try:
                for file in files:
                    for text in _pieces(file):
                        out.write(_packed(encode(text), file))
                out.flush()
                Path(out.name).replace(target)
            except BaseException:
                Path(out.name).unlink(missing_ok=True)
                raise
    if target.stat().st_size == 0:
        return np.empty(0, dtype=np.uint32)
    return np.memmap(target, dtype=np.uint32, mode="r")


def _packed(ids: Sequence[int], file: DataFile) -> bytes:
    try:
        return np.asarray(array("q", ids), dtype=np.int64).astype(np.uint32, casting="unsafe").tobytes()
    except (TypeError, OverflowError):
        raise DataError(f"{file.url}: the tokenizer gave {ids!r:.60}, not whole numbers") from None


def _changed(file: DataFile) -> int:
    path = file.local_path()
    return path.stat().st_mtime_ns if path is not None else 0


def _pieces(file: DataFile) -> Any:
    """The text in pieces of whole lines. Raises DataError naming the line that is not UTF-8."""
    at, rest = 0, b""
    while at < file.size:
        data = rest + file.read(at, at + _PIECE_BYTES)
        began = at - len(rest)
        at = min(file.size, at + _PIECE_BYTES)
        cut = len(data) if at == file.size else data.rfind(b"\n") + 1
        rest = data[cut:]
        try:
            yield data[:cut].decode("utf-8")
        except UnicodeDecodeError as error:
            line = line_at(file, began + error.start)
            raise DataError(
                f"{file.url}:{line}: byte 0x{data[error.start]:02x} is not UTF-8", hint="save the file as UTF-8"
            ) from None
