"""Every strategy, however the batch is cut and over however many processes, trains as one float64 process does."""

import math

import numpy as np
import pytest
import torch
from contract_cases import CASES, Case
from harness import GROUPS, Result, plan_of, reference, refused, results

# The first test of a group waits for all that the group runs.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def close(actual: np.ndarray | list[float], expected: np.ndarray | list[float], scale: float) -> bool:
    return bool(np.allclose(np.asarray(actual, dtype=np.float64), expected, rtol=scale, atol=scale, equal_nan=True))


def tolerance(case: Case) -> float:
    """float32 rounding, grown over the steps; half precision is only to be near."""
    if case.double:
        return 1e-11
    return {"fp32": 2e-5, "bf16": 5e-2, "fp16": 1e-2}[case.precision]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
@pytest.mark.parametrize(("strategy", "world"), GROUPS)
def test_trains_as_one_float64_process_does(strategy: str, world: int, case: Case) -> None:
    if why := refused(case, strategy):
        pytest.skip(why)
    got = results(strategy, world).get(case.name)
    assert got is not None, "an earlier case of this group failed"
    for outcome in got:
        assert isinstance(outcome, Result), outcome
    overflowed = {i for i, norm in enumerate(got[0].norms) if math.isinf(norm)} if case.precision == "fp16" else set()
    assert len(overflowed) <= 5
    losses, norms, state = reference(case, plan_of(case, strategy, world), frozenset(overflowed))
    scale = tolerance(case)

    assert close(np.sum([r.losses for r in got], axis=0), losses, scale)
    for rank in got:
        assert rank.norms == got[0].norms or any(math.isnan(n) for n in norms), "ranks report different norms"
        applied = [i for i, norm in enumerate(norms) if math.isfinite(norm) and i not in overflowed]
        assert close([rank.norms[i] for i in applied], [norms[i] for i in applied], scale * 5)
        assert [i for i, norm in enumerate(rank.norms) if math.isfinite(norm)] == applied
    for name, expected in state.items():
        assert close(got[0].full[name], expected, scale), f"{name}: off by {np.abs(got[0].full[name] - expected).max()}"
    assert set(got[0].full) == set(state), "full_parameters() names"


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_many_micro_batches_of_one_equal_one_of_many(strategy: str) -> None:
    world = 1 if strategy == "single" else 2
    one = results(strategy, world)["whole batches"][0].full
    many = results(strategy, world)["micro-batches of one"][0].full
    assert all(close(many[name], one[name], 2e-6) for name in one)


def test_clipping_is_felt() -> None:
    """The clip of the clipped cases is below the norms that occur; otherwise they would test nothing."""
    clipped = results("single", 1)["clipped"][0]
    assert min(clipped.norms) > 0.05
    whole = results("single", 1)["whole batches"][0]
    assert not close(clipped.full["head.weight"], whole.full["head.weight"], 1e-3)


def test_weights_stay_fp32_in_mixed_precision() -> None:
    for name in ("bf16", "fp16"):
        assert {a.dtype for a in results("ddp", 2)[name][0].full.values()} == {np.dtype("float32")}
        assert torch.tensor(results("ddp", 2)[name][0].losses).isfinite().all()
