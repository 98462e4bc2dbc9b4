"""What crosses from stage to stage of a tensor in which several axes are one dim: all axes, and what every rank has.

(N, 1 + H * W, C)      ->  (N, H, W, C)  +  (N, 1, C)       what has an axis a dim can be cut anew for other tiles
  flat, with a class token                                 and is put together again behind the boundary
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from mpi4dl.parallel.spatial.flattening import copies_in, open_dims, opened
from mpi4dl.parallel.spatial.halo import without_flat_dims
from mpi4dl.parallel.spatial.tensor import SpatialTensor


class Joint(NamedTuple):
    """How a tensor is made of what crosses: the shape of what is spread, and the dim with entries that every rank has,
    if any has: some before the others, some behind them, or both.
    """

    shape: tuple[int, ...]
    dim: int | None
    before: bool = False
    behind: bool = False


def take_apart(x: Tensor) -> tuple[list[Tensor], Joint | None]:
    """What crosses of x, and how x is made of it; x itself if it has no flat dims."""
    if not isinstance(x, SpatialTensor) or not x.layout.flat:
        return [x], None
    flats = x.layout.flat
    having = [flat for flat in flats if flat.copies]
    if having and len(flats) > 1:
        return [without_flat_dims(x)], None
    rest: Tensor = x
    beside = []
    for flat in having:
        size = x.shape[flat.dim]
        beside = [x.narrow(flat.dim, start, length) for start, length in copies_in(size, flat) if length]
        rest = x.narrow(flat.dim, flat.prefix, size - flat.copies)
    assert isinstance(rest, SpatialTensor)
    layout = rest.layout
    apart = SpatialTensor(open_dims(rest.local, layout, layout.held), opened(layout))
    shape = tuple(rest.shape)
    joints = [Joint(shape, flat.dim, flat.prefix > 0, flat.suffix > 0) for flat in having]
    return [apart, *beside], joints[0] if joints else Joint(shape, None)


def put_together(parts: Iterator[Tensor], joint: Joint | None) -> Tensor:
    """The way back on the next stage's grid, of the next parts."""
    x = next(parts)
    if joint is None:
        return x
    x = x.reshape(joint.shape)
    if joint.dim is None:
        return x
    before = [next(parts)] if joint.before else []
    behind = [next(parts)] if joint.behind else []
    return torch.cat([*before, x, *behind], joint.dim)
