"""What the nodes of a cluster have, whether they agree with each other, and the planner's view of them all.

`look` runs on every node at the same time; the rest are pure functions of what it brought back.
"""

import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata

from rung.cluster.gpus import Device
from rung.cluster.hardware import Hardware, probe
from rung.cluster.placement import Machine, Spot
from rung.strategies.findings import Finding, Level
from rung.strategies.plan import DeviceType

#: Packages that have to be the same on every node: what is pickled or exchanged between nodes depends on them.
SAME = ("rung", "torch", "ray", "deepspeed", "numpy")
#: A clock that differs by more makes the order of events, and of leases, doubtful.
SKEW_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """What one node says of itself. `clock`: seconds since the epoch. `trouble`: what the check found, or ""."""

    hardware: Hardware
    versions: dict[str, str]
    clock: float
    trouble: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeReport:
    """A node as the launcher knows it. `cpus` and `gpus` are what the cluster lets be used there. `asked`, `answered`:
    the launcher's clock around the question. `look` is None if the node did not answer; `error` then says why."""

    id: str
    name: str
    host: str
    cpus: float
    gpus: float
    asked: float = 0.0
    answered: float = 0.0
    look: Look | None = None
    error: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """All nodes of a cluster at one moment, and what is amiss."""

    nodes: tuple[NodeReport, ...]
    findings: tuple[Finding, ...] = field(default=())

    @property
    def usable(self) -> tuple[NodeReport, ...]:
        """The nodes that answered."""
        return tuple(node for node in self.nodes if node.look is not None)


def look(check: Callable[[], str] | None = None) -> Look:
    """Runs on a node. `check` is the launcher's own question; it returns what is wrong, or an empty text."""
    environ = dict(os.environ)
    if environ.get("CUDA_VISIBLE_DEVICES") in ("", "NoDevFiles"):
        del environ["CUDA_VISIBLE_DEVICES"]  # Ray hides all GPUs from whoever has not asked for one
    hardware = probe(environ=environ)
    trouble = ""
    if check is not None:
        try:
            trouble = check()
        except Exception as error:  # whatever it is, it is an answer
            trouble = f"{type(error).__name__}: {error}"
    return Look(hardware=hardware, versions=versions(), clock=time.time(), trouble=trouble)


def versions() -> dict[str, str]:
    """Versions of what has to be the same everywhere, read without importing any of it."""
    return {"python": ".".join(platform.python_version_tuple()[:2]), **{name: _version(name) for name in SAME}}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "missing"


def judge(nodes: Sequence[NodeReport], reference: Mapping[str, str]) -> list[Finding]:
    """What is amiss between the nodes and the launcher (whose versions are `reference`)."""
    findings: list[Finding] = []
    for node in nodes:
        subject = f"node {node.name}"
        if node.look is None:
            fact = f"did not answer: {node.error}"
            findings.append(Finding(level=Level.WARNING, subject=subject, fact=fact, why="it is left out"))
            continue
        there = node.look.versions
        if other := [f"{n} {there.get(n)} (here {v})" for n, v in reference.items() if there.get(n) != v]:
            fix = "install the same versions on all nodes, or name them in cluster.runtime_env"
            why = "what nodes send each other depends on it"
            fact = f"has {', '.join(other)}"
            findings.append(Finding(level=Level.ERROR, subject=subject, fact=fact, why=why, fix=fix))
        skew_s = abs(node.look.clock - (node.asked + node.answered) / 2) - (node.answered - node.asked) / 2
        if skew_s > SKEW_S:
            fact, why = f"its clock differs by {skew_s:.0f} s or more", "failures are put in order by time"
            fix = "run an NTP client on all nodes"
            findings.append(Finding(level=Level.WARNING, subject=subject, fact=fact, why=why, fix=fix))
        if node.look.trouble:
            findings.append(Finding(level=Level.ERROR, subject=subject, fact=node.look.trouble))
    return findings


def kind_of(nodes: Sequence[NodeReport]) -> DeviceType:
    """Accelerators if the cluster offers any, else CPUs."""
    return "cuda" if any(node.gpus >= 1 and _gpus(node) for node in nodes) else "cpu"


def machines_of(nodes: Sequence[NodeReport], kind: DeviceType) -> tuple[Machine, ...]:
    """Room for workers on each node, for `rung.cluster.placement.place`."""
    if kind == "cpu":
        return tuple(
            Machine(
                name=node.id,
                label=node.name,
                spots=tuple(Spot(index=i, speed=float(int(node.cpus))) for i in range(int(node.cpus))),
            )
            for node in nodes
            if node.cpus >= 1
        )
    found = []
    for node in nodes:
        islands = _islands(_gpus(node))
        spots = tuple(
            Spot(index=place, island=islands[device.uuid], speed=_speed(device), busy=bool(device.processes))
            for place, device in enumerate(_gpus(node))
        )
        if spots:
            found.append(Machine(name=node.id, label=node.name, spots=spots))
    return tuple(found)


def sharing(nodes: Sequence[NodeReport]) -> dict[str, int]:
    """How many nodes stand on each machine: several on one (as tests have them) share its memory and disk."""
    return Counter(node.look.hardware.host.hostname for node in nodes if node.look is not None)


def _gpus(node: NodeReport) -> list[Device]:
    if node.look is None:
        return []
    return [device for device in node.look.hardware.devices if device.kind == "cuda"][: int(node.gpus)]


def _speed(device: Device) -> float:
    """Only for order: compute capability tells generations apart, memory the classes within one."""
    try:
        capability = float(device.capability or 0.0)
    except ValueError:
        capability = 0.0
    return capability * 1000 + round(device.total_bytes / 2**33)


def _islands(devices: Sequence[Device]) -> dict[str, int]:
    """The island of each device by UUID: those that fast links join, directly or over others."""
    island = {device.uuid: number for number, device in enumerate(devices)}
    for device in devices:
        for link in device.links:
            if link.kind in ("nvlink", "xgmi") and link.peer in island:
                pair = (island[device.uuid], island[link.peer])
                island = {uuid: min(pair) if at in pair else at for uuid, at in island.items()}
    return island
