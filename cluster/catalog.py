"""What machines can do, as values: common devices and links by name, and machines that are not here, from a file.

The planner sees hardware only as an Inventory. It comes from the probe of this machine, from a Ray cluster, or from a
description such as

    nodes: 4
    devices: 8 x H100-80G        # or a list, one entry for each kind: ["4 x A100-40G", "4 x V100-32G"]
    link: nvlink4                # between the devices of a node
    network: 400Gb/s             # between nodes, for each node
    host: {memory: 2TB, cores: 192, disk: 8TB}

Several different kinds of nodes: a list of such entries under `groups`. Reading it touches no device.
Throughputs are the makers' dense figures; `efficiency` is what training reaches of them.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rung.strategies.errors import JobError
from rung.strategies.memory import GIB, DeviceFacts, HostFacts
from rung.strategies.plan import DeviceType

GB = 10**9
TERA = 10**12


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """A way for bytes. `bytes_per_s` is one direction, for each device (between devices) or node (between nodes)."""

    name: str
    bytes_per_s: float
    latency_s: float = 10e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """`count` machines that are alike: their devices, host, and the link between the devices of one of them."""

    devices: tuple[DeviceFacts, ...]
    host: HostFacts
    link: Link
    count: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Inventory:
    """All machines in reach. `network` joins the nodes."""

    nodes: tuple[Node, ...]
    network: Link
    described: bool = False

    @property
    def device_count(self) -> int:
        """Devices of all nodes."""
        return sum(node.count * len(node.devices) for node in self.nodes)

    @property
    def kind(self) -> DeviceType:
        """The kind of device to train on: an accelerator where there is one."""
        kinds = {device.kind for node in self.nodes for device in node.devices}
        return next((kind for kind in ("cuda", "mps") if kind in kinds), "cpu")


def _gpu(name: str, memory_gib: float, fp32: float, half: float, bandwidth_gb: float, **more: Any) -> DeviceFacts:
    total = int(memory_gib * GIB)
    return DeviceFacts(
        kind="cuda",
        name=name,
        total_bytes=total,
        free_bytes=total,
        flops={"fp32": fp32 * TERA, "bf16": half * TERA, "fp16": half * TERA},
        bytes_per_s=bandwidth_gb * GB,
        host_bytes_per_s=more.pop("host_gb", 25) * GB,
        efficiency=0.45,
        launch_s=6e-6,
        **more,
    )


# Memory is what the driver reports (a little below the name), fp32 is with TF32 off, half is dense bf16 or fp16.
DEVICES: Mapping[str, DeviceFacts] = {
    device.name.lower(): device
    for device in (
        _gpu("V100-16G", 15.8, 15.7, 125, 900, bf16=False, host_gb=12),
        _gpu("V100-32G", 31.7, 15.7, 125, 900, bf16=False, host_gb=12),
        _gpu("T4-16G", 14.7, 8.1, 65, 320, bf16=False, host_gb=12),
        _gpu("P100-16G", 15.9, 9.3, 18.7, 732, bf16=False, host_gb=12),
        _gpu("A10-24G", 22.5, 31.2, 125, 600),
        _gpu("A30-24G", 23.5, 10.3, 165, 933),
        _gpu("A40-48G", 44.9, 37.4, 150, 696),
        _gpu("A6000-48G", 47.5, 38.7, 155, 768),
        _gpu("A100-40G", 39.4, 19.5, 312, 1555),
        _gpu("A100-80G", 79.2, 19.5, 312, 2039),
        _gpu("L4-24G", 22.0, 30.3, 121, 300),
        _gpu("L40S-48G", 44.9, 91.6, 362, 864),
        _gpu("H100-80G", 79.6, 67, 989, 3350, host_gb=50),
        _gpu("H100-94G", 93.1, 60, 835, 3900, host_gb=50),
        _gpu("H200-141G", 139.8, 67, 989, 4800, host_gb=50),
        _gpu("H20-96G", 95.6, 44, 148, 4000, host_gb=50),
        _gpu("B200-180G", 178.4, 80, 2250, 8000, host_gb=50),
        _gpu("GH200-96G", 95.0, 67, 989, 4000, host_gb=400),
        _gpu("RTX2080Ti-11G", 10.7, 13.4, 54, 616, bf16=False, host_gb=12),
        _gpu("RTX3060-12G", 11.8, 12.7, 25, 360, host_gb=12),
        _gpu("RTX3080-10G", 9.8, 29.8, 59, 760),
        _gpu("RTX3090-24G", 23.7, 35.6, 71, 936),
        _gpu("RTX4070-12G", 11.7, 29.1, 58, 504),
        _gpu("RTX4080-16G", 15.7, 48.7, 97, 717),
        _gpu("RTX4090-24G", 23.6, 82.6, 165, 1008),
        _gpu("RTX5090-32G", 31.4, 104.8, 210, 1792, host_gb=50),
        _gpu("MI210-64G", 63.9, 22.6, 181, 1638),
        _gpu("MI250X-64G", 63.9, 23.9, 191, 1638),
        _gpu("MI300X-192G", 191.5, 163, 1307, 5300, host_gb=50),
    )
}

# Bytes per second in one direction for each device, as a ring over all devices of the node reaches it.
LINKS: Mapping[str, Link] = {
    link.name: link
    for link in (
        Link(name="memory", bytes_per_s=1.2 * GB, latency_s=80e-6),  # gloo between processes of one machine
        Link(name="pcie3", bytes_per_s=10 * GB),
        Link(name="pcie4", bytes_per_s=20 * GB),
        Link(name="pcie5", bytes_per_s=40 * GB),
        Link(name="nvlink2", bytes_per_s=130 * GB, latency_s=6e-6),
        Link(name="nvlink3", bytes_per_s=240 * GB, latency_s=6e-6),
        Link(name="nvlink4", bytes_per_s=370 * GB, latency_s=6e-6),
        Link(name="nvlink5", bytes_per_s=700 * GB, latency_s=6e-6),
        Link(name="xgmi", bytes_per_s=300 * GB, latency_s=6e-6),
    )
}

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_size(value: object, what: str) -> int:
    """Bytes from `80GB`, `1.5 TiB`, `4096`. Raises JobError naming `what`."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*([kmgt]i?)?b?\s*", str(value).lower())
    try:
        return int(float(match[1]) * _UNITS[match[2] or ""])  # type: ignore[index]
    except (TypeError, ValueError, OverflowError):
        raise JobError(f"{what}: {value!r} is not a size", hint="write it like 80GB, 512MiB or 4096") from None


