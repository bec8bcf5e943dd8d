"""Steps: each global batch of the data order, cut for one rank into micro-batches."""

import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from rung.launcher.data.fetch import Collate, Fetch, MapStyle, Randomness, probe
from rung.launcher.data.order import Indices, Order, batches
from rung.launcher.data.workers import Task, Workers
from rung.strategies.errors import TaskError, WorkersFailed
from rung.strategies.oom import oom_kind
from rung.strategies.plan import Cut, Plan, cut


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Micro:
    """One micro-batch of one rank. A `filler` stands where this rank has no samples left while others have: it has to
    run, with weight zero, because ranks communicate in each slot."""

    indices: Indices
    batch: Any
    filler: bool


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Step:
    """One global batch.

    `epoch` and `position`: where its first sample stands in the order. `count`: samples over all ranks. `indices`: all
    of them, of shape (count,). `slots`: how many micro-batches every rank has. `micro`: those of this rank, fetched
    while it is iterated, once; a tuple after `materialise`. `resume`: epoch and position of the step that follows.
    """

    epoch: int
    position: int
    count: int
    indices: Indices
    slots: int
    micro: Iterable[Micro]
    resume: tuple[int, int]

    def materialise(self) -> "Step":
        """The same step with all micro-batches in memory: for when the global weight has to be known first."""
        return replace(self, micro=tuple(self.micro))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Planned:
    """A step before anything is fetched: `micro` is (indices, filler) for each slot of this rank."""

    epoch: int
    position: int
    indices: Indices
    micro: list[tuple[Indices, bool]]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Schedule:
    """The steps of one rank from a place in the order on. Every `iter` starts there again."""

    order: Order
    plan: Plan
    rank: int
    epoch: int
    position: int
    epochs: int | None

    def __iter__(self) -> Iterator[_Planned]:
        cuts: dict[int, Cut] = {}
        start = {"epoch": self.epoch, "position": self.position, "epochs": self.epochs}
        for epoch, position, indices in batches(self.order, self.plan.global_batch, **start):  # type: ignore[arg-type]
            count = len(indices)
            if count not in cuts:
                cuts = {count: cut(count, self.plan)}
            micro = [(indices[a:b], False) if b > a else (indices[:1], True) for a, b in cuts[count].slices[self.rank]]
            yield _Planned(epoch=epoch, position=position, indices=indices, micro=micro)

    def tasks(self) -> Iterator[Task]:
        """What loader workers are to fetch, in order."""
        for planned in self:
            for indices, _filler in planned.micro:
                yield planned.epoch, indices.tolist()


