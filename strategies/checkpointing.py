"""Activation checkpointing: forget a block's activations after the forward pass, compute them again in the backward.

It is orthogonal to the strategy: applied to the bare model before anything wraps it, it changes no parameter name and
no result (the random state is replayed), only memory and time.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from rung.strategies.errors import JobError


def blocks(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The repeated blocks of `model` by name: the children of one class in the ModuleList or Sequential whose
    children of one class hold most parameters. Empty if no container repeats a block that has parameters."""
    best: dict[str, torch.nn.Module] = {}
    best_size = 0
    for prefix, container in model.named_modules():
        if not isinstance(container, torch.nn.ModuleList | torch.nn.Sequential):
            continue
        by_class: dict[type, dict[str, torch.nn.Module]] = {}
        for child_name, child in container.named_children():
            name = f"{prefix}.{child_name}" if prefix else child_name
            by_class.setdefault(type(child), {})[name] = child
        for alike in by_class.values():
            size = sum(_numel(p) for child in alike.values() for p in child.parameters())
            # A single layer such as Linear keeps only its input, which checkpointing would keep as well.
            if len(alike) > 1 and size > best_size and all(any(True for _ in c.children()) for c in alike.values()):
                best, best_size = alike, size
    return best


def _numel(parameter: torch.nn.Parameter) -> int:
    # Under ZeRO-3 a parameter is empty, and DeepSpeed's note on it tells what it stands for.
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def available(model: torch.nn.Module) -> bool:
    """Whether `enable` would find something to do."""
    return hasattr(model, "gradient_checkpointing_enable") or bool(blocks(model))


def enable(model: torch.nn.Module) -> str:
    """Turns activation checkpointing on and says how. Raises JobError if the model offers nothing to checkpoint."""
    own = getattr(model, "gradient_checkpointing_enable", None)
    if callable(own):
        own(gradient_checkpointing_kwargs={"use_reentrant": False})
        return "by the model's own gradient_checkpointing_enable"
    found = blocks(model)
    if not found:
        raise JobError(
            f"activation checkpointing: {type(model).__name__} has no repeated blocks (a ModuleList or Sequential with "
            "several children of one class, each made of layers) and no gradient_checkpointing_enable method",
            hint="set strategy.checkpointing: false, or give the model a gradient_checkpointing_enable()",
        )
    for block in found.values():
        block.forward = _checkpointed(block, block.forward)
    return f"on {len(found)} repeated blocks, {next(iter(found))} and on"


def _checkpointed(block: torch.nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    def recomputing(*args: Any, **kwargs: Any) -> Any:
        if not (block.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return recomputing
