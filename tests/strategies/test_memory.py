from dataclasses import replace

import pytest

from rung.strategies.calibration import Seen, calibrate
from rung.strategies.memory import MIB, Factors, accumulation, predict
from rung.strategies.plan import Plan
from rung.strategies.profile import Activity, Line, ParameterGroup, Profile


def make_profile(count=10**9, *, per_sample=100e6, precision="fp32", frozen=0):
    each = {"count": count // 40, "bytes": count // 10, "dtype": "float32", "trainable": True}
    groups = [ParameterGroup(name=f"b.{i}", **each) for i in range(40)]
    if frozen:
        groups.append(ParameterGroup(name="f", count=frozen, bytes=4 * frozen, dtype="float32", trainable=False))
    grads = 4 * count

    def activity(share, work):
        return Activity(
            first=(Line(grads, 0.1 * per_sample), Line(0, share * per_sample)),
            again=(Line(0, share * per_sample),),
            flops=Line(0, 6e12 * work),
            moved=Line(0, 1e9),
            operations=1000,
        )

    return Profile(
        task="t", digest="d", method="given", precision=precision, optimizer="AdamW", groups=tuple(groups),
        buffer_bytes=0, optimizer_bytes=8 * count, step_bytes=0, input_bytes=Line(0, 1000),
        plain=activity(1.0, 1.0), checkpointed=activity(0.2, 4 / 3), largest_parameter=count // 100,
    )  # fmt: skip


def make_plan(strategy="single", devices=1, micro=4, steps=1, **more):
    more = {"device": "cuda", **more}
    return Plan(strategy=strategy, devices=devices, global_batch=devices * micro * steps, micro_batch=micro, **more)


def item(account, name):
    return sum(entry.device_bytes for entry in account.items if entry.name.startswith(name))


def test_adam_in_fp32_takes_sixteen_bytes_for_each_weight():
    account = predict(make_profile(), make_plan(micro=1))
    assert item(account, "weights") + item(account, "gradients") + item(account, "optimizer") == 16 * 10**9


def test_the_peak_is_the_sum_of_the_items():
    account = predict(make_profile(), make_plan("zero2", 4))
    assert account.device_peak_bytes == sum(entry.device_bytes for entry in account.items)
    assert all(entry.source for entry in account.items)


def test_zero_divides_what_it_says():
    account = predict(make_profile(precision="bf16"), make_plan("zero2", 8, precision="bf16"))
    assert item(account, "weights") == 2 * 10**9
    assert item(account, "masters") == 12 * 10**9 // 8
    three = predict(make_profile(precision="bf16"), make_plan("zero3", 8, precision="bf16"))
    assert item(three, "weights") == 2 * 10**9 // 8
    assert item(three, "live") < 10**9


def test_offload_moves_state_to_the_host():
    here = predict(make_profile(), make_plan("zero2", 2))
    away = predict(make_profile(), make_plan("zero2", 2, offload_optimizer="host"))
    assert here.device_peak_bytes - away.device_peak_bytes >= 12 * 10**9 // 2
    assert away.host_peak_bytes >= 12 * 10**9 // 2
    disk = predict(make_profile(), make_plan("zero3", 2, offload_optimizer="disk"))
    assert disk.host_peak_bytes < away.host_peak_bytes


def test_more_samples_never_take_less_and_checkpointing_never_more():
    profile = make_profile()
    peaks = [predict(profile, make_plan(micro=micro)).device_peak_bytes for micro in (1, 2, 8, 64, 256)]
    assert peaks == sorted(peaks)
    saved = predict(profile, make_plan(micro=64, activation_checkpointing=True))
    assert saved.device_peak_bytes < peaks[3]


def test_on_a_cpu_the_device_is_the_host():
    account = predict(make_profile(), make_plan(device="cpu"))
    assert account.host_peak_bytes >= account.device_peak_bytes


def test_without_a_cap_a_cpu_is_predicted_with_more_slack():
    profile = make_profile(10**7)
    loose = predict(profile, make_plan(device="cpu"))
    tight = predict(profile, make_plan(device="cpu", memory_cap_bytes=2**33))
    assert loose.device_peak_bytes > tight.device_peak_bytes
    assert loose.error > tight.error


@pytest.mark.parametrize("batch", [1, 7, 64, 65])
@pytest.mark.parametrize("devices", [1, 3, 4])
@pytest.mark.parametrize("micro", [1, 5, 64])
def test_accumulation_is_that_of_the_cut(batch, devices, micro):
    plan = Plan(strategy="ddp", device="cpu", devices=devices, global_batch=batch, micro_batch=micro)
    assert accumulation(plan) == plan.accumulation


def test_calibration_adds_what_was_missing_and_narrows_the_band():
    seen = [
        Seen(predicted_bytes=1000 * MIB, measured_bytes=1050 * MIB, predicted_s=1.0, measured_s=2.0),
        Seen(predicted_bytes=2000 * MIB, measured_bytes=2052 * MIB, predicted_s=2.0, measured_s=4.2),
        Seen(predicted_bytes=500 * MIB, measured_bytes=548 * MIB, predicted_s=0.5, measured_s=0.9),
    ]
    factors = calibrate(seen)
    assert factors.device_bytes == 50 * MIB
    assert factors.time == 2.0
    assert factors.runs == 3
    assert factors.error is not None
    assert factors.error < 0.005
    plain = predict(make_profile(), make_plan())
    better = predict(make_profile(), make_plan(), factors)
    assert better.device_peak_bytes - plain.device_peak_bytes == 50 * MIB
    assert calibrate([]) == Factors()


def test_the_band_of_a_tiny_job_is_wide_and_that_of_a_large_one_narrow():
    def account(count):
        return predict(make_profile(count, per_sample=count / 10), make_plan(device="cpu", memory_cap_bytes=2**33))

    tiny, large = account(10**5), account(10**8)
    assert tiny.device_bytes_with_headroom - tiny.device_peak_bytes >= 3 * MIB
    assert tiny.error > 0.15
    assert large.error < 0.06


def test_what_making_the_model_imports_counts_on_a_cpu_only():
    profile = replace(make_profile(), imported_bytes=50 * MIB)
    assert item(predict(profile, make_plan(device="cpu")), "imports") == 50 * MIB
    assert item(predict(profile, make_plan()), "imports") == 0


def test_what_deepspeed_copies_in_a_step_is_counted_where_activations_are_few():
    def step(**more):
        return item(predict(make_profile(per_sample=1.0), make_plan("zero2", 2, micro=1, **more)), "activations")

    bucket = 4 * 50_000_000
    assert step() == 8 * 10**9 // 2 - bucket
    assert step(steps=2) == 4 * 10**9 // 2 - bucket  # what was added up is an item of its own
    away = predict(make_profile(per_sample=1.0), make_plan("zero2", 2, micro=1, offload_optimizer="host"))
    assert item(away, "activations") == bucket + 44 * MIB
    assert item(away, "one gradient") == 4 * 10**7


def test_copies_that_autocast_makes_are_not_there_where_weights_are_narrow_themselves():
    profile = make_profile(precision="bf16")
    copied = replace(profile, plain=replace(profile.plain, again=(Line(2e9, 100e6), Line(1e8, 110e6))))
    activations = item(predict(copied, make_plan("ddp", 8, precision="bf16")), "activations")
    assert activations == pytest.approx(2e9 + 4 * 100e6)
    activations = item(predict(copied, make_plan("zero3", 8, precision="bf16")), "activations")
    assert activations == pytest.approx(1e8 + 4 * 110e6)


def test_zero3_copies_what_it_prefetches_beside_activations_and_its_bucket_twice():
    count = 10**7
    profile, plan = make_profile(count, per_sample=0), make_plan("zero3", 2, device="cpu", memory_cap_bytes=2**33)
    assert item(predict(profile, plan), "activations") == 4 * count + 4 * count // 40
    busy = make_profile(count, per_sample=30e6)
    assert item(predict(busy, plan), "activations") == 4 * count + 3 * 120e6 // 4
