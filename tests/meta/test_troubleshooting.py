"""docs/troubleshooting.md says what rung says: each message on it is in the source, each finding and error on it."""

import ast
import re
from pathlib import Path

import pytest

import rung.strategies.errors as errors
from rung.cluster.failures import Cause
from rung.launcher.data.advice import ADVICE

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/troubleshooting.md").read_text()
MESSAGES = [line.strip().removeprefix("> ") for line in PAGE.splitlines() if line.strip().startswith("> ")]
TREES = {p: ast.parse(p.read_text()) for k in ("launcher", "cluster", "strategies") for p in (ROOT / k).rglob("*.py")}
SUBJECT = re.compile(r"[a-z][a-z0-9_]*(\.[a-z0-9_]+)*")


def template(node):
    """The text of a string or f-string, with … for each value; None for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    return None


def templates(tree):
    found = {template(node) for node in ast.walk(tree)}
    return found - {None}


def subjects(tree):
    """Names of findings: what is given as `subject`, or by place to a function that makes findings."""
    makers = {
        node.name for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.returns is not None and "Finding" in ast.unparse(node.returns)
    }  # fmt: skip
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            continue
        if call.func.id == "Finding" or call.func.id in makers:
            named = [word.value for word in call.keywords if word.arg == "subject"]
            placed = call.args if call.func.id in makers else []
            either = [branch for v in named if isinstance(v, ast.IfExp) for branch in (v.body, v.orelse)]
            texts = [template(node) for node in [*named, *either, *placed]]
            yield from (text for text in texts if text and SUBJECT.fullmatch(text))


SOURCE = {text for tree in TREES.values() for text in templates(tree)}
NAMED = set(re.findall(r"`([^`]+)`", PAGE))


def test_there_is_a_page_with_many_entries():
    assert len(MESSAGES) > 60


@pytest.mark.parametrize("message", MESSAGES)
def test_each_message_on_the_page_is_printed_by_the_source(message):
    fixed = [part for part in message.split("…") if part]
    assert sum(map(len, fixed)) >= 4, "nothing of it can be looked for"
    pattern, longest = re.compile(".*?".join(map(re.escape, fixed)), re.DOTALL), max(fixed, key=len)
    assert any(longest in text and pattern.search(text) for text in SOURCE)


def test_each_finding_is_on_the_page():
    known = {subject for tree in TREES.values() for subject in subjects(tree)} | set(ADVICE)
    assert len(known) > 50
    assert sorted(known - NAMED) == []


def test_each_error_and_each_cause_of_a_failure_is_on_the_page():
    kinds = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)}
    assert sorted((kinds | {cause.value for cause in Cause}) - NAMED) == []


def raised(path, kinds):
    for node in ast.walk(TREES[ROOT / path]):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in kinds and node.args:
            yield template(node.args[0])


@pytest.mark.parametrize("path", ["launcher/smoke.py", "launcher/task.py"])
def test_what_the_first_samples_and_the_task_are_refused_for_is_on_the_page(path):
    quoted = set(MESSAGES)
    said = {text for text in raised(path, {"DataError", "HealthError", "TaskError"}) if text}
    assert said
    assert sorted(said - quoted) == []
