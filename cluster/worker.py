"""What a worker does around the function it was started for: its log, its limits, its link, and how it ends."""

import atexit
import contextlib
import ctypes
import faulthandler
import importlib
import io
import os
import resource
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from rung.cluster.failures import LAST_WORDS, describe
from rung.cluster.link import (
    ARRIVED,
    FAILURE,
    LOOPBACK,
    Board,
    Link,
    apply_memory_cap,
    lift_memory_cap,
    loopback_interface,
)

PAYLOAD_DEADLINE_S = 60.0


def run_worker(request: dict[str, Any], link_fd: int, log_fd: int, board_fd: int, stacks_fd: int) -> int:
    """Runs the worker and returns its exit code. `request` is what `rung.cluster.spawner` wrote."""
    _own_log(log_fd)
    faulthandler.enable(file=2, all_threads=True)
    stacks = os.fdopen(stacks_fd, "wb", buffering=0)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    slot, beside = request["rank"], request["world"]
    board = Board(board_fd, beside)
    os.close(board_fd)
    rank, world, host = request["seat"] or (slot, beside, LOOPBACK)
    link = Link(socket.socket(fileno=link_fd), board, rank=rank, world=world, slot=slot, host=host)
    code = 0
    try:
        _settle(request)
        payload = link.receive_first(PAYLOAD_DEADLINE_S)
        function = _find(request["entry"])
        link.send_frame(ARRIVED, None)
        function(link, payload)
    except SystemExit as leaving:
        code = _exit_code(leaving)
    except BaseException as error:
        at = time.time()
        _report(link, rank, error, at)
        code = 1
    _leave(clean=code == 0)
    return code


def _own_log(log_fd: int) -> None:
    """Everything that this process and its libraries write goes to the log, line by line."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    os.close(null)
    os.close(log_fd)
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False))
    for name, fd in (("stdout", 1), ("stderr", 2)):
        raw = io.BufferedWriter(io.FileIO(fd, "w", closefd=False))
        stream = io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    with contextlib.suppress(OSError, ValueError, AttributeError):  # another C library; its output then comes in blocks
        libc = ctypes.CDLL(None)
        libc.setvbuf(ctypes.c_void_p.in_dll(libc, "__stdoutp" if sys.platform == "darwin" else "stdout"), None, 1, 0)


def _settle(request: dict[str, Any]) -> None:
    """Folder, import path, environment, CPUs, threads and the memory cap, in this order."""
    os.chdir(request["cwd"])
    sys.path[:] = request["sys_path"]
    importlib.invalidate_caches()
    local, beside, threads = request["rank"], request["world"], request["threads"]
    rank, world, _ = request["seat"] or (local, beside, "")
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(world)})
    os.environ.update({"LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(beside)})
    os.environ.update({"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)})
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback_interface())  # unless `env` says otherwise
    os.environ.update(request["env"])
    if request["cpus"] and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, request["cpus"])
    if "torch" in sys.modules:  # OpenMP read its environment when torch was loaded, in the process this was forked from
        import torch

        torch.set_num_threads(threads)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # macOS refuses "unlimited"; what there is then has to do
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if request["memory_cap_bytes"] is not None:
        apply_memory_cap(request["memory_cap_bytes"])


def _find(entry: str) -> Callable[[Link, Any], object]:
    module, _, name = entry.partition(":")
    function: Callable[[Link, Any], object] = getattr(importlib.import_module(module), name)
    return function


def _report(link: Link, rank: int, error: BaseException, at: float) -> None:
    """The whole traceback goes to the log, what a user needs of it to the launcher."""
    with contextlib.suppress(Exception):  # under memory pressure even this may fail; the launcher comes first
        lift_memory_cap()
        failure = describe(rank, error, at=at)
        link.send_frame(FAILURE, failure)
    with contextlib.suppress(Exception):  # a full disk must not hide the exit code
        sys.stdout.flush()
        print(f"\n{LAST_WORDS}", file=sys.stderr)
        traceback.print_exception(error)
        sys.stderr.flush()


def _exit_code(leaving: SystemExit) -> int:
    if leaving.code is None:
        return 0
    if isinstance(leaving.code, int):
        return leaving.code & 0xFF
    print(leaving.code, file=sys.stderr)
    return 1


def _leave(*, clean: bool) -> None:
    """What the interpreter does at its end, short of taking itself apart. After a failure threads are not waited for:
    one may hang in a collective whose other side is gone."""
    with contextlib.suppress(Exception):  # an exit handler's error was printed by its runner and changes nothing
        if clean:
            threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # nowhere left to write to
            stream.flush()
