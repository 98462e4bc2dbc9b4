"""Batch, group, instance, layer and root-mean-square norm with the statistics of the whole image."""

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from mpi4dl.comm import Communicator
from mpi4dl.comm.blocks import Blocks
from mpi4dl.comm.exchange import BACKWARD_TAG, FORWARD_TAG, Exchange, Like, narrow, once_differentiable, shape_of
from mpi4dl.comm.packing import Piece
from mpi4dl.geometry import BATCH, Box, Tiling, widest
from mpi4dl.parallel.spatial.grid import Layout
from mpi4dl.parallel.spatial.halo import gather
from mpi4dl.parallel.spatial.halo_prefetch import HaloPrefetch, Source
from mpi4dl.parallel.spatial.rules.convolution import as_own, of_channels, own_channels
from mpi4dl.parallel.spatial.rules.windows import in_plain_dtype
from mpi4dl.parallel.spatial.sums import shared, with_all_features
from mpi4dl.parallel.spatial.tensor import SpatialTensor, refusal, register, substitutes, wrap

# A few numbers for each channel: each rank's sums of its pixels, and the moments of all ranks' pixels made of them.
#
# An operator of PyTorch's takes a microsecond or two for them, whatever it does: so there are to be few operators, and
# on CPUs it is numpy that calculates, which takes a quarter of that.

backward_of_batch_norm = torch.ops.aten.native_batch_norm_backward.default
OTHERS = {ndim: ([d for d in range(ndim) if d != 1],) for ndim in range(2, 7)}  # all dims but that of channels
PER_CHANNEL = {ndim: (-1, *(1,) * (ndim - 2)) for ndim in range(2, 7)}  # the shape of a number for each, beside x


Constants = Callable[[int, torch.dtype, torch.device], tuple[Tensor, Tensor, Tensor]]


