"""All that touches DeepSpeed's workings: starting it in a worker, its optimizers' insides, and getting rid of it."""

import contextlib
import gc
import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from rung.strategies import zero_disk
from rung.strategies.plan import Plan

_log = logging.getLogger("rung")


@contextlib.contextmanager
def started(plan: Plan, rank: int, device: torch.device) -> Iterator[None]:
    """DeepSpeed ready for use in this process, over the process group that is there, until the context ends."""
    with contextlib.ExitStack() as stack:
        if not dist.is_initialized():
            # One worker needs no peer and no port, but DeepSpeed needs a group.
            dist.init_process_group(
                backend="nccl" if plan.device == "cuda" else "gloo",
                store=torch._C._distributed_c10d.HashStore(),
                rank=0,
                world_size=1,
            )
            stack.callback(_leave)
        stack.enter_context(_environment(plan, rank, device))
        with contextlib.redirect_stdout(io.StringIO()):
            _import(plan)
            # The process group may be another than that of a strategy that ran before in this process.
            _reset_globals()
            import deepspeed

            deepspeed.init_distributed(dist_backend=dist.get_backend(), verbose=False)
        stack.callback(_reset_globals)
        yield


def _leave() -> None:
    with contextlib.suppress(Exception):  # the process group may be broken; nobody is left to tell
        dist.destroy_process_group()


@contextlib.contextmanager
def _environment(plan: Plan, rank: int, device: torch.device) -> Iterator[None]:
    """What DeepSpeed reads from the environment; the caller's is restored."""
    ours = {
        "RANK": str(rank),
        "WORLD_SIZE": str(plan.devices),
        "LOCAL_RANK": str(device.index or 0 if device.type == "cuda" else rank),
        "LOCAL_SIZE": str(plan.devices),
        "DS_ACCELERATOR": plan.device,
    }
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _import(plan: Plan) -> None:
    # It warns on standard output of what rung does on purpose, and of skipped steps, which rung reports itself.
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    fresh = "deepspeed" not in sys.modules
    from deepspeed.accelerator import get_accelerator, set_accelerator
    from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)
    if get_accelerator()._name != plan.device:
        if plan.device == "cpu":
            from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator as Chosen
        else:
            from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator as Chosen
        set_accelerator(Chosen())
    if plan.device == "cpu":
        # DeepSpeed asks for fast fp16; torch's CPU kernels have it, if slowly.
        get_accelerator().is_fp16_supported = lambda: True
    import deepspeed.ops

    # An op that would be compiled at start-up, for a collective that training does not use.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if fresh:
        # DeepSpeed collects garbage at several points; with a million objects of imported modules that takes seconds.
        gc.collect()
        gc.freeze()
    warnings.filterwarnings(
        "ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning, module="torch.distributed"
    )


def _reset_globals() -> None:
    """Forgets process groups and counters that DeepSpeed keeps in module variables."""
    from deepspeed.comm import comm
    from deepspeed.runtime.zero import parameter_offload
    from deepspeed.runtime.zero.partition_parameters import Init, InsertPostInitMethodToModuleSubClasses
    from deepspeed.utils import groups

    comm.cdb = None
    groups.mpu = None
    groups.mesh_device = None
    for name in ("_WORLD_GROUP", "_ZERO_PARAM_INTRA_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP", "_MODEL_PARALLEL_GROUP"):
        setattr(groups, name, None)
    for name in ("_EXPERT_PARALLEL_GROUP", "_EXPERT_DATA_PARALLEL_GROUP", "_ALL_TO_ALL_GROUP"):
        getattr(groups, name).clear()
    parameter_offload.FWD_MODULE_STACK.clear()
    Init.param_id = 0
    Init.num_persisted_parameters = Init.num_persisted_elements = 0
    InsertPostInitMethodToModuleSubClasses.num_module_parameters = 0
    InsertPostInitMethodToModuleSubClasses.num_module_elements = 0
    # ZeRO-3's own linear layer, which would stay in place for every model after.
    if hasattr(InsertPostInitMethodToModuleSubClasses, "linear_bk"):
        torch.nn.functional.linear = InsertPostInitMethodToModuleSubClasses.linear_bk


def prepare_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Leaves only trained parameters in the groups, and has many small tensors updated in one call."""
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if p.requires_grad]
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
    if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
        for group in optimizer.param_groups:
            if group.get("fused") is None and group.get("foreach") is None and not group.get("differentiable"):
                group["fused"] = True


def initialize(module: torch.nn.Module, optimizer: torch.optim.Optimizer, config: dict[str, object]) -> Any:
    """DeepSpeed's engine around `module`. Nothing that DeepSpeed prints reaches standard output."""
    import deepspeed

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config, dist_init_required=False)
    if text := printed.getvalue().strip():
        _log.debug("DeepSpeed: %s", text)
    return engine


