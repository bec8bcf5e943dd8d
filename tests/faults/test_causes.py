"""Each cause of a failure, made for real in a whole run, gets the answer that it deserves."""

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from support import Done, environment, same_bits

pytestmark = pytest.mark.slow

DATA = """
import os
import sys

import torch
from torch import nn


class Padded(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, i):
        here = torch.utils.data.get_worker_info() is not None or PARENT != os.getpid()
        if here and i == 5 and not os.path.exists("failed-once"):
            open("failed-once", "w").close()
            HOW()
        generator = torch.Generator().manual_seed(i)
        return torch.randn(8, generator=generator), torch.zeros(KIB * 256), torch.tensor([i / 32])


def nothing():
    pass


def hoard():
    bytearray(1 << 60)


PARENT, KIB, HOW = os.getpid(), 1, nothing


class Task:
    def model(self):
        return nn.Linear(8, 1)

    def dataset(self, split):
        return Padded() if split == "train" else None

    def loss(self, model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[2])
"""
SETS = ["task=task:Task", "steps=8", "schedule=constant", "checkpoint.every=2 steps"]


def write(project, **names):
    """The task above with other values for PARENT, KIB or HOW."""
    values = {"PARENT": "os.getpid()", "KIB": "1", "HOW": "nothing", **{k: str(v) for k, v in names.items()}}
    line = f"PARENT, KIB, HOW = {values['PARENT']}, {values['KIB']}, {values['HOW']}"
    (project.folder / "task.py").write_text(DATA.replace("PARENT, KIB, HOW = os.getpid(), 1, nothing", line))


def run(project, command, timeout=110):
    done = subprocess.run(
        command, cwd=project.folder, capture_output=True, text=True, timeout=timeout, env=environment(project.folder)
    )
    return Done(done.returncode, done.stdout, done.stderr)


def causes(project):
    return [e["cause"] for e in project.events() if e["event"] == "outcome" and e["cause"]]


def test_shared_memory_that_is_full_is_done_without(project):
    write(project, KIB=1024)
    # A batch of 8 MiB does not fit.
    shell = 'mount -t tmpfs -o size=6m tmpfs /dev/shm && exec "$@"'
    tried = subprocess.run(["unshare", "-m", "sh", "-c", shell, "sh", "true"], capture_output=True, check=False)
    if tried.returncode != 0:
        pytest.skip("a mount namespace of its own is not permitted here")
    sets = [*SETS, "data.workers=2", "strategy.name=single"]
    done = run(project, ["unshare", "-m", "sh", "-c", shell, "sh", *project.command(*sets)])
    assert done.code == 0, done.all
    assert "shared memory (/dev/shm) is full: loader workers are given up" in done.out
    assert "fallback" not in done.out, "a smaller plan would not help"
    assert project.launch(*sets, "run=whole").code == 0
    assert same_bits(project.weights("whole"), project.weights()) == []


@pytest.mark.soak
def test_a_loader_worker_that_cannot_allocate_is_memory_and_no_broken_sample(project):
    write(project, HOW="hoard")
    done = project.launch(*SETS, "data.workers=2", "devices.count=1")
    assert done.code == 0, done.all
    assert "fallback" in done.out
    assert "out of" in done.out


@pytest.fixture
def group_of_little_memory():
    """A control group whose processes the kernel kills beyond 1200 MiB."""
    folder = Path(f"/sys/fs/cgroup/memory/rung-test-{os.getpid()}")
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(1200 << 20))
    except OSError:
        pytest.skip("making a memory control group is not permitted here")
    yield folder
    folder.rmdir()


def inside(group, command):
    return ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh", *command]


def test_before_the_kernel_kills_loader_workers_are_cut_back_and_it_is_said(project, group_of_little_memory):
    write(project)
    task = project.folder / "task.py"
    fill = f"""
        if model.training and not hasattr(self, "ballast") and os.path.exists("run/checkpoints"):
            group = "{group_of_little_memory}/memory."
            limit, used = (int(open(group + f).read()) for f in ("limit_in_bytes", "usage_in_bytes"))
            stat = dict(line.split() for line in open(group + "stat"))
            used -= int(stat["total_inactive_file"]) + int(stat["total_active_file"])
            self.ballast = torch.ones((int(0.95 * limit) - used) // 4)
        import time
        time.sleep(0.05)
        return nn.fun"""
    task.write_text(task.read_text().replace("\n        return nn.fun", fill))
    sets = ["task=task:Task", "steps=120", "checkpoint.every=5 steps", "data.workers=2", "strategy.name=single"]
    done = run(project, inside(group_of_little_memory, project.command(*sets)))
    assert done.code == 0, done.all
    assert "host memory is nearly full" in done.out
    assert "loader workers are cut back from 2 to 1" in done.out
    assert "fallback" not in done.out


def test_a_worker_that_the_kernel_kills_for_memory_is_told_from_any_other_kill(project, group_of_little_memory):
    sets = ["devices.count=2", "strategy.name=ddp", "steps=12", "task_args={fail: [1, 9, memory]}"]
    done = run(project, inside(group_of_little_memory, project.command(*sets)))
    assert done.code == 0, done.all
    assert causes(project) == ["host_oom"]
    [told] = [event["explanation"] for event in project.events() if event["event"] == "fallback"]
    assert "the kernel killed it because host memory ran out (it counts 1 such kill" in told
    assert "host memory before the end:" in told  # and who held it
    assert "rank-1.log" in told
    assert "out of host memory" in done.out
    assert "no step is lost" in done.out


@pytest.mark.parametrize("late", [False, True], ids=["at the start", "in the middle"])
def test_a_package_that_is_missing_ends_it_at_once_and_is_named(project, late):
    write(project)
    task = project.folder / "task.py"
    text = task.read_text()
    if late:
        body = (
            "        if os.path.exists('run/checkpoints'):\n            import not_there_at_all\n        return nn.fun"
        )
        text = text.replace("        return nn.fun", body)
    else:
        text = "import not_there_at_all\n" + text
    task.write_text(text)
    done = project.launch(*SETS, "strategy.name=single")
    assert done.code == 2, done.all
    assert "No module named 'not_there_at_all'" in done.all
    assert "fallback" not in done.out
    assert not late or causes(project) == ["dependency"]


@pytest.mark.soak
def test_a_stopped_worker_is_a_hung_one(project):
    """SIGSTOP: nothing of it answers, no thread, no stack."""
    sets = ["devices.count=2", "strategy.name=ddp", "steps=60", "task_args={sleep_s: 0.05}", "hang_s=3"]
    process = project.start(*sets)
    try:
        until = time.monotonic() + 60
        while not ((project.folder / "run/metrics.jsonl").exists() and project.metrics()):
            assert time.monotonic() < until
            time.sleep(0.05)
        [nursery] = psutil.Process(process.pid).children()
        os.kill(nursery.children()[1].pid, signal.SIGSTOP)
        out, _ = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 0, out
    assert "rank 1 hung" in out
    assert "no step is lost" in out
