"""DDP: what replicas share, what a step leaves alone, and that a lost or late peer ends in an error in bounded time."""

import functools
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from rung.strategies.collectives import Collectives
from rung.strategies.ddp import DdpStrategy
from rung.strategies.errors import WorkersFailed
from rung.strategies.plan import Plan

# The contract suite's launcher serves here too.
sys.path.append(str(Path(__file__).parents[1] / "contract"))
from harness import run_group

pytestmark = pytest.mark.slow


def plan(world: int, **changes: object) -> Plan:
    return Plan(strategy="ddp", device="cpu", devices=world, global_batch=8, micro_batch=8).with_(**changes)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(4, 4)
        self.sometimes = nn.Linear(4, 4)
        self.never = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.colour = "red"


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def built(rank: int, store: Any, world: int, **changes: Any) -> DdpStrategy:
    strategy = DdpStrategy(plan(world, **changes), rank, store)
    torch.manual_seed(rank)
    strategy.build(Net, adamw)
    return strategy


def numbers(model: nn.Module) -> dict[str, np.ndarray]:
    return {name: tensor.detach().numpy().copy() for name, tensor in model.state_dict().items()}


def outside_forward(rank: int, store: Any) -> Any:
    """The model is the task's own: attributes, several calls, weights used outside any forward pass."""
    strategy = built(rank, store, 2)
    start = numbers(strategy.model)
    model: Any = strategy.model
    inputs = torch.full((3, 4), float(rank + 1))
    with strategy.micro(last=False):
        # `sometimes` has a gradient on rank 1 only, and from a micro-batch that is not the last.
        hidden = model.used(inputs) if rank == 0 else model.sometimes(model.used(inputs))
        strategy.backward(hidden.square().mean() * 0.5)
    with strategy.micro(last=True):
        twice = model.used(model.used(inputs))
        strategy.backward((model.norm(twice).square().mean() + model.used.bias.square().sum()) * 0.5)
    norm = strategy.step(1.0)
    result = (start, numbers(model), norm, model.colour, sorted(i.name for i in strategy.intervals("save")))
    strategy.close()
    return result


def test_a_task_keeps_its_own_module_and_unused_parameters_are_left_alone() -> None:
    (start0, end0, norm0, colour, names0), (start1, end1, norm1, _, names1) = run_group(
        2, {"outside forward": outside_forward}
    )["outside forward"]
    assert colour == "red"
    assert all(np.array_equal(start0[name], start1[name]) for name in start0), "replicas start unequal"
    local = {name for name in end0 if "running" in name}
    assert all(np.array_equal(end0[name], end1[name]) for name in set(end0) - local), "replicas drift apart"
    assert any(not np.array_equal(end0[name], end1[name]) for name in local), "each rank has its own statistics"
    assert norm0 == norm1
    # AdamW would have decayed `never`, had it got a gradient of zeros.
    assert np.array_equal(start0["never.weight"], end0["never.weight"])
    assert not np.array_equal(start0["sometimes.weight"], end0["sometimes.weight"])
    assert not any("/never" in name and name.startswith("optim.") for name in names0 + names1)
    assert any(name == "optim.exp_avg/sometimes.weight" for name in names0 + names1)
    assert {name for name in names0 + names1 if "running" in name} == {name for name in names0 if "running" in name}


def poisoned_and_unhealthy(rank: int, store: Any) -> Any:
    strategy = built(rank, store, 2)
    start = numbers(strategy.model)
    model: Any = strategy.model
    norms = []
    for step in range(2):
        with strategy.micro(last=True):
            loss = model.used(torch.ones(2, 4)).square().mean()
            strategy.backward(loss * torch.nan if step == 0 and rank == 1 else loss)
        norms.append(strategy.step(None, healthy=step == 0))
    result = (start, numbers(model), norms, len(strategy.optimizer.state))
    strategy.close()
    return result


def test_a_nan_on_one_rank_reaches_no_weight_of_any() -> None:
    for start, end, norms, states in run_group(2, {"poisoned": poisoned_and_unhealthy})["poisoned"]:
        assert np.isnan(norms[0])
        assert np.isfinite(norms[1])
        assert states == 0
        assert all(np.array_equal(start[name], end[name]) for name in start)


def agreeing(rank: int, store: Any) -> Any:
    with_peers = Collectives.form(plan(3), rank, store)
    result = with_peers.agree([1.0, rank, 2.0**50 + rank]), with_peers.agree([-rank, rank], "max")
    with_peers.close()
    return result


def test_workers_agree_on_sums_and_maxima() -> None:
    for sums, maxima in run_group(3, {"agree": agreeing})["agree"]:
        assert sums == [3.0, 3.0, 3 * 2.0**50 + 3]
        assert maxima == [0.0, 2.0]


def test_alone_agreeing_is_a_copy() -> None:
    values = [1.0, 2.0]
    got = Collectives().agree(values)
    assert got == values
    assert got is not values


def late(rank: int, store: Any) -> Any:
    """Rank 1 comes too late to the gradients of the second step."""
    strategy = DdpStrategy(plan(2), rank, store, deadline_s=2.0)
    strategy.build(lambda: nn.Linear(4, 1), adamw)
    started = time.monotonic()
    try:
        for step in range(2):
            if step == 1 and rank == 1:
                time.sleep(5.0)
            with strategy.micro(last=True):
                strategy.backward(strategy.model(torch.ones(2, 4)).sum())
            strategy.step(None)
    except WorkersFailed as error:
        return str(error), time.monotonic() - started
    finally:
        strategy.close()
    return "no error", 0.0


