"""`rung launch --trial`: the whole path on a small scale, to know within about a minute that the long run will start,
save and resume. It runs in a scratch folder beside the run's own, on the same store, and leaves nothing there.

    1. data        a sample of the data set is read and checked
    2. two steps   the plan, ten samples, two optimizer steps at full batch, a save
    3. resume      a second launch finds that checkpoint, loads it, takes the third step, validates, saves again
"""

import io
import json
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rung.launcher import check, run
from rung.launcher.checkpoint.find import find
from rung.launcher.job import Job
from rung.launcher.storage import Store
from rung.launcher.watch.findings import finding_lines
from rung.launcher.watch.progress import View, duration, size
from rung.strategies.errors import DataError, RungError, StorageError
from rung.strategies.findings import Finding, Level

#: Micro-batches that the trial validates on: enough to run the code, few enough for any data set.
VALIDATED = 4
STEPS_BEFORE, STEPS = 2, 3


@dataclass(kw_only=True, slots=True)
class Proven:
    """What the trial has shown so far, in words."""

    lines: list[str] = field(default_factory=list)


def rehearse(job: Job, view: View) -> None:
    """Takes the job through the whole path. Returns if it holds; raises what stopped it otherwise."""
    began = time.monotonic()
    scratch = f"{job.run.rstrip('/')}-trial-{uuid.uuid4().hex[:8]}"
    store = Store.open(scratch, job.checkpoint.options)
    proven = Proven()
    try:
        _stage(view, proven, "data", lambda: _check(scaled(job, scratch, steps=STEPS_BEFORE), view))
        _stage(view, proven, "two steps", lambda: _two_steps(job, scratch, store))
        _stage(view, proven, "resume", lambda: _resume(job, scratch, store))
    except RungError:
        view.say(f"trial      failed after {duration(time.monotonic() - began)}; proven so far: "
                 + (", ".join(proven.lines) or "nothing"), style="red")  # fmt: skip
        raise
    finally:
        view.pause()
        _clean_up(store, view)
    view.say(f"trial      the job starts, trains, saves and resumes; proven in {duration(time.monotonic() - began)}; "
             f"nothing is left of it", style="bold green")  # fmt: skip


def _clean_up(store: Store, view: View) -> None:
    try:
        store.delete_folder("")
    except StorageError as error:  # must not hide why a trial has failed
        view.say(f"warning    {store.url} could not be deleted: {error.message}", style="yellow")


def scaled(job: Job, scratch: str, *, steps: int) -> Job:
    """The job as it stands, but in another folder and of few steps."""
    values = job.to_dict()
    values |= {"run": scratch, "steps": steps, "epochs": None}
    values["checkpoint"] |= {"every": None, "keep": 1, "keep_best": None}
    values["validation"] |= {"every": None, "batches": min(VALIDATED, job.validation.batches or VALIDATED)}
    return Job.from_dict(values, source=job.source)


def _stage(view: View, proven: Proven, name: str, act: Callable[[], str]) -> None:
    began = time.monotonic()
    said = act()
    view.pause()
    view.say(f"trial      {name}: {said}  ({duration(time.monotonic() - began)})")
    proven.lines.append(name)


def _check(job: Job, view: View) -> str:
    """A sample of the data. Raises DataError where something in it is wrong."""
    stored = check.check(job, view, full=False, quick=True)
    findings = [Finding(**{**f, "level": Level(f["level"])}) for f in stored["findings"]]
    for finding in findings:
        if finding.level is not Level.OK:
            text, style = finding_lines(finding)
            view.say(text, style=style)
    wrong = [f for f in findings if f.level is Level.ERROR]
    if wrong:
        raise DataError(
            f"the data has {len(wrong)} error{'s' if len(wrong) > 1 else ''}, the first: {wrong[0].fact}",
            hint=wrong[0].fix or "see `rung check`",
        )
    looked = sum(split["looked_at"] for split in stored["splits"])
    return f"{looked:,} samples looked at, none that stops a run"


def _two_steps(job: Job, scratch: str, store: Store) -> str:
    seen = _launch(scaled(job, scratch, steps=STEPS_BEFORE))
    saved = find(store)
    if not saved or saved[0].step != STEPS_BEFORE:
        raise StorageError(f"no checkpoint of step {STEPS_BEFORE} was found after the save", url=store.url)
    steps = [row for row in _rows(store, "metrics.jsonl") if row["kind"] == "step"]
    seconds = steps[-1]["seconds"]
    return (
        f"{_plan(seen)}; loss {steps[0]['loss']:.4g}, {steps[-1]['loss']:.4g}; {duration(seconds)} a step; "
        f"a checkpoint takes {size(saved[0].total_bytes)}{_room(job, store, saved[0].total_bytes)}"
    )


def _resume(job: Job, scratch: str, store: Store) -> str:
    seen = _launch(scaled(job, scratch, steps=STEPS))
    events = _rows(store, "events.jsonl")
    resumed = [e["resume"] for e in events if e["event"] == "attempt"][-1]
    if not resumed or "resume     step" not in seen:
        raise StorageError("the second launch did not find the checkpoint of the first", url=store.url)
    rows = _rows(store, "metrics.jsonl")
    valid = [row for row in rows if row["kind"] == "validation"]
    words = f", validation loss {valid[-1]['loss']:.4g}" if valid and "loss" in valid[-1] else ", no validation split"
    return f"from step {STEPS_BEFORE} to step {STEPS}{words}"


def _launch(job: Job) -> str:
    """Trains, and returns what a user would have read; it is shown where it fails."""
    seen = io.StringIO()
    try:
        with View(every_s=1e9, stream=seen, force_plain=True) as quiet:
            run.launch(job, run.Options(), quiet)
    except RungError as error:
        # The folder goes away with its logs, so what is said here has to tell it all.
        kept = [line for line in error.message.splitlines() if not line.startswith("  log: ")]
        error.message = "\n".join([*_troubles(seen.getvalue()), *kept])
        raise
    return seen.getvalue()


def _troubles(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(("failed ", "fallback ", "warning "))]


def _plan(seen: str) -> str:
    """The plan that it ended with: the first one, and what it fell back to."""
    lines = [line[11:] for line in seen.splitlines() if line.startswith("plan ")]
    fell = [line[11:] for line in seen.splitlines() if line.startswith("fallback ")]
    return "; fell back: ".join([*lines[-1:], *fell])


def _room(job: Job, store: Store, each: int) -> str:
    """Whether the store has room for all checkpoints that are kept, and one more while it is written."""
    free = store.free_bytes()
    wanted = (job.checkpoint.keep + 1) * each
    if free is None:
        return ""
    if free < wanted:
        raise StorageError(
            f"{job.checkpoint.keep} checkpoints and one in the making take {size(wanted)}; {size(free)} are free",
            url=store.url, hint="make room, lower checkpoint.keep, or let `run` point to a larger store",
        )  # fmt: skip
    return f" ({size(free)} are free)"


def _rows(store: Store, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in store.read(name, limit_bytes=1 << 26).decode().splitlines() if line.strip()]
