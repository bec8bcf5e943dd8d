"""The compiled parts of DeepSpeed that a plan needs: only the disk transfers, for offload to disk."""

import fcntl
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rung.strategies.errors import DependencyError
from rung.strategies.plan import Plan

OPS = ("pin_memory", "async_io")


def needed(plan: Plan) -> tuple[str, ...]:
    """Names of the operations that must be compiled on this machine before `plan` can run."""
    return OPS if "disk" in (plan.offload_optimizer, plan.offload_parameters) else ()


def build(plan: Plan, *, deadline_s: float) -> None:
    """Compiles what `plan` needs, unless that was done before on this machine; takes a minute or two the first time.

    Raises DependencyError if something to compile with is missing, compiling fails, or another process compiles for
    longer than `deadline_s`.
    """
    if not needed(plan):
        return
    if " " in sys.prefix:
        raise DependencyError(
            f"DeepSpeed cannot compile its disk transfers in {sys.prefix}: its commands do not quote the space",
            hint="use an environment whose path has no space, or keep the optimizer off the disk",
        )
    from deepspeed.ops.op_builder import AsyncIOBuilder

    hint = "install g++, ninja and libaio (Debian: apt install g++ libaio-dev), or keep the optimizer in host memory"
    builder = AsyncIOBuilder()
    if not builder.is_compatible(verbose=False):
        raise DependencyError("offload to disk needs libaio and its headers, which this machine lacks", hint=hint)
    with _alone(deadline_s):
        try:
            builder.load(verbose=False)
        except (RuntimeError, OSError, ImportError) as error:
            raise DependencyError(
                f"DeepSpeed's disk transfers do not compile here: {str(error).strip().splitlines()[0]}", hint=hint
            ) from error


@contextmanager
def _alone(deadline_s: float) -> Iterator[None]:
    """One process of this user at a time. The lock goes with its owner, whatever ends it; torch's own lock files do
    not, and whoever finds one left behind would wait for ever, so they are removed here."""
    from torch.utils.cpp_extension import _get_build_directory

    folders = [Path(_get_build_directory(name, False)) for name in OPS]
    with (folders[0].parent / "rung.lock").open("w") as lock:
        patience = time.monotonic() + deadline_s
        while not _locked(lock.fileno()):
            if time.monotonic() > patience:
                raise DependencyError(
                    f"another process has been compiling DeepSpeed's disk transfers for over {deadline_s:.0f} s",
                    hint=f"see what holds {lock.name}",
                )
            time.sleep(0.1)
        for folder in folders:
            (folder / "lock").unlink(missing_ok=True)
        yield


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
