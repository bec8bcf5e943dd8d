"""A rank chosen at random fails in a random way at a random moment, several times in a run: it is recovered each time,
nothing is lost that need not be, and the result is that of a run in which nothing failed."""

import functools
import json

import pytest
import torch
from random_runs import SAMPLES, Watched, differing, learnt, model_of, rng

RUNS, FAULTS_EACH = 40, 5
STEPS, EVERY = 72, 4
#: In `make test`.
FEW = (0,)

STRATEGIES = ["ddp", "zero1", "zero2", "zero3", "single"]
WHERE = ["forward", "backward", "optimizer", "updated", "validation", "save", "writing"]
CRASHES = ["kill", "exit", "term"]
OPTIMIZER = {"name": "task:Counted", "lr": 1e-3, "weight_decay": 0}


def plan_faults(seed):
    """[rank, calls, where, how] for each fault of a run."""
    r = rng(f"failures {seed}")
    strategy = STRATEGIES[seed % len(STRATEGIES)]
    devices = 1 if strategy == "single" else r.choice([2, 2, 2, 3])
    faults, memory, hangs = [], 0, 0
    for _ in range(FAULTS_EACH):
        where = r.choice(WHERE)
        how = r.choice(["memory", "memory", "kill", "kill", "exit", "term", "hang"])
        # Each out-of-memory takes a rung, and there are three between all and one sample at a time. The thread that
        # writes a save has no device memory to run out of.
        if how == "memory" and (memory == 2 or where in ("save", "writing")):
            how = r.choice(CRASHES)
        if how == "hang" and (hangs == 1 or where == "writing"):
            how = r.choice(CRASHES)
        memory, hangs = memory + (how == "memory"), hangs + (how == "hang")
        how = r.choice(["hoard", "huge"]) if how == "memory" else how
        faults.append([r.randrange(devices), r.randint(3, 6), where, how])
    return strategy, devices, faults


def settings(strategy, devices, faults=()):
    arguments = {"kind": "blocks", "width": 48, "depth": 2, "samples": SAMPLES, "faults": list(faults)}
    cap = {"single": 400, "ddp": 500}.get(strategy, 700)
    return [
        f"task_args={json.dumps(arguments)}", f"optimizer={json.dumps(OPTIMIZER)}", f"steps={STEPS}",
        f"devices.count={devices}", f"strategy.name={strategy}", f"checkpoint.every={EVERY} steps", "hang_s=8",
        "validation.every=3 steps", f"devices.memory={cap} MiB", "fallback={allow: [micro_batch]}",
    ]  # fmt: skip


@functools.cache
def undisturbed(folder):
    """The weights that every run has to end with, whatever happened to it: the law is that the cut does not matter."""
    project = Watched(folder / "undisturbed")
    done = project.watch(*settings("single", 1))
    assert done.code == 0, done.out
    return model_of(project)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "seed", [pytest.param(s, marks=pytest.mark.slow if s in FEW else pytest.mark.soak) for s in range(RUNS)]
)
def test_whatever_fails_is_recovered(tmp_path, tmp_path_factory, seed):
    project = Watched(tmp_path / "project")
    strategy, devices, faults = plan_faults(seed)
    print(f"\nseed {seed}: {strategy} x {devices}: {', '.join(f'{how} in {where}' for _, _, where, how in faults)}")
    launches, said = [], ""
    while not launches or launches[-1].code == 143:  # preemption ends a launch; the same command goes on
        assert len(launches) <= FAULTS_EACH, said
        launches.append(project.watch(*settings(strategy, devices, faults)))
        said += launches[-1].out
    struck = len(list(project.folder.glob("struck-*")))
    print(f"  {struck} struck, {len(launches)} launches, exit {launches[-1].code}")
    assert launches[-1].code == 0, said
    assert struck == FAULTS_EACH, said
    assert "Traceback" not in said
    check_nothing_was_lost(project, strategy, faults)
    weights = model_of(project)
    expected = learnt(STEPS, functools.partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.0))
    assert torch.allclose(weights["learnt.seen"], expected, rtol=1e-3, atol=1e-7)
    assert not (odd := differing(undisturbed(tmp_path_factory.getbasetemp()), weights, rtol=1e-3, atol=2e-5)), odd


def check_nothing_was_lost(project, strategy, faults):
    """Each fallback of the run, against what its fault allows to be lost."""
    events = project.events()
    marks = sorted(project.folder.glob("struck-*"), key=lambda mark: int(mark.name.removeprefix("struck-")))
    times = [json.loads(mark.read_text())["at"] for mark in marks]
    outcome, since = None, 0.0
    for event in events:
        if event["event"] == "attempt":
            since = event["time"]
        if event["event"] == "outcome":
            outcome = event
        if event["event"] != "fallback":
            continue
        # Another rank may run into the next fault before the group has ended.
        hit = [fault for fault, at in zip(faults, times, strict=False) if since <= at <= event["time"]]
        in_process = outcome is None or outcome["time"] < since
        since = event["time"]
        lost = 0 if in_process else outcome["step"] - event["step"]
        what = " and ".join(f"{how} in {where} of rank {rank}" for rank, _, where, how in hit)
        print(f"    {what}: {'in the process' if in_process else f'{lost} steps lost'}")
        kept = [how in ("hoard", "huge", "hang") and where not in ("optimizer", "updated") for _, _, where, how in hit]
        if (hit and all(kept)) or (strategy == "ddp" and len(hit) == 1):
            assert lost == 0, f"{what} under {strategy} lost {lost} steps"
        assert 0 <= lost <= EVERY, f"{what} under {strategy} lost {lost} steps"
