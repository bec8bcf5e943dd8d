"""The guards are pure: numbers in, a verdict out."""

import math

import pytest

from rung.launcher.watch.health import MOST_SKIPPED_IN_A_ROW, BatchFacts, Rules, judge, likely_cause


def verdict(**changes):
    given = {"step": 3, "loss": 1.0, "norm": 1.0, "rules": Rules(), "skipped_in_a_row": 0, "precision": "fp32"}
    return judge(**{**given, **changes})


def test_finite_positive_numbers_pass():
    assert verdict().action == "ok"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("what", ["loss", "norm"])
def test_non_finite_numbers_stop_within_the_first_steps_and_are_named(what, bad):
    said = verdict(**{what: bad})
    assert said.action == "stop"
    assert "step 3" in said.reason
    assert ("NaN" if math.isnan(bad) else "Inf") in said.reason


def test_the_tenth_step_is_the_last_that_stops():
    assert verdict(step=10, loss=math.nan).action == "stop"
    assert verdict(step=11, loss=math.nan).action == "skip"


def test_first_steps_follow_the_job():
    assert verdict(step=4, loss=math.nan, rules=Rules(first_steps=3)).action == "skip"


def test_non_finite_can_be_skipped_from_the_start():
    assert verdict(step=1, loss=math.nan, rules=Rules(non_finite="skip")).action == "skip"


def test_endless_skipping_stops():
    rules = Rules(non_finite="skip")
    assert verdict(step=99, norm=math.inf, rules=rules, skipped_in_a_row=MOST_SKIPPED_IN_A_ROW - 1).action == "skip"
    assert verdict(step=99, norm=math.inf, rules=rules, skipped_in_a_row=MOST_SKIPPED_IN_A_ROW).action == "stop"


def test_negative_loss_stops_early_only_and_can_be_allowed():
    assert verdict(loss=-0.1).action == "stop"
    assert "negative_loss: allow" in verdict(loss=-0.1).reason
    assert verdict(loss=-0.1, step=11).action == "ok"
    assert verdict(loss=-0.1, rules=Rules(negative_loss="allow")).action == "ok"


def test_fp16_overflow_of_the_gradients_is_how_the_loss_scale_is_found():
    assert verdict(norm=math.inf, precision="fp16").action == "skip"
    assert verdict(loss=math.nan, norm=math.inf, precision="fp16").action == "stop"


@pytest.mark.parametrize(
    ("facts", "lr", "precision", "losses", "word"),
    [
        (BatchFacts(non_finite_values=3), 1e-4, "fp32", [], "NaN or Inf"),
        (BatchFacts(largest=3.2e8), 1e-4, "fp32", [], "not normalised"),
        (BatchFacts(largest=1.0), 0.5, "fp32", [], "learning rate"),
        (BatchFacts(largest=1.0), 1e-4, "fp32", [1.0, 9.0], "learning rate"),
        (BatchFacts(largest=1.0), 1e-4, "fp16", [1.0, 0.9], "fp16 overflowed"),
        (BatchFacts(largest=1.0), 1e-4, "fp32", [1.0, 0.9], "loss function"),
    ],
)
def test_the_surest_cause_is_named(facts, lr, precision, losses, word):
    assert word in likely_cause(facts=facts, lr=lr, precision=precision, losses=losses)
