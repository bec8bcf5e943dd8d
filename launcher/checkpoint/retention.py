"""Which checkpoints go, as a pure function; and the two who act on it, after a commit and at a launch."""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from rung.launcher.checkpoint.find import find, find_all
from rung.launcher.checkpoint.manifest import NAME, Manifest
from rung.launcher.storage import Store
from rung.strategies.errors import CheckpointDamaged, ObjectMissing


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """What retention looks at. `metric` is that of `keep_best`; None or not finite if there is none."""

    step: int
    folder: str
    healthy: bool = True
    metric: float | None = None


def plan_retention(checkpoints: Iterable[Kept], *, keep: int, higher_is_better: bool = False) -> list[Kept]:
    """The checkpoints to delete, oldest first.

    Kept are the newest `keep` healthy ones, the healthy one with the best finite metric (if any has one; of equals the
    newest), and the newest of all, healthy or not. So a doubtful state never pushes out a good one, and the newest
    healthy one always stays. Raises `ValueError` if `keep` is less than 1.
    """
    if keep < 1:
        raise ValueError(f"at least one checkpoint is kept, got keep={keep}")
    newest_first = sorted(checkpoints, key=lambda c: -c.step)
    healthy = [c for c in newest_first if c.healthy]
    stays = {c.folder for c in [*newest_first[:1], *healthy[:keep]]}
    sign = -1.0 if higher_is_better else 1.0
    measured = [c for c in healthy if c.metric is not None and math.isfinite(c.metric)]
    if measured:
        stays.add(min(measured, key=lambda c: sign * (c.metric or 0.0)).folder)
    return [c for c in reversed(newest_first) if c.folder not in stays]


def best_of(keep_best: str | None) -> tuple[str | None, bool]:
    """(name of the metric, higher is better) for a job's `keep_best`: `loss` or `min loss`, `max accuracy`."""
    if keep_best is None:
        return None, False
    direction, _, name = keep_best.strip().partition(" ")
    if name and direction in ("min", "max"):
        return name.strip(), direction == "max"
    return keep_best.strip(), False


def kept(manifest: Manifest, keep_best: str | None) -> Kept:
    """What retention looks at in a manifest."""
    metric, _ = best_of(keep_best)
    value = manifest.metrics.get(metric) if metric is not None else None
    return Kept(step=manifest.step, folder=manifest.folder, healthy=manifest.healthy, metric=value)


def prune(store: Store, *, keep: int, keep_best: str | None = None, known: dict[str, Kept] | None = None) -> list[str]:
    """Deletes what `plan_retention` says; returns the folders. Call it after a commit, from one process.

    A checkpoint whose manifest cannot be read (a newer version's, a damaged one) is neither counted nor deleted.
    `known` remembers, between calls, what manifests said, so that each is read once.
    """
    known = {} if known is None else known
    _, higher = best_of(keep_best)
    folders = [info.folder for info in find(store)]
    for folder in folders:
        if folder not in known and (kept := _look(store, folder, keep_best)) is not None:
            known[folder] = kept
    doomed = plan_retention([known[f] for f in folders if f in known], keep=keep, higher_is_better=higher)
    for each in doomed:
        remove(store, each.folder)
        known.pop(each.folder, None)
    return [each.folder for each in doomed]


def remove(store: Store, folder: str) -> None:
    """Deletes one checkpoint, its manifest first: at no moment does it look whole without being so."""
    store.delete(f"{folder}/{NAME}")
    store.delete_folder(folder)


def sweep(store: Store, *, live: Collection[str] = ()) -> list[str]:
    """Deletes what dead runs left: folders without a manifest, and files that a manifest does not list.

    Only for the holder of the run's lease, while no worker writes; folders in `live` are left alone. Returns what was
    deleted, relative to the store.
    """
    deleted: list[str] = []
    for info in find_all(store):
        if info.folder in live:
            continue
        if not info.committed:
            store.delete_folder(info.folder)
            deleted.append(info.folder)
            continue
        for name in _leftovers(store, info.folder):
            store.delete(f"{info.folder}/{name}")
            deleted.append(f"{info.folder}/{name}")
    return deleted


def _look(store: Store, folder: str, keep_best: str | None) -> Kept | None:
    try:
        manifest = Manifest.read(store, folder)
    except (CheckpointDamaged, ObjectMissing):
        return None
    return kept(manifest, keep_best)


def _leftovers(store: Store, folder: str) -> Sequence[str]:
    try:
        manifest = Manifest.read(store, folder)
    except (CheckpointDamaged, ObjectMissing):
        return ()
    listed = {NAME, *(f.name for f in manifest.files)}
    return sorted(set(store.sizes(folder)) - listed)
