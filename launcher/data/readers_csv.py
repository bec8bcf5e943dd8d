"""CSV files of any size: an index of where rows begin, eight bytes each, and each row parsed when it is asked for."""

import csv
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rung.launcher.data.readers_rows import Paths, Row, Rows
from rung.launcher.storage_files import DataFile, find_files
from rung.strategies.errors import DataError

_SCAN_BYTES = 8 << 20
_GUESSED_ROWS = 200
_MISSING = frozenset({"", "na", "n/a", "nan", "null", "none"})
_HINT = "mend the file, or set data.clean: [drop_unreadable]"


class Csv(Rows):
    """Rows of one or more CSV files (RFC 4180, UTF-8) with a header line; see `Rows` for what a sample is.

    `types` maps columns to int, float or str; the others are guessed from the first 200 rows: a number where all are
    numbers. Empty values, NA, NaN and null are None. `paths` may be paths, patterns, folders or fsspec URLs;
    `options` go to the store.
    """

    def __init__(
        self,
        paths: Paths,
        *,
        features: Sequence[str] | None = None,
        label: str | None = None,
        classes: Sequence[str] | None = None,
        types: Mapping[str, type] | None = None,
        delimiter: str = ",",
        transform: Callable[[Any], Any] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        files = find_files(paths, (".csv", ".tsv"), options)
        self.delimiter = delimiter
        self._edges = [row_edges(file) for file in files]
        self.columns = self._fields(files[0], 0)
        for number, file in enumerate(files[1:], 1):
            if (other := self._fields(file, number)) != self.columns:
                raise DataError(f"{file.url}:1: its columns are {', '.join(other)}, those of {files[0].url} are "
                                f"{', '.join(self.columns)}")  # fmt: skip
        if len(set(self.columns)) < len(self.columns):
            twice = next(name for name in self.columns if self.columns.count(name) > 1)
            raise DataError(f"{files[0].url}:1: column {twice!r} occurs twice")
        counts = [len(edges) - 2 for edges in self._edges]
        super().__init__(files, counts, columns=self.columns, features=features, label=label, classes=classes,
                         transform=transform)  # fmt: skip
        if len(self) == 0:
            raise DataError(f"{files[0].url} has a header and no rows")
        self.types = {**self._guessed(), **dict(types or {})}
        if label is not None and classes is not None:
            self.types[label] = str

    def _fields(self, file: DataFile, number: int) -> list[str]:
        edges = self._edges[number]
        if len(edges) < 2:
            raise DataError(f"{file.url} is empty", hint="a CSV file begins with a line of column names")
        text = file.read(int(edges[0]), int(edges[1])).decode("utf-8-sig", "replace")
        return [name.strip() for name in next(csv.reader([text], delimiter=self.delimiter), [])]

    def _guessed(self) -> dict[str, type]:
        kinds: dict[str, type] = dict.fromkeys(self.columns, int)
        for index in range(min(_GUESSED_ROWS, len(self))):
            number, row = self._starts.locate(index)
            try:
                values = self._split(number, row)
            except DataError:  # it names itself when it is asked for
                continue
            for name, text in zip(self.columns, values, strict=True):
                while kinds[name] is not str and not _fits(text, kinds[name]):
                    kinds[name] = float if kinds[name] is int else str
        return kinds

    def row(self, number: int, row: int) -> Row:
        """One row, its values of the columns' types."""
        values: Row = {}
        for name, text in zip(self.columns, self._split(number, row), strict=True):
            kind = self.types[name]
            if text.strip().lower() in _MISSING:
                values[name] = None
            elif kind is str:
                values[name] = text
            else:
                try:
                    values[name] = kind(text)
                except ValueError:
                    what = "a whole number" if kind is int else "a number"
                    raise self.error(self._index(number, row), number, row, name, f"{text!r} is not {what}") from None
        return values

    def _split(self, number: int, row: int) -> list[str]:
        edges, file = self._edges[number], self.files[number]
        data = file.read(int(edges[row + 1]), int(edges[row + 2]))
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            column = data[: error.start].count(self.delimiter.encode())
            name = self.columns[column] if column < len(self.columns) else ""
            what = f"byte 0x{data[error.start]:02x} is not UTF-8"
            raise self.error(self._index(number, row), number, row, name, what) from None
        try:
            fields = next(csv.reader(text.splitlines(keepends=True), delimiter=self.delimiter, strict=True), [])
        except csv.Error as error:
            raise self.error(self._index(number, row), number, row, "", f"{error}: {_short(text)}") from None
        if len(fields) != len(self.columns):
            what = f"{len(fields)} fields, the header has {len(self.columns)}: {_short(text)}"
            raise self.error(self._index(number, row), number, row, "", what)
        return fields

    def _index(self, number: int, row: int) -> int:
        return sum(len(edges) - 2 for edges in self._edges[:number]) + row

    def place(self, number: int, row: int) -> str:
        """File and line."""
        return f"{self.files[number].url}:{self._line(number, row)}"

    def _line(self, number: int, row: int) -> int:
        return line_at(self.files[number], int(self._edges[number][row + 1]))


def line_at(file: DataFile, offset: int) -> int:
    """The line, from 1, that a byte stands in. Reads the file up to there: for errors only."""
    lines = 1
    for start in range(0, offset, _SCAN_BYTES):
        lines += file.read(start, min(offset, start + _SCAN_BYTES)).count(b"\n")
    return lines


def row_edges(file: DataFile, *, quotes: bool = True) -> npt.NDArray[np.int64]:
    """Where rows begin, and at last where the file ends. With `quotes`, line ends within quotes end no row; empty lines
    are no rows.

    Raises DataError where a quote is never closed.
    """
    parts: list[npt.NDArray[np.int64]] = []
    inside = 0  # quotes seen so far, modulo 2
    opened = 0
    for start in range(0, file.size, _SCAN_BYTES):
        data = np.frombuffer(file.read(start, start + _SCAN_BYTES), dtype=np.uint8)
        ends = np.flatnonzero(data == 10)
        if quotes:
            marks = np.flatnonzero(data == 34)
            if len(marks):
                before = np.searchsorted(marks, ends) + inside
                ends = ends[before % 2 == 0]
                opened = start + int(marks[-1])
                inside = (inside + len(marks)) % 2
            elif inside:
                ends = ends[:0]
        parts.append(ends.astype(np.int64) + start + 1)
    if inside:
        raise DataError(f"{file.url}:{line_at(file, opened)}: a quote that is opened here is never closed")
    begins = np.concatenate([np.zeros(1, dtype=np.int64), *parts])
    if begins[-1] != file.size:
        begins = np.append(begins, file.size)
    return _without_empty(file, begins)


def _without_empty(file: DataFile, edges: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Drops rows that are only a line end. A row then reaches up to the next one's begin, with what is between."""
    widths = np.diff(edges)
    keep = np.ones(len(edges), dtype=bool)
    for place in np.flatnonzero(widths <= 2).tolist():
        if not file.read(int(edges[place]), int(edges[place + 1])).strip(b"\r\n"):
            keep[place] = False
    return edges[keep] if not keep.all() else edges


def _fits(text: str, kind: type) -> bool:
    if text.strip().lower() in _MISSING:
        return True
    try:
        kind(text)
    except ValueError:
        return False
    return True


def _short(text: str) -> str:
    text = text.rstrip("\r\n")
    return repr(text if len(text) <= 60 else text[:57] + "...")
