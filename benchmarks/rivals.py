"""Two processes on this machine: seconds a step of `rung launch`, `accelerate launch` and Hugging Face's Trainer.

    python -m benchmarks.rivals [ddp-fused ddp-plain ...]

The same model, data, batch, optimizer, clipping and number of steps, launched as their users launch them, in turns, no
loader workers, a loss told every ten steps. `fused` or `plain` is the form of AdamW's update in torch, for all alike:
rung and Trainer take the fused one by default, a script with Accelerate what it says (torch's own default: plain).
The clock is in the model itself: it notes when each forward pass of rank 0 begins, so that whatever a framework does
from one step to the next counts. Prints the median step of each, and each rival's step divided by rung's.

Trainer needs `pip install transformers`; without it, it is left out. Under ZeRO Accelerate 1.15 does not run on CPUs:
it takes itself for one process, and DeepSpeed refuses its batch size.
"""

import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

WORLD, BATCH, STEPS, KEPT, ROUNDS = 2, 32, 80, 60, 5
DEADLINE_S = 100.0

MODEL = """
import atexit, json, os, time
import torch
from torch import nn

BATCH, STEPS, WIDTH, DEPTH = {batch}, {steps}, 768, 8

class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        layers = [m for _ in range(DEPTH) for m in (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU())]
        self.net = nn.Sequential(*layers, nn.Linear(WIDTH, 10))
        self.times = []
        if os.environ.get("RANK") == "0":
            atexit.register(self.write)

    def write(self):
        with open(os.environ["TIMES"], "w") as file:
            json.dump(self.times, file)

    def forward(self, x, labels=None):
        self.times.append(time.perf_counter())
        out = self.net(x)
        return out if labels is None else {{"loss": nn.functional.cross_entropy(out, labels), "logits": out}}

class Points(torch.utils.data.Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(4096, WIDTH, generator=generator)
        self.y = torch.randint(10, (4096,), generator=generator)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {{"x": self.x[i], "labels": self.y[i]}}

class Task:
    def model(self):
        return Mlp()

    def dataset(self, split):
        return Points() if split == "train" else None

    def loss(self, model, batch):
        return model(**batch)["loss"]
"""

JOB = """
task: shared:Task
run: {run}
batch: {batch}
steps: {steps}
optimizer: {{name: adamw, lr: 1e-4, weight_decay: 0.01, args: {{fused: {fused}}}}}
clip: 1.0
precision: fp32
strategy: {strategy}
devices: {{count: {world}, type: cpu}}
checkpoint: {{every: none}}
"""

ACCELERATE = """
import sys
import torch
from accelerate import Accelerator
from shared import BATCH, STEPS, Mlp, Points

torch.manual_seed(0)
torch.set_num_threads(1)
accelerator = Accelerator(cpu="deepspeed" not in sys.argv)  # which would keep it from DeepSpeed
model, data = Mlp(), torch.utils.data.DataLoader(Points(), batch_size=BATCH, shuffle=True, drop_last=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused="fused" in sys.argv or None)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, STEPS)
model, optimizer, data, schedule = accelerator.prepare(model, optimizer, data, schedule)
step = 0
while step < STEPS:
    for batch in data:
        with accelerator.accumulate(model):
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        step += 1
        if step % 10 == 0:
            accelerator.print(step, accelerator.reduce(loss.detach(), "mean").item(), flush=True)
        if step == STEPS:
            break
accelerator.end_training()
"""

TRAINER = """
import sys
import torch
from transformers import Trainer, TrainingArguments
from shared import BATCH, STEPS, Mlp, Points

torch.set_num_threads(1)
arguments = TrainingArguments(
    output_dir="trainer-out", per_device_train_batch_size=BATCH, max_steps=STEPS, learning_rate=1e-4, weight_decay=0.01,
    max_grad_norm=1.0, logging_steps=10, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True,
    optim="adamw_torch_fused" if "fused" in sys.argv else "adamw_torch", seed=0,
)
Trainer(model=Mlp(), args=arguments, train_dataset=Points()).train()
"""


