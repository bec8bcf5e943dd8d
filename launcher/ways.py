"""What a plan is put together from: ways to hold the state, sizes of a micro-batch, layouts over nodes. Pure."""

from collections.abc import Iterator

from rung.strategies.plan import Offload, StrategyName

_OFFLOADS: tuple[tuple[StrategyName, Offload, Offload], ...] = (
    ("zero2", "host", "none"),
    ("zero3", "host", "none"),
    ("zero3", "host", "host"),
    ("zero3", "disk", "none"),
    ("zero3", "disk", "host"),
    ("zero3", "disk", "disk"),
)


def ways(count: int) -> Iterator[tuple[StrategyName, Offload, Offload]]:
    """Strategy, and where optimizer and parameters live, on so many devices."""
    names: tuple[StrategyName, ...] = ("single",) if count == 1 else ("ddp",)
    yield from ((name, "none", "none") for name in (*names, *("zero1", "zero2", "zero3")))
    yield from _OFFLOADS


def micro_batches(batch: int, count: int, pinned: int | None) -> list[int]:
    """The whole share, and cuts of it into 2, 4, 8, ... equal parts, down to 1; or what is pinned."""
    share = -(-batch // count)
    if pinned:
        return [min(pinned, share)]
    sizes: list[int] = []
    parts = 1
    while not sizes or sizes[-1] > 1:
        size = -(-share // parts)
        sizes.append(size)
        parts *= 2
    return list(dict.fromkeys(sizes))


def nodes_of(count: int, per_node: int, nodes: int) -> int:
    """Devices that can hold all weights a second time, which are those of a node; 0 if nodes are not whole."""
    return per_node if nodes > 1 and per_node > 1 and count % per_node == 0 else 0
