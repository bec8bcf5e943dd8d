"""The border to the user's code: what it raises becomes a TaskError with the user's own traceback and none of ours."""

import os
import site
import sys
import sysconfig
import traceback
from types import TracebackType
from typing import NoReturn

from rung.strategies.errors import RungError, TaskError
from rung.strategies.oom import is_out_of_memory

_LIBRARIES = tuple(
    os.path.join(os.path.realpath(path), "")  # noqa: PTH118  # compared with the plain file names of frames
    for path in {
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        *site.getsitepackages(),
        site.getusersitepackages(),
    }
)


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


def user_traceback(error: BaseException) -> str:
    """The formatted traceback from the first frame of the user's on, without any frame of rung's or of the import
    system; causes and contexts likewise.

    Where no frame is the user's (an installed task, an error within torch's own collate), all that are not ours stay.
    """
    formatted = traceback.TracebackException.from_exception(error, compact=True)
    _filter(formatted, error, set())
    return "".join(formatted.format())


def _filter(formatted: traceback.TracebackException, error: BaseException, seen: set[int]) -> None:
    """Filters in place, along the same links that TracebackException follows."""
    if id(error) in seen:
        return
    seen.add(id(error))
    frames = list(traceback.walk_tb(error.__traceback__))
    keep = [not _is_ours(str(frame.f_globals.get("__name__", "")), frame.f_code.co_filename) for frame, _ in frames]
    theirs = [k and is_users_file(frame.f_code.co_filename) for k, (frame, _) in zip(keep, frames, strict=True)]
    first = theirs.index(True) if True in theirs else 0
    if len(formatted.stack) == len(frames):
        kept = [line for i, line in enumerate(formatted.stack) if i >= first and keep[i]]
        formatted.stack = traceback.StackSummary.from_list(kept)
    if formatted.__cause__ is not None and error.__cause__ is not None:
        _filter(formatted.__cause__, error.__cause__, seen)
    if formatted.__context__ is not None and error.__context__ is not None:
        _filter(formatted.__context__, error.__context__, seen)
    for inner, inner_error in zip(
        getattr(formatted, "exceptions", None) or (), getattr(error, "exceptions", ()), strict=False
    ):
        _filter(inner, inner_error, seen)


def _is_ours(module: str, filename: str) -> bool:
    return module.startswith("rung.") or filename.startswith("<frozen ") or module.partition(".")[0] == "importlib"


def is_users_file(filename: str) -> bool:
    """Whether a source file is neither Python's own nor an installed package's."""
    return not filename.startswith(_LIBRARIES) and not filename.startswith("<frozen ")


def _place(error: BaseException) -> str:
    """`task.py:31`: the innermost line of the user's own, or where the syntax is wrong."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{os.path.basename(error.filename)}:{error.lineno}"  # noqa: PTH119
    found = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        filename = frame.f_code.co_filename
        if not _is_ours(str(frame.f_globals.get("__name__", "")), filename) and is_users_file(filename):
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
