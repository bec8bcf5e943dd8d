"""Books every byte of a training step as it comes and goes, on fake tensors or real ones, and counts its work."""

import functools
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

CPU_FLASH = "_scaled_dot_product_flash_attention_for_cpu"


@dataclass(kw_only=True, slots=True)
class Phase:
    """(bytes of everything else, bytes of gradients) after each operation, the size of each new storage, and a digest
    of the operations' names."""

    alive: list[tuple[int, int]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    names: int = 0

    @property
    def peak(self) -> int:
        """The most bytes beside gradients."""
        return max((other for other, _ in self.alive), default=0)


@dataclass(kw_only=True, slots=True)
class Work:
    """Operations since the last question: FLOPs of products, bytes moved by the rest, how many there were, and the
    convolutions forward with the bytes of the largest kernel."""

    flops: float = 0.0
    moved: float = 0.0
    operations: int = 0
    convolutions: int = 0
    kernel_bytes: int = 0


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Books each storage when an operation returns it and strikes it out when it dies. Weights, buffers and inputs are
    named beforehand and not booked."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.other = 0
        self.gradients = 0
        # By identity of the C++ storage: bytes and whether it is a gradient; the reference strikes it out.
        self._live: dict[int, list[Any]] = {}
        self._ignored: set[int] = set()
        self._keep: list[torch.UntypedStorage] = []
        self._phase = Phase()
        self._work = Work()

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """Storages that count elsewhere."""
        for tensor in tensors:
            # A fake tensor that was copied deeply tells another storage than its views do.
            for storage in (tensor.untyped_storage(), tensor.detach().view_as(tensor).untyped_storage()):
                self._keep.append(storage)
                self._ignored.add(storage._cdata)

    def keep(self, tensors: Iterable[torch.Tensor]) -> int:
        """Strikes out storages that stay (optimizer state) and returns their bytes, those of scalars included."""
        total = 0
        for tensor in tensors:
            total += size_of(tensor)
            storage = tensor.untyped_storage()
            self._gone(storage._cdata)
            self._keep.append(storage)
            self._ignored.add(storage._cdata)
        return total

    def gradient(self, parameter: torch.Tensor) -> None:
        """A hook: this parameter's gradient is in place."""
        gradient = parameter.grad
        if gradient is None or gradient.layout is not torch.strided:
            return
        entry = self._live.get(gradient.untyped_storage()._cdata)
        if entry is not None and not entry[1]:
            entry[1] = True
            self.other -= entry[0]
            self.gradients += entry[0]

    def phase(self, run: Callable[[], None]) -> Phase:
        """What was alive during `run`."""
        self._phase = Phase()
        run()
        return self._phase

    def work(self) -> Work:
        """The work since the last call."""
        done, self._work = self._work, Work()
        return done

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        moved = 0
        for value in out if isinstance(out, tuple | list) else (out,):
            if isinstance(value, torch.Tensor):
                self._see(value)
                moved += size_of(value)
        self._count(func, args, kwargs, out, moved)
        self._phase.alive.append((self.other, self.gradients))
        self._phase.names = hash((self._phase.names, func))
        return out

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, moved: int) -> None:
        if func.namespace == "prim":
            return  # a question about a fake tensor (its device), which no real one asks
        packet = func._overloadpacket
        work = self._work
        if (formula := flop_registry.get(packet)) is not None:
            work.flops += formula(*args, **kwargs, out_val=out)
            if packet.__name__ == "convolution":
                work.convolutions += 1
                work.kernel_bytes = max(work.kernel_bytes, size_of(args[1]))
        elif packet.__name__.startswith(CPU_FLASH):
            work.flops += _attention_flops(packet.__name__, args)
        elif func.is_view:
            return
        else:
            work.moved += moved + sum(size_of(a) for a in args if isinstance(a, torch.Tensor))
        work.operations += 1

    def _see(self, tensor: torch.Tensor) -> None:
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._ignored:
            return
        size = storage.nbytes()
        entry = self._live.get(key)
        if entry is None:
            self._phase.sizes.append(size)
            entry = self._live[key] = [0, False, weakref.ref(storage, functools.partial(self._died, key))]
        elif entry[0] == size:
            return
        grown, entry[0] = size - entry[0], size
        if entry[1]:
            self.gradients += grown
        else:
            self.other += grown

    def _died(self, key: int, _: object) -> None:
        self._gone(key)

    def _gone(self, key: int) -> None:
        entry = self._live.pop(key, None)
        if entry is None:
            return
        if entry[1]:
            self.gradients -= entry[0]
        else:
            self.other -= entry[0]


def _attention_flops(name: str, args: tuple[Any, ...]) -> float:
    """Two matrix products forward; five backward, as FlashAttention recomputes one (Dao et al. 2022, section 3.1)."""
    backward = name.endswith("backward")
    query, key, value = args[1:4] if backward else args[:3]
    batch, heads, rows, width = query.shape
    one = 2.0 * batch * heads * rows * key.shape[-2]
    return float(one * (3 * width + 2 * value.shape[-1]) if backward else one * (width + value.shape[-1]))


def size_of(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()
