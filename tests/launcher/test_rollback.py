"""A loss that jumps: told, stopping, or going back past the batch; the last is exact, also when interrupted."""

import json

import pytest
from support import Project, same_bits

from rung.launcher.checkpoint.manifest import Manifest, folder_of
from rung.launcher.data.order import Order
from rung.launcher.rollback import MOST_ROLLBACKS, batch_before
from rung.launcher.storage import Store

SPIKY = '''

class Spoilt(Points):
    """Some samples have targets that are far off."""

    def __init__(self, count, spoilt):
        super().__init__(count)
        for i in spoilt:
            self.y[i] = 3000.0


class Spiky(Small):
    def __init__(self, spoilt=(), **more):
        super().__init__(**more)
        self.spoilt = spoilt

    def dataset(self, split):
        return Spoilt(self.samples, self.spoilt) if split == "train" else None
'''

SAMPLES, STEPS = 480, 60


def at_step(step):
    """The dataset index of the first sample that step `step` takes."""
    epoch, position = divmod((step - 1) * 8, SAMPLES)
    return int(Order(SAMPLES).indices(epoch, position, 1)[0])


@pytest.fixture
def spiky(tmp_path):
    project = Project(tmp_path / "project")
    with (project.folder / "task.py").open("a") as f:
        f.write(SPIKY)
    return project


def sets(*spoilt, on_spike="rollback", run="run", steps=STEPS):
    return [
        "task=task:Spiky", f"task_args={{samples: {SAMPLES}, spoilt: {list(spoilt)}}}", f"guard.on_spike={on_spike}",
        f"run={run}", f"steps={steps}", "checkpoint={every: 10 steps, keep: 9}", "schedule={name: constant, warmup: 0}",
    ]  # fmt: skip


def test_the_batch_before_is_found_across_the_end_of_an_epoch():
    assert batch_before(0, 0, length=20, batch=8) is None
    assert batch_before(0, 16, length=20, batch=8) == (0, 8)
    assert batch_before(3, 0, length=20, batch=8) == (2, 16)
    assert batch_before(1, 0, length=16, batch=8) == (0, 8)


@pytest.mark.slow
def test_going_back_ends_with_the_weights_of_a_run_that_never_took_the_batch(spiky):
    spoilt = at_step(45)
    done = spiky.launch(*sets(spoilt))
    assert done.code == 0, done.all
    assert "the loss jumped to" in done.out
    assert "at step 45" in done.out
    assert f"samples {spoilt}" in done.out
    assert "back to step 40; 2 batches are passed over" in done.out
    assert "done       step 60" in done.out
    [event] = [e for e in spiky.events() if e["event"] == "rollback"]
    assert (event["step"], event["to"], event["batches"]) == (45, 40, [[0, 43 * 8], [0, 44 * 8]])
    manifest = Manifest.read(Store.open(str(spiky.folder / "run")), folder_of(60))
    assert manifest.trainer["passed_over"] == [[0, 43 * 8], [0, 44 * 8]]
    # The same from the start, with nothing to go back from.
    (spiky.folder / "clean").mkdir()
    (spiky.folder / "clean/rollbacks.json").write_text((spiky.folder / "run/rollbacks.json").read_text())
    clean = spiky.launch(*sets(spoilt, run="clean"))
    assert clean.code == 0, clean.all
    assert "rollback" not in clean.out
    assert same_bits(spiky.weights("run"), spiky.weights("clean")) == []
    # And the same in two launches, the first of which ends right before the spike.
    assert spiky.launch(*sets(spoilt, run="parts", steps=44)).code == 0
    again = spiky.launch(*sets(spoilt, run="parts"))
    assert again.code == 0, again.all
    assert "back to step 40" in again.out  # step 44 has learnt from a batch under suspicion
    assert same_bits(spiky.weights("run"), spiky.weights("parts")) == []


@pytest.mark.slow
def test_two_processes_go_back_together(spiky):
    spoilt = at_step(45)
    assert spiky.launch(*sets(spoilt, run="one")).code == 0
    done = spiky.launch(*sets(spoilt, run="two"), "devices.count=2")
    assert done.code == 0, done.all
    assert "back to step 40" in done.out
    one, two = spiky.weights("one"), spiky.weights("two")
    for name in one:
        assert one[name].allclose(two[name], rtol=1e-4, atol=1e-6), name


@pytest.mark.slow
def test_a_run_that_keeps_jumping_stops_naming_how_often_it_went_back(spiky):
    spoilt = [at_step(step) for step in range(40, 60, 3)]
    done = spiky.launch(*sets(*spoilt))
    assert done.code == 4, done.all
    assert f"gone back {MOST_ROLLBACKS} times already" in done.err
    assert len(json.loads((spiky.folder / "run/rollbacks.json").read_text())) == MOST_ROLLBACKS


@pytest.mark.slow
def test_a_spike_is_told_and_can_stop_the_run(spiky):
    spoilt = at_step(45)
    told = spiky.launch(*sets(spoilt, on_spike="none", run="none"))
    assert told.code == 0
    assert "warning    loss.spike: the loss jumped to" in told.out
    assert f"samples of that step: {spoilt}" in told.out
    done = spiky.launch(*sets(spoilt, on_spike="stop"))
    assert done.code == 4, done.all
    assert "at step 45" in done.err
    assert f"samples {spoilt}" in done.err
    assert spiky.checkpoints()[-1] == "step-000000044"  # the weights from before it
