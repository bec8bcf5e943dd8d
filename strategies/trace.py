"""Makes a Profile: runs a task's training step on fake tensors and books every byte as it comes and goes.

Fake tensors have shapes, types and storages, but no memory: a model of 70 billion weights is stepped through in
seconds. The step is the real one (the task's loss, autocast, backward, clipping, the real optimizer), so what PyTorch
saves for the backward pass, and when it lets go of it, is seen rather than estimated. Where a task cannot run on fake
tensors (its shapes depend on data, or it calls kernels without a fake version) the same books are kept of a real step.

What cannot be seen: memory that a kernel takes and returns within one operation. `strategies/memory.py` allows for it.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_iter, tree_map_only

from rung.strategies import checkpointing
from rung.strategies.ledger import Ledger, Phase, size_of
from rung.strategies.measure import private_bytes
from rung.strategies.plan import Precision
from rung.strategies.precision import Amp
from rung.strategies.profile import Activity, Block, Line, Method, ParameterGroup, Profile, highest, upper_envelope

MakeOptimizer = Callable[[torch.nn.Module], torch.optim.Optimizer]
MakeBatch = Callable[[int], Any]
# Not 1: a size-1 dimension takes other paths (no copy to become contiguous), and BatchNorm may refuse it.
SIZES = (2, 4)
CHECK_SIZE = 7
# A third trace checks the lines only where it costs little.
CHECK_OPERATIONS = 4000
MOST_BLOCKS = 12
# A model with recurrent layers is measured rather than traced if its weights are no more than this.
MOST_RECURRENT_BYTES = 512 * 2**20


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
    if fake and facts.recurrent_bytes and facts.recurrent_bytes < MOST_RECURRENT_BYTES:
        # On a CPU oneDNN's recurrent kernels keep a workspace, and fake tensors take another path through PyTorch.
        real = profile_task(task, make_optimizer, make_batch, precision=precision, clip=clip, fake=False, name=name,
                            digest=digest, longest=longest)  # fmt: skip
        return replace(
            real,
            imported_bytes=facts.imported_bytes,
            note="Recurrent layers keep what only a real step shows, so one was measured.",
        )
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
        convolutions=facts.convolutions,
        kernel_bytes=facts.kernel_bytes,
        imported_bytes=facts.imported_bytes,
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
    convolutions: int
    kernel_bytes: int
    groups: tuple[ParameterGroup, ...]
    can_checkpoint: bool
    imported_bytes: int
    recurrent_bytes: int


@dataclass(kw_only=True, slots=True)
class _Run:
    """What a micro-batch of one size showed: (bytes of everything else, bytes of gradients) after each operation."""

    size: int
    phase: Phase
    flops: float
    moved: float
    operations: int
    convolutions: int
    kernel_bytes: int
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
        model, imported_bytes = _made(task)
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
        trained = (p for p in model.parameters() if p.requires_grad)
        hooks = [p.register_post_accumulate_grad_hook(ledger.gradient) for p in trained]  # type: ignore[no-untyped-call]
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
            buffer_bytes=sum(size_of(buffer) for buffer in model.buffers()),
            largest_parameter=max((p.numel() for p in model.parameters()), default=0),
            convolutions=max(run.convolutions for run in runs),
            kernel_bytes=max(run.kernel_bytes for run in runs),
            groups=_groups(model),
            can_checkpoint=can,
            imported_bytes=imported_bytes,
            recurrent_bytes=sum(map(size_of, model.parameters())) if _recurrent(model) else 0,
        )
    return facts, runs


def _made(task: Any) -> tuple[torch.nn.Module, int]:
    """The model, and the memory that the modules take which making it was the first to import."""
    torch.nn.Linear(2, 2)  # what PyTorch itself loads at the first of its modules
    known, before = set(sys.modules), private_bytes()
    model = task.model()
    theirs = [name for name in set(sys.modules) - known if name.partition(".")[0] != "torch"]
    return model, max(0, private_bytes() - before) if theirs else 0


def _traced(task: Any, model: torch.nn.Module, batch: Any, amp: Amp, ledger: Ledger, size: int) -> _Run:
    tensors = [t for t in tree_iter(batch) if isinstance(t, torch.Tensor)]
    ledger.ignore(tensors)
    with ledger:
        ledger.work()
        phase = ledger.phase(functools.partial(_micro, task, model, batch, amp))
        work = ledger.work()
    return _Run(
        size=size,
        phase=phase,
        flops=work.flops,
        moved=work.moved,
        operations=work.operations,
        convolutions=work.convolutions,
        kernel_bytes=work.kernel_bytes,
        input_bytes=sum(map(size_of, tensors)),
    )


def _updates(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, clip: float | None, ledger: Ledger
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
    """Switches to the form that PyTorch takes by default on CUDA, which works on all weights at once; not where the
    optimizer is told to take another."""
    if not all("foreach" in group and not group.get("fused") for group in optimizer.param_groups):
        return False
    for group in optimizer.param_groups:
        group["foreach"] = True
    return True


def _recurrent(model: torch.nn.Module) -> bool:
    return any(isinstance(module, torch.nn.RNNBase) for module in model.modules())


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
        entry[1] += size_of(parameter)
    return tuple(
        ParameterGroup(name=name, count=count, bytes=size, dtype=dtype, trainable=trainable)
        for (name, dtype, trainable), (count, size) in found.items()
    )


# --- lines from runs ----------------------------------------------------------------------------------------------


def _activity(runs: list[_Run], check: _Run | None) -> Activity:
    """`again` needs no run of its own: a later micro-batch does the same, and a new gradient is "something else" until
    it is added to the one that is there, just as it is until it is put in place in the first."""
    first = _lines(runs, lambda moment: moment[0] + moment[1])
    again = _lines(runs, lambda moment: moment[0])
    residual = 0.0
    if check is not None:
        seen = max((sum(moment) for moment in check.phase.alive), default=0)
        said = highest(first, check.size)
        residual = abs(said - seen) / seen if seen else 0.0
    return Activity(
        first=first,
        again=again,
        flops=_line([(run.size, run.flops) for run in runs]),
        moved=_line([(run.size, run.moved) for run in runs]),
        operations=max(run.operations for run in runs),
        blocks=_blocks(*runs),
        residual=residual,
        made=_line([(run.size, sum(run.phase.sizes)) for run in runs]),
    )


def _lines(runs: list[_Run], value: Callable[[tuple[int, int]], int]) -> tuple[Line, ...]:
    """Moment by moment where both runs did the same operations, else through the two peaks."""
    small, large = runs
    low, high = (list(map(value, run.phase.alive)) for run in runs)
    if small.phase.names == large.phase.names and len(low) == len(high):
        return upper_envelope(_line([(small.size, a), (large.size, b)]) for a, b in zip(low, high, strict=True))
    return (_line([(small.size, max(low, default=0)), (large.size, max(high, default=0))]),)


def _blocks(small: _Run, large: _Run) -> tuple[Block, ...]:
    """The sizes that activations (what grows with the micro-batch) come in, each with its share of their bytes."""
    found: dict[Line, int] = {}
    for a, b in zip(small.phase.sizes, large.phase.sizes, strict=False):
        if b > a:
            line = _line([(small.size, a), (large.size, b)])
            found[line] = found.get(line, 0) + b
    total = sum(found.values())
    most = sorted(found.items(), key=lambda entry: -entry[1])[:MOST_BLOCKS]
    return tuple(Block(size=line, share=size / total) for line, size in most)


def _line(points: list[tuple[int, float]]) -> Line:
    (x, y), (u, v) = points
    slope = (v - y) / (u - x)
    return Line(round(y - slope * x), slope)
