"""Broken inputs, each made here, and the one thing that rung has to say about each; and what must give no finding."""

import json
import os
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn
from torch.nn import functional

from rung.launcher.data import Csv, ImageFolder, Jsonl, Parquet, Text
from rung.launcher.data.checks import check_task
from rung.launcher.data.judge import judge
from rung.launcher.job import load
from rung.launcher.storage import Store
from rung.launcher.task import TaskAdapter, load_task
from rung.strategies.errors import RungError
from rung.strategies.findings import Level

ROOT = Path(__file__).parents[2]
RUNG = [sys.executable, "-c", "from rung.launcher.cli import main; main()"]
SAMPLES, WIDTH, CLASSES = 60, 8, 3


class Listed:
    """A data set of whatever is given; a sample that is an exception raises."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        sample = self.samples[index]
        if isinstance(sample, Exception):
            raise sample
        return sample() if callable(sample) else sample


class Task:
    """Classifies rows; `labelled` adds label()."""

    def __init__(self, train, valid=None, labelled=True, model=None, loss=None):
        self.sets = {"train": train, "valid": valid}
        self._model, self._loss = model, loss
        if labelled:
            self.label = lambda sample: sample[1]

    def model(self):
        return self._model() if self._model else nn.Linear(WIDTH, CLASSES)

    def dataset(self, split):
        given = self.sets[split]
        return Listed(given) if isinstance(given, list) else given

    def loss(self, model, batch):
        return self._loss(model, batch) if self._loss else functional.cross_entropy(model(batch[0]), batch[1])


def good(count=SAMPLES, seed=0):
    """Healthy samples: (row, label)."""
    rng = np.random.default_rng(seed)
    return [(torch.from_numpy(rng.normal(size=WIDTH).astype(np.float32)), i % CLASSES) for i in range(count)]


def with_sample(index, change):
    samples = good()
    samples[index] = change(*samples[index])
    return samples


def with_value(index, column, value):
    samples = good()
    samples[index][0][column] = value
    return samples


def kill():
    os._exit(7)


def wide(count=SAMPLES):
    rng = np.random.default_rng(1)
    return [(torch.from_numpy(rng.normal(size=64).astype(np.float32)), i % CLASSES) for i in range(count)]


def near_copy():
    samples = wide()
    samples[31] = (samples[7][0] * 1.5 + 0.25, samples[7][1])  # brighter, with more contrast
    return Task(samples, model=lambda: nn.Linear(64, CLASSES))


def conflict():
    samples = good()
    samples[31] = (samples[7][0].clone(), (samples[7][1] + 1) % CLASSES)
    wide_samples = wide()
    wide_samples[31] = (wide_samples[7][0].clone(), (wide_samples[7][1] + 1) % CLASSES)
    return Task(wide_samples, model=lambda: nn.Linear(64, CLASSES))


def dicts(change):
    samples = [{"x": x, "y": y} for x, y in good()]
    change(samples)
    return Task(samples, labelled=False, loss=lambda m, b: functional.cross_entropy(m(b["x"]), b["y"]))


def drop_key(samples):
    del samples[5]["y"]


def texts(change):
    samples = [{"text": f"sentence number {i}", "y": i % CLASSES} for i in range(SAMPLES)]
    change(samples)
    return Task(samples, labelled=False)


def set_text(index, value):
    return lambda samples: samples[index].__setitem__("text", value)


def raw_bytes():
    samples = [f"sentence number {i}".encode() for i in range(SAMPLES)]
    samples[9] = b"caf\xe9"
    return Task(samples, labelled=False)


def tokens(bad=None):
    rng = np.random.default_rng(2)
    samples = [torch.from_numpy(rng.integers(0, 50, 12)) for _ in range(SAMPLES)]
    if bad is not None:
        samples[13][4] = bad

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.out = nn.Embedding(50, 4), nn.Linear(4, 50)

        def forward(self, ids):
            return self.out(self.embed(ids))

    def loss(model, batch):
        return functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    return Task(samples, labelled=False, model=Model, loss=loss)


def ragged():
    rng = np.random.default_rng(3)
    samples = [torch.from_numpy(rng.integers(0, 50, int(n))) for n in rng.integers(5, 20, 300)]
    samples[17] = torch.from_numpy(rng.integers(0, 50, 5000))
    task = Task(samples, labelled=False)
    task.collate = lambda given: nn.utils.rnn.pad_sequence(given)
    return task


def scaled(index, column, factor):
    samples = good()
    samples[index][0][column] *= factor
    return samples


def columns_apart():
    samples = good()
    for x, _ in samples:
        x[3] *= 1e-6
    return samples


def constant_column():
    samples = good()
    for x, _ in samples:
        x[2] = 4.0
    return samples


def skewed():
    return [(x, 0 if i >= 4 else i % CLASSES) for i, (x, _) in enumerate(good())]


def relabelled(label):
    return [(x, label(y)) for x, y in good()]


def csv_task(text, **options):
    def make(folder):
        (folder / "x.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
        return Task(Csv(folder / "x.csv", **options), labelled=False)

    return make


def numbers(bad, at=9):
    rows = [f"{np.sin(i):.6f},{np.cos(i):.6f}" for i in range(SAMPLES)]
    rows[at] = bad
    return "a,b\n" + "\n".join(rows) + "\n"


def jsonl_task(folder):
    lines = [json.dumps({"text": f"line {i}"}) for i in range(SAMPLES)]
    lines[21] = lines[21][:-1]
    (folder / "x.jsonl").write_text("\n".join(lines))
    return Task(Jsonl(folder / "x.jsonl"), labelled=False)


def jsonl_without_key(folder):
    lines = [json.dumps({"text": f"line {i}"} if i != 4 else {"txt": "x"}) for i in range(SAMPLES)]
    (folder / "x.jsonl").write_text("\n".join(lines))
    return Task(Jsonl(folder / "x.jsonl", required=["text"]), labelled=False)


def parquet_with_null(folder):
    values = [float(np.sin(i)) for i in range(SAMPLES)]
    values[33] = None
    pq.write_table(pa.table({"a": values}), folder / "x.parquet")
    return Task(Parquet(folder / "x.parquet"), labelled=False)


def image_cut_short(folder):
    from PIL import Image

    rng = np.random.default_rng(4)
    (folder / "cat").mkdir()
    for i in range(30):
        Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(folder / "cat" / f"{i:02}.png")
    path = folder / "cat" / "11.png"
    path.write_bytes(path.read_bytes()[:200])
    return Task(ImageFolder(str(folder)), labelled=False)


def images_of_two_sizes(folder):
    from PIL import Image

    rng = np.random.default_rng(4)
    (folder / "cat").mkdir()
    for i in range(30):
        size = (16, 16, 3) if i != 8 else (16, 12, 3)
        Image.fromarray(rng.integers(0, 256, size, dtype=np.uint8)).save(folder / "cat" / f"{i:02}.png")
    return Task(ImageFolder(str(folder)), labelled=False)


DATA = {
    # subject, what the finding has to hold, and the task
    "a sample raises": (
        "sample.unreadable",
        "sample 5: ValueError: bad row",
        lambda _: Task(with_sample(5, lambda x, y: ValueError("bad row"))),
    ),
    "several samples raise": (
        "sample.unreadable",
        "samples 5, 6: KeyError",
        lambda _: Task([*good()[:5], KeyError("x"), KeyError("x"), *good()[7:]]),
    ),
    "reading a sample ends the process": (
        "sample.kills",
        "sample 5 ends the process",
        lambda _: Task(with_sample(5, lambda x, y: kill)),
    ),
    "the length is too long": ("sample.unreadable", "samples 60, 61: IndexError", lambda _: Task(TooLong(good()))),
    "a sample is None": (
        "sample.missing",
        "sample 5: the sample is None",
        lambda _: Task(with_sample(5, lambda x, y: None), labelled=False),
    ),
    "a field is None": ("sample.missing", "sample 5: ['x'] is None", lambda _: dicts(lambda s: s[5].update(x=None))),
    "a value is NaN": (
        "sample.non_finite",
        "sample 5: [0]: 1 of 8 values are NaN",
        lambda _: Task(with_value(5, 2, float("nan"))),
    ),
    "a value is infinite": (
        "sample.non_finite",
        "sample 5: [0]: 1 of 8 values are Inf",
        lambda _: Task(with_value(5, 2, float("-inf"))),
    ),
    "a number is NaN": (
        "sample.non_finite",
        "sample 5: ['z'] is NaN",
        lambda _: dicts(lambda s: [r.update(z=0.5 * (n % 7) if n != 5 else float("nan")) for n, r in enumerate(s)]),
    ),
    "a key is missing": (
        "sample.keys",
        "sample 5: the keys 'x', but most have the keys 'x', 'y'",
        lambda _: dicts(drop_key),
    ),
    "a key too many": ("sample.keys", "sample 5: the keys 'w', 'x', 'y'", lambda _: dicts(lambda s: s[5].update(w=1))),
    "another number of fields": (
        "sample.type",
        "sample 5: tuple of 3, but most have tuple of 2",
        lambda _: Task(with_sample(5, lambda x, y: (x, y, 0))),
    ),
    "another type of field": (
        "sample.type",
        "sample 5: [0]: text",
        lambda _: Task(with_sample(5, lambda x, y: ("row", y))),
    ),
    "another type of number": (
        "sample.dtype",
        "sample 5: [0]: type float64, but most have float32",
        lambda _: Task(with_sample(5, lambda x, y: (x.double(), y))),
    ),
    "another shape": (
        "sample.shape",
        "sample 5: [0]: shape (9,), but most have (8,)",
        lambda _: Task(with_sample(5, lambda x, y: (torch.cat([x, x[:1]]), y))),
    ),
    "images of two sizes": ("sample.shape", "sample 8: [0]: shape (3, 16, 12)", images_of_two_sizes),
    "copies": ("duplicates.exact", "sample 31 = 7", lambda _: Task(copied(7, 31))),
    "a near copy": ("duplicates.near", "sample 31 = 7", lambda _: near_copy()),
    "a near copy of a text": (
        "duplicates.near",
        "sample 31 = 7",
        lambda _: texts(set_text(31, "Sentence  number: 7!")),
    ),
    "equal inputs of different labels": ("label.conflict", "sample 31 (2) and sample 7 (1)", lambda _: conflict()),
    "leakage": (
        "leakage",
        "1 of 20 validation samples are in train too, such as valid 4 = train 9",
        lambda _: Task(good(), leak(9, 4)),
    ),
    "a constant column": ("feature.constant", "[0]: column 2 always 4", lambda _: Task(constant_column())),
    "values far out of scale": ("feature.scale", "(sample 5)", lambda _: Task(scaled(5, 1, 1e6))),
    "columns of very different ranges": (
        "feature.scale",
        "the ranges of columns lie between",
        lambda _: Task(columns_apart()),
    ),
    "an empty text": ("text.empty", "sample 9: ['text'] is empty", lambda _: texts(set_text(9, "  \n"))),
    "text decoded wrongly": ("text.utf8", "sample 9", lambda _: texts(set_text(9, "caf\ufffd"))),
    "bytes that are no UTF-8": ("text.utf8", "sample 9: byte 0xe9 at 3 is not UTF-8", lambda _: raw_bytes()),
    "one very long sequence": ("length.outlier", "sample 17 is 5,000 long, and 99% are at most", lambda _: ragged()),
    "a label above the model's classes": (
        "label.range",
        "sample 5: label 3 is outside 0..2 (3 classes",
        lambda _: Task(with_sample(5, lambda x, y: (x, 3))),
    ),
    "a negative label": (
        "label.range",
        "sample 5: label -1 is outside",
        lambda _: Task(with_sample(5, lambda x, y: (x, -1))),
    ),
    "labels that count from 1": ("label.range", "label 3 is outside 0..2", lambda _: Task(relabelled(lambda y: y + 1))),
    "a label that is no whole number": (
        "label.type",
        "sample 5: label 1.5 is not a whole number",
        lambda _: float_label(),
    ),
    "label() raises": ("label.unknown", "sample 5: KeyError", lambda _: label_raises()),
    "only one label": ("label.single", "every sample has label 1", lambda _: Task(relabelled(lambda y: 1))),
    "a class that never occurs": (
        "label.absent",
        "labels reach 2, but none is 1",
        lambda _: Task(relabelled(lambda y: 2 * (y > 0))),
    ),
    "unbalanced classes": ("label.imbalance", "samples have label 0", lambda _: Task(skewed())),
    "a label that only valid has": (
        "label.unseen",
        "valid has labels that train has not: 2",
        lambda _: Task(relabelled(lambda y: y % 2), good(20, 9)),
    ),
    "an id beyond the embedding": ("id.range", "sample 13: id 50 is outside 0..49 (50 rows", lambda _: tokens(50)),
    "a negative id": ("id.range", "sample 13: id -3 is outside", lambda _: tokens(-3)),
    "a csv value that is no number": (
        "sample.unreadable",
        "x.csv:11, column 'b': 'x' is not a number",
        csv_task(numbers("1,x"), types={"b": float}),
    ),
    "a csv row with a field too many": (
        "sample.unreadable",
        "x.csv:11: 3 fields, the header has 2",
        csv_task(numbers("1,2,3")),
    ),
    "a csv byte that is no text": (
        "sample.unreadable",
        "x.csv:11, column 'b': byte 0xff",
        csv_task(numbers("1,@").encode().replace(b"@", b"\xff")),
    ),
    "an empty csv value": ("sample.missing", "sample 9: ['b'] is None", csv_task(numbers("1,"))),
    "a json line cut short": ("sample.unreadable", "x.jsonl:22: character", jsonl_task),
    "a json line without a key": ("sample.unreadable", "x.jsonl:5, column 'text': missing", jsonl_without_key),
    "a null in a parquet file": ("sample.missing", "sample 33: ['a'] is None", parquet_with_null),
    "an image cut short": ("sample.unreadable", "11.png cannot be read as an image", image_cut_short),
}


class TooLong(Listed):
    def __len__(self):
        return len(self.samples) + 2


def copied(original, copy):
    samples = good()
    samples[copy] = (samples[original][0].clone(), samples[original][1])
    return samples


def leak(train_index, valid_index):
    valid = good(20, seed=9)
    valid[valid_index] = good()[train_index]
    return valid


def float_label():
    task = Task(good())
    task.label = lambda sample: sample[1] if sample[0][0] != good()[5][0][0] else 1.5
    return task


def label_raises():
    first = float(good()[5][0][0])
    task = Task(good())

    def label(sample):
        if float(sample[0][0]) == first:
            raise KeyError("cat")
        return sample[1]

    task.label = label
    return task


def findings_of(task):
    splits = check_task(TaskAdapter(task), seed=0, full=True)
    return [f for f in judge(splits) if f.level is not Level.OK]


@pytest.mark.slow
@pytest.mark.parametrize("name", DATA)
def test_broken_data_gives_its_one_finding(tmp_path, name):
    subject, text, make = DATA[name]
    [finding] = findings_of(make(tmp_path))
    assert finding.subject == subject
    assert text in finding.fact
    assert finding.why
    assert finding.fix


@pytest.mark.slow
def test_healthy_data_gives_none():
    assert findings_of(Task(good(), good(20, seed=9))) == []
    assert findings_of(tokens()) == []


# -------------------------------------------------------------------- tasks, jobs and environments


GOOD_TASK = """
import torch
class Task:
    def model(self): return torch.nn.Linear(2, 2)
    def dataset(self, split): return torch.utils.data.TensorDataset(torch.randn(8, 2)) if split == "train" else None
    def loss(self, model, batch): return model(batch[0]).square().mean()
