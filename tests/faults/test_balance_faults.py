"""A device that others slow down loses share while it trains, and the result stays the same."""

import os
import re
import statistics
import subprocess
import sys

import pytest
from support import same_bits

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]

TASK = '''
import os

import torch
from torch import nn
from torch.utils.data import Dataset


class Points(Dataset):
    def __init__(self):
        self.x = torch.randn(256, 1024, generator=torch.Generator().manual_seed(7))

    def __len__(self):
        return 256

    def __getitem__(self, i):
        return self.x[i]


class Heavy:
    """Each rank stays on a core of its own, as each would on a device of its own."""

    def model(self):
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[int(os.environ.get("RANK", "0"))]})
        layers = [m for _ in range(6) for m in (nn.Linear(1024, 1024), nn.Tanh())]
        return nn.Sequential(*layers)

    def dataset(self, split):
        return Points() if split == "train" else None

    def loss(self, model, batch):
        return (model(batch) - batch).square().mean()
'''
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


SETS = [
    "task=task:Heavy", "batch=256", "devices.count=2", "data.workers=0", "schedule=constant", "optimizer.lr=1e-4",
    "checkpoint.every=none",
]  # fmt: skip
ENV = {"OMP_NUM_THREADS": "1"}
TWO_CORES = pytest.mark.skipif(len(CORES) < 2, reason="two cores are needed, one for each rank")


def slowed(project, *sets):
    """A balanced run beside two processes that burn the core of rank 0."""
    (project.folder / "task.py").write_text(TASK)
    pin = f"import os; os.sched_setaffinity(0, {{{CORES[0]}}})\nwhile True: pass"
    burners = [subprocess.Popen([sys.executable, "-c", pin]) for _ in range(2)]
    try:
        done = project.launch(*SETS, *sets, "devices.balance=on", env=ENV)
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
    assert done.code == 0, done.all
    return [e["text"] for e in project.events() if e["event"] == "note" and e["text"].startswith("balance:")]


SLOWER = '''
import os
import time

from task import Points, nn


class Slower:
    """Each sample takes 7 ms, on rank 1 twice that once the loss was called so often."""

    def __init__(self, after=None):
        self.after, self.calls = after, 0

    def model(self):
        return nn.Linear(1024, 64)

    def dataset(self, split):
        return Points() if split == "train" else None

    def loss(self, model, batch):
        self.calls += 1
        if self.after is not None:
            late = os.environ.get("RANK") == "1" and self.calls > self.after
            time.sleep(0.007 * len(batch) * (2 if late else 1))
        return model(batch).square().mean()
'''


def straggling(project, *sets):
    """A run of which rank 1 becomes slow at step 15. Returns the notes on balance and the findings on rank 1."""
    (project.folder / "task.py").write_text(TASK)
    (project.folder / "slower.py").write_text(SLOWER)
    ours = [*SETS, "task=slower:Slower", "batch=32", "steps=40", *sets]
    done = project.launch(*ours, "task_args={after: 16}", env=ENV)
    assert done.code == 0, done.all
    assert project.launch(*ours, "run=even", "devices.balance=off", env=ENV).code == 0
    notes = [e["text"] for e in project.events() if e["event"] == "note" and e["text"].startswith("balance:")]
    named = [e for e in project.events() if e["event"] == "finding" and e["subject"].startswith("rank 1 on ")]
    return notes, named


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_a_straggler_that_appears_later_loses_share_within_20_steps_and_the_result_stays(project, strategy):
    if strategy != "ddp":
        pytest.importorskip("deepspeed")
    notes, named = straggling(project, f"strategy.name={strategy}", "devices.balance=on")
    assert len(notes) in (1, 2), notes
    first = [int(n) for n in re.findall(r"rank \d (\d+) \(", notes[-1])]
    assert sum(first) == 32
    assert first[1] <= 13, notes
    assert 15 <= named[0]["step"] <= 35, named
    assert "less than the median" in named[0]["fact"]
    even, shared = project.weights("even"), project.weights()
    assert all(even[n].allclose(shared[n], rtol=1e-4, atol=1e-5) for n in even if n.startswith("model/"))


def test_by_default_a_straggler_among_equal_devices_is_named_and_runs_stay_the_same_bit_for_bit(project):
    notes, named = straggling(project, "strategy.name=ddp")
    assert notes == []
    assert [15 <= e["step"] <= 35 for e in named] == [True], named
    assert "devices.balance: on" in named[0]["fix"]
    assert same_bits(project.weights("even"), project.weights()) == []


@TWO_CORES
@pytest.mark.soak
def test_on_an_idle_machine_a_rank_that_shares_its_core_loses_share_and_steps_get_shorter(project):
    notes = slowed(project, "strategy.name=ddp", "steps=150")
    assert notes
    first = [int(n) for n in re.findall(r"rank \d (\d+) \(", notes[0])]
    assert sum(first) == 256
    assert first[0] < 0.8 * first[1], notes
    seconds = [row["seconds"] for _, row in sorted(project.metrics().items())]
    assert statistics.median(seconds[-25:]) < 0.9 * statistics.median(seconds[3:10]), seconds
