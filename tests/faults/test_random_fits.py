"""Random models under random caps on one to four processes: what does not fit at its first plan trains to the end
without help, or stops with exit 3 because nothing fits."""

import functools
import json
import os
import re

import pytest
import torch
from random_runs import BATCH, SAMPLES, Watched, differing, learnt, model_of, rng

from rung.cluster.hardware import probe
from rung.cluster.local import warm
from rung.launcher.job import load
from rung.launcher.ladder import make_ladder
from rung.launcher.preload import PRELOAD
from rung.launcher.watch.progress import View

MIB = 1 << 20
CASES = 50
STEPS = 8
#: In `make test`: those that cost little.
FEW = (1, 12, 14)

MODELS = {
    "blocks": lambda r: {"width": r.choice([256, 512, 768]), "depth": r.choice([2, 4, 8])},
    "sequences": lambda r: {"width": r.choice([64, 128]), "depth": r.choice([2, 4])},
    "pictures": lambda r: {"width": r.choice([16, 32, 48]), "depth": r.choice([2, 4])},
    "hungry": lambda r: {"width": 16, "depth": r.choice([30, 60, 120])},
}
WAYS = [
    ("single", 1), ("auto", 1), ("ddp", 2), ("zero1", 2), ("zero2", 2), ("zero3", 2), ("auto", 2), ("ddp", 3),
    ("zero1", 3), ("zero3", 3), ("ddp", 4), ("zero2", 4), ("auto", 4),
]  # fmt: skip


def case(seed):
    """One random case: settings for the command line, and where between hopeless (0) and ample (1) the cap lies."""
    r = rng(f"fit {seed}")
    strategy, devices = WAYS[seed % len(WAYS)]
    kind = r.choice(list(MODELS))
    arguments = {"kind": kind, "samples": SAMPLES, **MODELS[kind](r)}
    surprise = r.choice(["none", "hidden", "hidden", "late", "late"])
    kib = r.choice([1024, 2048, 4096, 6144])
    if surprise == "hidden":
        arguments["hidden_kib"] = kib
    if surprise == "late":
        arguments["late"] = [r.randrange(SAMPLES), 2 * kib]
    # Attention has biases whose gradient is zero but for rounding; Adam makes steps of full size of that.
    name = "sgd" if kind == "sequences" else r.choice(["sgd", "adamw"])
    # A training that diverges tells any two ways of rounding apart: eight wide blocks do with ten times this rate.
    lr = 1e-3 if name == "adamw" else 2e-3
    extra = {"momentum": 0.9} if name == "sgd" else {}
    optimizer = {"name": name, "lr": lr, "weight_decay": 0, "args": extra}
    sets = [
        f"task_args={json.dumps(arguments)}", f"optimizer={json.dumps(optimizer)}", f"steps={STEPS}",
        f"devices.count={devices}", f"strategy.name={strategy}", "checkpoint.every=3 steps", "validation.every=none",
        # Offload to disk has its own tests; what it needs compiles for minutes where that was not done yet.
        "strategy.offload_optimizer=none", "strategy.offload_parameters=none",
    ]  # fmt: skip
    return sets, r.choice([0.0, 0.15, 0.3, 0.5, 0.7]) + r.uniform(0, 0.15), (name, lr, extra), surprise, kib, r


def peaks(project, sets):
    """What the planner predicts for every rung without a limit, the most frugal first."""
    warm(PRELOAD, {"OMP_NUM_THREADS": "1"})
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(project.folder / ".cache")
    try:
        job = load(project.folder / "job.yaml", [*sets, "devices.memory=64 GiB"])
        ladder = make_ladder(job, probe(folder=project.folder), View(every_s=1e9, force_plain=True, silent=True))
    finally:
        if before is None:
            del os.environ["XDG_CACHE_HOME"]
        else:
            os.environ["XDG_CACHE_HOME"] = before
    return sorted(ladder.plans, key=lambda plan: plan.predicted_device_peak_bytes)


