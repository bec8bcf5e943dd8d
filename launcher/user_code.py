"""The border to the user's code: what it raises becomes a TaskError with the user's own traceback and none of ours."""

import os
import sys
import traceback
from types import TracebackType
from typing import NoReturn

from rung.strategies.errors import RungError, TaskError
from rung.strategies.oom import is_out_of_memory
from rung.strategies.tracebacks import is_ours, is_users_file, user_traceback


class _UserCode:
    __slots__ = ("_what",)

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, _: object, error: BaseException | None, __: TracebackType | None) -> None:
        if isinstance(error, Exception | SystemExit):
            reraise(error, self._what)


def user_code(what: str) -> _UserCode:
    """`with user_code("model"): ...` around each call into the user's code; `what` is where, in their words.

    Out-of-memory, a broken connection between workers and rung's own errors pass unchanged, as do KeyboardInterrupt
    and the like: they are not the user's mistake.
    """
    return _UserCode(what)


def reraise(error: Exception | SystemExit, what: str) -> NoReturn:
    """Raises `error` as a TaskError, or unchanged where it is not the user's."""
    if isinstance(error, RungError) or _is_infrastructure(error) or is_out_of_memory(error):
        raise error
    raise task_error(error, what) from error


def task_error(error: BaseException, what: str) -> TaskError:
    """`KeyError: 'x' in task.py:31, in loss`, with the traceback from the user's file on."""
    place = _place(error)
    at = f" in {place}" if place else ""
    if isinstance(error, SystemExit):
        text = f"the task called exit({error.code!r})"
    else:
        text = "".join(traceback.format_exception_only(type(error), error)).strip().rpartition("\n")[2]
        if isinstance(error, SyntaxError):
            text = f"{type(error).__name__}: {error.msg}"
    return TaskError(f"{text}{at}, in {what}", traceback_text=user_traceback(error))


def _place(error: BaseException) -> str:
    """`task.py:31`: the innermost line of the user's own, or where the syntax is wrong."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{os.path.basename(error.filename)}:{error.lineno}"  # noqa: PTH119
    found = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        filename = frame.f_code.co_filename
        if not is_ours(str(frame.f_globals.get("__name__", "")), filename) and is_users_file(filename):
            found = f"{os.path.basename(filename)}:{line}"  # noqa: PTH119
    return found


def _is_infrastructure(error: BaseException) -> bool:
    """Whether a collective inside the user's forward pass failed: the cause is then another worker.

    NCCL and the store raise torch's DistError; Gloo raises plain RuntimeError that names its source file.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not isinstance(error, RuntimeError):
        return False
    kind = getattr(distributed, "DistError", None)
    if kind is not None and isinstance(error, kind):
        return True
    text = str(error)
    return "gloo/transport" in text or "NCCL error" in text or "c10d" in text
