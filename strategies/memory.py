"""How much memory a plan takes, item by item, on each device and on the host.

All formulas count bytes on one device. With P the trainable elements, F the frozen ones, N the devices, w the bytes of
a weight as the strategy holds it, and q = P/N:

    single, ddp    weights (P+F)·w, gradients P·w, optimizer state K·P
    zero1, zero2   weights (P+F)·w, fp32 masters and state (4+K)·q, gradients 4·q while micro-batches accumulate
    zero3          weights (P+F)·w/N, masters and state (4+K)·q, gradients 4·q, and the live parameters

after Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (SC 2020), section 5,
with K the optimizer's own bytes per element (8 for Adam), as traced. Activations and temporaries come from the trace.
On a CPU device "device memory" is what the process holds above what it held before the model was built.
"""

from dataclasses import dataclass, field, replace
from typing import Literal

from rung.strategies.plan import DeviceType, Plan
from rung.strategies.profile import Activity, Envelope, Profile, highest

MIB = 2**20
GIB = 2**30
Kind = Literal["cpu", "cuda", "mps"]
BYTES_OF = {"fp32": 4, "bf16": 2, "fp16": 2}

# What a process takes of a CUDA device outside of the allocator: context and kernels, and NCCL's channels.
CONTEXT_BYTES, NCCL_BYTES = 500 * MIB, 300 * MIB
# What our strategies set; strategies/zero.py and ddp.py use the same numbers.
DDP_BUCKET_BYTES = 25 * MIB
ZERO_BUCKET_ELEMENTS = 50_000_000
ZERO3_PREFETCH_ELEMENTS = 50_000_000
ZERO3_LIVE_ELEMENTS = 100_000_000

# Measured on a CPU, with what `PRELOAD` of the launcher imports in place (see `_overhead`).
LIBRARIES_BYTES = 8 * MIB
THREAD_BYTES = 10 * MIB
CONVOLUTION_BYTES = 3 * 2**19
MOST_CONVOLUTION_BYTES = 20 * MIB
GLOO_BYTES = 60 * MIB
ZERO_LIBRARY_BYTES = 106 * MIB
ZERO3_LIBRARY_BYTES = 140 * MIB
# glibc's malloc.h: the least size of a block that is mapped by itself.
M_MMAP_THRESHOLD = -3
STEADY_BYTES = 512 * 2**10


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFacts:
    """One device as a prediction needs it. Rates are per second; `efficiency` is the part of `flops` that training
    reaches; `launch_s` is the least time of one operation; `host_bytes_per_s` the way to host memory. On a CPU
    `stream_bytes_per_s` is the rate where no cache helps (0: as `bytes_per_s`), `fresh_bytes_per_s` that of memory at
    its first use (0: not known), and `core` what each core gives when all work on their own (None: an equal part)."""

    kind: DeviceType
    name: str
    total_bytes: int
    free_bytes: int
    flops: dict[str, float] = field(default_factory=dict)
    bytes_per_s: float = 2e10
    host_bytes_per_s: float = 1e10
    efficiency: float = 0.45
    launch_s: float = 6e-6
    bf16: bool = True
    stream_bytes_per_s: float = 0.0
    fresh_bytes_per_s: float = 0.0
    core: "DeviceFacts | None" = None


@dataclass(frozen=True, kw_only=True, slots=True)
class HostFacts:
    """One host: memory that a process may use (cgroup limits applied), usable cores, free disk for offload."""

    total_bytes: int
    free_bytes: int
    cores: int
    disk_bytes: int = 0
    disk_bytes_per_s: float = 1.5e9


