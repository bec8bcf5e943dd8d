"""The same job on a Ray cluster of several raylets: it ends like an undisturbed run, whatever dies or joins."""

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest
from support import Project, same_bits

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SETS = ["strategy.name=ddp", "schedule=constant", "log_every_s=0.1"]


@pytest.fixture(scope="module")
def cluster():
    """A head without CPUs, so that every other node can be killed. Nothing of it is left."""
    from ray.cluster_utils import Cluster

    there = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **SMALL})
    yield there
    there.shutdown()
    children = psutil.Process().children(recursive=True)
    assert not [p for p in children if p.name() in ("raylet", "gcs_server")]


SMALL = {"object_store_memory": 80 << 20, "include_dashboard": False}


@pytest.fixture
def nodes(cluster):
    """Adds nodes of one CPU each, and takes away what is left of them."""
    added = []

    def add(count=1):
        added.extend(cluster.add_node(num_cpus=1, object_store_memory=80 << 20) for _ in range(count))
        return added

    yield add
    for node in added:
        if node in cluster.worker_nodes:
            cluster.remove_node(node, allow_graceful=False)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An undisturbed run on this machine alone: two workers, 120 steps."""
    project = Project(tmp_path_factory.mktemp("whole") / "project")
    done = project.launch(*SETS, "devices.count=2", "steps=120")
    assert done.code == 0, done.all
    return project.weights()


def on(cluster, *more):
    return [*SETS, f"cluster.address={cluster.address}", "steps=120", *more]


def wait_for(condition, seconds=90.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.05)


class Output:
    """What a running command has printed so far."""

    def __init__(self, process):
        self.process, self.text = process, ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stdout:
            self.text += line

    def count(self, words):
        return self.text.count(words)

    def until(self, words, times, seconds=120.0):
        """Waits until `words` have been printed so often."""
        wait_for(lambda: self.count(words) >= times or self.process.poll() is not None, seconds)
        assert self.count(words) >= times, self.text

    def end(self, seconds):
        code = self.process.wait(seconds)
        self._reader.join(10)
        return code


def workers_of(project):
    """Rank -> process of all that train this project now, known by the log that they write."""
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.cwd() == str(project.folder):
                log = str(Path(f"/proc/{process.pid}/fd/1").readlink())
                if "/rank-" in log:
                    found[int(log.rpartition("-")[2].partition(".")[0])] = process
    return found


def close(one, other):
    return all(one[n].allclose(other[n], rtol=1e-4, atol=1e-6) for n in one) and one.keys() == other.keys()


def test_the_same_job_gives_the_same_bits_on_a_cluster_and_what_does_not_exist_is_refused(
    project, cluster, nodes, whole
):
    nodes(2)
    began = time.monotonic()
    refused = project.launch(*on(cluster, "cluster.workers=3"))
    assert refused.code == 2, refused.all
    assert "3 workers asked for, there is room for 2" in refused.err
    assert time.monotonic() - began < 40
    done = project.launch(*on(cluster, "cluster.workers=2"))
    assert done.code == 0, done.all
    assert same_bits(project.weights(), whole) == []
    assert {p.name for p in (project.folder / "run/logs/attempt-001").iterdir()} == {"rank-0.log", "rank-1.log"}
    assert "(pid=" not in done.all
    assert "INFO" not in done.all


def test_a_worker_and_then_a_raylet_killed_cost_no_step_and_a_node_that_joins_is_used(project, cluster, nodes, whole):
    added = nodes(2)
    sets = on(cluster, "cluster.workers=[1, 2]", "task_args={sleep_s: 0.25}", "checkpoint.every=none")
    process = project.start(*sets)
    try:
        out = Output(process)
        out.until("\nstep ", 3)
        workers_of(project)[1].send_signal(signal.SIGKILL)
        out.until("training ", 2)
        out.until("\nstep ", out.count("\nstep ") + 2)
        os.kill(added[1].all_processes["raylet"][0].process.pid, signal.SIGKILL)
        out.until("training ", 3)
        nodes(1)
        joined = time.monotonic()
        out.until("training ", 4)
        assert time.monotonic() - joined < 60
        code = out.end(100)
    finally:
        process.kill()
    out = out.text
    assert code == 0, out
    assert "no step is lost" in out
    assert "back to" not in out
    assert "(raylet" not in out
    assert "more node has come" in out
    plans = [e["plan"] for e in project.events() if e["event"] == "attempt"]
    assert [plan.split(",")[1].strip() for plan in plans] == ["2 x cpu", "2 x cpu", "1 x cpu", "2 x cpu"], plans
    assert close(project.weights(), whole)
    wait_for(lambda: not workers_of(project), 20)
