"""Batch, group, instance, layer and root-mean-square norm with the statistics of the whole image.

For the first three every rank computes the mean and the sum of squared deviations of the pixels that it owns; those are
gathered and merged in float64 by the formula of Chan, Golub and LeVeque (1979), so that a mean of 1000 with unit
variance keeps its digits, and every rank gets the same bits. Backward needs two sums per channel. What is saved is the
input and two vectors.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mpi4dl.comm import Communicator
from mpi4dl.comm.exchange import narrow
from mpi4dl.geometry import AXES, BATCH
from mpi4dl.parallel.spatial.grid import Layout
from mpi4dl.parallel.spatial.halo import retile
from mpi4dl.parallel.spatial.rules.windows import in_plain_dtype
from mpi4dl.parallel.spatial.tensor import SpatialTensor, refusal, register, wrap

aten = torch.ops.aten
Statistics = tuple[Tensor, Tensor, int]


def _moments(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The mean and the biased variance of each channel (dim 1)."""
    if not x.is_cpu:
        return torch.batch_norm_update_stats(x, None, None, 0.0)
    x = x.float() if x.itemsize < 4 else x
    # On CPUs several times faster, and no less exact: shift by the rounded mean, then take both sums in one pass of the
    # kernel that batch norm's backward takes its sums with.
    shift = x.mean([d for d in range(x.dim()) if d != 1])
    centred = x - shift.view(-1, *[1] * (x.dim() - 2))
    zeros, ones = torch.zeros_like(shift), torch.ones_like(shift)
    _, squares, rest = aten.native_batch_norm_backward(
        centred, centred, ones, zeros, ones, None, None, False, 0.0, [False, True, True]
    )
    remainder = rest.double() / count
    return shift.double() + remainder, squares.double() / count - remainder**2


def _merge(own: Tensor, counts: Sequence[int], comm: Communicator) -> tuple[Tensor, Tensor]:
    """Mean and biased variance (float64) of each channel (dim 1) of all ranks' tensors, of so many pixels each."""
    channels = own.shape[1]
    if own.is_meta:
        comm.all_gather(own.new_empty(2 * channels, dtype=torch.float64))
        return own.new_empty(channels), own.new_empty(channels)
    mine = own.new_zeros(2, channels, dtype=torch.float64)
    if own.numel():
        mine[0], mine[1] = _moments(own, own.numel() // channels)
    if comm.size == 1:
        return mine[0], mine[1]
    means, variances = comm.all_gather(mine).unbind(1)  # (ranks, channels) each
    total = max(sum(counts), 1)
    mean = torch.zeros_like(means[0])
    for count, each in zip(counts, means, strict=True):
        mean.add_(each, alpha=count / total)
    variance = torch.zeros_like(mean)
    for count, each, of_rank in zip(counts, means, variances, strict=True):
        variance.add_(of_rank + (each - mean) ** 2, alpha=count / total)
    return mean, variance


class _Normalize(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps) * weight + bias, with statistics over all dims but 1, and over all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        layout: Layout,
        comm: Communicator,
        counts: Sequence[int],
    ) -> tuple[Tensor, Tensor, Tensor]:
        own = narrow(x, layout.dims, layout.held, layout.owned) if layout.wide else x
        mean, variance = _merge(own, counts, comm)
        kind = weight.dtype if weight is not None else torch.float64 if x.dtype == torch.float64 else torch.float32
        ctx.mark_non_differentiable(mean, variance)
        ctx.layout, ctx.comm, ctx.count, ctx.eps = layout, comm, sum(counts), eps
        short_mean, short_variance = mean.to(kind), variance.to(kind)
        ctx.save_for_backward(x, weight, short_mean, short_variance)
        ctx.has_bias = bias is not None
        if x.numel() == 0:
            return torch.zeros_like(x), mean, variance
        y = aten.native_batch_norm(x, weight, bias, short_mean, short_variance, False, 0.0, eps)[0]
        return y, mean, variance

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, weight, mean, variance = ctx.saved_tensors
        comm: Communicator = ctx.comm
        invstd = torch.rsqrt(variance + ctx.eps)
        nothing = mean.new_empty(0)  # saved statistics: kernels of CUDA ask for tensors, and look at none of these
        if x.numel():
            _, sum_scaled, total = aten.native_batch_norm_backward(
                gradient.contiguous(),
                x,
                torch.ones_like(mean),
                mean,
                variance,
                nothing,
                nothing,
                False,
                ctx.eps,
                [False, True, True],
            )
        else:
            sum_scaled, total = torch.zeros_like(mean), torch.zeros_like(mean)
        slope = invstd if weight is None else weight * invstd
        gradient_weight = sum_scaled.clone() if weight is not None else None
        gradient_bias = total.clone() if ctx.has_bias else None
        gradient_x = None
        if ctx.needs_input_grad[0]:
            both = comm.all_reduce(torch.stack([sum_scaled, total]).double())
            sum_scaled, total = (-slope * both / ctx.count).to(mean.dtype)
            layout: Layout = ctx.layout
            if x.numel() == 0:
                gradient_x = torch.zeros_like(x)
            elif layout.wide:
                gradient_x = gradient * slope.view(-1, *[1] * (x.dim() - 2)).to(gradient.dtype)
                own = narrow(x, layout.dims, layout.held, layout.owned).contiguous()
                through = aten.native_batch_norm(own, sum_scaled, total, mean, variance, False, 0.0, ctx.eps)[0]
                narrow(gradient_x, layout.dims, layout.held, layout.owned).add_(through)
            else:
                gradient_x = aten.native_batch_norm(x, sum_scaled, total, mean, variance, False, 0.0, ctx.eps)[0]
                gradient_x.addcmul_(gradient, slope.view(-1, *[1] * (x.dim() - 2)).to(gradient.dtype))
        return gradient_x, gradient_weight, gradient_bias, None, None, None, None


