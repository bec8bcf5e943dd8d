"""Workers on this machine: started, watched, talked to and ended, so that nothing is ever left behind.

    warm(["torch"], {})                               # at once; torch loads while the launcher reads its job
    with Workers.start("my.module:main", specs, deadline_s=60) as workers:
        while workers.alive:
            for event in workers.poll(1.0): ...       # Message or Ended
    # here every process, socket, port and shared memory of theirs is gone

The launcher never imports torch: workers are forked from a process of their own that has (`rung.cluster.nursery`).
"""

import atexit
import contextlib
import os
import pickle
import signal
import socket
import tempfile
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import IO

from rung.cluster.failures import Ended, Facts, culprits
from rung.cluster.link import PAYLOAD, SLOT_BYTES, USER, Board, Seat, Stop, frame
from rung.cluster.memory_trace import MemoryTrace
from rung.cluster.spawner import Channel, Spawner, import_path, peer_frame
from rung.cluster.verdict import Verdict, tail, trim_stack, verdict
from rung.strategies.errors import StorageError, WorkersFailed
from rung.strategies.plan import DeviceType

TERM_S = 2.0
KILL_S = 15.0
"""How long a process may take to die of SIGKILL: a large one gives its memory back page by page."""

_spawner: Spawner | None = None
_spawner_lock = threading.Lock()


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSpec:
    """One worker to start.

    payload: any picklable value, handed to the worker's function. log: file that its output is appended to.
    memory_cap_bytes: private memory that it may take beyond what it starts with. cpus: those it may run on (empty:
    all). threads: for torch and OpenMP. seat: its place in a larger group that spans machines; its `rank` then is the
    one among the workers of this machine.
    """

    rank: int
    payload: object
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)
    memory_cap_bytes: int | None = None
    cpus: tuple[int, ...] = ()
    threads: int = 1
    seat: Seat | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """A value that a worker sent; `at` is when it came, in seconds since the epoch."""

    rank: int
    value: object
    at: float


Event = Message | Ended


def warm(preload: Sequence[str], env: Mapping[str, str]) -> None:
    """Starts, in the background, the process that workers are forked from; it imports `preload`. Returns at once.

    `env` is what must be in place before these modules load; a worker's own environment comes from its spec. A module
    that cannot be imported is left to the worker that needs it. Calling it again with the same values does nothing.
    """
    _get_spawner(preload, env)


def cool() -> None:
    """Ends that process and all below it. Happens by itself when the launcher exits."""
    global _spawner
    with _spawner_lock:
        if _spawner is not None:
            _spawner.close()
            _spawner = None


atexit.register(cool)


def _get_spawner(preload: Sequence[str] | None, env: Mapping[str, str] | None) -> Spawner:
    """The running one if it was started with these values (None: any), else a new one."""
    global _spawner
    with _spawner_lock:
        if _spawner is not None and _spawner.alive:
            same = preload is None or (_spawner.preload == tuple(preload) and _spawner.env == dict(env or {}))
            if same:
                return _spawner
        if _spawner is not None:
            _spawner.close()
        _spawner = Spawner(preload or (), env or {})
        return _spawner


