"""Class maps of slides: a class for each pixel, as a pyramid (OME-TIFF), over a thumbnail (PNG), as polygons (GeoJSON).

masks/NAME.ome.tif   uint8 numbers of classes at the resolution of the model, with microns per pixel
masks/NAME.png       the thumbnail with the classes in colours, and a legend
masks/NAME.geojson   polygons of each class but background, for QuPath, in pixels of the full level 0

Pictures that a model makes of slides are such pyramids, too: images/NAME.ome.tif.
"""

import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np
import numpy.typing as npt

from mpi4dl._files import Replacement, map_new, naming, write_durably
from mpi4dl._palette import CURVES, of_classes
from mpi4dl._wording import literal
from mpi4dl.datasets.base import DatasetError, package
from mpi4dl.datasets.slides.geojson import collection, feature, outlines
from mpi4dl.datasets.slides.masks import BACKGROUND
from mpi4dl.datasets.slides.slide import Slide
from mpi4dl.geometry import Interval, ceil_div
from mpi4dl.inference.masks import MappedFile

ENDINGS = (".ome.tif", ".png", ".geojson")
MOST_CLASSES = 256
TILE, SMALLEST_LEVEL = 512, 1024  # px
OUTLINE_PX = 4096  # of the longer side of a map whose outlines are found: larger ones are reduced
THUMBNAIL_PX, DPI = 1200, 100
OPACITY = 0.5
ON_TISSUE = [CURVES[number] for number in (2, 5, 4, 0, 1, 6, 3, 7)]  # those first that differ most from H&E


def write_picture(slide: Slide, channels: Sequence[str], path: Path, pixels: Any) -> None:
    """Write a picture of a slide, (height, width, channels), as a pyramid. Raises OSError."""
    with naming(path), TemporaryFile(dir=path.parent) as file:
        levels = [pixels]
        while max(slide.size) >= SMALLEST_LEVEL << len(levels):
            levels.append(_halved(levels[-1], file))
        write_pyramid(path, levels, slide, channels)


def class_map(path: Path, slide: Slide, classes: Sequence[str], **options: Any) -> MappedFile:
    """The class map of a slide, whose picture and polygons are beside it; `options` are those of `geojson`.

    Raises:
        OSError: it cannot be written.
        DatasetError: there are more than 256 classes.
    """
    if len(classes) > MOST_CLASSES:
        raise DatasetError(f"{len(classes)} classes: class maps of slides have up to {MOST_CLASSES}")
    base = path.name.removesuffix(ENDINGS[0])
    beside = [path.with_name(f"{base}{ending}") for ending in ENDINGS[1:]]

    def encode(path: Path, classes_of: Any) -> None:
        write_durably(beside[0], thumbnail_of(classes_of, slide, classes))
        write_durably(beside[1], geojson(classes_of, slide, classes, **options).encode())
        write_pyramid(path, levels_of(classes_of), slide, ["; ".join(classes)])

    return MappedFile(path, tuple(slide.size), np.uint8, encode=encode, beside=beside)


def levels_of(classes_of: npt.NDArray[np.uint8]) -> list[npt.NDArray[np.uint8]]:
    """A class map and smaller ones, each of every second pixel of the one before."""
    sides = [classes_of[:: 2**number, :: 2**number] for number in range(32)]
    return sides[: 1 + sum(max(each.shape) >= 2 * SMALLEST_LEVEL for each in sides)]


def _halved(pixels: Any, file: Any) -> Any:
    """Means of 2 x 2 pixels, (height, width, channels), mapped at the end of a file. Raises OSError."""
    height, width, channels = pixels.shape
    file.seek(0, os.SEEK_END)
    found = map_new(file, np.uint8, (ceil_div(height, 2), ceil_div(width, 2), channels))
    for top in range(0, len(found), TILE):
        band = pixels[2 * top : 2 * (top + TILE)]
        band = np.pad(band, ((0, len(band) % 2), (0, width % 2), (0, 0)), mode="edge").astype(np.uint16)
        sums = band[::2, ::2] + band[1::2, ::2] + band[::2, 1::2] + band[1::2, 1::2]
        found[top : top + TILE] = (sums + 2) >> 2
    return found


def write_pyramid(path: Path, levels: Sequence[Any], slide: Slide, channels: Sequence[str], patch: float = 1) -> None:
    """Write arrays (rows, columns), or colours, as an OME-TIFF of these levels, of which each halves.

    A pixel of the first one is `patch` pixels of the slide wide.
    """
    import tifffile

    colours = levels[0].ndim > 2
    about: dict[str, Any] = {"axes": "YXS"[: levels[0].ndim], "Name": slide.file.path.name}
    if not colours:
        about["Channel"] = {"Name": channels[0]}
    if slide.mpp is not None:
        side = (("", slide.mpp * patch), ("Unit", "µm"))
        about |= {f"PhysicalSize{axis}{what}": value for axis in "XY" for what, value in side}
    with (
        naming(path),
        Replacement(path) as temporary,
        temporary.open("wb") as file,
        tifffile.TiffWriter(file, bigtiff=True, ome=True) as writer,
    ):
        for number, level in enumerate(levels):
            writer.write(
                _tiles(level),
                shape=level.shape,
                dtype=level.dtype,
                tile=(TILE, TILE),
                compression="zlib",
                photometric="rgb" if colours else "minisblack",
                subifds=len(levels) - 1 if number == 0 else None,
                subfiletype=1 if number else 0,
                metadata=about if number == 0 else None,
            )


