"""The one error tree of rung.

    RungError                    exit
    ├── JobError                  2   the job file, the command line or an option is wrong
    ├── TaskError                 2   the user's own code raised; carries the user's traceback, from their file on
    ├── DependencyError           2   a package, compiler or driver that the plan needs is missing or does not match
    ├── DoesNotFit                3   no rung of the ladder fits
    ├── GuardStop                 4   data or a health guard stopped the run
    │   ├── DataError             4   a sample is broken; names its index
    │   └── HealthError           4   non-finite or negative loss
    ├── WorkersFailed             5   workers failed more often than allowed
    ├── StorageError              6   the store refused, for good
    │   ├── ObjectMissing         6   there is no such file or object
    │   ├── CheckpointDamaged     6   a file of a checkpoint is missing, short or altered
    │   └── RunLocked             6   another launcher owns the run folder
    └── Interrupted         130/143   SIGINT or SIGTERM; a checkpoint was saved

Every error names the value, the cause and the way out, and survives pickling between processes.
"""

from typing import ClassVar


class RungError(Exception):
    """Base of all errors that a user can see.

    `message` is complete on its own and says what was wrong with which value; `hint` is the way out (may be empty).
    """

    exit_code: ClassVar[int] = 5

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.args, dict(self.__dict__))

    def __str__(self) -> str:
        return f"{self.message}\n  → {self.hint}" if self.hint else self.message


def _rebuild(cls: type[RungError], args: tuple[object, ...], state: dict[str, object]) -> RungError:
    error = cls.__new__(cls)
    Exception.__init__(error, *args)
    error.__dict__.update(state)
    return error


class JobError(RungError):
    """One or more mistakes in a job file, an override or a command."""

    exit_code = 2


class TaskError(RungError):
    """The user's code raised. `traceback_text` starts at their first frame and holds no frame of rung's."""

    exit_code = 2

    def __init__(self, message: str, *, traceback_text: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.traceback_text = traceback_text


class DependencyError(RungError):
    """A package, compiler, library or driver is missing, or its version does not match."""

    exit_code = 2


class DoesNotFit(RungError):
    """No plan fits in the memory that is there."""

    exit_code = 3


class GuardStop(RungError):
    """A check of data or health stopped the run. `samples` are dataset indices, where they are known."""

    exit_code = 4

    def __init__(self, message: str, *, samples: tuple[int, ...] = (), step: int | None = None, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.samples = samples
        self.step = step


class DataError(GuardStop):
    """A sample or batch is broken."""


class HealthError(GuardStop):
    """Loss or gradient norm is NaN, Inf or (where forbidden) negative."""


class WorkersFailed(RungError):
    """Workers failed, and no retry is left or would help. `exit_status` is that of the process, as in `subprocess`
    (-9 is SIGKILL), where one process and its end are known."""

    exit_code = 5

    def __init__(self, message: str, *, exit_status: int | None = None, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.exit_status = exit_status


class StorageError(RungError):
    """The store refused or lost something, after retries. `url` names the object; it never holds credentials."""

    exit_code = 6

    def __init__(self, message: str, *, url: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.url = url


class ObjectMissing(StorageError):
    """There is no such file or object."""


class CheckpointDamaged(StorageError):
    """A file of a checkpoint is missing, short or altered."""


class RunLocked(StorageError):
    """Another launcher holds the lease on the run folder."""


class Interrupted(RungError):
    """SIGINT or SIGTERM arrived; the state is saved."""

    def __init__(self, message: str, *, signal_number: int, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.signal_number = signal_number

    @property
    def code(self) -> int:
        """Exit code: 128 plus the signal's number, as shells have it."""
        return 128 + self.signal_number
