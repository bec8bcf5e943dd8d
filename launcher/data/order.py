"""Which sample comes when: a pure function of (seed, epoch, position), with no state and no list of indices.

An epoch is a keyed permutation of 0..size-1, evaluated only at the positions asked for: O(1) memory, O(count) time, for
10 samples as for 10^12, and resuming in the middle is a seek. It knows nothing of ranks, micro-batches and workers.

Sizes up to 4096 are sorted by a keyed 64-bit hash, which gives all permutations alike. Above that stands a generalised
Feistel network over a*b >= size with a, b close to the square root of the size (Black and Rogaway, "Ciphers with
Arbitrary Finite Domains", 2002), six rounds; results outside 0..size-1 are enciphered again until they fall inside
(cycle-walking), which fewer than one in sixty do. Not for secrets.
"""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from rung.launcher.data.rng import mix64
from rung.strategies.errors import DataError

Indices = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

MAX_SIZE = 1 << 62
_SORTED_UP_TO = 4096
_ROUNDS = 6
_BLOCK = 1 << 14  # positions worked on at a time: the scratch arrays then stay in the cache
_FOR_ORDER = 0x6F726472


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """The order of `size` samples. `shuffle=False` is 0, 1, 2, ... in every epoch.

    `subset`, if given, holds the indices to draw from (cleaned, or with repeats for resampling); the permutation then
    runs over its entries, and an epoch has len(subset) positions. It is copied, and must lie within 0..size-1.
    """

    size: int
    seed: int = 0
    shuffle: bool = True
    subset: Indices | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.size <= MAX_SIZE:
            raise DataError(
                f"the data set has {self.size} samples; from 1 to 2^62 can be trained on",
                hint="check the path and the filter in the task's dataset(), and its __len__",
            )
        if self.subset is None:
            return
        chosen = np.array(self.subset)
        if chosen.ndim != 1 or chosen.dtype.kind not in "iu" or len(chosen) == 0:
            raise DataError(
                f"the subset is an array of shape {chosen.shape} and type {chosen.dtype}; it has to be one row of "
                "whole numbers, at least one",
                hint="cleaning or resampling that leaves nothing: loosen it",
            )
        if chosen.min() < 0 or chosen.max() >= self.size:
            raise DataError(
                f"the subset reaches from {chosen.min()} to {chosen.max()}; the data set has 0..{self.size - 1}"
            )
        chosen = chosen.astype(np.int64)
        chosen.flags.writeable = False
        object.__setattr__(self, "subset", chosen)

    @property
    def length(self) -> int:
        """Positions in one epoch."""
        return self.size if self.subset is None else len(self.subset)

    @property
    def fingerprint(self) -> str:
        """16 hex digits; two orders with the same one give the same samples at every epoch and position."""
        digest = hashlib.blake2b(f"{self.length} {self.seed if self.shuffle else '-'}".encode(), digest_size=8)
        if self.subset is not None:
            digest.update(self.subset.astype("<i8").tobytes())
        return digest.hexdigest()

    def indices(self, epoch: int, position: int, count: int) -> Indices:
        """The samples at positions position..position+count-1 of `epoch`, as int64 of shape (count,).

        Raises ValueError if they do not lie within the epoch.
        """
        if epoch < 0 or position < 0 or count < 0 or position + count > self.length:
            raise ValueError(
                f"positions {position}..{position + count - 1} of epoch {epoch} are not within 0..{self.length - 1}"
            )
        chosen = self._permuted(epoch, position, count)
        return chosen if self.subset is None else self.subset[chosen]

    def _permuted(self, epoch: int, position: int, count: int) -> Indices:
        positions = np.arange(position, position + count, dtype=np.int64)
        return permuted(self.length, self.seed, epoch, positions) if self.shuffle else positions


def permuted(size: int, seed: int, epoch: int, positions: Indices) -> Indices:
    """What stands at these positions, each within 0..size-1, in the permutation of 0..size-1 keyed by seed and
    epoch."""
    if size <= _SORTED_UP_TO:
        return _sorted(size, seed, epoch)[positions]
    keys = _keys(seed, epoch)
    out = np.empty(len(positions), dtype=np.int64)
    for start in range(0, len(positions), _BLOCK):
        block = positions[start : start + _BLOCK].astype(np.uint64)
        out[start : start + len(block)] = _walk(block, size, keys)
    return out


@lru_cache(maxsize=8)
def _keys(seed: int, epoch: int) -> _Words:
    return np.array([mix64(_FOR_ORDER, seed, epoch, i) for i in range(_ROUNDS)], dtype=np.uint64)