def constants_of(count: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Zeros and ones for so many channels, and a tensor without elements, which nobody writes to."""
    with torch.inference_mode(False):
        ones = torch.ones(count, dtype=dtype, device=device)
        return torch.zeros_like(ones), ones, torch.empty(0, dtype=dtype, device=device)


def sums_around(own: Tensor, constants: Constants) -> Tensor:
    """Of each channel (dim 1) a number near its mean, and the sums of the squared distances to it and of the distances.

    (3, C), in float32 or float64.
    """
    if own.is_meta or not own.numel():
        return own.new_zeros(3, own.shape[1], dtype=torch.float64 if own.dtype == torch.float64 else torch.float32)
    if not own.is_cpu:
        mean, variance = torch.batch_norm_update_stats(own, None, None, 0.0)
        return torch.stack((mean, variance * (own.numel() // own.shape[1]), torch.zeros_like(mean)))
    # Several times faster than `var_mean`, and no less exact: shift by the rounded mean, then take both sums in one
    # pass of the kernel that batch norm's backward takes its sums with.
    own = own.float() if own.itemsize < 4 else own
    near = own.mean(*OTHERS[own.dim()])
    centred = own - near.view(PER_CHANNEL[own.dim()])
    zeros, ones, _ = constants(len(near), near.dtype, near.device)
    _, squares, rest = backward_of_batch_norm(
        centred, centred, ones, zeros, ones, None, None, False, 0.0, [False, True, True]
    )
    return torch.stack((near, squares, rest))


@lru_cache(maxsize=4096)
def _usual_strides(shape: Sequence[int], memory_format: torch.memory_format) -> tuple[int, ...]:
    return torch.empty(shape, device="meta", memory_format=memory_format).stride()


def settled(x: Tensor) -> Tensor:
    """x, whose dims of one entry have the strides that its memory format gives them.

    On CPUs the kernel of batch norm's backward pass finds the format of its arguments by those strides, too. Where it
    finds other ones for a gradient and an image than they have, its results are wrong.
    """
    like = Like.of(x).memory_format
    if not x.is_contiguous(memory_format=like):
        return x
    strides = _usual_strides(x.shape, like)
    return x if x.stride() == strides else x.as_strided(x.shape, strides)


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


def merged(of_ranks: Tensor, shares: Shares, count: int, eps: float, weight: Tensor | None) -> Tensor:
    """The moments for a norm of `count` numbers a channel, from each rank's `sums_around`, (ranks, 3, C).

    In float64, (5, C): the mean, the biased and the unbiased variance, the slope, weight / sqrt(variance + eps), and
    what the slope is for the mean, -slope / count.
    """
    moments = torch.empty(5, of_ranks.shape[2], dtype=torch.float64, device=of_ranks.device)
    found, count = _as_numbers(moments), max(count, 1)
    with np.errstate(all="ignore"):  # infinities are for the model to find, as in PyTorch
        found[0], variance = _mean_and_variance(numbers(of_ranks), shares)
        found[1] = variance
        found[2] = variance * (count / max(count - 1, 1))
        slope = ((variance + eps) ** 0.5) ** -1
        found[3] = slope = slope if weight is None else slope * numbers(weight)
        found[4] = slope * (-1 / count)
    return moments


def joined(of_ranks: Tensor, shares: Shares, count: int) -> Tensor:
    """The `sums_around` of several ranks together, which have `count` numbers a channel: (3, C), in float64."""
    sums = torch.zeros(3, of_ranks.shape[2], dtype=torch.float64, device=of_ranks.device)
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


# Normalization by the mean and the variance of pixels that several ranks share out.
#
# forward     x -> mean and variance of what this rank owns --+
#             x -> strips for those who are to hold them ------> all ranks -> merged -> y = (x - mean) / deviation ...
# backward    g -> two sums for each channel -----------------+
#             g -> of strips that others own -----------------> all ranks -> gradient of x
#
# Each way is one exchange, whether or not somebody asked for strips. The ranks' moments are merged in float64
# (`merged`), so that a mean of 1000 with unit variance keeps its digits, and every rank gets the same bits. More ranks
# than one gather is for merge them in two levels. It saves the input, the strips, and five numbers for each channel.

FEW = 8  # ranks up to which each tells each other beside the strips, rather than all in a collective of its own


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

    def all_moments(self, mine: Tensor) -> Tensor:
        """`sums_around` of all ranks, (ranks, 3, C); (1, 3, C), of all together, where there are too many of them."""
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


def normalize(norm: Norm, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """(x - mean) / sqrt(variance + eps) * weight + bias with statistics over all dims but 1, and over all who share x.

    Returns this rank's part of it, held as `norm.output` says, and what `merged` gives, (5, C), in float32 where x and
    the weight are.
    """
    return _Normalize.apply((norm,), x, weight, bias)


@dataclass(frozen=True)
class WaitingNorm:
    """A norm that is to be computed with others: `done(y, moments)` is called with what `normalize` returns."""

    norm: Norm
    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    done: Callable[[Tensor, Tensor], None]
    version: int

    def compute(self, waiting: Sequence["WaitingNorm"]) -> None:
        for task in waiting:
            if task.x._version != task.version:
                raise RuntimeError(
                    "the input of a norm was modified by an inplace operation, but the norm's gradient needs it"
                )
        tensors = [t for task in waiting for t in (task.x, task.weight, task.bias)]
        with torch.inference_mode(False), torch.enable_grad():
            found = _Normalize.apply([task.norm for task in waiting], *tensors)
        for i, task in enumerate(waiting):
            task.done(*found[2 * i : 2 * i + 2])


def may_wait(foresight: HaloPrefetch, *tensors: Tensor | None) -> bool:
    """Whether autograd would find nothing changed if a function of these were called a little later."""
    return (
        torch.is_grad_enabled()
        and any(t is not None and t.requires_grad for t in tensors)
        and (foresight.repeats or torch._C._current_graph_task_id() < 0)  # a backward pass computes some layers again
        and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        and not substitutes
    )


class _Normalize(torch.autograd.Function):
    """Several norms in one exchange each way: of x, weight and bias for each."""

    @staticmethod
    def forward(ctx: Any, norms: Sequence[Norm], *tensors: Tensor | None) -> tuple[Tensor, ...]:
        if any(ctx.needs_input_grad):
            norms[0].layout.grid.foresight.passed(forward=True)
        xs, weights, biases = tensors[::3], tensors[1::3], tensors[2::3]
        told, strips = _Round(norms, FORWARD_TAG), []
        for norm, x in zip(norms, xs, strict=True):
            assert x is not None
            own = norm.own(x) if norm.wide else x
            strips.append(told.add(norm, sums_around(own, norm.constants), norm.exchange, x))
        outputs, saved = [], []
        for norm, x, weight, bias, around, theirs in zip(
            norms, xs, weights, biases, strips, told.gather(Norm.all_moments), strict=True
        ):
            assert x is not None
            moments = merged(theirs, norm.shares(theirs.device), norm.count, norm.eps, weight)
            kind = weight.dtype if weight is not None else torch.float64 if x.dtype == torch.float64 else torch.float32
            short = moments.to(kind)
            exact = moments if kind.itemsize < 4 else short
            outputs += [_applied(norm, x, around, weight, bias, short[0], short[1]), exact]
            saved += [x, weight, short, *around]
        ctx.mark_non_differentiable(*outputs[1::2])
        ctx.norms, ctx.biased = norms, [bias is not None for bias in biases]
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)  # a norm that nobody used gets no gradient, whomever it was computed with
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        norms: Sequence[Norm] = ctx.norms
        norms[0].layout.grid.foresight.passed(forward=False)
        norms[0].layout.grid.foresight.pay()  # what nobody looked at, and has running statistics all the same
        saved = iter(ctx.saved_tensors)
        found: list[Tensor | None] = [None]
        told, passing = _Round(norms, BACKWARD_TAG), []
        for i, norm in enumerate(norms):
            x, weight, short = next(saved), next(saved), next(saved)  # the weight only so that nobody changes it
            strips, gradient = [next(saved) for _ in norm.boxes], gradients[2 * i]
            if gradient is None:
                found += [None, None, None]
                continue
            parts = _parts(norm, gradient, x, strips)
            mean, variance = short[0], short[1]
            sums = _sums(norm, parts, mean, variance)
            found += [None, sums[0] if weight is not None else None, sums[1] if ctx.biased[i] else None]
            if ctx.needs_input_grad[1 + 3 * i]:
                back = None if norm.exchange is None else norm.exchange.adjoint
                strips = told.add(norm, sums.double(), back, gradient)
                passing.append((1 + 3 * i, norm, parts[0], short, strips))
        for (place, norm, own, short, strips), theirs in zip(passing, told.gather(_reduced), strict=True):
            found[place] = _gradient(norm, own, short, strips, theirs)
        return tuple(found)


class _Round:
    """One exchange for several norms: what ranks that share one tell each other, and strips."""

    def __init__(self, norms: Sequence[Norm], tag: int) -> None:
        self._comm, self._tag = norms[0].layout.grid.comm, tag
        self._told: list[tuple[Norm, Tensor, Tensor | None]] = []
        self._sends: list[Piece] = []
        self._receives: list[Piece] = []
        self._alone = len(norms) == 1 and norms[0].exchange is None

    def add(self, norm: Norm, mine: Tensor, exchange: Exchange | None, x: Tensor) -> list[Tensor]:
        """Tell `mine` to those who share the norm, and pass on strips of x: those that come are returned."""
        among, theirs = norm.among, None
        if not self._alone and len(among.ranks) <= FEW:
            theirs = mine.new_empty((len(among.ranks), *mine.shape))
            for place, rank in enumerate(among.ranks):
                if rank == self._comm.rank:
                    theirs[place] = mine
                else:
                    self._sends.append(Piece(rank, mine))
                    self._receives.append(Piece(rank, theirs[place]))
        self._told.append((norm, mine, theirs))
        strips = []
        if exchange is not None:
            strips = exchange.strips(Like.of(x))
            self._sends += exchange.leaving(x)
            self._receives += exchange.arriving(strips)
        return strips

    def gather(self, collect: Callable[[Norm, Tensor], Tensor]) -> list[Tensor]:
        """Statistics of all ranks of each norm, (ranks, *); `collect` finds them for many ranks, or one norm."""
        pending = None
        if self._sends or self._receives:
            pending = self._comm.iexchange(self._sends, self._receives, self._tag, collective=True)
        found = []
        for norm, mine, theirs in self._told:
            if theirs is None:
                theirs = collect(norm, mine) if norm.among.comm.size > 1 else mine[None]
            found.append(theirs)
        if pending is not None:
            pending.wait()
        return found


def _reduced(norm: Norm, mine: Tensor) -> Tensor:
    """Terms of the sum over the ranks; for few ranks in one order, with others or alone."""
    comm = norm.among.comm
    return comm.all_gather(mine) if comm.size <= FEW else comm.all_reduce(mine.clone())[None]


def _scaled(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor, eps: float
) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias."""
    if x.numel() == 0:
        return torch.zeros_like(x)
    return torch.native_batch_norm(x, weight, bias, mean, variance, False, 0.0, eps)[0]


def _applied(
    norm: Norm,
    x: Tensor,
    strips: Sequence[Tensor],
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    variance: Tensor,
) -> Tensor:
    if norm.exchange is None:
        return _scaled(x, weight, bias, mean, variance, norm.eps)
    like = Like.of(x)
    shape = shape_of(norm.output.held, norm.output.dims, x.shape)
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=like.memory_format)
    for part, box in zip((norm.own(x), *strips), (norm.output.owned, *norm.boxes), strict=True):
        # A kernel that writes with strides takes five times as long as a copy.
        norm.within(y, box).copy_(_scaled(part, weight, bias, mean, variance, norm.eps))
    return y


