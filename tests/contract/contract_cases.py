"""What is trained in the contract suite: small models, each with one thing that strategies tend to get wrong."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

Batch = tuple[torch.Tensor, ...]
SAMPLES = 240
STEPS = 20


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 7), nn.Tanh())
        self.head = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


class TiedLm(nn.Module):
    """Embedding and output share a weight; a buffer takes part; token 0 is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.mix = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.out = nn.Linear(8, 11, bias=False)
        self.out.weight = self.embed.weight
        self.register_buffer("gain", torch.rand(8) + 0.5)
        self.register_buffer("built", torch.tensor(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(torch.tanh(self.mix(self.embed(tokens)))) * self.gain)


class Moving(TiedLm):
    """All that a checkpoint has to carry: tied, frozen and unused weights, buffers of two types."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(8, 8)
        self.never = nn.Linear(8, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.mix(self.frozen(self.embed(tokens))))
        return self.out(self.norm(hidden) * self.gain)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # No bias: the norm cancels it, and AdamW would blow up the rounding error that is left of its gradient.
        self.first = nn.Linear(6, 8, bias=False)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.norm(self.first(x))))


class Branching(nn.Module):
    """Which parameters a forward pass uses depends on the samples in it; `never` is never used."""

    stretch = 1

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.left = nn.Linear(8, 3)
        self.right = nn.Linear(8, 3)
        self.never = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        goes_left = x[:, 0] > 0.9
        out = hidden[:, :3] * 0.1
        if goes_left.any():
            out = out + self.left(hidden) * goes_left[:, None]
        # In half of the data no sample turns right: then no rank uses these weights.
        goes_right = x[:, 1] > 0.3
        if goes_right.any():
            out = out + self.right(hidden) * goes_right[:, None]
        return out


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.drop(self.inner(x)))


class Deep(nn.Module):
    """Repeated blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual() for _ in range(3))
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class BranchingAlike(Branching):
    """All samples of a global batch of 12 take the same branches: all ranks use the same parameters."""

    stretch = 12


class TwoTypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8).double()
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x.to(self.first.weight.dtype)))
        return self.head(hidden.to(self.head.weight.dtype))


def vectors(model_: type[nn.Module]) -> Batch:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    if issubclass(model_, Branching):
        x[: SAMPLES // 2, 1] = 1.0 if model_ is BranchingAlike else x[: SAMPLES // 2, 1]
        x[SAMPLES // 2 :, 1] = -1.0
        x[:, 0] = x[:: model_.stretch, 0].repeat_interleave(model_.stretch)
    y = torch.randn(SAMPLES, 3, generator=generator, dtype=torch.float64)
    return x, y


def texts() -> Batch:
    """Rows of 5 tokens of which 1 to 5 are valid, so that every sample has its own weight."""
    generator = torch.Generator().manual_seed(8)
    tokens = torch.randint(1, 11, (SAMPLES, 6), generator=generator)
    lengths = torch.randint(1, 6, (SAMPLES, 1), generator=generator)
    targets = torch.where(torch.arange(5) < lengths, tokens[:, 1:], 0)
    return tokens[:, :-1], targets


def squared(model: nn.Module, batch: Batch) -> torch.Tensor:
    x, y = batch
    dtype = next(p.dtype for p in model.parameters())
    return (model(x.to(dtype)) - y.to(dtype)).square().mean()


def token_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    tokens, targets = batch
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=0)


def samples(batch: Batch) -> float:
    return float(len(batch[0]))


def valid_tokens(batch: Batch) -> float:
    return float((batch[1] != 0).sum())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3, weight_decay=0.1)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9, weight_decay=0.05)


