"""Versions of the packages that rung stands on, against those it is tested with."""

import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rung.cluster.hardware import Hardware
from rung.launcher.job import Job
from rung.strategies.findings import Finding, Level

PYTHON_LEAST = (3, 10)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tested:
    """A package: the least version that works, the newest that the tests ran with, and why below that it fails."""

    name: str
    least: str
    newest: str
    why: str


# A test keeps these in step with pyproject.toml (least) and constraints.txt (newest).
TESTED = (
    Tested(
        name="torch",
        least="2.6",
        newest="2.13.0",
        why="rung relies on weights_only loading by default and on the memory tracker as they are from 2.6 on",
    ),
    Tested(
        name="accelerate",
        least="1.2",
        newest="1.15.0",
        why="older releases were never tried with torch 2.6, the oldest that rung allows",
    ),
    Tested(
        name="deepspeed",
        least="0.16",
        newest="0.19.8",
        why="rung reads and writes ZeRO's partitions, whose layout is checked from 0.16 on",
    ),
    Tested(
        name="ray", least="2.48", newest="2.60.0", why="rung drives Ray Train's second interface, tried from 2.48 on"
    ),
    Tested(
        name="fsspec",
        least="2024.6",
        newest="2026.9.0",
        why="stores are read and written in ranges through it and its backends, tried from 2024.6 on",
    ),
    Tested(name="safetensors", least="0.4.3", newest="", why="the checkpoint's shards are written with it"),
    Tested(name="pydantic", least="2.7", newest="", why="job files are checked with pydantic 2's strict mode"),
)


def check_versions(job: Job | None, hardware: Hardware, *, newer: bool = False) -> Iterator[Finding]:
    """Python and each package of the table. `newer` also remarks on versions beyond those tested."""
    good = sys.version_info >= PYTHON_LEAST
    yield Finding(
        level=Level.OK if good else Level.ERROR,
        subject="python",
        fact=f"Python {hardware.host.python} at {sys.executable}",
        why="" if good else f"rung needs Python {PYTHON_LEAST[0]}.{PYTHON_LEAST[1]} or newer",
        fix="" if good else "make a virtual environment with a newer Python",
    )
    for package in TESTED:
        yield _check(package, job, newer)


def _check(package: Tested, job: Job | None, newer: bool) -> Finding:
    version = installed(package.name)
    subject = f"packages.{package.name}"
    fix = f"pip install -U '{package.name}>={package.least}'"
    if version is None:
        needed = _needed(package.name, job)
        return Finding(
            level=Level.ERROR if needed else Level.WARNING,
            subject=subject,
            fact=f"{package.name} is not installed",
            why="the job needs it" if needed else "plans that use it are left out",
            fix=fix,
        )
    if _numbers(version) < _numbers(package.least):
        return Finding(
            level=Level.ERROR if _needed(package.name, job) else Level.WARNING,
            subject=subject,
            fact=f"{package.name} {version} is older than {package.least}",
            why=package.why,
            fix=fix,
        )
    beyond = newer and package.newest != "" and _numbers(version)[:2] > _numbers(package.newest)[:2]
    return Finding(
        level=Level.WARNING if beyond else Level.OK,
        subject=subject,
        fact=f"{package.name} {version}" + (f", newer than the tested {package.newest}" if beyond else ""),
        why="it probably works, but nobody has tried it with this rung" if beyond else "",
        fix=f"if something fails: pip install '{package.name}=={package.newest}'" if beyond else "",
    )


def _needed(name: str, job: Job | None) -> bool:
    """Whether the job cannot run without the package; without a job, only what every run needs."""
    if name == "ray":
        return job is not None and job.cluster.address != "none"
    if name == "deepspeed":
        return job is not None and job.strategy.name.startswith("zero")
    return name != "accelerate" or (job is not None and job.strategy.name in ("single", "ddp"))


def installed(name: str) -> str | None:
    """The version of an installed package, without importing it; None if there is none that could be imported."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # something half removed is on the path
        return None
    if spec is None:
        return None
    # The name of the metadata's folder tells in a fraction of the time that reading the metadata takes.
    beside = Path(spec.origin).parent.parent.glob(f"{name}-*.dist-info") if spec.origin else ()
    for folder in beside:
        return folder.name[len(name) + 1 : -len(".dist-info")]
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:  # on the path without its metadata, as when built from source
        return "0 (unknown)" if name != "torch" else (torch_build()[0] or "0 (unknown)")


def torch_build() -> tuple[str, str | None, str | None]:
    """(version, CUDA, HIP) that the installed PyTorch was built for, from its version.py; empty without PyTorch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return "", None, None
    try:
        text = Path(spec.origin).with_name("version.py").read_text()
    except OSError:  # not laid out as PyTorch's own builds are; the throw-away process tells instead
        return "", None, None
    found = dict(re.findall(r"^(__version__|cuda|hip)\b[^=\n]*=\s*'([^']*)'", text, flags=re.MULTILINE))
    return found.get("__version__", ""), found.get("cuda"), found.get("hip")


def _numbers(version: str) -> tuple[int, ...]:
    """The release part of a version, for comparison: 2.13.0+cpu is (2, 13, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", re.split(r"[+a-zA-Z ]", version)[0])[:4])
