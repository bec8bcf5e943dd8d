"""The verdict is a pure function: it names the failure that the others follow from, its cause and its meaning."""

import signal
from pathlib import Path

import pytest

from rung.cluster.failures import Cause, Ended, Facts, Failure, cause_of, culprits, describe, first_failure
from rung.cluster.memory_trace import MemoryTrace, Sample
from rung.cluster.verdict import tail, trim_stack, verdict
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

GIB = 1 << 30


def ended(rank: int, at: float, *, code: int | None = None, number: int | None = None, **more: object) -> Ended:
    return Ended(rank=rank, at=at, exit_code=code, signal=number, log=Path(f"logs/rank-{rank}.log"), **more)  # type: ignore[arg-type]


def raised(rank: int, at: float, error: BaseException) -> Ended:
    return ended(rank, at + 0.2, code=1, failure=describe(rank, error, at=at))


PEER = RuntimeError(
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"
)


def test_all_well_is_no_verdict() -> None:
    ends = [ended(0, 1.0, code=0), ended(1, 1.0, number=9, stopped=True), ended(2, 1.0, code=1, stopped=True)]
    assert verdict(ends, Facts()) is None
    assert verdict([], Facts()) is None


def test_those_that_lost_their_peer_are_not_blamed_though_they_were_first() -> None:
    ends = [raised(0, 10.0, PEER), raised(2, 10.1, PEER), ended(1, 10.4, number=signal.SIGSEGV)]
    first = first_failure(ends)
    assert first is not None
    assert first.rank == 1
    judged = verdict(ends, Facts())
    assert judged is not None
    assert judged.line == "rank 1 was killed by SIGSEGV (exit code -11)"
    assert "after it: rank 0 lost its peer (-0.4 s); rank 2 lost its peer (-0.3 s)" in judged.text
    assert "logs/rank-1.log" in judged.text


def test_of_several_own_failures_the_first_in_time_is_blamed() -> None:
    ends = [raised(0, 12.0, ValueError("later")), raised(3, 11.0, KeyError("sooner")), ended(1, 11.5, code=4)]
    judged = verdict(ends, Facts())
    assert judged is not None
    assert judged.first.rank == 3
    assert judged.cause is Cause.USER_EXCEPTION


def test_when_all_only_lost_a_peer_a_worker_is_lost() -> None:
    judged = verdict([raised(0, 2.0, PEER), raised(1, 1.0, PEER)], Facts())
    assert judged is not None
    assert (judged.first.rank, judged.cause) == (1, Cause.LOST_WORKER)


def test_a_rank_that_hangs_comes_before_those_that_waited_for_it() -> None:
    timeout = RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation")
    ends = [raised(0, 5.0, timeout), ended(1, 9.0, number=9, stopped=True)]
    judged = verdict(ends, Facts(hung={1: 'Thread 0x1 (most recent call first):\n  File "task.py", line 3 in loss'}))
    assert judged is not None
    assert (judged.first.rank, judged.cause) == (1, Cause.HUNG)
    assert "line 3 in loss" in judged.text
    own = verdict([raised(0, 5.0, ValueError("x")), ends[1]], Facts(hung={1: "stack"}))
    assert own is not None
    assert own.first.rank == 0, "that one failed by itself; rank 1 waited for it"


