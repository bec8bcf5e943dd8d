"""The job's sections and fields: strict, frozen models with their defaults.

What a single field may hold is decided here and in `job_types`; what two fields say together is checked in `job_check`.
"""

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, model_validator

from rung.launcher.job_types import (
    MASK,
    Bytes,
    Count,
    Every,
    Fraction,
    Line,
    Natural,
    Or,
    Plain,
    Positive,
    Range,
    Rhythm,
    Workers,
    as_tuple,
    entry_point,
    named,
    optimizer_name,
    read_fallback,
)
from rung.strategies.plan import Offload


class _Section(BaseModel):
    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )


class Optimizer(_Section):
    name: Annotated[str, AfterValidator(optimizer_name)] = "adamw"
    """A class of torch.optim in any case, or module:callable."""
    lr: Annotated[float, Field(gt=0)] = 1e-4
    """Learning rate at the top of the schedule."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Applied to every trained tensor, as the optimizer itself does it."""
    args: Plain = {}
    """Further keyword arguments of that optimizer."""


class Schedule(_Section):
    name: Literal["linear", "cosine", "constant"] = "linear"
    """How the learning rate goes down after the warm-up."""
    warmup: Fraction = 0.03
    """Share of all steps in which the rate rises to its top."""
    final: Fraction = 0.0
    """Rate at the end, as a share of the top."""


class StrategyPins(_Section):
    """Parts of the plan that the user wants as they say; None leaves a part to the planner."""

    name: Literal["auto", "single", "ddp", "zero1", "zero2", "zero3"] = "auto"
    """The way of training."""
    micro_batch: Positive | None = None
    """Samples in one forward pass on one device."""
    checkpointing: bool | None = None
    """Activation checkpointing: recompute instead of keeping."""
    offload_optimizer: Offload | None = None
    """Where the optimizer's state lives, if not on the device."""
    offload_parameters: Offload | None = None
    """Where the weights live, if not on the device."""
    within_nodes: bool | None = None
    """ZeRO-3 over several nodes: each node holds all weights a second time, so that fewer gathers cross the network."""
    devices: Positive | None = None
    """How many devices take part."""
    sync_batchnorm: bool = False
    """Batch norms take their statistics over the micro-batches of all devices, not of each by itself."""


class Devices(_Section):
    count: Count = "auto"
    """auto (all that help), a number, or [least, most]."""
    memory: Bytes = "auto"
    """A hard cap for each device: "8 GiB", bytes, or auto."""
    type: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Which kind of device."""
    balance: Literal["auto"] | bool = "auto"
    """Whether devices get shares of each batch by their measured speed: auto (where they differ in kind), on, off."""


class Checkpoint(_Section):
    every: Rhythm = Every(amount=5.0, unit="epochs")
    """"5 epochs", "500 steps", "10 minutes" or none; the last step is always saved."""
    keep: Positive = 3
    """How many of the newest are kept."""
    keep_best: Line | None = None
    """A validation metric whose best checkpoint is kept as well."""
    options: Plain = {}
    """Options for the store, as fsspec takes them. Never shown or stored in the clear."""


class Guard(_Section):
    first_steps: Natural = 10
    """How many steps are watched with the strictest eye."""
    non_finite: Literal["stop", "skip"] = "stop"
    """What a NaN or infinite loss or gradient norm does."""
    negative_loss: Literal["stop", "allow"] = "stop"
    """Some objectives are negative by right: allow."""
    on_spike: Literal["none", "stop", "rollback"] = "none"
    """What a loss far above its recent values does."""


class Data(_Section):
    workers: Workers = "auto"
    """Loader processes per device; 0 loads in the main process."""
    clean: Annotated[
        tuple[Literal["drop_duplicates", "drop_missing", "drop_unreadable"], ...], BeforeValidator(as_tuple)
    ] = ()
    """Samples that are left out."""
    imbalance: Literal["none", "resample", "weights", "auto"] = "none"
    """What is done about classes of unequal size."""


class Validation(_Section):
    every: Rhythm = Every(amount=1.0, unit="epochs")
    """As in checkpoint.every."""
    batches: Positive | None = None
    """At most this many batches; null: all."""


class Cluster(_Section):
    address: Line = "none"
    """none (this machine), auto, local (Ray on this machine), or a Ray address or URL."""
    workers: Range = (1, 4)
    """How many workers: a number or [least, most]."""
    runtime_env: Plain = {}
    """Ray's runtime environment for the workers."""


class Fallback(_Section):
    enabled: bool = True
    """Whether a plan that does not fit is replaced."""
    allow: Annotated[
        tuple[Literal["micro_batch", "checkpointing", "strategy", "offload", "devices"], ...] | None,
        BeforeValidator(as_tuple),
    ] = None
    """What may change; null: all."""


