"""Keeps the checkpoints of a run: commits complete ones, deletes old ones, finds the one to go on from."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from rung.launcher.checkpoint import manifest as manifests
from rung.launcher.checkpoint import retention
from rung.launcher.checkpoint.find import find, newest_valid
from rung.launcher.checkpoint.lease import Lease
from rung.launcher.checkpoint.manifest import Manifest, Meta, Part
from rung.launcher.job import Job
from rung.launcher.rollback import Batch, took
from rung.launcher.storage import Store
from rung.launcher.watch.progress import View
from rung.strategies.errors import StorageError
from rung.strategies.plan import Plan


class Gathering:
    """Parts of checkpoints as workers report them. A step may be saved in two ways at once: each rank its share of it,
    and, when one of them dies meanwhile, a survivor the whole; parts of the one do not complete the other."""

    def __init__(self) -> None:
        self._parts: dict[tuple[int, int], dict[int, Part]] = defaultdict(dict)

    def add(self, part: Part) -> list[Part] | None:
        """All parts of what `part` completes, by rank; None while others are to come."""
        key = (part.step, part.world)
        self._parts[key][part.rank] = part
        if len(self._parts[key]) < part.world:
            return None
        there = self._parts.pop(key)
        return [there[rank] for rank in sorted(there)]


class Keeper:
    """The launcher's side of checkpoints: no tensor passes through here."""

    def __init__(self, store: Store, job: Job, view: View, lease: Lease) -> None:
        self.store, self.job, self.view, self.lease = store, job, view, lease
        self.committed_step = -1
        self.passed_over: tuple[Batch, ...] = ()
        self._damaged: set[str] = set()
        self._known: dict[str, retention.Kept] = {}
        self._last: Manifest | None = None

    def commit(self, parts: Sequence[Part], plan: Plan, metrics: Mapping[str, float]) -> str:
        """Makes a checkpoint of what all workers wrote, then deletes those that are no longer kept. Raises RunLocked
        if another launcher has taken the run over meanwhile."""
        self.lease.check()
        said = parts[0].meta
        meta = Meta(
            step=parts[0].step,
            epoch=said["epoch"],
            position=said["position"],
            global_batch=plan.global_batch,
            seed=self.job.seed,
            job_digest=self.job.digest(),
            world_size=plan.devices,
            strategy=plan.strategy,
            healthy=said["healthy"],
            metrics={name: value for name, value in metrics.items() if math.isfinite(value)},
            aliases=said["aliases"],
            trainer=said["trainer"],
        )
        manifest = manifests.merge(parts, meta, last=self._last)
        self._last = manifest
        if lacking := [name for name in said["weights"] if f"model/{name}" not in manifest.tensors]:
            raise StorageError(
                f"the checkpoint of step {meta.step} lacks {len(lacking)} weights: {', '.join(lacking[:5])}",
                url=self.store.url, hint="this should not happen; the previous checkpoint stays valid",
            )  # fmt: skip
        name = manifests.commit(self.store, manifest)
        self.committed_step = meta.step
        # Only after the commit, and by one process: this one.
        checkpoint = self.job.checkpoint
        self._known[name] = retention.kept(manifest, checkpoint.keep_best)
        retention.prune(self.store, keep=checkpoint.keep, keep_best=checkpoint.keep_best, known=self._known)
        return name

    def newest(self) -> Manifest | None:
        """The newest checkpoint whose manifest and file sizes are in order; says which newer ones are not."""
        found, rejected = newest_valid(self.store, skip=self._damaged)
        for name, reason in rejected:
            self.view.say(f"warning    {name} cannot be used: {reason}", style="yellow")
        if found is not None and took(found, self.passed_over):
            self._damaged.add(found.folder)  # a rollback was decided, and cut off before it was carried out
            return self.newest()
        if found is not None:
            self.committed_step = found.step
        return found

    def go_back(self) -> Manifest | None:
        """Gives up every checkpoint down to the newest healthy one that has not learnt from a batch that is passed
        over; returns that one. Raises RunLocked if another launcher has taken the run over meanwhile."""
        self.lease.check()
        self.committed_step = -1
        while (newest := self.newest()) is not None and not newest.healthy:
            self._damaged.add(newest.folder)
        for info in find(self.store):
            if newest is None or info.step > newest.step:
                retention.remove(self.store, info.folder)
                self._known.pop(info.folder, None)
                self._damaged.discard(info.folder)  # the same step may be saved again
        return newest

    def reject(self, folder: str) -> None:
        """A checkpoint turned out damaged while it was read: it is not looked at again."""
        self._damaged.add(folder)

    def sweep(self) -> None:
        """Deletes what dead runs left half-written. The lease says that no one else is writing."""
        retention.sweep(self.store)
