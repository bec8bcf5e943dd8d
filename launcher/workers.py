"""Where the workers of a job run: on this machine, or on the nodes of a Ray cluster. One interface for both."""

import contextlib
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from rung.cluster.binding import Slice, describe, slices
from rung.cluster.catalog import LINKS, Inventory, Node, parse_link
from rung.cluster.gpus import Device
from rung.cluster.group import Group
from rung.cluster.hardware import Hardware, probe
from rung.cluster.host import read_host
from rung.cluster.inventory import NodeReport, Survey, kind_of, machines_of, sharing
from rung.cluster.local import Workers, WorkerSpec
from rung.cluster.placement import place
from rung.launcher.job import Job
from rung.launcher.machines import inventory_of
from rung.launcher.planner import gib
from rung.launcher.storage import Store
from rung.launcher.watch.progress import View
from rung.strategies.errors import DependencyError, JobError, ObjectMissing, WorkersFailed
from rung.strategies.findings import Level
from rung.strategies.plan import DeviceType, Plan

#: How long nodes may take to answer: at first, with their runtime environment to be set up, and later.
FIRST_LOOK_S, LOOK_S = 120.0, 30.0
#: How often it is asked whether the cluster has changed, and how long it must then stay as it is.
WATCH_S, STEADY_S = 3.0, 6.0
#: How long a run waits for nodes to come back when fewer than its least are left.
RETURN_S = 120.0
#: How long memory of a GPU may take to come free before workers are started on it.
FREE_S = 120.0


class Fleet(Protocol):
    """The machines that a job may use."""

    elastic: bool
    """Whether machines may come and go."""
    placed: str
    """Where the workers started last are, where that was chosen; for people."""

    def machines(self) -> Hardware | Inventory:
        """What they have, looked at anew."""

    def planned(self, job: Job) -> Job:
        """The job with the number of devices that these machines and `cluster.workers` ask for."""

    def verify(self, store: Store) -> None:
        """Raises if not all machines can work on this run."""

    def changed(self) -> str:
        """Why workers should save and be started anew elsewhere; "" if they need not."""

    def pressed(self, plan: Plan) -> str:
        """Whose memory other programs hold, so that a plan fails for want of it that fits otherwise; "" if nobody's."""

    def start(self, entry: str, specs: Sequence[WorkerSpec], *, device: DeviceType, deadline_s: float) -> Group:
        """Starts workers."""


@contextlib.contextmanager
def fleet_of(job: Job, view: View, preload: Sequence[str]) -> Iterator[Fleet]:
    """The machines of `cluster.address`."""
    if job.cluster.address == "none":
        yield Here(job, view)
        return
    from rung.cluster.ray_train import RayCluster

    cluster = RayCluster.connect(job.cluster.address, runtime_env=job.cluster.runtime_env, preload=preload)
    with cluster:
        yield OnRay(cluster, job, view)


