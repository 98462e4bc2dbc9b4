"""Tiles, thumbnails, maps and annotations of slides, cut and read on demand, within caches of bounded size.

Tiles are those of a deep zoom pyramid: each level has half the sides of the next, and the last one is level 0 of the
slide, as far as the scanner scanned. Level 0 of the pyramid fits in one tile.

    slide of 2000 x 1400 px, tiles of 512 px      level 2   2000 x 1400 px   4 x 3 tiles
                                                  level 1   1000 x  700 px   2 x 2
                                                  level 0    500 x  350 px   1
"""

import io
import json
import math
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import PIL.Image

from mpi4dl._files import read_regular
from mpi4dl._numbers import parse_json
from mpi4dl.datasets.base import DatasetError, LastMade, Pixels, blaming
from mpi4dl.datasets.files import open_stored_picture, shown
from mpi4dl.datasets.slides.annotations import FARTHEST, read_annotations
from mpi4dl.datasets.slides.slide import MPP_AT_1X, Level, Resolution, Slide, SlideFile, open_slide
from mpi4dl.geometry import Interval, ceil_div
from mpi4dl.viewer.results import ViewedSlide

TILE_PX = 512
THUMBNAIL_PX = 256
QUALITY = 85  # of JPEG, as scanners write it
MOST_VIEWS = 64  # slides, each at one resolution, that a thread keeps
CACHE_BYTES = 1 << 26
SAME_PLACE = 0.01  # of the side of a patch, by which places of patches may be off their grid
FORMATS = {"jpg": "image/jpeg", "png": "image/png"}


class Missing(Exception):
    """There is nothing of this number, or at this place."""


class Pyramid(NamedTuple):
    """The levels of a slide's deep zoom pyramid: `size` is (height, width) of the last one."""

    size: tuple[int, ...]
    tile: int = TILE_PX

    @property
    def last(self) -> int:
        return max(0, math.ceil(math.log2(max(self.size) / self.tile)))

    def box(self, level: int, row: int, col: int) -> tuple[int, tuple[Interval, ...]]:
        """The downsample of a level, and the rows and columns of a tile of it. Raises Missing."""
        if not 0 <= level <= self.last:
            raise Missing(f"there is no level {level}, but levels 0 to {self.last}")
        down = 1 << (self.last - level)
        sides = [ceil_div(side, down) for side in self.size]
        box = tuple(
            Interval(at * self.tile, min((at + 1) * self.tile, side))
            for at, side in zip((row, col), sides, strict=True)
        )
        if min(row, col) < 0 or any(interval.start >= interval.stop for interval in box):
            raise Missing(f"level {level} has no tile at row {row}, column {col}")
        return down, box


class SlideReader:
    """Reads what is shown of slides; each thread that calls it opens slides of its own.

    `made` has for a slide of which a model made a picture the number of that.

    All methods raise Missing for numbers that no slide has, and DatasetError for slides that cannot be read.
    """

    def __init__(self, slides: Sequence[ViewedSlide]) -> None:
        made = [number for number, slide in enumerate(slides) if slide.made is not None]
        self.made = {number: len(slides) + place for place, number in enumerate(made)}
        self.slides = (*slides, *(replace(slides[number], path=slides[number].made) for number in made))
        self._tiles, self._others = (LastMade(CACHE_BYTES, len) for _ in range(2))
        self._of_thread = threading.local()

    def slide(self, number: int) -> ViewedSlide:
        if not 0 <= number < len(self.slides):
            raise Missing(f"there is no slide {number}")
        return self.slides[number]

    def view(self, number: int, downsample: float = 1.0) -> Slide:
        """A slide at a resolution, its header read."""

        def make() -> Slide:
            slide = self.slide(number)
            if slide.path is None:
                raise DatasetError(
                    slide.error or f"{slide.name}: nothing says where it is; name its folder by --slides"
                )
            return opened(slide, slide.path) if downsample == 1.0 else self.view(number).at(downsample)

        return self._of_thread.__dict__.setdefault("views", LastMade(MOST_VIEWS))((number, downsample), make)

    def facts(self, number: int) -> dict[str, Any]:
        """What a slide's page shows: its size, where the scanned region begins, and its resolution."""
        slide = self.view(number)
        power = slide.file.magnification
        if slide.mpp is not None:
            power = MPP_AT_1X / slide.mpp
        height, width = slide.size
        return {
            "height": height,
            "width": width,
            "origin": [slide.origin[1] / slide.scale[1], slide.origin[0] / slide.scale[0]],
            "tile": TILE_PX,
            "levels": Pyramid(slide.size).last + 1,
            "mpp": slide.mpp,
            "magnification": power,
            "objective": slide.file.magnification,
        }

    def tile(self, number: int, level: int, row: int, col: int, form: str = "jpg") -> bytes:

        def make() -> bytes:
            down, box = Pyramid(self.view(number).size).box(level, row, col)
            return encoded(read_extended(self.view(number, float(down)), box), form)

        return self._tiles((number, level, row, col, form), make)

    def thumbnail(self, number: int) -> bytes:

        def make() -> bytes:
            view = self.view(number).thumbnail(THUMBNAIL_PX)
            return encoded(view.read(*(Interval(0, side) for side in view.size)), "jpg")

        return self._others((number, "thumbnail"), make)

    def map(self, number: int) -> bytes:
        """The map of a slide, as `map_of` reads it, in JSON."""
        path = self.slide(number).map
        if path is None:
            raise Missing("this slide has no map")

        def make() -> bytes:
            scale = (1.0, 1.0)
            with suppress(DatasetError):  # which showing the slide will say
                scale = self.view(number).scale
            return as_json(read_map(path, scale))

        return self._others((number, "map"), make)

    def regions(self, what: str, number: int) -> bytes:
        """The polygons of a slide's `annotation`, or of its predicted `classes`, in square pixels of level 0, in JSON.

        Of each it has the number of its name, and its rings of (x, y).
        """
        slide = self.slide(number)
        path = slide.annotation if what == "annotation" else slide.classes
        if path is None:
            raise Missing("this slide has no annotation" if what == "annotation" else "this slide has no class map")

        def make() -> bytes:
            found = read_annotations(path)
            corner = self.view(number).origin[::-1] if slide.in_bounds else (0, 0)
            scale = self.view(number).scale[::-1]
            names = list(dict.fromkeys(region.name for region in found.regions))
            regions = [
                {
                    "name": names.index(each.name),
                    "rings": [((ring + corner) / scale).round(2).tolist() for ring in each.rings],
                }
                for each in found.regions
            ]
            return as_json({"names": names, "regions": regions})

        return self._others((number, what), make)


