import itertools
import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rung.launcher.data.order import MAX_SIZE, Order, Stream, batches
from rung.strategies.errors import DataError

seeds = st.integers(0, 2**64 - 1)
quick = settings(max_examples=60, deadline=None, derandomize=True)


def excess(counts: np.ndarray, expected: np.ndarray | float) -> float:
    """How many standard deviations the chi-square statistic lies above its mean, for counts that should be random."""
    freedom = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))


@quick
@given(size=st.one_of(st.integers(1, 70), st.integers(4090, 4105), st.integers(1, 60_000)), seed=seeds)
@example(size=1, seed=0)
@example(size=2, seed=0)
@example(size=3, seed=0)
@example(size=4096, seed=0)
@example(size=4097, seed=0)  # the first of the Feistel network, with a domain just above it
@example(size=65**2 - 1, seed=0)
@example(size=65**2, seed=0)
@example(size=65**2 + 1, seed=0)
def test_an_epoch_holds_each_sample_once(size: int, seed: int) -> None:
    samples = Order(size, seed).indices(5, 0, size)
    assert samples.dtype == np.int64
    assert np.array_equal(np.sort(samples), np.arange(size))


@quick
@given(size=st.integers(1, MAX_SIZE), seed=seeds, epoch=st.integers(0, 2**40), data=st.data())
def test_any_window_of_any_size_holds_distinct_samples_in_range(size: int, seed: int, epoch: int, data: st.DataObject):
    count = data.draw(st.integers(0, min(size, 3000)))
    position = data.draw(st.integers(0, size - count))
    samples = Order(size, seed).indices(epoch, position, count)
    assert len(np.unique(samples)) == len(samples) == count
    assert count == 0 or (samples.min() >= 0 and samples.max() < size)


@quick
@given(size=st.one_of(st.integers(1, 5000), st.integers(1, MAX_SIZE)), seed=seeds, data=st.data())
def test_a_seek_gives_the_slice_of_the_whole(size: int, seed: int, data: st.DataObject) -> None:
    whole_count = min(size, 40_000)
    start = data.draw(st.integers(0, size - whole_count))
    whole = Order(size, seed).indices(2, start, whole_count)
    at = data.draw(st.integers(0, whole_count))
    count = data.draw(st.integers(0, whole_count - at))
    assert np.array_equal(Order(size, seed).indices(2, start + at, count), whole[at : at + count])


def test_values_are_the_same_on_every_platform_and_version() -> None:
    """A change here changes what every stored run sees next: it needs a new checkpoint version."""
    known = {
        1: [0],
        2: [1],
        10: [9, 4, 1, 2, 5],
        5000: [3073, 2749, 4327, 2483, 3569],
        10**10: [8317689914, 9035491568, 914018326, 9381142085, 9818174264],
        1 << 62: [
            2446337556635766262, 1068856254346156555, 4430802860492950515, 1839141337873163672, 118014488065679933,
        ],
    }  # fmt: skip
    for size, expected in known.items():
        half = size // 2
        assert Order(size, seed=42).indices(3, half, min(5, size - half)).tolist() == expected


