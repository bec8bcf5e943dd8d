"""The same failing jobs under rung, accelerate's find_executable_batch_size, HF Trainer's auto_find_batch_size and
`torchrun --max-restarts`: who ends, with which global batch, what it cost.

Run: python benchmarks/fallback.py [repeats [tool]]

30 optimizer steps of 64 samples under a real cap (RLIMIT_DATA), a checkpoint every five. "again" are optimizer steps
computed more than once; "lost s" is the time from the failure to the end of the step that it interrupted. HF's Trainer
comes with `transformers`, which rung does not need; without it its lines are left out.
"""

import importlib.util
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MIB = 1 << 20
STEPS, BATCH, LIMIT_S = 30, 64, 45.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """One failing job. `memory`: the cap in bytes. `fault`: see `strike` in fallback_task.py."""

    name: str
    world: int
    memory: int
    fault: dict[str, Any]


NEVER = 10**9
CASES = [
    Case(name="does not fit from the start", world=1, memory=100 * MIB,
         fault={"how": "memory", "rank": 0, "step": NEVER}),
    Case(name="out of memory at step 16", world=1, memory=230 * MIB,
         fault={"how": "memory", "rank": 0, "step": 15, "kib": 3072}),
    Case(name="out of memory at step 16 of one of two", world=2, memory=230 * MIB,
         fault={"how": "memory", "rank": 1, "step": 15, "kib": 5120}),
    Case(name="one of two is killed at step 19", world=2, memory=0, fault={"how": "kill", "rank": 1, "step": 18}),
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one run came to. `lost_s` is None where the failure was before the first step, or never got over."""

    ended: bool
    batch: int
    again: str
    lost_s: float | None
    step_s: float
    wall_s: float


def command(tool: str, case: Case) -> list[str]:
    """The command line of `tool` for a case."""
    if tool == "rung":
        sets = [f"devices.count={case.world}", f"strategy.name={'single' if case.world == 1 else 'ddp'}"]
        sets += [f"devices.memory={case.memory // MIB} MiB"] if case.memory else []
        code = "from rung.launcher.cli import main; main()"
        return [sys.executable, "-c", code, "launch", "job.yaml", *(word for s in sets for word in ("--set", s))]
    code = f"import fallback_task; fallback_task.{tool.removesuffix(' (torchrun)')}({case.memory})"
    if case.world == 1 and tool != "plain (torchrun)":
        return [sys.executable, "-c", code]
    Path("script.py").write_text(code)
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case.world}"]
    return [*run, "--max-restarts=3", "script.py"]


def once(tool: str, case: Case) -> Result:
    """Runs one case in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="rung-bench-") as name:
        folder, back = Path(name), Path.cwd()
        os.chdir(folder)
        try:
            (folder / "task.py").write_text((HERE / "fallback_task.py").read_text())
            (folder / "fallback_task.py").write_text((HERE / "fallback_task.py").read_text())
            (folder / "fault.json").write_text(json.dumps(case.fault))
            (folder / "job.yaml").write_text(
                f"task: task:Task\nrun: run\nbatch: {BATCH}\nsteps: {STEPS}\nschedule: constant\nclip: null\n"
                "optimizer: {name: 'task:Logged', lr: 1.0e-3, weight_decay: 0}\ncheckpoint: {every: 5 steps}\n"
            )
            began = time.time()
            code = finish(command(tool, case), folder)
            return judge(case, code, folder, began, time.time() - began)
        finally:
            os.chdir(back)


def finish(words: list[str], folder: Path) -> int:
    """The exit code; what takes too long is ended with all that it started, and counts as failed."""
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "XDG_CACHE_HOME": str(folder / ".cache")}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log, env=env, start_new_session=True)
        try:
            return process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return process.wait() or 1


def judge(case: Case, code: int, folder: Path, began: float, wall_s: float) -> Result:
    """Reads the log that the optimizer wrote."""
    rows = [json.loads(line) for f in folder.glob("steps-*.jsonl") for line in f.read_text().splitlines()]
    rows.sort(key=lambda row: float(row["at"]))
    steps = [r for r in rows if "step" in r]
    if case.world > 1:  # one rank's lines tell
        steps = [json.loads(x) for x in (folder / "steps-0.jsonl").read_text().splitlines() if '"step"' in x]
    failed = next((r["at"] for r in rows if "fault" in r), None)
    interrupted = case.fault["step"] + 1
    after = [s["at"] for s in steps if failed is not None and s["at"] > failed and s["step"] >= interrupted]
    last = steps[-8:]
    gaps = [b["at"] - a["at"] for a, b in itertools.pairwise(last)]
    ended = code == 0 and len(steps) >= STEPS
    return Result(
        ended=ended,
        batch=steps[-1]["samples"] * case.world if steps else 0,
        again=str(len(steps) - STEPS) if ended else "-",
        lost_s=after[0] - failed if after and failed is not None else None,
        step_s=statistics.median(gaps) if gaps else 0.0,
        wall_s=wall_s,
    )


def tools(case: Case) -> list[str]:
    """Who is asked: the batch-size finders and torchrun know their own kinds of failure."""
    found = ["rung", "accelerate" if case.world == 1 else "accelerate (torchrun)", "plain (torchrun)"]
    if case.world == 1 and importlib.util.find_spec("transformers"):
        found.insert(2, "trainer")
    return found


NAMES = {
    "accelerate": "find_executable_batch_size",
    "accelerate (torchrun)": "find_executable_batch_size, torchrun",
    "plain (torchrun)": "torchrun --max-restarts 3",
    "trainer": "HF auto_find_batch_size",
}


def main(repeats: int, only: str = "") -> None:
    """Prints one table a case: medians over the repeats. `only`: one tool."""
    for case in CASES:
        print(f"\n{case.name} ({case.world} process{'es' * (case.world > 1)}, global batch {BATCH})")
        print(f"{'':38}{'ended':>7}{'batch':>7}{'again':>7}{'lost s':>8}{'in steps':>9}{'wall s':>8}")
        for tool in [tool for tool in tools(case) if only in tool]:
            runs = [once(tool, case) for _ in range(repeats if tool == "rung" and case.fault["how"] == "memory" else 1)]
            lost = [r.lost_s for r in runs if r.lost_s is not None]
            in_steps = [r.lost_s / r.step_s for r in runs if r.lost_s is not None and r.step_s]
            shown = (
                (f"{statistics.median(lost):8.2f}{statistics.median(in_steps):9.1f}") if lost else f"{'-':>8}{'-':>9}"
            )
            ended = f"{sum(r.ended for r in runs)}/{len(runs)}"
            wall = statistics.median(r.wall_s for r in runs)
            r = runs[-1]
            print(f"{NAMES.get(tool, tool):38}{ended:>7}{r.batch:>7}{r.again:>7}{shown}{wall:8.1f}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3, *sys.argv[2:3])
