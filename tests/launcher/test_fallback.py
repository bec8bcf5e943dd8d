"""What follows from a failure: the cause decides. Pure, so every case is one call."""

import pytest

from rung.cluster.failures import Cause
from rung.launcher.fallback import MOST_REPEATS, MOST_RESTARTS, MOST_RUNGS, GiveUp, Retry, Rules, Tried, changes, decide
from rung.launcher.planner import Ladder, Rung
from rung.strategies.plan import Plan

GIB = 1 << 30


def plan(strategy="ddp", devices=2, micro=16, peak=None, **more):
    return Plan(
        strategy=strategy, device="cpu", devices=devices, global_batch=32, micro_batch=micro,
        predicted_device_peak_bytes=peak, **more,
    )  # fmt: skip


def ladder(*plans):
    return Ladder(rungs=tuple(Rung(plan=p) for p in plans))


def tried(of, cause=Cause.DEVICE_OOM, first=0, step=0, peak=0):
    return Tried(plan=of, cause=cause, first_step=first, step=step, peak_bytes=peak)


A = plan(peak=8 * GIB)
B = plan(micro=8, peak=5 * GIB)
C = plan(micro=4, peak=3 * GIB)
D = plan("zero3", micro=4, peak=1 * GIB)


def test_out_of_memory_takes_the_first_rung_that_fits_by_what_was_seen():
    # A was predicted at 8 and failed at 16: everything needs twice as much, so B (10) fits below 16.
    found = decide([tried(A, peak=16 * GIB)], ladder(A, B, C, D), Rules())
    assert isinstance(found, Retry)
    assert found.plan.micro_batch == 8
    assert A not in found.ladder.plans


def test_a_rung_whose_corrected_prediction_does_not_fit_is_passed_over():
    # A failed at 4 although 8 were predicted: there is less memory than thought, too little for B (5).
    found = decide([tried(A, peak=4 * GIB)], ladder(A, B, C, D), Rules())
    assert found.plan.micro_batch == 4


def test_the_failed_rung_is_never_tried_again():
    rest = decide([tried(A, peak=8 * GIB)], ladder(A, B), Rules())
    end = decide([tried(A, peak=8 * GIB), tried(rest.plan, peak=8 * GIB)], rest.ladder, Rules())
    assert isinstance(end, GiveUp)
    assert end.fits_nowhere


def test_after_good_steps_what_no_prediction_explains_takes_the_next_smaller_rung():
    small = [plan(micro=m, peak=100) for m in (16, 8, 4, 1)]
    found = decide([tried(small[0], first=0, step=900, peak=10**9)], ladder(*small), Rules())
    assert found.plan.micro_batch == 8


def test_at_the_first_step_what_no_prediction_explains_takes_the_rung_that_needs_least():
    kinds = [plan(s, peak=p) for s, p in (("ddp", 100), ("zero1", 70), ("zero2", 60), ("zero3", 80))]
    found = decide([tried(kinds[0], peak=50)], ladder(*kinds), Rules())
    assert found.plan.strategy == "zero2", "by prediction, not by its place among the kinds"


def test_what_was_not_foreseen_is_taken_to_shrink_with_the_micro_batch():
    small = [plan(micro=m, peak=100) for m in (16, 8, 4, 1)]
    history, left, now = [], ladder(*small), small[0]
    for micro in (8, 4, 1):
        history.append(tried(now, peak=10**9))
        found = decide(history, left, Rules())
        assert found.plan.micro_batch == micro
        left, now = found.ladder, found.plan
    end = decide([*history, tried(now, peak=10**9)], left, Rules())
    assert isinstance(end, GiveUp)
    assert end.fits_nowhere


def test_a_rung_that_a_correction_took_away_is_tried_before_giving_up():
    # A failed at 4 with 8 foreseen, so B (5) was passed over for C (3); C fails too, and D (3.5) is not surely worse.
    D = plan("zero2", micro=4, peak=int(2.9 * GIB))
    first = decide([tried(A, peak=4 * GIB)], ladder(A, B, C, D), Rules())
    history = [tried(A, peak=4 * GIB), tried(first.plan, peak=4 * GIB)]
    second = decide(history, first.ladder, Rules())
    assert (first.plan.rung, second.plan.rung) == (C.rung, D.rung)
    end = decide([*history, tried(second.plan, peak=4 * GIB)], second.ladder, Rules())
    assert isinstance(end, GiveUp), "B needs more than what failed by any account"


def test_plans_that_may_just_fit_are_hopes_when_no_rung_is_left():
    unsure = plan("zero3", micro=1, peak=2 * GIB)
    known = Ladder(rungs=(Rung(plan=A),), hopes=(Rung(plan=unsure),))
    found = decide([tried(A, peak=4 * GIB)], known, Rules())
    assert found.plan == unsure
    history = [tried(A, peak=4 * GIB), tried(unsure, peak=4 * GIB)]
    assert isinstance(decide(history, found.ladder, Rules()), GiveUp)


def test_without_predictions_a_more_frugal_plan_is_taken():
    big, small, zero = plan(micro=16), plan(micro=8), plan("zero2", micro=16)
    assert decide([tried(big)], ladder(big, small, zero), Rules()).plan == small
    assert decide([tried(small)], ladder(big, small, zero), Rules()).plan == zero


def test_memory_that_another_program_holds_is_waited_for_once_before_the_plan_is_changed():
    pressed = Tried(plan=A, cause=Cause.DEVICE_OOM, first_step=0, step=7, peak_bytes=4 * GIB, pressed="python holds 4")
    found = decide([pressed], ladder(A, B, C), Rules())
    assert (found.plan, found.ladder) == (A, ladder(A, B, C))
    assert "python holds 4" in found.reason
    assert decide([pressed, pressed], ladder(A, B, C), Rules()).plan.micro_batch < A.micro_batch


