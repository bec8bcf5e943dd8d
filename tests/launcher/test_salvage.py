"""Which ranks write what after a failure."""

import pytest

from rung.launcher.checkpoint.manifest import Part
from rung.launcher.keeper import Gathering
from rung.launcher.messages import Position
from rung.launcher.salvage import salvage
from rung.strategies.plan import Plan


def plan(strategy, devices):
    return Plan(strategy=strategy, device="cpu", devices=devices, global_batch=8, micro_batch=1)


def at(step, *, sound=True):
    return Position(step=step, sound=sound, failing=False)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_if_all_are_sound_each_writes_its_share(strategy):
    found = salvage(plan(strategy, 3), {0: at(7), 1: at(7), 2: at(7)}, committed_step=5)
    assert (found.step, found.writers, found.whole) == (7, (0, 1, 2), False)


def test_under_ddp_one_survivor_writes_everything():
    found = salvage(plan("ddp", 3), {1: at(7), 2: at(7)}, committed_step=5)
    assert (found.step, found.writers, found.whole) == (7, (1,), True)


def test_under_ddp_the_newest_sound_step_counts():
    found = salvage(plan("ddp", 3), {0: at(6, sound=False), 1: at(6), 2: at(7)}, committed_step=5)
    assert (found.step, found.writers, found.whole) == (7, (2,), True)


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize(
    "positions", [{0: at(7)}, {0: at(7), 1: at(8)}, {0: at(7), 1: at(7, sound=False)}], ids=["dead", "ahead", "torn"]
)
def test_under_zero_a_missing_part_cannot_be_replaced(strategy, positions):
    assert salvage(plan(strategy, 2), positions, committed_step=5) is None


def test_nothing_is_written_that_is_saved_already():
    assert salvage(plan("ddp", 2), {0: at(5), 1: at(5)}, committed_step=5) is None


def test_the_state_before_the_first_step_is_worth_nothing():
    assert salvage(plan("ddp", 2), {0: at(0), 1: at(0)}, committed_step=-1) is None


def test_nobody_is_left():
    assert salvage(plan("ddp", 2), {}, committed_step=-1) is None


def part(rank, world, step=16):
    return Part(step=step, rank=rank, world=world, attempt="1", files=(), table="[]", pieces=None, meta={})


def test_a_survivors_whole_state_is_not_mixed_with_shares_of_the_same_step():
    gathering = Gathering()
    assert gathering.add(part(1, 2)) is None  # then rank 0 dies while it writes its share
    whole = part(0, 1)
    assert gathering.add(whole) == [whole]
    assert gathering.add(part(1, 2, step=17)) is None
    assert [p.rank for p in gathering.add(part(0, 2, step=17))] == [0, 1]
