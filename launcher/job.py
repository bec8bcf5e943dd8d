"""Reads a job file: YAML to a frozen `Job`, with every problem at once and its line.

The only home of yaml. YAML is walked as nodes, never constructed: that keeps the line of each value, and nothing in a
file can make an object. Numbers follow YAML 1.2 (`1e-4` is a number, `1:30` and dates are text); `on` and `off` are
booleans as in YAML 1.1.
"""

import copy
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from rung.launcher.job_changes import Change, changes
from rung.launcher.job_check import KeyPath, Problem, Where, dotted, validate
from rung.launcher.job_types import MASK, Every, shown
from rung.launcher.job_values import (
    Checkpoint,
    Cluster,
    Data,
    Devices,
    Fallback,
    Guard,
    Job,
    Optimizer,
    Schedule,
    StrategyPins,
    Validation,
    public_url,
)
from rung.strategies.errors import JobError

__all__ = [
    "Change",
    "Checkpoint",
    "Cluster",
    "Data",
    "Devices",
    "Every",
    "Fallback",
    "Guard",
    "Job",
    "Optimizer",
    "Schedule",
    "StrategyPins",
    "Validation",
    "changes",
    "load",
    "public_url",
]

_MOST_BYTES = 256 * 1024
_MOST_VALUES = 20_000  # a job has about a hundred; aliases could make billions
_MOST_LEVELS = 60
_TAG = "tag:yaml.org,2002:"
_SHORT_FORMS = ("optimizer", "schedule", "strategy")  # `strategy: zero2` is {name: zero2}


class _Loader(yaml.SafeLoader):
    pass


_Loader.yaml_implicit_resolvers = {}
for _name, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"(?i:true|false|yes|no|on|off)", list("tTfFyYnNoO")),
    ("int", r"[-+]?[0-9][0-9_]*|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:[0-9][0-9_]*\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?i:inf)|\.(?i:nan)",
        list("-+.0123456789"),
    ),
):
    _Loader.add_implicit_resolver(_TAG + _name, re.compile(rf"^(?:{_pattern})$"), _first)


def load(path: Path | str, sets: Sequence[str] = ()) -> Job:
    """The job in a file, with `--set` overrides such as `optimizer.lr=3e-4` applied.

    Raises JobError: one line for each problem, `job.yaml:7: optimizer.lr: ...`.
    """
    name = str(path).encode("utf-8", "backslashreplace").decode()
    values, reader = _parse(_text(Path(path), name), name)
    if not isinstance(values, dict):
        raise JobError(f"{name}:1: a job is a mapping (key: value), not {shown(values)}")
    places: dict[KeyPath, int | str] = dict(reader.lines)
    problems = list(reader.problems)
    for text in sets:
        problems += _apply(text, values, places)
    return validate(values, Where(name, places), problems, Path(path).absolute())


def read_mapping(path: Path) -> dict[str, Any]:
    """Any small YAML or JSON file that holds a mapping, read as strictly as a job. Raises JobError."""
    values, reader = _parse(_text(path, str(path)), str(path))
    if reader.problems:
        problem = reader.problems[0]
        raise JobError(f"{path}:{problem.place}: {problem.text}")
    if not isinstance(values, dict):
        raise JobError(f"{path}:1: a mapping (key: value) is expected, not {shown(values)}")
    return values


