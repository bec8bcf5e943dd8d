"""kill -9 at 200 random moments around saving: of the launcher and its workers, or of only one of them.

Each seed is one run that is killed 20 times and launched again after each; its last weights must be the bits of a run
that nobody disturbed, and at no moment may its newest checkpoint be damaged or older than it was.
"""

import random
import re
import signal
import time
from collections import Counter
from contextlib import suppress

import psutil
import pytest
from support import same_bits

from rung.launcher.checkpoint.find import newest_valid
from rung.launcher.storage import Store

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

SEEDS, KILLS = 10, 20
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def job_of(seed):
    """What differs from seed to seed: how large the state is, how often it is saved, who trains."""
    width = (16, 40_000)[seed % 2]
    sets = [f"task_args={{dropout: 0.2, sleep_s: 0.01, width: {width}}}", "steps=260", "fallback=off",
            f"checkpoint.every={1 + seed % 3} steps"]  # fmt: skip
    return [*sets, "devices.count=2", "strategy.name=ddp"] if seed >= 7 else [*sets, "devices.count=1"]


class Killed:
    """One run, and what was done to it."""

    def __init__(self, project, sets, rng):
        self.project, self.sets, self.rng = project, sets, rng
        self.store = Store.open(str(project.folder / "run"))
        self.done, self.codes = Counter(), Counter()
        self.newest = 0
        self.process = None

    def folders(self):
        top = self.project.folder / "run/checkpoints"
        return {path.name for path in top.iterdir()} if top.exists() else set()

    def launch(self):
        """Starts the run again, after seeing that what the kill left can be used."""
        manifest, rejected = newest_valid(self.store)
        assert rejected == []
        step = manifest.step if manifest is not None else 0
        assert step >= self.newest, f"step {self.newest} was saved, the newest checkpoint is of {step}"
        self.newest = step
        self.process = self.project.start(*self.sets, env=ONE_THREAD)

    def wait_for_a_save(self):
        """Until a save begins; false if the launch ends before it."""
        before = self.folders()
        until = time.monotonic() + 100
        while self.process.poll() is None and time.monotonic() < until:
            if self.folders() - before:
                return True
            time.sleep(0.0005)
        assert self.process.poll() is not None, "nothing was saved for 100 s"
        return False

    def strike(self):
        """Kills at a moment around a save; the launch may go on if only a worker died."""
        for _ in range(self.rng.randint(1, 3)):
            if not self.wait_for_a_save():
                return
        time.sleep(self.rng.choice((0.002, 0.01, 0.03, 0.1)) * self.rng.random())
        try:
            family = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return
        how = self.rng.choice(("all", "all", "launcher", "one"))
        launcher = psutil.Process(self.process.pid)
        victims = {"all": [launcher, *family], "launcher": [launcher], "one": family and [self.rng.choice(family)]}[how]
        self.rng.shuffle(victims)
        for each in victims:
            with suppress(psutil.NoSuchProcess):
                each.send_signal(signal.SIGKILL)
        if victims:
            self.done[how] += 1

    def collect(self):
        """What the launch that has ended said."""
        said, _ = self.process.communicate(timeout=60)
        self.codes[self.process.returncode] += 1
        assert "Traceback" not in said, said
        assert self.process.returncode in (-signal.SIGKILL, 5), said
        if self.newest:
            assert int(re.search(r"resume +step ([\d,]+)", said)[1].replace(",", "")) >= self.newest, said


@pytest.mark.parametrize("seed", range(SEEDS))
def test_killed_around_saving_a_run_ends_with_the_same_bits(project, seed):
    sets, rng = job_of(seed), random.Random(seed)
    run = Killed(project, sets, rng)
    run.launch()
    try:
        while run.done.total() < KILLS:
            if run.process.poll() is not None:
                run.collect()
                run.launch()
            run.strike()
            if run.process.poll() is None and rng.random() < 0.5:
                time.sleep(0.2)  # or not: then the next launch meets workers that have not noticed yet
        if run.process.poll() is None:
            run.process.communicate(timeout=100)
        if run.process.returncode != 0:
            done = project.launch(*sets, env=ONE_THREAD)
            assert done.code == 0, done.all
    finally:
        if run.process.poll() is None:
            run.process.kill()
    assert project.launch(*sets, "run=whole", env=ONE_THREAD).code == 0
    assert same_bits(project.weights("whole"), project.weights()) == []
    print(f"seed {seed}: {dict(run.done)} kills, launches ended with {dict(run.codes)}")
