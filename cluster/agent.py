"""One machine's part of a group that spans machines: starts its workers, and stands between them and the launcher.

    launcher (rung.cluster.remote)  <- one TCP connection each ->  agent  <- Unix sockets ->  its workers

The workers are those of `rung.cluster.local`, so that memory caps, exit statuses, stacks, signals and logs are the same
on a cluster as on one machine. What travels over TCP are pickles, so a connection begins with a random token that only
agents started by this launcher know; nothing is unpickled before it was compared.

Whatever starts agents (`rung.cluster.ray_train`) only has to call `serve` once on each machine.
"""

import contextlib
import os
import pickle
import queue
import shutil
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rung.cluster.failures import Ended
from rung.cluster.link import USER, Frames, Seat, frame
from rung.cluster.local import Message, Workers, WorkerSpec, warm
from rung.cluster.memory_trace import Sample
from rung.strategies.errors import RungError, WorkersFailed

TOKEN_BYTES = 32
NUMBER = struct.Struct("<I")
"""Follows the token: which agent this is."""

TICK_S = 0.5
"""How often an agent says how its workers are."""
CONNECT_S = 20.0
REACH_S = 5.0
"""How long an agent tries to reach another machine's."""
SILENT_S = 60.0
"""An agent that hears nothing from the launcher for so long ends its workers: the network may be cut for good."""
_LOG_CHUNK = 1 << 18


@dataclass(frozen=True, kw_only=True, slots=True)
class Duty:
    """What an agent is to do. `specs`: of its own workers, with their ranks in the whole group. `host`: the address by
    which the others reach this machine. `folder`: where workers start, if it is there."""

    entry: str
    specs: tuple[WorkerSpec, ...]
    world: int
    host: str
    folder: str
    preload: tuple[str, ...]
    deadline_s: float


# ---------------------------------------------------------------- agent to launcher


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """All workers of this machine are about to call their function, or have ended; or none could be started."""

    error: RungError | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Listening:
    """The port on which this machine can be tried by the others."""

    port: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Met:
    """The answer to Meet: which machine could not be reached and why, or ""."""

    trouble: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Port:
    """What one worker told its peers, on its way to those on other machines (both ways)."""

    body: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Pulse:
    """How the workers are: heartbeats and processes by rank, the newest memory sample, kills by the kernel so far."""

    beats: dict[int, tuple[int, str, float]]
    pids: dict[int, int]
    sample: Sample | None
    oom_kills: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Log:
    """What a worker printed."""

    rank: int
    text: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Stacks:
    """The answer to AskStacks."""

    number: int
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Settled:
    """Nothing is left of this machine's workers."""

    error: RungError | None = None


# ---------------------------------------------------------------- launcher to agent


@dataclass(frozen=True, kw_only=True, slots=True)
class Send:
    """A value for one worker, or for all of this machine."""

    rank: int | None
    value: object


