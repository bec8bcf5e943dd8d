"""Which GPUs of this machine the workers get."""

from dataclasses import replace

from rung.cluster.gpus import Device, DeviceProcess
from rung.launcher.workers import crowded, freest

GIB = 1 << 30


def gpu(index, free):
    return Device(
        kind="cuda", index=index, name="H", uuid=f"GPU-{index}", total_bytes=80 * GIB, free_bytes=free,
        capability="9.0", bf16=True, vendor="nvidia",
    )  # fmt: skip


def test_busy_ones_are_avoided_while_there_are_others():
    gpus = [gpu(0, 20 * GIB), gpu(1, 79 * GIB), gpu(2, 79 * GIB), gpu(3, 5 * GIB)]
    assert [g.uuid for g in freest(gpus, 2)] == ["GPU-1", "GPU-2"]
    assert [g.uuid for g in freest(gpus, 3)] == ["GPU-0", "GPU-1", "GPU-2"]


def test_equally_free_ones_keep_their_order_whatever_a_few_megabytes_say():
    gpus = [gpu(0, 79 * GIB), gpu(1, 79 * GIB + 4096)]
    assert [g.index for g in freest(gpus, 1)] == [0]


def test_a_gpu_that_others_fill_is_named_with_who_holds_it():
    full = replace(gpu(1, 20 * GIB), processes=(DeviceProcess(pid=7, name="blender", bytes=60 * GIB),))
    said = crowded([gpu(0, 79 * GIB), full], 40 * GIB)
    assert said == "GPU 1 has 20.0 GiB free of 40.0 GiB needed (blender holds the rest)"
    assert crowded([full], 10 * GIB) == ""
    assert crowded([gpu(0, 79 * GIB)], 90 * GIB) == "", "it is not too full, but too small"
