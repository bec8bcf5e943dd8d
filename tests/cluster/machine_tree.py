"""Builds trees of /proc, /sys and /dev files that stand for other machines."""

from pathlib import Path

V2_MOUNT = "30 25 0:26 / /sys/fs/cgroup ro,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
NO_LIMIT_V1 = "9223372036854771712"
GIB = 1 << 30
MIB = 1 << 20


def write(root: Path, files: dict[str, str]) -> Path:
    """Writes each file, making its folders. A text ending without a newline is written as it stands."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def v1_mount(*controllers: str, inner: str = "/") -> str:
    names = ",".join(controllers)
    return f"34 31 0:30 {inner} /sys/fs/cgroup/{names} rw,relatime - cgroup cgroup rw,{names}\n"


def machine(root: Path, *, memory_kib: int = 16 << 20, available_kib: int = 12 << 20, cpus: int = 8) -> Path:
    """A machine without control groups: 16 GiB of memory, 8 CPUs on 4 cores, one NUMA node."""
    files = {
        "proc/meminfo": f"MemTotal: {memory_kib} kB\nMemFree: 1 kB\nMemAvailable: {available_kib} kB\n",
        "proc/self/status": f"Name:\tpython\nCpus_allowed:\tff\nCpus_allowed_list:\t0-{cpus - 1}\n",
        "proc/cpuinfo": "processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: fpu avx2 avx512f\n\nprocessor\t: 1\n",
        "proc/self/cgroup": "",
        "proc/self/mountinfo": "22 27 0:21 / /proc rw - proc proc rw\n",
        "sys/devices/system/node/node0/cpulist": f"0-{cpus - 1}\n",
        "sys/devices/system/node/node0/meminfo": f"Node 0 MemTotal: {memory_kib} kB\n",
    }
    for cpu in range(cpus):
        mate = cpu ^ 1
        files[f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"] = f"{min(cpu, mate)},{max(cpu, mate)}\n"
    return write(root, files)