def find_device(name: str) -> DeviceFacts | None:
    """A device of the library by name or by what the driver calls it; None if it is not there."""
    key = re.sub(r"[\s_]+", "", name.lower())
    if key in DEVICES:
        return DEVICES[key]
    return next((d for k, d in DEVICES.items() if k.split("-")[0] == key), None)


def device_like(name: str, total_bytes: int) -> DeviceFacts | None:
    """The library's device for a driver's name (`NVIDIA A100-SXM4-80GB`): the model is in it and memory is nearest."""
    flat = re.sub(r"[^a-z0-9]", "", name.lower())
    fits = [d for k, d in DEVICES.items() if re.sub(r"[^a-z0-9]", "", k.split("-")[0]) in flat]
    longest = max((len(d.name.split("-")[0]) for d in fits), default=0)
    fits = [d for d in fits if len(d.name.split("-")[0]) == longest]
    return min(fits, key=lambda d: abs(d.total_bytes - total_bytes), default=None)


def parse_link(value: object, what: str) -> Link:
    """A link of the library, or a rate: `400Gb/s` (bits), `50GB/s` (bytes). Raises JobError naming `what`."""
    text = str(value).strip()
    if text.lower() in LINKS:
        return LINKS[text.lower()]
    if match := re.fullmatch(r"([0-9.]+)\s*([KMGT])?(b|bit|B|byte)(?:/s|ps)", text):
        scale = _UNITS[(match[2] or "").lower()] / (8 if match[3] in ("b", "bit") else 1)
        # What collectives reach of a network's nominal rate.
        return Link(name=text, bytes_per_s=0.85 * float(match[1]) * scale, latency_s=20e-6)
    raise JobError(f"{what}: {text!r} is not a link", hint=f"one of {', '.join(LINKS)}, or a rate like 400Gb/s")


_KEYS = {"nodes", "devices", "link", "host", "network", "groups"}


def parse_hardware(values: Mapping[str, Any], where: str = "hardware") -> Inventory:
    """An Inventory from what the file said. Raises JobError."""
    if unknown := set(values) - _KEYS:
        raise JobError(f"{where}: unknown {', '.join(sorted(unknown))}", hint=f"known: {', '.join(sorted(_KEYS))}")
    groups = values.get("groups") or [values]
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        raise JobError(f"{where}: groups: a list of mappings is expected")
    nodes = tuple(
        _node(group, f"{where}: groups[{i}]" if "groups" in values else where) for i, group in enumerate(groups)
    )
    network = parse_link(values.get("network", "100Gb/s"), f"{where}: network")
    return Inventory(nodes=nodes, network=network, described=True)


def _node(values: Mapping[str, Any], where: str) -> Node:
    count = values.get("nodes", 1)
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= 10**6:
        raise JobError(f"{where}: nodes: {count!r} is not a whole number of at least 1")
    devices = _devices(values.get("devices"), where)
    host = values.get("host") or {}
    if not isinstance(host, Mapping):
        raise JobError(f"{where}: host: a mapping is expected", hint="for example {memory: 512GB, cores: 64}")
    memory = parse_size(host.get("memory", 4 * sum(d.total_bytes for d in devices)), f"{where}: host.memory")
    cores = host.get("cores", 8 * len(devices))
    if not isinstance(cores, int) or cores < 1:
        raise JobError(f"{where}: host.cores: {cores!r} is not a whole number of at least 1")
    disk = parse_size(host["disk"], f"{where}: host.disk") if "disk" in host else 0
    link = parse_link(values["link"], f"{where}: link") if "link" in values else default_link(devices)
    facts = HostFacts(total_bytes=memory, free_bytes=int(0.95 * memory), cores=cores, disk_bytes=disk)
    return Node(devices=devices, host=facts, link=link, count=count)


def _devices(value: object, where: str) -> tuple[DeviceFacts, ...]:
    entries = value if isinstance(value, list) else [value]
    devices: list[DeviceFacts] = []
    for entry in entries:
        match = re.fullmatch(r"\s*(?:(\d{1,5})\s*x\s*)?(\S.*?)\s*", str(entry or ""))
        device = find_device(match[2]) if match else None
        if match is None or device is None:
            names = ", ".join(d.name for d in DEVICES.values())
            raise JobError(
                f"{where}: devices: {entry!r} is not a known device", hint=f"for example 8 x H100-80G; known: {names}"
            )
        devices += [device] * max(1, int(match[1] or 1))
    return tuple(devices)


def default_link(devices: tuple[DeviceFacts, ...]) -> Link:
    """The link such devices usually have where nothing is said: PCIe, since NVLink cannot be taken for granted."""
    if not devices or devices[0].kind != "cuda":
        return LINKS["memory"]
    return LINKS["pcie5" if devices[0].host_bytes_per_s > 30 * GB else "pcie4"]
