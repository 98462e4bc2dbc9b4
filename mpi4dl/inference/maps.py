"""Heat maps of slides: over a thumbnail (PNG), for QuPath (GeoJSON), and as an OME-TIFF.

A map has a value for each patch, or for each cell of a feature map, which is called a patch here too.

maps/NAME.png        the thumbnail with the patches in colours, a legend and a scale bar
maps/NAME.geojson    a tile for each patch with its measurements, in pixels of the full level 0
maps/NAME.ome.tif    a pixel for each patch, float32, NaN where there is none, with its microns per pixel
"""

import io
from collections.abc import Sequence
from math import ceil
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from mpi4dl._files import write_durably
from mpi4dl._wording import literal
from mpi4dl.datasets.base import package
from mpi4dl.datasets.slides.geojson import collection, feature, squares
from mpi4dl.datasets.slides.slide import Slide
from mpi4dl.geometry import Interval
from mpi4dl.inference.class_maps import write_pyramid

FOLDER = "maps"
THUMBNAIL_PX = 1200
OPACITY = 0.5
COLOURS = "inferno"
NUM_COLOURS = 256
BAR_UM = (50, 100, 200, 500, 1000, 2000, 5000, 10000)  # lengths of scale bars
DPI = 100
BESIDE_PX, ABOVE_PX = (10, 110), (10, 30)  # of the thumbnail: left and right, below and above
BAR_PX = 20  # the width of the legend, and its distance
MOST_TILES = 50_000  # of a GeoJSON: QuPath and browsers take long for more
ROUNDED = 1e-6  # of a patch


class PatchMap(NamedTuple):
    """A value for each of some patches of a slide, and their places (row, column) in its grid of patches."""

    places: Sequence[tuple[float, float]] | npt.NDArray[Any]  # fractions where patches lie on several grids
    values: npt.NDArray[np.float32]
    patch: float
    title: str
    by_value: bool = False  # of cells, most of which may have the same value: colours show values

    @property
    def shades(self) -> npt.NDArray[np.float32]:
        """What colours show, from 0 to 1: ranks, or values above 0 as shares of the largest."""
        if not self.by_value:
            return self.ranks
        most = float(self.values.max(initial=0))
        return (np.maximum(self.values, 0) / (most or 1)).astype(np.float32)

    @property
    def ranks(self) -> npt.NDArray[np.float32]:
        """The share of patches with a value as low or lower, from 0 to 1; of cells, with a lower one."""
        side: Literal["left", "right"] = "left" if self.by_value else "right"
        order = np.searchsorted(np.sort(self.values), self.values, side=side)
        return (order / max(1, len(self.values))).astype(np.float32)

    def peak(self, slide: Slide) -> tuple[float, float]:
        """The centre (row, column) of the patch with the largest value, in pixels of level 0."""
        row, col = self.places[int(self.values.argmax())]
        return slide.in_level_0((row + 0.5) * self.patch, (col + 0.5) * self.patch)


def map_of_cells(slide: Slide, values: npt.NDArray[np.float32], side: float, title: str) -> PatchMap:
    """The map of the cells (h, w) of a slide, `side` pixels wide each; cells beyond the slide are left out."""
    rows, cols = (min(n, ceil(pixels / side)) for n, pixels in zip(values.shape, slide.size, strict=True))
    places = np.indices((rows, cols)).reshape(2, -1).T
    return PatchMap(places, values[:rows, :cols].ravel(), side, title, by_value=True)


def write_map(folder: Path, name: Path, slide: Slide, found: PatchMap) -> list[Path]:
    """Write the three files of a slide's map, each at once or not at all; their paths.

    Raises:
        OSError: they cannot be written.
        DatasetError: a package is not installed, or the slide cannot be read.
    """
    base = folder / FOLDER / name
    base.parent.mkdir(parents=True, exist_ok=True)
    paths = [base.with_name(f"{base.name}{ending}") for ending in (".png", ".geojson", ".ome.tif")]
    write_durably(paths[0], picture(slide, found))
    write_durably(paths[1], geojson(slide, found).encode())
    write_pyramid(paths[2], [grid_of(found)], slide, [found.title], found.patch)
    return paths


def geojson(slide: Slide, found: PatchMap) -> str:
    """The patches as tiles of QuPath, with the value and its rank as measurements.

    Of a map with more than `MOST_TILES` it has those with the largest values, and absolute values. Cells whose value is
    0 are left out, unless all are.
    """
    values = found.values
    shown = np.arange(len(values))
    if len(values) > MOST_TILES:
        half = MOST_TILES // 2
        largest = (np.argpartition(-each, half)[:half] for each in (values, np.abs(values)))
        shown = np.unique(np.concatenate([*largest]))
    if found.by_value and values.any():
        shown = shown[values[shown] != 0]
    rows, cols = np.asarray(found.places, np.float64).reshape(-1, 2)[shown].T * found.patch
    corners = np.stack(slide.in_level_0(rows, cols), 1)
    rings = squares(corners, [found.patch * scale for scale in slide.scale])
    numbers = zip(values[shown].tolist(), found.ranks[shown].tolist(), strict=True)
    title, ranked = found.title, f"{found.title} rank"
    return collection(
        feature([ring], title, "tile", {title: value, ranked: rank})
        for ring, (value, rank) in zip(rings, numbers, strict=True)
    )


