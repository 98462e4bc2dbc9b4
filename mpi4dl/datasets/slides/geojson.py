"""GeoJSON as QuPath reads it: outlines of masks and values of patches, in pixels (x, y) of the full level 0."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mpi4dl.datasets.base import package

Ring = list[list[float]]  # corners (x, y), the last one the same as the first

LEAST_CORNERS = 4
CORNERS = np.array([[0, 0], [1, 0], [1, 1], [0, 1], [0, 0]])  # (x, y) of a square
TOLERANCE = 0.5  # pixels of a mask by which an outline may be simplified


def outlines(
    mask: npt.NDArray[np.bool_],
    scale: tuple[float, float] = (1, 1),
    origin: Sequence[float] = (0, 0),
    least_area: float = 0.0,
) -> list[list[Ring]]:
    """The regions of a mask as polygons: of each its outer ring and the rings of its holes.

    A pixel of the mask is `scale` (down, across) pixels of level 0, and the first one begins at `origin` (row, column).
    Rings of less than `least_area` pixels of level 0 are left out.
    """
    measure = package("skimage.measure", "slides", "scikit-image")
    padded = np.pad(mask, 1)
    parts = measure.label(padded, connectivity=1)
    outer: dict[int, list[Ring]] = {}
    holes: list[tuple[int, Ring]] = []
    for line in measure.find_contours(padded.astype(np.float32), 0.5):
        y, x = line.T
        area = float(np.sum(x[:-1] * y[1:] - x[1:] * y[:-1]))  # twice that of the ring; positive for outer ones
        if abs(area) / 2 * scale[0] * scale[1] < least_area:
            continue
        kept = measure.approximate_polygon(line, TOLERANCE)
        ring = [[origin[1] + (x - 0.5) * scale[1], origin[0] + (y - 0.5) * scale[0]] for y, x in kept.tolist()]
        if len(ring) >= LEAST_CORNERS:
            # A corner lies between a pixel of the mask and one outside, which is no part.
            part = max(int(parts[tuple(round_to(line[0]).astype(int))]) for round_to in (np.floor, np.ceil))
            if area > 0:
                outer[part] = [ring]
            else:
                holes.append((part, ring))
    for part, hole in holes:
        if part in outer:
            outer[part].append(hole)
    return [*outer.values()]


def squares(corners: npt.NDArray[np.float64], sides: Sequence[float]) -> list[Ring]:
    """Boxes of these sides (down, across) with their upper left corners (n, 2) at places (row, column) of level 0."""
    return (corners[:, None, ::-1] + np.asarray(sides)[::-1] * CORNERS).tolist()


def feature(
    polygon: Sequence[Ring], name: str, kind: str = "annotation", measurements: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """One object of QuPath: of `kind` annotation, detection or tile, classified as `name`, with named numbers."""
    properties: dict[str, Any] = {"objectType": kind, "classification": {"name": name}}
    if measurements is not None:
        properties["measurements"] = dict(measurements)
    return {
        "type": "Feature",
        "geometry": {"type": "Polygon", "coordinates": list(polygon)},
        "properties": properties,
    }


def collection(features: Iterable[Mapping[str, Any]]) -> str:
    """The text of a file of objects, which are used one after the other."""
    return f'{{"type": "FeatureCollection", "features": [{", ".join(map(json.dumps, features))}]}}'
