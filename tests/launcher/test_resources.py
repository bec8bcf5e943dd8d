"""What a run takes of its machine: sampled cheaply, and said in plain words when it runs out or holds the run up."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rung.cluster.local import Message, Workers, WorkerSpec, warm
from rung.cluster.memory_trace import MemoryTrace
from rung.launcher.job import load
from rung.launcher.messages import Assignment, CutBack, Finished, Ready, StepRecord, Steps
from rung.launcher.run import PRELOAD
from rung.launcher.watch.bottleneck import Setting, Split, bottleneck, wanted_workers
from rung.launcher.watch.pressure import WAIT_S, Pressure, judge
from rung.launcher.watch.resources import DeviceUse, Resources, Sampler
from rung.strategies.plan import Plan

GIB = 1 << 30


def record(step=1, seconds=0.1, data_s=0.0, exchange_s=0.0):
    return StepRecord(
        step=step, epoch=0, samples_seen=8, loss=1, norm=1, lr=1, weight=8, seconds=seconds, data_s=data_s,
        exchange_s=exchange_s,
    )  # fmt: skip


# ---------------------------------------------------------------- bottleneck


def test_shares_of_the_time_sum_to_one():
    split = Split(save_s=2.0, validation_s=3.0).plus((record(seconds=10, data_s=4, exchange_s=1),))
    assert split.total_s == 15
    assert split.shares() == pytest.approx(
        {"data_share": 4 / 15, "compute_share": 5 / 15, "exchange_share": 1 / 15, "save_share": 2 / 15,
         "validation_share": 3 / 15}, abs=1e-4,
    )  # fmt: skip
    assert Split().shares() == {}


def test_waiting_for_data_says_how_many_loader_workers_would_do():
    split = Split(steps=100, step_s=100.0, data_s=34.0)
    found = bottleneck(split, Setting(loader_workers=0, free_cores=6))
    assert found is not None
    assert found.fact == "34% of the time waits for data"
    assert found.fix == "data.workers 0 -> 1, or cache the data set"
    found = bottleneck(Split(steps=100, step_s=100.0, data_s=80.0), Setting(loader_workers=2, free_cores=20))
    assert found is not None
    assert found.fix.startswith("data.workers 2 -> 13")  # 2 x 100 s of fetching for 20 s of work, and a quarter more


def test_without_a_free_core_no_workers_are_proposed():
    found = bottleneck(Split(steps=9, step_s=100.0, data_s=34.0), Setting(loader_workers=2, free_cores=0))
    assert found is not None
    assert "no core is free" in found.fix
    assert wanted_workers(Split(step_s=10, data_s=9.9), Setting(free_cores=3)) == 3


@pytest.mark.parametrize(
    ("split", "subject"),
    [
        (Split(step_s=80, save_s=20), "bottleneck.save"),
        (Split(step_s=80, exchange_s=40), "bottleneck.exchange"),
        (Split(step_s=50, validation_s=50), "bottleneck.validation"),
        (Split(step_s=100, data_s=20, exchange_s=30), "bottleneck.exchange"),
    ],
)
def test_the_dearest_of_all_is_named(split, subject):
    found = bottleneck(split, Setting(devices=2))
    assert found is not None
    assert found.subject == subject


@pytest.mark.parametrize(
    "split",
    [Split(), Split(step_s=100), Split(step_s=100, data_s=10, exchange_s=10, save_s=5, validation_s=20),
     Split(step_s=4, data_s=3.9)],
    ids=["nothing", "all work", "a little of each", "seconds in all"],
)  # fmt: skip
def test_what_costs_little_is_not_worth_a_word(split):
    assert bottleneck(split, Setting()) is None


def test_a_gpu_that_idles_without_waiting_for_anything_is_named():
    found = bottleneck(Split(step_s=100), Setting(device_busy=0.2))
    assert found is not None
    assert found.fact == "the GPUs compute only 20% of the time, and wait for no data"
    assert bottleneck(Split(step_s=100), Setting(device_busy=0.9)) is None


# ---------------------------------------------------------------- pressure


def seen(at=0.0, free=100 * GIB, limit=128 * GIB, disk=900 * GIB):
    return Resources(at=at, host_free_bytes=free, host_limit_bytes=limit, worker_bytes=GIB, disk_free_bytes=disk)


def test_enough_of_everything_says_nothing():
    state = Pressure(loader_workers=4)
    assert judge(state, seen(), checkpoint_bytes=GIB) == (state, [], None)
    assert judge(state, Resources(at=0)) == (state, [], None)  # a system that tells nothing
    small = seen(free=GIB // 4, limit=GIB, disk=GIB)  # a quarter of a small machine is enough
    assert judge(state, small) == (state, [], None)


def test_loader_workers_are_halved_until_memory_is_free_then_it_is_only_said():
    state, cuts, said = Pressure(loader_workers=4), [], []
    for at in range(60):
        state, findings, cut = judge(state, seen(at=float(at), free=GIB))
        cuts += [] if cut is None else [(at, cut)]
        said += [(at, f.fact) for f in findings]
    wait = int(WAIT_S)
    assert cuts == [(0, 2), (wait, 1), (2 * wait, 0)]
    assert "1.0 GiB of 128.0 GiB are free" in said[0][1]
    assert "cut back from 4 to 2" in said[0][1]
    assert [at for at, _ in said] == [0, wait, 2 * wait, 3 * wait]
    assert "cut back" not in said[-1][1]


def test_a_disk_without_room_for_two_more_checkpoints_is_told_once():
    state, findings, _ = judge(Pressure(), seen(disk=5 * GIB), checkpoint_bytes=3 * GIB)
    assert findings[0].subject == "disk.full"
    assert "5.0 GiB are free; a checkpoint takes 3.0 GiB" in findings[0].fact
    assert judge(state, seen(disk=4 * GIB), checkpoint_bytes=3 * GIB)[1] == []
    assert judge(Pressure(), seen(disk=7 * GIB), checkpoint_bytes=3 * GIB)[1] == []


# ---------------------------------------------------------------- sampling


def test_a_look_sees_memory_processor_and_disk_and_costs_next_to_nothing(tmp_path):
    code = "import time\nend = time.time() + 30\nwhile time.time() < end: pass"
    with subprocess.Popen([sys.executable, "-c", code]) as busy:
        try:
            trace, pids = MemoryTrace(), {0: busy.pid}
            sampler = Sampler(pids=lambda: pids, memory=trace.samples, folder=tmp_path, gpus=False)
            assert sampler.look().host_free_bytes is None
            trace.sample(pids)
            time.sleep(0.3)
            found = sampler.look()
            began = time.thread_time()
            for _ in range(20):
                sampler.look()
            look_s = (time.thread_time() - began) / 20
        finally:
            busy.kill()
    assert 0 < found.host_free_bytes < found.host_limit_bytes
    assert found.disk_free_bytes > 0
    assert found.worker_bytes > 0
    assert 0 < found.cpu < 1.2
    # Once a second, on one of the cores: 0.5% of the time is 5 ms.
    assert look_s < 0.005
    row = found.to_row()
    assert {"host_free_bytes", "worker_bytes", "cpu", "disk_free_bytes"} == set(row)
    gpu = DeviceUse(index=1, memory_bytes=5, total_bytes=9, busy=0.5)
    assert Resources(at=0, devices=(gpu,)).to_row()["device1_busy"] == 0.5


def test_looking_ends_with_the_sampler_and_survives_a_folder_that_goes(tmp_path):
    folder = tmp_path / "run"
    sampler = Sampler(pids=dict, memory=tuple, folder=folder, gpus=False, every_s=0.01).start()
    time.sleep(0.1)
    taken = sampler.take()
    assert taken
    assert taken[0].disk_free_bytes is None
    sampler.close()
    sampler.take()
    time.sleep(0.05)
    assert sampler.take() == []


@pytest.mark.slow
def test_a_worker_that_is_told_to_cut_back_ends_loaders_and_trains_on(project):
    """The launcher's message reaches a real worker in the middle of its steps."""
    job = load(project.folder / "job.yaml", [f"run={project.folder / 'run'}", "steps=400", "data.workers=2",
                                             "task_args={sleep_s: 0.01}"])  # fmt: skip
    plan = Plan(strategy="single", device="cpu", devices=1, global_batch=8, micro_batch=8)
    payload = Assignment(job=job.to_dict(), source=job.source, plan=plan, attempt=1)
    warm(PRELOAD, {})
    spec = WorkerSpec(rank=0, payload=payload, log=project.folder / "log")
    children, ready, last, until = {}, None, None, time.monotonic() + 100
    with Workers.start("rung.launcher.train:main", [spec]) as workers:
        [pid] = workers.pids().values()
        while last is None and time.monotonic() < until:
            for event in workers.poll(0.2):
                match event:
                    case Message(value=Ready() as ready):
                        children["before"] = loaders(pid)
                        workers.send(0, CutBack(loader_workers=0))
                    case Message(value=Steps(records=records)) if records[-1].step > 200:
                        children["after"] = loaders(pid)
                    case Message(value=Finished() as last):
                        pass
    assert ready is not None
    assert ready.loader_workers == 2
    assert children["before"] - children["after"] == 2  # beside multiprocessing's own helper
    assert last is not None
    assert last.step == 400