def grid_of(found: PatchMap) -> npt.NDArray[np.float32]:
    """The values (rows, columns) of the grid of patches, NaN where there is none."""
    places = np.maximum(0, np.floor(np.asarray(found.places) + ROUNDED)).astype(np.int64)
    grid = np.full(places.max(0) + 1, np.nan, np.float32)
    grid[tuple(places.T)] = found.values
    return grid


def picture(slide: Slide, found: PatchMap) -> bytes:
    """A PNG: the thumbnail with the ranks of the patches in colours, a legend and a scale bar.

    Raises DatasetError if matplotlib is not installed.
    """
    modules = ("backends.backend_agg", "figure", "patches", "cm", "colors")
    canvas, figures, shapes, mapping, colors = (package(f"matplotlib.{name}", "a heat map") for name in modules)
    view = slide.thumbnail(THUMBNAIL_PX)
    pixels = view.read(*(Interval(0, side) for side in view.size))
    scale = slide.downsample / view.downsample
    shades = _painted(found, found.shades, scale, view.size)
    ramp = np.linspace(0, 1, NUM_COLOURS)
    palette = package("matplotlib", "a heat map").colormaps[COLOURS](ramp)
    palette[:, 3] = OPACITY * (ramp if found.by_value else 1)
    shown = colors.ListedColormap(palette)  # also of the legend: as clear there as over tissue
    colours = shown(np.nan_to_num(shades)).astype(np.float32)
    opacity = np.where(np.isnan(shades), np.float32(0), colours[..., 3])[..., None]
    pixels = np.rint(pixels * (1 - opacity) + 255 * opacity * colours[..., :3]).astype(np.uint8)
    height, width = view.size
    across, down = width + sum(BESIDE_PX), height + sum(ABOVE_PX)  # places by hand: a solver of layouts takes longer
    figure = figures.Figure(figsize=(across / DPI, down / DPI), dpi=DPI)
    axes = figure.add_axes((BESIDE_PX[0] / across, ABOVE_PX[0] / down, width / across, height / down))
    axes.imshow(pixels, interpolation="none")
    axes.set_axis_off()
    axes.set_title(literal(f"{slide.file.path.name}: {found.title}"), fontsize=9)
    corner = (BESIDE_PX[0] + width + BAR_PX) / across, (ABOVE_PX[0] + 0.2 * height) / down
    beside = figure.add_axes((*corner, BAR_PX / across, 0.6 * height / down))
    bar = figure.colorbar(mapping.ScalarMappable(cmap=shown), cax=beside)
    unit = "as a share of the largest" if found.by_value else "rank among the patches"
    bar.set_label(literal(f"{found.title}, {unit}"), fontsize=8)
    if view.mpp is not None:
        length = next((um for um in reversed(BAR_UM) if um / view.mpp < width / 4), BAR_UM[0])
        left, low = 0.03 * width, 0.96 * height
        axes.add_patch(shapes.Rectangle((left, low), length / view.mpp, max(2, height / 150), color="black"))
        axes.text(left, low - height / 100, _length(length), fontsize=8)
    file = io.BytesIO()
    canvas.FigureCanvasAgg(figure).print_png(
        file, pil_kwargs={"compress_level": 1}
    )  # half the time, a tenth more bytes
    return file.getvalue()


def _painted(
    found: PatchMap, shades: npt.NDArray[np.float32], scale: float, size: Sequence[int]
) -> npt.NDArray[np.float32]:
    """The shades as a picture of `size`, `scale` of its pixels for each of the slide; NaN where there is no patch.

    A pixel that shows several patches has the highest of them.
    """
    pixels = np.full(size, -1, np.float32)
    places = np.asarray(found.places, np.float64).reshape(-1, 2)
    first = np.maximum(0, np.rint(places * found.patch * scale)).astype(np.int64)
    stop = np.maximum(first + 1, np.rint((places + 1) * found.patch * scale).astype(np.int64))
    if found.patch * scale <= 1:
        inside = (first < np.asarray(size)).all(1)
        np.maximum.at(pixels, tuple(first[inside].T), shades[inside])
    else:
        for (top, left), (bottom, right), shade in zip(first.tolist(), stop.tolist(), shades.tolist(), strict=True):
            part = pixels[top:bottom, left:right]
            np.maximum(part, shade, out=part)
    return np.where(pixels < 0, np.float32(np.nan), pixels)


def _length(micrometres: float) -> str:
    return f"{micrometres / 1000:g} mm" if micrometres >= 1000 else f"{micrometres:g} µm"
