"""Slides with labels as a dataset: each at the resolution asked for, with the patches of it that show tissue."""

import logging
import math
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mpi4dl._wording import Tell, counted, quietly, some
from mpi4dl.datasets.base import BadImage, DatasetError, LastMade, Pixels, printable
from mpi4dl.datasets.kinds import SLIDES
from mpi4dl.datasets.labels import files_of, of_values
from mpi4dl.datasets.listed import ListedFiles, mask_as_text
from mpi4dl.datasets.samples import COVARIATES, read_samples
from mpi4dl.datasets.slides.masks import MaskOptions, SlideMasks
from mpi4dl.datasets.slides.slide import SAME_MPP, Cells, Resolution, Slide, SlideFile, open_slide
from mpi4dl.datasets.slides.targets import SlideTargets
from mpi4dl.datasets.slides.tissue import NoTissue, TissueMask, find_tissue, tissue_pixels
from mpi4dl.datasets.sources import SampleFiles
from mpi4dl.datasets.stains import Measured, StainNormalization
from mpi4dl.geometry import ceil_div

PATCH_STREAM = 47  # of random numbers
MOST_OPEN = 64  # slides whose headers are kept
LEAST_CELL = 32  # px, of parts of windows whose tissue is looked at

Patches = npt.NDArray[np.int64]  # (patches, 2): the row and the column of each in the grid of patches of a slide


@dataclass(frozen=True)
class SlideOptions:
    """How slides are read.

    `tissue`: a threshold of saturation from 0 to 1, or None for Otsu's. `leave_out`: of pen and blur, what is not taken
    for tissue. A patch is used if at least `min_tissue` of it is tissue, and more than nothing. Of a slide at most
    `most_patches` are drawn in each epoch of training; None: all.
    `masks`: how annotations become masks. `white_background`: whole slides are white where there is no tissue.
    `stains`: how colours become those of a reference; None: they do not.
    """

    resolution: Resolution = field(default_factory=Resolution)
    tissue: float | None = None
    min_tissue: float = 0.0
    most_patches: int | None = None
    masks: MaskOptions = field(default_factory=MaskOptions)
    white_background: bool = False
    stains: StainNormalization | None = None
    leave_out: tuple[str, ...] = ()


