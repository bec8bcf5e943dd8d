"""The files for KubeRay and Slurm, as far as they can be checked where neither is: parsed, and Slurm's with stand-ins
for `srun`, `scontrol`, `ray` and `rung` that write down how they were called."""

import os
import signal
import stat
import subprocess
import time
from pathlib import Path

import pytest
import yaml

HERE = Path(__file__).parents[2] / "examples" / "ray_cluster"


def test_the_kuberay_file_is_a_ray_cluster_whose_parts_fit_together():
    found = yaml.safe_load((HERE / "kuberay.yaml").read_text())
    assert (found["apiVersion"], found["kind"]) == ("ray.io/v1", "RayCluster")
    head, [group] = found["spec"]["headGroupSpec"], found["spec"]["workerGroupSpecs"]
    assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    for part in (head, group):
        assert all(isinstance(v, str) for v in part["rayStartParams"].values()), "KubeRay takes texts only"
        pod = part["template"]["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
            assert container["resources"]["limits"] == container["resources"]["requests"]
    assert 8265 in [port["containerPort"] for port in head["template"]["spec"]["containers"][0]["ports"]]


STAND_INS = {
    "scontrol": 'printf "n1\\nn2\\nn3\\n"',
    "srun": 'echo "srun $*" >> "$CALLS"',
    "ray": 'echo "ray $*" >> "$CALLS"; [ "$(grep -c "ray status" "$CALLS")" -ge 2 ]',
    "rung": 'echo "rung $*" >> "$CALLS"; trap "sleep 0.3; echo saved >> $CALLS; exit 143" TERM\n'
            'for _ in $(seq 100); do sleep 0.1; [ -e "$CALLS.end" ] && exit 3; done',
}  # fmt: skip


@pytest.mark.parametrize("preempted", [False, True])
def test_the_slurm_script_starts_one_node_a_task_and_passes_on_the_signal_and_the_exit_code(tmp_path, preempted):
    calls = tmp_path / "calls"
    calls.touch()
    for name, body in STAND_INS.items():
        path = tmp_path / name
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "sleep").write_text('#!/bin/bash\nexec /bin/sleep "${1/#2/0.05}"\n')
    (tmp_path / "sleep").chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "n[1-3]",
           "CALLS": str(calls)}  # fmt: skip
    process = subprocess.Popen(["bash", str(HERE / "slurm.sh"), "my.yaml"], env=env)
    until = time.monotonic() + 20
    while "rung launch" not in calls.read_text():
        assert time.monotonic() < until
        assert process.poll() is None
        time.sleep(0.02)
    time.sleep(0.2)
    if preempted:
        process.send_signal(signal.SIGTERM)
    else:
        (tmp_path / "calls.end").touch()
    assert process.wait(20) == (143 if preempted else 3)
    said = calls.read_text()
    assert ("saved" in said) == preempted
    assert "srun --nodes=1 --ntasks=1 -w n1 ray start --head --port=6379 --block" in said
    assert "srun --nodes=2 --ntasks=2 --exclude=n1 ray start --address=n1:6379 --block" in said
    assert "rung launch my.yaml --set cluster.address=n1:6379 --set cluster.workers=[1, 3] --set grace_s=100" in said
