"""Digits with classes of very unequal size: 0 to 4 in full, 5 to 9 one in twenty; validated on all classes alike.

rung launch examples/digits_skewed/job.yaml                                   # data.imbalance: auto
rung launch examples/digits_skewed/job.yaml --set data.imbalance=none --set run=runs/digits-none
python examples/digits_skewed/task.py                                         # compares none, resample and weights
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

CLASSES = 10


class SkewedDigits:
    """The task that job.yaml names. `keep` is how many of every hundred samples of the classes 5 to 9 are left."""

    def __init__(self, keep: int = 5, width: int = 16) -> None:
        self.width = width
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
        labels = torch.tensor(digits.target)
        held_out = torch.arange(len(labels)) % 5 == 0
        rare = (labels >= 5) & ~held_out
        kept = torch.zeros(len(labels), dtype=torch.bool)
        for label in range(5, CLASSES):
            of = (rare & (labels == label)).nonzero().flatten()
            kept[of[: max(1, len(of) * keep // 100)]] = True
        train = ~held_out & (~rare | kept)
        self.data = {"train": (images[train], labels[train]), "valid": (images[held_out], labels[held_out])}
        # Each class counts alike in validation, whatever its size there.
        self.balance = CLASSES * torch.bincount(labels[held_out], minlength=CLASSES) / held_out.sum()

    def model(self) -> nn.Module:
        w = self.width
        return nn.Sequential(
            nn.Conv2d(1, w, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(w, 2 * w, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
            nn.Flatten(), nn.Linear(8 * w, CLASSES),
        )  # fmt: skip

    def dataset(self, split: str) -> Dataset[tuple[Tensor, ...]]:
        return TensorDataset(*self.data[split])

    def label(self, sample: tuple[Tensor, Tensor]) -> int:
        return int(sample[1])

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor], class_weights: Tensor | None = None) -> Tensor:
        """With class weights, each sample's loss is scaled and the mean still taken over samples: cross_entropy's own
        `weight` would divide by the weights of each micro-batch, and how a batch is cut would then matter."""
        images, labels = batch
        losses = F.cross_entropy(model(images), labels, reduction="none")
        return losses.mean() if class_weights is None else (losses * class_weights[labels]).mean()

    def metrics(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        images, labels = batch
        right = (model(images).argmax(1) == labels).float()
        return {
            "accuracy": right.mean(),
            "balanced_accuracy": (right / self.balance.to(labels.device)[labels]).mean(),
            "rare_accuracy": (right * (labels >= 5)).mean() / (self.balance[5:].sum() / CLASSES),
        }


def main() -> None:
    """Trains three times and prints what each way gives, and what an epoch of it costs."""
    job = Path(__file__).with_name("job.yaml")
    print("data.imbalance  balanced accuracy  rare classes  accuracy  s per epoch")
    for way in ("none", "resample", "weights"):
        with tempfile.TemporaryDirectory() as run:
            command = [sys.executable, "-c", "from rung.launcher.cli import main; main()", "launch", str(job)]
            subprocess.run([*command, "--set", f"data.imbalance={way}", "--set", f"run={run}"], check=True,
                           stdout=subprocess.DEVNULL)  # fmt: skip
            rows = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
        last = next(row for row in reversed(rows) if row["kind"] == "validation")
        steps = [row for row in rows if row["kind"] == "step"]
        epoch_s = sum(row["seconds"] for row in steps) / steps[-1]["epoch"]
        print(
            f"{way:<15} {last['balanced_accuracy']:>17.3f}  {last['rare_accuracy']:>12.3f}  {last['accuracy']:>8.3f}  "
            f"{epoch_s:>11.3f}"
        )


if __name__ == "__main__":
    main()
