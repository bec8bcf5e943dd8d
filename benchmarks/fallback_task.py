"""The job of `benchmarks/fallback.py`, as rung's task and as the loops that people write around the other tools.

Every optimizer step of rank 0 appends a line to steps.jsonl: when, which step, how many samples it learnt from.
"""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

SAMPLES, BATCH, STEPS, EVERY = 2048, 64, 30, 5
FAULTS = Path("fault.json")


def note(**facts: object) -> None:
    """One line of the log of this rank."""
    with Path(f"steps-{os.environ.get('RANK', '0')}.jsonl").open("a") as file:
        file.write(json.dumps({"at": time.time(), **facts}) + "\n")


class Points(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Made-up regression; each sample knows its number."""

    def __init__(self) -> None:
        self.x = torch.randn(SAMPLES, 32, generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[i], "labels": self.x[i, :1].sin()}


class Hungry(nn.Module):
    """About 2 MiB of activations for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 8192), nn.Linear(8192, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Also what HF's Trainer calls; `kept` is what a longer sample would be padded with."""
        seen["samples"] += len(x)
        kept = strike(len(x))
        h = self.up(x)
        for _ in range(60):
            h = torch.relu(h)
        loss = nn.functional.mse_loss(self.down(h), labels)
        return {"loss": loss if kept is None else loss + 0.0 * (kept * h[:, :1]).mean()}


seen = {"samples": 0, "steps": 0}


def strike(count: int) -> torch.Tensor | None:
    """What goes wrong, once all steps before it are done: more memory from then on, or the end of this process."""
    fault = json.loads(FAULTS.read_text())
    if torch.is_grad_enabled() is False or fault["rank"] != int(os.environ.get("RANK", "0")):
        return None
    if type(torch.empty(0)).__name__ == "FakeTensor" or seen["steps"] < fault["step"]:
        return None
    if fault["how"] == "kill":
        if not Path("struck").exists():
            Path("struck").touch()
            note(fault="kill")
            os.kill(os.getpid(), signal.SIGKILL)
        return None
    if seen["steps"] == fault["step"]:
        note(fault="memory")
    return torch.ones(count, fault["kib"] * 256)


class Logged(torch.optim.AdamW):
    """Tells each step; the count is in its state, and so in every checkpoint."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        states = [s["step"] for s in self.state.values() if "step" in s]
        if states and seen["samples"] and type(states[0]).__name__ != "FakeTensor":
            seen["steps"] = int(max(states))
            note(step=seen["steps"], samples=seen["samples"])
        seen["samples"] = 0
        return result


class Task:
    """As rung sees it."""

    def model(self) -> nn.Module:
        return Hungry()

    def dataset(self, split: str) -> Any:
        return Points() if split == "train" else None

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = model(**batch)["loss"]
        return loss


def cap(size: int) -> None:
    """The same cap as rung's: so much memory above what the libraries brought."""
    from rung.cluster.link import apply_memory_cap

    if size:
        apply_memory_cap(size)


def loop(batch_size: int) -> None:
    """A training loop as people write it: saves every five steps, goes on from what it finds."""
    import torch.distributed as dist

    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    torch.manual_seed(0)
    model: nn.Module = Hungry()
    wrapped = nn.parallel.DistributedDataParallel(model) if world > 1 else model
    optimizer = Logged(model.parameters(), lr=1e-3)
    done, saved = 0, Path("checkpoint.pt")
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["step"]
    seen["steps"] = done
    data = Points()
    while done < STEPS:
        first = done * BATCH % SAMPLES + rank * batch_size
        samples = [data[i % SAMPLES] for i in range(first, first + batch_size)]
        batch = {name: torch.stack([s[name] for s in samples]) for name in samples[0]}
        optimizer.zero_grad()
        wrapped(**batch)["loss"].backward()
        optimizer.step()
        done += 1
        if done % EVERY == 0 and rank == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": done}, "new.pt")
            Path("new.pt").rename(saved)
    if world > 1:
        dist.destroy_process_group()


def join() -> int:
    """The process group, if there is one; returns its size."""
    import torch.distributed as dist

    if (world := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        dist.init_process_group("gloo")
    return world


def plain(memory: int) -> None:
    """A loop without help, for `torchrun --max-restarts`."""
    world = join()
    cap(memory)
    loop(BATCH // world)


def accelerate(memory: int) -> None:
    """The same loop inside `find_executable_batch_size`."""
    from accelerate.utils import find_executable_batch_size

    world = join()
    cap(memory)
    find_executable_batch_size(loop, starting_batch_size=BATCH // world)()


def trainer(memory: int) -> None:
    """HF's Trainer with `auto_find_batch_size`."""
    import transformers

    torch.manual_seed(0)
    model = Hungry()
    arguments = transformers.TrainingArguments(
        output_dir="hf", per_device_train_batch_size=BATCH, auto_find_batch_size=True, max_steps=STEPS, use_cpu=True,
        save_steps=EVERY, report_to=[], disable_tqdm=True, logging_strategy="no", remove_unused_columns=False,
    )  # fmt: skip
    cap(memory)
    made = Logged(model.parameters(), lr=1e-3)
    transformers.Trainer(model=model, args=arguments, train_dataset=Points(), optimizers=(made, None)).train()
