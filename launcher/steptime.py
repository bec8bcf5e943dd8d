"""How long one optimizer step takes under a plan: arithmetic, communication, offload and the update. Pure.

The aim is the right order of plans on one inventory, not the absolute time; measured runs scale it (Factors.time).
"""

from dataclasses import dataclass, replace

from rung.strategies.memory import STEADY_BYTES, DeviceFacts, Factors, HostFacts, accumulation, weight_width
from rung.strategies.plan import Plan
from rung.strategies.profile import Activity, Profile

# The part of a backward pass behind which DDP and ZeRO hide communication.
OVERLAP = 0.6
# ZeRO runs hooks and partitions tensors in Python: a cost for each parameter group and micro-batch, seen in profiles.
ZERO_HOOK_S = {0: 0.0, 1: 3e-4, 2: 4e-4, 3: 1.2e-3}

# What a group of unequal devices reaches of the sum of their speeds when shares follow speed (benchmarks/balance.py).
BALANCED = 0.95
# glibc's DEFAULT_MMAP_THRESHOLD_MAX: larger blocks never come from the heap.
MOST_HEAP_BYTES = 32 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What a plan runs on: its slowest device, its host, and the slowest link on the ring through all devices.

    `near_bytes_per_s`, `near_latency_s`: the link within a node. `kinds`: how many there are of each, where they differ
    and shares of the batch may follow their speeds.
    """

    device: DeviceFacts
    host: HostFacts
    link_bytes_per_s: float
    link_latency_s: float
    per_node: int
    nodes: int
    near_bytes_per_s: float = 0.0
    near_latency_s: float = 0.0
    kinds: tuple[tuple[DeviceFacts, int], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Seconds of one optimizer step by cause; `total_s` is their sum."""

    compute_s: float
    communication_s: float
    offload_s: float
    update_s: float

    @property
    def total_s(self) -> float:
        """The whole step."""
        return self.compute_s + self.communication_s + self.offload_s + self.update_s


def step_time(profile: Profile, plan: Plan, setting: Setting, factors: Factors | None = None) -> StepTime:
    """The predicted time of one full global batch."""
    factors = factors or Factors()
    slots = accumulation(plan)
    micro = _micro_s(profile, plan, setting) / _pace(profile, plan, setting)
    compute = slots * micro * factors.time
    backward = 2 / 3 * micro * factors.time
    return StepTime(
        compute_s=compute,
        communication_s=_communication_s(profile, plan, setting, slots, backward),
        offload_s=_offload_s(profile, plan, setting, slots),
        update_s=_update_s(profile, plan, setting),
    )


def _pace(profile: Profile, plan: Plan, setting: Setting) -> float:
    """How much faster than its slowest device a group computes whose shares follow speed. They stay equal where nothing
    can be measured (ZeRO-3), or a batch has too few samples to divide."""
    if not setting.kinds or plan.zero_stage == 3 or plan.global_batch < 2 * plan.devices:
        return 1.0
    own = _micro_s(profile, plan, setting)
    relative = [number * own / _micro_s(profile, plan, replace(setting, device=d)) for d, number in setting.kinds]
    return max(1.0, BALANCED * sum(relative) / plan.devices)


