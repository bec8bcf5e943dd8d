"""What checking data costs, beside a bare pass of torch's DataLoader with as many processes over the same samples.

Run: python benchmarks/check.py
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from rung.launcher.data.checks import check_task
from rung.launcher.data.clean import to_drop
from rung.launcher.data.judge import judge
from rung.launcher.data.scan import processes
from rung.launcher.task import TaskAdapter
from rung.strategies.findings import Level

WIDTH, CLASSES = 16, 10
GOAL = 0.8


class Rows:
    """A task over rows of numbers; with `labelled`, check also asks it for every label."""

    def __init__(self, samples: int, labelled: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(samples, WIDTH, generator=generator)
        self.train = TensorDataset(x, torch.arange(samples) % CLASSES)
        if labelled:
            self.label = lambda sample: int(sample[1])

    def model(self) -> torch.nn.Module:
        return torch.nn.Linear(WIDTH, CLASSES)

    def dataset(self, split: str) -> Dataset[tuple[torch.Tensor, ...]] | None:
        return self.train if split == "train" else None

    def loss(self, model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


def seconds(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """The least wall time of each call, all taken in turn: other programs only ever add to it."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            taken[name].append(time.perf_counter() - began)
    return {name: min(values) for name, values in taken.items()}


def main() -> None:
    """Prints one line for each measurement; the ratio is samples per second beside the bare pass."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(1)
    count, workers = args.samples, processes()
    plain, labelled = Rows(count, False), Rows(count, True)

    def bare(batch: int) -> None:
        for _ in DataLoader(plain.train, batch_size=batch, num_workers=workers):
            pass

    calls: dict[str, Callable[[], object]] = {f"bare DataLoader, {b}": lambda b=b: bare(b) for b in (256, 1024)}
    for name, task in (("check", TaskAdapter(plain)), ("check with label()", TaskAdapter(labelled))):
        calls[name] = lambda task=task: check_task(task, seed=0, full=True)
    calls["data.clean"] = lambda: to_drop(plain.train, ["drop_duplicates", "drop_missing"])
    print(f"{count:,} samples of {WIDTH} numbers and a label, {workers} processes")
    taken = seconds(calls, args.repeats)
    bare_s = min(s for name, s in taken.items() if name.startswith("bare"))
    for name, taken_s in taken.items():
        print(f"{name:<22} {taken_s:7.2f} s   {bare_s / taken_s:.2f} times the bare pass's speed, goal {GOAL}")
    began = time.perf_counter()
    splits = check_task(TaskAdapter(labelled), seed=0, full=True)
    pass_s = time.perf_counter() - began
    found = judge(splits)
    print(f"findings               {time.perf_counter() - began - pass_s:7.2f} s")
    assert not [f for f in found if f.level is not Level.OK]


if __name__ == "__main__":
    main()
