"""Annotations of slides as masks: GeoJSON of QuPath, XML of ASAP, and pictures of classes, read box by box.

    file  ->  regions: a class and the rings of a polygon, in pixels (x, y) of level 0
          ->  a box of the mask: later regions cover earlier ones, and holes show what lies below

A pixel has the class of the last region that its centre lies in, by the even-odd rule. The crossing of an edge and a
row is computed in coordinates of the slide. So a pixel has the same class in every box.
"""

import gzip
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple
from xml.parsers import expat

import numpy as np
import numpy.typing as npt

from mpi4dl._files import open_regular, read_at_most
from mpi4dl._wording import quoted
from mpi4dl.datasets.base import BadImage, blaming
from mpi4dl.datasets.masks import PICTURES, Mask
from mpi4dl.datasets.slides.slide import Slide
from mpi4dl.datasets.transform import nearest, within
from mpi4dl.geometry import Interval

GEOJSON = (".geojson", ".json", ".geojson.gz", ".json.gz")
ASAP = (".xml",)
POLYGONS = (*GEOJSON, *ASAP)
MOST_BYTES = 1 << 29  # of a file of annotations, unpacked
FARTHEST = 1 << 24  # px: no slide is that wide
MOST_NESTED = 8  # collections of geometries in one another
CORNERS_OF_POLYGON = 3
AT_ONCE = 1 << 22  # crossings of edges and rows
SAME_PROPORTIONS = 0.02
IGNORED_CLASS = "Ignore*"  # of QuPath
NO_CLASS = ("", "none")  # of ASAP
_LINES = ("Point", "MultiPoint", "LineString", "MultiLineString")
_AREAS, _RECTANGLE = ("Polygon", "Spline", "None"), "Rectangle"  # of ASAP, and those that have no area
_MARKS = ("Dot", "PointSet", "Measurement", "Polyline", "Line", "Arrow")

Ring = npt.NDArray[np.float64]  # (corners, 2): x and y


class Region(NamedTuple):
    """A polygon of a class: its outer ring and those of its holes, in pixels of level 0. The class may be empty."""

    name: str
    rings: tuple[Ring, ...]


@dataclass(frozen=True)
class Annotations:
    """The regions of a file, in its order."""

    path: Path
    regions: tuple[Region, ...]

    @cached_property
    def boxes(self) -> npt.NDArray[np.float64]:
        """Around each region the least and the largest x and y: (regions, 2, 2)."""
        ends = [(each.rings[0].min(0), each.rings[0].max(0)) for each in self.regions]
        return np.array(ends, np.float64).reshape(-1, 2, 2)

    @property
    def names(self) -> list[str]:
        """The classes, in the order of their first region; without the empty one."""
        return [name for name in dict.fromkeys(region.name for region in self.regions) if name]

    @cached_property
    def num_corners(self) -> int:
        return sum(len(ring) for region in self.regions for ring in region.rings)


def read_annotations(path: Path) -> Annotations:
    """The regions of a GeoJSON file, such as QuPath exports, or of an XML file of ASAP.

    Points and lines are left out. Raises BadImage for a file that is damaged, or none of these.
    """
    read = _read_xml if path.name.lower().endswith(ASAP) else _read_geojson
    with blaming(path, "cannot be read as annotations"):
        with open_regular(path) as file:
            packed: Any = gzip.GzipFile(fileobj=file) if path.name.lower().endswith(".gz") else file
            content = read_at_most(packed, MOST_BYTES)
        if len(content) > MOST_BYTES:
            most = MOST_BYTES >> 20
            raise BadImage(path, f"has more than {most} MiB of annotations: leave out detections, or simplify it")
        if not content.strip():
            raise BadImage(path, "is empty")
        try:
            return Annotations(path, tuple(read(content)))
        except (_Wrong, RecursionError) as error:
            deep = "cannot be read as annotations: it is nested too deeply"
            raise BadImage(path, str(error) if isinstance(error, _Wrong) else deep) from error


class _Wrong(ValueError):
    """What is wrong with a file, in words."""


