"""Building a model for ZeRO-3: partitioned as it comes into being, with the weights that a plain build would have.

DeepSpeed's `zero.Init` cuts each module's parameters up as soon as that module's `__init__` returns. Two things in it
would change what a user's model computes, and are put right here:

* it creates tensors in the training precision and on the device, where random numbers differ from those of a plain
  build. Here modules are made as they are without it, and cut up afterwards: the same seed gives the same weights.
* code that touches a module's weights later (`nn.init.normal_(self.head.weight)`, GPT-2's scaling of its projections,
  ResNet's loop over `modules()`) would find empty tensors and silently do nothing. Here such an access gathers the
  weight first, and cuts it up again when the next one is touched.

On CUDA, what is drawn by such later code comes from the device's generator, not from the host's, since the weight is
there by then; it is the same on every rank, for rank 0's values are kept.
"""

import ctypes
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from rung.strategies.zero_runtime import forget_second_partitions

# Gathered at once while later code initialises weights: a weight, its bias, and what it is tied to or copied from.
_OPEN = 4
# A module of at least this size leaves a hole worth giving back.
_TRIM_BYTES = 1 << 20
# Reading these needs no values and no shape.
_HARMLESS = {"__get__", "__hash__", "__repr__"}
_HARMLESS_GETTERS = {
    "grad_fn", "requires_grad", "is_leaf", "grad", "dtype", "device", "layout", "is_meta", "is_sparse", "is_quantized",
    "is_nested", "is_mkldnn", "is_cuda", "is_cpu", "_backward_hooks", "_post_accumulate_grad_hooks", "names",
    "retains_grad",
}  # fmt: skip


@contextmanager
def partitioned(config: dict[str, object], built: list[torch.nn.Module], *, dtype: torch.dtype) -> Iterator[None]:
    """The context in which to make the model, which is to be put into `built`; its weights are `dtype` in the end.
    Collective: every rank must run the same code in it."""
    # Weights on disk cannot change their type afterwards.
    at_once = _offloads_weights_to_disk(config)
    init = _init_class()(config_dict_or_path=config, dtype=dtype if at_once else torch.float32)
    touched = _Touched()
    init.rung_touched = touched
    with init, touched:
        yield
    touched.close()
    _spare_inputs()
    for module in built:
        if not at_once:
            _convert(module, dtype)
        # Made from what was there before the change of type, and not needed before the first step.
        forget_second_partitions(module)


