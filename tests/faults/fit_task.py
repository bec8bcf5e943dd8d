"""The task of the random fault runs: models of several shapes, memory that no prediction sees, failures on demand, and
a weight for each sample that counts how often it was learnt from. Copied into a folder of its own as task.py."""

import json
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

FEATURES = 32


class Points(Dataset):
    def __init__(self, count):
        generator = torch.Generator().manual_seed(11)
        self.x = torch.randn(count, FEATURES, generator=generator)
        self.y = self.x[:, :1].sin()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return i, self.x[i], self.y[i]


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.one, self.two = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return x + torch.tanh(self.two(torch.tanh(self.one(x))))


class Attention(nn.Module):
    """Each sample is a sequence of `length` positions."""

    def __init__(self, width, length):
        super().__init__()
        self.width, self.length = width, length
        self.inner = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.inner(x)


class Sequences(nn.Module):
    def __init__(self, width, depth, length):
        super().__init__()
        self.width, self.length = width, length
        self.into = nn.Linear(FEATURES, width * length)
        self.blocks = nn.ModuleList(Attention(width, length) for _ in range(depth))

    def forward(self, x):
        h = self.into(x).view(len(x), self.length, self.width)
        for block in self.blocks:
            h = block(h)
        return h.mean(1)


class Pictures(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.into = nn.Linear(FEATURES, 3 * 24 * 24)
        layers = [nn.Conv2d(3, width, 3, padding=1)]
        for _ in range(depth):
            layers += [nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(self.into(x).view(len(x), 3, 24, 24)).mean((2, 3))


class Hungry(nn.Module):
    """Few weights and `depth` x 32 KiB of activations for each sample."""

    def __init__(self, width, depth):
        super().__init__()
        self.up, self.down, self.depth = nn.Linear(FEATURES, 8192), nn.Linear(8192, width), depth

    def forward(self, x):
        h = self.up(x)
        for _ in range(self.depth):
            h = torch.sin(h)
        return self.down(h)


class Learnt(nn.Module):
    """One weight for each sample. Its gradient is 1/batch for each time that the sample is learnt from."""

    def __init__(self, samples):
        super().__init__()
        self.seen = nn.Parameter(torch.zeros(samples))

    def forward(self, index):
        return self.seen[index].mean()


class Model(nn.Module):
    def __init__(self, kind, width, depth, samples):
        super().__init__()
        if kind == "blocks":
            body = nn.Sequential(nn.Linear(FEATURES, width), *(Residual(width) for _ in range(depth)))
        elif kind == "sequences":
            body = Sequences(width, depth, 16)
        elif kind == "pictures":
            body = Pictures(width, depth)
        else:
            body = Hungry(width, depth)
        self.body, self.head, self.learnt = body, nn.Linear(width, 1), Learnt(samples)

    def forward(self, index, x):
        return self.head(self.body(x)), self.learnt(index)


class Fit:
    """`hidden_kib`: memory for each sample that no trace sees; `late`: [sample, KiB], a long sample that all others of
    its micro-batch are padded to. `faults`: [[rank, calls, where, how], ...], each once, in this order."""

    def __init__(self, kind="blocks", width=64, depth=2, samples=96, hidden_kib=0, late=(), faults=(), sleep_s=0.0):
        self.kind, self.width, self.depth, self.samples = kind, width, depth, samples
        self.hidden_kib, self.late, self.sleep_s = hidden_kib, list(late), sleep_s
        Faults.planned = [Fault(number, *fault) for number, fault in enumerate(faults)]

    def model(self):
        return Model(self.kind, self.width, self.depth, self.samples)

    def dataset(self, split):
        return Points(self.samples) if split == "train" else Points(12)

    def loss(self, model, batch):
        index, x, y = batch
        real = type(x).__name__ != "FakeTensor"
        if real:
            Faults.calls += model.training
            Faults.strike("forward" if model.training else "validation")
            time.sleep(self.sleep_s)
        output, learnt = model(index, x)
        loss = nn.functional.mse_loss(output, y) + learnt
        kib = self.hidden_kib
        if real and self.late and bool((index == self.late[0]).any()):
            kib += self.late[1]
        if real and kib:
            padding = torch.ones(len(x), kib * 256)
            loss = loss + 0.0 * (padding * output).mean()  # kept for the backward pass
        return Trap.apply(loss) if real and model.training else loss


class Trap(torch.autograd.Function):
    """Where the backward pass begins."""

    @staticmethod
    def forward(ctx, loss):
        return loss.clone()

    @staticmethod
    def backward(ctx, gradient):
        Faults.strike("backward")
        return gradient


class Counted(torch.optim.AdamW):
    """Fails before or after its update, where that is planned."""

    def step(self, closure=None):
        Faults.strike("optimizer")
        super().step(closure)
        Faults.strike("updated")


class Faults:
    """What is planned for this run, and how many micro-batches this process has trained on."""

    planned = ()
    calls = 0

    @staticmethod
    def strike(where):
        for fault in Faults.planned:
            if not fault.mark.exists():
                if fault.where == where and fault.due():
                    fault.strike()
                return


class Fault:
    """Happens once: a file in the working directory says that it has."""

    def __init__(self, number, rank, calls, where, how):
        self.rank, self.calls, self.where, self.how = rank, calls, where, how
        self.mark = Path(f"struck-{number}")

    def due(self):
        return os.environ.get("RANK") == str(self.rank) and Faults.calls >= self.calls

    def strike(self):
        self.mark.write_text(json.dumps({"at": time.time(), "calls": Faults.calls}))
        match self.how:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "term":
                os.kill(os.getpid(), signal.SIGTERM)
            case "exit":
                os._exit(3)
            case "hang":
                time.sleep(3600)
            case "hoard":  # until the cap of the device is reached
                hoard = [torch.ones(1 << 24) for _ in range(10_000)]
                raise AssertionError(f"{len(hoard)} x 64 MiB were there")
            case "huge":
                torch.empty(1 << 50)


def before_each_save():
    """A worker's save is no code of the task's: its entry is wrapped, so that it can fail there."""
    from rung.launcher.checkpoint.save import Saver

    whole, write = Saver.snapshot, Saver._write

    def snapshot(self, *args, **kwargs):
        Faults.strike("save")
        return whole(self, *args, **kwargs)

    def during(self, *args, **kwargs):
        Faults.strike("writing")
        return write(self, *args, **kwargs)

    Saver.snapshot, Saver._write = snapshot, during


before_each_save()