def _text(path: Path, name: str) -> str:
    try:
        if path.is_dir():
            raise JobError(f"{name} is a folder", hint=f"name the file in it, as in {path / 'job.yaml'}")
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        raise JobError(f"{name} does not exist", hint="`rung init FOLDER` writes one to start from") from None
    except (OSError, ValueError) as error:
        raise JobError(f"{name} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > _MOST_BYTES:
        raise JobError(f"{name} is longer than {_MOST_BYTES // 1024} KiB; this is no job file")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        bad = data[error.start]
        raise JobError(f"{name}:{line}: byte 0x{bad:02x} is not UTF-8", hint="save the file as UTF-8") from None


def _parse(text: str, name: str) -> tuple[Any, "_Reader"]:
    """Plain values of a YAML text. Raises JobError where it cannot be read at all."""
    reader = _Reader()
    try:
        node = _Loader(text).get_single_node()
        if node is None:
            raise JobError(f"{name} is empty", hint="a job needs at least task, run and batch")
        return reader.value(node, ()), reader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = f"{name}:{mark.line + 1}" if mark is not None else name
        raise JobError(f"{at}: {_yaml_words(error)}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise JobError(f"{name}:{line}: the character {error.character!r} may not stand in YAML") from None
    except _Unreadable as error:
        raise JobError(f"{name}:{error.line}: {error}") from None
    except RecursionError:
        raise JobError(f"{name}: nested deeper than {_MOST_LEVELS} levels") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # such as "\UFFFFFFFF", which PyYAML does not check
        raise JobError(f"{name}: not valid YAML: {error}") from None


def _yaml_words(error: yaml.MarkedYAMLError) -> str:
    problem = (error.problem or "").encode("utf-8", "backslashreplace").decode()
    if "'\\t'" in problem:
        return "a tab; YAML is indented with spaces"
    if "expected a single document" in (error.context or ""):
        return "a second document (---); a job file holds one"
    if "mapping values are not allowed" in problem:
        return "not valid YAML: a second `:` on this line, or wrong indentation (put text with `: ` in quotes)"
    context = f" ({error.context})" if error.context else ""
    return f"not valid YAML: {problem}{context}"


class _Unreadable(Exception):
    def __init__(self, line: int, text: str) -> None:
        super().__init__(text)
        self.line = line


class _Reader:
    """Turns nodes into plain values; remembers the line of each."""

    def __init__(self) -> None:
        self.lines: dict[KeyPath, int] = {}
        self.problems: list[Problem] = []
        self._values = 0
        self._open: set[int] = set()

    def value(self, node: yaml.Node, path: KeyPath) -> Any:
        line = node.start_mark.line + 1
        self._values += 1
        if self._values > _MOST_VALUES:
            raise _Unreadable(line, f"more than {_MOST_VALUES} values; do aliases (*name) multiply here?")
        if len(path) > _MOST_LEVELS:
            raise _Unreadable(line, f"nested deeper than {_MOST_LEVELS} levels")
        if id(node) in self._open:
            raise _Unreadable(line, "an alias (*name) stands inside of what it names")
        self.lines.setdefault(path, line)
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, path)
            if isinstance(node, yaml.SequenceNode):
                self._expect(node, "seq", path)
                return [self.value(item, (*path, i)) for i, item in enumerate(node.value)]
            return self._scalar(node, path)
        finally:
            self._open.discard(id(node))

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        self._expect(node, "map", path)
        values: dict[str, Any] = {}
        for key, item in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                self.problems.append(Problem(path, "a key must be plain text", line))
                continue
            name = str(key.value)
            inner = (*path, name)
            if name == "<<":
                self.problems.append(Problem(inner, "merge keys are not supported; repeat the values", line))
            elif name in values:
                first = self.lines[inner]
                self.problems.append(Problem(inner, f"given twice; first on line {first}", line))
            else:
                self.lines[inner] = line
                values[name] = self.value(item, inner)
        return values

    def _scalar(self, node: yaml.Node, path: KeyPath) -> Any:
        text: str = node.value
        tag = node.tag.removeprefix(_TAG)
        try:
            if tag == "str":
                return text
            if tag == "null" and text.lower() in ("", "~", "null"):
                return None
            if tag == "bool":
                return {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}[text.lower()]
            if tag == "int":
                digits = text.replace("_", "")
                return int(digits, 16) if digits[:2] == "0x" else int(digits)
            if tag == "float":
                return float(text.replace("_", "").lower().replace(".inf", "inf").replace(".nan", "nan"))
        except (KeyError, ValueError):
            words = "too many digits" if tag == "int" and len(text) > 100 else f"{shown(text)} is not a {tag}"
            self.problems.append(Problem(path, words, node.start_mark.line + 1))
            return None
        self._expect(node, "str", path)
        return text

    def _expect(self, node: yaml.Node, kind: str, path: KeyPath) -> None:
        if node.tag != _TAG + kind:
            words = f"the tag {shown(node.tag)} is not supported; write the plain value"
            self.problems.append(Problem(path, words, node.start_mark.line + 1))


def _apply(text: str, values: dict[str, Any], places: dict[KeyPath, int | str]) -> list[Problem]:
    """Writes one `a.b=value` into `values`; gives what is wrong with it."""
    key, equals, given = text.partition("=")
    path: KeyPath = tuple(key.strip().split("."))
    hidden = len(path) > 1 and path[:2] in (("checkpoint", "options"), ("cluster", "runtime_env"))
    label = f"--set {key}={MASK}" if hidden else f"--set {text}"
    label = label.encode("utf-8", "backslashreplace").decode().replace("\n", "\\n")[:120]
    if not equals or not all(path):
        return [Problem((), "write key=value, as in --set optimizer.lr=3e-4", label)]
    problems: list[Problem] = []
    inner_paths: list[KeyPath] = [()]
    value: Any = None
    if given.strip():
        try:
            value, reader = _parse(given, label)
        except JobError as error:
            return [Problem(path, error.message.removeprefix(label).lstrip(":0123456789 "), label)]
        problems = [Problem((*path, *p.path), p.text, label) for p in reader.problems]
        inner_paths = list(reader.lines)
    holder = values
    for depth, part in enumerate(path[:-1], 1):
        inner = holder.get(str(part))
        if depth == 1 and part in _SHORT_FORMS and isinstance(inner, str):
            inner = {"name": inner}
        if inner is not None and not isinstance(inner, dict):
            return [Problem(path, f"{dotted(path[:depth])} is {shown(inner)}, which has no keys", label)]
        holder[str(part)] = inner = copy.copy(inner) if inner else {}
        holder = inner
    holder[str(path[-1])] = value
    for old in [old for old in places if old[: len(path)] == path]:
        del places[old]
    places.update({(*path, *inner): label for inner in inner_paths})
    return problems
