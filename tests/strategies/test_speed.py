"""How fast a machine is found to be, and what follows for plans."""

import json
from dataclasses import asdict, replace

from rung.launcher.machines import cpu_device
from rung.launcher.speeds import speed_from_json
from rung.strategies.memory import GIB, HostFacts
from rung.strategies.speed import Rates, Speed, measure_speed

CORE = Rates(flops=5e10, bytes_per_s=2e10, stream_bytes_per_s=8e9, fresh_bytes_per_s=1e9)
WHOLE = Rates(flops=1.8e11, bytes_per_s=7e10, stream_bytes_per_s=2e10, fresh_bytes_per_s=3e9)
SPEED = Speed(cores=4, whole=WHOLE, core=CORE, launch_s=5e-6)


def test_every_rate_is_measured_and_survives_json():
    speed = measure_speed(1, 0.01)
    for rates in (speed.whole, speed.core):
        assert all(1e7 < value < 1e14 for value in asdict(rates).values())
    assert 1e-7 < speed.launch_s < 1e-2
    assert speed_from_json(json.dumps(asdict(speed))) == speed


def test_threads_that_were_kept_waiting_by_others_are_noticed():
    assert not SPEED.disturbed
    assert replace(SPEED, whole=replace(WHOLE, flops=9e10)).disturbed
    assert replace(SPEED, whole=replace(WHOLE, bytes_per_s=3e10)).disturbed


def test_cores_that_were_kept_waiting_together_are_taken_to_be_what_they_are_apart():
    assert SPEED.steadied is SPEED
    waited = replace(SPEED, whole=replace(WHOLE, bytes_per_s=1e9)).steadied
    assert waited.whole.flops == WHOLE.flops
    assert CORE.bytes_per_s * 2 < waited.whole.bytes_per_s < CORE.bytes_per_s * 4
    assert not waited.disturbed


def test_a_measured_cpu_has_the_rates_that_were_measured():
    host = HostFacts(total_bytes=GIB, free_bytes=GIB, cores=4)
    device = cpu_device(host, speed=SPEED)
    assert device.flops["fp32"] == WHOLE.flops
    assert device.core is not None
    assert (device.core.flops["fp32"], device.core.launch_s) == (CORE.flops, 5e-6)
    plain = cpu_device(host)
    assert device.flops["bf16"] / device.flops["fp32"] == plain.flops["bf16"] / plain.flops["fp32"]