@pytest.mark.parametrize(
    ("error", "device", "cause"),
    [
        (MemoryError(), "cpu", Cause.DEVICE_OOM),
        (MemoryError(), "cuda", Cause.HOST_OOM),
        (RuntimeError("CUDA error: out of memory"), "cuda", Cause.DEVICE_OOM),
        (RuntimeError("unable to write to file </torch_1>: No space left on device (28)"), "cpu", Cause.HOST_OOM),
        (HealthError("nan"), "cpu", Cause.NON_FINITE),
        (DataError("sample 7"), "cpu", Cause.BAD_DATA),
        (StorageError("gone"), "cpu", Cause.STORAGE),
        (DependencyError("no ninja"), "cpu", Cause.DEPENDENCY),
        (ModuleNotFoundError("No module named 'x'"), "cpu", Cause.DEPENDENCY),
        (Interrupted("SIGTERM", signal_number=15), "cpu", Cause.PREEMPTION),
        (WorkersFailed("rank 2 did not arrive"), "cpu", Cause.LOST_WORKER),
        (TaskError("theirs"), "cpu", Cause.USER_EXCEPTION),
        (ValueError("Connection closed by peer"), "cpu", Cause.USER_EXCEPTION),
        (PEER, "cpu", Cause.LOST_WORKER),
        (RuntimeError("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5)"), "cuda", Cause.HUNG),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "cuda", Cause.USER_EXCEPTION),
    ],
)
def test_each_exception_has_its_cause(error: Exception, device: str, cause: Cause) -> None:
    assert cause_of(raised(0, 1.0, error), Facts(device=device)) is cause  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("number", "facts", "cause", "words"),
    [
        (9, Facts(oom_kills=2), Cause.HOST_OOM, "host memory ran out (it counts 2 such kills since the start)"),
        (9, Facts(oom_kills=0), Cause.LOST_WORKER, "somebody sent SIGKILL"),
        (9, Facts(), Cause.HOST_OOM, "no counter of such kills can be read here"),
        (7, Facts(), Cause.HOST_OOM, "/dev/shm is full"),
        (11, Facts(), Cause.LOST_WORKER, "native code touched memory"),
        (4, Facts(), Cause.LOST_WORKER, "a library was built for another"),
        (6, Facts(log_tails={0: "what():  std::bad_alloc"}), Cause.DEVICE_OOM, "native code gave up"),
        (6, Facts(log_tails={0: "Assertion failed"}), Cause.LOST_WORKER, "native code gave up"),
        (
            6,
            Facts(log_tails={0: "match expected size. Is there a distributed collective mismatch in your code?"}),
            Cause.LOST_WORKER,
            "collectives that do not go together",
        ),
        (15, Facts(), Cause.PREEMPTION, "a preemption"),
    ],
)
def test_each_signal_is_explained(number: int, facts: Facts, cause: Cause, words: str) -> None:
    judged = verdict([ended(0, 1.0, number=number)], facts)
    assert judged is not None
    assert judged.cause is cause
    assert words in judged.text


def test_threads_that_cannot_start_under_a_cap_are_memory() -> None:
    said = {0: "libgomp: Thread creation failed: Resource temporarily unavailable"}
    end = ended(0, 1.0, code=1)
    assert cause_of(end, Facts(capped=True, log_tails=said)) is Cause.DEVICE_OOM
    assert cause_of(end, Facts(capped=False, log_tails=said)) is Cause.LOST_WORKER


def test_a_kill_for_memory_shows_how_memory_went() -> None:
    samples = [
        Sample(at=float(t), by_rank={0: t * GIB, 1: GIB}, free=(60 - t) * GIB, limit=64 * GIB) for t in range(60)
    ]
    judged = verdict([ended(0, 60.0, number=9)], Facts(oom_kills=1), memory=samples)
    assert judged is not None
    assert "rank 0 59.00 GiB, rank 1 1.00 GiB; free 1.00 GiB of 64.00 GiB" in judged.text
    assert "-59.0 s  rank 0 0.00 GiB" in judged.text
    assert len(judged.text.splitlines()) < 20


def test_a_thousand_ranks_and_a_long_traceback_are_still_one_screen() -> None:
    def deep(n: int) -> None:
        if n == 0:
            raise ValueError("x" * 1000)
        (deep if n % 2 else lambda m: deep(m))(n - 1)

    with pytest.raises(ValueError) as caught:
        deep(100)
    ends = [raised(0, 1.0, caught.value), *(raised(r, 2.0, PEER) for r in range(1, 1000))]
    judged = verdict(ends, Facts())
    assert judged is not None
    assert len(judged.text.splitlines()) < 40
    assert "and 991 more" in judged.text


