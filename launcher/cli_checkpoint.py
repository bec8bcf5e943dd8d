"""`rung checkpoint ...`: look at, verify, prune and export the checkpoints of a run."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rung.launcher.storage import Store

app = typer.Typer(help="Look at, verify, prune and export the checkpoints of a run.", no_args_is_help=True)

RunUrl = Annotated[str, typer.Argument(metavar="RUN", help="The run folder: a path or any fsspec URL.")]
Step = Annotated[int | None, typer.Option("--step", help="The checkpoint of this step; the newest if left out.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Option = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="KEY=VALUE", help="An fsspec option of the store, such as anon=true."),
]


def _open(url: str, options: list[str] | None) -> "Store":
    from rung.launcher.checkpoint.find import find_all
    from rung.launcher.storage import Store
    from rung.strategies.errors import JobError

    store = Store.open(url, read_options(options or []))
    if not store.exists("job.json") and not find_all(store):
        raise JobError(f"{store.url} is not a run folder: it has no job.json and no checkpoints")
    return store


def read_options(pairs: list[str]) -> dict[str, Any]:
    """`a.b=1` becomes {"a": {"b": 1}}; values are JSON where they can be, else text. Raises JobError."""
    from rung.strategies.errors import JobError

    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not (key and equals):
            raise JobError(f"--option {pair}: write KEY=VALUE, as in anon=true")
        holder = found
        *path, name = key.split(".")
        for part in path:
            holder = holder.setdefault(part, {})
        try:
            holder[name] = json.loads(text)
        except ValueError:
            holder[name] = text
    return found


@app.command()
def ls(run: RunUrl, as_json: AsJson = False, option: Option = None) -> None:
    """List the checkpoints of a run, newest first."""
    from rung.launcher.checkpoint.find import find_all
    from rung.launcher.watch.progress import size

    infos = find_all(_open(run, option))
    if as_json:
        names = ("step", "folder", "committed", "total_bytes", "files")
        typer.echo(json.dumps([{n: getattr(i, n) for n in names} for i in infos], indent=1))
        return
    for i in infos:
        left = "" if i.committed else "  (left over, never committed)"
        typer.echo(f"step {i.step:>9,}  {size(i.total_bytes):>9}  {i.files:>4} files  {i.folder}{left}")
    if not infos:
        typer.echo("no checkpoints")


@app.command()
def verify(run: RunUrl, step: Step = None, option: Option = None) -> None:
    """Read every byte of one checkpoint, or of all, and compare it with the hashes; exit code 6 if damaged."""
    from rung.launcher.checkpoint import inspect
    from rung.launcher.checkpoint.find import find
    from rung.launcher.watch.progress import size

    store = _open(run, option)
    infos = [inspect.choose(store, step)] if step is not None else (find(store) or [inspect.choose(store)])
    checks = [inspect.verify(store, info) for info in infos]
    for check in checks:
        state = "whole" if check.whole else "DAMAGED"
        typer.echo(f"step {check.step:>9,}  {size(check.verified_bytes):>9}  {state}")
        for line in check.damage:
            typer.echo(f"  {line}")
    if not all(check.whole for check in checks):
        raise typer.Exit(6)


@app.command()
def show(run: RunUrl, step: Step = None, as_json: AsJson = False, option: Option = None) -> None:
    """Show what one checkpoint says about itself."""
    from rung.launcher.checkpoint import inspect
    from rung.launcher.watch.progress import size

    store = _open(run, option)
    found = inspect.show(store, inspect.choose(store, step))
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    made = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found["created_s"]))
    typer.echo(f"step {found['step']:,}, epoch {found['epoch']}, sample {found['position']:,}, made {made}")
    typer.echo(f"by {found['strategy']} on {found['world_size']}, global batch {found['global_batch']}")
    typer.echo(f"{size(found['bytes'])} in {found['files']} files, {'healthy' if found['healthy'] else 'NOT healthy'}")
    for name, value in found["metrics"].items():
        typer.echo(f"{name} {value:.6g}")
    for name, tensor in found["tensors"].items():
        typer.echo(f"  {name}  {tensor['dtype']}{tensor['shape']}  {_pieces(tensor)}")


@app.command()
def prune(
    run: RunUrl, keep: Annotated[int, typer.Option(min=1, help="How many to keep.")] = 3, option: Option = None
) -> None:
    """Delete all but the newest checkpoints; the newest healthy one always stays. Refused while the run is in use."""
    from rung.launcher.checkpoint import retention
    from rung.launcher.checkpoint.lease import Lease

    store = _open(run, option)
    with Lease.acquire(store):
        deleted = retention.prune(store, keep=keep) + retention.sweep(store)
    for name in deleted:
        typer.echo(f"deleted {name}")


@app.command()
def export(
    run: RunUrl,
    to: Annotated[str, typer.Option("--to", metavar="FOLDER", help="Where to write; a path or any fsspec URL.")],
    step: Step = None,
    option: Option = None,
) -> None:
    """Write the model as plain safetensors, with config.json if the task names one (`hf_config`)."""
    from rung.launcher.checkpoint import inspect
    from rung.launcher.checkpoint.manifest import Manifest
    from rung.launcher.storage import Store

    store = _open(run, option)
    info = inspect.choose(store, step)
    config: Any = Manifest.read(store, info.folder).trainer.get("hf_config")
    for name in inspect.export(store, info, Store.open(to), config=config):
        typer.echo(f"wrote {Path(to) / name if '://' not in to else f'{to}/{name}'}")


def _pieces(tensor: dict[str, Any]) -> str:
    return f"in {tensor['pieces']} pieces" if tensor["pieces"] != 1 else ""
