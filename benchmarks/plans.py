"""Whether the plan that rung chooses is the fastest: its measured step against the best of all that were measured.

    python -m benchmarks.plans [--held-out] [--only PART ...] [--seconds 250] [--table]

For each model, batch and cap: the ways of training that fit on this CPU (one process on all cores or one on each core,
with two sizes of micro-batch, with and without activation checkpointing, ZeRO) take a few real steps each, in turns,
and the step of the ladder's first is set beside the shortest: the better of the turns' medians, since other programs
only ever make it longer. What is measured is kept in build/plans.jsonl;
the table plans anew. Run it on a machine that does nothing else.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace

from benchmarks.memory import profile_of
from benchmarks.memory_held_out import find
from benchmarks.memory_measure import measure
from benchmarks.rows import Rows
from rung.cluster.hardware import probe
from rung.launcher.machines import inventory_of, usable_cores
from rung.launcher.planner import Ladder, plan_ladder
from rung.launcher.speeds import speed_from_json
from rung.launcher.trials import candidates
from rung.strategies.errors import DoesNotFit
from rung.strategies.memory import MIB
from rung.strategies.plan import Plan
from rung.strategies.speed import Speed, measure_speed

WITHIN, SHARE = 1.10, 0.90
TURNS, STEPS = 2, 4


@dataclass(frozen=True)
class Question:
    """A model, its global batch, and a cap in MiB (0: none)."""

    case: str
    batch: int
    cap_mib: int = 0


QUESTIONS = (
    Question("decoder 4M", 16),
    Question("decoder 4M", 16, 200),
    Question("decoder 14M", 8),
    Question("decoder 14M", 8, 310),
    Question("CNN, BatchNorm", 16),
    Question("CNN, BatchNorm", 16, 190),
    Question("ViT", 16),
    Question("ViT", 16, 300),
    Question("MLP", 256),
    Question("MLP", 1024, 420),
    Question("recommender", 1024),
    Question("U-Net", 4),
    Question("U-Net", 4, 150),
    Question("decoder, grouped query", 4),
    Question("encoder-decoder", 8, 420),
    Question("Mixer", 16),
    Question("Mixer", 16, 300),
    Question("GRU, both ways", 16),
)
# Asked after everything that decides was written down.
HELD_OUT = (
    Question("decoder 4M", 32, 300),
    Question("decoder 30M, dropout", 4),
    Question("decoder, tied", 8),
    Question("decoder, tied", 8, 400),
    Question("decoder, LoRA", 8),
    Question("decoder, LoRA", 8, 270),
    Question("encoder", 8),
    Question("CNN, SGD", 32),
    Question("CNN, SGD", 32, 190),
    Question("LSTM", 16),
    Question("LSTM", 16, 310),
    Question("audio, Conv1d", 2),
    Question("CNN, depthwise", 12),
    Question("CNN, depthwise", 12, 450),
    Question("autoencoder, RMSprop", 16),
)


class Results(Rows):
    """Measured steps by question and plan, and the machine's speed when they were taken."""

    def speed(self) -> Speed:
        """Measured once for all."""
        for row in reversed(self.rows):
            if "speed" in row:
                return speed_from_json(json.dumps(row["speed"])).steadied
        found = measure_speed(usable_cores(probe()))
        self.add(speed=asdict(found))
        return found.steadied

    def steps(self, question: Question, plan: Plan) -> list[float]:
        """The median step of each turn."""
        name = _name(question, plan)
        return [float(str(row["step_s"])) for row in self.rows if row.get("name") == name and row["step_s"]]


def _name(question: Question, plan: Plan) -> str:
    checkpointing = plan.activation_checkpointing
    way = f"{plan.strategy}@{plan.devices} micro {plan.micro_batch}{' checkpointed' if checkpointing else ''}"
    return f"{question.case} | {question.batch} | {question.cap_mib} | {way}"


def ladder_of(question: Question, speed: Speed) -> Ladder:
    """As `rung plan` makes it on this machine."""
    profile = profile_of(find(question.case), Path("build/memory-profiles"))
    devices = SimpleNamespace(count="auto", memory=question.cap_mib * MIB or "auto", type="cpu")
    job = SimpleNamespace(batch=question.batch, strategy="auto", precision="auto", devices=devices)
    return plan_ladder(job, inventory_of(probe(), speed), profile)


def worth_measuring(ladder: Ladder) -> Iterator[Plan]:
    """The ladder's first, and of each way of training the two largest micro-batches (of slow ways, the largest)."""
    yield ladder.best
    seen: dict[tuple[object, ...], int] = {}
    for plan in sorted(ladder.plans, key=lambda p: -p.micro_batch):
        way = (plan.strategy, plan.devices, plan.activation_checkpointing)
        slow = plan.activation_checkpointing or plan.zero_stage
        if plan.zero_stage > 1 or "disk" in (plan.offload_optimizer, plan.offload_parameters):
            continue
        if plan.zero_stage and plan.activation_checkpointing:
            continue
        seen[way] = seen.get(way, 0) + 1
        if seen[way] <= (1 if slow else 2) and plan.rung != ladder.best.rung:
            yield plan


