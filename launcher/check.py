"""`rung check`: starts the worker that looks at the data, shows its progress, prints findings and stores the result.

Never loads torch; see `launcher/data/checks.py` for the part that does.
"""

import json
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rung.cluster.failures import Ended
from rung.cluster.local import Workers, WorkerSpec, warm
from rung.launcher.data.messages import CheckRequest, CheckResult, Progress
from rung.launcher.job import Job
from rung.launcher.storage import Store
from rung.launcher.watch.progress import View
from rung.strategies.errors import GuardStop, WorkersFailed
from rung.strategies.findings import Level

ENTRY = "rung.launcher.data.checks:main"
PRELOAD = ("torch", "rung.launcher.data.checks")
RESULT = "check.json"
_START_S = 300.0
#: A pass that shows no progress for so long hangs: a sample that is read for ten minutes is no sample.
_STILL_S = 600.0


def prepare() -> None:
    """Starts the process that the worker is forked from; returns at once."""
    warm(PRELOAD, {})


def check(job: Job, view: View, *, full: bool, quick: bool = False) -> dict[str, Any]:
    """Looks at the job's data, at every sample (`full`) or for some seconds only (`quick`).

    Returns what was stored as check.json in the run folder: `findings` and `splits`.

    Raises TaskError or JobError where the task cannot be built, and WorkersFailed where the checking itself ended.
    """
    store = Store.open(job.run, job.checkpoint.options)
    store.probe()  # a store that cannot be written to is known before the data is read
    with tempfile.TemporaryDirectory(prefix="rung-check-") as folder:
        request = CheckRequest(job=job.to_dict(), source=job.source, full=full, quick=quick)
        spec = WorkerSpec(rank=0, payload=request, log=Path(folder) / "check.log")
        with Workers.start(ENTRY, [spec], deadline_s=_START_S) as workers:
            result = _wait(workers, view)
    stored = {
        "version": 1,
        "time": round(time.time(), 3),
        "full": full,
        "findings": [{**asdict(finding), "level": finding.level.value} for finding in result.findings],
        "splits": list(result.splits),
    }
    store.write_atomic(RESULT, json.dumps(stored, indent=1).encode())
    if not quick:  # a trial's folder goes away
        view.say(f"checked    all of it is in {store.url_of(RESULT)}")
    return stored


def _wait(workers: Workers, view: View) -> CheckResult:
    moved_s = time.monotonic()
    while True:
        for event in workers.poll(1.0):
            moved_s = time.monotonic()
            if isinstance(event, Ended):
                view.pause()
                said = workers.verdict()
                if event.failure is not None and event.failure.error is not None:
                    raise event.failure.error
                raise WorkersFailed(said.text if said is not None else "the check ended before it had a result")
            match event.value:
                case Progress(split=split, done=done, total=total):
                    view.progress(done, total, f"checking {split}")
                case CheckResult() as result:
                    view.pause()
                    return result
        if time.monotonic() - moved_s > _STILL_S:
            raise GuardStop(
                f"reading the data shows no progress for {_STILL_S:g} s\n{workers.stacks(0)}",
                hint="a sample that waits for a network or a lock? The stack shows where",
            )


def has_errors(stored: dict[str, Any]) -> bool:
    """Whether any finding of a stored result is an error."""
    return any(finding["level"] == Level.ERROR.value for finding in stored["findings"])


def lines(stored: dict[str, Any]) -> list[tuple[str, str]]:
    """What to print: (line, level) for each finding, with why it matters and what mends it."""
    shown = []
    for f in stored["findings"]:
        more = f"\n           {f['why']}" if f["why"] and f["level"] != Level.OK.value else ""
        more += f"\n           → {f['fix']}" if f["fix"] and f["level"] != Level.OK.value else ""
        shown.append((f"{f['level']:<10} {f['subject']}: {f['fact']}{more}", f["level"]))
    return shown
