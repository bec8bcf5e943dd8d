"""Checks of GPUs: who else uses them, memory errors, clocks, and what the kernel's log says."""

import os
import re
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rung.cluster.gpus import gpu_health
from rung.cluster.hardware import Device, Hardware
from rung.strategies.findings import Finding, Level

_BUSY_BYTES = 256 << 20  # a bare context takes about as much
# NVIDIA's "Xid Errors" documentation, those that matter to training.
_XIDS = {
    31: "a kernel touched memory that is not its own: a fault of the program, seldom of the GPU",
    48: "an uncorrectable memory error",
    63: "a memory row was retired; it takes effect after a reset",
    64: "a memory row could not be retired",
    74: "an NVLink connection failed",
    79: "the GPU fell off the bus: power, heat or seating",
    94: "a contained memory error: the program that hit it had to end",
    95: "an uncontained memory error: the GPU needs a reset",
    119: "the GPU's own processor did not answer: the GPU needs a reset",
}


def check_busy(hardware: Hardware) -> Iterator[Finding]:
    """Memory of the devices that others hold, by name where the driver tells."""
    for device in hardware.of("cuda"):
        others = [process for process in device.processes if process.pid != os.getpid()]
        held = device.total_bytes - device.free_bytes
        if not others and held < max(_BUSY_BYTES, device.total_bytes // 50):
            yield Finding(level=Level.OK, subject="gpu.busy", fact=f"{_named(device)} is free")
            continue
        names = [f"{one.name or 'a process'} (pid {one.pid})" for one in others]
        # PIDs of another container or of a process that has just ended are not seen here.
        seen = [one.pid for one in others if Path(f"/proc/{one.pid}").exists()]
        yield Finding(
            level=Level.WARNING,
            subject="gpu.busy",
            fact=f"{_named(device)}: {held / 2**30:.1f} GiB are in use by "
            + (", ".join(names) or "something the driver does not name"),
            why="the run gets only the rest of the memory, and shares the time",
            fix=f"if they are left over: kill {' '.join(map(str, seen))}"
            if seen
            else f"nvidia-smi -i {device.physical_index}",
        )


def check_health(hardware: Hardware, deadline: float, environ: Mapping[str, str] | None = None) -> Iterator[Finding]:
    """Memory errors, clocks and PCIe width, by NVML. `deadline`: of `time.monotonic`."""
    if not any(device.vendor == "nvidia" for device in hardware.devices):
        return
    raw, reason = gpu_health(deadline, environ=environ)
    if raw is None:
        yield Finding(
            level=Level.WARNING,
            subject="gpu.health",
            fact=f"the driver could not be asked: {reason}",
            fix="nvidia-smi",
        )
        return
    used = {device.uuid for device in hardware.devices} | {
        device.alias.removeprefix("MIG-").partition("/")[0] for device in hardware.devices
    }
    for gpu in raw["gpus"]:
        if gpu["uuid"] in used:
            yield from judge_health(f"GPU {gpu['index']} ({gpu['name']})", gpu["index"], gpu["health"])


def judge_health(name: str, index: int, health: dict[str, Any]) -> Iterator[Finding]:
    """What NVML's figures of one GPU mean; keys as in `nvml.RawGpu`, those missing say nothing."""
    troubles: list[Finding] = []

    def add(level: Level, subject: str, fact: str, why: str, fix: str) -> None:
        troubles.append(Finding(level=level, subject=subject, fact=f"{name}: {fact}", why=why, fix=fix))

    reset = f"stop what uses it, then: nvidia-smi --gpu-reset -i {index}"
    if count := health.get("uncorrected_errors", 0):
        why = "results may be wrong, and programs that hit it end"
        add(Level.WARNING, "gpu.ecc", f"{count} uncorrectable memory errors since the driver was loaded", why, reset)
    rows = health.get("remapped_rows")
    if rows and rows[3]:
        why = "the memory cannot be repaired any more"
        add(Level.ERROR, "gpu.ecc", "a memory row could not be remapped", why, "have the GPU replaced")
    elif (rows and rows[2]) or health.get("retirement_pending"):
        add(Level.WARNING, "gpu.ecc", "bad memory is to be retired", "it stays in use until a reset", reset)
    if slow := health.get("slowdowns"):
        heat = f" at {health['temperature_c']} °C" if "temperature_c" in health else ""
        fact = f"{', '.join(slow)} in force{heat}, clock {health.get('clock_mhz', '?')} MHz"
        fact += f" of {health.get('clock_max_mhz', '?')}"
        add(Level.WARNING, "gpu.clocks", fact, "steps take longer, and peers wait for it", "check cooling and power")
    if health.get("pcie_width", 1) * 2 < health.get("pcie_max_width", 1):
        fact = f"PCIe runs with {health['pcie_width']} of {health['pcie_max_width']} lanes"
        add(Level.WARNING, "gpu.pcie", fact, "loading and offload are slower by that much", "reseat the card or riser")
    if health.get("compute_mode") == 2:
        fix = f"nvidia-smi -i {index} --compute-mode=DEFAULT"
        add(Level.ERROR, "gpu.mode", "compute mode is 'prohibited'", "no program may use it", fix)
    yield from troubles or [Finding(level=Level.OK, subject="gpu.health", fact=f"{name} is well")]


def check_xid(hardware: Hardware, deadline: float) -> Iterator[Finding]:
    """What the kernel's log says of NVIDIA GPUs; most containers may not read it."""
    if not any(device.vendor == "nvidia" for device in hardware.devices):
        return
    try:
        done = subprocess.run(
            ["dmesg"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=max(0.1, deadline - time.monotonic()),
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        yield Finding(level=Level.OK, subject="gpu.xid", fact=f"the kernel's log could not be read: {error}")
        return
    if done.returncode:
        yield Finding(level=Level.OK, subject="gpu.xid", fact="the kernel's log may not be read here (run: sudo dmesg)")
        return
    yield from judge_log(done.stdout)


def judge_log(text: str) -> Iterator[Finding]:
    """One finding for each kind of Xid and GPU in a kernel log."""
    counts: dict[tuple[str, int], int] = {}
    for pci, number in re.findall(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d{1,4})", text):
        counts[pci, int(number)] = counts.get((pci, int(number)), 0) + 1
    if not counts:
        yield Finding(level=Level.OK, subject="gpu.xid", fact="no GPU errors in the kernel's log")
    for (pci, number), count in sorted(counts.items()):
        yield Finding(
            level=Level.WARNING,
            subject="gpu.xid",
            fact=f"Xid {number} on the GPU at {pci}, {count} times since the machine started",
            why=_XIDS.get(number, "see NVIDIA's list of Xid errors"),
            fix="dmesg | grep Xid, to see when; if it is recent, leave this GPU out or reset it",
        )


def _named(device: Device) -> str:
    return f"GPU {device.physical_index} ({device.name})"
