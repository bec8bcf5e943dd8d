"""One screen that says why the workers ended: who failed first, with its own words, and what it means."""

import contextlib
import os
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rung.cluster.failures import Cause, Ended, Facts, cause_of, first_failure, main_thread, waits_for_peers
from rung.cluster.memory_trace import Sample

_TRACEBACK_LINES = 24
_LOG_LINES = 14
_TRACE_LINES = 5
_MOST_STACKS = 3
_OURS = [Path(__file__).parents[1] / package for package in ("launcher", "cluster", "strategies")]
_BOTTOM = re.compile(r"cluster/worker\.py\", line \d+ in run_worker$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """`first` is the end that the others follow from, `cause` its cause, `text` the screen, `line` the first line."""

    first: Ended
    cause: Cause
    line: str
    text: str


def verdict(ends: Sequence[Ended], facts: Facts, *, memory: Sequence[Sample] = ()) -> Verdict | None:
    """Judges how a group of workers ended; None if all ended well and none hung."""
    first = _first(list(ends), facts)
    if first is None:
        return None
    cause = cause_of(first, facts) or Cause.LOST_WORKER
    line = f"{_who(first, facts)} {_what(first, facts)}"
    parts = [f"{line}, at {time.strftime('%H:%M:%S', time.localtime(first.began))}"]
    meaning = _meaning(first, facts)
    if meaning:
        parts.append(f"  {meaning}")
    if first.rank in facts.hung:
        shown = sorted(facts.hung)[:_MOST_STACKS]
        lines = _TRACEBACK_LINES // len(shown)
        parts += [_stack(rank, facts.hung[rank], lines) for rank in shown]
    elif first.failure is not None and first.failure.traceback:
        parts.append(_block("its traceback", first.failure.traceback, _TRACEBACK_LINES))
    else:
        log_tail = facts.log_tails.get(first.rank, "")
        if log_tail:
            parts.append(_block("last lines of its log", log_tail, _LOG_LINES))
    if cause in {Cause.HOST_OOM, Cause.DEVICE_OOM} and memory:
        parts.append(_memory(memory))
    if first.log is not None:
        parts.append(f"  log: {first.log}")
    others = _others(list(ends), first, facts)
    if others:
        parts.append(others)
    return Verdict(first=first, cause=cause, line=line, text="\n".join(parts))


def tail(log: Path, lines: int = 20, max_bytes: int = 1 << 16) -> str:
    """The last lines of a log; empty if there is none. When the interpreter wrote its stacks as it crashed, these are
    what came before them and the stack that crashed, without the other threads and the list of extension modules."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - max_bytes))
        text = file.read().decode(errors="replace")
        before, crash, stacks = text.rpartition("Fatal Python error: ")
        if not crash:
            return "\n".join(text.splitlines()[-lines:])
        reason, *blocks = stacks.strip().split("\n\n")
        crashed = next((block for block in blocks if block.startswith("Current thread")), "")
        return "\n".join([*before.splitlines()[-4:], crash + reason, *trim_stack(crashed).splitlines()][:lines])
    return ""


def trim_stack(stacks: str) -> str:
    """Stacks as faulthandler writes them (most recent call first), without rung's own frames below the user's."""
    kept: list[str] = []
    ours = False
    for line in stacks.splitlines():
        ours = line.startswith("  ") and (ours or bool(_BOTTOM.search(line)))
        if not ours:
            kept.append(line)
    return "\n".join(kept)


def explain_signal(number: int, facts: Facts) -> str:
    """What it means that a signal ended a worker, and what to do."""
    match number:
        case signal.SIGKILL if facts.oom_kills:
            return (
                f"the kernel killed it because host memory ran out (it counts {facts.oom_kills} such "
                f"kill{'s' * (facts.oom_kills != 1)} since the start)"
            )
        case signal.SIGKILL if facts.oom_kills is None:
            return "most likely host memory ran out and the kernel killed it; no counter of such kills can be read here"
        case signal.SIGKILL:
            return "somebody sent SIGKILL; the kernel counts no out-of-memory kill, so it was a person or a scheduler"
        case signal.SIGSEGV:
            return "native code touched memory it does not own: a broken extension, or two that do not match"
        case signal.SIGBUS:
            return "a page of shared memory or of a mapped file could not be given: /dev/shm is full, or a file shrank"
        case signal.SIGABRT:
            return "native code gave up (an assertion, an uncaught C++ exception); the log has its last words"
        case signal.SIGILL:
            return "this CPU does not know an instruction: a library was built for another one"
        case signal.SIGFPE:
            return "native code divided an integer by zero"
        case signal.SIGTERM:
            return "it was asked to end from outside: a scheduler, a shutdown, or a preemption"
        case signal.SIGXCPU | signal.SIGXFSZ:
            return "a resource limit (ulimit) was reached"
        case _:
            return ""


def _first(ends: list[Ended], facts: Facts) -> Ended | None:
    """A rank that hung comes before those that waited for it, unless one failed on its own before."""
    first = first_failure(ends)
    waited = first is not None and first.failure is not None and (first.failure.peer or first.failure.hung)
    follows = first is None or first.stopped or waited
    if facts.hung and follows:
        rank = min(facts.hung)
        known = [end for end in ends if end.rank == rank]
        return known[0] if known else Ended(rank=rank, exit_code=None, signal=None, at=time.time())
    return first


def _who(first: Ended, facts: Facts) -> str:
    """The rank, or all ranks that hang together."""
    if first.rank not in facts.hung or len(facts.hung) == 1:
        return f"rank {first.rank}"
    *some, last = sorted(facts.hung)
    return f"ranks {', '.join(map(str, some))} and {last}"


def _what(end: Ended, facts: Facts) -> str:
    if end.rank in facts.hung:
        return "hung"
    if end.failure is not None:
        message = " ".join(end.failure.message.split())
        return f"raised {end.failure.type_name}: {message[:200]}" if message else f"raised {end.failure.type_name}"
    if end.signal is not None:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(end.signal).name} (exit code -{end.signal})"
        return f"was killed by signal {end.signal}"
    return f"ended with exit code {end.exit_code}"


