"""The doctor on packages that are old, missing or broken, and on builds of DeepSpeed's operations."""

import os
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
from doctor_help import ROOT, complete, elsewhere, gpu, job, only

from rung.cluster.hardware import Hardware, probe
from rung.launcher import doctor_packages, doctor_torch
from rung.strategies.findings import Finding, Level


@pytest.fixture(scope="module")
def hardware() -> Hardware:
    return probe()


# Packages.


def test_the_table_of_versions_is_that_of_the_project() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    pinned = (ROOT / "constraints.txt").read_text()
    for package in doctor_packages.TESTED:
        least = re.search(rf'"{package.name}(?:\[\w+\])?>=([\d.]+)', project)
        assert least is not None, package.name
        assert least[1] == package.least, package.name
        newest = re.search(rf"^{package.name}==([\d.]+)", pinned, flags=re.MULTILINE)
        assert newest is not None, package.name
        assert package.newest in ("", newest[1]), package.name


def write_package(folder: Path, name: str, version: str, source: str) -> None:
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(source)
    metadata = folder / f"{name}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.mark.slow
def test_old_and_new_packages_are_named_with_the_reason_of_the_bound(tmp_path: Path) -> None:
    write_package(tmp_path, "torch", "2.1.0", "")
    write_package(tmp_path, "fsspec", "2099.1.0", "")
    found = elsewhere("found = doctor_packages.check_versions(None, probe(), newer=True)", PYTHONPATH=str(tmp_path))
    old = only(found, "packages.torch")
    assert old.level is Level.ERROR
    assert "torch 2.1.0 is older than 2.6" in old.fact
    assert old.fix == "pip install -U 'torch>=2.6'"
    new = only(found, "packages.fsspec")
    assert new.level is Level.WARNING
    assert "newer than the tested" in new.fact
    assert all(map(complete, found))


def test_missing_package_matters_only_to_a_job_that_needs_it(hardware: Hardware, tmp_path: Path) -> None:
    absent = replace(doctor_packages.TESTED[2], name="deepspeed_that_is_not_here")
    assert doctor_packages._check(absent, None, False).fact == "deepspeed_that_is_not_here is not installed"
    assert doctor_packages._needed("deepspeed", job(tmp_path, "strategy: zero2\n"))
    assert not doctor_packages._needed("deepspeed", job(tmp_path))
    assert doctor_packages._needed("torch", None)


@pytest.mark.slow
def test_broken_deepspeed_is_an_error_for_zero_and_a_warning_otherwise(tmp_path: Path) -> None:
    write_package(tmp_path / "path", "deepspeed", "0.19.8", "raise ImportError('libcudart.so.11: cannot open')\n")
    job(tmp_path, "strategy: zero2\n")
    code = (
        "from rung.launcher.job import load\n"
        f"zero = load({str(tmp_path / 'job.yaml')!r})\n"
        "found = [*doctor_torch.check_deepspeed(zero, (), time.monotonic() + 30, os.environ),"
        "         *doctor_torch.check_deepspeed(None, (), time.monotonic() + 30, os.environ)]"
    )
    strict, lenient = elsewhere(code, PYTHONPATH=str(tmp_path / "path"), TORCH_EXTENSIONS_DIR=str(tmp_path))
    assert (strict.level, lenient.level) == (Level.ERROR, Level.WARNING)
    assert "libcudart.so.11: cannot open" in strict.fact
    assert complete(strict)


@pytest.mark.slow
def test_torch_that_cannot_be_imported(tmp_path: Path) -> None:
    write_package(tmp_path, "torch", "2.13.0", "raise OSError('libgomp.so.1: cannot open shared object file')\n")
    found = elsewhere(
        "found = doctor_torch.check_torch(probe(), time.monotonic() + 30, os.environ)", PYTHONPATH=str(tmp_path)
    )
    finding = only(found, "torch")
    assert finding.level is Level.ERROR
    assert "libgomp.so.1" in finding.fact


# PyTorch and DeepSpeed against devices, with packages made for the test.


@pytest.mark.parametrize(
    ("cuda", "hip", "vendor", "subject"),
    [
        (None, None, "nvidia", "torch.build"),
        ("12.8", None, "amd", "torch.build"),
        (None, "6.4", "nvidia", "torch.build"),
        ("13.0", None, "nvidia", "torch.driver"),
        ("12.8", None, "nvidia", ""),  # any 12.x runs on a driver for 12.4
        (None, "6.4", "amd", ""),
    ],
)
def test_build_of_torch_against_the_driver(
    hardware: Hardware, cuda: str | None, hip: str | None, vendor: str, subject: str
) -> None:
    machine = replace(hardware, devices=(gpu(vendor),), driver="550.54", runtime="12.4")
    found = list(doctor_torch.judge_build(machine, "2.13.0", cuda, hip))
    assert [one.subject for one in found] == ([subject] if subject else [])
    assert all(map(complete, found))


@pytest.mark.slow
def test_build_of_torch_is_read_without_importing_it() -> None:
    (found,) = elsewhere(
        "from rung.strategies.findings import Finding, Level\nversion, *built = doctor_packages.torch_build()\n"
        "found = [Finding(level=Level.OK, subject=version, fact=f'{built[0]} {built[1]}')]"
    )
    import torch

    assert (found.subject, found.fact) == (str(torch.__version__), f"{torch.version.cuda} {torch.version.hip}")


