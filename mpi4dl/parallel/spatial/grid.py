"""The ranks that share an image, and the layout of one tensor over them."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import torch

from mpi4dl import geometry
from mpi4dl.comm import Communicator
from mpi4dl.comm.exchange import Dims, Exchange, plan_retiling
from mpi4dl.geometry import BATCH, SPACE, Box, Tiling
from mpi4dl.parallel.spatial.halo_prefetch import HaloPrefetch

KNOWN = 1024  # what is remembered of a grid, and of a layout, before all of it is forgotten: images may have any size

T = TypeVar("T")


class PartPlace(NamedTuple):
    """Which part of parameters a rank has: its number among those that share features, and experts, and how many."""

    features: tuple[int, int] = (0, 1)
    experts: tuple[int, int] = (0, 1)

    def among(self, axes: Sequence[str]) -> tuple[int, int]:
        """The same over several of them, the last fastest."""
        index, count = 0, 1
        for axis in axes:
            number, size = getattr(self, axis)
            index, count = index * size + number, count * size
        return index, count


class Arrangement(NamedTuple):
    """The axes that ranks of a grid share besides tensors of images.

    `shares_tokens`: sums over the axis of features leave each rank some of the tokens (`sums`). Of ranks along the
    batch, where each replica has so many `ways`, `experts` share experts.
    """

    shares_tokens: bool = False
    experts: int = 1
    ways: int = 1


class Grid:
    """A grid of ranks, all those of `comm`: `batch` of them share the batch, and so many each axis of space.

    Grid(comm, rows=2, cols=2)      images, (N, C, H, W): height and width are cut into tiles
    Grid(comm, depth=2, rows=2)     volumes, (N, C, D, H, W), into boxes
    Grid(comm, tokens=4)            sequences, (N, C, L), into pieces
    Grid(comm, tokens=2, features=2)    and the parameters of layers, with what they make of features (`tensor`)

    Ranks are numbered in the order of the axes, the last fastest. Those that share the batch are data replicas, or the
    ways in which a stage splits its batch. `tracks_batch`: tensors know which of their dims is the batch; it is so
    wherever the batch is cut. `attention`: to "gather" keys and values of all tokens, or to let them go round the ranks
    in a "ring", which "auto" does where there are many.

    Raises:
        ValueError: the grid and `comm` differ in size, or tokens were given beside rows, columns or depth.
    """

    def __init__(
        self,
        comm: Communicator,
        rows: int | None = None,
        cols: int | None = None,
        batch: int = 1,
        tracks_batch: bool = False,
        *,
        depth: int | None = None,
        tokens: int | None = None,
        features: int | None = None,
    ) -> None:
        if tokens is not None:
            if (rows, cols, depth) != (None, None, None):
                raise ValueError("a grid cuts sequences along their tokens, or images along rows, columns and depth")
            space: tuple[int, ...] = (tokens,)
        else:
            space = (1 if rows is None else rows, 1 if cols is None else cols)
            space = space if depth is None else (depth, *space)
        if features is None:
            self._set(comm, geometry.GridShape(batch, *space), tracks_batch)
        else:
            self._set(comm, geometry.FeatureGridShape(batch, *space, features), tracks_batch)

    @classmethod
    def of(cls, comm: Communicator, shape: geometry.GridShape, tracks_batch: bool = False) -> "Grid":
        """The grid of this shape."""
        grid = cls.__new__(cls)
        grid._set(comm, shape, tracks_batch)
        return grid

    def _set(self, comm: Communicator, shape: geometry.GridShape, tracks_batch: bool) -> None:
        if min(shape) < 1:
            raise ValueError(f"a grid needs at least one rank on each axis, but got {' x '.join(map(str, shape))}")
        self.shape = shape
        self.axes = tuple(range(len(shape)))  # their numbers
        self.space = self.axes[BATCH + 1 :][: len(shape.space)]  # those of space, in the order of a tensor's last dims
        self.features = next(iter(self.axes[BATCH + 1 + len(shape.space) :]), None)  # the axis of features, if any
        self.names = ("batch", *SPACE[len(shape.space)], *(("features",) if self.features is not None else ()))
        if shape.size != comm.size:
            ways = " x ".join(
                f"{name}({parts})"
                for name, parts in zip(self.names, shape, strict=True)
                if name != "batch" or parts > 1
            )
            raise ValueError(
                f"{ways} = {shape.size} ranks, but there are {comm.size}: "
                f"start with mpirun -n {shape.size}, or choose another grid"
            )
        self.comm = comm
        self.tracks_batch = tracks_batch or shape.batch > 1
        self.coordinates = shape.coordinates(comm.rank)
        self.halo_prefetch = HaloPrefetch()
        self.arrangement = Arrangement()
        self.attention: Literal["auto", "ring", "gather"] = "auto"  # how keys and values come to queries
        self.loop: Literal["whole", "spread"] | None = None  # what models in users' own loops return (`own_loop`)
        self.cache: dict[Hashable, Any] = {}  # what was found out once for all layers, with communicators of its own
        self._along: dict[tuple[int, ...], Communicator] = {self.axes: comm}
        self._layouts: dict[Layout, Layout] = {}

    def __repr__(self) -> str:
        parts = (f"{name}={parts}" for name, parts in zip(self.names, self.shape, strict=True))
        return f"Grid({', '.join(parts)}, rank={self.rank})"

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def size(self) -> int:
        return self.comm.size

    def intern(self, layout: "Layout") -> "Layout":
        """Of all layouts equal to this one the one that tensors have, so that what is known of it is known once."""
        if layout.settled:
            return layout
        found = self._layouts.get(layout)
        if found is None:
            if len(self._layouts) >= KNOWN:
                self._layouts.clear()
            found = self._layouts[layout] = layout
            object.__setattr__(found, "settled", True)
            Layout.any_flat = Layout.any_flat or bool(layout.flat)
        return found

    @property
    def layouts(self) -> "Iterable[Layout]":
        """Those that tensors of this grid have."""
        return self._layouts.values()

    def along(self, axes: tuple[int, ...]) -> Communicator:
        """The ranks that differ from this one only along these axes. Collective when first asked for."""
        axes = tuple(axis for axis in self.axes if axis in axes or self.shape[axis] == 1)
        if axes not in self._along:
            fixed = (0 if axis in axes else place for axis, place in enumerate(self.coordinates))
            self._along[axes] = self.comm.split(self.shape.number(tuple(fixed)))
        return self._along[axes]

    @property
    def place(self) -> PartPlace:
        """Which part of parameters this rank has."""
        features = (0, 1) if self.features is None else (self.coordinates[self.features], self.shape[self.features])
        experts, ways = self.arrangement.experts, self.arrangement.ways
        return PartPlace(features, (self.coordinates[BATCH] // ways % experts, experts))

    def among_experts(self) -> Communicator:
        """The ranks that share out experts with this one, in the order of their parts. Collective."""
        experts, ways = self.arrangement.experts, self.arrangement.ways
        replica, way = divmod(self.coordinates[BATCH], ways)
        color = self.shape.number((replica // experts * ways + way, *self.coordinates[BATCH + 1 :]))
        return self.comm.split(color, replica % experts)

    def ranks_along(self, axes: tuple[int, ...]) -> tuple[int, ...]:
        """The ranks of `along(axes)`, by their numbers in the grid."""
        fixed = [axis for axis in self.axes if axis not in axes]
        places = map(self.shape.coordinates, range(self.size))
        return tuple(rank for rank, place in enumerate(places) if all(place[a] == self.coordinates[a] for a in fixed))

    def box(self, batch: int, size: Sequence[int]) -> Box:
        """The box of a batch of images of `size`, such as (H, W), that this rank holds when they are cut evenly."""
        return Tiling.even(self.shape, (batch, *size)).owned(self.rank)


class Factor(NamedTuple):
    """A factor of a flat dim: an axis, or a number of entries of an ordinary dim."""

    axis: int | None
    size: int = 0


class Flat(NamedTuple):
    """A dim that is the flattening of several, axes among them, such as the tokens of an image: (rows, cols).

    In front of them may be a `prefix` of entries that every rank has, such as a class token, and behind them a `suffix`
    of such entries, such as the first tokens once more, which fill a square.
    """

    dim: int
    factors: tuple[Factor, ...]
    prefix: int = 0
    suffix: int = 0

    @property
    def copies(self) -> int:
        """How many entries every rank has."""
        return self.prefix + self.suffix

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes that it is made of."""
        return tuple(factor.axis for factor in self.factors if factor.axis is not None)

    def sizes(self, box: Box) -> list[int]:
        """The sizes of what it is made of, in this box."""
        return [factor.size if factor.axis is None else box[factor.axis].length for factor in self.factors]