def _meaning(end: Ended, facts: Facts) -> str:
    if end.rank in facts.hung:
        if len(facts.hung) == 1:
            return "its heartbeat stood still; it did not arrive where the other ranks wait for it"
        if all(waits_for_peers(stacks) for stacks in facts.hung.values()):
            return (
                "all stand in collectives that do not belong together: one rank makes a call that others skip, "
                "such as a barrier under `if rank == 0`, or under ZeRO a branch of the model that not all take"
            )
        return "their heartbeats stood still; they did not arrive where the other ranks wait for them"
    if end.failure is not None:
        hint = end.failure.error.hint if end.failure.error is not None else ""
        return f"→ {hint}" if hint else ""
    if end.signal == signal.SIGABRT and "collective mismatch" in facts.log_tails.get(end.rank, ""):
        return (
            "the ranks made collectives that do not go together: a call that only some make, or under ZeRO a branch "
            "of the model or an expert that not all take (strategy: ddp or single trains that)"
        )
    if end.signal is not None:
        return explain_signal(end.signal, facts)
    return "it left by itself (sys.exit or os._exit), with no exception" if end.exit_code else ""


def _block(title: str, text: str, lines: int) -> str:
    kept = text.splitlines()
    cut = [f"... {len(kept) - lines} lines more in the log ..."] if len(kept) > lines else []
    return f"  {title}:\n" + "\n".join(f"    {line}" for line in [*cut, *kept[-lines:]])


def _stack(rank: int, stacks: str, lines: int) -> str:
    """Where the main thread stands, its newest calls; the other threads serve rung and torch."""
    kept = (main_thread(stacks) or stacks).splitlines()
    while len(kept) > 2 and any(f'"{folder}/' in kept[-1] for folder in _OURS):
        kept.pop()  # how rung came to call the task
    cut = [f"... and {len(kept) - lines} more"] if len(kept) > lines else []
    return f"  Python stack of rank {rank}:\n" + "\n".join(f"    {line}" for line in [*kept[:lines], *cut])


def _memory(samples: Sequence[Sample]) -> str:
    """A handful of samples up to the end: the last ones, and one from well before."""
    last = samples[-1].at
    wanted = [s for s in samples if last - s.at < _TRACE_LINES / 2] or list(samples[-1:])
    rows = [*samples[:1], *wanted[-_TRACE_LINES:]] if samples[0] is not wanted[0] else wanted[-_TRACE_LINES:]
    lines = []
    for sample in rows:
        ranks = ", ".join(f"rank {rank} {_gib(n)}" for rank, n in sorted(sample.by_rank.items()))
        free = "" if sample.free is None else f"; free {_gib(sample.free)}"
        limit = "" if sample.limit is None else f" of {_gib(sample.limit)}"
        lines.append(f"    {sample.at - last:+6.1f} s  {ranks}{free}{limit}")
    return "  host memory before the end:\n" + "\n".join(lines)


def _others(ends: list[Ended], first: Ended, facts: Facts) -> str:
    words = []
    for end in sorted(ends, key=lambda e: e.began):
        if end.rank == first.rank or end.clean:
            continue
        why = "lost its peer" if end.failure is not None and end.failure.peer else _what(end, facts)
        words.append(f"rank {end.rank} {why} ({round(end.began - first.began, 1) + 0.0:+.1f} s)")
    more = f" and {len(words) - 8} more" if len(words) > 8 else ""
    return f"  after it: {'; '.join(words[:8])}{more}" if words else ""


def _gib(count: int) -> str:
    return f"{count / (1 << 30):.2f} GiB"
