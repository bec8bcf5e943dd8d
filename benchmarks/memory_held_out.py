"""Models that no constant of the memory prediction was taken from: built from transformers configurations with random
weights, and of other kinds than those it was made with."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from benchmarks.memory_cases import Case, Llama, fitted_cases, images, text


class Mixer(nn.Module):
    """Images of 64 x 64 in patches of 8, mixed over places and over channels (Tolstikhin et al. 2021)."""

    def __init__(self, width: int = 384, layers: int = 8) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 8, 8)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers))
        self.places = nn.ModuleList(self._two(64, 256) for _ in range(layers))
        self.channels = nn.ModuleList(self._two(width, 4 * width) for _ in range(layers))
        self.head = nn.Linear(width, 100)

    @staticmethod
    def _two(outside: int, inside: int) -> nn.Module:
        return nn.Sequential(nn.Linear(outside, inside), nn.GELU(), nn.Linear(inside, outside))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of 100 classes."""
        x = self.patch(x).flatten(2).transpose(1, 2)
        for i, (places, channels) in enumerate(zip(self.places, self.channels, strict=True)):
            x = x + places(self.norms[2 * i](x).transpose(1, 2)).transpose(1, 2)
            x = x + channels(self.norms[2 * i + 1](x))
        return self.head(x.mean(1))


class Audio(nn.Module):
    """One-dimensional convolutions, ever wider apart (van den Oord et al. 2016), over 4,096 samples of sound."""

    def __init__(self, width: int = 192, layers: int = 10) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, width, 1)
        self.layers = nn.ModuleList(nn.Conv1d(width, 2 * width, 3, padding=2**i, dilation=2**i) for i in range(layers))
        self.mix = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(layers))
        self.head = nn.Conv1d(width, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 1, length) to the same."""
        x = self.first(x)
        for layer, mix in zip(self.layers, self.mix, strict=True):
            value, gate = layer(x).chunk(2, 1)
            x = x + mix(torch.tanh(value) * torch.sigmoid(gate))
        return self.head(x)


class Depthwise(nn.Module):
    """Inverted bottlenecks with one filter for each channel (Sandler et al. 2018)."""

    def __init__(self, width: int = 96, layers: int = 8, wider: int = 4) -> None:
        super().__init__()
        inside = wider * width
        self.first = nn.Sequential(nn.Conv2d(3, width, 4, 4), nn.BatchNorm2d(width))
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, inside, 1, bias=False),
                nn.BatchNorm2d(inside),
                nn.Hardswish(),
                nn.Conv2d(inside, inside, 5, padding=2, groups=inside, bias=False),
                nn.BatchNorm2d(inside),
                nn.Hardswish(),
                nn.Conv2d(inside, width, 1, bias=False),
                nn.BatchNorm2d(width),
            )
            for _ in range(layers)
        )
        self.head = nn.Sequential(nn.Linear(width, 4096), nn.Hardswish(), nn.Linear(4096, 1000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of 1,000 classes."""
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x.mean((2, 3)))


class Autoencoder(nn.Module):
    """Images through a narrow middle and back, with transposed convolutions and instance normalisation."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        sizes = [3, width, 2 * width, 4 * width, 8 * width]
        down, up = [], []
        for a, b in pairwise(sizes):
            down += [nn.Conv2d(a, b, 4, 2, 1), nn.InstanceNorm2d(b), nn.LeakyReLU(0.2)]
            up = [nn.ConvTranspose2d(b, max(a, 8), 4, 2, 1), nn.ReLU(), *up]
        up[-2] = nn.ConvTranspose2d(width, 1, 4, 2, 1)
        self.body = nn.Sequential(*down, *up[:-1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 3, h, w) to (batch, 1, h, w)."""
        return self.body(x)


