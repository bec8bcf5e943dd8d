"""Makes a Profile: runs a task's training step on fake tensors and books every byte as it comes and goes.

Fake tensors have shapes, types and storages, but no memory: a model of 70 billion weights is stepped through in
seconds. The step is the real one (the task's loss, autocast, backward, clipping, the real optimizer), so what PyTorch
saves for the backward pass, and when it lets go of it, is seen rather than estimated. Where a task cannot run on fake
tensors (its shapes depend on data, or it calls kernels without a fake version) the same bookkeeping watches a real step.

What cannot be seen: memory that a kernel takes and returns within one operation. `strategies/memory.py` allows for it.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only
from torch.utils.flop_counter import flop_registry

from rung.strategies import checkpointing
from rung.strategies.plan import Precision
from rung.strategies.precision import Amp
from rung.strategies.profile import Activity, Line, Method, ParameterGroup, Profile, upper_envelope

MakeOptimizer = Callable[[torch.nn.Module], torch.optim.Optimizer]
MakeBatch = Callable[[int], Any]
# Not 1: a size-1 dimension takes other paths (no copy to become contiguous), and BatchNorm may refuse it.
SIZES = (2, 4)
CHECK_SIZE = 7
# A third trace checks the lines only where it costs little.
CHECK_OPERATIONS = 4000
CPU_FLASH = "_scaled_dot_product_flash_attention_for_cpu"


def profile_task(
    task: Any,
    make_optimizer: MakeOptimizer,
    make_batch: MakeBatch,
    *,
    precision: Precision = "fp32",
    clip: float | None = 1.0,
    fake: bool = True,
    name: str = "",
    digest: str = "",
    longest: str = "",
) -> Profile:
    """The profile of `task` (the Task contract: `model()` and `loss(model, batch)`).

    make_optimizer: from the model, as in training. make_batch: a collated batch of so many samples, of the longest kind
    where sizes vary; real or fake. fake: False runs a real step of up to 4 samples instead, which needs the memory.
    Raises what the task raises, and torch's own errors where it cannot run on fake tensors (`cannot_fake` tells).
    """
    trace = functools.partial(_session, task, make_optimizer, make_batch, precision, clip, fake)
    facts, runs = trace(checkpoint=False)
    check = runs.pop() if len(runs) > len(SIZES) else None
    recomputed = _activity(trace(checkpoint=True)[1], None) if facts.can_checkpoint else None
    method: Method = "traced" if fake else "measured"
    return Profile(
        task=name or type(task).__name__,
        digest=digest,
        method=method,
        precision=precision,
        optimizer=facts.optimizer,
        groups=facts.groups,
        buffer_bytes=facts.buffer_bytes,
        optimizer_bytes=facts.optimizer_bytes,
        step_bytes=facts.step_bytes,
        foreach_step_bytes=facts.foreach_step_bytes,
        input_bytes=_line([(run.size, run.input_bytes) for run in runs]),
        plain=_activity(runs, check),
        checkpointed=recomputed,
        largest_parameter=facts.largest_parameter,
        longest=longest,
    )


def cannot_fake(error: BaseException) -> bool:
    """Whether `error` says that fake tensors are not enough (and a real step may do), rather than that the task is
    wrong."""
    from torch._subclasses import fake_tensor

    kinds: tuple[type[BaseException], ...] = (
        fake_tensor.DataDependentOutputException,
        fake_tensor.DynamicOutputShapeException,
        fake_tensor.UnsupportedFakeTensorException,
        fake_tensor.UnsupportedOperatorException,
        NotImplementedError,
    )
    text = str(error)
    hints = ("fake", "Fake", "meta", "Meta", "data pointer", "data_ptr", "numpy()", "storage")
    return isinstance(error, kinds) or any(hint in text for hint in hints)


# --- one run ------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True, slots=True)
class _Facts:
    """What does not depend on the micro-batch."""

    optimizer: str
    optimizer_bytes: int
    step_bytes: int
    foreach_step_bytes: int
    buffer_bytes: int
    largest_parameter: int
    groups: tuple[ParameterGroup, ...]
    can_checkpoint: bool


@dataclass(kw_only=True, slots=True)
class _Run:
    """What two micro-batches of one size showed: bytes alive after each operation of the first and of the second."""

    size: int
    first: list[int]
    again: list[int]
    names: tuple[int, int]
    flops: float
    moved: float
    operations: int
    input_bytes: int


def _session(
    task: Any,
    make_optimizer: MakeOptimizer,
    make_batch: MakeBatch,
    precision: Precision,
    clip: float | None,
    fake: bool,
    *,
    checkpoint: bool,
) -> tuple[_Facts, list[_Run]]:
    """One model, traced at each size. The optimizer's steps come after the first size, without checkpointing only: they
    depend on neither."""
    batches = [make_batch(size) for size in (*SIZES, CHECK_SIZE)]
    with _world(fake) as into:
        model = task.model()
        can = checkpointing.available(model)
        if checkpoint:
            checkpointing.enable(model)
        model.train()
        optimizer = make_optimizer(model)
        amp = Amp(precision, "cpu")
        amp.patch(model)
        ledger = Ledger()
        ledger.ignore(model.parameters())
        ledger.ignore(model.buffers())
        hooks = [p.register_post_accumulate_grad_hook(ledger.gradient) for p in model.parameters() if p.requires_grad]
        runs: list[_Run] = []
        update = (0, 0, 0)
        for size, batch in zip((*SIZES, CHECK_SIZE), batches, strict=True):
            if size == CHECK_SIZE and (checkpoint or not fake or runs[0].operations > CHECK_OPERATIONS):
                break
            runs.append(_traced(task, model, into(batch), amp, ledger, size))
            if not checkpoint and len(runs) == 1:
                update = _updates(model, optimizer, clip, ledger)
            optimizer.zero_grad(set_to_none=True)
        for hook in hooks:
            hook.remove()
        facts = _Facts(
            optimizer=type(optimizer).__name__,
            optimizer_bytes=update[0],
            step_bytes=update[1],
            foreach_step_bytes=update[2],
            buffer_bytes=sum(_bytes(buffer) for buffer in model.buffers()),
            largest_parameter=max((p.numel() for p in model.parameters()), default=0),
            groups=_groups(model),
            can_checkpoint=can,
        )
    return facts, runs


def _traced(task: Any, model: torch.nn.Module, batch: Any, amp: Amp, ledger: "Ledger", size: int) -> _Run:
    tensors = [t for t in tree_iter(batch) if isinstance(t, torch.Tensor)]
    ledger.ignore(tensors)
    with ledger:
        ledger.work()
        first = ledger.phase(functools.partial(_micro, task, model, batch, amp))
        work = ledger.work()
        again = ledger.phase(functools.partial(_micro, task, model, batch, amp))
    return _Run(
        size=size,
        first=[other + gradients for other, gradients in first.alive],
        again=[other for other, _ in again.alive],
        names=(first.names, again.names),
        flops=work.flops,
        moved=work.moved,
        operations=work.operations,
        input_bytes=sum(map(_bytes, tensors)),
    )


def _updates(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, clip: float | None, ledger: "Ledger"
) -> tuple[int, int, int]:
    """Bytes of the optimizer's state, of a step's temporaries, and of those in "foreach" form. The first step makes the
    state, the others show what a step takes when it is there."""
    step = functools.partial(_update, model, optimizer, clip)
    with ledger:
        ledger.phase(step)
        state = ledger.keep(_state_tensors(optimizer))
        single = ledger.phase(step).peak
        foreach = ledger.phase(step).peak if _foreach(optimizer) else single
    return state, single, foreach


@contextlib.contextmanager
def _world(fake: bool) -> Iterator[Callable[[Any], Any]]:
    """Fake tensors or real ones; gives what brings a batch into it."""
    if not fake:
        yield lambda batch: batch
        return
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def into(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if isinstance(tensor, FakeTensor) else mode.from_tensor(tensor)

    with mode:
        yield lambda batch: tree_map_only(torch.Tensor, into, batch)


def _micro(task: Any, model: torch.nn.Module, batch: Any, amp: Amp) -> None:
    with amp.autocast() if amp.enabled else contextlib.nullcontext():
        loss = task.loss(model, batch)
    amp.backward(loss * 0.5)


def _update(model: torch.nn.Module, optimizer: torch.optim.Optimizer, clip: float | None) -> None:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if clip is not None and gradients:
        norms = torch._foreach_norm(gradients)
        torch.linalg.vector_norm(torch.stack(norms))
        torch._foreach_mul_(gradients, 0.5)
    optimizer.step()


def _state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for state in optimizer.state.values():
        yield from (value for value in tree_iter(state) if isinstance(value, torch.Tensor))


def _foreach(optimizer: torch.optim.Optimizer) -> bool:
    """Switches to the form that PyTorch takes by default on CUDA, which works on all weights at once."""
    if not all("foreach" in group for group in optimizer.param_groups):
        return False
    for group in optimizer.param_groups:
        group["foreach"] = True
    return True


def _groups(model: torch.nn.Module) -> tuple[ParameterGroup, ...]:
    """Parameters by repeated block, the rest by the model's own children."""
    blocks = sorted(checkpointing.blocks(model), key=len, reverse=True)
    found: dict[tuple[str, str, bool], list[int]] = {}
    for name, parameter in model.named_parameters():
        part = name.split(".")[0]
        for depth in range(name.count("."), 0, -1):
            prefix = name.rsplit(".", depth)[0]
            if prefix in blocks:
                part = prefix
                break
        key = (part, str(parameter.dtype).removeprefix("torch."), parameter.requires_grad)
        entry = found.setdefault(key, [0, 0])
        entry[0] += parameter.numel()
        entry[1] += _bytes(parameter)
    return tuple(
        ParameterGroup(name=name, count=count, bytes=size, dtype=dtype, trainable=trainable)
        for (name, dtype, trainable), (count, size) in found.items()
    )


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


