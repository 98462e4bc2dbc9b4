"""The ranks that share an image, and the layout of one tensor over them."""

from dataclasses import dataclass, replace

from mpi4dl import geometry
from mpi4dl.comm import Communicator
from mpi4dl.comm.exchange import Dims, Exchange, plan_exchange
from mpi4dl.geometry import AXES, Box, Tiling
from mpi4dl.parallel.spatial.foresight import Foresight


class Grid:
    """A grid of `batch` x `rows` x `cols` ranks, all ranks of `comm`, numbered row by row.

    `rows` and `cols` cut the height and the width of every image into tiles, `batch` cuts the batch: those ranks are
    data replicas, or the ways in which a stage splits its batch. Raises ValueError if the grid and `comm` differ in
    size. `tracks_batch`: tensors know which of their dims is the batch; it is so wherever the batch is cut.
    """

    def __init__(
        self, comm: Communicator, rows: int = 1, cols: int = 1, batch: int = 1, tracks_batch: bool = False
    ) -> None:
        if min(rows, cols, batch) < 1:
            raise ValueError(f"a grid needs at least one rank on each axis, but got {batch} x {rows} x {cols}")
        self.shape = geometry.GridShape(batch, rows, cols)
        if self.shape.size != comm.size:
            ways = f"batch({batch}) x " if batch > 1 else ""
            raise ValueError(
                f"{ways}rows({rows}) x columns({cols}) = {self.shape.size} ranks, but there are {comm.size}: "
                f"start with mpirun -n {self.shape.size}, or choose another grid"
            )
        self.comm = comm
        self.tracks_batch = tracks_batch or batch > 1
        self.coordinates = self.shape.coordinates(comm.rank)
        self.foresight = Foresight()
        self._along: dict[tuple[int, ...], Communicator] = {AXES: comm}

    def __repr__(self) -> str:
        return f"Grid(rows={self.shape.rows}, cols={self.shape.cols}, batch={self.shape.batch}, rank={self.rank})"

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def size(self) -> int:
        return self.comm.size

    @property
    def rows(self) -> int:
        return self.shape.rows

    @property
    def cols(self) -> int:
        return self.shape.cols

    def along(self, axes: tuple[int, ...]) -> Communicator:
        """The ranks that differ from this one only along these axes. Collective when first asked for."""
        axes = tuple(axis for axis in AXES if axis in axes or self.shape[axis] == 1)
        if axes not in self._along:
            color = 0
            for axis in AXES:
                if axis not in axes:
                    color = color * self.shape[axis] + self.coordinates[axis]
            self._along[axes] = self.comm.split(color)
        return self._along[axes]

    def ranks_along(self, axes: tuple[int, ...]) -> tuple[int, ...]:
        """The ranks of `along(axes)`, by their numbers in the grid."""
        fixed = [axis for axis in AXES if axis not in axes]
        places = map(self.shape.coordinates, range(self.size))
        return tuple(rank for rank, place in enumerate(places) if all(place[a] == self.coordinates[a] for a in fixed))

    def box(self, batch: int, size: tuple[int, int]) -> Box:
        """The box of a batch of images of `size` (H, W) that this rank holds when they are cut evenly."""
        return Tiling.even(self.shape, (batch, *size)).owned(self.rank)


@dataclass(frozen=True)
class Layout:
    """Where this rank's part of a tensor lies in the whole: its tiling, and its dims of batch, rows and columns.

    A tensor without one of these axes has None there. A batch that is not tracked counts as an ordinary dim.
    """

    grid: Grid
    tiling: Tiling
    dims: Dims

    @property
    def owned(self) -> Box:
        return self.tiling.owned(self.grid.rank)

    @property
    def held(self) -> Box:
        return self.tiling.held(self.grid.rank)

    @property
    def wide(self) -> bool:
        return any(split.wide for split in self.tiling.splits)

    @property
    def whole(self) -> bool:
        """Whether nothing is left that the ranks share out: every rank holds all of the tensor."""
        return all(dim is None for dim in self.dims)

    @property
    def narrow(self) -> "Layout":
        """The same layout, holding what it owns and no more."""
        batch, rows, cols = (split.narrow() for split in self.tiling.splits)
        return replace(self, tiling=Tiling((batch, rows, cols)))

    def axis(self, dim: int) -> int | None:
        """Which axis a tensor's dim is: BATCH, ROWS, COLS, or None for an ordinary dim."""
        return self.dims.index(dim) if dim in self.dims else None

    def cut(self, dim: int) -> bool:
        """Whether more than one rank shares this dim."""
        axis = self.axis(dim)
        return axis is not None and self.grid.shape[axis] > 1

    def global_shape(self, local: tuple[int, ...]) -> tuple[int, ...]:
        shape = list(local)
        for axis, dim in enumerate(self.dims):
            if dim is not None:
                shape[dim] = self.tiling.splits[axis].size
        return tuple(shape)

    def local_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of this rank's part, held halo included, of a tensor of this global shape."""
        local = list(shape)
        for axis, dim in enumerate(self.dims):
            if dim is not None:
                local[dim] = self.held[axis].length
        return tuple(local)

    def with_dims(self, dims: Dims) -> "Layout":
        """The layout after the dims moved; an axis whose dim is now None is gone from the tensor."""
        tiling = self.tiling
        for axis in AXES:
            if dims[axis] is None and self.dims[axis] is not None:
                tiling = tiling.drop(axis)
        return Layout(self.grid, tiling, dims)

    def exchange_to(self, tiling: Tiling, fill: float = 0.0) -> Exchange:
        """The exchange after which each rank holds what `tiling` says, beyond the edge of the image if it says so."""
        plan = plan_exchange(
            self.grid.rank, self.tiling.all_owned, self.tiling.all_held, tiling.all_held, self.tiling.whole
        )
        return Exchange(plan, self.grid.comm, self.dims, fill)
