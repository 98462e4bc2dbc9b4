"""Find the tissue of slides on a thumbnail, and the patches that have some.

    thumbnail -> saturation -> median -> Otsu's threshold -> closing -> mask -> share of tissue of each patch

Otsu, "A threshold selection method from gray-level histograms", 1979. It parts any two peaks, also those of pale and
of dark tissue where a picture shows no glass. So its threshold counts only if most pixels below it are as pale as
glass. CLAM and TIAToolbox work alike. Pen marks and regions out of focus may be left out.
"""

import io
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import PIL.Image
import PIL.ImageFilter

from mpi4dl.datasets.base import BadImage, Pixels, package
from mpi4dl.datasets.slides.artifacts import ARTIFACTS, BLUR, COLOURS, PEN, out_of_focus, pen_marks
from mpi4dl.datasets.slides.geojson import collection, feature, outlines
from mpi4dl.datasets.slides.slide import CELL_PX, Slide
from mpi4dl.geometry import Interval, ceil_div

MASK_MPP = 8.0  # um per pixel of thumbnails
SHORTEST, LONGEST = 512, 4096  # px, of the longer side of thumbnails
WITHOUT_MPP = 2048  # px, of thumbnails of slides that do not say their resolution
MEDIAN_PX = 5
CLOSING_PX = 2  # radius
GLASS_SATURATION = 0.1  # of a range of 1: the median of glass is less, also of tinted glass
LEAST_SATURATION = 0.05  # of a range of 1: glass and paper have less, whatever Otsu's threshold is

SAMPLED_MPP = 1.0  # um per pixel, at which nuclei can be told from what is between them
SAMPLED_PX, MOST_SAMPLED = 64, 128  # side of the places whose pixels are sampled, and their number
SAMPLED_SHARE = 0.5  # of tissue in a place, if there are enough such places

OUTLINE = (0, 190, 60)  # RGB, of the outline of the tissue in pictures
LINES = 400  # the longer side of a picture, in widths of that line
PAINTED = 0.4  # opacity of what is left out

