"""GPUs: a driver library made for the test, which can hang and crash, and the kernel's files of AMD GPUs."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from machine_tree import GIB, machine, write

from rung.cluster.gpus import Device, gpu_health, select
from rung.cluster.hardware import describe, from_dict, probe, to_dict
from rung.strategies.findings import Level

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc and /sys are Linux's")


# AMD, by files.


def amd(root: Path) -> Path:
    """A CPU node and two MI250 halves joined by xGMI."""
    nodes = "sys/class/kfd/kfd/topology/nodes"
    files = {
        "dev/kfd": "",
        "sys/module/amdgpu/version": "6.7.0\n",
        f"{nodes}/0/properties": "cpu_cores_count 64\nsimd_count 0\n",
        "sys/class/kfd/kfd/proc/77/vram_1002": f"{GIB}\n",
        "proc/77/comm": "python\n",
    }
    for node in (1, 2):
        files |= {
            f"{nodes}/{node}/properties": "simd_count 440\ngfx_target_version 90010\ndomain 0\n"
            f"location_id {0x100 * node + 0x300}\nunique_id {node + 0xAB00}\ndrm_render_minor {127 + node}\n",
            f"{nodes}/{node}/gpu_id": f"{1000 + node}\n",
            f"{nodes}/{node}/io_links/0/properties": "type 2\nnode_from 1\nnode_to 0\n",
            f"{nodes}/{node}/io_links/1/properties": f"type 11\nnode_to {3 - node}\n",
            f"sys/class/drm/renderD{127 + node}/device/mem_info_vram_total": f"{64 * GIB}\n",
            f"sys/class/drm/renderD{127 + node}/device/mem_info_vram_used": f"{GIB}\n",
            f"sys/class/drm/renderD{127 + node}/device/product_name": "AMD Instinct MI250X\n",
            f"sys/bus/pci/devices/0000:0{node + 3}:00.0/numa_node": f"{node}\n",
        }
    return write(machine(root), files)


@linux
def test_amd_gpus_are_read_from_the_kernels_files(tmp_path: Path) -> None:
    hardware = probe(root=amd(tmp_path), environ={})
    first, second = hardware.of("cuda")
    assert hardware.best == (first, second)
    assert hardware.driver == "6.7.0"
    assert (first.vendor, first.name, first.capability, first.bf16) == ("amd", "AMD Instinct MI250X", "gfx90a", True)
    assert (first.total_bytes, first.free_bytes) == (64 * GIB, 63 * GIB)
    assert first.uuid == "GPU-000000000000ab01"
    assert (first.pci, first.numa_node) == ("0000:04:00.0", 1)
    assert [(link.peer, link.kind) for link in first.links] == [(second.uuid, "xgmi")]
    assert [(one.pid, one.name, one.bytes) for one in second.processes] == [(77, "python", GIB)]
    assert hardware.findings == ()


@linux
def test_rocms_two_filters_come_one_after_the_other(tmp_path: Path) -> None:
    root = amd(tmp_path)
    uuid = "GPU-000000000000ab02"
    assert [one.uuid for one in probe(root=root, environ={"ROCR_VISIBLE_DEVICES": uuid}).of("cuda")] == [uuid]
    hidden = probe(root=root, environ={"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "0"}).of("cuda")
    assert [(one.uuid, one.index, one.physical_index) for one in hidden] == [(uuid, 0, 1)]
    assert probe(root=root, environ={"HIP_VISIBLE_DEVICES": ""}).best[0].kind == "cpu"


@linux
def test_amd_files_that_make_no_sense_are_a_finding(tmp_path: Path) -> None:
    root = amd(tmp_path)
    (root / "sys/class/kfd/kfd/topology/nodes/2/properties").unlink()
    hardware = probe(root=root, environ={}, torch_deadline_s=0.0)
    assert hardware.of("cuda") == ()
    assert any("/sys/class/kfd" in finding.fact for finding in hardware.findings)


# NVIDIA, by a driver library made for the test.

Nvidia = Callable[..., tuple[Path, dict[str, str]]]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs a C compiler and Linux")
    folder = tmp_path_factory.mktemp("driver")
    source = Path(__file__).with_name("nvml_stub.c")
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-w", "-o", str(folder / "libnvidia-ml.so.1"), str(source)],
        check=True,
        timeout=60,
    )
    return folder


@pytest.fixture
def nvidia(library: Path, tmp_path: Path) -> Nvidia:
    root = write(machine(tmp_path), {"dev/nvidiactl": "", "proc/4242/comm": "trainer\n"})

    def chosen(which: str, **more: str) -> tuple[Path, dict[str, str]]:
        environ = {key: value for key, value in os.environ.items() if not key.startswith("CUDA_")}
        return root, {**environ, "LD_LIBRARY_PATH": str(library), "RUNG_TEST_NVML": which, **more}

    return chosen


def test_nvidia_gpus_with_topology_and_processes(nvidia: Nvidia) -> None:
    root, environ = nvidia("two")
    hardware = probe(root=root, environ=environ)
    first, second = hardware.of("cuda")
    assert (hardware.driver, hardware.runtime) == ("550.54.15", "12.4")
    assert (first.name, first.capability, first.bf16) == ("NVIDIA A100-SXM4-40GB", "8.0", True)
    assert (second.total_bytes, second.free_bytes) == (40 * GIB, 30 * GIB)
    assert [(one.pid, one.name, one.bytes) for one in second.processes] == [(4242, "trainer", 10 * GIB)]
    assert [(link.peer, link.kind, link.lanes) for link in first.links] == [(second.uuid, "nvlink", 7)]
    assert hardware.findings == ()
    text = "\n".join(describe(hardware))
    assert "cuda:1 NVIDIA A100-SXM4-40GB, 30.0 GiB free of 40.0 GiB" in text
    assert "in use by trainer 4242" in text
    assert from_dict(json.loads(json.dumps(to_dict(hardware)))) == hardware


def test_nvidia_old_driver_and_gpus_of_two_kinds(nvidia: Nvidia) -> None:
    root, environ = nvidia("old")
    assert [len(one.processes) for one in probe(root=root, environ=environ).of("cuda")] == [0, 1]
    root, environ = nvidia("mixed", CUDA_VISIBLE_DEVICES="1,0")
    hardware = probe(root=root, environ=environ)
    assert [(one.index, one.physical_index, one.bf16) for one in hardware.of("cuda")] == [(0, 1, True), (1, 0, False)]
    assert [finding.subject for finding in hardware.findings] == ["cuda.order"]
    environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    assert probe(root=root, environ=environ).findings == ()
    assert {link.kind for one in hardware.of("cuda") for link in one.links} == {"host-bridge"}


def test_nvidia_gpu_cut_into_instances(nvidia: Nvidia) -> None:
    root, environ = nvidia("mig")
    devices = probe(root=root, environ=environ).of("cuda")
    assert [(one.mig, one.total_bytes // GIB) for one in devices] == [(True, 20), (True, 20), (False, 40)]
    for value in ("MIG-20000000-1111", "MIG-GPU-a0000000-1111-2222-3333-444444444444/2/0"):
        environ["CUDA_VISIBLE_DEVICES"] = value
        assert [one.uuid for one in probe(root=root, environ=environ).of("cuda")] == [devices[1].uuid]


def test_nvidia_lost_gpu_leaves_the_other(nvidia: Nvidia) -> None:
    root, environ = nvidia("lost")
    hardware = probe(root=root, environ=environ)
    assert len(hardware.of("cuda")) == 1
    assert [finding.fact for finding in hardware.findings] == ["could not read GPU 1: GPU is lost"]


@pytest.mark.parametrize(
    ("which", "words"), [("absent", "Driver Not Loaded"), ("crash", "SIGABRT"), ("hang", "no answer before")]
)
def test_nvidia_driver_that_fails_does_not_fail_the_run(nvidia: Nvidia, which: str, words: str) -> None:
    root, environ = nvidia(which)
    start = time.monotonic()
    deadline_s = 0.5 if which == "hang" else 20.0
    hardware = probe(root=root, environ=environ, deadline_s=deadline_s, torch_deadline_s=0.0)
    assert time.monotonic() - start < deadline_s + 5.0
    assert hardware.best[0].kind == "cpu"
    finding = next(finding for finding in hardware.findings if finding.subject == "cuda.nvml")
    assert finding.level is Level.ERROR
    assert words in finding.fact


@pytest.mark.slow
def test_torch_is_asked_where_the_drivers_interface_fails(nvidia: Nvidia, tmp_path: Path) -> None:
    """A stand-in for PyTorch on the import path of the launcher's process; the launcher itself never loads it."""
    facts = "SimpleNamespace(name='A GPU', uuid='a-b', major=9, minor=0)"
    write(
        tmp_path,
        {
            "path/torch.py": "from types import SimpleNamespace\nversion = SimpleNamespace(hip=None)\n"
            "cuda = SimpleNamespace(device_count=lambda: 1, mem_get_info=lambda i: (5, 7), "
            f"get_device_properties=lambda i: {facts}, is_bf16_supported=lambda: True)\n"
        },
    )
    root, environ = nvidia("absent", PYTHONPATH=str(tmp_path / "path"))
    code = (
        "import sys, json; from pathlib import Path; from rung.cluster.hardware import *; "
        f"print(json.dumps(to_dict(probe(root=Path({str(root)!r}))))); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    device = from_dict(json.loads(done.stdout)).devices[0]
    assert (device.kind, device.name, device.uuid, device.total_bytes) == ("cuda", "A GPU", "GPU-a-b", 7)
    assert device.capability == "9.0"


def test_health_of_nvidia_gpus(nvidia: Nvidia) -> None:
    _, environ = nvidia("two")
    raw, reason = gpu_health(time.monotonic() + 10, environ=environ)
    assert raw is not None, reason
    assert raw["gpus"][1]["health"]["uncorrected_errors"] == 3
    assert raw["gpus"][1]["health"]["slowdowns"] == ["hardware thermal slowdown"]
    assert "retirement_pending" not in raw["gpus"][1]["health"], "not supported means not told"


# Which devices a variable shows.


def gpu(number: int, uuid: str) -> Device:
    return Device(
        kind="cuda",
        index=number,
        physical_index=number,
        name="GPU",
        uuid=uuid,
        total_bytes=1,
        free_bytes=1,
        capability="8.0",
        bf16=True,
        vendor="nvidia",
    )


GPUS = (gpu(0, "GPU-aa11"), gpu(1, "GPU-aa22"), gpu(2, "GPU-bb33"))


@pytest.mark.parametrize(
    ("value", "shown", "remark"),
    [
        (None, [0, 1, 2], False),
        ("", [], False),
        ("-1", [], False),
        ("NoDevFiles", [], False),
        ("2,0", [2, 0], False),
        (" 1 , 2 ", [1, 2], False),
        ("GPU-bb33", [2], False),
        ("GPU-BB", [2], False),
        ("GPU-aa", [], True),  # fits two
        ("1,9,0", [1], True),
        ("0,-1,2", [0], False),
        ("0,0", [], True),
        ("0,GPU-aa11", [], True),
        ("all", [], True),
        ("1" * 5000, [], True),
    ],
)
def test_visible_devices(value: str | None, shown: list[int], remark: bool) -> None:
    devices, findings = select(GPUS, value, "CUDA_VISIBLE_DEVICES")
    assert [device.physical_index for device in devices] == shown
    assert [device.index for device in devices] == list(range(len(shown)))
    assert bool(findings) == remark
