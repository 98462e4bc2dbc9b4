"""Cumulative sums, products and extrema along an axis of the image: what the parts before come to stands in front.

x        a b c | d e | f g      each part's last prefix, which every rank gathers, then takes those before its own:
totals     s       t     u      the last rank computes the prefixes of (s, t, f, g) and keeps the last two
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mpi4dl.geometry import Split
from mpi4dl.parallel.spatial.halo import gather_axes
from mpi4dl.parallel.spatial.rules.along_dim import along_dim
from mpi4dl.parallel.spatial.rules.reductions import owned_along
from mpi4dl.parallel.spatial.tensor import SpatialTensor, named, place_of, register, wrap


def _prefix(function: Any, indexed: bool) -> Callable[..., Any]:
    local = along_dim(function)

    def rule(input: SpatialTensor, dim: int, **options: Any) -> Any:
        dim = place_of(dim, input.dim())
        axis = input.layout.axis(dim)
        if axis is None or not input.layout.cut(dim):
            return local(input, dim, **options)
        part, layout = owned_along(input, (axis,)), input.layout
        layout = replace(layout, tiling=layout.tiling.replace(axis, layout.tiling.splits[axis].narrow()))
        split, place = layout.tiling.splits[axis], layout.grid.coordinates[axis]
        begun = [i for i in range(split.parts) if not split.owned(i).empty]
        earlier = sum(i < place for i in begun)
        units = replace(layout, tiling=layout.tiling.replace(axis, Split.at(range(split.parts + 1))))

        def before(last: Tensor) -> Tensor:
            """What the parts before this one, of those that have any pixels, came to."""
            every = gather_axes(SpatialTensor(last, units), (axis,))
            every = every.local if isinstance(every, SpatialTensor) else every
            every = every.index_select(dim, torch.tensor(begun, device=every.device))
            return every.narrow(dim, 0, earlier)

        def last_of(y: Tensor) -> Tensor:
            return y.narrow(dim, y.shape[dim] - 1, 1) if y.shape[dim] else y.sum(dim, keepdim=True).to(y.dtype)

        found = function(part, dim, **options)
        size = part.shape[dim]
        if not indexed:
            joined = torch.cat([before(last_of(found)), part], dim)
            return wrap(function(joined, dim, **options).narrow(dim, earlier, size), layout)
        values, indices = found
        start = split.owned(place).start
        numbers = torch.arange(start, start + size, device=part.device)
        shape = [size if d == dim else 1 for d in range(part.dim())]
        positions = torch.cat([before(last_of(indices + start)), numbers.view(shape).expand(part.shape)], dim)
        result = function(torch.cat([before(last_of(values)), part], dim), dim, **options)
        index = positions.gather(dim, result.indices).narrow(dim, earlier, size)
        return type(result)((wrap(result.values.narrow(dim, earlier, size), layout), wrap(index, layout)))

    return rule


for function in named("cumsum", "cumprod", "logcumsumexp"):
    register(function)(_prefix(function, indexed=False))
for function in named("cummax", "cummin"):
    register(function)(_prefix(function, indexed=True))
