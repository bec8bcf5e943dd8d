"""The accelerators of this machine, in the order in which PyTorch would count them. PyTorch is not imported here."""

import os
import platform
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from rung.cluster import nvml, rocm
from rung.cluster.bounded import InChild
from rung.strategies.findings import Finding, Level

DeviceKind = Literal["cpu", "cuda", "mps"]
Visible = TypeVar("Visible")

_NVML = "import sys; from rung.cluster import nvml; nvml.main(sys.argv[3:])"
_TORCH = """
import json, torch
found = []
for index in range(torch.cuda.device_count()):
    facts = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    found.append({
        "name": facts.name, "uuid": str(getattr(facts, "uuid", "")), "total": total, "free": free,
        "capability": getattr(facts, "gcnArchName", "").split(":")[0] or f"{facts.major}.{facts.minor}",
        "bf16": torch.cuda.is_bf16_supported(), "vendor": "amd" if torch.version.hip else "nvidia",
    })
print(json.dumps(found))
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceProcess:
    """A process that holds memory on a device. `bytes` is None where the driver does not tell; `name` may be empty."""

    pid: int
    name: str
    bytes: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceLink:
    """The way from one device to another: `kind` is nvlink or xgmi, or the nearest thing that both hang on
    (same-board, pcie-switch, pcie-switches, host-bridge, numa-node, system). `lanes`: direct connections."""

    peer: str
    kind: str
    lanes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """Something to train on.

    `index` is the number that PyTorch gives it in this process; `physical_index` its number on the machine, in the
    order of PCI addresses. `uuid` names it for good and is what a worker's CUDA_VISIBLE_DEVICES should hold.
    `capability` is the CUDA compute capability ("9.0"), AMD's chip name ("gfx942"), or the best matrix extension of
    a CPU. `bf16`: bfloat16 arithmetic in hardware. PyTorch calls AMD's GPUs "cuda" too; `vendor` tells them apart.
    `mig`: part of a GPU; `alias` is then the older name that CUDA_VISIBLE_DEVICES may hold.
    """

    kind: DeviceKind
    index: int
    name: str
    uuid: str
    total_bytes: int
    free_bytes: int
    capability: str | None
    bf16: bool
    vendor: str
    physical_index: int = 0
    pci: str = ""
    numa_node: int | None = None
    mig: bool = False
    alias: str = ""
    processes: tuple[DeviceProcess, ...] = ()
    links: tuple[DeviceLink, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpus:
    """`driver` is the kernel driver's version, `runtime` the newest CUDA that it serves ("12.4"); both may be empty."""

    devices: tuple[Device, ...] = ()
    driver: str = ""
    runtime: str = ""
    findings: tuple[Finding, ...] = ()


