"""Training on one device: clipping, rejected steps, tied weights, and state that survives a change of process."""

import math
import time

import pytest
import torch
from torch import nn

from rung.strategies.errors import JobError
from rung.strategies.make import make_strategy
from rung.strategies.plan import Plan
from rung.strategies.single import SingleStrategy
from rung.strategies.state import aliases, materialise


def plan(**changes: object) -> Plan:
    return Plan(strategy="single", device="cpu", devices=1, global_batch=8, micro_batch=8).with_(**changes)


class Net(nn.Module):
    """Tied weights, a frozen weight, a norm with statistics, a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.norm = nn.BatchNorm1d(6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.out = nn.Linear(6, 9, bias=False)
        self.out.weight = self.embed.weight
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.frozen(self.norm(self.embed(tokens))))


TOKENS = torch.arange(8) % 9


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def built(make_optimizer=adamw, seed: int = 0, model: type[nn.Module] = Net, **changes: object) -> SingleStrategy:
    strategy = make_strategy(plan(**changes), 0, None)
    assert isinstance(strategy, SingleStrategy)
    torch.manual_seed(seed)
    strategy.build(model, make_optimizer)
    return strategy


def train(strategy: SingleStrategy, steps: int, clip: float | None = None) -> list[float]:
    norms = []
    for _ in range(steps):
        with strategy.micro(last=True):
            strategy.backward(nn.functional.cross_entropy(strategy.model(TOKENS), (TOKENS * 2) % 9))
        norms.append(strategy.step(clip))
    return norms


def state(strategy: SingleStrategy) -> dict[str, torch.Tensor]:
    return {i.name: i.data.clone() for i in strategy.intervals("save")}


def fill(strategy: SingleStrategy, source: dict[str, torch.Tensor]) -> None:
    for interval in strategy.intervals("load"):
        if interval.name in source:
            interval.data.copy_(source[interval.name])
    strategy.restored()


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_equals_a_plain_torch_loop_bit_for_bit() -> None:
    strategy = built()
    norms = train(strategy, 5, clip=0.5)
    torch.manual_seed(0)
    model = Net()
    optimizer = adamw(model)
    expected = []
    for _ in range(5):
        nn.functional.cross_entropy(model(TOKENS), (TOKENS * 2) % 9).backward()
        expected.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    assert max(expected) > 0.5, "the clip is never felt"
    assert norms == pytest.approx(expected, rel=1e-6)
    for name, tensor in model.named_parameters():
        assert torch.allclose(dict(strategy.full_parameters())[name], tensor, rtol=1e-6, atol=1e-7), name


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_rejected_step_changes_nothing_and_clears_gradients(precision: str) -> None:
    strategy = built(precision=precision)
    train(strategy, 2)
    # Statistics of a norm move in the forward pass already, whatever becomes of the step.
    strategy.model.eval()
    before = {k: v for k, v in state(strategy).items() if "loss_" not in k}
    strategy.backward(nn.functional.cross_entropy(strategy.model(TOKENS), TOKENS))
    assert math.isfinite(strategy.step(None, healthy=False))
    strategy.backward(nn.functional.cross_entropy(strategy.model(TOKENS) * torch.nan, TOKENS))
    assert not math.isfinite(strategy.step(1.0))
    assert same({k: v for k, v in state(strategy).items() if "loss_" not in k}, before)
    assert all(p.grad is None for p in strategy.model.parameters())


def test_tied_weights_are_saved_once_and_counted_once_in_the_norm() -> None:
    strategy = built()
    names = list(state(strategy))
    assert "model/embed.weight" in names
    assert "model/out.weight" not in names
    assert "model/scratch" not in names
    assert len(names) == len(set(names))
    assert aliases(strategy.model) == {"out.weight": "embed.weight"}
    strategy.backward(strategy.model(TOKENS).sum())
    expected = math.sqrt(sum(p.grad.square().sum().item() for p in strategy.model.parameters() if p.grad is not None))
    assert strategy.step(None) == pytest.approx(expected, rel=1e-6)


def test_state_moves_to_a_fresh_strategy_and_training_goes_on_bit_for_bit() -> None:
    first = built()
    train(first, 3)
    second = built(seed=1)
    fill(second, state(first))
    assert same(state(first), state(second))
    assert train(first, 3) == train(second, 3)
    assert same(state(first), state(second))


def test_weights_alone_leave_the_optimizer_fresh() -> None:
    first = built()
    train(first, 3)
    second = built(seed=1)
    fill(second, {name: data for name, data in state(first).items() if name.startswith("model/")})
    assert not second.optimizer.state
    assert set(state(second)) == {name for name in state(first) if name.startswith("model/")}


def test_the_loss_scale_is_part_of_the_state() -> None:
    first = built(precision="fp16")
    first.backward(first.model(TOKENS).sum() * torch.inf)
    assert math.isinf(first.step(None))
    train(first, 2)
    second = built(precision="fp16")
    fill(second, state(first))
    assert second._amp.loss_scale is not None
    assert (second._amp.loss_scale.scale, second._amp.loss_scale.clean_steps) == (2.0**15, 2)


class CountingSgd(torch.optim.SGD):
    """Keeps a count in its parameter group and a plain number by parameter, as third-party optimizers do."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for parameter in (p for p in group["params"] if p.grad is not None):
                self.state[parameter]["seen"] = self.state[parameter].get("seen", 0) + 1
        return super().step(closure)


