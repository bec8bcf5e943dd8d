"""Workers on a Ray cluster. The only home of `ray`, with `rung.cluster.ray_jobs`.

    with RayCluster.connect("auto", runtime_env={}) as cluster:
        survey = cluster.survey(check, deadline_s=60)
        with cluster.start("my.module:main", specs, placement, ...) as workers: ...     # as rung.cluster.local.Workers

Ray finds the nodes, reserves room on them all at once (a placement group with one bundle for each node), carries the
runtime environment there, and runs one `rung.cluster.agent` in each bundle. Everything else is as on one machine.

Why Ray Train's trainers are not used, as tried with Ray 2.60. Since Train V2 a callback of its controller
(`WorkerGroupCallback.before_worker_group_shutdown`) can ask a survivor for its state before it is ended, and that works
when a process is killed. Against it stands that a group is ended with its processes and made anew, which took 12 s;
an agent with its libraries loaded takes 0.1 s; that a machine which falls silent is noticed after ten minutes, a hang
not at all; that the training function is fixed, while rung may need another plan; and that it runs in a thread of an
actor: no signal handler for preemption, no exit status that tells out-of-memory from a crash, no memory cap of its own.
The callback is not part of Train's stable interface either. What rung takes from Ray are the layers below Train.
"""

import contextlib
import inspect
import logging
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from rung.cluster.agent import TOKEN_BYTES, Duty, serve
from rung.cluster.inventory import Look, NodeReport, Survey, judge, look, versions
from rung.cluster.local import WorkerSpec
from rung.cluster.placement import Placement
from rung.cluster.remote import RemoteWorkers
from rung.cluster.sites import Site
from rung.strategies.errors import DependencyError, JobError, RungError, WorkersFailed

#: How long a cluster may take to accept a connection.
CONNECT_S = 10.0
#: How long room that exists, but may be in use, is waited for.
RESERVE_S = 20.0


