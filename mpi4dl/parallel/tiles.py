"""Exact spatial parallelism of one model in three calls: cut the image, look at the whole output, sum the gradients."""

from collections.abc import Sequence
from math import isqrt, prod

from torch import Tensor, nn

from mpi4dl.comm import Communicator, world
from mpi4dl.geometry import SPACE, GridShape
from mpi4dl.parallel import spatial


class Tiles:
    """A grid of tiles, one for each rank, through which a plain PyTorch model sees the whole image; see `tiles`."""

    def __init__(self, grid: spatial.Grid) -> None:
        self.grid = grid

    def cut(self, images: Tensor) -> Tensor:
        """This rank's tile of `images` (N, C, H, W), the same on every rank, as a tensor that a model takes as a whole.

        Of volumes (N, C, D, H, W), of sequences (N, C, L). On one rank it is what it was.
        """
        return images if self.grid.size == 1 else spatial.shard(images, self.grid)

    def join(self, tile: Tensor, size: Sequence[int]) -> Tensor:
        """The same of a tile (N, C, h, w) that this rank has read itself, of images of `size`, such as (H, W).

        Tiles are as `mpi4dl.geometry.Tiling.even(grid.shape, (N, *size))` cuts them: as even as can be.
        """
        return tile if self.grid.size == 1 else spatial.from_tile(tile, self.grid, size=tuple(size))

    def whole(self, outputs: Tensor) -> Tensor:
        """All of a model's outputs, on every rank. Collective."""
        return spatial.gather(outputs) if isinstance(outputs, spatial.SpatialTensor) else outputs

    def backward(self, loss: Tensor, model: nn.Module) -> None:
        """Give the parameters of `model` the gradients that one device would give them. Collective.

        `loss` is one number, which every rank has computed alike of whole outputs, or of spread ones.
        """
        (self.whole(loss) / self.grid.size).backward()
        spatial.sum_gradients(model, self.grid)


def tiles(*counts: int, comm: Communicator | None = None) -> Tiles:
    """A grid of as many tiles as `comm` has ranks, of images: rows and columns; of volumes a depth before, or a length.

    Without counts it has as many rows as go, up to as many as columns: 2 x 2 on 4 ranks, 1 x 5 on 5.

        tiles = mpi4dl.tiles()
        outputs = tiles.whole(model(tiles.cut(images)))
        tiles.backward(F.cross_entropy(outputs, labels), model)

    Raises:
        ValueError: the number of tiles is not that of ranks, or more axes than three.
    """
    comm = world() if comm is None else comm
    rows = next(n for n in range(isqrt(comm.size), 0, -1) if comm.size % n == 0)
    shape = counts or (rows, comm.size // rows)
    if len(shape) not in SPACE or prod(shape) != comm.size:
        asked = ", ".join(map(str, shape))
        raise ValueError(f"tiles({asked}) is not for {comm.size} ranks: 1 to 3 numbers whose product is that")
    return Tiles(spatial.Grid.of(comm, GridShape(1, *shape)))