def _spare_inputs() -> None:
    """ZeRO-3's linear layer keeps its input for the gradient of its weight, also of one that has none: a third of all
    activations of a model of which little trains (LoRA, measured). `zero_runtime` puts torch's own back in the end."""
    from deepspeed.runtime.zero import linear

    class Frozen(linear.LinearFunctionForZeroStage3):  # type: ignore[misc]
        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
            nothing = inputs[0].new_empty(0)
            linear.LinearFunctionForZeroStage3.setup_context(ctx, (nothing, *inputs[1:]), output)

    def apply(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:  # noqa: A002
        kept = linear.LinearFunctionForZeroStage3 if weight.requires_grad else Frozen
        return kept.apply(input, weight, bias)

    if torch.nn.functional.linear is linear.zero3_linear_wrap:
        torch.nn.functional.linear = apply


def _offloads_weights_to_disk(config: dict[str, object]) -> bool:
    zero = config["zero_optimization"]
    assert isinstance(zero, dict)
    return bool(zero["offload_param"]["device"] == "nvme")


@torch.no_grad()
def _convert(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Random numbers are drawn in fp32, so that all strategies start from the same weights; then they are narrowed."""
    from deepspeed.accelerator import get_accelerator

    for parameter in module.parameters():
        part = getattr(parameter, "ds_tensor", None)
        if part is None or part.dtype != torch.float32 or dtype == torch.float32:
            continue
        pinned = part.device.type == "cpu" and part.is_pinned()
        narrow = part.data.to(dtype)
        part.data = get_accelerator().pin_memory(narrow) if pinned else narrow
        parameter.data = parameter.data.to(dtype)


class _Touched(TorchFunctionMode):
    """Gathers a partitioned parameter before any torch function sees it, and cuts up the ones touched longest ago."""

    def __init__(self) -> None:
        super().__init__()
        self._open: OrderedDict[int, torch.nn.Parameter] = OrderedDict()

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _harmless(func):
            for value in (*args, *kwargs.values()):
                for item in value if isinstance(value, list | tuple) else (value,):
                    if isinstance(item, torch.nn.Parameter) and hasattr(item, "ds_id"):
                        self._gather(item)
        return func(*args, **kwargs)

    def _gather(self, parameter: Any) -> None:
        if parameter.ds_status.name != "NOT_AVAILABLE":
            return
        parameter.all_gather()
        self._open[id(parameter)] = parameter
        self._open.move_to_end(id(parameter))
        while len(self._open) > _OPEN:
            _cut(self._open.popitem(last=False)[1])

    def close(self) -> None:
        """Cuts up whatever is still whole."""
        while self._open:
            _cut(self._open.popitem(last=False)[1])


def _harmless(func: Any) -> bool:
    if getattr(func, "__name__", "") not in _HARMLESS:
        return False
    owner = getattr(func, "__self__", None)
    return func.__name__ != "__get__" or getattr(owner, "__name__", "") in _HARMLESS_GETTERS


def _cut(parameter: Any) -> None:
    """Rank 0's values are everyone's, then each keeps its part."""
    from deepspeed import comm

    if parameter.ds_status.name != "AVAILABLE":
        return  # `Module.apply` has done so already
    with torch.no_grad():
        comm.broadcast(parameter.data.view(torch.uint8), 0, group=parameter.ds_process_group)
        parameter.partition(has_been_updated=True)


def _give_back() -> None:
    """Returns freed host memory to the system: else the C library keeps a hole for each weight that was cut up, and
    the process grows by the whole model after all."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it; others need it less
    if trim is not None:
        trim(0)


def _init_class() -> Any:
    """`zero.Init` with the changes of this module. A function, since importing DeepSpeed takes a while."""
    from deepspeed import zero

    class Init(zero.Init):  # type: ignore[misc]
        rung_touched: _Touched

        def _post_init_method(self, module: torch.nn.Module) -> None:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                self.rung_touched.close()
                for parameter in module.parameters(recurse=False):
                    if not hasattr(parameter, "ds_id") and parameter.dtype == torch.float32:
                        parameter.data = parameter.data.to(self.dtype)
                size = sum(p.numel() * p.element_size() for p in module.parameters(recurse=False))
                super()._post_init_method(module)
                if size >= _TRIM_BYTES:
                    _give_back()

        def _all_gather(self, *args: Any, **kwargs: Any) -> Any:
            with torch._C.DisableTorchFunction():
                return super()._all_gather(*args, **kwargs)

        def _partition(self, *args: Any, **kwargs: Any) -> Any:
            with torch._C.DisableTorchFunction():
                return super()._partition(*args, **kwargs)

        def _add_tensor_creation_wrappers(self) -> None:
            """Tensors are made as without DeepSpeed."""

        def _remove_tensor_creation_wrappers(self) -> None:
            """Nothing was changed."""

    return Init


class _Shapes(TorchFunctionMode):
    """Answers questions about the shape of a partitioned parameter with that of the whole."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], torch.nn.Parameter) and hasattr(args[0], "ds_shape"):
            name = getattr(func, "__name__", "")
            if name == "__get__":
                name = getattr(getattr(func, "__self__", None), "__name__", "")
            if name in _SHAPE_QUESTIONS:
                stand_in = torch.empty(args[0].ds_shape, dtype=args[0].dtype, device="meta")
                return func(stand_in, *args[1:], **kwargs)
        return func(*args, **kwargs)


_SHAPE_QUESTIONS = {"shape", "ndim", "dim", "ndimension", "size", "numel", "nelement", "__len__"}


def whole_shapes() -> AbstractContextManager[object]:
    """Inside, code that groups parameters by their shape sees whole parameters (`p.ndim < 2`: no weight decay)."""
    return _Shapes()