class RayCluster:
    """A connection to a Ray cluster. Use as a context manager: at its end Ray on this machine, if it was started for
    this, is gone."""

    def __init__(self, ray: Any, address: str, preload: Sequence[str]) -> None:
        self._ray, self.address = ray, address
        self._preload = tuple(preload)
        self._room: _Room | None = None

    @classmethod
    def connect(
        cls, address: str, *, runtime_env: Mapping[str, Any] | None = None, preload: Sequence[str] = ()
    ) -> "RayCluster":
        """Joins a cluster: `local` starts one on this machine, `auto` finds the one that this machine is a node of,
        anything else is the address of a head (`host:6379`). Raises DependencyError or JobError."""
        ray = _import_ray()
        if address.startswith("ray://"):
            raise JobError(
                f"cluster.address: {address}: workers could not reach this machine through a Ray client",
                hint="use the job server, http://HEAD:8265, or launch on a node of the cluster with `auto`",
            )
        if address != "local":
            _reach(ray, address)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        _hush(ray)
        try:
            ray.init(
                address=address, runtime_env=dict(runtime_env or {}) or None, log_to_driver=False,
                logging_level=logging.ERROR,
                **({"include_dashboard": False} if address == "local" else {}),
            )  # fmt: skip
        except RuntimeError as error:
            if "Version mismatch" not in str(error):
                raise JobError(f"cluster.address: {address}: {_first_line(error)}") from None
            raise DependencyError(
                f"cluster.address: {address}: {' '.join(str(error).split())}",
                hint="install the Ray (and Python) version of the cluster here, or launch from one of its nodes",
            ) from None
        except (ConnectionError, TimeoutError, ValueError) as error:
            raise _nobody(address, error) from None
        logging.getLogger("ray").setLevel(logging.ERROR)
        return cls(ray, address, preload)

    @property
    def dashboard(self) -> str:
        """URL of Ray's dashboard, or "" if there is none."""
        with contextlib.suppress(Exception):  # a cluster without one; nothing depends on it
            url = self._ray._private.worker.get_dashboard_url()
            return f"http://{url}" if url else ""
        return ""

    def nodes(self) -> tuple[NodeReport, ...]:
        """The nodes that are up and not about to leave. A few milliseconds."""
        leaving = self._draining()
        return tuple(
            NodeReport(
                id=node["NodeID"], name=f"{node['NodeManagerHostname']}/{node['NodeID'][:6]}",
                host=node["NodeManagerAddress"], cpus=float(node["Resources"].get("CPU", 0)),
                gpus=float(node["Resources"].get("GPU", 0)),
            )
            for node in self._ray.nodes()
            if node["Alive"] and node["NodeID"] not in leaving
        )  # fmt: skip

    def _draining(self) -> set[str]:
        with contextlib.suppress(Exception):  # not in every version of Ray; a node that leaves is then just lost
            found: dict[str, int] = self._ray._private.state.state.get_draining_nodes()
            return set(found)
        return set()

    def survey(self, check: Callable[[], str] | None = None, *, deadline_s: float = 60.0) -> Survey:
        """Has `rung.cluster.inventory.look` run on every node at the same time. `check` must be picklable.

        A node that does not answer within `deadline_s` is reported and left out.
        """
        ray = self._ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        asked = time.time()
        question = ray.remote(look)
        nodes = self.nodes()
        refs = [
            question.options(
                num_cpus=0,
                max_retries=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
            ).remote(check)
            for node in nodes
        ]
        until = time.monotonic() + deadline_s
        answered: dict[Any, float] = {}
        while len(answered) < len(refs) and time.monotonic() < until:
            left = [ref for ref in refs if ref not in answered]
            ready, _ = ray.wait(left, num_returns=len(left), timeout=0.1)
            answered.update(dict.fromkeys(ready, time.time()))
        reports: list[NodeReport] = []
        for node, ref in zip(nodes, refs, strict=True):
            found, error = self._answer(ref) if ref in answered else (None, f"nothing within {deadline_s:g} s")
            if ref not in answered:
                ray.cancel(ref, force=True)
            reports.append(replace(node, look=found, error=error, asked=asked, answered=answered.get(ref, time.time())))
        return Survey(nodes=tuple(reports), findings=tuple(judge(reports, versions())))

    def _answer(self, ref: Any) -> tuple[Look | None, str]:
        try:
            found: Look = self._ray.get(ref, timeout=10.0)
        except Exception as error:  # whatever keeps a node from answering is its answer
            return None, _first_line(error)
        return found, ""

    def start(
        self, entry: str, specs: Sequence[WorkerSpec], placement: Placement, *, accelerators: bool, folder: Path,
        deadline_s: float = 120.0,
    ) -> RemoteWorkers:  # fmt: skip
        """Starts workers where `placement` says. Raises JobError if there is no room for them now, WorkersFailed if
        they do not start within `deadline_s`; nothing is left then."""
        nodes = {node.id: node for node in self.nodes()}
        sites: list[Site] = []
        bundles: list[dict[str, float]] = []
        ordered = sorted(specs, key=lambda spec: spec.rank)
        for take in placement.takes:
            if take.machine not in nodes:
                raise WorkersFailed(f"node {take.machine[:6]} left before workers were started on it")
            node, own = nodes[take.machine], tuple(ordered[: len(take.indices)])
            ordered = ordered[len(own) :]
            sites.append(Site(name=node.name, host=node.host, specs=own))
            cpus = min(node.cpus, float(sum(spec.threads for spec in own)))
            bundles.append({"CPU": cpus, **({"GPU": float(len(own))} if accelerators else {})})
        room = self._room_for([take.machine for take in placement.takes], bundles)
        return RemoteWorkers(
            entry, sites, host=self._ray.util.get_node_ip_address(), token=room.token, folder=str(folder),
            preload=self._preload, launch=room.launch, check=room.check, reap=room.rest, why_lost=room.why_lost,
            deadline_s=deadline_s,
        )  # fmt: skip

    def _room_for(self, nodes: Sequence[str], bundles: Sequence[dict[str, float]]) -> "_Room":
        """The room of the last time if it is the same and whole: its agents have libraries loaded. Else a new one."""
        if self._room is not None:
            if self._room.is_for(nodes, bundles) and self._room.idle():
                return self._room
            self._room.close()
        self._room = _Room(self._ray, nodes, bundles)
        self._room.reserve(RESERVE_S)
        return self._room

    def close(self) -> None:
        """Leaves the cluster. Safe to call twice."""
        if self._room is not None:
            self._room.close()
            self._room = None
        self._ray.shutdown()

    def __enter__(self) -> "RayCluster":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Agents:
    """The actor of one node: it only runs the agent."""

    def serve(self, where: tuple[str, int], token: bytes, number: int, duty: Duty) -> None:
        serve(where, token, number, duty)