class GpuProbe:
    """Starts looking at once, without waiting; `answer` gives what was found. On a machine without a GPU's device
    files nothing is started."""

    def __init__(self, root: Path = Path("/"), environ: Mapping[str, str] | None = None) -> None:
        self._root = root
        self._environ = dict(os.environ if environ is None else environ)
        self._nvidia = has_nvidia(root)
        self._amd = (root / "dev/kfd").exists()
        self._child = InChild(_NVML, env=self._environ) if self._nvidia else None

    def answer(self, deadline: float, *, torch_deadline_s: float = 60.0) -> Gpus:
        """`deadline` is a point of `time.monotonic`. Where a GPU's device file exists but the driver's own interface
        fails, PyTorch is asked in a throw-away process, for at most `torch_deadline_s`. Never raises."""
        found = Gpus()
        if self._child is not None:
            found = self._nvidia_gpus(self._child, deadline)
        if not found.devices and self._amd:
            found = self._amd_gpus(found)
        if not found.devices and any(finding.level is Level.ERROR for finding in found.findings):
            found = self._torch_gpus(found, torch_deadline_s)
        return found

    def _nvidia_gpus(self, child: InChild, deadline: float) -> Gpus:
        answer = child.answer(deadline)
        if answer.value is None:
            return Gpus(
                findings=(
                    Finding(
                        level=Level.ERROR,
                        subject="cuda.nvml",
                        fact=f"the NVIDIA driver could not be asked: {answer.reason}",
                        why="there is an NVIDIA device file, but no GPU can be used before its driver answers",
                        fix="pip install nvidia-ml-py" if "No module named" in answer.reason else "nvidia-smi",
                    ),
                )
            )
        raw = cast("nvml.RawNvidia", answer.value)
        findings = [_unread("cuda.nvml", what, reason) for what, reason in raw["unread"]]
        devices = _from_nvidia(raw["gpus"], self._root)
        visible, remarks = select(devices, self._environ.get("CUDA_VISIBLE_DEVICES"), "CUDA_VISIBLE_DEVICES")
        findings += remarks
        names = {gpu["name"] for gpu in raw["gpus"]}
        by_number = any(token.strip().isdigit() for token in self._environ.get("CUDA_VISIBLE_DEVICES", "").split(","))
        if by_number and len(names) > 1 and self._environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
            findings.append(
                Finding(
                    level=Level.WARNING,
                    subject="cuda.order",
                    fact="CUDA_VISIBLE_DEVICES holds numbers, and the GPUs of this machine are of different kinds",
                    why="CUDA then counts the fastest first, while nvidia-smi counts by PCI address",
                    fix="export CUDA_DEVICE_ORDER=PCI_BUS_ID, or name the GPUs by UUID (nvidia-smi -L)",
                )
            )
        return Gpus(devices=visible, driver=raw["driver"], runtime=raw["cuda"], findings=tuple(findings))

    def _amd_gpus(self, before: Gpus) -> Gpus:
        try:
            raw = rocm.ask(self._root)
        except (OSError, ValueError) as error:
            finding = _unread("rocm", "/sys/class/kfd", str(error))
            return replace(before, findings=(*before.findings, replace(finding, level=Level.ERROR)))
        devices = _from_amd(raw, self._root)
        findings = list(before.findings)
        # HIP counts within what ROCr leaves, and takes CUDA's variable where its own is not set.
        inner = "HIP_VISIBLE_DEVICES" if "HIP_VISIBLE_DEVICES" in self._environ else "CUDA_VISIBLE_DEVICES"
        for variable in ("ROCR_VISIBLE_DEVICES", inner):
            devices, remarks = select(devices, self._environ.get(variable), variable)
            findings += remarks
        version = self._root / "sys/module/amdgpu/version"
        driver = version.read_text().strip() if version.is_file() else ""
        return Gpus(devices=devices, driver=driver, findings=tuple(findings))

    def _torch_gpus(self, before: Gpus, deadline_s: float) -> Gpus:
        answer = InChild(_TORCH, env=self._environ).answer(time.monotonic() + deadline_s)
        if answer.value is None:
            finding = _unread("cuda.torch", "GPUs through PyTorch", answer.reason)
            return replace(before, findings=(*before.findings, finding))
        devices = tuple(
            Device(
                kind="cuda",
                index=index,
                physical_index=index,
                name=one["name"],
                uuid=one["uuid"] if one["uuid"].startswith("GPU-") or not one["uuid"] else f"GPU-{one['uuid']}",
                total_bytes=one["total"],
                free_bytes=one["free"],
                capability=one["capability"],
                bf16=one["bf16"],
                vendor=one["vendor"],
            )
            for index, one in enumerate(cast("list[dict[str, Any]]", answer.value))
        )
        return replace(before, devices=devices)


def has_nvidia(root: Path = Path("/")) -> bool:
    """Whether an NVIDIA driver shows itself (WSL2 has one device file for all GPUs)."""
    return any((root / path).exists() for path in ("dev/nvidiactl", "dev/nvidia0", "dev/dxg"))


def gpu_health(deadline: float, *, environ: Mapping[str, str] | None = None) -> tuple[nvml.RawNvidia | None, str]:
    """NVML's word on memory errors, clocks and PCIe, or None and the reason. `deadline`: of `time.monotonic`."""
    answer = InChild(_NVML, arguments=("health",), env=environ).answer(deadline)
    return cast("nvml.RawNvidia | None", answer.value), answer.reason


def select(
    devices: tuple[Device, ...], value: str | None, variable: str
) -> tuple[tuple[Device, ...], tuple[Finding, ...]]:
    """The devices that CUDA shows under CUDA_VISIBLE_DEVICES=`value`, numbered anew, and remarks.

    As CUDA has it: unset shows all; entries are numbers, or beginnings of UUIDs that fit just one device; the first
    entry that names none hides itself and all that follow; one device named twice hides all.
    """
    if value is None:
        return _renumbered(devices), ()
    chosen: list[Device] = []
    tokens = [token.strip() for token in value.split(",")]
    for token in tokens:
        fits = [device for device in devices if _names(token, device)]
        # A whole GPU that is cut into MIG instances stands for its first instance.
        fits = fits[:1] if token.isdigit() else fits
        if len(fits) != 1:
            if token in ("", "-1", "NoDevFiles"):  # the usual ways to say "none"
                break
            remark = f"{variable}={value!r}: {token!r} names no single device, so it and all after it are hidden"
            return _renumbered(chosen), (_hidden(variable, remark),)
        if fits[0] in chosen:
            return (), (_hidden(variable, f"{variable}={value!r} names {fits[0].uuid} twice, so no device is shown"),)
        chosen.append(fits[0])
    return _renumbered(chosen), ()


def _names(token: str, device: Device) -> bool:
    if token.isascii() and token.isdigit():
        return len(token) < 6 and int(token) == device.physical_index
    if token.startswith("MIG-") and "/" in token:  # the older kind of name
        return token == device.alias
    return bool(token) and device.uuid.lower().startswith(token.lower())


def _hidden(variable: str, fact: str) -> Finding:
    return Finding(
        level=Level.WARNING,
        subject="devices.visible",
        fact=fact,
        why="fewer devices are used than were probably meant",
        fix=f"unset {variable}, or set it to numbers or UUIDs from: nvidia-smi -L (AMD: rocm-smi --showuniqueid)",
    )


