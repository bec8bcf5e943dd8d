import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from rung.launcher import job as job_module
from rung.launcher.job import Every, Job, changes, load
from rung.strategies.errors import JobError

MINIMAL = "task: task:Task\nrun: runs/x\nbatch: 8\n"
FULL = """\
task: stdlib_lm.task:StdlibLM
task_args: {context: 128}
run: runs/stdlib-lm
batch: 64
epochs: 3
optimizer: {name: adamw, lr: 1.0e-4, weight_decay: 0.01}
schedule: {name: linear, warmup: 0.03}
clip: 1.0
precision: auto
strategy: auto
devices: {count: auto, memory: auto}
checkpoint: {every: 5 epochs, keep: 3}
guard: {first_steps: 10, non_finite: stop, negative_loss: stop}
data: {workers: auto, clean: [], imbalance: none}
cluster: {address: none, workers: [1, 4]}
seed: 0
"""


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "job.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def read(folder: Path, text: str, *sets: str) -> Job:
    return load(write(folder, text), sets)


def complaints(folder: Path, text: str | bytes, *sets: str) -> list[str]:
    path = write(folder, text)
    with pytest.raises(JobError) as caught:
        load(path, sets)
    return str(caught.value).replace(f"{path}", "job.yaml").splitlines()


def test_the_designs_example_is_the_default(tmp_path: Path) -> None:
    full, minimal = read(tmp_path, FULL).public_dict(), read(tmp_path, MINIMAL).public_dict()
    for key in ("task", "task_args", "run", "batch", "epochs"):
        del full[key], minimal[key]
    assert full == minimal


def test_defaults(tmp_path: Path) -> None:
    job = read(tmp_path, MINIMAL)
    assert (job.epochs, job.steps, job.clip, job.seed) == (1.0, None, 1.0, 0)
    assert (job.optimizer.name, job.optimizer.lr, job.optimizer.weight_decay) == ("adamw", 1e-4, 0.01)
    assert job.checkpoint.every == Every(amount=5.0, unit="epochs")
    assert job.validation.every == Every(amount=1.0, unit="epochs")
    assert job.fallback.enabled
    assert job.fallback.allow is None
    assert job.source == tmp_path / "job.yaml"
    assert job.folder == tmp_path


def test_short_forms_and_units(tmp_path: Path) -> None:
    job = read(
        tmp_path,
        MINIMAL
        + "optimizer: SGD\nschedule: cosine\nstrategy: zero2\nfallback: off\nclip: null\nsteps: 10_000\n"
        + "devices: {count: [1, 4], memory: 8 GiB}\ncluster: {workers: 2}\n"
        + "checkpoint: {every: 90 seconds}\nvalidation: {every: none}\nseed: 010\n",
    )
    assert (job.optimizer.name, job.schedule.name, job.strategy.name) == ("sgd", "cosine", "zero2")
    assert (job.clip, job.steps, job.epochs, job.seed) == (None, 10_000, None, 10)
    assert (job.devices.count, job.devices.memory, job.cluster.workers) == ((1, 4), 8 * 2**30, (2, 2))
    assert (job.checkpoint.every, job.validation.every) == (Every(amount=1.5, unit="minutes"), None)
    assert not job.fallback.enabled
    assert read(tmp_path, MINIMAL + "fallback: {allow: [micro_batch]}\n").fallback.allow == ("micro_batch",)
    assert read(tmp_path, MINIMAL + "devices: {memory: 500 mb}\n").devices.memory == 500_000_000


@pytest.mark.parametrize("text", ["1e-4", "1.0e-4", "+1E-4", "0.0001", ".0001", "1_00e-6"])
def test_each_way_to_write_a_number_is_one(tmp_path: Path, text: str) -> None:
    assert read(tmp_path, MINIMAL + f"optimizer: {{lr: {text}}}\n").optimizer.lr == pytest.approx(1e-4)


def test_dates_and_clock_times_are_text_not_numbers(tmp_path: Path) -> None:
    args = read(tmp_path, MINIMAL + "task_args: {day: 2024-01-02, at: 1:30, v: 1.2.3, e: 5e}\n").task_args
    assert args == {"day": "2024-01-02", "at": "1:30", "v": "1.2.3", "e": "5e"}


