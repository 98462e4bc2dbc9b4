"""How the rows of an operator's output depend on the rows of its input, along one axis: integers only, no torch.

    input     0  1  2  3 | 4  5  6  7        a convolution's `Window` slides along it: an output row at each place.
    output       0     1 |    2     3        cuts follow the data, and a plan says which part needs which input rows

"Rows" are the pixels along any one axis.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, Protocol

from mpi4dl.geometry.boxes import Interval, Split, ceil_div


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


class _Kernel:
    """The parameters of a window that slides over the input, or over the output."""

    kernel: int
    stride: int
    dilation: int

    def __post_init__(self) -> None:
        check_window(self.kernel, self.stride, self.dilation)

    @property
    def extent(self) -> int:
        return self.dilation * (self.kernel - 1) + 1


@dataclass(frozen=True)
class Window(_Kernel):
    """A sliding window: convolution, pooling, and with `kernel=1` cropping (negative padding) and strided slicing.

    Output row o reads input rows o * stride - before + dilation * (0 .. kernel - 1).
    """

    kernel: int
    stride: int = 1
    before: int = 0
    after: int = 0
    dilation: int = 1
    ceil_mode: bool = False

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

    def unpadded(self, needed: Interval, output: Interval, size: int) -> Interval:
        """The needed rows without those beyond the image, if equal padding of both sides then gives the same output."""
        inside = needed.intersect(Interval(0, size))
        around = inside.start - needed.start
        same = replace(self, before=around, after=around).output_size(inside.length) == output.length
        return (
            inside if same and inside.length >= self.extent else needed
        )  # PyTorch refuses some images that are smaller


@dataclass(frozen=True)
class TransposedWindow(_Kernel):
    """A transposed convolution: input row i adds to output rows i * stride - padding + dilation * (0 .. kernel - 1)."""

    kernel: int
    stride: int = 1
    padding: int = 0
    output_padding: int = 0
    dilation: int = 1

    def output_size(self, size: int) -> int:
        return (size - 1) * self.stride - 2 * self.padding + self.extent + self.output_padding

    def output_cut(self, cut: int) -> int:
        return cut * self.stride - self.padding + (self.extent - 1) // 2

    def needs(self, output: Interval, size: int) -> Interval:
        first = ceil_div(output.start + self.padding - self.extent + 1, self.stride)
        last = (output.stop - 1 + self.padding) // self.stride
        return Interval(first, last + 1).intersect(Interval(0, size))

    def adds_to(self, source: Interval) -> Interval:
        """The output rows that these input rows add to, from the first to the last. It may reach into the padding."""
        start = source.start * self.stride - self.padding
        return Interval(start, start if source.empty else start + (source.length - 1) * self.stride + self.extent)


@dataclass(frozen=True)
class OfPart:
    """An operator that is called on a part as on the whole: the part begins where windows do, and ends with the image.

    Of its output, rows that an edge of the part changes are not among those that are asked for.
    """

    window: Window | TransposedWindow

    def output_size(self, size: int) -> int:
        return self.window.output_size(size)

    def output_cut(self, cut: int) -> int:
        return self.window.output_cut(cut)

    def needs(self, output: Interval, size: int) -> Interval:
        start, stop = self.window.needs(output, size).intersect(Interval(0, size))
        return Interval(start - start % self._period[0], stop)

    def begins(self, row: int) -> int:
        """The output row with which the output of a part begins whose first row this is."""
        inputs, outputs = self._period
        return row // inputs * outputs

    @property
    def _period(self) -> tuple[int, int]:
        stride = self.window.stride
        return (stride, 1) if isinstance(self.window, Window) else (1, stride)


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
    start -= _most(start, lambda more: suffices(Interval(start - more, stop)))
    stop += _most(mapping.output_size(size) - stop, lambda more: suffices(Interval(start, stop + more)))
    return Interval(start, stop)


def _most(limit: int, suffices: Callable[[int], bool]) -> int:
    """The largest number up to `limit` for which something holds that holds for all smaller ones, and for 0."""
    low, high = 0, 1
    while high <= limit and suffices(high):
        low, high = high, 2 * high
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if suffices(middle) else (low, middle)
    return low


class AxisPlan(NamedTuple):
    """One axis of an operator's output, and the input rows from which each part computes it."""

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
