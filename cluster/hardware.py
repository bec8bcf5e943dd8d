"""What this machine has, asked in a few milliseconds, without PyTorch, and without ever failing the run.

    probe()  ->  Hardware(host, devices, findings)

Whatever hangs, raises or makes no sense becomes a finding with its reason.
"""

import json
import os
import platform
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from rung.cluster.bounded import InThread
from rung.cluster.gpus import Device, DeviceKind, DeviceLink, DeviceProcess, GpuProbe, apple_gpu
from rung.cluster.host import Host, NumaNode, read_host, read_space
from rung.cluster.limits import ROOT
from rung.strategies.errors import JobError
from rung.strategies.findings import Finding, Level

__all__ = [
    "Device",
    "DeviceKind",
    "DeviceLink",
    "DeviceProcess",
    "Hardware",
    "Host",
    "NumaNode",
    "describe",
    "from_dict",
    "probe",
    "to_dict",
]

_FORMAT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """`devices`: the accelerators in PyTorch's order, then the CPU as one device, always. `driver` and `runtime`: the
    GPU driver's version and the newest CUDA it serves; empty without one. `findings`: what could not be read."""

    host: Host
    devices: tuple[Device, ...]
    findings: tuple[Finding, ...] = ()
    driver: str = ""
    runtime: str = ""

    def of(self, kind: DeviceKind) -> tuple[Device, ...]:
        """The devices of one kind."""
        return tuple(device for device in self.devices if device.kind == kind)

    @property
    def best(self) -> tuple[Device, ...]:
        """The devices to train on if nothing else is asked for: the accelerators, or else the CPU."""
        return tuple(device for device in self.devices if device.kind != "cpu") or self.devices


def probe(
    *,
    folder: Path | None = None,
    deadline_s: float = 5.0,
    torch_deadline_s: float = 60.0,
    root: Path = ROOT,
    environ: Mapping[str, str] | None = None,
) -> Hardware:
    """Looks at this machine. `folder` is where free disk is measured (by default the current one).

    `root` and `environ` stand for the machine's file system and environment. Never raises and ends within
    `deadline_s`, but for one case: a GPU whose driver interface fails is looked for through PyTorch as well, for
    `torch_deadline_s` more.
    """
    deadline = time.monotonic() + deadline_s
    gpu_probe = GpuProbe(root, environ)
    wanted = folder if folder is not None else Path()  # the current folder may be gone by now
    host_answer = InThread(lambda: read_host(root))
    disk_answer = InThread(lambda: read_space(wanted))
    shm_folder = root / "dev/shm"
    shm_answer = InThread(lambda: read_space(shm_folder)) if shm_folder.is_dir() else None

    found = host_answer.answer(deadline)
    host, findings = found.value if found.value is not None else (_least_host(), [_no_answer("host", found.reason)])
    if shm_answer is not None:
        shm = shm_answer.answer(deadline)
        if shm.value is not None:
            host = replace(host, shm_total_bytes=shm.value[1], shm_free_bytes=shm.value[2])
        else:
            findings.append(_no_answer("shm", shm.reason))
    disk = disk_answer.answer(deadline)
    if disk.value is not None:
        place, total, free = disk.value
        host = replace(host, disk_folder=str(place), disk_total_bytes=total, disk_free_bytes=free)
    else:
        findings.append(_no_answer("disk", f"{wanted}: {disk.reason}"))
    gpus = gpu_probe.answer(deadline, torch_deadline_s=torch_deadline_s)
    accelerators = gpus.devices or apple_gpu(host.memory_total_bytes, host.memory_available_bytes)
    return Hardware(
        host=host,
        devices=(*accelerators, _cpu(host)),
        findings=(*findings, *gpus.findings),
        driver=gpus.driver,
        runtime=gpus.runtime,
    )


def _cpu(host: Host) -> Device:
    return Device(
        kind="cpu",
        index=0,
        name=host.cpu_name,
        uuid=f"cpu-{host.hostname}",
        total_bytes=host.memory_total_bytes,
        free_bytes=host.memory_available_bytes,
        capability=host.cpu_extension or None,
        bf16=host.cpu_bf16,
        vendor="cpu",
    )


def _least_host() -> Host:
    """What the interpreter knows by itself, for a machine whose files do not answer."""
    cpus = os.cpu_count() or 1
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Host(
        hostname=socket.gethostname(),
        os=platform.system(),
        python=platform.python_version(),
        cpus=float(cpus),
        cpus_source="all CPUs",
        allowed_cpus=tuple(range(cpus)),
        physical_cpus=cpus,
        cpu_name=platform.machine(),
        cpu_extension="",
        cpu_bf16=False,
        memory_total_bytes=memory,
        memory_available_bytes=memory,
        memory_limit_source="physical memory",
        numa_nodes=(),
    )


