"""ZeRO 1, 2 and 3 train as one float64 process does, lose nothing when state moves, and leave nothing behind."""

import multiprocessing
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import zero_cases as cases
from torch.distributed import TCPStore

from rung.strategies.zero_state import verify_owned

pytestmark = pytest.mark.slow
DEADLINE_S = 100.0
ROUNDING = 2e-6
STAGES = ("zero1", "zero2", "zero3")


def run(world: int, case: Callable[..., Any], *args: Any, deadline_s: float = DEADLINE_S) -> list[Any]:
    """What `case(rank, world, store, *args)` gives in each of `world` processes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch", "torch._dynamo", "deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer"]
    )
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes, workers = [], []
    for rank in range(world):
        ours, theirs = context.Pipe(duplex=False)
        worker = context.Process(target=_work, args=(case, rank, world, store.port, args, theirs), daemon=True)
        worker.start()
        theirs.close()
        pipes.append(ours)
        workers.append(worker)
    until = time.monotonic() + deadline_s
    try:
        return [_result(pipe, until) for pipe in pipes]
    finally:
        for worker in workers:
            worker.join(timeout=2)
            if worker.is_alive():
                worker.kill()
                worker.join(timeout=5)


def _result(pipe: Any, until: float) -> Any:
    assert pipe.poll(max(0.0, until - time.monotonic())), "a worker gave no result in time"
    good, value = pickle.loads(pipe.recv_bytes())
    assert good, value
    return value


def _work(case: Callable[..., Any], rank: int, world: int, port: int, args: tuple[Any, ...], pipe: Any) -> None:
    torch.set_num_threads(1)
    try:
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=DEADLINE_S))
        pipe.send_bytes(pickle.dumps((True, case(rank, world, store, *args))))
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


AGREE = {
    1: [{"strategy": stage, "micro_batch": 5, "clip": 0.5} for stage in STAGES],
    2: [
        *({"strategy": stage, "micro_batch": 12, "clip": None} for stage in STAGES),
        *({"strategy": stage, "micro_batch": 2, "clip": 0.5, "offload_optimizer": "host"} for stage in STAGES),
        {"strategy": "zero3", "micro_batch": 4, "offload_optimizer": "host", "offload_parameters": "host"},
        {"strategy": "zero3", "micro_batch": 4, "clip": 0.5, "evaluate": True},
    ],
    3: [{"strategy": stage, "micro_batch": 1, "clip": 0.5} for stage in STAGES],
}


@pytest.mark.parametrize("world", AGREE)
def test_weights_and_norms_agree_with_one_float64_process(world: int) -> None:
    """Micro-batches that divide and that do not, unequal weights, clipping, accumulation, tied, frozen and at times
    unused weights, parameter groups, offload to the host: 20 steps of each."""
    results = run(world, cases.agreement, AGREE[world])
    for number, (case, off, norms_off, norms) in enumerate(results[0]):
        assert off < ROUNDING, case
        assert norms_off < ROUNDING, case
        assert all(rank[number][3] == norms for rank in results), "ranks report different norms"


def test_half_precision_stays_near() -> None:
    half = [{"strategy": s, "precision": p, "clip": 1.0} for p in ("bf16", "fp16") for s in STAGES]
    for case, off, norms_off, _ in run(2, cases.agreement, half, 10)[0]:
        assert off < {"bf16": 2e-2, "fp16": 2e-3}[case["precision"]], case
        assert norms_off < {"bf16": 3e-2, "fp16": 5e-3}[case["precision"]], case


REJECT = [
    *({"strategy": stage} for stage in STAGES),
    {"strategy": "zero1", "precision": "bf16"},
    {"strategy": "zero3", "precision": "fp16"},
    {"strategy": "zero2", "offload_optimizer": "host"},
]


def test_a_bad_step_changes_nothing_on_any_rank_and_training_goes_on() -> None:
    for rank in run(2, cases.rejected, REJECT):
        for found in rank:
            case = found["case"]
            assert found["nan"] == float("inf"), case
            assert found["unhealthy"] != found["unhealthy"], case
            assert found["untouched"], case
            # Under fp16 the scale is lower afterwards, and small gradients round a little differently.
            assert found["off"] <= (1e-3 if case.get("precision") == "fp16" else 0.0), case
            assert found["norms"] <= (1e-2 if case.get("precision") == "fp16" else 0.0), case


MOVES = [
    ({"strategy": "zero1"}, 2, {1: STAGES, 3: ("zero2", "zero3")}),
    ({"strategy": "zero3"}, 3, {2: STAGES}),
]


@pytest.mark.parametrize(("source", "world", "targets"), MOVES)
def test_state_moves_between_stages_and_numbers_of_ranks(
    source: dict[str, Any], world: int, targets: dict[int, tuple[str, ...]]
) -> None:
    saved = run(world, cases.saved, source, 4)
    pieces = [piece for rank in saved for piece in rank[0]]
    owned = [(p.name, p.shape, p.start, p.length) for p in pieces]
    assert verify_owned(owned, saved[0][2]) == []
    assert verify_owned(owned[1:], saved[0][2]) != []
    wholes = cases.assembled(iter(pieces))
    assert (
        sum(w.numel() for name, w in wholes.items() if name.startswith("model/"))
        == sum(tensor.numel() for tensor in cases.make_model().state_dict().values())
        - cases.make_model().head.weight.numel()
    ), "tied weights once, all else once"
    for target_world, stages in targets.items():
        plans = [{"strategy": stage} for stage in stages]
        for plan, (missing, weights) in zip(
            plans, run(target_world, cases.continued, plans, wholes, 4)[0], strict=True
        ):
            assert missing == [], plan
            assert largest_difference(weights, saved[0][1]) < ROUNDING, plan


def test_weights_alone_start_a_fresh_optimizer() -> None:
    """A destination that is not filled gives no state: the first step is that of a new optimizer."""
    start = {f"model/{n}": t.detach().reshape(-1).clone() for n, t in cases.make_model().state_dict().items()}
    plans = [{"strategy": stage} for stage in STAGES]
    found = run(2, cases.continued, plans, start, 0)[0]
    expected, _ = cases.reference(2, 1.0)
    for plan, (missing, weights) in zip(plans, found, strict=True):
        assert all(name.startswith("optim.") for name in missing)
        assert missing
        assert max(float((weights[n].double() - w).abs().max()) for n, w in expected.items()) < ROUNDING, plan


def test_a_partitioned_model_starts_from_the_weights_of_a_plain_one() -> None:
    """Also where they are drawn or scaled after their module was made: exactly in fp32, rounded in half precision."""
    plain = {name: tensor.detach() for name, tensor in cases.make_model().named_parameters()}
    plain["scale"] = torch.tensor([0.5])
    plans = [{"strategy": "zero3"}, {"strategy": "zero3", "precision": "bf16"}, {"strategy": "zero2"}]
    exact, rounded, stage2 = run(2, cases.initial, plans)[0]
    assert largest_difference(exact, plain) == 0.0
    assert largest_difference(stage2, plain) == 0.0
    wanted = {n: t if n == "scale" else t.bfloat16() for n, t in plain.items()}
    assert largest_difference(rounded, wanted) == 0.0


def test_no_process_ever_holds_a_whole_partitioned_model() -> None:
    for rank in run(2, cases.memory):
        assert rank["built"] < 96 + 40, "each of two ranks holds half of 192 MB, and a layer of 16 MB at a time"
        assert rank["streamed"] < 70, "weights of 16 MB one at a time, with what gloo takes to move one"
        assert rank["evaluated"] < 70, "in evaluation too"


def test_nothing_is_left_in_the_process_after_closing(tmp_path: Path) -> None:
    for left in run(2, cases.traces, tmp_path):
        assert left == {"linear": True, "environment": True, "init": True, "group": False, "hooks": 0, "files": []}


@pytest.mark.skipif(" " in sys.prefix, reason="DeepSpeed's compiler commands do not quote a space in the path")
@pytest.mark.timeout(900)  # compiles DeepSpeed's disk transfers where that was not done before
@pytest.mark.parametrize("weights", ["none", "disk"])
def test_offload_to_disk_changes_nothing_and_cleans_up(weights: str, tmp_path: Path) -> None:
    case = {"offload_optimizer": "disk", "offload_parameters": weights}
    for found in run(2, cases.on_disk, case, tmp_path, deadline_s=850):
        assert found["swapped"] > 0
        assert found["files"] >= 2
        assert found["rejected"], "a bad step leaves what is on disk alone"
        assert found["same"], "what is loaded is what was saved"
        assert max(found["off"], found["resumed"], found["norms"]) < 1e-5
    assert list(tmp_path.iterdir()) == []
