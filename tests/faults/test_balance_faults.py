"""A device that others slow down loses share while it trains, and the result stays the same."""

import os
import re
import statistics
import subprocess
import sys

import pytest

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


@TWO_CORES
@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_unequal_shares_give_the_same_result_as_equal_ones(project, strategy):
    if strategy != "ddp":
        pytest.importorskip("deepspeed")
    slowed(project, f"strategy.name={strategy}", "steps=60")
    assert project.launch(*SETS, f"strategy.name={strategy}", "steps=60", "run=even", env=ENV).code == 0
    even, shared = project.weights("even"), project.weights()
    assert all(even[n].allclose(shared[n], rtol=1e-4, atol=1e-5) for n in even if n.startswith("model/"))


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
