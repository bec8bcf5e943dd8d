"""Going back when the loss has jumped: to a checkpoint from before, and past the batches that are under suspicion.

A batch is named by (epoch, position) of its first sample in the order. The step that would take it is counted as done,
with the weights as before: so every later step has the same samples and learning rate as it would have had. What is
passed over stands in the run folder, so that every later attempt and launch does the same.
"""

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass

from rung.launcher.checkpoint.manifest import Manifest
from rung.launcher.storage import Store
from rung.strategies.errors import ObjectMissing

NAME = "rollbacks.json"
#: A run that jumps more often than this has another trouble than a bad batch.
MOST_ROLLBACKS = 5

Batch = tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollback:
    """One return. `step`: the one whose loss jumped; `batches`: those that are passed over from now on."""

    step: int
    batches: tuple[Batch, ...]
    reason: str


def read(store: Store) -> tuple[Rollback, ...]:
    """All rollbacks of a run, oldest first."""
    try:
        rows = json.loads(store.read(NAME))
    except ObjectMissing:
        return ()
    return tuple(
        Rollback(step=int(row["step"]), batches=tuple((int(e), int(p)) for e, p in row["batches"]),
                 reason=str(row["reason"]))
        for row in rows
    )  # fmt: skip


def write(store: Store, rollbacks: Collection[Rollback]) -> None:
    """Keeps them, before any checkpoint is given up for them."""
    store.write_atomic(NAME, json.dumps([asdict(r) for r in rollbacks], indent=1).encode())


def passed_over(rollbacks: Collection[Rollback]) -> tuple[Batch, ...]:
    """All batches that no step may take."""
    return tuple(sorted({batch for r in rollbacks for batch in r.batches}))


def took(manifest: Manifest, batches: Collection[Batch]) -> bool:
    """Whether a checkpoint's weights have learnt from any of these batches."""
    done = {(int(e), int(p)) for e, p in manifest.trainer.get("passed_over", ())}
    return any(batch < (manifest.epoch, manifest.position) and batch not in done for batch in batches)


def batch_before(epoch: int, position: int, *, length: int, batch: int) -> Batch | None:
    """The batch that comes before the one at (epoch, position), in epochs of `length` samples; None for the first."""
    if position > 0:
        return epoch, position - batch
    return (epoch - 1, (length - 1) // batch * batch) if epoch > 0 else None