def absent(rank: int, store: Any) -> Any:
    """Rank 1 never joins."""
    started = time.monotonic()
    if rank == 1:
        return "", 0.0
    try:
        DdpStrategy(plan(2), rank, store, deadline_s=2.0)
    except WorkersFailed as error:
        return str(error), time.monotonic() - started
    return "no error", 0.0


@pytest.mark.parametrize("job", [late, absent], ids=lambda j: j.__name__)
def test_a_peer_that_does_not_come_is_an_error_within_the_deadline(job: Any) -> None:
    message, waited_s = run_group(2, {"waiting": job})["waiting"][0]
    assert "rank 0 of 2 lost its peers" in message
    assert 1.5 < waited_s < 15.0


def leaves_environment(rank: int, store: Any) -> Any:
    import os

    os.environ["ACCELERATE_MIXED_PRECISION"] = "fp16"
    before = dict(os.environ), torch.get_num_threads()
    built(rank, store, 2).close()
    return (dict(os.environ), torch.get_num_threads()) == before, dist.is_initialized()


def test_accelerate_leaves_no_trace_in_the_environment_and_the_group_is_left() -> None:
    assert run_group(2, {"environment": leaves_environment})["environment"] == [(True, False)] * 2


def accumulated(splits: int, rank: int, store: Any) -> Any:
    strategy = built(rank, store, 2, activation_checkpointing=False)
    model: Any = strategy.model
    inputs = torch.linspace(-1, 1, 32).view(8, 4)[rank::2]
    for _ in range(3):
        for slot, piece in enumerate(inputs.chunk(splits)):
            with strategy.micro(last=slot == splits - 1):
                strategy.backward(model.used(piece).square().mean() / splits)
        strategy.step(0.1)
    result = numbers(model)
    strategy.close()
    return result


def test_gradients_stay_local_until_the_last_micro_batch() -> None:
    jobs = {str(splits): functools.partial(accumulated, splits) for splits in (1, 2, 4)}
    results = run_group(2, jobs)
    for splits in ("2", "4"):
        for name, value in results["1"][0].items():
            assert np.allclose(value, results[splits][0][name], atol=1e-6), name


class Synchronised(nn.Module):
    """Brings its own SyncBatchNorm, which torch runs on GPUs only."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.SyncBatchNorm(3, momentum=None)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.norm(images)


def images() -> torch.Tensor:
    # A mean that is large beside the spread: sums of squares would cancel.
    return torch.randn(5, 3, 4, 4, generator=torch.Generator().manual_seed(3)) + 1e3


def synchronised(rank: int, store: Any) -> Any:
    strategy = DdpStrategy(plan(2), rank, store)
    strategy.build(Synchronised, adamw)
    mine = images()[:1] if rank == 0 else images()[1:]  # unequal parts
    mine.requires_grad_()
    with strategy.micro(last=True):
        out = strategy.model(mine)
        strategy.backward((out * out.detach().exp()).sum())
    with strategy.micro(last=False, empty=rank == 1):  # the second batch is rank 0's alone
        strategy.model(images() * 2)
    half = strategy.model((images() - 1e3).bfloat16()).dtype
    strategy.model.eval()
    with torch.no_grad():
        evaluated = strategy.model(images()) if rank == 1 else None  # evaluation waits for nobody
    result = out.detach().numpy(), mine.grad.numpy(), numbers(strategy.model), str(half)
    strategy.close()
    return result, evaluated is not None


def test_a_models_own_sync_batch_norm_works_on_a_cpu_and_sees_all_samples_as_one_batch() -> None:
    whole, reference = images().double().requires_grad_(), nn.BatchNorm2d(3, momentum=None).double()
    expected = reference(whole)
    (expected * expected.detach().exp()).sum().backward()
    reference(images().double() * 2)
    reference((images() - 1e3).repeat(2, 1, 1, 1).double())
    (((out0, grad0, state0, half), _), ((out1, grad1, state1, _), alone)) = run_group(2, {"sync": synchronised})["sync"]
    assert np.allclose(np.concatenate([out0, out1]), expected.detach(), atol=1e-3)
    assert np.allclose(np.concatenate([grad0, grad1]), whole.grad, atol=1e-3)
    assert half == "torch.bfloat16"
    assert alone
    assert state0["norm.num_batches_tracked"] == 3
    for name in ("norm.running_mean", "norm.running_var"):
        assert np.array_equal(state0[name], state1[name])
        assert np.allclose(state0[name], reference.state_dict()[name.removeprefix("norm.")], rtol=1e-2)


def one_value(rank: int, store: Any) -> Any:
    strategy = DdpStrategy(plan(2), rank, store)
    strategy.build(Net, adamw)
    try:
        with strategy.micro(last=True, empty=rank == 1):
            strategy.model.norm(torch.ones(1, 4))
    except ValueError as error:
        return str(error)
    finally:
        strategy.close()
    return "fine"


def test_one_value_a_channel_is_refused_as_torch_does_but_a_filler_passes() -> None:
    refused, passed = run_group(2, {"one value": one_value})["one value"]
    assert refused.startswith("Expected more than 1 value per channel")
    assert passed == "fine"
