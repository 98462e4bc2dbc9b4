"""Batch, group, instance, layer and root-mean-square norm with the statistics of the whole image."""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl.comm.exchange import BACKWARD_TAG, CHANNELS_LAST, FORWARD_TAG, Exchange, LocalFunction, once_differentiable
from mpi4dl.comm.packing import Piece
from mpi4dl.geometry import BATCH, Tiling, widest
from mpi4dl.parallel.spatial.flattening import close_dims, open_dims, opened
from mpi4dl.parallel.spatial.grid import Layout
from mpi4dl.parallel.spatial.halo import gather, gather_axes
from mpi4dl.parallel.spatial.halo_prefetch import HaloPrefetch, Source
from mpi4dl.parallel.spatial.rules.convolution import as_own, of_channels, own_channels
from mpi4dl.parallel.spatial.rules.norm_kernels import (
    ANYWHERE,
    PER_CHANNEL,
    UNTRACKED,
    Norm,
    Rows,
    Tracked,
    gradient_of,
    kernels_for,
    sharers,
)
from mpi4dl.parallel.spatial.rules.resampling import channels_last
from mpi4dl.parallel.spatial.rules.windows import in_plain_dtype
from mpi4dl.parallel.spatial.sums import shared, with_all_features
from mpi4dl.parallel.spatial.tensor import SpatialTensor, local_part, refusal, register, substitutes, wrap

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

BATCH_NORM = nn.BatchNorm2d.forward
DEPTH = 8  # calls from that of a module down to the rule
FEW = 8  # ranks up to which each tells each other beside the strips, rather than all in a collective of its own


def normalize(
    norm: Norm, x: Tensor, weight: Tensor | None, bias: Tensor | None, tracked: Tracked = UNTRACKED
) -> tuple[Tensor, Tensor | None]:
    """(x - mean) / sqrt(variance + eps) * weight + bias with statistics over all dims but 1, and over all who share x.

    Returns this rank's part of it, held as `norm.output` says; and moments, whose rows 0 and 2 are mean and unbiased
    variance, or none if `tracked` took them in.
    """
    return _Normalize.apply(((norm, tracked),), x, weight, bias)


@dataclass(frozen=True)
class WaitingNorm:
    """A norm that is to be computed with others: `done(y)` is called with its output."""

    norm: Norm
    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    tracked: Tracked
    done: Callable[[Any], None]
    version: int

    def compute(self, waiting: Sequence["WaitingNorm"]) -> None:
        for task in waiting:
            if task.x._version != task.version:
                raise RuntimeError(
                    "the input of a norm was modified by an inplace operation, but the norm's gradient needs it"
                )
        tensors = [t for task in waiting for t in (task.x, task.weight, task.bias)]
        with torch.inference_mode(False), torch.enable_grad():
            found = _Normalize.apply([(task.norm, task.tracked) for task in waiting], *tensors)
        for i, task in enumerate(waiting):
            task.done(found[2 * i])


def may_wait(halo_prefetch: HaloPrefetch, *tensors: Tensor | None) -> bool:
    """Whether autograd would find nothing changed if a function of these were called a little later."""
    return (
        torch.is_grad_enabled()
        and any(t is not None and t.requires_grad for t in tensors)
        and (
            halo_prefetch.repeats or torch._C._current_graph_task_id() < 0
        )  # a backward pass computes some layers again
        and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        and not substitutes
    )


def _track(running: Tracked, moments: Tensor) -> None:
    """Update running statistics before anything is saved: there, as PyTorch's kernel has, recomputation may stop."""
    mean, variance, momentum = running
    if mean is not None and variance is not None:
        known = moments.to(mean.dtype)
        # Without a count of writes, as PyTorch's own.
        torch._foreach_lerp_([mean.data, variance.data], [known[0], known[2]], momentum)


