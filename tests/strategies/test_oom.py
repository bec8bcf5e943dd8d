"""Out of memory is told from all else, by type first."""

import errno
import subprocess
import sys

import pytest

from rung.strategies import oom
from rung.strategies.errors import DoesNotFit
from rung.strategies.oom import is_out_of_memory, oom_kind

TEXTS = {
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB": "device",
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported": "device",
    "HIP out of memory. Tried to allocate 20.00 MiB": "device",
    "MPS backend out of memory (MPS allocated: 9.05 GB, other allocations: 1 KB)": "device",
    "XPU out of memory. Tried to allocate 1.00 GiB": "device",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`": "device",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED": "device",
    "cuFFT error: CUFFT_ALLOC_FAILED": "device",
    "NCCL error in: ProcessGroupNCCL.cpp:2, unhandled cuda error\nLast error:\nFailed to CUDA calloc 6 bytes": "device",
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried": "host",
    "[Errno 12] Cannot allocate memory": "host",
    "std::bad_alloc": "host",
    "Caught Strange in DataLoader worker process 0.\nOriginal Traceback:\n  File x\nMemoryError": "host",
    "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's workers are out of "
    "shared memory. Please try to raise your shared memory limit.": "shared",
    "unable to write to file </torch_12_3_0>: No space left on device (28)": "shared",
    "unable to allocate shared memory(shm) for file </torch_1>: Success (0)": "shared",
}


@pytest.mark.parametrize(("text", "kind"), TEXTS.items())
def test_what_libraries_say_is_recognised(text: str, kind: str) -> None:
    assert oom_kind(RuntimeError(text)) == kind


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
        RuntimeError("Connection closed by peer [127.0.0.1]:1234"),
        ImportError("libx.so: cannot allocate memory in static TLS block"),
        SystemError("error return without exception set"),
        ValueError("CUDA out of memory"),
        KeyError("MemoryError"),
        OSError(errno.ENOSPC, "No space left on device", "/data/checkpoint"),
        OSError(errno.ENOENT, "No such file"),
        DoesNotFit("no plan fits: CUDA out of memory at 8 GiB"),
        KeyboardInterrupt(),
    ],
)
def test_other_failures_are_not_out_of_memory(error: BaseException) -> None:
    assert not is_out_of_memory(error)


def test_what_the_interpreter_leaves_unsaid_is_memory_where_that_is_capped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oom, "caps", [1 << 30])
    assert oom_kind(SystemError("error return without exception set")) == "host"
    assert oom_kind(SystemError("<built-in function f> returned NULL without setting an exception")) == "host"
    assert oom_kind(SystemError("bad argument to internal function")) is None


def test_a_library_that_does_not_load_for_want_of_memory_is_no_missing_one() -> None:
    assert oom_kind(ImportError("libx.so: failed to map segment from shared object: Cannot allocate memory")) == "host"


def test_types_and_numbers_decide_before_text() -> None:
    import torch

    assert oom_kind(torch.OutOfMemoryError("anything")) == "device"
    assert oom_kind(torch.cuda.OutOfMemoryError("anything")) == "device"
    assert oom_kind(MemoryError()) == "host"
    assert oom_kind(OSError(errno.ENOMEM, "anything")) == "host"
    assert oom_kind(OSError(errno.ENOSPC, "full", "/dev/shm/torch_1")) == "shared"


def test_a_real_cpu_allocation_failure_is_recognised() -> None:
    import torch

    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert oom_kind(caught.value) == "host"


def test_chains_and_groups_are_followed_and_suppression_is_honoured() -> None:
    def fail(how: str) -> None:
        try:
            raise MemoryError
        except MemoryError as memory:
            if how == "cause":
                raise ValueError("wrapped") from memory
            if how == "none":
                raise ValueError("unrelated") from None
            raise ValueError("while handling")  # noqa: B904 - the implicit context is what is tested

    seen = {}
    for how in ("cause", "context", "none"):
        with pytest.raises(ValueError) as caught:
            fail(how)
        seen[how] = is_out_of_memory(caught.value)
    assert seen == {"cause": True, "context": True, "none": False}

    group = ValueError("members")
    group.exceptions = (KeyError("a"), MemoryError())  # type: ignore[attr-defined]
    assert is_out_of_memory(group)

    loop = ValueError("a ring")
    loop.__cause__ = KeyError("b")
    loop.__cause__.__cause__ = loop
    assert not is_out_of_memory(loop)


def test_looking_does_not_load_torch() -> None:
    code = (
        "import sys; from rung.strategies.oom import oom_kind as k; k(MemoryError())\nsys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_capped_process_that_cannot_grow_is_out_of_memory() -> None:
    code = (
        "import resource, sys\n"
        "from rung.strategies.oom import oom_kind\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (200 << 20,) * 2)\n"
        "try:\n    bytearray(1 << 30)\n"
        "except MemoryError as e:\n    sys.exit(0 if oom_kind(e) == 'host' else 3)\n"
        "sys.exit(4)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