LEAST_PIXELS = 0.499  # of the mask, that a patch must have to have any tissue

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class TissueMask:
    """Where a slide has tissue: `mask` (rows, columns), each of whose pixels is `scale` (down, across) of level 0.

    `left_out` are masks of what is not taken for tissue, by the names of `ARTIFACTS`.
    """

    mask: Mask
    scale: tuple[float, float]
    origin: tuple[int, int] = (0, 0)
    left_out: Mapping[str, Mask] = field(default_factory=dict)

    def shares(self, slide: Slide, patch: int) -> npt.NDArray[np.float32]:
        """The share of tissue, from 0 to 1, of each patch of `patch` x `patch` px of the slide: (rows, columns).

        Patches begin at the upper left corner. Those at the right and lower sides may reach beyond the slide, where
        there is no tissue. A patch of which more is left out than is tissue has none.
        """
        found = self._shares(self.mask, slide, patch)
        if self.left_out:
            found[self._shares(np.logical_or.reduce([*self.left_out.values()]), slide, patch) > found] = 0
        return found

    def cells(self, slide: Slide) -> Mask:
        """Which cells of `CELL_PX` x `CELL_PX` px of a slide have tissue, or a neighbour with some: (rows, columns).

        Cells of which more is left out than is tissue are none of them.
        """
        found = self._shares(self.mask, slide, CELL_PX)
        padded, (rows, cols) = np.pad(found > 0, 1), found.shape
        grown: Mask = np.logical_or.reduce([padded[y:, x:][:rows, :cols] for y in range(3) for x in range(3)])
        if self.left_out:
            grown &= self._shares(np.logical_or.reduce([*self.left_out.values()]), slide, CELL_PX) <= found
        return grown

    def _shares(self, mask: Mask, slide: Slide, patch: int) -> npt.NDArray[np.float32]:
        scale = patch * slide.scale[0] / self.scale[0]
        rows, cols = (ceil_div(side, patch) for side in slide.size)
        # Sums over all pixels above and left of a place, linear between pixels, give the area of tissue in any box.
        sums = np.zeros((mask.shape[0] + 1, mask.shape[1] + 1))
        sums[1:, 1:] = mask.cumsum(0, dtype=np.float64).cumsum(1)
        down, across = (np.arange(count + 1, dtype=np.float64) * scale for count in (rows, cols))
        at = _interpolated(_interpolated(sums, down).T, across).T
        areas = at[1:, 1:] - at[:-1, 1:] - at[1:, :-1] + at[:-1, :-1]
        areas[areas < LEAST_PIXELS] = 0  # sums are rounded
        return (areas / scale**2).astype(np.float32)

    @property
    def share(self) -> float:
        """The share of the slide that is tissue."""
        return float(self.mask.mean()) if self.mask.size else 0.0

    def picture(self, slide: Slide) -> bytes:
        """A PNG: the thumbnail with the outline of the tissue, and what is left out in a colour for each kind.

        Raises as `find_tissue`.
        """
        morphology = package("skimage.morphology", "slides", "scikit-image")
        pixels = _read_thumbnail(slide)[1].copy()
        inner = morphology.disk(max(2, round(max(self.mask.shape) / LINES)))
        for mask, colour in ((self.mask, OUTLINE), *((mask, COLOURS[name]) for name, mask in self.left_out.items())):
            if colour is not OUTLINE:
                pixels[mask] = np.rint(PAINTED * np.array(colour) + (1 - PAINTED) * pixels[mask]).astype(np.uint8)
            pixels[mask & ~morphology.erosion(mask, inner)] = colour
        file = io.BytesIO()
        PIL.Image.fromarray(pixels).save(file, "PNG")
        return file.getvalue()

    def geojson(self) -> str:
        """Its outlines as annotations of QuPath, in pixels (x, y) of level 0."""
        masks = {"Tissue": self.mask, **{ARTIFACTS[name]: mask for name, mask in self.left_out.items()}}
        return collection(
            feature(polygon, name)
            for name, mask in masks.items()
            for polygon in outlines(mask, self.scale, self.origin)
        )