def _no_answer(subject: str, reason: str) -> Finding:
    return Finding(
        level=Level.WARNING,
        subject=subject,
        fact=f"could not be read: {reason}",
        why="rung goes on without knowing it",
    )


def describe(hardware: Hardware) -> list[str]:
    """Plain lines for a log."""
    host = hardware.host
    memory = f"{_size(host.memory_available_bytes)} free of {_size(host.memory_total_bytes)}"
    lines = [
        f"{host.hostname}: {host.os}, Python {host.python}",
        f"CPU: {host.cpu_name}, {host.cpus:g} usable ({host.cpus_source}), {host.physical_cpus} cores"
        + (f", {host.cpu_extension}" if host.cpu_extension else ""),
        f"memory: {memory} ({host.memory_limit_source})",
        f"disk: {_size(host.disk_free_bytes)} free at {host.disk_folder}"
        + (f"; /dev/shm: {_size(host.shm_free_bytes)} free" if host.shm_total_bytes else ""),
    ]
    if hardware.driver:
        lines.append(f"driver: {hardware.driver}" + (f", CUDA up to {hardware.runtime}" if hardware.runtime else ""))
    for device in hardware.devices:
        if device.kind == "cpu":
            continue
        line = f"{device.kind}:{device.index} {device.name}, {_size(device.free_bytes)} free of "
        line += f"{_size(device.total_bytes)}, {device.capability or 'capability unknown'}"
        line += f"{', bf16' if device.bf16 else ''}, {device.uuid}"
        if device.processes:
            names = ", ".join(f"{one.name or 'process'} {one.pid}" for one in device.processes)
            line += f"; in use by {names}"
        if device.links:
            kinds = sorted({f"{link.kind} x{link.lanes}" if link.lanes else link.kind for link in device.links})
            line += f"; to its peers: {', '.join(kinds)}"
        lines.append(line)
    lines += [f"{finding.level.value}: {finding.subject}: {finding.fact}" for finding in hardware.findings]
    return lines


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


def to_dict(hardware: Hardware) -> dict[str, Any]:
    """Plain JSON values, with the number of the format."""
    values: dict[str, Any] = json.loads(json.dumps(asdict(hardware)))
    return {"format": _FORMAT, **values}


def from_dict(values: object) -> Hardware:
    """The inverse of `to_dict`. Raises JobError naming the entry that is missing, unknown or of the wrong kind."""
    if not isinstance(values, dict) or values.get("format") != _FORMAT:
        raise JobError(
            f"this is not a description of hardware in format {_FORMAT}",
            hint="write one on the machine itself: rung hardware --json > hardware.json",
        )
    hardware = _decode({key: value for key, value in values.items() if key != "format"}, Hardware, "hardware")
    assert isinstance(hardware, Hardware)
    return hardware


def _decode(value: object, kind: Any, where: str) -> object:
    """`value` from JSON as the type `kind`: our dataclasses and what their fields are made of."""
    origin = get_origin(kind)
    if is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, dict):
            raise _wrong(where, "a mapping", value)
        hints = get_type_hints(kind)
        known = {one.name for one in fields(kind)}
        if unknown := sorted(set(value) - known):
            raise JobError(f"{where}: unknown entry {unknown[0]!r}", hint=f"known are {', '.join(sorted(known))}")
        decoded = {name: _decode(item, hints[name], f"{where}.{name}") for name, item in value.items()}
        try:
            return kind(**decoded)
        except TypeError as error:  # a required field is missing; the message names it
            raise JobError(f"{where}: {str(error).partition('() ')[2]}") from None
    if origin is tuple:
        if not isinstance(value, list):
            raise _wrong(where, "a list", value)
        return tuple(_decode(item, get_args(kind)[0], f"{where}[{index}]") for index, item in enumerate(value))
    if origin in (Union, UnionType):
        inner = next(one for one in get_args(kind) if one is not type(None))
        return None if value is None else _decode(value, inner, where)
    return _plain(value, kind, where)


def _plain(value: object, kind: Any, where: str) -> object:
    if get_origin(kind) is Literal or (isinstance(kind, type) and issubclass(kind, Enum)):
        choices = get_args(kind) or tuple(one.value for one in kind)
        if value not in choices:
            raise _wrong(where, f"one of {', '.join(choices)}", value)
        return value if get_origin(kind) is Literal else kind(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise _wrong(where, {"int": "a whole number", "str": "text"}.get(kind.__name__, kind.__name__), value)
    return value


def _wrong(where: str, wanted: str, value: object) -> JobError:
    return JobError(f"{where}: expected {wanted}, found {repr(value)[:80]}")