"""
GOOD_JOB = {"task": "task:Task", "run": "run", "batch": 4, "steps": 1}

WITH_CSV = f"from rung.launcher.data import Csv\n{GOOD_TASK}\n    def dataset(self, split): return Csv('nothing.csv')"
WITH_TEXT = (
    f"from rung.launcher.data import Text\n{GOOD_TASK}\n    def dataset(self, split): return Text(__file__, 10**6)"
)


@dataclass
class Case:
    says: str
    job: dict | str | bytes | None = None
    task: str = GOOD_TASK
    act: str = "task"  # how far to go: load the job, build the task, its data set, or open the store


def changed(**changes):
    return {**GOOD_JOB, **changes}


SETUPS = {
    "an unknown key": Case("job.yaml:5: optimiser: ", changed(optimiser="adam"), act="job"),
    "a wrong type": Case("batch: ", changed(batch="many"), act="job"),
    "a negative batch": Case("batch: ", changed(batch=-1), act="job"),
    "no task": Case("task: ", {k: v for k, v in GOOD_JOB.items() if k != "task"}, act="job"),
    "two lengths": Case("steps", changed(epochs=2), act="job"),
    "an unknown filter": Case("data.clean", changed(data={"clean": ["drop_dupes"]}), act="job"),
    "an empty job": Case("is empty", "", act="job"),
    "a job that is no YAML": Case("job.yaml:", "task: [", act="job"),
    "a job that is no text": Case("is not UTF-8", b"task: \xff", act="job"),
    "no such job file": Case("does not exist", None, act="job"),
    "no such module": Case("nowhere", changed(task="nowhere:Task")),
    "no such class": Case("Tsak", changed(task="task:Tsak")),
    "not a class": Case("not a class", GOOD_JOB, GOOD_TASK + "\nTask = Task()"),
    "a syntax error": Case("SyntaxError", GOOD_JOB, GOOD_TASK + "\ndef f(:"),
    "an import that fails": Case("ModuleNotFoundError", GOOD_JOB, "import no_such_package_at_all" + GOOD_TASK),
    "a constructor that raises": Case("ZeroDivisionError", GOOD_JOB, GOOD_TASK + "\n    def __init__(self): 1 / 0"),
    "an argument that is not there": Case("depth", changed(task_args={"depth": 3})),
    "a task without a loss": Case("lacks loss", GOOD_JOB, GOOD_TASK.replace("def loss", "def losss")),
    "an empty data set": Case("is empty", GOOD_JOB, GOOD_TASK.replace("randn(8", "randn(0"), act="data"),
    "a data set without a length": Case(
        "lacks a length", GOOD_JOB, GOOD_TASK + "\n    def dataset(self, split): return 3", act="data"
    ),
    "a model that is none": Case(
        "not a torch.nn.Module", GOOD_JOB, GOOD_TASK + "\n    def model(self): return 3", act="model"
    ),
    "a store of an unknown kind": Case("no store is known for", changed(run="floppy://a"), act="store"),
    "a run folder below a file": Case("task.py", changed(run="task.py/run"), act="store"),
    "a data file that is not there": Case("nothing.csv", GOOD_JOB, WITH_CSV, act="data"),
    "a text shorter than a window": Case("less than one window", GOOD_JOB, WITH_TEXT, act="data"),
}


def use(path, act):
    job = load(path)
    if act == "store":
        Store.open(job.run).probe()
    elif act != "job":
        task = load_task(job)
        if act == "data":
            task.dataset("train")
        elif act == "model":
            task.model()


@pytest.mark.parametrize("name", SETUPS)
def test_a_broken_setup_gives_its_one_error(tmp_path, monkeypatch, name):
    case = SETUPS[name]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "task.py").write_text(case.task)
    path = tmp_path / "job.yaml"
    if isinstance(case.job, dict):
        path.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in case.job.items()))
    elif case.job is not None:
        path.write_bytes(case.job if isinstance(case.job, bytes) else case.job.encode())
    with pytest.raises(RungError) as caught:
        use(path, case.act)
    assert case.says in str(caught.value)


def test_there_are_at_least_forty():
    assert len(DATA) + len(SETUPS) >= 70


# -------------------------------------------------------------------- the command


def rung(*arguments, cwd=None):
    return subprocess.run([*RUNG, *arguments], capture_output=True, text=True, timeout=110, cwd=cwd)


@pytest.mark.slow
@pytest.mark.parametrize("example", ["digits", "stdlib_lm"])
def test_the_examples_give_no_finding(tmp_path, example):
    job = ROOT / "examples" / example / "job.yaml"
    done = rung("check", str(job), "--set", f"run={tmp_path}", "--json")
    assert done.returncode == 0, done.stderr
    assert [f for f in json.loads(done.stdout)["findings"] if f["level"] != "ok"] == []


@pytest.mark.slow
def test_the_command_prints_findings_stores_them_and_exits_4(tmp_path):
    (tmp_path / "task.py").write_text(
        GOOD_TASK
        + """
    def dataset(self, split):
        data = torch.randn(50, 2, generator=torch.Generator().manual_seed(0))
        data[7, 1] = float("nan")
        return torch.utils.data.TensorDataset(data) if split == "train" else None
