"""Workers on several machines, each machine a process of its own here: what the launcher sees, and what it survives."""

import contextlib
import dataclasses
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rung.cluster import remote
from rung.cluster.agent import TOKEN_BYTES, unreachable
from rung.cluster.failures import Cause
from rung.cluster.local import Ended, Message, WorkerSpec, import_path
from rung.cluster.remote import RemoteWorkers
from rung.cluster.sites import Line, Site, neighbours
from rung.strategies.errors import WorkersFailed

HERE = Path(__file__).parent
pytestmark = [pytest.mark.slow, pytest.mark.timeout(100)]
AGENT = "import pickle, sys; from rung.cluster.agent import serve; serve(*pickle.load(sys.stdin.buffer))"


class Machines:
    """Starts agents as a cluster would, each in a session of its own."""

    def __init__(self, folder):
        self.folder, self.agents = folder, {}
        self.token = secrets.token_bytes(TOKEN_BYTES)

    def start(self, body, layout, payload=None, **more):
        """`layout`: how many workers each machine has."""
        sites, rank = [], 0
        for n, count in enumerate(layout):
            ranks = range(rank, rank + count)
            specs = [WorkerSpec(rank=r, payload=payload, log=self.folder / f"{r}.log") for r in ranks]
            sites.append(Site(name=f"machine-{n}", host="127.0.0.1", specs=tuple(specs)))
            rank += count
        more = {"launch": self.launch, "reap": self.reap, "deadline_s": 60.0} | more
        return RemoteWorkers(
            f"worker_bodies:{body}",
            sites,
            host="127.0.0.1",
            token=self.token,
            folder=str(self.folder),
            preload=("torch",),
            **more,
        )

    def launch(self, number, where, duty):
        process = subprocess.Popen(
            [sys.executable, "-c", AGENT],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(HERE), *import_path()])},
        )
        process.stdin.write(pickle.dumps((where, self.token, number, duty)))
        process.stdin.close()
        self.agents[number] = process

    def reap(self):
        until = time.monotonic() + 10.0
        while time.monotonic() < until and any(p.poll() is None for p in self.agents.values()):
            time.sleep(0.02)
        for process in self.agents.values():
            process.kill()
            process.wait()


@pytest.fixture
def machines(tmp_path):
    there = Machines(tmp_path)
    yield there
    there.reap()


def until_ended(workers, seconds=60.0):
    events, until = [], time.monotonic() + seconds
    while workers.alive:
        assert time.monotonic() < until, events
        events += workers.poll(0.5)
    return events + workers.poll(0.0)


def gone(pid):
    until = time.monotonic() + 20
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def test_a_group_on_two_machines_has_one_numbering_one_meeting_place_and_one_log_folder(machines, tmp_path):
    with machines.start("all_reduce", [1, 2]) as workers:
        events = until_ended(workers)
    sums = {e.rank: e.value[0] for e in events if isinstance(e, Message)}
    assert sums == {0: 6.0, 1: 6.0, 2: 6.0}
    assert workers.verdict() is None
    assert sorted(p.name for p in tmp_path.glob("*.log")) == ["0.log", "1.log", "2.log"]


def test_values_reach_one_rank_or_all_and_come_back(machines):
    with machines.start("echo", [2, 1], {"a": 1}) as workers:
        workers.send(2, "two")
        workers.send(None, "all")
        got, until = [], time.monotonic() + 30
        while len(got) < 7 and time.monotonic() < until:
            got += [(e.rank, *e.value[:2]) for e in workers.poll(0.5) if isinstance(e, Message)]
        assert sorted(got, key=str) == sorted(
            [(r, "hello", r) for r in range(3)] + [(r, "echo", "all") for r in range(3)] + [(2, "echo", "two")], key=str
        )
        pids = {}
        while len(pids) < 3 and time.monotonic() < until:
            pids = workers.pids()
        assert "echo" in workers.stacks(2)
    assert all(gone(pid) for pid in pids.values())


def test_the_first_failure_is_named_with_its_machine_and_its_traceback(machines):
    payload = {"rank": 2, "step": 5, "fault": "users_own_mistake"}
    with machines.start("train", [1, 2], payload) as workers:
        until_ended(workers)
    said = workers.verdict()
    assert said.first.rank == 2
    assert said.cause is Cause.USER_EXCEPTION
    assert "machine-1" in said.text
    assert "users_own_mistake" in said.text


