"""Find pen marks and out-of-focus regions of slides, which tissue detection may leave out.

    pen mark       hue, saturation and brightness of a thumbnail -> closing, opening -> grown by the edge of a stroke
    out of focus   variance of the Laplacian of cells of 64 um at 1 um per pixel -> median of neighbours -> threshold

Pech-Pacheco et al., "Diatom autofocusing in brightfield microscopy: a comparative study", 2000. HistoQC, TIAToolbox and
TRIDENT leave out alike.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import PIL.Image

from mpi4dl.datasets.base import Pixels, package
from mpi4dl.datasets.slides.slide import Slide
from mpi4dl.geometry import Interval

PEN, BLUR = "pen", "blur"
ARTIFACTS = {PEN: "Pen mark", BLUR: "Out of focus"}  # what can be left out, and the class of each in QuPath
COLOURS = {PEN: (240, 228, 66), BLUR: (213, 94, 0)}  # in pictures; no ink is yellow

# Hues in degrees, and the least saturation and brightness from 0 to 1, of inks. The hues of haematoxylin are above 240
# at any concentration, those of eosin above 300. Blood is red, but less saturated than red ink.
INKS = {
    "green": ((85, 175), 0.3, 0.06),
    "blue": ((175, 237), 0.5, 0.12),
    "red": ((350, 380), 0.82, 0.42),
}
# Blue ink over tissue has the hue of haematoxylin, but absorbs less blue: optical densities of red as a share of that
# of green (haematoxylin has 0.93, eosin 0.07), and of blue as a share of the largest (0.41), at some density.
INK_OVER_TISSUE = (0.85, 0.36, 0.5)
# The least and most brightness, and the most difference of channels and saturation. Darker parts were not scanned.
BLACK_INK = (0.03, 0.35, 0.1, 0.45)
GAPS_PX = 2  # radius, of nuclei that are too dark for a hue
OPENING_PX = 3  # radius: strokes are wider
EDGE_PX = 3  # by which strokes are grown

FOCUS_MPP = 1.0  # um per pixel, at which regions out of focus differ from pale ones
FOCUS_PX = 64  # side of cells
JUDGED_SHARE = 0.5  # of tissue in a cell that is judged by itself
LEAST_VARIANCE = 25.0  # of the Laplacian of greys from 0 to 255, of a cell in focus
BAND_CELLS, CELLS_AT_ONCE = 16, 64  # rows and columns of cells that are read at once

Mask = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.float64]


def pen_marks(pixels: Pixels) -> Mask:
    """Where a thumbnail (height, width, 3), uint8, shows ink of green, blue, red or black pens: (height, width)."""
    morphology = package("skimage.morphology", "slides", "scikit-image")
    hue, saturation, value = np.moveaxis(package("skimage.color", "slides", "scikit-image").rgb2hsv(pixels), -1, 0)
    hue, chroma = 360 * hue, saturation * value
    least, most, grey, saturated = BLACK_INK
    ink = (value >= least) & (value <= most) & (chroma <= grey) & (saturation <= saturated)
    for (first, last), saturated, bright in INKS.values():
        turned = (hue >= first) & (hue <= last) | (hue + 360 <= last)
        ink |= turned & (saturation >= saturated) & (value >= bright)
    red, green, blue = -np.log10(np.maximum(np.moveaxis(pixels, -1, 0), 1) / np.float32(255))
    least_red, most_blue, dense = INK_OVER_TISSUE
    densest = np.maximum(red, green)
    ink |= (red >= least_red * green) & (blue <= most_blue * densest) & (densest >= dense)
    strokes = morphology.opening(morphology.closing(ink, morphology.disk(GAPS_PX)), morphology.disk(OPENING_PX))
    return morphology.dilation(strokes, morphology.disk(EDGE_PX))


def out_of_focus(slide: Slide, shares: Callable[[Slide, int], npt.NDArray[np.float32]]) -> tuple[Mask, float]:
    """Which cells of a slide are out of focus, (rows, columns), and the side of a cell in pixels of level 0.

    `shares(view, side)` are the shares of tissue of the cells of a view. Cells with much tissue are judged by the
    median over 3 x 3 of them, others by their neighbours. Cells that reach beyond the slide are judged so, too.
    """
    whole = slide.at(1.0)
    view = whole if whole.mpp is None else whole.at(max(1.0, FOCUS_MPP / whole.mpp))
    found = shares(view, FOCUS_PX)
    variances = np.full(found.shape, np.nan)
    judged = found[: view.size[0] // FOCUS_PX, : view.size[1] // FOCUS_PX] >= JUDGED_SHARE
    for top in range(0, len(judged), BAND_CELLS):
        band = judged[top : top + BAND_CELLS]
        rows = Interval(top, top + len(band))
        cells = np.flatnonzero(band.any(0))
        runs = np.split(cells, np.flatnonzero(np.diff(cells) > 1) + 1) if len(cells) else []  # of neighbours
        intervals = (Interval(int(run[0]), int(run[-1]) + 1) for run in runs)
        for cols in (strip for each in intervals for strip in each.strips(CELLS_AT_ONCE)):
            pixels = view.read(*(Interval(FOCUS_PX * each.start, FOCUS_PX * each.stop) for each in (rows, cols)))
            box = np.s_[rows.start : rows.stop, cols.start : cols.stop]
            variances[box] = np.where(judged[box], laplacian_variances(pixels), np.nan)
    wider, (down, across) = np.pad(variances, 1, constant_values=np.nan), found.shape
    around = np.stack([wider[y:, x:][:down, :across] for y in range(3) for x in range(3)])
    known, medians = ~np.isnan(around).all(0), np.full(variances.shape, np.nan)
    medians[known] = np.nanmedian(around[:, known], axis=0)
    return (found > 0) & (medians < LEAST_VARIANCE), FOCUS_PX * view.downsample


def laplacian_variances(pixels: Pixels) -> Numbers:
    """The variance of the Laplacian of grey of each cell (rows, columns) of a picture of whole cells."""
    grey = np.asarray(PIL.Image.fromarray(pixels).convert("L")).astype(np.int32)
    rows, cols = (side // FOCUS_PX for side in grey.shape)
    cells = grey.reshape(rows, FOCUS_PX, cols, FOCUS_PX).swapaxes(1, 2)
    inner = cells[..., 1:-1, 1:-1]
    above, below = cells[..., :-2, 1:-1], cells[..., 2:, 1:-1]
    left, right = cells[..., 1:-1, :-2], cells[..., 1:-1, 2:]
    return (4 * inner - above - below - left - right).var((2, 3), dtype=np.float64)
