"""Nodes of a cluster: what they say, whether they agree, and what the planner makes of many of them."""

import dataclasses
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from rung.cluster import inventory
from rung.cluster.gpus import DeviceLink, DeviceProcess
from rung.cluster.hardware import Device, probe
from rung.cluster.inventory import Look, NodeReport, Survey
from rung.cluster.placement import place
from rung.launcher.job import Job
from rung.launcher.planner import plan_ladder
from rung.launcher.storage import Store
from rung.launcher.workers import OnRay, sees, to_inventory
from rung.strategies.errors import JobError
from rung.strategies.findings import Level
from rung.strategies.profile import Activity, Line, ParameterGroup, Profile


@pytest.fixture(scope="module")
def hardware():
    return probe()


def gpu(index, *, peers=(), busy=False, name="NVIDIA H100 80GB HBM3"):
    links = tuple(DeviceLink(peer=f"GPU-{peer}", kind="nvlink", lanes=18) for peer in peers)
    found = Device(
        kind="cuda", index=index, name=name, uuid=f"GPU-{index}", total_bytes=80 << 30, free_bytes=79 << 30,
        capability="9.0", bf16=True, vendor="nvidia", links=links,
    )  # fmt: skip
    if not busy:
        return found
    return dataclasses.replace(found, processes=(DeviceProcess(pid=1, name="python", bytes=1 << 30),))


def node(hardware, number, *, gpus=(), cpus=4.0, clock=100.0, **versions):
    """A node that was asked at 99 and answered at 101."""
    host = dataclasses.replace(hardware.host, hostname=f"host-{number}")
    there = dataclasses.replace(hardware, host=host, devices=(*gpus, *hardware.of("cpu")))
    look = Look(hardware=there, versions={"torch": "2.6", **versions}, clock=clock)
    return NodeReport(
        id=f"id-{number}", name=f"node-{number}", host="10.0.0.1", cpus=cpus, gpus=float(len(gpus)), asked=99.0,
        answered=101.0, look=look,
    )  # fmt: skip


def profile():
    activity = Activity(first=(Line(0, 1e6),), again=(Line(0, 1e6),), flops=Line(0, 1e11), moved=Line(0, 1e6),
                        operations=100)  # fmt: skip
    group = ParameterGroup(name="w", count=10**6, bytes=4 * 10**6, dtype="float32", trainable=True)
    return Profile(
        task="t", digest="d", method="given", precision="fp32", optimizer="AdamW", groups=(group,), buffer_bytes=0,
        optimizer_bytes=8 * 10**6, step_bytes=0, input_bytes=Line(0, 1000), plain=activity, checkpointed=None,
        largest_parameter=10**6,
    )  # fmt: skip


