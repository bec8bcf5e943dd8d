"""What the worker processes of test_zero.py run. Each case is a function of (rank, world, store, ...)."""

import ctypes
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rung.strategies.plan import Plan, cut
from rung.strategies.shards import Interval
from rung.strategies.zero import ZeroStrategy

GLOBAL_BATCH = 12
WORDS = 11


class Net(nn.Module):
    """Tied, frozen and sometimes unused weights, sizes that divide by nothing, a buffer, and weights that are
    initialised long after their modules were made, in the three ways that are common."""

    def __init__(self, width: int = 13) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.norm = nn.LayerNorm(8)
        self.hidden = nn.Linear(8, width)
        self.back = nn.Linear(width, 8)
        self.fixed = nn.Linear(8, 8)
        self.spare = nn.Linear(8, 8)
        self.head = nn.Linear(8, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((1,), 0.5))
        self.apply(_initialise)
        nn.init.normal_(self.back.weight, std=0.4)
        with torch.no_grad():
            self.hidden.weight.mul_(0.7)
        for name, parameter in self.named_parameters():
            if name.endswith("spare.weight"):
                parameter.data.normal_(0.0, 0.2 / math.sqrt(parameter.shape[0]))
        for parameter in self.fixed.parameters():
            parameter.requires_grad_(False)

    def forward(self, tokens: torch.Tensor, *, spare: bool = True) -> torch.Tensor:
        x = self.norm(self.embed(tokens))
        x = self.fixed(x + self.back(torch.tanh(self.hidden(x))) * self.scale)
        return self.head(x + self.spare(x) if spare else x)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.3)


def make_model(width: int = 13) -> nn.Module:
    torch.manual_seed(7)
    return Net(width)


def make_optimizer(model: nn.Module, lr: float = 3e-3) -> torch.optim.Optimizer:
    """Two groups, told apart by the number of dimensions, as many training scripts do."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors}], lr=lr, weight_decay=0.0)


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets (12, 5); -100 marks targets that do not count, more of them in some samples."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(WORDS, (GLOBAL_BATCH, 5), generator=generator)
    targets = torch.randint(WORDS, (GLOBAL_BATCH, 5), generator=generator)
    lengths = torch.randint(1, 6, (GLOBAL_BATCH,), generator=generator)
    targets[torch.arange(5) >= lengths[:, None]] = -100
    return tokens, targets


def uses_spare(step: int) -> bool:
    return step % 3 != 1


def mean_loss(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor, *, spare: bool) -> torch.Tensor:
    logits = model(tokens, spare=spare)
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def reference(
    steps: int, clip: float | None, optimizer: Callable[[nn.Module], torch.optim.Optimizer] = make_optimizer
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Weights and gradient norms of the plainest training loop, in float64."""
    model = make_model().double()
    updater = optimizer(model)
    norms = []
    for step in range(steps):
        mean_loss(model, *data(step), spare=uses_spare(step)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf)))
        updater.step()
        updater.zero_grad()
    return {name: tensor.detach() for name, tensor in model.named_parameters()}, norms


def one_step(
    strategy: ZeroStrategy, step: int, clip: float | None, *, poison: float = 1.0, healthy: bool = True
) -> float:
    """A global batch through `strategy`, cut as the plan says, weighted by what counts."""
    tokens, targets = data(step)
    total = int((targets != -100).sum())
    division = cut(GLOBAL_BATCH, strategy.plan)
    for slot, (start, stop) in enumerate(division.slices[strategy.rank]):
        own = slice(start, stop) if stop > start else slice(0, 1)
        weight = int((targets[own] != -100).sum()) if stop > start else 0
        with strategy.micro(last=slot == division.slots - 1):
            loss = mean_loss(strategy.model, tokens[own], targets[own], spare=uses_spare(step))
            strategy.backward(loss * (weight * strategy.plan.devices / total) * poison)
    return strategy.step(clip, healthy=healthy)


@torch.no_grad()
def evaluate(strategy: ZeroStrategy, step: int) -> None:
    """What a validation pass does, over fewer modules than training uses."""
    strategy.model.eval()
    with strategy.micro(last=False):
        mean_loss(strategy.model, *data(500 + step), spare=False)
    strategy.model.train()


def whole(strategy: ZeroStrategy) -> dict[str, torch.Tensor]:
    return dict(strategy.full_parameters())


def plan_of(world: int, **changes: Any) -> Plan:
    return Plan(**{"device": "cpu", "devices": world, "global_batch": GLOBAL_BATCH, "micro_batch": 4, **changes})


class Opened:
    """A built strategy, closed at the end."""

    def __init__(
        self, rank: int, world: int, store: Any, *, folder: Path | None = None, width: int = 13, **changes: Any
    ) -> None:
        self._width = width
        self._count = getattr(Opened, "count", 0)
        Opened.count = self._count + 1
        own = torch.distributed.PrefixStore(f"group{self._count}", store) if store is not None else None
        self.strategy = ZeroStrategy(plan_of(world, **changes), rank, own, folder=folder)

    def __enter__(self) -> ZeroStrategy:
        self.strategy.build(lambda: make_model(self._width), make_optimizer)
        return self.strategy

    def __exit__(self, *error: object) -> None:
        self.strategy.close()


