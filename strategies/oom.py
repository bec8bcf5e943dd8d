"""Tells running out of memory from every other failure.

Types and error numbers are looked at first. Only `RuntimeError`, `OSError`, `ImportError` and `SystemError`, which is
what torch, the vendors' libraries and the interpreter raise, are searched for known phrases: a user's
`ValueError("out of memory")` is not ours.
Torch is not imported: an exception of torch's can only exist where torch is loaded already.
"""

import errno
import re
from collections.abc import Iterator
from typing import Literal

from rung.strategies.errors import RungError

OomKind = Literal["device", "host", "shared"]
"""device: the allocator of an accelerator; host: this process's own memory; shared: /dev/shm is full."""

_SHARED = re.compile(
    r"out of shared memory"  # what DataLoader says when a worker dies of SIGBUS
    r"|unable to (?:write to file|allocate shared memory|resize file|mmap).*(?:No space left|Cannot allocate)"
    r"|unable to allocate shared memory"
    r"|(?:No space left on device|Cannot allocate memory).*(?:/dev/shm|/torch_|nccl-)"
    r"|(?:/dev/shm|/torch_|nccl-).*(?:No space left on device)",
    re.IGNORECASE | re.DOTALL,
)
_DEVICE = re.compile(
    r"(?:CUDA|HIP|XPU|MPS|NPU)\b[^\n]{0,80}out of memory"
    r"|CU(?:BLAS|DNN|FFT|SOLVER|SPARSE|RAND)_?(?:STATUS_)?ALLOC(?:ATION)?_FAILED"
    r"|(?:HIPBLAS|ROCBLAS|MIOPEN)_?STATUS_?(?:ALLOC_FAILED|MEMORY_ERROR)|miopenStatusAllocFailed"
    r"|(?:hip|cuda)Error(?:OutOfMemory|MemoryAllocation)"
    r"|CUDA_ERROR_OUT_OF_MEMORY"
    r"|NCCL[^\n]{0,200}(?:failed to CUDA (?:m|c)alloc|out of memory)"
    r"|Failed to CUDA (?:host )?(?:m|c)alloc",
    re.IGNORECASE,
)
_HOST = re.compile(
    r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory)"
    r"|\bstd::bad_alloc\b|^bad allocation$"
    r"|\[Errno 12\]|Cannot allocate memory(?! in static TLS)"
    r"|can't start new thread"  # no room for its stack
    r"|(?:^|\n|Caught )MemoryError\b"  # a loader worker's traceback, when its type could not be rebuilt here
    r"|Unable to allocate [\d.]+ [KMGTPE]?i?B"
    r"|failed to allocate (?:host|pinned) memory",
    re.IGNORECASE,
)
#: What the interpreter says when C code failed and set no exception, such as for want of memory.
_UNSAID = re.compile(r"error return without exception set|returned NULL without setting an exception")
#: The limits that the memory of this process was put under, in bytes: what the interpreter leaves unsaid means memory.
caps: list[int] = []


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error`, or what it was raised from or while handling, is some memory having run out."""
    return oom_kind(error) is not None


def oom_kind(error: BaseException) -> OomKind | None:
    """Which memory ran out, or None. The chain is searched from the outside in; the first that tells decides."""
    for link in chain(error):
        kind = _kind_of_one(link)
        if kind is not None:
            return kind
    return None


def oom_kind_of_text(text: str) -> OomKind | None:
    """The same from words alone (a log's last lines, a library that aborts instead of raising)."""
    if _SHARED.search(text):
        return "shared"
    if _DEVICE.search(text):
        return "device"
    return "host" if _HOST.search(text) else None


def chain(error: BaseException) -> Iterator[BaseException]:
    """`error`, then all it came from: causes, contexts that are not suppressed, members of exception groups."""
    seen: set[int] = set()
    queue = [error]
    while queue:
        current = queue.pop(0)
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        if current.__cause__ is not None:
            queue.append(current.__cause__)
        elif current.__context__ is not None and not current.__suppress_context__:
            queue.append(current.__context__)
        members = getattr(current, "exceptions", ())
        if isinstance(members, tuple):  # ExceptionGroup is not in Python 3.10; its backport has the same attribute
            queue.extend(m for m in members if isinstance(m, BaseException))


def _kind_of_one(error: BaseException) -> OomKind | None:
    if isinstance(error, RungError):
        return None  # ours already carry their meaning in their type
    if isinstance(error, MemoryError):
        return "host"
    if any(t.__name__ == "OutOfMemoryError" and t.__module__.split(".")[0] == "torch" for t in type(error).__mro__):
        return "device"
    if isinstance(error, OSError):
        if error.errno == errno.ENOMEM:
            return "host"
        name = str(error.filename or "")
        if error.errno == errno.ENOSPC and name.startswith(("/dev/shm", "/torch_")):  # noqa: S108 - a test, not a use
            return "shared"
    if isinstance(error, SystemError) and _UNSAID.search(str(error)) and caps:
        return "host"
    if isinstance(error, (RuntimeError, OSError, ImportError, SystemError)):
        return oom_kind_of_text(str(error))
    return None
