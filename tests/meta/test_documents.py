"""What the documents name exists: commands, options, fields, files, benchmarks."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rung.launcher.job import Job

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.md")])
FOLDERS = "docs|launcher|strategies|cluster|tests|benchmarks|examples"
README = (ROOT / "README.md").read_text()


def benchmark_names():
    return {p.stem for p in (ROOT / "benchmarks").glob("*.py") if "\nif __name__ ==" in p.read_text()} - {"__main__"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_every_benchmark_and_file_that_is_named_exists(document):
    text = document.read_text()
    for name in re.findall(r"python -m benchmarks\.(\w+)", text):
        assert name in benchmark_names()
    for name in re.findall(
        r"\b(?:docs|launcher|strategies|cluster|tests|benchmarks|examples)/[\w/]+\.(?:py|md|yaml)\b", text
    ):
        assert (ROOT / name).exists(), name


def test_the_readme_names_every_benchmark():
    assert benchmark_names() == set(re.findall(r"python -m benchmarks\.(\w+)", README))


def test_the_readme_explains_every_field_of_a_job():
    explained = set(re.findall(r"`(\w+)`", README)) | set(re.findall(r"^(?:# )?(\w+):", README, re.MULTILINE))
    assert set(Job.model_fields) <= explained


def test_the_job_in_the_readme_is_valid():
    text = re.search(r"```yaml\n(.*?)```", README, re.DOTALL).group(1)
    Job.model_validate(yaml.safe_load(text))


def test_every_command_and_option_in_the_readme_is_real():
    for command in sorted(set(re.findall(r"^\$? ?rung (\w+)", README, re.MULTILINE))):
        shown = subprocess.run(
            [sys.executable, "-c", "from rung.launcher.cli import main; main()", command, "--help"],
            capture_output=True,
            text=True,
            timeout=60,
            env={"PATH": "", "COLUMNS": "200", "TERM": "dumb"},
            check=False,
        )
        assert shown.returncode == 0, command
        for line in re.findall(rf"^\$? ?(rung {command} [^#\n]*)", README, re.MULTILINE):
            for option in re.findall(r"--\w[\w-]*", line):
                assert command == "checkpoint" or option in shown.stdout, line


def test_make_bench_runs_what_there_is():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "nonsense"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert all(name in done.stderr for name in benchmark_names())
