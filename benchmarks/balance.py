"""Unequal devices: a balanced group against the sum of its devices' own speeds, and against equal shares.

    python -m benchmarks.balance [half | quota] [rounds]

half: two workers, each on a core of its own, one of which a burner process shares. quota: three workers whose control
groups give them 1/5, 2/5 and 4/5 of a core (needs to be root; nothing else makes devices 1 : 2 : 4 of two cores). Each
round measures the devices as single workers apart, then the group with equal shares, then the group with
`devices.balance: on`, by the wall clock of its steps. Prints samples per second, and the median of the ratios over all
rounds.
"""

import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TASK = '''
import os
import time
import torch
from torch import nn
from torch.utils.data import TensorDataset


class Heavy:
    """Much compute for each sample, few weights. Each worker goes to the core and control group of its place."""

    def model(self):
        place = int(os.environ.get("PLACE", os.environ.get("RANK", "0")))
        os.sched_setaffinity(0, {int(os.environ["CORES"].split(",")[place])})
        torch.set_num_threads(1)
        if groups := os.environ.get("GROUPS"):
            with open(groups.split(",")[place] + "/cgroup.procs", "w") as file:
                file.write(str(os.getpid()))
        self.place, self.calls = place, 0
        shared = nn.Linear(256, 256)
        return nn.Sequential(*(m for _ in range(8) for m in (shared, nn.GELU())))

    def dataset(self, split):
        if split == "train":
            return TensorDataset(torch.randn(840, 48, 256, generator=torch.Generator().manual_seed(0)))
        return None

    def loss(self, model, batch):
        self.calls += 1
        if self.calls == 7 and "MEET" in os.environ:  # those that are measured apart begin together
            folder = os.environ["MEET"]
            open(f"{folder}/{self.place}", "w").close()
            until = time.monotonic() + 30
            while len(os.listdir(folder)) < len(os.environ["CORES"].split(",")) and time.monotonic() < until:
                time.sleep(0.01)
        return (model(batch[0]) - batch[0]).square().mean()
'''
JOB = {
    "task": "task:Heavy", "data": {"workers": 0}, "checkpoint": {"every": "none"}, "log_every_s": 1000,
    "schedule": "constant", "fallback": {"enabled": False},
}  # fmt: skip
PERIOD_US = 5_000


def run(folder: Path, env: dict[str, str], *, place: int | None = None, batch: int, steps: int, **devices: object):
    """Trains, and returns the seconds of each step and the shares it ended with ("" if they stayed equal)."""
    name = tempfile.mkdtemp(dir=folder)
    strategy = "ddp" if place is None else "single"
    job = {**JOB, "run": name, "batch": batch, "steps": steps, "strategy": strategy, "devices": devices}
    (folder / "job.yaml").write_text(json.dumps(job))
    env = {**os.environ, **env, "OMP_NUM_THREADS": "1", **({} if place is None else {"PLACE": str(place)})}
    command = [sys.executable, "-c", "from rung.launcher.cli import main; main()", "launch", "job.yaml"]
    subprocess.run(command, cwd=folder, env=env, check=True, stdout=subprocess.DEVNULL, timeout=280)
    rows = [json.loads(line) for line in (Path(name) / "metrics.jsonl").read_text().splitlines()]
    events = [json.loads(line) for line in (Path(name) / "events.jsonl").read_text().splitlines()]
    notes = [e["text"] for e in events if e["event"] == "note" and e["text"].startswith("balance:")]
    seconds = [row["seconds"] for row in rows if row["kind"] == "step"]
    return seconds, [re.sub(r";.*", "", note) for note in notes]


def speed(batch: int, seconds: list[float]) -> float:
    """Samples a second over these steps."""
    return batch * len(seconds) / sum(seconds)


