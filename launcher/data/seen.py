"""What a pass over samples has seen, as values that add up: one for each chunk, merged into one for the split.

Memory does not grow with the data set: lists of indices, shapes and lengths are cut off, and of the hashes only an
evenly thinned part is kept once there are many.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rung.launcher.data.rowhash import Words

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

SHOWN = 20  # indices that a finding names
_KINDS = 64  # distinct shapes, types or structures told apart in one field
_LENGTHS = 4096  # distinct lengths
_CLASSES = 65_536  # distinct labels
_HASHES = 4_000_000  # hashes kept of one split: 128 MB with what belongs to them


@dataclass(slots=True)
class Some:
    """How many samples something is true of, and the first of them."""

    count: int = 0
    indices: list[int] = field(default_factory=list)
    text: str = ""

    def add(self, indices: Iterable[int], text: str = "") -> None:
        """Counts these too."""
        new = list(indices)
        self.text = self.text or text
        self.count += len(new)
        if len(self.indices) < SHOWN:
            self.indices += new[: SHOWN - len(self.indices)]

    def merge(self, other: "Some") -> None:
        """Adds what another one has counted."""
        self.text = self.text or other.text
        self.count += other.count
        self.indices = sorted(self.indices + other.indices)[:SHOWN]


Tally = dict[str, Some]


def tally(tallies: Tally, name: str, indices: Iterable[int], text: str = "") -> None:
    """Counts samples under a name; from the 64th name on, under `...`."""
    if name not in tallies and len(tallies) >= _KINDS:
        name = "..."
    tallies.setdefault(name, Some()).add(indices, text)


def _merge_tallies(into: Tally, other: Tally) -> None:
    for name, some in other.items():
        key = name if name in into or len(into) < _KINDS else "..."
        into.setdefault(key, Some()).merge(some)


@dataclass(slots=True)
class Field:
    """One field of the samples: its types, shapes and lengths, the moments and extremes of its finite values, and, for
    rows of floating values, the extremes of each column."""

    kinds: Tally = field(default_factory=dict)
    dtypes: Tally = field(default_factory=dict)
    shapes: Tally = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)
    longest: tuple[int, int] = (-1, -1)  # length, index
    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    low: tuple[float, int] = (np.inf, -1)  # value, index of its sample
    high: tuple[float, int] = (-np.inf, -1)
    columns: tuple[Floats, Floats] | None = None
    rows: int = 0
    texts: int = 0
    broken_text: Some = field(default_factory=Some)

    @property
    def deviation(self) -> float:
        """The standard deviation of all values."""
        return float(np.sqrt(self.squares / self.count)) if self.count else 0.0

    def add_moments(self, count: int, mean: float, squares: float) -> None:
        """Chan, Golub and LeVeque's pairwise update (1979)."""
        if count:
            total = self.count + count
            delta = mean - self.mean
            self.mean += delta * count / total
            self.squares += squares + delta * delta * self.count * count / total
            self.count = total

    def add_columns(self, low: Floats, high: Floats, rows: int) -> None:
        """Smallest and largest value of each column over `rows` samples."""
        self.rows += rows
        if self.columns is None:
            self.columns = low, high
        elif len(self.columns[0]) == len(low):
            self.columns = np.minimum(self.columns[0], low), np.maximum(self.columns[1], high)

    def add_lengths(self, lengths: Ints, indices: Ints) -> None:
        """One length for each of these samples."""
        values, counts = np.unique(lengths, return_counts=True)
        for value, count in zip(values.tolist(), counts.tolist(), strict=True):
            if value in self.lengths or len(self.lengths) < _LENGTHS:
                self.lengths[value] = self.lengths.get(value, 0) + count
        at = int(lengths.argmax())
        self.longest = max(self.longest, (int(lengths[at]), int(indices[at])))

    def merge(self, other: "Field") -> None:
        """Adds what another one has seen of the same field."""
        _merge_tallies(self.kinds, other.kinds)
        _merge_tallies(self.dtypes, other.dtypes)
        _merge_tallies(self.shapes, other.shapes)
        for value, count in other.lengths.items():
            if value in self.lengths or len(self.lengths) < _LENGTHS:
                self.lengths[value] = self.lengths.get(value, 0) + count
        self.longest = max(self.longest, other.longest)
        self.add_moments(other.count, other.mean, other.squares)
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        if other.columns is not None:
            self.add_columns(*other.columns, other.rows)
        self.texts += other.texts
        self.broken_text.merge(other.broken_text)