# --- lines from runs ----------------------------------------------------------------------------------------------


def _activity(runs: list[_Run], check: _Run | None) -> Activity:
    first = _lines([(run.size, run.first, run.names[0]) for run in runs])
    again = _lines([(run.size, run.again, run.names[1]) for run in runs])
    residual = 0.0
    if check is not None:
        seen = max(check.first, default=0)
        said = max((line.at(check.size) for line in first), default=0.0)
        residual = abs(said - seen) / seen if seen else 0.0
    return Activity(
        first=first,
        again=again,
        flops=_line([(run.size, run.flops) for run in runs]),
        moved=_line([(run.size, run.moved) for run in runs]),
        operations=max(run.operations for run in runs),
        residual=residual,
    )


def _lines(runs: list[tuple[int, list[int], int]]) -> tuple[Line, ...]:
    """Moment by moment where both runs did the same operations, else through the two peaks."""
    (small, low, names), (large, high, others) = runs
    if names == others and len(low) == len(high):
        return upper_envelope(_line([(small, a), (large, b)]) for a, b in zip(low, high, strict=True))
    return (_line([(small, max(low, default=0)), (large, max(high, default=0))]),)


def _line(points: list[tuple[int, float]]) -> Line:
    (x, y), (u, v) = points
    slope = (v - y) / (u - x)
    return Line(y - slope * x, slope)


