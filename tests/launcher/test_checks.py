"""A pass over the data sees what is there, whatever the chunks, processes and thinning."""

import contextlib
import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from rung.launcher.data import checks, rowhash
from rung.launcher.data.examine import Examiner
from rung.launcher.data.judge import Split, judge
from rung.launcher.data.limits import LABEL, find_limits
from rung.launcher.data.order import Order
from rung.launcher.data.scan import Deaths, scan
from rung.launcher.data.seen import Field, Hashes, Seen, Some
from rung.launcher.task import TaskAdapter
from rung.strategies.findings import Level

RNG = np.random.default_rng(0)


def seen_of(dataset, chunk=7, **options):
    """One Seen of the whole data set, examined in chunks in this process; with the chunks themselves."""
    examiner = Examiner(dataset, **options)
    whole, chunks = Seen(), []
    for start in range(0, len(dataset), chunk):
        part = examiner(0, list(range(start, min(start + chunk, len(dataset)))), preserve=False)
        whole.merge(part)
        chunks.append(part)
    return whole, chunks


# -------------------------------------------------------------------- hashes


@pytest.mark.parametrize("width", [1, 7, 8, 63, 64, 65, 600])
def test_equal_rows_and_only_they_have_equal_hashes(width):
    rows = RNG.integers(0, 256, (500, width), dtype=np.uint8)
    rows[300:] = rows[:200]
    hashes = rowhash.hash_rows(rows)
    assert (hashes[300:] == hashes[:200]).all()
    distinct = len({row.tobytes() for row in rows})
    assert len(set(hashes.tolist())) == distinct


def test_a_changed_bit_a_swap_and_a_shift_change_the_hash():
    row = RNG.integers(0, 2, (1, 64)).astype(np.float32)
    seen = {int(rowhash.hash_rows(row)[0])}
    for place in range(64):
        other = row.copy()
        other[0, place] += 1
        seen.add(int(rowhash.hash_rows(other)[0]))
        seen.add(int(rowhash.hash_rows(np.roll(row, place + 1, axis=1))[0]))
    assert len(seen) >= 65 + 55  # a few of the shifts of zeros and ones may give the row itself


def test_near_hashes_ignore_brightness_contrast_and_mostly_small_noise():
    rows = RNG.random((300, 64)).astype(np.float32)
    near = rowhash.hash_near(rows)
    assert (rowhash.hash_near(rows * 3 + 0.5) == near).mean() > 0.95
    noisy = rows + RNG.normal(size=rows.shape).astype(np.float32) * 1e-5
    assert (rowhash.hash_near(noisy) == near).mean() > 0.9
    assert len(set(near.tolist())) == 300
    assert rowhash.hash_near(rows[:, :8]) is None


def test_thinned_hashes_keep_equal_samples_together_in_every_split():
    words = rowhash.finalised(np.arange(20_000, dtype=np.uint64))
    zeros, indices = np.zeros(20_000, dtype=np.uint64), np.arange(20_000)
    large, small = Hashes(most=1000), Hashes(most=10**6)
    for start in range(0, 20_000, 500):
        part = slice(start, start + 500)
        large.add(words[part], zeros[part], indices[part], indices[part])
    small.add(words[:2000], zeros[:2000], indices[:2000], indices[:2000])
    small.thin_to(large.halvings)
    kept, of_small = set(large.arrays()[2].tolist()), set(small.arrays()[2].tolist())
    assert 400 < len(kept) <= 1000
    assert of_small == {i for i in kept if i < 2000}
    assert large.fraction == pytest.approx(len(kept) / 20_000, rel=0.3)