class Here:
    """This machine."""

    elastic = False

    def __init__(self, job: Job, view: View) -> None:
        self._job, self._view = job, view
        self.placed = ""

    def machines(self) -> Hardware:
        """What the probe finds."""
        return probe(folder=self._job.folder)

    def planned(self, job: Job) -> Job:
        """As it is."""
        return job

    def verify(self, store: Store) -> None:
        """There is nothing to compare."""

    def changed(self) -> str:
        """A machine stays what it is."""
        return ""

    def start(self, entry: str, specs: Sequence[WorkerSpec], *, device: DeviceType, deadline_s: float) -> Group:
        """Forks them. Each is shown one GPU only, by its UUID: an index can mean another one in another process. On a
        machine with several NUMA nodes each stays on one of them."""
        chosen: list[Device] = []
        if device == "cuda":
            hardware, chosen = self._roomy(specs)
            host = hardware.host
            specs = [
                replace(spec, env={**spec.env, "CUDA_VISIBLE_DEVICES": gpu.uuid})
                for spec, gpu in zip(specs, chosen, strict=False)
            ]
        else:
            host, _ = read_host()
        found = slices(len(specs), host, chosen)
        self.placed = describe(found)
        if found:
            specs = bound(specs, found)
        return Workers.start(entry, specs, deadline_s=deadline_s)

    def pressed(self, plan: Plan) -> str:
        """The GPUs that have less free, with no worker of ours on them, than the plan needs."""
        if plan.device != "cuda":
            return ""
        gpus = freest(probe(folder=self._job.folder).of("cuda"), plan.devices)
        return crowded(gpus, plan.predicted_device_peak_bytes or 0)

    def _roomy(self, specs: Sequence[WorkerSpec]) -> tuple[Hardware, list[Device]]:
        """The machine and its freest GPUs, once their memory is free: that of workers that have just ended comes back
        late, and what another program holds may be gone in a minute. Not waited for longer than FREE_S."""
        plan = getattr(specs[0].payload, "plan", None)
        needed = (plan.predicted_device_peak_bytes or 0) if isinstance(plan, Plan) else 0
        until, told = time.monotonic() + FREE_S, False
        while True:
            hardware = probe(folder=self._job.folder)
            chosen = freest(hardware.of("cuda"), len(specs))
            short = crowded(chosen, needed)
            if not short or time.monotonic() > until:
                return hardware, chosen
            if not told:
                self._view.say(f"waiting    {short}; at most {FREE_S:g} s for that to come free", style="yellow")
            told = True
            time.sleep(1.0)