def test_fallback_off_stops_at_once():
    found = decide([tried(A)], ladder(A, B), Rules(enabled=False))
    assert isinstance(found, GiveUp)
    assert "fallback: off" in found.reason


def test_allow_restricts_what_may_change():
    found = decide([tried(A, peak=8 * GIB)], ladder(A, B, C, D), Rules(allow=("micro_batch",)))
    assert found.plan.micro_batch == 8
    only_zero = decide([tried(A, peak=8 * GIB)], ladder(A, B, C, plan("zero3", peak=GIB)), Rules(allow=("strategy",)))
    assert only_zero.plan.strategy == "zero3"


def test_out_of_memory_attempts_are_bounded_and_progress_resets_the_bound():
    stuck = [tried(A, peak=8 * GIB)] * (MOST_RUNGS + 1)
    assert isinstance(decide(stuck, ladder(A, B), Rules()), GiveUp)
    moving = [tried(A, first=n, step=n + 1, peak=8 * GIB) for n in range(MOST_RUNGS + 5)]
    assert isinstance(decide(moving, ladder(A, B), Rules()), Retry)


def test_steps_that_are_taken_again_and_lost_again_are_no_progress():
    """Without a checkpoint each attempt takes them anew; the bound holds all the same."""
    first = [tried(A, Cause.LOST_WORKER, first=0, step=9)]
    again = [tried(A, Cause.LOST_WORKER, first=0, step=1 + n % 9) for n in range(MOST_REPEATS)]
    found = decide(first + again[:-1], ladder(A), Rules())
    assert "10 of 10 without getting any further" in found.reason
    assert isinstance(decide(first + again, ladder(A), Rules()), GiveUp)
    assert "10 times" not in decide(first + again[:2], ladder(A), Rules()).reason
    further = tried(A, Cause.LOST_WORKER, first=0, step=10)
    assert isinstance(decide([*first, *again, further], ladder(A), Rules()), Retry)
    later = tried(A, Cause.LOST_WORKER, first=5, step=8)  # from a checkpoint that was not there before
    assert isinstance(decide([*first, *again, later], ladder(A), Rules()), Retry)


@pytest.mark.parametrize("cause", [Cause.LOST_WORKER, Cause.HUNG])
def test_a_lost_worker_keeps_the_plan_with_growing_pauses_then_gives_up(cause):
    history, pauses = [], []
    for _ in range(MOST_RESTARTS):
        history.append(tried(A, cause))
        found = decide(history, ladder(A, B), Rules(fewest_devices=2))
        assert found.plan == A
        pauses.append(found.pause_s)
    assert pauses == sorted(pauses)
    assert pauses[0] > 0
    assert isinstance(decide([*history, tried(A, cause)], ladder(A, B), Rules(fewest_devices=2)), GiveUp)


def test_a_worker_that_stays_away_means_fewer_devices_where_the_job_allows():
    one = plan("single", devices=1)
    found = decide([tried(A, Cause.LOST_WORKER)] * (MOST_RESTARTS + 1), ladder(A, one), Rules(fewest_devices=1))
    assert found.plan == one


def test_fewer_devices_are_a_change_that_a_job_may_forbid():
    one, zero = plan("single", devices=1), plan("zero2", devices=1)
    history = [tried(A, Cause.LOST_WORKER)] * (MOST_RESTARTS + 1)
    assert changes(A, one) == ["devices"]  # ddp on one device is called single
    assert decide(history, ladder(A, one), Rules(allow=("devices",))).plan == one
    assert isinstance(decide(history, ladder(A, zero), Rules(allow=("devices",))), GiveUp)
    assert isinstance(decide(history, ladder(A, one), Rules(allow=("micro_batch",))), GiveUp)
    assert isinstance(decide(history, ladder(A, one), Rules(enabled=False)), GiveUp)


def test_progress_between_lost_workers_resets_the_count():
    history = [tried(A, Cause.LOST_WORKER, first=n, step=n + 9) for n in range(50)]
    found = decide(history, ladder(A), Rules())
    assert isinstance(found, Retry)
    assert "restart 1 of" in found.reason


@pytest.mark.parametrize(
    "cause",
    [Cause.NON_FINITE, Cause.BAD_DATA, Cause.USER_EXCEPTION, Cause.STORAGE, Cause.DEPENDENCY, Cause.PREEMPTION],
)
def test_what_would_only_happen_again_stops(cause):
    found = decide([tried(A, cause)], ladder(A, B), Rules())
    assert isinstance(found, GiveUp)
    assert not found.fits_nowhere


def test_changes_are_named_as_the_job_file_names_them():
    assert changes(A, B) == ["micro_batch"]
    assert changes(A, D) == ["strategy", "micro_batch"]
    assert changes(A, plan(activation_checkpointing=True)) == ["checkpointing"]
    assert changes(plan("zero3"), plan("zero3", offload_optimizer="disk")) == ["offload"]


def test_a_rung_that_needs_what_is_missing_is_passed_over_in_a_fallback_only():
    full = plan("zero3", micro=16)
    disk, small = plan("zero3", micro=16, offload_optimizer="disk"), plan("zero3", micro=8)
    history = [tried(full), tried(disk, Cause.DEPENDENCY)]
    assert decide(history, ladder(disk, small), Rules()).plan == small
    more = plan("zero3", micro=16, offload_optimizer="disk", offload_parameters="disk")
    assert decide(history, ladder(disk, more, small), Rules()).plan == small, "parameters need the same library"
    assert isinstance(decide(history[1:], ladder(disk, small), Rules()), GiveUp)
    assert isinstance(decide(history, ladder(disk), Rules()), GiveUp)
