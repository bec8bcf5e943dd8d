"""Questions to the machine that may hang, crash or raise, asked so that the run goes on: each has a deadline."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO, Generic, TypeVar

T = TypeVar("T")

# The child takes over the parent's import path as it stands, without the current folder, where a user's file may
# have the name of a module that is needed.
_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); exec(sys.argv[2])"
_LAST_WORDS = 2000  # characters of a child's stderr that are kept


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer(Generic[T]):
    """`value`, or None and the `reason` in words why there is none."""

    value: T | None = None
    reason: str = ""


class InThread(Generic[T]):
    """Starts `call` in a daemon thread at once; `answer` waits for it until the deadline.

    For calls that only read files. A thread that hangs is left behind: it holds nothing, and cannot be ended.
    """

    def __init__(self, call: Callable[[], T]) -> None:
        self._answer: Answer[T] = Answer(reason="no answer")
        self._call = call
        self._thread = threading.Thread(target=self._run, name="rung-probe", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # the limit on processes is reached
            self._answer = Answer(reason=str(error))

    def _run(self) -> None:
        try:
            self._answer = Answer(value=self._call())
        except Exception as error:  # whatever a probe raises is the reason for having no answer
            self._answer = Answer(reason=f"{type(error).__name__}: {error}")

    def answer(self, deadline: float) -> Answer[T]:
        """`deadline` is a point of `time.monotonic`."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return Answer(reason="no answer before the deadline") if self._thread.is_alive() else self._answer


class InChild:
    """Runs Python source in a process of its own, and takes what it prints as JSON on its last line of output.

    For calls into drivers and for heavy imports, which may crash, hang for good, or take memory that must come back.
    The child is the leader of its own session; at the deadline it is killed with all that it started.
    """

    def __init__(self, source: str, *, arguments: tuple[str, ...] = (), env: Mapping[str, str] | None = None) -> None:
        paths = json.dumps([path for path in sys.path if path])
        self._process: subprocess.Popen[bytes] | None = None
        self._failure = ""
        self._files: list[IO[bytes]] = []
        try:
            # Files, since a pipe that nobody reads yet would fill up and block the child.
            self._files = [tempfile.TemporaryFile(), tempfile.TemporaryFile()]  # noqa: SIM115 - `answer` closes them
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, paths, source, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=self._files[0],
                stderr=self._files[1],
                env=None if env is None else dict(env),
                start_new_session=True,
            )
        except OSError as error:
            self._failure = f"could not start {sys.executable}: {error}"

    def answer(self, deadline: float) -> Answer[object]:
        """`deadline` is a point of `time.monotonic`. To be called once."""
        if self._process is None:
            return Answer(reason=self._failure)
        output, errors = self._files
        with output, errors:
            try:
                code = self._process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                return Answer(reason="no answer before the deadline" + self._end() + _last_words(errors))
            if code != 0:
                meaning = f"ended by signal {-code} ({_signal_name(-code)})" if code < 0 else f"ended with code {code}"
                return Answer(reason=meaning + _last_words(errors))
            output.seek(0)
            lines = output.read().decode(errors="replace").strip().splitlines()
            try:
                return Answer(value=json.loads(lines[-1]))
            except (IndexError, ValueError):
                return Answer(reason="answered without a result" + _last_words(errors))

    def _end(self) -> str:
        """Kills the child's session. One stuck inside a driver cannot be reaped, and must not make us wait."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):  # it ended by itself just now
            os.killpg(self._process.pid, signal.SIGKILL)
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return f"; process {self._process.pid} is stuck in the kernel and cannot be killed"
        return ""


def _last_words(errors: IO[bytes]) -> str:
    size = errors.seek(0, os.SEEK_END)
    errors.seek(max(0, size - _LAST_WORDS))
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return f": {lines[-1].strip()}" if lines else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