class _Normalize(LocalFunction):
    """Several norms in one exchange each way: of x, weight and bias for each."""

    @staticmethod
    def forward(ctx: Any, jobs: Sequence[tuple[Norm, Tracked]], *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        norms, tracked = zip(*jobs, strict=True)
        if any(ctx.needs_input_grad):
            norms[0].layout.grid.halo_prefetch.passed(forward=True)
        xs, weights, biases = tensors[::3], tensors[1::3], tensors[2::3]
        told, strips = _Round(norms, FORWARD_TAG), []
        ctx.kernels = []
        for norm, x in zip(norms, xs, strict=True):
            assert x is not None
            kernels = kernels_for(norm) if x.is_cuda else ANYWHERE
            ctx.kernels.append(kernels)
            own = norm.own(x) if norm.wide else x
            strips.append(told.add(norm, kernels.told(norm, own), norm.exchange, x))
        outputs: list[Tensor | None] = []
        saved: list[Tensor | None] = []
        known: list[Tensor] = []
        for norm, kernels, running, x, weight, bias, around, theirs in zip(
            norms, ctx.kernels, tracked, xs, weights, biases, strips, told.gather(Norm.all_moments), strict=True
        ):
            assert x is not None
            kept, moments = kernels.merged(norm, x, theirs, weight, running)
            if moments is not None:
                known.append(moments)
                if running is not UNTRACKED:
                    _track(running, moments)
            outputs += [kernels.applied(norm, x, around, kept, weight, bias), moments]
            saved += [x, weight, *kept, *around]
        ctx.mark_non_differentiable(*known)
        ctx.norms, ctx.biased = norms, [bias is not None for bias in biases]
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)  # a norm that nobody used gets no gradient, whomever it was computed with
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        norms: Sequence[Norm] = ctx.norms
        norms[0].layout.grid.halo_prefetch.passed(forward=False)
        norms[0].layout.grid.halo_prefetch.flush()  # what nobody looked at, and has running statistics all the same
        tensors = iter(ctx.saved_tensors)
        found: list[Tensor | None] = [None]
        told, passing = _Round(norms, BACKWARD_TAG), []
        for i, (norm, kernels) in enumerate(zip(norms, ctx.kernels, strict=True)):
            x, weight = next(tensors), next(tensors)
            saved = [next(tensors) for _ in range(kernels.SAVED)]
            strips, gradient = [next(tensors) for _ in norm.boxes], gradients[2 * i]
            if gradient is None:
                found += [None, None, None]
                continue
            parts = kernels.parts(norm, gradient, x, strips)
            sums, own = kernels.sums(norm, parts, saved)
            found += [None, None if weight is None else own[0], own[1] if ctx.biased[i] else None]
            if ctx.needs_input_grad[1 + 3 * i]:
                back = None if norm.exchange is None else norm.exchange.adjoint
                strips = told.add(norm, sums, back, gradient)
                passing.append((1 + 3 * i, norm, kernels, parts[0], saved, weight, strips))
        for (place, norm, kernels, own, saved, weight, strips), theirs in zip(
            passing, told.gather(_reduced), strict=True
        ):
            found[place] = gradient_of(norm, kernels, own, saved, weight, strips, theirs)
        return tuple(found)


class _Round:
    """One exchange for several norms: what ranks that share one tell each other, and strips."""

    def __init__(self, norms: Sequence[Norm], tag: int) -> None:
        self._comm, self._tag = norms[0].layout.grid.comm, tag
        self._told: list[tuple[Norm, Tensor, Tensor | None]] = []
        self._sends: list[Piece] = []
        self._receives: list[Piece] = []
        self._alone = len(norms) == 1 and norms[0].exchange is None

    def add(self, norm: Norm, rows: Rows | Tensor, exchange: Exchange | None, x: Tensor) -> list[Tensor]:
        """Tell these rows to those who share the norm, and pass on strips of x: those that come are returned."""
        among, theirs = norm.among, None
        if not self._alone and len(among.ranks) <= FEW:
            like = rows if isinstance(rows, Tensor) else rows[0]
            theirs = like.new_empty((len(among.ranks), len(rows), like.shape[-1]))
            mine = theirs[among.ranks.index(self._comm.rank)]
            if isinstance(rows, Tensor):
                mine.copy_(rows)
            else:
                torch.stack(rows, out=mine)
            for place, rank in enumerate(among.ranks):
                if rank != self._comm.rank:
                    self._sends.append(Piece(rank, mine))
                    self._receives.append(Piece(rank, theirs[place]))
        else:
            mine = rows if isinstance(rows, Tensor) else torch.stack(rows)
        self._told.append((norm, mine, theirs))
        strips: list[Tensor] = []
        if exchange is not None:
            strips, arriving = exchange.arriving(x)
            self._sends += exchange.leaving(x)
            self._receives += arriving
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
    halo_prefetch = layout.grid.halo_prefetch
    owned = layout.narrow.tiling
    held = halo_prefetch.held(weight, owned)
    norm = layout.cached((batch_norm, x.shape, eps, held), lambda: _norm(layout, x.shape, eps, held))
    if norm.count < 2 and not x.is_meta:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {tuple(input.shape)}")
    if x.is_cuda and norm.alone:
        return wrap(F.batch_norm(x, running_mean, running_var, weight, bias, True, momentum, eps), layout)
    needs_gradient = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias))
    result = SpatialTensor.promise(x, norm.output, needs_gradient)

    tracked = running_mean, running_var, momentum
    patient = halo_prefetch.can_wait(weight) and _is_pytorchs()
    if (patient or halo_prefetch.waiting) and may_wait(halo_prefetch, x, weight, bias):
        halo_prefetch.wait(WaitingNorm(norm, x, weight, bias, tracked, result.fulfil, x._version))
        result.before_first_look(halo_prefetch.flush)
        if not patient:
            halo_prefetch.flush()
    else:
        result.fulfil(normalize(norm, x, weight, bias, tracked)[0])
    if weight is None:
        return result
    if not patient:
        result.before_first_look(partial(halo_prefetch.seen, weight))
    result.halo_sources = (Source(halo_prefetch, weight, owned),)
    return result


