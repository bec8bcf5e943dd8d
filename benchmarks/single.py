"""One device: `rung launch` against a hand-written PyTorch loop on the same model, data and optimizer.

    python -m benchmarks.single

Prints steps per second as a ratio (rung / script) for a step of about 5 ms and one of about 100 ms, and the time from
command to the end of the first step as a ratio. The two run in turn, so a machine that is busy is busy for both.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.mlp_task import MLP

TASK = (
    MLP
    + '''

class Bench(Mlp):
    """Marks in a file when its loss is called for the n-th time, for n in MARKS."""

    marks = {int(n) for n in os.environ["MARKS"].split(",")}

    def loss(self, model, batch):
        self.calls += 1
        if self.calls in self.marks:
            with open(os.environ["MARK_FILE"], "a") as f:
                f.write(f"{self.calls} {time.time()}\\n")
        return nn.functional.cross_entropy(model(batch[0]), batch[1])
'''
)

SCRIPT = """
import sys
import torch
from torch.utils.data import DataLoader
from task import Bench

width, depth, steps = map(int, sys.argv[1:])
task = Bench(width, depth)
torch.manual_seed(0)
model = task.model()
loader = DataLoader(task.dataset("train"), batch_size=64, shuffle=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
step = 0
while step < steps:
    for batch in loader:
        loss = task.loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            loss.item()
        step += 1
        if step == steps:
            break
"""

#: rung's ten samples are one call of the loss more than the script's.
SMOKE_CALLS = 1


def once(folder: Path, kind: str, width: int, depth: int, steps: int, marks: tuple[int, int]) -> dict[int, float]:
    """Runs one of the two; returns when the loss was called for the first and last marked step (0: the command)."""
    extra = SMOKE_CALLS if kind == "rung" else 0
    mark_file = folder / "marks.txt"
    mark_file.unlink(missing_ok=True)
    env = {**os.environ, "MARK_FILE": str(mark_file), "MARKS": ",".join(str(m + extra) for m in marks)}
    if kind == "rung":
        job = {
            "task": "task:Bench", "task_args": {"width": width, "depth": depth}, "run": tempfile.mkdtemp(dir=folder),
            "batch": 64, "steps": steps, "strategy": "single", "checkpoint": {"every": "none"}, "log_every_s": 1000,
        }  # fmt: skip
        (folder / "job.yaml").write_text(json.dumps(job))
        command = [str(Path(sys.executable).parent / "rung"), "launch", "job.yaml"]
    else:
        command = [sys.executable, "script.py", str(width), str(depth), str(steps)]
    began = time.time()
    subprocess.run(command, cwd=folder, env=env, check=True, stdout=subprocess.DEVNULL, timeout=600)
    found = dict(line.split() for line in mark_file.read_text().splitlines())
    return {0: began} | {m: float(found[str(m + extra)]) for m in marks}


def calibrate(folder: Path, target_s: float, depth: int) -> int:
    """The width of a model whose step takes about `target_s` on this machine now."""
    width = 128
    while width < 8192:
        at = once(folder, "script", width, depth, 42, (20, 40))
        if (at[40] - at[20]) / 20 >= target_s * 0.8:
            return width
        width = int(width * 1.5)
    return width


def main() -> None:
    """Prints the three ratios."""
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "task.py").write_text(TASK)
        (folder / "script.py").write_text(SCRIPT)
        for target_s, steps, wanted in ((0.005, 600, 0.98), (0.1, 60, 0.99)):
            width = calibrate(folder, target_s, 4)
            marks = (steps // 6, steps - 2)
            ratios, scripts = [], []
            for _ in range(repeats):
                took = {}
                for kind in ("script", "rung"):
                    at = once(folder, kind, width, 4, steps, marks)
                    took[kind] = (at[marks[1]] - at[marks[0]]) / (marks[1] - marks[0])
                ratios.append(took["script"] / took["rung"])
                scripts.append(took["script"])
            step_ms = statistics.median(scripts) * 1e3
            print(
                f"steps/s, rung / script, step of {step_ms:.1f} ms (width {width}): "
                f"median {statistics.median(ratios):.3f} of {[round(r, 3) for r in sorted(ratios)]}, wanted {wanted}"
            )
        ratios = []
        for _ in range(repeats):
            took = {}
            for kind in ("script", "rung"):
                at = once(folder, kind, 256, 2, 3, (1, 2))
                took[kind] = at[2] - at[0]
            ratios.append(took["rung"] / took["script"])
        print(
            f"command to end of first step, rung / script: median {statistics.median(ratios):.2f} "
            f"of {[round(r, 2) for r in sorted(ratios)]} (script {took['script']:.2f} s), wanted at most 1.3"
        )


if __name__ == "__main__":
    main()
