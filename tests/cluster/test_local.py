"""Workers on this machine: what they are given, what they say, and that nothing is left of them."""

import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rung.cluster import local
from rung.cluster.link import Board, Frames, Stop, frame
from rung.cluster.local import Ended, Message, Workers, WorkerSpec
from rung.strategies.errors import StorageError, WorkersFailed

HERE = Path(__file__).parent
pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def warm_nursery():
    sys.path.insert(0, str(HERE))
    local.warm(["torch", "torch.distributed"], {"OMP_NUM_THREADS": "1"})
    yield
    local.cool()
    sys.path.remove(str(HERE))


@pytest.fixture(autouse=True)
def nursery(request: pytest.FixtureRequest) -> None:
    """Only tests that start workers wait for torch to load."""
    if request.node.get_closest_marker("slow"):
        request.getfixturevalue("warm_nursery")


def specs(count: int, folder: Path, payload: object = None, **more: object) -> list[WorkerSpec]:
    return [WorkerSpec(rank=r, payload=payload, log=folder / f"{r}.log", **more) for r in range(count)]  # type: ignore[arg-type]


def values(workers: Workers, count: int, timeout_s: float = 20.0) -> list[Message]:
    """The next messages; anything else fails the test."""
    found: list[Message] = []
    until = time.monotonic() + timeout_s
    while len(found) < count:
        assert time.monotonic() < until, f"only {found}"
        for event in workers.poll(1.0):
            assert isinstance(event, Message), event
            found.append(event)
    return found


def exists(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def shared() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def test_frames_come_out_whole_however_they_were_cut() -> None:
    sent = [("a", 1), b"x" * 5000, None, [1.5] * 300]
    stream = b"".join(frame(i, value) for i, value in enumerate(sent))
    for step in (1, 7, 4096, len(stream)):
        frames, got = Frames(), []
        for start in range(0, len(stream), step):
            got += frames.feed(stream[start : start + step])
        assert [(kind, pickle.loads(body)) for kind, body in got] == list(enumerate(sent))


def test_a_heartbeat_is_read_as_it_was_written(tmp_path: Path) -> None:
    with (tmp_path / "board").open("w+b") as file:
        file.truncate(3 * 64)
        board = Board(file.fileno(), 3)
        assert board.read(1) is None
        board.write(1, 12, "validation " + "é" * 40)
        step, phase, age = board.read(1) or (0, "", 9.0)
        assert (step, phase[:15]) == (12, "validation éééé")
        assert 0 <= age < 1.0
        assert board.read(0) is None
        assert board.read(2) is None
        board.close()


def test_ranks_must_be_without_gaps(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"0\.\.1"):
        Workers.start("worker_bodies:echo", [specs(3, tmp_path)[0], specs(3, tmp_path)[2]])


def test_a_log_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"file/0\.log"):
        Workers.start("worker_bodies:echo", specs(1, tmp_path / "file"))


@pytest.mark.slow
def test_messages_go_both_ways_in_order_and_stop_is_heard(tmp_path: Path) -> None:
    with Workers.start("worker_bodies:echo", specs(2, tmp_path, {"a": (1, 2)})) as workers:
        hello = values(workers, 2)
        assert sorted(m.value[:4] for m in hello) == [("hello", r, 2, {"a": (1, 2)}) for r in range(2)]
        assert {m.value[4] for m in hello} == set(workers.pids().values())
        for number in range(100):
            workers.send(0, number)
        workers.send(None, "all")
        got = values(workers, 102)
        assert [m.value[1] for m in got if m.rank == 0] == [*range(100), "all"]
        assert [m.value[1] for m in got if m.rank == 1] == ["all"]
        workers.stop(10.0, reason="enough")
        ends = workers.poll()
        assert all(isinstance(e, Ended) and e.clean and e.exit_code == 0 and e.stopped for e in ends), ends
        assert workers.verdict() is None
    assert "torch" not in sys.modules or "pytest" in sys.modules


@pytest.mark.slow
def test_a_worker_gets_its_threads_cpus_environment_log_and_session(tmp_path: Path) -> None:
    cpu = min(os.sched_getaffinity(0))
    more = {"threads": 3, "cpus": (cpu,), "env": {"OF_THE_WORKER": "yes"}}
    with Workers.start("worker_bodies:facts", specs(1, tmp_path, **more)) as workers:
        facts = values(workers, 1)[0].value
        assert facts == {
            "threads": 3, "cpus": [cpu], "env": "yes", "rank": "0", "session": True, "main": None, "stdin": "",
        }  # fmt: skip
        # Seen before the worker ends: nothing waits in a buffer.
        lines = (tmp_path / "0.log").read_text().splitlines()
        assert lines == ["from C", "from Python", "from stderr", "from the descriptor"]


