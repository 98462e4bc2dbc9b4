"""Random numbers for pixels: dropout, `rand_like`, `Tensor.normal_`, `bernoulli`, and functions made of these.

Ranks that share an image draw from generators in the same state, so that whatever is drawn for a replicated tensor is
the same on all. For a whole that is small each of them draws all numbers, as plain PyTorch would, and keeps its part.
For tiles of what is too large for that, numbers come from another generator, seeded by one such draw and the tile's
place: independent on every tile.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mpi4dl.comm.exchange import narrow, shape_of
from mpi4dl.parallel.spatial.flattening import between_copies, copies_in, cut_out
from mpi4dl.parallel.spatial.grid import Layout
from mpi4dl.parallel.spatial.halo import gather
from mpi4dl.parallel.spatial.tensor import (
    SpatialTensor,
    function_name,
    named,
    of_whole,
    refusal,
    register,
    wrap,
)

DRAWN_WHOLE = 1 << 24  # so many numbers at most: 64 MiB in float32, for a moment

Fill = Callable[[Tensor, torch.Generator | None], Any]  # fills a tensor in place


def drawn(x: SpatialTensor, fill: Fill, dtype: torch.dtype | None = None, generator: Any = None) -> Tensor:
    """This rank's part, as x's layout says, of numbers for all pixels of x; of the type of x by default."""
    local = x.local
    part = torch.empty_like(local, dtype=local.dtype if dtype is None else dtype)
    if x.is_meta:
        return part
    if x.shape.numel() <= DRAWN_WHOLE:
        whole = torch.empty_like(of_whole(x), dtype=part.dtype, device=part.device)
        fill(whole, generator)
        return part.copy_(cut_out(whole, x.layout))
    for flat in x.layout.flat:  # entries that every rank has are the same on all
        for start, length in copies_in(part.shape[flat.dim], flat):
            fill(part.narrow(flat.dim, start, length), generator)
    rest = part
    for flat in x.layout.flat:
        rest = between_copies(rest, flat)
    _draw_tiles(x.layout, rest, fill, int(torch.randint(2**62, (), generator=generator)))
    return part


def _draw_tiles(layout: Layout, part: Tensor, fill: Fill, seed: int) -> None:
    """Fill a rank's part, with the halo that it holds, as the owners of its pixels do."""
    if not layout.wide:
        fill(part, _generator(layout, layout.grid.rank, seed, part.device))
        return
    for rank in layout.grid.ranks_along(tuple(axis for axis, dim in enumerate(layout.dims) if dim is not None)):
        theirs = layout.tiling.owned(rank)
        both = theirs.intersect(layout.held)
        if not both.empty:
            tile = part.new_empty(shape_of(theirs, layout.dims, part.shape))
            fill(tile, _generator(layout, rank, seed, part.device))
            narrow(part, layout.dims, layout.held, both).copy_(narrow(tile, layout.dims, theirs, both))


def _generator(layout: Layout, rank: int, seed: int, device: torch.device) -> torch.Generator:
    """The generator of a rank's tile, the same for ranks that hold copies."""
    place = 0
    for axis, (dim, coordinate) in enumerate(zip(layout.dims, layout.grid.shape.coordinates(rank), strict=True)):
        place = place * layout.grid.shape[axis] + (coordinate if dim is not None else 0)
    return torch.Generator(device).manual_seed((seed + 0x9E3779B97F4A7C15 * (place + 1)) % 2**63)


def _kept(share: float) -> Fill:
    return lambda x, generator: x.bernoulli_(share, generator=generator)


def _dropped(p: float) -> Fill:
    """Which are kept, as plain dropout draws it: on GPUs by a kernel of its own."""
    kept = _kept(1 - p)

    def fill(x: Tensor, generator: torch.Generator | None) -> Any:
        fused = x.is_cuda and generator is None and p < 1
        return x.copy_(torch.native_dropout(x, p, True)[1]) if fused else kept(x, generator)

    return fill


