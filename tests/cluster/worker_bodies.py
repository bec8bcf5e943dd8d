"""Functions that test workers run. Importing this module must be cheap: the launcher's tests import it too."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from rung.cluster.link import Link, Stop


def echo(link: Link, payload: Any) -> None:
    link.send(("hello", link.rank, link.world, payload, os.getpid()))
    while not isinstance(value := link.poll(), Stop):
        if value is not None:
            link.send(("echo", value))
        time.sleep(0.001)


def all_reduce(link: Link, payload: Any) -> None:
    import torch
    import torch.distributed as dist

    store = link.store(30.0)
    dist.init_process_group("gloo", store=store, rank=link.rank, world_size=link.world)
    value = torch.tensor([float(link.rank + 1)])
    dist.all_reduce(value)
    link.send((value.item(), torch.get_num_threads()))
    dist.destroy_process_group()


def train(link: Link, payload: Any) -> None:
    """Collectives in a loop, with heartbeats; `payload` is what the failing rank does and at which step."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", store=link.store(30.0), rank=link.rank, world_size=link.world)
    value = torch.ones(8)
    for step in range(1, 200):
        link.beat(step, "forward")
        if payload["rank"] == link.rank and step == payload["step"]:
            FAULTS[payload["fault"]](link)
        dist.all_reduce(value)
        value /= link.world
        link.beat(step, "step")
        if isinstance(link.poll(), Stop):
            break
        time.sleep(0.01)


class StrangeError(Exception):
    """Cannot be pickled, and its type is known to the worker alone."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


def users_own_mistake(_: Link) -> None:
    raise StrangeError("salt", "sugar")


def leave(_: Link) -> None:
    sys.exit(3)


def kill(_: Link) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def touch_nothing(_: Link) -> None:
    ctypes.string_at(0)


def eat_memory(_: Link) -> None:
    import torch

    held = []
    while True:
        held.append(torch.ones(1 << 22))


def sleep_in_python(_: Link) -> None:
    where_it_hangs()


def where_it_hangs() -> None:
    time.sleep(600)


def deadlock_in_c(_: Link) -> None:
    libc = ctypes.PyDLL(None)  # PyDLL keeps the interpreter's lock: no Python code of this process runs any more
    mutex = ctypes.create_string_buffer(64)  # all zeros, as PTHREAD_MUTEX_INITIALIZER has it
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


def bus_error(_: Link) -> None:
    import mmap
    import tempfile

    with tempfile.TemporaryFile() as file:
        file.truncate(4096)
        page = mmap.mmap(file.fileno(), 4096)
        file.truncate(0)
        page[0]


def health(_: Link) -> None:
    from rung.strategies.errors import HealthError

    raise HealthError("loss is nan at step 5", samples=(7, 9), step=5, hint="look at sample 7")


def abort_for_memory(_: Link) -> None:
    print("terminate called after throwing an instance of 'std::bad_alloc'", file=sys.stderr)
    os.abort()


FAULTS = {
    f.__name__: f
    for f in (
        users_own_mistake,
        leave,
        kill,
        touch_nothing,
        eat_memory,
        sleep_in_python,
        deadlock_in_c,
        bus_error,
        health,
        abort_for_memory,
    )
}


def never_arrive(link: Link, payload: Any) -> None:
    if link.rank == payload:
        time.sleep(600)
    link.store(1.5)


def spawn_and_wait(link: Link, payload: Any) -> None:
    """Children of every kind: in the same session, in one of their own, and one whose parent is gone already."""
    code = "import time; time.sleep(600)"
    same = subprocess.Popen([sys.executable, "-c", code])
    apart = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    fork = (
        "import subprocess as s, sys\n"
        f"print(s.Popen([sys.executable, '-c', {code!r}], stdout=s.DEVNULL, start_new_session=True).pid)"
    )
    lost = subprocess.run([sys.executable, "-c", fork], stdout=subprocess.PIPE, check=True)
    link.send([os.getpid(), same.pid, apart.pid, int(lost.stdout)])
    if payload == "crash":
        os.abort()
    time.sleep(600)


def loader(link: Link, payload: Any) -> None:
    """A DataLoader with two workers, held in the middle of its work."""
    import torch
    from torch.utils.data import DataLoader

    iterator = iter(DataLoader(list(range(100000)), batch_size=2, num_workers=2))
    next(iterator)
    Path(f"/dev/shm/torch_{os.getpid()}_1_2").touch()  # what a torch that is killed in a bad moment leaves
    link.send([os.getpid(), *(w.pid for w in iterator._workers), torch.get_num_threads()])
    time.sleep(600)


def named_memory(link: Link, payload: Any) -> None:
    from multiprocessing.shared_memory import SharedMemory

    memory = SharedMemory(create=True, size=4096)
    link.send(memory.name)
    time.sleep(600)


def deaf(link: Link, payload: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    link.send("ready")
    time.sleep(600)


def full(link: Link, payload: Any) -> None:
    """Takes all memory that its cap allows, down to the last pages, and then waits to be told something."""
    heard = threading.Event()

    def answer(value: Any) -> bool:
        threading.Thread(target=lambda: (link.send(("heard", value)), heard.set())).start()
        return True

    link.intercept = answer
    link.send("ready")
    held: list[Any] = []
    for size in (1 << 24, 1 << 20, 1 << 16, 1 << 12):
        with contextlib.suppress(MemoryError):
            while True:
                held.append(bytearray(size))
    heard.wait(20)


def facts(link: Link, payload: Any) -> None:
    import __main__

    ctypes.CDLL(None).puts(b"from C")
    print("from Python")
    print("from stderr", file=sys.stderr)
    os.write(1, b"from the descriptor\n")
    import torch

    link.send(
        {
            "threads": torch.get_num_threads(),
            "cpus": sorted(os.sched_getaffinity(0)),
            "env": os.environ.get("OF_THE_WORKER"),
            "rank": os.environ["RANK"],
            "session": os.getsid(0) == os.getpid(),
            "main": getattr(__main__, "__file__", None),
            "stdin": sys.stdin.read(),
        }
    )
    sys.stdout.flush()
    while not isinstance(link.poll(), Stop):
        time.sleep(0.001)


def flood(link: Link, payload: Any) -> None:
    for number in range(payload):
        link.send((number, b"x" * 1000))


def time_poll(link: Link, payload: Any) -> None:
    import timeit

    calls = (link.poll, lambda: link.beat(1, "step"))
    link.send([min(timeit.repeat(call, number=10_000)) / 10_000 for call in calls])


def unloadable(link: Link, payload: Any) -> None:
    import types

    module = types.ModuleType("only_here")
    exec("class Thing: pass", module.__dict__)
    sys.modules["only_here"] = module
    link.send(module.Thing())
    link.send("next")
