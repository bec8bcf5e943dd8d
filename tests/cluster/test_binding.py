"""Workers stay near their devices, and on one node are left to the kernel."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from machine_tree import machine, write

from rung.cluster.binding import Slice, describe, slices
from rung.cluster.gpus import Device
from rung.cluster.hardware import Hardware
from rung.cluster.host import Host, read_host
from rung.cluster.local import WorkerSpec
from rung.launcher.ladder import with_binding
from rung.launcher.planner import Ladder, Rung
from rung.launcher.workers import bound
from rung.strategies.plan import Plan

NODE_0, NODE_1 = (0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)


def two_nodes(root: Path, *, allowed: str = "0-15") -> Host:
    """16 CPUs on 8 cores: node 0 has CPUs 0-3 and 8-11, node 1 the others; CPU n and n + 8 are one core."""
    machine(root, cpus=16)
    files = {
        "proc/self/status": f"Cpus_allowed_list:\t{allowed}\n",
        "sys/devices/system/node/node0/cpulist": "0-3,8-11\n",
        "sys/devices/system/node/node1/cpulist": "4-7,12-15\n",
        "sys/devices/system/node/node1/meminfo": "Node 1 MemTotal: 1024 kB\n",
    }
    for cpu in range(16):
        pair = f"{cpu % 8},{cpu % 8 + 8}\n"
        files[f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"] = pair
    return read_host(write(root, files))[0]


def gpu(index: int, node: int | None) -> Device:
    return Device(
        kind="cuda", index=index, name="", uuid=f"GPU-{index}", total_bytes=1, free_bytes=1, capability="9.0",
        bf16=True, vendor="nvidia", numa_node=node,
    )  # fmt: skip


def test_workers_on_cpus_share_out_whole_cores_by_node(tmp_path: Path) -> None:
    host = two_nodes(tmp_path)
    two = slices(2, host, root=tmp_path)
    assert two == (Slice(node=0, cpus=NODE_0, cores=4), Slice(node=1, cpus=NODE_1, cores=4))
    three = slices(3, host, root=tmp_path)
    assert [s.cpus for s in three] == [(0, 1, 8, 9), (2, 3, 10, 11), NODE_1]
    assert [s.cores for s in three] == [2, 2, 4]
    five = slices(5, host, root=tmp_path)
    assert sorted(cpu for s in five for cpu in s.cpus) == list(range(16)), "no CPU is idle or given twice"
    assert describe(three) == "ranks 0, 1 on NUMA node 0 with 2 cores each; rank 2 on NUMA node 1 with 4 cores"


def test_a_worker_with_a_gpu_has_the_whole_node_of_its_gpu(tmp_path: Path) -> None:
    host = two_nodes(tmp_path)
    found = slices(3, host, [gpu(0, 1), gpu(1, 1), gpu(2, 0)], root=tmp_path)
    assert [s.node for s in found] == [1, 1, 0]
    assert found[0].cpus == found[1].cpus == NODE_1
    assert [s.cores for s in found] == [2, 2, 4]


def test_only_cpus_that_the_container_allows_are_given(tmp_path: Path) -> None:
    host = two_nodes(tmp_path, allowed="2-5,10")
    found = slices(2, host, root=tmp_path)
    assert [(s.cpus, s.cores) for s in found] == [((2, 3, 10), 2), ((4, 5), 2)]


def test_nobody_is_bound_where_it_makes_no_sense(tmp_path: Path) -> None:
    host = two_nodes(tmp_path)
    assert slices(1, host, root=tmp_path) == (), "one worker on CPUs may use them all"
    assert slices(9, host, root=tmp_path) == (), "more workers than cores"
    assert slices(2, host, [gpu(0, 0), gpu(1, None)], root=tmp_path) == (), "the node of a GPU is not known"
    assert slices(2, host, [gpu(0, 0), gpu(1, 7)], root=tmp_path) == (), "a node that has no CPU for us"
    one = replace(host, numa_nodes=host.numa_nodes[:1])
    assert slices(2, one, root=tmp_path) == ()
    assert slices(1, one, [gpu(0, 0)], root=tmp_path) == ()


def test_all_workers_compute_with_as_many_threads_as_the_smallest_slice_has_cores() -> None:
    specs = [WorkerSpec(rank=r, payload=None, log=Path("x"), threads=8) for r in range(2)]
    found = [Slice(node=0, cpus=(0, 1, 2), cores=3), Slice(node=1, cpus=tuple(range(4, 24)), cores=20)]
    assert [(s.cpus, s.threads) for s in bound(specs, found)] == [((0, 1, 2), 3), (tuple(range(4, 24)), 3)]


def test_the_plan_tells_where_its_workers_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rung.launcher.ladder.slices", partial(slices, root=tmp_path))
    hardware = Hardware(host=two_nodes(tmp_path), devices=(gpu(0, 1), gpu(1, 0)))
    plans = [
        Plan(strategy="ddp", device=device, devices=count, global_batch=8, micro_batch=1)  # type: ignore[arg-type]
        for device, count in (("cuda", 2), ("cuda", 1), ("cpu", 1))
    ]
    ladder = with_binding(Ladder(rungs=tuple(Rung(plan=plan) for plan in plans)), hardware)
    assert [plan.reasons.get("binding") for plan in ladder.plans] == [
        "rank 1 on NUMA node 0 with 4 cores; rank 0 on NUMA node 1 with 4 cores",
        "rank 0 on NUMA node 1 with 4 cores",
        None,
    ]
