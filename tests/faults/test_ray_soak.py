"""Long fault runs on Ray: workers and raylets killed at random moments, and hosts whose link is cut."""

import contextlib
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from ray_cases import SETS, Output, close, cluster, nodes, on, whole, workers_of
from support import Project, same_bits

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.soak, pytest.mark.timeout(420)]
__all__ = ["cluster", "nodes", "whole"]
KILLS = 5


@pytest.mark.parametrize("seed", range(4))
def test_killed_at_random_moments_it_ends_like_an_undisturbed_run(project, cluster, nodes, whole, seed):
    """Five kills each: of a worker, or of a raylet, which another one then replaces."""
    rng = random.Random(seed)
    alive = list(nodes(3))
    sets = on(cluster, "cluster.workers=[1, 3]", "task_args={sleep_s: 0.3}", "checkpoint.every=20 steps")
    process = project.start(*sets)
    killed = []
    try:
        out = Output(process)
        out.until("\nstep ", 1)
        for _ in range(KILLS):
            time.sleep(rng.uniform(0.2, 12.0))
            if process.poll() is not None:
                break
            workers = workers_of(project)
            if workers and rng.random() < 0.5:
                rank = rng.choice(sorted(workers))
                with contextlib.suppress(psutil.Error):
                    workers[rank].send_signal(signal.SIGKILL)
                killed.append(f"worker {rank}")
            else:
                victim = alive.pop(rng.randrange(len(alive)))
                os.kill(victim.all_processes["raylet"][0].process.pid, signal.SIGKILL)
                killed.append("raylet")
                alive.append(nodes(1)[-1])
        code = out.end(280)
    finally:
        process.kill()
    events = [e for e in project.events() if e["event"] == "attempt"]
    print(f"seed {seed}: killed {', '.join(killed)}; {len(events)} attempts: {[e['plan'][:12] for e in events]}")
    assert code == 0, out.text
    assert len(killed) == KILLS, "the run was over before"
    assert "back to" not in out.text, out.text
    assert close(project.weights(), whole)
    until = time.monotonic() + 30
    while workers_of(project):
        assert time.monotonic() < until, "workers are left"
        time.sleep(0.2)


def test_zero3_on_two_nodes_holds_the_weights_twice_in_each_and_ends_like_ddp(project, cluster):
    pytest.importorskip("deepspeed")
    # Weights that are worth a partition; an optimizer that does not make much of rounding.
    few = ["steps=12", "schedule=constant", "task_args={width: 4096}", "optimizer.name=sgd"]
    assert project.launch(*few, "strategy.name=ddp", "devices.count=2", "run=whole").code == 0
    there = [cluster.add_node(num_cpus=2, object_store_memory=80 << 20) for _ in range(2)]
    try:
        pinned = ["strategy={name: zero3, within_nodes: true}", f"cluster.address={cluster.address}"]
        done = project.launch(*pinned, *few, "cluster.workers=4", timeout=250)
        assert done.code == 0, done.all
        assert "weights a second time in every 2 devices" in done.out
        moved = project.launch(*pinned, "cluster.workers=4", *few[1:], "steps=16", flags=["--force"], timeout=250)
        assert moved.code == 0, moved.all
        assert "resume     step 12" in moved.out
    finally:
        for node in there:
            cluster.remove_node(node, allow_graceful=False)
    model = {name: t for name, t in project.weights(step=12).items() if name.startswith("model/")}
    whole = {name: t for name, t in project.weights("whole").items() if name.startswith("model/")}
    print("off by", max(float((model[name] - whole[name]).abs().max()) for name in whole))
    assert close(model, whole)


# ---------------------------------------------------------------- the job server


@pytest.fixture
def job_server():
    """A head with two CPUs and its dashboard, which has the job server. To be run alone: with several clusters on a
    machine, Ray's server may send a job to another one."""
    pytest.importorskip("aiohttp_cors", reason="the job server needs ray[default]")
    from ray.cluster_utils import Cluster

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    folder = tempfile.mkdtemp(prefix="rj", dir="/tmp")  # Ray's sockets need a short path
    there = Cluster(initialize_head=True, head_node_args={
        "num_cpus": 2, "object_store_memory": 80 << 20, "include_dashboard": True, "dashboard_port": port,
        "temp_dir": folder,
    })  # fmt: skip
    yield f"http://{there.webui_url}"
    there.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def test_through_the_job_server_output_exit_codes_and_stops_are_as_if_it_ran_here(project, job_server):
    plain = [one for one in SETS if "strategy" not in one]
    sets = [*plain, f"cluster.address={job_server}", f"run={project.folder}/there/run", "cluster.workers=1"]
    refused = project.launch(*sets, "steps=12", "cluster.workers=5")
    assert refused.code == 2, refused.all
    assert "5 workers asked for" in refused.all
    done = project.launch(*sets, "steps=12", 'cluster.runtime_env={env_vars: {FROM_JOB: "yes"}}')
    assert done.code == 0, done.all
    assert "training " in done.out
    assert same_bits(project.weights("there/run"), straight(project)) == []
    process = project.start(*sets, "steps=400", "task_args={sleep_s: 0.1}", f"run={project.folder}/there/stopped")
    out = Output(process)
    out.until("\nstep ", 2)
    process.send_signal(signal.SIGINT)
    assert out.end(90) == 130, out.text
    assert "stopping" in out.text
    assert len(project.checkpoints("there/stopped")) == 1


