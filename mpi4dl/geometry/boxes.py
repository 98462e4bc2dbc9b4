"""Which part of an image a rank owns, and which part an operator needs: integers only, no torch.

    axes     0       1      2      3            the batch, and those of space: as many as the images have
    images   batch   rows   cols
    volumes  batch   depth  rows   cols         a `Box` has an interval of each, a `Tiling` a `Split`, a grid of ranks
    sequences        batch  tokens              a number of parts; nothing here knows how many axes there are

Everything is in global pixel coordinates and half-open. A `Tiling` cuts a tensor of some size into one box per rank.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise, product
from math import isqrt, prod
from typing import NamedTuple, Self, TypeVar

BATCH = 0  # of all axes the first
# The names of the axes of space, by their number: first the slowest in memory, as in NCDHW.
SPACE = {1: ("tokens",), 2: ("rows", "cols"), 3: ("depth", "rows", "cols")}


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


class Interval(NamedTuple):
    """The integers from `start` up to, not including, `stop`."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        return max(0, self.stop - self.start)

    @property
    def empty(self) -> bool:
        return self.stop <= self.start

    def intersect(self, other: "Interval") -> "Interval":
        start = max(self.start, other.start)
        return Interval(start, max(start, min(self.stop, other.stop)))

    def covers(self, other: "Interval") -> bool:
        return other.empty or (self.start <= other.start and other.stop <= self.stop)

    def shift(self, by: int) -> "Interval":
        return Interval(self.start + by, self.stop + by)

    def grow(self, before: int, after: int) -> "Interval":
        return Interval(self.start - before, self.stop + after)

    def strips(self, step: int) -> list["Interval"]:
        """Its parts of `step` each, of which the last one may be shorter."""
        return [Interval(at, min(at + step, self.stop)) for at in range(self.start, self.stop, step)]

    def blocks(self, side: int) -> list["Interval"]:
        """The blocks of a grid, `side` each, that it touches."""
        return [Interval(n * side, (n + 1) * side) for n in range(self.start // side, ceil_div(self.stop, side))]


T = TypeVar("T")


class PerAxis(tuple[T, ...]):
    """One of something for each axis: the batch first, then the axes of space."""

    __slots__ = ()

    def __new__(cls, *each: T) -> Self:
        return super().__new__(cls, each)

    def __getnewargs__(self) -> tuple[T, ...]:
        return tuple(self)

    @property
    def batch(self) -> T:
        return self[BATCH]

    @property
    def space(self) -> tuple[T, ...]:
        return self[BATCH + 1 :]


class Box(PerAxis[Interval]):
    """A block of a batch of images: which samples, then which pixels along each axis of space."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"Box({', '.join(f'{start}:{stop}' for start, stop in self)})"

    @property
    def rows(self) -> Interval:
        return self[-2]

    @property
    def cols(self) -> Interval:
        return self[-1]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(interval.length for interval in self)

    @property
    def empty(self) -> bool:
        return any(interval.empty for interval in self)

    def intersect(self, other: "Box") -> "Box":
        return Box(*(a.intersect(b) for a, b in zip(self, other, strict=True)))

    def covers(self, other: "Box") -> bool:
        return other.empty or all(a.covers(b) for a, b in zip(self, other, strict=True))


def near_square(count: int, num_axes: int = 2) -> tuple[int, ...]:
    """So many tiles: of pictures as many rows as go, up to as many as columns; of volumes all of the depth."""
    if num_axes == 1:
        return (count,)
    rows = next((n for n in range(isqrt(count), 0, -1) if count % n == 0), 1)
    return (*(1,) * (num_axes - 2), rows, count // rows)


class GridShape(PerAxis[int]):
    """How many ranks share each axis; ranks are numbered in the order of the axes, the last one fastest."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"GridShape({', '.join(map(str, self))})"

    @property
    def size(self) -> int:
        return prod(self)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        return _places(self)[rank]

    def number(self, coordinates: Sequence[int]) -> int:
        """The rank that has these coordinates."""
        found = 0
        for place, parts in zip(coordinates, self, strict=True):
            found = found * parts + place
        return found


class FeatureGridShape(GridShape):
    """The same with ranks that share features, which are the last axis: no axis of space."""

    __slots__ = ()

    @property
    def space(self) -> tuple[int, ...]:
        return self[BATCH + 1 : -1]


@lru_cache(maxsize=256)
def _places(shape: GridShape) -> tuple[tuple[int, ...], ...]:
    """The coordinates of all ranks."""
    return tuple(product(*map(range, shape)))


def even_cuts(size: int, parts: int) -> tuple[int, ...]:
    """Cut `size` into `parts` whose lengths differ by at most one."""
    return tuple(size * i // parts for i in range(parts + 1))


class Split(NamedTuple):
    """How one axis of a tensor is cut over the ranks along it.

    Part `i` *owns* [cuts[i], cuts[i + 1]): every element has one owner. It *holds* `held[i]`, which is that interval,
    or a wider one whose extra elements are exact copies of what its neighbours own.
    """

    cuts: tuple[int, ...]
    held: tuple[Interval, ...]

    @classmethod
    def at(cls, cuts: Sequence[int]) -> "Split":
        return cls(tuple(cuts), tuple(Interval(*pair) for pair in pairwise(cuts)))

    @property
    def size(self) -> int:
        return self.cuts[-1]

    @property
    def parts(self) -> int:
        return len(self.held)

    @property
    def wide(self) -> bool:
        return any(held != owned for held, owned in zip(self.held, pairwise(self.cuts), strict=True))

    def owned(self, part: int) -> Interval:
        return Interval(self.cuts[part], self.cuts[part + 1])

    def narrow(self) -> "Split":
        return Split.at(self.cuts)

    def widen(self, halo: int) -> "Split":
        """The same cuts, each part holding up to `halo` more elements on both sides."""
        whole = Interval(0, self.size)
        held = (self.owned(i).grow(halo, halo).intersect(whole) for i in range(self.parts))
        return Split(self.cuts, tuple(held))


class Tiling(NamedTuple):
    """A grid of ranks and how each axis of one tensor is cut over it.

    An axis that the tensor does not have (the rows of something already averaged over the rows) is cut into one unit
    per part: each rank along it owns a copy, and nothing needs to know the difference.
    """

    splits: tuple[Split, ...]

    @classmethod
    def even(cls, grid: GridShape, size: Sequence[int]) -> "Tiling":
        """Samples and pixels of this size, cut evenly; ranks that share features have copies of them."""
        return cls.of_images(grid, [Split.at(even_cuts(n, parts)) for n, parts in zip(size, grid, strict=False)])

    @classmethod
    def of_images(cls, grid: GridShape, splits: Sequence[Split]) -> "Tiling":
        """That of images whose samples and pixels are cut so, one split for each axis of them."""
        copied = grid[len(splits) :]
        assert len(splits) == 1 + len(grid.space)
        return cls((*splits, *(Split.at(range(parts + 1)) for parts in copied)))

    @classmethod
    def copies(cls, grid: GridShape) -> "Tiling":
        """That of a tensor that has none of the axes: every rank holds it."""
        return cls(tuple(Split.at(range(parts + 1)) for parts in grid))

    @property
    def grid(self) -> GridShape:
        return GridShape(*(split.parts for split in self.splits))

    @property
    def size(self) -> tuple[int, ...]:
        return tuple(split.size for split in self.splits)

    @property
    def wide(self) -> bool:
        """Whether a rank may hold more than it owns."""
        return self.narrow != self

    def owned(self, rank: int) -> Box:
        return _boxes_of(self, rank)[0]

    def held(self, rank: int) -> Box:
        return _boxes_of(self, rank)[1]

    @property
    def whole(self) -> Box:
        return Box(*(Interval(0, split.size) for split in self.splits))

    @property
    def all_owned(self) -> tuple[Box, ...]:
        return _boxes(self)[0]

    @property
    def all_held(self) -> tuple[Box, ...]:
        return _boxes(self)[1]

    @property
    def narrow(self) -> "Tiling":
        """The same cuts, each part holding what it owns and no more."""
        return _narrow(self)

    def replace(self, axis: int, split: Split) -> "Tiling":
        return Tiling((*self.splits[:axis], split, *self.splits[axis + 1 :]))

    def drop(self, axis: int) -> "Tiling":
        """The tiling of a tensor that no longer has this axis: every rank along it holds a copy."""
        return self.replace(axis, Split.at(range(self.splits[axis].parts + 1)))


@lru_cache(maxsize=4096)
def _narrow(tiling: Tiling) -> Tiling:
    return Tiling(tuple(split.narrow() for split in tiling.splits))


@lru_cache(maxsize=4096)
def _boxes_of(tiling: Tiling, rank: int) -> tuple[Box, Box]:
    """The boxes that a rank owns and holds."""
    places = list(zip(tiling.splits, tiling.grid.coordinates(rank), strict=True))
    return Box(*(split.owned(part) for split, part in places)), Box(*(split.held[part] for split, part in places))


@lru_cache(maxsize=4096)
def _boxes(tiling: Tiling) -> tuple[tuple[Box, ...], tuple[Box, ...]]:
    """The boxes that every rank owns and holds."""
    ranks = range(tiling.grid.size)
    return tuple(tiling.owned(rank) for rank in ranks), tuple(tiling.held(rank) for rank in ranks)


def cut_alike(a: Tiling, b: Tiling) -> bool:
    """Whether ranks own the same by both."""
    return all(one.cuts == other.cuts for one, other in zip(a.splits, b.splits, strict=True))


@lru_cache(maxsize=4096)
def suffices(have: Tiling, want: Tiling) -> bool:
    """Whether every rank holds by one tiling what it is to hold by another, along each axis and within the whole."""
    return all(
        held.covers(needed.intersect(Interval(0, one.size)))
        for one, other in zip(have.splits, want.splits, strict=True)
        for held, needed in zip(one.held, other.held, strict=True)
    )


@lru_cache(maxsize=4096)
def widest(a: Tiling, b: Tiling) -> Tiling:
    """The hull of what each rank holds by two tilings of the same cuts, within the whole."""
    return Tiling(tuple(_widest(one, other) for one, other in zip(a.splits, b.splits, strict=True)))


def _widest(a: Split, b: Split) -> Split:
    held = []
    for one, other in zip(a.held, b.held, strict=True):
        both = [interval for interval in (one, other) if not interval.empty] or [one]
        hull = Interval(min(start for start, _ in both), max(stop for _, stop in both))
        held.append(hull.intersect(Interval(0, a.size)))
    return Split(a.cuts, tuple(held))
