"""Predictions beside what real workers take: a short part of `python -m benchmarks.memory`."""

import pytest

from benchmarks.memory import plan_of, predicted
from benchmarks.memory_held_out import find
from benchmarks.memory_measure import measure, profile_case

# Model, way, which of its three micro-batches, and how far off the prediction may be.
SHORT = (
    ("decoder 4M", "single", 1, 0.06),
    ("CNN, BatchNorm", "single", 1, 0.06),
    ("MLP", "ddp", 1, 0.07),
    ("encoder-decoder", "zero2", 1, 0.10),
)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("name", "way", "size", "most"), SHORT, ids=lambda value: str(value))
def test_a_worker_takes_what_was_predicted_and_runs_under_that_cap(name, way, size, most):
    case = find(name)
    plan = plan_of(case, way, case.micro_batches[size])
    taken, headroom, _ = predicted(profile_case(name), plan)
    found = measure(name, plan)
    assert not found.error
    assert found.peak_bytes == pytest.approx(taken, rel=most)
    if way == "single":
        assert measure(name, plan.with_(memory_cap_bytes=headroom)).error == ""
        refused = measure(name, plan.with_(memory_cap_bytes=int(0.8 * found.peak_bytes)))
        assert "memory" in refused.error
