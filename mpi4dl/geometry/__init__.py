"""Which part of an image a rank owns, and which part an operator needs: integers only, no torch."""

from mpi4dl.geometry.boxes import (
    BATCH,
    SPACE,
    Box,
    FeatureGridShape,
    GridShape,
    Interval,
    Split,
    Tiling,
    ceil_div,
    cut_alike,
    even_cuts,
    near_square,
    suffices,
    widest,
)
from mpi4dl.geometry.windows import AxisMap, AxisPlan, OfPart, TransposedWindow, Window, check_window, plan_axis

__all__ = [
    "BATCH",
    "SPACE",
    "AxisMap",
    "AxisPlan",
    "Box",
    "FeatureGridShape",
    "GridShape",
    "Interval",
    "OfPart",
    "Split",
    "Tiling",
    "TransposedWindow",
    "Window",
    "ceil_div",
    "check_window",
    "cut_alike",
    "even_cuts",
    "near_square",
    "plan_axis",
    "suffices",
    "widest",
]
