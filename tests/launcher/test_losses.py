"""The loss watch: no false alarm on real curves, none missed where something is wrong."""

import json
import random
from collections import deque
from dataclasses import replace
from pathlib import Path

import pytest

from rung.launcher.watch.losses import BLOCK, ENOUGH, PLATEAU_STEPS, WINDOW, Trend, follow, spike

# Losses of the examples as they ran: digits as it stands (two seeds), stdlib_lm with half the width and depth.
CURVES = json.loads((Path(__file__).parent / "loss_curves.json").read_text())


def watched(curve, first_steps=10):
    """What the watch says about a whole curve, as (step, subject)."""
    recent, trend, said = deque(maxlen=WINDOW), Trend(), []
    for step, loss in enumerate(curve, 1):
        found = spike(recent, loss, step=step, start=trend.start) if step > first_steps else None
        recent.append(loss)
        trend, slow = follow(trend, loss, step=step)
        said += [(step, f.subject) for f in (found, slow) if f is not None]
    return said


def falling(steps, seed=3, start=3.0, end=1.0, noise=0.05):
    draw = random.Random(seed)
    return [end + (start - end) * 0.99**i + draw.gauss(0, noise) for i in range(steps)]


@pytest.mark.parametrize("name", CURVES)
def test_the_examples_give_no_finding(name):
    assert watched(CURVES[name]) == []


# At step 100 the loss still falls by as much within the window as a small jump is high.
@pytest.mark.parametrize(("at", "times"), [(100, 20), (300, 2.5), (300, 4), (650, 2.5), (650, 100)])
def test_a_jump_in_a_real_curve_is_told_with_its_step(at, times):
    curve = list(CURVES["stdlib_lm"])
    curve[at] *= times
    assert watched(curve) == [(at + 1, "loss.spike")]


def test_a_spike_names_step_value_and_what_was_usual():
    found = spike([2.0, 2.1, 1.9, 2.05] * 16, 9.5, step=1234, start=5.0)
    assert found is not None
    assert "9.5 at step 1,234" in found.fact
    assert "2.025 (the median of the last 64 steps)" in found.fact
    assert "rollback" in found.fix


@pytest.mark.parametrize(
    "draw",
    [lambda r: r.expovariate(1), lambda r: r.gauss(2, 0.3), lambda r: r.gauss(-5, 1), lambda r: r.uniform(0, 1)],
    ids=["exponential", "normal", "negative", "uniform"],
)
def test_noise_alone_is_no_spike(draw):
    source = random.Random(1)
    assert [s for s in watched([draw(source) for _ in range(10_000)]) if s[1] == "loss.spike"] == []


def test_too_few_losses_judge_nothing():
    assert spike([1.0] * (ENOUGH - 1), 1e9, step=ENOUGH, start=None) is None
    assert spike([1.0] * ENOUGH, 1e9, step=ENOUGH + 1, start=None) is not None


def test_a_small_rise_at_the_bottom_of_a_long_descent_is_no_spike():
    # ten times the loss of the moment, but nothing beside what the training has gained
    assert spike([0.01, 0.012, 0.011] * 30, 0.1, step=500, start=2.3) is None
    assert spike([0.01, 0.012, 0.011] * 30, 1.0, step=500, start=2.3) is not None


def test_a_loss_that_climbs_back_is_a_divergence_told_once():
    curve = falling(400)
    curve += [curve[-1] + 0.01 * i for i in range(400)]
    said = watched(curve)
    assert [subject for _, subject in said] == ["loss.divergence"]
    assert 400 < said[0][0] <= 600


def test_a_loss_that_rises_from_the_start_is_a_divergence():
    draw = random.Random(5)
    assert watched([2.3 + 0.02 * i + draw.gauss(0, 0.05) for i in range(200)])[0][1] == "loss.divergence"


def test_a_loss_that_never_falls_is_a_plateau_and_says_so():
    draw = random.Random(2)
    trend, found = Trend(), []
    for step in range(1, 3 * PLATEAU_STEPS):
        # The first block is a little better than all that follow.
        trend, more = follow(trend, 2.3 + 0.01 * (step > BLOCK) + draw.gauss(0, 0.001), step=step)
        found += [more] if more else []
    assert [f.subject for f in found] == ["loss.plateau"]
    assert "never learnt anything" in found[0].why


def test_a_loss_that_went_flat_late_is_a_plateau_only_after_as_long_again():
    curve = falling(1000, noise=0.01) + [1.2] * 1500
    said = watched(curve)
    assert [subject for _, subject in said] == ["loss.plateau"]
    assert 1600 <= said[0][0] <= 2100


def test_what_was_said_of_a_plateau_is_taken_back_when_the_loss_falls_again():
    trend = Trend(start=2.0, best=1.0, best_step=100, told=("loss.plateau",))
    for step in range(101, 101 + BLOCK):
        trend, _ = follow(trend, 0.5, step=step)
    assert trend == replace(Trend(start=2.0), best=0.5, best_step=100 + BLOCK)


def test_a_trend_survives_its_way_through_a_manifest():
    trend = Trend()
    for step, loss in enumerate(falling(100), 1):
        trend, _ = follow(trend, loss, step=step)
    assert Trend.from_json(json.loads(json.dumps(trend.to_json()))) == trend
