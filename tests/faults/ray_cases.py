"""What the tests on a Ray cluster share: several raylets on this machine, and a look at what runs on them."""

import contextlib
import threading
import time
from pathlib import Path

import psutil
import pytest
from support import Project

SETS = ["strategy.name=ddp", "schedule=constant", "log_every_s=0.1"]
SMALL = {"object_store_memory": 80 << 20, "include_dashboard": False}


@pytest.fixture(scope="module")
def cluster():
    """A head without CPUs, so that every other node can be killed. Nothing of it is left."""
    from ray.cluster_utils import Cluster

    there = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **SMALL})
    yield there
    there.shutdown()
    children = psutil.Process().children(recursive=True)
    assert not [p for p in children if p.name() in ("raylet", "gcs_server")]


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
