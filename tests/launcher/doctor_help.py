"""What the tests of the doctor share."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from rung.cluster.hardware import Device
from rung.launcher.job import Job, load
from rung.strategies.findings import Finding, Level

ROOT = Path(__file__).parents[2]
GIB = 1 << 30


def job(folder: Path, text: str = "") -> Job:
    file = folder / "job.yaml"
    file.write_text(f"task: task:Task\nrun: {folder / 'run'}\nbatch: 4\n{text}")
    return load(file)


def only(findings: object, subject: str) -> Finding:
    found = [one for one in findings if one.subject == subject]  # type: ignore[attr-defined]
    assert len(found) == 1, found
    return found[0]


def elsewhere(code: str, *, shell: str = "", **environ: str) -> list[Finding]:
    """Runs `code` in a fresh process, perhaps after a shell command; it sets `found` to findings."""
    source = (
        "import json, os, time\nfrom pathlib import Path\nfrom rung.cluster.hardware import probe\n"
        "from rung.launcher import doctor, doctor_host, doctor_packages, doctor_torch\n"
        f"{code}\nimport sys\nassert 'torch' not in sys.modules\n"
        "print(json.dumps([[f.level.value, f.subject, f.fact, f.why, f.fix] for f in found]))"
    )
    command = [sys.executable, "-c", source]
    if shell:
        command = ["bash", "-c", f'{shell}; exec "$@"', "bash", *command]
    done = subprocess.run(
        command, env={**os.environ, **environ}, capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])
    return [Finding(level=Level(r[0]), subject=r[1], fact=r[2], why=r[3], fix=r[4]) for r in rows]


def complete(finding: Finding) -> bool:
    """Whoever is told of trouble is told why it matters and what mends it."""
    return finding.level is Level.OK or bool(finding.fact and finding.why and finding.fix)


def gpu(vendor: str = "nvidia", capability: str = "8.0", **changes: object) -> Device:
    device = Device(
        kind="cuda",
        index=0,
        name="A100",
        uuid="GPU-a",
        total_bytes=40 * GIB,
        free_bytes=40 * GIB,
        capability=capability,
        bf16=True,
        vendor=vendor,
    )
    return replace(device, **changes)  # type: ignore[arg-type]
