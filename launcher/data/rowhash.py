"""Hashes of samples, many at a time: equal contents give equal 64 bits, on every machine.

Two samples of n that differ share one by chance with probability below n^2 / 2^65: one in 37 million for a million.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import xxhash

from rung.launcher.data.rng import mix64

Words = npt.NDArray[np.uint64]

_FOR_ROWS = 0x726F7773
_FEW_WORDS = 64  # rows up to this many 8-byte words are hashed together; a longer one fills xxhash's own lanes
_LEVELS = 15
_NEAR_LEAST, _NEAR_MOST = 16, 4096  # values of a row that a near hash looks at, at least and at most


def finalised(words: Words) -> Words:
    """SplitMix64's finaliser: a bijection in which each bit of the result depends on each bit given."""
    words = (words ^ words >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ words >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return words ^ words >> np.uint64(31)


def hash_rows(rows: npt.NDArray[np.generic]) -> Words:
    """One hash for each row of an array of shape (rows, ...), over the bytes of the row."""
    count = len(rows)
    data = np.ascontiguousarray(rows).reshape(count, -1).view(np.uint8)
    width = -(-data.shape[1] // 8)
    if width > _FEW_WORDS:
        return np.fromiter((xxhash.xxh3_64_intdigest(row.data) for row in data), dtype=np.uint64, count=count)
    if data.shape[1] % 8:
        data = np.pad(data, ((0, 0), (0, width * 8 - data.shape[1])))
    words = data.view(np.uint64).reshape(count, width)
    hashes: Words = finalised(words + _keys(width)).sum(axis=1, dtype=np.uint64)
    return hashes


@lru_cache(maxsize=_FEW_WORDS + 1)
def _keys(width: int) -> Words:
    return np.array([mix64(_FOR_ROWS, place) for place in range(width)], dtype=np.uint64)


def hash_bytes(values: Sequence[bytes]) -> Words:
    """One hash for each value."""
    return np.fromiter((xxhash.xxh3_64_intdigest(v) for v in values), dtype=np.uint64, count=len(values))


def combined(hashes: Words, more: Words, field: int) -> Words:
    """The hash of a sample with one field more; `field` tells fields of equal content apart."""
    return finalised(hashes * np.uint64(0x9E3779B97F4A7C15) + more + np.uint64(field))


def hash_near(rows: npt.NDArray[np.generic]) -> Words | None:
    """A hash that small noise, brightness and contrast mostly leave alone: of the values scaled to the row's own range
    and rounded to 16 levels. None where rows are too short to tell by it. Expects finite values.

    A value near the edge between two levels may fall on either side, so that some near duplicates are missed.
    """
    flat = rows.reshape(len(rows), -1)
    if flat.shape[1] < _NEAR_LEAST:
        return None
    step = -(-flat.shape[1] // _NEAR_MOST)
    values = flat[:, ::step].astype(np.float32)
    low = values.min(axis=1, keepdims=True)
    spread = values.max(axis=1, keepdims=True) - low
    np.maximum(spread, np.float32(1e-30), out=spread)
    return hash_rows(np.rint((values - low) / spread * _LEVELS).astype(np.uint8))