def test_a_machine_that_dies_is_a_lost_worker_and_the_others_can_still_be_asked(machines):
    with machines.start("echo", [1, 1]) as workers:
        until = time.monotonic() + 30
        while len(workers.pids()) < 2:
            assert time.monotonic() < until
            workers.poll(0.1)
        victim = workers.pids()[1]
        machines.agents[1].send_signal(signal.SIGKILL)
        ended = [e for e in until_rank_ends(workers, 1) if isinstance(e, Ended)]
        assert [e.rank for e in ended] == [1]
        assert gone(victim)
        workers.send(0, "still there?")
        answer = []
        while not answer and time.monotonic() < until:
            answer = [e for e in workers.poll(0.5) if isinstance(e, Message) and e.value[0] == "echo"]
        assert answer
    said = workers.verdict()
    assert said.cause is Cause.LOST_WORKER
    assert "machine-1 ended its connection" in said.text


def until_rank_ends(workers, rank):
    events, until = [], time.monotonic() + 30
    while rank in workers.alive:
        assert time.monotonic() < until
        events += workers.poll(0.2)
    return events + workers.poll(0.0)


def test_when_the_launcher_is_gone_agents_and_workers_go_too(machines):
    workers = machines.start("echo", [2])
    until = time.monotonic() + 30
    while len(workers.pids()) < 2:
        assert time.monotonic() < until
        time.sleep(0.1)
    pids = [*workers.pids().values(), machines.agents[0].pid]
    workers._closed = True  # as if it had been killed: connections just end
    workers._running = False
    assert all(gone(pid) for pid in pids)


def test_a_machine_that_falls_silent_counts_as_lost(machines, monkeypatch):
    monkeypatch.setattr(remote, "SILENT_S", 4.0)
    with machines.start("echo", [1, 1]) as workers:
        machines.agents[0].send_signal(signal.SIGSTOP)
        until_rank_ends(workers, 0)  # bounded by its own deadline
        assert workers.alive == (1,)
        machines.agents[0].send_signal(signal.SIGKILL)
    assert "machine-0 has said nothing for 4 s" in workers.verdict().text


def test_who_does_not_know_the_token_gets_nothing_unpickled(machines, tmp_path):
    mark = tmp_path / "unpickled"

    class Bomb:
        def __reduce__(self):
            return (open, (str(mark), "w"))

    with machines.start("echo", [1]) as workers:
        with socket.create_connection(workers._listener.getsockname(), timeout=5) as sock:
            sock.sendall(bytes(TOKEN_BYTES) + b"\0\0\0\0" + pickle.dumps(Bomb()))
            sock.settimeout(10)
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(1) == b""
        assert workers.alive == (0,)
    assert not mark.exists()


def test_a_machine_that_never_answers_is_named(machines):
    with pytest.raises(WorkersFailed, match=r"machine-0 \(ranks 0\)"):
        machines.start("echo", [1], launch=lambda *_: None, deadline_s=1.0)


def test_a_machine_that_the_others_cannot_reach_is_named_before_anything_trains(machines):
    def elsewhere(number, where, duty):
        # As where Ray knows a node by an address of another network: the machine itself does not have it.
        machines.launch(number, where, dataclasses.replace(duty, host="192.0.2.7") if number else duty)

    def check():
        if machines.agents[1].poll() is not None:
            raise WorkersFailed("the agent ended")

    with pytest.raises(WorkersFailed, match="the agent ended"):
        machines.start("echo", [1, 1], launch=elsewhere, check=check)
    said = machines.agents[1].stderr.read().decode()
    assert "cannot listen on 192.0.2.7, by which the other nodes are to reach it" in said


def test_a_door_that_is_shut_is_said_by_name_and_an_open_one_is_not():
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
        assert unreachable([("a", "127.0.0.1", port)]) == ""
    assert unreachable([("b", "127.0.0.1", port)], 1.0).startswith(f"b at 127.0.0.1:{port}: ")


def test_each_machine_tries_the_first_one_and_its_neighbours():
    lines = [Line(n, Site(name=f"m{n}", host="h", specs=()), door=n + 1) for n in range(5)]
    assert [peer[0] for peer in neighbours(lines, lines[0])] == ["m1", "m2"]
    assert [peer[0] for peer in neighbours(lines, lines[3])] == ["m0", "m4"]
    assert neighbours(lines[:1], lines[0]) == ()
