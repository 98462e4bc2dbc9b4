"""Which part of an image a rank owns, and which part an operator needs: integers only, no torch.

Everything is in global pixel coordinates and half-open. A `Box` is an interval over batch, rows and columns; a
`Tiling` cuts a tensor of some size into one box per rank; an `AxisMap` (a convolution's `Window`, a
`TransposedWindow`) says how the rows of an operator's output depend on the rows of its input.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple, Protocol

BATCH, ROWS, COLS = 0, 1, 2
AXES = (BATCH, ROWS, COLS)


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


class Box(NamedTuple):
    """A block of a batch of images: which samples, which rows, which columns."""

    batch: Interval
    rows: Interval
    cols: Interval

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.batch.length, self.rows.length, self.cols.length

    @property
    def empty(self) -> bool:
        return any(interval.empty for interval in self)

    def intersect(self, other: "Box") -> "Box":
        return Box(*(a.intersect(b) for a, b in zip(self, other, strict=True)))

    def covers(self, other: "Box") -> bool:
        return other.empty or all(a.covers(b) for a, b in zip(self, other, strict=True))


class GridShape(NamedTuple):
    """How many ranks share the batch, the rows and the columns; ranks are numbered in that order, columns fastest."""

    batch: int
    rows: int
    cols: int

    @property
    def size(self) -> int:
        return self.batch * self.rows * self.cols

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        return rank // (self.rows * self.cols), rank // self.cols % self.rows, rank % self.cols


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
        return any(self.held[i] != self.owned(i) for i in range(self.parts))

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

    splits: tuple[Split, Split, Split]

    @classmethod
    def even(cls, grid: GridShape, size: tuple[int, int, int]) -> "Tiling":
        batch, rows, cols = (Split.at(even_cuts(n, parts)) for n, parts in zip(size, grid, strict=True))
        return cls((batch, rows, cols))

    @property
    def grid(self) -> GridShape:
        return GridShape(*(split.parts for split in self.splits))

    @property
    def size(self) -> tuple[int, int, int]:
        batch, rows, cols = (split.size for split in self.splits)
        return batch, rows, cols

    def owned(self, rank: int) -> Box:
        where = self.grid.coordinates(rank)
        return Box(*(split.owned(part) for split, part in zip(self.splits, where, strict=True)))

    def held(self, rank: int) -> Box:
        where = self.grid.coordinates(rank)
        return Box(*(split.held[part] for split, part in zip(self.splits, where, strict=True)))

    @property
    def whole(self) -> Box:
        return Box(*(Interval(0, split.size) for split in self.splits))

    @property
    def all_owned(self) -> tuple[Box, ...]:
        return _boxes(self)[0]

    @property
    def all_held(self) -> tuple[Box, ...]:
        return _boxes(self)[1]

    def replace(self, axis: int, split: Split) -> "Tiling":
        splits = list(self.splits)
        splits[axis] = split
        return Tiling((splits[0], splits[1], splits[2]))

    def drop(self, axis: int) -> "Tiling":
        """The tiling of a tensor that no longer has this axis: every rank along it holds a copy."""
        return self.replace(axis, Split.at(range(self.splits[axis].parts + 1)))


@lru_cache(maxsize=4096)
def _boxes(tiling: Tiling) -> tuple[tuple[Box, ...], tuple[Box, ...]]:
    """What every rank owns, and what every rank holds."""
    ranks = range(tiling.grid.size)
    return tuple(tiling.owned(rank) for rank in ranks), tuple(tiling.held(rank) for rank in ranks)


def cut_alike(a: Tiling, b: Tiling) -> bool:
    """Whether ranks own the same by both."""
    return all(one.cuts == other.cuts for one, other in zip(a.splits, b.splits, strict=True))


@lru_cache(maxsize=4096)
def widest(a: Tiling, b: Tiling) -> Tiling:
    """What each rank holds by either of two tilings of the same cuts, and whatever is between, within the whole."""
    splits = [_widest(one, other) for one, other in zip(a.splits, b.splits, strict=True)]
    return Tiling((splits[0], splits[1], splits[2]))


def _widest(a: Split, b: Split) -> Split:
    held = []
    for one, other in zip(a.held, b.held, strict=True):
        both = [interval for interval in (one, other) if not interval.empty] or [one]
        hull = Interval(min(start for start, _ in both), max(stop for _, stop in both))
        held.append(hull.intersect(Interval(0, a.size)))
    return Split(a.cuts, tuple(held))


class AxisMap(Hashable, Protocol):
    """How an operator's output rows (or columns) depend on its input rows."""

    def output_size(self, size: int) -> int:
        """The number of output rows for `size` input rows."""

    def output_cut(self, cut: int) -> int:
        """Where a cut of the input reappears in the output, before it is limited to the output's size."""

    def needs(self, output: Interval, size: int) -> Interval:
        """The input rows that these output rows read. It may reach outside [0, size): padding is there."""


def check_window(kernel: int, stride: int, dilation: int) -> None:
    if min(kernel, stride, dilation) < 1:
        raise ValueError(f"kernel, stride and dilation must be positive, but are {kernel}, {stride} and {dilation}")


