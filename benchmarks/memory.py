"""Predicted against measured memory: `python -m benchmarks.memory [--short] [--strategies single,ddp,...] [CASE ...]`.

For each kind of model, strategy and three micro-batches: what rung predicts for a worker under a cap, what a real
worker took above its baseline, whether it then runs under a cap at the predicted value plus headroom, and what
`accelerate estimate-memory` (its formula: 4 times the weights under Adam) and DeepSpeed's estimators say of the same.
`--short` takes one micro-batch of a few cases, in under a minute.
"""

import argparse
import statistics
import sys
import time
from dataclasses import dataclass

from benchmarks.memory_cases import Case, all_cases
from benchmarks.memory_measure import measure
from rung.strategies.memory import MIB, predict
from rung.strategies.plan import Plan, StrategyName
from rung.strategies.profile import Profile
from rung.strategies.trace import profile_task

SHORT = ("decoder 4M", "CNN, BatchNorm", "MLP", "recommender")
ALL: tuple[StrategyName, ...] = ("single", "ddp", "zero1", "zero2", "zero3")
LARGE_CAP = 64 * 2**30
MEAN_ERROR = 0.05
UNUSED = 0.10


@dataclass(frozen=True, kw_only=True)
class Line:
    """One row of the table, in MiB."""

    name: str
    strategy: str
    micro_batch: int
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
            f"{self.name:24} {self.strategy:7} {self.micro_batch:5} {self.predicted:9.0f} {self.measured:9.0f} "
            f"{self.error:+7.1%} {self.unused:7.1%} {self.accelerate:11.0f} {self.deepspeed:10.0f}  {self.under_cap}"
        )


def accelerate_mib(profile: Profile) -> float:
    """What `accelerate estimate-memory` prints for training with Adam: 4 times the weights (commands/estimate.py)."""
    return 4 * profile.weight_bytes / MIB


def deepspeed_mib(profile: Profile, plan: Plan) -> float:
    """DeepSpeed's own estimate for a GPU; none for single and ddp. Its buffer factor of 1.5 is left as it is."""
    if not plan.zero_stage:
        return float("nan")
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    total = profile.parameter_count
    if plan.zero_stage < 3:
        _, device = estimate_zero2_model_states_mem_needs(
            total_params=total, num_gpus_per_node=plan.devices, cpu_offload=False
        )
    else:
        _, device, _ = estimate_zero3_model_states_mem_needs(
            total_params=total,
            largest_layer_params=profile.largest_parameter,
            num_gpus_per_node=plan.devices,
            cpu_offload=False,
            cpu_offload_params=False,
        )
    return device / MIB


def compare(number: int, case: Case, strategies: tuple[StrategyName, ...], *, short: bool, caps: bool) -> list[Line]:
    """All rows of one case."""
    profile = profile_task(case, case.make_optimizer, case.sample)
    lines = []
    for strategy in strategies:
        devices = 1 if strategy == "single" else 2
        for micro in case.micro_batches[1:2] if short else case.micro_batches:
            plan = Plan(
                strategy=strategy,
                device="cpu",
                devices=devices,
                global_batch=micro * devices,
                micro_batch=micro,
                activation_checkpointing=case.checkpointing,
                memory_cap_bytes=LARGE_CAP,
            )
            account = predict(profile, plan)
            found = measure(number, plan)
            under = ""
            if caps and not found.error:
                capped = measure(number, plan.with_(memory_cap_bytes=account.device_bytes_with_headroom), steps=2)
                under = capped.error or "fits"
            lines.append(
                Line(
                    name=case.name,
                    strategy=strategy,
                    micro_batch=micro,
                    predicted=account.device_peak_bytes / MIB,
                    headroom=account.device_bytes_with_headroom / MIB,
                    measured=found.peak_bytes / MIB,
                    accelerate=accelerate_mib(profile),
                    deepspeed=deepspeed_mib(profile, plan),
                    under_cap=found.error or under,
                )
            )
            print(lines[-1], flush=True)
    return lines


def main(arguments: list[str]) -> int:
    """Prints the table and the figures; 1 if they miss the marks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="names, or parts of names; all if none")
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--no-caps", action="store_true", help="do not run again under the predicted cap")
    parser.add_argument("--strategies", default="")
    options = parser.parse_args(arguments)
    strategies = tuple(options.strategies.split(",")) if options.strategies else ("single",) if options.short else ALL
    wanted = options.cases or (SHORT if options.short else [""])
    began = time.monotonic()
    header = f"{'model':24} {'':7} {'micro':>5} {'predicted':>9} {'measured':>9} {'error':>7} {'unused':>7}"
    print(f"{header} {'accelerate':>11} {'deepspeed':>10}  under the cap (MiB above the baseline)")
    lines: list[Line] = []
    for number, case in enumerate(all_cases()):
        if any(part in case.name for part in wanted):
            lines += compare(number, case, strategies, short=options.short, caps=not options.no_caps)
    return verdict(lines, time.monotonic() - began)


def verdict(lines: list[Line], seconds: float) -> int:
    """The figures of a table."""
    good = [line for line in lines if line.measured]
    if not good:
        print("nothing was measured")
        return 1
    error = statistics.fmean(abs(line.error) for line in good)
    unused = statistics.fmean(line.unused for line in good)
    failed = [line for line in lines if line.under_cap not in ("", "fits")]
    theirs = statistics.fmean(abs(line.accelerate / line.measured - 1) for line in good)
    zero = [abs(line.deepspeed / line.measured - 1) for line in good if line.deepspeed == line.deepspeed]
    print(f"\n{len(good)} cases in {seconds:.0f} s: mean error {error:.1%} (mark {MEAN_ERROR:.0%}), worst", end=" ")
    print(f"{max(abs(line.error) for line in good):.1%}; unused {unused:.1%} (mark {UNUSED:.0%}); {len(failed)} failed")
    print(f"mean error of accelerate {theirs:.0%}" + (f", of deepspeed {statistics.fmean(zero):.0%}" if zero else ""))
    return int(error > MEAN_ERROR or unused > UNUSED or bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
