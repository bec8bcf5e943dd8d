"""`rung launch` as a user meets it: real command, real workers."""

import json
import re
import shutil
import subprocess

import pytest
from support import Project, same_bits

pytestmark = pytest.mark.slow


def test_a_job_trains_to_its_end_and_leaves_everything_in_its_run_folder(project):
    done = project.launch("validation.every=4 steps")
    assert done.code == 0, done.all
    assert "plan       single, 1 x cpu, batch 8 = 1 x 8 x 1, fp32" in done.out
    assert "done       step 12" in done.out
    assert project.checkpoints() == ["step-000000012"]
    run = project.folder / "run"
    assert {"job.json", "events.jsonl", "metrics.jsonl", "tensorboard", "plans", "logs"} <= {
        p.name for p in run.iterdir()
    }
    steps = project.metrics()
    assert sorted(steps) == list(range(1, 13))
    assert steps[12]["loss"] < steps[1]["loss"]
    validations = [json.loads(x) for x in (run / "metrics.jsonl").read_text().splitlines() if "validation" in x]
    assert [v["step"] for v in validations] == [4, 8, 12]
    assert list((run / "tensorboard").iterdir())
    told = re.search(r"memory predicted (\S+ \S+), measured (\S+ \S+) \(", done.out)
    assert told, done.out
    [seen] = [json.loads(x) for x in next((project.folder / ".cache/rung/calibration").iterdir()).open()]
    assert told[1] == f"{seen['predicted_bytes'] / 2**20:.0f} MiB"
    assert told[2] == f"{seen['measured_bytes'] / 2**20:.0f} MiB"


def test_a_dry_run_shows_the_plan_and_makes_nothing(project):
    done = project.launch(flags=["--dry-run"])
    assert done.code == 0
    assert "plan       single" in done.out
    assert not (project.folder / "run").exists()


def test_resuming_gives_the_same_bits_as_never_stopping(project):
    sets = ["task_args={dropout: 0.3}", "schedule=constant"]
    assert project.launch(*sets, "run=whole").code == 0
    assert project.launch(*sets, "steps=5").code == 0
    again = project.launch(*sets)
    assert again.code == 0, again.all
    assert "resume     step 5, epoch 0, sample 40" in again.out
    assert same_bits(project.weights("whole"), project.weights("run")) == []


def test_a_finished_run_is_not_trained_again(project):
    assert project.launch().code == 0
    before = project.weights()
    done = project.launch()
    assert done.code == 0
    assert "resume     step 12" in done.out
    assert same_bits(before, project.weights()) == []


def test_a_changed_job_is_refused_naming_the_field_unless_forced(project):
    assert project.launch("steps=3").code == 0
    refused = project.launch("batch=16")
    assert refused.code == 2
    assert "batch" in refused.err
    assert "--force" in refused.err
    assert project.launch("batch=16", flags=["--force"]).code == 0


def test_the_task_is_found_from_another_folder_and_in_a_path_with_spaces(tmp_path):
    project = Project(tmp_path / "my project")
    done = project.launch(f"run={tmp_path / 'my run'}", "steps=2")
    assert done.code == 0, done.all
    shutil.rmtree(tmp_path / "my run")
    command = [*project.command(f"run={tmp_path / 'my run'}", "steps=2")]
    command[command.index("job.yaml")] = str(project.folder / "job.yaml")
    assert subprocess.run(command, cwd="/", timeout=100, capture_output=True, check=False).returncode == 0


def test_files_of_the_user_with_our_names_do_no_harm(project):
    (project.folder / "launcher.py").write_text("raise SystemExit('the user own launcher.py was run')\n")
    for package in ("cluster", "strategies"):
        (project.folder / package).mkdir()
        (project.folder / package / "__init__.py").write_text("raise SystemExit('the user own package was run')\n")
    done = project.launch("steps=2")
    assert done.code == 0, done.all


def test_nan_stops_with_exit_4_naming_step_samples_and_cause(project):
    done = project.launch("task_args={nan_after: 10}", "steps=30")
    assert done.code == 4, done.all
    assert "the loss is NaN at step" in done.err
    assert "samples" in done.err
    assert "likely cause" in done.err
    assert "Traceback" not in done.all


def test_badly_normalised_data_is_named_as_such(project):
    done = project.launch("task_args={scale: 1.0e+30}")
    assert done.code == 4, done.all
    assert "normalis" in done.err


def test_a_negative_loss_stops_unless_it_is_allowed(project):
    done = project.launch("task_args={negative: true}")
    assert done.code == 4
    assert "negative" in done.err
    assert project.launch("task_args={negative: true}", "guard.negative_loss=allow", "run=other").code == 0


def test_a_late_nan_never_reaches_the_weights(project):
    done = project.launch("task_args={nan_after: 15}", "steps=20", "guard.first_steps=5")
    # ten samples take calls too, so the NaN begins somewhat before step 15; from there on every step is skipped
    assert "skipped, the weights are as before" in done.all
    assert all(t.isfinite().all() for t in project.weights().values())


def test_an_error_in_the_task_shows_the_users_traceback_and_nothing_of_ours(project):
    task = (project.folder / "task.py").read_text()
    (project.folder / "task.py").write_text(
        task.replace("loss = nn.functional", "missing_name\n        loss = nn.functional")
    )
    done = project.launch()
    assert done.code == 2, done.all
    assert "NameError" in done.err
    assert "missing_name" in done.err
    assert "train.py" not in done.all


@pytest.mark.parametrize("devices", [2, 3])
def test_several_processes_give_the_same_training(project, devices):
    assert project.launch("run=one").code == 0
    done = project.launch("run=many", f"devices.count={devices}")
    assert done.code == 0, done.all
    one, many = project.weights("one"), project.weights("many")
    assert one.keys() == many.keys()
    for name in one:
        assert one[name].allclose(many[name], rtol=1e-4, atol=1e-6), name