def test_a_failure_tells_the_owners_frames_and_keeps_our_errors_whole() -> None:
    failure = describe(2, StorageError("bucket x refused", url="s3://x", hint="log in"), at=3.0)
    assert isinstance(failure.error, StorageError)
    assert failure.error.url == "s3://x"
    assert failure.message == "bucket x refused"

    class Local(RungError):
        pass

    assert describe(0, Local("x"), at=1.0).error is None, "a type that the launcher may not know stays behind"

    odd = StorageError("y")
    odd.handle = lambda: None  # type: ignore[attr-defined]
    assert describe(0, odd, at=1.0).error is None
    assert describe(0, odd, at=1.0).message == "y"

    task = TaskError("user's", traceback_text='File "task.py", line 3')
    assert describe(0, task, at=1.0).traceback == 'File "task.py", line 3'


def test_frames_of_ours_above_the_users_are_left_out() -> None:
    namespace: dict[str, object] = {"__name__": "rung.launcher.train"}
    exec(compile("def call(f):\n    f()", "/x/launcher/train.py", "exec"), namespace)

    def theirs() -> None:
        raise ValueError("their mistake")

    with pytest.raises(ValueError) as caught:
        namespace["call"](theirs)  # type: ignore[operator]
    # pytest's own frame comes first here; a worker's first frames are rung's.
    caught.value.__traceback__ = caught.value.__traceback__.tb_next  # type: ignore[union-attr]
    text = describe(0, caught.value, at=1.0).traceback
    assert "train.py" not in text
    assert "their mistake" in text


ALL_REDUCE = """Thread 0x00007f (most recent call first):
  File "/x/cluster/link.py", line 1 in _listen

Thread 0x00007e (most recent call first):
  File "/v/torch/distributed/distributed_c10d.py", line 3 in all_reduce
  File "/u/task.py", line 9 in loss"""
IN_LOSS = 'Thread 0x00007e (most recent call first):\n  File "/u/task.py", line 9 in loss'


def test_who_waits_in_a_collective_is_not_the_one_that_hangs() -> None:
    assert culprits({0: 5, 1: 5, 2: 5}, {0: ALL_REDUCE, 1: IN_LOSS, 2: ALL_REDUCE}) == [1]
    assert culprits({0: 5, 1: 5}, {0: ALL_REDUCE, 1: ALL_REDUCE}) == [0, 1]
    assert culprits({0: 6, 1: 5}, {0: IN_LOSS, 1: IN_LOSS}) == [1]
    assert culprits({}, {}) == []


def test_a_crash_in_the_log_is_cut_to_the_stack_that_crashed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "step 1\nstep 2\nFatal Python error: Segmentation fault\n\n"
        'Thread 0x1 (most recent call first):\n  File "a.py", line 1 in other\n\n'
        'Current thread 0x2 (most recent call first):\n  File "b.py", line 2 in guilty\n'
        '  File "/x/cluster/worker.py", line 40 in run_worker\n  File "/x/cluster/nursery.py", line 9 in main\n\n'
        "Extension modules: numpy, torch\n"
    )
    assert tail(log).splitlines() == [
        "step 1",
        "step 2",
        "Fatal Python error: Segmentation fault",
        "Current thread 0x2 (most recent call first):",
        '  File "b.py", line 2 in guilty',
    ]
    log.write_text("".join(f"line {i}\n" for i in range(50_000)))
    assert tail(log).splitlines() == [f"line {i}" for i in range(49_980, 50_000)]
    assert tail(tmp_path / "none") == ""
    assert trim_stack(ALL_REDUCE) == ALL_REDUCE


def test_a_sample_of_this_process_is_about_right() -> None:
    import os

    trace = MemoryTrace()
    trace.sample({0: os.getpid()})
    held = b"\1" * (64 << 20)
    trace.sample({0: os.getpid()})
    first, second = trace.samples()
    assert len(held) * 0.9 < second.by_rank[0] - first.by_rank[0] < len(held) * 1.5
    assert second.free is not None
    assert second.limit is not None
    assert 0 < second.free <= second.limit
    assert trace.oom_kills() in {0, None}
    trace.sample({0: 1 << 30})
    assert trace.samples()[-1].by_rank == {0: 0}, "a process that has gone counts nothing"


def test_values_travel() -> None:
    import pickle

    failure = Failure(rank=1, at=2.0, type_name="X", message="m", traceback="t", error=HealthError("nan", step=3))
    assert pickle.loads(pickle.dumps(failure)).error.step == 3