def run(questions: list[Question], results: Results, seconds: float) -> None:
    """Takes what is missing, a turn of every plan after the other."""
    until = time.monotonic() + seconds
    speed = results.speed()
    for question in questions:
        try:
            plans = list(worth_measuring(ladder_of(question, speed)))
        except DoesNotFit as error:
            print(f"{question}: {error}")
            continue
        for turn in range(TURNS):
            for plan in plans:
                if len(results.steps(question, plan)) > turn:
                    continue
                if time.monotonic() > until:
                    print(f"stopped after {seconds} s; call again to go on")
                    return
                found = measure(question.case, plan, steps=STEPS)
                results.add(name=_name(question, plan), step_s=found.step_s, error=found.error, peak=found.peak_bytes)


def table(questions: list[Question], results: Results) -> int:
    """Prints a line for each question; 1 if the mark is missed."""
    speed, ratios, off, picked = results.speed(), [], [], []
    print(f"{'model':26} {'batch':>5} {'cap':>5}  {'chosen':28} {'predicted':>9} {'measured':>9}  {'best':28} ratio")
    for question in questions:
        try:
            ladder = ladder_of(question, speed)
        except DoesNotFit:
            continue
        took = {plan.rung: min(s) for plan in ladder.plans if (s := results.steps(question, plan))}
        if ladder.best.rung not in took:
            continue
        plans = [plan for plan in ladder.plans if plan.rung in took]
        best = min(plans, key=lambda plan: took[plan.rung])
        ratios.append(took[ladder.best.rung] / took[best.rung])
        off += [(plan.predicted_step_s or 0.0) / took[plan.rung] for plan in plans]
        chosen, other = (_name(question, plan).split(" | ")[-1] for plan in (ladder.best, best))
        print(
            f"{question.case:26} {question.batch:5} {question.cap_mib or '-':>5}  {chosen:28} "
            f"{ladder.best.predicted_step_s:9.3f} {took[ladder.best.rung]:9.3f}  {other:28} {ratios[-1]:.2f}"
            + (" (within noise)" if 1 < ratios[-1] <= 1 + _noise(question, (ladder.best, best), results) else "")
        )
        if (tried := _measured_pick(question, ladder, results)) is not None:
            picked.append(tried)
    if not ratios:
        print("nothing was measured")
        return 1
    good = sum(ratio <= WITHIN for ratio in ratios) / len(ratios)
    near = sum(0.5 <= value <= 2 for value in off) / len(off)
    print(
        f"\nchosen within 10% of the best in {good:.0%} of {len(ratios)} cases (mark {SHARE:.0%}), worst "
        f"{max(ratios):.2f}\npredicted step over measured, {len(off)} plans: median {statistics.median(off):.2f}, "
        f"from {min(off):.2f} to {max(off):.2f}, within twice {near:.0%}"
    )
    if picked:
        print(
            f"--measure (the first turn picks among its candidates, the second judges): within 10% in "
            f"{sum(ratio <= WITHIN for ratio in picked) / len(picked):.0%} of {len(picked)}, worst {max(picked):.2f}"
        )
    return int(good < SHARE)


def _noise(question: Question, plans: tuple[Plan, ...], results: Results) -> float:
    """How far the turns of the same plan lie apart, as a part of the shorter; the larger of several plans."""
    return max(max(steps) / min(steps) - 1 for plan in plans if (steps := results.steps(question, plan)))


def _measured_pick(question: Question, ladder: Ladder, results: Results) -> float | None:
    """What `--measure` would take by the first turn, against the best, both by the second; None where that lacks."""
    turns = {plan.rung: s for plan in ladder.plans if len(s := results.steps(question, plan)) > 1}
    tried = [plan.rung for plan in candidates(ladder) if plan.rung in turns]
    if not tried:
        return None
    pick = min(tried, key=lambda rung: turns[rung][0])
    return turns[pick][1] / min(steps[1] for steps in turns.values())


def main(arguments: list[str]) -> int:
    """Measures what is missing and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[""], help="names of models, or parts of them")
    parser.add_argument("--seconds", type=float, default=250.0, help="start no measurement after so long")
    parser.add_argument("--held-out", action="store_true", help="the questions that nothing was fitted on")
    parser.add_argument("--table", action="store_true", help="measure nothing, show what there is")
    parser.add_argument("--file", type=Path, default=Path("build/plans.jsonl"))
    options = parser.parse_args(arguments)
    asked = HELD_OUT if options.held_out else QUESTIONS
    questions = [q for q in asked if any(part in q.case for part in options.only)]
    results = Results(options.file)
    if not options.table:
        run(questions, results, options.seconds)
    return table(questions, results)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
