"""The data order of a run: which samples there are after cleaning, and how classes are evened out.

Runs on every rank before the process group forms, since a pass over the data may take long. Rank 0 makes what needs
such a pass; all read it from the run folder, so that every rank and every later attempt has the same order.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rung.cluster.link import Link
from rung.launcher.data import clean
from rung.launcher.data.examine import Examiner
from rung.launcher.data.imbalance import class_weights, decide, stratified
from rung.launcher.data.limits import LABEL, find_limits
from rung.launcher.data.once import Kept, once
from rung.launcher.data.order import Indices, Order
from rung.launcher.data.scan import Deaths, processes, scan
from rung.launcher.data.seen import NO_LABEL, Ints
from rung.launcher.job import Job
from rung.launcher.messages import Note
from rung.launcher.storage import Store
from rung.strategies.errors import DataError, JobError

if TYPE_CHECKING:
    import torch

    from rung.launcher.task import MapDataset, TaskAdapter


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """`order` is what the run draws from. `class_weights`, of shape (classes,), are for the loss, or None. `filter`
    says which samples and shares the order is made of, for a resumed run to compare; "" if all. `notes` are for the
    user."""

    order: Order
    class_weights: "torch.Tensor | None"
    filter: str
    notes: tuple[str, ...]


def prepare(
    job: Job, task: "TaskAdapter", dataset: "MapDataset", *, rank: int, resumes: bool,
    beat: Callable[[str], None] = lambda _: None,
) -> Prepared:  # fmt: skip
    """The order that `data.clean` and `data.imbalance` ask for. `beat` is told what is done while it takes long.

    Raises JobError where the task lacks what they need, DataError for samples and labels that stop them.
    """
    size = len(dataset)
    rules: list[str] = sorted(set(job.data.clean))
    wanted = job.data.imbalance
    if not rules and wanted == "none":
        return Prepared(order=Order(size=size, seed=job.seed), class_weights=None, filter="", notes=())
    if wanted != "none" and not task.has_label:
        raise JobError(
            f"data.imbalance: {wanted} needs a label of each sample, and the task has no label(sample)",
            hint="write def label(self, sample): return int(...), or leave data.imbalance at none",
        )
    if wanted == "weights" and not task.takes_class_weights:
        raise JobError(
            "data.imbalance: weights needs a loss that takes them, and loss(model, batch) does not",
            hint="write def loss(self, model, batch, class_weights=None), or use data.imbalance: resample",
        )
    store = Store.open(job.run, job.checkpoint.options)
    notes: list[str] = []
    ids: list[str] = []
    chosen: Indices | None = None
    if rules:
        kept = once(
            store, "clean-" + "-".join(rule.removeprefix("drop_") for rule in rules),
            lambda: clean.to_drop(dataset, rules, progress=lambda done: beat(f"cleaning, {done:,} of {size:,}")),
            size=size, rank=rank, resumes=resumes, beat=lambda: beat("waiting for the filter"),
        )  # fmt: skip
        notes.append(clean.words(kept.facts, size))
        ids.append(f"clean {kept.digest}")
        if len(kept.values):
            chosen = clean.kept_after(size, kept.values)
    order = Order(size=size, seed=job.seed, subset=chosen)
    if wanted == "none":
        return Prepared(order=order, class_weights=None, filter=", ".join(ids), notes=tuple(notes))
    labels = labels_of(store, task, dataset, chosen, rules, rank=rank, resumes=resumes, beat=beat)
    counts = _counts(labels.values, chosen)
    decision = decide(wanted, counts, takes_weights=task.takes_class_weights)
    notes.append(f"data.imbalance: {decision.kind}; {decision.reason}")
    ids += [] if decision.kind == "none" else [f"{decision.kind} {labels.digest}"]
    weights = None
    if decision.kind == "resample":
        order = stratified(size, job.seed, labels.values, chosen)
        notes.append(_shares(counts, order))
    elif decision.kind == "weights":
        weights = _weights(task, task.fetch(dataset, 0 if chosen is None else int(chosen[0])), counts, notes)
    return Prepared(order=order, class_weights=weights, filter=", ".join(ids), notes=tuple(notes))


def prepare_run(job: Job, task: "TaskAdapter", dataset: "MapDataset", link: Link, *, resumes: bool) -> Prepared:
    """`prepare` in a worker: it shows signs of life, and rank 0 tells the user what was decided."""
    prepared = prepare(job, task, dataset, rank=link.rank, resumes=resumes, beat=lambda what: link.beat(0, what))
    for text in prepared.notes if link.rank == 0 else ():
        link.send(Note(text=text))
    return prepared


def labels_of(
    store: Store, task: "TaskAdapter", dataset: "MapDataset", chosen: Indices | None, rules: list[str], *, rank: int,
    resumes: bool, beat: Callable[[str], None],
) -> Kept:  # fmt: skip
    """The label of every sample that is drawn from, read once in parallel processes."""
    size = len(dataset)
    name = "labels" + ("-" + "-".join(rule.removeprefix("drop_") for rule in rules) if rules else "")

    def make() -> tuple[Ints, dict[str, Any]]:
        wanted = np.arange(size, dtype=np.int64) if chosen is None else chosen
        labels = np.full(size, NO_LABEL, dtype=np.int64)
        deaths = Deaths()
        examiner = Examiner(dataset, label=task.task.label, labels_only=True)
        for seen in scan(examiner, wanted, workers=processes(), deaths=deaths,
                         progress=lambda done: beat(f"reading labels, {done:,} of {len(wanted):,}")):  # fmt: skip
            for some in seen.problems.values():
                raise DataError(
                    f"data.imbalance: sample {some.indices[0]}: {some.text or 'no label'}", samples=tuple(some.indices),
                    hint="`rung check` lists all such samples; data.clean: [drop_unreadable] leaves out what cannot be "
                    "read",
                )  # fmt: skip
            labels[seen.indices] = seen.labels
        if deaths.samples or deaths.gave_up:
            index = deaths.samples[0][0] if deaths.samples else -1
            raise DataError(f"reading sample {index} ends the process that reads it", samples=(index,))
        return labels, {"classes": len(np.unique(labels[wanted]))}

    return once(store, name, make, size=size, rank=rank, resumes=resumes, beat=lambda: beat("waiting for the labels"))


def _counts(labels: Ints, chosen: Indices | None) -> dict[int, int]:
    values, counts = np.unique(labels if chosen is None else labels[chosen], return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


def _shares(counts: dict[int, int], order: Order) -> str:
    share = order.length / len(counts)
    seen = [f"{label}: x {share / count:.3g}" for label, count in list(counts.items())[:12]]
    return (
        f"each epoch draws {order.length:,} samples, {share:,.0f} of each class; how often a sample comes: "
        + ", ".join(seen) + (", ..." if len(counts) > 12 else "")
    )  # fmt: skip


def _weights(task: "TaskAdapter", sample: Any, counts: dict[int, int], notes: list[str]) -> "torch.Tensor":
    import torch

    limit = find_limits(task, [sample, sample]).get(LABEL)
    weights = class_weights(counts, max(max(counts) + 1, limit.size if limit is not None else 0))
    shown = ", ".join(f"{label}: {weights[label]:.3g}" for label in list(counts)[:12])
    notes.append(f"class weights {shown}{', ...' if len(counts) > 12 else ''} (mean over samples 1)")
    return torch.from_numpy(weights)


def refuse_other_filter(stored: str, own: str) -> None:
    """Raises JobError where a checkpoint was written with another filter than the run has now."""
    if stored != own:
        raise JobError(
            f"the checkpoint was written while training on {stored or 'all samples as they are'}; now data.clean and "
            f"data.imbalance give {own or 'all samples as they are'}",
            hint="its position means nothing in another order: put them back as they were, or start a new run with "
            "init_from",
        )
