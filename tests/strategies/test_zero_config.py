"""The DeepSpeed configuration of a plan is whole, consistent, and refuses what DeepSpeed cannot do."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rung.strategies.errors import JobError
from rung.strategies.plan import Plan
from rung.strategies.zero_config import deepspeed_config
from rung.strategies.zero_limits import refusals
from rung.strategies.zero_ops import needed
from rung.strategies.zero_state import verify_owned


def plan(**changes: Any) -> Plan:
    return Plan(**{"strategy": "zero2", "device": "cpu", "devices": 2, "global_batch": 8, "micro_batch": 2, **changes})


EVERY = [
    plan(strategy=strategy, precision=precision, device=device, offload_optimizer=optimizer, offload_parameters=weights)
    for strategy in ("zero1", "zero2", "zero3")
    for precision in ("fp32", "bf16", "fp16")
    for device in ("cpu", "cuda")
    for optimizer in ("none", "host", "disk")
    for weights in ("none", "host", "disk")
    if (weights == "none" or strategy == "zero3")
    and (optimizer != "disk" or strategy == "zero3")
    and (weights != "disk" or optimizer == "disk")
]


def leaves(value: Any) -> list[Any]:
    return [leaf for item in value.values() for leaf in leaves(item)] if isinstance(value, dict) else [value]


@pytest.mark.parametrize("one", EVERY, ids=lambda p: p.describe())
def test_a_configuration_is_whole_and_its_numbers_agree(one: Plan, tmp_path: Path) -> None:
    config = deepspeed_config(one, elements=1000, largest=300, folder=tmp_path)
    assert "auto" not in leaves(config)
    assert json.loads(json.dumps(config)) == config
    micro, steps = config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]
    assert config["train_batch_size"] == micro * steps * one.devices  # type: ignore[operator]
    zero: Any = config["zero_optimization"]
    assert zero["stage"] == int(one.strategy[-1])
    assert zero["reduce_bucket_size"] == 1000
    assert (config["bf16"]["enabled"], config["fp16"]["enabled"]) == (  # type: ignore[index]
        one.precision == "bf16",
        one.precision == "fp16",
    )
    assert config["communication_data_type"] == config["data_types"]["grad_accum_dtype"] == "fp32"  # type: ignore[index]
    placed = {"none": "none", "host": "cpu", "disk": "nvme"}
    assert zero["offload_optimizer"]["device"] == placed[one.offload_optimizer]
    assert (zero["offload_optimizer"]["nvme_path"] == str(tmp_path)) == (one.offload_optimizer == "disk")
    assert zero.get("offload_param", {"device": "none"})["device"] == placed[one.offload_parameters]


def test_buckets_have_an_upper_bound() -> None:
    zero: Any = deepspeed_config(plan(), elements=10**12)["zero_optimization"]
    assert zero["reduce_bucket_size"] == 50_000_000


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (plan(strategy="ddp"), "not one of DeepSpeed's"),
        (plan(device="mps"), "Apple"),
        (plan(offload_parameters="host"), "zero2 cannot offload parameters to host"),
        (plan(strategy="zero1", offload_optimizer="disk"), "zero1 cannot offload the optimizer to disk"),
        (plan(strategy="zero3", offload_parameters="disk", offload_optimizer="host"), "parameters on disk"),
    ],
)
def test_what_deepspeed_cannot_do_is_refused_with_a_way_out(one: Plan, words: str, tmp_path: Path) -> None:
    with pytest.raises(JobError, match=words) as caught:
        deepspeed_config(one, folder=tmp_path)
    assert caught.value.hint


def test_disk_needs_a_folder_and_compiled_operations() -> None:
    one = plan(strategy="zero3", offload_optimizer="disk")
    with pytest.raises(JobError, match="no folder"):
        deepspeed_config(one)
    assert needed(one) == ("pin_memory", "async_io")
    assert needed(plan(offload_optimizer="host")) == ()


class MoELayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.expert = nn.Linear(2, 2)


def with_parameter(value: torch.Tensor, *, trained: bool = True) -> nn.Module:
    model = nn.Linear(2, 2)
    model.extra = nn.Parameter(value, requires_grad=trained)
    return model


@pytest.mark.parametrize(
    ("model", "changes", "words"),
    [
        (nn.Embedding(3, 2, sparse=True), {}, "sparse gradients"),
        (with_parameter(torch.zeros(2, dtype=torch.complex64)), {}, "extra is complex"),
        (with_parameter(torch.zeros(2, dtype=torch.float64)), {}, "extra is float64"),
        (with_parameter(torch.zeros(2, dtype=torch.float16)), {"precision": "bf16"}, "extra is float16"),
        (with_parameter(torch.zeros(())), {}, "extra is a scalar"),
        (with_parameter(torch.zeros(2, dtype=torch.int8), trained=False), {"strategy": "zero3"}, "int8"),
        (nn.Sequential(MoELayer()), {"strategy": "zero3"}, "mixture of experts"),
        (nn.LazyLinear(2), {}, "no shape before its first batch"),
        (nn.ReLU(), {}, "no parameter to train"),
    ],
)
def test_models_that_deepspeed_cannot_train_are_refused_with_the_reason(
    model: nn.Module, changes: dict[str, Any], words: str
) -> None:
    assert any(words in reason for reason in refusals(model, plan(**changes)))


def test_ordinary_models_are_not_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), MoELayer(), nn.BatchNorm1d(2))
    assert refusals(model, plan()) == []
    half = with_parameter(torch.zeros(2, dtype=torch.bfloat16))
    assert refusals(half, plan(precision="bf16")) == []


def test_optimizers_that_need_whole_parameters_are_refused() -> None:
    model = nn.Linear(2, 2)
    muon = type("Muon", (torch.optim.SGD,), {})(model.parameters(), lr=0.1)
    assert any("whole parameters" in reason for reason in refusals(model, plan(), muon))
    assert refusals(model, plan(), torch.optim.RMSprop(model.parameters())) == []


def test_intervals_that_cover_everything_once_are_sound() -> None:
    owned = [("model/a", (2, 3), 4, 2), ("model/a", (2, 3), 0, 4), ("model/b", (), 0, 1)]
    assert verify_owned(owned, {"model/a": 6, "model/b": 1}) == []


@pytest.mark.parametrize(
    ("owned", "expected", "words"),
    [
        ([("a", (6,), 0, 3), ("a", (6,), 4, 2)], None, "a: elements 3 to 4 are owned by no rank"),
        ([("a", (6,), 0, 4), ("a", (6,), 3, 3)], None, "a: elements 3 to 4 are owned by two ranks"),
        ([("a", (6,), 0, 5)], None, "a: 5 elements saved of 6"),
        ([("a", (6,), 0, 3), ("a", (3, 2), 3, 3)], None, r"a: shape (6,) on one rank, (3, 2) on another"),
        ([("a", (0,), 0, 0)], {"a": 6}, "a: 0 elements saved of 6"),
        ([], {"a": 6}, "a: not saved by any rank"),
    ],
)
def test_intervals_that_do_not_add_up_are_told(owned: Any, expected: Any, words: str) -> None:
    assert words in verify_owned(owned, expected)
