"""The launcher's end: starts the process that workers are forked from, and talks to it and to all workers.

One background thread does all the talking, so that no worker ever waits for a launcher that is busy, and sending to a
worker that hangs never blocks the launcher.
"""

import contextlib
import json
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from rung.cluster.failures import Ended, Failure
from rung.cluster.link import ARRIVED, FAILURE, PORT, USER, Frames, frame
from rung.strategies.errors import WorkersFailed

_BOOT = "import sys; n = int(sys.argv[2]); sys.path[:] = sys.argv[3 : 3 + n]; from rung.cluster.nursery import main; "
_BOOT += "main(int(sys.argv[1]), sys.argv[3 + n :])"
TICK_S = 0.5
# Batches of unequal size fragment CUDA's memory less so. Workers inherit it; what the user has set, under any of the
# names that versions of PyTorch know, stands.
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def allocator(environ: Mapping[str, str]) -> dict[str, str]:
    """What to add to an environment so that CUDA's memory grows in place. Newer versions of PyTorch look for the first
    name, older ones know only the second."""
    if any(name in environ for name in _ALLOCATOR):
        return {}
    return dict.fromkeys(_ALLOCATOR[:2], "expandable_segments:True")


@dataclass(slots=True, eq=False)
class Channel:
    """One worker as the talking thread sees it. Only that thread changes it, but for `stop_at`."""

    rank: int
    sock: socket.socket
    on_message: Callable[["Channel", bytes], None]
    on_change: Callable[["Channel"], None]
    to_peers: Callable[["Channel", bytes], None]
    frames: Frames = field(default_factory=Frames)
    outbox: bytearray = field(default_factory=bytearray)
    pid: int | None = None
    arrived: bool = False
    failure: Failure | None = None
    ended: Ended | None = None
    stop_at: float | None = None
    settled: bool = False


