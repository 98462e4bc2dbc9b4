"""The arithmetic of a norm whose pixels several ranks share out: statistics, their merging, and gradients.

    any device      a mean and sums of squares for each channel; merged in float64, on CPUs by numpy
    CUDA            the kernels of PyTorch's own SyncBatchNorm

A `Norm` says what is normalized, and by whom. Both kinds of `Kernels` are used in the same way: `told` is what ranks
tell each other, `merged` makes of it what is saved, `applied` and `gradient` are the norm and its adjoint, and `sums`
is what ranks tell each other in the backward pass.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mpi4dl.comm import Communicator
from mpi4dl.comm.blocks import Blocks
from mpi4dl.comm.exchange import Exchange, Like, narrow, shape_of
from mpi4dl.geometry import Box
from mpi4dl.parallel.cpu_kernels import CPU, OF_BATCH_NORM, batch_norm_backward
from mpi4dl.parallel.spatial.grid import Layout

# A few numbers for each channel: each rank's sums of its pixels, and the moments of all ranks' pixels made of them.
#
# An operator of PyTorch's takes a microsecond or two for them, whatever it does: so there are to be few operators, and
# on CPUs it is numpy that calculates, which takes a quarter of that.

backward_of_batch_norm = torch.ops.aten.native_batch_norm_backward.default  # of any device
OTHERS = {ndim: ([d for d in range(ndim) if d != 1],) for ndim in range(2, 7)}  # all dims but that of channels
BLOCK_PIXELS, BLOCK_NUMBERS = 1 << 13, 1 << 20  # sums of more float32 numbers in a row lose digits, caches end
FEW_NUMBERS = 2 * BLOCK_PIXELS
PER_CHANNEL = {ndim: (-1, *(1,) * (ndim - 2)) for ndim in range(2, 7)}  # the shape of a number for each, beside x


Rows = tuple[Tensor, ...]  # numbers for each channel, each of (C,)
Constants = Callable[[int, torch.dtype, torch.device], tuple[Tensor, Tensor, Tensor]]


def constants_of(count: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Zeros and ones for so many channels, and a tensor without elements, which nobody writes to."""
    with torch.inference_mode(False):
        ones = torch.ones(count, dtype=dtype, device=device)
        return torch.zeros_like(ones), ones, torch.empty(0, dtype=dtype, device=device)


