"""What of a tensor a rank has that no other is to count or to write: the parts of all ranks are the whole, once."""

from typing import NamedTuple

from torch import Tensor

from mpi4dl.geometry import BATCH
from mpi4dl.parallel.spatial.grid import Grid
from mpi4dl.parallel.spatial.halo import gather, gather_axes, retile
from mpi4dl.parallel.spatial.tensor import SpatialTensor

CLASSES = 1


class Owned(NamedTuple):
    """A rank's part: `values` are whole[where]. `counts`: it is this rank that speaks for it. `dense`: it is one of
    several parts that differ along more than the batch.
    """

    values: Tensor
    where: tuple[slice, ...]
    counts: bool
    dense: bool

    def of_targets(self, targets: Tensor) -> Tensor:
        """The same part of targets (N, ...) beside a whole of (N, C, ...), or of the same shape."""
        if targets.dim() == len(self.where):
            return targets[self.where]
        if targets.dim() == len(self.where) - 1:
            return targets[tuple(cut for dim, cut in enumerate(self.where) if dim != CLASSES)]
        raise ValueError(
            f"dense outputs with {len(self.where)} dims have targets of as many, or of one less, not {targets.dim()}"
        )


def owned(x: Tensor, grid: Grid) -> Owned:
    """This rank's part of x, which all ranks of the grid have as a plain tensor, or spread. Collective over the grid.

    Outputs that differ only along the batch, such as logits, are gathered, and rank 0 speaks for them.
    """
    if isinstance(x, SpatialTensor) and all(dim is None for dim in x.layout.dims[BATCH + 1 :]):
        x = gather(x)
    if isinstance(x, SpatialTensor):
        rest = [axis for axis in grid.axes[BATCH + 1 :] if axis not in grid.space and x.layout.dims[axis] is not None]
        x = gather_axes(x, rest) if rest or x.layout.flat else x
    if not isinstance(x, SpatialTensor):
        return Owned(x, tuple(slice(0, size) for size in x.shape), grid.rank == 0, False)
    x = retile(x, x.layout.tiling.narrow)
    index = [slice(0, size) for size in x.shape]
    for axis, dim in enumerate(x.layout.dims):
        if dim is not None:
            index[dim] = slice(*x.layout.owned[axis])
    counts = all(place == 0 for place, dim in zip(grid.coordinates, x.layout.dims, strict=True) if dim is None)
    return Owned(x.local, tuple(index), counts, True)
