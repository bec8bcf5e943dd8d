"""Classes of unequal size: the decision and its reason, weights, and an order that draws classes evenly."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rung.launcher.data.imbalance import CAP, class_weights, decide, stratified
from rung.launcher.data.order import Order, Stream, batches
from rung.strategies.errors import DataError


def labels_of(sizes, seed=0):
    labels = np.concatenate([np.full(size, label, dtype=np.int64) for label, size in enumerate(sizes)])
    return np.random.default_rng(seed).permutation(labels)


# -------------------------------------------------------------------- decisions


@pytest.mark.parametrize(
    ("wanted", "counts", "takes", "kind", "reason"),
    [
        ("none", {0: 1000, 1: 1}, True, "none", ""),
        ("resample", {0: 5, 1: 5}, True, "resample", "asked for"),
        ("weights", {0: 5, 1: 5}, True, "weights", "asked for"),
        ("auto", {0: 100, 1: 50}, True, "none", "2 times the smallest, less than 3"),
        ("auto", {0: 100}, True, "none", "1 classes"),
        ("auto", {0: 100, 1: 20}, True, "weights", "weights up to 3 make up for it"),
        ("auto", {0: 100, 1: 20}, False, "resample", "loss() takes no class_weights"),
        ("auto", {0: 10_000, 1: 20}, True, "resample", "its weight of 250 would overshoot"),
    ],
)
def test_the_decision_follows_the_histogram_and_says_why(wanted, counts, takes, kind, reason):
    decision = decide(wanted, counts, takes_weights=takes)
    assert decision.kind == kind
    assert reason in decision.reason
    assert f"{max(counts.values()):,}" in decision.reason


@settings(deadline=None)
@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=12), st.integers(0, 3))
def test_weights_are_inverse_to_frequency_capped_and_one_on_average(sizes, more):
    counts = dict(enumerate(sizes))
    weights = class_weights(counts, len(sizes) + more)
    assert weights.shape == (len(sizes) + more,)
    assert (weights[len(sizes) :] == 1).all()
    own = weights[: len(sizes)].astype(np.float64)
    assert own.max() <= CAP * (1 + 1e-6)
    assert np.average(own, weights=sizes) == pytest.approx(1, rel=1e-5)
    uncapped = own < CAP * (1 - 1e-6)
    shares = own[uncapped] * np.array(sizes)[uncapped]
    if len(shares) > 1:
        assert np.allclose(shares, shares[0], rtol=1e-4)
    assert (np.diff(own[np.argsort(sizes, kind="stable")]) <= 1e-6).all()


# -------------------------------------------------------------------- the order


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=6), st.integers(0, 2**40), st.integers(0, 5))
def test_each_epoch_has_every_class_equally_often(sizes, seed, epoch):
    labels = labels_of(sizes)
    order = stratified(len(labels), seed, labels)
    drawn = labels[order.indices(epoch, 0, order.length)]
    counts = np.bincount(drawn, minlength=len(sizes))
    assert order.length == len(labels)
    assert counts.max() - counts.min() <= 1


def test_no_member_repeats_before_all_of_its_class_have_come_over_the_ends_of_epochs():
    labels = labels_of([500, 40, 3])
    order = stratified(len(labels), 7, labels)
    drawn = [order.indices(epoch, 0, order.length) for epoch in range(8)]
    for label, size in enumerate([500, 40, 3]):
        # An epoch holds whole runs and parts of runs of a class; within the whole sequence of epochs no member is
        # ahead of another by more than one draw.
        counts = np.zeros(len(labels), dtype=np.int64)
        for epoch in drawn:
            np.add.at(counts, epoch[labels[epoch] == label], 1)
        mine = counts[labels == label]
        assert len(mine) == size
        assert mine.max() - mine.min() <= 1
    assert set(np.concatenate(drawn[:4]).tolist()) == set(range(len(labels)))


def test_it_is_a_pure_function_of_seed_epoch_and_position():
    labels = labels_of([6000, 900, 50])
    order = stratified(len(labels), 3, labels)
    whole = order.indices(2, 0, order.length)
    rng = np.random.default_rng(0)
    for _ in range(50):
        start = int(rng.integers(0, order.length))
        count = int(rng.integers(0, order.length - start + 1))
        assert np.array_equal(order.indices(2, start, count), whole[start : start + count])
    assert np.array_equal(stratified(len(labels), 3, labels).indices(2, 0, order.length), whole)
    assert not np.array_equal(order.indices(3, 0, order.length), whole)
    assert not np.array_equal(stratified(len(labels), 4, labels).indices(2, 0, order.length), whole)


def test_it_is_read_like_any_order_in_batches_and_from_the_middle():
    labels = labels_of([70, 20, 11])
    order = stratified(len(labels), 3, labels)
    listed = [(epoch, position, tuple(i)) for epoch, position, i in batches(order, 16, epochs=3)]
    assert [e[:2] for e in listed[:8]] == [(0, p) for p in range(0, 101, 16)] + [(1, 0)]
    at = listed[9]
    assert listed[9:] == [(e, p, tuple(i)) for e, p, i in batches(order, 16, epoch=at[0], position=at[1], epochs=3)]
    assert Stream(order, 1, 5).take(7).tolist() == order.indices(1, 5, 7).tolist()


def test_classes_are_mixed_within_an_epoch():
    labels = labels_of([900, 90, 10])
    order = stratified(len(labels), 0, labels)
    drawn = labels[order.indices(0, 0, order.length)]
    thirds = [np.bincount(part, minlength=3) for part in np.array_split(drawn, 10)]
    assert np.min(thirds) > 15


def test_only_chosen_samples_are_drawn_and_any_label_may_stand_for_a_class():
    labels = labels_of([50, 30]) * 7 - 3
    chosen = np.arange(0, 80, 2)
    order = stratified(80, 0, labels, chosen)
    drawn = order.indices(0, 0, order.length)
    assert order.length == 40
    assert set(drawn.tolist()) <= set(chosen.tolist())
    assert sorted(np.unique(labels[drawn], return_counts=True)[1].tolist()) == [20, 20]


def test_the_fingerprint_tells_resampled_from_plain_and_one_labelling_from_another():
    labels = labels_of([50, 30])
    prints = {
        Order(80, seed=0).fingerprint,
        stratified(80, 0, labels).fingerprint,
        stratified(80, 1, labels).fingerprint,
        stratified(80, 0, labels_of([50, 30], seed=1)).fingerprint,
    }
    assert len(prints) == 4
    assert stratified(80, 0, labels).fingerprint in prints


def test_places_outside_the_epoch_and_no_members_are_refused():
    order = stratified(80, 0, labels_of([50, 30]))
    for bad in ((-1, 0, 1), (0, 79, 2), (0, -1, 1)):
        with pytest.raises(ValueError, match="not within"):
            order.indices(*bad)
    with pytest.raises(DataError):
        stratified(80, 0, labels_of([50, 30]), np.empty(0, dtype=np.int64))


def test_a_large_set_costs_little_at_any_place():
    labels = np.zeros(3_000_000, dtype=np.int64)
    labels[::1000] = 1
    order = stratified(len(labels), 0, labels)
    drawn = order.indices(5, 2_000_000, 4096)
    assert len(drawn) == 4096
    assert abs(int(labels[drawn].sum()) - 2048) < 200


@pytest.mark.slow
@pytest.mark.timeout(240)  # three whole runs
def test_both_ways_raise_the_balanced_accuracy_of_the_skewed_example():
    task = Path(__file__).parents[2] / "examples/digits_skewed/task.py"
    done = subprocess.run([sys.executable, str(task)], capture_output=True, text=True, timeout=230)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[1:]]
    balanced = {row[0]: float(row[1]) for row in rows}
    assert balanced["resample"] > balanced["none"] + 0.1
    assert balanced["weights"] > balanced["none"] + 0.05