def test_this_node_says_what_it_has_and_what_the_check_finds():
    assert inventory.look(lambda: "no disk").trouble == "no disk"
    bad = inventory.look(lambda: 1 // 0)
    assert bad.trouble.startswith("ZeroDivisionError")
    assert bad.versions["rung"] != "missing"
    assert abs(bad.clock - time.time()) < 60


def test_other_versions_clocks_and_silence_are_told(hardware):
    nodes = [
        node(hardware, 0), node(hardware, 1, torch="2.5"), node(hardware, 2, clock=140.0),
        dataclasses.replace(node(hardware, 3), look=None, error="it is down"),
    ]  # fmt: skip
    found = {f.subject: f for f in inventory.judge(nodes, {"torch": "2.6"})}
    assert set(found) == {"node node-1", "node node-2", "node node-3"}
    assert found["node node-1"].fact == "has torch 2.5 (here 2.6)"
    assert found["node node-1"].level is Level.ERROR
    assert "39 s" in found["node node-2"].fact
    assert "it is down" in found["node node-3"].fact


def test_islands_follow_fast_links_and_ray_decides_how_many_devices_may_be_used(hardware):
    devices = [gpu(0, peers=(1,)), gpu(1, peers=(0,)), gpu(2, peers=(3,)), gpu(3, peers=(2,), busy=True)]
    [machine] = inventory.machines_of([node(hardware, 0, gpus=devices)], "cuda")
    assert [spot.island for spot in machine.spots] == [0, 0, 2, 2]
    assert [spot.busy for spot in machine.spots] == [False, False, False, True]
    two = dataclasses.replace(node(hardware, 0, gpus=devices), gpus=2.0)
    assert len(inventory.machines_of([two], "cuda")[0].spots) == 2
    assert inventory.kind_of([two]) == "cuda"
    assert inventory.kind_of([node(hardware, 1)]) == "cpu"


def test_nodes_of_one_machine_share_its_memory_in_the_plan(hardware):
    one, other = node(hardware, 0), node(hardware, 0)
    alone = to_inventory([one]).nodes[0].host.free_bytes
    assert to_inventory([one, other]).nodes[0].host.free_bytes == alone // 2


def test_a_node_that_would_hold_back_the_rest_is_not_forced_on_the_planner(hardware):
    """Of equal nodes all are used; where they differ it may leave slow ones out, down to the least asked for."""
    job = Job.from_dict(
        {"task": "task:T", "run": "run", "batch": 64, "cluster": {"address": "auto", "workers": [1, 4]}}
    )

    class Cluster:
        dashboard = ""

        def __init__(self, cpus):
            self.nodes = [node(hardware, number, cpus=count) for number, count in enumerate(cpus)]

        def survey(self, deadline_s):
            return Survey(nodes=tuple(self.nodes))

    def planned(cpus):
        most = dataclasses.replace(hardware.host, cpus=64.0, physical_cpus=64)
        cluster = Cluster(cpus)
        cluster.nodes = [
            dataclasses.replace(n, look=dataclasses.replace(n.look, hardware=dataclasses.replace(
                n.look.hardware, host=dataclasses.replace(most, hostname=n.name))))
            for n in cluster.nodes
        ]  # fmt: skip
        fleet = OnRay(cluster, job, SimpleNamespace(say=lambda *a, **k: None))
        inventory = fleet.machines()
        return plan_ladder(fleet.planned(job), inventory, profile()), inventory

    ladder, _ = planned([8.0, 8.0])
    assert {plan.devices for plan in ladder.plans} == {2}
    ladder, inventory = planned([2.0, 32.0])
    assert ladder.best.devices == 1
    assert ladder.best.threads == 32
    assert inventory.nodes[0].host.cores == 2


@pytest.mark.parametrize("count", [64, 8000])
def test_a_thousand_nodes_of_eight_are_planned_and_placed_in_seconds(hardware, count):
    nodes = [node(hardware, i, gpus=[gpu(n) for n in range(8)]) for i in range(1000)]
    job = Job.from_dict({"task": "task:T", "run": "run", "batch": 16384, "devices": {"count": count}})
    began = time.process_time()
    ladder = plan_ladder(job, to_inventory(nodes))
    chosen = place(count, inventory.machines_of(nodes, "cuda"))
    assert time.process_time() - began < 5.0
    assert ladder.best.devices == count
    assert sum(len(take.indices) for take in chosen.takes) == count


def test_a_store_that_a_node_sees_otherwise_is_found(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    there.mkdir()
    store = Store.open(str(here))
    store.write_atomic("mark", b"1234")
    assert sees(str(here), {}, "mark", b"1234", (str(tmp_path),)) == ""
    assert "another folder" in sees(str(there), {}, "mark", b"1234", (str(tmp_path),))
    assert "other bytes" in sees(str(here), {}, "mark", b"5678", (str(tmp_path),))
    assert "no folder" in sees(str(here), {}, "mark", b"1234", (str(tmp_path / "gone"),))
    assert [p.name for p in here.iterdir()] == ["mark"]


def test_without_ray_the_address_is_an_error_that_says_so():
    code = "import sys; sys.modules['ray'] = None\n"
    code += "from rung.cluster.ray_train import RayCluster\nRayCluster.connect('auto')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "DependencyError: cluster.address needs Ray" in done.stderr
    assert "pip install" in done.stderr


@pytest.mark.slow
def test_no_cluster_and_a_ray_client_are_refused_with_a_way_out(monkeypatch, tmp_path):
    pytest.importorskip("ray")
    from rung.cluster.ray_train import RayCluster

    with pytest.raises(JobError, match="Ray client"):
        RayCluster.connect("ray://127.0.0.1:10001")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    began = time.monotonic()
    with pytest.raises(JobError, match=r"no Ray cluster answers at 127\.0\.0\.1:1"):
        RayCluster.connect("127.0.0.1:1")
    assert time.monotonic() - began < 60
