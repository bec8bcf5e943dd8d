"""Memory of the host or disk that is about to run out: what to say, and what to cut back. Pure."""

from dataclasses import dataclass, replace

from rung.launcher.watch.progress import size
from rung.launcher.watch.resources import Resources
from rung.strategies.findings import Finding, Level

#: Less host memory than this part (and than the second, in bytes) may be gone within seconds.
LOW_PART, LOW_BYTES = 0.06, 2 << 30
#: How long a cut gets to show before the next one, in seconds.
WAIT_S = 5.0
#: The disk is nearly full when it does not hold so many more checkpoints, or has less than this.
CHECKPOINTS, LEAST_DISK_BYTES = 2, 256 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Pressure:
    """What was said and done so far. `loader_workers`: for each worker, as far as is known."""

    loader_workers: int = 0
    devices: int = 1
    cut_at: float | None = None
    told_memory: bool = False
    told_disk: bool = False


def judge(state: Pressure, seen: Resources, *, checkpoint_bytes: int = 0) -> tuple[Pressure, list[Finding], int | None]:
    """The new state, what to say, and how many loader workers each worker may keep (None: no change)."""
    findings: list[Finding] = []
    cut: int | None = None
    if _memory_is_low(seen) and (state.cut_at is None or seen.at - state.cut_at >= WAIT_S):
        if state.loader_workers > 0:
            cut = state.loader_workers // 2
            findings.append(_memory(seen, _cut_words(state, cut)))
            state = replace(state, loader_workers=cut, cut_at=seen.at)
        elif not state.told_memory:
            findings.append(_memory(seen, ""))
            state = replace(state, told_memory=True)
    if not state.told_disk and _disk_is_low(seen, checkpoint_bytes):
        assert seen.disk_free_bytes is not None
        findings.append(_disk(seen.disk_free_bytes, checkpoint_bytes))
        state = replace(state, told_disk=True)
    return state, findings, cut


def _memory_is_low(seen: Resources) -> bool:
    free, limit = seen.host_free_bytes, seen.host_limit_bytes
    return free is not None and limit is not None and free < min(LOW_PART * limit, LOW_BYTES)


def _disk_is_low(seen: Resources, checkpoint_bytes: int) -> bool:
    free = seen.disk_free_bytes
    return free is not None and free < max(CHECKPOINTS * checkpoint_bytes, LEAST_DISK_BYTES)


def _cut_words(state: Pressure, cut: int) -> str:
    each = " for each device" if state.devices > 1 else ""
    return f"; loader workers are cut back from {state.loader_workers} to {cut}{each}"


def _memory(seen: Resources, done: str) -> Finding:
    assert seen.host_free_bytes is not None
    assert seen.host_limit_bytes is not None
    free, limit = size(seen.host_free_bytes), size(seen.host_limit_bytes)
    held = size(seen.worker_bytes)
    return Finding(
        level=Level.WARNING,
        subject="memory.host",
        fact=f"host memory is nearly full: {free} of {limit} are free, the workers hold {held}{done}",
        why="when it is full the kernel kills a process, without a word to it",
        fix="fewer data.workers, no offload to host, or more memory for this job or container",
    )


def _disk(free_bytes: int, checkpoint_bytes: int) -> Finding:
    of = f"; a checkpoint takes {size(checkpoint_bytes)}" if checkpoint_bytes else ""
    return Finding(
        level=Level.WARNING,
        subject="disk.full",
        fact=f"the disk of the run folder is nearly full: {size(free_bytes)} are free{of}",
        why="a save that finds no room ends the run",
        fix="make room, lower checkpoint.keep, or let `run` point to a larger store",
    )