class Spawner:
    """One nursery and the thread that serves it. `alive` turns false when the nursery is gone."""

    def __init__(self, preload: Sequence[str], env: Mapping[str, str]) -> None:
        self.preload = tuple(preload)
        self.env = dict(env)
        self.alive = True
        self.ready = threading.Event()
        self.tickers: list[Callable[[], None]] = []
        self._by_tag: dict[str, Channel] = {}
        self._by_pid: dict[int, Channel] = {}
        self._calls: deque[Callable[[], None]] = deque()
        self._pending = b""
        self._ending = threading.Lock()
        self._ended = False
        self._control, theirs = socket.socketpair()
        self._wake_r, self._wake_w = socket.socketpair()
        for end in (self._wake_r, self._wake_w):
            end.setblocking(False)
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the nursery
        path = import_path()
        arguments = [str(theirs.fileno()), str(len(path)), *path, *self.preload]
        self._process = subprocess.Popen(
            [sys.executable, *subprocess._args_from_interpreter_flags(), "-c", _BOOT, *arguments],  # type: ignore[attr-defined]
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            env={**allocator(os.environ), **os.environ, **self.env},
            start_new_session=True,
        )
        theirs.close()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._control, selectors.EVENT_READ)
        self._selector.register(self._wake_r, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._talk, name="rung-workers", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """The nursery's process."""
        return self._process.pid

    def fork(self, channel: Channel, request: dict[str, Any], payload: bytes, fds: Sequence[int]) -> None:
        """Asks for a worker. `fds` are those that the nursery hands to it; the caller may close them afterwards."""
        kept = [os.dup(fd) for fd in fds]

        def act() -> None:
            self._selector.register(channel.sock, selectors.EVENT_READ, channel)
            self._queue(channel, payload)
            self._ask({"fork": request}, kept)
            for fd in kept:
                os.close(fd)

        with self._ending:
            if not self._ended:
                self._by_tag[request["tag"]] = channel
                self._post(act)
                return
        for fd in kept:
            os.close(fd)
        self._lose(channel)

    def send(self, channel: Channel, data: bytes) -> None:
        """Sends a frame to a worker as soon as it takes it; nothing if it has ended."""
        self._post(lambda: self._queue(channel, data))

    def kill(self, channel: Channel, number: int) -> None:
        """Sends a signal to a worker, if it has not ended. When it dies, the nursery ends the rest of its session."""
        if channel.pid is not None and channel.ended is None:
            request = {"kill": channel.pid, "signal": int(number)}
            self._post(lambda: self._ask(request))

    def settle(self, channels: Sequence[Channel]) -> None:
        """Asks to be told (`Channel.settled`) when nothing is left of these workers."""
        pids = [c.pid for c in channels if c.pid is not None]
        self._post(lambda: self._ask({"settle": pids}))

    def close(self, timeout_s: float = 8.0) -> None:
        """Ends the nursery and all that is below it."""
        self.alive = False
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        self._output.close()

    def _post(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        with contextlib.suppress(BlockingIOError, OSError):  # full: it will wake anyway; closed: nobody is left to tell
            self._wake_w.send(b"x")

    def _talk(self) -> None:
        try:
            self._serve()
        finally:
            self._orphaned()  # the nursery is gone; or a defect of ours, and then the workers end with this socket

    def _serve(self) -> None:
        next_tick = time.monotonic() + TICK_S
        while True:
            for key, mask in self._selector.select(max(0.0, next_tick - time.monotonic()) if self.tickers else None):
                if key.data is not None:
                    if mask & selectors.EVENT_READ:
                        self._read(key.data)
                    if mask & selectors.EVENT_WRITE:
                        self._flush(key.data)
                elif key.fileobj is self._wake_r:
                    with contextlib.suppress(BlockingIOError):
                        self._wake_r.recv(4096)
                elif not self._hear():
                    return
            while self._calls:
                self._calls.popleft()()
            if time.monotonic() >= next_tick:
                next_tick = time.monotonic() + TICK_S
                for ticker in list(self.tickers):
                    ticker()

    def _ask(self, request: dict[str, Any], fds: Sequence[int] = ()) -> None:
        data = json.dumps(request).encode() + b"\n"
        with contextlib.suppress(ConnectionError, OSError):  # the nursery died; the next read says so
            sent = socket.send_fds(self._control, [data], list(fds)) if fds else self._control.send(data)
            self._control.sendall(data[sent:])

    def _hear(self) -> bool:
        try:
            data = self._control.recv(1 << 16)
        except OSError:
            data = b""
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines:
            self._heard(json.loads(line))
        return bool(data)

    def _heard(self, message: dict[str, Any]) -> None:
        match message:
            case {"ready": _}:
                self.ready.set()
            case {"forked": tag, "pid": pid}:
                channel = self._by_tag.pop(tag)
                channel.pid = pid
                self._by_pid[pid] = channel
                channel.on_change(channel)
            case {"failed": tag, "why": why}:
                channel = self._by_tag.pop(tag)
                at = time.time()
                channel.failure = Failure(rank=channel.rank, at=at, type_name="OSError", message=why, traceback="")
                self._end(channel, os.EX_OSERR << 8, at, 0)
            case {"ended": pid, "status": status, "at": at, "peak_bytes": peak}:
                self._end(self._by_pid[pid], status, at, peak)
            case {"settled": pids}:
                for pid in pids:
                    channel = self._by_pid.pop(pid)
                    channel.settled = True
                    channel.on_change(channel)

    def _end(self, channel: Channel, status: int, at: float, peak_bytes: int) -> None:
        self._read(channel)  # what it said before it died is in the socket already
        with contextlib.suppress(KeyError):
            self._selector.unregister(channel.sock)
        channel.sock.close()
        code = os.waitstatus_to_exitcode(status)
        began = channel.failure.at if channel.failure else at
        channel.ended = Ended(
            rank=channel.rank,
            exit_code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            at=at,
            failure=channel.failure,
            stopped=channel.stop_at is not None and began >= channel.stop_at,
            peak_bytes=peak_bytes,
        )
        channel.on_change(channel)

    def _read(self, channel: Channel) -> None:
        while channel.sock.fileno() >= 0:
            try:
                data = channel.sock.recv(1 << 18)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                with contextlib.suppress(KeyError):
                    self._selector.unregister(channel.sock)  # its end is told by the nursery
                return
            for kind, body in channel.frames.feed(data):
                self._got(channel, kind, body)

    def _got(self, channel: Channel, kind: int, body: bytes) -> None:
        if kind == USER:
            channel.on_message(channel, body)
        elif kind == PORT:
            channel.to_peers(channel, body)
        elif kind == ARRIVED:
            channel.arrived = True
            channel.on_change(channel)
        elif kind == FAILURE:
            channel.failure = _load_failure(channel.rank, body)

    def _queue(self, channel: Channel, data: bytes) -> None:
        if channel.ended is None:
            channel.outbox += data
            self._flush(channel)

    def _flush(self, channel: Channel) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # full: later; closed: its end is told by the nursery
            while channel.outbox:
                del channel.outbox[: channel.sock.send(channel.outbox)]
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.outbox else 0)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.modify(channel.sock, wanted, channel)

    def _orphaned(self) -> None:
        """The nursery is gone: the kernel killed its workers with it."""
        self.alive = False
        with self._ending:
            self._ended = True
            while self._calls:
                self._calls.popleft()()
            lost = [*self._by_tag.values(), *self._by_pid.values()]
        for channel in lost:
            self._lose(channel)
        self._selector.close()
        for end in (self._control, self._wake_r, self._wake_w):
            end.close()

    def _lose(self, channel: Channel) -> None:
        if channel.ended is None:
            at, why = time.time(), f"the process that workers are forked from ended\n{self.output()}".rstrip()
            self._read(channel)
            channel.failure = channel.failure or Failure(
                rank=channel.rank,
                at=at,
                type_name="WorkersFailed",
                message=why,
                traceback="",
                error=WorkersFailed(why),
                peer=True,
            )
            self._end(channel, signal.SIGKILL, at, 0)
        channel.settled = True
        channel.on_change(channel)

    def output(self) -> str:
        """What the nursery itself has written: modules that could not be preloaded, and how it died."""
        if self._output.closed:
            return ""
        size = os.fstat(self._output.fileno()).st_size
        return os.pread(self._output.fileno(), 4096, max(0, size - 4096)).decode(errors="replace").strip()


def import_path() -> list[str]:
    """`sys.path` as another process can use it. Only "" means the current folder; others need not be folders at all."""
    return [entry or os.getcwd() for entry in sys.path]  # noqa: PTH109 - a string is wanted


def _load_failure(rank: int, body: bytes) -> Failure:
    try:
        failure: Failure = pickle.loads(body)  # noqa: S301 - from a worker that we forked
    except Exception as error:
        why = f"its report cannot be read here ({type(error).__name__}: {error})"
        return Failure(rank=rank, at=time.time(), type_name="Exception", message=why, traceback="")
    return failure


def peer_frame(body: bytes) -> bytes:
    """A PORT frame, made anew for the other ranks."""
    return frame(PORT, pickle.loads(body))  # noqa: S301 - a number, a host and a port from a worker that rung started
