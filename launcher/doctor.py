"""Looks at the environment before a run: what would fail later, why it matters, and what mends it.

    quick   some milliseconds, at each launch; starts no process
    full    `rung doctor`: everything, in parallel, within a deadline

It reads only. Two things are written: a probe object in the run's store, deleted at once, and compiled operations in
PyTorch's own cache, where the run would put them too. PyTorch is loaded in throw-away processes only.
"""

import os
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from rung.cluster.bounded import InThread
from rung.cluster.hardware import Hardware, probe
from rung.launcher import doctor_gpus, doctor_host, doctor_packages, doctor_torch
from rung.launcher.doctor_store import check_store
from rung.launcher.job import Job
from rung.strategies.findings import Finding, Level

Check = Callable[[], Iterable[Finding]]

_ENVIRONMENT, _STORE = 2, 6  # exit codes, as in strategies/errors.py
_ORDER = {Level.ERROR: 0, Level.WARNING: 1, Level.OK: 2}


def quick(job: Job | None, hardware: Hardware, *, checkpoint_bytes: int | None = None) -> list[Finding]:
    """What can be known in milliseconds, of a machine that was just probed; only what is not well, errors first.

    `checkpoint_bytes`: size of one checkpoint, where the model is known already.
    """
    checks: list[tuple[str, Check]] = [
        ("hardware", lambda: hardware.findings),
        ("packages", partial(doctor_packages.check_versions, job, hardware)),
        ("torch", partial(doctor_torch.check_build, hardware)),
        ("shm", partial(doctor_host.check_shm, hardware.host)),
        ("limits", doctor_host.check_ulimits),
        ("disk", partial(doctor_host.check_disk, job, hardware.host, checkpoint_bytes)),
        ("clock", doctor_host.check_clock),
        ("gpu.busy", partial(doctor_gpus.check_busy, hardware)),
    ]
    found = [finding for subject, check in checks for finding in _safely(subject, check)]
    return _sorted(finding for finding in found if finding.level is not Level.OK)


def full(
    job: Job | None,
    *,
    deadline_s: float = 120.0,
    hardware: Hardware | None = None,
    checkpoint_bytes: int | None = None,
    ops: tuple[str, ...] | None = None,
    hostname: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> list[Finding]:
    """Everything, well or not, errors first; ends within `deadline_s` (plus a second to end what hangs).

    `ops`: names of DeepSpeed operations that must compile (by default those that the job asks for); see
    `doctor_torch.OPS`. `hostname` and `environ` stand for this machine's.
    """
    deadline = time.monotonic() + deadline_s
    environ = os.environ if environ is None else environ
    hardware = hardware or probe(deadline_s=min(10.0, deadline_s))
    needed = doctor_torch.ops_of(job, hardware) if ops is None else ops
    several = job is not None and job.cluster.address != "none"
    checks: list[tuple[str, Check]] = [
        ("hardware", lambda: hardware.findings),
        ("packages", partial(doctor_packages.check_versions, job, hardware, newer=True)),
        ("torch", partial(doctor_torch.check_torch, hardware, deadline, environ)),
        ("deepspeed", partial(doctor_torch.check_deepspeed, job, needed, deadline, environ)),
        ("compiler", partial(doctor_host.check_compiler, environ)),
        ("libaio", partial(doctor_host.check_libaio, job)),
        ("shm", partial(doctor_host.check_shm, hardware.host)),
        ("limits", doctor_host.check_ulimits),
        ("disk", partial(doctor_host.check_disk, job, hardware.host, checkpoint_bytes)),
        ("clock", doctor_host.check_clock),
        ("network.name", partial(doctor_host.check_hostname, hostname or hardware.host.hostname, several)),
        ("network.interfaces", partial(doctor_host.check_interfaces, environ, several)),
        ("gpu.busy", partial(doctor_gpus.check_busy, hardware)),
        ("gpu.health", partial(doctor_gpus.check_health, hardware, deadline, environ)),
        ("gpu.xid", partial(doctor_gpus.check_xid, hardware, deadline)),
    ]
    if job is not None:
        checks.append(("store", partial(check_store, job.run, job.checkpoint.options, deadline)))
    running = [(subject, InThread(partial(_safely, subject, check))) for subject, check in checks]
    found: list[Finding] = []
    for subject, thread in running:
        # A check that starts a process ends it at the deadline itself, and then needs a moment to say so.
        answer = thread.answer(deadline + 1.5)
        found += answer.value if answer.value is not None else [_broken(subject, answer.reason)]
    return _sorted(found)


def exit_code(findings: Iterable[Finding]) -> int:
    """0 without an error; 6 if the store alone is at fault; else 2, as for anything that the user has to mend."""
    subjects = {finding.subject for finding in findings if finding.level is Level.ERROR}
    if not subjects:
        return 0
    return _STORE if all(subject.split(".")[0] == "store" for subject in subjects) else _ENVIRONMENT


def _safely(subject: str, check: Check) -> list[Finding]:
    """A check must not be what stops a run: if it fails, that is said instead."""
    try:
        return list(check())
    except Exception as error:
        return [_broken(subject, f"{type(error).__name__}: {error}")]


def _sorted(findings: Iterable[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: _ORDER[finding.level])


def _broken(subject: str, reason: str) -> Finding:
    return Finding(
        level=Level.WARNING,
        subject=subject,
        fact=f"this could not be checked: {reason}",
        why="it may be well or not",
        fix="rung doctor, with more time if it was short",
    )
