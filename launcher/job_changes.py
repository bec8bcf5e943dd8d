"""What may change in a job between two launches of the same run. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rung.launcher.job_values import Job


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One field that differs. `allowed` says whether a run goes on with it without `--force`."""

    field: str
    old: object
    new: object
    allowed: bool
    reason: str


_STEPS = "the end moves; the rate of the steps still to come is that of the new length"
_HARDWARE = "only how the batch is cut and where it is computed changes"
_MATHS = "the steps already done were made with the old value, so the result would be neither the one nor the other"

# The longest prefix of a field's name decides.
_RULES: dict[str, tuple[bool, str]] = {
    "steps": (True, _STEPS),
    "epochs": (True, _STEPS),
    "run": (True, "the folder may be named differently or have moved"),
    "checkpoint": (True, "only what is saved, and when, changes"),
    "devices": (True, _HARDWARE),
    "strategy": (True, _HARDWARE),
    "strategy.sync_batchnorm": (False, _MATHS),
    "cluster": (True, _HARDWARE),
    "fallback": (True, _HARDWARE),
    "precision": (True, "weights and optimizer state are kept in full precision; only later steps round differently"),
    "data.workers": (True, "the order of samples does not depend on loader processes"),
    "validation": (True, "training does not depend on it"),
    "guard": (True, "only what is watched changes"),
    "log_every_s": (True, "only what is printed changes"),
    "grace_s": (True, "only how a stop is done changes"),
    "hang_s": (True, "only when a worker counts as hung changes"),
    "allow_mismatch": (True, "it has no effect once training has begun"),
    "batch": (False, "position and schedule are counted in batches of the old size"),
    "seed": (False, "the order of samples would change in the middle of an epoch"),
    "task": (False, "the state belongs to the old task"),
    "task_args": (False, "the state belongs to the task as it was built"),
    "optimizer": (False, _MATHS),
    "schedule": (False, _MATHS),
    "clip": (False, _MATHS),
    "data.clean": (False, "the filter decides which samples there are, so the order would change"),
    "data.imbalance": (False, "the order or the loss would change in the middle of the run"),
    "init_from": (False, "the run has started from other weights already"),
}


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """All fields that differ between two jobs, each as `Job.public_dict` gives it, in order of name.

    Fields that the older one lacks, because an older version wrote it, count as the defaults.
    """
    defaults = Job(task="task:Task", run="run", batch=1).public_dict()
    before, after = _flat(_filled(old, defaults)), _flat(_filled(new, defaults))
    found = []
    for field in sorted({*before, *after}):
        was, now = before.get(field), after.get(field)
        if was != now:
            allowed, reason = _rule(field)
            found.append(Change(field=field, old=was, new=now, allowed=allowed, reason=reason))
    return found


def _filled(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    filled = {**defaults, **values}
    for key, inner in defaults.items():
        if isinstance(inner, dict) and isinstance(filled[key], dict) and inner:
            filled[key] = {**inner, **filled[key]}
    if "steps" in values and values["steps"] is not None and "epochs" not in values:
        filled["epochs"] = None
    return filled


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            flat.update(_flat(value, f"{prefix}{key}."))
        elif value != {}:
            flat[prefix + key] = value
    return flat


def _rule(field: str) -> tuple[bool, str]:
    parts = field.split(".")
    for length in range(len(parts), 0, -1):
        found = _RULES.get(".".join(parts[:length]))
        if found is not None:
            return found
    return False, "nothing is known about what this would do to a run that has begun"
