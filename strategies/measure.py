"""How much memory the device of this process has taken: now, at its peak, and against which limit."""

from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")


class Memory:
    """Watches one device from its construction on. On a CPU the device's memory is the process's own, counted above
    what the process had at construction (make it before the model is built)."""

    def __init__(self, device: torch.device, cap_bytes: int | None) -> None:
        self.device = device
        self.limit = cap_bytes
        self._baseline = {} if device.type != "cpu" else _process()
        self._seen = 0
        if device.type == "cuda":
            total = torch.cuda.get_device_properties(device).total_memory
            self.limit = min(cap_bytes or total, total)

    def now(self) -> int:
        """Bytes taken now (on CUDA: reserved by the allocator, since that is what others cannot have)."""
        if self.device.type == "cuda":
            return int(torch.cuda.memory_reserved(self.device))
        if self.device.type == "mps":
            return int(torch.mps.driver_allocated_memory())
        here = _process()
        used = max(0, here.get("VmRSS", 0) - self._baseline.get("VmRSS", 0))
        self._seen = max(self._seen, used)
        return used

    def peak(self) -> int:
        """The most bytes taken at once since construction."""
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_reserved(self.device))
        now = self.now()
        if self.device.type == "mps":
            self._seen = max(self._seen, now)
            return self._seen
        return max(self._seen, _process().get("VmHWM", 0) - self._baseline.get("VmRSS", 0))


def _process() -> dict[str, int]:
    """Sizes of this process in bytes, by the kernel's names; empty where there is no /proc."""
    try:
        text = _STATUS.read_text()
    except OSError:
        return {}
    lines = (line.split() for line in text.splitlines() if line.startswith("Vm"))
    return {name.rstrip(":"): int(value) * 1024 for name, value, *_ in lines}
