"""What a whole launch does when somebody takes its store away under its hands."""

import os
import re
import shutil
import subprocess
import time

import pytest
from support import environment, same_bits

pytestmark = pytest.mark.slow
SETS = ["task_args={sleep_s: 0.03}", "steps=60", "schedule=constant", "checkpoint.every=2 steps"]
NOBODY = 65534


def wait_for_checkpoints(project, process, count=2):
    until = time.monotonic() + 90
    while len(project.checkpoints()) < count:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a launch as somebody who may not write everywhere")
def test_a_permission_that_is_taken_away_ends_with_exit_6_and_the_state_elsewhere(project, tmp_path):
    for folder in (project.folder, *project.folder.parents[:3]):
        folder.chmod(0o755)
    for path in (project.folder, *project.folder.rglob("*")):
        os.chown(path, NOBODY, NOBODY)
    process = subprocess.Popen(
        project.command(*SETS), cwd=project.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=environment(project.folder, {"HOME": str(project.folder), "OMP_NUM_THREADS": "1"}), user=NOBODY,
        group=NOBODY, extra_groups=[], start_new_session=True,
    )  # fmt: skip
    wait_for_checkpoints(project, process)
    (project.folder / "run/checkpoints").chmod(0o555)
    said, _ = process.communicate(timeout=100)
    (project.folder / "run/checkpoints").chmod(0o755)
    assert process.returncode == 6, said
    assert "access is denied" in said
    assert "Traceback" not in said
    elsewhere = re.search(r"is saved in (\S+)", said)[1]
    assert project.launch(*SETS, "run=whole").code == 0
    again = project.launch(*SETS, f"run={elsewhere}")
    assert again.code == 0, again.all
    assert "resume     step" in again.out
    assert same_bits(project.weights("whole"), project.weights(elsewhere)) == []
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