def _interpolated(sums: npt.NDArray[np.float64], places: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Rows of `sums` at these places, linear between rows; beyond the last row, the last one."""
    places = np.minimum(places, len(sums) - 1)
    lower = np.minimum(np.floor(places).astype(int), max(0, len(sums) - 2))
    weight = (places - lower)[:, None]
    upper = np.minimum(lower + 1, len(sums) - 1)
    return sums[lower] * (1 - weight) + sums[upper] * weight


def find_tissue(slide: Slide, threshold: float | None = None, leave_out: Sequence[str] = ()) -> TissueMask:
    """The tissue of a slide, by its saturation on a thumbnail; `threshold` from 0 to 1, or None for Otsu's.

    `leave_out`: of `ARTIFACTS`, what is not taken for tissue. A warning names a slide without tissue, or without glass.

    Raises:
        BadImage: the slide cannot be read.
        DatasetError: scikit-image is not installed.
    """
    view, pixels = _read_thumbnail(slide)
    ink = pen_marks(pixels) if PEN in leave_out else None
    mask, glass = tissue_of(pixels, threshold, ink)
    if not mask.any():
        logging.getLogger(__name__).warning("%s", NoTissue.of(slide))
    elif not glass:
        logging.getLogger(__name__).warning(
            "%s: shows no glass, so all of saturation above %g is taken for tissue; `tissue` says another threshold",
            slide.file.path,
            LEAST_SATURATION,
        )
    left_out = {} if ink is None else {PEN: ink}
    if BLUR in leave_out:
        cells, side = out_of_focus(slide, TissueMask(mask, view.scale).shares)
        places = (
            np.minimum(((np.arange(length) + 0.5) * view.downsample // side).astype(int), most - 1)
            for length, most in zip(mask.shape, cells.shape, strict=True)
        )
        left_out[BLUR] = mask & cells[np.ix_(*places)]
        mask &= ~left_out[BLUR]
    return TissueMask(mask, view.scale, view.origin, left_out)


class NoTissue(BadImage):
    """A slide shows no tissue."""

    @classmethod
    def of(cls, slide: Slide) -> "NoTissue":
        remedy = "leave it out, or choose a lower threshold by `tissue`"
        return cls(slide.file.path, f"shows no tissue by its saturation: {remedy}")


def _read_thumbnail(slide: Slide) -> tuple[Slide, Pixels]:
    """The thumbnail that tissue is found on, and its pixels (rows, columns, 3). Raises BadImage."""
    whole = slide.at(1.0)
    if slide.mpp is None:
        longest = WITHOUT_MPP
    else:
        longest = math.ceil(max(whole.size) * (slide.mpp / slide.downsample) / MASK_MPP)
    view = whole.thumbnail(min(max(longest, SHORTEST), LONGEST))
    return view, view.read(*(Interval(0, side) for side in view.size))


def tissue_pixels(slide: Slide, threshold: float | None = None, leave_out: Sequence[str] = ()) -> Pixels:
    """Some pixels (N, 3) of a slide, in its own colours, from places with tissue all over it; always the same ones.

    Raises as `find_tissue`.
    """
    mask = find_tissue(slide, threshold, leave_out)
    own_mpp = None if slide.mpp is None else slide.mpp / slide.downsample
    view = slide.at(1.0 if own_mpp is None else max(1.0, SAMPLED_MPP / own_mpp))
    shares = mask.shares(view, SAMPLED_PX)
    places = np.argwhere(shares >= SAMPLED_SHARE)
    if len(places) < MOST_SAMPLED:
        places = np.argwhere(shares > 0)
    chosen = np.unique(np.linspace(0, len(places) - 1, MOST_SAMPLED).astype(int))[: len(places)]
    parts = [np.empty((0, 3), np.uint8)]
    for row, col in places[chosen].tolist():
        space = (
            Interval(at * SAMPLED_PX, (at + 1) * SAMPLED_PX).intersect(Interval(0, side))
            for at, side in zip((row, col), view.size, strict=True)
        )
        parts.append(view.read(*space).reshape(-1, 3))
    return np.concatenate(parts)


def tissue_of(pixels: Pixels, threshold: float | None = None, ink: Mask | None = None) -> tuple[Mask, bool]:
    """Where a picture (height, width, 3), uint8, shows tissue: (height, width); and whether the rest may be glass.

    There is no tissue in `ink`.
    """
    filters, morphology = (
        package("skimage.filters", "slides", "scikit-image"),
        package("skimage.morphology", "slides", "scikit-image"),
    )
    most, least = pixels.max(2).astype(np.float32), pixels.min(2).astype(np.float32)
    saturation = np.where(most > 0, (most - least) / np.maximum(most, 1), 0)
    if ink is not None:
        saturation[ink] = 0
    picture = PIL.Image.fromarray(np.rint(255 * saturation).astype(np.uint8))
    smooth = np.asarray(picture.filter(PIL.ImageFilter.MedianFilter(MEDIAN_PX)))
    glass = True
    if threshold is None:
        seen = smooth if ink is None else smooth[~ink]
        found = float(filters.threshold_otsu(seen)) if seen.size else 0.0  # of one value, that value
        glass = not seen.size or float(np.median(seen[seen <= found])) <= GLASS_SATURATION * 255
        threshold = max(found / 255, LEAST_SATURATION) if glass else LEAST_SATURATION
    mask = smooth > threshold * 255
    closed: Mask = morphology.closing(mask, morphology.disk(CLOSING_PX))
    return (closed if ink is None else closed & ~ink), glass
