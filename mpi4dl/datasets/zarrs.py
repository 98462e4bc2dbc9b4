"""Read boxes of Zarr arrays, plain ones or OME-Zarr: images and volumes. Only chunks that a box touches are decoded."""

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mpi4dl.datasets.base import BadImage, Opened, Slices, blaming, package
from mpi4dl.datasets.tiff import chosen_bands
from mpi4dl.geometry import Interval

NAMES = {"y": "y", "row": "y", "height": "y", "x": "x", "col": "x", "column": "x", "width": "x"}
NAMES |= {"c": "c", "channel": "c", "band": "c"}
OF_VOLUMES = NAMES | {"z": "z", "depth": "z", "slice": "z", "plane": "z"}


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


def _opened(path: Path) -> tuple[Any, list[str] | None]:
    """The array of the finest level, and the names of its axes, if they are known. Raises BadImage."""
    zarr = package("zarr", f"{path}: reading Zarr", "mpi4dl[zarr]")
    with blaming(path, "has no readable metadata of Zarr"):
        found = zarr.open(store=path, mode="r")
    if isinstance(found, zarr.Group):
        return _of_group(path, found)
    told = getattr(found.metadata, "dimension_names", None) or dict(found.attrs).get("_ARRAY_DIMENSIONS")
    return found, None if not told or None in told else [str(name) for name in told]


def _unnamed(path: Path, shape: tuple[int, ...]) -> dict[str, int]:
    """Which axes of an image are y, x and, if there are any, channels. Raises BadImage."""
    if len(shape) == 2:
        return {"y": 0, "x": 1}
    if len(shape) == 3:
        first, middle, last = shape
        if first < min(middle, last):
            return {"c": 0, "y": 1, "x": 2}
        if last < min(first, middle):
            return {"y": 0, "x": 1, "c": 2}
    size = " x ".join(map(str, shape))
    message = f"is an array of {size} without names of its axes: expected (H, W), (C, H, W) or (H, W, C), of fewer"
    raise BadImage(path, f"{message} channels than rows and columns")


def _known(path: Path, named: list[str], shape: tuple[int, ...], names: Mapping[str, str]) -> dict[str, int]:
    """Which axes are those of `names`, of which channels need not be there; others have one entry. Raises BadImage."""
    size, found = " x ".join(map(str, shape)), dict[str, int]()
    for axis, name in enumerate(named):
        kind = names.get(name.lower())
        if kind is None and shape[axis] != 1:
            raise BadImage(path, f"is a stack of images (axes {', '.join(named)}, {size}): write each by itself")
        if kind in found:
            raise BadImage(path, f"has two axes that may be {kind} ({', '.join(named)})")
        if kind is not None:
            found[kind] = axis
    expected = sorted({*names.values()} - {"c"})
    if not found.keys() >= {*expected} or len(named) != len(shape):
        raise BadImage(path, f"has axes {', '.join(named)} of {size}: expected {', '.join(expected)} among them")
    return found


def _part(array: Any, axes: Mapping[str, int], wanted: Mapping[str, slice]) -> npt.NDArray[Any]:
    """Slices of those wanted axes that the array has, in their order; of others the first entry."""
    order = [axes[name] for name in wanted if name in axes]
    places = [slice(0, 1)] * len(array.shape)
    for name, axis in axes.items():
        places[axis] = wanted[name]
    found = np.moveaxis(np.asarray(array[tuple(places)]), order, range(len(order)))
    found = found.reshape(found.shape[: len(order)])
    return found.astype(found.dtype.newbyteorder("="), copy=False)


def open_volume(path: Path) -> Opened:
    """An array of depth, rows and columns, and perhaps of channels. Raises BadImage."""
    array, named = _opened(path)
    if named is None:
        return Opened(array.shape, lambda slices: np.asarray(array[slices]), array.dtype)
    axes = _known(path, named, array.shape, OF_VOLUMES)
    order = [name for name in "zyxc" if name in axes]

    def read_part(slices: Slices) -> npt.NDArray[Any]:
        return _part(array, axes, dict(zip(order, slices, strict=True)))

    shape = [array.shape[axes[name]] for name in order]
    return Opened(shape, read_part, array.dtype, channel=order.index("c") if "c" in axes else None)


class ZarrImage:
    """An image whose values are as they are stored, of all its channels or of some, counted from 1. Raises BadImage."""

    def __init__(self, path: Path, bands: Sequence[int] = ()) -> None:
        array, named = _opened(path)
        axes = _unnamed(path, array.shape) if named is None else _known(path, named, array.shape, NAMES)
        self.dtype = array.dtype.name
        self.size: tuple[int, int] = array.shape[axes["y"]], array.shape[axes["x"]]
        if min(self.size) < 1:
            raise BadImage(path, f"has {self.size[0]} x {self.size[1]} pixels")
        self.bands = chosen_bands(path, bands, array.shape[axes["c"]] if "c" in axes else 1)
        self._array, self._axes = array, axes

    def read(self, *space: Interval) -> npt.NDArray[Any]:
        """A box, (rows, columns, channels)."""
        first = min(self.bands)
        wanted = {"y": slice(*space[0]), "x": slice(*space[1]), "c": slice(first, max(self.bands) + 1)}
        found = _part(self._array, self._axes, wanted)
        found = found if "c" in self._axes else found[..., None]
        return np.ascontiguousarray(found[..., [band - first for band in self.bands]])