def _is_pytorchs() -> bool:
    """Whether a module of PyTorch calls the norm that is computed now: others may use its statistics at once."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(DEPTH):
        frame = None if frame is None else frame.f_back
        if frame is not None and frame.f_code is BATCH_NORM.__code__:
            module = frame.f_locals["self"]
            return type(module).forward is BATCH_NORM and not module._forward_hooks
    return False


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
            known.data.copy_(found)
    return y


def _norm(layout: Layout, shape: Sequence[int], eps: float, held: Tiling) -> Norm:
    """A batch norm of tensors of this layout and local shape, of which at least that is to be held."""
    others = math.prod(n for d, n in enumerate(shape) if d != 1 and d not in layout.dims)
    output = replace(layout, tiling=widest(layout.tiling, held))
    return Norm(layout, layout.grid.intern(output), sharers(layout, layout.grid.axes, others), eps)


def _affine(y: Tensor, weight: Tensor | None, bias: Tensor | None = None) -> Tensor:
    """y * weight + bias in the dtype of y, which may have fewer bits than they. Nobody else has y."""
    dtype = y.dtype
    as_it_is = (weight is None or weight.dtype == dtype) and (bias is None or bias.dtype == dtype)
    if as_it_is and type(y) is Tensor and not torch.is_grad_enabled():
        y = y if weight is None else y.mul_(weight)
        return y if bias is None else y.add_(bias)
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias).to(dtype)


@register(F.group_norm, torch.group_norm, flat=True)
def group_norm(
    input: SpatialTensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    """Statistics over the channels of a group and the whole image, for each sample."""
    layout = input.layout
    if any(flat.copies or flat.dim < 2 for flat in layout.flat):
        return F.group_norm(gather_axes(input, ()), num_groups, weight, bias, eps)
    if layout.flat:  # the tokens of an image are an image again
        image = SpatialTensor(open_dims(input.local, layout, layout.held), opened(layout))
        found = local_part(group_norm(image, num_groups, weight, bias, eps))
        return input.like(close_dims(found, layout, layout.held))
    if shared(input, 1):
        return _group_norm_of_own(input, num_groups, weight, bias, eps)
    if input.layout.has_whole_samples:
        return wrap(torch.group_norm(input.local, num_groups, weight, bias, eps), input.layout)
    input = in_plain_dtype(input, lambda image: F.group_norm(image, 1))
    y = _by_sample(input, num_groups, weight, bias, eps, "torch.nn.functional.group_norm")[0]
    local = input.local
    if local.is_contiguous() or not local.is_cpu or local.dim() not in CHANNELS_LAST or not channels_last(local):
        return y
    return y.contiguous(memory_format=CHANNELS_LAST[local.dim()])  # as PyTorch: random numbers are drawn in this order


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
        _track_samples(input.layout, (running_mean, running_var), moments, momentum)
    return y


def _track_samples(layout: Layout, running: tuple[Tensor, Tensor | None], moments: Tensor, momentum: float) -> None:
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
                buffer.lerp_((total / number).to(buffer.dtype), momentum)


def _by_sample(
    x: SpatialTensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, name: str
) -> tuple[Tensor, Tensor]:
    """The normalized image; mean and unbiased variance of each sample's groups, as rows."""
    if x.layout.axis(1) is not None or x.layout.dims[BATCH] not in (None, 0):
        raise refusal(name, "dims 0 and 1 are not batch and channels here")
    if x.shape[1] % groups:
        raise ValueError(f"`num_channels` (={x.shape[1]}) must be divisible by `num_groups` (={groups})")
    layout, local = x.layout, x.local
    n, c, *space = local.shape
    rows = local.reshape(1, n * groups, c // groups, *space)
    key = _by_sample, local.shape, groups, eps
    norm = layout.cached(key, lambda: _norm_by_sample(layout, local.shape, c // groups, eps))
    y, moments = normalize(norm, rows, None, None)
    shape = PER_CHANNEL[x.dim()]
    weight, bias = weight if weight is None else weight.view(shape), bias if bias is None else bias.view(shape)
    assert moments is not None  # nothing takes them in
    return wrap(_affine(y.view(local.shape), weight, bias), layout), moments


def _norm_by_sample(layout: Layout, shape: Sequence[int], size: int, eps: float) -> Norm:
    """Of rows of this many channels each, samples and groups are the channels, and what is behind them moved by one."""
    others = [n for d, n in enumerate(shape) if d > 1 and d not in layout.dims]
    inner = layout.grid.intern(layout.with_dims(None if not dim else dim + 1 for dim in layout.dims))
    within = [axis for axis in layout.grid.axes if layout.dims[axis] != 0]
    return Norm(inner, inner, sharers(layout, within, size * math.prod(others)), eps)


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
    count = len(input.shape)
    last = tuple(range(count - len(shape), count))
    if tuple(shape) != input.shape[count - len(shape) :]:
        raise RuntimeError(f"normalized_shape={list(shape)} does not fit a tensor of {tuple(input.shape)}")
    if input.layout.cut_dims.isdisjoint(last):
        return wrap(function(input.local, shape, *affine, eps), input.layout)
    input = in_plain_dtype(input, lambda image: function(image, image.shape[-1:]))
    x: Tensor = input.float() if input.itemsize < 4 else input
    x = x - x.mean(last, True) if function is F.layer_norm else x
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return _affine(x * ((x * x).mean(last, True) + eps).rsqrt(), *affine).to(input.dtype)
