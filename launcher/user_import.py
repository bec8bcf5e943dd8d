"""Finds and imports `module:name` of the user's: beside the job file, in the working directory, or installed."""

import importlib
import sys
from collections.abc import Iterable
from pathlib import Path

from rung.launcher.nearest import did_you_mean
from rung.launcher.user_code import user_code
from rung.strategies.errors import JobError
from rung.strategies.tracebacks import is_users_file

# Modules that were imported for a job, by the folder they came from. A process may load several jobs, each with its
# own task.py; the later must not be given the earlier's.
_imported: dict[Path, set[str]] = {}


def import_object(entry: str, folder: Path, key: str) -> object:
    """The object that `module:name` names. `key` is the job's field, for messages.

    The folder that holds the module is put first on `sys.path`, as Python does for a script, then the job's folder and
    the working directory. Raises JobError if there is no such module or name, TaskError if importing it raises.
    """
    module_name, _, name = entry.partition(":")
    folder, cwd = folder.absolute(), Path.cwd()
    root = _root(module_name.split("."), folder, cwd)
    _forget_others({root or folder, folder, cwd})
    for path in (cwd, folder, root or folder):
        if str(path) in sys.path:
            sys.path.remove(str(path))
        sys.path.insert(0, str(path))
    if root is not None:
        _refuse_a_taken_name(module_name.partition(".")[0], root, key)
    importlib.invalidate_caches()
    before = set(sys.modules)
    try:
        with user_code(f"importing {module_name}"):
            try:
                module = importlib.import_module(module_name)
            except ModuleNotFoundError as error:
                if root is None and error.name and f"{module_name}.".startswith(f"{error.name}."):
                    raise _no_module(module_name, folder, cwd, key) from None
                raise
    finally:
        base = root or folder
        _imported.setdefault(base, set()).update(n for n in set(sys.modules) - before if _is_within(n, base))
    if not hasattr(module, name):
        classes = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        own = [n for n in classes if getattr(vars(module)[n], "__module__", None) == module.__name__]
        raise JobError(
            f"{key}: {_file(module_name)} has no {name}{did_you_mean(name, own or classes)}",
            hint=f"it defines {', '.join(own)}" if own else "it defines no class or function",
        )
    return getattr(module, name)


def _root(parts: list[str], folder: Path, cwd: Path) -> Path | None:
    """The folder to import from: beside the job file; the one above, where the job lies in its package; the cwd."""
    above = [
        folder.parents[depth - 1]
        for depth in range(1, min(len(parts), len(folder.parents) + 1))
        if list(folder.parts[-depth:]) == parts[:depth]
    ]
    for root in (folder, *above, cwd):
        path = root.joinpath(*parts)
        if path.with_name(path.name + ".py").is_file() or (path / "__init__.py").is_file():
            return root
    return None


def _is_within(module: str, root: Path) -> bool:
    """Whether a loaded module is the user's and from below `root` (which may hold their virtual environment too)."""
    # Not getattr: some modules make up whatever they are asked for (torch.ops).
    attributes = getattr(sys.modules.get(module), "__dict__", {})
    path = attributes.get("__path__")
    places = [attributes.get("__file__"), *(path if isinstance(path, Iterable) else ())]
    return not module.startswith("rung.") and any(
        isinstance(place, str) and Path(place).is_relative_to(root) and is_users_file(place) for place in places
    )


def _forget_others(wanted: set[Path]) -> None:
    for root in [root for root in _imported if root not in wanted]:
        for name in _imported.pop(root):
            sys.modules.pop(name, None)
        while str(root) in sys.path:
            sys.path.remove(str(root))


def _refuse_a_taken_name(top: str, root: Path, key: str) -> None:
    if top in sys.modules and not (_is_within(top, root) or _is_within(top, root.resolve())):
        other = getattr(sys.modules[top], "__file__", None) or "Python itself"
        raise JobError(
            f"{key}: {root / top} has the same name as a module that is loaded already ({other})",
            hint=f"give yours another name than {top}",
        )


def _no_module(module_name: str, folder: Path, cwd: Path, key: str) -> JobError:
    looked = [str(folder), *([str(cwd)] if cwd != folder else [])]
    there = [
        path.stem
        for place in {folder, cwd}
        for path in (*place.glob("*.py"), *place.glob("*/"))
        if path.is_file() or path.is_dir()
    ]
    return JobError(
        f"{key}: there is no module {module_name}{did_you_mean(module_name, there)}",
        hint=f"looked for {_file(module_name)} in {' and '.join(looked)}, and among the installed packages",
    )


def _file(module_name: str) -> str:
    return module_name.replace(".", "/") + ".py"
