"""A Plan is one complete way to train: frozen, serialisable, with a reason for each choice.

How a global batch is cut into micro-batches lives here too, since every worker must cut alike.
"""

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Literal

StrategyName = Literal["single", "ddp", "zero1", "zero2", "zero3"]
Precision = Literal["fp32", "bf16", "fp16"]
DeviceType = Literal["cpu", "cuda", "mps"]
Offload = Literal["none", "host", "disk"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One rung of the ladder.

    `micro_batch` is the most samples in one forward pass on one device. `shares` gives the samples that each rank
    takes of a full global batch (their sum is `global_batch`); empty means as equal as can be. `sync_batchnorm`: batch
    norms take their statistics over the micro-batches of all devices. `node_ranks`: under ZeRO-3, each so many
    neighbouring ranks (those of a node) hold all weights among them a second time, so that gathers stay within the node
    but for the first one of a step (ZeRO++'s hpZ, Wang et al. 2023); 0: they do not. All sizes are in bytes. `reasons`
    maps a field's name to why it has its value.
    """

    strategy: StrategyName
    device: DeviceType
    devices: int
    global_batch: int
    micro_batch: int
    precision: Precision = "fp32"
    activation_checkpointing: bool = False
    offload_optimizer: Offload = "none"
    offload_parameters: Offload = "none"
    node_ranks: int = 0
    sync_batchnorm: bool = False
    shares: tuple[int, ...] = ()
    memory_cap_bytes: int | None = None
    threads: int = 1
    predicted_device_peak_bytes: int | None = None
    predicted_host_peak_bytes: int | None = None
    predicted_step_s: float | None = None
    reasons: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.devices < 1 or self.micro_batch < 1 or self.global_batch < 1:
            raise ValueError(f"devices, micro_batch and global_batch are at least 1, got {self}")
        if self.strategy == "single" and self.devices != 1:
            raise ValueError(f"single runs on one device, got {self.devices}")
        whole_nodes = self.node_ranks > 1 and self.devices % self.node_ranks == 0 and self.devices > self.node_ranks
        if self.node_ranks and not (self.strategy == "zero3" and self.offload_parameters == "none" and whole_nodes):
            raise ValueError(f"node_ranks is for zero3 on several nodes of as many devices each, got {self}")
        if self.shares and (len(self.shares) != self.devices or sum(self.shares) != self.global_batch):
            raise ValueError(f"shares {self.shares} do not cut {self.global_batch} samples over {self.devices} devices")

    @property
    def accumulation(self) -> int:
        """Micro-batches that make one optimizer step of a full global batch."""
        return cut(self.global_batch, self).slots

    @property
    def rung(self) -> tuple[object, ...]:
        """What tells one rung of a ladder from another: everything chosen, nothing predicted or explained."""
        return (
            self.strategy, self.devices, self.micro_batch, self.activation_checkpointing,
            self.offload_optimizer, self.offload_parameters, self.node_ranks,
        )  # fmt: skip

    @property
    def zero_stage(self) -> int:
        """DeepSpeed's stage: 0 for single and ddp."""
        return int(self.strategy[-1]) if self.strategy.startswith("zero") else 0

    def describe(self) -> str:
        """One line: what a user wants to read about this plan."""
        parts = [
            self.strategy,
            f"{self.devices} x {self.device}",
            f"batch {self.global_batch} = {self.devices} x {self.micro_batch} x {self.accumulation}",
            self.precision,
        ]
        if self.activation_checkpointing:
            parts.append("activation checkpointing")
        if self.node_ranks:
            parts.append(f"weights a second time in every {self.node_ranks} devices")
        if self.sync_batchnorm and self.devices > 1:
            parts.append("batch norms synchronised")
        for what, where in (("optimizer", self.offload_optimizer), ("parameters", self.offload_parameters)):
            if where != "none":
                parts.append(f"{what} on {where}")
        return ", ".join(parts)

    def to_json(self) -> str:
        """Stable JSON of all fields."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """The inverse of `to_json`; unknown fields are an error."""
        values = json.loads(text)
        known = {f.name for f in fields(cls)}
        if unknown := set(values) - known:
            raise ValueError(f"not fields of a plan: {sorted(unknown)}")
        values["shares"] = tuple(values.get("shares", ()))
        return cls(**values)

    def with_(self, **changes: object) -> "Plan":
        """A copy with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Cut:
    """How one global batch falls apart: `slices[rank][slot]` is a (start, stop) within the global batch.

    Every rank has the same number of slots, since ZeRO communicates in each of them. A slot may be empty
    (start == stop): the worker then runs any sample at hand with weight zero.
    """

    slots: int
    slices: tuple[tuple[tuple[int, int], ...], ...]


def cut(count: int, plan: Plan) -> Cut:
    """Cuts a global batch of `count` samples (at most `plan.global_batch`; the last of an epoch may be smaller).

    Each rank takes one contiguous run, in proportion to its share, and splits it as evenly as can be into the same
    number of micro-batches, none larger than `plan.micro_batch`.
    """
    if not 0 < count <= plan.global_batch:
        raise ValueError(f"a global batch of {count} samples is not within 1..{plan.global_batch}")
    sizes = _proportional(count, plan.shares or (1,) * plan.devices)
    slots = max(-(-size // plan.micro_batch) for size in sizes)
    slices: list[tuple[tuple[int, int], ...]] = []
    start = 0
    for size in sizes:
        edges = [start + size * i // slots for i in range(slots + 1)]
        slices.append(tuple(itertools.pairwise(edges)))
        start += size
    return Cut(slots, tuple(slices))


def _proportional(count: int, shares: Sequence[int]) -> list[int]:
    """Whole parts of `count` in proportion to `shares`, summing to it exactly (largest remainder first, then rank)."""
    total = sum(shares)
    parts = [count * share // total for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda r: (-(count * shares[r] % total), r))
    for rank in by_remainder[: count - sum(parts)]:
        parts[rank] += 1
    return parts
