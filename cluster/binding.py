"""Which CPUs each worker of this machine may run on: those of the NUMA node that its device hangs on.

Memory of another node is slower to reach, and a worker that wanders between nodes leaves its data behind. A worker
with a GPU may use all of its node, which its loader processes need; workers that train on CPUs share out the cores of
the nodes evenly. On a machine with one node nobody is bound: the kernel then places threads at least as well (see
"Strategies" in docs/measurements.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rung.cluster.gpus import Device
from rung.cluster.host import Host, siblings
from rung.cluster.limits import ROOT


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """What one worker gets. `cores` are physical ones, the most threads that it should compute with."""

    node: int
    cpus: tuple[int, ...]
    cores: int


def slices(count: int, host: Host, gpus: Sequence[Device] = (), *, root: Path = ROOT) -> tuple[Slice, ...]:
    """The slices of `count` workers, by rank; empty where binding them makes no sense or the nodes are not known.

    `gpus` are the devices of the workers, by rank; none where they train on CPUs. `root` stands for the file system.
    """
    nodes = {node.index: _cores(node.cpus, root) for node in host.numa_nodes if node.cpus}
    if len(nodes) < 2:
        return ()
    if gpus:
        homes = [gpu.numa_node for gpu in gpus[:count]]
        if len(homes) < count or any(home not in nodes for home in homes):
            return ()
        return tuple(
            Slice(node=home, cpus=_flat(nodes[home]), cores=max(1, len(nodes[home]) // homes.count(home)))
            for home in homes
            if home is not None
        )
    if count < 2 or count > sum(map(len, nodes.values())):
        return ()
    found = []
    for node, many in _shared_out(count, {node: len(cores) for node, cores in nodes.items()}).items():
        cores = nodes[node]
        for n in range(many):
            own = cores[len(cores) * n // many : len(cores) * (n + 1) // many]
            found.append(Slice(node=node, cpus=_flat(own), cores=len(own)))
    return tuple(found)


def describe(found: Sequence[Slice]) -> str:
    """One line about who is where."""
    by_node: dict[int, list[int]] = {}
    for rank, own in enumerate(found):
        by_node.setdefault(own.node, []).append(rank)
    parts = []
    for node, ranks in sorted(by_node.items()):
        sizes = sorted({found[rank].cores for rank in ranks})
        cores = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
        names = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        parts.append(f"{names} on NUMA node {node} with {cores} core{'s' * (cores != '1')}{' each' * (len(ranks) > 1)}")
    return "; ".join(parts)


def _cores(cpus: Sequence[int], root: Path) -> list[tuple[int, ...]]:
    """The CPUs of each physical core: hyperthreads of one core are no two cores to share out."""
    found: dict[tuple[int, ...], None] = {}
    for cpu in cpus:
        found[tuple(sorted(siblings(cpu, root) & set(cpus)))] = None
    return list(found)


def _flat(cores: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sorted(cpu for core in cores for cpu in core))


def _shared_out(count: int, cores: dict[int, int]) -> dict[int, int]:
    """Workers of each node: one after the other goes where most cores are left for each."""
    many = dict.fromkeys(cores, 0)
    for _ in range(count):
        best = max(cores, key=lambda node: (cores[node] / (many[node] + 1), -node))
        many[best] += 1
    return many
