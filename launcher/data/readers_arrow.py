"""Parquet files, and data sets that Hugging Face's `datasets` saved to disk; both by pyarrow."""

import json
import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rung.launcher.data.readers_rows import Paths, Row, Rows
from rung.launcher.storage import Store
from rung.launcher.storage_files import DataFile, Starts, find_files
from rung.strategies.errors import DataError, DependencyError, ObjectMissing

_CACHE_BYTES = 1 << 30


def _pyarrow() -> Any:
    try:
        import pyarrow as pa
        import pyarrow.parquet
    except ImportError as error:
        raise DependencyError(f"this reader needs pyarrow ({error})", hint='pip install "rung[data]"') from None
    return pa


class Parquet(Rows):
    """Rows of one or more Parquet files; see `Rows` for what a sample is.

    A row group is decoded as a whole; each process keeps those used last, up to `cache_bytes`. Shuffled access to a
    set larger than that decodes a group for nearly every sample, so write row groups of a few thousand rows.
    """

    def __init__(
        self,
        paths: Paths,
        *,
        columns: Sequence[str] | None = None,
        features: Sequence[str] | None = None,
        label: str | None = None,
        classes: Sequence[Any] | None = None,
        transform: Callable[[Any], Any] | None = None,
        cache_bytes: int = _CACHE_BYTES,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        _pyarrow()
        files = find_files(paths, (".parquet", ".pq"), options)
        self._groups: list[Starts] = []
        names: list[str] = []
        for file in files:
            opened = _open_parquet(file)
            metadata = opened.metadata
            self._groups.append(Starts([metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]))
            these = [str(name) for name in opened.schema_arrow.names]
            if names and these != names:
                raise DataError(
                    f"{file.url}: its columns are {', '.join(these)}, those of {files[0].url} are {', '.join(names)}"
                )
            names = these
        super().__init__(files, [g.total for g in self._groups], columns=names, features=features, label=label,
                         classes=classes, transform=transform)  # fmt: skip
        if len(self) == 0:
            raise DataError(f"{files[0].url} has no rows")
        wanted = columns if columns is not None else [*(features or ()), *([label] if label is not None else [])]
        self.columns = list(wanted) if wanted else names
        self._cache_bytes = cache_bytes
        self._forget()

    def _forget(self) -> None:
        self._pid = os.getpid()
        self._opened: dict[int, Any] = {}
        self._tables: OrderedDict[tuple[int, int], Any] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_opened", "_tables", "_pid")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def row(self, number: int, row: int) -> Row:
        """One row as Python values."""
        group, inner = self._groups[number].locate(row)
        table = self._table(number, group)
        return {name: table.column(place)[inner].as_py() for place, name in enumerate(self.columns)}

    def _table(self, number: int, group: int) -> Any:
        if self._pid != os.getpid():
            self._forget()
        table = self._tables.get((number, group))
        if table is None:
            if number not in self._opened:
                self._opened[number] = _open_parquet(self.files[number])
            try:
                table = self._opened[number].read_row_group(group, columns=self.columns, use_threads=False)
                table = table.combine_chunks()
            except Exception as error:
                raise _damaged(self.files[number], error, f"row group {group}") from None
            self._tables[number, group] = table
            while len(self._tables) > 1 and sum(t.nbytes for t in self._tables.values()) > self._cache_bytes:
                self._tables.popitem(last=False)
        self._tables.move_to_end((number, group))
        return table


def _open_parquet(file: DataFile) -> Any:
    try:
        return _pyarrow().parquet.ParquetFile(file.open())
    except Exception as error:
        raise _damaged(file, error, "") from None


def _damaged(file: DataFile, error: Exception, where: str) -> DataError:
    said = str(error).strip().split("\n")[0]
    at = f", {where}" if where else ""
    return DataError(
        f"{file.url}{at}: cannot be read: {said}", hint="the file is damaged or of another kind: fetch it again"
    )


class SavedDataset(Rows):
    """A data set that Hugging Face's `datasets` wrote with `save_to_disk`, without that package.

    `path` is its folder, or that of a DatasetDict with `split`. Local files are mapped into memory; remote ones are
    read whole by each process that uses them.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        split: str | None = None,
        *,
        features: Sequence[str] | None = None,
        label: str | None = None,
        classes: Sequence[Any] | None = None,
        transform: Callable[[Any], Any] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        _pyarrow()
        folder = os.fspath(path).rstrip("/")
        folder = _split_folder(folder, split, options)
        try:
            state = json.loads(Store.open(folder, options).read("state.json"))
            names = [entry["filename"] for entry in state["_data_files"]]
        except ObjectMissing:
            raise DataError(f"{folder} holds no state.json", hint="name a folder that save_to_disk wrote") from None
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{folder}/state.json cannot be used: {error}") from None
        files = [DataFile(f"{folder}/{name}", options) for name in names]
        indices = [DataFile(f"{folder}/{e['filename']}", options) for e in state.get("_indices_data_files") or ()]
        self._batches: dict[int, tuple[Any, list[int]]] = {}
        self._pid = os.getpid()
        self.files = files
        counts = [self._opened(number)[1][-1] for number in range(len(files))]
        self._chosen = np.concatenate([_column_of(file) for file in indices]) if indices else None
        columns = [str(name) for name in self._opened(0)[0][0].schema.names] if counts[0] else []
        super().__init__(files, counts, columns=columns or None, features=features, label=label, classes=classes,
                         transform=transform)  # fmt: skip
        if len(self) == 0:
            raise DataError(f"{folder} has no rows")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_batches": {}}

    def __len__(self) -> int:
        return self._starts.total if self._chosen is None else len(self._chosen)

    def __getitem__(self, index: int) -> Any:
        if self._chosen is None:
            return super().__getitem__(index)
        if not -len(self._chosen) <= index < len(self._chosen):
            raise IndexError(f"sample {index} of {len(self._chosen)}")
        return super().__getitem__(int(self._chosen[index]))

    def row(self, number: int, row: int) -> Row:
        """One row as Python values."""
        batches, ends = self._opened(number)
        at = bisect_right(ends, row)
        batch, inner = batches[at], row - (ends[at - 1] if at else 0)
        return {name: batch.column(place)[inner].as_py() for place, name in enumerate(batch.schema.names)}

    def _opened(self, number: int) -> tuple[Any, list[int]]:
        """The record batches of a file, and where each ends."""
        if self._pid != os.getpid():
            self._pid, self._batches = os.getpid(), {}
        found = self._batches.get(number)
        if found is None:
            batches = _record_batches(self.files[number])
            ends = np.cumsum([batch.num_rows for batch in batches], dtype=np.int64).tolist() or [0]
            found = self._batches[number] = (batches, ends)
        return found


def _split_folder(folder: str, split: str | None, options: Mapping[str, Any] | None) -> str:
    try:
        names = list(json.loads(Store.open(folder, options).read("dataset_dict.json"))["splits"])
    except ObjectMissing:
        return folder if split is None else f"{folder}/{split}"
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder}/dataset_dict.json cannot be used: {error}") from None
    if split not in names:
        raise DataError(f"{folder} has no split {split!r}; its splits are {', '.join(names)}")
    return f"{folder}/{split}"


def _record_batches(file: DataFile) -> list[Any]:
    pa = _pyarrow()
    path = file.local_path()
    source = pa.memory_map(str(path)) if path is not None and file.size else pa.BufferReader(file.read(0, file.size))
    try:
        return list(pa.ipc.open_stream(source))
    except Exception as error:
        raise _damaged(file, error, "") from None


def _column_of(file: DataFile) -> Any:
    return np.concatenate([batch.column(0).to_numpy() for batch in _record_batches(file)]).astype(np.int64)
