"""`rung explain`: after a run, the cause of its end in one screen, from what the run folder holds. No torch."""

import json
from pathlib import Path
from typing import Any

from rung.launcher.storage import Store
from rung.strategies.errors import JobError, ObjectMissing

#: What to look at next, by the cause of a failure.
ADVICE = {
    "device_oom": "give it more memory (devices.memory), a smaller batch or model, or more devices; see `rung plan`",
    "host_oom": "lower data.workers, or leave more host memory to the job; the trace above shows who held it",
    "non_finite": "do what the likely cause above asks for; `rung check` looks at the samples",
    "bad_data": "mend or drop the samples named above: `rung check`, data.clean",
    "user_exception": "mend the line that the traceback names, or the sample it failed on (`rung check` finds it); "
    "then launch again: the run goes on from its last checkpoint",
    "lost_worker": "see the log named above; if it was killed, find out by whom (scheduler, kernel, operator)",
    "hung": "the stacks in the log show where the rank waited: a data loader, a lock, a network",
    "storage": "see that the store is writable and has room: `rung doctor`",
    "preemption": "launch again with the same command; it goes on from the checkpoint",
    "dependency": "`rung doctor` names what is missing and the command that installs it",
}


def explain(url: str) -> list[str]:
    """Lines about the last launch of the run at `url`. Raises JobError if there is no run."""
    store = Store.open(url)
    try:
        text = store.read("events.jsonl").decode()
    except ObjectMissing:
        raise JobError(
            f"{store.url} is not a run folder: it has no events.jsonl", hint="name the job's `run`"
        ) from None
    events = [json.loads(line) for line in text.splitlines() if line.strip()]
    lines = [f"run        {store.url}"]
    if not any(e["event"] == "attempt" for e in events):
        return [*lines, "           it has not started yet"]
    begun = max((n for n, e in enumerate(events) if e["event"] == "launch"), default=0)
    if before := sum(e["event"] == "attempt" for e in events[:begun]):
        lines.append(f"before     {before} attempt{'s' * (before > 1)} in earlier launches")
    for e in events[begun:]:
        lines += _line(e)
    return lines + _end(events)


def _line(e: dict[str, Any]) -> list[str]:
    match e["event"]:
        case "attempt":
            resumed = f", from {e['resume']}" if e.get("resume") else ""
            return [f"attempt {e['number']:<2} {e['plan']}{resumed}"]
        case "workers":
            each = f"{e['threads']} thread{'s' * (e['threads'] != 1)} each"
            return [f"           {e['placed'] + '; ' if e.get('placed') else ''}{each}"]
        case "fallback":
            return [f"fallback   after step {e['step']:,}: {e['reason']}"]
        case "rollback":
            return [f"rollback   {e['reason']}",
                    f"           back to step {e['to']:,}, {len(e['batches'])} batches passed over"]  # fmt: skip
        case "finding":
            at = f" ({_samples(e['samples'])})" if e.get("samples") else ""
            return [f"noticed    step {e['step']:,}, {e['subject']}: {e['fact']}{at}"]
        case "outcome" if e.get("headline"):
            return [f"           {e['headline']}"]
    return []


def _end(events: list[dict[str, Any]]) -> list[str]:
    last = next((e for e in reversed(events) if e["event"] in ("done", "outcome", "launch", "attempt")), None)
    saved = next((e for e in reversed(events) if e["event"] == "checkpoint"), None)
    where = f"the newest checkpoint is of step {saved['step']:,}" if saved else "there is no checkpoint"
    if last is None or last["event"] in ("launch", "attempt"):
        return [f"end        it is running, or was cut off without a word (power, kill -9); {where}",
                "           → the same `rung launch` goes on from there"]  # fmt: skip
    if last["event"] == "done":
        return [f"end        done at step {last['step']:,} in {last['seconds']:,} s"]
    cause = str(last.get("cause") or "")
    lines = [f"end        {last['reason']} after step {last['step']:,}; {where}"]
    lines += ["           " + text for text in str(last.get("explanation") or "").splitlines()]
    if last.get("samples"):
        lines.append(f"           {_samples(last['samples'])} (indices into the data set)")
    if cause in ADVICE:
        lines.append(f"           → {ADVICE[cause]}")
    elif last["reason"] in ("stopped", "cut short"):
        lines.append("           → the same `rung launch` goes on from there")
    return lines


def _samples(indices: list[int]) -> str:
    more = f" and {len(indices) - 8} more" if len(indices) > 8 else ""
    return f"samples {', '.join(map(str, indices[:8]))}{more}"


def newest_run(folder: Path) -> str:
    """The run below `folder` that was written to last. Raises JobError if there is none."""
    found = sorted(folder.glob("**/events.jsonl"), key=lambda p: p.stat().st_mtime)
    if not found:
        raise JobError(f"no run was found below {folder}", hint="name the run folder: rung explain RUN")
    return str(found[-1].parent)
