"""The DeepSpeed configuration of a plan: written whole, with no value left for DeepSpeed or a person to fill in."""

from pathlib import Path

from rung.strategies.errors import JobError
from rung.strategies.memory import ZERO3_LIVE_ELEMENTS, ZERO3_PREFETCH_ELEMENTS, ZERO_BUCKET_ELEMENTS
from rung.strategies.plan import Offload, Plan

# A weight of at most this many elements (biases, norms) stays whole on every rank under ZeRO-3: gathering it each time
# would cost a round trip for a few kilobytes.
PERSISTENT_ELEMENTS = 10_000
# Elements of one rank's partition that are updated, and with offload to disk held in memory, at a time.
SUB_GROUP_ELEMENTS = 100_000_000
# Disk transfers: 1 MiB blocks, 32 in flight. DeepSpeed keeps tensors smaller than a block in memory.
AIO = {
    "block_size": 1 << 20,
    "queue_depth": 32,
    "intra_op_parallelism": 1,
    "single_submit": False,
    "overlap_events": True,
    "use_gds": False,
}
# Weight, gradient and up to four state tensors of one sub-group.
SWAP_BUFFERS = 6


def deepspeed_config(
    plan: Plan, *, elements: int = ZERO_BUCKET_ELEMENTS, largest: int = 0, folder: Path | None = None
) -> dict[str, object]:
    """The complete configuration for `plan`.

    elements: trainable elements of the model, `largest`: those of its largest parameter; buffers need not be larger
    than they ask for. folder: where offload to disk puts its files.

    Gradients are added up and averaged over ranks in fp32 whatever the precision, so that the number of ranks and of
    micro-batches does not show in the result. The batch numbers only satisfy DeepSpeed's own arithmetic: rung weights
    every loss itself, marks the last micro-batch itself, and `backward` divides by nothing.

    Raises JobError for a plan that DeepSpeed cannot carry out.
    """
    if plan.zero_stage == 0:
        raise JobError(f"strategy {plan.strategy} is not one of DeepSpeed's", hint="use zero1, zero2 or zero3")
    _check_offload(plan, folder)
    bucket = max(1, min(ZERO_BUCKET_ELEMENTS, elements))
    zero: dict[str, object] = {
        "stage": plan.zero_stage,
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "reduce_bucket_size": bucket,
        "allgather_partitions": True,
        "allgather_bucket_size": bucket + bucket % 2,
        "overlap_comm": plan.device == "cuda" and plan.offload_optimizer == "none",
        "round_robin_gradients": False,
        "ignore_unused_parameters": True,
        "elastic_checkpoint": False,
        "sub_group_size": SUB_GROUP_ELEMENTS,
    }
    if plan.zero_stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": min(ZERO3_PREFETCH_ELEMENTS, bucket),
            "stage3_max_live_parameters": ZERO3_LIVE_ELEMENTS,
            "stage3_max_reuse_distance": ZERO3_LIVE_ELEMENTS,
            "stage3_param_persistence_threshold": PERSISTENT_ELEMENTS,
            "stage3_gather_16bit_weights_on_model_save": False,
            "memory_efficient_linear": True,
            "zero_hpz_partition_size": plan.node_ranks or 1,
        }
    zero["offload_optimizer"] = _offload(plan.offload_optimizer, plan, folder) | {
        "buffer_count": SWAP_BUFFERS,
        "pipeline_read": False,
        "pipeline_write": False,
        "fast_init": False,
    }
    if plan.zero_stage == 3:
        buffers = -(-max(largest, 1) // plan.devices)
        zero["offload_param"] = _offload(plan.offload_parameters, plan, folder) | {
            "buffer_count": SWAP_BUFFERS,
            "buffer_size": max(buffers, AIO["block_size"]),
            "max_in_cpu": 0,
        }
    return {
        "train_batch_size": plan.devices,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        # rung scales the loss itself (precision.LossScale), the same way under every strategy.
        "fp16": {"enabled": plan.precision == "fp16", "loss_scale": 1.0, "auto_cast": False},
        "bf16": {"enabled": plan.precision == "bf16", "check_grad_overflow": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "prescale_gradients": False,
        "gradient_predivide_factor": 1.0,
        "aio": dict(AIO),
        "steps_per_print": None,
        "wall_clock_breakdown": False,
        "memory_breakdown": False,
        "dump_state": False,
    }


def _check_offload(plan: Plan, folder: Path | None) -> None:
    if plan.device == "mps":
        raise JobError("DeepSpeed has no support for Apple GPUs", hint="use strategy: single there")
    if plan.offload_parameters != "none" and plan.zero_stage != 3:
        raise JobError(
            f"{plan.strategy} cannot offload parameters to {plan.offload_parameters}: it holds them whole",
            hint="use zero3, or offload only the optimizer",
        )
    if plan.offload_optimizer == "disk" and plan.zero_stage != 3:
        raise JobError(
            f"{plan.strategy} cannot offload the optimizer to disk: DeepSpeed does so for ZeRO-3 only",
            hint="use zero3, or offload to host",
        )
    if plan.offload_parameters == "disk" and plan.offload_optimizer != "disk":
        raise JobError(
            f"parameters on disk with the optimizer on {plan.offload_optimizer} is a plan that DeepSpeed cannot update",
            hint="offload the optimizer to disk as well",
        )
    if "disk" in (plan.offload_optimizer, plan.offload_parameters) and folder is None:
        raise JobError("the plan offloads to disk, but no folder was given for it", hint="name a local folder")


def _offload(where: Offload, plan: Plan, folder: Path | None) -> dict[str, object]:
    device = {"none": "none", "host": "cpu", "disk": "nvme"}[where]
    return {
        "device": device,
        "nvme_path": str(folder) if where == "disk" else None,
        # Page-locked memory only pays where a device copies from it.
        "pin_memory": plan.device == "cuda",
    }
