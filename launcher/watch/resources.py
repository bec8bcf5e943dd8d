"""What a run takes of its machine, sampled while it trains: memory, processors, disk, devices. No torch.

A thread looks about once a second. It has time enough: a driver or a mount that hangs holds up this thread only, and
the run goes on without samples. One look costs about a millisecond of one core.
"""

import contextlib
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rung.cluster.memory_trace import Sample, process_tree

EVERY_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceUse:
    """One GPU as its driver sees it: memory that is taken by anyone, and the part of the time it computed (0..1)."""

    index: int
    memory_bytes: int
    total_bytes: int
    busy: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Resources:
    """One look. Bytes; None where the system does not tell.

    `host_free_bytes` of `host_limit_bytes`: what the machine or the control group, whichever is tighter, can still
    give. `worker_bytes`: private memory of all workers and their loaders. `cpu`: cores that they kept busy since the
    look before, of `cpus` that are allowed. `disk_free_bytes`: where the run folder is.
    """

    at: float
    host_free_bytes: int | None = None
    host_limit_bytes: int | None = None
    worker_bytes: int = 0
    cpu: float | None = None
    cpus: float = 1.0
    disk_free_bytes: int | None = None
    devices: tuple[DeviceUse, ...] = ()

    def to_row(self) -> dict[str, float]:
        """Flat numbers for metrics; what is not known is left out."""
        row: dict[str, float | None] = {
            "host_free_bytes": self.host_free_bytes, "worker_bytes": self.worker_bytes, "cpu": self.cpu,
            "disk_free_bytes": self.disk_free_bytes,
        }  # fmt: skip
        for d in self.devices:
            row |= {f"device{d.index}_memory_bytes": d.memory_bytes, f"device{d.index}_busy": d.busy}
        return {name: round(value, 4) for name, value in row.items() if value is not None}


class Sampler:
    """Looks every second until it is closed. `pids` gives the workers' processes by rank, `memory` the newest sample of
    their memory; `gpus` says whether to ask a driver."""

    def __init__(
        self, *, pids: Callable[[], Mapping[int, int]], memory: Callable[[], tuple[Sample, ...]], folder: Path,
        gpus: bool, every_s: float = EVERY_S,
    ) -> None:  # fmt: skip
        self._pids, self._memory, self._folder, self._gpus = pids, memory, folder, gpus
        self._every_s = every_s
        self._cpu_before: tuple[float, float] | None = None
        self._nvml: _Nvml | None = None
        self._found: deque[Resources] = deque(maxlen=64)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rung-resources", daemon=True)

    def start(self) -> "Sampler":
        """Begins to look."""
        self._thread.start()
        return self

    def close(self) -> None:
        """Looks no more. Does not wait for a look that hangs."""
        self._over.set()
        self._thread.join(timeout=0.5)

    def take(self) -> list[Resources]:
        """What was seen since the last call."""
        taken = []
        while self._found:
            taken.append(self._found.popleft())
        return taken

    def look(self) -> Resources:
        """One look, now."""
        if self._gpus and self._nvml is None:
            self._nvml = _Nvml()
        samples = self._memory()
        newest = samples[-1] if samples else None
        disk: int | None = None
        with contextlib.suppress(OSError):  # the folder may have been moved away; a save will say so
            disk = shutil.disk_usage(self._folder).free
        return Resources(
            at=time.time(),
            host_free_bytes=newest.free if newest else None,
            host_limit_bytes=newest.limit if newest else None,
            worker_bytes=sum(newest.by_rank.values()) if newest else 0,
            cpu=self._cpu(),
            cpus=allowed_cpus(),
            disk_free_bytes=disk,
            devices=self._nvml.look() if self._nvml else (),
        )

    def _run(self) -> None:
        self._cpu()
        while not self._over.wait(self._every_s):
            self._found.append(self.look())

    def _cpu(self) -> float | None:
        """Cores kept busy since the last call; None at first, and where processes do not show their times."""
        now = time.monotonic()
        used = sum(cpu_seconds(pid) for root in self._pids().values() for pid in process_tree(root))
        before, self._cpu_before = self._cpu_before, (now, used)
        if before is None or now <= before[0]:
            return None
        return max(0.0, used - before[1]) / (now - before[0])


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has taken so far; 0 if it is gone."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def allowed_cpus() -> float:
    """Processors that this process may use."""
    return float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


class _Nvml:
    """NVIDIA's management library, in this process: it is asked once a second, and makes no CUDA context."""

    def __init__(self) -> None:
        self._handles: dict[int, Any] = {}
        try:
            import pynvml

            self._library: Any = pynvml
            pynvml.nvmlInit()
            self._find()
        except Exception:  # no driver or no package: what a GPU does is then not shown, and the run needs it not
            self._handles = {}

    def _find(self) -> None:
        nvml = self._library
        shown = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = nvml.nvmlDeviceGetUUID(handle)
            uuid = uuid.decode() if isinstance(uuid, bytes) else uuid
            if not shown or str(index) in shown or any(uuid.startswith(name) for name in shown):
                self._handles[index] = handle

    def look(self) -> tuple[DeviceUse, ...]:
        """All devices that answer."""
        found = []
        for index, handle in self._handles.items():
            with contextlib.suppress(self._library.NVMLError):
                memory = self._library.nvmlDeviceGetMemoryInfo(handle)
                busy = self._library.nvmlDeviceGetUtilizationRates(handle).gpu / 100
                found.append(
                    DeviceUse(index=index, memory_bytes=int(memory.used), total_bytes=int(memory.total), busy=busy)
                )
        return tuple(found)
