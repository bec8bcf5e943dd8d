"""How much of each global batch every device gets, so that all are done at the same time: pure functions.

What a rank computed in a step, at the share that it had, gives its speed; waiting for others is not in it. The new
shares are proportional to the speeds, so they settle where all ranks need the same time, whatever part of it does not
depend on the number of samples. Gradients stay exact for any shares: a sample counts by its weight (`strategies.plan`).

Times are noisy, and shares that follow noise are worse than equal ones. So a change has to promise more than the noise
could feign: the noise is taken from how much times differ from one stretch to the next, which a device that has become
slower for good does not change; windows of several lengths are looked at, so that a large difference is answered after
a few steps and a small one after many; and whoever has changed often lately has to promise more.
"""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

#: A change has to make steps shorter by at least this part, beyond what noise could feign; one that refines a change
#: after a few steps, by half of it.
LEAST_GAIN = 0.04
#: The last so many stretches are looked at, the shortest window first; a change within `CALM` stretches after two
#: others has to promise twice as much, and so on.
WINDOWS, CALM = (5, 10, 20, 40, 80), 400
#: A stretch is a step, or as many as it takes until some rank has computed for so long: less tells of chance alone.
STRETCH_S = 0.1
#: No share grows or shrinks by more than this at once.
MOST = 3.0
#: Noise is never taken to be less than this part of a time.
QUIET = 0.01
#: A rank that is slower than the median of all by this part is worth naming.
SLOW = 0.15
#: Micro-batches are added to every rank only if steps become shorter by this part through it.
WORTH_A_SLOT = 0.05
#: With more ranks, stretches are judged one in five only: it takes time in proportion to their number.
MANY = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Balance:
    """`shares`: samples of a full global batch for each rank, of which a pass takes at most `micro_batch`. `speeds`:
    samples a second of compute, as last seen. `reason`: why the shares are what they are.

    `stretches`: mean seconds of a step for each rank, since the last change, newest last; `open`: steps and sums of the
    stretch that is not complete; `changes`: how many stretches ago shares changed."""

    shares: tuple[int, ...]
    micro_batch: int
    speeds: tuple[float, ...] = ()
    reason: str = "equal shares"
    stretches: tuple[tuple[float, ...], ...] = ()
    open: tuple[int, tuple[float, ...]] = (0, ())
    changes: tuple[int, ...] = ()

    @property
    def slowest(self) -> int:
        """The rank with the least speed, as last seen."""
        return min(range(len(self.speeds)), key=self.speeds.__getitem__)

    @property
    def lag(self) -> float:
        """How much slower the slowest rank is than the median of all: 0.5 is half as fast."""
        return 1.0 - min(self.speeds) / statistics.median(self.speeds) if self.speeds else 0.0


def equal(batch: int, ranks: int, micro_batch: int = 1 << 30) -> Balance:
    """The start: as equal as can be, as `rung.strategies.plan.cut` has it without shares."""
    return Balance(shares=proportional(batch, [1.0] * ranks, least=0), micro_batch=micro_batch)


def observe(before: Balance, seconds: Sequence[float]) -> Balance:
    """The balance after a step in which rank r computed for `seconds[r]`; its shares differ if that is worth it."""
    if len(seconds) != len(before.shares):
        raise ValueError(f"{len(seconds)} times for {len(before.shares)} ranks")
    if min(seconds) <= 0.0 or min(before.shares) < 1:
        return before
    steps, sums = before.open
    steps += 1
    sums = tuple(map(sum, zip(sums, seconds, strict=True))) if sums else tuple(seconds)
    if max(sums) < STRETCH_S:
        return replace(before, open=(steps, sums))
    stretches = (*before.stretches, tuple(s / steps for s in sums))[-WINDOWS[-1] :]
    changes = tuple(ago + 1 for ago in before.changes if ago < CALM)
    after = replace(before, stretches=stretches, open=(0, ()), changes=changes)
    if len(seconds) > MANY and len(stretches) % 5:
        return after
    return _judge(after)


def _judge(before: Balance) -> Balance:
    """The first window that promises enough decides."""
    lately = len(before.changes)
    least = LEAST_GAIN * (0.5 if lately == 1 else 2.0 ** max(0, lately - 1))
    noise = _noise(before.stretches)
    # A false alarm is then rarer than once in some ten thousand stretches, however many ranks could raise it.
    doubt = math.sqrt(2.0 * math.log(200.0 * len(before.shares)))
    for window in WINDOWS:
        if len(before.stretches) < window:
            break
        seconds = [_middle(times) for times in zip(*before.stretches[-window:], strict=True)]
        speeds = tuple(share / s for share, s in zip(before.shares, seconds, strict=True))
        wanted = _wanted(before, speeds)
        now, then = max(seconds), _longest(wanted, speeds)
        if wanted != before.shares and 1.0 - then / now > least + doubt * 1.2 * noise / math.sqrt(window):
            reason = f"compute of a step {now:.3g} s -> {then:.3g} s by measured speed"
            return replace(before, shares=wanted, speeds=speeds, reason=reason, stretches=(), open=(0, ()),
                           changes=(*before.changes, 0))  # fmt: skip
    return before


def _wanted(before: Balance, speeds: Sequence[float]) -> tuple[int, ...]:
    """Shares in proportion to the speeds, without leaps, and without further micro-batches that are not worth it."""
    total = sum(before.shares)
    ideal = [total * speed / sum(speeds) for speed in speeds]
    bounded = [min(max(i, share / MOST), share * MOST) for i, share in zip(ideal, before.shares, strict=True)]
    wanted = proportional(total, bounded)
    slots = _slots(before.shares, before.micro_batch)
    if _slots(wanted, before.micro_batch) <= slots:
        return wanted
    full = slots * before.micro_batch
    within = [float(min(share, full)) for share in wanted]
    while (left := total - sum(within)) >= 1.0:  # what the full ones leave goes to the others
        room = [r for r, share in enumerate(within) if share < full]
        weight = sum(speeds[r] for r in room)
        for r in room:
            within[r] = min(full, within[r] + left * speeds[r] / weight)
    capped = tuple(min(full, share) for share in proportional(total, within))
    fits = sum(capped) == total
    return capped if fits and _longest(capped, speeds) < (1 + WORTH_A_SLOT) * _longest(wanted, speeds) else wanted


def _slots(shares: Sequence[int], micro_batch: int) -> int:
    return max(-(-share // micro_batch) for share in shares)


def _longest(shares: Sequence[int], speeds: Sequence[float]) -> float:
    return max(share / speed for share, speed in zip(shares, speeds, strict=True))


def _noise(stretches: Sequence[Sequence[float]]) -> float:
    """By which part times differ by chance (a standard deviation), from the differences of neighbours: that of a rank
    which is noisier than most others."""
    if len(stretches) < 2:
        return math.inf
    found = []
    for times in zip(*stretches, strict=True):
        steps = sorted(abs(math.log(after / before)) for before, after in itertools.pairwise(times))
        found.append(statistics.median(steps) / (0.6745 * math.sqrt(2.0)))
    return max(QUIET, sorted(found)[math.ceil(0.9 * (len(found) - 1))])


def _middle(times: Sequence[float]) -> float:
    """The mean of the middle fifth: a hiccup in a third of the window does not count."""
    cut = 2 * len(times) // 5
    return statistics.fmean(sorted(times)[cut : len(times) - cut])


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