def _parts(norm: Norm, gradient: Tensor, x: Tensor, strips: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """The owned parts of the gradient, to be changed, and of x; then the strips of both."""
    if norm.exchange is None:
        return [(gradient.contiguous(), x)]
    own = norm.within(gradient, norm.output.owned).clone(memory_format=torch.contiguous_format)
    around = (norm.within(gradient, box).contiguous() for box in norm.boxes)
    return [(own, norm.own(x)), *zip(around, strips, strict=True)]


def _sums(norm: Norm, parts: Sequence[tuple[Tensor, Tensor]], mean: Tensor, variance: Tensor) -> Tensor:
    """The gradients of weight and bias, (2, C)."""
    _, ones, nothing = norm.constants(len(mean), mean.dtype, mean.device)
    found: Tensor | None = None
    for gradient, x in parts:
        if x.numel():
            if 1 in x.shape and gradient.stride() != x.stride():
                gradient, x = settled(gradient), settled(x)
            # As PyTorch calls it in evaluation mode: with saved statistics that are empty, since CUDA's kernel takes
            # what it finds there for the mean and 1/std (aten/src/ATen/native/cuda/Normalization.cu).
            _, scaled, plain = backward_of_batch_norm(
                gradient, x, ones, mean, variance, nothing, nothing, False, norm.eps, [False, True, True]
            )
            sums = torch.stack((scaled, plain))
            found = sums if found is None else found.add_(sums)
    return mean.new_zeros(2, len(mean)) if found is None else found


def _gradient(
    norm: Norm,
    own: tuple[Tensor, Tensor],
    short: Tensor,
    strips: Sequence[Tensor],
    of_ranks: Tensor,
) -> Tensor:
    """The gradient of x, this rank's part, once the strips of others have come and the sums of all ranks, (*, 2, C)."""
    gradient, x = own
    shape = PER_CHANNEL[x.dim()]
    mean, variance, _, slope, of_sums = short.unbind()
    factor, constant = (of_ranks.sum(0) * of_sums).to(short.dtype).unbind()
    if norm.exchange is not None:
        for slab, strip in zip(norm.exchange.plan.sends, strips, strict=True):
            narrow(gradient, norm.layout.dims, norm.layout.owned, slab.box).add_(strip)
    elif norm.layout.wide:  # a halo that somebody else brought here: its gradient is for them to take back
        held = gradient * slope.view(shape).to(gradient.dtype)
        norm.own(held).add_(_scaled(norm.own(x).contiguous(), factor, constant, mean, variance, norm.eps))
        return held
    result = _scaled(x, factor, constant, mean, variance, norm.eps)
    result.addcmul_(gradient, slope.view(shape).to(gradient.dtype))
    if not norm.layout.wide:
        return result
    held = result.new_zeros(shape_of(norm.layout.held, norm.layout.dims, x.shape))
    norm.own(held).copy_(result)
    return held


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
    if shared(input, 1):
        return _batch_norm_of_own(input, running_mean, running_var, weight, bias, training, momentum, eps)
    if input.layout.axis(1) is not None:
        raise refusal("torch.nn.functional.batch_norm", "dim 1 is not the channels here")
    layout, x = input.layout, input.local
    if not training:
        assert running_mean is not None
        assert running_var is not None
        return wrap(F.batch_norm(x, running_mean, running_var, weight, bias, False, momentum, eps), layout)
    foresight = layout.grid.foresight
    owned = layout.narrow.tiling
    held = foresight.held(weight, owned)
    norm = layout.known((batch_norm, x.shape, eps, held), lambda: _norm(layout, x.shape, eps, held))
    if norm.count < 2 and not x.is_meta:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {tuple(input.shape)}")
    needs_gradient = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias))
    result = SpatialTensor.promise(x, norm.output, needs_gradient)

    def done(y: Tensor, moments: Tensor) -> None:
        result.fulfil(y)
        tracked = [(running, row) for running, row in ((running_mean, 0), (running_var, 2)) if running is not None]
        if tracked:
            known = moments.to(tracked[0][0].dtype)
            torch._foreach_lerp_(
                [running.detach() for running, _ in tracked], [known[row] for _, row in tracked], momentum
            )

    patient = foresight.reached(weight)
    if (patient or foresight.waiting) and may_wait(foresight, x, weight, bias):
        foresight.wait(WaitingNorm(norm, x, weight, bias, done, x._version))
        result.before_first_look(foresight.pay)
        if not patient:
            foresight.pay()
    else:
        done(*normalize(norm, x, weight, bias))
    if weight is None:
        return result
    if not patient:
        result.before_first_look(partial(foresight.seen, weight))
    result.providers = (Source(foresight, weight, owned),)
    return result


