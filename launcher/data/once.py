"""Facts about the data that take a pass over it: made once by rank 0, kept in the run folder, read by all ranks.

An array is kept as `data/NAME.npy` and committed by `data/NAME.json`, written last, which holds its digest.
"""

import hashlib
import io
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rung.launcher.storage import Store
from rung.strategies.errors import DataError, ObjectMissing, StorageError

#: How long ranks wait for rank 0's pass over the data, in seconds. Should rank 0 fail, the launcher ends them all.
PATIENCE_S = 24 * 3600.0
_AGAIN = "the same data gives the same file again: delete both files of that name"


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """An array with what is known of it; `digest` is over both."""

    values: npt.NDArray[np.int64]
    facts: dict[str, Any]
    digest: str


Make = Callable[[], tuple[npt.NDArray[np.int64], dict[str, Any]]]


def once(
    store: Store, name: str, make: Make, *, size: int, rank: int, resumes: bool, beat: Callable[[], None] = lambda: None
) -> Kept:
    """What is kept under `name` for a data set of `size` samples; made by `make` on rank 0 if there is none yet.

    A run that resumes is held to what it was started with: DataError if that was for another number of samples, or
    if what is stored is damaged. `beat` is called while waiting.
    """
    kept = _load(store, name)
    if kept is not None and kept.facts["size"] == size:
        return kept
    if kept is not None and resumes:
        raise DataError(
            f"{store.url_of(f'data/{name}.json')} was made for {kept.facts['size']:,} samples, "
            f"the data set has {size:,} now",
            hint="bring back the data that the run was started with, or start a new run with init_from",
        )
    if rank == 0:
        values, facts = make()
        return _keep(store, name, values, {**facts, "size": size})
    until = time.monotonic() + PATIENCE_S
    pause_s = 0.05
    while time.monotonic() < until:
        kept = _load(store, name)
        if kept is not None and kept.facts["size"] == size:
            return kept
        beat()
        time.sleep(pause_s)
        pause_s = min(2.0, 1.5 * pause_s)
    raise DataError(f"rank 0 did not finish its pass over the data within {PATIENCE_S / 3600:g} hours")


def _keep(store: Store, name: str, values: npt.NDArray[np.int64], facts: dict[str, Any]) -> Kept:
    stream = io.BytesIO()
    np.save(stream, np.ascontiguousarray(values, dtype="<i8"), allow_pickle=False)
    data = stream.getvalue()
    digest = _digest(data, facts)
    store.write_atomic(f"data/{name}.npy", data)
    store.write_atomic(f"data/{name}.json", json.dumps({**facts, "digest": digest}, indent=1, sort_keys=True).encode())
    return Kept(values=values, facts=facts, digest=digest)


def _load(store: Store, name: str) -> Kept | None:
    try:
        facts = json.loads(store.read(f"data/{name}.json"))
        data = store.read(f"data/{name}.npy", limit_bytes=store.size(f"data/{name}.npy"))
        digest = facts.pop("digest")
        values = np.load(io.BytesIO(data), allow_pickle=False).astype(np.int64)
    except ObjectMissing:
        return None
    except (ValueError, KeyError, AttributeError) as error:
        url = store.url_of(f"data/{name}.json")
        raise StorageError(f"{url} is damaged: {error}", url=url, hint=_AGAIN) from None
    if _digest(data, facts) != digest:
        url = store.url_of(f"data/{name}.npy")
        raise StorageError(f"{url} is damaged: its digest is another one", url=url, hint=_AGAIN)
    return Kept(values=values, facts=facts, digest=digest)


def _digest(data: bytes, facts: dict[str, Any]) -> str:
    text = json.dumps(facts, sort_keys=True).encode()
    return hashlib.blake2b(data + text, digest_size=16).hexdigest()