class Workers:
    """A group of workers, ranks 0 to world - 1. Made by `start`; a context manager that ends with `stop`."""

    def __init__(
        self, spawner: Spawner, specs: Sequence[WorkerSpec], to_other_machines: Callable[[bytes], None] | None = None
    ) -> None:
        self.specs = tuple(sorted(specs, key=lambda spec: spec.rank))
        self.world = len(self.specs)
        if [spec.rank for spec in self.specs] != list(range(self.world)):
            raise ValueError(f"ranks have to be 0..{self.world - 1}, got {[spec.rank for spec in self.specs]}")
        self.ends: list[Ended] = []
        self.memory = MemoryTrace()
        self._spawner = spawner
        self._to_other_machines = to_other_machines
        self._channels: list[Channel] = []
        self._stacks: list[IO[bytes]] = []
        self._events: deque[Ended | tuple[int, bytes, float]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._board_file = _memory_file()
        os.ftruncate(self._board_file.fileno(), self.world * SLOT_BYTES)
        self._board = Board(self._board_file.fileno(), self.world)

    @classmethod
    def start(
        cls, entry: str, specs: Sequence[WorkerSpec], *, deadline_s: float = 120.0,
        to_other_machines: Callable[[bytes], None] | None = None,
    ) -> "Workers":  # fmt: skip
        """Runs `function(link, payload)` of `entry` ("module:function") in one process for each spec.

        Returns when every worker is about to call its function, or has already ended (an event says how). Raises
        WorkersFailed naming the ranks that did neither within `deadline_s`; nothing of the group is left then.

        `to_other_machines` gets what workers here tell their peers, where the group has more of them elsewhere.
        """
        workers = cls(_get_spawner(None, None), specs, to_other_machines)
        try:
            payloads = [frame(PAYLOAD, spec.payload) for spec in workers.specs]
            for spec, payload in zip(workers.specs, payloads, strict=True):
                workers._fork(entry, spec, payload)
            workers._spawner.tickers.append(workers._sample)
            workers._wait_for_arrival(deadline_s)
        except BaseException:
            workers.stop(0.0)
            raise
        return workers

    def _fork(self, entry: str, spec: WorkerSpec, payload: bytes) -> None:
        try:
            spec.log.parent.mkdir(parents=True, exist_ok=True)
            log = os.open(spec.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise StorageError(
                f"cannot write the log of rank {spec.rank}, {spec.log}: {error.strerror}", url=str(spec.log)
            ) from None
        stacks = _memory_file()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        channel = Channel(
            rank=spec.rank,
            sock=ours,
            on_message=self._on_message,
            on_change=self._on_change,
            to_peers=self._to_peers,
        )
        self._channels.append(channel)
        self._stacks.append(stacks)
        request = {
            "tag": uuid.uuid4().hex,
            "rank": spec.rank,
            "world": self.world,
            "entry": entry,
            "cwd": str(Path.cwd()),
            "sys_path": import_path(),
            "env": dict(spec.env),
            "cpus": list(spec.cpus),
            "threads": spec.threads,
            "memory_cap_bytes": spec.memory_cap_bytes,
            "seat": spec.seat and [spec.seat.rank, spec.seat.world, spec.seat.host],
        }
        try:
            fds = (theirs.fileno(), log, self._board_file.fileno(), stacks.fileno())
            self._spawner.fork(channel, request, payload, fds)
        finally:
            theirs.close()
            os.close(log)

    def _wait_for_arrival(self, deadline_s: float) -> None:
        def missing() -> list[int]:
            return [c.rank for c in self._channels if not c.arrived and c.ended is None]

        with self._changed:
            if self._changed.wait_for(lambda: not missing(), deadline_s):
                return
        text = ", ".join(map(str, missing()))
        said = self._spawner.output()
        raise WorkersFailed(
            f"of {self.world} workers, these ranks did not start within {deadline_s:g} s: {text}"
            + (f"\n{said}" if said else ""),
            hint="see their logs; a slow disk or many imports in the task need a longer deadline",
        )

    @property
    def alive(self) -> tuple[int, ...]:
        """Ranks that have not ended."""
        return tuple(c.rank for c in self._channels if c.ended is None)

    def pids(self) -> dict[int, int]:
        """Process of each living rank."""
        return {c.rank: c.pid for c in self._channels if c.ended is None and c.pid is not None}

    def poll(self, timeout_s: float = 0.0) -> list[Event]:
        """What has happened since the last call, in order; waits up to `timeout_s` for the first event."""
        with self._changed:
            self._changed.wait_for(lambda: self._events, timeout_s)
            events = list(self._events)
            self._events.clear()
        return [event if isinstance(event, Ended) else _message(*event) for event in events]

    def send(self, rank: int | None, value: object) -> None:
        """Sends `value` to one rank, or to all that live (None). Never blocks."""
        data = frame(USER, value)
        for channel in self._channels:
            if rank is None or channel.rank == rank:
                self._spawner.send(channel, data)

    def heartbeats(self) -> dict[int, tuple[int, str, float]]:
        """(step, phase, age in seconds) of the last heartbeat of each living rank that has made one."""
        beats = {rank: self._board.read(rank) for rank in self.alive}
        return {rank: beat for rank, beat in beats.items() if beat is not None}

    def stacks(self, rank: int, deadline_s: float = 2.0) -> str:
        """Python stacks of all threads of a living worker, most recent call first; works while it hangs in C code."""
        channel, file = self._channels[rank], self._stacks[rank].fileno()
        start = size = os.fstat(file).st_size
        self._spawner.kill(channel, signal.SIGUSR1)
        until, still = time.monotonic() + deadline_s, 0
        while time.monotonic() < until and still < 3:
            time.sleep(0.02)
            now = os.fstat(file).st_size
            still = still + 1 if now == size and now > start else 0
            size = now
        if size == start:
            return f"rank {rank} did not answer within {deadline_s:g} s ({_state(channel.pid)})"
        return trim_stack(os.pread(file, size - start, start).decode(errors="replace").strip())

    def hung(self, silent_s: float) -> dict[int, str]:
        """Ranks that hold up the others, with their stacks: empty unless a heartbeat is older than `silent_s`.

        When one rank hangs all fall silent, since the others wait for it; `culprits` tells them apart.
        """
        beats = self.heartbeats()
        if not any(age > silent_s for _, _, age in beats.values()):
            return {}
        stacks = {rank: self.stacks(rank) for rank in beats}
        return {rank: stacks[rank] for rank in culprits({r: step for r, (step, _, _) in beats.items()}, stacks)}

    def from_other_machine(self, body: bytes) -> None:
        """Passes on what a worker elsewhere told its peers."""
        data = peer_frame(body)
        for channel in self._channels:
            self._spawner.send(channel, data)

    def signal(self, rank: int, number: int) -> None:
        """Sends a signal to one worker."""
        self._spawner.kill(self._channels[rank], number)

    def stop(self, grace_s: float = 10.0, *, reason: str = "") -> None:
        """Ends all workers and everything below them; returns when nothing is left. Safe to call twice.

        They are sent `Stop` and have `grace_s` to return; then SIGTERM and two seconds, then SIGKILL to their process
        sessions. With no grace at all SIGKILL comes at once.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._end(grace_s, reason)
        finally:
            with contextlib.suppress(ValueError):
                self._spawner.tickers.remove(self._sample)
            self._board.close()
            self._board_file.close()
            for stacks in self._stacks:
                stacks.close()

    def _end(self, grace_s: float, reason: str) -> None:
        now = time.time()
        for channel in self._channels:
            channel.stop_at = now if channel.ended is None else None
        if grace_s > 0:
            self.send(None, Stop(reason=reason))
            if not self._wait_for_end(grace_s):
                for channel in self._channels:
                    self._spawner.kill(channel, signal.SIGTERM)
                self._wait_for_end(TERM_S)
        if any(c.pid is None and c.ended is None for c in self._channels):
            self._spawner.close()  # it has not come to fork them yet, and shall not
        shared = _shared_memory_of(self.pids().values())
        for channel in self._channels:
            self._spawner.kill(channel, signal.SIGKILL)
        if not self._wait_for_end(KILL_S):
            left = {rank: _state(pid) for rank, pid in self.pids().items()}
            raise WorkersFailed(
                f"workers did not die of SIGKILL within {KILL_S:g} s: {left}",
                hint="a process in state D waits for a device or a disk; the machine may need a restart",
            )
        if self._spawner.alive:
            self._spawner.settle(self._channels)
        with self._changed:
            self._changed.wait_for(lambda: all(c.settled or c.pid is None for c in self._channels), KILL_S)
        for name in shared | _named_after({c.pid for c in self._channels if c.pid is not None}):
            with contextlib.suppress(OSError):
                name.unlink()

    def _wait_for_end(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self.alive, timeout_s)

    def verdict(self, *, device: DeviceType = "cpu", hung: Mapping[int, str] | None = None) -> Verdict | None:
        """One screen about why the workers ended; None if all ended well. `hung` are stacks of ranks that hung."""
        facts = Facts(
            device=device,
            oom_kills=self.memory.oom_kills(),
            log_tails={spec.rank: tail(spec.log) for spec in self.specs},
            hung=dict(hung or {}),
            capped=any(spec.memory_cap_bytes is not None for spec in self.specs),
        )
        return verdict(self.ends, facts, memory=self.memory.samples())

    def __enter__(self) -> "Workers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(10.0 if kind is None else 0.0)

    # Called by the talking thread.

    def _on_message(self, channel: Channel, body: bytes) -> None:
        with self._changed:
            self._events.append((channel.rank, body, time.time()))
            self._changed.notify_all()

    def _on_change(self, channel: Channel) -> None:
        with self._changed:
            if channel.ended is not None and all(end.rank != channel.rank for end in self.ends):
                ended = replace(channel.ended, log=self.specs[channel.rank].log)
                self.ends.append(ended)
                self._events.append(ended)
            self._changed.notify_all()

    def _to_peers(self, channel: Channel, body: bytes) -> None:
        if self._to_other_machines is not None:
            self._to_other_machines(body)
        data = peer_frame(body)
        for peer in self._channels:
            if peer is not channel:
                self._spawner.send(peer, data)

    def _sample(self) -> None:
        self.memory.sample(self.pids())


def _message(rank: int, body: bytes, at: float) -> Message:
    """Loaded here and not by the talking thread, so that a value that cannot be loaded is the caller's to see."""
    return Message(rank=rank, value=pickle.loads(body), at=at)  # noqa: S301 - from a worker that we forked


def _memory_file() -> IO[bytes]:
    """An empty file without a name, in memory where the system has that: no full disk can break a heartbeat."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("rung"), "w+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)


def _state(pid: int | None) -> str:
    """The kernel's word for what a process does, such as `D (disk sleep)`."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("State:"):
                return line.split(":", 1)[1].strip()
    return "gone"


_SHM = Path("/dev/shm")  # noqa: S108 - looked at, not written to


def _shared_memory_of(pids: object) -> set[Path]:
    """Named shared memory that living workers have mapped, to be removed when they are gone."""
    found: set[Path] = set()
    for pid in pids:  # type: ignore[attr-defined]
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                name = line.partition("/dev/shm/")[2]  # noqa: S108
                if name and not name.endswith("(deleted)"):
                    found.add(_SHM / name)
    return found


def _named_after(pids: set[int]) -> set[Path]:
    """What torch named after processes that are gone now (`torch_<pid>_...`)."""
    with contextlib.suppress(OSError):
        return {path for path in _SHM.glob("torch_*") if path.name.split("_")[1] in {str(pid) for pid in pids}}
    return set()
