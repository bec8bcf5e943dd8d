"""Each way in which a worker can fail, for real: the right rank is blamed with the right cause, in bounded time, and
nothing of the group is left."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from rung.cluster import local
from rung.cluster.failures import Cause
from rung.cluster.local import Workers, WorkerSpec
from rung.cluster.verdict import Verdict

BODIES = Path(__file__).parents[1] / "cluster"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]


@pytest.fixture(autouse=True, scope="module")
def nursery():
    sys.path.insert(0, str(BODIES))
    local.warm(["torch", "torch.distributed"], {"OMP_NUM_THREADS": "1"})
    yield
    local.cool()
    sys.path.remove(str(BODIES))


@pytest.fixture(autouse=True)
def nothing_is_left():
    def seen() -> tuple[set[str], set[str]]:
        return _below(os.getpid()), _listening()

    local._get_spawner(None, None).ready.wait(30)
    before = seen()
    yield
    for now, then in zip(seen(), before, strict=True):
        assert now <= then


def _below(pid: int) -> set[str]:
    """All processes below this one: the nursery and what it holds."""
    found: set[str] = set()
    queue = [str(pid)]
    while queue:
        for task in Path(f"/proc/{queue.pop()}/task").glob("*"):
            children = (task / "children").read_text().split()
            found.update(children)
            queue += children
    return found


def _listening() -> set[str]:
    """Sockets in the state LISTEN that belong to processes below this one."""
    inodes = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                inodes[f"socket:[{fields[9]}]"] = fields[1]
    found = set()
    for pid in _below(os.getpid()):
        for fd in Path(f"/proc/{pid}/fd").glob("*"):
            if (name := str(fd.readlink())) in inodes:
                found.add(inodes[name])
    return found


def run(folder: Path, fault: str, *, world: int = 3, rank: int = 1, **more: object) -> tuple[Verdict, float]:
    """Trains until the fault at step 5 of `rank` ends it; returns the verdict and how many seconds that took."""
    payload = {"fault": fault, "rank": rank, "step": 5}
    specs = [WorkerSpec(rank=r, payload=payload, log=folder / f"rank-{r}.log", **more) for r in range(world)]  # type: ignore[arg-type]
    began = time.monotonic()
    with Workers.start("worker_bodies:train", specs, deadline_s=30) as workers:
        while not workers.ends:
            assert time.monotonic() - began < 30
            workers.poll(0.1)
        workers.poll(0.5)  # what follows from it may be seen too; it must not be taken for the cause
        workers.stop(2.0)
        verdict = workers.verdict()
    assert verdict is not None
    assert str(folder / f"rank-{verdict.first.rank}.log") in verdict.text
    assert len(verdict.text.splitlines()) < 50, "one screen"
    return verdict, time.monotonic() - began


FAULTS = {
    "users_own_mistake": (Cause.USER_EXCEPTION, ["rank 1 raised StrangeError: salt and sugar", "users_own_mistake"]),
    "leave": (Cause.LOST_WORKER, ["rank 1 ended with exit code 3", "left by itself"]),
    "touch_nothing": (Cause.LOST_WORKER, ["SIGSEGV (exit code -11)", "native code touched memory", "string_at"]),
    "bus_error": (Cause.HOST_OOM, ["SIGBUS (exit code -7)", "/dev/shm is full"]),
    "health": (Cause.NON_FINITE, ["rank 1 raised HealthError: loss is nan at step 5", "→ look at sample 7"]),
    "abort_for_memory": (Cause.DEVICE_OOM, ["SIGABRT (exit code -6)", "std::bad_alloc"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_rank_that_failed_is_blamed_with_its_cause(tmp_path: Path, fault: str) -> None:
    cause, words = FAULTS[fault]
    verdict, seconds = run(tmp_path, fault)
    assert verdict.first.rank == 1
    assert verdict.cause is cause, verdict.text
    for word in words:
        assert word in verdict.text
    assert seconds < 15


def test_minus_nine_without_a_kernel_kill_was_somebody(tmp_path: Path) -> None:
    verdict, _ = run(tmp_path, "kill")
    assert (verdict.first.rank, verdict.first.signal) == (1, signal.SIGKILL)
    if verdict.cause is Cause.LOST_WORKER:
        assert "the kernel counts no out-of-memory kill" in verdict.text
    else:  # no counter is readable here, or another process of this machine was killed just now
        assert "host memory ran out" in verdict.text
        assert "host memory before the end" in verdict.text


def test_a_real_cap_makes_an_exception_of_the_owner_and_the_message_gets_out(tmp_path: Path) -> None:
    verdict, _ = run(tmp_path, "eat_memory", world=2, memory_cap_bytes=300 << 20)
    assert verdict.first.rank == 1
    assert verdict.cause is Cause.DEVICE_OOM, verdict.text
    assert verdict.first.failure is not None
    assert verdict.first.failure.oom == "host"
    assert "can't allocate memory" in verdict.text
    assert (300 << 20) > verdict.first.peak_bytes - (150 << 20) > (100 << 20)


def test_the_cap_leaves_alone_who_stays_below_it(tmp_path: Path) -> None:
    verdict, _ = run(tmp_path, "users_own_mistake", world=2, memory_cap_bytes=300 << 20)
    assert verdict.cause is Cause.USER_EXCEPTION


@pytest.mark.parametrize(
    ("fault", "where"), [("sleep_in_python", "where_it_hangs"), ("deadlock_in_c", "deadlock_in_c")]
)
def test_a_rank_that_hangs_is_found_and_its_stack_names_where(tmp_path: Path, fault: str, where: str) -> None:
    payload = {"fault": fault, "rank": 1, "step": 5}
    specs = [WorkerSpec(rank=r, payload=payload, log=tmp_path / f"{r}.log") for r in range(3)]
    with Workers.start("worker_bodies:train", specs, deadline_s=30) as workers:
        until = time.monotonic() + 20
        while not (hung := workers.hung(1.0)):
            assert time.monotonic() < until
            assert not workers.ends
            workers.poll(0.1)
        assert list(hung) == [1]
        assert workers.heartbeats()[1][:2] == (5, "forward")
        assert "all_reduce" in workers.stacks(0)
        began = time.monotonic()
        workers.stop(0.5)
        assert time.monotonic() - began < 6
        verdict = workers.verdict(hung=hung)
    assert verdict is not None
    assert (verdict.cause, verdict.first.rank) == (Cause.HUNG, 1)
    assert where in verdict.text


def test_a_rank_that_never_arrives_is_named_by_those_that_wait(tmp_path: Path) -> None:
    for missing in (2, 0):
        specs = [WorkerSpec(rank=r, payload=missing, log=tmp_path / f"{r}.log") for r in range(3)]
        began = time.monotonic()
        with Workers.start("worker_bodies:never_arrive", specs, deadline_s=30) as workers:
            while len(workers.ends) < 2:
                assert time.monotonic() - began < 10
                workers.poll(0.1)
            workers.stop(0.0)
            verdict = workers.verdict()
        assert verdict is not None
        assert f"rank {missing} did not arrive within 1.5 s" in verdict.text
        assert verdict.first.rank != missing
