"""Which precision is chosen and why; mixed precision equals what Accelerate and torch's own scaler do."""

import math
from collections import namedtuple

import pytest
import torch
from torch import nn

from rung.strategies.errors import JobError
from rung.strategies.make import make_strategy
from rung.strategies.plan import Plan
from rung.strategies.precision import Amp, LossScale, choose

INPUTS = torch.linspace(-1, 1, 24).view(4, 6)
TARGETS = torch.tensor([0, 1, 2, 1])


@pytest.mark.parametrize(
    ("requested", "facts", "expected", "because"),
    [
        ("auto", {"kind": "cpu", "bf16": False}, "fp32", "exact"),
        ("auto", {"kind": "cpu", "bf16": True}, "fp32", "bf16 instructions"),
        ("auto", {"kind": "cuda", "bf16": True, "capability": (9, 0)}, "bf16", "9.0"),
        ("auto", {"kind": "cuda", "bf16": False, "capability": (7, 5)}, "fp16", "loss is scaled"),
        ("auto", {"kind": "cuda", "bf16": False, "capability": (6, 1)}, "fp32", "neither"),
        ("auto", {"kind": "mps", "bf16": True}, "fp32", "Apple"),
        ("fp16", {"kind": "cpu", "bf16": False}, "fp16", "set in the job"),
        ("bf16", {"kind": "cpu", "bf16": False}, "bf16", "set in the job"),
    ],
)
def test_precision_is_chosen_with_a_reason(requested, facts, expected, because) -> None:
    chosen, reason = choose(requested, **facts)
    assert chosen == expected
    assert because in reason


def test_bf16_on_a_gpu_without_it_is_refused() -> None:
    with pytest.raises(JobError, match=r"7\.5.*bfloat16"):
        choose("bf16", kind="cuda", bf16=False, capability=(7, 5))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3))


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def trained(precision: str, steps: int = 6) -> dict[str, torch.Tensor]:
    plan = Plan(strategy="single", device="cpu", devices=1, global_batch=4, micro_batch=4, precision=precision)
    strategy = make_strategy(plan, 0, None)
    strategy.build(model, sgd)
    for _ in range(steps):
        with strategy.micro(last=True):
            strategy.backward(nn.functional.cross_entropy(strategy.model(INPUTS), TARGETS))
        assert math.isfinite(strategy.step(None))
    return {name: tensor.clone() for name, tensor in strategy.full_parameters()}


def test_bf16_equals_accelerate_bit_for_bit() -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    module = model()
    optimizer = sgd(module)
    prepared, optimizer = accelerator.prepare(module, optimizer)
    for _ in range(6):
        accelerator.backward(nn.functional.cross_entropy(prepared(INPUTS), TARGETS))
        optimizer.step()
        optimizer.zero_grad()
    AcceleratorState._reset_state(reset_partial_state=True)
    ours = trained("bf16")
    assert all(torch.equal(tensor, ours[name]) for name, tensor in module.named_parameters())
    assert not torch.equal(ours["0.weight"], trained("fp32")["0.weight"])


def test_fp16_equals_torchs_scaler_bit_for_bit() -> None:
    module = model()
    optimizer = sgd(module)
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(6):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(module(INPUTS).float(), TARGETS)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    ours = trained("fp16")
    assert all(torch.equal(tensor, ours[name]) for name, tensor in module.named_parameters())


def test_the_loss_scale_follows_torchs_rule() -> None:
    ours = LossScale()
    scaler = torch.amp.GradScaler("cpu", growth_interval=LossScale.GROWTH_INTERVAL_STEPS)
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scaler.scale(torch.ones(1))
    generator = torch.Generator().manual_seed(0)
    for _ in range(5000):
        overflow = bool(torch.rand((), generator=generator) < 0.0003)
        weight.grad = torch.full((1,), torch.inf if overflow else 1.0)
        scaler.step(optimizer)
        scaler.update()
        ours.update(overflow=overflow)
        assert ours.scale == scaler.get_scale()
    assert ours.scale != 2.0**16


def test_an_overflow_is_inf_until_no_lower_scale_is_left() -> None:
    amp = Amp("fp16", "cpu")
    norms = [amp.settle(math.inf)[0] for _ in range(40)]
    assert math.isinf(norms[0])
    assert math.isnan(norms[-1])
    assert amp.loss_scale is not None
    assert amp.loss_scale.scale == LossScale.FLOOR


def test_evaluation_computes_as_training_does_and_returns_fp32() -> None:
    Pair = namedtuple("Pair", ["logits", "rest"])

    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 3)

        def forward(self, x: torch.Tensor):
            out = self.inner(x)
            return Pair(out, {"list": [out, 3, None], "tuple": (out, torch.arange(2))})

    module = Nested()
    amp = Amp("bf16", "cpu")
    amp.patch(module)
    outside = module(INPUTS)
    with amp.autocast():
        inside = module(INPUTS)
    assert type(outside) is Pair
    assert outside.logits.dtype == torch.float32
    assert torch.equal(outside.logits, inside.logits)
    assert torch.equal(outside.logits, outside.logits.bfloat16().float()), "it was computed in bfloat16"
    assert outside.rest["list"][0].dtype == outside.rest["tuple"][0].dtype == torch.float32
    assert outside.rest["list"][1:] == [3, None]
    assert outside.rest["tuple"][1].dtype == torch.int64
