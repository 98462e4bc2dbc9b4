"""Where the map of a slide is highest, and whether an annotation is there."""

import math
from collections.abc import Collection, Iterable
from typing import NamedTuple

import numpy as np

from mpi4dl.datasets.base import BadImage, DatasetError, printable
from mpi4dl.datasets.slides.annotations import RegionMask, read_annotations
from mpi4dl.datasets.slides.masks import BACKGROUND, is_auxiliary
from mpi4dl.datasets.slides.slide import Resolution, open_slide
from mpi4dl.geometry import Interval
from mpi4dl.results.formats import csv_lines
from mpi4dl.viewer.reading import read_map
from mpi4dl.viewer.results import ViewedSlide

OUTSIDE = -1
COLUMNS = ("slide", "value", "x", "y", "side", "annotated", "centre_annotated", "classes")


class Hit(NamedTuple):
    """The cell of a slide's map with the highest value.

    Attributes:
        centre: its place (row, column) in pixels of the full level 0, and `side` its sides (height, width).
        overlaps: whether a pixel of it lies in an annotated region. inside: whether its centre does.
        names: the classes of the regions that it overlaps.
    """

    slide: str
    value: float
    centre: tuple[float, float]
    side: tuple[float, float]
    overlaps: bool
    inside: bool
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        (row, col), (height, width) = self.centre, self.side
        classes = ", ".join(printable(name) or "a region without class" for name in self.names)
        where = f"in {classes}" if self.overlaps else "in no annotated region"
        where += " with its centre" if self.inside else ""
        place = f"x {col:.0f}, y {row:.0f} ({width:.0f} x {height:.0f} px)"
        return f"{printable(self.slide)}: highest {self.value:.4g} at {place} {where}"


def csv_of(hits: Iterable[Hit]) -> bytes:
    """A table with a line for each slide; `x` and `y` are the centre of the cell, in pixels of the full level 0."""
    rows = []
    for hit in hits:
        (row, col), (side, _) = hit.centre, hit.side
        classes = ";".join(map(printable, hit.names))
        rows.append((hit.slide, hit.value, col, row, side, int(hit.overlaps), int(hit.inside), classes))
    return csv_lines(COLUMNS, *rows)


def hit_of(slide: ViewedSlide, classes: Collection[str] | None = None) -> Hit | tuple[str, ...]:
    """Where the map of a slide is highest; the classes of its regions if none of them is among `classes`.

    By default all classes count but background and those of QuPath with an asterisk, such as Ignore*.

    Raises:
        DatasetError: the slide has no map or annotation, or its files cannot be read.
    """
    if slide.path is None or slide.map is None or slide.annotation is None:
        what = "map" if slide.map is None else "annotation" if slide.annotation is None else "file"
        raise DatasetError(slide.error or f"{slide.name}: has no {what}")
    if not slide.map.is_file():
        raise BadImage(slide.map, "is gone, the map of a slide")
    annotations = read_annotations(slide.annotation)
    names = [*dict.fromkeys(region.name for region in annotations.regions)]
    if classes is None:
        counting = {name for name in names if not is_auxiliary(name) and name.casefold() != BACKGROUND}
    else:
        counting = {*names} & {*classes}
    if not counting:
        return tuple(names)
    whole = open_slide(slide.path, Resolution(assumed_mpp=slide.mpp))
    numbers = {name: number if name in counting else OUTSIDE for number, name in enumerate(names)}
    mask = RegionMask(annotations, whole, numbers, OUTSIDE, whole.origin if slide.in_bounds else (0, 0))
    mask.require_on_slide()
    found = read_map(slide.map, whole.scale)
    best = int(np.argmax(found["values"]))
    side = found["side"]
    corner = [
        start + at[best] * side for start, at in zip(found["origin"][::-1], (found["rows"], found["cols"]), strict=True)
    ]
    origins = (origin / scale for origin, scale in zip(whole.origin, whole.scale, strict=True))
    top, left = (start - origin for start, origin in zip(corner, origins, strict=True))
    box = [Interval(math.floor(start), max(math.floor(start) + 1, math.ceil(start + side))) for start in (top, left)]
    values = mask.read(*box)
    row, col = (math.floor(start + side / 2) for start in (top, left))
    at_centre = mask.read(Interval(row, row + 1), Interval(col, col + 1))
    present = np.unique(values[values != OUTSIDE]).tolist()
    return Hit(
        slide.name,
        found["values"][best],
        ((corner[0] + side / 2) * whole.scale[0], (corner[1] + side / 2) * whole.scale[1]),
        (side * whole.scale[0], side * whole.scale[1]),
        bool(present),
        bool((at_centre != OUTSIDE).any()),
        tuple(names[number] for number in present),
    )
