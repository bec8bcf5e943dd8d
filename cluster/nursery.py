"""The process that workers are forked from: torch is imported here once, and no device is touched.

It is a program of its own, started by `rung.cluster.spawner`, and loads nothing but the standard library before the
modules that it is told to preload. What it promises:

- it lives in a session of its own, so that Ctrl-C in a terminal does not reach it or the workers;
- when the launcher goes, however it goes, the control socket closes, and every process below this one is killed;
- when this process goes, the kernel kills the workers (PR_SET_PDEATHSIG, Linux);
- when a worker ends, its exit status is reported and what is left of its session is killed;
- processes that lose their parent below it are handed to it (PR_SET_CHILD_SUBREAPER, Linux), so nothing escapes.

Why neither `multiprocessing`'s fork server nor torch's elastic agent. The stdlib's server lives until the last worker
closes its pipe (a launcher killed with -9 would leave all of them running), runs the launcher's `__main__` again,
hides errors of preloading and reports exit codes only through a `Process` object. Torch's agent would put torch into
the launcher.

Requests are JSON lines on a Unix socket, those to fork with file descriptors attached (link, log, heartbeats, stacks):
`{"fork": {...}}`, `{"kill": pid, "signal": n}` and `{"settle": [pids]}`. Replies:
`{"ready": true}`, `{"forked": tag, "pid": n}`, `{"failed": tag, "why": text}`,
`{"ended": pid, "status": wait status, "at": time, "peak_bytes": n}`, and
`{"settled": [pids]}` once nothing is left of these workers' sessions.
"""

import contextlib
import ctypes
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

FDS_PER_WORKER = 4
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_CLEANER_GRACE_S = 1.0
_CLEANERS = (b"multiprocessing.resource_tracker", b"torch_shm_manager")
"""They remove the shared memory of a worker that died, and get this long to do so."""