def pins(plan):
    """The settings that ask for exactly this plan."""
    checkpointing = "true" if plan.activation_checkpointing else "false"
    offloads = {what: getattr(plan, f"offload_{what}") for what in ("optimizer", "parameters")}
    return [
        f"devices.count={plan.devices}", f"strategy.name={plan.strategy}", f"strategy.micro_batch={plan.micro_batch}",
        f"strategy.checkpointing={checkpointing}",
        *(f"strategy.offload_{what}={where}" for what, where in offloads.items() if where != "none"),
    ]  # fmt: skip


def nothing_fits(project, sets, cap, plans, said):
    """The plans that should need least run out of memory for real under the cap less the stack of a thread: what fits
    by a hair does so at one time and not at another. No prediction keeps them from being tried: the profile is made to
    say that the model needs next to nothing."""
    tighter = f"devices.memory={cap // MIB - 8} MiB"
    for kept in (project.folder / ".cache/rung/profiles").glob("*.json"):
        kept.write_text(json.dumps(modest(json.loads(kept.read_text()))))
    one_by_one = min(plans, key=lambda plan: (plan.micro_batch, not plan.activation_checkpointing))
    for number, plan in enumerate((plans[0], one_by_one)):
        again = project.watch(*sets, *pins(plan), tighter, f"run=frugal-{number}", "fallback=off")
        assert again.code == 3, f"stopped though {plan.describe()} fits:\n{again.out}\n{said}"
        assert "out of" in again.out, again.out


def modest(value):
    """The same profile with every size at most 1."""
    if isinstance(value, dict):
        return {name: inner if name == "format" else modest(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [modest(inner) for inner in value]
    return type(value)(min(value, 1)) if isinstance(value, int | float) and not isinstance(value, bool) else value


@functools.cache
def optimizer_of(name, lr, momentum):
    if name == "sgd":
        return functools.partial(torch.optim.SGD, lr=lr, momentum=momentum)
    return functools.partial(torch.optim.AdamW, lr=lr, weight_decay=0.0)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "seed", [pytest.param(s, marks=pytest.mark.slow if s in FEW else pytest.mark.soak) for s in range(CASES)]
)
def test_what_does_not_fit_at_first_trains_to_the_end_or_fits_nowhere(tmp_path, seed):
    project = Watched(tmp_path / "project")
    sets, share, (name, lr, extra), surprise, kib, r = case(seed)
    plans = peaks(project, sets)
    least, most = plans[0].predicted_device_peak_bytes, plans[-1].predicted_device_peak_bytes
    unseen = kib * 1024 * (2 if surprise == "late" else 1 if surprise == "hidden" else 0)
    top = most + unseen * -(-BATCH // plans[-1].devices)
    low = least if share < 0.15 else least + unseen
    cap = int(low + share * (top - low))
    capped = f"devices.memory={cap // MIB + 1} MiB"
    done = project.watch(*sets, capped)
    fallbacks = done.out.count("\nfallback ")
    what = f"seed {seed}: {sets[0][10:]} {sets[4][14:]} x {plans[0].devices}, {surprise}, {cap // MIB} MiB"
    print(f"\n{what} -> exit {done.code}, {fallbacks} fallbacks")
    if done.code == 3:
        nothing_fits(project, sets, cap, plans, f"{what}:\n{done.out}")
        return
    assert "Traceback" not in done.out, done.out
    assert done.code == 0, f"{what}\n{done.out}"
    assert "back to" not in re.sub(r"(?m)^ .*", "", done.out), f"a completed step was lost:\n{done.out}"
    weights = model_of(project)
    counts = learnt(STEPS, optimizer_of(name, lr, extra.get("momentum", 0.0)))
    assert torch.allclose(weights["learnt.seen"], counts, rtol=1e-3, atol=1e-7), what
    if fallbacks and r.random() < 0.6:
        last = re.findall(r"to start with what worked: (.*)", done.out)[-1]
        straight = project.watch(*sets, *re.findall(r"--set (\S+)", last), "run=straight")
        assert straight.code == 0, straight.out
        assert "\nfallback " not in straight.out
        odd = differing(model_of(project, "straight"), weights, atol=2e-5 if name == "adamw" else 2e-6)
        assert not odd, f"{what}: {odd}"
        print("equal to a run that was on its last rung from the start")