def crowded(gpus: Sequence[Device], needed_bytes: int) -> str:
    """Which of these GPUs have less free than is needed, though they are large enough, and who holds the rest; "" if
    none."""
    words = []
    for gpu in gpus:
        if gpu.free_bytes >= min(needed_bytes, gpu.total_bytes * 9 // 10):
            continue
        holders = ", ".join(p.name or str(p.pid) for p in gpu.processes[:3])
        by = f" ({holders} {'holds' if len(gpu.processes) == 1 else 'hold'} the rest)" if holders else ""
        words.append(f"GPU {gpu.index} has {gib(gpu.free_bytes)} free of {gib(needed_bytes)} needed{by}")
    return "; ".join(words)


def bound(specs: Sequence[WorkerSpec], found: Sequence[Slice]) -> list[WorkerSpec]:
    """The workers, each on its slice, with no more threads than the smallest has cores: more would only wait for that
    one, and replicas that cut their sums in different ways drift apart by their last bits."""
    cores = max(1, min((own.cores for own in found), default=1))
    return [
        replace(spec, cpus=own.cpus, threads=min(spec.threads, cores)) for spec, own in zip(specs, found, strict=True)
    ]


def freest(gpus: Sequence[Device], count: int) -> list[Device]:
    """So many GPUs, those with the most free memory (busy ones are avoided while there are others), in their order."""
    most_free = sorted(gpus, key=lambda gpu: (-(gpu.free_bytes >> 28), gpu.index))[:count]
    return sorted(most_free, key=lambda gpu: gpu.index)


@dataclass(slots=True)
class _Watch:
    """What was seen of the cluster's nodes lately."""

    asked_s: float = 0.0
    ids: frozenset[str] = frozenset()
    since_s: float = 0.0


class OnRay:
    """The nodes of a Ray cluster. `cluster` is a `rung.cluster.ray_train.RayCluster`."""

    elastic = True

    def __init__(self, cluster: Any, job: Job, view: View) -> None:
        self._cluster, self._job, self._view = cluster, job, view
        self.placed = ""
        self._survey: Survey | None = None
        self._count = 0
        self._unequal = False
        self._used: frozenset[str] = frozenset()
        self._watch = _Watch()
        if cluster.dashboard:
            view.say(f"cluster    Ray's dashboard: {cluster.dashboard}")

    @property
    def _range(self) -> tuple[int, int]:
        """The least and the most workers."""
        count = self._job.devices.count
        if count == "auto":
            workers = self._job.cluster.workers
            return workers if isinstance(workers, tuple) else (workers, workers)
        return count if isinstance(count, tuple) else (count, count)

    def machines(self) -> Inventory:
        """Looks at all nodes at once. When workers were lost before, waits a while for enough nodes to be there."""
        first = self._survey is None
        least, most = self._range
        until = time.monotonic() + (0.0 if first else RETURN_S)
        while True:
            survey = self._cluster.survey(deadline_s=FIRST_LOOK_S if first else LOOK_S)
            nodes = survey.usable
            kind = self._kind(nodes)
            machines = machines_of(nodes, kind)
            room = sum(len(machine.spots) for machine in machines)
            if room >= least or time.monotonic() > until:
                break
            time.sleep(1.0)
        self._say(survey, first)
        if survey.nodes and not nodes and first:
            silent = "; ".join(f"{node.name}: {node.error}" for node in survey.nodes[:4])
            raise JobError(
                f"cluster: no node answers: {silent}",
                hint="if that is about the environment, look at cluster.runtime_env and what it needs on the nodes",
            )
        if room < least and not first:
            raise WorkersFailed(
                f"the job needs at least {least} workers, and the nodes that are left have room for {room}"
            )
        wanted = min(most, len(machines) if kind == "cpu" else room)
        self._count = min(max(least, wanted), self._job.batch)
        place(max(self._count, least), machines, spread=kind == "cpu")  # refused now, with what exists
        self._survey = survey
        self._watch = _Watch(ids=frozenset(node.id for node in nodes))
        offered = {machine.name for machine in machines}
        inventory = to_inventory([node for node in nodes if node.id in offered])
        speeds = {device.flops["fp32"] for node in inventory.nodes for device in node.devices if device.kind == kind}
        self._unequal = len(speeds) > 1
        return inventory

    def _kind(self, nodes: Sequence[NodeReport]) -> DeviceType:
        wanted = self._job.devices.type
        return kind_of(nodes) if wanted == "auto" else wanted

    def _say(self, survey: Survey, first: bool) -> None:
        known = {node.id for node in self._survey.usable} if self._survey else set()
        if errors := [f for f in survey.findings if f.level is Level.ERROR]:
            raise DependencyError(
                "\n".join(f"{f.subject} {f.fact}" for f in errors[:8]), hint=errors[0].fix or "see each node's words"
            )
        for finding in survey.findings:
            self._view.say(f"warning    {finding.subject}: {finding.fact}", style="yellow")
        if {node.id for node in survey.usable} == known:
            return
        parts = [f"{n.name} {n.cpus:g} CPUs" + (f" {n.gpus:g} GPUs" if n.gpus else "") for n in survey.usable[:6]]
        more = f" and {len(survey.usable) - 6} more" if len(survey.usable) > 6 else ""
        self._view.say(f"cluster    {len(survey.usable)} {'nodes' if first else 'nodes now'}: {', '.join(parts)}{more}")

    def planned(self, job: Job) -> Job:
        """With the number of workers that there is room for, within `cluster.workers`."""
        # Where devices differ the planner looks at those groups too that leave the slow ones out.
        count = (min(self._range[0], self._count), self._count) if self._unequal else self._count
        changes: dict[str, object] = {"devices": job.devices.model_copy(update={"count": count})}
        if self._count == 1 and job.strategy.name == "ddp":  # which is what it is when only one worker is left
            changes["strategy"] = job.strategy.model_copy(update={"name": "single"})
        return job.model_copy(update=changes)

    def verify(self, store: Store) -> None:
        """Every node sees the same store and the job's folder. Raises JobError naming those that do not."""
        name, content = f"seen-{secrets.token_hex(8)}", secrets.token_bytes(16)
        store.write_atomic(name, content)
        try:
            folders = (str(self._job.folder), str(Path.cwd()))
            check = partial(sees, store.url, dict(self._job.checkpoint.options), name, content, folders)
            survey: Survey = self._cluster.survey(check, deadline_s=LOOK_S)
        finally:
            store.delete(name)
        blind = [f"{node.name}: {node.look.trouble}" for node in survey.usable if node.look and node.look.trouble]
        if blind:
            raise JobError(
                "not every node of the cluster can work on this run:\n  " + "\n  ".join(blind[:8]),
                hint="put `run` on storage that all nodes share (s3://..., NFS), and the job's folder too, or submit to"
                " the job server (cluster.address: http://HEAD:8265), which carries the folder to every node",
            )

    def changed(self) -> str:
        """A node of ours is about to leave, or new ones have come that could be used."""
        now, watch = time.monotonic(), self._watch
        if now - watch.asked_s < WATCH_S:
            return ""
        watch.asked_s = now
        nodes = {node.id: node for node in self._cluster.nodes()}
        ids = frozenset(nodes)
        if ids != watch.ids:
            watch.ids, watch.since_s = ids, now
        if leaving := self._used - ids:
            # Of a node that Ray has lost, the workers may live on for a while: long enough to save.
            return f"{len(leaving)} of its nodes {'has' if len(leaving) == 1 else 'have'} left, or will soon"
        known = frozenset(node.id for node in self._survey.usable) if self._survey else ids
        came = ids - known
        if not came or now - watch.since_s < STEADY_S or self._count >= min(self._range[1], self._job.batch):
            return ""
        return f"{len(came)} more {'node has' if len(came) == 1 else 'nodes have'} come"

    def pressed(self, plan: Plan) -> str:  # noqa: ARG002 - whatever the plan
        """Ray gives a GPU to one user at a time."""
        return ""

    def start(self, entry: str, specs: Sequence[WorkerSpec], *, device: DeviceType, deadline_s: float) -> Group:
        """Places them, has the cluster reserve room, and starts them."""
        assert self._survey is not None
        machines = machines_of(self._survey.usable, device)
        placement = place(len(specs), machines, spread=device == "cpu")
        self._used = frozenset(take.machine for take in placement.takes)
        names = {node.id: node.name for node in self._survey.nodes}
        where = ", ".join(f"{names[take.machine]} x {len(take.indices)}" for take in placement.takes[:8])
        more = f" and {len(placement.takes) - 8} more" if len(placement.takes) > 8 else ""
        self.placed = f"{where}{more} ({placement.reason})"
        self._view.say(f"placement  {self.placed}")
        group: Group = self._cluster.start(
            entry, specs, placement, accelerators=device == "cuda", folder=Path.cwd(), deadline_s=deadline_s
        )
        return group


def to_inventory(nodes: Sequence[NodeReport]) -> Inventory:
    """The planner's view of the nodes: what Ray lets be used of each, and what joins them."""
    beside = sharing(nodes)
    found: list[Node] = []
    for node in nodes:
        assert node.look is not None
        [own] = inventory_of(node.look.hardware).nodes
        many = beside[node.look.hardware.host.hostname]
        cores = max(1, min(own.host.cores, int(node.cpus) or 1))
        host = replace(
            own.host, cores=cores, free_bytes=own.host.free_bytes // many, disk_bytes=own.host.disk_bytes // many
        )
        gpus = [device for device in own.devices if device.kind != "cpu"][: int(node.gpus)]
        cpu = [
            replace(device, free_bytes=device.free_bytes // many, name=f"CPU with {cores} cores",
                    flops={name: rate * cores / own.host.cores for name, rate in device.flops.items()})
            for device in own.devices if device.kind == "cpu"
        ]  # fmt: skip
        found.append(replace(own, devices=(*gpus, *cpu), host=host))
    one_machine = len(beside) == 1
    # What joins the nodes cannot be seen from them; a modest network makes no plan look better than it is.
    return Inventory(nodes=tuple(found), network=LINKS["memory"] if one_machine else parse_link("25Gb/s", "network"))


def sees(url: str, options: dict[str, Any], name: str, content: bytes, folders: tuple[str, ...]) -> str:
    """Runs on a node: "" if it can read what the launcher wrote, can write there, and has the `folders`."""
    for path in folders:
        if not Path(path).is_dir():
            return f"there is no folder {path}"
    store = Store.open(url, options)
    try:
        read = store.read(name)
    except ObjectMissing:
        return f"{store.url} is another folder there: what this machine writes is not seen"
    if read != content:
        return f"{store.url} gives other bytes there than were written here"
    own = f"{name}-{secrets.token_hex(4)}"
    store.write_atomic(own, b"x")
    store.delete(own)
    return ""