class GRU(nn.Module):
    """Token ids to logits through a recurrent layer that reads both ways."""

    def __init__(self, vocabulary: int = 6000, width: int = 384) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.body = nn.GRU(width, width, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits at every place."""
        return self.head(self.body(self.embed(tokens))[0])


class Seq2Seq(nn.Module):
    """PyTorch's own encoder-decoder (`nn.Transformer`), post-norm, with dropout."""

    def __init__(self, vocabulary: int = 6000, width: int = 384) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.body = nn.Transformer(width, 6, 3, 3, 4 * width, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the next token, reading the whole as source."""
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        x = self.embed(tokens)
        return self.head(self.body(x, x, tgt_mask=mask, tgt_is_causal=True))


def sound(count: int) -> tuple[torch.Tensor, ...]:
    """Batches of sound, to be told again."""
    waves = torch.linspace(-1, 1, count * 4096).view(count, 1, 4096)
    return waves, torch.zeros(count, 1, 4096)


class Scores(nn.Module):
    """A transformers model with what it wants as keyword arguments, giving its logits."""

    def __init__(self, model: nn.Module, argument: str, *, decoder: bool = False) -> None:
        super().__init__()
        self.model, self.argument, self.decoder = model, argument, decoder

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Its logits."""
        more = {"decoder_input_ids": x} if self.decoder else {}
        return self.model(**{self.argument: x}, **more).logits


def from_config(kind: str, config: str, argument: str = "", **values: Any) -> nn.Module:
    """A transformers model with random weights. Imported here, as a task would: when the model is made."""
    import transformers

    model: nn.Module = getattr(transformers, kind)(getattr(transformers, config)(**values))
    return Scores(model, argument, decoder="T5" in kind) if argument else model


def transformers_cases() -> list[Case]:
    """Models made from transformers configurations with random weights; none where it is not installed."""
    from importlib.util import find_spec

    if find_spec("transformers") is None:
        return []
    ends: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}
    made: list[tuple[str, Callable[[], nn.Module], Callable[[int], tuple[torch.Tensor, ...]]]] = [
        (
            "transformers Llama",
            partial(
                from_config, "LlamaForCausalLM", "LlamaConfig", vocab_size=4000, hidden_size=384,
                intermediate_size=1024, num_hidden_layers=6, num_attention_heads=6, **ends,
            ),
            text(128, 4000),
        ),
        (
            "transformers GPT-2",
            partial(
                from_config, "GPT2LMHeadModel", "GPT2Config", vocab_size=4000, n_embd=384, n_layer=6, n_head=6,
                n_positions=256, **ends,
            ),
            text(128, 4000),
        ),
        (
            "transformers BERT",
            partial(
                from_config, "BertForMaskedLM", "BertConfig", vocab_size=4000, hidden_size=384,
                intermediate_size=1536, num_hidden_layers=6, num_attention_heads=6,
            ),
            text(128, 4000),
        ),
        (
            "transformers T5",
            partial(
                from_config, "T5ForConditionalGeneration", "T5Config", "input_ids", vocab_size=6000, d_model=384,
                d_kv=64, d_ff=1536, num_layers=4, num_heads=6, decoder_start_token_id=0,
            ),
            text(128, 6000),
        ),
        (
            "transformers ViT",
            partial(
                from_config, "ViTForImageClassification", "ViTConfig", "pixel_values", image_size=64, patch_size=8,
                hidden_size=384, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=6, num_labels=100,
            ),
            images(64),
        ),
    ]  # fmt: skip
    sizes = {"transformers ViT": (4, 12, 24)}
    return [
        Case(name=name, build=build, sample=sample, micro_batches=sizes.get(name, (1, 4, 8)))
        for name, build, sample in made
    ]


def held_out_cases() -> list[Case]:
    """The cases that nothing was fitted on."""
    grouped = {"vocabulary": 6000, "width": 512, "heads": 8, "groups": 2, "inner": 1408, "layers": 8}
    return [
        Case(
            name="decoder, grouped query",
            build=lambda: Llama(**grouped),
            sample=text(192, 6000),
            micro_batches=(1, 3, 6),
            optimizer="Adam",
        ),
        Case(
            name="decoder, grouped, checkpt.",
            build=lambda: Llama(**grouped),
            sample=text(192, 6000),
            micro_batches=(2, 6, 12),
            checkpointing=True,
        ),
        Case(name="encoder-decoder", build=Seq2Seq, sample=text(96, 6000), micro_batches=(1, 4, 10)),
        Case(name="Mixer", build=Mixer, sample=images(64), micro_batches=(4, 12, 24)),
        Case(name="audio, Conv1d", build=Audio, sample=sound, micro_batches=(1, 2, 4)),
        Case(name="CNN, depthwise", build=Depthwise, sample=images(96), micro_batches=(2, 6, 12)),
        Case(
            name="autoencoder, RMSprop",
            build=Autoencoder,
            sample=images(64, dense=True),
            micro_batches=(4, 16, 48),
            optimizer="RMSprop",
        ),
        Case(name="GRU, both ways", build=GRU, sample=text(64, 6000), micro_batches=(2, 8, 16)),
        *transformers_cases(),
    ]


def all_cases() -> list[Case]:
    """Every case that this machine can run, in a fixed order."""
    return [*fitted_cases(), *held_out_cases()]


def find(name: str) -> Case:
    """The case of that name."""
    return next(case for case in all_cases() if case.name == name)
