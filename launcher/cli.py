"""The command line: parses, calls, prints, and turns errors into exit codes. Nothing here decides anything."""

import errno
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from rung.launcher import cli_checkpoint, cli_plan
from rung.launcher.version import VERSION

app = typer.Typer(
    name="rung",
    help="Trains a PyTorch model on whatever hardware is there, and gets the job through when it does not fit.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(cli_checkpoint.app, name="checkpoint")
app.command()(cli_plan.plan)

JobPath = Annotated[Path, typer.Argument(metavar="JOB", help="The job file, such as job.yaml.")]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Overrides a field, such as optimizer.lr=0.01. May be repeated."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rung {VERSION}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Trains a PyTorch model on whatever hardware is there, and gets the job through when it does not fit."""


@app.command()
def launch(
    job: JobPath,
    sets: Sets = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and its reasons; start nothing.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Continue a run although its job has changed.")] = False,
    trial: Annotated[
        bool, typer.Option("--trial", help="Three steps, a save, a load and a validation, in a folder that goes away.")
    ] = False,
) -> None:
    """Train a job; on an existing run folder, continue it."""
    from rung.launcher.preload import prepare

    prepare()
    from rung.launcher import remote, run
    from rung.launcher.job import load
    from rung.launcher.watch.progress import View

    loaded = load(job, sets or ())
    if remote.is_remote(loaded):
        given = {"--dry-run": dry_run, "--force": force, "--trial": trial}
        raise typer.Exit(remote.submit(loaded, sets or (), [flag for flag, on in given.items() if on]))
    with View(every_s=loaded.log_every_s) as view:
        if trial:
            from rung.launcher.rehearsal import rehearse

            rehearse(loaded, view)
            return
        run.launch(loaded, run.Options(dry_run=dry_run, force=force), view)


@app.command()
def check(
    job: JobPath,
    sets: Sets = None,
    full: Annotated[bool, typer.Option("--full", help="Look at every sample, however many there are.")] = False,
    as_json: AsJson = False,
) -> None:
    """Look for what is wrong with a job's data; exit code 4 if something is."""
    from rung.launcher import check as checking

    checking.prepare()
    from rung.launcher.job import load
    from rung.launcher.watch.progress import View

    loaded = load(job, sets or ())
    with View(every_s=loaded.log_every_s, stream=sys.stderr if as_json else None) as view:
        stored = checking.check(loaded, view, full=full)
        if as_json:
            typer.echo(json.dumps(stored, indent=1))
        else:
            for line, level in checking.lines(stored):
                view.say(line, style={"error": "red", "warning": "yellow"}.get(level, ""))
    if checking.has_errors(stored):
        raise typer.Exit(4)


@app.command()
def hardware(as_json: AsJson = False) -> None:
    """Show the devices and memory that a run can use here, and what could not be read."""
    from rung.cluster.hardware import describe, probe, to_dict

    found = probe(folder=Path.cwd())
    if as_json:
        typer.echo(json.dumps(to_dict(found), indent=1))
        return
    for line in describe(found):
        typer.echo(line)


@app.command()
def doctor(
    job: Annotated[Path | None, typer.Argument(metavar="[JOB]", help="Also check what this job needs.")] = None,
    sets: Sets = None,
    as_json: AsJson = False,
    deadline: Annotated[float, typer.Option(min=5, help="Seconds that all checks may take.")] = 120.0,
) -> None:
    """Check the environment: versions, compilers, memory, disk, store, network; say what mends it."""
    from dataclasses import asdict

    from rung.launcher import doctor as doctoring
    from rung.launcher.job import load
    from rung.launcher.watch.findings import finding_lines
    from rung.launcher.watch.progress import View

    findings = doctoring.full(load(job, sets or ()) if job is not None else None, deadline_s=deadline)
    if as_json:
        typer.echo(json.dumps([asdict(f) for f in findings], indent=1))
    else:
        with View() as view:
            for text, style in map(finding_lines, findings):
                view.say(text, style=style)
    raise typer.Exit(doctoring.exit_code(findings))


@app.command()
def explain(
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="The run folder; the newest here if left out.")
    ] = None,
) -> None:
    """Say in one screen how a run ended: what happened, what was tried, what to change."""
    from rung.launcher import explain as explaining

    for line in explaining.explain(run or explaining.newest_run(Path.cwd())):
        typer.echo(line)


@app.command()
def init(folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write job.yaml and task.py.")]) -> None:
    """Write a small job and task that train at once."""
    from rung.launcher.init import init as write

    for path in write(folder):
        typer.echo(f"wrote {path}")
    typer.echo(f"now: rung launch {folder / 'job.yaml'}")


@app.command()
def schema() -> None:
    """Print the JSON schema of a job file, for editors."""
    from rung.launcher.job import Job

    typer.echo(Job.schema_json())


def main() -> None:
    """Entry point of the `rung` command."""
    from rung.strategies.errors import RungError, StorageError

    try:
        app(standalone_mode=True)
    except RungError as error:
        from rung.launcher.report import exit_code, show_error

        show_error(error)
        sys.exit(exit_code(error))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise
        sys.stderr.write(
            f"rung: {error.strerror}: {error.filename or 'the run folder'}\n  → free some space, and launch again\n"
        )
        sys.exit(StorageError.exit_code)