def _renumbered(devices: Iterable[Device]) -> tuple[Device, ...]:
    """Numbers from 0 on, and only links between devices that are in."""
    kept = list(devices)
    uuids = {device.uuid for device in kept}
    return tuple(
        replace(device, index=index, links=tuple(link for link in device.links if link.peer in uuids))
        for index, device in enumerate(kept)
    )


def _from_nvidia(gpus: list[nvml.RawGpu], root: Path) -> tuple[Device, ...]:
    devices: list[Device] = []
    for gpu in gpus:
        capability = gpu["capability"]
        whole = Device(
            kind="cuda",
            index=gpu["index"],
            physical_index=gpu["index"],
            name=gpu["name"],
            uuid=gpu["uuid"],
            total_bytes=gpu["total"] or _host_memory(root)[0],
            free_bytes=gpu["free"] or (0 if gpu["total"] else _host_memory(root)[1]),
            capability=capability,
            bf16=capability is not None and int(capability.split(".")[0]) >= 8,
            vendor="nvidia",
            pci=gpu["pci"],
            numa_node=_numa_node(root, gpu["pci"]),
            processes=tuple(_process(one["pid"], one["bytes"], root) for one in gpu["processes"]),
            links=tuple(DeviceLink(peer=peer, kind=kind, lanes=lanes) for peer, kind, lanes in gpu["links"]),
        )
        if not gpu["mig"]:
            devices.append(whole)
            continue
        devices += [
            replace(
                whole,
                name=part["name"],
                uuid=part["uuid"],
                total_bytes=part["total"],
                free_bytes=part["free"],
                alias=part["legacy"],
                mig=True,
                processes=tuple(_process(one["pid"], one["bytes"], root) for one in part["processes"]),
                links=(),  # instances cannot reach each other or another GPU's memory
            )
            for part in gpu["instances"]
        ]
    return tuple(devices)


def _from_amd(gpus: list[rocm.RawAmd], root: Path) -> tuple[Device, ...]:
    return tuple(
        Device(
            kind="cuda",
            index=number,
            physical_index=number,
            name=gpu["name"],
            uuid=gpu["uuid"],
            total_bytes=gpu["total"],
            free_bytes=gpu["free"],
            capability=gpu["target"],
            bf16=rocm.has_bf16(gpu["target"]),
            vendor="amd",
            pci=gpu["pci"],
            numa_node=_numa_node(root, gpu["pci"]),
            processes=tuple(_process(pid, held, root) for pid, held in gpu["processes"]),
            links=tuple(DeviceLink(peer=peer, kind=kind, lanes=lanes) for peer, kind, lanes in gpu["links"]),
        )
        for number, gpu in enumerate(gpus)
    )


def apple_gpu(memory_total_bytes: int, memory_available_bytes: int) -> tuple[Device, ...]:
    """The GPU of an Apple computer with its own chips, by what the platform says; memory is shared with the CPU.

    Metal advises to use no more than about two thirds of the memory (three quarters from 48 GB on).
    """
    if platform.system() != "Darwin" or platform.machine() != "arm64":
        return ()
    version = tuple(int(part) for part in platform.mac_ver()[0].split(".")[:2] if part.isdigit())
    total = memory_total_bytes * 3 // 4 if memory_total_bytes >= 48 << 30 else memory_total_bytes * 2 // 3
    device = Device(
        kind="mps",
        index=0,
        name="Apple GPU",
        uuid="mps-0",
        total_bytes=total,
        free_bytes=min(total, memory_available_bytes),
        capability=None,
        bf16=version >= (14, 0),  # the first macOS whose Metal has bfloat16
        vendor="apple",
    )
    return (device,) if version >= (12, 3) else ()  # the first macOS that PyTorch's MPS runs on


def _process(pid: int, held: int | None, root: Path) -> DeviceProcess:
    return DeviceProcess(pid=pid, name=nvml.process_name(pid, root), bytes=held)


def _numa_node(root: Path, pci: str) -> int | None:
    # NVML writes the domain with eight digits, the kernel with four.
    name = pci.lower()[4:] if len(pci.partition(":")[0]) == 8 else pci.lower()
    file = root / "sys/bus/pci/devices" / (name or "none") / "numa_node"
    try:
        node = int(file.read_text())
    except (OSError, ValueError):  # no such file in many containers; only a help for pinning
        return None
    return node if node >= 0 else None


def _host_memory(root: Path) -> tuple[int, int]:
    """(total, available) of the machine, for GPUs that have no memory of their own (Jetson, DGX Spark)."""
    facts: dict[str, int] = {}
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        facts[name] = int(rest.split()[0]) * 1024
    return facts.get("MemTotal", 0), facts.get("MemAvailable", 0)


def _unread(subject: str, what: str, reason: str) -> Finding:
    return Finding(
        level=Level.WARNING,
        subject=subject,
        fact=f"could not read {what}: {reason}",
        why="rung goes on with what it knows",
    )
