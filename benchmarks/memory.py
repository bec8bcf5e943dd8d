"""Predicted against measured memory, for models of many kinds under every strategy.

    python -m benchmarks.memory [--only PART ...] [--strategies single,ddp,...] [--seconds 420] [--caps 3]
    python -m benchmarks.memory --table
    python -m benchmarks.memory --short

For each model, strategy and three micro-batches: what rung predicts for a worker under a cap, what a real worker took
above its baseline, and for every n-th of them (`--caps n`) whether it runs under a cap at the predicted value plus
headroom. What is measured is kept in build/memory.jsonl, so that a call goes on where the last one stopped; the table
predicts anew. Beside it, what `accelerate estimate-memory` and DeepSpeed's estimators say of the same model.
`--short` measures a few cases with nothing kept, in under a minute.
"""

import argparse
import hashlib
import sys
import time
from pathlib import Path

from benchmarks.memory_cases import Case
from benchmarks.memory_held_out import all_cases
from benchmarks.memory_measure import measure, profile_case
from benchmarks.memory_table import HEADER, Line, line_of, summary
from benchmarks.rows import Rows
from rung.strategies.memory import Account, predict
from rung.strategies.plan import Plan, StrategyName
from rung.strategies.profile import Profile

WAYS: dict[str, tuple[StrategyName, int]] = {
    "single": ("single", 1),
    "ddp": ("ddp", 2),
    "zero1": ("zero1", 2),
    "zero2": ("zero2", 2),
    "zero3": ("zero3", 2),
    "zero2+host": ("zero2", 2),
}
SHORT = {
    ("decoder 4M", "single"),
    ("CNN, BatchNorm", "single"),
    ("recommender", "single"),
    ("decoder, grouped query", "single"),
    ("MLP", "ddp"),
    ("encoder-decoder", "zero2"),
}
LARGE_CAP = 64 * 2**30


class Results(Rows):
    """What was measured so far."""

    def peak(self, key: tuple[str, str, int]) -> dict[str, object] | None:
        """The measurement without a tight cap, or None."""
        return next((row for row in self.rows if _key(row) == key and not row["cap"]), None)

    def verdict(self, key: tuple[str, str, int], cap: int) -> str:
        """`fits` under this cap or a lower one, the error under this one or a higher; empty if that is open."""
        for row in self.rows:
            tried = int(str(row["cap"]))
            if _key(row) == key and tried:
                if not row["error"] and tried <= cap:
                    return "fits"
                if row["error"] and tried >= cap:
                    return str(row["error"])
        return ""


def _key(row: dict[str, object]) -> tuple[str, str, int]:
    return str(row["case"]), str(row["way"]), int(str(row["micro"]))


def plan_of(case: Case, way: str, micro: int) -> Plan:
    """The plan of one row."""
    strategy, devices = WAYS[way]
    return Plan(
        strategy=strategy,
        device="cpu",
        devices=devices,
        global_batch=micro * devices,
        micro_batch=micro,
        activation_checkpointing=case.checkpointing,
        offload_optimizer="host" if way.endswith("host") else "none",
        memory_cap_bytes=LARGE_CAP,
    )


def predicted(profile: Profile, plan: Plan) -> tuple[int, int, Account]:
    """Bytes that the process takes, and with headroom: on a CPU all of it is one memory. No loader runs here, so what
    it prefetches is left out."""
    account = predict(profile, plan)
    prefetched = 2 * int(profile.input_bytes.at(plan.micro_batch))
    taken = account.host_peak_bytes - prefetched
    return taken, int(taken * (account.device_bytes_with_headroom / account.device_peak_bytes)), account


def profile_of(case: Case, folder: Path | None) -> Profile:
    """The case's profile, kept as long as nothing that makes it changes."""
    here = Path(__file__).resolve()
    made = [here.parents[1] / "strategies" / f"{n}.py" for n in ("trace", "ledger", "profile", "checkpointing")]
    digest = hashlib.blake2b(digest_size=8)
    for file in [*made, *here.parent.glob("memory_[ch]*.py")]:
        digest.update(file.read_bytes())
    kept = folder and folder / f"{case.name.replace(' ', '-')}-{digest.hexdigest()}.json"
    if kept and kept.is_file():
        return Profile.from_json(kept.read_text())
    profile = profile_case(case.name)
    if kept:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(profile.to_json())
    return profile


def run_rows(keys: list[tuple[Case, str, int]], results: Results, options: argparse.Namespace) -> None:
    """Measures what is still open, until the time is over."""
    until = time.monotonic() + options.seconds
    profiles = None if results.file is None else results.file.parent / "memory-profiles"
    # The middle size of each first, so that a part of the table says something of all.
    keys = sorted(keys, key=lambda key: key[2] != key[0].micro_batches[1])
    capped = keys[:: options.caps] if options.caps else []
    loose = [] if options.tight_only else keys
    for (case, way, micro), tight in [*((key, False) for key in loose), *((key, True) for key in capped)]:
        key, plan = (case.name, way, micro), plan_of(case, way, micro)
        if time.monotonic() > until:
            print(f"stopped after {options.seconds} s; call again to go on")
            return
        results.look()
        if tight and results.peak(key) is None:
            continue  # what was not measured yet has nothing to be set beside
        cap = predicted(profile_of(case, profiles), plan)[1] if tight else 0
        if results.verdict(key, cap) if tight else results.peak(key):
            continue
        found = measure(case.name, plan.with_(memory_cap_bytes=cap) if tight else plan)
        results.add(case=case.name, way=way, micro=micro, cap=cap, peak=found.peak_bytes, error=found.error,
                    step_s=found.step_s)  # fmt: skip


def table(keys: list[tuple[Case, str, int]], results: Results) -> list[Line]:
    """A line for whatever was measured."""
    profiles = None if results.file is None else results.file.parent / "memory-profiles"
    lines = []
    for case, way, micro in keys:
        key, plan = (case.name, way, micro), plan_of(case, way, micro)
        row = results.peak(key)
        if row is None:
            continue
        taken, headroom, _ = predicted(profile_of(case, profiles), plan)
        lines.append(
            line_of(case, way, plan, profile_of(case, profiles), taken, headroom, row, results.verdict(key, headroom))
        )
        print(lines[-1], flush=True)
    return lines


def main(arguments: list[str]) -> int:
    """Prints the table and the figures; 1 if they miss the marks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[""], help="names of models, or parts of them")
    parser.add_argument("--strategies", default=",".join(WAYS), help=f"of {','.join(WAYS)}")
    parser.add_argument("--seconds", type=float, default=420.0, help="start no measurement after so long")
    parser.add_argument("--caps", type=int, default=3, help="every n-th again under the predicted cap; 0: none")
    parser.add_argument("--tight-only", action="store_true", help="only again under caps what was measured before")
    parser.add_argument("--table", action="store_true", help="measure nothing, show what there is")
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--file", type=Path, default=Path("build/memory.jsonl"))
    options = parser.parse_args(arguments)
    ways = options.strategies.split(",")
    keys = [
        (case, way, micro)
        for case in all_cases()
        if any(part in case.name for part in options.only)
        for way in ways
        for micro in case.micro_batches
        if not options.short or ((case.name, way) in SHORT and micro == case.micro_batches[1])
    ]
    results = Results(None if options.short else options.file)
    if not options.table:
        run_rows(keys, results, options)
    print(HEADER)
    return summary(table(keys, results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
