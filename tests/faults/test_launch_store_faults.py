"""What a whole launch does when somebody takes its store away under its hands."""

import re
import shutil
import subprocess
import time

import pytest

pytestmark = pytest.mark.slow
SETS = ["task_args={sleep_s: 0.03}", "steps=60", "schedule=constant", "checkpoint.every=2 steps"]


def wait_for_checkpoints(project, process, count=2):
    until = time.monotonic() + 90
    while len(project.checkpoints()) < count:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_permission_that_is_taken_away_ends_with_exit_6_and_the_state_elsewhere(project):
    process = project.start(*SETS, env={"OMP_NUM_THREADS": "1"})
    wait_for_checkpoints(project, process)
    folder = project.folder / "run/checkpoints"
    # Root may write anywhere but into a folder that may not be changed.
    denied = subprocess.run(["chattr", "+i", str(folder)], capture_output=True, check=False)
    if denied.returncode:
        process.kill()
        process.communicate(timeout=60)
        pytest.skip("this file system has no folders that may not be changed")
    try:
        said, _ = process.communicate(timeout=100)
    finally:
        subprocess.run(["chattr", "-i", str(folder)], check=True)
    assert process.returncode == 6, said
    assert "access is denied" in said
    assert "Traceback" not in said
    elsewhere = re.search(r"is saved in (\S+)", said)[1]
    again = project.launch(*SETS, f"run={elsewhere}")
    assert again.code == 0, again.all
    assert "resume     step" in again.out
    shutil.rmtree(elsewhere)


def test_checkpoints_deleted_while_it_trains_are_saved_again(project):
    process = project.start(*SETS, env={"OMP_NUM_THREADS": "1"})
    wait_for_checkpoints(project, process)
    shutil.rmtree(project.folder / "run/checkpoints", ignore_errors=True)
    said, _ = process.communicate(timeout=100)
    assert "Traceback" not in said
    assert process.returncode in (0, 6), said
    if process.returncode == 6:  # it was writing at that moment
        assert "saved in" in said
        assert project.launch(*SETS).code == 0
    assert project.checkpoints()[-1] == "step-000000060"