@pytest.mark.slow
def test_ten_megabytes_from_each_rank_arrive_though_nobody_polls(tmp_path: Path) -> None:
    with Workers.start("worker_bodies:flood", specs(2, tmp_path, 10_000)) as workers:
        until = time.monotonic() + 30
        while workers.alive:
            assert time.monotonic() < until, "a worker waits for the launcher to read"
            time.sleep(0.05)
        events = workers.poll()
    for rank in range(2):
        assert [e.value[0] for e in events if isinstance(e, Message) and e.rank == rank] == list(range(10_000))
        assert isinstance(next(e for e in reversed(events) if e.rank == rank), Ended), "the end comes last"


@pytest.mark.slow
def test_a_value_that_the_launcher_cannot_load_is_the_pollers_to_see(tmp_path: Path) -> None:
    with Workers.start("worker_bodies:unloadable", specs(1, tmp_path)) as workers:
        while workers.alive:
            time.sleep(0.01)
        with pytest.raises(ModuleNotFoundError, match="only_here"):
            workers.poll(5.0)


@pytest.mark.slow
def test_four_ranks_meet_and_reduce_on_a_port_of_the_loopback_alone(tmp_path: Path) -> None:
    with Workers.start("worker_bodies:all_reduce", specs(4, tmp_path, threads=2)) as workers:
        assert [m.value for m in values_until_end(workers)] == [(10.0, 2)] * 4
        assert all(end.clean for end in workers.ends)


def values_until_end(workers: Workers) -> list[Message]:
    found: list[Message] = []
    until = time.monotonic() + 30
    while workers.alive:
        assert time.monotonic() < until
        found += [e for e in workers.poll(1.0) if isinstance(e, Message)]
    return found + [e for e in workers.poll() if isinstance(e, Message)]


@pytest.mark.slow
def test_polling_and_beating_cost_next_to_nothing(tmp_path: Path) -> None:
    with Workers.start("worker_bodies:time_poll", specs(1, tmp_path)) as workers:
        poll_s, beat_s = values(workers, 1)[0].value
    assert poll_s < 2e-6
    assert beat_s < 5e-6


@pytest.mark.slow
@pytest.mark.parametrize("how", ["crash", "kill"])
def test_children_of_every_kind_end_with_their_worker(tmp_path: Path, how: str) -> None:
    with Workers.start("worker_bodies:spawn_and_wait", specs(1, tmp_path, how)) as workers:
        pids = values(workers, 1)[0].value
        if how == "crash":
            while workers.alive:
                workers.poll(0.1)
        else:
            assert all(exists(pid) for pid in pids)
        workers.stop(0.0)
        assert not [pid for pid in pids if exists(pid)]


@pytest.mark.slow
def test_loader_workers_and_shared_memory_go_too(tmp_path: Path) -> None:
    before = shared()
    with Workers.start("worker_bodies:loader", specs(1, tmp_path)) as workers:
        pids = values(workers, 1)[0].value[:3]
        assert all(exists(pid) for pid in pids)
        assert any(name.startswith(f"torch_{pids[0]}_") for name in shared())
        workers.stop(0.0)
    assert not [pid for pid in pids if exists(pid)]
    assert not {n for n in shared() - before if n.startswith(f"torch_{pids[0]}")}


@pytest.mark.slow
def test_named_memory_of_a_killed_worker_is_removed(tmp_path: Path) -> None:
    with Workers.start("worker_bodies:named_memory", specs(1, tmp_path)) as workers:
        name = values(workers, 1)[0].value
        assert name in shared()
        workers.signal(0, signal.SIGKILL)
        while workers.alive:
            workers.poll(0.1)
    assert name not in shared()


@pytest.mark.slow
def test_a_worker_deaf_to_all_is_killed_in_bounded_time(tmp_path: Path) -> None:
    with Workers.start("worker_bodies:deaf", specs(2, tmp_path)) as workers:
        values(workers, 2)
        began = time.monotonic()
        workers.stop(0.5)
        assert 2.0 < time.monotonic() - began < 20.0  # 2.6 s on an idle machine
        assert {end.signal for end in workers.ends} == {signal.SIGKILL}
        assert workers.verdict() is None, "we killed them ourselves"
        workers.stop()


@pytest.mark.slow
def test_a_worker_that_holds_all_its_memory_still_hears(tmp_path: Path) -> None:
    with Workers.start("worker_bodies:full", specs(1, tmp_path, memory_cap_bytes=100 << 20)) as workers:
        values(workers, 1)
        time.sleep(0.5)  # until it has taken all
        workers.send(0, "x" * 100_000)
        assert [m.value for m in values(workers, 1)] == [("heard", "x" * 100_000)]


