"""One launcher per run folder: refused by name, taken over when stale, noticed when lost."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from rung.launcher.checkpoint.lease import NAME, Holder, Lease
from rung.launcher.storage import Store
from rung.strategies.errors import RunLocked


@pytest.fixture(params=["disk", pytest.param("memory", marks=pytest.mark.slow)])
def store(request, tmp_path):
    if request.param == "disk":
        return Store.open(str(tmp_path / "run"))
    return Store.open(f"memory://lease/{tmp_path.name}")


def foreign(store: Store, **facts: object) -> Holder:
    """A lease that a launcher on another machine wrote."""
    values = {"token": "t", "host": "node7", "machine": "another", "pid": 4242, "started": 0.0, "lifetime_s": 0.6,
              "written_s": time.time(), "beat": 1, **facts}  # fmt: skip
    store.write_atomic(NAME, json.dumps(values).encode())
    found = Holder.from_bytes(store.read(NAME))
    assert found is not None
    return found


def test_a_second_launcher_is_refused_at_once_and_told_who_holds_it(store):
    with Lease.acquire(store) as lease:
        began = time.monotonic()
        with pytest.raises(
            RunLocked, match=rf"in use by process {os.getpid()} on .+, last heard of \d s ago"
        ) as caught:
            Lease.acquire(store)
        assert time.monotonic() - began < 1.0
        assert store.url in str(caught.value)
        lease.check(fresh=True)
    assert not store.exists(NAME)
    with Lease.acquire(store):
        pass


def test_a_fresh_lease_of_another_machine_is_respected_and_a_stale_one_taken(store):
    foreign(store, lifetime_s=60.0)
    with pytest.raises(RunLocked, match="process 4242 on node7"):
        Lease.acquire(store)
    foreign(store, written_s=time.time() - 100)
    with Lease.acquire(store) as lease:
        lease.check(fresh=True)


def test_clocks_need_not_agree(store):
    """A holder whose clock is an hour off is seen to live by its renewals, and to be dead by their absence."""
    stop = threading.Event()

    def renew() -> None:
        for beat in range(1000):
            foreign(store, written_s=time.time() - 3600, beat=beat)
            if stop.wait(0.1):
                return

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        time.sleep(0.05)
        with pytest.raises(RunLocked, match="node7"):
            Lease.acquire(store)
    finally:
        stop.set()
        thread.join()
    foreign(store, written_s=time.time() + 3600)
    with Lease.acquire(store):
        pass


def test_what_is_no_lease_protects_nobody(store):
    store.write_atomic(NAME, b"\x80garbage")
    with Lease.acquire(store) as lease:
        lease.check(fresh=True)


def test_the_lease_is_renewed_and_its_loss_is_noticed(store):
    lost: list[RunLocked] = []
    with Lease.acquire(store, lifetime_s=0.6, on_lost=lost.append) as lease:
        first = Holder.from_bytes(store.read(NAME))
        time.sleep(0.5)
        second = Holder.from_bytes(store.read(NAME))
        assert first is not None
        assert second is not None
        assert second.beat > first.beat
        lease.check()
        foreign(store, lifetime_s=60.0)
        deadline = time.monotonic() + 5.0
        while not lost and time.monotonic() < deadline:
            time.sleep(0.02)
        with pytest.raises(RunLocked, match="taken over by process 4242 on node7"):
            lease.check()
    assert len(lost) == 1
    assert store.exists(NAME)  # it is not ours to delete


def test_a_lease_that_cannot_be_renewed_is_lost(tmp_path):
    store = Store.open(str(tmp_path / "run"))
    with Lease.acquire(store, lifetime_s=0.5) as lease:
        (tmp_path / "run").rename(tmp_path / "moved")
        (tmp_path / "run").write_text("no folder any more")
        time.sleep(1.0)
        with pytest.raises(RunLocked, match="could not be renewed"):
            lease.check()


HOLD = """
import sys, time
from rung.launcher.checkpoint.lease import Lease
from rung.launcher.storage import Store
lease = Lease.acquire(Store.open(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_the_lease_of_a_killed_launcher_on_this_machine_is_stale_at_once(tmp_path):
    store = Store.open(str(tmp_path / "run"))
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline().strip() == "held"
        with pytest.raises(RunLocked, match=f"process {holder.pid} "):
            Lease.acquire(store)
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait(10)
        began = time.monotonic()
        with Lease.acquire(store):
            assert time.monotonic() - began < 5.0
    finally:
        holder.kill()
        holder.wait(10)
        holder.stdout.close()


RACE = """
import sys, time
from rung.launcher.checkpoint.lease import Lease
from rung.launcher.storage import Store
from rung.strategies.errors import RunLocked
store = Store.open(sys.argv[1])
while time.time() < float(sys.argv[2]):
    time.sleep(0.001)
try:
    lease = Lease.acquire(store)
except RunLocked:
    print("refused")
else:
    print("held", flush=True)
    time.sleep(4)
"""


@pytest.mark.slow
@pytest.mark.parametrize("stale", [False, True])
def test_of_many_that_try_at_once_one_wins(tmp_path, stale):
    store = Store.open(str(tmp_path / "run"))
    if stale:
        foreign(store, written_s=time.time() - 100, lifetime_s=0.5)
    start = str(time.time() + 3.0)
    racers = [
        subprocess.Popen([sys.executable, "-c", RACE, str(tmp_path / "run"), start], stdout=subprocess.PIPE, text=True)
        for _ in range(6)
    ]
    said = [racer.communicate(timeout=60)[0].strip() for racer in racers]
    assert sorted(said) == ["held"] + ["refused"] * 5
