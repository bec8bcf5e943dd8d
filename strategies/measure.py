"""How much memory the device of this process has taken: now, at its peak, and against which limit."""

import os
import threading

import torch
import torch.distributed as dist

from rung.strategies.memory import CONTEXT_BYTES, NCCL_BYTES

#: How often the memory of a CPU worker is looked at, in seconds. A look takes 3 microseconds, but also the GIL: looking
#: ten times as often was seen to cost steps of 5 ms a few percent.
LOOK_S = 0.1
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


class Memory:
    """Watches one device from its construction on, and on CUDA has the allocator keep to the cap.

    On a CPU the device's memory is the private memory of this process (what RLIMIT_DATA counts), above what it had at
    construction: make it before the model is built. A thread looks at it, since the kernel keeps no peak of it.
    """

    def __init__(self, device: torch.device, cap_bytes: int | None) -> None:
        self.device = device
        self.limit = cap_bytes
        self._peak = 0
        self._stop = threading.Event()
        if device.type == "cuda":
            total = torch.cuda.get_device_properties(device).total_memory
            self.limit = min(cap_bytes or total, total)
            self._outside = CONTEXT_BYTES + (NCCL_BYTES if dist.is_initialized() else 0)
            if cap_bytes is not None:
                torch.cuda.set_per_process_memory_fraction(max(0, self.limit - self._outside) / total, device)
        elif device.type == "cpu":
            self._baseline = private_bytes()
            threading.Thread(target=self._watch, name="rung-memory", daemon=True).start()

    def now(self) -> int:
        """Bytes taken now (on CUDA: reserved by the allocator, since that is what others cannot have, and outside)."""
        if self.device.type == "cuda":
            return int(torch.cuda.memory_reserved(self.device)) + self._outside
        if self.device.type == "mps":
            return int(torch.mps.driver_allocated_memory())
        return max(0, private_bytes() - self._baseline)

    def peak(self) -> int:
        """The most bytes taken at once by training (on a CPU: until `settle`)."""
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_reserved(self.device)) + self._outside
        if not self._stop.is_set():
            self._peak = max(self._peak, self.now())
        return self._peak

    def settle(self) -> None:
        """From now on host buffers for saving come and go, which a CPU cannot tell from training: the peak is final."""
        self.peak()
        self._stop.set()

    def _watch(self) -> None:
        while not self._stop.wait(LOOK_S):
            self._peak = max(self._peak, self.now())


def private_bytes() -> int:
    """Private writable memory of this process; 0 where there is no /proc, or no memory left to read it with."""
    try:
        with open("/proc/self/statm", "rb") as f:  # noqa: PTH123 - as cheap as can be
            return int(f.read().split()[5]) * _PAGE_BYTES
    except (OSError, MemoryError):
        return 0
