"""Batch normalisation over several devices: statistics of one device's samples, or of all devices' together.

torch's own SyncBatchNorm runs on GPUs only and counts every sample that it is shown. This one runs on every device,
and leaves out the fillers that stand where a rank has no samples left in a step: synchronised, one micro-batch on each
of N devices gives what one process gives with the samples of all N in one micro-batch.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from rung.strategies.collectives import naming_peers


@dataclass(kw_only=True, slots=True)
class Peers:
    """The workers that share statistics. `empty`: this worker's micro-batch is a filler, whose samples do not count."""

    rank: int
    world: int
    deadline_s: float
    empty: bool = False

    def waiting(self) -> AbstractContextManager[None]:
        """For an exchange between them."""
        return naming_peers(self.rank, self.world, "while batch statistics were shared", self.deadline_s)


def adapt(model: torch.nn.Module, peers: Peers, *, together: bool) -> int:
    """Teaches the batch norms of `model` about fillers and, if `together`, to share their statistics.

    A SyncBatchNorm asks for that by itself; one with a process group of its own is left as it is. Only `forward` is
    replaced, on the instance: names of parameters and buffers, and evaluation, stay. Returns how many layers share.
    """
    sharing = 0
    for layer in model.modules():
        if not isinstance(layer, _BatchNorm) or getattr(layer, "process_group", None) is not None:
            continue
        shares = together or isinstance(layer, torch.nn.SyncBatchNorm)
        vars(layer)["forward"] = _forward(layer, layer.forward, peers, shares=shares)
        sharing += shares
    return sharing


@contextlib.contextmanager
def unrecognised(model: torch.nn.Module) -> Iterator[None]:
    """Within, torch's DDP does not see that `model` has SyncBatchNorms, which it refuses on a CPU by their type."""
    layers = [layer for layer in model.modules() if type(layer) is torch.nn.SyncBatchNorm]
    for layer in layers:
        layer.__class__ = torch.nn.BatchNorm1d  # type: ignore[assignment]
    try:
        yield
    finally:
        for layer in layers:
            layer.__class__ = torch.nn.SyncBatchNorm


def _forward(
    layer: _BatchNorm, forward: Callable[[torch.Tensor], torch.Tensor], peers: Peers, *, shares: bool
) -> Callable[[torch.Tensor], torch.Tensor]:
    def own(x: torch.Tensor) -> torch.Tensor:
        return _pass_through(layer, x) if peers.empty and layer.training else forward(x)

    def shared(x: torch.Tensor) -> torch.Tensor:
        if not layer.training:
            return forward(x)
        layer._check_input_dim(x)  # type: ignore[no-untyped-call]
        mean, var = (layer.running_mean, layer.running_var) if layer.track_running_stats else (None, None)
        momentum = layer.momentum
        if mean is not None and layer.num_batches_tracked is not None:
            layer.num_batches_tracked.add_(1)
            if momentum is None:  # the average over all batches
                momentum = 1.0 / float(layer.num_batches_tracked)
        scheme = (mean, var, momentum or 0.0, layer.eps, peers)
        return _Shared.apply(x, layer.weight, layer.bias, scheme)  # type: ignore[no-any-return,no-untyped-call]

    return shared if shares else own


def _pass_through(layer: _BatchNorm, x: torch.Tensor) -> torch.Tensor:
    """For a filler: uses the weights (every rank has to), and neither takes nor changes statistics."""
    mean, var = layer.running_mean, layer.running_var
    if mean is None or var is None:
        channels = x.size(1)
        mean, var = x.new_zeros(channels), x.new_ones(channels)
    return torch.nn.functional.batch_norm(x, mean, var, layer.weight, layer.bias, training=False, eps=layer.eps)


class _Shared(torch.autograd.Function):
    """Normalises with the mean and variance over the samples of all ranks.

    Forward: every rank's mean, sum of squared deviations and count are gathered, and combined as by Chan, Golub and
    LeVeque (Updating formulae and a pairwise algorithm for computing sample variances, 1979), which does not cancel.
    Backward, with n values a channel, x̂ the normalised input and sums over all ranks:
    dx = w / sqrt(var + eps) * (dy - (Σ dy + x̂ Σ dy x̂) / n).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        scheme: tuple[torch.Tensor | None, torch.Tensor | None, float, float, Peers],
    ) -> torch.Tensor:
        running_mean, running_var, momentum, eps, peers = scheme
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean, squares, n = _combined(wide, peers)
        var = squares / n
        if running_mean is not None and running_var is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            running_var.lerp_((squares / (n - 1)).to(running_var.dtype), momentum)
        scale = torch.rsqrt(var + eps)
        out = (wide - _shaped(mean, x)).mul_(_shaped(scale, x))
        ctx.peers, ctx.empty = peers, peers.empty
        ctx.save_for_backward(x, weight, mean, scale, n)
        if weight is not None:
            out.mul_(_shaped(weight, x))
        if bias is not None:
            out.add_(_shaped(bias, x))
        return out.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, scale, n = ctx.saved_tensors
        wide, wide_dy = x.to(mean.dtype), dy.to(mean.dtype)
        normal = (wide - _shaped(mean, x)).mul_(_shaped(scale, x))
        own = torch.stack([wide_dy.sum(_others(x)), (wide_dy * normal).sum(_others(x))])
        dx = None
        if ctx.needs_input_grad[0]:
            sums = own.clone()
            with ctx.peers.waiting():
                dist.all_reduce(sums)
            sums /= -n
            factor = _shaped(scale if weight is None else scale * weight, x)
            if ctx.empty:  # a filler has no part in the statistics
                dx = wide_dy * factor
            else:
                dx = normal.mul_(_shaped(sums[1], x)).add_(_shaped(sums[0], x)).add_(wide_dy).mul_(factor)
            dx = dx.to(x.dtype)
        d_bias, d_weight = own.unbind()
        return (
            dx,
            d_weight.to(weight.dtype) if ctx.needs_input_grad[1] else None,
            d_bias.to(d_bias.dtype if weight is None else weight.dtype) if ctx.needs_input_grad[2] else None,
            None,
        )


def _combined(x: torch.Tensor, peers: Peers) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Over all ranks, for each channel: mean, sum of squared deviations from it, and the count (a scalar).

    Raises ValueError, on every rank, when all of them together hold one value a channel.
    """
    channels = x.size(1)
    count = 0 if peers.empty else x.numel() // channels
    own = x.new_zeros(2 * channels + 1)
    if count:
        var, mean = torch.var_mean(x, _others(x), correction=0)
        own = torch.cat([mean, var * count, x.new_full((1,), count)])
    every = x.new_empty(peers.world, own.numel())
    with peers.waiting():
        dist.all_gather(list(every.unbind()), own)
    means, squares, counts = every[:, :channels], every[:, channels:-1], every[:, -1:]
    n = counts.sum()
    if count <= 1 and float(n) <= 1:  # read, which waits for the device, only where it may be so
        raise ValueError(f"Expected more than 1 value per channel when training, over all {peers.world} devices")
    mean = (means * counts).sum(0) / n
    return mean, (squares + counts * (means - mean).square()).sum(0), n


def _others(x: torch.Tensor) -> list[int]:
    """All dimensions but the channels'."""
    return [d for d in range(x.dim()) if d != 1]


def _shaped(per_channel: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return per_channel.view(1, -1, *([1] * (x.dim() - 2)))