def test_all_problems_come_at_once_each_with_its_line_and_in_order(tmp_path: Path) -> None:
    lines = complaints(
        tmp_path,
        "task: Task\n"
        "run: runs/x\n"
        "batch: many\n"
        "optimizer:\n"
        "  name: adamw\n"
        "  lr: -1\n"
        "  lerning_rate: 3\n"
        "clip: -0.5\n"
        "checkpoint: {keep: 0}\n"
        "schedule:\n"
        "  warmup: 100\n"
        "sede: 3\n"
        "epochs: 2\n"
        "steps: 5\n"
        "precision: fp61\n",
    )
    expected = [
        ("job.yaml:1: task: ", "'Task' is not module:Class"),
        ("job.yaml:3: batch: ", "'many' is not a whole number"),
        ("job.yaml:6: optimizer.lr: ", "-1 must be more than 0"),
        ("job.yaml:7: optimizer.lerning_rate: ", "not a key of optimizer; did you mean lr?"),
        ("job.yaml:8: clip: ", "-0.5 must be more than 0; write null to switch clipping off"),
        ("job.yaml:9: checkpoint.keep: ", "0 must be at least 1"),
        ("job.yaml:11: schedule.warmup: ", "100 must be at most 1"),
        ("job.yaml:12: sede: ", "did you mean seed?"),
        ("job.yaml:14: steps: ", "steps 5 and epochs 2 (line 13) are both given"),
        ("job.yaml:15: precision: ", "did you mean fp16?"),
    ]
    assert len(lines) == len(expected), "\n".join(lines)
    for line, (start, words) in zip(lines, expected, strict=True):
        assert line.startswith(start)
        assert words in line


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("source: x", ["source: not a key of the job"]),
        ("lr: 0.1", ["lr: not a key of the job; did you mean optimizer.lr?"]),
        ("data: {seed: 3}", ["data.seed: ", "did you mean seed at the top level?"]),
        ("optimizer: {momentum: 0.9}", ["go under optimizer.args"]),
        ("guard: 5", ["guard: 5 is not a mapping"]),
        ("clip: true", ["clip: True is not a number"]),
        ("seed: -1", ["seed: -1 must be at least 0"]),
        ("seed: 1.5", ["seed: 1.5 is not a whole number"]),
        ("seed: 9223372036854775808", ["must be at most"]),
        ("seed: " + "9" * 5000, ["seed: too many digits"]),
        ("seed: 0x" + "f" * 5000, ["seed: a number of about 6000 digits must be at most"]),
        ("clip: .inf", ["clip: inf is not a finite number"]),
        ("clip: 1e999", ["clip: inf is not a finite number"]),
        ("task_args: {a: {b: [1, .nan]}}", ["task_args: a: b: nan is not a finite number"]),
        ("epochs: 0", ["epochs: 0 must be more than 0"]),
        ("steps: 0", ["steps: 0 must be at least 1"]),
        ("checkpoint: {every: 0 steps}", ["checkpoint.every: '0 steps' must be more than zero"]),
        ("checkpoint: {every: 1.5 steps}", ["steps are whole numbers"]),
        ("checkpoint: {every: 5}", ["checkpoint.every: 5 is not a rhythm"]),
        ("checkpoint: {every: 5 parsecs}", ["'parsecs' is not a unit"]),
        ("devices: {memory: 8}", ["8 must be between 1 MiB", "write the unit"]),
        ("devices: {memory: lots}", ["'lots' is not an amount of memory"]),
        ("devices: {count: 0}", ["devices.count: 0 is not a count"]),
        ("devices: {count: [1, 2, 3]}", ["is not a count"]),
        ("data: {clean: [drop_duplicate]}", ["data.clean[0]: ", "did you mean drop_duplicates?"]),
        ("data: {workers: -1}", ["data.workers: -1 is not a count"]),
        ("optimizer: {name: adamz}", ["optimizer.name: 'adamz' is none of", "did you mean adam"]),
        ("optimizer: {name: 'a.b:c-d'}", ["is not module:callable"]),
        ("fallback: maybe", ["fallback: 'maybe' is not on, off or"]),
        ("init_from: ''", ["init_from: is empty"]),
        ('init_from: "a\\nb"', ["init_from: 'a\\nb' holds a control character"]),
        ("batch: 1", ["job.yaml:4: batch: given twice; first on line 3"]),
        ("task_args: {<<: {a: 1}}", ["merge keys are not supported"]),
        ("task_args: {? [a] : 1}", ["a key must be plain text"]),
        ("task_args: !!python/object/apply:os.system [ls]", ["the tag", "is not supported"]),
        ("seed: !!int x", ["seed: 'x' is not a int"]),
    ],
)
def test_a_wrong_value_is_named_with_what_is_expected(tmp_path: Path, more: str, words: list[str]) -> None:
    text = "\n".join(complaints(tmp_path, MINIMAL + more + "\n"))
    assert text.startswith("job.yaml:4: ")
    assert len(text) < 1000
    for word in words:
        assert word in text


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("steps: 5\nepochs: 2", "job.yaml:4: steps: steps 5 and epochs 2 (line 5) are both given"),
        ("devices: {count: 9}", "job.yaml:3: batch: 8 samples cannot keep 9 devices (line 4) busy"),
        ("devices:\n  count: [4, 2]", "job.yaml:5: devices.count: [4, 2] has its ends swapped"),
        ("cluster: {workers: [4, 2]}", "job.yaml:4: cluster.workers: [4, 2] has its ends swapped"),
        ("strategy: {micro_batch: 9}", "strategy.micro_batch: 9 is more than the whole batch of 8 (line 3)"),
        ("strategy: single\ndevices: {count: 2}", "strategy.name: single trains on one device, but devices"),
        ("strategy: {name: single, devices: 2}", "single trains on one device, but strategy.devices (line 4) is 2"),
        ("checkpoint: {keep_best: loss}\nvalidation: {every: none}", "but validation.every (line 5) is none"),
        ("cluster: {address: auto, workers: 9}", "8 samples cannot keep 9 workers (line 4) busy"),
        ("strategy: {devices: 9}", "job.yaml:3: batch: 8 samples cannot keep 9 devices (line 4) busy"),
        ("strategy: {devices: 4}\ndevices: {count: 2}", "4 devices are pinned, but devices.count (line 5) is 2"),
        ("strategy: {name: ddp, offload_parameters: host}", "only zero3 can move parameters off"),
        ("strategy: {name: zero2, within_nodes: true}", "only zero3 can hold weights a second time in each node"),
        ("strategy:\n  name: ddp\n  offload_optimizer: disk", "strategy (line 5) is ddp"),
    ],
)  # fmt: skip
def test_contradictions_name_both_lines(tmp_path: Path, more: str, words: str) -> None:
    lines = complaints(tmp_path, MINIMAL + more + "\n")
    assert len(lines) == 1
    assert words in lines[0]


