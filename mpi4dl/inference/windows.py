"""Images larger than what a model sees, by windows that overlap: which ones, and each as an image of its own.

image of source px  ->  resized as training images were, or as it is  ->  windows of `frame` px  ->  their cores, joined

A window decides its core alone: up to the middle of what it shares with its neighbours. Windows begin at multiples of
32 px where they are large enough, so that most models have their grids of features at the same places in all of them.
"""

import threading
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mpi4dl.datasets.base import Image, Values
from mpi4dl.datasets.split import Named
from mpi4dl.datasets.view import Fit, View
from mpi4dl.geometry import Interval

SHARED = 4  # neighbours share at least a fourth of a window's side
GRID = 32  # px


class WindowInterval(NamedTuple):
    """A window along an axis: where it begins, and the pixels that it decides."""

    start: int
    core: Interval


def windows_along(size: int, frame: int) -> list[WindowInterval]:
    """Windows of `frame` px that cover `size` px, the last one at the end; the cores are all pixels, each once."""
    if size <= frame:
        return [WindowInterval(0, Interval(0, size))]
    step = max(1, frame - -(-frame // SHARED))
    step = step // GRID * GRID or step
    starts = [*range(0, size - frame, step), size - frame]
    middles = [(start + following + frame) // 2 for start, following in pairwise(starts)]
    return [
        WindowInterval(start, Interval(a, b))
        for start, a, b in zip(starts, [0, *middles], [*middles, size], strict=True)
    ]


@dataclass(frozen=True)
class Target:
    """How an image of `source` px is seen by windows of `frame` px: brought to `size` px, by `fit`."""

    source: tuple[int, ...]
    size: tuple[int, ...]
    frame: tuple[int, ...]
    fit: Fit

    @classmethod
    def of(
        cls, source: tuple[int, ...], frame: tuple[int, ...], fit: Fit, largest: tuple[int, ...] | None = None
    ) -> "Target":
        """Of an image of this size, for a model that was trained on images of up to `largest` px.

        With `fit` crop, training saw pixels as they are, and so do windows. With resize it saw whole images, resized to
        the frame: so are images up to `largest`, and larger ones are resized as much as `largest` was. If it is not
        known, all images are resized to the frame.
        """
        if fit == "crop":
            return cls(source, tuple(map(max, source, frame)), frame, fit)
        known = source if largest is None else largest
        sides = zip(source, frame, known, strict=True)
        return cls(source, tuple(b if a <= c else max(b, round(a * b / c)) for a, b, c in sides), frame, fit)

    @cached_property
    def intervals(self) -> list[list[WindowInterval]]:
        """The windows along each axis."""
        return [windows_along(size, frame) for size, frame in zip(self.size, self.frame, strict=True)]

    @property
    def num_windows(self) -> int:
        return prod(map(len, self.intervals))

    def window(self, number: int) -> tuple[WindowInterval, ...]:
        """The window of this number: they are counted row by row."""
        places = np.unravel_index(number, [len(intervals) for intervals in self.intervals])
        return tuple(intervals[int(place)] for intervals, place in zip(self.intervals, places, strict=True))

    def places(self) -> list[npt.NDArray[np.int64]]:
        """For each pixel of the image along each axis, which pixel of what windows see shows it."""
        found = []
        for source, size in zip(self.source, self.size, strict=True):
            if self.fit == "crop":
                found.append(np.arange(source) + (size - source) // 2)
            else:
                nearest = np.floor((np.arange(source) + 0.5) * (size / source)).astype(np.int64)
                found.append(np.minimum(nearest, size - 1))
        return found


class Windows:
    """The windows of images as images of their own, in order; `targets` say how each image of `indices` is seen."""

    def __init__(self, images: Named, indices: Sequence[int], targets: Sequence[Target]) -> None:
        self.images, self.indices, self.targets = images, indices, targets
        self.classes, self.channels = images.classes, images.channels
        self._ends = [*accumulate(target.num_windows for target in targets)]
        self._opened = threading.local()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def place(self, index: int) -> tuple[int, tuple[WindowInterval, ...], bool]:
        """Of a window: the position of its image, what it covers, and whether it is the last one of that."""
        position = bisect_right(self._ends, index)
        target = self.targets[position]
        number = index - (self._ends[position] - target.num_windows)
        return position, target.window(number), number == target.num_windows - 1

    def name(self, index: int) -> str:
        return self.images.name(self.indices[self.place(index)[0]])

    def label(self, index: int) -> Any:
        return 0

    def image(self, index: int) -> Image:
        """A window. A thread that reads several of one image opens it once. Raises as `images.image`."""
        position, intervals, _ = self.place(index)
        if getattr(self._opened, "position", None) != position:
            self._opened.position = None
            self._opened.image = self.images.image(self.indices[position])
            self._opened.position = position
        whole: Image = self._opened.image
        target = self.targets[position]
        return whole if target.num_windows == 1 else _Window(whole, target, [cut.start for cut in intervals])


class _Window:
    """The pixels of a window, read from those of its image that it needs."""

    def __init__(self, whole: Image, target: Target, corner: Sequence[int]) -> None:
        self._whole, self._corner = whole, corner
        self._view = View(target.size, target.fit)
        self.size = target.frame

    def read(self, *space: Interval) -> Values:
        moved = (Interval(part.start + at, part.stop + at) for part, at in zip(space, self._corner, strict=True))
        return self._view.pixels(self._whole, *moved)
