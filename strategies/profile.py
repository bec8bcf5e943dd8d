"""What a model needs, as values: parameters, optimizer state, the memory and the work of a step for any micro-batch.

Nothing here imports torch: the launcher reads a Profile, plans with it and stores it. `trace.py` makes one.

A step is traced at two micro-batch sizes on fake tensors. The same operations run at both, so the bytes alive at each
moment are a line `base + slope * micro_batch`, and the peak at any size is the highest of those lines. Only the few
lines that are highest somewhere are kept (the upper envelope); that is exact where one fitted line is not.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rung.strategies.plan import Precision

FORMAT_VERSION = 2
Method = Literal["traced", "measured", "given"]


@dataclass(frozen=True, slots=True)
class Line:
    """`base + slope * samples`, in the unit of its use (bytes, FLOPs)."""

    base: float
    slope: float

    def at(self, samples: float) -> float:
        """The value for a micro-batch of `samples`."""
        return self.base + self.slope * samples


Envelope = tuple[Line, ...]


def highest(envelope: Envelope, samples: float) -> float:
    """The largest of the lines at `samples`; 0 for no lines."""
    return max((line.at(samples) for line in envelope), default=0.0)


def upper_envelope(lines: Iterable[Line]) -> Envelope:
    """The lines that are highest for some micro-batch of at least 1, by rising slope (the convex hull trick)."""
    best: dict[float, float] = {}
    for line in lines:
        if line.slope not in best or best[line.slope] < line.base:
            best[line.slope] = line.base
    hull: list[Line] = []
    for slope in sorted(best):
        new = Line(best[slope], slope)
        while hull and (hull[-1].at(1) <= new.at(1) or (len(hull) > 1 and _useless(hull[-2], hull[-1], new))):
            hull.pop()
        hull.append(new)
    return tuple(hull)


def _useless(low: Line, middle: Line, high: Line) -> bool:
    """Whether `middle` (slopes rise from low to high) is nowhere above both others."""
    return (high.base - low.base) * (middle.slope - low.slope) >= (middle.base - low.base) * (high.slope - low.slope)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterGroup:
    """The parameters of one part of the model (`transformer.h.3`): how many, in what type, and whether they train."""

    name: str
    count: int
    bytes: int
    dtype: str
    trainable: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Tensors of one size: bytes of each, and their share of the bytes of all activations of a step."""

    size: Line
    share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Activity:
    """One micro-batch, forward and backward, run in one way (with or without activation checkpointing).

    first: bytes alive beyond weights, buffers and optimizer state while no gradient exists at the start; the gradients
        that this micro-batch makes are counted.
    again: bytes alive beyond weights, buffers, optimizer state and accumulated gradients, for a later micro-batch of
        the same step; a gradient counts only until it is added to the one that is there.
    flops: floating point operations of matrix products and convolutions; 2 for a multiply-add.
    moved: bytes that all other operations read and write.
    made: bytes of all tensors that operations make.
    operations: how many operations run, each with its own launch cost.
    blocks: the most frequent sizes of a tensor among activations.
    residual: largest relative difference between the lines and a trace at a third size; 0 when there was none.
    """

    first: Envelope
    again: Envelope
    flops: Line
    moved: Line
    operations: int
    blocks: tuple[Block, ...] = ()
    residual: float = 0.0
    made: Line = Line(0.0, 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """A task's needs at one precision with one optimizer. All sizes in bytes.

    optimizer_bytes: state that stays, as the real optimizer class made it.
    step_bytes: the most that clipping and the optimizer's step hold beyond weights, gradients and state.
    foreach_step_bytes: the same for the optimizer's "foreach" form, which PyTorch takes on CUDA.
    input_bytes: one batch as the loader gives it.
    largest_parameter: elements of the largest.
    imported_bytes: private memory of modules that only making the model imports (on a CPU they share the device's).
    convolutions, kernel_bytes: how many run in a forward pass, and the weights of the largest.
    longest: what was taken for the longest sample ("sample 12 of 64"), empty where sizes do not vary.
    """

    task: str
    digest: str
    method: Method
    precision: Precision
    optimizer: str
    groups: tuple[ParameterGroup, ...]
    buffer_bytes: int
    optimizer_bytes: int
    step_bytes: int
    input_bytes: Line
    plain: Activity
    checkpointed: Activity | None = None
    foreach_step_bytes: int = 0
    largest_parameter: int = 0
    convolutions: int = 0
    kernel_bytes: int = 0
    imported_bytes: int = 0
    longest: str = ""
    note: str = ""

    @property
    def trainable_count(self) -> int:
        """Elements of parameters that train."""
        return sum(group.count for group in self.groups if group.trainable)

    @property
    def parameter_count(self) -> int:
        """Elements of all parameters."""
        return sum(group.count for group in self.groups)

    @property
    def weight_bytes(self) -> int:
        """All parameters as the task made them."""
        return sum(group.bytes for group in self.groups)

    @property
    def gradient_bytes(self) -> int:
        """A gradient has the type of its parameter."""
        return sum(group.bytes for group in self.groups if group.trainable)

    @property
    def largest_group_count(self) -> int:
        """Elements of the part of the model that ZeRO-3 must gather at once."""
        return max((group.count for group in self.groups), default=0)

    def to_json(self) -> str:
        """Stable JSON of all fields."""
        return json.dumps({"format": FORMAT_VERSION, **asdict(self)}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "Profile":
        """The inverse of `to_json`. Raises ValueError for another format."""
        values: dict[str, Any] = json.loads(text)
        if values.pop("format", None) != FORMAT_VERSION:
            raise ValueError("a profile of another version of rung")
        values["groups"] = tuple(ParameterGroup(**group) for group in values["groups"])
        values["input_bytes"] = Line(**values["input_bytes"])
        values["plain"] = _activity(values["plain"])
        values["checkpointed"] = _activity(values["checkpointed"]) if values["checkpointed"] else None
        return cls(**values)


def _activity(values: dict[str, Any]) -> Activity:
    envelopes = {name: tuple(Line(**line) for line in values[name]) for name in ("first", "again")}
    lines = {name: Line(**values[name]) for name in ("flops", "moved", "made")}
    blocks = tuple(Block(size=Line(**block["size"]), share=block["share"]) for block in values["blocks"])
    return Activity(**{**values, **envelopes, **lines, "blocks": blocks})
