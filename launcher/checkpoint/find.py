"""Which checkpoints a run has, and which of them can be used. No torch: the launcher decides where to resume."""

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass

from rung.launcher.checkpoint.manifest import NAME, ROOT, Manifest, check_files, step_of
from rung.launcher.storage import Store
from rung.strategies.errors import CheckpointDamaged, ObjectMissing


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointInfo:
    """One folder below `checkpoints/`, as a listing shows it. `committed`: it has a manifest."""

    step: int
    folder: str
    committed: bool
    total_bytes: int
    files: int


def find_all(store: Store) -> list[CheckpointInfo]:
    """All checkpoint folders of a run, committed or not, newest step first."""
    sizes: dict[str, dict[str, int]] = defaultdict(dict)
    for path, size in store.sizes(ROOT).items():
        folder, _, name = path.partition("/")
        if step_of(folder) is not None and name:
            sizes[folder][name] = size
    infos = [
        CheckpointInfo(
            step=step_of(folder) or 0,
            folder=f"{ROOT}/{folder}",
            committed=NAME in files,
            total_bytes=sum(files.values()),
            files=len(files),
        )
        for folder, files in sizes.items()
    ]
    return sorted(infos, key=lambda c: -c.step)


def find(store: Store) -> list[CheckpointInfo]:
    """The checkpoints of a run (those that were committed), newest first."""
    return [info for info in find_all(store) if info.committed]


def newest_valid(store: Store, *, skip: Collection[str] = ()) -> tuple[Manifest | None, list[tuple[str, str]]]:
    """The newest checkpoint that is complete at a cheap look: its manifest is sound, its files have their sizes.

    Folders in `skip` (those that turned out damaged while loading) are passed over. Returns the manifest, None if
    there is no usable checkpoint, and (folder, reason) of each newer one that was rejected.
    """
    rejected: list[tuple[str, str]] = []
    for info in find(store):
        if info.folder in skip:
            continue
        try:
            manifest = Manifest.read(store, info.folder)
            check_files(store, manifest)
        except (CheckpointDamaged, ObjectMissing) as error:
            rejected.append((info.folder, error.message))
        else:
            return manifest, rejected
    return None, rejected
