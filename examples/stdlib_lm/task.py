"""A byte-level language model that learns to write Python from the standard library's own source."""

import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

BYTES = 256


def read_source(max_bytes: int) -> tuple[bytes, bytes]:
    """Returns the training and the validation text: every 20th file of the standard library validates."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
    files = sorted(p for p in root.rglob("*.py") if not left_out & set(p.relative_to(root).parts))
    train, valid = bytearray(), bytearray()
    for i, file in enumerate(files):
        (valid if i % 20 == 19 else train).extend(file.read_bytes() + b"\n")
    return bytes(train[:max_bytes]), bytes(valid[: max_bytes // 10])


class Windows(Dataset[Tensor]):
    """Sample i holds the bytes of the i-th window, plus one more byte to predict; shape (context + 1,), int64."""

    def __init__(self, text: bytes, context: int) -> None:
        self.data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        return (len(self.data) - 1) // self.context

    def __getitem__(self, i: int) -> Tensor:
        return self.data[i * self.context : (i + 1) * self.context + 1].long()


class Block(nn.Module):
    """Pre-norm attention and feed-forward."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, w))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """A GPT over bytes; the output layer shares its weight with the embedding."""

    def __init__(self, context: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(BYTES, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)
        for embedding in (self.embed, self.place):
            nn.init.normal_(embedding.weight, std=0.02)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.place.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class StdlibLM:
    """The task that job.yaml names."""

    def __init__(
        self, context: int = 128, width: int = 128, depth: int = 4, heads: int = 4, max_bytes: int = 1_500_000
    ) -> None:
        self.shape = {"context": context, "width": width, "depth": depth, "heads": heads}
        self.context = context
        self.train_text, self.valid_text = read_source(max_bytes)
        counts = torch.bincount(torch.frombuffer(bytearray(self.train_text), dtype=torch.uint8), minlength=BYTES) + 1
        self.unigram = (counts / counts.sum()).log()

    def model(self) -> nn.Module:
        return Decoder(**self.shape)

    def dataset(self, split: str) -> Dataset[Tensor]:
        return Windows(self.train_text if split == "train" else self.valid_text, self.context)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        logits = model(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def metrics(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        """What a model would lose that knows only how often each byte occurs: the loss must fall well below it."""
        return {"unigram_loss": -self.unigram.to(batch.device)[batch[:, 1:]].mean()}
