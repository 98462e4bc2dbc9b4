"""Normalization by the mean and the variance of pixels that several ranks share out.

forward     x -> mean and variance of what this rank owns --\
            x -> strips for those who are to hold them ------> all ranks -> merged -> y = (x - mean) / deviation ...
backward    g -> two sums for each channel -----------------\
            g -> of strips that others own -----------------> all ranks -> gradient of x

Each way is one exchange, whether or not somebody asked for strips. The ranks' moments are merged in float64
(`merging`), so that a mean of 1000 with unit variance keeps its digits, and every rank gets the same bits. What is
saved is the input, the strips, and five numbers for each channel.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpi4dl.comm import Communicator
from mpi4dl.comm.exchange import BACKWARD_TAG, FORWARD_TAG, Exchange, Like, narrow, shape_of
from mpi4dl.comm.packing import Piece
from mpi4dl.geometry import Box
from mpi4dl.parallel.spatial.foresight import Foresight
from mpi4dl.parallel.spatial.grid import Layout
from mpi4dl.parallel.spatial.rules.merging import (
    PER_CHANNEL,
    Constants,
    Shares,
    backward_of_batch_norm,
    merged,
    sums_around,
)
from mpi4dl.parallel.spatial.tensor import substitutes

FEW = 8  # ranks up to which each tells each other beside the strips, rather than all in a collective of its own


class Sharers(NamedTuple):
    """The ranks of a grid that share what is normalized, and how many numbers of a channel each owns."""

    comm: Communicator
    ranks: tuple[int, ...]
    counts: tuple[int, ...]


def sharers(layout: Layout, axes: Sequence[int], each: int) -> Sharers:
    """Those who share what is normalized along these axes, in which every pixel counts `each` times."""
    axes = tuple(axis for axis in axes if layout.dims[axis] is not None)
    splits = [layout.tiling.splits[axis] for axis in axes]
    lengths = [[split.owned(part).length for part in range(split.parts)] for split in splits]
    counts = tuple(each * math.prod(of_rank) for of_rank in itertools.product(*lengths))
    return Sharers(layout.grid.along(axes), layout.grid.ranks_along(axes), counts)


class Norm:
    """One normalization: of tensors of `layout`, to be held as `output` says."""

    def __init__(self, layout: Layout, output: Layout, among: Sharers, eps: float) -> None:
        self.layout, self.output, self.among, self.eps = layout, output, among, eps
        self.count = sum(among.counts)
        self.constants = Constants()
        self._shares: dict[torch.device, Shares] = {}

    def shares(self, device: torch.device) -> Shares:
        """Of how many numbers each rank knows the sums."""
        if device not in self._shares:
            self._shares[device] = Shares.of(self.among.counts, device)
        return self._shares[device]

    @cached_property
    def exchange(self) -> Exchange | None:
        """What brings the strips of the input that this rank is to normalize for what follows."""
        layout, output = self.layout, self.output
        return None if output.tiling == layout.tiling else layout.exchange_to(output.tiling)

    def own(self, x: Tensor) -> Tensor:
        """What this rank owns of x."""
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

    Returns this rank's part of it, held as `norm.output` says, and in float64, (5, C), what `merged` gives.
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


def may_wait(foresight: Foresight, *tensors: Tensor | None) -> bool:
    """Whether autograd would find nothing changed if a function of these were called a little later."""
    return (
        torch.is_grad_enabled()
        and any(t is not None and t.requires_grad for t in tensors)
        and (foresight.visits or torch._C._current_graph_task_id() < 0)  # a backward pass computes some layers again
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
            strips.append(told.add(norm, sums_around(norm.own(x), norm.constants), norm.exchange, x))
        outputs, saved = [], []
        for norm, x, weight, bias, around, theirs in zip(
            norms, xs, weights, biases, strips, told.gather(_gathered), strict=True
        ):
            assert x is not None
            moments = merged(theirs, norm.shares(theirs.device), norm.count, norm.eps, weight)
            kind = weight.dtype if weight is not None else torch.float64 if x.dtype == torch.float64 else torch.float32
            short = moments.to(kind)
            outputs += [_applied(norm, x, around, weight, bias, short[0], short[1]), moments]
            saved += [x, weight, short, *around]
        ctx.mark_non_differentiable(*outputs[1::2])
        ctx.norms, ctx.biased = norms, [bias is not None for bias in biases]
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)  # a norm that nobody used gets no gradient, whomever it was computed with
        return tuple(outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
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
        self._told: list[tuple[Sharers, Tensor, Tensor | None]] = []
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
        self._told.append((among, mine, theirs))
        strips = []
        if exchange is not None:
            strips = exchange.strips(Like.of(x))
            self._sends += exchange.leaving(x)
            self._receives += exchange.arriving(strips)
        return strips

    def gather(self, collect: Callable[[Communicator, Tensor], Tensor]) -> list[Tensor]:
        """What all who share each norm told, (ranks, *); `collect` finds it where they are many, or the norm alone."""
        pending = None
        if self._sends or self._receives:
            pending = self._comm.iexchange(self._sends, self._receives, self._tag, collective=True)
        found = []
        for among, mine, theirs in self._told:
            if theirs is None:
                theirs = collect(among.comm, mine) if among.comm.size > 1 else mine[None]
            found.append(theirs)
        if pending is not None:
            pending.wait()
        return found


def _gathered(comm: Communicator, mine: Tensor) -> Tensor:
    return comm.all_gather(mine)


def _reduced(comm: Communicator, mine: Tensor) -> Tensor:
    """What adds up to the sum over the ranks; for few ranks in one order, with others or alone."""
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
    """What this rank owns of the gradient, to be changed, and of x; then the strips of both."""
    if norm.exchange is None:
        return [(gradient.contiguous(), x)]
    own = norm.within(gradient, norm.output.owned).clone(memory_format=torch.contiguous_format)
    around = (norm.within(gradient, box).contiguous() for box in norm.boxes)
    return [(own, norm.own(x)), *zip(around, strips, strict=True)]


def _sums(norm: Norm, parts: Sequence[tuple[Tensor, Tensor]], mean: Tensor, variance: Tensor) -> Tensor:
    """The gradients of weight and bias, (2, C)."""
    _, ones = norm.constants.like(mean)
    found: Tensor | None = None
    for gradient, x in parts:
        if x.numel():
            # Saved statistics: kernels of CUDA ask for tensors, and look at none of these.
            _, scaled, plain = backward_of_batch_norm(
                gradient, x, ones, mean, variance, mean, mean, False, norm.eps, [False, True, True]
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