def main(control_fd: int, preload: Sequence[str]) -> None:
    """Preloads, then serves until the launcher is gone. A forked worker leaves by `os._exit`."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP):
        signal.signal(number, signal.SIG_IGN)
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    control = socket.socket(fileno=control_fd)
    # Importing makes a million objects that are never freed: looking through them again and again while they come
    # takes a quarter of the time, and looking later would unshare their pages.
    import gc

    gc.disable()
    for name in preload:
        if _hung_up(control):
            os._exit(0)
        try:
            __import__(name)
        except Exception as error:
            print(f"preloading {name} failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    gc.freeze()
    gc.enable()
    child = _Server(control).serve()
    if child is not None:
        child()  # never returns


def prctl(option: int, value: int) -> None:
    """Sets a Linux process attribute; elsewhere the sockets' end-of-file is all there is."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def die_with_parent() -> None:
    """Asks the kernel to kill this process when its parent goes."""
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class _Server:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._workers: dict[int, str] = {}
        self._fds: list[int] = []
        self._pending = b""
        self._settling: list[list[int]] = []
        self._sweeps: list[tuple[float, int]] = []
        """(when, session): sessions of ended workers, of which something may still be cleaning up."""
        self._strays: dict[int, float] = {}
        """Since when a process is ours because its parent ended."""

    def serve(self) -> Callable[[], None] | None:
        """Runs until the launcher hangs up. In a forked child it returns at once, with what the child shall do."""
        wake_r, wake_w = socket.socketpair()
        for end in (wake_r, wake_w):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_w.fileno(), warn_on_full_buffer=False)
        self._reply({"ready": True})
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(wake_r, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in selector.select(0.02 if self._sweeps or self._settling else None)]
                if wake_r in ready:
                    with contextlib.suppress(BlockingIOError):
                        wake_r.recv(4096)
                self._reap()
                if self._control in ready:
                    requests = self._receive()
                    if requests is None:
                        self._end_everything()
                        return None
                    for request in requests:
                        child = self._handle(request)
                        if child is not None:
                            signal.set_wakeup_fd(-1)
                            selector.close()
                            for end in (wake_r, wake_w, self._control):
                                end.close()
                            return child
                self._sweep()

    def _receive(self) -> list[dict[str, Any]] | None:
        """Whole requests that have arrived; None when the launcher is gone."""
        try:
            data, fds, _, _ = socket.recv_fds(self._control, 1 << 16, 64)
        except ConnectionError:
            return None
        for fd in fds:
            os.set_inheritable(fd, False)
        self._fds += fds
        if not data:
            return None
        *lines, self._pending = (self._pending + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def _handle(self, request: dict[str, Any]) -> Callable[[], None] | None:
        if "fork" in request:
            return self._fork(request["fork"])
        if "settle" in request:
            self._settling.append(request["settle"])
            return None
        pid = request["kill"]
        if pid in self._workers:  # not yet waited for, so the number cannot have been given to another process
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, request["signal"])
        return None

    def _fork(self, request: dict[str, Any]) -> Callable[[], None] | None:
        fds, self._fds = self._fds[:FDS_PER_WORKER], self._fds[FDS_PER_WORKER:]
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            self._reply({"failed": request["tag"], "why": f"fork: {error}"})
            pid = -1
        if pid == 0:
            for fd in self._fds:
                os.close(fd)
            return lambda: _become_worker(request, fds, parent)
        for fd in fds:
            os.close(fd)
        if pid > 0:
            self._workers[pid] = request["tag"]
            self._reply({"forked": request["tag"], "pid": pid})
        return None

    def _reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if self._workers.pop(pid, None) is not None:
                unit = 1 if sys.platform == "darwin" else 1024
                at = time.time()
                _kill_session(pid, spare_cleaners=True)
                self._sweeps.append((time.monotonic() + _CLEANER_GRACE_S, pid))
                self._reply({"ended": pid, "status": status, "at": at, "peak_bytes": usage.ru_maxrss * unit})

    def _sweep(self) -> None:
        now = time.monotonic()
        for due, session in list(self._sweeps):
            if now >= due or not _session(session):
                _kill_session(session, spare_cleaners=False)
                self._sweeps.remove((due, session))
        strays: list[int] = []
        if not self._workers and not self._sweeps:
            strays = _children()  # what changed its session and outlived its worker
            self._strays = {pid: self._strays.get(pid, now) for pid in strays}
            for pid, since in self._strays.items():
                if now - since >= _CLEANER_GRACE_S or not _is_cleaner(pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        waiting = {session for _, session in self._sweeps} | set(self._workers)
        for pids in list(self._settling):
            if not strays and not waiting & set(pids):
                self._settling.remove(pids)
                self._reply({"settled": pids})

    def _end_everything(self) -> None:
        deadline = time.monotonic() + 5.0
        for pid in list(self._workers):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        while time.monotonic() < deadline:
            self._reap()
            self._sweep()
            if not self._workers and not self._sweeps and not _children():
                return
            time.sleep(0.01)

    def _reply(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(ConnectionError):  # the launcher went; the next read says so
            self._control.sendall(json.dumps(message).encode() + b"\n")


def _become_worker(request: dict[str, Any], fds: list[int], parent: int) -> None:
    """The first thing a forked worker does. Leaves by `os._exit`: the server's stack is below it and must not run."""
    os.setsid()
    die_with_parent()
    if os.getppid() != parent:
        os._exit(1)  # the server died between the fork and the line above
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = 1
    try:
        from rung.cluster.worker import run_worker

        code = run_worker(request, *fds)
    finally:
        os._exit(code)


def _hung_up(control: socket.socket) -> bool:
    try:
        return control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def _session(session: int) -> list[int]:
    """Living processes of a session, found in /proc; empty where there is none."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] not in "ZX":
                found.append(int(entry.name))
    return found


def _is_cleaner(pid: int) -> bool:
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return any(name in command for name in _CLEANERS)
    return False


def _kill_session(session: int, *, spare_cleaners: bool) -> None:
    members = _session(session)
    if not members and sys.platform != "linux":
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(session, signal.SIGKILL)
    for pid in members:
        if spare_cleaners and _is_cleaner(pid):
            continue
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _children() -> list[int]:
    with contextlib.suppress(OSError):
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    return []
