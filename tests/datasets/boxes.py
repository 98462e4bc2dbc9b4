"""Boxes and images that several tests of the datasets use."""

from collections.abc import Iterator
from itertools import pairwise, product
from typing import Any

import numpy as np
from hypothesis import strategies as st
from skimage.measure import points_in_poly

from mpi4dl.geometry import Interval


def whole(height: int, width: int) -> tuple[Interval, Interval]:
    return Interval(0, height), Interval(0, width)


def smooth_image(height: int, width: int, channels: int = 3) -> np.ndarray:
    """Gradients that lossy compression hardly changes: uint8, (height, width, channels)."""
    y, x = np.linspace(0, 1, height)[:, None], np.linspace(0, 1, width)
    planes = [y + 0 * x, 0 * y + x, (y + x) / 2, (1 - y + x) / 2][:channels]
    return np.round(255 * np.stack(planes, axis=2)).astype(np.uint8)


def noise_image(height: int, width: int, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, channels), np.uint8)


@st.composite
def cuts(draw: st.DrawFn, size: int) -> list[Interval]:
    """A way to cut `size` pixels into consecutive intervals, some of them perhaps empty."""
    inner = draw(st.lists(st.integers(0, size), max_size=3))
    return [Interval(*pair) for pair in pairwise([0, *sorted(inner), size])]


def tiles(rows: list[Interval], cols: list[Interval]) -> Iterator[tuple[Interval, Interval]]:
    return ((r, c) for r, c in product(rows, cols) if not r.empty and not c.empty)


def contains(features: list[dict[str, Any]], row: float, col: float) -> bool:
    """Whether a place of level 0 lies in a polygon of features of GeoJSON, and in no hole of it."""

    def inside(ring: list[list[float]]) -> bool:
        return bool(points_in_poly([(col, row)], ring)[0])

    polygons = [each["geometry"]["coordinates"] for each in features]
    return any(inside(outer) and not any(map(inside, holes)) for outer, *holes in polygons)
