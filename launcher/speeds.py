"""How fast this machine is, measured once in a throw-away process and kept for a week."""

import hashlib
import json
import time
from dataclasses import asdict
from importlib.metadata import version

from rung.cluster.host import cpu_kind
from rung.cluster.link import Link
from rung.launcher.aside import ask
from rung.launcher.folder import cache_folder, keep_whole
from rung.strategies.speed import Rates, Speed

ENTRY = "rung.launcher.speeds:main"
#: It takes under a second, unless the machine is busy; then a guess does.
DEADLINE_S = 15.0
KEPT_S = 7 * 86400.0


def find_speed(cores: int) -> Speed | None:
    """What was measured of this machine's cores; None where that did not work, which costs only precision. What was
    measured beside busy programs holds for now, and is not kept."""
    kept = cache_folder() / "speed" / f"{_machine(cores)}.json"
    try:
        if time.time() - kept.stat().st_mtime < KEPT_S:
            return speed_from_json(kept.read_text())
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not there, or of another version: measured again
    answer = ask(ENTRY, cores, deadline_s=DEADLINE_S, threads=cores)
    speed = answer.value if answer is not None and isinstance(answer.value, Speed) else None
    if speed is None:
        return None
    if not speed.disturbed:
        keep_whole(kept, json.dumps(asdict(speed)))
    return speed.steadied


def speed_from_json(text: str) -> Speed:
    """The inverse of json.dumps(asdict(speed))."""
    values = json.loads(text)
    return Speed(**{**values, "whole": Rates(**values["whole"]), "core": Rates(**values["core"])})


def _machine(cores: int) -> str:
    """Changes with the processor, the cores that may be used, torch, and (the first number) how speed is measured."""
    model, _ = cpu_kind()
    return hashlib.blake2b(f"2 {model} {cores} {version('torch')}".encode(), digest_size=8).hexdigest()


def main(link: Link, cores: int) -> None:
    """Entry point of the throw-away process."""
    from rung.strategies.speed import measure_speed

    link.send(measure_speed(cores))
