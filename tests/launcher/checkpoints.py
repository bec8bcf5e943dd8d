"""A made-up state, cut over any number of ranks, and a way to save it: shared by the checkpoint tests."""

import pickle
from collections.abc import Mapping

import torch

from rung.launcher.checkpoint.find import find, newest_valid
from rung.launcher.checkpoint.load import Loader
from rung.launcher.checkpoint.manifest import Manifest, Meta, Part, commit, folder_of, merge
from rung.launcher.checkpoint.retention import prune, sweep
from rung.launcher.checkpoint.save import Saver
from rung.launcher.storage import Store
from rung.strategies.shards import Interval

State = Mapping[str, torch.Tensor]


def state(seed: int = 0, large: int = 300_000, small: int = 40) -> dict[str, torch.Tensor]:
    """Every kind of tensor that a training has: large, small, empty, scalar, of many types."""
    torch.manual_seed(seed)
    tensors = {
        "model/large": torch.randn(large // 100, 100),
        "optim.exp_avg/large": torch.randn(large // 100, 100),
        "model/half": torch.randn(1001, 3).bfloat16(),
        "model/scalar": torch.tensor(float(seed)),
        "model/empty": torch.empty(0, 4),
        "model/mask": torch.rand(77) > 0.5,
        "optim.step/large": torch.tensor(seed, dtype=torch.int64),
        'model/naïve "name"': torch.randn(5),
    }
    for i in range(small):
        tensors[f"model/small.{i}"] = torch.randn(i % 13 + 1)
    return tensors


def owned(tensors: State, rank: int, world: int) -> list[Interval]:
    """The intervals of one rank: 1/world of each tensor, so that pieces begin anywhere."""
    found = []
    for name, tensor in tensors.items():
        flat = tensor.reshape(-1)
        low, high = flat.numel() * rank // world, flat.numel() * (rank + 1) // world
        if high > low or (flat.numel() == 0 and rank == 0):
            shape = tuple(tensor.shape)
            found.append(Interval(name=name, shape=shape, dtype=tensor.dtype, start=low, data=flat[low:high]))
    return found


def blank(intervals: list[Interval]) -> list[Interval]:
    """The same places, holding nothing of value."""
    return [
        Interval(name=i.name, shape=i.shape, dtype=i.dtype, start=i.start, data=torch.full_like(i.data, 1))
        for i in intervals
    ]


def parts_of(store: Store, step: int, tensors: State, world: int = 1) -> list[Part]:
    """What each of `world` workers reports, as it arrives through a pipe."""
    parts: list[Part] = []
    savers = [
        Saver(store, rank=r, world=world, attempt=1, on_part=lambda p: parts.append(pickle.loads(pickle.dumps(p))))
        for r in range(world)
    ]
    for rank, saver in enumerate(savers):
        saver.snapshot(step, owned(tensors, rank, world))
    for saver in savers:
        saver.wait()
        saver.close()
    return parts


def save(store: Store, step: int, tensors: State, world: int = 1, **facts: object) -> Manifest:
    """A committed checkpoint."""
    manifest = merge(parts_of(store, step, tensors, world), Meta(step=step, world_size=world, **facts))  # type: ignore[arg-type]
    commit(store, manifest)
    return manifest


def differs(store: Store, manifest: Manifest, tensors: State, world: int = 1) -> list[str]:
    """Names of tensors that load differently from `tensors`, on any of `world` ranks."""
    wrong = []
    for rank in range(world):
        expected = owned(tensors, rank, world)
        found = blank(expected)
        Loader(store, manifest).fill(found)
        wrong += [e.name for e, f in zip(expected, found, strict=True) if not torch.equal(e.data, f.data)]
    return wrong


def lives_on(store: Store) -> None:
    """Saves, finds, prunes, sweeps and loads: what a run asks of a store."""
    for step in (1, 2, 3):
        save(store, step, state(step), 3)
    assert [info.step for info in find(store)] == [3, 2, 1]
    assert prune(store, keep=2) == [folder_of(1)]
    store.write(f"{folder_of(9)}/shard-1-0-1.safetensors", b"left behind")
    assert sweep(store) == [folder_of(9)]
    found, rejected = newest_valid(store)
    assert (found.step, rejected) == (3, [])
    assert differs(store, found, state(3), 2) == []