def agreement(rank: int, world: int, store: Any, cases: list[dict[str, Any]], steps: int = 20) -> list[tuple[Any, ...]]:
    """For each case (clip and fields of the plan): the largest differences to the reference of weights and norms."""
    found = []
    for case in cases:
        clip = case.get("clip")
        norms = []
        with Opened(rank, world, store, **{k: v for k, v in case.items() if k not in ("clip", "evaluate")}) as strategy:
            for step in range(steps):
                norms.append(one_step(strategy, step, clip))
                if case.get("evaluate"):
                    evaluate(strategy, step)
            weights = whole(strategy)
        expected, expected_norms = reference(steps, clip)
        off = (
            max((float((weights[n].double() - w).abs().max()) for n, w in expected.items()), default=0.0)
            if rank == 0
            else 0.0
        )
        found.append((case, off, max(abs(a - b) / b for a, b in zip(norms, expected_norms, strict=True)), norms))
    return found


def snapshot(strategy: ZeroStrategy) -> dict[tuple[str, int], torch.Tensor]:
    """A copy of all that this rank would save."""
    return {(i.name, i.start): i.data.clone() for i in strategy.intervals("save")}


def same(one: dict[tuple[str, int], torch.Tensor], other: dict[tuple[str, int], torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def rejected(rank: int, world: int, store: Any, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each case: norms of good and bad steps, whether the bad ones left all state alone, and whether the run then
    goes on as one that never saw them."""
    found = []
    for case in cases:
        with Opened(rank, world, store, **case) as strategy:
            norms = [one_step(strategy, step, 1.0) for step in range(2)]
            before = snapshot(strategy)
            nan = one_step(strategy, 2, 1.0, poison=math.nan)
            untouched = same(before, snapshot(strategy)) or _same_but_scale(before, snapshot(strategy))
            unhealthy = one_step(strategy, 2, 1.0, healthy=False)
            untouched = untouched and _same_but_scale(before, snapshot(strategy))
            norms += [one_step(strategy, step, 1.0) for step in range(2, 4)]
            after = whole(strategy)
        with Opened(rank, world, store, **case) as strategy:
            plain_norms = [one_step(strategy, step, 1.0) for step in range(4)]
            plain = whole(strategy)
        off = max(
            (float((after[n].float() - t.float()).abs().max()) for n, t in plain.items() if t.numel()), default=0.0
        )
        found.append(
            {
                "case": case, "nan": nan, "unhealthy": unhealthy, "untouched": untouched, "off": off,
                "norms": max(abs(a - b) / b for a, b in zip(norms, plain_norms, strict=True)),
            }
        )  # fmt: skip
    return found


def _same_but_scale(one: dict[tuple[str, int], torch.Tensor], other: dict[tuple[str, int], torch.Tensor]) -> bool:
    keep = lambda items: {k: v for k, v in items.items() if not k[0].startswith("optim.loss_")}  # noqa: E731
    return same(keep(one), keep(other))


def saved(rank: int, world: int, store: Any, case: dict[str, Any], steps: int, folder: Path | None = None) -> list[Any]:
    """Trains `steps` steps and returns what this rank saves, and the whole weights after two more."""
    with Opened(rank, world, store, folder=folder, **case) as strategy:
        for step in range(steps):
            one_step(strategy, step, 1.0)
        pieces = [
            Interval(name=i.name, shape=i.shape, dtype=i.dtype, start=i.start, data=i.data.clone())
            for i in strategy.intervals("save")
        ]
        for step in range(steps, steps + 2):
            one_step(strategy, step, 1.0)
        return [pieces, whole(strategy), strategy._state.expected()]


def assembled(pieces: Iterator[Interval]) -> dict[str, torch.Tensor]:
    """Whole flat tensors from all ranks' pieces."""
    wholes: dict[str, torch.Tensor] = {}
    for piece in pieces:
        target = wholes.setdefault(piece.name, torch.full((math.prod(piece.shape),), math.nan, dtype=piece.dtype))
        target[piece.start : piece.start + piece.length] = piece.data
    return wholes


def fill(strategy: Any, wholes: dict[str, torch.Tensor]) -> list[str]:
    """Fills what `strategy` needs from `wholes`, as a loader does; names that are not there are left alone."""
    missing = []
    for want in strategy.intervals("load"):
        if want.name in wholes:
            want.data.copy_(wholes[want.name][want.start : want.start + want.length])
        else:
            missing.append(want.name)
    strategy.restored()
    return missing


def continued(
    rank: int, world: int, store: Any, cases: list[dict[str, Any]], wholes: dict[str, torch.Tensor], start: int,
    folder: Path | None = None,
) -> list[tuple[list[str], dict[str, torch.Tensor]]]:  # fmt: skip
    """For each case: what was missing, and the whole weights two steps after loading `wholes` at step `start`."""
    found = []
    for case in cases:
        with Opened(rank, world, store, folder=folder, **case) as strategy:
            one_step(strategy, 99, None)  # so that there is something to overwrite
            missing = fill(strategy, wholes)
            for step in range(start, start + 2):
                one_step(strategy, step, 1.0)
            found.append((missing, whole(strategy)))
    return found


def on_disk(rank: int, world: int, store: Any, case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Differences between offload to disk and none, and what a checkpoint of the former gives when loaded again.
    A weight of 88 elements comes first, so that no other starts at a block of the disk."""
    base = {"width": 90_000, "strategy": "zero3", "micro_batch": 3}
    first, then = (0, 2), (3, 5)
    with Opened(rank, world, store, **base) as strategy:
        norms = [one_step(strategy, step, 1.0) for step in (*first, *then)]
        expected = whole(strategy)
    with Opened(rank, world, store, folder=folder, **base, **case) as strategy:
        disk_norms = [one_step(strategy, step, 1.0) for step in first]
        swapped = sum(part.view is None for part in strategy._state.parts)
        pieces = snapshot(strategy)
        files = sum(1 for _ in folder.rglob("*.swp"))
        nan = one_step(strategy, 9, 1.0, poison=math.nan)
        untouched = same(pieces, snapshot(strategy))
        disk_norms += [one_step(strategy, step, 1.0) for step in then]
        disk = whole(strategy)
    with Opened(rank, world, store, folder=folder, **base, **case) as strategy:
        everyone: list[Any] = [None] * world
        torch.distributed.all_gather_object(everyone, {key: t for key, t in pieces.items() if len(t) == 1})
        single = {key: tensor for rank_pieces in everyone for key, tensor in rank_pieces.items()}
        for want in strategy.intervals("load"):
            want.data.copy_((single | pieces)[want.name, want.start])
        strategy.restored()
        again = snapshot(strategy)
        for step in then:
            one_step(strategy, step, 1.0)
        resumed = whole(strategy)
    off = lambda one: max((float((one[n] - t).abs().max()) for n, t in expected.items() if t.numel()), default=0.0)  # noqa: E731
    return {
        "norms": max(abs(a - b) / b for a, b in zip(disk_norms, norms, strict=True)), "off": off(disk),
        "resumed": off(resumed), "same": same(pieces, again), "swapped": swapped, "files": files,
        "rejected": untouched and not math.isfinite(nan),
    }  # fmt: skip


def initial(rank: int, world: int, store: Any, cases: list[dict[str, Any]]) -> list[dict[str, torch.Tensor]]:
    """The weights that each case starts from. Ranks other than 0 build with another seed."""
    found = []
    for case in cases:
        with Opened(rank, world, store, **case) as opened:
            found.append(whole(opened))
    return found


class Stack(nn.Module):
    """12 layers of 16 MB. `seen` is told after each."""

    def __init__(self, seen: Callable[[], None]) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for _ in range(12):
            self.layers.append(nn.Linear(2000, 2000, bias=False))
            seen()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def memory(rank: int, world: int, store: Any) -> dict[str, float]:
    """MB by which a process grows at most while it makes a ZeRO-3 model of 192 MB, streams its weights, evaluates."""
    import psutil

    ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD: what is freed is given back, and not counted
    process = psutil.Process()
    strategy = ZeroStrategy(plan_of(world, strategy="zero3"), rank, store)
    peaks = []
    note = lambda: peaks.append(process.memory_info().rss)  # noqa: E731
    strategy.build(lambda: Stack(note), lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
    # From the first layer on, so that imports and first collectives do not count.
    built = (max(peaks) - peaks[0]) / 1e6

    def growth(act: Callable[[], object]) -> float:
        act()  # what is loaded and laid out at the first time does not count
        peaks.clear()
        note()
        over = threading.Event()

        def watch() -> None:
            while not over.wait(0.0005):
                note()

        watcher = threading.Thread(target=watch)
        watcher.start()
        act()
        over.set()
        watcher.join()
        return (max(peaks) - peaks[0]) / 1e6

    def evaluate() -> None:
        with torch.no_grad(), strategy.micro(last=False):
            strategy.model(torch.ones(1, 2000))

    streamed = growth(lambda: [whole.sum() for _, whole in strategy.full_parameters()])
    strategy.model.eval()
    evaluated = growth(evaluate)
    strategy.close()
    return {"built": built, "streamed": streamed, "evaluated": evaluated}


def traces(rank: int, world: int, store: Any, folder: Path) -> dict[str, Any]:
    """What a strategy leaves behind in its process."""
    import os

    linear, environment, init = nn.functional.linear, dict(os.environ), nn.Linear.__init__
    with Opened(rank, world, store, strategy="zero3") as strategy:
        one_step(strategy, 0, None)
        module = strategy.model.module
    return {
        "linear": nn.functional.linear is linear,
        "environment": dict(os.environ) == environment,
        "init": nn.Linear.__init__ is init,
        "group": torch.distributed.is_initialized(),
        "hooks": sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules()),
        "files": list(folder.iterdir()),
    }
