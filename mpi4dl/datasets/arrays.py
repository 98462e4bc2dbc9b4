"""Images that are already arrays in memory, and the .npz files that hold them."""

import hashlib
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mpi4dl.datasets.base import DatasetError, Image, WholeImage, unit_values
from mpi4dl.datasets.colour import bytes_of
from mpi4dl.datasets.files import open_regular

NPZ_LAYOUT = "expected arrays x_train, y_train, x_test, y_test, or x, y"
_NAMES = ("x", "y", "x_train", "y_train", "x_test", "y_test")
_CHANNELS = (1, 3, 4)
_SIDES = {1: ("length",), 2: ("height", "width"), 3: ("depth", "height", "width")}


class ArrayDataset:
    """Images (count, height, width, channels), or with other axes of space, and their labels (count,)."""

    def __init__(self, images: npt.NDArray[Any], labels: npt.NDArray[np.int64], classes: tuple[str, ...]) -> None:
        self.classes = classes
        self.channels: int = images.shape[-1]
        self._images, self._labels = images, labels

    def __len__(self) -> int:
        return len(self._images)

    def name(self, index: int) -> str:
        return str(index)

    def digest(self) -> str:
        """What differs where images or labels differ."""
        found = hashlib.blake2b(self._labels.tobytes(), digest_size=8)
        for image in self._images:
            found.update(np.ascontiguousarray(image).data)
        return f"{self._images.shape} {found.hexdigest()}"

    def label(self, index: int) -> int:
        return int(self._labels[index])

    def image(self, index: int) -> Image:
        return WholeImage(self._images[index])


def load_npz(path: Path, num_axes: int = 2) -> tuple[ArrayDataset, ArrayDataset | None]:
    """The training and the test arrays of an .npz file; None for the latter where it has only x and y.

    Images are (count, height, width), or with 1, 3 or 4 channels in the last place or in the second; labels are
    integers (count,) or (count, 1). Volumes have three axes of space, sequences one: `num_axes`.

    Raises:
        DatasetError: no such file, a damaged one, other arrays, or arrays that do not fit each other.
    """
    arrays = _arrays(path)
    names = [("x_train", "y_train"), ("x_test", "y_test")] if "x_train" in arrays else [("x", "y")]
    missing = [name for pair in names for name in pair if name not in arrays]
    if missing:
        found = ", ".join(sorted(arrays)) or "nothing"
        raise DatasetError(f"{path}: has no {', '.join(missing)}; {NPZ_LAYOUT}; found {found}")
    images = [_images(path, x, arrays[x], num_axes) for x, _ in names]
    labels = [_labels(path, y, arrays[y]) for _, y in names]
    classes = tuple(str(i) for i in range(max(2, 1 + max(int(found.max()) for found in labels))))
    for (x, y), xs, ys in zip(names, images, labels, strict=True):
        if len(xs) != len(ys):
            raise DatasetError(f"{path}: {x} has {len(xs)} images and {y} has {len(ys)} labels: they must be as many")
    parts = [ArrayDataset(xs, ys, classes) for xs, ys in zip(images, labels, strict=True)]
    if len(parts) == 2 and parts[0].channels != parts[1].channels:
        raise DatasetError(
            f"{path}: x_train has {parts[0].channels} channels, x_test has {parts[1].channels}: they must be equal"
        )
    return parts[0], parts[1] if len(parts) == 2 else None


def _arrays(path: Path) -> dict[str, npt.NDArray[Any]]:
    try:
        # NumPy leaves a damaged file open where it opened it itself.
        with open_regular(path) as stream, np.load(stream, allow_pickle=False) as file:
            return {name: file[name] for name in file.files if name in _NAMES}
    except FileNotFoundError as error:
        raise DatasetError(f"{path}: no such file; {NPZ_LAYOUT}") from error
    except (OSError, ValueError, EOFError, KeyError, TypeError, zlib.error, zipfile.BadZipFile) as error:
        raise DatasetError(f"{path}: is no readable .npz file, it is damaged or something else: {error}") from error


def _images(path: Path, name: str, images: npt.NDArray[Any], num_axes: int) -> npt.NDArray[Any]:
    dims = num_axes + 2
    if images.ndim == dims - 1:
        images = images[..., None]
    elif images.ndim == dims and images.shape[-1] not in _CHANNELS and images.shape[1] in _CHANNELS:
        images = np.moveaxis(images, 1, -1)
    if images.ndim != dims or images.shape[-1] not in _CHANNELS or images.size == 0:
        sides = ", ".join(_SIDES[num_axes])
        raise DatasetError(
            f"{path}: {name} has shape {images.shape}; expected (count, {sides}) or "
            f"(count, {sides}, channels), with 1, 3 or 4 channels and at least one image"
        )
    try:
        if num_axes != 2:  # pictures are bytes; others keep what their values mean
            unit_values(images[:0])
            return np.ascontiguousarray(images)
        return np.ascontiguousarray(bytes_of(images))
    except ValueError as error:
        raise DatasetError(f"{path}: {name} {error}") from error


def _labels(path: Path, name: str, labels: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1 or labels.size == 0 or labels.dtype.kind not in "iu" or labels.min() < 0:
        raise DatasetError(
            f"{path}: {name} has shape {labels.shape} and type {labels.dtype}; expected (count,) class numbers from 0"
        )
    return labels.astype(np.int64)