@pytest.mark.parametrize("size", [4099, 10**6, 10**12])
def test_a_position_gets_any_sample_alike_over_seeds_and_epochs(size: int) -> None:
    drawn = np.array([Order(size, i % 3).indices(i // 3, size // 3, 3) for i in range(6000)])
    cells = drawn.astype(float) * 32 // size
    cells = cells.astype(np.int64)
    expected = np.diff(np.arange(33) * size / 32) / size * len(drawn)
    for column in cells.T:
        assert excess(np.bincount(column, minlength=32), expected) < 5
    pairs = (cells[:, 0] // 2) * 16 + cells[:, 1] // 2
    assert excess(np.bincount(pairs, minlength=256), len(drawn) / 256) < 5
    assert excess(np.bincount(drawn[:, 0] % 64, minlength=64), len(drawn) / 64) < 5


def test_all_orders_of_few_samples_come_alike() -> None:
    for size in (2, 3, 4):
        seen = Counter(tuple(Order(size, seed).indices(0, 0, size).tolist()) for seed in range(4000))
        every = list(itertools.permutations(range(size)))
        assert excess(np.array([seen[p] for p in every]), 4000 / len(every)) < 5


@pytest.mark.parametrize("size", [4096, 4097, 100_003])
def test_displacements_and_successors_look_random(size: int) -> None:
    order = Order(size, 11)
    samples, later = order.indices(0, 0, size), order.indices(1, 0, size)
    edges = np.arange(65) * size // 64
    expected = np.diff(edges)
    for spread in (samples - np.arange(size), np.diff(samples, append=samples[:1]), later - samples):
        assert excess(np.histogram(spread % size, bins=edges)[0], expected) < 5
    for other in (np.arange(size), later):
        assert abs(np.corrcoef(samples, other)[0, 1]) * np.sqrt(size) < 4


def test_seed_and_epoch_each_change_the_order() -> None:
    base = Order(1000, 1).indices(0, 0, 1000)
    for other in (Order(1000, 2).indices(0, 0, 1000), Order(1000, 1).indices(1, 0, 1000)):
        assert (base == other).sum() < 10  # one is expected by chance


def test_unshuffled_counts_up_in_every_epoch() -> None:
    assert Order(10**12, 3, shuffle=False).indices(7, 10**11, 3).tolist() == [10**11, 10**11 + 1, 10**11 + 2]


@quick
@given(seed=seeds, chosen=st.lists(st.integers(0, 99), min_size=1, max_size=300), shuffle=st.booleans())
def test_a_subset_is_what_the_permutation_runs_over(seed: int, chosen: list[int], shuffle: bool) -> None:
    order = Order(100, seed, shuffle, np.array(chosen))
    whole = order.indices(1, 0, order.length)
    assert sorted(whole.tolist()) == sorted(chosen)  # repeats stay repeats
    assert whole.tolist() == np.array(chosen)[Order(len(chosen), seed, shuffle).indices(1, 0, len(chosen))].tolist()
    assert order.indices(1, len(chosen) // 2, 1) == whole[len(chosen) // 2]


def test_a_subset_is_copied_and_cannot_be_changed() -> None:
    mine = np.array([1, 2, 3])
    order = Order(10, subset=mine)
    mine[:] = 9
    assert sorted(order.indices(0, 0, 3).tolist()) == [1, 2, 3]
    assert order.subset is not None
    with pytest.raises(ValueError, match="read-only"):
        order.subset[0] = 5


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Order(0), "0 samples"),
        (lambda: Order(MAX_SIZE + 1), "2\\^62"),
        (lambda: Order(5, subset=np.array([], dtype=np.int64)), "shape \\(0,\\)"),
        (lambda: Order(5, subset=np.array([0.5])), "float64"),
        (lambda: Order(5, subset=np.array([True, False])), "bool"),
        (lambda: Order(5, subset=np.array([0, 5])), "0 to 5"),
        (lambda: Order(5, subset=np.array([-1, 2])), "-1 to 2"),
        (lambda: Stream(Order(5), position=6), "position 6"),
    ],
)
def test_what_cannot_be_ordered_is_refused_with_its_value(make, says: str) -> None:
    with pytest.raises(DataError, match=says):
        make()


@pytest.mark.parametrize("place", [(-1, 0, 1), (0, -1, 1), (0, 8, 3), (0, 0, -1)])
def test_positions_outside_the_epoch_are_refused(place: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="not within"):
        Order(10).indices(*place)


def test_fingerprints_tell_orders_apart() -> None:
    orders = [
        Order(10), Order(11), Order(10, 1), Order(10, shuffle=False), Order(10, subset=np.arange(9)),
        Order(10, subset=np.arange(10)[::-1].copy()),
    ]  # fmt: skip
    assert len({order.fingerprint for order in orders}) == len(orders)
    assert Order(10, 1, shuffle=False).fingerprint == Order(10, 2, shuffle=False).fingerprint
    assert Order(10, subset=np.arange(9, dtype=np.int32)).fingerprint == Order(10, subset=np.arange(9)).fingerprint


@quick
@given(
    size=st.one_of(st.integers(1, 200), st.integers(4097, 6000)),
    takes=st.lists(st.integers(1, 300), max_size=40),
    chunk=st.integers(1, 500),
    data=st.data(),
)
def test_a_stream_gives_what_the_order_does(size: int, takes: list[int], chunk: int, data: st.DataObject) -> None:
    order = Order(size, 9)
    epoch, position = 4, data.draw(st.integers(0, size))
    stream = Stream(order, epoch, position, chunk)
    for count in takes:
        if position == size:
            epoch, position = epoch + 1, 0
        assert (stream.epoch, stream.position) == (epoch, position)
        expected = order.indices(epoch, position, min(count, size - position))
        assert np.array_equal(stream.take(count), expected)
        position += len(expected)


def test_batches_use_the_smaller_last_one_and_stop_after_the_epochs() -> None:
    order = Order(10, 3)
    found = list(batches(order, 4, position=4, epochs=2))
    assert [(epoch, position, len(indices)) for epoch, position, indices in found] == [
        (0, 4, 4), (0, 8, 2), (1, 0, 4), (1, 4, 4), (1, 8, 2),
    ]  # fmt: skip
    assert np.array_equal(np.concatenate([i for e, _, i in found if e == 1]), order.indices(1, 0, 10))
    assert list(batches(order, 4, epoch=1, position=10, epochs=2)) == []


def test_the_first_batch_of_ten_billion_samples_comes_within_five_milliseconds() -> None:
    taken = []
    for seed in range(5):
        start = time.perf_counter()
        Stream(Order(10**10, seed), 3, 5 * 10**9).take(64)
        taken.append(time.perf_counter() - start)
    assert min(taken) < 5e-3
