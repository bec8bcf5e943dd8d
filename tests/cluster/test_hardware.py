"""The probe: this machine, trees of files that stand for others, and questions with a deadline."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machine_tree import GIB, V2_MOUNT, machine, write

from rung.cluster.bounded import InChild, InThread
from rung.cluster.hardware import from_dict, probe, to_dict
from rung.cluster.host import read_host, read_space
from rung.strategies.errors import JobError
from rung.strategies.findings import Level

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc and /sys are Linux's")


# This machine.


@linux
def test_probe_of_this_machine_needs_no_torch_and_no_psutil() -> None:
    code = (
        "import sys; from rung.cluster.hardware import probe; probe(); "
        "sys.exit(', '.join({'torch', 'psutil', 'numpy', 'pynvml'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"loaded: {done.stderr}"


@linux
def test_facts_of_this_machine() -> None:
    hardware = probe()
    host = hardware.host
    memory = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    assert 0 < host.memory_available_bytes <= host.memory_total_bytes <= memory
    assert host.allowed_cpus == tuple(sorted(os.sched_getaffinity(0)))
    assert 0 < host.cpus <= len(host.allowed_cpus)
    assert 1 <= host.physical_cpus <= len(host.allowed_cpus)
    assert host.disk_free_bytes <= shutil.disk_usage(".").total == host.disk_total_bytes
    assert hardware.devices[-1].kind == "cpu"
    assert hardware.devices[-1].total_bytes == host.memory_total_bytes
    assert not [finding for finding in hardware.findings if finding.level is Level.ERROR]


@linux
def test_probe_takes_less_than_50_ms_without_gpus() -> None:
    if Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists():
        pytest.skip("there is a GPU, whose driver takes its time")
    times = []
    for _ in range(7):
        start = time.perf_counter()
        probe()
        times.append(time.perf_counter() - start)
    assert min(times) < 0.050, "the least, since other programs may be at work"


@linux
def test_affinity_is_kept() -> None:
    code = (
        "import os; one = sorted(os.sched_getaffinity(0))[0]; os.sched_setaffinity(0, {one}); "
        "from rung.cluster.hardware import probe; host = probe().host; print(host.cpus, host.allowed_cpus == (one,))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["1.0", "True"]


def test_space_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    place, total, free = read_space(tmp_path / "not" / "yet")
    assert place == tmp_path
    assert 0 < free <= total
    assert probe(folder=tmp_path / "not").host.disk_folder == str(tmp_path)


def test_deadline_of_zero_still_answers() -> None:
    start = time.monotonic()
    hardware = probe(deadline_s=0.0)
    assert time.monotonic() - start < 5.0
    assert hardware.host.memory_total_bytes > 0
    assert hardware.devices[-1].kind == "cpu"


@linux
def test_probe_survives_a_current_folder_that_is_gone(tmp_path: Path) -> None:
    code = (
        "import os; os.rmdir(os.getcwd()); from rung.cluster.hardware import probe; "
        "print([finding.subject for finding in probe().findings])"
    )
    (tmp_path / "gone").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "gone", capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout.strip(), done.returncode) == ("['disk']", 0), done.stderr


# Other machines, as trees of files.


@linux
def test_container_with_a_quota_and_a_limit(tmp_path: Path) -> None:
    root = write(
        machine(tmp_path),
        {
            "proc/self/cgroup": "0::/\n",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/memory.max": f"{4 * GIB}\n",
            "sys/fs/cgroup/memory.current": f"{GIB}\n",
            "sys/fs/cgroup/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/cpuset.cpus.effective": "0-3\n",
        },
    )
    host, findings = read_host(root)
    assert findings == []
    assert (host.memory_total_bytes, host.memory_available_bytes) == (4 * GIB, 3 * GIB)
    assert host.memory_limit_source == "cgroup v2: /sys/fs/cgroup/memory.max"
    assert host.cpus == 1.5
    assert host.allowed_cpus == (0, 1, 2, 3)
    assert host.physical_cpus == 2, "two threads share a core"
    assert [(node.index, node.cpus) for node in host.numa_nodes] == [(0, (0, 1, 2, 3))]


@linux
def test_limit_above_the_memory_of_the_machine_is_none(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/\n",
        "proc/self/mountinfo": V2_MOUNT,
        "sys/fs/cgroup/memory.max": f"{64 * GIB}\n",
        "sys/fs/cgroup/memory.current": "0\n",
    }
    host, _ = read_host(write(machine(tmp_path), files))
    assert (host.memory_total_bytes, host.memory_available_bytes) == (16 * GIB, 12 * GIB)
    assert host.memory_limit_source == "physical memory"


@linux
@pytest.mark.parametrize(
    ("cpuinfo", "extension", "bf16"),
    [
        ("model name\t: A\nflags\t\t: avx2 avx512f avx512_bf16 amx_bf16\n\n", "amx_bf16", True),
        ("model name\t: A\nflags\t\t: avx2 avx512f avx512_bf16\n\n", "avx512_bf16", True),
        ("model name\t: A\nflags\t\t: avx2 avx512f\n\n", "avx512f", False),
        ("processor\t: 0\nFeatures\t: fp asimd bf16 i8mm\n\n", "bf16", True),
        ("processor\t: 0\nFeatures\t: fp asimd\n\n", "asimd", False),
        ("flags\t\t: avx2\n\nflags\t\t: avx512_bf16\n", "avx2", False),
        ("", "", False),
    ],
)
def test_bfloat16_of_cpus(tmp_path: Path, cpuinfo: str, extension: str, bf16: bool) -> None:
    host, _ = read_host(write(machine(tmp_path), {"proc/cpuinfo": cpuinfo}))
    assert (host.cpu_extension, host.cpu_bf16) == (extension, bf16)
    assert host.cpu_name


@linux
def test_machine_whose_files_are_missing_or_nonsense(tmp_path: Path) -> None:
    hardware = probe(root=tmp_path / "empty")
    assert hardware.host.memory_total_bytes > 0
    assert {finding.fact.split(":")[0] for finding in hardware.findings} == {
        "could not read /proc/meminfo",
        "could not read /proc/self/status",
    }
    root = machine(tmp_path / "broken")
    write(root, {"proc/self/status": "Cpus_allowed_list:\tall\n", "sys/fs/cgroup/memory.max": "x"})
    write(root, {"sys/fs/cgroup/cgroup.controllers": "", "proc/self/mountinfo": ""})
    facts = [finding.fact for finding in probe(root=root).findings]
    assert len(facts) == 2
    assert any("/sys/fs/cgroup/memory.max" in fact for fact in facts)
    assert any("/proc/self/status" in fact for fact in facts)


# As JSON.


def test_round_trip_through_json() -> None:
    hardware = probe()
    assert from_dict(json.loads(json.dumps(to_dict(hardware)))) == hardware


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda v: v.update(format=2), "format 1"),
        (lambda v: v["host"].pop("cpus"), "hardware.host: missing.*cpus"),
        (lambda v: v["host"].update(cpus="two"), r"hardware.host.cpus: expected float, found 'two'"),
        (lambda v: v["host"].update(memory_total_bytes=1.5), "memory_total_bytes: expected a whole number"),
        (lambda v: v["host"].update(memory_total_bytes=True), "memory_total_bytes: expected a whole number"),
        (lambda v: v["host"].update(ram=1), "unknown entry 'ram'"),
        (lambda v: v["devices"][-1].update(kind="tpu"), r"devices\[\d\].kind: expected one of cpu, cuda, mps"),
        (lambda v: v.update(devices={}), "hardware.devices: expected a list"),
        (lambda v: v.update(host=[]), "hardware.host: expected a mapping"),
    ],
)
def test_broken_description_names_the_entry(change: Callable[[dict[str, object]], object], words: str) -> None:
    values = to_dict(probe())
    change(values)
    with pytest.raises(JobError, match=words):
        from_dict(values)


@settings(max_examples=25, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda x: st.lists(x) | st.dictionaries(st.sampled_from(["format", "host", "devices", "findings"]), x),
    )
)
def test_no_json_makes_anything_but_a_job_error(values: object) -> None:
    if isinstance(values, dict):
        values["format"] = 1
    with pytest.raises(JobError):
        from_dict(values)


# Questions with a deadline.


def test_thread_that_raises_or_hangs_is_a_reason() -> None:
    assert InThread(lambda: 1 // 0).answer(time.monotonic() + 5).reason.startswith("ZeroDivisionError")
    assert "deadline" in InThread(lambda: time.sleep(0.5)).answer(time.monotonic() + 0.01).reason
    assert InThread(lambda: 3).answer(time.monotonic() + 5).value == 3


@pytest.mark.slow
def test_child_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    source = (
        "import subprocess, sys, time; from pathlib import Path; child = subprocess.Popen(['sleep', '60']); "
        f"Path({str(told)!r} + '.new').write_text(str(child.pid)); Path({str(told)!r} + '.new').rename({str(told)!r}); "
        "time.sleep(60)"
    )
    child = InChild(source)
    patience = time.monotonic() + 30
    while not told.exists() and time.monotonic() < patience:
        time.sleep(0.02)
    assert "no answer before the deadline" in child.answer(time.monotonic() + 0.05).reason
    grandchild = int(told.read_text())
    for _ in range(500):
        try:
            state = Path(f"/proc/{grandchild}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            break
        if state == "Z":
            break
        time.sleep(0.02)
    else:
        pytest.fail("the grandchild still runs")


def test_child_with_much_to_say_neither_blocks_nor_confuses() -> None:
    source = "import sys; sys.stderr.write('x' * 300000); print('noise' * 100000); print('[1, 2]')"
    assert InChild(source).answer(time.monotonic() + 20).value == [1, 2]
    assert "without a result" in InChild("print('no json')").answer(time.monotonic() + 20).reason
    assert "ValueError: bad" in InChild("raise ValueError('bad')").answer(time.monotonic() + 20).reason


def test_values_are_frozen() -> None:
    hardware = probe()
    with pytest.raises(dataclasses.FrozenInstanceError):
        hardware.host.cpus = 1.0  # type: ignore[misc]
