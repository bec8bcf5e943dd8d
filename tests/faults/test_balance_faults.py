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


@pytest.mark.skipif(len(CORES) < 2, reason="two cores are needed, one for each rank")
@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_a_rank_that_shares_its_core_with_a_burner_loses_share_and_steps_get_shorter(project, strategy):
    if strategy != "ddp":
        pytest.importorskip("deepspeed")
    (project.folder / "task.py").write_text(TASK)
    sets = [
        "task=task:Heavy", "batch=256", "steps=150", "devices.count=2", f"strategy.name={strategy}", "data.workers=0",
        "schedule=constant", "optimizer.lr=1e-4", "checkpoint.every=none",
    ]  # fmt: skip
    env = {"OMP_NUM_THREADS": "1"}
    pin = f"import os; os.sched_setaffinity(0, {{{CORES[0]}}})\nwhile True: pass"
    idle = os.getloadavg()[0] < 1.5  # else whoever else is here slows down the other core as much
    burners = [subprocess.Popen([sys.executable, "-c", pin]) for _ in range(2)]
    try:
        done = project.launch(*sets, env=env)
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
    assert done.code == 0, done.all
    notes = [e for e in project.events() if e["event"] == "note" and e["text"].startswith("balance:")]
    if idle:
        assert notes, done.all
        first = [int(n) for n in re.findall(r"rank \d (\d+) \(", notes[0]["text"])]
        assert sum(first) == 256
        assert first[0] < 0.8 * first[1], notes
        seconds = [row["seconds"] for _, row in sorted(project.metrics().items())]
        assert statistics.median(seconds[-25:]) < 0.9 * statistics.median(seconds[3:10]), seconds
    assert project.launch(*sets, "devices.balance=off", "run=even", env=env).code == 0
    even, shared = project.weights("even"), project.weights()
    assert all(even[n].allclose(shared[n], rtol=1e-4, atol=1e-5) for n in even if n.startswith("model/"))
