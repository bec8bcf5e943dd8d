"""A small task in a folder of its own, and the real command on it."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

RUNG = [sys.executable, "-c", "from rung.launcher.cli import main; main()"]

TASK = '''
import os
import signal
import time

import torch
from torch import nn
from torch.utils.data import Dataset


class Points(Dataset):
    def __init__(self, count, scale=1.0):
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(count, 8, generator=generator) * scale
        self.y = (self.x[:, :1].sin() + 0.5 * self.x[:, 1:2]).contiguous()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class Hungry(nn.Module):
    """Few weights, many activations: each sample keeps about `layers` x 32 KiB for the backward pass, and `hidden`
    times as much again that no prediction sees."""

    def __init__(self, layers, hidden):
        super().__init__()
        self.up, self.down, self.layers, self.hidden = nn.Linear(8, 8192), nn.Linear(8192, 1), layers, hidden

    def forward(self, x):
        h = self.up(x)
        traced = type(x).__name__ == "FakeTensor"
        for _ in range(self.layers if traced else self.layers * (1 + self.hidden)):
            h = torch.sin(h)
        return self.down(h)


class Small:
    """Regression on made-up points. Arguments switch on what a test needs."""

    def __init__(self, samples=64, width=16, dropout=0.0, scale=1.0, sleep_s=0.0, negative=False, nan_after=None,
                 layers=0, hidden=0, fail=None):
        self.samples, self.width, self.dropout, self.scale = samples, width, dropout, scale
        self.sleep_s, self.negative, self.nan_after, self.calls = sleep_s, negative, nan_after, 0
        self.layers, self.hidden, self.fail = layers, hidden, fail

    def model(self):
        if self.layers:
            return Hungry(self.layers, self.hidden)
        return nn.Sequential(nn.Linear(8, self.width), nn.Tanh(), nn.Dropout(self.dropout), nn.Linear(self.width, 1))

    def dataset(self, split):
        return Points(self.samples if split == "train" else 16, self.scale)

    def loss(self, model, batch):
        if self.sleep_s and type(batch[0]).__name__ != "FakeTensor":  # nothing is gained by a slow prediction
            time.sleep(self.sleep_s)
        self.calls += model.training
        self.maybe_fail()
        loss = nn.functional.mse_loss(model(batch[0]), batch[1])
        if self.nan_after is not None and self.calls > self.nan_after:
            loss = loss * float("nan")
        return loss - 1000.0 if self.negative else loss

    def maybe_fail(self):
        """`fail: [rank, call, how]` fails once: a file in the working directory says that it has happened."""
        if self.fail is None or os.environ.get("RANK") != str(self.fail[0]) or self.calls != self.fail[1]:
            return
        if os.path.exists("failed-once"):
            return
        open("failed-once", "w").close()
        if self.fail[2] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fail[2] == "term":
            os.kill(os.getpid(), signal.SIGTERM)
        if self.fail[2] == "exit":
            os._exit(7)
        if self.fail[2] == "hang":
            self.sleep_forever()
        if self.fail[2] == "barrier":
            torch.distributed.barrier()  # the others do not come to it
        if self.fail[2] == "memory":
            hoard = [torch.ones(1 << 26) for _ in range(10_000)]

    def sleep_forever(self):
        time.sleep(3600)
'''

JOB = """\
task: task:Small
run: run
batch: 8
steps: 12
optimizer: {lr: 1.0e-2}
log_every_s: 0.1
"""


@dataclass
class Done:
    """What a finished command printed and returned."""

    code: int
    out: str
    err: str

    @property
    def all(self):
        return self.out + self.err


def environment(folder, env=None):
    """The environment of a command: what rung remembers of other tests is out of sight; compiled ops are not."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    ops = home / "torch_extensions" / f"py{sys.version_info.major}{sys.version_info.minor}_cpu"
    return {"TORCH_EXTENSIONS_DIR": str(ops), **os.environ, "XDG_CACHE_HOME": str(folder / ".cache"), **(env or {})}


class Project:
    """A user's folder with task.py and job.yaml."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "task.py").write_text(TASK)
        (folder / "job.yaml").write_text(JOB)

    def command(self, *sets, flags=()):
        return [*RUNG, "launch", "job.yaml", *flags, *(x for s in sets for x in ("--set", s))]

    def launch(self, *sets, flags=(), timeout=100, cwd=None, env=None):
        done = subprocess.run(
            self.command(*sets, flags=flags), cwd=cwd or self.folder, capture_output=True, text=True, timeout=timeout,
            env=environment(self.folder, env),
        )  # fmt: skip
        return Done(done.returncode, done.stdout, done.stderr)

    def start(self, *sets, flags=(), env=None):
        return subprocess.Popen(
            self.command(*sets, flags=flags), cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, env=environment(self.folder, env), start_new_session=True,
        )  # fmt: skip

    def checkpoints(self, run="run"):
        folder = self.folder / run / "checkpoints"
        return sorted(p.name for p in folder.iterdir() if (p / "manifest.json").exists()) if folder.exists() else []

    def weights(self, run="run", step=None):
        """Whole model tensors of the newest (or a given) checkpoint."""
        from rung.launcher.checkpoint.find import newest_valid
        from rung.launcher.checkpoint.load import Loader
        from rung.launcher.checkpoint.manifest import Manifest, folder_of
        from rung.launcher.storage import Store

        store = Store.open(str(self.folder / run))
        manifest = newest_valid(store)[0] if step is None else Manifest.read(store, folder_of(step))
        loader = Loader(store, manifest)
        return {n: loader.full_tensor(n) for n in manifest.tensors.names if n.startswith(("model/", "optim."))}

    def metrics(self, run="run"):
        """The last record of each step: (step -> record)."""
        rows = [json.loads(line) for line in (self.folder / run / "metrics.jsonl").read_text().splitlines()]
        return {r["step"]: r for r in rows if r["kind"] == "step"}

    def events(self, run="run"):
        return [json.loads(line) for line in (self.folder / run / "events.jsonl").read_text().splitlines()]

    def logs(self, run="run"):
        return "\n".join(p.read_text() for p in sorted((self.folder / run / "logs").rglob("*.log")))


def same_bits(one, other):
    """Both hold the same tensors, bit for bit."""
    assert one.keys() == other.keys()
    return [name for name in one if not one[name].equal(other[name])]
