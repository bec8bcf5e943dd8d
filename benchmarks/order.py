"""What the data order costs, beside a list of shuffled indices as torch's samplers make it.

Run: python benchmarks/order.py
"""

import statistics
import time
from collections.abc import Callable

import torch

from rung.launcher.data.order import Order, Stream

SIZE = 10**10
LISTED = 10**7  # what a list can still hold; a list of 10^10 indices takes 80 GB as an array, 360 GB as Python ints
BATCH = 64
BUDGET_S = 5e-3


def median(call: Callable[[int], object], repeats: int) -> float:
    """Median seconds of one call; each gets another number."""
    taken = []
    for i in range(repeats):
        start = time.perf_counter()
        call(i)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def main() -> None:
    """Prints one line for each measurement."""
    first = median(lambda i: Stream(Order(SIZE, seed=i), 1, SIZE // 2).take(BATCH), 50)
    print(
        f"first batch of 10^10 samples, from the middle  {first * 1e3:9.3f} ms   {first / BUDGET_S:.3f} of the budget"
    )

    listed = median(lambda _: torch.randperm(LISTED).tolist()[:BATCH], 3)
    print(f"first batch of 10^7 from a shuffled list       {listed * 1e3:9.3f} ms   {listed / first:.0f} times as long")

    stream = Stream(Order(SIZE, seed=1), 1, SIZE // 2)
    per_batch = median(lambda _: [stream.take(BATCH) for _ in range(4096 // BATCH * 4)], 50) / (4096 // BATCH * 4)
    print(f"each batch of {BATCH} after that                    {per_batch * 1e6:9.3f} us   mean over whole chunks")

    alone = median(lambda i: Order(SIZE, seed=1).indices(1, i * BATCH, BATCH), 200)
    print(f"{BATCH} indices at any place, nothing cached         {alone * 1e6:9.3f} us")


if __name__ == "__main__":
    main()