# GeoJSON: a FeatureCollection, a list of features as QuPath writes it, one feature, or a geometry.


def _refuse(word: str) -> float:
    raise _Wrong(f"has {word} for a number")


def _compact(found: dict[str, Any]) -> dict[str, Any]:
    """A value of JSON whose rings of corners become arrays, which take an eighth of their memory, if they are such."""
    kind, places = found.get("type"), found.get("coordinates")
    with suppress(TypeError, ValueError):  # which reading its feature will say
        if kind in ("Polygon", "MultiPolygon"):
            many: Any = [places] if kind == "Polygon" else places
            found["coordinates"] = [[_ring(ring, "") for ring in rings] for rings in many]
            found["type"] = "MultiPolygon"
    return found


def _read_geojson(content: bytes) -> Iterator[Region]:
    try:
        found = json.loads(content.decode("utf-8-sig"), object_hook=_compact, parse_constant=_refuse)
    except json.JSONDecodeError as error:
        raise _Wrong(f"is no JSON, it is truncated or damaged: line {error.lineno}, {error.msg}") from error
    except UnicodeDecodeError as error:
        raise _Wrong(f"is no text in UTF-8: {error.reason} at byte {error.start}") from error
    features = found.get("features", [found]) if isinstance(found, dict) else found
    if not isinstance(features, list):
        raise _Wrong(f"has {quoted(features)} where a list of features is expected")
    for number, feature in enumerate(features, 1):
        where = f"feature {number}"
        if not isinstance(feature, dict):
            raise _Wrong(f"has {quoted(feature)} as {where}")
        if feature.get("type") == "Feature" or "geometry" in feature:
            geometry, name = feature.get("geometry"), _class_of(feature.get("properties"), where)
        else:
            geometry, name = feature, ""
        if geometry is not None:  # a feature without a place is allowed
            yield from (Region(name, rings) for rings in _polygons(geometry, where))


def _class_of(properties: Any, where: str) -> str:
    """The class of a feature, as QuPath names it now, or did before; empty if it has none."""
    if properties is None:
        return ""
    if not isinstance(properties, dict):
        raise _Wrong(f"has {quoted(properties)} as properties of {where}")
    found = properties.get("classification", properties.get("pathClassId"))
    if isinstance(found, dict):
        names = found.get("names")
        found = ": ".join(map(str, names)) if isinstance(names, list) else found.get("name")
    if found is not None and not isinstance(found, str):
        raise _Wrong(f"has {quoted(found)} as the class of {where}")
    return (found or "").strip()


def _polygons(geometry: Any, where: str, depth: int = 0) -> Iterator[tuple[Ring, ...]]:
    kind = geometry.get("type") if isinstance(geometry, dict) else None
    if kind in _LINES:
        return
    if kind == "GeometryCollection" and isinstance(geometry.get("geometries"), list):
        if depth == MOST_NESTED:
            raise _Wrong(f"has collections of geometries in one another, more than {MOST_NESTED}, in {where}")
        for each in geometry["geometries"]:
            yield from _polygons(each, where, depth + 1)
        return
    if kind not in ("Polygon", "MultiPolygon"):
        raise _Wrong(f"has a geometry of type {quoted(kind)} in {where}: a Polygon or MultiPolygon is expected")
    places = geometry.get("coordinates")
    many = [places] if kind == "Polygon" else places
    if not isinstance(many, list) or not all(isinstance(each, list) for each in many):
        raise _Wrong(f"has {quoted(places)} as coordinates of {where}")
    for rings in many:
        kept = tuple(_ring(ring, where) for ring in rings)
        if kept and len(kept[0]) >= CORNERS_OF_POLYGON:
            yield kept


def _ring(corners: Any, where: str) -> Ring:
    if isinstance(corners, np.ndarray):
        return corners
    if not isinstance(corners, list):
        raise _Wrong(f"has {quoted(corners)} where {where} needs a list of corners")
    for corner in corners:
        numbers = isinstance(corner, list) and len(corner) >= 2
        if not numbers or not all(isinstance(x, int | float) and not isinstance(x, bool) for x in corner[:2]):
            raise _Wrong(f"has {quoted(corner)} as a corner of {where}: two numbers, x and y, are expected")
        _check_place(corner[0], corner[1], where)
    return np.array([corner[:2] for corner in corners], np.float64).reshape(-1, 2)