def norm_device(zero: Any) -> torch.device:
    """Where `zero` expects a gradient norm to be."""
    return torch.device(getattr(zero, "device", None) or zero.bf16_groups[0][0].device)


def forget_gradients(zero: Any) -> None:
    """Zeroes gradients that `zero` keeps beyond a step."""
    if hasattr(zero, "grad_partitions_flat_buffer"):
        zero.grad_partitions_flat_buffer.zero_()
    for flat in getattr(zero, "fp32_partitioned_groups_flat", getattr(zero, "single_partition_of_fp32_groups", [])):
        if flat.grad is not None:
            flat.grad.zero_()
    if getattr(zero, "swap_optimizer", False):
        zero_disk.forget_gradients(zero)
    for kept in getattr(zero, "accumulated_grads_in_cpu", {}).values():
        kept.zero_()


@torch.no_grad()
def spread_weights(zero: Any) -> None:
    """Copies the fp32 partitions into the model's weights on all ranks."""
    if not hasattr(zero, "fp16_groups"):
        zero.update_lp_params()
        return
    zero._partition_all_parameters()
    for index in range(len(zero.fp16_groups)):
        disk = zero._swappable_optimizer_subgroup(index)
        if disk:
            zero._optimizer_states_and_gradient_swap_in(index)
        zero._reassign_or_swap_out_partitioned_parameters(index)
        if disk:
            zero._release_swap_buffers(index)
    forget_second_partitions(zero.module)
    if zero.persistent_parameters:
        zero.persistent_parameters[0].all_gather(zero.persistent_parameters)


def forget_second_partitions(module: torch.nn.Module) -> None:
    """Weights that a node holds a second time (`Plan.node_ranks`) are old once the first partitions are written; the
    next forward pass makes them anew."""
    for parameter in module.parameters():
        if hasattr(parameter, "ds_id"):
            parameter.ds_secondary_tensor = None  # type: ignore[attr-defined]


@torch.no_grad()
def gathered(zero: Any, parameter: Any, *, keep: bool) -> torch.Tensor:
    """The whole of `parameter` in fp32 (a frozen one: as it is) on the CPU, or an empty tensor unless `keep`."""
    if hasattr(parameter, "ds_id") and not parameter.requires_grad:
        from deepspeed.runtime.zero import GatheredParameters

        with GatheredParameters([parameter]):
            return _kept(parameter.detach(), keep)
    if hasattr(parameter, "ds_id"):
        whole: torch.Tensor = zero.get_full_hp_param(parameter)  # made for us: no copy is needed
        return whole.cpu() if keep else torch.empty(0, dtype=whole.dtype)
    if parameter.requires_grad and parameter.dtype != torch.float32:
        return _kept(parameter.get_full_hp_param(), keep)
    return _kept(parameter.detach(), keep)


@contextlib.contextmanager
def frugal(zero: Any) -> Iterator[None]:
    """Within, ZeRO-3 holds one layer's whole weights at a time, and lets go of them at once: no backward pass comes
    that would use them again."""
    coordinator = zero.parameter_offload.get_param_coordinator()
    limits = [f"_{type(coordinator).__name__}__{name}" for name in ("prefetch_bucket_sz", "max_reuse_dist_in_numel")]
    before = [getattr(coordinator, name) for name in limits]
    for name in limits:
        setattr(coordinator, name, 0)
    try:
        yield
    finally:
        for name, value in zip(limits, before, strict=True):
            setattr(coordinator, name, value)


def _kept(tensor: torch.Tensor, keep: bool) -> torch.Tensor:
    if not keep:
        return torch.empty(0, dtype=tensor.dtype)
    return tensor.cpu() if tensor.device.type != "cpu" else tensor.clone()


def destroy(engine: Any) -> None:
    """Takes DeepSpeed's hooks off the module and lets go of its memory. Never raises."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            engine.destroy()
    except Exception as error:  # (closing after a failure: the first error is the one to report)
        _log.debug("DeepSpeed's engine did not close cleanly: %s", error)
    engine.module_forward_pre_hook.remove()
    engine.module_forward_post_hook.remove()
    zero = engine.optimizer
    engine.optimizer = engine.basic_optimizer = None
    for name in list(vars(zero)):
        delattr(zero, name)
