"""What a model needs, found before anything starts: traced in a throw-away process, and kept for the next launch.

`find_profile` runs in the launcher and never fails the run: without a profile the ladder goes from simple to frugal.
"""

import hashlib
import json
import sys
from importlib.machinery import PathFinder
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rung.cluster.link import Link
from rung.launcher.aside import ask
from rung.launcher.folder import cache_folder, keep_whole
from rung.launcher.job import Job
from rung.launcher.messages import ProfileRequest
from rung.strategies.errors import RungError, TaskError
from rung.strategies.plan import Precision
from rung.strategies.profile import Profile

if TYPE_CHECKING:
    from rung.launcher.task import TaskAdapter

ENTRY = "rung.launcher.profiling:main"
#: How long a profile may take, in seconds; a decoder of 70 billion weights needs less.
DEADLINE_S = 120.0
#: Samples that are looked at for the longest one.
LOOKED_AT = 512


def worth_it(job: Job, kind: str) -> bool:
    """Whether there is anything to choose by memory: not if all is pinned, nor for one CPU process without a cap."""
    pins = job.strategy
    if job.devices.memory != "auto":
        return True  # whatever is pinned is checked against the cap
    pinned = pins.name != "auto" and pins.micro_batch is not None
    return not pinned and not (pins.name == "single" and kind == "cpu")


def find_profile(job: Job, precision: Precision, *, deadline_s: float = DEADLINE_S) -> tuple[Profile | None, str]:
    """The profile of the job's task, from the cache or a trace, and what to say about it (empty if all is well).

    Raises what is wrong with the job or the task itself, since training would meet it too.
    """
    digest = digest_of(job, precision)
    kept = cache_folder() / "profiles" / f"{digest}.json"
    try:
        return Profile.from_json(kept.read_text()), ""
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not there, or of another version: made again
    answer = _trace(job, precision, digest, deadline_s)
    if isinstance(answer, Profile):
        keep_whole(kept, answer.to_json())
        return answer, ""
    return None, answer


def digest_of(job: Job, precision: Precision) -> str:
    """Changes with whatever changes a profile: the task's code (each .py beside the job or the task's module, wherever
    that is), arguments, optimizer, versions."""
    digest = hashlib.blake2b(digest_size=16)
    said = [
        job.task,
        job.task_args,
        job.optimizer.model_dump(mode="json"),
        job.clip is None,
        precision,
        version("torch"),
    ]
    digest.update(json.dumps(said, sort_keys=True, default=str).encode())
    here = Path(__file__).parents[1] / "strategies"
    for file in sorted({*job.folder.rglob("*.py"), *here.glob("*.py"), *_task_files(job)}):
        if file.is_file():  # not a link to nowhere
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _task_files(job: Job) -> list[Path]:
    """The code of the task's module and what lies beside it, found without running any. Of an installed module only
    itself: what is installed beside it is not its own."""
    name = job.task.partition(":")[0].partition(".")[0]
    spec = PathFinder.find_spec(name, [str(job.folder), str(Path.cwd()), *sys.path])
    if spec is None:
        return []
    if spec.submodule_search_locations:
        return [file for folder in spec.submodule_search_locations for file in Path(folder).rglob("*.py")]
    if not spec.origin or not spec.origin.endswith(".py"):
        return []
    file = Path(spec.origin)
    return (
        [file]
        if file.parent.name == "site-packages"
        else [file, *file.parent.glob("*.py"), *file.parent.glob("*/*.py")]
    )


def _trace(job: Job, precision: Precision, digest: str, deadline_s: float) -> Profile | str:
    request = ProfileRequest(job=job.to_dict(), source=job.source, precision=precision, digest=digest)
    answer = ask(ENTRY, request, deadline_s=deadline_s)
    if answer is None:
        return f"the model could not be profiled within {deadline_s:g} s"
    if answer.error is not None:
        raise answer.error
    if isinstance(answer.value, Profile | str):
        return answer.value
    return f"the model could not be profiled: {answer.line}"


# -------------------------------------------------------------------- in the throw-away process


def main(link: Link, request: ProfileRequest) -> None:
    """Entry point: traces one step on fake tensors, or else measures a real one."""
    from rung.launcher.task import load_task, make_optimizer
    from rung.strategies.trace import cannot_fake, profile_task

    job = Job.from_dict(request.job, source=request.source)
    task = load_task(job)
    dataset = task.dataset("train")
    samples, longest = _samples(task, dataset)

    def make_batch(count: int) -> Any:
        return task.collate([samples[i % len(samples)] for i in range(count)])

    def trace(*, fake: bool) -> Profile:
        return profile_task(
            task, lambda model: make_optimizer(job.optimizer, task.parameters(model), job.folder), make_batch,
            precision=request.precision, clip=job.clip, fake=fake, name=job.task, digest=request.digest,
            longest=longest,
        )  # fmt: skip

    for fake in (True, False):
        try:
            found: Profile | str = trace(fake=fake)
        except Exception as error:
            if isinstance(error, TaskError) and fake:
                continue  # their code may only object to tensors without values; a real step tells
            if isinstance(error, RungError):
                raise
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            found = f"the model could not be profiled ({reason}); memory is found out by trying"
            if fake and cannot_fake(error):
                continue  # whatever fake tensors cannot do, a real step may
        link.send(found)
        return


def _samples(task: "TaskAdapter", dataset: Any) -> tuple[list[Any], str]:
    """Samples to make batches of: the longest of those looked at, where the task tells sizes; else the first few."""
    if not task.has_size:
        return [task.fetch(dataset, i) for i in range(min(8, len(dataset)))], ""
    stride = max(1, len(dataset) // LOOKED_AT)
    looked = [(task.size(task.fetch(dataset, i)), i) for i in range(0, len(dataset), stride)]
    _, index = max(looked)
    return [task.fetch(dataset, index)], f"sample {index}, the longest of {len(looked)} looked at"
