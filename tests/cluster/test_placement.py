"""Where workers go: pure decisions."""

import random
import time

import pytest

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


def test_cpu_workers_go_to_the_largest_machines_one_on_each():
    machines = [machine("small", [0], speed=1.0), machine("a", [0] * 4, speed=4.0), machine("b", [0] * 4, speed=4.0)]
    chosen = place(2, machines, spread=True)
    assert where(chosen) == {"a": (0,), "b": (0,)}
    assert "1 slower left out" in chosen.reason
    assert where(place(3, machines, spread=True)) == {"small": (0,), "a": (0,), "b": (0,)}


def test_more_than_there_is_is_refused_with_what_there_is():
    with pytest.raises(JobError, match=r"9 workers asked for, there is room for 3 \(a: 2, b: 1\)"):
        place(9, [machine("a", [0, 0]), machine("b", [0])])


@pytest.mark.parametrize("count", [1, 8, 100, 7999, 8000])
def test_a_thousand_machines_are_placed_in_no_time_and_no_device_twice(count):
    rng = random.Random(count)
    machines = [machine(f"n{i}", [0] * 4 + [1] * 4, busy={rng.randrange(8)} if i % 5 == 0 else ()) for i in range(1000)]
    began = time.process_time()
    chosen = place(count, machines)
    assert time.process_time() - began < 5.0
    taken = [(take.machine, i) for take in chosen.takes for i in take.indices]
    assert len(taken) == len(set(taken)) == count
