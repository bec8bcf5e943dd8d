"""Learns a curve in eight dimensions. It needs no data from outside, so that every node has all there is."""

import torch
from torch import nn
from torch.utils.data import Dataset


class Points(Dataset):
    """Points and the value of the curve there."""

    def __init__(self, count: int, seed: int) -> None:
        self.x = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
        self.y = (self.x[:, :1] * 2).sin() + 0.5 * self.x[:, 1:2] * self.x[:, 2:3]

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[i], self.y[i]


class Curve:
    """Regression with a small network."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 1))

    def dataset(self, split: str) -> Dataset:
        return Points(16384, seed=1) if split == "train" else Points(1024, seed=2)

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(model(x), y)
