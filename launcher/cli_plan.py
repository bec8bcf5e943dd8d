"""`rung plan`: every way to train a job, as a table, with the reasons; nothing is started but to trace or measure."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rung.launcher.planner import Ladder
    from rung.launcher.watch.progress import View


def plan(
    job: Annotated[Path, typer.Argument(metavar="JOB", help="The job file, such as job.yaml.")],
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Overrides a field. May be repeated.")
    ] = None,
    hardware: Annotated[
        Path | None, typer.Option("--hardware", metavar="FILE", help="Plan for the machines that this file describes.")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Run the first few for some steps, and take the fastest.")
    ] = False,
    all_rungs: Annotated[bool, typer.Option("--all", help="Show every micro-batch of each way of training.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show every way to train a job: predicted memory and time, what fits and why not, and which is chosen."""
    from rung.launcher.preload import PRELOAD, prepare

    prepare()
    import sys

    from rung.cluster.catalog import parse_hardware
    from rung.launcher.job import load, read_mapping
    from rung.launcher.ladder import make_ladder
    from rung.launcher.plan_view import as_json as plain_values
    from rung.launcher.watch.progress import View
    from rung.launcher.workers import fleet_of
    from rung.strategies.errors import JobError

    if measure and hardware is not None:
        raise JobError("--measure runs on the machines that are here, --hardware describes others", hint="use one")
    if hardware is not None and not hardware.is_file():
        raise JobError(
            f"--hardware {hardware}: there is no such file", hint="it has lines such as devices: 8 x H100-80G"
        )
    loaded = load(job, sets or ())
    with View(stream=sys.stderr if as_json else None) as view, fleet_of(loaded, view, PRELOAD) as fleet:
        machines = parse_hardware(read_mapping(hardware), str(hardware)) if hardware is not None else fleet.machines()
        ladder = make_ladder(fleet.planned(loaded), machines, view, always=True)
        if measure:
            from rung.launcher.trials import measure as run_some
            from rung.launcher.watch.progress import size

            ladder, found = run_some(loaded, ladder, fleet)
            for m in found:
                took = f"{m.step_s:.3g} s a step, peak {size(m.peak_bytes)}" if m.step_s is not None else m.failure
                view.say(f"measured   {m.plan.describe()}: {took}")
        if as_json:
            typer.echo(json.dumps(plain_values(ladder), indent=1))
            return
        _print(view, ladder, all_rungs)


def _print(view: "View", ladder: "Ladder", all_rungs: bool) -> None:
    """A table in plain text, so that it reads the same in a log; what makes no sense at all only with --all."""
    from rung.launcher.plan_view import HEADER, rows
    from rung.launcher.report import show_plan

    found = rows(ladder, all_rungs=all_rungs)
    shown = [row for row in found if all_rungs or row[-1] in ("yes", "not known") or "needs" in row[-1]]
    widths = [max(len(row[i]) for row in (HEADER, *shown)) for i in range(len(HEADER) - 1)]
    for row in (HEADER, *shown):
        cells = [cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=True)]
        style = "bold" if row[0] else ("" if row[-1] in ("yes", "fits") else "dim")
        view.say("  ".join([*cells, row[-1]]).rstrip(), style=style)
    if len(shown) < len(found):
        view.say(
            f"    and {len(found) - len(shown)} more ways that do not apply here; --all shows them and why", style="dim"
        )
    show_plan(view, ladder)
    for note in ladder.notes:
        view.say(f"           {note}", style="dim")