@dataclass(frozen=True)
class Window:
    """A sliding window: convolution, pooling, and with `kernel=1` cropping (negative padding) and strided slicing.

    Output row o reads input rows o * stride - before + dilation * (0 .. kernel - 1).
    """

    kernel: int
    stride: int = 1
    before: int = 0
    after: int = 0
    dilation: int = 1
    ceil_mode: bool = False

    def __post_init__(self) -> None:
        check_window(self.kernel, self.stride, self.dilation)

    @property
    def extent(self) -> int:
        return self.dilation * (self.kernel - 1) + 1

    def output_size(self, size: int) -> int:
        free = size + self.before + self.after - self.extent
        if not self.ceil_mode:
            return free // self.stride + 1
        count = ceil_div(free, self.stride) + 1
        # A last window that would begin beyond the input and its leading padding is left out, as PyTorch does.
        return count - 1 if (count - 1) * self.stride >= size + self.before else count

    def output_cut(self, cut: int) -> int:
        # An output row lies where the middle of its window does, so that halos are as even as they can be and branches
        # of different kernels are cut alike.
        return ceil_div(cut + self.before - (self.extent - 1) // 2, self.stride)

    def needs(self, output: Interval, size: int) -> Interval:
        start = output.start * self.stride - self.before
        return Interval(start, start + (output.length - 1) * self.stride + self.extent)

    def readers(self, source: Interval) -> Interval:
        """The output rows whose windows reach into these input rows."""
        first = ceil_div(source.start + self.before - self.extent + 1, self.stride)
        return Interval(first, (source.stop - 1 + self.before) // self.stride + 1)

    def taps(self, output: Interval, source: Interval) -> Interval:
        """Which of the kernel's rows may fall on these input rows, of the windows of these output rows."""
        first = output.start * self.stride - self.before
        last = first + (output.length - 1) * self.stride
        hit = Interval(ceil_div(source.start - last, self.dilation), (source.stop - 1 - first) // self.dilation + 1)
        return hit.intersect(Interval(0, self.kernel))


@dataclass(frozen=True)
class TransposedWindow:
    """A transposed convolution: input row i adds to output rows i * stride - padding + dilation * (0 .. kernel - 1)."""

    kernel: int
    stride: int = 1
    padding: int = 0
    output_padding: int = 0
    dilation: int = 1

    def __post_init__(self) -> None:
        check_window(self.kernel, self.stride, self.dilation)

    @property
    def extent(self) -> int:
        return self.dilation * (self.kernel - 1) + 1

    def output_size(self, size: int) -> int:
        return (size - 1) * self.stride - 2 * self.padding + self.extent + self.output_padding

    def output_cut(self, cut: int) -> int:
        return cut * self.stride - self.padding + (self.extent - 1) // 2

    def needs(self, output: Interval, size: int) -> Interval:
        first = ceil_div(output.start + self.padding - self.extent + 1, self.stride)
        last = (output.stop - 1 + self.padding) // self.stride
        return Interval(first, last + 1).intersect(Interval(0, size))


def _computable(mapping: AxisMap, held: Interval, size: int, output: Interval) -> Interval:
    """The longest run of output rows in `output` and around it that the rows in `held` suffice for.

    Returns an empty interval where not even `output` can be computed.
    """
    whole = Interval(0, size)

    def suffices(rows: Interval) -> bool:
        return held.covers(mapping.needs(rows, size).intersect(whole))

    if output.empty:
        return output
    if not suffices(output):
        return Interval(output.start, output.start)
    start, stop = output
    while start > 0 and suffices(Interval(start - 1, stop)):
        start -= 1
    while stop < mapping.output_size(size) and suffices(Interval(start, stop + 1)):
        stop += 1
    return Interval(start, stop)


class AxisPlan(NamedTuple):
    """What one axis of an operator's output looks like, and which input rows each part computes it from."""

    output: Split
    needed: tuple[Interval, ...]
    exchange: bool


@lru_cache(maxsize=4096)
def plan_axis(mapping: AxisMap, split: Split) -> AxisPlan:
    """Let the cuts follow the data, and exchange only if what the parts hold does not suffice.

    If every part can compute the output that it owns from the input that it holds, it computes as much as it can and
    nothing is exchanged. Otherwise each part computes what it owns, from rows it has and rows it is sent.
    """
    size = mapping.output_size(split.size)
    if size < 1:
        raise ValueError(f"an image of {split.size} pixels along one axis is too small for {mapping}")
    cuts = [0, *(min(max(mapping.output_cut(cut), 0), size) for cut in split.cuts[1:-1]), size]
    output = Split.at(cuts)
    held = tuple(_computable(mapping, split.held[i], split.size, output.owned(i)) for i in range(split.parts))
    exchange = not all(held[i].covers(output.owned(i)) for i in range(split.parts))
    if not exchange:
        output = Split(output.cuts, held)
    needed = tuple(
        Interval(split.cuts[i], split.cuts[i]) if rows.empty else mapping.needs(rows, split.size)
        for i, rows in enumerate(output.held)
    )
    return AxisPlan(output, needed, exchange)
