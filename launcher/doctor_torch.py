"""Checks of PyTorch and DeepSpeed: builds against drivers, and whether DeepSpeed's operations compile. Both are only
loaded in throw-away processes."""

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from rung.cluster.bounded import InChild
from rung.cluster.hardware import Device, Hardware
from rung.launcher.doctor_packages import installed, torch_build
from rung.launcher.job import Job
from rung.strategies.findings import Finding, Level

# Our name of an operation, DeepSpeed's builder of it, and what a plan needs it for.
OPS = {
    "cpu_adam": ("CPUAdamBuilder", "the optimizer on the host, when its state is offloaded"),
    "async_io": ("AsyncIOBuilder", "offload to disk"),
    "fused_adam": ("FusedAdamBuilder", "the optimizer on CUDA devices under ZeRO"),
}
_STALE_LOCK_S = 1800.0

_TORCH = """
import json, torch
cuda, distributed = torch.cuda, torch.distributed
facts = {
    "version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip,
    "available": cuda.is_available(), "arch": cuda.get_arch_list() if cuda.is_available() else [],
    "gloo": distributed.is_available() and distributed.is_gloo_available(), "nccl": None, "broken": [],
}
if distributed.is_available() and distributed.is_nccl_available():
    facts["nccl"] = ".".join(map(str, cuda.nccl.version()))
for index in range(cuda.device_count() if facts["available"] else 0):
    try:
        if (torch.ones(8, device=f"cuda:{index}") * 2).sum().item() != 16:
            facts["broken"].append([index, "1 + 1 is not 2 there"])
    except Exception as error:
        facts["broken"].append([index, str(error).splitlines()[0]])
print(json.dumps(facts))
"""

# Prints what it knows after each operation, so that a build that is cut short does not hide the ones before it.
_OPS = """
import json, sys, time
import deepspeed
from deepspeed.accelerator import get_accelerator
facts = {"version": deepspeed.__version__, "ops": {}}
for name, builder_name in json.loads(sys.argv[3]).items():
    start = time.monotonic()
    try:
        builder = get_accelerator().create_op_builder(builder_name)
        if builder is None or not builder.is_compatible(verbose=False):
            reason = getattr(builder, "error_log", None) or "DeepSpeed says that it does not go with this machine"
            facts["ops"][name] = {"error": str(reason)}
            continue
        module = builder.load(verbose=False)
        facts["ops"][name] = {"file": getattr(module, "__file__", ""), "seconds": time.monotonic() - start}
    except Exception as error:
        lines = [line for line in str(error).splitlines() if "error" in line.lower()] or str(error).splitlines()
        facts["ops"][name] = {"error": f"{type(error).__name__}: {(lines or ['no message'])[0][:300]}"}
print(json.dumps(facts))
"""


def check_build(hardware: Hardware) -> Iterator[Finding]:
    """The installed PyTorch, by its own version file, against the devices and their driver."""
    yield from judge_build(hardware, *torch_build())


def judge_build(hardware: Hardware, version: str, cuda: str | None, hip: str | None) -> Iterator[Finding]:
    """Whether a PyTorch of that version, built for that CUDA or HIP, can use the GPUs."""
    gpus = hardware.of("cuda")
    if not version or not gpus:
        return
    vendor = gpus[0].vendor
    built = f"for CUDA {cuda}" if cuda else f"for ROCm {hip}" if hip else "without any GPU"
    if (vendor == "nvidia" and not cuda) or (vendor == "amd" and not hip):
        yield Finding(
            level=Level.ERROR,
            subject="torch.build",
            fact=f"PyTorch {version} is built {built}, and this machine has {len(gpus)} x {gpus[0].name}",
            why="PyTorch cannot use the GPUs",
            fix="pip install torch --force-reinstall, with the index URL that pytorch.org names for this GPU",
        )
    elif cuda and hardware.runtime and int(cuda.split(".")[0]) > int(hardware.runtime.split(".")[0]):
        yield Finding(
            level=Level.ERROR,
            subject="torch.driver",
            fact=f"PyTorch {version} is built {built}, the driver {hardware.driver} serves CUDA up to "
            f"{hardware.runtime}",
            why="a driver serves any CUDA of its own major version, but none of a later one",
            fix=f"update the driver, or install a PyTorch built for CUDA {hardware.runtime.split('.')[0]}",
        )


