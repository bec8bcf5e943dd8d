"""How much of each global batch every device gets, so that all are done at the same time: a pure function.

What a rank computed in a step, at the share that it had, gives its speed; waiting for others is not in it. The new
shares are proportional to the speeds, so they settle where all ranks need the same time, whatever part of it does not
depend on the number of samples. Gradients stay exact for any shares: a sample counts by its weight (`strategies.plan`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

#: A step must promise to become shorter by this part, in `WINDOWS` stretches in a row, before shares change.
LEAST_GAIN, WINDOWS = 0.1, 2
#: A stretch is so many steps, and goes on until some rank has computed for so long: less tells of chance alone.
STRETCH, STRETCH_S = 5, 1.0
#: No share grows or shrinks by more than this at once.
MOST = 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Balance:
    """`shares`: samples of a full global batch for each rank. `streak`: how many stretches in a row have called for
    others. `speeds`: samples a second of compute, as last seen. `reason`: why the shares are what they are."""

    shares: tuple[int, ...]
    streak: int = 0
    speeds: tuple[float, ...] = ()
    reason: str = "equal shares"


def equal(batch: int, ranks: int) -> Balance:
    """The start: as equal as can be, as `rung.strategies.plan.cut` has it without shares."""
    return Balance(shares=proportional(batch, [1.0] * ranks, least=0))


def judge(before: Balance, seconds: Sequence[float]) -> Balance:
    """The balance after a stretch in which rank r computed for `seconds[r]` a step (the median: a hiccup is none).

    The shares stay as they are unless the stretch, and the one before it, promise a gain of more than `LEAST_GAIN`;
    then the speeds are the means of both.
    """
    shares = before.shares
    if len(seconds) != len(shares):
        raise ValueError(f"{len(seconds)} times for {len(shares)} ranks")
    if min(seconds) <= 0.0 or min(shares) < 1:
        return replace(before, streak=0)
    speeds = [share / s for share, s in zip(shares, seconds, strict=True)]
    if before.streak:
        speeds = [(one + other) / 2 for one, other in zip(speeds, before.speeds, strict=True)]
    ideal = [sum(shares) * speed / sum(speeds) for speed in speeds]
    wanted = proportional(
        sum(shares), [min(max(i, share / MOST), share * MOST) for i, share in zip(ideal, shares, strict=True)]
    )
    now = max(seconds)
    then = max(share / speed for share, speed in zip(wanted, speeds, strict=True))
    gain = 1.0 - then / now
    if gain <= LEAST_GAIN or wanted == shares:
        return replace(before, streak=0, speeds=tuple(speeds))
    if before.streak + 1 < WINDOWS:
        return replace(before, streak=before.streak + 1, speeds=tuple(speeds))
    slowest = min(range(len(speeds)), key=speeds.__getitem__)
    reason = f"rank {slowest} is the slowest: compute of a step {now:.3g} s -> {then:.3g} s by measured speed"
    return Balance(shares=wanted, speeds=tuple(speeds), reason=reason)


def proportional(total: int, weights: Sequence[float], *, least: int = 1) -> tuple[int, ...]:
    """Whole parts of `total` in proportion to `weights` that sum to it (largest remainder first, then rank), none
    below `least` as long as there is enough."""
    if total < least * len(weights):
        least = 0
    ideal = [total * weight / sum(weights) for weight in weights]
    parts = [max(least, int(one)) for one in ideal]
    by_remainder = sorted(range(len(parts)), key=lambda r: (-(ideal[r] - parts[r]), r))
    for rank in by_remainder[: max(0, total - sum(parts))]:
        parts[rank] += 1
    while sum(parts) > total:  # the least took more than there was
        parts[max(range(len(parts)), key=parts.__getitem__)] -= 1
    return tuple(parts)


def describe(balance: Balance) -> str:
    """One line: every device's share, and why."""
    total = sum(balance.shares)
    shown = [f"rank {rank} {share} ({share / total:.0%})" for rank, share in enumerate(balance.shares[:16])]
    more = f" and {len(balance.shares) - 16} ranks more" if len(balance.shares) > 16 else ""
    return f"shares of {total} samples: {', '.join(shown)}{more}; {balance.reason}"