@dataclass(frozen=True, kw_only=True, slots=True)
class Meet:
    """Asks whether some of the other machines can be reached: (name, host, port) of each."""

    peers: tuple[tuple[str, str, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """A signal for one worker."""

    rank: int
    signal: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AskStacks:
    """Asks for the Python stacks of one worker."""

    number: int
    rank: int
    deadline_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """End all workers, as `Workers.stop` does."""

    grace_s: float
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Ping:
    """The launcher is there."""


def serve(where: tuple[str, int], token: bytes, number: int, duty: Duty) -> None:
    """Runs this machine's workers until the launcher ends them or is gone.

    Of its workers nothing is left then. The process that they are forked from stays, warm for the next time, until this
    one ends or calls `rung.cluster.local.cool`.
    """
    if duty.folder and Path(duty.folder).is_dir():
        os.chdir(duty.folder)
    warm(duty.preload, {})
    try:
        sock = socket.create_connection(where, timeout=CONNECT_S)
    except OSError as error:
        raise WorkersFailed(
            f"{socket.gethostname()} cannot reach the launcher at {where[0]}:{where[1]}: {error}",
            hint="the nodes of a cluster have to reach the machine of the launcher on any port; look at firewalls",
        ) from None
    with sock, _door(duty.host) as door, tempfile.TemporaryDirectory(prefix="rung-logs-") as logs:
        sock.settimeout(None)
        sock.sendall(token + NUMBER.pack(number))
        _Agent(sock, duty, Path(logs), door.getsockname()[1]).run()


def _door(host: str) -> socket.socket:
    """Where the others try whether this machine can be reached. The system answers for us: nothing is read."""
    try:
        return socket.create_server((host, 0), backlog=64)
    except OSError as error:
        raise WorkersFailed(
            f"{socket.gethostname()} cannot listen on {host}, by which the other nodes are to reach it: {error}",
            hint="start Ray there with --node-ip-address=ADDRESS, one that the machine has and the others reach",
        ) from None


def unreachable(peers: Sequence[tuple[str, str, int]], deadline_s: float = REACH_S) -> str:
    """The first of these (name, host, port) that cannot be reached from here, and why; "" if all can."""
    at = ""
    try:
        for name, host, port in peers:
            at = f"{name} at {host}:{port}"
            socket.create_connection((host, port), timeout=deadline_s).close()
    except OSError as error:
        return f"{at}: {error}"
    return ""


class _Agent:
    def __init__(self, sock: socket.socket, duty: Duty, logs: Path, port: int) -> None:
        self._sock, self._duty, self._port_of_door = sock, duty, port
        self._sending = threading.Lock()
        self._inbox: queue.Queue[object] = queue.Queue()
        self._early: list[bytes] = []
        self._rank_of = [spec.rank for spec in duty.specs]
        self._local_of = {rank: local for local, rank in enumerate(self._rank_of)}
        environment = _interfaces(duty.host)
        self._specs = [
            replace(spec, rank=local, log=logs / f"rank-{spec.rank}.log", env={**environment, **spec.env},
                    seat=Seat(rank=spec.rank, world=duty.world, host=duty.host))
            for local, spec in enumerate(duty.specs)
        ]  # fmt: skip
        self._sent = dict.fromkeys(self._rank_of, 0)
        self._heard = time.monotonic()
        self._folder = logs
        self._over = False

    def run(self) -> None:
        threading.Thread(target=self._listen, name="rung-agent", daemon=True).start()
        self._say(Listening(port=self._port_of_door))
        try:
            workers = Workers.start(
                self._duty.entry, self._specs, deadline_s=self._duty.deadline_s, to_other_machines=self._port
            )
        except RungError as error:
            self._logs()
            self._over = True
            self._say(Started(error=error))
            return
        end = End(grace_s=0.0, reason="")
        try:
            self._say(Started())
            end = self._serve(workers)
        finally:
            self._finish(workers, end)

    def _serve(self, workers: Workers) -> End:
        """Passes everything on until the launcher says how to end."""
        next_pulse = 0.0
        while True:
            for event in workers.poll(0.05):
                self._say(self._renamed(event))
            while True:
                try:
                    order = self._inbox.get_nowait()
                except queue.Empty:
                    break
                if isinstance(order, End):
                    return order
                self._obey(workers, order)
            now = time.monotonic()
            if now >= next_pulse:
                next_pulse = now + TICK_S
                self._pulse(workers)
                self._logs()
                if now - self._heard > SILENT_S:
                    return End(grace_s=0.0, reason="the launcher fell silent")

    def _finish(self, workers: Workers, end: End) -> None:
        error: RungError | None = None
        try:
            workers.stop(end.grace_s, reason=end.reason)
        except RungError as left:
            error = left
        for event in workers.poll(0.0):
            self._say(self._renamed(event))
        self._pulse(workers)
        self._logs()
        self._over = True
        self._say(Settled(error=error))

    def _obey(self, workers: Workers, order: object) -> None:
        match order:
            case Send(rank=None, value=value):
                workers.send(None, value)
            case Send(rank=int(rank), value=value):
                workers.send(self._local_of[rank], value)
            case Port(body=body):
                workers.from_other_machine(body)
            case Kill(rank=rank, signal=number):
                workers.signal(self._local_of[rank], number)
            case AskStacks(number=number, rank=rank, deadline_s=deadline_s):
                self._say(Stacks(number=number, text=workers.stacks(self._local_of[rank], deadline_s)))

    def _renamed(self, event: Message | Ended) -> Message | Ended:
        """Ranks on this machine become ranks of the group."""
        rank = self._rank_of[event.rank]
        if isinstance(event, Message):
            return replace(event, rank=rank)
        failure = event.failure and replace(event.failure, rank=rank)
        return replace(event, rank=rank, failure=failure, log=None)

    def _pulse(self, workers: Workers) -> None:
        samples = workers.memory.samples()
        sample = samples[-1] if samples else None
        if sample is not None:
            sample = replace(sample, by_rank={self._rank_of[r]: n for r, n in sample.by_rank.items()})
        beats = {self._rank_of[r]: beat for r, beat in workers.heartbeats().items()} if workers.alive else {}
        pids = {self._rank_of[r]: pid for r, pid in workers.pids().items()}
        self._say(Pulse(beats=beats, pids=pids, sample=sample, oom_kills=workers.memory.oom_kills()))

    def _logs(self) -> None:
        for spec, rank in zip(self._specs, self._rank_of, strict=True):
            with contextlib.suppress(FileNotFoundError), spec.log.open("rb") as file:
                file.seek(self._sent[rank])
                while text := file.read(_LOG_CHUNK):
                    self._sent[rank] += len(text)
                    self._say(Log(rank=rank, text=text))

    def _port(self, body: bytes) -> None:
        """Runs on the thread that talks to the workers."""
        self._say(Port(body=body))

    def _say(self, value: object) -> None:
        data = frame(USER, value)
        with self._sending, contextlib.suppress(OSError):  # the launcher is gone: the listening thread ends it all
            self._sock.sendall(data)

    def _listen(self) -> None:
        frames = Frames()
        while True:
            try:
                data = self._sock.recv(1 << 18)
            except OSError:
                data = b""
            if not data and self._over:
                return
            if not data:
                shutil.rmtree(self._folder, ignore_errors=True)
                # Nobody would commit what workers still do. Their nursery ends them when this process is gone.
                os._exit(1)
            self._heard = time.monotonic()
            for _, body in frames.feed(data):
                value = pickle.loads(body)  # noqa: S301 - from the launcher that started this agent
                if isinstance(value, Meet):
                    threading.Thread(target=self._meet, args=(value.peers,), name="rung-meet", daemon=True).start()
                elif not isinstance(value, Ping):
                    self._inbox.put(value)

    def _meet(self, peers: tuple[tuple[str, str, int], ...]) -> None:
        """On a thread of its own: workers are being started meanwhile."""
        self._say(Met(trouble=unreachable(peers)))


def _interfaces(host: str) -> Mapping[str, str]:
    """Which network interface gloo and NCCL are to use: the one that has the address `host`."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == host for address in addresses):
            return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
    return {}
