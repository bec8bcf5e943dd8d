"""When saves and validations are due."""

from dataclasses import dataclass

import pytest

from rung.launcher.cadence import due, steps_per_epoch, total_steps


@dataclass
class Every:
    amount: float
    unit: str


def due_steps(every, per_epoch, until):
    return [s for s in range(1, until + 1) if due(every, step=s, per_epoch=per_epoch, minutes_since_last=0.0)]


def test_steps():
    assert due_steps(Every(3, "steps"), 10, 10) == [3, 6, 9]


def test_whole_epochs_end_with_their_last_step():
    assert due_steps(Every(2, "epochs"), 5, 20) == [10, 20]


@pytest.mark.parametrize("parts", [2, 3, 7])
def test_fractions_of_an_epoch_come_exactly_that_often(parts):
    per_epoch = 11
    found = due_steps(Every(1 / parts, "epochs"), per_epoch, 3 * per_epoch)
    assert len(found) == 3 * parts
    assert {per_epoch, 2 * per_epoch, 3 * per_epoch} <= set(found)


def test_an_interval_shorter_than_a_step_is_due_every_step():
    assert due_steps(Every(0.01, "epochs"), 4, 4) == [1, 2, 3, 4]


def test_minutes_follow_the_clock():
    every = Every(10, "minutes")
    assert not due(every, step=5, per_epoch=1, minutes_since_last=9.9)
    assert due(every, step=5, per_epoch=1, minutes_since_last=10.0)


def test_never_is_never_due():
    assert not due(None, step=5, per_epoch=1, minutes_since_last=99.0)


def test_totals():
    assert steps_per_epoch(10, 4) == 3
    assert total_steps(steps=7, epochs=None, per_epoch=3) == 7
    assert total_steps(steps=None, epochs=2, per_epoch=3) == 6
    assert total_steps(steps=None, epochs=0.5, per_epoch=3) == 2
    assert total_steps(steps=None, epochs=0.001, per_epoch=3) == 1
    assert total_steps(steps=None, epochs=0.1 + 0.2, per_epoch=10) == 3