def test_a_contradiction_with_a_field_that_is_wrong_anyway_is_not_reported_twice(tmp_path: Path) -> None:
    lines = complaints(tmp_path, "task: a:B\nrun: r\nbatch: x\ndevices: {count: 9}\n")
    assert lines == [
        "job.yaml:3: batch: 'x' is not a whole number; it is the samples of one optimizer step over all devices"
    ]


def test_what_is_missing_is_said_with_an_example(tmp_path: Path) -> None:
    lines = complaints(tmp_path, "seed: 1\n")
    assert [line.split(": ")[1:3] for line in lines] == [[n, "missing; write " + w] for n, w in (
        ("task", "module:Class, as in task"),
        ("run", "the folder that the run is kept in, as in run"),
        ("batch", "the samples of one optimizer step, as in batch"),
    )]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "job.yaml is empty"),
        (b"# only a comment\n", "job.yaml is empty"),
        (b"- a\n- b\n", "job.yaml:1: a job is a mapping (key: value), not ['a', 'b']"),
        (b"just text", "not 'just text'"),
        (b"a: 1\nb:\n\t- x\n", "job.yaml:3: a tab; YAML is indented with spaces"),
        (b"a: [1, 2\n", "not valid YAML"),
        (b"a: b: c\n", "job.yaml:1: not valid YAML: a second `:` on this line"),
        (b"a: 1\n---\nb: 2\n", "a second document"),
        (b"a: 1\nb: \xff\xfe\n", "job.yaml:2: byte 0xff is not UTF-8"),
        (b"a: 1\nb: \x00\n", "job.yaml:2: the character"),
        (b'a: "\\UFFFFFFFF"\n', "not valid YAML"),
        (b"a: *nobody\n", "found undefined alias"),
        (b"a: &x [*x]\n", "stands inside of what it names"),
        (b"[" * 1500, "nested deeper than 60 levels"),
        (b"a: " + b"[" * 70 + b"]" * 70, "nested deeper than 60 levels"),
        (b"a: x" + b" " * 300_000, "longer than 256 KiB"),
        (
            b"a0: &a0 [x,x,x,x,x,x,x,x,x]\n"
            + b"".join(b"a%d: &a%d [%s]\n" % (i, i, b",".join([b"*a%d" % (i - 1)] * 9)) for i in range(1, 12)),
            "more than 20000 values; do aliases (*name) multiply here?",
        ),
    ],
)
def test_a_file_that_is_no_job_says_so(tmp_path: Path, text: bytes, words: str) -> None:
    assert words in "\n".join(complaints(tmp_path, text))


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="does not exist"):
        load(tmp_path / "none.yaml")
    with pytest.raises(JobError, match="is a folder"):
        load(tmp_path)
    with pytest.raises(JobError, match="cannot be read"):
        load("a\0b")
    with pytest.raises(JobError, match="cannot be read: File name too long"):
        load(tmp_path / ("x" * 5000))
    path = write(tmp_path, MINIMAL)
    path.chmod(0)
    if not os.access(path, os.R_OK):  # root may read anything
        with pytest.raises(JobError, match="Permission denied"):
            load(path)


