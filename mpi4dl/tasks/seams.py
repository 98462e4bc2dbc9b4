"""How much an image shows the borders of tiles: how it steps across them, over how it steps beside them.

Of an image y, lines l of an axis (rows or columns), and borders B, where k is that between lines k - 1 and k:

    step(k)  = |y[l = k] - y[l = k - 1]|, of each channel and each pixel of a line
    beside B = {k - 1, k + 1 for k in B}, without those that are borders themselves, or outside of the image
    seams    = mean of step(k), k in B of both axes / mean of step(k), k beside B of both axes

About 1: borders are like other lines. 2: the image steps twice as much across them.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


class Seams:
    """The ratio above, of an image of this `size` that comes in bands of rows from top to bottom.

    `borders` are those of rows and those of columns. The ratio is NaN without any inside of the image.
    """

    def __init__(self, size: Sequence[int], borders: Sequence[Sequence[int]]) -> None:
        self._lines: list[tuple[Tensor, Tensor]] = []
        for length, given in zip(size, borders, strict=True):
            across = {k for k in given if 0 < k < length}
            beside = {k for border in across for k in (border - 1, border + 1) if 0 < k < length} - across
            self._lines.append((torch.tensor(sorted(across)).long(), torch.tensor(sorted(beside)).long()))
        self._sums, self._counts = [0.0, 0.0], [0, 0]  # across borders, and beside them
        self._top = 0  # the next row
        self._last: Tensor | None = None  # the one before it

    def add(self, rows: Tensor) -> None:
        """The next rows, (channels, rows, columns)."""
        rows = rows.double()
        above = 0 if self._last is None else 1
        both = rows if self._last is None else torch.cat((self._last, rows), 1)
        first, end = self._top - above, self._top + rows.shape[1]
        for kind, (down, right) in enumerate(zip(*self._lines, strict=True)):
            here = down[(down > first) & (down < end)] - first
            for steps in (both[:, here] - both[:, here - 1], rows[..., right] - rows[..., right - 1]):
                self._sums[kind] += float(steps.abs().sum())
                self._counts[kind] += steps.numel()
        self._top, self._last = end, rows[:, -1:].clone()

    def value(self) -> float:
        """The ratio so far."""
        if not all(self._counts):
            return math.nan
        across, beside = (total / count for total, count in zip(self._sums, self._counts, strict=True))
        return across / beside if beside else math.inf if across else math.nan
