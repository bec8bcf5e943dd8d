"""`data.clean` and `data.imbalance` in a run: the same filter on every rank and in every attempt, and no other."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from itertools import chain

import numpy as np
import pytest
import torch

from rung.launcher.data import once as once_module
from rung.launcher.data.clean import kept_after, to_drop, words
from rung.launcher.data.once import once
from rung.launcher.data.prepare import prepare
from rung.launcher.job import Job
from rung.launcher.storage import Store
from rung.launcher.task import TaskAdapter
from rung.strategies.errors import DataError, JobError, StorageError

RUNG = [sys.executable, "-c", "from rung.launcher.cli import main; main()"]
ALL = ["drop_duplicates", "drop_missing", "drop_unreadable"]


class Listed:
    """A data set of whatever is given; an exception raises, None of the process lives on after `kill`."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        sample = self.samples[index]
        if isinstance(sample, Exception):
            raise sample
        if sample == "kill":
            os._exit(5)
        return sample


def messy(size=400, seed=0):
    """Samples with every kind of trouble, and what each rule has to drop of them, by brute force."""
    rng = np.random.default_rng(seed)
    samples, seen = [], {}
    expected = {rule: [] for rule in ALL}
    for index in range(size):
        kind = rng.integers(0, 10)
        value = int(rng.integers(0, 150))
        x = torch.tensor([float(value), 1.0])
        if kind == 0:
            samples.append(KeyError("gone"))
            expected["drop_unreadable"].append(index)
        elif kind == 1:
            bad = [None, (torch.tensor([float("nan"), 1.0]), value), (x, None), (x, float("inf"))][value % 4]
            samples.append(bad)
            expected["drop_missing"].append(index)
        else:
            samples.append((x, value))
            if value in seen:
                expected["drop_duplicates"].append(index)
            seen.setdefault(value, index)
    return samples, expected


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3])
def test_each_rule_drops_what_it_says_whatever_the_processes(workers):
    samples, expected = messy()
    dropped, facts = to_drop(Listed(samples), ALL, workers=workers)
    assert dropped.tolist() == sorted(chain(*expected.values()))
    assert facts["rules"] == {rule: len(gone) for rule, gone in expected.items()}
    assert "leaves out" in words(facts, len(samples))
    dropped, _ = to_drop(Listed(samples), ["drop_unreadable"], workers=workers)
    assert dropped.tolist() == expected["drop_unreadable"]


@pytest.mark.slow
def test_what_cannot_be_read_is_an_error_unless_it_is_to_be_dropped():
    samples = [torch.tensor([float(i)]) for i in range(20)]
    samples[7] = ValueError("bad row")
    with pytest.raises(DataError, match="sample 7 cannot be read: ValueError: bad row") as caught:
        to_drop(Listed(samples), ["drop_missing"])
    assert caught.value.samples == (7,)
    with pytest.raises(DataError, match="leaves none of 3 samples"):
        to_drop(Listed([ValueError()] * 3), ALL)


@pytest.mark.slow
def test_a_sample_that_ends_its_process_counts_as_unreadable():
    samples = [(i, float(i)) for i in range(50)]
    samples[33] = "kill"
    dropped, _ = to_drop(Listed(samples), ["drop_unreadable"], workers=2)
    assert dropped.tolist() == [33]


def test_what_is_left_after_dropping():
    assert kept_after(6, np.array([0, 4])).tolist() == [1, 2, 3, 5]


# -------------------------------------------------------------------- made once


def made(values=(1, 2, 3), **facts):
    return lambda: (np.array(values, dtype=np.int64), facts)


def never():
    raise AssertionError("made again")


def test_it_is_made_once_and_read_from_then_on(tmp_path):
    store = Store.open(str(tmp_path))
    first = once(store, "x", made(note="n"), size=9, rank=0, resumes=False)
    for rank in (0, 1):
        again = once(store, "x", never, size=9, rank=rank, resumes=True)
        assert again.values.tolist() == [1, 2, 3]
        assert again.digest == first.digest
        assert again.facts == {"note": "n", "size": 9}


