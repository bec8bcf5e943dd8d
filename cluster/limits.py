"""What a container or a service manager really allows: memory, CPUs and the count of out-of-memory kills.

Linux control groups of version 1, version 2 and both at once ("hybrid"). A limit may sit on any ancestor of the group
of this process, so each reader walks from the own group to the top of what is mounted and takes the tightest value.

All functions take the root of the file system, so that a tree of files can stand for a machine.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path("/")
Controller = Literal["memory", "cpu", "cpuset"]

# Version 1 shows "no limit" as the largest multiple of a page below 2**63; anything of that size means the same.
_UNLIMITED = 1 << 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What the control groups of this process allow; None where they set no limit.

    `memory_bytes` is the tightest memory limit and `memory_source` the file that sets it. `memory_free_bytes` is the
    smallest rest over all levels: limit minus use, where file cache counts as free because the kernel drops it before
    it kills. `cpus` is the CPU time per second by quota; `cpu_set` the CPUs that the group may run on.
    `unread` holds (file, reason) for what exists but could not be understood.
    """

    memory_bytes: int | None = None
    memory_free_bytes: int | None = None
    memory_source: str = ""
    cpus: float | None = None
    cpus_source: str = ""
    cpu_set: frozenset[int] | None = None
    unread: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The own control group for one controller: `folders` from the own group to the top that is visible."""

    version: Literal[1, 2]
    folders: tuple[Path, ...]


class _Reader:
    """Reads small kernel files. A file that is missing is normal; one that cannot be understood is remembered."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.unread: dict[str, str] = {}

    def text(self, path: Path) -> str | None:
        try:
            return path.read_text(encoding="utf-8", errors="replace")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            self.unread[self.shown(path)] = error.strerror or str(error)
            return None

    def number(self, path: Path) -> int | None:
        """A count, or None for no file, no limit ("max", -1, an absurdly large number) or a text that is no number."""
        text = self.text(path)
        return None if text is None else self.parse(path, text.strip())

    def parse(self, path: Path, text: str) -> int | None:
        if text in ("max", "-1"):
            return None
        value = _count(text)
        if value is None:
            self.unread[self.shown(path)] = f"expected a number, found {text[:40]!r}"
            return None
        return None if value >= _UNLIMITED else value

    def limit(self, path: Path) -> int | None:
        """Like `number`, but 0 is refused: no process could run under it, so the file does not mean what it says."""
        value = self.number(path)
        if value == 0:
            self.unread[self.shown(path)] = "a limit of 0 cannot be true of a running process"
            return None
        return value

    def table(self, path: Path) -> dict[str, str]:
        """Files of `name value` lines, such as memory.stat."""
        pairs = (line.split(None, 1) for line in (self.text(path) or "").splitlines())
        return {pair[0]: pair[1].strip() for pair in pairs if len(pair) == 2}

    def shown(self, path: Path) -> str:
        """The path as it is called on the machine that `root` stands for."""
        try:
            return "/" + str(path.relative_to(self.root))
        except ValueError:
            return str(path)


def read_limits(root: Path = ROOT) -> Limits:
    """The limits that hold for this process. Never raises: what could not be read is in `unread`."""
    reader = _Reader(root)
    groups = own_groups(root)
    limit: int | None = None
    free: int | None = None
    source = ""
    if group := groups.get("memory"):
        for path, value, rest in _memory_levels(reader, group):
            if limit is None or value < limit:
                limit, source = value, f"cgroup v{group.version}: {reader.shown(path)}"
            free = rest if free is None else min(free, rest)
    cpus, cpus_source = _cpu_quota(reader, groups.get("cpu"))
    return Limits(
        memory_bytes=limit,
        memory_free_bytes=free,
        memory_source=source,
        cpus=cpus,
        cpus_source=cpus_source,
        cpu_set=_cpu_set(reader, groups.get("cpuset")),
        unread=tuple(sorted(reader.unread.items())),
    )


def _memory_levels(reader: _Reader, group: Group) -> list[tuple[Path, int, int]]:
    """(file, limit, rest in bytes) for each limit on the way up."""
    levels: list[tuple[Path, int, int]] = []
    for number, folder in enumerate(group.folders):
        if group.version == 2:
            # memory.high does not kill, but a process above it is slowed until it makes no progress.
            files = [folder / "memory.max", folder / "memory.high"]
            use_file, prefix = folder / "memory.current", ""
        else:
            # A parent without use_hierarchy does not count its children (kernels before 5.11 allowed that).
            if number and reader.number(folder / "memory.use_hierarchy") == 0:
                break
            files = [folder / "memory.limit_in_bytes"]
            use_file, prefix = folder / "memory.usage_in_bytes", "total_"
        found = [(file, value) for file in files if (value := reader.limit(file)) is not None]
        stat = reader.table(folder / "memory.stat") if found or not number else {}
        hierarchical = _count(stat.get("hierarchical_memory_limit", "")) or _UNLIMITED
        if group.version == 1 and not number and hierarchical < _UNLIMITED:
            # It also knows ancestors outside what a container has mounted.
            found.append((folder / "memory.stat hierarchical_memory_limit", hierarchical))
        if found:
            used = reader.number(use_file) or 0
            cache = sum(_count(stat.get(prefix + name, "")) or 0 for name in ("inactive_file", "active_file"))
            levels += [(file, value, max(0, value - max(0, used - cache))) for file, value in found]
    return levels