def fused(model: nn.Module) -> torch.optim.Optimizer:
    """The form that `rung launch` chooses."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=3e-3, weight_decay=0.1, fused=True)


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    rest = [p for p in model.parameters() if p.requires_grad and p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.2}, {"params": rest, "lr": 1e-2, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=3e-3)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training. `counts` are the sizes of successive global batches, repeated; `freeze` names a prefix;
    `poisoned` is a step in which one sample is NaN; `synchronised` are batch norms that share their statistics."""

    name: str
    model: type[nn.Module] = Mlp
    loss: Callable[[nn.Module, Batch], torch.Tensor] = squared
    weight: Callable[[Batch], float] = samples
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw
    global_batch: int = 12
    micro_batch: int = 12
    counts: tuple[int, ...] = (12,)
    clip: float | None = None
    freeze: str = ""
    precision: str = "fp32"
    shares: dict[int, tuple[int, ...]] = field(default_factory=dict)
    checkpointed: bool = False
    synchronised: bool = False
    poisoned: int | None = None
    double: bool = False
    steps: int = STEPS
    only: tuple[str, ...] = ()

    def make_model(self, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        model = self.model()
        if self.double:
            model.double()
        if self.freeze:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(not name.startswith(self.freeze))
        return model

    def data(self, step: int) -> Batch:
        """The global batch of one step."""
        everything = texts() if self.loss is token_loss else vectors(self.model)
        start = sum(self.counts[i % len(self.counts)] for i in range(step)) % (SAMPLES - self.global_batch)
        batch = tuple(t[start : start + self.counts[step % len(self.counts)]].clone() for t in everything)
        if step == self.poisoned:
            batch[0][-1] = torch.nan
        return batch


MOVING = Case(
    name="state that moves",
    model=Moving,
    loss=token_loss,
    weight=valid_tokens,
    optimizer=two_groups,
    micro_batch=4,
    clip=0.5,
    freeze="frozen",
    steps=12,
)
MOVES_AFTER = 6

REPLICATED = ("single", "ddp")
_IDLE = {2: (12, 0), 3: (8, 0, 4), 4: (5, 0, 0, 7)}
_UNEVEN = {1: (12,), 2: (9, 3), 3: (2, 6, 4), 4: (1, 5, 0, 6)}

CASES = [
    Case(name="whole batches"),
    Case(name="clipped", clip=0.05),
    Case(name="micro-batches of one", micro_batch=1),
    Case(name="micro-batches that do not divide, clipped", micro_batch=5, clip=0.05),
    Case(name="small last batches, empty slots", micro_batch=2, counts=(12, 7, 1, 3), optimizer=sgd),
    Case(name="uneven shares", micro_batch=2, shares=_UNEVEN, counts=(12, 5)),
    Case(name="tied, weighted by token", model=TiedLm, loss=token_loss, weight=valid_tokens, micro_batch=2, clip=0.5),
    Case(name="frozen", freeze="body.0", micro_batch=3, optimizer=sgd, clip=0.5),
    Case(name="fused updates", optimizer=fused, micro_batch=5, clip=0.05),
    Case(name="parameter groups", optimizer=two_groups, micro_batch=4),
    Case(name="batch norm", model=Normed, micro_batch=3, global_batch=24, counts=(24,)),
    Case(name="batch norm, a rank without samples", model=Normed, shares=_IDLE),
    Case(name="batch norm, synchronised", model=Normed, synchronised=True, counts=(12, 7), shares=_UNEVEN),
    Case(name="batch norm, synchronised, empty slots", model=Normed, synchronised=True, micro_batch=4, counts=(12, 3)),
    Case(name="unused parameters", model=Branching, micro_batch=2, clip=0.5, only=REPLICATED),
    Case(name="unused parameters, momentum", model=Branching, optimizer=sgd, only=REPLICATED),
    Case(name="unused parameters, alike on all ranks", model=BranchingAlike, micro_batch=2),
    Case(name="activation checkpointing", model=Deep, micro_batch=4, checkpointed=True),
    Case(name="a poisoned step", micro_batch=2, poisoned=4, clip=0.5),
    Case(name="float64", double=True, micro_batch=5, clip=0.5, only=REPLICATED),
    Case(name="float64, unused", model=Branching, double=True, micro_batch=2, only=REPLICATED),
    Case(name="two types", model=TwoTypes, micro_batch=5, clip=0.5, only=REPLICATED),
    Case(name="bf16", precision="bf16", micro_batch=5, clip=0.5),
    Case(name="fp16", precision="fp16", micro_batch=5, clip=0.5),
]
