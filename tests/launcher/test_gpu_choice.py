"""Which GPUs of this machine the workers get."""

from rung.cluster.gpus import Device
from rung.launcher.workers import freest

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
