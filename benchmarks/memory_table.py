"""The rows and figures of `benchmarks.memory`, with what other tools say of the same models."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.memory_cases import Case
from rung.strategies.memory import MIB
from rung.strategies.plan import Plan
from rung.strategies.profile import Profile

MEAN_ERROR = 0.05
UNUSED = 0.10
HEADER = (
    f"{'model':25} {'strategy':10} {'micro':>5} {'predicted':>9} {'measured':>9} {'error':>7} {'unused':>7} "
    f"{'accelerate':>11} {'deepspeed':>10}  under the cap (MiB above the baseline; *: used in fitting)"
)


@dataclass(frozen=True, kw_only=True)
class Line:
    """One row of the table, in MiB."""

    name: str
    way: str
    micro_batch: int
    fitted: bool
    predicted: float
    headroom: float
    measured: float
    accelerate: float
    deepspeed: float
    under_cap: str

    @property
    def error(self) -> float:
        """Relative, of what was measured."""
        return self.predicted / self.measured - 1 if self.measured else float("nan")

    @property
    def unused(self) -> float:
        """The part of what must be free that is never touched."""
        return 1 - self.measured / self.headroom

    def __str__(self) -> str:
        """A row."""
        return (
            f"{self.name + '*' * self.fitted:25} {self.way:10} {self.micro_batch:5} {self.predicted:9.0f} "
            f"{self.measured:9.0f} {self.error:+7.1%} {self.unused:7.1%} {self.accelerate:11.0f} "
            f"{self.deepspeed:10.0f}  {self.under_cap}"
        )


def line_of(
    case: Case, way: str, plan: Plan, profile: Profile, taken: int, headroom: int, row: Mapping[str, object], under: str
) -> Line:
    """The row for one measurement."""
    return Line(
        name=case.name,
        way=way,
        micro_batch=plan.micro_batch,
        fitted=case.fitted,
        predicted=taken / MIB,
        headroom=headroom / MIB,
        measured=float(str(row["peak"])) / MIB,
        accelerate=accelerate_mib(case),
        deepspeed=deepspeed_mib(profile, plan),
        under_cap=str(row["error"]) or under,
    )


def accelerate_mib(case: Case) -> float:
    """What `accelerate estimate-memory` prints as "Training using Adam" for fp32 weights, by its own functions."""
    from accelerate import init_empty_weights
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    with init_empty_weights():
        model = case.model()
    size, _ = calculate_maximum_sizes(model)
    return float(max(estimate_training_usage(size, "float32").values())) / MIB


def deepspeed_mib(profile: Profile, plan: Plan) -> float:
    """DeepSpeed's own estimate for a device (and for a worker's host memory, with offload); none for single and ddp.
    Its buffer factor of 1.5 is left as it is."""
    if not plan.zero_stage:
        return float("nan")
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    total, offload = profile.parameter_count, plan.offload_optimizer != "none"
    if plan.zero_stage < 3:
        host, device = estimate_zero2_model_states_mem_needs(
            total_params=total, num_gpus_per_node=plan.devices, cpu_offload=offload
        )
    else:
        host, device, _ = estimate_zero3_model_states_mem_needs(
            total_params=total,
            largest_layer_params=profile.largest_parameter,
            num_gpus_per_node=plan.devices,
            cpu_offload=offload,
            cpu_offload_params=False,
        )
    return float(device + (host / plan.devices if offload else 0)) / MIB


def summary(lines: Sequence[Line]) -> int:
    """Prints the figures of a table: 0 if the marks are met."""
    good = [line for line in lines if line.measured]
    if not good:
        print("nothing was measured")
        return 1
    print(f"\n{len({line.name for line in good})} models, {len(good)} cases")
    for name, of in (
        ("all", good),
        ("used in fitting", [line for line in good if line.fitted]),
        ("held out", [line for line in good if not line.fitted]),
        *((way, [line for line in good if line.way == way]) for way in dict.fromkeys(line.way for line in good)),
    ):
        if of:
            print(f"{name:16} {_figures(of)}")
    failed = [line for line in lines if line.under_cap not in ("", "fits")]
    tried = [line for line in lines if line.under_cap]
    print(f"under a cap at prediction plus headroom: {len(tried) - len(failed)} of {len(tried)} tried ran")
    theirs = statistics.fmean(abs(line.accelerate / line.measured - 1) for line in good)
    zero = [abs(line.deepspeed / line.measured - 1) for line in good if line.deepspeed == line.deepspeed]
    print(f"mean error of accelerate {theirs:.0%}" + (f", of deepspeed {statistics.fmean(zero):.0%}" if zero else ""))
    error = statistics.fmean(abs(line.error) for line in good)
    unused = statistics.fmean(line.unused for line in good)
    return int(error > MEAN_ERROR or unused > UNUSED or bool(failed))


def _figures(lines: Sequence[Line]) -> str:
    errors = sorted(abs(line.error) for line in lines)
    unused = statistics.fmean(line.unused for line in lines)
    over = sum(line.measured > line.headroom for line in lines)
    return (
        f"mean error {statistics.fmean(errors):.1%} (mark {MEAN_ERROR:.0%}), median {statistics.median(errors):.1%}, "
        f"worst {errors[-1]:.1%}; unused {unused:.1%} (mark {UNUSED:.0%}); {over} of {len(lines)} above headroom"
    )
