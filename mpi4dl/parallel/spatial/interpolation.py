"""Which rows of an image an interpolated row is made of, and how they are weighted: plain numbers, no torch."""

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from math import floor
from typing import Literal, get_args

import numpy as np

from mpi4dl.geometry import Interval, ceil_div

LONGEST_PERIOD = 16
EXACT_IN_FLOAT32 = 1 << 24

Kernel = Literal["quick", "float32", "float64"]


@dataclass(frozen=True)
class Resampling:
    """Interpolation to another size: an output row is a weighted sum of a few neighbouring input rows.

    `scale` is input rows per output row, as PyTorch computes it: size / output, or (size - 1) / (output - 1) where
    the corners are aligned, or the reciprocal of a scale factor that the caller gave. `kernel` is that of PyTorch's
    which finds the nearest rows: "quick", which copies and doubles rows where that makes the output's size, whatever
    the scale, and otherwise multiplies in float32; or the general one, which multiplies in float32 or in float64. On
    it depends which of the needed rows are taken, but nothing that ranks must agree on: a part of a pixel or of none
    does not tell in which format the whole is.
    """

    size: int
    output: int
    mode: Literal["nearest", "nearest-exact", "linear", "cubic", "area"]
    align_corners: bool = False
    scale: float = 0.0
    antialias: bool = False
    kernel: Kernel = "quick"

    def output_size(self, size: int) -> int:
        return self.output

    def output_cut(self, cut: int) -> int:
        return ceil_div(cut * self.output, self.size)

    @property
    def identity(self) -> bool:
        """Whether every row stays as it is: to their own size, most operators copy images, whatever the scale."""
        if self.size != self.output:
            return False
        copied = self.antialias or self.mode in ("linear", "area")
        return copied or self.scale == 1 or (self.align_corners and self.size == 1)

    @property
    def _times(self) -> int:
        """How often the nearest row is every row, where the kernel asks for no scale; otherwise 0."""
        quick = self.mode == "nearest" and self.kernel == "quick" and self.output in (self.size, 2 * self.size)
        return self.output // self.size if quick else 0

    @property
    def backward(self) -> "Resampling":
        """What PyTorch's backward takes for it: the nearest rows that the quick kernel would have found."""
        return replace(self, kernel="quick")

    @cached_property
    def period(self) -> tuple[int, int] | None:
        """After so many input rows and so many output rows all weights repeat; None if that takes many rows.

        What begins at a multiple of the first is resampled as the whole is, but for the rows that its edge changes.
        Only of modes that have PyTorch's own operators to gain by it.
        """
        if self.align_corners or self.antialias or self.mode in ("cubic", "area"):
            return None
        ratio = Fraction(self.scale).limit_denominator(LONGEST_PERIOD)
        if not 0 < ratio.numerator <= LONGEST_PERIOD or float(ratio) != self.scale:
            return None
        if self.mode != "linear":
            # Products that are rounded are rounded differently in a part.
            rounded = ratio.denominator.bit_count() > 1 or 2 * self.output * ratio.numerator > EXACT_IN_FLOAT32
            shortcut = self.output in (self.size, 2 * self.size) and self.output * self.scale != self.size
            if rounded or shortcut:
                return None
        return ratio.as_integer_ratio()

    def taps(self, row: int) -> list[tuple[int, float]]:
        """The input rows that an output row reads, each with its weight; at the image's edge a row may repeat."""
        last = self.size - 1
        if self.antialias and not self.identity:
            return self._filtered(row)
        if self.mode == "area":
            rows = range(row * self.size // self.output, ceil_div((row + 1) * self.size, self.output))
            return [(source, 1 / len(rows)) for source in rows]
        if self.identity:
            return [(row, 1.0)]
        if self.mode.startswith("nearest"):
            centre = row if self.mode == "nearest" else row + 0.5
            wide = self.kernel == "float64"
            place = centre * self.scale if wide else np.float32(centre) * np.float32(self.scale)
            return [(row // self._times if self._times else min(floor(np.float32(place)), last), 1.0)]
        position = row * self.scale if self.align_corners else (row + 0.5) * self.scale - 0.5
        if self.mode == "linear":
            position = max(position, 0.0)
            first = min(floor(position), last)
            weight = position - first
            return [(first, 1.0 - weight), (min(first + 1, last), weight)]
        first = floor(position)
        return [(min(max(first + k, 0), last), _cubic(abs(position - first - k), -0.75)) for k in range(-1, 3)]

    def _filtered(self, row: int) -> list[tuple[int, float]]:
        """All rows under a filter that is as much wider as the image gets smaller, as Pillow has it."""
        width, centre = max(self.scale, 1.0), self.scale * (row + 0.5)
        reach = (1 if self.mode == "linear" else 2) * width
        rows = range(max(int(centre - reach + 0.5), 0), min(int(centre + reach + 0.5), self.size))
        distances = [abs(source - centre + 0.5) / width for source in rows]
        weights = [max(1 - x, 0.0) if self.mode == "linear" else _cubic(x, -0.5) for x in distances]
        total = sum(weights)
        return [(source, weight / total) for source, weight in zip(rows, weights, strict=True)]

    def needs(self, output: Interval, size: int) -> Interval:
        kernels = get_args(Kernel) if self.mode.startswith("nearest") else (self.kernel,)
        mappings = [replace(self, kernel=kernel) for kernel in kernels]
        rows = [row for each in mappings for end in (output.start, output.stop - 1) for row, _ in each.taps(end)]
        start = min(rows)
        return Interval(start - start % self.period[0] if self.period else start, max(rows) + 1)


def _cubic(x: float, a: float) -> float:
    """Keys' cubic convolution kernel (IEEE TASSP 1981) at a distance x."""
    if x <= 1:
        return ((a + 2) * x - (a + 3)) * x * x + 1
    return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a if x < 2 else 0.0
