"""The script for GPUs works as far as a CPU can tell, and says so where there is no GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2]))
from benchmarks.gpu import PARTS, apart

ROOT = Path(__file__).parents[2]
GPU = [sys.executable, "-m", "benchmarks.gpu"]


@pytest.mark.slow
def test_its_parts_run_on_a_cpu_and_are_written_down(tmp_path: Path) -> None:
    parts = ["hardware", "precision", "save"]
    command = [*GPU, "--device", "cpu", "--json", str(tmp_path / "found.json"), "--only", *parts]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    found = json.loads((tmp_path / "found.json").read_text())
    assert {name: found[name]["outcome"] for name in found} == dict.fromkeys(parts, "ok"), done.stdout
    assert done.returncode == 0
    assert found["precision"]["scale"] == found["precision"]["torch_scale"]


@pytest.mark.slow
def test_without_a_gpu_it_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here: run the script itself")
    done = subprocess.run(GPU, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3
    assert "no CUDA GPU" in done.stdout


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="shows what a CUDA GPU does, and there is none")
@pytest.mark.parametrize("part", PARTS)
def test_each_part_holds_on_a_gpu(part: str) -> None:
    found = apart(part, "cuda")
    if found["outcome"].startswith("skipped"):
        pytest.skip(found["outcome"])
    assert found["outcome"] == "ok", found
