"""Takes samples apart into columns, one for each field, and looks at every column as one array."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from rung.launcher.data import rowhash
from rung.launcher.data.limits import Limit
from rung.launcher.data.rng import mix64
from rung.launcher.data.seen import Field, Ints, Seen, tally

_MOST_COLUMNS = 4096
_NUMBERS = (bool, int, float, np.generic)


class Fields:
    """`walk` adds to a `Seen` what the values of all samples show. With `deep` false only hashes and missing values are
    looked at. `limits` hold what the model can take for a field of whole numbers. `bytes` counts what was looked at.
    """

    def __init__(self, limits: Mapping[str, Limit], *, deep: bool) -> None:
        self.limits = limits
        self.deep = deep
        self.bytes = 0
        self._keys: dict[str, int] = {}

    def walk(self, path: str, values: Sequence[Any], rows: Ints, seen: Seen, bad: npt.NDArray[np.bool_]) -> None:
        """Looks at one field of all samples in `rows`; `values` has one entry for each."""
        kinds = set(map(type, values))
        if len(kinds) == 1:
            self._alike(path, kinds.pop(), values, rows, seen, bad)
            return
        if all(issubclass(kind, _NUMBERS) for kind in kinds):
            self._numbers(path, values, rows, seen, bad)
            return
        for kind in sorted(kinds, key=lambda k: k.__qualname__):
            chosen = [n for n, value in enumerate(values) if type(value) is kind]
            self._alike(path, kind, [values[n] for n in chosen], rows[chosen], seen, bad)

    def _alike(
        self, path: str, kind: type, values: Sequence[Any], rows: Ints, seen: Seen, bad: npt.NDArray[np.bool_]
    ) -> None:
        """The same, where all values are of one type."""
        indices = seen.indices[rows]
        if kind is type(None):
            tally(seen.problems, "sample.missing", indices.tolist(), f"{path or 'the sample'} is None")
            bad[rows] = True
        elif issubclass(kind, torch.Tensor):
            self._tensors(path, values, rows, seen, bad)
        elif issubclass(kind, np.ndarray):
            self._arrays(path, values, rows, seen, bad)
        elif issubclass(kind, _NUMBERS):
            self._numbers(path, values, rows, seen, bad)
        elif issubclass(kind, str):
            self._texts(path, values, rows, seen)
        elif issubclass(kind, bytes | bytearray):
            self._bytes_like(path, values, rows, seen)
        elif issubclass(kind, Mapping):
            self._mappings(path, values, rows, seen, bad)
        elif issubclass(kind, tuple | list):
            self._sequences(path, kind, values, rows, seen, bad)
        elif hasattr(kind, "__dataclass_fields__"):
            self._kind(path, kind.__name__, rows, seen)
            for name in kind.__dataclass_fields__:
                self.walk(f"{path}.{name}", [getattr(v, name) for v in values], rows, seen, bad)
        else:  # an image object and the like: no more than its type is known
            self._kind(path, kind.__name__, rows, seen)

    def _kind(self, path: str, name: str, rows: Ints, seen: Seen) -> Field:
        found = seen.fields.get(path)
        if found is None:
            found = seen.fields[path] = Field()
        if self.deep:
            tally(found.kinds, name, seen.indices[rows].tolist())
        return found

    def _mappings(self, path: str, values: Sequence[Any], rows: Ints, seen: Seen, bad: npt.NDArray[np.bool_]) -> None:
        first = values[0].keys()
        if all(value.keys() == first for value in values):
            groups = [(tuple(first), list(range(len(values))))]
        else:
            by_keys: dict[tuple[Any, ...], list[int]] = {}
            for n, value in enumerate(values):
                by_keys.setdefault(tuple(sorted(value.keys(), key=repr)), []).append(n)
            groups = list(by_keys.items())
        for keys, chosen in groups:
            name = "the keys " + ", ".join(sorted(map(repr, keys)))
            group = rows if len(groups) == 1 else rows[chosen]
            self._kind(path, name, group, seen)
            for key in keys:
                self.walk(f"{path}[{key!r}]", [values[n][key] for n in chosen], group, seen, bad)

    def _sequences(
        self, path: str, kind: type, values: Sequence[Any], rows: Ints, seen: Seen, bad: npt.NDArray[np.bool_]
    ) -> None:
        if issubclass(kind, list) and all(isinstance(x, _NUMBERS) for value in values for x in value):
            self._arrays(path, [np.asarray(value) for value in values], rows, seen, bad, kind="list")
            return
        lengths = list(map(len, values))
        for length in sorted(set(lengths)):
            chosen = [n for n, count in enumerate(lengths) if count == length]
            group = rows if len(chosen) == len(values) else rows[chosen]
            self._kind(path, f"{kind.__name__} of {length}", group, seen)
            if not hasattr(kind, "_fields"):
                columns: Any = zip(*(values[n] for n in chosen), strict=True)
                names = [f"{path}[{place}]" for place in range(length)]
            else:
                columns = ([getattr(values[n], name) for n in chosen] for name in kind._fields)
                names = [f"{path}.{name}" for name in kind._fields]
            for name, column in zip(names, columns, strict=True):
                self.walk(name, column, group, seen, bad)

    # ---------------------------------------------------------------- leaves

    def _tensors(
        self, path: str, values: Sequence[torch.Tensor], rows: Ints, seen: Seen, bad: npt.NDArray[np.bool_]
    ) -> None:
        if len({value.dtype for value in values}) == 1:
            stacked = _stacked(values)
            if stacked is not None:
                self._array(path, "tensor", stacked, rows, seen, bad)
                return
        self._arrays(path, values, rows, seen, bad, kind="tensor")

    def _arrays(
        self,
        path: str,
        values: Sequence[Any],
        rows: Ints,
        seen: Seen,
        bad: npt.NDArray[np.bool_],
        kind: str = "array",
    ) -> None:
        """Arrays or tensors of any types and shapes: those alike are stacked."""
        groups: dict[tuple[Any, ...], list[int]] = {}
        for n, value in enumerate(values):
            groups.setdefault((value.dtype, tuple(value.shape)), []).append(n)
        for chosen in groups.values():
            stacked = _stacked([values[n] for n in chosen])
            if stacked is None or stacked.dtype.kind not in "fiubc":  # sparse tensors, arrays of objects and the like
                self._kind(path, kind, rows[chosen], seen)
            else:
                self._array(path, kind, stacked, rows[chosen], seen, bad)

    def _numbers(self, path: str, values: Sequence[Any], rows: Ints, seen: Seen, bad: npt.NDArray[np.bool_]) -> None:
        stacked = np.asarray(values)
        if stacked.dtype == object:  # beyond 64 bits
            stacked = stacked.astype(np.float64)
        self._array(path, "number", stacked, rows, seen, bad)

    def _array(
        self,
        path: str,
        kind: str,
        stacked: npt.NDArray[Any],
        rows: Ints,
        seen: Seen,
        bad: npt.NDArray[np.bool_],
    ) -> None:
        """One array of shape (rows, ...): hashes, missing values and, if deep, all else that numbers tell."""
        self.bytes += stacked.nbytes
        found = self._kind(path, kind, rows, seen)
        whole = len(rows) == len(seen.indices)
        self._hash(path, rowhash.hash_rows(stacked), rows, seen, whole)
        finite = True
        if stacked.dtype.kind in "fc":
            sums = stacked.reshape(len(rows), -1).sum(axis=1)
            odd = ~np.isfinite(sums)
            if odd.any():  # a sum may also overflow where no value is infinite
                odd[odd] = ~np.isfinite(stacked[odd].reshape(int(odd.sum()), -1)).all(axis=1)
            if odd.any():
                finite = False
                bad[rows[odd]] = True
                named = seen.indices[rows[odd]].tolist()
                tally(seen.problems, "sample.non_finite", named, _non_finite_words(path, stacked[odd][0]))
                stacked, rows = stacked[~odd], rows[~odd]
                whole = False
        if not self.deep:
            return
        indices = seen.indices[rows]
        tally(found.dtypes, str(stacked.dtype), indices.tolist())
        shape = stacked.shape[1:]
        tally(found.shapes, str(tuple(shape)), indices.tolist())
        if len(rows) == 0:
            return
        if shape:
            found.add_lengths(np.full(len(rows), shape[0], dtype=np.int64), indices)
        if stacked.size == 0 or stacked.dtype.kind not in "fiub":
            return
        near = rowhash.hash_near(stacked) if stacked.dtype.kind == "f" or stacked.dtype == np.uint8 else None
        if near is not None and finite:
            key = np.uint64(self._key(path))
            seen.near[rows] = rowhash.finalised(seen.near[rows] + near + key)
        self._statistics(path, found, stacked, indices, seen)

    def _statistics(self, path: str, found: Field, stacked: npt.NDArray[Any], indices: Ints, seen: Seen) -> None:
        flat = stacked.reshape(len(indices), -1)
        low, high = flat.min(axis=1), flat.max(axis=1)
        at_low, at_high = int(low.argmin()), int(high.argmax())
        found.low = min(found.low, (float(low[at_low]), int(indices[at_low])))
        found.high = max(found.high, (float(high[at_high]), int(indices[at_high])))
        if stacked.dtype.kind == "f":
            mean = float(flat.mean(dtype=np.float64))
            found.add_moments(flat.size, mean, float(flat.var(dtype=np.float64)) * flat.size)
            if stacked.ndim <= 2 and flat.shape[1] <= _MOST_COLUMNS:
                columns = flat.min(axis=0).astype(np.float64), flat.max(axis=0).astype(np.float64)
                found.add_columns(*columns, len(indices))
            else:
                found.add_columns(np.array([low.min()], np.float64), np.array([high.max()], np.float64), len(indices))
        elif (limit := self.limits.get(path)) is not None:
            outside = (flat < 0) | (flat >= limit.size)
            if limit.ignored is not None:
                outside &= flat != limit.ignored
            wrong = outside.any(axis=1)
            if wrong.any():
                text = f"{limit.what} {int(flat[outside][0])} is outside {limit.words}"
                tally(seen.problems, f"{limit.what}.range", indices[wrong].tolist(), text)

    def _texts(self, path: str, values: Sequence[str], rows: Ints, seen: Seen) -> None:
        found = self._kind(path, "text", rows, seen)
        encoded = [value.encode("utf-8", "surrogatepass") for value in values]
        self.bytes += sum(map(len, encoded))
        self._hash(path, rowhash.hash_bytes(encoded), rows, seen, len(rows) == len(seen.indices))
        if not self.deep:
            return
        indices = seen.indices[rows]
        key = np.uint64(self._key(path))
        plain = ["".join(c for c in value.casefold() if c.isalnum()).encode("utf-8", "replace") for value in values]
        seen.near[rows] = rowhash.finalised(seen.near[rows] + rowhash.hash_bytes(plain) + key)
        found.add_lengths(np.fromiter(map(len, values), dtype=np.int64, count=len(values)), indices)
        for index, value in zip(indices.tolist(), values, strict=True):
            if not value.strip():
                tally(seen.problems, "text.empty", [index], f"{path or 'the text'} is empty")
            elif "\ufffd" in value or any("\ud800" <= c <= "\udfff" for c in value):
                tally(seen.problems, "text.utf8", [index], f"{path or 'the text'} holds characters that are no text")

    def _bytes_like(self, path: str, values: Sequence[bytes], rows: Ints, seen: Seen) -> None:
        found = self._kind(path, "bytes", rows, seen)
        self.bytes += sum(map(len, values))
        self._hash(path, rowhash.hash_bytes(values), rows, seen, len(rows) == len(seen.indices))
        if not self.deep:
            return
        indices = seen.indices[rows]
        found.add_lengths(np.fromiter(map(len, values), dtype=np.int64, count=len(values)), indices)
        for index, value in zip(indices.tolist(), values, strict=True):
            if (at := _not_utf8(value)) is None:
                found.texts += 1
            else:
                found.broken_text.add([index], f"byte 0x{value[at]:02x} at {at} is not UTF-8")

    def _hash(self, path: str, hashes: rowhash.Words, rows: Ints, seen: Seen, whole: bool) -> None:
        key = self._key(path)
        if whole:
            seen.exact = rowhash.combined(seen.exact, hashes, key)
        else:
            seen.exact[rows] = rowhash.combined(seen.exact[rows], hashes, key)

    def _key(self, path: str) -> int:
        key = self._keys.get(path)
        if key is None:
            key = self._keys[path] = mix64(xxhash.xxh3_64_intdigest(path.encode("utf-8", "replace")))
        return key


def _not_utf8(value: bytes) -> int | None:
    """Where the first byte stands that is not UTF-8."""
    try:
        value.decode()
    except UnicodeDecodeError as error:
        return error.start
    return None


def _stacked(values: Sequence[Any]) -> npt.NDArray[Any] | None:
    """One array of them all; None where shapes differ or a layout, such as a sparse one, cannot be stacked."""
    try:
        return _numpy(torch.stack(list(values))) if isinstance(values[0], torch.Tensor) else np.stack(values)
    except (RuntimeError, TypeError, ValueError):
        return None


def _numpy(stacked: torch.Tensor) -> npt.NDArray[Any]:
    stacked = stacked.detach().cpu()
    if stacked.dtype == torch.bfloat16:
        stacked = stacked.float()
    return stacked.numpy()


def _non_finite_words(path: str, row: npt.NDArray[Any]) -> str:
    odd = int((~np.isfinite(row)).sum())
    what = "NaN" if np.isnan(row).any() else "Inf"
    where = path or "the sample"
    return f"{where} is {what}" if row.size == 1 else f"{where}: {odd} of {row.size} values are {what}"
