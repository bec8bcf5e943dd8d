"""What a checking worker tells the launcher. Plain values; none needs torch to be unpickled."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rung.strategies.findings import Finding


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckRequest:
    """`job` is `Job.to_dict()`, `source` the file it came from. `full`: every sample; `quick`: only some seconds."""

    job: dict[str, Any]
    source: Path
    full: bool
    quick: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """`done` of `total` samples of a split have been looked at."""

    split: str
    done: int
    total: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """All findings, and what was seen of each split as JSON values."""

    findings: tuple[Finding, ...]
    splits: tuple[dict[str, Any], ...]
