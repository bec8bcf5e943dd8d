"""The same job on a Ray cluster of several raylets: it ends like an undisturbed run, whatever dies or joins."""

import os
import signal
import subprocess
import sys
import time

import pytest
from ray_cases import SETS, Output, close, cluster, nodes, on, wait_for, whole, workers_of
from support import same_bits

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
__all__ = ["cluster", "nodes", "whole"]


def test_the_same_job_gives_the_same_bits_on_a_cluster_and_what_does_not_exist_is_refused(
    project, cluster, nodes, whole
):
    nodes(2)
    began = time.monotonic()
    refused = project.launch(*on(cluster, "cluster.workers=3"))
    assert refused.code == 2, refused.all
    assert "3 workers asked for, there is room for 2" in refused.err
    assert time.monotonic() - began < 40
    with (project.folder / "task.py").open("a") as file:
        file.write('print("FROM_JOB is", os.environ.get("FROM_JOB"), "on", os.environ.get("RANK"), flush=True)\n')
    done = project.launch(*on(cluster, "cluster.workers=2", 'cluster.runtime_env={env_vars: {FROM_JOB: "yes"}}'))
    assert done.code == 0, done.all
    assert {line for line in project.logs().splitlines() if "FROM_JOB" in line} == {
        "FROM_JOB is yes on 0", "FROM_JOB is yes on 1"
    }  # fmt: skip
    assert same_bits(project.weights(), whole) == []
    assert {p.name for p in (project.folder / "run/logs/attempt-001").iterdir()} == {"rank-0.log", "rank-1.log"}
    assert "(pid=" not in done.all
    assert "INFO" not in done.all


def test_other_versions_on_a_node_and_another_ray_here_are_refused_by_name(project, cluster, nodes, tmp_path):
    nodes(1)
    (tmp_path / "numpy-0.1.dist-info").mkdir()
    (tmp_path / "numpy-0.1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 0.1\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    other = cluster.add_node(num_cpus=1, object_store_memory=80 << 20, env_vars={"PYTHONPATH": path})
    try:
        refused = project.launch(*on(cluster, "cluster.workers=[1, 2]"))
    finally:
        cluster.remove_node(other, allow_graceful=False)
    assert refused.code == 2, refused.all
    assert "has numpy 0.1 (here" in refused.err
    assert "training " not in refused.out
    code = "import sys, ray; ray.__version__ = '1.0'\nfrom rung.cluster.ray_train import RayCluster\n"
    code += "RayCluster.connect(sys.argv[1])"
    command = [sys.executable, "-c", code, cluster.address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "DependencyError" in done.stderr, done.stderr
    assert "Ray: 1.0" in done.stderr
    assert "install the Ray (and Python) version of the cluster" in done.stderr


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


def test_memory_that_runs_out_on_one_node_changes_the_plan_of_all_under_zero(project, cluster, nodes):
    pytest.importorskip("deepspeed")
    few = ["steps=12", "schedule=constant"]
    assert project.launch(*few, "strategy.name=ddp", "devices.count=2", "run=whole").code == 0
    nodes(2)
    zero = ["strategy.name=zero2", "devices.memory=600 MiB", "task_args={fail: [1, 9, memory]}"]
    done = project.launch(*on(cluster, "cluster.workers=2"), *few, *zero, timeout=200)
    assert done.code == 0, done.all
    assert "out of device memory" in done.out
    assert "no step is lost (step " in done.out
    plans = [e["plan"] for e in project.events() if e["event"] == "attempt"]
    assert all(plan.startswith("zero2, 2 x cpu") for plan in plans), plans
    assert len(set(plans)) == 2, plans
    model = {n: t for n, t in project.weights().items() if n.startswith("model/")}
    assert close(model, {n: t for n, t in project.weights("whole").items() if n.startswith("model/")})


def drain(cluster, node_id):
    """What an autoscaler does before it takes a node away."""
    import ray
    from ray.core.generated import autoscaler_pb2

    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    in_a_minute = int(time.time() * 1000) + 60_000
    said = ray._raylet.GcsClient(address=cluster.address).drain_node(node_id, reason, "spot", in_a_minute)
    assert said[0], said


def test_a_drained_node_is_left_after_a_save_and_so_is_the_whole_cluster_on_sigterm(project, cluster, nodes, whole):
    added = nodes(2)
    slow = ["task_args={sleep_s: 0.25}", "checkpoint.every=none"]
    process = project.start(*on(cluster, "cluster.workers=[1, 2]", *slow))
    try:
        out = Output(process)
        out.until("\nstep ", 3)
        drain(cluster, added[1].node_id)
        out.until("training ", 2)
        out.until("\nstep ", out.count("\nstep ") + 2)
        process.send_signal(signal.SIGTERM)
        code = out.end(60)
    finally:
        process.kill()
    assert code == 143, out.text
    assert "saving, then going on with what is there" in out.text
    assert "failed " not in out.text
    assert "is saved" in out.text
    plans = [e["plan"] for e in project.events() if e["event"] == "attempt"]
    assert [plan.split(",")[1].strip() for plan in plans] == ["2 x cpu", "1 x cpu"], plans
    done = project.launch(*SETS, "steps=120", "devices.count=2", flags=["--force"])  # without the sleep
    assert done.code == 0, done.all
    assert "resume     step " in done.out
    assert close(project.weights(), whole)
