"""Triangles of matrices: what each rank keeps follows from which rows and columns it has."""

from collections.abc import Callable

import torch
from torch import Tensor

from mpi4dl.parallel.spatial.tensor import SpatialTensor, named, register


def _rule(outside: Callable[[Tensor, int], Tensor], in_place: bool) -> Callable[..., Tensor]:
    """The rule that sets to zero what is `outside`, given how far columns are to the right of rows, and a diagonal."""

    def rule(input: SpatialTensor, diagonal: int = 0) -> Tensor:
        rows, cols = (_places(input, dim) for dim in (-2, -1))
        gone = outside(cols - rows.unsqueeze(-1), diagonal)
        if in_place:
            input.local.masked_fill_(gone, 0)
            return input
        return input.like(input.local.masked_fill(gone, 0))

    return rule


def _places(x: SpatialTensor, dim: int) -> Tensor:
    """Which rows or columns of the whole this rank holds."""
    axis = x.layout.axis(x.dim() + dim)
    start = 0 if axis is None else x.layout.held[axis].start
    return torch.arange(start, start + x.local.shape[dim], device=x.local.device)


for name, outside in (("tril", torch.gt), ("triu", torch.lt)):
    register(*named(name))(_rule(outside, False))
    register(*named(f"{name}_"))(_rule(outside, True))
