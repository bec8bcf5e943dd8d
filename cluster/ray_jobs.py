"""Runs a command on the head of a Ray cluster through its job server (`http://HEAD:8265`), as if it ran here.

The folder travels as the job's working_dir, what the command prints comes back as it prints it, and Ctrl-C or SIGTERM
here stops it there.
"""

import asyncio
import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rung.strategies.errors import DependencyError, JobError, WorkersFailed

#: How long a job may take to begin, its environment being set up, and to end after it was stopped, beyond its grace.
BEGIN_S, END_S = 600.0, 30.0
_ENDED = ("SUCCEEDED", "FAILED", "STOPPED")


def run_there(
    address: str, command: str, *, folder: Path, excludes: Sequence[str], runtime_env: Mapping[str, Any],
    grace_s: float, show: Callable[[str], None],
) -> int:  # fmt: skip
    """Submits `command`, shows its output piece by piece, and returns its exit code once it has ended.

    `folder` is copied to the cluster without what matches `excludes`. Raises JobError if there is no job server at
    `address`, DependencyError if its version of Ray does not match.
    """
    client = _connect(address)
    environment = {"working_dir": str(folder), "excludes": list(excludes), **runtime_env}
    variables = {"RAY_JOB_STOP_WAIT_TIME_S": str(int(grace_s)), "PYTHONUNBUFFERED": "1"}
    environment["env_vars"] = {**variables, **environment.get("env_vars", {})}
    try:
        job = client.submit_job(entrypoint=command, runtime_env=environment)
    except (RuntimeError, ValueError) as error:
        raise JobError(f"cluster.address: {address} refused the job: {error}") from None
    stopped = 0
    with _signals() as caught:
        try:
            _begin(client, job, caught)
            asyncio.run(_follow(client, job, caught, show))
        except KeyboardInterrupt:
            caught.append(signal.SIGINT)
        if caught:
            stopped = caught[0]
            show(f"stopping {job} on the cluster\n")
            client.stop_job(job)
            status = _wait_for_end(client, job, grace_s + END_S)
            show(f"{job} is {status.lower()}; the same command goes on from its last checkpoint\n")
            return 128 + stopped
    status = _wait_for_end(client, job, END_S)
    if status == "SUCCEEDED":
        return 0
    info = client.get_job_info(job)
    if info.driver_exit_code is None:
        raise WorkersFailed(f"{job} {status.lower()} on {address}: {info.message}")
    return int(info.driver_exit_code)


def _connect(address: str) -> Any:
    try:
        from ray.job_submission import JobSubmissionClient
    except ImportError as error:
        raise DependencyError(
            f"cluster.address: {address} needs Ray's job client, which cannot be imported: {error}",
            hint="pip install 'ray[default]'",
        ) from None
    try:
        client = JobSubmissionClient(address)
    except RuntimeError as error:
        raise DependencyError(f"cluster.address: {address}: {error}", hint="install the cluster's Ray here") from None
    except Exception as error:
        if type(error).__name__ == "AuthenticationError":
            raise JobError(
                f"cluster.address: {address} wants Ray's token",
                hint="export RAY_AUTH_MODE=token, and see `ray get-auth-token --help`",
            ) from None
        if not isinstance(error, ConnectionError | ValueError):
            raise
        raise JobError(
            f"cluster.address: no job server answers at {address}: {error}",
            hint="it is the dashboard's address: `ray start --head --dashboard-host=0.0.0.0` on the head, port 8265",
        ) from None
    for name in ("ray", "ray.dashboard", "ray.job_submission"):
        logging.getLogger(name).setLevel(logging.ERROR)  # the client sets these to INFO
    return client


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """The signals that came meanwhile; each also interrupts what is being waited for."""
    caught: list[int] = []

    def on(number: int, _frame: object) -> None:
        caught.append(number)
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    before = {number: signal.signal(number, on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _begin(client: Any, job: str, caught: Sequence[int]) -> None:
    until = time.monotonic() + BEGIN_S
    while not caught and client.get_job_status(job).value == "PENDING":
        if time.monotonic() > until:
            client.stop_job(job)
            raise WorkersFailed(f"{job} did not begin within {BEGIN_S:g} s", hint="see the dashboard for its state")
        time.sleep(0.2)


async def _follow(client: Any, job: str, caught: Sequence[int], show: Callable[[str], None]) -> None:
    async for piece in client.tail_job_logs(job):
        show(piece)
        if caught:
            return


def _wait_for_end(client: Any, job: str, deadline_s: float) -> str:
    until = time.monotonic() + deadline_s
    while (status := str(client.get_job_status(job).value)) not in _ENDED and time.monotonic() < until:
        time.sleep(0.2)
    return status
