"""The model and data that `single.py` and `ray.py` train; each adds how it marks a step."""

MLP = """
import os, time
import torch
from torch import nn
from torch.utils.data import TensorDataset


class Mlp:
    def __init__(self, width=768, depth=4, samples=8192):
        self.width, self.depth, self.samples, self.calls = width, depth, samples, 0

    def model(self):
        layers = [nn.Linear(64, self.width), nn.ReLU()]
        for _ in range(self.depth):
            layers += [nn.Linear(self.width, self.width), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(self.width, 10))

    def dataset(self, split):
        if split != "train":
            return None
        g = torch.Generator().manual_seed(0)
        return TensorDataset(torch.randn(self.samples, 64, generator=g),
                             torch.randint(10, (self.samples,), generator=g))
"""
