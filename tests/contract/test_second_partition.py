"""ZeRO-3 over two nodes of two ranks, each of which holds all weights a second time (ZeRO++'s hpZ): the result of any
other plan, with most gathers within a node, and state that moves to and from it."""

import functools
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from contract_cases import CASES, MOVES_AFTER, MOVING, Case
from harness import (
    Result,
    Saved,
    assemble,
    built,
    fill,
    load_and_run,
    plan_of,
    reference,
    run_case,
    run_group,
    take,
    train,
)

from rung.strategies.memory import predict
from rung.strategies.plan import Plan
from rung.strategies.profile import Activity, Line, ParameterGroup, Profile

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
WORLD, NODE = 4, 2
TOLERANCE = 2e-5
NAMES = ("micro-batches of one", "frozen")
CHOSEN = [case for case in CASES if case.name in NAMES]
MANY = next(case for case in CASES if case.name == NAMES[0])


def plan(case: Case, node_ranks: int = NODE) -> Plan:
    return plan_of(case, "zero3", WORLD).with_(node_ranks=node_ranks)


def apart(job: Any, rank: int, store: Any) -> tuple[Any, Counter[int]]:
    """`job` with every weight partitioned, the small ones too; what it gave, and how many ranks each gather had."""
    from deepspeed.runtime.zero import partition_parameters

    from rung.strategies import zero_config

    kept, gather = zero_config.PERSISTENT_ELEMENTS, partition_parameters.dist.allgather_fn
    ranks: Counter[int] = Counter()

    def noted(output: torch.Tensor, own: torch.Tensor, group: Any = None, **more: Any) -> Any:
        ranks[dist.get_world_size(group)] += 1
        return gather(output, own, group=group, **more)

    zero_config.PERSISTENT_ELEMENTS, partition_parameters.dist.allgather_fn = 0, noted
    try:
        return job(rank, store), ranks
    finally:
        zero_config.PERSISTENT_ELEMENTS, partition_parameters.dist.allgather_fn = kept, gather


KEPT: dict[str, np.ndarray] = {}


def saved(rank: int, store: Any) -> list[Saved]:
    """What this rank saves after some steps; what all save stays in each process for the jobs after this one."""
    with built(MOVING, plan(MOVING), rank, store) as strategy:
        train(strategy, MOVING, range(MOVES_AFTER))
        own = take(strategy)
        everyone: list[list[Saved]] = [[] for _ in range(WORLD)]
        dist.all_gather_object(everyone, own)
    KEPT.update(assemble([piece for pieces in everyone for piece in pieces]))
    return own


def away(rank: int, store: Any) -> Result:
    """Goes on under ddp."""
    return load_and_run(MOVING, plan_of(MOVING, "ddp", WORLD), KEPT, rank, store)


def rolled_back(rank: int, store: Any) -> tuple[Result, int]:
    """Trains and evaluates from other weights, so that second partitions of them are there, then loads; also gives the
    elements of those partitions."""
    with built(MOVING, plan(MOVING), rank, store, seed=99) as strategy:
        train(strategy, MOVING, range(1))
        strategy.module.eval()
        with torch.no_grad(), strategy.micro(last=True):
            MOVING.loss(strategy.model, MOVING.data(0))
        strategy.module.train()
        held = [p.ds_secondary_tensor for p in strategy.module.parameters()]
        second = sum(tensor.numel() for tensor in held if tensor is not None)
        fill(strategy, KEPT)
        losses, norms = train(strategy, MOVING, range(MOVES_AFTER, MOVING.steps))
        full = {name: tensor.numpy().copy() for name, tensor in strategy.full_parameters()}
        return Result(losses=losses, norms=norms, full=full, saved=take(strategy)), second


@functools.cache
def group() -> dict[str, list[Any]]:
    jobs = {case.name: functools.partial(apart, functools.partial(run_case, case, plan(case))) for case in CHOSEN}
    jobs["plain"] = functools.partial(apart, functools.partial(run_case, MANY, plan(MANY, 0)))
    jobs["saved"] = functools.partial(apart, saved)
    jobs["back"] = functools.partial(apart, rolled_back)
    jobs["away"] = away
    got = run_group(WORLD, jobs)
    for values in got.values():
        assert not any(isinstance(value, str) for value in values), values
    return got


def check(case: Case, got: list[Result]) -> None:
    losses, _, state = reference(case, plan(case))
    after = slice(len(losses) - len(got[0].losses), None)
    assert np.allclose(np.sum([r.losses for r in got], axis=0), losses[after], rtol=TOLERANCE, atol=TOLERANCE)
    saved = assemble([piece for result in got for piece in result.saved])
    for name, expected in state.items():
        assert np.allclose(got[0].full[name], expected, rtol=TOLERANCE, atol=TOLERANCE), name
        if f"model/{name}" in saved:
            assert np.allclose(saved[f"model/{name}"], expected.ravel(), rtol=TOLERANCE, atol=TOLERANCE), name


@pytest.mark.parametrize("name", NAMES)
def test_it_trains_as_one_process_does(name: str) -> None:
    check(next(case for case in CHOSEN if case.name == name), [result for result, _ in group()[name]])


def test_most_gathers_stay_within_a_node() -> None:
    (_, within), (_, plain) = group()[NAMES[0]][0], group()["plain"][0]
    assert plain[NODE] == 0
    assert within[WORLD] < plain[WORLD] / 2
    assert within[NODE] > within[WORLD]


def test_state_moves_to_it_and_from_it_and_old_copies_are_not_used() -> None:
    check(MOVING, [result for (result, _), _ in group()["back"]])
    check(MOVING, group()["away"])


def test_the_second_partition_is_as_large_as_predicted() -> None:
    held = group()["back"][0][0][1]
    count = sum(p.numel() for p in MOVING.make_model().parameters())
    line = Activity(first=(Line(0, 0),), again=(Line(0, 0),), flops=Line(0, 0), moved=Line(0, 0), operations=1)
    weights = ParameterGroup(name="all", count=count, bytes=4 * count, dtype="float32", trainable=True)
    profile = Profile(
        task="t", digest="d", method="given", precision="fp32", optimizer="AdamW", groups=(weights,), buffer_bytes=0,
        optimizer_bytes=8 * count, step_bytes=0, input_bytes=Line(0, 0), plain=line, checkpointed=None,
        largest_parameter=count,
    )  # fmt: skip
    [item] = [item for item in predict(profile, plan(MOVING)).items if item.name == "weights, second partition"]
    assert 4 * held == pytest.approx(item.device_bytes, rel=0.1)