def _without_lists(key: Any) -> Any:
    return tuple(map(_without_lists, key)) if isinstance(key, list | tuple) else key


@dataclass(frozen=True)
class Layout:
    """Where this rank's part of a tensor lies in the whole: its tiling, and for each axis the tensor's dim of it.

    A tensor without one of these axes has None there. A batch that is not tracked counts as an ordinary dim. `flat`
    describes dims that several axes, or an axis and an ordinary dim, became. Of such axes ranks hold what they own, and
    a rank's part of such a dim is the flattening of its box.
    """

    any_flat: ClassVar[bool] = False  # whether there was such a dim in this process
    settled: ClassVar[bool] = False  # whether it is `Grid.intern`

    grid: Grid
    tiling: Tiling
    dims: Dims
    flat: tuple[Flat, ...] = ()

    @classmethod
    def of_copies(cls, grid: Grid) -> "Layout":
        """That of a tensor that every rank has whole."""
        return cls(grid, Tiling.copies(grid.shape), (None,) * len(grid.shape))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((id(self.grid), self.tiling, self.dims, self.flat))

    @cached_property
    def _cache(self) -> dict[Hashable, Any]:
        return {}

    @cached_property
    def shapes(self) -> "_Shapes":
        """The shape of the whole, by that of this rank's part."""
        return _Shapes(self)

    def cached(self, key: Hashable, find: Callable[[], T]) -> T:
        """The result of `find()` for this layout, cached by this key, in which lists count as tuples.

        All that an operator needs to know before it computes follows from the layout and its arguments.
        """
        try:
            found: T | None = self._cache.get(key)
        except TypeError:
            return self.cached(_without_lists(key), find)
        if found is None:
            if len(self._cache) >= KNOWN:
                self._cache.clear()
            found = find()
            self._cache[key] = found = self.grid.intern(found) if isinstance(found, Layout) else found  # type: ignore
        assert found is not None
        return found

    def known(self, key: Hashable) -> Any:
        """What is cached by this key; None if nothing is."""
        return self._cache.get(key)

    @cached_property
    def owned(self) -> Box:
        return self.tiling.owned(self.grid.rank)

    @cached_property
    def held(self) -> Box:
        return self.tiling.held(self.grid.rank)

    @cached_property
    def wide(self) -> bool:
        return self.tiling.wide

    @cached_property
    def whole(self) -> bool:
        """Whether nothing is left that the ranks share out: every rank holds all of the tensor."""
        return all(dim is None for dim in self.dims)

    @cached_property
    def has_whole_samples(self) -> bool:
        """Whether ranks share nothing but samples, which are dim 0."""
        return all(dim in (None, 0) or parts == 1 for dim, parts in zip(self.dims, self.grid.shape, strict=True))

    @cached_property
    def narrow(self) -> "Layout":
        """The same layout, holding what it owns and no more."""
        return self.grid.intern(replace(self, tiling=self.tiling.narrow)) if self.wide else self

    def axis(self, dim: int) -> int | None:
        """Which axis a tensor's dim is, or None for an ordinary dim."""
        return self.dims.index(dim) if dim in self.dims else None

    def axes_at(self, dims: Sequence[int]) -> tuple[int, ...]:
        """All axes that these dims of a tensor carry."""
        return tuple(axis for axis, dim in enumerate(self.dims) if dim in dims)

    @cached_property
    def cut_dims(self) -> frozenset[int]:
        """The dims that more than one rank shares."""
        shared = zip(self.dims, self.grid.shape, strict=True)
        return frozenset(dim for dim, parts in shared if dim is not None and parts > 1)

    def cut(self, dim: int) -> bool:
        """Whether more than one rank shares this dim."""
        return dim in self.cut_dims

    def flat_at(self, dim: int) -> Flat | None:
        return next((flat for flat in self.flat if flat.dim == dim), None)

    def first_along(self, flat: Flat) -> bool:
        """Whether this rank is the first of those that share a flat dim: it speaks for the entries that all have."""
        return not any(self.grid.coordinates[axis] for axis in flat.axes)

    @cached_property
    def carried(self) -> frozenset[int]:
        """The axes of all flat dims."""
        return frozenset(axis for flat in self.flat for axis in flat.axes)

    def global_shape(self, local: tuple[int, ...]) -> torch.Size:
        """The shape of the whole of which this rank's part is `local`."""
        shape = list(local)
        for axis, dim in enumerate(self.dims):
            if dim is not None:
                shape[dim] = self.tiling.splits[axis].size
        for flat in self.flat:
            shape[flat.dim] = flat.copies + prod(flat.sizes(self.tiling.whole))
        return torch.Size(shape)

    def local_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of this rank's part, held halo included, of a tensor of this global shape."""
        local = list(shape)
        for axis, dim in enumerate(self.dims):
            if dim is not None:
                local[dim] = self.held[axis].length
        for flat in self.flat:
            local[flat.dim] = flat.copies + prod(flat.sizes(self.held))
        return tuple(local)

    def with_dims(self, dims: Iterable[int | None]) -> "Layout":
        """The layout after the dims moved; an axis whose dim is now None is gone from the tensor."""
        dims, tiling = tuple(dims), self.tiling
        for axis, dim in enumerate(dims):
            if dim is None and self.dims[axis] is not None:
                tiling = tiling.drop(axis)
        return Layout(self.grid, tiling, dims)

    def moved(self, place: Callable[[int], int | None]) -> "Layout":
        """The layout after each dim came to its `place`; the axes of one that has none are gone."""
        layout = self.with_dims([None if dim is None else place(dim) for dim in self.dims])
        if not self.flat:
            return layout
        found = ((flat, place(flat.dim)) for flat in self.flat)
        return replace(layout, flat=tuple(flat._replace(dim=dim) for flat, dim in found if dim is not None))

    def exchange_to(self, tiling: Tiling, fill: float = 0.0) -> Exchange:
        """The exchange after which each rank holds what `tiling` says, beyond the edge of the image if it says so."""
        return Exchange(plan_retiling(self.grid.rank, self.tiling, tiling), self.grid.comm, self.dims, fill)


class _Shapes(dict[torch.Size, torch.Size]):
    """Found when first asked for: every new tensor asks."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self._layout = layout

    def __missing__(self, local: torch.Size) -> torch.Size:
        if len(self) >= KNOWN:
            self.clear()
        self[local] = found = self._layout.global_shape(local)
        return found