@pytest.mark.parametrize(
    ("built", "capability", "runs"),
    [
        (["sm_80", "sm_90"], "8.0", True),
        (["sm_80"], "8.6", True),
        (["sm_86"], "8.0", False),
        (["sm_80", "sm_90"], "12.0", False),
        (["sm_80", "compute_90"], "12.0", True),
        (["sm_90a"], "9.0", True),
        (["sm_75", "sm_80"], "7.0", False),
        (["gfx90a"], "8.0", True),  # nothing is known
    ],
)
def test_kernels_against_compute_capability(built: list[str], capability: str, runs: bool) -> None:
    found = list(doctor_torch.judge_architectures(built, (gpu(capability=capability),)))
    assert (found == []) == runs
    assert all(map(complete, found))


FAKE_DEEPSPEED = """
import os, time, types, sys
from pathlib import Path
__version__ = "0.19.8"
folder = Path(os.environ["TORCH_EXTENSIONS_DIR"])
class Builder:
    error_log = "no libaio-dev"
    def __init__(self, name): self.name = name
    def is_compatible(self, verbose): return self.name != "AsyncIOBuilder"
    def load(self, verbose):
        if self.name == "FusedAdamBuilder": raise RuntimeError("building\\nfused.cu:7: error: nvcc is too old\\nmore")
        build = folder / "cpu_adam"; build.mkdir(parents=True, exist_ok=True)
        with (folder / "builds").open("a") as log: log.write("x")
        if os.environ.get("SLOW"): (build / "lock").write_text(""); time.sleep(60)
        (build / "op.so").write_text("")
        return types.SimpleNamespace(__file__=str(build / "op.so"))
accelerator = types.ModuleType("deepspeed.accelerator")
accelerator.get_accelerator = lambda: types.SimpleNamespace(create_op_builder=Builder)
sys.modules["deepspeed.accelerator"] = accelerator
"""


def built_ops(folder: Path, ops: tuple[str, ...], deadline_s: float = 30.0, **environ: str) -> list[Finding]:
    if not (folder / "path").exists():
        write_package(folder / "path", "deepspeed", "0.19.8", FAKE_DEEPSPEED)
    return elsewhere(
        f"found = doctor_torch.check_deepspeed(None, {ops!r}, time.monotonic() + {deadline_s}, os.environ)",
        PYTHONPATH=str(folder / "path"),
        TORCH_EXTENSIONS_DIR=str(folder / "extensions"),
        XDG_CACHE_HOME=str(folder / "cache"),
        **environ,
    )


@pytest.mark.slow
def test_operation_is_built_once_and_again_when_it_is_gone(tmp_path: Path) -> None:
    for _ in range(2):
        assert only(built_ops(tmp_path, ("cpu_adam",)), "deepspeed.cpu_adam").level is Level.OK
    assert (tmp_path / "extensions/builds").read_text() == "x", "the second time it was remembered"
    (tmp_path / "extensions/cpu_adam/op.so").unlink()
    assert only(built_ops(tmp_path, ("cpu_adam",)), "deepspeed.cpu_adam").level is Level.OK
    assert (tmp_path / "extensions/builds").read_text() == "xx"


@pytest.mark.slow
def test_operation_that_does_not_build_says_why_and_is_not_remembered(tmp_path: Path) -> None:
    for _ in range(2):
        found = built_ops(tmp_path, ("async_io", "fused_adam"))
        incompatible, broken = only(found, "deepspeed.async_io"), only(found, "deepspeed.fused_adam")
        assert (incompatible.level, broken.level) == (Level.ERROR, Level.ERROR)
        assert "no libaio-dev" in incompatible.fact
        assert "libaio-dev" in incompatible.fix
        assert "nvcc is too old" in broken.fact


@pytest.mark.slow
def test_build_that_is_cut_short_leaves_no_lock_for_the_next(tmp_path: Path) -> None:
    finding = only(built_ops(tmp_path, ("cpu_adam",), deadline_s=5.0, SLOW="1"), "deepspeed.ops")
    assert finding.level is Level.WARNING
    assert (tmp_path / "extensions/builds").exists(), "it had begun"
    assert not (tmp_path / "extensions/cpu_adam/lock").exists()


@pytest.mark.slow
def test_lock_of_a_build_that_died_is_found(tmp_path: Path) -> None:
    lock = tmp_path / "extensions/py311_cpu/cpu_adam/lock"
    lock.parent.mkdir(parents=True)
    lock.write_text("")
    os.utime(lock, (time.time() - 7200, time.time() - 7200))
    finding = only(built_ops(tmp_path, ("cpu_adam",)), "deepspeed.lock")
    assert finding.level is Level.ERROR
    assert finding.fix == f"rm {lock}"


def test_operations_that_a_job_asks_for(hardware: Hardware, tmp_path: Path) -> None:
    pins = "strategy: {{name: zero2, offload_optimizer: {}}}\n"
    assert doctor_torch.ops_of(None, hardware) == ()
    assert doctor_torch.ops_of(job(tmp_path), hardware) == ()
    assert doctor_torch.ops_of(job(tmp_path, pins.format("host")), hardware) == ("cpu_adam",)
    assert doctor_torch.ops_of(job(tmp_path, pins.format("disk")), hardware) == ("cpu_adam", "async_io")
