"""The worker's end of the line to its launcher, and the format of what goes over it.

A line is one Unix stream socket. A frame is 8 bytes of length, 1 byte of kind and a pickle. Both ends are processes of
one user on one machine, forked one from the other; nothing from anywhere else is ever unpickled here. (For a group on
several machines the process at the other end is `rung.cluster.agent`, which talks to the launcher over TCP.)

Heartbeats do not travel as messages: each worker writes its own slot of a page that it shares with the launcher,
about a microsecond per beat, and a worker that hangs cannot forget to be silent.
"""

import contextlib
import mmap
import os
import pickle
import queue
import resource
import socket
import struct
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rung.strategies import oom
from rung.strategies.errors import WorkersFailed
from rung.strategies.memory import steady_allocator
from rung.strategies.oom import is_out_of_memory

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

HEADER = struct.Struct("<QB")
USER, ARRIVED, FAILURE, PORT, PAYLOAD = range(5)
"""Kinds of frames. PORT is (number of the store, host, port); PAYLOAD is the first frame down."""

LOOPBACK = "127.0.0.1"

SLOT_BYTES = 64
_SLOT = struct.Struct("<qd48s")
"""One heartbeat: step, CLOCK_MONOTONIC in seconds, phase (UTF-8, padded with zeros)."""


_STACK_BYTES = 9 << 20  # what a thread costs: its stack as ulimit usually has it, and a little heap
_HEARING_BYTES = 2 * _STACK_BYTES  # room for what a message from the launcher sets going: a thread or two


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    """Sent down by `Workers.stop`: finish what must be finished and return from the worker's function."""

    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """A worker's place in a group that spans machines. `host`: the address by which the others reach its machine."""

    rank: int
    world: int
    host: str


def frame(kind: int, value: object) -> bytes:
    """One frame, ready to be sent."""
    body = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(len(body), kind) + body


