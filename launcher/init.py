"""`rung init`: a job and a task that train at once, to start from."""

from importlib.resources import files
from pathlib import Path

from rung.strategies.errors import JobError

NAMES = ("job.yaml", "task.py")


def init(folder: Path) -> list[Path]:
    """Writes job.yaml and task.py into `folder`, which is made if need be; gives their paths.

    Raises JobError, and writes nothing, where one of them is there already or the folder cannot be written to.
    """
    paths = [folder / name for name in NAMES]
    there = [str(path) for path in paths if path.exists() or path.is_symlink()]
    if there:
        raise JobError(
            f"{' and '.join(there)} {'is' if len(there) == 1 else 'are'} there already; nothing was written",
            hint="choose another folder, or move what is there out of the way",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in paths:
            with path.open("x", encoding="utf-8") as file:
                file.write((files("rung.launcher") / "templates" / path.name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise JobError(f"{folder} cannot be written to: {getattr(error, 'strerror', None) or error}") from None
    return paths