def _pixels(layout: Layout, axes: Sequence[int], each: int) -> tuple[Communicator, list[int]]:
    """The ranks that share what is normalized along these axes, and how much each owns: `each` for every pixel."""
    axes = tuple(axis for axis in axes if layout.dims[axis] is not None)
    splits = [layout.tiling.splits[axis] for axis in axes]
    lengths = [[split.owned(part).length for part in range(split.parts)] for split in splits]
    return layout.grid.along(axes), [each * math.prod(of_rank) for of_rank in itertools.product(*lengths)]


@register(F.batch_norm)
def batch_norm(
    input: SpatialTensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    if input.layout.axis(1) is not None:
        raise refusal("torch.nn.functional.batch_norm", "dim 1 is not the channels here")
    layout, x = input.layout, input.local
    if not training:
        assert running_mean is not None
        assert running_var is not None
        return wrap(F.batch_norm(x, running_mean, running_var, weight, bias, False, momentum, eps), layout)
    comm, counts = _pixels(layout, AXES, math.prod(n for d, n in enumerate(x.shape) if d != 1 and d not in layout.dims))
    count = sum(counts)
    y, mean, variance = _Normalize.apply(x, weight, bias, eps, layout, comm, counts)
    if count < 2 and not x.is_meta:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {tuple(input.shape)}")
    with torch.no_grad():
        if running_mean is not None:
            running_mean.mul_(1 - momentum).add_(mean.to(running_mean.dtype), alpha=momentum)
        if running_var is not None:
            unbiased = variance * (count / max(count - 1, 1))
            running_var.mul_(1 - momentum).add_(unbiased.to(running_var.dtype), alpha=momentum)
    return wrap(y, layout)


@register(torch.batch_norm)
def torch_batch_norm(
    input: SpatialTensor, weight: Any, bias: Any, running_mean: Any, running_var: Any, training: bool, *rest: Any
) -> Tensor:
    """The same with its arguments in another order."""
    return batch_norm(input, running_mean, running_var, weight, bias, training, *rest)


def _affine(y: Tensor, weight: Tensor | None, bias: Tensor | None, shape: tuple[int, ...] | None) -> Tensor:
    """y * weight + bias, which may be seen in another shape, in the dtype of y, which may have fewer bits than they."""
    dtype = y.dtype
    if weight is not None:
        y = y * (weight if shape is None else weight.view(shape))
    if bias is not None:
        y = y + (bias if shape is None else bias.view(shape))
    return y.to(dtype)


@register(F.group_norm, torch.group_norm)
def group_norm(
    input: SpatialTensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    """Statistics over the channels of a group and the whole image, for each sample."""
    input = in_plain_dtype(input, lambda image: F.group_norm(image, 1))
    return _by_sample(input, num_groups, weight, bias, eps, "torch.nn.functional.group_norm")[0]


@register(F.instance_norm)
def instance_norm(
    input: SpatialTensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    if not use_input_stats:
        return batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    y, statistics = _by_sample(input, input.shape[1], weight, bias, eps, "torch.nn.functional.instance_norm")
    if running_mean is not None:
        _track(input.layout, (running_mean, running_var), statistics, momentum)
    return y


def _track(layout: Layout, running: tuple[Tensor, Tensor | None], statistics: Statistics, momentum: float) -> None:
    """Running statistics of instance norm: the means, over the batch, of each sample's mean and unbiased variance."""
    mean, variance, count = statistics
    channels = running[0].shape[0]
    values = torch.stack([mean, variance * (count / max(count - 1, 1))]).view(2, -1, channels)
    samples = torch.full((2, 1, channels), float(values.shape[1]), dtype=values.dtype, device=values.device)
    sums = torch.cat([values.sum(1, keepdim=True), samples], 1)
    if layout.cut(0):
        sums = layout.grid.along((BATCH,)).all_reduce(sums)
    with torch.no_grad():
        for buffer, (total, number) in zip(running, sums, strict=True):
            if buffer is not None:
                buffer.mul_(1 - momentum).add_((total / number).to(buffer.dtype), alpha=momentum)


def _by_sample(
    x: SpatialTensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, name: str
) -> tuple[Tensor, Statistics]:
    """The normalized image; mean and biased variance of each sample's groups, in this order, and the count behind."""
    if x.layout.axis(1) is not None or x.layout.dims[BATCH] not in (None, 0):
        raise refusal(name, "dims 0 and 1 are not batch and channels here")
    if x.shape[1] % groups:
        raise ValueError(f"`num_channels` (={x.shape[1]}) must be divisible by `num_groups` (={groups})")
    x = retile(x, x.layout.narrow.tiling)
    local = x.local
    n, c, h, *rest = local.shape
    rows = local.reshape(1, n * groups, c // groups * h, *rest)
    others = [n for d, n in enumerate(local.shape) if d > 1 and d not in x.layout.dims]
    comm, counts = _pixels(x.layout, AXES[1:], c // groups * math.prod(others))
    y, mean, variance = _Normalize.apply(rows, None, None, eps, x.layout, comm, counts)
    y = _affine(wrap(y.view(local.shape), x.layout), weight, bias, (1, -1, *[1] * (x.dim() - 2)))
    return y, (mean, variance, sum(counts))


@register(F.local_response_norm)
def local_response_norm(input: SpatialTensor, size: int, *args: Any, **kwargs: Any) -> Tensor:
    """Over neighbouring channels, the same for every pixel."""
    if input.layout.axis(1) is not None:
        raise refusal("torch.nn.functional.local_response_norm", "dim 1 is not the channels here")
    return wrap(F.local_response_norm(input.local, size, *args, **kwargs), input.layout)


@register(F.layer_norm, torch.layer_norm)
def layer_norm(
    input: SpatialTensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    """Local where the normalized dims are not cut, as in ConvNeXt; where they are, a root mean square of deviations."""
    last = _last_dims(input, normalized_shape)
    if not any(input.layout.cut(dim) for dim in last):
        return wrap(F.layer_norm(input.local, normalized_shape, weight, bias, eps), input.layout)
    input = in_plain_dtype(input, lambda image: F.layer_norm(image, image.shape[-1:]))
    x = input.float() if input.itemsize < 4 else input
    return _affine(_by_root_mean_square(x - x.mean(tuple(last), True), last, eps), weight, bias, None).to(input.dtype)


@register(F.rms_norm, torch.rms_norm)
def rms_norm(
    input: SpatialTensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    last = _last_dims(input, normalized_shape)
    if not any(input.layout.cut(dim) for dim in last):
        return wrap(F.rms_norm(input.local, normalized_shape, weight, eps), input.layout)
    input = in_plain_dtype(input, lambda image: F.rms_norm(image, image.shape[-1:]))
    x = input.float() if input.itemsize < 4 else input
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return _affine(_by_root_mean_square(x, last, eps), weight, None, None).to(input.dtype)


def _last_dims(x: Tensor, normalized_shape: Sequence[int]) -> range:
    last = range(x.dim() - len(normalized_shape), x.dim())
    if tuple(normalized_shape) != tuple(x.shape[last.start :]):
        raise RuntimeError(f"normalized_shape={list(normalized_shape)} does not fit a tensor of {tuple(x.shape)}")
    return last


def _by_root_mean_square(x: Tensor, dims: Sequence[int], eps: float) -> Tensor:
    return x * ((x * x).mean(tuple(dims), True) + eps).rsqrt()
