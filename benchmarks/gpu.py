"""All that only a GPU can show, on a machine with at least one CUDA GPU, in under six minutes.

    python -m benchmarks.gpu [--only PART ...] [--json FILE]

Each part runs in a process of its own with its own deadline. Prints a table, and writes what was found as JSON. A part
that cannot run here says why and is skipped. Exit status: 0 if no part failed, 1 if one did, 3 without a CUDA GPU.

    hardware    what NVML says (name, UUID, free memory) against what CUDA says
    cap         devices.memory is enforced: a model that needs more than predicted runs out of memory for real, and the
                run goes on in the same process with a smaller micro-batch
    precision   bf16, and fp16 with its loss scale, against a plain loop with autocast and GradScaler
    memory      predicted against measured peak of a few models
    step        a step under `single` against a plain loop
    offload     ZeRO-2 with the optimizer in host memory, against `single`: the same loss, less device memory
    several     ddp, ZeRO-2 and ZeRO-3 on two devices over NCCL, against `single`: the same losses
    save        how long a save keeps training waiting, through pinned memory
"""

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rung.cluster.spawner import allocator

Found = dict[str, Any]

TASK = """
import time
import torch
from torch import nn
from torch.utils.data import TensorDataset

class Hungry(nn.Module):
    '''Keeps 32 KiB a layer and sample for the backward pass; the prediction sees one layer in sixteen.'''

    def __init__(self, layers):
        super().__init__()
        self.up, self.down, self.layers = nn.Linear(64, 8192), nn.Linear(8192, 10), layers

    def forward(self, x):
        h = self.up(x)
        for _ in range(self.layers // 16 if type(x).__name__ == "FakeTensor" else self.layers):
            h = torch.sin(h)
        return self.down(h)

class Task:
    def __init__(self, width=256, depth=4, hungry=0, pause=0.0):
        self.width, self.depth, self.hungry, self.pause = width, depth, hungry, pause

    def model(self):
        if self.hungry:
            return Hungry(self.hungry)
        layers = [nn.Linear(64, self.width), nn.ReLU()]
        for _ in range(self.depth):
            layers += [nn.Linear(self.width, self.width), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(self.width, 10))

    def dataset(self, split):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(1024, 64, generator=generator)
        return TensorDataset(x, x[:, :10].argmax(1)) if split == "train" else None

    def loss(self, model, batch):
        if type(batch[0]).__name__ != "FakeTensor":
            time.sleep(self.pause)
        return nn.functional.cross_entropy(model(batch[0]), batch[1])
"""


class Skipped(Exception):
    """This part cannot run here; the message says why."""


