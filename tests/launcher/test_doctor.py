"""The doctor on environments that are really broken, each in a process of its own where the breakage needs one."""

import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from doctor_help import GIB, ROOT, complete, elsewhere, gpu, job, only

from rung.cluster.hardware import DeviceProcess, Hardware, probe
from rung.launcher import doctor, doctor_gpus, doctor_host
from rung.launcher.doctor_store import check_store
from rung.strategies.findings import Finding, Level

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc and /sys are Linux's")


@pytest.fixture(scope="module")
def hardware() -> Hardware:
    return probe()


# As a whole.


def test_quick_takes_milliseconds_and_finds_nothing_wrong_here(hardware: Hardware, tmp_path: Path) -> None:
    times = []
    for _ in range(5):
        start = time.perf_counter()
        found = doctor.quick(job(tmp_path), hardware)
        times.append(time.perf_counter() - start)
    assert [one for one in found if one.level is Level.ERROR] == []
    assert min(times) < 0.1


@pytest.mark.slow
def test_full_finds_no_error_here_and_leaves_nothing(tmp_path: Path) -> None:
    found = elsewhere(
        f"from rung.launcher.job import load\nfound = doctor.full(load({str(tmp_path / 'job.yaml')!r}))",
        shell=f"printf 'task: t:T\\nrun: {tmp_path}/a/b\\nbatch: 1\\n' > {tmp_path}/job.yaml",
    )
    assert [one for one in found if one.level is Level.ERROR] == []
    assert doctor.exit_code(found) == 0
    assert {"python", "torch", "deepspeed", "compiler", "libaio", "disk", "store", "clock"} <= {
        f.subject for f in found
    }
    assert all(map(complete, found))
    assert [path.name for path in tmp_path.iterdir()] == ["job.yaml"], "the run folder was not there before either"


def test_full_ends_at_its_deadline() -> None:
    start = time.monotonic()
    found = doctor.full(None, deadline_s=0.3)
    assert time.monotonic() - start < 10.0
    late = only(found, "torch")
    assert "deadline" in late.fact


def test_errors_come_first_and_decide_the_exit_code() -> None:
    def of(level: Level, subject: str) -> Finding:
        return Finding(level=level, subject=subject, fact="")

    assert doctor.exit_code([]) == 0
    assert doctor.exit_code([of(Level.WARNING, "shm"), of(Level.OK, "disk")]) == 0
    assert doctor.exit_code([of(Level.ERROR, "store")]) == 6
    assert doctor.exit_code([of(Level.ERROR, "store"), of(Level.ERROR, "torch")]) == 2


# The machine.


def test_no_compiler_and_one_that_does_not_work(tmp_path: Path) -> None:
    finding = only(doctor_host.check_compiler({"PATH": str(tmp_path)}), "compiler")
    assert finding.level is Level.WARNING
    assert "no C++ compiler" in finding.fact
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho 'fatal error: vector: No such file' >&2\nexit 1\n")
    broken.chmod(0o755)
    finding = only(doctor_host.check_compiler({"PATH": f"{tmp_path}:/bin:/usr/bin"}), "compiler")
    assert "vector: No such file" in finding.fact
    assert complete(finding)


@pytest.fixture
def mount(tmp_path: Path):
    """Mounts a tmpfs with the given options; skips where that is not allowed."""
    mounted: list[Path] = []

    def make(folder: Path, options: str) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        program = shutil.which("mount")
        done = program and subprocess.run(
            [program, "-t", "tmpfs", "-o", options, "none", str(folder)], capture_output=True, text=True, timeout=20
        )
        if not done or done.returncode:
            pytest.skip(f"may not mount: {done.stderr.strip() if done else 'no mount program'}")
        mounted.append(folder)
        return folder

    yield make
    for folder in mounted:
        subprocess.run(["umount", str(folder)], check=True, timeout=20)


@linux
def test_small_shared_memory(mount, tmp_path: Path) -> None:
    mount(tmp_path / "dev/shm", "size=4m")
    host = probe(root=tmp_path).host
    assert host.shm_total_bytes == 4 << 20
    finding = only(doctor_host.check_shm(host), "shm")
    assert finding.level is Level.WARNING
    assert "4.0 MiB free of 4.0 MiB" in finding.fact
    assert complete(finding)