class Hashes:
    """(exact, near, index, label) of samples, thinned evenly by the exact hash once there are too many: equal samples
    stay or go together, in every split alike."""

    def __init__(self, most: int = _HASHES) -> None:
        self.most = most
        self.halvings = 0
        self._parts: list[tuple[Words, Words, Ints, Ints]] = []
        self._count = 0

    @property
    def fraction(self) -> float:
        """What part of the samples is looked at for duplicates."""
        return 0.5**self.halvings

    def add(self, exact: Words, near: Words, indices: Ints, labels: Ints) -> None:
        """One row each for some samples."""
        self._parts.append(self._thinned((exact, near, indices, labels)))
        self._count += len(self._parts[-1][0])
        while self._count > self.most:
            self.halvings += 1
            self._parts = [self._thinned(self.arrays())]
            self._count = len(self._parts[0][0])

    def thin_to(self, halvings: int) -> None:
        """Thins as far as another set is, so that the two can be compared."""
        if halvings > self.halvings:
            self.halvings = halvings
            self._parts = [self._thinned(self.arrays())]
            self._count = len(self._parts[0][0])

    def _thinned(self, part: tuple[Words, Words, Ints, Ints]) -> tuple[Words, Words, Ints, Ints]:
        if not self.halvings:
            return part
        keep = part[0] >> np.uint64(64 - self.halvings) == 0
        return part[0][keep], part[1][keep], part[2][keep], part[3][keep]

    def arrays(self) -> tuple[Words, Words, Ints, Ints]:
        """All rows."""
        if not self._parts:
            words, ints = np.empty(0, dtype=np.uint64), np.empty(0, dtype=np.int64)
            return words, words, ints, ints
        exact, near, indices, labels = (np.concatenate(column) for column in zip(*self._parts, strict=True))
        self._parts = [(exact, near, indices, labels)]
        return exact, near, indices, labels


NO_LABEL = np.iinfo(np.int64).min


@dataclass(slots=True)
class Seen:
    """What one chunk of samples, or a whole split, shows.

    `read`: samples that could be read. `problems`: by subject, what is wrong with which samples. `exact`, `near`,
    `indices` and `labels`: one entry for each sample read, of one chunk only (`Hashes` keeps them for a split).
    `unreadable` and `missing` (a value is None, NaN or Inf): all of them, of one chunk only. `seconds`: what it took.
    """

    read: int = 0
    seconds: float = 0.0
    fields: dict[str, Field] = field(default_factory=dict)
    problems: Tally = field(default_factory=dict)
    histogram: dict[int, int] = field(default_factory=dict)
    exact: Words = field(default_factory=lambda: np.empty(0, dtype=np.uint64))
    near: Words = field(default_factory=lambda: np.empty(0, dtype=np.uint64))
    indices: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    labels: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    unreadable: list[int] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)

    def merge(self, chunk: "Seen") -> None:
        """Adds a chunk's facts; not what is kept for each of its samples."""
        self.read += chunk.read
        for path, other in chunk.fields.items():
            self.fields.setdefault(path, Field()).merge(other)
        _merge_tallies(self.problems, chunk.problems)
        for label, count in chunk.histogram.items():
            if label in self.histogram or len(self.histogram) < _CLASSES:
                self.histogram[label] = self.histogram.get(label, 0) + count