# -------------------------------------------------------------------- statistics


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_merged_statistics_are_those_of_the_whole(chunk):
    values = (RNG.normal(size=(200, 5)) * 3 + 1).astype(np.float32)
    whole, chunks = seen_of(TensorDataset(torch.from_numpy(values)), chunk)
    facts = whole.fields["[0]"]
    assert facts.count == 1000
    assert facts.mean == pytest.approx(values.mean(dtype=np.float64))
    assert facts.deviation == pytest.approx(values.std(dtype=np.float64))
    assert facts.low == (values.min(), int(values.min(axis=1).argmin()))
    assert facts.high == (values.max(), int(values.max(axis=1).argmax()))
    assert np.allclose(facts.columns[0], values.min(axis=0))
    assert np.allclose(facts.columns[1], values.max(axis=0))
    alone, _ = seen_of(TensorDataset(torch.from_numpy(values)), 1000)
    assert np.array_equal(
        np.concatenate([c.exact for c in chunks]),
        seen_of(TensorDataset(torch.from_numpy(values)), 1000)[1][0].exact,
    )
    assert alone.fields["[0]"].shapes["(5,)"].count == 200


def test_memory_does_not_grow_with_what_differs():
    field = Field()
    for n in range(10_000):
        other = Field()
        other.shapes[f"({n},)"] = Some(1, [n])
        other.add_lengths(np.array([n]), np.array([n]))
        field.merge(other)
    assert len(field.shapes) <= 65
    assert len(field.lengths) <= 4096
    assert field.longest == (9999, 9999)
    assert sum(some.count for some in field.shapes.values()) == 10_000


@pytest.mark.parametrize(
    "sample",
    [
        lambda i: torch.tensor(float(i)),
        lambda i: {"a": {"b": [torch.zeros(2) + i, i]}, "c": "text"},
        lambda i: (np.full((2, 2), i, dtype=np.float16), np.int32(i), True),
        lambda i: [i, i + 1, i + 2],
        lambda i: torch.full((3,), float(i), dtype=torch.bfloat16),
        lambda i: {"list": list(range(i % 5)), "bytes": bytes([i])},
        lambda i: torch.sparse_coo_tensor([[0]], [float(i)], (4,)),
        lambda i: (object(), 10**30 + i),
    ],
)
def test_any_structure_can_be_looked_at(sample):
    whole, chunks = seen_of([sample(i) for i in range(30)])
    assert whole.read == 30
    assert not whole.problems
    assert all(len(c.exact) == c.read for c in chunks)


# -------------------------------------------------------------------- what the model can take


class Classifier:
    def __init__(self, loss=None, classes=4):
        self.classes = classes
        self._loss = loss

    def model(self):
        return nn.Sequential(nn.Embedding(11, 6), nn.Flatten(), nn.Linear(18, self.classes))

    def dataset(self, split):
        raise KeyError(split)

    def loss(self, model, batch):
        return (self._loss or functional.cross_entropy)(model(batch["ids"].view(-1, 3)), batch["y"].long())


SAMPLE = {"ids": torch.tensor([1, 2, 3]), "y": 2}


@pytest.mark.slow
def test_limits_are_found_through_what_only_moves_values():
    limits = find_limits(TaskAdapter(Classifier()), [SAMPLE, SAMPLE])
    assert {name: (x.size, x.what, x.ignored) for name, x in limits.items()} == {
        "['ids']": (11, "id", None),
        "['y']": (4, "label", -100),
        LABEL: (4, "label", -100),
    }


@pytest.mark.slow
def test_a_model_that_needs_values_or_does_not_classify_has_no_known_limits():
    def needs_values(out, y):
        return out.sum() * float(y.sum())

    assert find_limits(TaskAdapter(Classifier(loss=needs_values)), [SAMPLE, SAMPLE]) == {}
    limits = find_limits(TaskAdapter(Classifier(loss=lambda out, y: out.mean())), [SAMPLE, SAMPLE])
    assert list(limits) == ["['ids']"]


@pytest.mark.slow
def test_a_label_that_the_loss_ignores_is_no_mistake():
    limits = find_limits(TaskAdapter(Classifier()), [SAMPLE, SAMPLE])
    data = [{"ids": torch.tensor([1, 2, i % 11]), "y": -100 if i % 3 else i % 4} for i in range(30)]
    assert not seen_of(data, limits=limits)[0].problems
    assert not seen_of(data, limits=limits, label=lambda s: s["y"])[0].problems
    assert list(seen_of(data, limits={}, label=lambda s: s["y"])[0].problems) == ["label.range"]