@linux
def test_limits_of_the_shell() -> None:
    found = elsewhere("found = list(doctor_host.check_ulimits())", shell="ulimit -S -n 64; ulimit -v 16000000")
    files = only(found, "limits.files")
    assert files.level is Level.WARNING
    assert "may open 64 files" in files.fact
    assert files.fix.startswith("ulimit -n ")
    size = only(found, "limits.size")
    assert "address space" in size.fact
    assert size.fix == "ulimit -v unlimited"


def test_disk_too_small_for_the_checkpoints_to_keep(hardware: Hardware, tmp_path: Path) -> None:
    host = hardware.host
    good = only(doctor_host.check_disk(job(tmp_path), host, 1 << 20), "disk")
    assert good.level is Level.OK
    bad = only(doctor_host.check_disk(job(tmp_path), host, 1 << 60), "disk")
    assert bad.level is Level.ERROR
    assert "4 checkpoints take" in bad.fact, "three are kept while the fourth is written"
    remote = job(tmp_path, "").model_copy(update={"run": "s3://bucket/run"})
    assert list(doctor_host.check_disk(remote, host, 1 << 60)) == []


def test_clock_that_is_years_behind() -> None:
    assert only(doctor_host.check_clock(), "clock").level is Level.OK
    finding = only(doctor_host.check_clock(now=0.0), "clock")
    assert finding.level is Level.WARNING
    assert "1970-01-01" in finding.fact


@pytest.mark.parametrize("name", ["x" * 70, "two words", "a..b"])
def test_own_name_that_does_not_resolve(name: str) -> None:
    assert only(doctor_host.check_hostname(name, several=False), "network.name").level is Level.WARNING
    finding = only(doctor_host.check_hostname(name, several=True), "network.name")
    assert finding.level is Level.ERROR
    assert name in finding.fact
    assert complete(finding)


def test_own_name_that_leads_to_itself_matters_on_a_cluster() -> None:
    assert only(doctor_host.check_hostname("localhost", several=False), "network.name").level is Level.OK
    assert only(doctor_host.check_hostname("localhost", several=True), "network.name").level is Level.WARNING


@pytest.mark.parametrize(
    ("variable", "value", "wrong"),
    [
        ("NCCL_SOCKET_IFNAME", "ib", True),
        ("NCCL_SOCKET_IFNAME", "eth", False),
        ("NCCL_SOCKET_IFNAME", "=eth", True),
        ("NCCL_SOCKET_IFNAME", "^docker,lo", False),
        ("NCCL_SOCKET_IFNAME", "ib,eth", False),
        ("GLOO_SOCKET_IFNAME", "eth", True),
        ("GLOO_SOCKET_IFNAME", "eth0", False),
    ],
)
def test_variables_that_choose_an_interface(tmp_path: Path, variable: str, value: str, wrong: bool) -> None:
    for name, state in (("eth0", "up"), ("lo", "unknown"), ("wlan0", "down")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "operstate").write_text(f"{state}\n")
    found = list(doctor_host.check_interfaces({variable: value}, False, tmp_path))
    assert found[0].fact == "network interfaces that are up: eth0"
    assert [one.level for one in found[1:]] == ([Level.ERROR] if wrong else [])


# The store.


def test_store_that_works_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    finding = only(check_store(str(tmp_path / "a/b"), {}, time.monotonic() + 20), "store")
    assert finding.level is not Level.ERROR
    assert re.search(r"written at \d+ MB/s, read at \d+ MB/s", finding.fact)
    assert list(tmp_path.iterdir()) == []


def test_store_below_a_file_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    finding = only(check_store(str(tmp_path / "file/run"), {}, time.monotonic() + 5), "store")
    assert finding.level is Level.ERROR
    assert str(tmp_path / "file") in finding.fact
    assert complete(finding)