def _batch_norm_of_own(
    input: SpatialTensor, running_mean: Tensor | None, running_var: Tensor | None, *args: Any
) -> Tensor:
    """Of channels that ranks share: every rank has the running statistics of all of them."""
    grid, split = input.layout.grid, input.layout.tiling.splits[-1]
    mine = input.layout.owned[-1]
    weight, bias, training, *rest = args
    running = [known for known in (running_mean, running_var) if known is not None]
    own = [of_channels(x, mine) for x in (running_mean, running_var, weight, bias)]
    normalized: Tensor = F.batch_norm(own_channels(input), *own, training, *rest)  # type: ignore[call-arg, arg-type]
    y = as_own(normalized, grid, split, 1)
    if training and running:
        told = torch.stack([known[mine.start : mine.stop] for known in running])
        every = gather(as_own(told, grid, split, 1))
        for known, found in zip(running, every, strict=True):
            known.detach().copy_(found)
    return y


def _norm(layout: Layout, shape: Sequence[int], eps: float, held: Tiling) -> Norm:
    """A batch norm of tensors of this layout and local shape, of which at least that is to be held."""
    others = math.prod(n for d, n in enumerate(shape) if d != 1 and d not in layout.dims)
    output = replace(layout, tiling=widest(layout.tiling, held))
    return Norm(layout, layout.grid.the_one(output), sharers(layout, layout.grid.axes, others), eps)


