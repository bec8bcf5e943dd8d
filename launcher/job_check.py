"""From plain values to a Job, with every problem found at once and said in the user's terms."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rung.launcher.job_types import LARGEST, MASK, shown
from rung.launcher.job_values import Devices, Job, StrategyPins
from rung.launcher.nearest import did_you_mean, nearest
from rung.strategies.errors import JobError

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Where:
    """Where each value was written: a line of the file, or the text of a `--set`."""

    name: str
    places: Mapping[KeyPath, int | str] = field(default_factory=dict)

    def place(self, path: KeyPath) -> int | str | None:
        """That of the value itself or of the nearest mapping around it."""
        for length in range(len(path), -1, -1):
            found = self.places.get(path[:length])
            if found is not None:
                return found
        return None

    def label(self, path: KeyPath) -> str:
        """`job.yaml:7`, or the `--set` that it came from."""
        place = self.place(path)
        if isinstance(place, str):
            return place
        return self.name if place is None else f"{self.name}:{place}"

    def near(self, path: KeyPath) -> str:
        """The same in a few words, for the second place that a message names."""
        place = self.places.get(path)
        if place is None and path[-1:] == ("name",):
            place = self.places.get(path[:-1])  # `strategy: zero2` for {name: zero2}
        if place is None:
            return "the default"
        return place if isinstance(place, str) else f"line {place}"


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake; `path` is the value that is wrong."""

    path: KeyPath
    text: str
    place: int | str | None = None  # set where the path alone does not tell


def dotted(path: KeyPath) -> str:
    """`data.clean[0]`"""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text.encode("utf-8", "backslashreplace").decode()[:200]


def problems_error(problems: Iterable[Problem], where: Where) -> JobError:
    """One error with a line for each problem, in the order of the file."""

    def order(item: tuple[int, int | str | None, str]) -> tuple[int, int]:
        number, place, _ = item
        return (place if isinstance(place, int) else LARGEST if isinstance(place, str) else 0), number

    lines: list[tuple[int, int | str | None, str]] = []
    for number, problem in enumerate(problems):
        place = problem.place if problem.place is not None else where.place(problem.path)
        label = place if isinstance(place, str) else where.name if place is None else f"{where.name}:{place}"
        name = dotted(problem.path)
        lines.append((number, place, f"{label}: {name}: {problem.text}" if name else f"{label}: {problem.text}"))
    return JobError("\n".join(dict.fromkeys(line for _, _, line in sorted(lines, key=order))))


def validate(values: object, where: Where, problems: list[Problem], source: Path) -> Job:
    """The Job, if neither `problems` (found while reading) nor any check here speaks against it.

    Contradictions are looked for also when some fields are wrong: those fields are set aside, and what is left is
    checked with their defaults in place.
    """
    found = list(problems)
    set_aside: set[KeyPath] = {problem.path for problem in problems if problem.path}
    remaining = values
    job: Job | None = None
    for _ in range(8):  # setting a field aside may show others, at most once for each level of nesting
        try:
            job = Job.model_validate(remaining)
        except ValidationError as error:
            details = error.errors(include_url=False)
        except RecursionError:
            raise JobError(f"{where.name}: the values are nested too deeply") from None
        else:
            break
        for detail in details:
            problem = _translate(detail)
            if problem.path not in set_aside:
                found.append(problem)
                set_aside.add(problem.path)
        if not isinstance(values, dict):
            break
        remaining = _without(remaining, [_location(detail) for detail in details])
    if job is not None:
        found += [p for p in contradictions(job, where) if not any(_touches(p, other) for other in set_aside)]
    if found or job is None:
        raise problems_error(found, where)
    job._source = source
    return job


def _touches(problem: "Contradiction", path: KeyPath) -> bool:
    return any(path[: len(part)] == part or part[: len(path)] == path for part in problem.paths)


def _without(values: object, paths: list[KeyPath]) -> object:
    """A copy that lacks the values at these paths; the three required fields get a stand-in."""
    if not isinstance(values, dict):
        return {}
    copy: dict[str, Any] = dict(values)
    for path in paths:
        if not path:
            return {}
        head = path[0]
        inner = copy.get(str(head))
        if len(path) > 1 and isinstance(inner, dict) and path[1] in inner:
            copy[str(head)] = {key: value for key, value in inner.items() if key != path[1]}
        elif head in _STAND_INS:
            copy[str(head)] = _STAND_INS[str(head)]
        else:
            copy.pop(str(head), None)
    return copy