def opened(slide: ViewedSlide, path: Path) -> Slide:
    """A slide, or a picture of any depth of which another was made. Raises DatasetError."""
    if not slide.is_picture:
        return open_slide(path, Resolution(assumed_mpp=slide.mpp))
    return Slide(SlideFile(path, (Level(shown(open_stored_picture(path)), 1.0),)), 1.0)


def read_extended(view: Slide, box: Sequence[Interval]) -> Pixels:
    """A box of a view, whose last row and column are repeated where the box reaches beyond.

    A level of the pyramid has its sides rounded up, and a view has them rounded.
    """
    inside = [
        Interval(min(each.start, side - 1), min(each.stop, side)) for each, side in zip(box, view.size, strict=True)
    ]
    missing = [(0, each.length - part.length) for each, part in zip(box, inside, strict=True)]
    return np.pad(view.read(*inside), [*missing, (0, 0)], mode="edge")


def encoded(pixels: Pixels, form: str) -> bytes:
    file = io.BytesIO()
    image = PIL.Image.fromarray(np.ascontiguousarray(pixels))
    if form == "jpg":
        image.save(file, "JPEG", quality=QUALITY)
    else:
        image.save(file, "PNG", compress_level=1)
    return file.getvalue()


def read_map(path: Path, scale: Sequence[float] = (1, 1)) -> dict[str, Any]:
    """The map in a GeoJSON file, as `map_of` has it. Raises BadImage."""
    with blaming(path, "is damaged"):
        return map_of(parse_json(read_regular(path)), scale)


def map_of(content: Any, scale: Sequence[float] = (1, 1)) -> dict[str, Any]:
    """A map from its GeoJSON: the grid of patches, and the value of each.

    `origin` (x, y) is the upper left corner of the grid and `side` that of a patch, in pixels of the full level 0, or
    in units of `scale` (down, across) of these.
    `rows`, `cols`, `values` and `ranks` are of each patch.

    Raises:
        ValueError: the features are no squares of one size in a grid. LookupError, TypeError: it is no map.
    """
    features = content["features"]
    if not features:
        raise ValueError("has no patches")
    corners = np.array([each["geometry"]["coordinates"][0][0] for each in features], np.float64)
    opposite = np.array([each["geometry"]["coordinates"][0][2] for each in features], np.float64)
    corners, opposite = corners / scale[::-1], opposite / scale[::-1]
    names = [*features[0]["properties"]["measurements"]]
    title, rank = names[0], names[1]
    numbers = np.array(
        [[each["properties"]["measurements"][name] for name in (title, rank)] for each in features], np.float64
    )
    if corners.shape != (len(features), 2) or opposite.shape != corners.shape or not np.isfinite(numbers).all():
        raise ValueError("has corners or values that are no numbers")
    if not (np.abs([corners, opposite]) <= FARTHEST).all():
        raise ValueError("has corners that are no places on a slide")
    origin, side = corners.min(0), float((opposite - corners).mean())
    if side <= 0 or np.ptp(corners, 0).max() / side > FARTHEST:
        raise ValueError("has patches without an area")
    places = np.rint((corners - origin) / side)
    off = max(np.abs(corners - origin - places * side).max(), np.abs(opposite - corners - side).max())
    if off > SAME_PLACE * side * max(1.0, places.max()):
        raise ValueError("has patches that are no squares of one size in a grid")
    cols, rows = places.astype(np.int64).T
    return {
        "title": str(title),
        "origin": origin.tolist(),
        "side": side,
        "rows": rows.tolist(),
        "cols": cols.tolist(),
        "values": numbers[:, 0].tolist(),
        "ranks": numbers[:, 1].tolist(),
    }


def as_json(value: Any) -> bytes:
    """JSON in ASCII, also of names of files that are no text. Raises ValueError for numbers that JSON does not have."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