class Frames:
    """Cuts a stream of bytes into frames. Bodies stay pickled, so that what is only forwarded is never loaded."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> list[tuple[int, bytes]]:
        """Takes what arrived; returns the frames that are complete now, as (kind, pickle). Where there is no memory for
        that, it has taken nothing."""
        before = len(self._buffer)
        self._buffer += data
        try:
            return self._whole()
        except MemoryError:
            del self._buffer[before:]
            raise

    def _whole(self) -> list[tuple[int, bytes]]:
        frames: list[tuple[int, bytes]] = []
        start = 0
        while len(self._buffer) - start >= HEADER.size:
            length, kind = HEADER.unpack_from(self._buffer, start)
            if len(self._buffer) - start - HEADER.size < length:
                break
            start += HEADER.size
            frames.append((kind, bytes(self._buffer[start : start + length])))
            start += length
        del self._buffer[:start]
        return frames


class Board:
    """The heartbeats of all ranks in one shared page; `fd` is the file behind it."""

    def __init__(self, fd: int, ranks: int) -> None:
        self._map = mmap.mmap(fd, max(ranks, 1) * SLOT_BYTES)

    def write(self, rank: int, step: int, phase: str) -> None:
        """Says that `rank` is alive at `step`, doing `phase` (up to 48 bytes are kept)."""
        _SLOT.pack_into(self._map, rank * SLOT_BYTES, step, time.monotonic(), phase.encode())

    def read(self, rank: int) -> tuple[int, str, float] | None:
        """(step, phase, age in seconds) of the last beat, or None before the first."""
        start = rank * SLOT_BYTES
        raw = self._map[start : start + SLOT_BYTES]
        while (again := self._map[start : start + SLOT_BYTES]) != raw:
            raw = again  # it was being written; what is read twice alike is whole
        step, at, phase = _SLOT.unpack(raw)
        if at == 0.0:
            return None
        return step, phase.rstrip(b"\0").decode(errors="replace"), max(0.0, time.monotonic() - at)

    def close(self) -> None:
        """Lets go of the page."""
        self._map.close()


class Link:
    """What a worker's function gets. `rank` and `world` say who it is; all methods may be called from any thread.

    A value that is sent must be picklable, and loadable in a process that does not know torch.
    """

    def __init__(
        self, sock: socket.socket, board: Board, *, rank: int, world: int, slot: int | None = None,
        host: str = LOOPBACK,
    ) -> None:  # fmt: skip
        self.rank = rank
        self.world = world
        self._slot = rank if slot is None else slot
        self._host = host
        self._sock = sock
        self._board = board
        self._sending = threading.Lock()
        self._inbox: deque[Any] = deque()
        self._ports: queue.Queue[tuple[int, str, int]] = queue.Queue()
        self._stores = 0
        self.intercept: Callable[[Any], bool] | None = None
        """Sees each value as it comes down, on the listening thread, even while the main thread hangs in a collective;
        if it returns True, the value does not reach `poll`."""

    def send(self, value: object) -> None:
        """Sends `value` up. The launcher reads all the time, so this does not wait for it to care."""
        self.send_frame(USER, value)

    def send_frame(self, kind: int, value: object) -> None:
        """Sends a frame of any kind; for `rung.cluster` itself."""
        data = frame(kind, value)
        with self._sending:
            self._sock.sendall(data)

    def poll(self) -> Any | None:
        """The next value that came down, or None. Costs well under a microsecond when there is none."""
        try:
            return self._inbox.popleft()
        except IndexError:
            return None

    def beat(self, step: int, phase: str = "") -> None:
        """Shows the launcher that this rank is getting on: call it whenever `step` or `phase` changes."""
        self._board.write(self._slot, step, phase)

    def store(self, deadline_s: float = 120.0) -> "Store":
        """A store that all ranks share, for `init_process_group`. Every rank calls it; it returns when all have.

        Rank 0 serves it on a port that the kernel chose, on the loopback interface (or, in a group that spans machines,
        on the address by which the others reach it), and the launcher passes the number on. Raises WorkersFailed naming
        the ranks that did not come within `deadline_s`.
        """
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        until = time.monotonic() + deadline_s
        number, self._stores = self._stores, self._stores + 1
        if self.rank == 0:
            host = self._host
            listener = socket.create_server((host, 0), backlog=max(128, 2 * self.world))
            port = listener.getsockname()[1]
            store = TCPStore(
                host,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=_delta(deadline_s),
                master_listen_fd=listener.detach(),
            )
            self.send_frame(PORT, (number, host, port))
        else:
            host, port = self._port_of(number, until, deadline_s)
            store = TCPStore(
                host, port, is_master=False, wait_for_workers=False, timeout=_delta(until - time.monotonic())
            )
        self._all_arrive(store, until, deadline_s)
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = host, str(port)
        return store

    def _port_of(self, number: int, until: float, deadline_s: float) -> tuple[str, int]:
        while True:
            try:
                of, host, port = self._ports.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                raise WorkersFailed(
                    f"rank 0 did not arrive within {deadline_s:g} s", hint="its log tells what it was doing"
                ) from None
            if of == number:
                return host, port

    def _all_arrive(self, store: "Store", until: float, deadline_s: float) -> None:
        store.set(f"rung/arrived/{self.rank}", "1")
        keys = {rank: f"rung/arrived/{rank}" for rank in range(self.world)}
        try:
            store.wait(list(keys.values()), _delta(until - time.monotonic()))
        except Exception as error:  # its type differs between versions of torch
            missing = [rank for rank, key in keys.items() if not _has(store, key)]
            raise WorkersFailed(
                f"{_ranks(missing)} did not arrive within {deadline_s:g} s" if missing else f"no meeting: {error}",
                hint="their logs tell what they were doing",
            ) from None

    def receive_first(self, deadline_s: float) -> object:
        """The payload that the launcher sends before anything else; then listening begins."""
        frames = Frames()
        self._sock.settimeout(deadline_s)
        got: list[tuple[int, bytes]] = []
        while not got:
            data = self._sock.recv(1 << 20)
            if not data:
                os._exit(1)  # the launcher is gone
            got = frames.feed(data)
        self._sock.settimeout(None)
        payload = got.pop(0)[1]
        threading.Thread(target=self._listen, args=(frames, got), name="rung-link", daemon=True).start()
        return pickle.loads(payload)  # noqa: S301 - from our own launcher, see the module's docstring

    def _listen(self, frames: Frames, got: list[tuple[int, bytes]]) -> None:
        """Never ends but with the process: a worker that heard nothing more would wait in a collective for its peers,
        and they for it. The main thread may hold all memory that the cap allows; then what was heard gets some more."""
        room = memoryview(bytearray(1 << 16))
        size, tries = 0, 0
        while True:
            try:
                while got:
                    self._hear(*got[0])
                    got.pop(0)
                size = size or self._sock.recv_into(room)
                if not size:
                    os._exit(1)  # the launcher is gone: nobody would commit what this worker still does
                got = frames.feed(room[:size])
                size = tries = 0
            except OSError:  # noqa: PERF203 - a message comes once in a while
                os._exit(1)
            except BaseException as error:
                tries += 1
                if tries > 2 or not is_out_of_memory(error):
                    traceback.print_exception(error)
                    os._exit(1)
                raise_memory_cap(_HEARING_BYTES)

    def _hear(self, kind: int, body: bytes) -> None:
        value = pickle.loads(body)  # noqa: S301 - from our own launcher
        if kind == PORT:
            self._ports.put(value)
        elif self.intercept is None or not self.intercept(value):
            self._inbox.append(value)


def apply_memory_cap(cap_bytes: int) -> int:
    """Lets this process take `cap_bytes` more private memory than it has now; returns the limit that was set.

    RLIMIT_DATA on Linux counts private writable mappings, so what torch itself brought along (current VmData) is added.
    Only the soft limit is set: `lift_memory_cap` can give the way free to save what is in memory. Beyond the cap the
    allocator fails with an exception instead of the kernel killing the process.
    """
    steady_allocator()  # what glibc keeps of freed memory would else be half as much again
    limit = data_bytes() + cap_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    oom.caps.append(limit)
    return limit


def raise_memory_cap(by_bytes: int) -> None:
    """Lets this process take so much more than its cap."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if soft != resource.RLIM_INFINITY:
        more = soft + by_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (more if hard == resource.RLIM_INFINITY else min(more, hard), hard))


def lift_memory_cap() -> None:
    """Takes the cap away again."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


@contextlib.contextmanager
def beyond_memory_cap(threads: int = 0) -> Iterator[None]:
    """Inside, memory is taken that is not the device's (buffers for saving, our own threads): the cap is lifted, and
    afterwards stands higher by what was taken, plus the stacks of `threads` that are still to start."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if soft == hard:
        yield
        return
    before = data_bytes()
    lift_memory_cap()
    try:
        yield
    finally:
        grown = max(0, data_bytes() - before) + threads * _STACK_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (soft + grown, hard))


def data_bytes() -> int:
    """Private writable memory of this process (VmData), in bytes; 0 where the system does not tell."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmData:"):
                return int(line.split()[1]) * 1024
    return 0


def loopback_interface() -> str:
    """Name of the loopback interface, for libraries that ask for one."""
    return "lo0" if sys.platform == "darwin" else "lo"


def _delta(seconds: float) -> Any:
    from datetime import timedelta

    return timedelta(seconds=max(seconds, 0.001))


def _has(store: "Store", key: str) -> bool:
    try:
        return bool(store.check([key]))
    except Exception:
        return False


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