class SlideFolder(SampleFiles):
    """Slides by a table, or all of a folder.

    `columns` are the task and the columns, as of `read_samples`. `tell(doing, done, total)` hears of annotations that
    were read. Raises as `read_samples`.
    """

    kind, of_slides = SLIDES, True
    slides_root: Path | None = None  # of what is no slide itself

    def __init__(
        self,
        source: Path,
        options: SlideOptions,
        *,
        folder: Path | None = None,
        classes: tuple[str, ...] | None = None,
        tell: Tell = quietly,
        **columns: Any,
    ) -> None:
        root = folder or (source if source.is_dir() else source.parent)
        found = read_samples(source, self.kind, folder=folder, classes=classes, **columns)
        super().__init__(source, root, found, self.kind)
        self.options = options
        self.pixels: SlideMasks | SlideTargets | None = None  # labels of pixels
        if of_values(found.task):
            self.pixels = SlideTargets(source, root, found.rows)
        elif files_of(found.task):
            self.pixels = SlideMasks(source, root, found.rows, options.masks, classes, tell)
        if self.pixels is not None:
            self.classes, self.values = self.pixels.classes, self.pixels.values
            self.remarks = (*self.remarks, *self.pixels.remarks)
        self.stains: dict[int, Measured | None] = {}
        self._slides, self._patches, self._cells = LastMade(MOST_OPEN), LastMade(), LastMade()

    def lists(self) -> tuple[ListedFiles, ...]:
        return (self,) if self.pixels is None else (self, self.pixels.files)

    def place_of(self, name: str) -> dict[str, str | None]:
        """The slide of a file that is no slide itself, for records."""
        return {}

    def label(self, index: int) -> Any:
        """What is to be learnt of a slide; its mask or target is yet to be read. Raises BadImage, OtherFile."""
        return super().label(index) if self.pixels is None else self.pixels.label(index, self.image(index))

    def told(self, index: int) -> dict[str, Any]:
        mpp, covariates = self.rows[index].mpp, self.covariates_as_text(index)
        return ({} if mpp is None else {"mpp": mpp}) | ({COVARIATES: covariates} if covariates else {})

    def mask_as_text(self, index: int) -> str | None:
        annotation, pixels = self.rows[index].annotation, self.pixels
        if pixels is None or annotation is None:
            return None
        return mask_as_text(annotation, pixels.files, pixels.places[index])

    def image(self, index: int) -> Slide:
        """A slide, its header read and its pixels not; the headers of the last ones are kept.

        Raises BadImage, OtherFile.
        """
        found: Slide = self._slides(index, partial(self._opened, index))
        return found

    def _opened(self, index: int) -> Slide:
        row, resolution = self.rows[index], self.options.resolution
        if row.mpp is not None:  # the table knows better than the option for all
            resolution = Resolution(resolution.mpp, resolution.magnification, resolution.level, row.mpp)
        found = open_slide(self.checked(index), resolution)
        cells_of = partial(self._cells_of, index) if self.options.white_background else None
        recolour = None if self.options.stains is None else partial(self._recoloured, index)
        return Slide(found.file, found.downsample, resolution.assumed_mpp, cells_of, recolour)

    def tissue(self, slide: Slide) -> TissueMask:
        """The tissue of a slide, as the options say. Raises as `find_tissue`."""
        return find_tissue(slide, self.options.tissue, self.options.leave_out)

    def _cells_of(self, index: int, slide: Slide) -> Cells:
        """The cells of a slide that are not white, which are found once. Raises BadImage if there are none."""

        def find() -> tuple[npt.NDArray[np.uint8], tuple[int, ...]]:
            found = self.tissue(slide).cells(slide)
            if not found.any():
                raise NoTissue.of(slide)
            return np.packbits(found), found.shape

        packed, shape = self._cells(index, find)
        return np.unpackbits(packed, count=math.prod(shape)).reshape(shape).astype(bool)

    def _recoloured(self, index: int, pixels: Pixels) -> Pixels:
        """Pixels of a slide in the colours of the reference."""
        self.measure_stains(index)
        measured, stains = self.stains[index], self.options.stains
        return pixels if measured is None or stains is None else stains.recolour(measured)(pixels)

    def measure_stains(self, index: int) -> None:
        """Measure the stains of a slide on its tissue, unless that was done. Raises BadImage, DatasetError."""
        if self.options.stains is not None and index not in self.stains:
            pixels = tissue_pixels(self.image(index), self.options.tissue, self.options.leave_out)
            self.stains[index] = self.options.stains.measured(pixels)

    def unstained(self) -> str | None:
        """A remark on slides that keep their colours, since too little tissue was found to measure their stains."""
        names = [self.name(index) for index, measured in sorted(self.stains.items()) if measured is None]
        if not names:
            return None
        return f"{counted(len(names), 'slide')} with too little stained tissue to normalize: {some(names)}"

    def number_of(self, index: int) -> int:
        """A number of a slide for random draws, by its name: it stays where lines of the table come, go or move."""
        return zlib.crc32(self.name(index).encode(errors="surrogateescape"))

    def tissue_patches(self, index: int, patch: int, key: tuple[int, ...] = ()) -> Patches:
        """The patches of `patch` x `patch` px of a slide that show tissue, in the order of rows.

        If none has `min_tissue`, it is the one that has the most. With a `key` of random numbers, such as (seed,
        epoch, repeat), they are at most as many as the options say.

        Raises BadImage, also of a slide without tissue, and DatasetError.
        """
        found, most = self._all_patches(index, patch), self.options.most_patches
        if not key or most is None or len(found) <= most:
            return found
        drawn = np.random.default_rng((PATCH_STREAM, *key, self.number_of(index))).choice(
            len(found), most, replace=False
        )
        return found[np.sort(drawn)]

    def _all_patches(self, index: int, patch: int) -> Patches:
        def find() -> Patches:
            slide = self.image(index)
            shares = self.tissue(slide).shares(slide, patch)
            found = np.argwhere((shares > 0) & (shares >= self.options.min_tissue))
            if not shares.any():
                raise NoTissue.of(slide)
            if not len(found):
                found = np.array([np.unravel_index(int(shares.argmax()), shares.shape)])
            return found.astype(np.int64)

        patches: Patches = self._patches((index, patch), find)
        return patches

    def grid(self, index: int, size: Sequence[int]) -> list[tuple[int, int]]:
        """The corners of the windows of `size` px of a slide that show tissue, row by row.

        Of a slide that cannot be read it is the first one. A slide without tissue has none.
        """
        side = math.gcd(*size)
        try:
            if side < LEAST_CELL:
                rows, cols = (range(0, most, each) for most, each in zip(self.image(index).size, size, strict=True))
                return [(row, col) for row in rows for col in cols]
            cells = self._all_patches(index, side)
        except NoTissue:  # which was logged
            return []
        except BadImage:  # which reading it will say
            return [(0, 0)]
        return [(row, col) for row, col in (np.unique(cells * side // size, axis=0) * size).tolist()]

    def frame(self, multiple: Sequence[int], skips: bool = True) -> tuple[tuple[int, int], tuple[Slide, Slide]]:
        """The least size (height, width) in which each slide fits, and the highest and the widest slide.

        Its sides are multiples of these numbers of pixels. It `skips` slides that cannot be read. Warnings name those
        that say another resolution than the table, or than their own tags.

        Raises:
            DatasetError: no slide can be read, or one cannot that is not skipped.
        """
        slides, problem, others = [], None, dict[str, list[str]]()
        for index in range(len(self)):
            try:
                slides.append(self.image(index))
            except BadImage as error:
                if not skips:
                    raise DatasetError(f"{error}; `on_bad_image` skip leaves such slides out") from error
                problem = problem or error
                continue
            said, file = self.rows[index].mpp, getattr(slides[-1], "file", None)
            known, tagged = (file.mpp, file.other_mpp) if isinstance(file, SlideFile) else (None, None)
            if said is not None and known is not None and not math.isclose(said, known, rel_tol=SAME_MPP):
                others.setdefault("the table", []).append(f"{self.name(index)} ({known:.4g}, not {said:.4g})")
            if tagged is not None:
                others.setdefault("tags of the file", []).append(f"{self.name(index)} ({known:.4g}, not {tagged:.4g})")
        for where, names in others.items():
            told = f"{counted(len(names), 'slide')} with other microns per pixel than {where}, which are taken"
            logging.getLogger(__name__).warning("%s", printable(f"{told}: {some(names, 3)}"))
        if not slides:
            raise DatasetError(f"{self.root}: no slide can be read: {problem}")
        highest = max(slides, key=lambda slide: slide.size[0])
        widest = max(slides, key=lambda slide: slide.size[1])
        sides = highest.size[0], widest.size[1]
        height, width = (ceil_div(side, each) * each for side, each in zip(sides, multiple, strict=True))
        return (height, width), (highest, widest)

    def first_slide(self) -> tuple[str, ...]:
        """The size, levels, resolution and vendor of one slide, for people to look at; nothing if none can be read."""
        for index in range(min(len(self), MOST_OPEN)):
            with suppress(DatasetError):
                return (f"{printable(self.name(index))}: {self.image(index).file.described()}",)
        return ()

    def described(self) -> tuple[str, ...]:
        return (*(super().described() or ("slides without a table",)), *self.first_slide())
