"""From a command to the first line of user code, and from a failure to the next one, beside torchrun.

Run: python benchmarks/start.py [repeats]

Both sides do the same: two processes meet over gloo and reduce one number. Measured by the wall clock of a fresh
command, in turns, so that a busy machine is as unkind to the one as to the other.
"""

import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

WORLD = 2
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}

REDUCE = """
def reduce(store, rank, world):
    import torch, torch.distributed as dist
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    value = torch.ones(1)
    dist.all_reduce(value)
    assert value.item() == world

def again(world):
    import torch, torch.distributed as dist
    dist.all_reduce(torch.ones(1))
"""

OURS = (
    REDUCE
    + """
import time

def first_line(link, payload):
    link.send(time.time())

def reduced(link, payload):
    reduce(link.store(60.0), link.rank, link.world)
    link.send(time.time())

def fails_once(link, payload):
    reduce(link.store(60.0), link.rank, link.world)
    link.send(time.time())
    if payload == 0:
        if link.rank == 1:
            raise RuntimeError("on purpose")
        again(link.world)
"""
)

LAUNCH = """
import sys, time
from pathlib import Path
from rung.cluster.local import Message, Workers, WorkerSpec, cool, warm

sys.path.insert(0, {folder!r})
warm(["torch", "torch.distributed"], {{"OMP_NUM_THREADS": "1"}})
times = []
for attempt in range({attempts}):
    specs = [
        WorkerSpec(rank=r, payload=attempt, log=Path({folder!r}) / f"{{r}}.log") for r in range({world})
    ]
    with Workers.start("bodies:{body}", specs) as workers:
        while workers.alive and not any(end.failure for end in workers.ends):
            times += [(attempt, e.rank, e.value) for e in workers.poll(1.0) if isinstance(e, Message)]
        times += [(attempt, e.rank, e.value) for e in workers.poll() if isinstance(e, Message)]
        workers.stop(0.0)
cool()
print(max(t for a, _, t in times if a == {attempts} - 1))
print(*[t for a, r, t in times if a == 0 and r == 1])
"""

THEIRS = (
    REDUCE
    + """
import os, sys, time
import torch.distributed as dist
dist.init_process_group("gloo")
import torch
value = torch.ones(1)
dist.all_reduce(value)
dist.barrier()
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
with open(os.path.join(os.path.dirname(__file__), f"times-{attempt}-{rank}"), "w") as file:
    file.write(str(time.time()))
if "fail" in sys.argv and attempt == 0:
    if rank == 1:
        raise RuntimeError("on purpose")
    dist.all_reduce(value)
dist.destroy_process_group()
"""
)


def ours(folder: Path, body: str, *, world: int = WORLD, attempts: int = 1) -> tuple[float, float]:
    """(moment of the last message of the last attempt, moment when rank 1 of the first one failed)."""
    code = LAUNCH.format(folder=str(folder), body=body, world=world, attempts=attempts)
    done = subprocess.run(
        [sys.executable, "-c", code], env=ENV, check=True, capture_output=True, text=True, timeout=120
    )
    last, *failed = map(float, done.stdout.split())
    return last, failed[-1] if failed else last


def torchrun(folder: Path, *arguments: str) -> tuple[float, float]:
    """The same of torchrun; infinite if it ends with an error or not within a minute."""
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORLD}", "--max-restarts=1"]
    script = str(folder / "theirs.py")
    for old in folder.glob("times-*"):
        old.unlink()
    whole = [sys.executable, *command, script, *arguments]
    process = subprocess.Popen(whole, env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        code = process.wait(40.0)
    except subprocess.TimeoutExpired:
        process.terminate()  # it ends its workers
        code = process.wait()
    if code != 0:
        return math.inf, 0.0
    at = {path.name: float(path.read_text()) for path in folder.glob("times-*")}
    last = max(int(name.split("-")[1]) for name in at)
    return max(t for name, t in at.items() if name.startswith(f"times-{last}-")), at["times-0-1"]


def since_start(call: Callable[[], tuple[float, float]]) -> float:
    """Seconds from now to the moment that `call` reports."""
    began = time.time()
    return call()[0] - began


def gap(call: Callable[[], tuple[float, float]]) -> float:
    """Seconds from the failure that `call` reports to its last message."""
    last, failed = call()
    return last - failed


def main(arguments: Sequence[str]) -> None:
    """Prints medians and ratios."""
    repeats = int(arguments[0]) if arguments else 5
    folder = Path(tempfile.mkdtemp(prefix="rung-start-"))
    (folder / "bodies.py").write_text(OURS)
    (folder / "theirs.py").write_text(THEIRS)

    def import_torch() -> tuple[float, float]:
        subprocess.run([sys.executable, "-c", "import torch"], env=ENV, check=True)
        return time.time(), 0.0

    cases: dict[str, Callable[[], float]] = {
        "python -c 'import torch'": lambda: since_start(import_torch),
        "first line of user code, 1 worker": lambda: since_start(lambda: ours(folder, "first_line", world=1)),
        "first all-reduce, 2 workers": lambda: since_start(lambda: ours(folder, "reduced")),
        "first all-reduce, torchrun": lambda: since_start(lambda: torchrun(folder)),
        "failure to next all-reduce": lambda: gap(lambda: ours(folder, "fails_once", attempts=2)),
        "failure to next, torchrun": lambda: gap(lambda: torchrun(folder, "fail")),
    }
    taken: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeats):
        for name, case in cases.items():
            taken[name].append(case())
    # Only goes that came to an end count, which is kind to torchrun: its restarts do not always.
    median = {n: statistics.median([s for s in all_ if s < math.inf] or [math.inf]) for n, all_ in taken.items()}
    for name, seconds in taken.items():
        failed = sum(map(math.isinf, seconds))
        print(f"{name:36s} {median[name]:7.2f} s" + (f"   ({failed} of {repeats} failed)" if failed else ""))
    names = list(cases)
    for what, one, other, bound in (
        ("user code / import torch", names[1], names[0], 1.25),
        ("first all-reduce / torchrun", names[2], names[3], 0.6),
        ("restart / torchrun", names[4], names[5], 0.5),
    ):
        print(f"{what:36s} {median[one] / median[other]:7.2f}    (at most {bound})")


if __name__ == "__main__":
    main(sys.argv[1:])