@dataclass(frozen=True, kw_only=True, slots=True)
class Factors:
    """What measured runs taught: multiply activations, add to the device, and how far predictions were off."""

    activations: float = 1.0
    device_bytes: int = 0
    time: float = 1.0
    error: float | None = None
    runs: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One line of the account. `source` says how the number was found."""

    name: str
    device_bytes: int = 0
    host_bytes: int = 0
    source: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Account:
    """All items; the peaks are their sums. `host_peak_bytes` is for one worker. `error` is the relative error band."""

    items: tuple[Item, ...]
    error: float

    @property
    def device_peak_bytes(self) -> int:
        """The most bytes on one device at any moment."""
        return sum(item.device_bytes for item in self.items)

    @property
    def host_peak_bytes(self) -> int:
        """The most bytes of host memory of one worker."""
        return sum(item.host_bytes for item in self.items)

    @property
    def device_bytes_with_headroom(self) -> int:
        """What must be free for the plan to count as fitting."""
        return int(self.device_peak_bytes * (1 + self.error))


def predict(profile: Profile, plan: Plan, factors: Factors | None = None) -> Account:
    """The account of one worker under `plan`."""
    factors = factors or Factors()
    items = [*_state(profile, plan), *_transient(profile, plan, factors), *_communication(profile, plan)]
    items += _overhead(profile, plan, factors, items)
    if plan.device == "cpu":
        # One memory: what the device holds is host memory too.
        items = [replace(item, host_bytes=item.host_bytes + item.device_bytes) for item in items]
    peak = sum(item.device_bytes for item in items)
    return Account(
        items=tuple(item for item in items if item.device_bytes or item.host_bytes), error=_error(plan, factors, peak)
    )


def _activity(profile: Profile, plan: Plan) -> Activity:
    return (profile.checkpointed or profile.plain) if plan.activation_checkpointing else profile.plain


def accumulation(plan: Plan) -> int:
    """Micro-batches in a full global batch: as `plan.accumulation`, without making the cut (thousands of devices)."""
    largest = max(plan.shares) if plan.shares else -(-plan.global_batch // plan.devices)
    return -(-largest // plan.micro_batch)


def weight_width(plan: Plan) -> int:
    """Bytes of one weight as the strategy holds it: DeepSpeed casts the model, autocast keeps it fp32."""
    return BYTES_OF[plan.precision] if plan.zero_stage else 4


def _state(profile: Profile, plan: Plan) -> list[Item]:
    """Weights, buffers, gradients, masters and optimizer state; the module's docstring has the formulas."""
    stage, n = plan.zero_stage, plan.devices
    trainable, frozen = profile.trainable_count, profile.parameter_count - profile.trainable_count
    buffers = Item(name="buffers", device_bytes=profile.buffer_bytes, source="traced")
    if stage == 0:
        return [
            Item(name="weights", device_bytes=profile.weight_bytes, source="traced"),
            buffers,
            Item(name="gradients", device_bytes=profile.gradient_bytes, source="one for each trainable weight"),
            Item(name="optimizer", device_bytes=profile.optimizer_bytes, source=f"traced: {profile.optimizer}"),
        ]
    width, part = weight_width(plan), -(-trainable // n)
    weights = (trainable + frozen) * width
    state = 4 * part + -(-profile.optimizer_bytes // n)
    items = [buffers]
    if stage == 3:
        items.append(_placed("weights, partition", -(-weights // n), plan.offload_parameters, "(P+F)·w/N"))
        live = min(trainable + frozen, ZERO3_LIVE_ELEMENTS + profile.largest_group_count) * width
        if plan.node_ranks:
            second = -(-weights // plan.node_ranks)
            items.append(Item(name="weights, second partition", device_bytes=second, source="hpZ: (P+F)·w/node_ranks"))
        items.append(Item(name="live parameters", device_bytes=live, source="gathered for use, at most the live limit"))
    else:
        items.append(Item(name="weights", device_bytes=weights, source="(P+F)·w"))
    items.append(_placed("masters and optimizer", state, plan.offload_optimizer, "(4+K)·P/N"))
    if plan.offload_optimizer != "none":
        items.append(Item(name="gradients for the host", host_bytes=4 * part, source="fp32 partition: 4·P/N"))
        if stage < 3:
            largest = width * profile.largest_parameter
            items.append(
                Item(name="weights for the device", host_bytes=width * part, source="on their way back: w·P/N")
            )
            items.append(Item(name="one gradient", device_bytes=largest, host_bytes=largest,
                              source="the largest on its way, stage_1_and_2.py: temp_grad_buffer"))  # fmt: skip
    elif stage == 3 or accumulation(plan) > 1:
        # Stages 1 and 2 keep none when a step is one micro-batch: what is reduced goes into the update at once.
        items.append(Item(name="gradients, partition", device_bytes=4 * part, source="fp32: 4·P/N"))
    return items


def _placed(name: str, size: int, where: str, source: str) -> Item:
    if where == "none":
        return Item(name=name, device_bytes=size, source=source)
    if where == "host":
        return Item(name=f"{name} (host)", host_bytes=size, source=source)
    swap = min(size, 512 * MIB)
    return Item(name=f"{name} (disk buffers)", host_bytes=swap, source="buffers for what is on disk: at most 512 MiB")


def _transient(profile: Profile, plan: Plan, factors: Factors) -> list[Item]:
    """What comes and goes within a step: the highest of forward and backward, and of the optimizer's step.

    With gradients that wait for their owner's step (single), the first micro-batch makes them as it goes and frees
    activations meanwhile; with buckets (ddp) or partitions (zero) their place is taken from the start, and what ddp
    accumulates before its last micro-batch waits beside the buckets. DDP begins by sending all weights in flat copies
    of up to 250 MiB (PyTorch's _sync_module_states).
    """
    activity = _activity(profile, plan)
    later = highest(_without_casts(activity.again, profile, plan), plan.micro_batch)
    passes = later
    if plan.strategy == "single":
        first = highest(activity.first, plan.micro_batch) - profile.gradient_bytes
        passes = max(first, later) if accumulation(plan) > 1 else first
    elif plan.strategy == "ddp" and accumulation(plan) > 1:
        passes += profile.gradient_bytes
    update = profile.step_bytes if plan.zero_stage == 0 else -(-profile.step_bytes // plan.devices)
    if plan.zero_stage == 0 and plan.device == "cuda":
        update = profile.foreach_step_bytes  # PyTorch's default there, unless the optimizer is told otherwise
    update = 0 if plan.offload_optimizer != "none" else update + _left_in_heap(profile, plan)
    size = int(max(passes * factors.activations, update, 0.0))
    if plan.strategy == "ddp":
        sent = min(profile.weight_bytes, 250 * MIB)
        size = max(size, sent - profile.gradient_bytes - profile.optimizer_bytes)
    if plan.zero_stage:
        if plan.zero_stage < 3 and plan.device == "cpu":
            # Kernels lie anywhere in one flat buffer, and oneDNN copies them once more (measured).
            size += _convolution_bytes(profile) * 5 // 4
        size = max(size, _zero_floor(profile, plan, int(passes * factors.activations)))
    batch = int(profile.input_bytes.at(plan.micro_batch))
    return [
        Item(name="activations", device_bytes=size, source=f"{profile.method}, micro-batch {plan.micro_batch}"),
        Item(name="input", device_bytes=batch, host_bytes=2 * batch, source="one batch here, two prefetched"),
    ]


def _without_casts(again: Envelope, profile: Profile, plan: Plan) -> Envelope:
    """`again` under `plan`. Autocast keeps a copy of each weight in the narrow type until the pass is over, which the
    trace has seen; DeepSpeed's weights are of that type themselves, and nothing is copied. Lines too low to hold the
    copies are of other moments. Embeddings, which autocast leaves alone, make this too much by their size at most."""
    if not plan.zero_stage or plan.precision == "fp32":
        return again
    copies = BYTES_OF[plan.precision] * profile.parameter_count
    return tuple(
        replace(line, base=max(0.0, line.base - copies)) if line.base >= copies / 2 else line for line in again
    )


def _zero_floor(profile: Profile, plan: Plan, passes: int) -> int:
    """What DeepSpeed flattens, gathers and prefetches, which may be more than the activations (`passes`) alone.

    Stages 1 and 2: a bucket is flattened into a copy to be reduced (stage_1_and_2.py, allreduce_bucket); in the step,
    with the bucket gone, this rank's gradients are there twice, as they came and flat. The rest was measured.

    Stage 3, the higher of two moments. Prefetched weights arrive in one flat tensor, and each is copied out before that
    goes (partition_parameters.py, AllGatherCoalescedHandle.wait), beside the activations that wait for the backward
    pass: the peak of a pass without what its loss took besides (measured: three quarters). At its end the bucket is
    laid out by ranks in a copy (coalesced_collectives.py, reduce_scatter_coalesced), which gloo copies again, since it
    reduces for all (ProcessGroupGloo.cpp); all live weights but the last modules' are gone by then.
    """
    bucket = 4 * min(ZERO_BUCKET_ELEMENTS, profile.trainable_count)
    if plan.zero_stage == 3:
        prefetched = weight_width(plan) * min(ZERO3_PREFETCH_ELEMENTS, profile.trainable_count)
        return max(passes * 3 // 4 + prefetched, bucket + weight_width(plan) * profile.largest_group_count)
    part = -(-profile.trainable_count // plan.devices)
    flat = 0 if plan.offload_optimizer != "none" else 4 * part * (1 if accumulation(plan) > 1 else 2)
    return max(bucket + 44 * MIB, flat - bucket)


def _communication(profile: Profile, plan: Plan) -> list[Item]:
    """Buckets. DDP: the gradients end up in its buckets, which are there from the start (PyTorch's reducer.cpp with
    gradient_as_bucket_view); while micro-batches accumulate, their sum waits beside the buckets. ZeRO: two contiguous
    reduce buckets (overlap_comm doubles the buffer, DeepSpeed's stage_1_and_2.py); none is larger than the model."""
    if plan.strategy == "ddp" and plan.device == "cpu" and plan.devices > 1:
        return [Item(name="gloo and Accelerate", device_bytes=GLOO_BYTES, source="measured")]
    if plan.zero_stage == 0:
        return []
    size = 4 * min(ZERO_BUCKET_ELEMENTS, profile.trainable_count)
    copies = 2 if plan.device == "cuda" and plan.offload_optimizer == "none" else 1
    items = [Item(name="buckets", device_bytes=copies * size, source=f"{copies} fp32 reduce buckets")]
    if plan.device == "cpu":
        libraries = ZERO3_LIBRARY_BYTES if plan.zero_stage == 3 else ZERO_LIBRARY_BYTES
        items.append(Item(name="gloo and DeepSpeed", device_bytes=libraries, source="measured"))
    return items


def _overhead(profile: Profile, plan: Plan, factors: Factors, items: list[Item]) -> list[Item]:
    """Allocator slack, the device's context and libraries' workspaces. The CPU's numbers were measured on glibc 2.36
    with `benchmarks/memory.py`: with the steady allocator, only what libraries load on first use and oneDNN's copies of
    a convolution's kernel; with glibc's own, freed blocks stay in the heap, about half of what comes and goes."""
    extra = Item(name="measured extra", device_bytes=factors.device_bytes, source=f"{factors.runs} measured runs")
    so_far = sum(item.device_bytes for item in items)
    if plan.device == "cpu":
        libraries = LIBRARIES_BYTES + THREAD_BYTES * (plan.threads - 1)
        libraries += _convolution_bytes(profile)
        slack = so_far // 200
        if plan.memory_cap_bytes is None:
            moving = sum(item.device_bytes for item in items if item.name in ("activations", "gradients"))
            slack += moving * 2 // 5
        return [
            Item(name="libraries", device_bytes=libraries, source="measured: first use of torch, MKL and oneDNN"),
            Item(name="imports", device_bytes=profile.imported_bytes, source="traced: what making the model imports"),
            Item(
                name="allocator", device_bytes=slack, source="measured: " + ("0.5%" if plan.memory_cap_bytes else "40%")
            ),
            extra,
        ]
    if plan.device == "mps":
        return [Item(name="allocator and libraries", device_bytes=256 * MIB + so_far // 20, source="measured"), extra]
    nccl = NCCL_BYTES if plan.devices > 1 else 0
    return [
        Item(name="context", device_bytes=CONTEXT_BYTES + nccl, source="CUDA context and kernels; NCCL channels"),
        Item(name="workspace", device_bytes=64 * MIB, source="cuBLAS and cuDNN workspaces"),
        Item(name="allocator", device_bytes=so_far // 25, source="4%, with expandable segments"),
        extra,
    ]


def _convolution_bytes(profile: Profile) -> int:
    """What oneDNN keeps for convolutions: compiled kernels and weights in its own layout (measured)."""
    return min(MOST_CONVOLUTION_BYTES, CONVOLUTION_BYTES * profile.convolutions) + 2 * profile.kernel_bytes


def _left_in_heap(profile: Profile, plan: Plan) -> int:
    """Activations in blocks too small to be mapped by themselves stay in glibc's heap when freed, and so are still
    there beside all gradients and what the optimizer's step takes (measured with `benchmarks/memory.py`)."""
    activity = _activity(profile, plan)
    if plan.device != "cpu" or plan.zero_stage:
        return 0
    small = sum(block.share for block in activity.blocks if block.size.at(plan.micro_batch) < STEADY_BYTES)
    return int(small * highest(activity.again, plan.micro_batch))


def _error(plan: Plan, factors: Factors, peak: int) -> float:
    """A part of the peak, and on a CPU an amount besides: what libraries take does not shrink with the model. Stages 1
    and 2 differ from run to run by part of a bucket, as the reduction of one meets the backward pass (measured)."""
    if factors.error is not None:
        return max(0.02, factors.error)
    if plan.device != "cpu":
        return 0.08
    amount = (12 if plan.zero_stage == 3 else 18 if plan.zero_stage else 6 if plan.devices > 1 else 3) * MIB
    return (0.05 if plan.memory_cap_bytes else 0.15) + amount / max(1, peak)


def steady_allocator() -> bool:
    """Makes this process's memory follow what is alive: every block of half a MiB or more is mapped by itself and given
    back when freed (glibc's `mallopt`), so that a prediction can be kept to a few percent under a cap. It costs time
    (5 to 30% on small models, next to nothing on large ones), so it is for capped CPU workers only. Call it before the
    model is built. Returns False where the C library has no such choice."""
    import ctypes

    try:
        return bool(ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, STEADY_BYTES))
    except (AttributeError, OSError):
        return False
