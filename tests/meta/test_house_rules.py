"""The structure that the design asks for, held by tests: who may import whom, and where heavy packages live."""

import ast
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import rung.strategies.errors as errors

ROOT = Path(__file__).parents[2]
PACKAGES = ("strategies", "cluster", "launcher")  # each may import those before it, and itself
HOMES = {
    "ray": ("cluster/",),
    "deepspeed": ("strategies/",),
    "accelerate": ("strategies/",),
    "fsspec": ("launcher/storage",),
    "typer": ("launcher/cli",),
    "rich": ("launcher/cli", "launcher/watch/progress.py"),
    "yaml": ("launcher/job",),
}
SOURCES = sorted(p for package in PACKAGES for p in (ROOT / package).rglob("*.py"))


def imports(path):
    """(module, line) of every import statement in a file, also those inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            yield node.module, node.lineno
            # `from rung import cluster` and the like name a module too
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def test_there_is_something_to_look_at():
    assert len(SOURCES) > 20


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_imports_point_one_way_and_heavy_packages_have_one_home(path):
    here = path.relative_to(ROOT).as_posix()
    allowed = PACKAGES[: PACKAGES.index(here.split("/")[0]) + 1]
    for module, line in imports(path):
        top, _, rest = module.partition(".")
        if top == "rung" and rest:
            assert rest.split(".")[0] in allowed, f"{here}:{line} imports {module}"
        if homes := HOMES.get(top):
            assert here.startswith(homes), f"{here}:{line} imports {top}, whose home is {' or '.join(homes)}"


def loaded_by(code):
    """Top-level names of all modules that a fresh interpreter has loaded after running `code`."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(*{{m.split('.')[0] for m in sys.modules}})"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "module",
    [
        "cli",
        "run",
        "job",
        "planner",
        "folder",
        "storage",
        "checkpoint.manifest",
        "checkpoint.retention",
        "attempt",
        "doctor",
    ],
)
def test_the_launcher_process_never_loads_torch(module):
    heavy = {"torch", "deepspeed", "accelerate", "ray", "transformers"}
    assert not heavy & loaded_by(f"import rung.launcher.{module}")


@pytest.mark.parametrize("module", ["hardware", "local", "verdict", "failures"])
def test_the_cluster_package_loads_neither_torch_nor_ray_by_itself(module):
    assert not {"torch", "ray"} & loaded_by(f"import rung.cluster.{module}")


def all_errors():
    found, queue = [], [errors.RungError]
    while queue:
        kind = queue.pop()
        found.append(kind)
        queue += kind.__subclasses__()
    return found


@pytest.mark.parametrize("kind", all_errors(), ids=lambda k: k.__name__)
def test_every_error_survives_pickling_with_all_it_says(kind):
    extra = {"signal_number": 2} if kind is errors.Interrupted else {}
    error = kind("value 7 is odd", hint="use 8", **extra)
    error.note = "added later"
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == str(error) == "value 7 is odd\n  → use 8"
    assert again.__dict__ == error.__dict__


def test_the_error_tree_in_the_docstring_is_the_real_one():
    for kind in all_errors():
        assert kind.__name__ in errors.__doc__


def test_files_stay_readable():
    long = {p.relative_to(ROOT).as_posix(): n for p in SOURCES if (n := p.read_text().count("\n")) > 420}
    assert not long
    assert (ROOT / "launcher/run.py").read_text().count("\n") <= 250
