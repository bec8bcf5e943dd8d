"""Activation checkpointing saves memory and changes neither results nor names."""

import pytest
import torch
from torch import nn

from rung.strategies.checkpointing import available, blocks, enable
from rung.strategies.errors import JobError


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x + scale * self.drop(self.down(torch.relu(self.up(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return self.norm(x)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(1)
    loss = model(torch.linspace(-1, 1, 32).view(4, 8)).square().sum()
    # Something else draws random numbers between the passes, as data loading may.
    torch.rand(3)
    loss.backward()
    return [p.grad.clone() for p in model.parameters()]


def make() -> Net:
    torch.manual_seed(0)
    return Net()


def saved_bytes(model: nn.Module) -> int:
    """Bytes that autograd keeps between the forward and the backward pass."""
    kept = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(torch.rand(64, 8))
    return sum(kept.values())


def test_results_are_equal_bit_for_bit_with_dropout() -> None:
    plain, checkpointed = make(), make()
    enable(checkpointed)
    assert all(torch.equal(a, b) for a, b in zip(gradients(plain), gradients(checkpointed), strict=True))


def test_names_stay() -> None:
    plain, checkpointed = make(), make()
    enable(checkpointed)
    assert list(plain.state_dict()) == list(checkpointed.state_dict())


def test_activations_are_let_go() -> None:
    plain, checkpointed = make(), make()
    enable(checkpointed)
    assert saved_bytes(checkpointed) < 0.5 * saved_bytes(plain)


def test_the_largest_repeated_blocks_are_found() -> None:
    assert list(blocks(Net())) == ["layers.0", "layers.1", "layers.2", "layers.3"]
    assert list(blocks(nn.Sequential(Block(), Block(), nn.Linear(8, 8)))) == ["0", "1"]
    assert "4 repeated blocks" in enable(Net())


def test_evaluation_runs_straight_through() -> None:
    model = make()
    enable(model)
    model.eval()
    calls = []
    model.layers[0].up.register_forward_hook(lambda *_: calls.append(1))
    model(torch.rand(2, 8)).sum().backward()
    assert len(calls) == 1


def test_a_models_own_method_is_used() -> None:
    class Own(nn.Linear):
        def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, bool]) -> None:
            self.asked = gradient_checkpointing_kwargs

    model = Own(2, 2)
    assert available(model)
    assert "own" in enable(model)
    assert model.asked == {"use_reentrant": False}


def test_a_model_without_repeated_blocks_is_refused_with_a_reason() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    assert not available(model)
    with pytest.raises(JobError, match="no repeated blocks"):
        enable(model)
