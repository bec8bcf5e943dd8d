"""What readers of rows have in common: a row is a mapping of columns to values; what becomes of it is decided here."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rung.launcher.nearest import did_you_mean
from rung.launcher.storage_files import DataFile, Starts
from rung.strategies.errors import DataError, JobError

Row = dict[str, Any]
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


class Rows(ABC):
    """A map-style data set over the rows of files, larger than memory; safe to pickle and to fork.

    Sample i is row i as a dict; with `features`, a float32 tensor of those columns in that order; with `features` and
    `label`, the pair of it and the label: an int, or its place in `classes` if these are given. `transform` gets that
    and returns what the sample is. Raises DataError naming file, line (or row), column and value.
    """

    def __init__(
        self,
        files: Sequence[DataFile],
        counts: Sequence[int],
        *,
        columns: Sequence[str] | None,
        features: Sequence[str] | None,
        label: str | None,
        classes: Sequence[Any] | None,
        transform: Callable[[Any], Any] | None,
    ) -> None:
        self.files = list(files)
        self._starts = Starts(counts)
        self.features = list(features) if features is not None else None
        self.label = label
        self.classes = {value: number for number, value in enumerate(classes)} if classes is not None else None
        self.transform = transform
        if label is not None and features is None:
            raise JobError(f"label={label!r} needs features", hint="name the columns of the input: features=[...]")
        if columns is not None:
            wanted = [*(self.features or ()), *([label] if label is not None else [])]
            for name in wanted:
                if name not in columns:
                    raise DataError(
                        f"{self.files[0].url} has no column {name!r}{did_you_mean(name, list(columns))}",
                        hint=f"its columns are {', '.join(columns)}",
                    )

    def __len__(self) -> int:
        return self._starts.total

    def __getitem__(self, index: int) -> Any:
        number, row = self._starts.locate(index)
        return self._sample(index, number, row, self.row(number, row))

    @abstractmethod
    def row(self, number: int, row: int) -> Row:
        """One row of file `number`."""

    def place(self, number: int, row: int) -> str:
        """How a person finds the row: file and line."""
        return f"{self.files[number].url}: row {row}"

    def _sample(self, index: int, number: int, row: int, values: Row) -> Any:
        sample: Any = values
        if self.features is not None:
            import torch

            numbers = [self._number(index, number, row, name, values.get(name)) for name in self.features]
            sample = torch.tensor(numbers, dtype=torch.float32)
            if self.label is not None:
                sample = (sample, self._class(index, number, row, self.label, values.get(self.label)))
        return self.transform(sample) if self.transform is not None else sample

    def _number(self, index: int, number: int, row: int, column: str, value: Any) -> float:
        if value is None:
            return float("nan")  # missing: `rung check` counts it, data.clean: [drop_missing] leaves it out
        try:
            return float(value)
        except (TypeError, ValueError):
            raise self.error(index, number, row, column, f"{value!r} is not a number") from None

    def _class(self, index: int, number: int, row: int, column: str, value: Any) -> int:
        if self.classes is not None:
            if value not in self.classes:
                raise self.error(index, number, row, column, f"{value!r} is none of the {len(self.classes)} classes")
            return self.classes[value]
        if isinstance(value, str) or value is None or int(value) != value:
            raise self.error(index, number, row, column, f"{value!r} is no class; classes=[...] numbers names")
        return int(value)

    def error(self, index: int, number: int, row: int, column: str, what: str) -> DataError:
        """The error about one value."""
        at = f", column {column!r}" if column else ""
        return DataError(
            f"{self.place(number, row)}{at}: {what}", samples=(index,) if index >= 0 else (),
            hint="mend the file, or set data.clean: [drop_unreadable]",
        )  # fmt: skip


def row_mapping(value: Mapping[str, Any]) -> Row:
    """A plain dict with text for keys."""
    return {str(name): inner for name, inner in value.items()}
