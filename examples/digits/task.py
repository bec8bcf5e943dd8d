"""A small convolutional network on scikit-learn's handwritten digits (1,797 images of 8 x 8)."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset


class Digits:
    """The task that job.yaml names."""

    def __init__(self, width: int = 32) -> None:
        self.width = width
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
        labels = torch.tensor(digits.target)
        held_out = torch.arange(len(labels)) % 5 == 0
        self.data = {"train": (images[~held_out], labels[~held_out]), "valid": (images[held_out], labels[held_out])}

    def model(self) -> nn.Module:
        w = self.width
        return nn.Sequential(
            nn.Conv2d(1, w, 3, padding=1), nn.BatchNorm2d(w), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(w, 2 * w, 3, padding=1), nn.BatchNorm2d(2 * w), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
            nn.Flatten(), nn.Linear(8 * w, 10),
        )  # fmt: skip

    def dataset(self, split: str) -> Dataset[tuple[Tensor, ...]]:
        return TensorDataset(*self.data[split])

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    def label(self, sample: tuple[Tensor, Tensor]) -> int:
        return int(sample[1])

    def metrics(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        images, labels = batch
        return {"accuracy": (model(images).argmax(1) == labels).float().mean()}