def check_torch(hardware: Hardware, deadline: float, environ: Mapping[str, str]) -> Iterator[Finding]:
    """PyTorch at work on each device, and its NCCL. `deadline`: of `time.monotonic`."""
    yield from check_build(hardware)
    if installed("torch") is None:
        return  # the table of packages says so
    answer = InChild(_TORCH, env=environ).answer(deadline)
    if answer.value is None:
        yield Finding(
            level=Level.ERROR,
            subject="torch",
            fact=f"PyTorch cannot be imported: {answer.reason}",
            why="nothing trains without it",
            fix='python -c "import torch" shows the whole error; pip install --force-reinstall torch',
        )
        return
    facts = cast("dict[str, Any]", answer.value)
    target = f"CUDA {facts['cuda']}" if facts["cuda"] else f"ROCm {facts['hip']}" if facts["hip"] else "CPU only"
    yield Finding(level=Level.OK, subject="torch", fact=f"PyTorch {facts['version']}, {target}")
    if not facts["gloo"]:
        yield Finding(
            level=Level.WARNING,
            subject="torch.gloo",
            fact="this PyTorch has no Gloo",
            why="several workers agree through it, on CPU and on GPU",
            fix="install one of PyTorch's own builds",
        )
    gpus = hardware.of("cuda")
    if not gpus:
        return
    if not facts["available"]:
        yield Finding(
            level=Level.ERROR,
            subject="torch.cuda",
            fact=f"PyTorch sees none of the {len(gpus)} GPUs",
            why="training would fall back to the CPU",
            fix='python -c "import torch; torch.cuda.init()" names the reason',
        )
    for index, reason in facts["broken"]:
        yield Finding(
            level=Level.ERROR,
            subject="torch.cuda",
            fact=f"cuda:{index} fails on a sum of eight numbers: {reason}",
            why="it will fail in training too",
            fix=f"leave it out with CUDA_VISIBLE_DEVICES, or look at: nvidia-smi -i {index}",
        )
    yield from judge_architectures(facts["arch"], gpus)
    if len(gpus) > 1:
        missing = facts["nccl"] is None
        yield Finding(
            level=Level.ERROR if missing else Level.OK,
            subject="torch.nccl",
            fact="this PyTorch has no NCCL" if missing else f"NCCL {facts['nccl']}",
            why="GPUs exchange gradients through it" if missing else "",
            fix="install one of PyTorch's own builds for Linux" if missing else "",
        )


