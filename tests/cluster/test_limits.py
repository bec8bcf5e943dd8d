"""Limits of control groups: trees of files for each kind of machine, and a real group of this one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from machine_tree import GIB, MIB, NO_LIMIT_V1, V2_MOUNT, v1_mount, write

from rung.cluster.limits import oom_kill_count, own_groups, parse_cpu_list, read_limits


def v2(root: Path, path: str = "/app.slice/job", **groups: dict[str, str]) -> Path:
    """A version 2 machine; `groups` maps a folder below the mount (dots for slashes, "top" for the mount) to files."""
    files = {"proc/self/cgroup": f"0::{path}\n", "proc/self/mountinfo": V2_MOUNT}
    for name, contents in groups.items():
        folder = "" if name == "top" else name.replace("__", ".").replace("_", "/") + "/"
        files |= {f"sys/fs/cgroup/{folder}{file}": text for file, text in contents.items()}
    root.joinpath("sys/fs/cgroup" + path).mkdir(parents=True, exist_ok=True)
    return write(root, files)


def v1(root: Path, groups: dict[str, str], *, path: str = "/docker/abc", inner: str = "/") -> Path:
    """A version 1 machine; `groups` maps files below /sys/fs/cgroup to their texts."""
    root.joinpath("sys/fs/cgroup/memory" + path.removeprefix(inner.rstrip("/"))).mkdir(parents=True, exist_ok=True)
    return write(
        root,
        {
            "proc/self/cgroup": f"4:memory:{path}\n3:cpuset:{path}\n2:cpu,cpuacct:{path}\n1:name=systemd:{path}\n",
            "proc/self/mountinfo": v1_mount("memory", inner=inner)
            + v1_mount("cpuset", inner=inner)
            + v1_mount("cpu", "cpuacct", inner=inner),
            **{f"sys/fs/cgroup/{name}": text for name, text in groups.items()},
        },
    )


def test_v2_limit_of_the_own_group(tmp_path: Path) -> None:
    root = v2(
        tmp_path,
        app__slice_job={
            "memory.max": f"{2 * GIB}\n",
            "memory.current": f"{GIB}\n",
            "memory.stat": f"anon 5\ninactive_file {256 * MIB}\nactive_file {128 * MIB}\n",
        },
    )
    limits = read_limits(root)
    assert limits.memory_bytes == 2 * GIB
    assert limits.memory_free_bytes == GIB + 384 * MIB, "file cache is free memory: the kernel drops it first"
    assert limits.memory_source == "cgroup v2: /sys/fs/cgroup/app.slice/job/memory.max"
    assert limits.unread == ()


def test_v2_tightest_limit_is_found_on_an_ancestor_and_the_least_rest_on_another(tmp_path: Path) -> None:
    root = v2(
        tmp_path,
        app__slice_job={"memory.max": f"{8 * GIB}", "memory.current": f"{GIB}"},
        app__slice={"memory.max": f"{4 * GIB}", "memory.current": f"{GIB}"},
        top={"memory.max": f"{6 * GIB}", "memory.current": f"{5 * GIB}"},
    )
    limits = read_limits(root)
    assert limits.memory_bytes == 4 * GIB
    assert "app.slice/memory.max" in limits.memory_source
    assert limits.memory_free_bytes == GIB, "6 - 5 GiB at the top is less than what any other level leaves"


def test_v2_high_counts_as_a_limit(tmp_path: Path) -> None:
    root = v2(tmp_path, app__slice_job={"memory.max": "max\n", "memory.high": f"{GIB}\n", "memory.current": "0\n"})
    limits = read_limits(root)
    assert limits.memory_bytes == GIB
    assert limits.memory_source.endswith("memory.high")


def test_v2_max_everywhere_is_no_limit(tmp_path: Path) -> None:
    root = v2(tmp_path, app__slice_job={"memory.max": "max\n", "memory.high": "max\n", "cpu.max": "max 100000\n"})
    limits = read_limits(root)
    assert (limits.memory_bytes, limits.memory_free_bytes, limits.cpus) == (None, None, None)
    assert limits.unread == ()


def test_v2_cpu_quota_is_the_least_on_the_way_up(tmp_path: Path) -> None:
    root = v2(
        tmp_path,
        app__slice_job={"cpu.max": "400000 100000\n", "cpuset.cpus.effective": "0-3,6\n"},
        app__slice={"cpu.max": "75000 50000\n"},
    )
    limits = read_limits(root)
    assert limits.cpus == 1.5
    assert limits.cpus_source == "cgroup v2: /sys/fs/cgroup/app.slice/cpu.max"
    assert limits.cpu_set == {0, 1, 2, 3, 6}


def test_v1_limit_quota_and_set(tmp_path: Path) -> None:
    root = v1(
        tmp_path,
        {
            "memory/docker/abc/memory.limit_in_bytes": f"{512 * MIB}\n",
            "memory/docker/abc/memory.usage_in_bytes": f"{300 * MIB}\n",
            "memory/docker/abc/memory.stat": f"inactive_file 1\ntotal_inactive_file {100 * MIB}\n",
            "memory/docker/memory.limit_in_bytes": f"{NO_LIMIT_V1}\n",
            "memory/memory.limit_in_bytes": f"{NO_LIMIT_V1}\n",
            "cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "250000\n",
            "cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000\n",
            "cpu,cpuacct/docker/cpu.cfs_quota_us": "-1\n",
            "cpuset/docker/abc/cpuset.effective_cpus": "2-3\n",
            "cpuset/docker/abc/cpuset.cpus": "0-7\n",
        },
    )
    limits = read_limits(root)
    assert limits.memory_bytes == 512 * MIB
    assert limits.memory_free_bytes == 312 * MIB
    assert limits.memory_source == "cgroup v1: /sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes"
    assert limits.cpus == 2.5
    assert limits.cpu_set == {2, 3}
    assert limits.unread == ()


def test_v1_hierarchical_limit_tells_of_ancestors_that_are_not_mounted(tmp_path: Path) -> None:
    """In a container the mount starts at the container's own group, so that its parents cannot be walked."""
    root = v1(
        tmp_path,
        {
            "memory/memory.limit_in_bytes": f"{NO_LIMIT_V1}\n",
            "memory/memory.usage_in_bytes": "0\n",
            "memory/memory.stat": f"hierarchical_memory_limit {3 * GIB}\n",
        },
        inner="/docker/abc",
    )
    limits = read_limits(root)
    assert limits.memory_bytes == 3 * GIB
    assert "hierarchical_memory_limit" in limits.memory_source