def _cpu_quota(reader: _Reader, group: Group | None) -> tuple[float | None, str]:
    """CPU seconds per second by the tightest quota on the way up, and the file that sets it."""
    tightest: float | None = None
    source = ""
    if group is None:
        return tightest, source
    for folder in group.folders:
        if group.version == 2:
            path = folder / "cpu.max"
            words = (reader.text(path) or "max").split()
            quota = reader.parse(path, words[0]) if words else None
            period = reader.parse(path, words[1]) if len(words) > 1 else 100_000
        else:
            path = folder / "cpu.cfs_quota_us"
            quota = reader.number(path)
            period = reader.number(folder / "cpu.cfs_period_us") if quota is not None else None
        if quota and period and (tightest is None or quota / period < tightest):
            tightest, source = quota / period, f"cgroup v{group.version}: {reader.shown(path)}"
    return tightest, source


def _cpu_set(reader: _Reader, group: Group | None) -> frozenset[int] | None:
    """The CPUs in effect for the own group (the kernel has already cut them by those of its ancestors)."""
    names = ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus")
    for folder in group.folders if group else ():
        for name in names:
            text = (reader.text(folder / name) or "").strip()
            if not text:
                continue
            try:
                return parse_cpu_list(text)
            except ValueError as error:
                reader.unread[reader.shown(folder / name)] = str(error)
    return None


def parse_cpu_list(text: str) -> frozenset[int]:
    """The kernel's list format: "0-3,8,10-11". Raises ValueError for anything else, or an absurdly long range."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part.strip(), flags=re.ASCII)
        if match is None:
            raise ValueError(f"expected a list of CPUs such as 0-3,8, found {text[:40]!r}")
        cpus.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(cpus)


def own_groups(root: Path = ROOT) -> dict[Controller, Group]:
    """Where the control groups of this process are mounted; a controller that is on no hierarchy is left out."""
    reader = _Reader(root)
    paths: dict[str, str] = {}
    for line in (reader.text(root / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for name in controllers.split(","):
            paths[name] = path  # version 2 has an empty name
    mounts = _mounts(reader)
    groups: dict[Controller, Group] = {}
    controllers_needed: tuple[Controller, ...] = ("memory", "cpu", "cpuset")
    for controller in controllers_needed:
        version: Literal[1, 2]
        for version, key in ((1, controller), (2, "")):
            found = [
                _folders(root, mount_root, point, paths.get(key, "/")) for mount_root, point in mounts.get(key, ())
            ]
            # The same hierarchy may be mounted twice; the mount that shows more of it knows more limits.
            if found and (folders := max(found, key=len)):
                groups[controller] = Group(version=version, folders=folders)
                break
    return groups


def _mounts(reader: _Reader) -> dict[str, list[tuple[str, str]]]:
    """Controller ("" for version 2) to (root within the hierarchy, mount point), from mountinfo or by custom."""
    mounts: dict[str, list[tuple[str, str]]] = {}
    text = reader.text(reader.root / "proc/self/mountinfo")
    for line in (text or "").splitlines():
        left, _, right = line.partition(" - ")
        fields, kinds = left.split(), right.split()
        if len(fields) < 5 or not kinds:
            continue
        place = (_unescape(fields[3]), _unescape(fields[4]))
        if kinds[0] == "cgroup2":
            mounts.setdefault("", []).append(place)
        elif kinds[0] == "cgroup" and len(kinds) > 2:
            for name in kinds[2].split(","):
                mounts.setdefault(name, []).append(place)
    if not mounts:  # sandboxes hide mountinfo, but still mount at the usual places
        if (reader.root / "sys/fs/cgroup/cgroup.controllers").exists():
            mounts[""] = [("/", "/sys/fs/cgroup")]
        for name in ("memory", "cpu", "cpuset"):
            if (reader.root / "sys/fs/cgroup" / name).is_dir():
                mounts[name] = [("/", f"/sys/fs/cgroup/{name}")]
    return mounts


def _folders(root: Path, mount_root: str, mount_point: str, path: str) -> tuple[Path, ...]:
    """The own group's folder and its ancestors up to the mount point, those that exist."""
    top = root / mount_point.lstrip("/")
    prefix = mount_root.rstrip("/")
    inside = path[len(prefix) :] if path == prefix or path.startswith(prefix + "/") else ""
    parts = [part for part in inside.split("/") if part]
    if ".." in parts:  # the group lies outside the namespace that is mounted
        parts = []
    chain = [top.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
    return tuple(folder for folder in chain if folder.is_dir())


def _unescape(text: str) -> str:
    r"""mountinfo writes blanks and backslashes of a path as octal, such as \040."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _count(text: str) -> int | None:
    """A plain decimal number; None for anything else, and for more digits than any counter has."""
    return int(text) if re.fullmatch(r"\d{1,30}", text, flags=re.ASCII) else None


def oom_kill_count(root: Path = ROOT) -> int | None:
    """How often the kernel has killed a process of this group for want of memory; None if nothing tells.

    Taken before and after, it explains a worker that ended with signal 9. The own group's count is used where there
    is one (memory.events or memory.oom_control), else that of the whole machine (/proc/vmstat).
    """
    reader = _Reader(root)
    group = own_groups(root).get("memory")
    if group:
        name = "memory.events" if group.version == 2 else "memory.oom_control"
        count = _count(reader.table(group.folders[0] / name).get("oom_kill", ""))
        if count is not None:
            return count
    return _count(reader.table(root / "proc/vmstat").get("oom_kill", ""))