def test_other_ranks_wait_for_rank_0_and_show_signs_of_life(tmp_path, monkeypatch):
    beats = []

    def slow():
        time.sleep(0.5)
        return made()()

    store = Store.open(str(tmp_path))
    thread = threading.Thread(target=lambda: once(store, "x", slow, size=3, rank=0, resumes=False))
    thread.start()
    got = once(store, "x", never, size=3, rank=1, resumes=False, beat=lambda: beats.append(1))
    thread.join()
    assert got.values.tolist() == [1, 2, 3]
    assert beats
    monkeypatch.setattr(once_module, "PATIENCE_S", 0.2)
    with pytest.raises(DataError, match="rank 0 did not finish"):
        once(store, "y", never, size=3, rank=1, resumes=False)


def test_another_data_set_makes_it_anew_but_not_for_a_run_that_resumes(tmp_path):
    store = Store.open(str(tmp_path))
    once(store, "x", made(), size=9, rank=0, resumes=False)
    with pytest.raises(DataError, match="made for 9 samples, the data set has 10 now"):
        once(store, "x", never, size=10, rank=0, resumes=True)
    assert once(store, "x", made([5]), size=10, rank=0, resumes=False).values.tolist() == [5]


@pytest.mark.parametrize("name", ["x.npy", "x.json"])
def test_a_damaged_file_is_named(tmp_path, name):
    store = Store.open(str(tmp_path))
    once(store, "x", made(note="old"), size=9, rank=0, resumes=False)
    path = tmp_path / "data" / name
    data = path.read_bytes()
    path.write_bytes(data.replace(b"old", b"new") if name.endswith("json") else data[:-1] + b"\x01")
    with pytest.raises(StorageError, match=r"data/x\..* is damaged"):
        once(store, "x", never, size=9, rank=0, resumes=False)


# -------------------------------------------------------------------- prepared


class Task:
    """Few samples of class 1, many of class 0, one broken."""

    def __init__(self, takes=True):
        if not takes:
            self.loss = lambda model, batch: model(batch[0]).mean()

    def model(self):
        return torch.nn.Linear(2, 4)

    def dataset(self, split):
        rng = np.random.default_rng(0)
        samples = [(torch.from_numpy(rng.normal(size=2).astype(np.float32)), int(i % 10 == 0)) for i in range(60)]
        samples[5] = (samples[5][0] * float("nan"), 0)
        return Listed(samples)

    def label(self, sample):
        return sample[1]

    def loss(self, model, batch, class_weights=None):
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1], weight=class_weights)


def prepared(tmp_path, task, **data):
    job = Job.from_dict({"task": "t:T", "run": str(tmp_path / "run"), "batch": 4, "data": data})
    adapter = TaskAdapter(task)
    return prepare(job, adapter, adapter.dataset("train"), rank=0, resumes=False)


@pytest.mark.slow
def test_filter_and_resampling_work_together(tmp_path):
    plan = prepared(tmp_path, Task(), clean=["drop_missing"], imbalance="resample")
    drawn = plan.order.indices(0, 0, plan.order.length)
    assert 5 not in drawn
    assert plan.order.length == 59
    assert np.isin(drawn, np.arange(0, 60, 10)).sum() in (29, 30)
    assert re.fullmatch(r"clean [0-9a-f]{32}, resample [0-9a-f]{32}", plan.filter)
    assert any("leaves out 1 of 60" in note for note in plan.notes)
    again = prepared(tmp_path, Task(), clean=["drop_missing"], imbalance="resample")
    assert again.filter == plan.filter
    assert again.order.fingerprint == plan.order.fingerprint


@pytest.mark.slow
def test_weights_have_one_entry_for_each_output_of_the_model(tmp_path):
    plan = prepared(tmp_path, Task(), imbalance="weights")
    assert plan.class_weights.shape == (4,)
    assert plan.class_weights[1] == pytest.approx(5)
    assert plan.class_weights[2] == 1
    assert any(note.startswith("class weights 0: 0.556, 1: 5") for note in plan.notes)
    assert prepared(tmp_path, Task(), imbalance="auto").class_weights is not None


def test_nothing_asked_for_reads_nothing(tmp_path):
    plan = prepared(tmp_path, Task())
    assert plan.filter == ""
    assert plan.order.subset is None
    assert not (tmp_path / "run").exists()


