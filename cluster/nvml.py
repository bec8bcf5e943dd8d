"""NVIDIA GPUs as the driver's management library (NVML) knows them. No CUDA context is made, no memory is taken.

Meant to run in a process of its own (`gpus.py` starts it), since a wedged driver hangs its callers for good. The
answer is plain JSON values.
"""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict

_LEVELS = {0: "same-board", 10: "pcie-switch", 20: "pcie-switches", 30: "host-bridge", 40: "numa-node", 50: "system"}
_MAX_NVLINKS = 18
_SLOWDOWNS = {  # bits of the "clocks event reasons" that mean trouble; idle, power cap and user settings do not
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}


class RawProcess(TypedDict):
    """`bytes` is None where the driver does not tell (as for a process of another container)."""

    pid: int
    bytes: int | None


class RawInstance(TypedDict):
    """One MIG instance. `legacy` is the older name, MIG-<GPU's UUID>/<GPU instance>/<compute instance>."""

    uuid: str
    legacy: str
    name: str
    total: int
    free: int
    processes: list[RawProcess]


class RawGpu(TypedDict):
    """One GPU, in the order of its PCI address. `links` holds [UUID of the peer, kind, NVLink connections]."""

    index: int
    uuid: str
    name: str
    total: int
    free: int
    capability: str | None
    pci: str
    processes: list[RawProcess]
    mig: bool
    instances: list[RawInstance]
    links: list[tuple[str, str, int]]
    health: dict[str, Any]


class RawNvidia(TypedDict):
    """`unread` holds [what, reason]."""

    driver: str
    cuda: str
    gpus: list[RawGpu]
    unread: list[tuple[str, str]]


class _Asker:
    """Asks one question at a time; an error of the driver is remembered and becomes the default."""

    def __init__(self) -> None:
        import pynvml

        self.nvml: Any = pynvml
        self.unread: list[tuple[str, str]] = []

    def ask(self, what: str, default: Any, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except self.nvml.NVMLError_NotSupported:  # a fact about the device, not a failure
            return default
        except self.nvml.NVMLError as error:
            self.unread.append((what, str(error)))
            return default


def ask(*, health: bool = False) -> RawNvidia:
    """Everything about all GPUs. Raises pynvml.NVMLError if the driver cannot be reached, ImportError without pynvml.

    `health` adds what `rung doctor` wants to know: memory errors, clocks and PCIe width.
    """
    asker = _Asker()
    nvml = asker.nvml
    nvml.nvmlInit()
    cuda = asker.ask("CUDA version of the driver", 0, nvml.nvmlSystemGetCudaDriverVersion_v2)
    gpus: list[RawGpu] = []
    handles: list[Any] = []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            gpu = _gpu(asker, handle, index)
        except nvml.NVMLError as error:  # such as "GPU is lost"; the others still count
            asker.unread.append((f"GPU {index}", str(error)))
            continue
        gpu["health"] = _health(asker, handle, f"GPU {index}") if health else {}
        gpus.append(gpu)
        handles.append(handle)
    _add_links(asker, handles, gpus)
    return {
        "driver": _text(asker.ask("driver version", "", nvml.nvmlSystemGetDriverVersion)),
        "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else "",
        "gpus": gpus,
        "unread": asker.unread,
    }


def _gpu(asker: _Asker, handle: Any, index: int) -> RawGpu:
    nvml, name = asker.nvml, f"GPU {index}"
    uuid = _text(nvml.nvmlDeviceGetUUID(handle))
    memory = asker.ask(f"{name} memory", None, nvml.nvmlDeviceGetMemoryInfo, handle)
    capability = asker.ask(f"{name} capability", None, nvml.nvmlDeviceGetCudaComputeCapability, handle)
    mig = asker.ask(f"{name} MIG mode", [0], nvml.nvmlDeviceGetMigMode, handle)[0] == 1
    pci = asker.ask(f"{name} PCI address", None, nvml.nvmlDeviceGetPciInfo, handle)
    return {
        "index": index,
        "uuid": uuid,
        "name": _text(asker.ask(f"{name} name", "NVIDIA GPU", nvml.nvmlDeviceGetName, handle)),
        "total": memory.total if memory else 0,
        "free": memory.free if memory else 0,
        "capability": f"{capability[0]}.{capability[1]}" if capability else None,
        "pci": _text(pci.busId) if pci else "",
        "processes": _processes(asker, handle, name),
        "mig": mig,
        "instances": _instances(asker, handle, uuid, name) if mig else [],
        "links": [],
        "health": {},
    }


def _instances(asker: _Asker, handle: Any, parent: str, name: str) -> list[RawInstance]:
    nvml = asker.nvml
    found: list[RawInstance] = []
    for index in range(asker.ask(f"{name} MIG count", 0, nvml.nvmlDeviceGetMaxMigDeviceCount, handle)):
        try:
            part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except nvml.NVMLError_NotFound:  # slots need not be filled
            continue
        what = f"{name} MIG {index}"
        memory = nvml.nvmlDeviceGetMemoryInfo(part)
        outer = asker.ask(what, None, nvml.nvmlDeviceGetGpuInstanceId, part)
        inner = asker.ask(what, None, nvml.nvmlDeviceGetComputeInstanceId, part)
        found.append(
            {
                "uuid": _text(nvml.nvmlDeviceGetUUID(part)),
                "legacy": "" if outer is None or inner is None else f"MIG-{parent}/{outer}/{inner}",
                "name": _text(asker.ask(what, "MIG instance", nvml.nvmlDeviceGetName, part)),
                "total": memory.total,
                "free": memory.free,
                "processes": _processes(asker, part, what),
            }
        )
    return found


def _processes(asker: _Asker, handle: Any, name: str) -> list[RawProcess]:
    nvml = asker.nvml
    try:
        found = nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle)
    except nvml.NVMLError:  # drivers before R510 know the second version only; if that fails too, it is remembered
        found = asker.ask(f"{name} processes", [], nvml.nvmlDeviceGetComputeRunningProcesses_v2, handle)
    return [{"pid": one.pid, "bytes": one.usedGpuMemory} for one in found]


