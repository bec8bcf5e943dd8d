"""Random numbers as pure functions of what they are for, so that no generator's state ever needs storing.

Importable without torch: the launcher process uses `mix64` too.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FOR_STEP = 0x73746570  # these keep the streams of steps, samples and batches apart
_FOR_SAMPLE = 0x73616D70
_FOR_COLLATE = 0x636F6C6C


def mix64(*values: int) -> int:
    """One well-mixed 64-bit key from whole numbers of any size and sign; their order counts.

    A sponge over the finaliser of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators,
    2014). The same on every platform and version.
    """
    state = 0
    for value in values:
        while True:
            state = (state ^ (value & _MASK64)) + _GOLDEN & _MASK64
            state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK64
            state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK64
            state ^= state >> 31
            value >>= 64  # noqa: PLW2901 - the remaining words of a large number
            if value in (0, -1):
                break
    return state


def seed_everything(seed: int, step: int, rank: int) -> None:
    """Reseeds every global generator that a model can draw from, as a function of (seed, step, rank) only.

    Covers Python's `random`, numpy's global generator, torch's CPU generator, and those of CUDA and MPS devices where
    they are in use. About 10 microseconds on a CPU.
    """
    key = mix64(_FOR_STEP, seed, step, rank)
    _seed_cpu(key)
    _seed_devices(key)


def seed_sample(seed: int, epoch: int, index: int) -> None:
    """Reseeds the CPU generators for one sample, so that its augmentation depends on (seed, epoch, index) only."""
    _seed_cpu(mix64(_FOR_SAMPLE, seed, epoch, index))


def seed_collate(seed: int, epoch: int, first: int, count: int) -> None:
    """Reseeds the CPU generators before `count` samples, of which `first` is the first's index, are collated."""
    _seed_cpu(mix64(_FOR_COLLATE, seed, epoch, first, count))


def _seed_cpu(key: int) -> None:
    import torch

    random.seed(key)
    np.random.seed(key >> 32)
    # torch.manual_seed looks at every kind of device and takes a hundred times as long.
    torch.default_generator.manual_seed(key)


def _seed_devices(key: int) -> None:
    import torch

    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for generator in torch.cuda.default_generators:
            generator.manual_seed(key)
    elif _has_mps():
        torch.mps.manual_seed(key)


_mps: list[bool] = []


def _has_mps() -> bool:
    """Whether there is an MPS device; asked of torch once, since the answer costs more than the seeding."""
    if not _mps:
        import torch

        _mps.append(torch.backends.mps.is_available())
    return _mps[0]


@contextmanager
def preserved() -> Iterator[None]:
    """Whatever is drawn inside leaves the global CPU generators as they were. About 60 microseconds."""
    import torch

    python = random.getstate()
    numpy = np.random.get_state(legacy=False)
    generator = torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.default_generator.set_state(generator)


def draws_randomness(fetch: Callable[[], object]) -> bool:
    """Whether calling `fetch` draws from, or reseeds, a global CPU generator (Python, numpy, torch).

    The generators are put back as they were, also if `fetch` raises; what it raises is passed on. A generator that the
    user's code owns (`numpy.random.default_rng(0)`) cannot be seen.
    """
    with preserved():
        before = _states()
        fetch()
        return _states() != before


def _states() -> tuple[object, object, object]:
    import torch

    numpy = np.random.get_state(legacy=True)
    words = tuple(part.tobytes() if isinstance(part, np.ndarray) else part for part in numpy)
    return random.getstate(), words, torch.default_generator.get_state().numpy().tobytes()