def judge_architectures(built: list[str], gpus: tuple[Device, ...]) -> Iterator[Finding]:
    """Whether PyTorch's kernels run on NVIDIA GPUs: code for sm_80 runs on 8.0 and later 8.x, and compute_80 (which
    the driver compiles) on all later ones. `built`: as `torch.cuda.get_arch_list`."""
    code = [(m[1], int(m[2])) for name in built if (m := re.match(r"(sm|compute)_(\d+)", name))]
    for gpu in gpus:
        if gpu.vendor != "nvidia" or gpu.capability is None or not code:
            continue
        number = int(gpu.capability.replace(".", ""))
        runs = any(c <= number and (kind == "compute" or c // 10 == number // 10) for kind, c in code)
        if not runs:
            yield Finding(
                level=Level.ERROR,
                subject="torch.arch",
                fact=f"PyTorch has kernels for {', '.join(built)}, none of which run on {gpu.name} ({gpu.capability})",
                why="the first operation fails with 'no kernel image is available'",
                fix="install a PyTorch built for this GPU's generation",
            )


def ops_of(job: Job | None, hardware: Hardware) -> tuple[str, ...]:
    """The operations that the job's pins ask for; nothing is built on mere suspicion, since it takes minutes."""
    if job is None:
        return ()
    pins = {job.strategy.offload_optimizer, job.strategy.offload_parameters}
    wanted = []
    if job.strategy.offload_optimizer in ("host", "disk"):
        wanted.append("cpu_adam")
    if "disk" in pins:
        wanted.append("async_io")
    if job.strategy.name.startswith("zero") and not wanted and hardware.of("cuda"):
        wanted.append("fused_adam")
    return tuple(wanted)


def check_deepspeed(
    job: Job | None, ops: tuple[str, ...], deadline: float, environ: Mapping[str, str]
) -> Iterator[Finding]:
    """Whether DeepSpeed can be imported and the given operations compile. What once compiled with the same versions,
    compiler and processor is not built again."""
    if installed("deepspeed") is None:
        return  # the table of packages says so
    yield from _stale_locks(ops, environ)
    record = _record(environ)
    known = _read_record(record)
    build = {name: OPS[name][0] for name in ops if name not in known}
    locks = set(_locks(environ))
    answer = InChild(_OPS, arguments=(json.dumps(build),), env=environ).answer(deadline)
    if answer.value is None:
        # A build that is killed leaves its lock behind, and the next one would wait for it for ever.
        for lock in set(_locks(environ)) - locks:
            lock.unlink(missing_ok=True)
        late = "deadline" in answer.reason and bool(build)
        needed = bool(ops) or (job is not None and job.strategy.name.startswith("zero"))
        yield Finding(
            level=Level.WARNING if late or not needed else Level.ERROR,
            subject="deepspeed.ops" if late else "deepspeed",
            fact=f"DeepSpeed was not done compiling {', '.join(build)}"
            if late
            else f"DeepSpeed cannot be imported: {answer.reason}",
            why="the first run with it will wait for the compiler" if late else "ZeRO and offload go through it",
            fix="run rung doctor again with more time: it may take ten minutes on two cores"
            if late
            else 'python -c "import deepspeed" shows the whole error; pip install -U deepspeed',
        )
        return
    facts = cast("dict[str, Any]", answer.value)
    yield Finding(level=Level.OK, subject="deepspeed", fact=f"DeepSpeed {facts['version']} can be imported")
    for name in ops:
        result = facts["ops"].get(name) or known[name]
        failed = result.get("error")
        if not failed:
            known[name] = result
        yield Finding(
            level=Level.ERROR if failed else Level.OK,
            subject=f"deepspeed.{name}",
            fact=f"DeepSpeed's {name} does not build: {failed}" if failed else f"DeepSpeed's {name} is built",
            why=f"it is {OPS[name][1]}" if failed else "",
            fix=_op_fix(name) if failed else "",
        )
    if build:
        _write_record(record, known)


def _op_fix(name: str) -> str:
    libraries = {"async_io": "apt-get install libaio-dev g++", "fused_adam": "install the CUDA toolkit (nvcc)"}
    return f"{libraries.get(name, 'apt-get install g++')}, and pip install ninja"


def extensions_folder(environ: Mapping[str, str]) -> Path:
    """Where PyTorch keeps compiled operations (as in torch.utils.cpp_extension)."""
    chosen = environ.get("TORCH_EXTENSIONS_DIR")
    cache = environ.get("XDG_CACHE_HOME") or str(Path(environ.get("HOME", "~")).expanduser() / ".cache")
    return Path(chosen) if chosen else Path(cache) / "torch_extensions"


def _locks(environ: Mapping[str, str]) -> Iterator[Path]:
    folder = extensions_folder(environ)
    yield from (*folder.glob("*/lock"), *folder.glob("*/*/lock"))


def _stale_locks(ops: tuple[str, ...], environ: Mapping[str, str]) -> Iterator[Finding]:
    for lock in _locks(environ):
        try:
            age_s = time.time() - lock.stat().st_mtime
        except FileNotFoundError:  # its build has just ended
            continue
        if age_s > _STALE_LOCK_S:
            yield Finding(
                level=Level.ERROR if lock.parent.name in ops else Level.WARNING,
                subject="deepspeed.lock",
                fact=f"{lock} is {age_s / 3600:.1f} hours old: left by a build that was killed",
                why="every later use of this operation waits for it for ever",
                fix=f"rm {lock}",
            )


def _record(environ: Mapping[str, str]) -> Path:
    """The file that remembers what was built; its name changes with everything that a build depends on."""
    path = environ.get("PATH", os.defpath)
    compiler = shutil.which(environ.get("CXX") or "c++", path=path) or ""
    stamp = Path(compiler).resolve().stat().st_mtime if compiler else 0
    version, cuda, hip = torch_build()
    parts = [version, cuda, hip, installed("deepspeed"), compiler, stamp, str(extensions_folder(environ)), _processor()]
    cache = environ.get("XDG_CACHE_HOME") or str(Path(environ.get("HOME", "~")).expanduser() / ".cache")
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
    return Path(cache) / "rung" / f"ops-{digest}.json"


def _processor() -> str:
    """Operations are built for the very processor (-march=native), and a home folder may be shared."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:  # not Linux: one processor per home folder
        return ""
    return "".join(re.findall(r"^(?:model name|flags|Features)\s*:.*$", text, flags=re.MULTILINE)[:2])


def _read_record(file: Path) -> dict[str, dict[str, Any]]:
    """What was built before and is still there; nothing if the file is missing or damaged."""
    try:
        values = json.loads(file.read_text())
        return {name: one for name, one in values.items() if name in OPS and Path(one["file"]).is_file()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):  # then it is built again
        return {}


def _write_record(file: Path, known: dict[str, dict[str, Any]]) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        fresh = file.with_name(f"{file.name}.{os.getpid()}")
        fresh.write_text(json.dumps(known))
        fresh.replace(file)
    except OSError:  # a read-only home: the next doctor builds, or finds it built, once more
        return