def counting(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = CountingSgd(model.parameters(), lr=0.01, momentum=0.9)
    optimizer.param_groups[0]["k"] = 0
    return optimizer


OPTIMIZERS = {
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.01),
    "adadelta": lambda m: torch.optim.Adadelta(m.parameters(), lr=0.1),
    "adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=0.01),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, amsgrad=True),
    "adamax": lambda m: torch.optim.Adamax(m.parameters(), lr=0.01),
    "adamw fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True),
    "asgd": lambda m: torch.optim.ASGD(m.parameters(), lr=0.01),
    "nadam": lambda m: torch.optim.NAdam(m.parameters(), lr=0.01),
    "radam": lambda m: torch.optim.RAdam(m.parameters(), lr=0.01),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01, momentum=0.5, centered=True),
    "rprop": lambda m: torch.optim.Rprop(m.parameters(), lr=0.01),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.01),
    "sgd momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9, nesterov=True),
    "counting": counting,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_elementwise_optimizer_resumes_bit_for_bit(name: str) -> None:
    first = built(OPTIMIZERS[name])
    train(first, 3)
    second = built(OPTIMIZERS[name], seed=1)
    fill(second, state(first))
    assert same(state(first), state(second))
    train(first, 3)
    train(second, 3)
    assert same(state(first), state(second))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_making_optimizer_state_changes_no_weight_and_no_group(name: str) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = OPTIMIZERS[name](model)
    weights = [p.detach().clone() for p in model.parameters()]
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    materialise(optimizer)
    assert all(torch.equal(p, before) for p, before in zip(model.parameters(), weights, strict=True))
    assert [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups] == groups
    assert set(optimizer.state) <= set(model.parameters())


def test_a_parameter_without_state_stays_without() -> None:
    class Half(Net):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Linear(2, 2)

    first = built(model=Half)
    train(first, 2)
    assert "optim.exp_avg/unused.weight" not in state(first)
    second = built(model=Half, seed=1)
    fill(second, state(first))
    assert same(state(first), state(second))


def test_weights_in_another_memory_layout_are_saved_row_major_and_loaded_back() -> None:
    def conv() -> nn.Module:
        return nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)

    def steps(strategy: SingleStrategy) -> None:
        for _ in range(2):
            strategy.backward(strategy.model(torch.linspace(-1, 1, 54).view(2, 3, 3, 3)).square().mean())
            strategy.step(None)

    first, second = built(model=conv), built(model=conv, seed=1)
    weight = dict(first.model.named_parameters())["weight"]
    assert not weight.is_contiguous()
    steps(first)
    assert torch.equal(state(first)["model/weight"], weight.detach().contiguous().view(-1))
    fill(second, state(first))
    steps(first)
    steps(second)
    assert same(state(first), state(second))


def test_what_cannot_be_trained_is_refused_with_a_reason() -> None:
    with pytest.raises(JobError, match="LBFGS"):
        built(lambda m: torch.optim.LBFGS(m.parameters()))
    with pytest.raises(JobError, match="does not belong to the model"):
        built(lambda m: torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0))
    with pytest.raises(JobError, match="sparse"):
        built(model=lambda: nn.Embedding(3, 2, sparse=True))


def test_intervals_are_views_of_the_live_state() -> None:
    strategy = built()
    train(strategy, 1)
    pointers = {p.data_ptr() for p in strategy.model.parameters()}
    saved = {i.name: i.data.data_ptr() for i in strategy.intervals("save")}
    assert all(saved[f"model/{name}"] in pointers for name, _ in strategy.model.named_parameters())


def test_closing_twice_is_harmless() -> None:
    strategy = built()
    strategy.close()
    strategy.close()


@pytest.mark.slow
def test_a_step_costs_little_more_than_a_hand_written_one() -> None:
    """Paired, interleaved, medians; the budget is 100 us for a 5 ms step."""

    def deep() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64))))

    inputs = torch.randn(32, 64)
    strategy = built(model=deep)
    model = deep()
    optimizer = adamw(model)

    def ours() -> None:
        with strategy.micro(last=True):
            strategy.backward(strategy.model(inputs).square().mean())
        strategy.step(1.0)

    def by_hand() -> None:
        model(inputs).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if math.isfinite(norm.item()):
            optimizer.step()
        optimizer.zero_grad()

    extra = []
    for _ in range(60):
        times = []
        for step in (ours, by_hand):
            start = time.perf_counter()
            for _ in range(5):
                step()
            times.append((time.perf_counter() - start) / 5)
        extra.append(times[0] - times[1])
    assert sorted(extra[10:])[25] < 100e-6
