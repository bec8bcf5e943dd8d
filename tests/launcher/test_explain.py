"""`rung explain`: after any end, one screen from what the run folder holds."""

import json
import os

import pytest

from rung.launcher.explain import ADVICE, explain, newest_run
from rung.strategies.errors import JobError


@pytest.fixture
def told(tmp_path):
    """Writes events, gives the lines."""

    def of(*events):
        text = "".join(json.dumps({"time": 0, **e}) + "\n" for e in events)
        (tmp_path / "events.jsonl").write_text(text)
        return explain(str(tmp_path))

    return of


LAUNCH = {"event": "launch", "version": "1"}
ATTEMPT = {"event": "attempt", "number": 1, "plan": "ddp, 2 x cpu", "resume": None}
SAVED = {"event": "checkpoint", "step": 40, "name": "step-000000040"}


def ended(reason="failed", **more):
    return {"event": "outcome", "reason": reason, "step": 45, "cause": None, "headline": "", "explanation": "", **more}


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(JobError, match="not a run folder"):
        explain(str(tmp_path))
    with pytest.raises(JobError, match="no run was found"):
        newest_run(tmp_path)


def test_a_failure_names_rank_samples_checkpoint_and_what_to_change(told):
    lines = told(
        LAUNCH, ATTEMPT, SAVED,
        ended(cause="non_finite", headline="rank 1 raised HealthError: the loss is NaN at step 46",
              explanation="the loss is NaN at step 46; samples 3, 4\n  → likely cause: the learning rate",
              samples=list(range(3, 20))),
    )  # fmt: skip
    text = "\n".join(lines)
    assert "rank 1 raised HealthError" in text
    assert "failed after step 45; the newest checkpoint is of step 40" in text
    assert "samples 3, 4, 5, 6, 7, 8, 9, 10 and 9 more" in text
    assert lines[-1].strip() == f"→ {ADVICE['non_finite']}"
    assert len(lines) <= 24  # one screen


def test_what_was_tried_is_listed_in_order(told):
    where = {"event": "workers", "placed": "rank 0 on NUMA node 0 with 4 cores; rank 1 on NUMA node 1 with 4 cores"}
    text = "\n".join(told(
        LAUNCH, ATTEMPT, {**where, "threads": 4}, ended(cause="device_oom", headline="rank 0 raised OutOfMemoryError"),
        {"event": "fallback", "step": 45, "reason": "out of device memory: micro-batch 8 -> 4"},
        {**ATTEMPT, "number": 2, "resume": "checkpoints/step-000000040"},
        {"event": "finding", "step": 50, "subject": "loss.spike", "fact": "the loss jumped", "samples": [7, 8]},
        {"event": "rollback", "step": 50, "to": 40, "batches": [[0, 8], [0, 16]], "reason": "the loss jumped to 9"},
        {"event": "done", "step": 60, "seconds": 12.5},
    ))  # fmt: skip
    places = [text.index(words) for words in (
        "attempt 1", "rank 1 on NUMA node 1 with 4 cores; 4 threads each", "OutOfMemoryError",
        "after step 45: out of device memory", "from checkpoints/step-000000040",
        "step 50, loss.spike: the loss jumped (samples 7, 8)", "back to step 40, 2 batches passed over",
        "done at step 60 in 12.5 s",
    )]  # fmt: skip
    assert places == sorted(places)


def test_only_the_last_launch_is_told_in_full(told):
    text = "\n".join(told(LAUNCH, {**ATTEMPT, "plan": "the old plan"}, ended(), LAUNCH, {**ATTEMPT, "number": 2},
                          {"event": "done", "step": 9, "seconds": 1}))  # fmt: skip
    assert "the old plan" not in text
    assert "1 attempt in earlier launches" in text
    assert "done at step 9" in text


def test_a_run_that_was_cut_off_says_that_the_same_command_goes_on(told):
    for events in ((LAUNCH, ATTEMPT, SAVED), (LAUNCH, ATTEMPT, SAVED, ended(), LAUNCH)):
        text = "\n".join(told(*events))
        assert "cut off without a word" in text
        assert "step 40" in text
    assert "the same `rung launch` goes on" in told(LAUNCH, ATTEMPT, ended(reason="stopped"))[-1]


def test_every_cause_has_advice():
    from rung.cluster.failures import Cause

    assert {cause.value for cause in Cause} == set(ADVICE)


def test_the_newest_run_below_a_folder_is_found(tmp_path):
    for name, age in (("a", 100), ("runs/b", 10), ("c", 50)):
        (tmp_path / name).mkdir(parents=True)
        file = tmp_path / name / "events.jsonl"
        file.write_text("")
        os.utime(file, (1e9 - age, 1e9 - age))
    assert newest_run(tmp_path) == str(tmp_path / "runs/b")


@pytest.mark.slow
def test_after_a_real_failure_it_says_what_the_launch_said(project):
    done = project.launch("task_args={nan_after: 16}", "steps=30", "devices.count=2", "guard.first_steps=30")
    assert done.code == 4, done.all
    lines = explain(str(project.folder / "run"))
    text = "\n".join(lines)
    assert "rank " in text
    assert "the loss is NaN at step" in text
    assert "(indices into the data set)" in text
    assert len(lines) <= 24
