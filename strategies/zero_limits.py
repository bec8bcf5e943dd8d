"""What DeepSpeed cannot train, told before it goes wrong."""

import re
from collections.abc import Iterator

import torch

from rung.strategies.plan import Plan
from rung.strategies.zero_parts import shape_of

WEIGHT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_EXPERTS = re.compile(r"MoE|Moe|MixtureOfExperts")
# Their update of an element depends on the shape of the parameter or on elements that other ranks hold.
_SHAPED = {"Adafactor", "Muon", "LBFGS", "SparseAdam", "Lamb", "LAMB", "Lars", "LARS", "Shampoo", "SOAP", "Sophia"}


def refusals(model: torch.nn.Module, plan: Plan, optimizer: torch.optim.Optimizer | None = None) -> list[str]:
    """Why ZeRO cannot train `model` (with `optimizer`) under `plan`: one sentence each, none if it can."""
    reasons = []
    if not any(p.requires_grad for p in model.parameters()):
        reasons.append("it has no parameter to train")
    for name, parameter in model.named_parameters():
        reasons += [f"{name} {reason}" for reason in _parameter(parameter, plan)]
    for name, module in model.named_modules():
        label = f"{name or 'the model'} ({type(module).__name__})"
        reasons += [f"{label} {reason}" for reason in _module(module, plan)]
    if optimizer is not None and type(optimizer).__name__ in _SHAPED:
        reasons.append(f"{type(optimizer).__name__} needs whole parameters, and a partition ends anywhere within one")
    if isinstance(optimizer, torch.optim.Adagrad) and len(optimizer.param_groups) > 1:
        reasons.append("DeepSpeed makes Adagrad anew, and forgets that its parameter groups differ")
    return reasons


def _parameter(parameter: torch.nn.Parameter, plan: Plan) -> Iterator[str]:
    wanted = {torch.float32, WEIGHT_DTYPES[plan.precision]}
    if parameter.is_complex():
        yield "is complex, and DeepSpeed's flat buffers are real"
    elif parameter.requires_grad and parameter.dtype not in wanted:
        yield f"is {_plain(parameter.dtype)}, and a partition holds one type ({plan.precision})"
    elif not parameter.is_floating_point() and plan.zero_stage == 3:
        yield f"is {_plain(parameter.dtype)} (quantised?), which ZeRO-3 does not partition"
    if type(parameter).__name__ == "UninitializedParameter":
        yield "has no shape before its first batch"
    elif not shape_of(parameter):
        yield "is a scalar parameter, which DeepSpeed cannot broadcast; give it the shape (1,)"
    if getattr(parameter, "allreduce", True) is False:
        yield "belongs to an expert-parallel layer"


def _module(module: torch.nn.Module, plan: Plan) -> Iterator[str]:
    if getattr(module, "sparse", False) and isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag):
        yield "has sparse gradients"
    if plan.zero_stage == 3 and _EXPERTS.search(type(module).__name__):
        yield "is a mixture of experts: ranks would gather different experts and wait for ever"


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