def _micro_s(profile: Profile, plan: Plan, setting: Setting) -> float:
    """Roofline: matrix products at the device's rate, the rest at its memory's, never faster than operations start. On
    a CPU nothing runs ahead: the times to start operations add up, and so do those to get memory from the kernel."""
    activity = (profile.checkpointed if plan.activation_checkpointing else None) or profile.plain
    device = setting.device
    share = -(-plan.global_batch // plan.devices)
    samples = share / accumulation(plan)
    rate = device.flops.get(plan.precision) or device.flops.get("fp32") or 1e12
    work = activity.flops.at(samples) / (rate * device.efficiency)
    if plan.activation_checkpointing and profile.checkpointed is None:
        work *= 4 / 3
    work += activity.moved.at(samples) / device.bytes_per_s
    if plan.device == "cpu":
        # Smaller micro-batches take blocks that malloc keeps, yet were not seen to be faster for it: their products are
        # slower by as much (benchmarks/plans.py). So it is judged by the whole share at once.
        fresh = _fresh_share(activity, plan, share) * activity.made.at(samples)
        faults = fresh / device.fresh_bytes_per_s if device.fresh_bytes_per_s else 0.0
        return work + faults + activity.operations * device.launch_s
    return max(work, activity.operations * device.launch_s)


def _fresh_share(activity: Activity, plan: Plan, samples: float) -> float:
    """The part of the tensors' bytes that comes anew from the kernel each time: blocks that malloc maps one by one."""
    least = STEADY_BYTES if plan.memory_cap_bytes else MOST_HEAP_BYTES
    return sum(block.share for block in activity.blocks if block.size.at(samples) >= least)


def _communication_s(profile: Profile, plan: Plan, setting: Setting, slots: int, backward_s: float) -> float:
    """Ring collectives: an all-reduce moves 2(N-1)/N of the bytes, a reduce-scatter or all-gather half of that
    (Thakur et al. 2005). Stage 2 reduces in every micro-batch; stage 3 gathers the weights for forward and again for
    backward (ZeRO paper, section 7). Gradients hide behind the backward pass in part; stage 1's gather of new weights
    does not."""
    if plan.devices == 1:
        return 0.0
    ring = (plan.devices - 1) / plan.devices / setting.link_bytes_per_s
    latency = setting.link_latency_s * (1 + (plan.devices - 1).bit_length())
    gradients = profile.gradient_bytes if plan.zero_stage == 0 else profile.trainable_count * weight_width(plan)
    weights = profile.parameter_count * weight_width(plan)
    # On a CPU gloo adds up and copies on the cores that compute.
    hidden = 0.0 if plan.device == "cpu" else OVERLAP * backward_s
    hooks = ZERO_HOOK_S[plan.zero_stage] * max(1, len(profile.groups)) * slots
    buckets = 1 + gradients // (25 * 2**20)
    if plan.zero_stage == 0:
        reduce = 2 * gradients * ring + buckets * latency
        return max(reduce - hidden, 0.1 * reduce)
    reduce = gradients * ring + buckets * latency
    if plan.zero_stage == 1:
        return max(reduce - hidden, 0.1 * reduce) + weights * ring + latency + hooks
    each = max(reduce - hidden, 0.1 * reduce) * slots
    if plan.zero_stage == 2:
        return each + weights * ring + latency + hooks
    first = again = 2 * (weights * ring + len(profile.groups) * latency)
    if plan.node_ranks:
        # Only the first forward pass gathers over the network (ZeRO++, Wang et al. 2023, section 3.2).
        near = (plan.node_ranks - 1) / plan.node_ranks / setting.near_bytes_per_s
        again = 2 * (weights * near + len(profile.groups) * setting.near_latency_s * (1 + plan.node_ranks.bit_length()))
        first = (first + again) / 2
    gathers = max(first - hidden, 0.3 * first) + max(again - hidden, 0.3 * again) * (slots - 1)
    return each + gathers + hooks


def _offload_s(profile: Profile, plan: Plan, setting: Setting, slots: int) -> float:
    """Traffic to the host and the disk for one device, after ZeRO-Offload (Ren et al. 2021) and ZeRO-Infinity
    (Rajbhandari et al. 2021): gradients down and new weights up once a step, weights up twice a micro-batch when they
    live there; all devices of a node share its disk."""
    part = profile.trainable_count / plan.devices
    width = weight_width(plan)
    way, disk = setting.device.host_bytes_per_s, setting.host.disk_bytes_per_s / setting.per_node
    seconds = 0.0
    if plan.offload_optimizer != "none":
        seconds += 2 * part * width / way
    if plan.offload_optimizer == "disk":
        seconds += 2 * (profile.optimizer_bytes / plan.devices + 4 * part) / disk
    if plan.offload_parameters != "none":
        seconds += 2 * slots * profile.parameter_count / plan.devices * width / way
    if plan.offload_parameters == "disk":
        seconds += 2 * slots * profile.parameter_count / plan.devices * width / disk
    return seconds


def _update_s(profile: Profile, plan: Plan, setting: Setting) -> float:
    """The optimizer reads weights, gradients and state and writes weights and state: bound by memory, on the host when
    the optimizer lives there (cores share its bandwidth, about 10 GB/s each up to 80)."""
    parts = plan.devices if plan.zero_stage else 1
    touched = (2 * profile.optimizer_bytes + 3 * 4 * profile.trainable_count) / parts
    if plan.offload_optimizer == "none":
        return touched / (setting.device.stream_bytes_per_s or setting.device.bytes_per_s)
    rate = min(8e10, 1e10 * setting.host.cores)
    return touched * setting.per_node / rate