def _tiles(level: npt.NDArray[Any]) -> Iterator[npt.NDArray[Any]]:
    for top in range(0, level.shape[0], TILE):
        for left in range(0, level.shape[1], TILE):
            yield np.ascontiguousarray(level[top : top + TILE, left : left + TILE])


def _reduced(classes_of: npt.NDArray[np.uint8], longest: int) -> tuple[npt.NDArray[np.uint8], int]:
    """A map with sides of at most so many pixels, every so many pixels of the whole one, and how many these are."""
    step = max(1, ceil_div(max(classes_of.shape), longest))
    sides = (min(step // 2, side - 1) for side in classes_of.shape)
    return np.asarray(classes_of[tuple(slice(first, None, step) for first in sides)]), step


def geojson(
    classes_of: npt.NDArray[np.uint8],
    slide: Slide,
    classes: Sequence[str],
    min_area: float = 0.0,
    in_bounds: bool = False,
) -> str:
    """The regions of each class but background as annotations of QuPath, of `min_area` square microns or more.

    `in_bounds`: coordinates begin at the part of a slide that the scanner scanned, as in QuPath.
    """
    small, step = _reduced(classes_of, OUTLINE_PX)
    pixel = (slide.scale[0] * step, slide.scale[1] * step)
    # Without microns per pixel, areas are those of pixels of level 0.
    square_micron = 1.0 if slide.mpp is None else slide.scale[0] * slide.scale[1] / slide.mpp**2
    origin = (0, 0) if in_bounds else slide.origin
    features = []
    for number, name in enumerate(classes):
        if number == 0 and name in (BACKGROUND, "0"):
            continue
        mask = small == number
        rows, cols = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
        if not len(rows):
            continue
        part = mask[rows[0] : rows[-1] + 1, cols[0] : cols[-1] + 1]
        corner = (origin[0] + rows[0] * pixel[0], origin[1] + cols[0] * pixel[1])
        found = outlines(part, pixel, corner, min_area * square_micron)
        features += [feature(polygon, name) for polygon in found]
    return collection(features)


def thumbnail_of(classes_of: npt.NDArray[np.uint8], slide: Slide, classes: Sequence[str]) -> bytes:
    """A PNG: the thumbnail with the classes in colours and a legend with their shares of the slide.

    Raises DatasetError if matplotlib is not installed, or the slide cannot be read.
    """
    modules = ("backends.backend_agg", "figure", "patches")
    canvas, figures, shapes = (package(f"matplotlib.{name}", "a class map") for name in modules)
    view = slide.thumbnail(THUMBNAIL_PX)
    pixels = view.read(*(Interval(0, side) for side in view.size))
    small, _ = _reduced(classes_of, THUMBNAIL_PX)
    colours = _colours(classes)
    height, width = view.size
    figure = figures.Figure(figsize=(width / DPI + 2.0, height / DPI + 0.4), dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    extent = (0, width, height, 0)
    axes.imshow(pixels, extent=extent)
    axes.imshow(colours[small], extent=extent, interpolation="nearest")
    axes.set_axis_off()
    axes.set_title(literal(slide.file.path.name), fontsize=9)
    shares = np.bincount(small.reshape(-1), minlength=len(classes)) / small.size
    patches = [
        shapes.Patch(
            facecolor=colours[number], edgecolor="black", linewidth=0.5, label=literal(f"{name}, {100 * share:.2g} %")
        )
        for number, (name, share) in enumerate(zip(classes, shares, strict=True))
    ]
    figure.legend(handles=patches, loc="outside right upper", fontsize=8)
    file = io.BytesIO()
    canvas.FigureCanvasAgg(figure).print_png(file)
    return file.getvalue()


def _colours(classes: Sequence[str]) -> npt.NDArray[np.float32]:
    """RGBA of each class, from 0 to 1; the first one is transparent if it is background."""
    found = np.ones((len(classes), 4), np.float32)
    found[:, :3] = np.frombuffer(of_classes(len(classes)), np.uint8).reshape(-1, 3) / 255
    first = int(classes[0] in (BACKGROUND, "0"))
    if len(classes) - first <= len(ON_TISSUE):
        for number, colour in zip(range(first, len(classes)), ON_TISSUE, strict=False):
            found[number, :3] = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    found[:, 3] = OPACITY
    found[:first, 3] = 0
    return found
