"""A Finding is one fact about the machine, the data or the run, with why it matters and what mends it."""

from dataclasses import dataclass
from enum import Enum


class Level(str, Enum):
    """How much a finding matters."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """`subject` is a short stable name (`shm`, `cuda.driver`); `fix` is a command or an action, empty if none."""

    level: Level
    subject: str
    fact: str
    why: str = ""
    fix: str = ""