_STAND_INS: dict[str, object] = {"task": "task:Task", "run": "run", "batch": LARGEST}


def _location(detail: ErrorDetails) -> KeyPath:
    """The path to the value; pydantic marks a bad key of a mapping by a last part that a user's key may equal too."""
    path = detail["loc"]
    return path[:-1] if path[-1:] == ("[key]",) and detail["type"] != "extra_forbidden" else path


# What a field must hold, by pydantic's name of the mistake.
_EXPECTED: dict[str, str] = {
    "int_type": "is not a whole number",
    "int_from_float": "is not a whole number",
    "int_parsing": "is not a whole number",
    "int_parsing_size": "is too large",
    "float_type": "is not a number",
    "float_parsing": "is not a number",
    "finite_number": "is not a finite number",
    "string_type": "is not text",
    "string_unicode": "is not text",
    "bool_type": "is neither true nor false",
    "bool_parsing": "is neither true nor false",
    "dict_type": "is not a mapping (key: value)",
    "model_type": "is not a mapping (key: value)",
    "tuple_type": "is not a list",
    "list_type": "is not a list",
}
_HINTS: dict[str, str] = {
    "clip": "; write null to switch clipping off",
    "checkpoint.keep": "; at least one checkpoint is kept, else nothing could be resumed",
    "schedule.warmup": "; it is a share of all steps (0.03 is 3%): for a number of steps, divide by their total",
    "schedule.final": "; it is a share of the top rate",
    "batch": "; it is the samples of one optimizer step over all devices",
    "task_args": ", the keyword arguments of the task's constructor",
}


def _translate(detail: ErrorDetails) -> Problem:
    path = _location(detail)
    kind, given, context = detail["type"], detail["input"], detail.get("ctx", {})
    value = MASK if _secret(path) else shown(given)
    hint = _HINTS.get(dotted(path), "")
    if kind == "missing":
        return Problem(path, f"missing; {_REQUIRED.get(dotted(path), 'it is needed')}")
    if kind == "extra_forbidden":
        return Problem(path, _unknown_key(path))
    if kind in ("model_type", "dict_type") and not path:
        return Problem(path, f"a job is a mapping (key: value), not {value}")
    if kind == "literal_error":
        options = [part.strip("'") for part in str(context["expected"]).replace(" or ", ", ").split(", ")]
        near = did_you_mean(given, options) if isinstance(given, str) else ""
        return Problem(path, f"{value} is none of {', '.join(options)}{near}")
    if kind == "value_error":
        return Problem(path, f"{context['error']}{hint}")
    for name, words in (("gt", "more than"), ("ge", "at least"), ("lt", "less than"), ("le", "at most")):
        if name in context:
            return Problem(path, f"{value} must be {words} {context[name]:g}{hint}")
    return Problem(path, f"{value} {_EXPECTED.get(kind, 'is wrong: ' + detail['msg'])}{hint}")


_REQUIRED = {
    "task": "write module:Class, as in task: task:MyTask",
    "run": "write the folder that the run is kept in, as in run: runs/first",
    "batch": "write the samples of one optimizer step, as in batch: 64",
}


def _secret(path: KeyPath) -> bool:
    return path[:2] in (("checkpoint", "options"), ("cluster", "runtime_env"))


def sections() -> dict[str, type[BaseModel]]:
    """The nested sections of a job by name."""
    return {name: model for name, info in Job.model_fields.items() if (model := _model(info.annotation))}


def _model(annotation: object) -> type[BaseModel] | None:
    if isinstance(annotation, UnionType):
        return next((model for part in get_args(annotation) if (model := _model(part))), None)
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _unknown_key(path: KeyPath) -> str:
    """Looks for the name among the keys of the same section first, then in all others."""
    name, parents = str(path[-1]), path[:-1]
    nested = sections()
    here = nested[str(parents[0])] if parents else Job
    place = f"not a key of {dotted(parents) if parents else 'the job'}"
    found = nearest(name, here.model_fields)
    if found is not None:
        return f"{place}; did you mean {found}?"
    for section, model in nested.items():
        inner = nearest(name, model.model_fields)
        if inner is not None and section not in parents:
            return f"{place}; did you mean {section}.{inner}?"
    if parents and (top := nearest(name, Job.model_fields)) is not None:
        return f"{place}; did you mean {top} at the top level?"
    if parents == ("optimizer",):
        return f"{place}; arguments of the optimizer itself go under optimizer.args"
    return f"{place}; known: {', '.join(here.model_fields)}"