def straight(project):
    assert project.launch("schedule=constant", "steps=12", "strategy.name=single", "run=here").code == 0
    return project.weights("here")


# ---------------------------------------------------------------- hosts made of network namespaces

RAY = [sys.executable, "-m", "ray.scripts.scripts", "start", "--num-cpus=1", "--object-store-memory=83886080",
       "--disable-usage-stats", "--min-worker-port=0", "--max-worker-port=0"]  # fmt: skip


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Hosts:
    """Two hosts `a` and `b` on a switch, each a network namespace. Names and addresses are of this test alone."""

    def __init__(self, folder):
        self.folder, self.names = folder, {n: f"rung-{os.getpid()}-{n}" for n in ("a", "b", "switch")}
        self.address, self.token = {"a": "10.213.7.1", "b": "10.213.7.2"}, secrets.token_hex(32)
        for name in self.names.values():
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        switch = self.names["switch"]
        ip("-n", switch, "link", "add", "br0", "type", "bridge")
        ip("-n", switch, "link", "set", "br0", "up")
        for host, address in self.address.items():
            mine, port = self.names[host], f"port-{host}"
            ip("-n", mine, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", switch)
            ip("-n", mine, "addr", "add", f"{address}/24", "dev", "eth0")
            ip("-n", mine, "link", "set", "eth0", "up")
            ip("-n", mine, "route", "add", "default", "via", "10.213.7.254")
            ip("-n", switch, "link", "set", port, "master", "br0", "up")

    def cut(self, host):
        ip("-n", self.names["switch"], "link", "set", f"port-{host}", "down")

    def mend(self, host):
        ip("-n", self.names["switch"], "link", "set", f"port-{host}", "up")

    def on(self, host, command, **more):
        """A command there. `b` sees a disk of its own at `own`."""
        own = self.folder / "own"
        own.mkdir(exist_ok=True)
        script = 'mount -t tmpfs none "$0" && exec "$@"' if host == "b" else 'exec "$@"'
        env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        # A token in the home folder would protect the head, and not be used by the others, unless all are told.
        env |= {"OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token}
        whole = ["ip", "netns", "exec", self.names[host], "sh", "-c", script, str(own), *command]
        return subprocess.Popen(whole, env=env, start_new_session=True, text=True, **more)

    def join(self, host):
        """Starts a raylet there, on `a` that of the head."""
        role = ["--head", "--port=6379", "--include-dashboard=false"] if host == "a" else ["--address=10.213.7.1:6379"]
        temp = [f"--temp-dir={self.folder}/ray"] if host == "a" else []
        command = [*RAY, *role, *temp, f"--node-ip-address={self.address[host]}"]
        process = self.on(host, command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        text, _ = process.communicate(timeout=90)
        assert process.returncode == 0, text

    def processes(self, host):
        """All that run there."""
        done = subprocess.run(["ip", "netns", "pids", self.names[host]], capture_output=True, text=True, check=True)
        return [int(pid) for pid in done.stdout.split()]

    def close(self):
        for host in ("a", "b"):
            for _ in range(3):
                for pid in self.processes(host):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(0.5)
        for name in self.names.values():
            ip("netns", "del", name)


@pytest.fixture
def hosts(tmp_path_factory):
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` here, so there are no network namespaces")
    probe = f"rung-{os.getpid()}-probe"
    tried = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"network namespaces are not permitted here: {tried.stderr.strip()}")
    ip("netns", "del", probe)
    folder = Path("/tmp") / f"rung-hosts-{os.getpid()}"  # Ray's sockets need a short path
    folder.mkdir()
    there = Hosts(folder)
    yield there
    there.close()
    shutil.rmtree(folder, ignore_errors=True)


def launch(hosts, project, *sets):
    sets = [*SETS, "cluster.address=10.213.7.1:6379", *sets]
    home = ["env", f"XDG_CACHE_HOME={project.folder}/.cache"]
    return hosts.on("a", [*home, *project.command(*sets)], cwd=project.folder, stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT)  # fmt: skip


def test_a_link_that_is_cut_and_mended_between_two_hosts_costs_no_step(hosts, whole):
    project = Project(hosts.folder / "project")
    hosts.join("a")
    hosts.join("b")
    refused = launch(hosts, project, "cluster.workers=2", "steps=20", f"run={hosts.folder}/own/run")
    said = Output(refused)
    assert said.end(120) == 2, said.text
    assert "is another folder there" in said.text

    process = launch(hosts, project, "cluster.workers=[1, 2]", "task_args={sleep_s: 0.8}", "steps=120",
                     "checkpoint.every=none")  # fmt: skip
    try:
        out = Output(process)
        out.until("\nstep ", 3)
        hosts.cut("b")
        time.sleep(8.0)
        hosts.mend("b")
        out.until("\nstep ", out.count("\nstep ") + 5)
        assert out.count("training ") == 1, "a short cut is only waited for"
        hosts.cut("b")
        cut = time.monotonic()
        out.until("training ", 2, 150)
        print(f"goes on {time.monotonic() - cut:.0f} s after the cut")
        out.until("\nstep ", out.count("\nstep ") + 2)
        hosts.mend("b")
        for pid in hosts.processes("b"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        hosts.join("b")
        joined = time.monotonic()
        out.until("training ", 3)
        print(f"the host is used again {time.monotonic() - joined:.0f} s after it came back")
        assert time.monotonic() - joined < 60
        code = out.end(200)
    finally:
        process.kill()
    assert code == 0, out.text
    assert "back to" not in out.text, out.text
    assert close(project.weights(), whole)