def test_v1_parent_that_does_not_count_its_children_sets_no_limit(tmp_path: Path) -> None:
    files = {
        "memory/docker/abc/memory.limit_in_bytes": f"{4 * GIB}",
        "memory/docker/memory.limit_in_bytes": f"{GIB}",
    }
    assert read_limits(v1(tmp_path, files)).memory_bytes == GIB
    assert read_limits(v1(tmp_path, {"memory/docker/memory.use_hierarchy": "0"})).memory_bytes == 4 * GIB


def test_group_path_that_is_not_mounted_falls_back_to_what_is(tmp_path: Path) -> None:
    """Kubernetes without its own namespace shows the host's path, but mounts only the pod's group."""
    root = v1(tmp_path, {"memory/memory.limit_in_bytes": f"{GIB}\n"}, path="/")
    write(root, {"proc/self/cgroup": "4:memory:/kubepods/burstable/pod1/abc\n"})
    assert read_limits(root).memory_bytes == GIB


def test_group_outside_the_namespace_falls_back_to_the_mount(tmp_path: Path) -> None:
    root = v2(tmp_path, "/", top={"memory.max": f"{GIB}"})
    write(root, {"proc/self/cgroup": "0::/../../other\n"})
    assert read_limits(root).memory_bytes == GIB


def test_hybrid_takes_each_controller_from_where_it_is(tmp_path: Path) -> None:
    """systemd's hybrid layout: memory still on version 1, CPUs on the unified mount."""
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/job\n0::/user/job\n",
            "proc/self/mountinfo": v1_mount("memory") + "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{GIB}\n",
            "sys/fs/cgroup/unified/user/job/cpu.max": "50000 100000\n",
            "sys/fs/cgroup/unified/user/job/memory.max": f"{MIB}\n",
        },
    )
    limits = read_limits(root)
    assert limits.memory_bytes == GIB, "the unified mount does not hold the memory controller"
    assert limits.cpus == 0.5
    assert {name: group.version for name, group in own_groups(root).items()} == {"memory": 1, "cpu": 2, "cpuset": 2}


def test_mount_point_with_a_blank(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/\n",
            "proc/self/mountinfo": "30 25 0:26 / /mnt/my\\040groups ro - cgroup2 cgroup2 rw\n",
            "mnt/my groups/memory.max": f"{GIB}\n",
        },
    )
    assert read_limits(root).memory_bytes == GIB


def test_mounts_by_custom_where_mountinfo_is_hidden(tmp_path: Path) -> None:
    root = write(tmp_path / "v2", {"sys/fs/cgroup/cgroup.controllers": "memory", "sys/fs/cgroup/memory.max": f"{GIB}"})
    assert read_limits(root).memory_bytes == GIB
    root = write(tmp_path / "v1", {"sys/fs/cgroup/memory/memory.limit_in_bytes": f"{GIB}"})
    assert read_limits(root).memory_bytes == GIB


@pytest.mark.parametrize("text", [NO_LIMIT_V1, "18446744073709551615", "9223372036854775807", "-1"])
def test_absurdly_large_is_no_limit(tmp_path: Path, text: str) -> None:
    limits = read_limits(v1(tmp_path, {"memory/docker/abc/memory.limit_in_bytes": text}))
    assert limits.memory_bytes is None
    assert limits.unread == ()