@linux
def test_store_that_is_read_only(mount, tmp_path: Path) -> None:
    folder = mount(tmp_path / "locked", "ro")
    start = time.monotonic()
    finding = only(check_store(str(folder / "run"), {}, time.monotonic() + 120), "store")
    assert finding.level is Level.ERROR
    assert time.monotonic() - start < 20.0, "what cannot change is not tried again"


def test_store_that_is_too_small(mount, tmp_path: Path) -> None:
    folder = mount(tmp_path / "small", "size=1m")
    finding = only(check_store(str(folder / "run"), {}, time.monotonic() + 5), "store")
    assert finding.level is Level.ERROR
    assert list(folder.rglob("*")) == [], "the probe that did not fit is gone"


# GPUs.


def test_gpu_that_others_use(hardware: Hardware) -> None:
    me = DeviceProcess(pid=os.getpid(), name="rung", bytes=GIB)
    left = DeviceProcess(pid=os.getppid(), name="old-run", bytes=9 * GIB)
    used = replace(hardware, devices=(gpu(processes=(me, left), free_bytes=30 * GIB),))
    finding = only(doctor_gpus.check_busy(used), "gpu.busy")
    assert finding.level is Level.WARNING
    assert f"10.0 GiB are in use by old-run (pid {os.getppid()})" in finding.fact
    assert f"kill {os.getppid()}" in finding.fix
    idle = replace(hardware, devices=(gpu(),))
    assert only(doctor_gpus.check_busy(idle), "gpu.busy").level is Level.OK
    hidden = replace(hardware, devices=(gpu(free_bytes=20 * GIB),))
    assert "does not name" in only(doctor_gpus.check_busy(hidden), "gpu.busy").fact


@linux
def test_health_of_gpus_by_the_drivers_library(hardware: Hardware, tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    source = ROOT / "tests/cluster/nvml_stub.c"
    library = tmp_path / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-w", "-o", str(library), str(source)], check=True, timeout=60)
    environ = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "RUNG_TEST_NVML": "two"}
    both = tuple(gpu(uuid=f"GPU-{letter}0000000-1111-2222-3333-444444444444") for letter in "ab")
    found = list(doctor_gpus.check_health(replace(hardware, devices=both), time.monotonic() + 10, environ))
    assert [one.subject for one in found] == ["gpu.health", "gpu.ecc", "gpu.ecc", "gpu.clocks", "gpu.pcie"]
    assert "3 uncorrectable memory errors" in found[1].fact
    assert "hardware thermal slowdown in force at 91 °C, clock 210 MHz of 1410" in found[3].fact
    assert "4 of 16 lanes" in found[4].fact
    assert all(map(complete, found))
    only_first = replace(hardware, devices=both[:1])
    found = list(doctor_gpus.check_health(only_first, time.monotonic() + 10, environ))
    assert [one.subject for one in found] == ["gpu.health"], "a GPU that the run does not use is not its trouble"
    assert list(doctor_gpus.check_health(replace(hardware, devices=()), time.monotonic(), environ)) == []


def test_kernel_log_with_and_without_gpu_errors() -> None:
    log = (
        "[1.0] usb 1-1: new device\n"
        "[2.0] NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', GPU has fallen off the bus.\n"
        "[3.0] NVRM: Xid (PCI:0000:3b:00): 79, pid=77\n[4.0] NVRM: Xid (PCI:0000:5e:00): 999, x\n"
    )
    first, second = doctor_gpus.judge_log(log)
    assert first.fact == "Xid 79 on the GPU at 0000:3b:00, 2 times since the machine started"
    assert "fell off the bus" in first.why
    assert "list of Xid errors" in second.why
    assert [one.level for one in doctor_gpus.judge_log("[1.0] all is well\n")] == [Level.OK]


def test_check_that_fails_is_said_and_does_not_stop_the_others(hardware: Hardware) -> None:
    known = Finding(level=Level.WARNING, subject="probe", fact="something could not be read")
    broken = replace(hardware, host=None, devices=(), findings=(known,))  # type: ignore[arg-type]
    found = doctor.quick(None, broken)
    assert "could not be checked: AttributeError" in only(found, "shm").fact
    assert "could not be checked: AttributeError" in only(found, "disk").fact, "checks after it were made"
    assert known in found, "and those before it"