def commands(case: str) -> dict[str, list[str]]:
    """How each is launched in one case, such as `ddp-fused`, in the folder that holds their files."""
    strategy, _, form = case.partition("-")
    python = [sys.executable, "-m"]
    launch = [*python, "accelerate.commands.launch", "--num_processes", str(WORLD), "--num_machines", "1"]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no", "--num_cpu_threads_per_process", "1"]
    launch += ["--main_process_port", "0"]
    script = ["with_accelerate.py", form]
    if strategy.startswith("zero"):
        launch += ["--use_deepspeed", "--zero_stage", strategy[-1], "--gradient_clipping", "1.0"]
        script.append("deepspeed")
    else:
        launch.append("--multi_gpu")  # several processes; with --cpu it starts one
    found = {
        "rung": [sys.executable, "-c", "from rung.launcher.cli import main; main()", "launch", f"{case}.yaml"],
        "accelerate launch": [*launch, *script],
    }
    if strategy == "ddp" and importlib.util.find_spec("transformers") is not None:
        run = [*python, "torch.distributed.run", "--standalone", f"--nproc-per-node={WORLD}"]
        found["Trainer"] = [*run, "with_trainer.py", form]
    return found


def step_s(command: list[str], folder: Path, run: int) -> float | str:
    """The median of the last steps in seconds, or the last words of one that failed."""
    times = folder / "times.json"
    times.unlink(missing_ok=True)
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "TIMES": str(times), "TOKENIZERS_PARALLELISM": "false"}
    extra = ["--set", f"run=runs/{run}"] if "launch" in command and command[-1].endswith(".yaml") else []
    try:
        done = subprocess.run(
            [*command, *extra], cwd=folder, env=environ, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"not done within {DEADLINE_S:g} s"
    if not times.exists():  # some abort when all is done and noted
        text = (done.stderr + done.stdout).strip()
        return next((line for line in text.splitlines() if re.search(r"\wError: .", line)), text[-300:])
    noted = json.loads(times.read_text())
    if len(noted) < STEPS:
        return f"only {len(noted)} steps"
    return statistics.median(b - a for a, b in zip(noted[-KEPT - 1 : -1], noted[-KEPT:], strict=True))


def write(folder: Path, cases: list[str]) -> None:
    """The files that the runs share."""
    (folder / "shared.py").write_text(MODEL.format(batch=BATCH, steps=STEPS))
    (folder / "with_accelerate.py").write_text(ACCELERATE)
    (folder / "with_trainer.py").write_text(TRAINER)
    for case in cases:
        strategy, _, form = case.partition("-")
        fused = "true" if form == "fused" else "false"
        text = JOB.format(
            strategy=strategy, run="runs/0", batch=BATCH * WORLD, steps=STEPS, world=WORLD, fused=fused
        )  # fmt: skip
        (folder / f"{case}.yaml").write_text(text)


def measure(case: str, folder: Path, run: int) -> None:
    """Prints one line for each of them."""
    taken: dict[str, dict[int, float]] = {}
    for turn in range(ROUNDS):
        for who, command in commands(case).items():
            result = step_s(command, folder, run + turn)
            if isinstance(result, str):
                print(f"{case} {who} failed: {result}", flush=True)
            else:
                taken.setdefault(who, {})[turn] = result
    ours = taken.get("rung", {})
    for who, seconds in taken.items():
        text = f"{case} {who:18s} {statistics.median(seconds.values()) * 1e3:7.1f} ms a step"
        ratios = sorted(seconds[turn] / ours[turn] for turn in seconds.keys() & ours.keys())
        if who != "rung" and ratios:
            middle, low, high = statistics.median(ratios), ratios[0], ratios[-1]
            text += f"   rung is {middle:.3f} of [{low:.3f}, {high:.3f}] times as fast (at least 1.0)"
        print(text, flush=True)


def main(cases: list[str]) -> None:
    """Measures one case after the other."""
    if importlib.util.find_spec("transformers") is None:
        print("Trainer is left out: pip install transformers")
    with tempfile.TemporaryDirectory(prefix="rung-rivals-") as name:
        write(Path(name), cases)
        for number, case in enumerate(cases):
            measure(case, Path(name), number * ROUNDS)


if __name__ == "__main__":
    main(sys.argv[1:] or ["ddp-fused", "ddp-plain"])