def counts_of(counts: Sequence[int], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """How many pixels each rank has, as the kernels of CUDA take it forward and backward."""
    with torch.inference_mode(False):
        each = torch.tensor(counts, dtype=torch.int32, device=device)
        return each.to(dtype), each


def blocks_of(x: Tensor) -> Sequence[Tensor]:
    """x (N, C, ...) in parts along its longest other dim, each with few pixels of a channel, and few numbers."""
    pixels = x.numel() // x.shape[1]
    most = min(BLOCK_PIXELS, max(1, BLOCK_NUMBERS // x.shape[1]))
    if pixels <= 2 * most:
        return (x,)
    dim = max(*OTHERS[x.dim()], key=x.shape.__getitem__)
    return x.split(max(1, most * x.shape[dim] // pixels), dim)


class Shares(NamedTuple):
    """One over how many numbers each rank has, (ranks, 1), and which share of all, (ranks,)."""

    inverses: Any
    shares: Any

    @classmethod
    def of(cls, counts: Sequence[int], device: torch.device) -> "Shares":
        with torch.inference_mode(False):
            each = torch.tensor(counts, dtype=torch.float64, device=device)
            return cls(numbers(1 / each.clamp(min=1)[:, None]), numbers(each / max(sum(counts), 1)))


def numbers(x: Tensor) -> Any:
    """A few numbers in float64, to calculate with: on CPUs an array of numpy, of the same memory if x is float64."""
    x = x.detach()
    return x.numpy().astype(np.float64, copy=False) if x.is_cpu and x.dtype in EXACT else _as_numbers(x.double())


EXACT = (torch.float32, torch.float64)  # what numpy has, too


def _as_numbers(x: Tensor) -> Any:
    return x.numpy() if x.is_cpu else x


def joined(of_ranks: Tensor, shares: Shares, count: int) -> Tensor:
    """The `sums_around` of several ranks together, which have `count` numbers a channel: (3, C), in float64."""
    sums = torch.zeros(3, of_ranks.shape[2], dtype=torch.float64, device=of_ranks.device)
    if not sums.is_meta:  # a dry run has no values
        found = _as_numbers(sums)
        with np.errstate(all="ignore"):
            found[0], variance = _mean_and_variance(numbers(of_ranks), shares)
            found[1] = variance * count
    return sums


def _mean_and_variance(values: Any, shares: Shares) -> tuple[Any, Any]:
    """Of all numbers of each channel, from each rank's (ranks, 3, C): by Chan, Golub and LeVeque (1979)."""
    inverse, share = shares
    rest = values[:, 2] * inverse
    means = values[:, 0] + rest
    mean = share @ means
    means -= mean
    variances = values[:, 1] * inverse
    variances += means * means - rest * rest
    return mean, share @ variances


class Sharers(NamedTuple):
    """The ranks of a grid that share what is normalized, and how many numbers of a channel each owns."""

    comm: Communicator
    ranks: tuple[int, ...]
    counts: tuple[int, ...]
    blocks: Blocks | None


def sharers(layout: Layout, axes: Sequence[int], each: int) -> Sharers:
    """Those who share what is normalized along these axes, in which every pixel counts `each` times."""
    axes = tuple(axis for axis in axes if layout.dims[axis] is not None)
    splits = [layout.tiling.splits[axis] for axis in axes]
    lengths = [[split.owned(part).length for part in range(split.parts)] for split in splits]
    counts = tuple(each * math.prod(of_rank) for of_rank in itertools.product(*lengths))
    comm = layout.grid.along(axes)
    return Sharers(comm, layout.grid.ranks_along(axes), counts, comm.blocks)


class Norm:
    """One normalization: of tensors of `layout`, to be held as `output` says."""

    def __init__(self, layout: Layout, output: Layout, among: Sharers, eps: float) -> None:
        self.layout, self.output, self.among, self.eps = layout, output, among, eps
        self.wide = layout.wide
        self.count = sum(among.counts)
        self.constants = cache(constants_of)
        counts = among.counts if among.blocks is None else (self.count,)
        self.shares = cache(partial(Shares.of, counts))  # of how many numbers each rank knows the sums: by device
        self.shares_of = cache(Shares.of)
        self.counts = cache(partial(counts_of, counts))

    def all_moments(self, mine: Tensor) -> Tensor:
        """What all ranks told, (ranks, rows, C); (1, rows, C), of all together, where there are too many of them."""
        blocks = self.among.blocks
        if blocks is None:
            return self.among.comm.all_gather(mine)
        return blocks.combine(mine, self._joined)[None]

    def _joined(self, parts: Tensor, level: int) -> Tensor:
        counts = self._counts[level]
        return joined(parts, self.shares_of(counts, parts.device), sum(counts))

    @cached_property
    def _counts(self) -> list[tuple[int, ...]]:
        """How many numbers a channel the parts have that are joined at each level."""
        blocks, counts = self.among.blocks, self.among.counts
        levels = () if blocks is None else blocks.spans
        return [tuple(sum(counts[span.start : span.stop]) for span in spans) for spans in levels]

    @cached_property
    def exchange(self) -> Exchange | None:
        """The exchange of strips of the input that this rank normalizes for the next layers."""
        layout, output = self.layout, self.output
        return None if output.tiling == layout.tiling else layout.exchange_to(output.tiling)

    @cached_property
    def alone(self) -> bool:
        """Whether this rank has all that is normalized, and nothing to fetch."""
        return self.among.comm.size == 1 and self.exchange is None and not self.wide

    def own(self, x: Tensor) -> Tensor:
        """The owned part of x."""
        layout = self.layout
        return narrow(x, layout.dims, layout.held, layout.owned) if layout.wide else x

    def within(self, y: Tensor, box: Box) -> Tensor:
        """This box of y, this rank's part of the output."""
        return narrow(y, self.output.dims, self.output.held, box)

    @property
    def boxes(self) -> list[Box]:
        """Where the strips lie."""
        return [] if self.exchange is None else [slab.box for slab in self.exchange.plan.receives]


Tracked = tuple[Tensor | None, Tensor | None, float]  # running statistics, and the share of a new value in them
UNTRACKED: Tracked = (None, None, 0.0)


class Kernels:
    """Those that any device has."""

    SAVED = 1  # tensors that `merged` returns to be saved
    KEEP_FORMAT = False  # whether gradients are to lie in memory as x does

    def told(self, norm: Norm, own: Tensor) -> Rows:
        """Of each channel a number near its mean, and the sums of the squared distances to it and of the distances.

        Rows of (C,), in float32 or float64.
        """
        if own.is_meta or not own.numel():
            return own.new_zeros(3, own.shape[1], dtype=torch.promote_types(own.dtype, torch.float32)).unbind()
        if not own.is_cpu:
            mean, variance = torch.batch_norm_update_stats(own, None, None, 0.0)
            return mean, variance * (own.numel() // own.shape[1]), torch.zeros_like(mean)
        # Several times faster than `var_mean`, and no less exact: shift by the rounded mean, then take both sums in one
        # pass of the kernel that batch norm's backward takes its sums with. It adds one number after the other in their
        # own type, so it gets blocks, which also stay in the cache.
        own = own.float() if own.itemsize < 4 else own
        near = own.mean(*OTHERS[own.dim()])
        zeros, ones, _ = norm.constants(len(near), near.dtype, near.device)
        found: list[Tensor] = []
        shape = PER_CHANNEL[own.dim()]
        for block in (own,) if own.numel() <= FEW_NUMBERS else blocks_of(own):
            centred = block - near.view(shape)
            found += OF_BATCH_NORM.call_boxed(
                CPU, centred, centred, ones, zeros, ones, None, None, False, 0.0, [False, True, True]
            )[1:]
        if len(found) == 2:
            return near, found[0], found[1]
        return near, *torch.stack(found).unflatten(0, (-1, 2)).sum(0, dtype=torch.float64).to(near.dtype)

    def merged(
        self, norm: Norm, x: Tensor, theirs: Tensor, weight: Tensor | None, tracked: Tracked
    ) -> tuple[Sequence[Tensor], Tensor | None]:
        """Of what all ranks told, (ranks, rows, C): what is to be saved; then moments, or none, if `tracked` has them.

        Their rows 0 and 2 are mean and unbiased variance. Saved in float64 or the type of the weight, (5, C): the mean,
        the biased and the unbiased variance, the slope, weight / sqrt(variance + eps), and what the slope is for the
        mean, -slope / count.
        """
        moments = torch.empty(5, theirs.shape[2], dtype=torch.float64, device=theirs.device)
        if not moments.is_meta:  # a dry run has no values
            found, count = _as_numbers(moments), max(norm.count, 1)
            with np.errstate(all="ignore"):  # infinities are for the model to find, as in PyTorch
                found[0], variance = _mean_and_variance(numbers(theirs), norm.shares(theirs.device))
                found[1] = variance
                found[2] = variance * (count / max(count - 1, 1))
                slope = ((variance + norm.eps) ** 0.5) ** -1
                found[3] = slope = slope if weight is None else slope * numbers(weight)
                found[4] = slope * (-1 / count)
        kind = weight.dtype if weight is not None else torch.float64 if x.dtype == torch.float64 else torch.float32
        short = moments.to(kind)
        return [short], moments if kind.itemsize < 4 else short

    def applied(
        self, norm: Norm, x: Tensor, strips: Sequence[Tensor], saved: Sequence[Tensor], weight: Any, bias: Any
    ) -> Tensor:
        """This rank's part of the output: of x, and of strips that others own."""
        mean, variance = saved[0][0], saved[0][1]
        if norm.exchange is None:
            return _scaled(x, weight, bias, mean, variance, norm.eps)
        # A kernel that writes with strides takes five times as long as a copy.
        parts = [_scaled(part, weight, bias, mean, variance, norm.eps) for part in (norm.own(x), *strips)]
        return _side_by_side(norm, x, parts)

    def parts(self, norm: Norm, gradient: Tensor, x: Tensor, strips: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """The owned parts of the gradient, to be changed, and of x; then the strips of both."""
        like = Like.of(x).memory_format if self.KEEP_FORMAT else torch.contiguous_format
        if norm.exchange is None:
            return [(gradient.contiguous(memory_format=like), x)]
        own = norm.within(gradient, norm.output.owned).clone(memory_format=like)
        around = (norm.within(gradient, box).contiguous(memory_format=like) for box in norm.boxes)
        return [(own, norm.own(x)), *zip(around, strips, strict=True)]

    def sums(
        self, norm: Norm, parts: Sequence[tuple[Tensor, Tensor]], saved: Sequence[Tensor]
    ) -> tuple[Rows | Tensor, Rows | Tensor]:
        """What ranks tell each other, two rows of (C,); and the gradients of weight and bias."""
        mean, variance = saved[0][0], saved[0][1]
        _, ones, nothing = norm.constants(len(mean), mean.dtype, mean.device)
        found: Tensor | None = None
        for gradient, x in parts:
            if x.numel():
                # As PyTorch calls it in evaluation mode: with saved statistics that are empty, since CUDA's kernel
                # takes what it finds there for the mean and 1/std (aten/src/ATen/native/cuda/Normalization.cu).
                function = batch_norm_backward if x.is_cpu else backward_of_batch_norm
                _, scaled, plain = function(
                    gradient, x, ones, mean, variance, nothing, nothing, False, norm.eps, [False, True, True]
                )
                sums = torch.stack((scaled, plain))
                found = sums if found is None else found.add_(sums)
        found = mean.new_zeros(2, len(mean)) if found is None else found
        return found.double(), found

    def slope(self, saved: Sequence[Tensor], weight: Tensor | None) -> Tensor:
        """weight / sqrt(variance + eps)."""
        return saved[0][3]

    def gradient(
        self,
        norm: Norm,
        gradient: Tensor,
        x: Tensor,
        saved: Sequence[Tensor],
        weight: Tensor | None,
        theirs: Tensor,
    ) -> Tensor:
        """The gradient of the owned x, from that of the output and what all ranks told, (*, 2, C)."""
        mean, variance, _, slope, of_sums = saved[0].unbind()
        factor, constant = (theirs.sum(0) * of_sums).to(slope.dtype).unbind()
        result = _scaled(x.contiguous() if norm.layout.wide else x, factor, constant, mean, variance, norm.eps)
        return result.addcmul_(gradient, slope.view(PER_CHANNEL[x.dim()]).to(gradient.dtype))


class CudaKernels(Kernels):
    """Those of torch.nn.SyncBatchNorm (torch/nn/modules/_functions.py), which read x once each.

    They know no rank without pixels, and count pixels in 32 bits.
    """

    SAVED, KEEP_FORMAT = 2, True
    MOST_PIXELS = 2**31 - 1

    def told(self, norm: Norm, own: Tensor) -> Rows:
        return torch.batch_norm_stats(own.contiguous(memory_format=Like.of(own).memory_format), norm.eps)

    def merged(
        self, norm: Norm, x: Tensor, theirs: Tensor, weight: Tensor | None, tracked: Tracked
    ) -> tuple[Sequence[Tensor], Tensor | None]:
        counts, _ = norm.counts(theirs.dtype, theirs.device)
        mean, variance, momentum = tracked
        moments = None
        if mean is None or variance is None or {mean.dtype, variance.dtype} != {theirs.dtype}:
            moments = theirs.new_zeros(3, theirs.shape[2])
            mean, variance, momentum = moments[0], moments[2], 1.0
        saved = torch.batch_norm_gather_stats_with_counts(
            x, theirs[:, 0], theirs[:, 1], mean, variance, momentum, norm.eps, counts
        )
        return saved, moments

    def applied(
        self, norm: Norm, x: Tensor, strips: Sequence[Tensor], saved: Sequence[Tensor], weight: Any, bias: Any
    ) -> Tensor:
        x = x if norm.exchange is None else _side_by_side(norm, x, (norm.own(x), *strips))
        mean, invstd = saved
        return torch.batch_norm_elemt(x, weight, bias, mean, invstd, norm.eps)

    def sums(
        self, norm: Norm, parts: Sequence[tuple[Tensor, Tensor]], saved: Sequence[Tensor]
    ) -> tuple[Rows | Tensor, Rows | Tensor]:
        mean, invstd = saved
        _, ones, _ = norm.constants(len(mean), mean.dtype, mean.device)
        found = [
            torch.batch_norm_backward_reduce(gradient, x, mean, invstd, ones, True, True, True)
            for gradient, x in parts
            if x.numel()
        ]
        for more in found[1:]:
            torch._foreach_add_(found[0], more)
        plain, scaled, of_weight, of_bias = found[0]
        return (plain, scaled), (of_weight, of_bias)

    def slope(self, saved: Sequence[Tensor], weight: Tensor | None) -> Tensor:
        return saved[1] if weight is None else saved[1] * weight

    def gradient(
        self,
        norm: Norm,
        gradient: Tensor,
        x: Tensor,
        saved: Sequence[Tensor],
        weight: Tensor | None,
        theirs: Tensor,
    ) -> Tensor:
        _, counts = norm.counts(theirs.dtype, theirs.device)
        like = Like.of(x).memory_format
        gradient, x = (t.contiguous(memory_format=like) for t in (gradient, x))
        weight = None if weight is None else weight.to(theirs.dtype)
        mean, invstd = saved
        plain, scaled = theirs.sum(0) if len(theirs) > 1 else theirs[0]
        return torch.batch_norm_backward_elemt(gradient, x, mean, invstd, weight, plain, scaled, counts)


ANYWHERE, ON_CUDA = Kernels(), CudaKernels()


def kernels_for(norm: Norm) -> Kernels:
    """Those for a norm on a GPU."""
    few = norm.among.blocks is None and norm.count <= CudaKernels.MOST_PIXELS
    return ON_CUDA if few and min(norm.among.counts) else ANYWHERE


def _side_by_side(norm: Norm, x: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """What belongs to the owned pixels, then to the strips, as it lies in this rank's part of the output."""
    shape = shape_of(norm.output.held, norm.output.dims, x.shape)
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=Like.of(x).memory_format)
    for part, box in zip(parts, (norm.output.owned, *norm.boxes), strict=True):
        norm.within(y, box).copy_(part)
    return y


def _scaled(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor, eps: float
) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias."""
    if x.numel() == 0:
        return torch.zeros_like(x)
    return torch.native_batch_norm(x, weight, bias, mean, variance, False, 0.0, eps)[0]


def gradient_of(
    norm: Norm,
    kernels: Kernels,
    own: tuple[Tensor, Tensor],
    saved: Sequence[Tensor],
    weight: Tensor | None,
    strips: Sequence[Tensor],
    theirs: Tensor,
) -> Tensor:
    """The gradient of x, this rank's part, once the strips of others have come and the sums of all ranks, (*, 2, C)."""
    gradient, x = own
    if norm.exchange is None and norm.layout.wide:
        # A halo that somebody else brought here: its gradient is for them to take back.
        held = gradient * kernels.slope(saved, weight).view(PER_CHANNEL[x.dim()]).to(gradient.dtype)
        norm.own(held).copy_(kernels.gradient(norm, norm.own(gradient), norm.own(x), saved, weight, theirs))
        return held
    if norm.exchange is not None:
        for slab, strip in zip(norm.exchange.plan.sends, strips, strict=True):
            narrow(gradient, norm.layout.dims, norm.layout.owned, slab.box).add_(strip)
    result = kernels.gradient(norm, gradient, x, saved, weight, theirs)
    if not norm.layout.wide:
        return result
    held = result.new_zeros(shape_of(norm.layout.held, norm.layout.dims, x.shape))
    norm.own(held).copy_(result)
    return held