"""
    )
    (tmp_path / "job.yaml").write_text("".join(f"{k}: {json.dumps(v)}\n" for k, v in GOOD_JOB.items()))
    done = rung("check", "job.yaml", cwd=tmp_path)
    assert done.returncode == 4, done.stderr
    assert "sample 7: [0]: 1 of 2 values are NaN" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    stored = json.loads((tmp_path / "run" / "check.json").read_text())
    assert [f["subject"] for f in stored["findings"] if f["level"] == "error"] == ["sample.non_finite"]
    assert stored["splits"][0]["problems"]["sample.non_finite"]["samples"] == [7]


@pytest.mark.slow
def test_the_command_with_a_broken_task_exits_2_with_the_users_traceback(tmp_path):
    (tmp_path / "task.py").write_text(GOOD_TASK + "\n    def __init__(self):\n        1 / 0\n")
    (tmp_path / "job.yaml").write_text("".join(f"{k}: {json.dumps(v)}\n" for k, v in GOOD_JOB.items()))
    done = rung("check", "job.yaml", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "ZeroDivisionError" in done.stderr
    assert "launcher/data" not in done.stderr


def test_a_struct_that_is_no_text_is_read_as_bytes(tmp_path):
    path = tmp_path / "x.txt"
    path.write_bytes(struct.pack("<10I", *range(10)))
    assert Text(path, 4)[0].tolist() == [0, 0, 0, 0, 1]