class Job(_Section):
    """What the user wants: one training, as written in a job file."""

    task: Annotated[str, AfterValidator(entry_point)]
    """module:Class, found beside the job file, in the working directory, or installed."""
    task_args: Plain = {}
    """Keyword arguments of the task's constructor."""
    run: Line
    """Folder of the run: a path or any fsspec URL."""
    batch: Positive
    """Samples in one optimizer step, over all devices."""
    epochs: Annotated[float, Field(gt=0, le=1e12)] | None = None
    """How often the data is seen; this or steps. 1 if neither is given."""
    steps: Positive | None = None
    """How many optimizer steps; this or epochs."""
    optimizer: Annotated[Optimizer, BeforeValidator(named), Or({"type": "string"})] = Optimizer()
    schedule: Annotated[Schedule, BeforeValidator(named), Or({"enum": ["linear", "cosine", "constant"]})] = Schedule()
    clip: Annotated[float, Field(gt=0)] | None = 1.0
    """Largest L2 norm of the whole gradient; null: no clipping."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """What the forward pass computes in."""
    strategy: Annotated[StrategyPins, BeforeValidator(named), Or({"type": "string"})] = StrategyPins()
    """auto, a name, or a mapping that pins parts of the plan."""
    devices: Devices = Devices()
    checkpoint: Checkpoint = Checkpoint()
    guard: Guard = Guard()
    data: Data = Data()
    validation: Validation = Validation()
    cluster: Cluster = Cluster()
    fallback: Annotated[Fallback, BeforeValidator(read_fallback), Or({"enum": ["on", "off", True, False]})] = Fallback()
    init_from: Line | None = None
    """Weights to start from: a file, folder, URL or another run."""
    allow_mismatch: Annotated[tuple[Line, ...], BeforeValidator(as_tuple)] = ()
    """Names or patterns of weights that init_from need not match."""
    log_every_s: Annotated[float, Field(gt=0)] = 5.0
    """Seconds between progress lines in a log."""
    grace_s: Annotated[float, Field(ge=0)] = 30.0
    """Seconds that a stop may take to save."""
    hang_s: Annotated[float, Field(gt=0)] = 600.0
    """Seconds without a sign of progress after which a worker counts as hung and the group is restarted."""
    seed: Natural = 0

    _source: Path = PrivateAttr(default=Path("job.yaml"))

    @model_validator(mode="before")
    @classmethod
    def _one_epoch(cls, values: object) -> object:
        if isinstance(values, dict) and values.get("epochs") is None and values.get("steps") is None:
            return {**values, "epochs": 1.0}
        return values

    @property
    def source(self) -> Path:
        """The file it was read from."""
        return self._source

    @property
    def folder(self) -> Path:
        """The folder of that file; the task is looked for there first."""
        return self._source.parent

    def to_dict(self) -> dict[str, Any]:
        """All fields and `source` as plain JSON values, secrets included; `from_dict` is the inverse."""
        return {**self.model_dump(mode="json"), "source": str(self._source)}

    def public_dict(self) -> dict[str, Any]:
        """The fields with whatever may be secret masked: store options, environment values, passwords in URLs."""
        values = self.model_dump(mode="json")
        values["checkpoint"]["options"] = _masked(values["checkpoint"]["options"])
        values["cluster"]["runtime_env"] = _masked_env(values["cluster"]["runtime_env"])
        for holder, key in ((values, "run"), (values, "init_from"), (values["cluster"], "address")):
            if holder[key] is not None:
                holder[key] = public_url(holder[key])
        return values

    def digest(self) -> str:
        """32 hex digits over `public_dict`: the same in any process and for any order of keys."""
        text = json.dumps(self.public_dict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    @classmethod
    def from_dict(cls, values: object, *, source: Path | None = None) -> "Job":
        """A job from what `to_dict` or `public_dict` gave; `source` replaces the one in it.

        Raises JobError with all problems.
        """
        from rung.launcher.job_check import Where, validate

        if isinstance(values, dict) and isinstance(stored := values.get("source"), str):
            values = {key: value for key, value in values.items() if key != "source"}
            source = source or Path(stored)
        return validate(values, Where("stored job"), [], source or Path("job.yaml"))

    @classmethod
    def schema_json(cls) -> str:  # type: ignore[override]
        """JSON schema of the job file, for editors."""
        return json.dumps(cls.model_json_schema(), indent=2)


def public_url(url: str) -> str:
    """A URL without the user, password and query that may stand in it."""
    scheme, sep, rest = url.partition("://")
    if not sep:
        return url
    rest, mark, _ = rest.partition("?")
    host, slash, tail = rest.partition("/")
    if "@" in host:
        host = f"{MASK}@{host.rpartition('@')[2]}"
    return f"{scheme}://{host}{slash}{tail}{mark}{MASK if mark else ''}"


def _masked(value: object) -> object:
    if isinstance(value, dict):
        return {key: _masked(inner) for key, inner in value.items()}
    return value if isinstance(value, bool) or value is None else MASK


def _masked_env(env: dict[str, Any]) -> dict[str, Any]:
    return {key: _masked(value) if key == "env_vars" else value for key, value in env.items()}
