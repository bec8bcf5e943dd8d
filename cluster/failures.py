"""What went wrong, as values: how a worker ended, why it raised, and the cause that decides what happens next.

Pure: nothing here looks at the machine. Types and facts (exit status, signal, the kernel's count of out-of-memory
kills, a memory cap) come first; words are read only where nothing else tells.
"""

import pickle
import re
import signal
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from rung.strategies.errors import (
    DataError,
    DependencyError,
    HealthError,
    Interrupted,
    RungError,
    StorageError,
    TaskError,
    WorkersFailed,
)
from rung.strategies.oom import OomKind, chain, oom_kind, oom_kind_of_text
from rung.strategies.plan import DeviceType
from rung.strategies.tracebacks import user_traceback

LAST_WORDS = "rung: why this worker ended:"
"""A line of its log, before a traceback that the launcher shows in its own way."""


class Cause(str, Enum):
    """Why an attempt failed. Each deserves another answer; see `rung.launcher.fallback`."""

    DEVICE_OOM = "device_oom"
    HOST_OOM = "host_oom"
    NON_FINITE = "non_finite"
    BAD_DATA = "bad_data"
    USER_EXCEPTION = "user_exception"
    LOST_WORKER = "lost_worker"
    HUNG = "hung"
    STORAGE = "storage"
    PREEMPTION = "preemption"
    DEPENDENCY = "dependency"


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """An exception that a worker's function let out.

    at: seconds since the epoch when it was caught. error: the exception itself where it is a RungError, else None.
    traceback: from the first frame that is not rung's. oom: which memory ran out, if any did. peer: it only says that
    another worker went away or did not answer, so it follows from a failure and is not one. hung: a wait ran out.
    missing: it comes from an import of something that is not installed.
    """

    rank: int
    at: float
    type_name: str
    message: str
    traceback: str
    error: RungError | None = None
    oom: OomKind | None = None
    peer: bool = False
    hung: bool = False
    missing: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """A worker is gone. Exactly one of `exit_code` and `signal` is a number.

    at: seconds since the epoch when its end was seen. stopped: it ended after it had been told to stop.
    peak_bytes: the largest resident size that it had, as the kernel counted; 0 where unknown.
    """

    rank: int
    exit_code: int | None
    signal: int | None
    at: float
    failure: Failure | None = None
    log: Path | None = None
    stopped: bool = False
    peak_bytes: int = 0

    @property
    def clean(self) -> bool:
        """It did what it was asked to, and nothing failed."""
        return self.failure is None and (self.exit_code == 0 or self.stopped)

    @property
    def began(self) -> float:
        """When its failure began: when the exception was caught, or else when its end was seen."""
        return self.failure.at if self.failure else self.at


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What the launcher knows beside the workers' own words.

    oom_kills: processes that the kernel killed for memory since the workers started (None: no counter is readable).
    log_tails: last lines of the log by rank. hung: ranks whose heartbeat stood still, with their stacks.
    capped: the workers ran under a memory cap.
    """

    device: DeviceType = "cpu"
    oom_kills: int | None = None
    log_tails: dict[int, str] = field(default_factory=dict)
    hung: dict[int, str] = field(default_factory=dict)
    capped: bool = False


def describe(rank: int, error: BaseException, *, at: float) -> Failure:
    """A picklable account of `error`, made in the worker where its type and its chain can still be seen."""
    return Failure(
        rank=rank,
        at=at,
        type_name=type(error).__qualname__,
        message=error.message if isinstance(error, RungError) else str(error),
        traceback=error.traceback_text if isinstance(error, TaskError) else user_traceback(error),
        error=error if isinstance(error, RungError) and _travels(error) else None,
        oom=oom_kind(error),
        peer=any(_peer(link) for link in chain(error)),
        hung=any(_timeout(link) for link in chain(error)),
        missing=any(isinstance(link, ModuleNotFoundError) for link in chain(error)),
    )


def cause_of(ended: Ended, facts: Facts) -> Cause | None:
    """The cause of one worker's end; None if it ended cleanly.

    On the CPU the device's memory is the process's own, so what its allocator refuses there counts as device memory.
    """
    if ended.rank in facts.hung:
        return Cause.HUNG
    if ended.clean:
        return None
    if ended.failure is not None:
        return _cause_of_failure(ended.failure, facts)
    if ended.signal is not None:
        return _cause_of_signal(ended, facts)
    return _cause_of_log(ended, facts) or Cause.LOST_WORKER


def first_failure(ends: list[Ended]) -> Ended | None:
    """The end that the others follow from: the first in time, where those that only say that a peer went are asked
    last, and a worker that was killed for no reason of its own loses to one that failed by itself."""
    failed = [end for end in ends if not end.clean and not end.stopped] or [end for end in ends if not end.clean]
    return min(
        failed,
        key=lambda e: (e.failure is not None and (e.failure.peer or e.failure.hung), e.began, e.rank),
        default=None,
    )


def culprits(steps: dict[int, int], stacks: dict[int, str]) -> list[int]:
    """Which of several silent ranks the others wait for: those at the lowest step, and of these the ones whose stack
    does not end in a wait for others. If all of them wait, all of them are returned."""
    lowest = min(steps.values(), default=0)
    behind = sorted(rank for rank, step in steps.items() if step == lowest)
    return [rank for rank in behind if not waits_for_peers(stacks.get(rank, ""))] or behind


_WAITING = re.compile(
    r"/torch/distributed/(?!checkpoint)|/torch/nn/parallel/distributed\.py|/deepspeed/comm/|_engine_run_backward"
    r"|/torch/cuda/(?:streams|__init__)\.py.*synchronize"
)


def waits_for_peers(stacks: str) -> bool:
    """Whether the main thread of these faulthandler stacks stands in a collective, or where one is waited for (the
    backward pass of DDP communicates inside the autograd engine)."""
    frames = [line for line in main_thread(stacks).splitlines() if line.lstrip().startswith("File ")]
    return any(_WAITING.search(line) for line in frames[:3])


def main_thread(stacks: str) -> str:
    """Of the stacks that faulthandler writes, that of the main thread: the interpreter lists its newest one first."""
    blocks = [block for block in re.split(r"\n\s*\n", stacks) if "hread 0x" in block]
    return blocks[-1].strip("\n") if blocks else ""


def _travels(error: RungError) -> bool:
    """Whether `error` can be sent whole: one of the tree itself, since a subclass may live where only torch can go."""
    if type(error).__module__ != RungError.__module__:
        return False
    try:
        pickle.dumps(error)
    except Exception:
        return False
    return True


_PEER_TYPES = {"DistNetworkError", "DistStoreError", "DistBackendError"}
_PEER_WORDS = re.compile(
    r"Connection (?:closed by peer|reset by peer|refused)|Broken pipe|Socket (?:Timeout|closed)"
    r"|ncclRemoteError|remote process exited|NCCL communicator was aborted|recvBytes failed|Failed to recv"
    r"|Application timeout caused pair closure|The client socket has (?:failed|timed out)|Connection was likely closed",
    re.IGNORECASE,
)
_TIMEOUT_WORDS = re.compile(
    r"Timed out (?:waiting|after)|Watchdog caught collective operation timeout|wait timeout after"
    r"|collective.*timed? ?out",
    re.IGNORECASE,
)


def _from_torch_distributed(error: BaseException) -> bool:
    return any(t.__name__ in _PEER_TYPES and t.__module__.startswith("torch") for t in type(error).__mro__)


def _peer(error: BaseException) -> bool:
    if isinstance(error, RungError) or oom_kind(error):
        return False
    return _from_torch_distributed(error) or (isinstance(error, RuntimeError) and bool(_PEER_WORDS.search(str(error))))


def _timeout(error: BaseException) -> bool:
    if isinstance(error, RungError):
        return False
    known = isinstance(error, RuntimeError) or _from_torch_distributed(error)
    return known and bool(_TIMEOUT_WORDS.search(str(error)))


def _cause_of_oom(kind: OomKind, facts: Facts) -> Cause:
    if kind == "device" or (kind == "host" and facts.device == "cpu"):
        return Cause.DEVICE_OOM
    return Cause.HOST_OOM


def _cause_of_failure(failure: Failure, facts: Facts) -> Cause:
    if failure.oom is not None:
        return _cause_of_oom(failure.oom, facts)
    match failure.error:
        case HealthError():
            return Cause.NON_FINITE
        case DataError():
            return Cause.BAD_DATA
        case StorageError():
            return Cause.STORAGE
        case DependencyError():
            return Cause.DEPENDENCY
        case Interrupted():
            return Cause.PREEMPTION
        case WorkersFailed():
            return Cause.LOST_WORKER
        case _:
            pass
    if failure.hung:
        return Cause.HUNG
    if failure.peer:
        return Cause.LOST_WORKER
    if failure.missing or failure.type_name == "ImportError":
        return Cause.DEPENDENCY
    return Cause.USER_EXCEPTION


def _cause_of_signal(ended: Ended, facts: Facts) -> Cause:
    match ended.signal:
        case signal.SIGKILL if facts.oom_kills is None or facts.oom_kills > 0:
            return Cause.HOST_OOM  # with no counter to read, memory is by far the most likely killer
        case signal.SIGBUS:
            return Cause.HOST_OOM  # a page of shared memory could not be given
        case signal.SIGTERM | signal.SIGINT | signal.SIGHUP:
            return Cause.PREEMPTION
        case _:
            return _cause_of_log(ended, facts) or Cause.LOST_WORKER


_THREAD_WORDS = re.compile(
    r"libgomp: Thread creation failed|OMP: Error #\d+: .*(?:memory|thread)|can't start new thread"
)


def _cause_of_log(ended: Ended, facts: Facts) -> Cause | None:
    """For what ends a process without an exception: a C++ library that aborts, OpenMP that cannot start a thread."""
    tail = facts.log_tails.get(ended.rank, "")
    kind = oom_kind_of_text(tail)
    if kind is None and facts.capped and _THREAD_WORDS.search(tail):
        kind = "host"  # a thread's stack counts against the cap
    return None if kind is None else _cause_of_oom(kind, facts)
