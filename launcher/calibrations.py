"""What runs measured, kept for the next prediction of the same task. One small file per task, in the cache folder."""

import json
from dataclasses import asdict
from pathlib import Path

from rung.launcher.folder import cache_folder
from rung.launcher.job import Job
from rung.launcher.planner import gib
from rung.launcher.profiling import digest_of
from rung.strategies.calibration import ENOUGH_RUNS, Seen, calibrate
from rung.strategies.memory import Factors
from rung.strategies.plan import Plan

#: Older runs than so many say less about the machine as it is now.
MOST = 50


def factors_for(digest: str) -> Factors:
    """Corrections for predictions of the task with this profile digest; none before it ran a few times here."""
    history = _read(_file(digest))[-MOST:]
    return calibrate(history) if len(history) >= ENOUGH_RUNS else Factors()


def remember(digest: str, seen: Seen) -> None:
    """Adds one run. `seen` holds predictions without corrections. A cache that cannot be written is done without."""
    file = _file(digest)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8") as f:
            f.write(json.dumps(asdict(seen)) + "\n")
    except OSError:
        return


def record(job: Job, plan: Plan, peak_bytes: int, step_s: float) -> str:
    """Keeps what a finished run measured; says how far the prediction was off ("" where there was none)."""
    predicted = plan.predicted_device_peak_bytes
    if not predicted or not peak_bytes or not step_s:
        return ""
    digest = digest_of(job, plan.precision)
    factors = factors_for(digest)
    raw_s = (plan.predicted_step_s or 0.0) / factors.time
    raw = max(1, predicted - factors.device_bytes)
    remember(digest, Seen(predicted_bytes=raw, measured_bytes=peak_bytes, predicted_s=raw_s, measured_s=step_s))
    return f"memory predicted {gib(predicted)}, measured {gib(peak_bytes)} ({peak_bytes / predicted - 1:+.0%})"


def _file(digest: str) -> Path:
    return cache_folder() / "calibration" / f"{digest}.jsonl"


def _read(file: Path) -> list[Seen]:
    """Lines that are not what `remember` writes are passed over: the file may be cut short."""
    if not file.is_file():
        return []
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    return [seen for line in lines if (seen := _parse(line)) is not None]


def _parse(line: str) -> Seen | None:
    try:
        return Seen(**json.loads(line))
    except (ValueError, TypeError):
        return None
