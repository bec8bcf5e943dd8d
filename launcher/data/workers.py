"""Loader workers: processes that fetch micro-batches ahead of the trainer, in an order that they cannot change."""

import contextlib
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize

from rung.launcher.data.fetch import passes
from rung.strategies.errors import RungError, TaskError, WorkersFailed

Task = tuple[int, list[int]]  # epoch, indices of one micro-batch

_PREFETCH = 2  # micro-batches that each worker prepares ahead
_GRACE_S = 2.0  # for a worker to end by itself when the loader closes
_WATCH_S = 1.0  # how often a worker looks whether its trainer lives


@dataclass(frozen=True, kw_only=True, slots=True)
class _Failed:
    """What a worker sends instead of a batch. An exception that is raised there would come back altered by torch."""

    error: Exception


class _Remote:
    """What torch takes for a data set: one task in, one finished micro-batch out."""

    def __init__(self, fetch: Callable[..., object]) -> None:
        self._fetch = fetch
        self._sendable = False

    def __getitem__(self, task: Task) -> object:
        try:
            batch = self._fetch(*task, preserve=False)
            if not self._sendable:
                _check_sendable(batch)
                self._sendable = True
        except RungError as error:
            return _Failed(error=error.with_traceback(None))
        except MemoryError as error:
            return _Failed(error=MemoryError(str(error)))
        except Exception as error:
            if not passes(error):
                raise
            return _Failed(error=RuntimeError(str(error)))  # its own type may not survive the way
        return batch


def _check_sendable(batch: object) -> None:
    """Looked at for the first batch of a worker: the queue drops what cannot be pickled, and the trainer would wait for
    it for good."""
    try:
        pickle.dumps(batch)
    except Exception as error:
        if passes(error):
            raise
        raise TaskError(
            f"a batch cannot be sent from a loader worker to the trainer: {type(error).__name__}: {error}",
            hint="return tensors, numbers, strings and containers of them from the data set and collate; or "
            "set data.workers: 0",
        ) from None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tasks:
    """What torch takes for a sampler."""

    make: Callable[[], Iterator[Task]]

    def __iter__(self) -> Iterator[Task]:
        return self.make()


def _unchanged(batch: object) -> object:
    return batch


class Workers:
    """`count` processes that run `fetch` on the tasks in turn; `next()` gives the results in the tasks' order.

    They start at once: build this before the process opens devices or starts threads, and from a process that may have
    children (not a daemonic one). They outlive SIGINT and SIGTERM, since it is the trainer that is asked to stop, and
    end when it closes them, exits or dies. Each computes with one thread.
    """

    def __init__(
        self, fetch: Callable[..., object], tasks: Callable[[], Iterator[Task]], count: int, *, pin: bool
    ) -> None:
        import torch
        from torch.utils.data import DataLoader

        loader: DataLoader[object] = DataLoader(
            _Remote(fetch),  # type: ignore[arg-type] # has the one method that is used of a Dataset
            sampler=_Tasks(make=tasks),
            batch_size=None,
            collate_fn=_unchanged,
            num_workers=count,
            prefetch_factor=_PREFETCH,
            pin_memory=pin and torch.cuda.is_available(),
            worker_init_fn=partial(_in_worker, os.getpid()),
            # A fork takes milliseconds and needs no pickling of the data set; elsewhere than on Linux it is not safe.
            multiprocessing_context="fork" if sys.platform == "linux" else "spawn",
            generator=torch.Generator(),  # else torch draws from the model's generator
        )
        with _signals_held():
            self._results: Iterator[object] = iter(loader)
        self._processes: list[BaseProcess] = list(self._results._workers)  # type: ignore[attr-defined]
        # Runs before multiprocessing joins its children at exit, which would never end: they ignore its SIGTERM.
        self._at_exit = Finalize(self, _end, args=(self._results, self._processes), exitpriority=10)

    @property
    def pids(self) -> list[int]:
        """Process ids."""
        return [process.pid for process in self._processes if process.pid is not None]

    def __next__(self) -> object:
        """The next result. Raises what the fetch raised, StopIteration after the last task, and WorkersFailed (its
        `exit_status` that of the process) if a worker has died; that shows within about five seconds."""
        try:
            result = next(self._results)
        except StopIteration:
            raise
        except Exception as error:  # torch's own word for it, or a connection to the dead worker that broke
            if (died := self._death()) is None:
                raise
            raise died from error
        if isinstance(result, _Failed):
            raise result.error
        return result

    def _death(self) -> WorkersFailed | None:
        """The first worker that ended badly. A broken connection may be seen a moment before the end itself."""
        until = time.monotonic() + _WATCH_S
        while True:
            for number, process in enumerate(self._processes):
                if not process.is_alive() and process.exitcode:
                    return _died(number, process.pid, process.exitcode)
            if time.monotonic() > until:
                return None
            time.sleep(0.02)

    def close(self) -> None:
        """Ends the processes: asks, and after two seconds kills. Does nothing the second time."""
        self._at_exit()


def _end(results: Iterator[object], processes: Iterable[BaseProcess]) -> None:
    # In a thread, since a worker that was killed while it held a lock of the queue makes torch's part wait for good.
    asking = threading.Thread(target=results._shutdown_workers, daemon=True)  # type: ignore[attr-defined]
    asking.start()
    asking.join(_GRACE_S)
    for process in processes:
        if process.is_alive():
            process.kill()
    for process in processes:
        process.join(_GRACE_S)
    asking.join(_GRACE_S)


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """For starting workers: SIGINT and SIGTERM wait, in them until they are ignored, and in this process until the
    block is left. torch's SIGCHLD handler, which raises in the middle of whatever the trainer is doing, is taken out
    again; a dead worker is seen when its batch is due."""
    in_main = threading.current_thread() is threading.main_thread()
    on_child = signal.getsignal(signal.SIGCHLD)
    resource_tracker.ensure_running()  # its start, which would come inside the block, lets the signals through
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        if in_main and on_child is not None:
            signal.signal(signal.SIGCHLD, on_child)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _in_worker(trainer: int, _worker: int) -> None:
    """The first thing that runs in a worker."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    threading.Thread(target=_end_with, args=(trainer,), name="rung-watch-trainer", daemon=True).start()


def _end_with(trainer: int) -> None:
    # torch's workers look for this between two fetches only, so that one long fetch would leave an orphan.
    while os.getppid() == trainer:
        time.sleep(_WATCH_S)
    os.kill(os.getpid(), signal.SIGKILL)


_MEANING: dict[int, tuple[str, str]] = {
    signal.SIGKILL: (
        "most likely the kernel, because host memory ran out",
        "fewer data.workers, smaller samples, or a data set that does not keep growing in each worker",
    ),
    signal.SIGBUS: (
        "most likely shared memory (/dev/shm) is full",
        "a larger /dev/shm (in a container: --shm-size), or data.workers: 0",
    ),
    signal.SIGSEGV: ("a crash in native code that the data set calls", "data.workers: 0 shows where"),
}


def _died(number: int, pid: int | None, status: int) -> WorkersFailed:
    """Says what an exit status of a loader worker means; as in `subprocess`, -9 is SIGKILL."""
    who = f"data loader worker {number} (process {pid})"
    hint = "something in the data set ends the process; data.workers: 0 shows where"
    if status >= 0:
        return WorkersFailed(f"{who} ended by itself with exit code {status}", exit_status=status, hint=hint)
    meaning, hint = _MEANING.get(-status, ("from outside", hint))
    name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
    message = f"{who} was killed by {name} (exit code {status}): {meaning}"
    return WorkersFailed(message, exit_status=status, hint=hint)
