"""A job that is launched on the head of a cluster from a machine outside of it."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rung.launcher.job import Job
from rung.strategies.errors import JobError

#: Never sent along: what is large and not needed there.
EXCLUDES = (".git", ".venv", "__pycache__", "*.pyc")


def is_remote(job: Job) -> bool:
    """Whether `cluster.address` is that of a job server."""
    return job.cluster.address.startswith(("http://", "https://"))


def submit(job: Job, sets: Sequence[str], flags: Sequence[str]) -> int:
    """Has `rung launch` run on the cluster's head, with the job file's folder; returns its exit code.

    Raises JobError if the run folder would be lost there.
    """
    from rung.cluster.ray_jobs import run_there

    if "://" not in job.run and not Path(job.run).is_absolute():
        raise JobError(
            f"run: {job.run!r} would be a folder inside the copy that the cluster gets, and be lost with it",
            hint="name storage that this machine and all nodes share: s3://..., or an absolute path on a shared disk",
        )
    address, excludes = job.cluster.address, list(EXCLUDES)
    if "://" not in job.run and Path(job.run).is_relative_to(job.folder):
        excludes.append(f"/{Path(job.run).relative_to(job.folder).as_posix()}")
    sets = [one for one in sets if not one.startswith(("cluster.address=", "cluster.runtime_env"))]
    # The nodes have the runtime environment from the job server already; it must not be asked for twice.
    sets += ["cluster.address=auto", "cluster.runtime_env={}"]
    words = ["python", "-c", "from rung.launcher.cli import main; main()", "launch", job.source.name, *flags]
    command = shlex.join([*words, *(word for one in sets for word in ("--set", one))])
    return run_there(
        address, command, folder=job.folder, excludes=excludes, runtime_env=job.cluster.runtime_env,
        grace_s=job.grace_s, show=_show,
    )  # fmt: skip


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
