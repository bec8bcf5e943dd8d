"""Models of many kinds, small enough to measure in seconds and large enough for the measure to mean something."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True, kw_only=True)
class Case:
    """A Task with the batches that go with it; `micro_batches` are three sizes, `optimizer` its class's name. `fitted`:
    measurements of this case were looked at while the model of memory was made, so it proves less than the others."""

    name: str
    build: Callable[[], nn.Module]
    sample: Callable[[int], tuple[torch.Tensor, ...]]
    micro_batches: tuple[int, int, int]
    tokens: bool = False
    optimizer: str = "AdamW"
    options: Mapping[str, Any] = field(default_factory=dict)
    checkpointing: bool = False
    fitted: bool = False

    def model(self) -> nn.Module:
        """The task's model."""
        return self.build()

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Cross entropy over the last dimension, or the model's own loss."""
        *inputs, target = batch
        output = model(*inputs)
        output = getattr(output, "logits", output)
        if output.dtype.is_floating_point and target.dtype.is_floating_point:
            return F.mse_loss(output, target)
        return F.cross_entropy(output.flatten(0, -2), target.flatten())

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The real optimizer over the weights that train."""
        weights = [p for p in model.parameters() if p.requires_grad]
        return getattr(torch.optim, self.optimizer)(weights, lr=1e-4, **self.options)


class Attention(nn.Module):
    """Multi-head attention, causal or not."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, width) to the same."""
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int, causal: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, width) to the same."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Transformer(nn.Module):
    """Token ids (batch, length) to logits (batch, length, vocabulary)."""

    def __init__(
        self, vocabulary: int, width: int, layers: int, *, causal: bool = True, tied: bool = False, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(1024, width)
        self.blocks = nn.ModuleList(Block(width, width // 64, causal, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the next token at every place."""
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Low(nn.Module):
    """A frozen linear layer with a low-rank part that trains (Hu et al. 2021)."""

    def __init__(self, linear: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As the layer, plus the low-rank part."""
        return self.linear(x) + self.up(self.down(x))


def lora(model: nn.Module) -> nn.Module:
    """Freezes a model and gives its attention low-rank parts."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        if isinstance(module, Attention):
            module.qkv, module.out = Low(module.qkv), Low(module.out)  # type: ignore[assignment]
    return model


class Residual(nn.Module):
    """Two convolutions with BatchNorm around a shortcut."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inside, outside, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outside),
            nn.ReLU(inplace=True),
            nn.Conv2d(outside, outside, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outside),
        )
        self.short = nn.Conv2d(inside, outside, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images to images."""
        return F.relu(self.body(x) + self.short(x))


class ResNet(nn.Module):
    """Images (batch, 3, height, width) to class scores."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        stages: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        for stage in range(4):
            outside = width * 2**stage
            stages.append(Residual(max(width, outside // 2), outside, 2 if stage else 1))
            stages.append(Residual(outside, outside, 1))
        self.body = nn.Sequential(*stages)
        self.head = nn.Linear(width * 8, 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of 100 classes."""
        return self.head(self.body(x).mean((2, 3)))


class UNet(nn.Module):
    """Images to images of one channel, with skips that keep activations alive for long."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()

        def pair(inside: int, outside: int) -> nn.Module:
            first = nn.Conv2d(inside, outside, 3, 1, 1)
            return nn.Sequential(
                first, nn.GroupNorm(8, outside), nn.SiLU(), nn.Conv2d(outside, outside, 3, 1, 1), nn.SiLU()
            )

        sizes = [width, 2 * width, 4 * width, 8 * width]
        self.down = nn.ModuleList(pair(a, b) for a, b in zip([3, *sizes[:-1]], sizes, strict=True))
        self.up = nn.ModuleList(pair(a + b, b) for a, b in zip(sizes[:0:-1], sizes[-2::-1], strict=True))
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 3, h, w) to (batch, 1, h, w)."""
        skips = []
        for layer in self.down:
            x = layer(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = skips.pop()
        for layer in self.up:
            x = layer(torch.cat([F.interpolate(x, scale_factor=2.0), skips.pop()], 1))
        return self.head(x)


class ViT(nn.Module):
    """Images of 64 x 64 in patches of 8 to class scores."""

    def __init__(self, width: int = 384, layers: int = 6) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 8, 8)
        self.position = nn.Parameter(torch.randn(1, 65, width) * 0.02)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.blocks = nn.ModuleList(Block(width, width // 64, causal=False, dropout=0.1) for _ in range(layers))
        self.head = nn.Linear(width, 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of 100 classes."""
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0])


class LSTM(nn.Module):
    """Token ids to logits through two recurrent layers."""

    def __init__(self, vocabulary: int = 8000, width: int = 512) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.body = nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the next token at every place."""
        return self.head(self.body(self.embed(tokens))[0])


class Recommender(nn.Module):
    """Ids of 8 categories into large embedding tables, then a small MLP."""

    def __init__(self, rows: int = 40_000, width: int = 64) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(8))
        self.top = nn.Sequential(nn.Linear(8 * width, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """(batch, 8) to (batch, 1)."""
        return self.top(torch.cat([table(ids[:, i]) for i, table in enumerate(self.tables)], 1))


def mlp(width: int = 2048, layers: int = 5) -> nn.Module:
    """A plain stack of wide layers."""
    return nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(width, width), nn.GELU())))


def text(length: int, vocabulary: int) -> Callable[[int], tuple[torch.Tensor, ...]]:
    """Batches of token ids with targets."""

    def make(count: int) -> tuple[torch.Tensor, ...]:
        tokens = torch.arange(count * (length + 1)).remainder(vocabulary).view(count, length + 1)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return make


def images(side: int, *, dense: bool = False) -> Callable[[int], tuple[torch.Tensor, ...]]:
    """Batches of images with classes, or with images as targets."""

    def make(count: int) -> tuple[torch.Tensor, ...]:
        pictures = torch.linspace(-1, 1, count * 3 * side * side).view(count, 3, side, side)
        return pictures, (torch.zeros(count, 1, side, side) if dense else torch.arange(count).remainder(100))

    return make


def vectors(width: int) -> Callable[[int], tuple[torch.Tensor, ...]]:
    """Batches of vectors with vectors as targets."""
    return lambda count: (torch.linspace(-1, 1, count * width).view(count, width), torch.zeros(count, width))


def ids(count: int) -> tuple[torch.Tensor, ...]:
    """Batches of 8 ids with one number as target."""
    return torch.arange(count * 8).remainder(40_000).view(count, 8), torch.zeros(count, 1)


def fitted_cases() -> list[Case]:
    """The cases that the model of memory was made with."""
    sgd = {"momentum": 0.9}
    found = [
        Case(
            name="decoder 4M",
            build=lambda: Transformer(2000, 256, 4),
            sample=text(128, 2000),
            micro_batches=(4, 16, 32),
        ),
        Case(
            name="decoder 14M", build=lambda: Transformer(4000, 384, 6), sample=text(128, 4000), micro_batches=(1, 4, 8)
        ),
        Case(
            name="decoder 30M, dropout",
            build=lambda: Transformer(8000, 512, 7, dropout=0.1),
            sample=text(128, 8000),
            micro_batches=(1, 2, 4),
        ),
        Case(
            name="decoder, checkpointed",
            build=lambda: Transformer(2000, 384, 8),
            sample=text(128, 2000),
            micro_batches=(4, 8, 16),
            checkpointing=True,
        ),
        Case(
            name="decoder, tied",
            build=lambda: Transformer(16000, 384, 4, tied=True),
            sample=text(128, 16000),
            micro_batches=(1, 4, 8),
        ),
        Case(
            name="decoder, LoRA",
            build=lambda: lora(Transformer(4000, 512, 8)),
            sample=text(128, 4000),
            micro_batches=(2, 4, 8),
        ),
        Case(
            name="encoder",
            build=lambda: Transformer(8000, 384, 6, causal=False, dropout=0.1),
            sample=text(128, 8000),
            micro_batches=(1, 4, 8),
        ),
        Case(name="CNN, BatchNorm", build=ResNet, sample=images(32), micro_batches=(8, 16, 32)),
        Case(
            name="CNN, SGD",
            build=lambda: ResNet(32),
            sample=images(48),
            micro_batches=(8, 16, 32),
            optimizer="SGD",
            options=sgd,
        ),
        Case(name="ViT", build=ViT, sample=images(64), micro_batches=(4, 16, 32)),
        Case(name="MLP", build=mlp, sample=vectors(2048), micro_batches=(16, 128, 512)),
        Case(name="LSTM", build=LSTM, sample=text(64, 8000), micro_batches=(4, 8, 16)),
        Case(name="recommender", build=Recommender, sample=ids, micro_batches=(64, 1024, 8192)),
        Case(name="U-Net", build=UNet, sample=images(64, dense=True), micro_batches=(2, 4, 8)),
    ]
    return [replace(case, fitted=True) for case in found]


class LlamaBlock(nn.Module):
    """Grouped-query attention and a gated MLP, as in Llama 2 (Touvron et al. 2023)."""

    def __init__(self, width: int, heads: int, groups: int, inner: int) -> None:
        super().__init__()
        self.heads, self.groups, head = heads, groups, width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, groups * head, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, width) to the same."""
        batch, length, width = x.shape
        y = self.norm1(x)
        q = self.q(y).view(batch, length, self.heads, -1).transpose(1, 2)
        k, v = (part(y).view(batch, length, self.groups, -1).transpose(1, 2) for part in (self.k, self.v))
        k, v = (part.repeat_interleave(self.heads // self.groups, 1) for part in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(batch, length, width))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """A decoder of any size, for planning without allocating it."""

    def __init__(self, *, vocabulary: int, width: int, heads: int, groups: int, inner: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, groups, inner) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the next token at every place."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def llama(billions: int) -> Case:
    """A decoder of about 1, 7 or 70 billion parameters, 2048 tokens a sample."""
    width, heads, groups, inner, layers = {
        1: (2048, 16, 16, 5632, 22),
        7: (4096, 32, 32, 11008, 32),
        70: (8192, 64, 8, 28672, 80),
    }[billions]
    sizes = {"vocabulary": 32000, "width": width, "heads": heads, "groups": groups, "inner": inner, "layers": layers}
    return Case(
        name=f"Llama {billions}B", build=lambda: Llama(**sizes), sample=text(2048, 32000), micro_batches=(1, 2, 4)
    )


def parameters(model: nn.Module) -> int:
    """Elements of all parameters."""
    return sum(math.prod(p.shape) for p in model.parameters())
