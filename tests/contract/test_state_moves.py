"""State saved under one strategy and world size loads under any other, and training goes on as if nothing had been."""

import functools
from typing import Any

import numpy as np
import pytest
from contract_cases import MOVING
from harness import GROUPS, Result, Saved, assemble, load_and_run, plan_of, reference, run_and_save, run_group

# The first test of a group waits for all that the group runs.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

# float32 rounding, grown over twelve steps.
TOLERANCE = 2e-5
STRATEGIES = ("single", "ddp", "zero1", "zero2", "zero3")


@functools.cache
def saved(strategy: str, world: int) -> list[tuple[list[Saved], Result]]:
    job = functools.partial(run_and_save, MOVING, plan_of(MOVING, strategy, world))
    got = run_group(world, {MOVING.name: job})[MOVING.name]
    assert not any(isinstance(value, str) for value in got), got
    return got


@functools.cache
def checkpoint(strategy: str, world: int) -> dict[str, np.ndarray]:
    return assemble([piece for intervals, _ in saved(strategy, world) for piece in intervals])


def source_world(target_world: int, source: str) -> int:
    """Every strategy is loaded at every world size from every strategy; over these, every pair of sizes occurs."""
    return 1 if source == "single" else (target_world + STRATEGIES.index(source) - 1) % 4 + 1


@functools.cache
def moved(strategy: str, world: int) -> dict[str, list[Any]]:
    plan = plan_of(MOVING, strategy, world)
    jobs = {
        source: functools.partial(load_and_run, MOVING, plan, checkpoint(source, source_world(world, source)))
        for source in STRATEGIES
    }
    return run_group(world, jobs)


@pytest.mark.parametrize(("strategy", "world"), GROUPS)
def test_each_element_is_saved_once_in_equal_shares(strategy: str, world: int) -> None:
    whole = checkpoint(strategy, world)
    model = MOVING.make_model()
    tied = {"model/out.weight"}
    expected = {f"model/{name}" for name in model.state_dict()} - tied
    assert {name for name in whole if name.startswith("model/")} == expected
    for name, parameter in model.named_parameters():
        trained = parameter.requires_grad and not name.startswith("never")
        for key in ("exp_avg", "exp_avg_sq"):
            assert (f"optim.{key}/{name}" in whole) == trained, f"optim.{key}/{name}"
            assert not trained or whole[f"optim.{key}/{name}"].size == parameter.numel()
        assert not trained or whole[f"optim.step/{name}"].tolist() == [6.0]
    sizes = [sum(piece.values.nbytes for piece in intervals) for intervals, _ in saved(strategy, world)]
    assert max(sizes) <= 1.5 * sum(sizes) / world + 600, sizes


@pytest.mark.parametrize(("strategy", "world"), GROUPS)
def test_saving_changes_nothing(strategy: str, world: int) -> None:
    losses, _, state = reference(MOVING, plan_of(MOVING, strategy, world))
    got = [result for _, result in saved(strategy, world)]
    assert np.allclose(np.sum([r.losses for r in got], axis=0), losses, rtol=TOLERANCE)
    for name, expected in state.items():
        assert np.allclose(got[0].full[name], expected, rtol=TOLERANCE, atol=TOLERANCE), name


@pytest.mark.parametrize("source", STRATEGIES)
@pytest.mark.parametrize(("strategy", "world"), GROUPS)
def test_training_goes_on_under_another_strategy_and_world_size(strategy: str, world: int, source: str) -> None:
    assert source in moved(strategy, world), "an earlier move of this group failed"
    got = moved(strategy, world)[source]
    for outcome in got:
        assert isinstance(outcome, Result), outcome
    losses, norms, state = reference(MOVING, plan_of(MOVING, strategy, world))
    after = slice(len(losses) - len(got[0].losses), None)
    assert np.allclose(np.sum([r.losses for r in got], axis=0), losses[after], rtol=TOLERANCE)
    assert np.allclose(got[0].norms, norms[after], rtol=TOLERANCE * 5)
    for name, expected in state.items():
        assert np.allclose(got[0].full[name], expected, rtol=TOLERANCE, atol=TOLERANCE), name
    never = saved("single", 1)[0][1]
    for name, value in assemble([piece for result in got for piece in result.saved]).items():
        unchanged = next(piece.values for piece in never.saved if piece.name == name)
        assert np.allclose(value, unchanged, rtol=1e-3, atol=TOLERANCE), name