def test_windows_line_ends_and_a_byte_order_mark_are_fine(tmp_path: Path) -> None:
    assert load(write(tmp_path, b"\xef\xbb\xbf" + MINIMAL.replace("\n", "\r\n").encode())).batch == 8


def test_sets_override_and_create_and_are_named_when_wrong(tmp_path: Path) -> None:
    job = read(
        tmp_path,
        MINIMAL + "strategy: zero2\n",
        "optimizer.lr=3e-4",
        "strategy.micro_batch=2",
        "task_args.text=a=b",
        "clip=",
        "devices={count: [1, 2]}",
        "data.clean=[drop_missing]",
    )
    assert (job.optimizer.lr, job.clip, job.devices.count) == (3e-4, None, (1, 2))
    assert (job.strategy.name, job.strategy.micro_batch) == ("zero2", 2)
    assert (job.task_args, job.data.clean) == ({"text": "a=b"}, ("drop_missing",))
    sets = [
        "clip=0",
        "batch.size=3",
        "nope",
        "a..b=1",
        "guard=[",
        "lerning_rate=1",
        "steps=3",
        "epochs=4",
        "seed=!!int x",
    ]
    lines = complaints(tmp_path, MINIMAL, *sets)
    assert [line.split(": ")[0] for line in lines].count("--set clip=0") == 1
    text = "\n".join(lines)
    for words in (
        "--set clip=0: clip: 0 must be more than 0",
        "--set batch.size=3: batch.size: batch is 8, which has no keys",
        "--set nope: write key=value",
        "--set a..b=1: write key=value",
        "--set guard=[: guard: not valid YAML",
        "--set lerning_rate=1: lerning_rate: not a key of the job; did you mean optimizer.lr?",
        "--set steps=3: steps: steps 3 and epochs 4 (--set epochs=4) are both given",
        "--set seed=!!int x: seed: 'x' is not a int",
    ):
        assert words in text
    assert len(lines) == 8


def test_secrets_are_neither_shown_nor_stored(tmp_path: Path) -> None:
    secret = "hunter2"
    job = read(
        tmp_path,
        f"task: a:B\nrun: s3://key:{secret}@bucket/x?token={secret}\nbatch: 1\n"
        f"checkpoint: {{options: {{secret: {secret}, client: {{token: [{secret}]}}, anon: false}}}}\n"
        f"cluster: {{runtime_env: {{env_vars: {{TOKEN: {secret}}}, pip: [x]}}}}\n",
    )
    assert secret in json.dumps(job.to_dict())
    public = job.public_dict()
    assert secret not in json.dumps(public)
    assert public["run"] == "s3://***@bucket/x?***"
    assert public["checkpoint"]["options"]["anon"] is False
    assert public["cluster"]["runtime_env"]["pip"] == ["x"]
    lines = complaints(tmp_path, MINIMAL, f"checkpoint.options.x.y={secret}: [", f"checkpoint.options={secret}")
    assert secret not in "\n".join(lines)


