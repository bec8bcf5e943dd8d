"""Machines as the planner asks about them: which devices make a group of N, what they have, what joins them. Pure."""

import itertools
import math
from dataclasses import dataclass, replace

from rung.cluster.catalog import GB, LINKS, Inventory, Link, Node, default_link, device_like
from rung.cluster.gpus import Device
from rung.cluster.hardware import Hardware
from rung.launcher.steptime import Setting
from rung.strategies.memory import DeviceFacts, HostFacts
from rung.strategies.plan import DeviceType
from rung.strategies.speed import Rates, Speed

# More workers than this on one CPU are never planned unless asked for.
MOST_CPU_WORKERS = 8
# A pinned count on CPU may exceed the cores (tests do); beyond this it is a mistake.
MOST_PINNED_CPU_WORKERS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The devices that a plan of so many would use. `free_bytes` is that of the device with the least."""

    setting: Setting
    free_bytes: int
    threads: int

    def device_bytes(self, cap_bytes: int | None) -> int:
        """What one worker may use: its device's free memory, or the cap where that is less."""
        return self.free_bytes if cap_bytes is None else min(cap_bytes, self.free_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    """All devices of the kind that will train: runs of (node, device, how many in all), fastest first."""

    kind: DeviceType
    runs: tuple[tuple[Node, DeviceFacts, int], ...]
    network: Link

    @classmethod
    def of(cls, inventory: Inventory, kind: DeviceType | None = None) -> "Pool":
        """The devices of an inventory, by speed, then memory; of its best kind if none is asked for."""
        kind = kind or inventory.kind
        runs: dict[tuple[int, str, int], tuple[Node, DeviceFacts, int]] = {}
        for index, node in enumerate(inventory.nodes):
            for device in node.devices:
                if device.kind == kind:
                    key = (index, device.name, device.free_bytes)
                    seen = runs[key][2] if key in runs else 0
                    runs[key] = (node, device, seen + node.count)
        ordered = sorted(runs.values(), key=lambda r: (-_speed(r[1]), -r[1].free_bytes))
        return cls(kind=kind, runs=tuple(ordered), network=inventory.network)

    @property
    def bf16(self) -> bool:
        """Whether every device has fast bf16."""
        return all(device.bf16 for _, device, _ in self.runs)

    @property
    def fp16(self) -> bool:
        """Whether every device multiplies fp16 much faster than fp32."""
        return all(d.flops.get("fp16", 0) > 2.5 * d.flops.get("fp32", 1) for _, d, _ in self.runs)

    @property
    def disk_bytes(self) -> int:
        """Free disk for offload on the node with the least."""
        return min((node.host.disk_bytes for node, _, _ in self.runs), default=0)

    def most(self, *, pinned: bool = False) -> int:
        """The largest number of workers; on CPU one for each core (up to a limit), more only when pinned."""
        if self.kind != "cpu":
            return sum(number for _, _, number in self.runs)
        limit = MOST_PINNED_CPU_WORKERS if pinned else MOST_CPU_WORKERS
        return sum(number * (limit if pinned else min(limit, node.host.cores)) for node, _, number in self.runs)

    def describe(self) -> str:
        """`8 x H100-80G + 2 x T4-16G`."""
        return " + ".join(f"{number} x {device.name}" for _, device, number in self.runs) or "none"

    def counts(self, batch: int, least: int = 1, limit: int | None = None) -> list[int]:
        """The numbers of workers worth planning: one, powers of two, each node whole, all; none above the batch, all
        within `least` and `limit`."""
        most = min(self.most(pinned=limit is not None), batch, limit or batch)
        node = max((sum(d.kind == self.kind for d in n.devices) for n, _, _ in self.runs), default=1)
        counts = {1, most, min(most, node)}
        counts |= {2**power for power in range(most.bit_length()) if 2**power <= most}
        number = node
        while number <= most:
            counts.add(number)
            number *= 2
        total = 0
        for _, _, here in self.runs:
            total += here
            counts.add(min(most, total))
        return sorted({max(least, count) for count in counts})

    def why(self, count: int) -> str:
        """The reason for so many workers."""
        if self.kind == "cpu":
            return "one process uses all cores; more only where memory asks for it" if count == 1 else ""
        if count == self.most():
            return "every device there is"
        speeds = [(_speed(device), number) for _, device, number in self.runs]
        left = count
        while speeds and left >= speeds[0][1]:
            left -= speeds.pop(0)[1]
        slower = left == 0 and speeds[0][0] < _speed(self.runs[0][1])
        return f"{count} of {self.most()} devices" + (": the others are slower" if slower else "")

    def choose(self, count: int, *, balanced: bool = True) -> Choice:
        """The `count` fastest devices, judged by the slowest and the smallest among them; where shares can follow speed
        (`balanced`), the setting has all kinds among them."""
        if self.kind == "cpu":
            return self._choose_cpu(count)
        taken = []
        left = count
        for node, device, number in self.runs:
            if left <= 0:
                break
            taken.append((node, device, min(left, number)))
            left -= number
        node, slowest, _ = taken[-1]
        per_node = min(count, max(sum(d.kind == self.kind for d in n.devices) for n, _, _ in taken))
        nodes = max(1, math.ceil(count / per_node))
        link = min((n.link for n, _, _ in taken), key=lambda link: link.bytes_per_s)
        host = min((n.host for n, _, _ in taken), key=lambda host: host.free_bytes)
        between = self.network.bytes_per_s
        kinds = tuple((device, number) for _, device, number in taken)
        differ = len({device.name for device, _ in kinds}) > 1
        setting = Setting(
            device=slowest,
            host=host,
            # A ring crosses each node's network once in each direction, however many devices the node has.
            link_bytes_per_s=link.bytes_per_s if nodes == 1 else min(link.bytes_per_s, between),
            link_latency_s=link.latency_s if nodes == 1 else self.network.latency_s,
            per_node=per_node,
            nodes=nodes,
            near_bytes_per_s=link.bytes_per_s,
            near_latency_s=link.latency_s,
            kinds=kinds if balanced and differ else (),
        )
        threads = max(1, host.cores // per_node)
        return Choice(setting=setting, free_bytes=min(d.free_bytes for _, d, _ in taken), threads=threads)

    def _choose_cpu(self, count: int) -> Choice:
        """Workers on CPUs: spread over the nodes, sharing each node's cores and memory."""
        there = sum(number for _, _, number in self.runs)
        nodes = min(count, there)
        per_node = math.ceil(count / nodes)
        ends = itertools.accumulate(number for _, _, number in self.runs)
        node, device, _ = next(run for run, end in zip(self.runs, ends, strict=True) if end >= nodes)
        host = node.host
        threads = max(1, host.cores // per_node)
        share = threads / host.cores * (1.0 if per_node <= host.cores else host.cores / per_node)
        if per_node > 1 and device.core is not None:
            slice_ = _scaled(device.core, share * host.cores, max(1.0, per_node / host.cores))
        else:
            slice_ = _scaled(device, share, max(1.0, per_node / host.cores))
        link = LINKS["memory"] if nodes == 1 else self.network
        setting = Setting(
            device=slice_,
            host=host,
            link_bytes_per_s=min(link.bytes_per_s, LINKS["memory"].bytes_per_s) / max(1, per_node - 1),
            link_latency_s=max(link.latency_s, LINKS["memory"].latency_s),
            per_node=per_node,
            nodes=nodes,
            near_bytes_per_s=LINKS["memory"].bytes_per_s / max(1, per_node - 1),
            near_latency_s=LINKS["memory"].latency_s,
        )
        return Choice(setting=setting, free_bytes=host.free_bytes // per_node, threads=threads)


def _speed(device: DeviceFacts) -> float:
    """For comparing devices: the fastest rate that it has."""
    return max(device.flops.values(), default=1.0)


def _scaled(device: DeviceFacts, by: float, slower: float) -> DeviceFacts:
    """`by` times the rates, and each operation `slower` to start."""
    return replace(
        device,
        flops={name: rate * by for name, rate in device.flops.items()},
        bytes_per_s=device.bytes_per_s * by,
        stream_bytes_per_s=device.stream_bytes_per_s * by,
        fresh_bytes_per_s=device.fresh_bytes_per_s * by,
        launch_s=device.launch_s * slower,
    )


def usable_cores(hardware: Hardware) -> int:
    """Whole cores that this process may use."""
    host = hardware.host
    return max(1, min(int(host.cpus), host.physical_cpus or int(host.cpus)))


def inventory_of(hardware: Hardware | Inventory, speed: Speed | None = None) -> Inventory:
    """An Inventory as it is, or from what the probe of this machine found (`rung.cluster.hardware.Hardware`). `speed`:
    what was measured of its cores."""
    if isinstance(hardware, Inventory):
        return hardware
    host = hardware.host
    facts = HostFacts(
        total_bytes=host.memory_total_bytes,
        free_bytes=host.memory_available_bytes,
        cores=usable_cores(hardware),
        disk_bytes=host.disk_free_bytes,
    )
    devices = tuple(_device(device) for device in hardware.devices if device.kind != "cpu")
    devices += (cpu_device(facts, bf16=host.cpu_bf16, speed=speed),)
    link = default_link(devices)
    if any(link_.kind in ("nvlink", "xgmi") for device in hardware.devices for link_ in device.links):
        link = LINKS["xgmi" if any(device.vendor == "amd" for device in hardware.devices) else "nvlink3"]
    return Inventory(nodes=(Node(devices=devices, host=facts, link=link),), network=LINKS["memory"])


def cpu_device(host: HostFacts, *, bf16: bool = False, speed: Speed | None = None) -> DeviceFacts:
    """All cores of a host as one device. Without a measured `speed`, rates are those of an ordinary server core with
    AVX2; they order plans."""
    rate = 2.5e10 * host.cores
    device = DeviceFacts(
        kind="cpu",
        name=f"CPU with {host.cores} cores",
        total_bytes=host.total_bytes,
        free_bytes=host.free_bytes,
        flops={"fp32": rate, "bf16": 2 * rate if bf16 else rate / 4, "fp16": rate / 8},
        bytes_per_s=min(80 * GB, 5 * GB * host.cores),
        host_bytes_per_s=10 * GB,
        efficiency=0.8,
        launch_s=8e-6,
        bf16=bf16,
    )
    if speed is None:
        return device
    whole, core = (_as_measured(device, rates, speed.launch_s) for rates in (speed.whole, speed.core))
    return replace(whole, core=core)


def _as_measured(device: DeviceFacts, rates: Rates, launch_s: float) -> DeviceFacts:
    by = rates.flops / device.flops["fp32"]
    return replace(
        device,
        flops={name: rate * by for name, rate in device.flops.items()},
        bytes_per_s=rates.bytes_per_s,
        stream_bytes_per_s=rates.stream_bytes_per_s,
        fresh_bytes_per_s=rates.fresh_bytes_per_s,
        launch_s=launch_s,
    )


def _device(device: Device) -> DeviceFacts:
    """A probed accelerator, with the rates of the library's device of that name, else of a middling one."""
    like = device_like(device.name, device.total_bytes)
    base = like or DeviceFacts(
        kind=device.kind,
        name=device.name,
        total_bytes=device.total_bytes,
        free_bytes=device.free_bytes,
        flops={"fp32": 1e13, "bf16": 4e13, "fp16": 4e13},
        bytes_per_s=4e11,
    )
    return replace(
        base,
        kind=device.kind,
        name=device.name,
        total_bytes=device.total_bytes,
        free_bytes=device.free_bytes,
        bf16=bool(device.bf16),
    )