def loaders(pid):
    """Child processes of a process."""
    return sum(len((task / "children").read_text().split()) for task in Path(f"/proc/{pid}/task").iterdir())


SLOW_DATA = """

class SlowPoints(Points):
    def __getitem__(self, i):
        time.sleep(0.01)
        return super().__getitem__(i)


class SlowData(Small):
    def dataset(self, split):
        return SlowPoints(self.samples) if split == "train" else None
"""


@pytest.mark.slow
def test_a_run_that_waits_for_its_data_is_told_so_at_the_end_and_keeps_the_numbers(project):
    with (project.folder / "task.py").open("a") as f:
        f.write(SLOW_DATA)
    done = project.launch("task=task:SlowData", "steps=80", "data.workers=0", "checkpoint.every=none")
    assert done.code == 0, done.all
    assert "bottleneck.data: 9" in done.out  # some 95%
    assert "of the time waits for data" in done.out
    rows = [json.loads(line) for line in (project.folder / "run/metrics.jsonl").read_text().splitlines()]
    resources = [r for r in rows if r["kind"] == "resources"]
    assert resources
    assert resources[-1]["data_share"] > 0.8
    assert resources[-1]["host_free_bytes"] > 0
    assert [e["subject"] for e in project.events() if e["event"] == "finding"] == ["bottleneck.data"]
