"""Starting from given weights: compares them with the model, name by name, before anything is copied."""

import difflib
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from rung.launcher.checkpoint.weights import Shapes, Weights, open_weights
from rung.strategies.errors import JobError
from rung.strategies.shards import Interval

_PREFIX = "model/"
_THREADS = 4
_SHOWN = 20  # rows of the table


@dataclass(frozen=True, kw_only=True, slots=True)
class Mismatch:
    """One row: `kind` is missing (the model has it, the weights do not), unexpected, or shape."""

    kind: str
    name: str
    model_shape: tuple[int, ...] | None = None
    given_shape: tuple[int, ...] | None = None
    nearest: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """How weights fit a model. `refused` are the mismatches that no pattern allows; `names` maps each name of the
    model to the one it is loaded from."""

    names: Mapping[str, str]
    allowed: tuple[Mismatch, ...]
    refused: tuple[Mismatch, ...]


def compare(
    model: Shapes, given: Shapes, *, allow_mismatch: Sequence[str] = (), aliases: Mapping[str, str] | None = None
) -> Comparison:
    """Compares names and shapes; names have no `model/` in front.

    allow_mismatch: names or patterns (`head.*`, `*.bias`) of what may differ. aliases: other names of tied weights,
    each to the model's; they may stand in for it, and are not unexpected.
    """
    aliases = aliases or {}
    stand_ins = {target: other for other, target in aliases.items() if other in given}
    names: dict[str, str] = {}
    rows: list[Mismatch] = []
    spare = sorted(set(given) - set(model) - set(aliases))
    for name, shape in model.items():
        source = name if name in given else stand_ins.get(name)
        if source is None:
            rows.append(
                Mismatch(kind="missing", name=name, model_shape=shape, nearest=_nearest(name, shape, spare, given))
            )
        elif tuple(given[source]) != tuple(shape):
            rows.append(Mismatch(kind="shape", name=name, model_shape=shape, given_shape=given[source]))
        else:
            names[name] = source
    absent = [row.name for row in rows if row.kind == "missing"]
    for name in spare:
        near = _nearest(name, given[name], absent, model)
        rows.append(Mismatch(kind="unexpected", name=name, given_shape=given[name], nearest=near))
    allowed = tuple(r for r in rows if any(r.name == p or fnmatchcase(r.name, p) for p in allow_mismatch))
    refused = tuple(r for r in rows if r not in set(allowed))
    return Comparison(names=names, allowed=allowed, refused=refused)


def table(rows: Sequence[Mismatch]) -> str:
    """The mismatches as lines of text, the worst kind first, at most twenty of each kind."""
    lines: list[str] = []
    for kind, title in (
        ("shape", "another shape"),
        ("missing", "missing in the weights"),
        ("unexpected", "not in the model"),
    ):
        some = [r for r in rows if r.kind == kind]
        if not some:
            continue
        lines.append(f"{title} ({len(some)}):")
        width = min(60, max(len(r.name) for r in some[:_SHOWN]))
        lines.extend(f"  {row.name:<{width}}  {_facts(row)}" for row in some[:_SHOWN])
        if len(some) > _SHOWN:
            lines.append(f"  ... and {len(some) - _SHOWN} more")
    return "\n".join(lines)


def load_weights(
    url: str,
    intervals: Sequence[Interval],
    allow_mismatch: Sequence[str] = (),
    *,
    options: Mapping[str, Any] | None = None,
    model: Shapes | None = None,
    aliases: Mapping[str, str] | None = None,
) -> Comparison:
    """Fills the `model/` intervals from the weights at `url` (see `open_weights`); optimizer state stays as it is.

    model: names and shapes of the whole model; needed where one rank's intervals do not show all of it. Raises
    `JobError` with the table of mismatches, before anything is copied, unless patterns of `allow_mismatch` allow them.
    """
    mine = [i for i in intervals if i.name.startswith(_PREFIX)]
    whole = model if model is not None else {i.name.removeprefix(_PREFIX): tuple(i.shape) for i in mine}
    weights = open_weights(url, options)
    comparison = compare(whole, weights.shapes, allow_mismatch=allow_mismatch, aliases=aliases)
    if comparison.refused:
        raise JobError(
            f"init_from: the weights do not fit the model\n{table(comparison.refused)}",
            hint=f"other weights, or allow_mismatch: [{_suggestion(comparison.refused)}] to start these from scratch",
        )
    _fill(weights, mine, comparison.names)
    return comparison


def _fill(weights: Weights, intervals: Sequence[Interval], names: Mapping[str, str]) -> None:
    todo = [(names[n], i) for i in intervals if (n := i.name.removeprefix(_PREFIX)) in names and i.data.numel()]
    with ThreadPoolExecutor(max_workers=_THREADS) as pool:
        for _ in pool.map(lambda each: weights.read(each[0], each[1].start, each[1].data), todo):
            pass


def _nearest(name: str, shape: tuple[int, ...], candidates: Sequence[str], shapes: Shapes) -> str:
    """The most similar candidate, one of the same shape if there is any."""
    same = [c for c in candidates if tuple(shapes[c]) == tuple(shape)]
    ending = name.rpartition(".")[2]
    pool = [c for c in same or candidates if c.rpartition(".")[2] == ending][:200] or list(same or candidates)[:200]
    found = difflib.get_close_matches(name, pool, n=1, cutoff=0.5)
    return found[0] if found else ""


def _facts(row: Mismatch) -> str:
    if row.kind == "shape":
        return f"model {list(row.model_shape or ())}, weights {list(row.given_shape or ())}"
    shape = list(row.model_shape or row.given_shape or ())
    return f"{shape}, nearest: {row.nearest}" if row.nearest else str(shape)


def _suggestion(rows: Sequence[Mismatch]) -> str:
    """Patterns that would allow these rows: one for each module at the top."""
    tops = dict.fromkeys(re.split(r"\.", r.name)[0] + (".*" if "." in r.name else "") for r in rows)
    return ", ".join(f'"{top}"' for top in list(tops)[:5])