def _check_place(x: float, y: float, where: str) -> None:
    if not all(abs(each) <= FARTHEST for each in (x, y)):  # also if it is not a number
        place = f"({quoted(x)}, {quoted(y)})"
        raise _Wrong(f"has the corner {place} in {where}: coordinates are pixels of level 0 of the slide")


# XML of ASAP, as of CAMELYON: Annotation Type="Polygon" PartOfGroup="Tumor" with Coordinate Order="0" X="1" Y="2".


def _read_xml(content: bytes) -> list[Region]:
    """Read element by element. A file with a document type could define entities without end, and is refused."""
    found: list[Region] = []
    corners: list[tuple[int, float, float]] = []
    about: dict[str, str] = {}
    root: list[str] = []

    def doctype(*_: object) -> None:
        raise _Wrong("has a document type, which annotations of ASAP have not: it is not read")

    def begin(tag: str, attributes: dict[str, str]) -> None:
        root.append(tag) if not root else None
        if tag == "Annotation":
            corners.clear()
            about.clear()
            about.update(attributes)
        elif tag == "Coordinate" and about:
            where = f"annotation {len(found) + 1}"
            try:
                x, y = (float(attributes[name].replace(",", ".")) for name in "XY")
                order = int(attributes.get("Order", len(corners)))
            except (KeyError, ValueError):
                raise _Wrong(f"has {quoted(attributes)} as a corner of {where}: X and Y are numbers") from None
            _check_place(x, y, where)
            corners.append((order, x, y))

    def end(tag: str) -> None:
        if tag != "Annotation":
            return
        kind, name = about.get("Type", "Polygon"), about.get("PartOfGroup", "").strip()
        if kind not in (*_AREAS, _RECTANGLE, *_MARKS):
            raise _Wrong(f"has the type {quoted(kind)} of an annotation: expected {', '.join(_AREAS)} or {_RECTANGLE}")
        ring = np.array([place for _, *place in sorted(corners, key=lambda each: each[0])], np.float64)
        if kind == _RECTANGLE and len(ring) == 2:  # opposite corners
            (left, top), (right, bottom) = ring
            ring = np.array([(left, top), (right, top), (right, bottom), (left, bottom)])
        if kind not in _MARKS and len(ring) >= CORNERS_OF_POLYGON:
            found.append(Region("" if name.casefold() in NO_CLASS else name, (ring,)))
        about.clear()

    parser = expat.ParserCreate()
    parser.StartDoctypeDeclHandler, parser.StartElementHandler, parser.EndElementHandler = doctype, begin, end
    try:
        parser.Parse(content, True)
    except expat.ExpatError as error:
        raise _Wrong(f"is no XML, it is truncated or damaged: {error}") from error
    if root != ["ASAP_Annotations"]:
        raise _Wrong(f"is XML of {quoted(root[0])}: that of ASAP, ASAP_Annotations, is expected")
    return found


