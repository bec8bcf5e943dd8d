"""Thousands of small tensors: read straight into place, and no less verified."""

import random

import pytest
import torch

from rung.launcher.checkpoint.find import find
from rung.launcher.checkpoint.layout import BLOCK_BYTES
from rung.launcher.checkpoint.load import DIRECT_BYTES, Loader
from rung.launcher.checkpoint.manifest import Manifest, Meta, commit, merge
from rung.launcher.checkpoint.save import Saver
from rung.launcher.storage import Store
from rung.strategies.errors import CheckpointDamaged
from rung.strategies.shards import Interval
from tests.launcher.checkpoints import blank, differs, owned, parts_of, save

TYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)


@pytest.fixture
def store(tmp_path):
    return Store.open(str(tmp_path / "run"))


def many(count=3000, seed=0):
    """Small tensors of several types, from one element to some kilobytes: below, at and above what is read directly."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    sizes = [1, DIRECT_BYTES // 4 - 1, DIRECT_BYTES // 4, DIRECT_BYTES // 4 + 1]
    return {
        f"model/layers.{i}.weight": torch.randint(
            0, 100, (rng.choice([*sizes, rng.randint(1, 3000)]),), generator=generator
        ).to(rng.choice(TYPES))
        for i in range(count)
    }


def test_they_load_whole_in_part_and_in_any_order(store):
    tensors = many()
    for writers in (1, 3):
        manifest = save(store, writers, tensors, writers)
        assert sum(f.size for f in manifest.files) > 4 * BLOCK_BYTES
        assert [differs(store, manifest, tensors, readers) for readers in (1, 2, 5)] == [[], [], []]
        rng = random.Random(writers)
        wanted = blank(owned(tensors, 0, 1))
        rng.shuffle(wanted)
        wanted = wanted[: len(wanted) // 2]
        Loader(store, manifest).fill(wanted)
        assert [i.name for i in wanted if not torch.equal(i.data, tensors[i.name])] == []


def test_destinations_of_every_kind_may_stand_beside_each_other(store):
    tensors = {f"model/w.{i}": torch.randn(2000) for i in range(400)}
    manifest = save(store, 1, tensors)
    kinds = [
        lambda: torch.zeros(2000),
        lambda: torch.zeros(2000, dtype=torch.float64),
        lambda: torch.zeros(2000, 2)[:, 1],
        lambda: torch.zeros(2500)[100:2100],
        lambda: torch.nn.Parameter(torch.zeros(2000)),
    ]
    wanted = [
        Interval(name=name, shape=(2000,), dtype=torch.float32, start=0, data=kinds[i % len(kinds)]())
        for i, name in enumerate(tensors)
    ]
    # The same bytes twice: neither of the two may be left out.
    wanted += [
        Interval(name="model/w.7", shape=(2000,), dtype=torch.float32, start=start, data=torch.zeros(1000))
        for start in (0, 500)
    ]
    Loader(store, manifest).fill(wanted)
    for each in wanted:
        expected = tensors[each.name][each.start : each.start + each.length]
        assert torch.equal(each.data.detach().float(), expected), each.name


def test_a_bit_that_flips_anywhere_among_them_is_found(store):
    tensors = many(1500, seed=1)
    manifest = save(store, 1, tensors)
    path = store.local_path(f"{manifest.folder}/{manifest.files[0].name}")
    sound = path.read_bytes()
    rng = random.Random(2)
    edges = [0, 7, len(sound) - 1, BLOCK_BYTES - 1, BLOCK_BYTES]
    for at in [*edges, *(rng.randrange(len(sound)) for _ in range(40))]:
        spoiled = bytearray(sound)
        spoiled[at] ^= 1 << rng.randrange(8)
        path.write_bytes(spoiled)
        with pytest.raises(CheckpointDamaged, match=rf"block {at // BLOCK_BYTES} .*has hash"):
            Loader(store, manifest).fill(blank(owned(tensors, 0, 1)))
    path.write_bytes(sound)
    assert differs(store, manifest, tensors) == []


def test_a_copy_that_fails_leaves_nothing_and_the_next_save_works(store):
    tensors = {f"model/w.{i}": torch.randn(30_000) for i in range(400)}  # several files
    parts, failures = [], []
    saver = Saver(store, rank=0, world=1, attempt=1, on_part=parts.append, on_failure=lambda *a: failures.append(a))
    intervals = owned(tensors, 0, 1)
    last = intervals[-1]
    nowhere = Interval(
        name=last.name, shape=last.shape, dtype=last.dtype, start=0, data=torch.empty(30_000, device="meta")
    )
    with pytest.raises((RuntimeError, NotImplementedError)):
        saver.snapshot(1, [*intervals[:-1], nowhere])
    saver.wait()
    assert (parts, failures, store.list("checkpoints")) == ([], [], [])
    saver.snapshot(2, intervals)
    saver.wait()
    manifest = merge([parts.pop()], Meta(step=2))
    commit(store, manifest)
    assert len(manifest.files) > 2
    assert differs(store, manifest, tensors) == []
    saver.close()


def test_what_is_taken_over_from_the_save_before_is_what_would_have_been_merged(store):
    tensors = many(300)
    first = merge(parts_of(store, 1, tensors, 2), Meta(step=1))
    parts = parts_of(store, 2, {name: t + 1 for name, t in tensors.items()}, 2)
    again = merge(parts, Meta(step=2), last=first)
    assert again.tensors is first.tensors
    assert again.tensors == merge(parts, Meta(step=2)).tensors
    commit(store, again)
    assert Manifest.read(store, find(store)[0].folder) == again
    others = {f"{name}x": t for name, t in tensors.items()}
    for changed, world in ((others, 2), (tensors, 3), (dict(list(tensors.items())[:-1]), 2)):
        parts = parts_of(store, 3, changed, world)
        other = merge(parts, Meta(step=3), last=first)
        assert other.tensors is not first.tensors
        assert other.tensors == merge(parts, Meta(step=3)).tensors