@pytest.mark.slow
def test_what_does_not_start_is_named_and_removed(tmp_path: Path) -> None:
    with pytest.raises(WorkersFailed, match=r"of 2 workers, .* within 0\.001 s: 0, 1"):
        Workers.start("worker_bodies:echo", specs(2, tmp_path), deadline_s=0.001)


@pytest.mark.slow
def test_an_entry_that_is_not_there_is_the_workers_failure(tmp_path: Path) -> None:
    with Workers.start("no_such_module:main", specs(1, tmp_path)) as workers:
        while workers.alive:
            workers.poll(0.1)
        failure = workers.ends[0].failure
    assert failure is not None
    assert failure.type_name == "ModuleNotFoundError"
    assert "no_such_module" in failure.message


@pytest.mark.slow
def test_a_nursery_that_is_killed_takes_its_workers_along_and_is_replaced(tmp_path: Path) -> None:
    with Workers.start("worker_bodies:echo", specs(2, tmp_path)) as workers:
        pids = list(workers.pids().values())
        values(workers, 2)
        assert local._spawner is not None
        os.kill(local._spawner.pid, signal.SIGKILL)
        until = time.monotonic() + 10
        while workers.alive:
            assert time.monotonic() < until
            workers.poll(0.1)
        verdict = workers.verdict()
    assert verdict is not None
    assert "the process that workers are forked from ended" in verdict.text
    until = time.monotonic() + 5
    while any(map(exists, pids)):
        assert time.monotonic() < until
        time.sleep(0.05)
    with Workers.start("worker_bodies:echo", specs(1, tmp_path)) as workers:
        values(workers, 1)


@pytest.mark.slow
def test_thirty_lives_leak_neither_descriptors_nor_processes_nor_threads(tmp_path: Path) -> None:
    import threading

    def life() -> None:
        with Workers.start("worker_bodies:echo", specs(2, tmp_path)) as workers:
            values(workers, 2)

    def count() -> tuple[int, int, int, int]:
        assert local._spawner is not None
        pid = local._spawner.pid
        below = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        fds = [sum(1 for _ in Path(f"/proc/{p}/fd").iterdir()) for p in ("self", pid)]
        return fds[0], fds[1], len(below), threading.active_count()

    life()
    before = count()
    for _ in range(30):
        life()
    assert count() == before


LAUNCHER = """
import sys, time
sys.path.insert(0, {here!r})
from pathlib import Path
from rung.cluster import local
local.warm(["torch"], {{}})
folder = Path({folder!r})
specs = [local.WorkerSpec(rank=r, payload=None, log=folder / f"{{r}}.log") for r in range(2)]
with local.Workers.start("worker_bodies:spawn_and_wait", specs) as workers:
    pids = [local._spawner.pid]
    until = time.monotonic() + 30
    while len(pids) < 9 and time.monotonic() < until:
        for event in workers.poll(1.0):
            pids += event.value
    print(*pids, flush=True)
    while workers.alive:
        workers.poll(1.0)
"""


def launch(folder: Path) -> tuple["subprocess.Popen[str]", list[int]]:
    """A launcher in a process and a process group of its own, and all processes below it."""
    code = LAUNCHER.format(here=str(HERE), folder=str(folder))
    launcher = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
    )
    assert launcher.stdout is not None
    pids = list(map(int, launcher.stdout.readline().split()))
    assert len(pids) == 9
    assert all(map(exists, pids))
    return launcher, pids


@pytest.mark.slow
def test_a_launcher_killed_with_minus_9_leaves_nothing(tmp_path: Path) -> None:
    launcher, pids = launch(tmp_path)
    launcher.kill()
    launcher.communicate()
    until = time.monotonic() + 30  # a second on an idle machine
    while left := [pid for pid in pids if exists(pid)]:
        assert time.monotonic() < until, left
        time.sleep(0.02)


@pytest.mark.slow
def test_ctrl_c_reaches_the_launcher_alone_and_leaves_nothing(tmp_path: Path) -> None:
    launcher, pids = launch(tmp_path)
    os.killpg(launcher.pid, signal.SIGINT)
    began = time.monotonic()
    _, errors = launcher.communicate(timeout=50)
    assert time.monotonic() - began < 40  # 1 s; all deadlines of `stop` together if the interrupt strikes in a lock
    assert errors.count("KeyboardInterrupt") == 1, errors
    assert not [pid for pid in pids if exists(pid)]
    assert not any("Interrupt" in log.read_text() for log in tmp_path.glob("*.log"))


def test_stop_travels() -> None:
    assert pickle.loads(pickle.dumps(Stop(reason="x"))) == Stop(reason="x")
