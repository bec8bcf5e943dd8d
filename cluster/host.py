"""Facts about this machine's processors, memory and disks, within what a container is allowed. Linux is read from /proc
and /sys (a few milliseconds, no import); other systems are asked through psutil."""

import os
import platform
import re
import socket
from dataclasses import dataclass
from pathlib import Path

from rung.cluster.limits import ROOT, Limits, parse_cpu_list, read_limits
from rung.strategies.findings import Finding, Level


@dataclass(frozen=True, kw_only=True, slots=True)
class NumaNode:
    """Processors and memory that are near each other; `cpus` only holds those that this process may use."""

    index: int
    cpus: tuple[int, ...]
    memory_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """One machine as this process may use it.

    `cpus` is the CPU time per second that it gets: the allowed CPUs, or the quota if that is less (1.5 is possible).
    `allowed_cpus` are their numbers, `physical_cpus` the cores behind them. Memory is in bytes and under the tightest
    control-group limit; `memory_limit_source` says what sets it. `disk_folder` is the existing folder that was
    measured (the nearest parent of the one asked for).
    """

    hostname: str
    os: str
    python: str
    cpus: float
    cpus_source: str
    allowed_cpus: tuple[int, ...]
    physical_cpus: int
    cpu_name: str
    cpu_extension: str
    cpu_bf16: bool
    memory_total_bytes: int
    memory_available_bytes: int
    memory_limit_source: str
    numa_nodes: tuple[NumaNode, ...]
    shm_total_bytes: int = 0
    shm_free_bytes: int = 0
    disk_folder: str = ""
    disk_total_bytes: int = 0
    disk_free_bytes: int = 0


def read_host(root: Path = ROOT) -> tuple[Host, list[Finding]]:
    """Everything but shared memory and disk, which can hang on a dead mount (`read_space`)."""
    if platform.system() == "Linux":
        return _linux(root)
    return _other()


def read_space(folder: Path) -> tuple[Path, int, int]:
    """(existing folder, total bytes, bytes free for this user) of the file system that `folder` is or would be on."""
    existing = folder.absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    facts = os.statvfs(existing)
    return existing, facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize


def _linux(root: Path) -> tuple[Host, list[Finding]]:
    limits = read_limits(root)
    findings = [
        Finding(
            level=Level.WARNING,
            subject="cgroup",
            fact=f"could not read {path}: {reason}",
            why="a limit that is not known is not kept, and the kernel then kills the run",
        )
        for path, reason in limits.unread
    ]
    total, available, source = _memory(root, limits, findings)
    allowed = _allowed(root, limits, findings)
    cpus, cpus_source = float(len(allowed)), f"{len(allowed)} CPUs allowed"
    if limits.cpus is not None and limits.cpus < cpus:
        cpus, cpus_source = limits.cpus, limits.cpus_source
    name, extension = cpu_kind(root)
    return Host(
        hostname=socket.gethostname(),
        os=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        cpus=cpus,
        cpus_source=cpus_source,
        allowed_cpus=tuple(sorted(allowed)),
        physical_cpus=_cores(root, allowed),
        cpu_name=name,
        cpu_extension=extension,
        cpu_bf16=extension.endswith("bf16"),
        memory_total_bytes=total,
        memory_available_bytes=available,
        memory_limit_source=source,
        numa_nodes=_numa(root, allowed),
    ), findings


def _memory(root: Path, limits: Limits, findings: list[Finding]) -> tuple[int, int, str]:
    """(total, available, source), each the least of what the machine has and what the control group leaves."""
    facts: dict[str, int] = {}
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            match = re.match(r"(\w+):\s+(\d{1,18}) kB", line)
            if match:
                facts[match[1]] = int(match[2]) * 1024
    except OSError as error:
        findings.append(_unread("/proc/meminfo", error))
    total = facts.get("MemTotal") or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # Kernels before 3.14 and some sandboxes do not give MemAvailable.
    available = facts.get("MemAvailable", facts.get("MemFree", 0) + facts.get("Cached", 0)) or total
    source = "physical memory"
    if limits.memory_bytes is not None and limits.memory_bytes < total:
        total, source = limits.memory_bytes, limits.memory_source
    if limits.memory_free_bytes is not None:
        available = min(available, limits.memory_free_bytes)
    return total, min(available, total), source


