"""What is deleted: never the newest healthy checkpoint, whatever else happens."""

import random

import pytest

from rung.launcher.checkpoint.find import find, find_all
from rung.launcher.checkpoint.manifest import folder_of
from rung.launcher.checkpoint.retention import Kept, best_of, plan_retention, prune, sweep
from rung.launcher.storage import Store
from tests.launcher.checkpoints import differs, parts_of, save, state


def kept(step: int, healthy: bool = True, metric: float | None = None) -> Kept:
    return Kept(step=step, folder=folder_of(step), healthy=healthy, metric=metric)


def steps(doomed: list[Kept]) -> list[int]:
    return [c.step for c in doomed]


def test_the_newest_stay():
    assert steps(plan_retention([kept(s) for s in (5, 1, 4, 2, 3)], keep=3)) == [1, 2]
    assert steps(plan_retention([kept(1)], keep=1)) == []
    assert steps(plan_retention([], keep=1)) == []
    with pytest.raises(ValueError, match="keep=0"):
        plan_retention([kept(1)], keep=0)


def test_doubtful_states_do_not_push_out_good_ones():
    run = [kept(1), kept(2), kept(3, healthy=False), kept(4, healthy=False), kept(5, healthy=False)]
    assert steps(plan_retention(run, keep=2)) == [3, 4]
    assert steps(plan_retention(run, keep=1)) == [1, 3, 4]


def test_the_best_stays_and_nan_is_never_best():
    run = [kept(1, metric=0.5), kept(2, metric=0.1), kept(3, metric=float("nan")), kept(4, metric=0.3), kept(5)]
    assert steps(plan_retention(run, keep=1)) == [1, 3, 4]
    assert steps(plan_retention(run, keep=1, higher_is_better=True)) == [2, 3, 4]
    assert steps(plan_retention([kept(1, metric=float("nan")), kept(2, metric=float("inf"))], keep=1)) == [1]
    assert steps(plan_retention([kept(1, metric=-9.0, healthy=False), kept(2, metric=0.0), kept(3)], keep=1)) == [1]
    assert best_of("loss") == ("loss", False)
    assert best_of("max accuracy") == ("accuracy", True)
    assert best_of("min wer") == ("wer", False)
    assert best_of(None) == (None, False)


def test_whatever_is_there_the_newest_healthy_one_stays():
    rng = random.Random(0)
    for _ in range(500):
        run = [
            kept(s, healthy=rng.random() < 0.5, metric=rng.choice([None, float("nan"), rng.random()]))
            for s in rng.sample(range(50), rng.randrange(1, 12))
        ]
        keep = rng.randrange(1, 5)
        doomed = plan_retention(run, keep=keep, higher_is_better=rng.random() < 0.5)
        left = [c for c in run if c not in doomed]
        healthy = sorted((c.step for c in run if c.healthy), reverse=True)
        assert set(healthy[:keep]) <= {c.step for c in left}
        assert max(c.step for c in run) in {c.step for c in left}
        assert len(left) <= keep + 2
        assert plan_retention(left, keep=keep) == [] or any(c.metric is not None for c in left)


@pytest.mark.parametrize("kind", ["disk", "memory"])
def test_pruning_deletes_whole_folders_and_leaves_what_it_cannot_read(kind, tmp_path):
    store = Store.open(str(tmp_path) if kind == "disk" else f"memory://retention/{tmp_path.name}")
    for step in range(1, 6):
        save(store, step, state(step), metrics={"loss": abs(step - 2.0)})
    newer = store.read(f"{folder_of(1)}/manifest.json").replace(b'"version":1', b'"version":9')
    store.write_atomic(f"{folder_of(1)}/manifest.json", newer)
    known: dict[str, Kept] = {}
    assert prune(store, keep=2, keep_best="loss", known=known) == [folder_of(3)]
    assert [info.step for info in find(store)] == [5, 4, 2, 1]
    assert not [p for p in store.sizes("checkpoints") if p.startswith("step-000000003")]
    assert prune(store, keep=2, keep_best="loss", known=known) == []
    assert set(known) == {folder_of(2), folder_of(4), folder_of(5)}


def test_leftovers_of_dead_runs_are_swept(tmp_path):
    store = Store.open(str(tmp_path))
    tensors = state(1)
    manifest = save(store, 1, tensors)
    parts_of(store, 1, state(9))  # a second save of the same step that was never committed
    parts_of(store, 2, state(2))
    parts_of(store, 3, state(3))
    store.write("checkpoints/notes.txt", b"not ours")
    swept = sweep(store, live=[folder_of(3)])
    assert folder_of(2) in swept
    assert [(i.step, i.committed) for i in find_all(store)] == [(3, False), (1, True)]
    assert set(store.list(manifest.folder)) == {"manifest.json", *(f.name for f in manifest.files)}
    assert store.exists("checkpoints/notes.txt")
    assert differs(store, manifest, tensors) == []
    assert sweep(store, live=[folder_of(3)]) == []
    assert sweep(store) == [folder_of(3)]