def covered(rings: Sequence[Ring], rows: Interval, cols: Interval) -> npt.NDArray[np.bool_]:
    """Of which pixels of a box the centre lies inside, by the even-odd rule. Corners are (x, y) in pixels of the box's
    image.
    """
    toggled = np.zeros((rows.length, cols.length + 1), np.uint8)
    for ring in rings:
        first, second = ring, np.roll(ring, -1, axis=0)
        swapped = first[:, 1] > second[:, 1]  # each edge downwards: neighbours that share one have equal crossings
        upper, lower = np.where(swapped[:, None], second, first), np.where(swapped[:, None], first, second)
        # Rows whose centres an edge crosses, the lower end excluded.
        begin = np.clip(np.ceil(upper[:, 1] - 0.5), rows.start, rows.stop).astype(np.int64)
        count = np.clip(np.ceil(lower[:, 1] - 0.5), rows.start, rows.stop).astype(np.int64) - begin
        crossing = np.flatnonzero(count > 0)
        count = np.maximum(count, 0)
        ends = np.cumsum(count[crossing])
        parts = np.searchsorted(ends, range(AT_ONCE, int(count.sum()), AT_ONCE))
        for part in np.split(crossing, parts):
            # Mark where each row passes an edge: the first pixel whose centre lies to the right of it.
            (ux, uy), (lx, ly), counts = upper[part].T, lower[part].T, count[part]
            edge = np.repeat(np.arange(len(part)), counts)
            row = begin[part][edge] + np.arange(len(edge)) - np.repeat(np.cumsum(counts) - counts, counts)
            slope = (lx - ux) / (ly - uy)
            at = ux[edge] + (row + 0.5 - uy[edge]) * slope[edge]
            col = np.clip(np.ceil(at - 0.5), cols.start, cols.stop).astype(np.int64)
            np.bitwise_xor.at(toggled, (row - rows.start, col - cols.start), 1)
    return np.bitwise_xor.accumulate(toggled, axis=1)[:, :-1].astype(bool)


