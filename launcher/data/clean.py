"""`data.clean`: which samples are left out of training. A pure function of the data and the rules, made once."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rung.launcher.data.examine import Examiner
from rung.launcher.data.fetch import MapStyle
from rung.launcher.data.judge import named
from rung.launcher.data.order import Indices, Order
from rung.launcher.data.scan import Deaths, processes, scan
from rung.launcher.data.seen import Some
from rung.strategies.errors import DataError

Ints = npt.NDArray[np.int64]


def to_drop(
    dataset: MapStyle,
    rules: Sequence[str],
    *,
    progress: Callable[[int], None] | None = None,
    workers: int | None = None,
) -> tuple[Ints, dict[str, Any]]:
    """Indices of the samples that the rules leave out, rising, and how many each rule took.

    drop_unreadable: those that raise or whose reading ends the process. drop_missing: those with a value that is
    None, NaN or Inf. drop_duplicates: of samples whose content is equal in all fields, all but the first; 16 bytes of
    memory for each sample. Reads the whole data set in parallel. Raises DataError for a sample that cannot be read
    where drop_unreadable is not among the rules, and where nothing would be left.
    """
    size = len(dataset)
    every = Order(size=size, shuffle=False).indices(0, 0, size)
    deaths = Deaths()
    hashes: list[npt.NDArray[np.uint64]] = []
    indices: list[Ints] = []
    unreadable: list[int] = []
    missing: list[int] = []
    broken = Some()
    count = workers if workers is not None else processes()
    for seen in scan(Examiner(dataset, deep=False), every, workers=count, deaths=deaths, progress=progress):
        hashes.append(seen.exact)
        indices.append(seen.indices)
        unreadable += seen.unreadable
        missing += seen.missing
        if (some := seen.problems.get("sample.unreadable")) is not None:
            broken.merge(some)
    unreadable += [index for index, _ in deaths.samples]
    if deaths.gave_up:
        raise DataError("reading the data keeps ending the processes that read it", samples=tuple(unreadable[:20]),
                        hint="`rung check` says more; leave such samples out in dataset()")  # fmt: skip
    if unreadable and "drop_unreadable" not in rules:
        first = sorted(unreadable)[:20]
        raise DataError(
            f"{named(first, len(unreadable))} cannot be read{f': {broken.text}' if broken.text else ''}",
            samples=tuple(first), hint="mend the data, or add drop_unreadable to data.clean",
        )  # fmt: skip
    taken = {rule: np.empty(0, dtype=np.int64) for rule in rules}
    if "drop_unreadable" in rules:
        taken["drop_unreadable"] = np.array(sorted(unreadable), dtype=np.int64)
    if "drop_missing" in rules:
        taken["drop_missing"] = np.array(sorted(missing), dtype=np.int64)
    if "drop_duplicates" in rules and indices:
        read = np.concatenate(indices)
        whole = ~np.isin(read, taken["drop_missing"]) if "drop_missing" in rules else np.ones(len(read), dtype=bool)
        taken["drop_duplicates"] = _copies(np.concatenate(hashes)[whole], read[whole])
    dropped = np.unique(np.concatenate([np.empty(0, dtype=np.int64), *taken.values()]))
    if len(dropped) == size:
        raise DataError(f"data.clean leaves none of {size:,} samples", hint="`rung check` says what is wrong with them")
    return dropped, {"rules": {rule: len(gone) for rule, gone in taken.items()}, "dropped": len(dropped)}


def _copies(hashes: npt.NDArray[np.uint64], indices: Ints) -> Ints:
    order = np.lexsort((indices, hashes))
    again = hashes[order][1:] == hashes[order][:-1]
    return np.sort(indices[order][1:][again])


def kept_after(size: int, dropped: Indices) -> Indices:
    """The indices that are left, rising."""
    keep = np.ones(size, dtype=bool)
    keep[dropped] = False
    return np.flatnonzero(keep).astype(np.int64)


def words(facts: dict[str, Any], size: int) -> str:
    """One line for the user."""
    parts = [f"{count:,} by {rule}" for rule, count in facts["rules"].items()]
    return f"data.clean leaves out {facts['dropped']:,} of {size:,} samples ({', '.join(parts)})"