@register(F.dropout, torch.dropout, flat=True)
def dropout(input: SpatialTensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """The halo that is held is dropped as its owner drops it."""
    if not training or p == 0:
        return input
    keep = drawn(input, _dropped(p))
    scaled = keep.div_(1 - p) if p < 1 else keep
    return wrap(input.local.mul_(scaled) if inplace else input.local * scaled, input.layout)


def _whole_channels(function: Any, without_batch: int | None) -> Callable[..., Tensor]:
    """Channels are dropped in the whole image, by the mask that PyTorch would draw: for each entry of dims 0 and 1, or
    of dim 0 in a tensor of `without_batch` dims.
    """

    def rule(input: SpatialTensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        kept = 1 if input.dim() == without_batch else 2
        mask = function(input.local.new_ones([n if d < kept else 1 for d, n in enumerate(input.shape)]), p, training)
        if not training or p == 0:
            return input
        return input.mul_(mask) if inplace else input * mask

    return rule


for function, without_batch in ((F.dropout1d, 2), (F.dropout2d, None), (F.dropout3d, 4)):
    register(function)(_whole_channels(function, without_batch))


SCALE = -1.7580993408473766  # of SELU at minus infinity: Klambauer et al., arXiv 1706.02515


def _alpha_dropout(of_channels: bool) -> Callable[..., Tensor]:
    """Dropout that keeps mean and variance: a * (x where kept, else SCALE) + b, by pixels or by whole channels."""

    def rule(input: SpatialTensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> Tensor:
        if not training or p == 0:
            return input
        if p == 1:
            return input.mul_(0) if inplace else input * 0
        if of_channels:
            keep = input.local.new_empty([n if d < 2 else 1 for d, n in enumerate(input.shape)]).bernoulli_(1 - p)
        else:
            keep = wrap(drawn(input, _kept(1 - p)), input.layout)
        a = 1 / math.sqrt((SCALE * SCALE * p + 1) * (1 - p))
        factor, shift = keep * a, (1 - keep) * (a * SCALE) - a * SCALE * p
        return input.mul_(factor).add_(shift) if inplace else input * factor + shift

    return rule


register(F.alpha_dropout, torch.alpha_dropout, flat=True)(_alpha_dropout(False))
register(F.feature_alpha_dropout, torch.feature_alpha_dropout)(_alpha_dropout(True))


def _like(fill_of: Callable[..., Fill]) -> Callable[..., Tensor]:
    """The rule of `rand_like` and the like: `fill_of(*args)` fills."""

    def rule(
        input: SpatialTensor,
        *args: Any,
        dtype: torch.dtype | None = None,
        generator: torch.Generator | None = None,
        requires_grad: bool = False,
        **kwargs: Any,
    ) -> Tensor:
        return wrap(drawn(input, fill_of(*args), dtype, generator).requires_grad_(requires_grad), input.layout)

    return rule


register(torch.rand_like, flat=True)(_like(lambda: lambda x, generator: x.uniform_(generator=generator)))
register(torch.randn_like, flat=True)(_like(lambda: lambda x, generator: x.normal_(generator=generator)))
register(torch.randint_like, flat=True)(_like(lambda *ends: lambda x, generator: x.random_(*ends, generator=generator)))


def _in_place(function: Any) -> Callable[..., Tensor]:
    def rule(input: SpatialTensor, *args: Any, generator: torch.Generator | None = None, **kwargs: Any) -> Tensor:
        if any(isinstance(each, Tensor) for each in (*args, *kwargs.values())):
            raise refusal(function_name(function), "its parameters are tensors")
        part = drawn(input, lambda x, by: function(x, *args, generator=by, **kwargs), generator=generator)
        input.local.copy_(part)
        return input

    return rule


for name in ("normal_", "uniform_", "exponential_", "cauchy_", "log_normal_", "geometric_", "random_", "bernoulli_"):
    register(getattr(Tensor, name), flat=True)(_in_place(getattr(Tensor, name)))


@register(torch.normal)
def normal(mean: Any, std: Any = 1.0, *, generator: torch.Generator | None = None) -> Tensor:
    both = (mean + 0 * std).contiguous()  # of the shape and the layout of the result, in whose order PyTorch draws
    if not isinstance(both, SpatialTensor):
        return torch.normal(gather(mean) if isinstance(mean, Tensor) else mean, std, generator=generator)
    standard = wrap(drawn(both, lambda x, by: x.normal_(generator=by), generator=generator), both.layout)
    return (standard * std + mean).detach()


@register(F.gumbel_softmax)
def gumbel_softmax(
    logits: SpatialTensor, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1
) -> Tensor:
    """By noise in the order in which PyTorch draws it; `eps` is for nothing, as in PyTorch."""
    noise = -torch.empty_like(logits, memory_format=torch.legacy_contiguous_format).exponential_().log()
    soft = ((logits + noise) / tau).softmax(dim)
    if not hard:
        return soft
    shape = [-1 if d == dim % logits.dim() else 1 for d in range(logits.dim())]
    classes = torch.arange(logits.shape[dim], device=logits.device).view(shape)
    one_hot = (classes == soft.argmax(dim, keepdim=True)).to(soft.dtype)
    return one_hot - soft.detach() + soft


# Numbers that depend on the pixels, drawn one after the other: for all pixels, on every rank.


@register(*named("bernoulli"))
def bernoulli(input: SpatialTensor, p: float | None = None, *, generator: torch.Generator | None = None) -> Tensor:
    if p is not None:
        return wrap(drawn(input, lambda x, by: x.bernoulli_(p, generator=by), generator=generator), input.layout)
    return _of_the_whole(input, lambda whole: torch.bernoulli(whole, generator=generator))


@register(*named("poisson"))
def poisson(input: SpatialTensor, generator: torch.Generator | None = None) -> Tensor:
    return _of_the_whole(input, lambda whole: torch.poisson(whole, generator))


@register(*named("rrelu", "rrelu_"))
def rrelu(
    input: SpatialTensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, inplace: bool = False
) -> Tensor:
    if not training:
        return F.leaky_relu(input, (lower + upper) / 2, inplace)

    def slopes(whole: Tensor) -> Tensor:
        return torch.where(whole < 0, F.rrelu(whole, lower, upper, training=True) / whole, 1.0)

    slope = _of_the_whole(input, slopes)
    return input.mul_(slope) if inplace else input * slope


def _of_the_whole(x: SpatialTensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """This rank's part of what a function makes of all pixels, without a gradient."""
    return wrap(cut_out(function(_gathered(x)), x.layout).clone(), x.layout)


def _gathered(x: SpatialTensor) -> Tensor:
    """All of x without its gradient, as it lies in the memory of one process: numbers are drawn in that order."""
    return torch.empty_like(of_whole(x), device=x.device).copy_(gather(x.detach()))


@register(*named("multinomial"))
def multinomial(
    input: SpatialTensor, num_samples: int, replacement: bool = False, *, generator: torch.Generator | None = None
) -> Tensor:
    """The same numbers on every rank."""
    return torch.multinomial(_gathered(input), num_samples, replacement, generator=generator)