def _add_links(asker: _Asker, handles: list[Any], gpus: list[RawGpu]) -> None:
    nvml = asker.nvml
    if len(gpus) < 2:
        return
    wires = [_nvlinks(asker, handle, f"GPU {index} NVLink") for index, handle in enumerate(handles)]
    for one in range(len(gpus)):
        for two in range(one + 1, len(gpus)):
            # Wires either end at the peer itself, or at a switch that joins all that are on it.
            count = wires[one].get(gpus[two]["pci"], 0) or min(wires[one].get("switch", 0), wires[two].get("switch", 0))
            kind = "nvlink"
            if not count:
                what = f"path between GPU {one} and {two}"
                level = asker.ask(what, -1, nvml.nvmlDeviceGetTopologyCommonAncestor, handles[one], handles[two])
                kind = _LEVELS.get(level, "unknown")
            gpus[one]["links"].append((gpus[two]["uuid"], kind, count))
            gpus[two]["links"].append((gpus[one]["uuid"], kind, count))


def _nvlinks(asker: _Asker, handle: Any, what: str) -> dict[str, int]:
    """Active NVLink connections by where they end: a PCI address, or "switch"."""
    nvml = asker.nvml
    ends: dict[str, int] = {}
    for link in range(_MAX_NVLINKS):
        try:
            if not nvml.nvmlDeviceGetNvLinkState(handle, link):
                continue
            switch = nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link) == 2
            end = "switch" if switch else _text(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId)
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_InvalidArgument):  # no NVLink, or no more of them
            break
        except nvml.NVMLError as error:
            asker.unread.append((what, str(error)))
            break
        ends[end] = ends.get(end, 0) + 1
    return ends


def _health(asker: _Asker, handle: Any, name: str) -> dict[str, Any]:
    """What was told about errors and speed; a missing key means the device does not tell."""
    nvml = asker.nvml
    questions: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
        "uncorrected_errors": (nvml.nvmlDeviceGetTotalEccErrors, (1, 0)),  # uncorrected, since the driver was loaded
        "remapped_rows": (nvml.nvmlDeviceGetRemappedRows, ()),
        "retirement_pending": (nvml.nvmlDeviceGetRetiredPagesPendingStatus, ()),
        "clock_reasons": (nvml.nvmlDeviceGetCurrentClocksThrottleReasons, ()),
        "clock_mhz": (nvml.nvmlDeviceGetClockInfo, (1,)),  # 1: the streaming multiprocessors' clock
        "clock_max_mhz": (nvml.nvmlDeviceGetMaxClockInfo, (1,)),
        "temperature_c": (nvml.nvmlDeviceGetTemperature, (0,)),  # 0: the GPU's own sensor
        "pcie_width": (nvml.nvmlDeviceGetCurrPcieLinkWidth, ()),
        "pcie_max_width": (nvml.nvmlDeviceGetMaxPcieLinkWidth, ()),
        "compute_mode": (nvml.nvmlDeviceGetComputeMode, ()),
    }
    answers = {key: asker.ask(f"{name} {key}", None, call, handle, *more) for key, (call, more) in questions.items()}
    reasons = answers.pop("clock_reasons") or 0
    answers["slowdowns"] = [words for bit, words in _SLOWDOWNS.items() if reasons & bit]
    return {key: value for key, value in answers.items() if value is not None}


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def process_name(pid: int, root: Path = Path("/")) -> str:
    """The program of a process, or "" if it cannot be seen: GPU drivers tell PIDs as the host knows them."""
    with contextlib.suppress(OSError):
        return (root / f"proc/{pid}/comm").read_text(errors="replace").strip()
    return ""


def main(arguments: list[str]) -> None:
    """Prints the answer as JSON; for the child process."""
    print(json.dumps(ask(health="health" in arguments)))
