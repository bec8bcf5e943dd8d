"""Cutting a global batch, and a plan's round trip."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rung.strategies.plan import Plan, cut


def plan(**changes):
    given = {"strategy": "ddp", "device": "cpu", "devices": 1, "global_batch": 8, "micro_batch": 4}
    return Plan(**{**given, **changes})


@given(
    devices=st.integers(1, 9), batch=st.integers(1, 200), micro=st.integers(1, 40), part=st.floats(0, 1), data=st.data()
)
def test_every_sample_is_taken_exactly_once_and_no_micro_batch_is_too_large(devices, batch, micro, part, data):
    shares = ()
    if data.draw(st.booleans()):
        edges = sorted(data.draw(st.lists(st.integers(0, batch), min_size=devices - 1, max_size=devices - 1)))
        shares = tuple(b - a for a, b in zip([0, *edges], [*edges, batch], strict=True))
    count = max(1, round(part * batch))
    found = cut(count, plan(devices=devices, global_batch=batch, micro_batch=micro, shares=shares))
    taken = [i for rank in found.slices for start, stop in rank for i in range(start, stop)]
    assert taken == list(range(count))
    assert all(len(rank) == found.slots for rank in found.slices)
    assert all(stop - start <= micro for rank in found.slices for start, stop in rank)


def test_equal_shares_differ_by_one_sample_at_most():
    found = cut(10, plan(devices=4, global_batch=10, micro_batch=99))
    assert sorted(stop - start for [(start, stop)] in found.slices) == [2, 2, 3, 3]


def test_shares_hold_for_a_smaller_last_batch_too():
    found = cut(7, plan(devices=2, global_batch=14, shares=(10, 4), micro_batch=99))
    assert [stop - start for [(start, stop)] in found.slices] == [5, 2]


@pytest.mark.parametrize("count", [0, -1, 9])
def test_a_count_outside_the_global_batch_is_refused(count):
    with pytest.raises(ValueError, match=str(count)):
        cut(count, plan())


@pytest.mark.parametrize(
    "wrong",
    [{"devices": 0}, {"micro_batch": 0}, {"strategy": "single", "devices": 2}, {"devices": 2, "shares": (8,)},
     {"devices": 2, "shares": (4, 3)}],
)  # fmt: skip
def test_impossible_plans_cannot_be_made(wrong):
    with pytest.raises(ValueError):
        plan(**wrong)


def test_a_plan_survives_its_json():
    original = plan(devices=2, shares=(5, 3), reasons={"strategy": "two devices"}, memory_cap_bytes=1 << 30)
    assert Plan.from_json(original.to_json()) == original


def test_unknown_fields_of_a_stored_plan_are_named():
    text = json.dumps({**json.loads(plan().to_json()), "colour": "red"})
    with pytest.raises(ValueError, match="colour"):
        Plan.from_json(text)


def test_the_description_shows_how_the_batch_is_cut():
    assert "batch 8 = 2 x 2 x 2" in plan(devices=2, micro_batch=2).describe()
