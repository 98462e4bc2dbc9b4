"""Layers of images of whose channels each rank has some: those that it has are treated as if they were all.

column   weight (out | , in, k, k)   each rank computes some channels, of all of the input's
row      weight (out, in | , k, k)   each rank has some channels of the input, and all add up
groups   weight (out | , 1, k, k)    each rank has the same groups of the input's channels and of the output's
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor

from mpi4dl.comm import collectives
from mpi4dl.geometry import Interval, Split
from mpi4dl.parallel.spatial.grid import Grid, Layout
from mpi4dl.parallel.spatial.sums import shared, with_all_features
from mpi4dl.parallel.spatial.tensor import SpatialTensor, function_name, refusal, wrap


def own_channels(x: Tensor) -> Tensor:
    """What this rank has of x's channels, as if these were all."""
    if not isinstance(x, SpatialTensor):
        return x
    layout = x.layout
    return wrap(x.local, layout.with_dims([*layout.dims[:-1], None]))


def as_own(y: Tensor, grid: Grid, split: Split, dim: int) -> SpatialTensor:
    """y, made of this rank's own channels, as what it has of all of them, which are cut so."""
    layout = y.layout if isinstance(y, SpatialTensor) else Layout.of_copies(grid)
    local = y.local if isinstance(y, SpatialTensor) else y
    tiling = layout.tiling.replace(grid.axes[-1], split)
    return SpatialTensor(local, Layout(grid, tiling, (*layout.dims[:-1], dim), layout.flat))


def of_channels(x: Tensor | None, channels: Interval) -> Tensor | None:
    """Those entries of x, which every rank has for all channels."""
    return None if x is None else x[channels.start : channels.stop]


Convolve = Callable[..., Tensor]
GROUPS = 3  # the place of `groups` in what follows a convolution's bias
BEHIND_BIAS = (
    ("stride", "padding", "dilation", "groups"),
    ("stride", "padding", "output_padding", "groups", "dilation"),
)


def with_cut_channels(function: Any, convolution: Convolve, out: int = 0) -> Convolve:
    """The rule `convolution` of this function, for weights too that are cut; `out` is the weight's dim of outputs."""

    @wraps(convolution)
    def rule(input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **options: Any) -> Tensor:
        dim = input.dim() - weight.dim() + 1
        if not isinstance(weight, SpatialTensor) and not shared(input, dim):
            return convolution(input, weight, bias, *args, **options)
        if isinstance(weight, SpatialTensor) and not shared(weight, 0) and not shared(weight, 1):
            raise refusal(function_name(function), "an argument other than the input is a SpatialTensor")
        groups = options.get("groups", args[GROUPS] if len(args) > GROUPS else 1)
        if not isinstance(weight, SpatialTensor):
            return function(with_all_features(input), weight, bias, *args, **options)  # type: ignore[arg-type]
        grid, split = weight.layout.grid, weight.layout.tiling.splits[-1]
        if groups == 1 and shared(weight, out):
            x = with_all_features(input) if shared(input, dim) else input  # type: ignore[arg-type]
            y = function(x, weight.local, _own(bias, weight, split), *args, **options)
            return as_own(y, grid, split, dim)
        if groups == 1:
            x = _these(input, split, dim, grid)
            y = function(x, weight.local, None, *args, **options)
            total = y.local if isinstance(y, SpatialTensor) else y
            total = collectives.all_reduce(total, grid.along((grid.axes[-1],)))
            y = wrap(total, y.layout) if isinstance(y, SpatialTensor) else total
            return y if bias is None else y + bias.view(-1, *[1] * (weight.dim() - 2))
        # Groups: some of the inputs make some of the outputs.
        if not shared(weight, 0) or weight.shape[0] % groups or any(n * groups % weight.shape[0] for n in split.cuts):
            raise refusal(function_name(function), f"a weight of {groups} groups is cut elsewhere than between these")
        cuts = [n * groups // weight.shape[0] for n in split.cuts]  # in groups
        number = cuts[grid.coordinates[-1] + 1] - cuts[grid.coordinates[-1]]
        own = {**dict(zip(BEHIND_BIAS[out], args, strict=False)), **options, "groups": number}
        x = _these(input, Split.at([n * (input.shape[dim] // groups) for n in cuts]), dim, grid)
        made = Split.at([n * (weight.shape[out] // (1 if out else groups)) for n in cuts])
        return as_own(function(x, weight.local, _own(bias, weight, split), **own), grid, made, dim)

    return rule


def _own(bias: Tensor | None, weight: SpatialTensor, split: Split) -> Tensor | None:
    if isinstance(bias, SpatialTensor):
        return bias.local
    return of_channels(bias, split.owned(weight.layout.grid.coordinates[-1]))


def _these(x: Tensor, split: Split, dim: int, grid: Grid) -> Tensor:
    """Of x this rank's channels by that split."""
    if shared(x, dim) and x.layout.tiling.splits[-1] == split:  # type: ignore[attr-defined]
        return own_channels(x)
    x = with_all_features(x) if shared(x, dim) else x  # type: ignore[arg-type]
    mine = split.owned(grid.coordinates[-1])
    return x.narrow(dim, mine.start, mine.length)
