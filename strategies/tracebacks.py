"""A traceback as its owner wants to read it: from the user's first line on, and nothing of ours."""

import os
import site
import sysconfig
import traceback

_LIBRARIES = tuple(
    os.path.join(os.path.realpath(path), "")  # noqa: PTH118  # compared with the plain file names of frames
    for path in {
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        *site.getsitepackages(),
        site.getusersitepackages(),
    }
)


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
    keep = [not is_ours(str(frame.f_globals.get("__name__", "")), frame.f_code.co_filename) for frame, _ in frames]
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


def is_ours(module: str, filename: str) -> bool:
    """Whether a frame is rung's or of the import system."""
    return module.startswith("rung.") or filename.startswith("<frozen ") or module.partition(".")[0] == "importlib"


def is_users_file(filename: str) -> bool:
    """Whether a source file is neither Python's own nor an installed package's."""
    return not filename.startswith(_LIBRARIES) and not filename.startswith("<frozen ")