# -------------------------------------------------------------------- the pass


class Numbers:
    """Sample i is [i]; `act` may do something first."""

    def __init__(self, size, act=lambda i: None):
        self.size, self.act = size, act

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        self.act(i)
        return torch.tensor([float(i)])


def scanned(dataset, indices, **options):
    deaths = Deaths()
    parts = list(scan(Examiner(dataset), indices, workers=2, deaths=deaths, **options))
    return np.concatenate([np.empty(0, np.int64), *(p.indices for p in parts)]), deaths


@pytest.mark.slow
def test_a_scan_gives_every_sample_once_and_tells_its_progress():
    told = []
    indices = Order(size=5000, seed=1).indices(0, 0, 5000)
    found, deaths = scanned(Numbers(5000), indices, progress=told.append)
    assert sorted(found.tolist()) == list(range(5000))
    assert told[-1] == 5000
    assert told == sorted(told)
    assert not deaths.samples


@pytest.mark.slow
def test_a_sample_that_ends_its_process_is_named_and_the_others_are_read():
    def act(i):
        if i in (40, 777):
            os._exit(3)

    found, deaths = scanned(Numbers(1000, act), np.arange(1000))
    assert sorted(index for index, _ in deaths.samples) == [40, 777]
    assert sorted(found.tolist()) == [i for i in range(1000) if i not in (40, 777)]
    assert not deaths.gave_up
    assert "exit code 3" in deaths.samples[0][1]


@pytest.mark.slow
def test_a_scan_ends_at_its_limit_in_time_and_leaves_no_process():
    before = set(children())
    began = time.monotonic()
    found, _ = scanned(Numbers(100_000, lambda i: time.sleep(0.01)), np.arange(100_000), until=began + 1.0)
    assert time.monotonic() - began < 30
    assert 0 < len(found) < 20_000
    assert set(children()) <= before


def children():
    with contextlib.suppress(FileNotFoundError):
        for thread in Path("/proc/self/task").iterdir():
            yield from map(int, (thread / "children").read_text().split())


@pytest.mark.slow
def test_of_a_large_set_a_sample_is_looked_at_and_the_confidence_is_said(monkeypatch):
    monkeypatch.setattr(checks, "SAMPLE", 2000)

    class Task(Classifier):
        def dataset(self, split):
            return Numbers(50_000) if split == "train" else None

    [split] = checks.check_task(TaskAdapter(Task()), seed=0, full=False)
    assert split.looked_at == 2000
    [extent] = [f for f in judge([split]) if f.subject == "extent"]
    assert "2,000 of 50,000" in extent.fact
    assert "95% confidence, wrong in fewer than 0.0015 of all" in extent.fact
    [whole] = checks.check_task(TaskAdapter(Task()), seed=0, full=True)
    assert whole.looked_at == 50_000


def test_facts_of_a_split_are_plain_values():
    import json

    seen, _ = seen_of([{"x": torch.ones(2) * i, "t": "a"} for i in range(5)])
    split = Split(name="train", size=5, seen=seen, looked_at=5)
    facts = json.loads(json.dumps(checks.facts(split)))
    assert facts["fields"]["['x']"]["high"] == 4
    assert facts["readable"] == 5


def test_few_copies_among_many_are_no_warning():
    for copies, level in ((1, Level.OK), (10, Level.WARNING)):
        data = torch.randn(500, 3, generator=torch.Generator().manual_seed(0))
        data[:copies] = data[400 : 400 + copies]
        seen, chunks = seen_of(TensorDataset(data), 100)
        split = Split(name="train", size=500, seen=seen, looked_at=500)
        for c in chunks:
            split.hashes.add(c.exact, c.near, c.indices, c.labels)
        [finding] = [f for f in judge([split]) if f.subject == "duplicates.exact"]
        assert finding.level is level
