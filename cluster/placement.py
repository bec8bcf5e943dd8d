"""Which devices of a cluster a group gets: a pure function, and each choice with its reason.

Accelerators are packed: one NVLink island if it suffices, else one machine, else as few machines as can be. CPU workers
are spread, since those of one machine share its cores and memory. The devices are the fastest there are; busy ones
(other processes hold memory on them) are left out as long as there are enough others.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rung.strategies.errors import JobError


@dataclass(frozen=True, kw_only=True, slots=True)
class Spot:
    """Room for one worker. `island`: devices with the same number have fast links to each other. `speed`: any unit,
    alike for all. `busy`: somebody else uses it."""

    index: int
    island: int = 0
    speed: float = 1.0
    busy: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """One node of a cluster, and the room it has. `label`: what a person calls it, if not `name`."""

    name: str
    spots: tuple[Spot, ...]
    label: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Take:
    """Devices (by index) of one machine."""

    machine: str
    indices: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where the workers go: ranks count up through `takes`. `reason` says why there."""

    takes: tuple[Take, ...]
    reason: str


def place(count: int, machines: Sequence[Machine], *, spread: bool = False) -> Placement:
    """Room for `count` workers. Raises JobError with what there is if that is less."""
    everything = [(machine.name, spot) for machine in machines for spot in machine.spots]
    if count > len(everything):
        there = ", ".join(f"{m.label or m.name}: {len(m.spots)}" for m in machines[:8]) or "no machine"
        more = f" and {len(machines) - 8} machines more" if len(machines) > 8 else ""
        raise JobError(
            f"cluster.workers: {count} workers asked for, there is room for {len(everything)} ({there}{more})",
            hint=f"ask for at most {len(everything)}, or add machines (`ray start`)",
        )
    if count < 1:
        raise ValueError(f"a group has at least one worker, got {count}")
    idle = [(name, spot) for name, spot in everything if not spot.busy]
    used_busy = count > len(idle)
    pool = everything if used_busy else idle
    # Whoever is slower than the last one needed would hold the others back.
    slowest = _least_speed(count, pool, spread=spread)
    room: dict[str, list[Spot]] = defaultdict(list)
    for name, spot in pool:
        if spot.speed >= slowest:
            room[name].append(spot)
    takes, reason = _spread(count, room) if spread else _packed(count, room)
    skipped = len(everything) - len(idle)
    if skipped:
        reason += f"; {'also' if used_busy else 'without'} {skipped} busy {'ones' if skipped > 1 else 'one'}"
    slower = len(pool) - sum(map(len, room.values()))
    if slower:
        reason += f"; {slower} slower left out"
    return Placement(takes=takes, reason=reason)


def _least_speed(count: int, pool: Sequence[tuple[str, Spot]], *, spread: bool) -> float:
    """The speed of the last one needed. Spread workers take machine after machine before any gets a second one."""
    if not spread:
        return sorted((spot.speed for _, spot in pool), reverse=True)[count - 1]
    machines: dict[str, float] = {}
    for name, spot in pool:
        machines[name] = max(machines.get(name, 0.0), spot.speed)
    return sorted(machines.values(), reverse=True)[min(count, len(machines)) - 1]


def _spread(count: int, room: Mapping[str, list[Spot]]) -> tuple[tuple[Take, ...], str]:
    """As evenly as can be over the machines."""
    numbers = dict.fromkeys(room, 0)
    left = count
    while left:
        for name, spots in room.items():
            if left and numbers[name] < len(spots):
                numbers[name] += 1
                left -= 1
    takes = tuple(_take(name, room[name][:number]) for name, number in numbers.items() if number)
    return takes, f"spread over {_many(len(takes), 'machine')}: workers of one share its cores"


def _packed(count: int, room: Mapping[str, list[Spot]]) -> tuple[tuple[Take, ...], str]:
    """The tightest island that has enough, else the tightest machine, else the fewest machines."""
    islands: dict[tuple[str, int], list[Spot]] = defaultdict(list)
    for name, spots in room.items():
        for spot in spots:
            islands[name, spot.island].append(spot)
    fitting = [(len(spots), name, spots) for (name, _), spots in islands.items() if len(spots) >= count]
    if fitting:
        _, name, spots = min(fitting, key=lambda one: one[0])
        return (_take(name, spots[:count]),), f"all within one island of fast links on {name}"
    whole = [(len(spots), name) for name, spots in room.items() if len(spots) >= count]
    if whole:
        _, name = min(whole, key=lambda one: one[0])
        return (_take(name, _by_island(room[name])[:count]),), f"all on {name}; no island of fast links has {count}"
    takes: list[Take] = []
    left = count
    rest = dict(room)
    while left:
        enough = [name for name, spots in rest.items() if len(spots) >= left]
        # A machine that is large enough for the rest: the tightest such; else the largest one.
        name = min(enough, key=lambda n: len(rest[n])) if enough else max(rest, key=lambda n: len(rest[n]))
        spots = _by_island(rest.pop(name))[:left]
        takes.append(_take(name, spots))
        left -= len(spots)
    return tuple(takes), f"over {_many(len(takes), 'machine')}: no single one has {count}"


def _by_island(spots: Sequence[Spot]) -> list[Spot]:
    """Whole islands first, the largest before the others."""
    sizes: dict[int, int] = defaultdict(int)
    for spot in spots:
        sizes[spot.island] += 1
    return sorted(spots, key=lambda spot: (-sizes[spot.island], spot.island, spot.index))


def _take(name: str, spots: Sequence[Spot]) -> Take:
    return Take(machine=name, indices=tuple(sorted(spot.index for spot in spots)))


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"
