"""A process that saves until it is killed. A light module: each of many processes imports it."""

import torch

from rung.launcher.checkpoint.manifest import Meta, commit, merge
from rung.launcher.checkpoint.retention import prune
from rung.launcher.checkpoint.save import Saver
from rung.launcher.storage import Store
from tests.launcher.checkpoints import owned


def save_for_ever(url: str, first: int) -> None:
    """Saves, commits and prunes, every value of a step's state being that step."""
    torch.set_num_threads(1)
    store = Store.open(url)
    weights = torch.zeros(700_000)
    parts = []
    saver = Saver(store, rank=0, world=1, attempt=1, on_part=parts.append)
    for step in range(first, first + 10_000):
        weights.fill_(step)
        saver.snapshot(step, owned({"model/w": weights, "optim.m/w": weights[:1000]}, 0, 1))
        saver.wait()
        commit(store, merge([parts.pop()], Meta(step=step)))
        prune(store, keep=2)