# --- the ledger ---------------------------------------------------------------------------------------------------


@dataclass(kw_only=True, slots=True)
class Phase:
    """(bytes of everything else, bytes of gradients) after each operation, and a digest of the operations' names."""

    alive: list[tuple[int, int]] = field(default_factory=list)
    names: int = 0

    @property
    def peak(self) -> int:
        """The most bytes beside gradients."""
        return max((other for other, _ in self.alive), default=0)


@dataclass(kw_only=True, slots=True)
class Work:
    """Operations since the last question: FLOPs of products, bytes moved by the rest, and how many there were."""

    flops: float = 0.0
    moved: float = 0.0
    operations: int = 0


class Ledger(TorchDispatchMode):
    """Books each storage when an operation returns it and strikes it out when it dies. Weights, buffers and inputs are
    named beforehand and not booked."""

    def __init__(self) -> None:
        super().__init__()
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
            storage = tensor.untyped_storage()
            self._keep.append(storage)
            self._ignored.add(storage._cdata)

    def keep(self, tensors: Iterable[torch.Tensor]) -> int:
        """Strikes out storages that stay (optimizer state) and returns their bytes, those of scalars included."""
        total = 0
        for tensor in tensors:
            total += _bytes(tensor)
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
                moved += _bytes(value)
        self._count(func, args, kwargs, out, moved)
        self._phase.alive.append((self.other, self.gradients))
        self._phase.names = hash((self._phase.names, func))
        return out

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, moved: int) -> None:
        packet = func._overloadpacket
        work = self._work
        if (formula := flop_registry.get(packet)) is not None:
            work.flops += formula(*args, **kwargs, out_val=out)
        elif packet.__name__.startswith(CPU_FLASH):
            work.flops += _attention_flops(packet.__name__, args)
        elif func.is_view:
            return
        else:
            work.moved += moved + sum(_bytes(a) for a in args if isinstance(a, torch.Tensor))
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
    return one * (3 * width + 2 * value.shape[-1]) if backward else one * (width + value.shape[-1])
