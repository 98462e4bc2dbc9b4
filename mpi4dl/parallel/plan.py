"""A plan: how many ranks share an image, and how many replicas share a batch. Data, from which all else is derived."""

from dataclasses import dataclass

from mpi4dl.comm import Communicator
from mpi4dl.parallel.spatial.grid import Grid


@dataclass(frozen=True)
class Plan:
    """`tiles` (rows, columns) of every image, times `data` replicas that share each batch.

    Ranks of one replica are neighbours, so that halos stay within a node.
    """

    tiles: tuple[int, int] = (1, 1)
    data: int = 1

    @property
    def num_ranks(self) -> int:
        return self.tiles[0] * self.tiles[1] * self.data

    def __str__(self) -> str:
        return f"tiles({self.tiles[0]}x{self.tiles[1]}) x data({self.data})"

    def problem(self, num_ranks: int, image_size: tuple[int, int], batch_size: int) -> str | None:
        """What is wrong with this plan for so many ranks and such images, in one sentence; None if it fits."""
        if self.num_ranks != num_ranks:
            return (
                f"{self} = {self.num_ranks} ranks, but mpirun started {num_ranks}: "
                f"start with mpirun -n {self.num_ranks}, or change --tiles or --data"
            )
        for name, tiles, pixels in zip(("rows", "columns"), self.tiles, image_size, strict=True):
            if tiles > pixels:
                asked = f"--tiles {self.tiles[0]}x{self.tiles[1]}"
                return f"{asked} cuts images into {tiles} {name} of tiles, but they have only {pixels} {name} of pixels"
        if self.data > batch_size:
            return f"--data {self.data} replicas cannot share a batch of {batch_size}: raise --batch-size"
        return None

    def grid(self, comm: Communicator) -> Grid:
        return Grid(comm, rows=self.tiles[0], cols=self.tiles[1], batch=self.data)