def _affine(y: Tensor, weight: Tensor | None, bias: Tensor | None = None) -> Tensor:
    """y * weight + bias in the dtype of y, which may have fewer bits than they."""
    dtype = y.dtype
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias).to(dtype)


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
    if shared(input, 1):
        return _group_norm_of_own(input, num_groups, weight, bias, eps)
    input = in_plain_dtype(input, lambda image: F.group_norm(image, 1))
    return _by_sample(input, num_groups, weight, bias, eps, "torch.nn.functional.group_norm")[0]


def _group_norm_of_own(
    input: SpatialTensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Of channels that ranks share: each rank's own groups, unless the channels are cut within one."""
    split, mine = input.layout.tiling.splits[-1], input.layout.owned[-1]
    size = max(1, input.shape[1] // num_groups)
    if any(cut % size for cut in split.cuts):
        return F.group_norm(with_all_features(input), num_groups, weight, bias, eps)
    own = F.group_norm(
        own_channels(input), mine.length // size, of_channels(weight, mine), of_channels(bias, mine), eps
    )
    return as_own(own, input.layout.grid, split, 1)


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
    if shared(input, 1):
        whole = with_all_features(input)
        return F.instance_norm(whole, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
    if not use_input_stats:
        return batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    y, moments = _by_sample(input, input.shape[1], weight, bias, eps, "torch.nn.functional.instance_norm")
    if running_mean is not None:
        _track(input.layout, (running_mean, running_var), moments, momentum)
    return y


def _track(layout: Layout, running: tuple[Tensor, Tensor | None], moments: Tensor, momentum: float) -> None:
    """Running statistics of instance norm: the means, over the batch, of each sample's mean and unbiased variance."""
    channels = running[0].shape[0]
    values = moments[:3:2].view(2, -1, channels)
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
) -> tuple[Tensor, Tensor]:
    """The normalized image; mean, biased and unbiased variance of each sample's groups, in this order, as rows."""
    if x.layout.axis(1) is not None or x.layout.dims[BATCH] not in (None, 0):
        raise refusal(name, "dims 0 and 1 are not batch and channels here")
    if x.shape[1] % groups:
        raise ValueError(f"`num_channels` (={x.shape[1]}) must be divisible by `num_groups` (={groups})")
    layout, local = x.layout, x.local
    n, c, *space = local.shape
    rows = local.reshape(1, n * groups, c // groups, *space)
    key = _by_sample, local.shape, groups, eps
    norm = layout.known(key, lambda: _norm_by_sample(layout, local.shape, c // groups, eps))
    y, moments = normalize(norm, rows, None, None)
    shape = PER_CHANNEL[x.dim()]
    weight, bias = weight if weight is None else weight.view(shape), bias if bias is None else bias.view(shape)
    return wrap(_affine(y.view(local.shape), weight, bias), layout), moments


def _norm_by_sample(layout: Layout, shape: Sequence[int], size: int, eps: float) -> Norm:
    """Of rows of this many channels each, samples and groups are the channels, and what is behind them moved by one."""
    others = [n for d, n in enumerate(shape) if d > 1 and d not in layout.dims]
    inner = layout.grid.the_one(layout.with_dims(None if not dim else dim + 1 for dim in layout.dims))
    return Norm(inner, inner, sharers(layout, layout.grid.space, size * math.prod(others)), eps)


@register(F.layer_norm, torch.layer_norm, flat=True)
def layer_norm(
    input: SpatialTensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    return _over_last_dims(F.layer_norm, input, normalized_shape, (weight, bias), eps)


@register(F.rms_norm, torch.rms_norm, flat=True)
def rms_norm(
    input: SpatialTensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    return _over_last_dims(F.rms_norm, input, normalized_shape, (weight,), eps)


def _over_last_dims(
    function: Any, input: SpatialTensor, shape: Sequence[int], affine: Sequence[Tensor | None], eps: float | None
) -> Tensor:
    """Local where the normalized dims are not cut, as in ConvNeXt; where they are, by a root mean square: of layer norm
    that of deviations.
    """
    last = tuple(range(input.dim() - len(shape), input.dim()))
    if tuple(shape) != tuple(input.shape[input.dim() - len(shape) :]):
        raise RuntimeError(f"normalized_shape={list(shape)} does not fit a tensor of {tuple(input.shape)}")
    if not any(input.layout.cut(dim) for dim in last):
        return wrap(function(input.local, shape, *affine, eps), input.layout)
    input = in_plain_dtype(input, lambda image: function(image, image.shape[-1:]))
    x: Tensor = input.float() if input.itemsize < 4 else input
    x = x - x.mean(last, True) if function is F.layer_norm else x
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return _affine(x * ((x * x).mean(last, True) + eps).rsqrt(), *affine).to(input.dtype)


NEVER_REMOVED = -1  # the number of a hook: PyTorch counts from 0


def right_gradients(model: nn.Module) -> None:
    """Let batch and instance norms on plain tensors hand their kernel gradients that it reads right.

    On CPUs PyTorch's kernel misreads the gradient of one image whose strides say that its channels come last, as behind
    `flatten(2).transpose(1, 2)` and a linear layer. A copy in the usual order is read right. To instance norms all
    images are one.
    """
    for module in model.modules():
        if isinstance(module, _BatchNorm | _InstanceNorm) and _of_one_image not in module._forward_hooks.values():
            module.register_forward_hook(_of_one_image)


def _of_one_image(module: nn.Module, inputs: Any, output: Any) -> None:
    if type(output) is not Tensor and (not isinstance(output, Tensor) or isinstance(output, SpatialTensor)):
        return
    if not output.requires_grad or not output.is_cpu or output.dim() <= 2:
        return
    if output.shape[0] != 1 and not isinstance(module, _InstanceNorm):
        return
    if output._backward_hooks is not None or output.grad_fn is None:
        output.register_hook(Tensor.contiguous)
        return
    # As register_hook does, but for the handle by which a hook is removed, which takes half of its time.
    output._backward_hooks = OrderedDict({NEVER_REMOVED: Tensor.contiguous})
    output.grad_fn._register_hook_dict(output)
