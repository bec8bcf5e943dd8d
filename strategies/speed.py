"""How fast the cores of this machine are at what training does on a CPU, measured in under a second.

Two numbers for each kind of work: one process with a thread on every core, and one core while all others work on
something of their own (processes of one thread each). They differ by what threads lose in waiting for each other.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

#: Seconds for each of the nine measurements.
EACH_S = 0.05
#: A process on all cores is never this much slower than they are apart, unless others keep it waiting.
LEAST_TOGETHER = 0.5
#: What one usually reaches of that sum, where others left no better measurement.
USUAL_TOGETHER = 0.8
#: All that `_stream` goes through, in bytes: no cache holds it, however many threads have a part.
STREAM_BYTES = 256 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Of one process: FLOPs a second in matrix products; bytes a second that other operations read and write, in
    tensors of a few megabytes (`bytes_per_s`) and in ones that no cache holds (`stream_bytes_per_s`); bytes a second
    of new memory that the kernel hands out at its first use."""

    flops: float
    bytes_per_s: float
    stream_bytes_per_s: float
    fresh_bytes_per_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """`whole`: one process on all cores; `core`: each of as many processes as cores; `launch_s`: what an operation
    takes beside its work, with the Python around it."""

    cores: int
    whole: Rates
    core: Rates
    launch_s: float

    @property
    def disturbed(self) -> bool:
        """Whether other programs took so much that this says little of the machine: what works together waits for the
        slowest, and suffers most."""
        pairs = ((self.whole.flops, self.core.flops), (self.whole.bytes_per_s, self.core.bytes_per_s))
        return any(whole < LEAST_TOGETHER * self.cores * core for whole, core in pairs)

    @property
    def steadied(self) -> "Speed":
        """As it is, or if `disturbed`, with the cores together as fast as they usually are of what each has alone: a
        thread that others kept waiting for a moment says nothing of an hour's training."""
        if not self.disturbed:
            return self
        alone = {name: USUAL_TOGETHER * self.cores * rate for name, rate in asdict(self.core).items()}
        # Memory has one rate for all: it is not as many times that of a core.
        alone["stream_bytes_per_s"] = self.core.stream_bytes_per_s
        together = {name: max(rate, alone[name]) for name, rate in asdict(self.whole).items()}
        return replace(self, whole=Rates(**together))


def measure_speed(cores: int, each_s: float = EACH_S) -> Speed:
    """Measures this machine. The threads of the calling process are set to one and left so."""
    import torch

    torch.set_num_threads(cores)
    whole = [_rate(make(1), each_s) for make in _KINDS]
    torch.set_num_threads(1)
    core = [_together(make, cores, each_s) for make in _KINDS]
    return Speed(cores=cores, whole=_rates(whole), core=_rates(core), launch_s=1 / _rate(_small(), each_s))


def _rates(found: list[float]) -> Rates:
    flops, passes, stream, fresh = found
    return Rates(flops=flops, bytes_per_s=passes, stream_bytes_per_s=stream, fresh_bytes_per_s=fresh)


# Each of these prepares something, as one of so many at once, and gives a call that does some of it and tells how much.


def _products(_: int) -> Callable[[], float]:
    import torch

    a, b = torch.randn(512, 512), torch.randn(512, 1536)
    out = torch.empty(512, 1536)

    def run() -> float:
        torch.mm(a, b, out=out)
        return 2.0 * 512 * 512 * 1536

    return run


def _passes(_: int) -> Callable[[], float]:
    """What lies between products: a norm, an activation, a sum."""
    import torch

    x, weight = torch.randn(1024, 1024), torch.ones(1024)

    def run() -> float:
        y = torch.nn.functional.layer_norm(x, (1024,), weight)
        z = torch.nn.functional.gelu(y)
        torch.add(z, x)
        return 7.0 * x.nbytes

    return run


def _stream(sharers: int) -> Callable[[], float]:
    import torch

    elements = STREAM_BYTES // 8 // sharers
    x, y = torch.zeros(elements), torch.ones(elements)

    def run() -> float:
        x.add_(y, alpha=1e-3)
        return 3.0 * x.nbytes

    return run


def _fresh(_: int) -> Callable[[], float]:
    import mmap

    import torch

    size = 4 * 2**20

    def run() -> float:
        torch.frombuffer(mmap.mmap(-1, size), dtype=torch.float32).fill_(1.0)
        return float(size)

    return run


_KINDS = (_products, _passes, _stream, _fresh)


def _small() -> Callable[[], float]:
    """Layers so small that only starting them takes time."""
    import torch

    layers = [part for _ in range(10) for part in (torch.nn.Linear(4, 4), torch.nn.ReLU())]
    model, x = torch.nn.Sequential(*layers), torch.ones(4, 4)

    def run() -> float:
        model(x).sum().backward()
        # Forward 2 operations a layer, backward 5 with those that add up gradients.
        return 10.0 * 7

    return run


def _rate(call: Callable[[], float], seconds: float) -> float:
    """What a call does in a second: the best of a few turns, since other programs only ever slow it."""
    call()
    best = 0.0
    for _ in range(3):
        done, began = 0.0, time.perf_counter()
        while time.perf_counter() - began < seconds / 3:
            done += call()
        best = max(best, done / (time.perf_counter() - began))
    return best


def _together(make: Callable[[int], Callable[[], float]], count: int, seconds: float) -> float:
    """The mean rate of `count` threads of Python, each with work of its own."""
    rates: list[float] = []

    def work() -> None:
        rates.append(_rate(make(count), seconds))

    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(rates) / count