class Run:
    """One `rung launch`: its events and its step records."""

    def __init__(self, folder: Path, device: str, **job: Any) -> None:
        (folder / "gpu_task.py").write_text(TASK)
        run = Path(tempfile.mkdtemp(dir=folder))
        whole = {"task": "gpu_task:Task", "run": str(run), "batch": 64, "steps": 6, "precision": "fp32",
                 "checkpoint": {"every": "none"}, **job}  # fmt: skip
        whole["devices"] = {"count": 1, "type": device, **job.get("devices", {})}
        (folder / "job.yaml").write_text(json.dumps(whole))
        command = [sys.executable, "-c", "from rung.launcher.cli import main; main()", "launch", "job.yaml"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError((done.stderr + done.stdout)[-2000:])
        self.events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        self.steps = [row for row in rows if row["kind"] == "step"]

    def of(self, kind: str) -> list[Found]:
        """The events of one kind."""
        return [event for event in self.events if event["event"] == kind]

    @property
    def peak_bytes(self) -> int:
        """The most memory of the device."""
        return max(event.get("peak_bytes", 0) for event in self.events)


def hardware(device: str, _: Path) -> Found:
    """The probe's view of the first device."""
    from rung.cluster.hardware import probe

    devices = probe().of(device)  # type: ignore[arg-type]
    if not devices:
        raise RuntimeError("the probe finds no such device")
    first = devices[0]
    found = {"name": first.name, "uuid": first.uuid, "free_gib": first.free_bytes / 2**30, "numa": first.numa_node}
    if device == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info(0)
        said = str(getattr(torch.cuda.get_device_properties(0), "uuid", ""))
        found |= {"cuda_free_gib": free / 2**30, "driver": probe().driver}
        check(said.removeprefix("GPU-") in first.uuid, f"CUDA's first device has the UUID {said}")
        # The driver keeps some of it for itself, and what has just been asked of CUDA took a context.
        check(abs(total - first.total_bytes) < 2 * 2**30, f"CUDA says {total} bytes in all, NVML {first.total_bytes}")
        check(abs(free - first.free_bytes) < 3 * 2**30, "NVML and CUDA differ by more than 3 GiB of free memory")
    return found


def cap(device: str, folder: Path) -> Found:
    """512 MiB of activations of which the prediction sees 32, with 300 MiB for them and the weights."""
    limit = (300 if device == "cpu" else 300 + 564) * 2**20  # with a GPU's context and workspaces
    run = Run(folder, device, task_args={"hungry": 256}, devices={"memory": limit})
    falls = run.of("fallback")
    check(bool(falls), "no fallback: the cap was not enforced")
    check(len(run.of("attempt")) == 1, "the process was started again")
    check(len(run.steps) == 6, f"{len(run.steps)} of 6 steps")
    check(run.peak_bytes <= limit, f"{run.peak_bytes} bytes were taken, {limit} allowed")
    return {"fallbacks": len(falls), "first": falls[0]["reason"], "peak_mib": run.peak_bytes / 2**20}


def precision(device: str, _: Path) -> Found:
    """Thirty steps of one batch under each format: the loss falls as in a plain loop."""
    import torch
    from torch import nn

    from rung.strategies.plan import Plan
    from rung.strategies.single import SingleStrategy

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.LayerNorm(512), nn.Linear(512, 10))

    def adamw(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3)

    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(256, 64, generator=generator).to(device), torch.randint(10, (256,), generator=generator)
    y = y.to(device)
    found: Found = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        plan = Plan(strategy="single", device=device, devices=1, global_batch=256, micro_batch=256, precision=name)  # type: ignore[arg-type]
        strategy = SingleStrategy(plan)
        strategy.build(make, adamw)
        plain, scaler = make().to(device), torch.amp.GradScaler(device, enabled=name == "fp16")
        optimizer = adamw(plain)
        ours, theirs = [], []
        for _ in range(30):
            with strategy.micro(last=True):
                loss = nn.functional.cross_entropy(strategy.model(x), y)
                strategy.backward(loss)
            strategy.step(None)
            ours.append(float(loss))
            with torch.autocast(device, dtype=dtype):
                loss = nn.functional.cross_entropy(plain(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            theirs.append(float(loss))
        check(ours[-1] < 0.5 * ours[0], f"{name}: the loss went from {ours[0]} to {ours[-1]}")
        off = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
        check(off < 0.05, f"{name}: up to {off} from a plain loop's losses")
        found |= {f"{name}_loss": ours[-1], f"{name}_off": off}
        if name == "fp16":
            scale = strategy._amp.loss_scale
            found |= {"scale": scale.scale if scale else 0.0, "torch_scale": scaler.get_scale()}
        strategy.close()
    return found


CASES = (("decoder 4M", 32), ("decoder, checkpointed", 16), ("CNN, BatchNorm", 32))


def memory(device: str, folder: Path) -> Found:
    """Predicted and measured peak of the device; the prediction with its headroom must hold."""
    from benchmarks.memory_measure import measure, profile_case
    from rung.strategies.memory import predict
    from rung.strategies.plan import Plan

    found: Found = {}
    for name, micro in CASES:
        plan = Plan(strategy="single", device=device, devices=1, global_batch=micro, micro_batch=micro,
                    activation_checkpointing="checkpointed" in name)  # type: ignore[arg-type] # fmt: skip
        if device == "cpu":  # a cap, which is never reached, has what was freed given back at once
            plan = plan.with_(memory_cap_bytes=2**36)
        account = predict(profile_case(name), plan)
        peak = _cuda_peak(name, plan) if device == "cuda" else measure(name, plan).peak_bytes
        found[name] = f"{account.device_peak_bytes / 2**20:.0f} MiB predicted, {peak / 2**20:.0f} measured"
        found[f"{name} ratio"] = account.device_peak_bytes / peak
        check(peak <= account.device_bytes_with_headroom, f"{name}: {found[name]}")
    return found


def _cuda_peak(name: str, plan: Any) -> int:
    import torch

    from benchmarks.memory_held_out import find
    from rung.strategies.measure import CONTEXT_BYTES
    from rung.strategies.single import SingleStrategy

    case = find(name)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    strategy = SingleStrategy(plan)
    strategy.build(case.model, case.make_optimizer)
    for _ in range(3):
        batch = tuple(tensor.to("cuda") for tensor in case.sample(plan.micro_batch))
        with strategy.micro(last=True):
            strategy.backward(case.loss(strategy.model, batch))
        strategy.step(1.0)
    peak = torch.cuda.max_memory_reserved() - before + CONTEXT_BYTES
    strategy.close()
    return peak


def step(device: str, _: Path) -> Found:
    """Steps per second of rung's single-device step and of a plain loop, in turns."""
    import torch
    from torch import nn

    from benchmarks.strategies import BATCH, batch, make_model, make_optimizer, rung_step
    from rung.strategies.plan import Plan
    from rung.strategies.single import SingleStrategy

    def settle() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    plan = Plan(strategy="single", device=device, devices=1, global_batch=BATCH, micro_batch=BATCH)  # type: ignore[arg-type]
    strategy = SingleStrategy(plan)
    strategy.build(make_model, make_optimizer)
    x, y = (tensor.to(device) for tensor in batch(0))
    model = make_model().to(device)
    optimizer = make_optimizer(model)

    def plain() -> None:
        nn.functional.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    pair = (rung_step(strategy), plain)
    count = 50 if device == "cuda" else 4
    ratios, seconds = [], []
    for turn in range(11):
        took = [math.nan, math.nan]
        for which in ((0, 1), (1, 0))[turn % 2]:
            pair[which]()
            settle()
            began = time.perf_counter()
            for _ in range(count):
                pair[which]()
            settle()
            took[which] = (time.perf_counter() - began) / count
        ratios.append(took[1] / took[0])
        seconds.append(took[0])
    strategy.close()
    return {"step_ms": statistics.median(seconds) * 1e3, "ratio_to_plain_loop": statistics.median(ratios)}


def offload(device: str, folder: Path) -> Found:
    """ZeRO-2 with the optimizer on the host. On a CPU, where that is no offload, ZeRO-2 alone."""
    width = {"width": 4096 if device == "cuda" else 64}
    alone = Run(folder, device, task_args=width, strategy="single")
    where = {"offload_optimizer": "host"} if device == "cuda" else {}
    try:
        other = Run(folder, device, task_args=width, strategy={"name": "zero2", **where})
    except RuntimeError as error:
        if "CUDA_HOME" in str(error):  # DeepSpeed wants the toolkit though nothing is to be compiled
            raise Skipped(f"DeepSpeed finds no CUDA toolkit (nvcc): {str(error)[-200:]}") from error
        raise
    losses = [[row["loss"] for row in run.steps] for run in (alone, other)]
    off = max(abs(a - b) for a, b in zip(*losses, strict=True))
    check(off < 1e-3, f"the losses differ by up to {off}")
    found = {"off": off, "single_mib": alone.peak_bytes / 2**20, "zero2_mib": other.peak_bytes / 2**20}
    if device == "cuda":
        check(other.peak_bytes < alone.peak_bytes, "offload saved no device memory")
    return found


def several(device: str, folder: Path) -> Found:
    """Two devices of one machine."""
    if device == "cuda":
        import torch

        if torch.cuda.device_count() < 2:
            raise Skipped("one GPU: NCCL needs two")
    alone = Run(folder, device, strategy="single")
    found: Found = {}
    for name in ("ddp", "zero2", "zero3"):
        both = Run(folder, device, strategy=name, devices={"count": 2})
        pairs = zip(alone.steps, both.steps, strict=True)
        off = max(abs(a[what] - b[what]) for a, b in pairs for what in ("loss", "norm"))
        check(off < 1e-3, f"{name}: losses or norms differ by up to {off}")
        found[f"{name}_off"] = off
    return found


def save(device: str, folder: Path) -> Found:
    """A save at every third step, and time in between for it to reach the disk."""
    width, pause = (4096, 0.5) if device == "cuda" else (256, 0.0)
    sizes = {"width": width, "depth": 4, "pause": pause}
    run = Run(folder, device, task_args=sizes, steps=12, checkpoint={"every": "3 steps", "keep": 1})
    blocked = [event["blocked_s"] for event in run.of("checkpoint")]
    check(len(blocked) == 4, f"{len(blocked)} of 4 checkpoints")
    state = 12 * (4 * width * width + 64 * width)
    # The first one makes the buffer.
    usual = statistics.median(blocked[1:])
    rate = state / 2**30 / max(usual, 1e-9)
    return {"state_gib": state / 2**30, "first_s": blocked[0], "blocked_s": usual, "gib_per_s": rate}


#: Each with its deadline in seconds; they sum up to less than six minutes.
PARTS: dict[str, tuple[Callable[[str, Path], Found], float]] = {
    "hardware": (hardware, 20.0),
    "cap": (cap, 45.0),
    "precision": (precision, 30.0),
    "memory": (memory, 60.0),
    "step": (step, 30.0),
    "offload": (offload, 80.0),
    "several": (several, 55.0),
    "save": (save, 35.0),
}


def check(holds: bool, otherwise: str) -> None:
    """Fails the part with these words unless it `holds`."""
    if not holds:
        raise RuntimeError(otherwise)


def run_part(name: str, device: str) -> Found:
    """One part in this process: its outcome, and what it found."""
    try:
        with tempfile.TemporaryDirectory(prefix="rung-gpu-") as folder:
            return {"outcome": "ok", **PARTS[name][0](device, Path(folder))}
    except Skipped as reason:
        return {"outcome": f"skipped: {reason}"}
    except Exception as error:  # what fails is a result
        return {"outcome": f"failed: {type(error).__name__}: {error}"}


def apart(name: str, device: str) -> Found:
    """One part in a process of its own, within its deadline."""
    deadline_s = PARTS[name][1]
    command = [sys.executable, "-m", "benchmarks.gpu", "--part", name, "--device", device]
    began = time.monotonic()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**allocator(os.environ), **os.environ},
    )  # fmt: skip
    try:
        out, errors = process.communicate(timeout=deadline_s)
        found = json.loads(out.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with the launcher that it may have started
        process.communicate()
        found = {"outcome": f"failed: not done within {deadline_s:g} s"}
    except (IndexError, json.JSONDecodeError):
        found = {"outcome": f"failed: exit status {process.returncode}: {errors.strip()[-500:]}"}
    return {**found, "seconds": time.monotonic() - began}


def has_cuda() -> bool:
    """Whether PyTorch sees a GPU; asked in another process, so that this one holds no memory of it."""
    command = [sys.executable, "-c", "import sys, torch; sys.exit(not torch.cuda.is_available())"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def row(name: str, found: Found) -> str:
    """A line of the table."""
    shown = [f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in found.items()
             if key not in ("outcome", "seconds")]  # fmt: skip
    return f"{name:10s} {found['seconds']:6.1f} s  {found['outcome']}   {', '.join(shown)}"


def main(arguments: list[str]) -> int:
    """Runs the parts one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(PARTS), choices=list(PARTS), metavar="PART")
    parser.add_argument("--json", type=Path, default=Path("build/gpu.json"))
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)  # cpu: tries out this script
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.part:
        print(json.dumps(run_part(options.part, options.device)))
        return 0
    if options.device == "cuda" and not has_cuda():
        print("PyTorch sees no CUDA GPU here: nothing was run")
        return 3
    found = {}
    for name in options.only:
        found[name] = apart(name, options.device)
        print(row(name, found[name]), flush=True)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(found, indent=2) + "\n")
    print(f"written to {options.json}")
    return int(any(value["outcome"].startswith("failed") for value in found.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