@dataclass(frozen=True, slots=True)
class Contradiction(Problem):
    """Two values that cannot both hold; `paths` are both."""

    paths: tuple[KeyPath, ...] = ()


def contradictions(job: Job, where: Where) -> list[Contradiction]:
    """All pairs of fields that speak against each other. Pure."""
    found: list[Contradiction] = []

    def both(first: KeyPath, second: KeyPath, say: Callable[[str], str]) -> None:
        found.append(Contradiction(first, say(f"({where.near(second)})"), paths=(first, second)))

    if job.steps is not None and job.epochs is not None:
        both(
            ("steps",),
            ("epochs",),
            lambda at: (
                f"steps {job.steps} and epochs {job.epochs:g} {at} are both given; keep one, or set the other to null"
            ),
        )
    if job.checkpoint.keep_best is not None and job.validation.every is None:
        both(
            ("checkpoint", "keep_best"),
            ("validation", "every"),
            lambda at: (
                f"the best {job.checkpoint.keep_best} is known from validation, but validation.every {at} is none"
            ),
        )
    _check_counts(job, both)
    pins, span = job.strategy, _span(job.devices)
    if pins.name == "single" and span[0] > 1:
        both(
            ("strategy", "name"),
            ("devices", "count"),
            lambda at: f"single trains on one device, but devices.count {at} asks for at least {span[0]}",
        )
    if pins.name == "single" and (pins.devices or 1) > 1:
        both(
            ("strategy", "name"),
            ("strategy", "devices"),
            lambda at: f"single trains on one device, but strategy.devices {at} is {pins.devices}",
        )
    if pins.devices is not None and not span[0] <= pins.devices <= span[1]:
        both(
            ("strategy", "devices"),
            ("devices", "count"),
            lambda at: f"{pins.devices} devices are pinned, but devices.count {at} is {job.devices.count}",
        )
    _check_offload(pins, both)
    return found


Both = Callable[[KeyPath, KeyPath, Callable[[str], str]], None]


def _span(devices: Devices) -> tuple[int, int]:
    count = devices.count
    if count == "auto":
        return 1, LARGEST
    return (count, count) if isinstance(count, int) else (count[0], count[1])


def _check_counts(job: Job, both: Both) -> None:
    least, most = _span(job.devices)
    pins, workers = job.strategy, job.cluster.workers
    if least > most:
        both(
            ("devices", "count"),
            ("devices", "count"),
            lambda _: f"[{least}, {most}] has its ends swapped: write [least, most]",
        )
    if workers[0] > workers[1]:
        both(
            ("cluster", "workers"),
            ("cluster", "workers"),
            lambda _: f"[{workers[0]}, {workers[1]}] has its ends swapped: write [least, most]",
        )
    if job.batch < least:
        both(
            ("batch",),
            ("devices", "count"),
            lambda at: f"{job.batch} samples cannot keep {least} devices {at} busy; each needs at least one",
        )
    if job.cluster.address != "none" and job.batch < workers[0]:
        both(
            ("batch",),
            ("cluster", "workers"),
            lambda at: f"{job.batch} samples cannot keep {workers[0]} workers {at} busy; each needs at least one",
        )
    if pins.devices is not None and job.batch < pins.devices:
        both(
            ("batch",),
            ("strategy", "devices"),
            lambda at: f"{job.batch} samples cannot keep {pins.devices} devices {at} busy; each needs at least one",
        )
    if pins.micro_batch is not None and pins.micro_batch > job.batch:
        both(
            ("strategy", "micro_batch"),
            ("batch",),
            lambda at: f"{pins.micro_batch} is more than the whole batch of {job.batch} {at}",
        )


def _check_offload(pins: StrategyPins, both: Both) -> None:
    name = pins.name
    if pins.offload_parameters in ("host", "disk") and name not in ("auto", "zero3"):
        both(
            ("strategy", "offload_parameters"),
            ("strategy", "name"),
            lambda at: f"only zero3 can move parameters off the device, but strategy {at} is {name}",
        )
    if pins.within_nodes and name not in ("auto", "zero3"):
        both(
            ("strategy", "within_nodes"),
            ("strategy", "name"),
            lambda at: f"only zero3 can hold weights a second time in each node, but strategy {at} is {name}",
        )
    if pins.offload_optimizer in ("host", "disk") and not (name == "auto" or name.startswith("zero")):
        both(
            ("strategy", "offload_optimizer"),
            ("strategy", "name"),
            lambda at: f"only zero1 to zero3 can move the optimizer off the device, but strategy {at} is {name}",
        )
