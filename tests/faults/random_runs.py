"""Runs of `fit_task.py` that are watched from outside: they end in time, leave no process, and their weights tell how
often each sample was learnt from."""

import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import torch
from support import Done, Project, environment

from rung.launcher.data.order import Order

SAMPLES = 52
BATCH = 16


class Watched(Project):
    """A project whose task is `fit_task.py`. `seen` are all processes that any of its commands had."""

    def __init__(self, folder):
        super().__init__(folder)
        shutil.copy(Path(__file__).with_name("fit_task.py"), folder / "task.py")
        (folder / "job.yaml").write_text(
            f"task: task:Fit\nrun: run\nbatch: {BATCH}\nclip: null\nlog_every_s: 0.1\n"
            "schedule: {name: constant, warmup: 0}\nguard: {negative_loss: allow}\ndata: {workers: 0}\n"
        )
        self.seen = set()

    def watch(self, *sets, deadline_s=240.0):
        """Runs a launch to its end. A launch that takes longer than its deadline hangs, and fails the test."""
        log = self.folder / "launch.log"
        with log.open("w") as file:
            process = subprocess.Popen(
                self.command(*sets), cwd=self.folder, stdout=file, stderr=subprocess.STDOUT,
                env=environment(self.folder), start_new_session=True,
            )  # fmt: skip
        until = time.monotonic() + deadline_s
        while process.poll() is None:
            self._look(process.pid)
            if time.monotonic() > until:
                process.send_signal(signal.SIGQUIT)
                self._end(process)
                raise AssertionError(f"no end within {deadline_s:g} s:\n{log.read_text()[-4000:]}")
            time.sleep(0.05)
        self._nothing_left()
        return Done(process.returncode, log.read_text(), "")

    def _look(self, pid):
        try:
            self.seen |= {(p.pid, p.create_time()) for p in psutil.Process(pid).children(recursive=True)}
        except psutil.NoSuchProcess:
            return

    def _end(self, process):
        process.kill()
        for pid, created in self.seen:
            if _lives(pid, created):
                os.kill(pid, signal.SIGKILL)
        process.wait()

    def _nothing_left(self):
        until = time.monotonic() + 20.0
        while left := [pid for pid, created in self.seen if _lives(pid, created)]:
            assert time.monotonic() < until, f"orphans: {left}"
            time.sleep(0.05)


def _lives(pid, created):
    try:
        process = psutil.Process(pid)
        return process.create_time() == created and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def learnt(steps, optimizer, *, samples=SAMPLES, seed=0):
    """What `Learnt.seen` is after so many steps over the order of the job, each sample as often as it comes there."""
    weight = torch.nn.Parameter(torch.zeros(samples))
    made = optimizer([weight])
    order, epoch, position = Order(samples, seed), 0, 0
    for _ in range(steps):
        count = min(BATCH, samples - position)
        index = torch.from_numpy(order.indices(epoch, position, count))
        weight.grad = torch.bincount(index, minlength=samples).float() / count
        made.step()
        position += count
        if position == samples:
            epoch, position = epoch + 1, 0
    return weight.detach()


def differing(one, other, *, rtol=2e-4, atol=2e-6):
    """Names of weights that differ by more than float32 rounding, and by how much."""
    assert one.keys() == other.keys()
    return {
        name: float((one[name] - other[name]).abs().max())
        for name in one
        if not torch.allclose(one[name], other[name], rtol=rtol, atol=atol)
    }


def model_of(project, run="run"):
    """The weights of the newest checkpoint."""
    return {n.removeprefix("model/"): w for n, w in project.weights(run).items() if n.startswith("model/")}


def rng(seed):
    """A generator of its own for each case."""
    return random.Random(f"rung {seed}")
