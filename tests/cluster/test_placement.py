"""Where workers go and what share of a batch they get: pure decisions."""

import random
import time

import pytest

from rung.cluster import balance
from rung.cluster.placement import Machine, Spot, place
from rung.strategies.errors import JobError


def machine(name, islands, busy=(), speed=1.0):
    spots = tuple(Spot(index=i, island=island, busy=i in busy, speed=speed) for i, island in enumerate(islands))
    return Machine(name=name, spots=spots)


def where(placement):
    return {take.machine: take.indices for take in placement.takes}


def test_the_tightest_island_that_suffices_is_taken():
    machines = [machine("a", [0, 0, 0, 0]), machine("b", [0, 0, 1, 1])]
    assert where(place(2, machines)) == {"b": (0, 1)}
    assert where(place(4, machines)) == {"a": (0, 1, 2, 3)}
    assert "island" in place(2, machines).reason


def test_one_machine_comes_before_several_and_several_are_as_few_as_can_be():
    machines = [machine("a", [0, 1]), machine("b", [0, 0, 1, 1]), machine("c", [0, 0, 1, 1])]
    assert where(place(3, machines)) == {"b": (0, 1, 2)}
    assert where(place(6, machines)) == {"b": (0, 1, 2, 3), "a": (0, 1)}


def test_busy_devices_are_taken_only_when_there_are_no_others():
    machines = [machine("a", [0, 0], busy={0}), machine("b", [0])]
    alone = place(1, machines)
    assert where(alone) in ({"a": (1,)}, {"b": (0,)})
    assert "without 1 busy one" in alone.reason
    assert "also 1 busy" in place(3, machines).reason


def test_slower_devices_are_left_out():
    machines = [machine("slow", [0] * 8, speed=1.0), machine("fast", [0] * 2, speed=4.0)]
    chosen = place(2, machines)
    assert where(chosen) == {"fast": (0, 1)}
    assert "8 slower left out" in chosen.reason


def test_cpu_workers_are_spread():
    machines = [machine("a", [0] * 4), machine("b", [0] * 4)]
    assert where(place(3, machines, spread=True)) == {"a": (0, 1), "b": (0,)}


def test_more_than_there_is_is_refused_with_what_there_is():
    with pytest.raises(JobError, match=r"9 workers asked for, there is room for 3 \(a: 2, b: 1\)"):
        place(9, [machine("a", [0, 0]), machine("b", [0])])


@pytest.mark.parametrize("count", [1, 8, 100, 7999, 8000])
def test_a_thousand_machines_are_placed_in_no_time_and_no_device_twice(count):
    rng = random.Random(count)
    machines = [machine(f"n{i}", [0] * 4 + [1] * 4, busy={rng.randrange(8)} if i % 5 == 0 else ()) for i in range(1000)]
    began = time.perf_counter()
    chosen = place(count, machines)
    assert time.perf_counter() - began < 5.0
    taken = [(take.machine, i) for take in chosen.takes for i in take.indices]
    assert len(taken) == len(set(taken)) == count


def settle(batch, samples_per_s, fixed_s=0.0, noise=0.0, stretches=12, seed=0):
    """Plays stretches of steps on devices of these speeds; returns every balance on the way."""
    rng = random.Random(seed)
    found = [balance.equal(batch, len(samples_per_s))]
    for _ in range(stretches):
        times = [
            (share / speed + fixed_s) * (1 + rng.uniform(-noise, noise))
            for share, speed in zip(found[-1].shares, samples_per_s, strict=True)
        ]
        found.append(balance.judge(found[-1], times))
    return found


def test_three_devices_of_speeds_1_2_4_get_shares_1_2_4():
    found = settle(70, [10.0, 20.0, 40.0])
    assert found[-1].shares == (10, 20, 40)
    assert "rank 0 is the slowest" in found[2].reason
    assert found[2].shares == (10, 20, 40)  # two stretches of 5 steps


def test_fixed_costs_of_a_step_do_not_keep_it_from_settling_near_equal_times():
    found = settle(128, [40.0, 80.0], fixed_s=0.3)
    times = [share / speed + 0.3 for share, speed in zip(found[-1].shares, [40.0, 80.0], strict=True)]
    assert max(times) / min(times) < 1.15


@pytest.mark.parametrize("seed", range(20))
def test_noise_below_the_threshold_never_moves_a_sample(seed):
    found = settle(64, [20.0, 20.0, 20.0, 20.0], noise=0.04, stretches=60, seed=seed)
    assert {b.shares for b in found} == {(16, 16, 16, 16)}


def test_one_bad_stretch_changes_nothing():
    before = balance.equal(8, 2)
    hit = balance.judge(before, [0.1, 0.5])
    assert hit.shares == (4, 4)
    assert balance.judge(balance.judge(hit, [0.1, 0.1]), [0.1, 0.5]).shares == (4, 4)
    assert balance.judge(hit, [0.1, 0.5]).shares == (7, 1)


def test_no_share_leaps_by_more_than_three_times_at_once():
    before = balance.equal(200, 2)
    assert balance.judge(balance.judge(before, [0.01, 1.0]), [0.01, 1.0]).shares == (171, 29)


@pytest.mark.parametrize("seed", range(50))
def test_parts_sum_to_the_whole_and_nobody_is_left_without(seed):
    rng = random.Random(seed)
    weights = [rng.uniform(0.01, 5.0) for _ in range(rng.randrange(1, 12))]
    total = rng.randrange(len(weights), 500)
    parts = balance.proportional(total, weights)
    assert sum(parts) == total
    assert min(parts) >= 1
