"""`rung plan`, and what it learns from runs."""

import json
import subprocess

import pytest
from support import RUNG, environment

from rung.launcher import calibrations
from rung.launcher.job import Job
from rung.launcher.profiling import digest_of
from rung.strategies.calibration import Seen


def test_predictions_are_corrected_only_after_a_few_runs_and_only_upwards(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for n in range(3):
        assert calibrations.factors_for("abc").runs == 0, n
        calibrations.remember("abc", Seen(predicted_bytes=100, measured_bytes=130, predicted_s=1.0, measured_s=2.0))
    assert (calibrations.factors_for("abc").device_bytes, calibrations.factors_for("abc").time) == (30, 2.0)
    for _ in range(9):
        calibrations.remember("abc", Seen(predicted_bytes=100, measured_bytes=10))
    assert calibrations.factors_for("abc").device_bytes == 0
    assert calibrations.factors_for("other").runs == 0


def test_a_cut_off_calibration_file_costs_only_the_broken_line(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for _ in range(4):
        calibrations.remember("abc", Seen(predicted_bytes=100, measured_bytes=130))
    file = next(tmp_path.rglob("abc.jsonl"))
    file.write_bytes(file.read_bytes()[:-9] + b"\xff")
    assert calibrations.factors_for("abc").runs == 3


def plan(project, *arguments):
    command = [*RUNG, "plan", "job.yaml", *arguments]
    return subprocess.run(
        command,
        cwd=project.folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=environment(project.folder),
    )


def test_a_profile_is_made_anew_when_the_task_or_a_module_beside_it_changes_wherever_it_lies(tmp_path, monkeypatch):
    beside, elsewhere = tmp_path / "job", tmp_path / "code"
    for folder in (beside, elsewhere):
        folder.mkdir()
    monkeypatch.chdir(elsewhere)
    job = Job.from_dict({"task": "far_task:T", "run": "run", "batch": 4, "steps": 1}, source=beside / "job.yaml")
    (elsewhere / "far_task.py").write_text("import far_helper\n")
    (elsewhere / "far_helper.py").write_text("width = 4\n")
    seen = [digest_of(job, "fp32"), digest_of(job, "fp32")]
    (elsewhere / "far_helper.py").write_text("width = 8\n")
    seen.append(digest_of(job, "fp32"))
    (elsewhere / "far_task.py").write_text("import far_helper  # more\n")
    seen.append(digest_of(job, "fp32"))
    assert seen[0] == seen[1]
    assert len(set(seen)) == 3


@pytest.mark.slow
def test_the_table_marks_the_choice_and_gives_reasons_and_starts_nothing(project):
    done = plan(project)
    assert done.returncode == 0, done.stderr
    chosen = [line for line in done.stdout.splitlines() if line.startswith("->")]
    assert len(chosen) == 1
    assert "single" in chosen[0]
    assert "fastest that fits" in done.stdout
    assert not (project.folder / "run").exists()


@pytest.mark.slow
def test_json_holds_every_plan_with_its_account(project):
    done = plan(project, "--json")
    found = json.loads(done.stdout)
    assert {p["plan"]["strategy"] for p in found["plans"]} >= {"single", "ddp", "zero3"}
    assert all(p["items"] for p in found["plans"])
    assert all(r["reason"] for r in found["rejected"])


@pytest.mark.slow
def test_what_fits_nowhere_exits_3_and_names_the_nearest_rung(project):
    done = plan(project, "--set", "devices.memory=1 MiB")
    assert done.returncode == 3
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_machines_that_are_not_here_can_be_planned_for(project):
    file = project.folder / "machines.yaml"
    file.write_text("nodes: 4\ndevices: 8 x H100-80G\nlink: nvlink4\nnetwork: 400Gb/s\n")
    done = plan(project, "--hardware", "machines.yaml", "--set", "batch=64")
    assert done.returncode == 0, done.stderr
    assert "32 x cuda" in done.stdout or "8 x cuda" in done.stdout


@pytest.mark.slow
def test_a_task_that_reads_values_is_measured_instead_of_traced(project):
    task = (project.folder / "task.py").read_text()
    reading = task.replace("        loss = nn.functional", "        batch[1].tolist()\n        loss = nn.functional")
    (project.folder / "task.py").write_text(reading)
    done = plan(project)
    assert done.returncode == 0, done.stderr
    assert "measured in a throw-away process" in done.stdout
