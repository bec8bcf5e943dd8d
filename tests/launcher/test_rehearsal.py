"""`rung launch --trial`: says what was proven or what is wrong, and leaves nothing behind."""

import pytest

pytestmark = pytest.mark.slow


def left(project):
    return {path.name for path in project.folder.iterdir()} - {"__pycache__", ".cache"}


def test_a_sound_job_is_proven_and_nothing_is_left(project):
    done = project.launch("task_args={samples: 200}", flags=["--trial"])
    assert done.code == 0, done.all
    assert "trial      data: 216 samples looked at, none that stops a run" in done.out
    assert "trial      two steps: single, 1 x cpu, batch 8" in done.out
    assert "a checkpoint takes" in done.out
    assert "trial      resume: from step 2 to step 3, validation loss 0." in done.out
    assert "the job starts, trains, saves and resumes" in done.out
    assert left(project) == {"task.py", "job.yaml"}


@pytest.mark.parametrize(
    ("change", "code", "words", "proven"),
    [
        (("return self.x[i], self.y[i]", "return self.x[i] / (i != 3), self.y[i]"), 4, "sample 3", "nothing"),
        (("loss = nn.functional", "missing_name\n        loss = nn.functional"), 2, "missing_name", "data"),
    ],
    ids=["data", "code"],
)
def test_what_is_wrong_ends_it_with_the_exit_code_of_a_real_run(project, change, code, words, proven):
    task = project.folder / "task.py"
    assert change[0] in task.read_text()
    task.write_text(task.read_text().replace(*change))
    done = project.launch(flags=["--trial"])
    assert done.code == code, done.all
    assert words in done.err
    assert f"proven so far: {proven}" in done.out
    assert "rung:" in done.err
    assert left(project) == {"task.py", "job.yaml"}