def apart(folder: Path, env: dict[str, str], batch: int, steps: list[int]) -> list[float]:
    """Speeds of single workers that know nothing of each other, all at the same time, since cores share caches and,
    as hyperthreads, their units: a core beside an idle one is faster than it can be in a group."""
    env = {**env, "MEET": tempfile.mkdtemp(dir=folder)}
    homes = [folder / f"apart-{place}" for place in range(len(steps))]
    for home in homes:
        home.mkdir(exist_ok=True)
        (home / "task.py").write_text(TASK)
    with ThreadPoolExecutor(len(steps)) as pool:
        runs = [
            pool.submit(run, home, env, place=place, batch=batch, steps=10 + many, count=1)
            for place, (home, many) in enumerate(zip(homes, steps, strict=True))
        ]
        return [speed(batch, one.result()[0][7:]) for one in runs]


def rounds_of(folder: Path, env: dict[str, str], parts: list[float], batch: int, rounds: int) -> None:
    """Measures and prints. `parts`: what each device has of a core."""
    ranks = len(parts)
    balanced, even = [], []
    for _ in range(rounds):
        alone = apart(folder, env, batch // ranks, [int(40 * part / max(parts)) for part in parts])
        seconds, _ = run(folder, env, batch=batch, steps=16, count=ranks, balance=False)
        equal = speed(batch, seconds[4:])
        seconds, notes = run(folder, env, batch=batch, steps=90, count=ranks, balance=True)
        shared = speed(batch, seconds[50:])
        balanced.append(shared / sum(alone))
        even.append(equal / sum(alone))
        print(f"apart {', '.join(f'{s:.1f}' for s in alone)} samples/s, in sum {sum(alone):.1f}; equal shares "
              f"{equal:.1f} ({even[-1]:.0%}); balanced {shared:.1f} ({balanced[-1]:.1%})", flush=True)  # fmt: skip
        print("  " + "\n  ".join(notes), flush=True)
    print(
        f"balanced / sum of the separate speeds: median {statistics.median(balanced):.3f} of "
        f"{[round(r, 3) for r in sorted(balanced)]}, wanted 0.95; equal shares: {statistics.median(even):.3f}"
    )


@contextlib.contextmanager
def burner(core: int) -> Iterator[None]:
    """A process that uses all of a core that it can get."""
    code = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        yield
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def quotas(parts: list[float]) -> Iterator[list[str]]:
    """Control groups that give so many parts of a core. Raises OSError where that is not allowed."""
    old = Path("/sys/fs/cgroup/cpu")
    root = old if old.exists() else Path("/sys/fs/cgroup")
    made = []
    try:
        for number, part in enumerate(parts):
            group = root / f"rung-balance-{os.getpid()}-{number}"
            group.mkdir()
            made.append(group)
            quota = str(int(part * PERIOD_US))
            if root == old:
                (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (group / "cpu.cfs_quota_us").write_text(quota)
            else:
                (group / "cpu.max").write_text(f"{quota} {PERIOD_US}")
        yield [str(group) for group in made]
    finally:
        for group in made:
            group.rmdir()


def main(arguments: list[str]) -> int:
    """Runs the cases that are asked for, or both."""
    cases = [a for a in arguments if a in ("half", "quota")] or ["half", "quota"]
    rounds = next((int(a) for a in arguments if a.isdigit()), 2)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        print("two cores are needed", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "task.py").write_text(TASK)
        if "half" in cases:
            print(f"half: rank 0 on core {cores[0]}; rank 1 on core {cores[1]}, beside a burner", flush=True)
            with burner(cores[1]):
                rounds_of(folder, {"CORES": f"{cores[0]},{cores[1]}"}, [1.0, 0.5], 210, rounds)
        if "quota" in cases:
            print("quota: 1/5, 2/5 and 4/5 of a core, by control groups", flush=True)
            try:
                parts = [0.2, 0.4, 0.8]
                with quotas(parts) as groups:
                    env = {"CORES": f"{cores[1]},{cores[1]},{cores[0]}", "GROUPS": ",".join(groups)}
                    rounds_of(folder, env, parts, 420, rounds)
            except OSError as error:
                print(f"not measured: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
