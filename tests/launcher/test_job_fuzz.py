"""No input makes anything but a Job or a JobError: not bytes, not values, not a valid file with some bytes changed."""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rung.launcher.job import Job, load
from rung.strategies.errors import JobError

VALID = b"""\
task: stdlib_lm.task:StdlibLM
task_args: {context: 128, deep: {a: [1, 2.5, ~]}}
run: "runs/x"
batch: 64
epochs: 3
optimizer:
  name: adamw
  lr: 1e-4
  args: {betas: [0.9, 0.99]}
schedule: {name: linear, warmup: 0.03}
clip: 1.0
strategy: {name: zero3, micro_batch: 4, offload_optimizer: host}
devices: {count: [1, 4], memory: 8 GiB}
checkpoint: {every: 5 epochs, keep: 3}
data: {workers: auto, clean: [drop_missing], imbalance: none}
cluster: {address: none, workers: [1, 4]}
fallback: {allow: [micro_batch]}
seed: 0
"""
WORDS = [
    "task", "run", "batch", "epochs", "steps", "optimizer", "name", "lr", "args", "schedule", "warmup", "clip",
    "strategy", "micro_batch", "devices", "count", "memory", "checkpoint", "every", "keep", "options", "data",
    "clean", "cluster", "workers", "fallback", "allow", "seed", "guard", "validation", "init_from",
    "allow_mismatch", "a:B", "auto", "none", "on", "<<", "lerning_rate", "zero3", "single", "sgd", "5 epochs",
    "8 GiB", "", "\ud800", "\0",
]  # fmt: skip
SETTINGS = settings(
    max_examples=100, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
BITS = [b"\t", b"[", b"]", b"{", b"}", b": ", b"- ", b"&a ", b"*a", b"!!int ", b"!!python/name:os ", b"\x00", b"\xff",
        b'"', b"|", b">", b"%YAML 9", b"---\n", b"...", b"? ", b"#", b"\\U00110000", b".nan", b".inf", b"1e999",
        b"9" * 60, b"<<: ", b"\r", b"\xe2\x80\xa8", b"~", b"@", b"`"]  # fmt: skip


def check_words(text: str, *starts: str) -> None:
    text.encode()
    assert text.startswith(starts)
    assert all(len(line) < 1200 for line in text.splitlines())
    assert "Traceback" not in text


def outcome(path: Path, sets: tuple[str, ...] = ()) -> Job | None:
    """The job, or None for an error that meets the rules: short lines, each with a place, and no surrogate in it."""
    try:
        job = load(path, sets)
    except JobError as error:
        check_words(str(error), str(path), "--set")
        return None
    assert Job.from_dict(json.loads(json.dumps(job.to_dict())), source=job.source) == job
    return job


@SETTINGS
@given(data=st.binary(max_size=200) | st.text(max_size=100).map(lambda t: t.encode("utf-8", "surrogatepass")))
def test_any_bytes(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(data)
    outcome(path)


@SETTINGS
@given(
    edits=st.lists(
        st.tuples(st.integers(0, len(VALID)), st.integers(0, 12), st.sampled_from(BITS) | st.binary(max_size=3)),
        min_size=1,
        max_size=4,
    )
)
def test_a_valid_file_with_some_bytes_changed(tmp_path: Path, edits: list[tuple[int, int, bytes]]) -> None:
    data = VALID
    for start, length, new in edits:
        data = data[:start] + new + data[start + length :]
    path = tmp_path / "job.yaml"
    path.write_bytes(data)
    outcome(path)


leaves = (
    st.none() | st.booleans() | st.integers() | st.integers(10**30, 10**40) | st.floats()
    | st.sampled_from(WORDS) | st.text(max_size=5)
)  # fmt: skip
keys = st.sampled_from(WORDS) | st.text(max_size=5)
trees = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=8,
)  # fmt: skip


@SETTINGS
@given(changed=st.dictionaries(st.sampled_from(WORDS), trees, max_size=5))
@example(changed={"steps": 3, "epochs": 10**400})
@example(changed={"clip": -(10**5000)})
@example(changed={"batch": True, "devices": {"count": [10**5000, 1]}})
@example(changed={"task_args": {"x": {1: 2}}})
@example(changed={"task_args": {"x": b"bytes"}})
@example(changed={3: 4})
def test_any_values(changed: dict[str, object]) -> None:
    try:
        job = Job.from_dict({"task": "a:B", "run": "x", "batch": 4, **changed})
    except JobError as error:
        check_words(str(error), "stored job")
    else:
        assert Job.from_dict(json.loads(json.dumps(job.to_dict()))) == job
        assert len(job.digest()) == 32


@pytest.mark.parametrize("values", [None, 3, [], "x", {1: 2}])
def test_no_mapping_at_all(values: object) -> None:
    with pytest.raises(JobError):
        Job.from_dict(values)


@SETTINGS
@given(
    key=st.lists(st.sampled_from(WORDS), min_size=1, max_size=3).map(".".join) | st.text(max_size=8),
    value=st.text(max_size=20) | trees.map(lambda t: json.dumps(t, default=str)),
)
@example(key="[key]", value="")
def test_any_override(tmp_path: Path, key: str, value: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(VALID)
    outcome(path, (f"{key}={value}", key))
    outcome(path, (f"{key}={value}",))


def test_the_file_that_is_changed_here_is_valid(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(VALID)
    job = outcome(path)
    assert job is not None
    assert job.optimizer.args == {"betas": [0.9, 0.99]}