class _Room:
    """A placement group with one bundle for each node, and the agents in it."""

    def __init__(self, ray: Any, nodes: Sequence[str], bundles: Sequence[dict[str, float]]) -> None:
        self._ray, self._nodes, self._bundles = ray, list(nodes), list(bundles)
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self._closed = False
        self._actors: dict[int, Any] = {}
        self._runs: dict[int, Any] = {}
        from ray.util.placement_group import placement_group

        if "bundle_label_selector" not in inspect.signature(placement_group).parameters:
            raise DependencyError(
                f"Ray {ray.__version__} cannot place bundles on named nodes", hint="pip install -U 'ray[train]'"
            )
        selectors = [{"ray.io/node-id": node} for node in nodes]
        self._group = placement_group(list(bundles), strategy="PACK", bundle_label_selector=selectors)

    def reserve(self, deadline_s: float) -> None:
        until = time.monotonic() + deadline_s
        while not self._group.wait(timeout_seconds=1):
            alive = {node["NodeID"] for node in self._ray.nodes() if node["Alive"]}
            if gone := [node for node in self._nodes if node not in alive]:
                self.close()
                raise WorkersFailed(f"node {gone[0][:6]} left before workers were started on it")
            if time.monotonic() > until:
                break
        else:
            return
        self.close()
        asked = " + ".join(", ".join(f"{number:g} {name}" for name, number in b.items()) for b in self._bundles)
        total, free = self._ray.cluster_resources(), self._ray.available_resources()
        there = ", ".join(f"{free.get(n, 0):g} of {total.get(n, 0):g} {n}" for n in ("CPU", "GPU") if n in total)
        raise JobError(
            f"cluster.workers: no room within {deadline_s:g} s for {asked}; free are {there}",
            hint="others use the rest: ask for fewer workers, or wait (`ray status` shows who has what)",
        )

    def launch(self, number: int, where: tuple[str, int], duty: Duty) -> None:

        if number not in self._actors:
            self._actors[number] = self._actor(number)
        self._runs[number] = self._actors[number].serve.remote(where, self.token, number, duty)

    def is_for(self, nodes: Sequence[str], bundles: Sequence[dict[str, float]]) -> bool:
        """Whether it is this room."""
        return not self._closed and self._nodes == list(nodes) and self._bundles == list(bundles)

    def idle(self) -> bool:
        """Whether every agent has ended its last run in order, and so can begin another."""
        if len(self._runs) < len(self._bundles):
            return False
        ready, left = self._ray.wait(list(self._runs.values()), num_returns=len(self._runs), timeout=3.0)
        try:
            self._ray.get(ready, timeout=5.0)
        except Exception:  # one of them is lost, for whatever reason
            return False
        return not left

    def _actor(self, number: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = self._bundles[number]
        return (
            self._ray.remote(_Agents)
            .options(
                num_cpus=bundle["CPU"], num_gpus=bundle.get("GPU", 0), max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=number),
            )
            .remote()
        )  # fmt: skip

    def check(self) -> None:
        """Raises what kept an agent from starting."""
        ready, _ = self._ray.wait(list(self._runs.values()), num_returns=len(self._runs), timeout=0)
        for ref in ready:
            self._raise(ref)

    def _raise(self, ref: Any) -> None:
        try:
            self._ray.get(ref, timeout=10.0)
        except Exception as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, RungError):
                raise cause from None
            text = str(error)
            if "No module named 'rung'" in text:
                raise DependencyError(
                    "rung is not installed on every node", hint="install it there, or name it in cluster.runtime_env"
                ) from None
            if type(error).__name__ == "RuntimeEnvSetupError":
                raise JobError(f"cluster.runtime_env: {_first_line(error)}") from None
            raise WorkersFailed(f"an agent could not be started: {_first_line(error)}") from None

    def why_lost(self, number: int) -> str:
        """What Ray knows about the end of an agent; "" if nothing yet."""
        ready, _ = self._ray.wait([self._runs[number]], timeout=1.0)
        try:
            for ref in ready:
                self._raise(ref)
        except RungError as error:
            return error.message
        return ""

    def rest(self) -> None:
        """After a run: what does not end by itself is given up with the whole room."""
        if not self.idle():
            self.close()

    def close(self) -> None:
        """Ends all agents, and gives the room back. Safe to call twice."""
        from ray.util.placement_group import remove_placement_group

        if self._closed:
            return
        self._closed = True
        for actor in self._actors.values():
            self._ray.kill(actor, no_restart=True)
        remove_placement_group(self._group)


def _reach(ray: Any, address: str) -> None:
    """Raises JobError at once where nobody listens; Ray itself would try for minutes."""
    try:
        if address == "auto":
            found = ray._private.services.canonicalize_bootstrap_address(address)
            if not found:
                raise ConnectionError("no node of a cluster runs on this machine")
        else:
            found = address
        host, _, port = str(found).rpartition(":")
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    except (OSError, ValueError) as error:
        raise _nobody(address, error) from None


def _nobody(address: str, error: Exception) -> JobError:
    return JobError(
        f"cluster.address: no Ray cluster answers at {address}: {_first_line(error)}",
        hint="start one (`ray start --head`), or use `local` for Ray on this machine, `none` to do without;"
        " if it is protected by a token, export RAY_AUTH_MODE=token",
    )


def _hush(ray: Any) -> None:
    """Ray prints the last lines of a dead raylet's log, and more, into the driver's terminal, with no switch for it.
    What matters of it is said by rung in its own words, and all of it is in Ray's own logs."""
    if hasattr(ray._private.worker, "print_to_stdstream"):
        ray._private.worker.print_to_stdstream = lambda *_, **__: None


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise DependencyError(
            f"cluster.address needs Ray, which cannot be imported: {error}", hint="pip install 'ray[train]'"
        ) from None
    return ray


def _first_line(error: BaseException) -> str:
    plain = re.sub(r"\x1b\[[0-9;]*m", "", str(error))  # Ray colours its words for terminals
    lines = [line.strip() for line in plain.splitlines() if line.strip()]
    if any("Traceback (most recent" in line or line.startswith("ray::") for line in lines[:3]):
        return lines[-1][:400]
    return " ".join(lines[:3])[:400] or type(error).__name__
