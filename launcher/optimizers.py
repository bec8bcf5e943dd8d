"""From the job's `optimizer` to a torch optimizer."""

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rung.launcher.job_values import Optimizer
from rung.launcher.nearest import did_you_mean
from rung.launcher.user_code import user_code
from rung.launcher.user_import import import_object
from rung.strategies.errors import JobError

if TYPE_CHECKING:
    import torch

_FUSED = ("adam", "adamw", "sgd")
_FORMS = {"fused", "foreach", "capturable", "differentiable"}


def make_optimizer(
    spec: Optimizer, groups: Sequence[dict[str, Any]], folder: Path | None = None
) -> "torch.optim.Optimizer":
    """The optimizer over these parameter groups.

    `weight_decay` goes to every parameter alike, one-dimensional ones too, as torch itself does; a task whose
    `parameters` gives groups of its own may set it by group. `lr` and `weight_decay` are left out where the optimizer
    takes neither and the job has the default. Adam, AdamW and SGD update a weight in one pass over memory and without
    temporaries (torch's `fused`), where torch by default takes a dozen; `optimizer.args.fused: false` has it so.
    Raises JobError for a name or argument that it does not have.
    """
    import torch

    custom = ":" in spec.name
    factory = import_object(spec.name, folder or Path.cwd(), "optimizer.name") if custom else _of_torch(spec.name)
    if not callable(factory):
        raise JobError(f"optimizer.name: {spec.name} is a {type(factory).__name__}, not a class or function")
    arguments = _arguments(spec, factory)
    if not custom and _can_be_fused(spec, groups):
        arguments["fused"] = True
    if custom:
        with user_code(f"optimizer {spec.name}"):
            optimizer = factory(groups, **arguments)
    else:
        try:
            optimizer = factory(groups, **arguments)
        except (TypeError, ValueError) as error:  # such as "Invalid beta parameter at index 0: 1.5"
            raise JobError(f"optimizer: {spec.name} does not take this: {error}") from None
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise JobError(
            f"optimizer.name: {spec.name} made a {type(optimizer).__name__}, not a torch.optim.Optimizer",
            hint="it is called with parameter groups and keyword arguments, and returns an optimizer",
        )
    return optimizer


def torch_optimizers() -> dict[str, "type[torch.optim.Optimizer]"]:
    """What this torch has, by lower-case name; without L-BFGS, which needs a closure."""
    import torch

    base = torch.optim.Optimizer
    return {
        name.lower(): kind
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, base) and kind is not base and name != "LBFGS"
    }


def _can_be_fused(spec: Optimizer, groups: Sequence[dict[str, Any]]) -> bool:
    """Whether torch's fused update takes these weights and the job asks for no other form of it. Gradients of weights
    that are not contiguous may lie otherwise in memory than these, which the kernels do not look at."""
    from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

    if spec.name.lower() not in _FUSED or _FORMS & spec.args.keys():
        return False
    kinds = _get_fused_kernels_supported_devices()
    return all(
        p.device.type in kinds and p.is_floating_point() and p.is_contiguous() for g in groups for p in g["params"]
    )


def _of_torch(name: str) -> Callable[..., Any]:
    import torch

    known = torch_optimizers()
    if name.lower() not in known:
        raise JobError(
            f"optimizer.name: torch {torch.__version__} has no {name}{did_you_mean(name, known)}",
            hint=f"it has {', '.join(sorted(known))}; any other as module:callable",
        )
    return known[name.lower()]


def _arguments(spec: Optimizer, factory: Callable[..., Any]) -> dict[str, Any]:
    for name in ("lr", "weight_decay"):
        if name in spec.args:
            raise JobError(f"optimizer.args.{name}: write it as optimizer.{name}")
    try:
        parameters = list(inspect.signature(factory).parameters.values())
    except (TypeError, ValueError):  # a builtin without a signature takes what it takes
        return {"lr": spec.lr, "weight_decay": spec.weight_decay, **spec.args}
    named = [p.name for p in parameters[1:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    anything = any(p.kind == p.VAR_KEYWORD for p in parameters)
    shown = f"{spec.name}({', '.join(str(p).partition(':')[0].partition('=')[0] for p in parameters)})"
    for name in spec.args:
        if name not in named and not anything:
            raise JobError(
                f"optimizer.args.{name}: not an argument of {spec.name}{did_you_mean(name, named)}",
                hint=f"its signature is {shown}",
            )
    arguments = dict(spec.args)
    for name, value, default in (("lr", spec.lr, 1e-4), ("weight_decay", spec.weight_decay, 0.01)):
        if name in named or anything:
            arguments[name] = value
        elif value not in (default, 0):
            raise JobError(
                f"optimizer.{name}: {spec.name} takes no {name}, but the job says {value:g}",
                hint=f"its signature is {shown}",
            )
    return arguments