class Loader:
    """An iterator of `Step`s for one rank, from (epoch, position) on, without end unless `epochs` is given: then it
    ends before epoch number `epochs`.

    What comes is a pure function of order, plan and place. `workers` is how many processes fetch ahead; with 0 the
    trainer fetches by itself, while it iterates, and its random generators stay untouched. `random` says what draws
    random numbers; None tries it on a few samples. Close it, or use it as a context manager.

    Where shared memory is too small for what the workers send, they are given up: the trainer fetches by itself from
    there on, the same samples in the same order. `told` then hears why.

    Raises DataError if the place is not in the order, TaskError for what the user's data set or collate raises, and
    WorkersFailed if a loader worker died.
    """

    def __init__(
        self,
        dataset: MapStyle,
        collate: Collate,
        order: Order,
        plan: Plan,
        rank: int,
        *,
        epoch: int = 0,
        position: int = 0,
        epochs: int | None = None,
        workers: int = 0,
        random: Randomness | None = None,
        told: Callable[[str], None] | None = None,
    ) -> None:
        if (size := _size(dataset)) != order.size:
            raise ValueError(f"the order is made for {order.size} samples, the data set has {size}")
        if not 0 <= rank < plan.devices:
            raise ValueError(f"rank {rank} is not within 0..{plan.devices - 1}")
        self.random = probe(dataset, collate, order) if random is None else random
        self._order = order
        self._fetch = Fetch(dataset=dataset, collate=collate, seed=order.seed, random=self.random)
        schedule = _Schedule(order=order, plan=plan, rank=rank, epoch=epoch, position=position, epochs=epochs)
        self._planned = iter(schedule)
        self._micro: Iterator[Micro] = iter(())
        self._workers: Workers | None = None
        self._told = told
        if workers > 0:
            self._workers = Workers(self._fetch, schedule.tasks, workers, pin=plan.device == "cuda")

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the loader workers."""
        return self._workers.pids if self._workers else []

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> Step:
        if self._workers:
            for _ in self._micro:  # what the trainer left of the last step would else be taken for the next one's
                pass
        planned = next(self._planned)
        self._micro = self._fetched(planned)
        end = planned.position + len(planned.indices)
        return Step(
            epoch=planned.epoch,
            position=planned.position,
            count=len(planned.indices),
            indices=planned.indices,
            slots=len(planned.micro),
            micro=self._micro,
            resume=(planned.epoch, end) if end < self._order.length else (planned.epoch + 1, 0),
        )

    def _fetched(self, planned: _Planned) -> Iterator[Micro]:
        for indices, filler in planned.micro:
            batch = self._sent() if self._workers else None
            if self._workers is None:
                batch = self._fetch(planned.epoch, indices.tolist(), preserve=True)
            yield Micro(indices=indices, batch=batch, filler=filler)

    def _sent(self) -> object:
        """The next batch from the workers; when these can send nothing for want of shared memory they are gone."""
        assert self._workers is not None
        try:
            return next(self._workers)
        except Exception as error:
            full = isinstance(error, WorkersFailed) and error.exit_status == -signal.SIGBUS
            if not full and oom_kind(error) != "shared":
                raise
        self.close()
        self._workers = None
        if self._told is not None:
            self._told(
                "shared memory (/dev/shm) is full: loader workers are given up, the trainer fetches its data itself; "
                "a larger /dev/shm (in a container: --shm-size) or smaller batches would keep them"
            )
        return None

    def close(self) -> None:
        """Ends the loader workers."""
        if self._workers:
            self._workers.close()

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _size(dataset: MapStyle) -> int:
    from torch.utils.data import IterableDataset

    # An IterableDataset inherits a __getitem__ that only raises.
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise TaskError(
            f"dataset() returned a {type(dataset).__name__}, which has no __len__ and __getitem__ of its own",
            hint="return a map-style data set: any sample can be asked for by its index, also on resume",
        )
    return len(dataset)


def eval_batches(
    dataset: MapStyle,
    collate: Collate,
    plan: Plan,
    rank: int,
    *,
    workers: int = 0,
    random: Randomness | None = None,
) -> Iterator[Micro]:
    """The data set once, in its own order, for validation: every rank gets the same number of micro-batches, with
    fillers where its samples have run out. As many samples at a time as the devices hold, unless the plan shares a
    batch out unevenly."""
    if not plan.shares:
        plan = plan.with_(global_batch=plan.devices * plan.micro_batch)
    order = Order(_size(dataset), shuffle=False)
    with Loader(dataset, collate, order, plan, rank, epochs=1, workers=workers, random=random) as loader:
        for step in loader:
            yield from step.micro


def auto_workers(cpus: int, ranks: int, fetch_s: float, step_s: float | None) -> tuple[int, str]:
    """How many loader workers each rank is to have, and why.

    `cpus`: cores that this machine allows; `ranks`: trainers on it; `fetch_s`: seconds to fetch one micro-batch in the
    trainer; `step_s`: seconds the device needs for it, None if not known yet.
    """
    spare = cpus // ranks - 1
    fetch = f"fetching a batch takes {fetch_s * 1e3:.3g} ms"
    if fetch_s < 1e-3:
        return 0, f"{fetch}: a worker would cost more"
    if step_s is not None and fetch_s < 0.01 * step_s:
        return 0, f"{fetch}, less than a hundredth of the {step_s * 1e3:.3g} ms that training on it takes"
    if spare < 1:
        return 0, f"{cpus} CPU cores for {ranks} trainers leave none for loader workers"
    if step_s is None:
        count = min(spare, 4)
        return count, f"{fetch}; {count} of {spare} cores that are free for each trainer"
    # A quarter more than the mean rate asks for, since fetches vary.
    wanted = max(1, -int(-1.25 * fetch_s // step_s))
    count = min(wanted, spare, 16)
    why = f"{fetch}, training on it {step_s * 1e3:.3g} ms"
    return count, why if count == wanted else f"{why}: {wanted} would keep up, {spare} cores are free"
