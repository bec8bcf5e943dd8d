"""Classes of unequal size: what to do about them, decided from the histogram; and an order that draws classes evenly.

Pure: labels in, decisions and orders out. `launcher/data/prepare.py` reads the labels.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from rung.launcher.data.order import Indices, Order, permuted
from rung.launcher.data.rng import mix64
from rung.strategies.errors import DataError

#: No class weighs more than this many times the mean: larger steps on few samples overshoot.
CAP = 10.0
#: Below this proportion of the largest class to the smallest, nothing is gained.
_EVEN = 3.0
_FOR_CLASS = 0x636C6173

Kind = Literal["none", "resample", "weights"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What is done, and why."""

    kind: Kind
    reason: str


def decide(wanted: str, counts: Mapping[int, int], *, takes_weights: bool) -> Decision:
    """`wanted` is data.imbalance; `counts` the samples of each class; `takes_weights`: the loss has `class_weights`."""
    most, least = max(counts.values()), min(counts.values())
    ratio = most / least
    said = f"{len(counts)} classes of {least:,} to {most:,} samples"
    if wanted == "resample":
        return Decision(kind="resample", reason=f"{said}; asked for")
    if wanted == "weights":
        return Decision(kind="weights", reason=f"{said}; asked for")
    if wanted == "none" or len(counts) < 2 or ratio < _EVEN:
        return Decision(
            kind="none", reason=f"{said}: the largest is {ratio:.3g} times the smallest, less than {_EVEN:g}"
        )
    said += f": the largest is {ratio:.3g} times the smallest"
    if not takes_weights:
        return Decision(kind="resample", reason=f"{said}, and loss() takes no class_weights")
    raw = sum(counts.values()) / (len(counts) * least)
    if raw > CAP:
        return Decision(kind="resample", reason=f"{said}; its weight of {raw:.3g} would overshoot ({CAP:g} is the cap)")
    return Decision(kind="weights", reason=f"{said}; weights up to {raw:.3g} make up for it and keep every sample")


def class_weights(counts: Mapping[int, int], classes: int, *, cap: float = CAP) -> npt.NDArray[np.float32]:
    """One weight for each of `classes` classes: inversely proportional to its samples, none above `cap`, and the mean
    over all samples is 1, so that the learning rate keeps its meaning. Classes without samples get 1.

    What the cap takes from a class goes to the others in proportion.
    """
    weights = np.ones(classes, dtype=np.float64)
    labels = np.array(sorted(counts), dtype=np.int64)
    sizes = np.array([counts[int(label)] for label in labels], dtype=np.float64)
    total, capped = sizes.sum(), np.zeros(len(sizes), dtype=bool)
    own = np.full(len(sizes), cap)
    while not capped.all():
        # Each class that is not capped gets the same share of the weight that is left.
        share = (total - cap * sizes[capped].sum()) / (~capped).sum()
        own[~capped] = share / sizes[~capped]
        over = ~capped & (own > cap)
        if not over.any():
            break
        own[over] = cap
        capped |= over
    weights[labels] = own
    return weights.astype(np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class Stratified(Order):
    """Every class equally often in each epoch, exact to one sample, in the order's own shuffled way. Still a pure
    function of (seed, epoch, position): it resumes by a seek, for any number of devices.

    `members` holds the indices of each class. An epoch is as long as all members together. A class draws from its
    members without repeating one before all have come; the next epoch goes on where the last one ended, so that of a
    large class all samples come in time. `subset` is left None.
    """

    members: tuple[Indices, ...] = ()

    def __post_init__(self) -> None:
        Order.__post_init__(self)
        if not self.members or any(len(m) == 0 for m in self.members):
            raise DataError("resampling needs at least one sample of each class")

    @property
    def length(self) -> int:
        """Positions in one epoch."""
        return sum(map(len, self.members))

    @property
    def fingerprint(self) -> str:
        """As of any order; differs from that of the same samples not resampled."""
        digest = hashlib.blake2b(f"stratified {self.length} {self.seed}".encode(), digest_size=8)
        for members in self.members:
            digest.update(len(members).to_bytes(8, "little") + members.astype("<i8").tobytes())
        return digest.hexdigest()

    def indices(self, epoch: int, position: int, count: int) -> Indices:
        """As of any order."""
        if epoch < 0 or position < 0 or count < 0 or position + count > self.length:
            raise ValueError(
                f"positions {position}..{position + count - 1} of epoch {epoch} are not within 0..{self.length - 1}"
            )
        slots = permuted(self.length, self.seed, epoch, np.arange(position, position + count, dtype=np.int64))
        edges = self._edges()
        classes = np.searchsorted(edges, slots, side="right") - 1
        out = np.empty(count, dtype=np.int64)
        for number in np.unique(classes).tolist():
            mine = classes == number
            draws = epoch * int(edges[number + 1] - edges[number]) + (slots[mine] - edges[number])
            out[mine] = self._draw(number, draws)
        return out

    def _edges(self) -> Indices:
        """Slots edges[c]..edges[c+1]-1 of an epoch belong to class c."""
        count = len(self.members)
        return np.array([self.length * c // count for c in range(count + 1)], dtype=np.int64)

    def _draw(self, number: int, draws: Indices) -> Indices:
        """The members that a class gives at these places of its endless sequence: one permutation after another."""
        members = self.members[number]
        rounds, places = np.divmod(draws, len(members))
        out = np.empty(len(draws), dtype=np.int64)
        key = mix64(_FOR_CLASS, self.seed, number)
        for turn in np.unique(rounds).tolist():
            mine = rounds == turn
            out[mine] = members[permuted(len(members), key, turn, places[mine])]
        return out


def stratified(size: int, seed: int, labels: npt.NDArray[np.int64], chosen: Indices | None = None) -> Stratified:
    """The order that draws evenly from the classes in `labels` (one for each sample), of all samples or those
    `chosen`."""
    indices = np.arange(size, dtype=np.int64) if chosen is None else chosen
    of = labels[indices]
    members = tuple(indices[of == label] for label in np.unique(of).tolist())
    return Stratified(size=size, seed=seed, members=members)