def test_round_trip_pickle_and_equality(tmp_path: Path) -> None:
    job = read(tmp_path, FULL, "strategy.micro_batch=4", "fallback={allow: [strategy]}", "devices.count=[1, 3]")
    again = Job.from_dict(json.loads(json.dumps(job.to_dict())), source=job.source)
    assert again == job
    assert Job.from_dict(job.to_dict()).source == job.source
    assert "source" not in job.public_dict()
    assert again.digest() == job.digest()
    assert pickle.loads(pickle.dumps(job)) == job
    assert pickle.loads(pickle.dumps(job)).source == job.source
    with pytest.raises(JobError, match="stored job: batch: 'x' is not a whole number"):
        Job.from_dict({**job.to_dict(), "batch": "x"})
    with pytest.raises(ValueError, match="frozen"):
        job.batch = 3  # type: ignore[misc]


def test_the_digest_depends_on_values_only(tmp_path: Path) -> None:
    shuffled = "".join(reversed(FULL.splitlines(keepends=True)))
    other = tmp_path / "elsewhere"
    other.mkdir()
    digest = read(tmp_path, FULL).digest()
    assert read(other, shuffled).digest() == digest
    assert read(tmp_path, FULL, "seed=1").digest() != digest
    code = f"from rung.launcher.job import load; print(load({str(write(tmp_path, FULL))!r}).digest())"
    env = {**os.environ, "PYTHONHASHSEED": "77"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=60)
    assert result.stdout.strip() == digest, result.stderr


def test_changes_say_what_may_change_and_why(tmp_path: Path) -> None:
    old = read(tmp_path, FULL).public_dict()
    allowed = [
        "epochs=4", "checkpoint.keep=1", "devices.count=2", "strategy=ddp", "data.workers=2", "guard.first_steps=3",
        "validation.every=none", "cluster.address=auto", "fallback=off", "log_every_s=1", "grace_s=1", "run=moved",
        "precision=bf16", "hang_s=60",
    ]  # fmt: skip
    refused = [
        "batch=32", "seed=1", "task=a:B", "task_args.context=64", "optimizer.lr=1e-3", "schedule.warmup=0.1", "clip=2",
        "data.clean=[drop_missing]", "data.imbalance=auto", "init_from=x",
    ]  # fmt: skip
    found = {c.field: c for c in changes(old, read(tmp_path, FULL, *allowed, *refused).public_dict())}
    assert {f for f, c in found.items() if not c.allowed} == {t.partition("=")[0] for t in refused}
    assert {f.partition(".name")[0].partition(".enabled")[0] for f, c in found.items() if c.allowed} == {
        t.partition("=")[0] for t in allowed
    }
    assert "rate" in found["epochs"].reason
    assert (found["optimizer.lr"].old, found["optimizer.lr"].new) == (1e-4, 1e-3)
    assert changes(old, json.loads(json.dumps(old))) == []


def test_changes_from_epochs_to_steps_and_from_an_older_job_without_newer_fields(tmp_path: Path) -> None:
    old = read(tmp_path, FULL).public_dict()
    new = read(tmp_path, FULL.replace("epochs: 3", "steps: 7")).public_dict()
    assert [(c.field, c.old, c.new, c.allowed) for c in changes(old, new)] == [
        ("epochs", 3.0, None, True),
        ("steps", None, 7, True),
    ]
    del old["guard"]["on_spike"], old["grace_s"], old["validation"]
    assert changes(old, read(tmp_path, FULL).public_dict()) == []


def test_the_schema_accepts_what_load_accepts(tmp_path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    import yaml

    schema = json.loads(Job.schema_json())
    jsonschema.Draft202012Validator.check_schema(schema)
    check = jsonschema.Draft202012Validator(schema)
    for text in (FULL, MINIMAL + "strategy: zero2\noptimizer: sgd\nfallback: off\nschedule: cosine\n",
                 MINIMAL + "strategy: {name: zero3, offload_optimizer: host}\nfallback: {allow: [devices]}\n"
                 "devices: {count: [1, 2], memory: 8 GiB}\n"):  # fmt: skip
        read(tmp_path, text)
        check.validate(yaml.safe_load(text))
    assert not check.is_valid({"task": "a:B", "run": "x", "batch": 1, "lr": 3})
    assert not check.is_valid({"task": "a:B", "run": "x", "batch": "many"})
    assert schema["properties"]["batch"]["description"].startswith("Samples in one optimizer step")


def test_reading_a_job_imports_no_torch() -> None:
    code = "import sys, rung.launcher.job; print(sorted({'torch', 'numpy', 'typer'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == "[]", result.stderr


def test_all_names_of_the_module_exist() -> None:
    assert [name for name in job_module.__all__ if not hasattr(job_module, name)] == []
