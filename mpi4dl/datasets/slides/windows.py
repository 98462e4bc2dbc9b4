"""Windows of slides as images of their own: drawn at random within tissue or on classes, or the whole grid of a slide.

training     each epoch, `each` windows of a slide, by (seed, epoch, sample) alone: the same on all ranks
validation   the windows of a grid that show tissue, so that each pixel counts once
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from typing import Any

import numpy as np

from mpi4dl._wording import Tell, quietly
from mpi4dl.datasets.base import DatasetError, Image
from mpi4dl.datasets.slides.dataset import SlideFolder
from mpi4dl.datasets.slides.slide import Corner, Slide, window
from mpi4dl.datasets.split import Subset

WINDOW_STREAM = 53  # of random numbers
CELLS = 2  # along each side of a window, of the grid in which tissue is found


class SlideWindows(Subset, ABC):
    """Windows of `size` px of slides, whose corners subclasses say."""

    def __init__(self, whole: SlideFolder, indices: Sequence[int], size: tuple[int, ...]) -> None:
        super().__init__(whole, indices)
        self._slides, self._size = whole, size

    @abstractmethod
    def corner(self, sample: int) -> Corner:
        """The upper left corner of a window, in pixels of its slide. Raises BadImage."""

    def image(self, index: int) -> Image:
        return window(self._slides.image(self.indices[index]), self.corner(index), self._size)

    def label(self, index: int) -> Any:
        pixels: Any = self._slides.pixels
        return pixels.window(self._slides.label(self.indices[index]), self.corner(index), self._size)


class RandomWindows(SlideWindows):
    """So many windows of `size` px of each of some slides, their centres in tissue.

    A share `on_classes` of them have their centres on an annotated class instead, each class of the slide equally
    often. A sample is a window; `drawn` moves all of them.
    """

    def __init__(
        self,
        whole: SlideFolder,
        indices: Sequence[int],
        size: tuple[int, ...],
        each: int,
        on_classes: float = 0.0,
    ) -> None:
        super().__init__(whole, [index for index in indices for _ in range(each)], size)
        self._each, self._on_classes = each, on_classes
        self._key: tuple[int, ...] = ()

    def drawn(self, key: tuple[int, ...]) -> "RandomWindows":
        """The windows as they are drawn by a key."""
        found = copy(self)
        found._key = key
        return found

    def corner(self, sample: int) -> Corner:
        index, number = self.indices[sample], sample % self._each
        slide: Slide = self._slides.image(index)
        random = np.random.default_rng((WINDOW_STREAM, *self._key, self._slides.number_of(index), number))
        centre: Corner | None = None
        if random.random() < self._on_classes:
            mask, numbers = self._slides.label(index), np.arange(1, len(self.classes))
            places = (mask.place(number, random) for number in random.permutation(numbers).tolist())
            centre = next((place for place in places if place is not None), None)
        if centre is None:
            side = max(1, min(self._size) // CELLS)
            cells = self._slides.tissue_patches(index, side)
            row, col = cells[int(random.integers(len(cells)))].tolist()
            down, across = random.random(2).tolist()
            centre = int((row + down) * side), int((col + across) * side)
        # Moved into the slide where it has room.
        sides = zip(centre, self._size, slide.size, strict=True)
        top, left = (max(0, min(at - side // 2, most - side)) for at, side, most in sides)
        return top, left


class GridWindows(SlideWindows):
    """The windows of `size` px of some slides that show tissue: each begins where the one before ends.

    Those at the right and lower sides may reach beyond the slide. Slides that cannot be read have one window, which
    says so when it is read. `tell(doing, done, total)` hears of slides that were looked at.

    Raises:
        DatasetError: no slide shows tissue.
    """

    def __init__(self, whole: SlideFolder, indices: Sequence[int], size: tuple[int, ...], tell: Tell = quietly) -> None:
        self.corners: list[Corner] = []
        kept: list[int] = []
        for number, index in enumerate(indices):
            found = whole.grid(index, size)
            self.corners += found
            kept += [index] * len(found)
            tell("finding tissue", number + 1, len(indices))
        if not kept:
            raise DatasetError(f"{whole.source}: none of {len(indices)} slides to validate with shows tissue")
        super().__init__(whole, kept, size)

    def corner(self, sample: int) -> Corner:
        return self.corners[sample]