@pytest.mark.parametrize("text", ["", "0", "-5", "lots", "12 GB", "9" * 5000, "٣", "\x00\xff"])
def test_nonsense_is_reported_and_is_no_limit(tmp_path: Path, text: str) -> None:
    root = v2(tmp_path, app__slice_job={"memory.max": text}, app__slice={"memory.max": f"{GIB}"})
    limits = read_limits(root)
    assert limits.memory_bytes == GIB, "the levels that make sense still count"
    assert [path for path, _ in limits.unread] == ["/sys/fs/cgroup/app.slice/job/memory.max"]
    assert limits.unread[0][1]


@pytest.mark.parametrize("text", ["", "100000", "abc 100000", "100000 0", "100000 abc", "0 100000"])
def test_nonsense_in_the_quota_never_raises(tmp_path: Path, text: str) -> None:
    limits = read_limits(v2(tmp_path, app__slice_job={"cpu.max": text}))
    assert limits.cpus in (None, 1.0)


def test_file_that_cannot_be_read_is_reported(tmp_path: Path) -> None:
    root = v2(tmp_path)
    (root / "sys/fs/cgroup/app.slice/job/memory.max").mkdir()  # reading it fails for root too
    limits = read_limits(root)
    assert limits.unread == (("/sys/fs/cgroup/app.slice/job/memory.max", "Is a directory"),)


def test_nothing_there_at_all(tmp_path: Path) -> None:
    limits = read_limits(tmp_path)
    assert (limits.memory_bytes, limits.cpus, limits.cpu_set, limits.unread) == (None, None, None, ())
    assert own_groups(tmp_path) == {}
    assert oom_kill_count(tmp_path) is None


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "3-x", "1;2", "1000000-1000001", "0-" + "9" * 30])
def test_cpu_list_refuses_what_it_does_not_know(text: str) -> None:
    with pytest.raises(ValueError, match="list of CPUs"):
        parse_cpu_list(text)


def test_cpu_list_formats() -> None:
    assert parse_cpu_list("0\n") == {0}
    assert parse_cpu_list("0-2,8, 10-11") == {0, 1, 2, 8, 10, 11}


def test_oom_kills_of_the_own_group_then_of_the_machine(tmp_path: Path) -> None:
    events = "low 0\nhigh 0\nmax 9\noom 4\noom_kill 3\noom_group_kill 0\n"
    root = v2(tmp_path / "v2", app__slice_job={"memory.events": events})
    write(root, {"proc/vmstat": "pgfault 1\noom_kill 11\n"})
    assert oom_kill_count(root) == 3
    (root / "sys/fs/cgroup/app.slice/job/memory.events").unlink()
    assert oom_kill_count(root) == 11
    root = v1(
        tmp_path / "v1",
        {"memory/docker/abc/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 7\n"},
    )
    assert oom_kill_count(root) == 7


# In a group of this machine.

_IN_GROUP = """
import json, os, sys
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
from pathlib import Path
from rung.cluster.hardware import probe
from rung.cluster.limits import oom_kill_count, read_limits
limits, host = read_limits(), probe().host
before = oom_kill_count()
child = os.fork()
if child == 0:
    held = []
    while True:
        held.append(bytearray(b"x") * (16 << 20))
_, status = os.waitpid(child, 0)
print(json.dumps({
    "limit": limits.memory_bytes, "free": limits.memory_free_bytes, "source": limits.memory_source,
    "total": host.memory_total_bytes, "available": host.memory_available_bytes,
    "signal": os.WTERMSIG(status), "kills": [before, oom_kill_count()],
}))
"""


def make_group(name: str) -> Path:
    """A child of the own memory group, or a skip with the reason."""
    group = own_groups().get("memory")
    if group is None:
        pytest.skip("no memory control group on this machine")
    folder = group.folders[-1] / name
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"may not make a control group: {error}")
    file = folder / ("memory.max" if group.version == 2 else "memory.limit_in_bytes")
    try:
        file.write_text(str(512 * MIB))
    except OSError as error:
        folder.rmdir()
        pytest.skip(f"may not set a memory limit: {error}")
    return folder


@pytest.mark.slow
def test_real_group_with_512_mib_is_seen_and_its_kill_counted() -> None:
    if not sys.platform.startswith("linux"):
        pytest.skip("control groups are Linux's")
    folder = make_group(f"rung-test-{os.getpid()}")
    try:
        done = subprocess.run(
            [sys.executable, "-c", _IN_GROUP, str(folder)], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        seen = json.loads(done.stdout)
    finally:
        folder.rmdir()
    assert seen["limit"] == seen["total"] == 512 * MIB
    assert 0 < seen["available"] < 512 * MIB
    # The two are read one after the other, and the interpreter's own pages come and go in between.
    assert seen["available"] <= seen["free"] + MIB < 513 * MIB
    assert folder.name in seen["source"]
    assert seen["signal"] == 9, "the kernel ended the child that asked for more than the limit"
    assert seen["kills"][1] == seen["kills"][0] + 1


def test_limits_of_this_machine_are_read_without_complaint() -> None:
    limits = read_limits()
    assert limits.unread == ()
    assert limits.memory_bytes is None or limits.memory_bytes > 64 * MIB
    assert limits.cpu_set is None or limits.cpu_set
