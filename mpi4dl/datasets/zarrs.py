"""Read boxes of Zarr arrays, plain ones or OME-Zarr images: only the chunks that a box touches are read and decoded."""

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mpi4dl.datasets.base import BadImage, blaming, package
from mpi4dl.datasets.tiff import chosen_bands
from mpi4dl.geometry import Interval

NAMES = {"y": "y", "row": "y", "height": "y", "x": "x", "col": "x", "column": "x", "width": "x"}
NAMES |= {"c": "c", "channel": "c", "band": "c"}


def _of_group(path: Path, group: Any) -> tuple[Any, list[str]]:
    """The finest level of the one image in a group of OME-Zarr, and the names of its axes."""
    attributes = dict(group.attrs)
    about = attributes.get("ome", attributes)
    if "plate" in about or "well" in about or "bioformats2raw.layout" in about:
        raise BadImage(path, "has several images (a plate, or a series): write each to a folder of its own")
    images = about.get("multiscales") or []
    if len(images) != 1 or not images[0].get("datasets"):
        raise BadImage(path, f"is a group with {len(images)} images of OME-Zarr (multiscales), not one")
    levels = {name: group.get(name) for name in (str(each.get("path")) for each in images[0]["datasets"])}
    missing = next((name for name, level in levels.items() if not hasattr(level, "shape")), None)
    if missing is not None:
        raise BadImage(path, f"names a level {missing!r}, which is not there")
    array: Any = max(levels.values(), key=lambda level: prod(level.shape))
    named = images[0].get("axes") or "tczyx"[-len(array.shape) :]
    return array, [each["name"] if isinstance(each, dict) else str(each) for each in named]


def _known(path: Path, named: list[str] | None, shape: tuple[int, ...]) -> dict[str, int]:
    """Which axes are y, x and, if there are any, channels; others have one entry. Raises BadImage."""
    size = " x ".join(map(str, shape))
    if named is None:
        if len(shape) == 2:
            return {"y": 0, "x": 1}
        if len(shape) == 3:
            first, middle, last = shape
            if first < min(middle, last):
                return {"c": 0, "y": 1, "x": 2}
            if last < min(first, middle):
                return {"y": 0, "x": 1, "c": 2}
        message = f"is an array of {size} without names of its axes: expected (H, W), (C, H, W) or (H, W, C), of fewer"
        raise BadImage(path, f"{message} channels than rows and columns")
    found: dict[str, int] = {}
    for axis, name in enumerate(named):
        kind = NAMES.get(name.lower())
        if kind is None and shape[axis] != 1:
            raise BadImage(path, f"is a stack of images (axes {', '.join(named)}, {size}): write each by itself")
        if kind in found:
            raise BadImage(path, f"has two axes that may be {kind} ({', '.join(named)})")
        if kind is not None:
            found[kind] = axis
    if not {"y", "x"} <= found.keys() or len(named) != len(shape):
        raise BadImage(path, f"has axes {', '.join(named)} of {size}: expected y and x among them")
    return found


class ZarrImage:
    """An image whose values are as they are stored, of all its channels or of some, counted from 1. Raises BadImage."""

    def __init__(self, path: Path, bands: Sequence[int] = ()) -> None:
        zarr = package("zarr", f"{path}: reading Zarr", "mpi4dl[zarr]")
        with blaming(path, "has no readable metadata of Zarr"):
            found = zarr.open(store=path, mode="r")
        if isinstance(found, zarr.Group):
            array, named = _of_group(path, found)
            names: list[str] | None = named
        else:  # a plain array, which may have names of its axes
            array = found
            told = getattr(array.metadata, "dimension_names", None) or dict(array.attrs).get("_ARRAY_DIMENSIONS")
            names = None if not told or None in told else [str(name) for name in told]
        axes = _known(path, names, array.shape)
        self.dtype = array.dtype.name
        self.size: tuple[int, int] = array.shape[axes["y"]], array.shape[axes["x"]]
        if min(self.size) < 1:
            raise BadImage(path, f"has {self.size[0]} x {self.size[1]} pixels")
        self.bands = chosen_bands(path, bands, array.shape[axes["c"]] if "c" in axes else 1)
        self._array, self._axes = array, axes

    def read(self, *space: Interval) -> npt.NDArray[Any]:
        """A box, (rows, columns, channels)."""
        first = min(self.bands)
        wanted = {"y": space[0], "x": space[1], "c": Interval(first, max(self.bands) + 1)}
        where = [slice(0, 1)] * len(self._array.shape)
        for name, axis in self._axes.items():
            where[axis] = slice(*wanted[name])
        axes = [self._axes[name] for name in "yxc" if name in self._axes]
        found = np.moveaxis(np.asarray(self._array[tuple(where)]), axes, range(len(axes)))
        found = found.reshape([each.length for each in wanted.values()])[..., [band - first for band in self.bands]]
        return np.ascontiguousarray(found.astype(found.dtype.newbyteorder("="), copy=False))
