"""What crosses from stage to stage of a tensor in which several axes are one dim: all axes apart, and its prefix too.

(N, 1 + H * W, C)      ->  (N, H, W, C)  +  (N, 1, C)       what has an axis a dim can be cut anew for other tiles
  flat, with a prefix                                       and is put together again behind the boundary
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from mpi4dl.parallel.spatial.flattening import open_dims, opened
from mpi4dl.parallel.spatial.halo import without_flat_dims
from mpi4dl.parallel.spatial.tensor import SpatialTensor


class Joint(NamedTuple):
    """How a tensor is made of what crosses: the shape of all but its prefix, and the dim that has one, if any does."""

    shape: tuple[int, ...]
    prefixed: int | None


def take_apart(x: Tensor) -> tuple[list[Tensor], Joint | None]:
    """What crosses of x, and how x is made of it; x itself if it has no flat dims."""
    if not isinstance(x, SpatialTensor) or not x.layout.flat:
        return [x], None
    flats = x.layout.flat
    prefixed = [flat for flat in flats if flat.prefix]
    if prefixed and len(flats) > 1:
        return [without_flat_dims(x)], None
    rest: Tensor = x
    before = []
    for dim, _, prefix in prefixed:
        before = [x.narrow(dim, 0, prefix)]
        rest = x.narrow(dim, prefix, x.shape[dim] - prefix)
    assert isinstance(rest, SpatialTensor)
    layout = rest.layout
    apart = SpatialTensor(open_dims(rest.local, layout, layout.held), opened(layout))
    return [apart, *before], Joint(tuple(rest.shape), prefixed[0].dim if prefixed else None)


def put_together(parts: Iterator[Tensor], joint: Joint | None) -> Tensor:
    """The way back on the next stage's grid, of the next parts."""
    x = next(parts)
    if joint is None:
        return x
    x = x.reshape(joint.shape)
    return x if joint.prefixed is None else torch.cat([next(parts), x], joint.prefixed)
