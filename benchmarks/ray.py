"""Two workers on a warm Ray cluster: `rung launch` against a bare Ray Train TorchTrainer of the same model.

    python -m benchmarks.ray [repeats]

Brings up a head and two nodes of one CPU each on this machine, then runs the two in turn, each as a command of its own:
same model, data, optimizer and batch. Prints the time from the command to the end of the first step, and the time of a
step from then on, both as ratios.
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
    """Marks in a file when its loss is called for the n-th time on rank 0, for n in MARKS."""

    def loss(self, model, batch):
        self.calls += 1
        marks = json_marks()
        if os.environ.get("RANK", "0") == "0" and self.calls in marks["at"]:
            with open(marks["file"], "a") as f:
                f.write(f"{self.calls} {time.time()}\\n")
        return nn.functional.cross_entropy(model(batch[0]), batch[1])


def json_marks(kept={}):
    if not kept:
        import json
        kept.update(json.load(open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "marks.json"))))
    return kept
'''
)

SCRIPT = """
import os, sys
import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

address, folder, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])


def train(config):
    import sys
    sys.path.insert(0, config["folder"])
    import torch
    import ray.train.torch
    from torch.utils.data import DataLoader
    from task import Bench
    torch.set_num_threads(1)
    os.environ["RANK"] = str(ray.train.get_context().get_world_rank())
    task = Bench()
    torch.manual_seed(0)
    model = ray.train.torch.prepare_model(task.model())
    loader = ray.train.torch.prepare_data_loader(DataLoader(task.dataset("train"), batch_size=32, shuffle=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)
    step = 0
    while step < config["steps"]:
        for batch in loader:
            loss = task.loss(model, batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if step % 10 == 0:
                loss.item()
            step += 1
            if step == config["steps"]:
                break


ray.init(address=address, log_to_driver=False)
TorchTrainer(
    train, train_loop_config={"steps": steps, "folder": folder},
    scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
    run_config=RunConfig(storage_path=folder + "/results"),
).fit()
"""
STEPS, FIRST = 300, 40
#: rung's ten samples are one call of the loss more than the script's.
SMOKE_CALLS = 1


def once(folder: Path, kind: str, address: str) -> tuple[float, float]:
    """Seconds from the command to the end of the first step, and of a step from the 40th on."""
    extra = SMOKE_CALLS if kind == "rung" else 0
    marks = [2 + extra, FIRST + extra, STEPS + extra]
    file = folder / "marks.txt"
    file.unlink(missing_ok=True)
    (folder / "marks.json").write_text(json.dumps({"at": marks, "file": str(file)}))
    if kind == "rung":
        job = {
            "task": "task:Bench", "run": tempfile.mkdtemp(dir=folder), "batch": 64, "steps": STEPS, "strategy": "ddp",
            "checkpoint": {"every": "none"}, "log_every_s": 1000, "schedule": "constant", "data": {"workers": 0},
            "cluster": {"address": address, "workers": 2},
        }  # fmt: skip
        (folder / "job.yaml").write_text(json.dumps(job))
        command = [sys.executable, "-c", "from rung.launcher.cli import main; main()", "launch", "job.yaml"]
    else:
        command = [sys.executable, "script.py", address, str(folder), str(STEPS)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    began = time.time()
    done = subprocess.run(command, cwd=folder, env=env, check=False, capture_output=True, text=True, timeout=200)
    if done.returncode != 0:
        raise RuntimeError(f"{kind} failed:\n{done.stdout}\n{done.stderr}")
    at = {int(n): float(t) for n, t in (line.split() for line in file.read_text().splitlines())}
    return at[marks[0]] - began, (at[marks[2]] - at[marks[1]]) / (STEPS - FIRST)


def main(arguments: list[str]) -> None:
    """Prints both ratios."""
    from ray.cluster_utils import Cluster

    repeats = int(arguments[0]) if arguments else 5
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
        cluster.wait_for_nodes()
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "task.py").write_text(TASK)
            (folder / "script.py").write_text(SCRIPT)
            starts: dict[str, list[float]] = {"train": [], "rung": []}
            steps: dict[str, list[float]] = {"train": [], "rung": []}
            for turn in range(repeats + 1):
                for kind in ("train", "rung") if turn % 2 else ("rung", "train"):
                    start, step = once(folder, kind, cluster.address)
                    print(f"  {kind:6s} first step after {start:.2f} s, then {step * 1e3:.1f} ms", flush=True)
                    if turn:  # the first of each warms caches and compiles byte code
                        starts[kind].append(start)
                        steps[kind].append(step)
    finally:
        cluster.shutdown()
    for what, taken, flip, wanted in (
        ("command to end of first step, rung / TorchTrainer", starts, False, "at most 1.5"),
        ("steps/s, rung / TorchTrainer", steps, True, "at least 0.98"),
    ):
        pairs = zip(taken["rung"], taken["train"], strict=True)
        ratios = sorted(b / a if flip else a / b for a, b in pairs)
        print(f"{what}: median {statistics.median(ratios):.3f} of {[round(r, 2) for r in ratios]}, wanted {wanted}")


if __name__ == "__main__":
    main(sys.argv[1:])