@lru_cache(maxsize=8)
def _sorted(length: int, seed: int, epoch: int) -> Indices:
    """The whole permutation of a small size: the order of keyed hashes. Stable, should two be equal."""
    words = np.arange(length, dtype=np.uint64)
    for key in _keys(seed, epoch)[:2]:
        words += key
        words = _finalised(words)
    return np.argsort(words, kind="stable").astype(np.int64)


def _finalised(words: _Words) -> _Words:
    """SplitMix64's finaliser: a bijection in which each bit of the result depends on each bit given."""
    words = (words ^ words >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ words >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return words ^ words >> np.uint64(31)


def _walk(words: _Words, size: int, keys: _Words) -> _Words:
    """Enciphers positions below `size`, again and again those that come out at or above it.

    Ends: the cipher is a permutation, so each cycle leads back to its start, which is below `size`.
    """
    words = _encipher(words, size, keys)
    while len(outside := np.flatnonzero(words >= np.uint64(size))):
        words[outside] = _encipher(words[outside], size, keys)
    return words


def _encipher(words: _Words, size: int, keys: _Words) -> _Words:
    """The Feistel network. A word is left * b + right; in turn, a hash of one half is added to the other."""
    a = math.isqrt(size - 1) + 1
    b = -(-size // a)
    left = words // np.uint64(b)
    right = words - left * np.uint64(b)
    for i in range(0, _ROUNDS, 2):
        _add_hash(left, right, a, keys[i])
        _add_hash(right, left, b, keys[i + 1])
    left *= np.uint64(b)
    left += right
    return left


def _add_hash(target: _Words, source: _Words, modulus: int, key: np.uint64) -> None:
    """target = (target + hash(source)) mod modulus, in place. The modulus is at most 2^31."""
    bits = modulus.bit_length()
    hashed = source ^ key
    hashed *= np.uint64(0xBF58476D1CE4E5B9)
    hashed ^= hashed >> np.uint64(32)
    hashed *= np.uint64(0x94D049BB133111EB)
    # The top 64-bits bits, scaled to 0..modulus-1 by multiply and shift: a division would cost more than all the rest,
    # and no residue is favoured by more than 2^(2*bits-64).
    hashed >>= np.uint64(bits)
    hashed *= np.uint64(modulus)
    hashed >>= np.uint64(64 - bits)
    target += hashed
    # Below the modulus, the difference wraps around to a huge number: the smaller of the two is the remainder.
    np.minimum(target, target - np.uint64(modulus), out=target)


class Stream:
    """Reads an order one global batch after another, across epochs, computing `chunk` positions at a time.

    Drawing 64 indices on their own costs about as much as drawing 1000, so a chunk makes a step's share small.
    `epoch` and `position` are where the next batch starts.
    """

    def __init__(self, order: Order, epoch: int = 0, position: int = 0, chunk: int = 4096) -> None:
        if not 0 <= position <= order.length:
            raise DataError(
                f"cannot go on at position {position}: an epoch has {order.length} samples",
                hint="the data set or its filter has changed since the checkpoint was written",
            )
        self.order = order
        self.epoch = epoch
        self.position = position
        self._chunk = chunk
        self._cached = np.empty(0, dtype=np.int64)
        self._cached_from = position
        self._roll_over()

    def _roll_over(self) -> None:
        if self.position == self.order.length:
            self.epoch, self.position = self.epoch + 1, 0
            self._cached, self._cached_from = self._cached[:0], 0

    def take(self, count: int) -> Indices:
        """The next `count` samples, fewer if the epoch has fewer left; never across its end."""
        stop = min(self.position + count, self.order.length)
        end = self._cached_from + len(self._cached)
        if stop > end:
            rest = self._cached[self.position - self._cached_from :]
            more = min(max(self._chunk, stop - end), self.order.length - end)
            self._cached = np.concatenate([rest, self.order.indices(self.epoch, end, more)])
            self._cached_from = self.position
        taken = self._cached[self.position - self._cached_from : stop - self._cached_from]
        self.position = stop
        self._roll_over()
        return taken


def batches(
    order: Order, batch: int, *, epoch: int = 0, position: int = 0, epochs: int | None = None
) -> Iterator[tuple[int, int, Indices]]:
    """Global batches as (epoch, position of its first sample, indices), from the given place on.

    Ends before epoch number `epochs`, never if that is None. The last batch of an epoch holds what is left of it.
    """
    stream = Stream(order, epoch, position)
    while epochs is None or stream.epoch < epochs:
        at = stream.epoch, stream.position
        yield *at, stream.take(batch)