@dataclass(frozen=True)
class RegionMask:
    """The classes of the pixels of a slide by its regions: a mask, read box by box.

    `numbers` gives the class of each name; regions of others are left out. Pixels of no region are `outside`. `corner`
    is the place (row, column) of level 0 that coordinates of regions begin at.
    """

    annotations: Annotations
    slide: Slide
    numbers: Mapping[str, int]
    outside: int = 0
    corner: tuple[int, int] = (0, 0)

    @property
    def size(self) -> tuple[int, ...]:
        return self.slide.size

    def _placed(self, places: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Places (..., 2), x and y of regions, in pixels of the slide as it is read."""
        moved = np.array([self.corner[axis] - self.slide.origin[axis] for axis in (1, 0)], np.float64)
        return (places + moved) / self.slide.scale[::-1]

    @cached_property
    def _boxes(self) -> npt.NDArray[np.float64]:
        return self._placed(self.annotations.boxes)

    def read(self, *space: Interval) -> npt.NDArray[np.int64]:
        """A box of it, (rows, columns), int64; -100 is none."""
        rows, cols = space
        found = np.full((rows.length, cols.length), self.outside, np.int64)
        if not len(self._boxes):
            return found
        (left, top), (right, bottom) = self._boxes.transpose(1, 2, 0)
        near = (left < cols.stop) & (right > cols.start) & (top < rows.stop) & (bottom > rows.start)
        for number in np.flatnonzero(near).tolist():
            region = self.annotations.regions[number]
            value = self.numbers.get(region.name)
            first, last = np.floor(self._boxes[number, 0]), np.ceil(self._boxes[number, 1])
            around = [Interval(int(first[axis]), int(last[axis])) for axis in (1, 0)]
            part = [each.intersect(asked) for each, asked in zip(around, space, strict=True)]
            if value is not None and not any(each.empty for each in part):
                inside = covered([self._placed(ring) for ring in region.rings], part[0], part[1])
                found[within(part, space)][inside] = value
        return found

    def require_on_slide(self) -> None:
        """Raises BadImage if no region lies on the slide, or one reaches far beyond it."""
        if not len(self._boxes):
            return
        size = np.array(self.size[::-1], np.float64)
        least, most = self._boxes[:, 0], self._boxes[:, 1]
        far = np.flatnonzero(((least < -size) | (most > 2 * size)).any(1))
        away = not ((least < size) & (most > 0)).all(1).any()
        if len(far) or away:
            number = int(far[0]) if len(far) else 0
            x, y = self.annotations.boxes[number, 1].tolist()
            height, width = self.slide.file.size
            raise BadImage(
                self.annotations.path,
                f"has a polygon up to ({x:g}, {y:g}), which is not on the slide {self.slide.file.path.name} of {width} "
                f"x {height} px: coordinates are pixels of level 0, or with `annotation_origin` bounds of the part "
                "that the scanner scanned",
            )

    def place(self, number: int, random: np.random.Generator) -> tuple[int, int] | None:
        """A random pixel of the regions of a class, each as likely as any other; None if it has none there."""
        chosen = [i for i, each in enumerate(self.annotations.regions) if self.numbers.get(each.name) == number]
        outer = (self.annotations.regions[i].rings[0].T for i in chosen)
        areas = np.array([abs(float(np.dot(x, np.roll(y, -1)) - np.dot(y, np.roll(x, -1)))) for x, y in outer])
        if not len(chosen) or not areas.sum() > 0:
            return None
        which = chosen[int(random.choice(len(chosen), p=areas / areas.sum()))]
        (left, top), (right, bottom) = self._boxes[which].tolist()
        scale = max(1.0, max(right - left, bottom - top) / PLACES_PX)
        rings = [(self._placed(ring) - (left, top)) / scale for ring in self.annotations.regions[which].rings]
        sides = [Interval(0, max(1, math.ceil(side / scale))) for side in (bottom - top, right - left)]
        inside = np.argwhere(covered(rings, sides[0], sides[1]))
        at = inside[int(random.integers(len(inside)))] + random.random(2) if len(inside) else random.random(2)
        row, col = (top + at[0] * scale, left + at[1] * scale)
        return tuple(int(min(max(x, 0), side - 1)) for x, side in zip((row, col), self.size, strict=True))  # type: ignore


PLACES_PX = 256  # sides of a region's picture in which places are drawn


@dataclass(frozen=True)
class PictureMask:
    """A picture of classes of the same extent as a slide, at the slide's resolution: the nearest pixel of it."""

    mask: Mask
    slide: Slide

    @property
    def size(self) -> tuple[int, ...]:
        return self.slide.size

    def require_on_slide(self) -> None:
        """Raises BadImage if the picture has other proportions than the slide."""
        (height, width), (rows, cols) = self.slide.file.size, self.mask.size
        if abs(rows * width - cols * height) > max(SAME_PROPORTIONS * cols * height, width, height):
            raise BadImage(
                self.mask.path,
                f"has {cols} x {rows} px, but its slide {self.slide.file.path.name} has {width} x {height}: a mask "
                "shows the same extent, at any resolution",
            )

    def _sources(self, axis: int, wanted: Interval) -> npt.NDArray[np.int64]:
        """Which row, or column, of the picture shows each one of the slide."""
        share = self.mask.size[axis] / self.slide.file.size[axis]
        centres = self.slide.origin[axis] + (np.arange(*wanted) + 0.5) * self.slide.scale[axis]
        return np.clip(np.floor(centres * share), 0, self.mask.size[axis] - 1).astype(np.int64)

    def read(self, *space: Interval) -> npt.NDArray[np.int64]:
        """A box of it, (rows, columns), int64; -100 is none. Raises BadImage."""
        places = [self._sources(axis, wanted) for axis, wanted in enumerate(space)]
        found = np.empty([*map(len, places)], np.int64)
        if found.size:
            nearest(self.mask.read, places, found)
        return found

    def place(self, number: int, random: np.random.Generator) -> tuple[int, int] | None:
        """A random pixel of a class, by a thumbnail of the mask; None if it shows none."""
        small = PictureMask(self.mask, self.slide.thumbnail(THUMBNAIL_PX))
        inside = np.argwhere(small.read(*(Interval(0, side) for side in small.size)) == number)
        if not len(inside):
            return None
        scale = small.slide.downsample / self.slide.downsample
        at = (inside[int(random.integers(len(inside)))] + random.random(2)) * scale
        return tuple(int(min(max(x, 0), side - 1)) for x, side in zip(at, self.size, strict=True))  # type: ignore


THUMBNAIL_PX = 1024
SlideMask = RegionMask | PictureMask


def is_picture(path: Path) -> bool:
    """Whether a file is a picture of classes, rather than polygons. Raises BadImage for neither."""
    name = path.name.lower()
    if name.endswith(PICTURES):
        return True
    if name.endswith(POLYGONS):
        return False
    raise BadImage(path, f"is no annotation: files of these end in {' '.join((*POLYGONS, *PICTURES))}")
