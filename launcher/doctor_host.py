"""Checks of the machine itself: shared memory, limits of the shell, disk, clock, compiler, network."""

import ctypes.util
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from rung.cluster.host import Host, read_space
from rung.launcher.job import Job
from rung.strategies.findings import Finding, Level

GIB = 1 << 30
# Loader workers hand batches over through /dev/shm; Docker's default of 64 MB is below a few batches of images.
_SHM_LEAST_BYTES = GIB
_SHM = "/dev/shm"  # noqa: S108 - looked at, not written to
_FILES_LEAST = 1024  # one worker with its loader, sockets and shards needs some hundreds
_DISK_LEAST_BYTES = GIB
_BUILT = Path(__file__)  # no clock of a machine that has this file is right before its date


def check_shm(host: Host) -> Iterator[Finding]:
    """Room for the batches that loader workers hand over."""
    if not host.shm_total_bytes:
        return
    few = host.shm_free_bytes < min(_SHM_LEAST_BYTES, host.memory_total_bytes // 4)
    yield Finding(
        level=Level.WARNING if few else Level.OK,
        subject="shm",
        fact=f"{_SHM} has {_size(host.shm_free_bytes)} free of {_size(host.shm_total_bytes)}",
        why="loader workers pass batches through it and die of a bus error when it is full" if few else "",
        fix="docker run --shm-size=8g, or: mount -o remount,size=8g /dev/shm; or data.workers: 0" if few else "",
    )


def check_ulimits() -> Iterator[Finding]:
    """Open files, locked memory and the sizes that a shell or a batch system may cap."""
    try:
        import resource
    except ImportError:  # Windows has none of these limits
        return
    unlimited = resource.RLIM_INFINITY
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft != unlimited and soft < _FILES_LEAST
    could = "unlimited" if hard == unlimited else str(hard)
    yield Finding(
        level=Level.WARNING if few else Level.OK,
        subject="limits.files",
        fact=f"a process may open {'any number of' if soft == unlimited else soft} files (up to {could} if it asks)",
        why="loader workers, shards and sockets run out of them: 'Too many open files'" if few else "",
        fix=f"ulimit -n {65536 if hard == unlimited else min(hard, 65536)}" if few else "",
    )
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    yield Finding(
        level=Level.OK,  # only RDMA networks need it, and they say so themselves
        subject="limits.locked",
        fact="a process may lock " + ("any amount of memory" if locked == unlimited else f"{locked >> 10} KiB"),
        why="" if locked == unlimited else "InfiniBand and RoCE need it unlimited; nothing else does",
        fix="" if locked == unlimited else "only with InfiniBand: ulimit -l unlimited",
    )
    for name, option, kind in (
        ("address space", "-v", resource.RLIMIT_AS),
        ("data segment", "-d", resource.RLIMIT_DATA),
        ("file size", "-f", resource.RLIMIT_FSIZE),
    ):
        value = resource.getrlimit(kind)[0]
        if value != unlimited:
            yield Finding(
                level=Level.WARNING,
                subject="limits.size",
                fact=f"the {name} of a process is limited to {_size(value)}",
                why="allocations or checkpoints fail at this limit though there is room",
                fix=f"ulimit {option} unlimited",
            )


def check_disk(job: Job | None, host: Host, checkpoint_bytes: int | None) -> Iterator[Finding]:
    """Free space where the run folder is, if that is a local disk."""
    folder = Path.cwd()
    if job is not None:
        scheme, _, rest = job.run.rpartition("://")
        if scheme not in ("", "file", "local"):
            return  # an object store does not run full; the store's own check says what it knows
        folder = Path(rest).expanduser()
    place, _, free = read_space(folder)
    kept = job.checkpoint.keep + 1 if job is not None else 1  # the newest is written before the oldest goes
    needed = max(_DISK_LEAST_BYTES, kept * checkpoint_bytes if checkpoint_bytes else 0)
    short = free < needed
    words = f", {kept} checkpoints take {_size(kept * checkpoint_bytes)}" if checkpoint_bytes else ""
    yield Finding(
        level=(Level.ERROR if checkpoint_bytes else Level.WARNING) if short else Level.OK,
        subject="disk",
        fact=f"{place} has {_size(free)} free{words}",
        why="a full disk stops the run at a checkpoint" if short else "",
        fix="free some space, lower checkpoint.keep, or set run: to another disk or store" if short else "",
    )
    if host.shm_total_bytes and place.is_relative_to(_SHM):
        yield Finding(
            level=Level.WARNING,
            subject="disk.memory",
            fact=f"the run folder {place} lies in memory",
            why="checkpoints there take the memory that training needs, and are gone after a restart",
            fix="set run: to a folder on a disk",
        )


def check_clock(now: float | None = None) -> Iterator[Finding]:
    """A clock that is far behind: stores refuse signed requests, and leases are judged wrongly."""
    now = time.time() if now is None else now
    behind_s = _BUILT.stat().st_mtime - now
    late = behind_s > 120.0
    yield Finding(
        level=Level.WARNING if late else Level.OK,
        subject="clock",
        fact=time.strftime("this machine's clock says %Y-%m-%d %H:%M UTC", time.gmtime(now))
        + (", which is before rung itself was installed" if late else ""),
        why="object stores refuse requests and certificates of another time" if late else "",
        fix="timedatectl set-ntp true" if late else "",
    )


def check_compiler(environ: Mapping[str, str]) -> Iterator[Finding]:
    """A C++ compiler that works, and ninja: DeepSpeed compiles its operations when they are first used."""
    path = environ.get("PATH", os.defpath)
    wanted = environ.get("CXX", "")
    names = [wanted.split()[0]] if wanted.split() else ["c++", "g++", "clang++"]
    found = next((where for name in names if (where := shutil.which(name, path=path))), None)
    why = "DeepSpeed's offload operations are compiled on this machine when they are first used"
    if found is None:
        yield Finding(
            level=Level.WARNING,
            subject="compiler",
            fact=f"no C++ compiler on PATH ({', '.join(names)})",
            why=why,
            fix="apt-get install g++ (or: dnf install gcc-c++)",
        )
        return
    try:
        done = subprocess.run(
            [found, "-x", "c++", "-fsyntax-only", "-"],
            input="#include <vector>\nint main() { return 0; }\n",
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
            env=dict(environ),
        )
        trouble = done.stderr.strip().splitlines()[:1] if done.returncode else []
    except (OSError, subprocess.TimeoutExpired) as error:
        trouble = [str(error)]
    yield Finding(
        level=Level.WARNING if trouble else Level.OK,
        subject="compiler",
        fact=f"{found} fails on a small program: {trouble[0]}" if trouble else f"{found} works",
        why=why if trouble else "",
        fix="apt-get install --reinstall g++ libstdc++-dev" if trouble else "",
    )


def check_libaio(job: Job | None) -> Iterator[Finding]:
    """The library behind offload to disk."""
    pins = (job.strategy.offload_optimizer, job.strategy.offload_parameters) if job is not None else ()
    library = ctypes.util.find_library("aio")
    header = any(Path(folder, "libaio.h").exists() for folder in ("/usr/include", "/usr/local/include"))
    missing = [name for name, there in (("the library", library), ("its header libaio.h", header)) if not there]
    needed = "disk" in pins
    yield Finding(
        level=(Level.ERROR if needed else Level.WARNING) if missing else Level.OK,
        subject="libaio",
        fact=f"libaio: {' and '.join(missing)} not found" if missing else "libaio is there",
        why="offload to disk reads and writes through it" if missing else "",
        fix="apt-get install libaio-dev" if missing else "",
    )


def check_hostname(hostname: str, several: bool) -> Iterator[Finding]:
    """Whether this machine's own name leads to an address that others can use. May take as long as the name server."""
    try:
        entries = socket.getaddrinfo(hostname, None, type=socket.SOCK_STREAM)
        addresses = sorted({str(entry[4][0]) for entry in entries})
    except (OSError, UnicodeError) as error:
        yield Finding(
            level=Level.ERROR if several else Level.WARNING,
            subject="network.name",
            fact=f"the name of this machine, {hostname!r}, does not resolve: {error}",
            why="workers that look each other up by name cannot meet",
            fix=f'echo "127.0.0.1 {hostname}" >> /etc/hosts, or on a cluster the address that others reach it by',
        )
        return
    own = all(address.startswith("127.") or address == "::1" for address in addresses)
    yield Finding(
        level=Level.WARNING if own and several else Level.OK,
        subject="network.name",
        fact=f"{hostname} is {', '.join(addresses)}",
        why="other machines are told an address that leads to themselves" if own and several else "",
        fix=f"give {hostname} its network address in /etc/hosts" if own and several else "",
    )


def check_interfaces(
    environ: Mapping[str, str], several: bool, folder: Path = Path("/sys/class/net")
) -> Iterator[Finding]:
    """Network interfaces that are up, and the variables that choose one."""
    states = {path.name: _state(path) for path in (sorted(folder.iterdir()) if folder.is_dir() else [])}
    # Loopback and tunnels report "unknown" while they work.
    up = [name for name, state in states.items() if state in ("up", "unknown") and name != "lo"]
    lonely = several and not up and bool(states)
    yield Finding(
        level=Level.ERROR if lonely else Level.OK,
        subject="network.interfaces",
        fact=f"network interfaces that are up: {', '.join(up) or 'none'}",
        why="a cluster needs one" if lonely else "",
        fix="ip link set dev NAME up" if lonely else "",
    )
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = environ.get(variable, "")
        # NCCL's syntax: prefixes, "=" for exact names, "^" for exclusion; Gloo takes exact names.
        names = [] if value.startswith("^") else [name for name in value.lstrip("=").split(",") if name]
        exact = value.startswith("=") or variable.startswith("GLOO")
        known = [s for s in states if any(s == name if exact else s.startswith(name) for name in names)]
        if names and states and not known:
            yield Finding(
                level=Level.ERROR,
                subject="network.interfaces",
                fact=f"{variable}={value} names no interface; there are {', '.join(states)}",
                why="workers fail to connect before the first step",
                fix=f"unset {variable}",
            )


def _state(interface: Path) -> str:
    try:
        return (interface / "operstate").read_text().strip()
    except OSError:  # gone since it was listed, or a file that is no interface
        return "down"


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB // 10 else f"{count / (1 << 20):.1f} MiB"