def test_what_the_task_lacks_is_said_before_the_data_is_read(tmp_path):
    with pytest.raises(JobError, match="needs a loss that takes them"):
        prepared(tmp_path, Task(takes=False), imbalance="weights")
    task = Task()
    task.__class__ = type("Unlabelled", (), {k: v for k, v in vars(Task).items() if k != "label"})
    with pytest.raises(JobError, match="no label"):
        prepared(tmp_path, task, imbalance="auto")
    assert not (tmp_path / "run").exists()


# -------------------------------------------------------------------- in a run

TASK = """
import os, torch
from torch.nn import functional
class Data(torch.utils.data.Dataset):
    def __init__(self):
        self.x = torch.randn(48, 3, generator=torch.Generator().manual_seed(0))
        self.x[7] = self.x[3]
        self.x[9, 1] = float("nan")
    def __len__(self): return 48
    def __getitem__(self, i): return self.x[i], int(i % 8 == 1)
class Task:
    def model(self): return torch.nn.Linear(3, 2)
    def dataset(self, split): return Data() if split == "train" else None
    def label(self, sample): return sample[1]
    def loss(self, model, batch):
        if model.training and type(batch[0]) is torch.Tensor and not batch[0].is_meta:
            same = (batch[0][:, None] == Data().x[None]).all(-1)
            drawn = [row.int().argmax().item() if row.any() else -1 for row in same]
            print("DREW", *drawn, flush=True)
        return functional.cross_entropy(model(batch[0]), batch[1])
"""


def launch(folder, *sets):
    done = subprocess.run(
        [*RUNG, "launch", "job.yaml", *sets], cwd=folder, capture_output=True, text=True, timeout=110,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def run(tmp_path):
    (tmp_path / "task.py").write_text(TASK)
    job = {
        "task": "task:Task",
        "run": "run",
        "batch": 4,
        "steps": 6,
        "devices": {"count": 1, "type": "cpu"},
        "log_every_s": 0.1,
    }
    job["data"] = {"clean": ["drop_duplicates", "drop_missing"], "imbalance": "resample", "workers": 0}
    (tmp_path / "job.yaml").write_text("".join(f"{k}: {json.dumps(v)}\n" for k, v in job.items()))
    return tmp_path


def drawn(folder, run="run"):
    """The samples of each step, in order, over all attempts; ranks' shares put together. Ten samples tried first by
    each attempt are left out."""
    batches = []
    for attempt in sorted((folder / run / "logs").iterdir()):
        shares = []
        for log in sorted(attempt.glob("rank-*.log")):
            lines = [line.split()[1:] for line in log.read_text().splitlines() if line.startswith("DREW")]
            tried = -(-10 // len(lines[0]))
            shares.append(lines[tried:])
        batches += [list(chain(*parts)) for parts in zip(*shares, strict=True)]
    return [[int(i) for i in batch] for batch in batches]


@pytest.mark.slow
@pytest.mark.timeout(300)  # five launches
def test_a_run_draws_what_is_left_evenly_and_goes_on_exactly_and_under_no_other_filter(run):
    code, said = launch(run)
    assert code == 0, said
    assert "data.clean leaves out 2 of 48 samples (1 by drop_duplicates, 1 by drop_missing)" in said
    code, said = launch(run, "--set", "steps=12")
    assert code == 0, said
    code, said = launch(run, "--set", "steps=12", "--set", "run=whole", "--set", "devices.count=2")
    assert code == 0, said
    batches = drawn(run)
    assert len(batches) == 12
    assert batches == drawn(run, "whole")
    epoch = list(chain(*batches))[:46]
    assert not {7, 9, -1} & set(epoch)
    assert sum(i % 8 == 1 for i in epoch) == 23

    code, said = launch(run, "--set", "steps=16", "--set", "data.clean=[drop_missing]")
    assert code == 2
    assert "data.clean" in said
    code, said = launch(run, "--set", "steps=16", "--set", "data.clean=[drop_missing]", "--force")
    assert code == 2
    assert "the checkpoint was written while training on clean" in said
    assert "init_from" in said
