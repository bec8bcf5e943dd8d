"""Real steps in throw-away processes, with the process's own memory watched while they run."""

import contextlib
import os
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

from rung.launcher.preload import PRELOAD
from rung.strategies.plan import Plan, cut
from rung.strategies.profile import Profile

# What a worker of `rung launch` starts with, and this module's own.
PRELOADED = [*PRELOAD, "benchmarks.memory_held_out"]
PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """`peak_bytes`: the most private memory of a worker above its baseline, in bytes; `baseline_bytes`: what it held
    before it made anything; `step_s`: the median of all steps but the first. `error`: why it failed, if it did."""

    peak_bytes: int = 0
    baseline_bytes: int = 0
    step_s: float = 0.0
    error: str = ""


def private_bytes(file: int) -> int:
    """What RLIMIT_DATA counts of a process: the sixth field of its statm."""
    return int(os.pread(file, 200, 0).split()[5]) * PAGE


class Watch(threading.Thread):
    """Reads a worker's memory a few thousand times a second. From outside: within, the interpreter's lock would keep it
    waiting just while an operation holds the most."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._file = os.open(f"/proc/{pid}/statm", os.O_RDONLY)
        self.peak = 0

    def run(self) -> None:
        """Until the process is gone."""
        try:
            while True:
                self.peak = max(self.peak, private_bytes(self._file))
                time.sleep(0.0002)
        except (OSError, IndexError):  # it has ended
            os.close(self._file)


def profile_case(name: str, *, deadline_s: float = 240.0) -> Profile:
    """The profile of a case, traced in a process that knows no more than rung's own would. Raises RuntimeError."""
    ours, theirs = _context().Pipe(duplex=False)
    worker = _context().Process(target=_trace, args=(name, theirs), daemon=True)
    worker.start()
    theirs.close()
    try:
        if not ours.poll(deadline_s):
            raise RuntimeError(f"{name}: no profile in {deadline_s:g} s")
        return Profile.from_json(ours.recv())
    except EOFError:
        raise RuntimeError(f"{name}: the process that traced it died") from None
    finally:
        worker.kill()
        worker.join()


def _context() -> Any:
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _trace(name: str, pipe: Any) -> None:
    import torch

    from benchmarks.memory_held_out import find
    from rung.strategies.trace import profile_task

    torch.set_num_threads(1)
    case = find(name)
    pipe.send(profile_task(case, case.make_optimizer, case.sample, name=name).to_json())


def measure(name: str, plan: Plan, *, steps: int = 2, deadline_s: float = 120.0) -> Measured:
    """Runs a few real steps of a case under `plan`, one process for each device; the worst of them counts."""
    context = _context()
    with tempfile.TemporaryDirectory() as folder:
        pipes, workers, watches = [], [], []
        for rank in range(plan.devices):
            ours, theirs = context.Pipe(duplex=False)
            worker = context.Process(target=_work, args=(name, plan, rank, folder, steps, theirs), daemon=True)
            worker.start()
            theirs.close()
            watches.append(Watch(worker.pid))
            watches[-1].start()
            pipes.append(ours)
            workers.append(worker)
        found = [_answer(pipe, deadline_s) for pipe in pipes]
        for worker in workers:
            worker.join(10)
            if worker.is_alive():
                worker.kill()
                worker.join()
        for watch in watches:
            watch.join(10)
    if errors := [entry.error for entry in found if entry.error]:
        return Measured(error=next((e for e in errors if "emory" in e), errors[0]))
    peaks = [watch.peak - entry.baseline_bytes for watch, entry in zip(watches, found, strict=True)]
    return Measured(peak_bytes=max(peaks), step_s=max(entry.step_s for entry in found))


def _answer(pipe: Any, deadline_s: float) -> Measured:
    with contextlib.suppress(EOFError):
        if pipe.poll(deadline_s):
            return pipe.recv()
        return Measured(error=f"no answer in {deadline_s} s")
    return Measured(error="the process died")


def _work(name: str, plan: Plan, rank: int, folder: str, steps: int, pipe: Any) -> None:
    import torch

    from benchmarks.memory_held_out import find
    from rung.cluster.link import apply_memory_cap
    from rung.strategies.make import make_strategy

    torch.set_num_threads(plan.threads)
    case = find(name)
    with open("/proc/self/statm") as file:  # noqa: PTH123 - its descriptor is read
        baseline = private_bytes(file.fileno())
    if plan.memory_cap_bytes is not None:
        apply_memory_cap(plan.memory_cap_bytes)
    try:
        alone = plan.devices == 1 and plan.zero_stage == 0
        store = None if alone else torch.distributed.FileStore(f"{folder}/store", plan.devices)
        strategy = make_strategy(plan, rank, store)
        torch.manual_seed(0)
        strategy.build(case.model, case.make_optimizer)
        seconds = []
        for _ in range(steps):
            began = time.perf_counter()
            _step(case, plan, rank, strategy)
            seconds.append(time.perf_counter() - began)
        # The first step makes the optimizer's state, and libraries choose their kernels.
        pipe.send(Measured(baseline_bytes=baseline, step_s=statistics.median(seconds[1:] or seconds)))
    except Exception as error:  # the parent prints it: a case that fails is a result
        pipe.send(Measured(error=f"{type(error).__name__}: {str(error)[:200]}"))
    os._exit(0)


def _step(case: Any, plan: Plan, rank: int, strategy: Any) -> None:
    slices = cut(plan.global_batch, plan).slices[rank]
    for index, (start, stop) in enumerate(slices):
        batch = case.sample(stop - start)
        with strategy.micro(last=index == len(slices) - 1):
            loss = case.loss(strategy.model, batch)
            strategy.backward(loss * ((stop - start) * plan.devices / plan.global_batch))
        del loss
    strategy.step(1.0)