def _allowed(root: Path, limits: Limits, findings: list[Finding]) -> frozenset[int]:
    """CPUs by affinity and control group."""
    try:
        status = (root / "proc/self/status").read_text(errors="replace")
        match = re.search(r"^Cpus_allowed_list:\s*(\S+)", status, flags=re.MULTILINE)
        allowed = parse_cpu_list(match[1]) if match else frozenset(os.sched_getaffinity(0))
    except (OSError, ValueError) as error:
        findings.append(_unread("/proc/self/status", error))
        allowed = frozenset(os.sched_getaffinity(0))
    # The kernel keeps affinity within the set; where the two do not meet, one of the files is not about us.
    return allowed & limits.cpu_set if limits.cpu_set and allowed & limits.cpu_set else allowed


def _cores(root: Path, allowed: frozenset[int]) -> int:
    """Physical cores behind the allowed CPUs; their number itself where the kernel does not tell."""
    seen: set[int] = set()
    cores = 0
    for cpu in sorted(allowed):
        if cpu in seen:
            continue
        cores += 1
        seen |= siblings(cpu, root)
    return cores


def siblings(cpu: int, root: Path = ROOT) -> frozenset[int]:
    """The CPUs that are threads of the same core as `cpu`, itself included."""
    try:
        file = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        return parse_cpu_list(file.read_text()) | {cpu}
    except (OSError, ValueError):  # sandboxes and some ARM kernels have no topology: each CPU is then a core
        return frozenset({cpu})


def _numa(root: Path, allowed: frozenset[int]) -> tuple[NumaNode, ...]:
    nodes: list[NumaNode] = []
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        try:
            text = (folder / "cpulist").read_text().strip()
            cpus = parse_cpu_list(text) & allowed if text else frozenset()
            match = re.search(r"MemTotal:\s+(\d{1,18}) kB", (folder / "meminfo").read_text())
        except (OSError, ValueError):  # only a help for pinning; without it all CPUs count as equally near
            continue
        memory = int(match[1]) * 1024 if match else 0
        nodes.append(NumaNode(index=int(folder.name[4:]), cpus=tuple(sorted(cpus)), memory_bytes=memory))
    return tuple(sorted(nodes, key=lambda node: node.index))


def cpu_kind(root: Path = ROOT) -> tuple[str, str]:
    """Model name and the best extension for matrix work. Only the first processor's lines are read: the kernel asks
    every core for its clock as the file is read on."""
    facts: dict[str, str] = {}
    try:
        with (root / "proc/cpuinfo").open(errors="replace") as file:
            for line in file:
                if not line.strip():
                    break
                name, _, value = line.partition(":")
                facts[name.strip()] = value.strip()
    except OSError:  # the name is for people, and without flags bfloat16 counts as slow
        return platform.machine(), ""
    flags = set((facts.get("flags") or facts.get("Features") or "").split())
    best = next((flag for flag in ("amx_bf16", "avx512_bf16", "bf16", "avx512f", "avx2", "asimd") if flag in flags), "")
    return facts.get("model name") or facts.get("Processor") or platform.machine(), best


def _other() -> tuple[Host, list[Finding]]:
    """macOS and others, without control groups."""
    import psutil

    memory = psutil.virtual_memory()
    logical = os.cpu_count() or 1
    return Host(
        hostname=socket.gethostname(),
        os=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        cpus=float(logical),
        cpus_source=f"{logical} CPUs",
        allowed_cpus=tuple(range(logical)),
        physical_cpus=psutil.cpu_count(logical=False) or logical,
        cpu_name=platform.processor() or platform.machine(),
        cpu_extension="",
        cpu_bf16=False,
        memory_total_bytes=memory.total,
        memory_available_bytes=memory.available,
        memory_limit_source="physical memory",
        numa_nodes=(),
    ), []


def _unread(path: str, error: Exception) -> Finding:
    return Finding(
        level=Level.WARNING,
        subject="host",
        fact=f"could not read {path}: {error}",
        why="rung goes on with what the system says otherwise",
    )
