"""The command line is quick, complete and quiet."""

import json
import subprocess
import sys
import time

import pytest

RUNG = [sys.executable, "-c", "from rung.launcher.cli import main; main()"]


def rung(*arguments, **options):
    return subprocess.run([*RUNG, *arguments], capture_output=True, text=True, timeout=60, **options)


def test_help_is_quick_and_loads_no_torch():
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        assert rung("--help").returncode == 0
        seconds.append(time.perf_counter() - began)
    bare = []
    for _ in range(5):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", "pass"], check=True)
        bare.append(time.perf_counter() - began)
    # 0.3 s is the promise on an idle machine; a loaded one slows a bare interpreter just as much.
    assert min(seconds) < 0.3 + 5 * (min(bare) - 0.02)


def test_help_names_every_command():
    text = rung("--help").stdout
    for command in ("launch", "hardware", "init", "schema"):
        assert command in text


def test_version():
    assert rung("--version").stdout.startswith("rung ")


def test_the_schema_is_json():
    assert json.loads(rung("schema").stdout)["properties"]["batch"]


@pytest.mark.parametrize("arguments", [["launch"], ["fly"], ["launch", "a", "b"], ["launch", "--nonsense", "x"]])
def test_a_wrong_command_line_exits_2_without_a_traceback(arguments):
    done = rung(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr + done.stdout


def test_a_missing_job_file_exits_2_and_is_named(tmp_path):
    done = rung("launch", str(tmp_path / "nowhere.yaml"))
    assert done.returncode == 2
    assert "nowhere.yaml" in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
