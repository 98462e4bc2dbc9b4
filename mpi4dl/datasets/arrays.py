"""Images that need no decoder: arrays and .npz files, CIFAR's batches, and synthetic images from a formula."""

import hashlib
import pickle
from functools import reduce
from math import cos, pi, sin
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mpi4dl._files import open_regular
from mpi4dl.datasets.base import DatasetError, FunctionImage, Image, Pixels, Whole, WholeImage, blaming, unit_values
from mpi4dl.datasets.colour import bytes_of
from mpi4dl.datasets.files import check_unpacked
from mpi4dl.datasets.listed import text_of
from mpi4dl.geometry import Interval

NPZ_LAYOUT = "expected arrays x_train, y_train, x_test, y_test, or x, y"
_NAMES = ("x", "y", "x_train", "y_train", "x_test", "y_test")
_VALIDATION = ("x_val", "x_valid", "x_validation")
_CHANNELS = (1, 3, 4)
_SIDES = {1: ("length",), 2: ("height", "width"), 3: ("depth", "height", "width")}


class ArrayDataset(Whole):
    """Images (count, height, width, channels), or with other axes of space, and their labels (count,)."""

    in_memory = True

    def __init__(self, images: npt.NDArray[Any], labels: npt.NDArray[np.int64], classes: tuple[str, ...]) -> None:
        self.classes = classes
        self.channels: int = images.shape[-1]
        self._images, self._labels = images, labels

    def __len__(self) -> int:
        return len(self._images)

    def digest(self) -> str:
        """A digest that differs where images or labels differ."""
        found = hashlib.blake2b(self._labels.tobytes(), digest_size=8)
        for image in self._images:
            found.update(np.ascontiguousarray(image).data)
        return f"{self._images.shape} {found.hexdigest()}"

    @property
    def strata(self) -> list[int]:
        """The class of each image."""
        return self._labels.tolist()

    def label(self, index: int) -> int:
        return int(self._labels[index])

    def label_as_text(self, index: int) -> str | None:
        """The class of an image."""
        return text_of(self.label(index), self.classes)

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
    if not path.exists():
        raise DatasetError(f"{path}: no such file; {NPZ_LAYOUT}")
    with (
        blaming(path, "is no readable .npz file, it is damaged or something else"),
        open_regular(path) as stream,  # NumPy leaves a damaged file open where it opened it itself
        np.load(stream, allow_pickle=False) as file,
    ):
        names = [name for name in file.files if name in _NAMES]
        other = next((name for name in file.files if name in _VALIDATION), None)
        if other is not None:
            raise DatasetError(f"{path}: has {other}, but x_test validates: call it x_test, and move what is for tests")
        check_unpacked(path, file, names)
        return {name: file[name] for name in names}


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


# Read CIFAR-10 and CIFAR-100 from the folder of pickled batches that their authors distribute.
#
# A pickle can run any code when it is loaded. These need only NumPy's array constructor, so nothing else is let in.

_TEN = [f"data_batch_{i}" for i in range(1, 6)]
_SIZE_PX = 32


def is_cifar(folder: Path) -> bool:
    return (folder / "batches.meta").is_file() or (folder / "meta").is_file()


def load_cifar(folder: Path) -> tuple[ArrayDataset, ArrayDataset]:
    """The training and the test images of `cifar-10-batches-py` or `cifar-100-python`.

    Raises:
        DatasetError: a file is missing, damaged, or not what CIFAR's are.
    """
    if (folder / "batches.meta").is_file():
        meta, training, test_files = "batches.meta", _TEN, ["test_batch"]
        label_key, names_key = b"labels", b"label_names"
    else:
        meta, training, test_files = "meta", ["train"], ["test"]
        label_key, names_key = b"fine_labels", b"fine_label_names"
    names = _load(folder / meta, names_key)[names_key]
    classes = tuple(name.decode() for name in names)
    train, test = ([folder / name for name in files] for files in (training, test_files))
    return _dataset(train, label_key, classes), _dataset(test, label_key, classes)


def _dataset(files: list[Path], label_key: bytes, classes: tuple[str, ...]) -> ArrayDataset:
    images, labels = [], []
    for file in files:
        batch = _load(file, b"data", label_key)
        rows, numbers = np.asarray(batch[b"data"]), np.asarray(batch[label_key])
        if rows.dtype != np.uint8 or rows.shape != (len(numbers), 3 * _SIZE_PX**2):
            wanted = f"({len(numbers)}, {3 * _SIZE_PX**2})"
            raise DatasetError(f"{file}: holds {rows.dtype} images of shape {rows.shape}; expected uint8 {wanted}")
        if numbers.size and not 0 <= numbers.min() <= numbers.max() < len(classes):
            raise DatasetError(f"{file}: has labels outside 0 to {len(classes) - 1}")
        images.append(rows.reshape(-1, 3, _SIZE_PX, _SIZE_PX).transpose(0, 2, 3, 1))
        labels.append(numbers.astype(np.int64))
    return ArrayDataset(np.ascontiguousarray(np.concatenate(images)), np.concatenate(labels), classes)


class _ArraysOnly(pickle.Unpickler):
    """Loads built-in containers and NumPy arrays; refuses every other class and function."""

    def find_class(self, module: str, name: str) -> Any:
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            return lambda kind, shape, code: np.ndarray(shape, code.decode())
        if module == "numpy" and name == "dtype":
            # The files of 2009 pass 0 and 1 where NumPy now insists on False and True.
            return lambda code, *flags: np.dtype(code.decode() if isinstance(code, bytes) else code, *map(bool, flags))
        if module == "numpy" and name == "ndarray":
            return np.ndarray
        raise pickle.UnpicklingError(f"asks for {module}.{name}, which no CIFAR file needs")


def _load(file: Path, *keys: bytes) -> dict[bytes, Any]:
    if not file.exists():
        raise DatasetError(f"{file}: no such file, although CIFAR has it: unpack the archive again")
    with blaming(file, "is no readable CIFAR batch"), open_regular(file) as stream:
        content = _ArraysOnly(stream, encoding="bytes").load()
    missing = [key.decode() for key in keys if not isinstance(content, dict) or key not in content]
    if missing:
        raise DatasetError(f"{file}: has no {', '.join(missing)}, as CIFAR's files have: unpack the archive again")
    return content


# Images computed from a formula: any number, any size, no files, and labels that can be learnt.

# Everything is integer arithmetic on global coordinates, so a tile cannot differ from the whole by rounding.
_PHASES = 256
_STRIPE_PERIOD_PX = 12
_WAVE = np.round(80 * np.sin(2 * pi * np.arange(_PHASES) / _PHASES)).astype(np.int16)
_NOISE_BITS = 6


class Synthetic(Whole):
    """Noisy stripes whose direction and tint tell the class; class i % num_classes for image i.

    In a volume they lean along its depth too; of a sequence it is how close they are that tells the class.

    Raises:
        DatasetError: no images, fewer than two classes, or an empty size.
    """

    channels = 3

    def __init__(self, length: int, size: tuple[int, ...], num_classes: int = 10, seed: int = 0) -> None:
        if length < 1 or num_classes < 2 or min(size) < 1:
            asked = f"{length} synthetic images of {' x '.join(map(str, size))} pixels in {num_classes} classes"
            raise DatasetError(f"{asked}: needs at least 1 image, {' x '.join('1' * len(size))} pixels and 2 classes")
        self.classes = tuple(f"class {i}" for i in range(num_classes))
        self._length, self._size, self._seed = length, size, seed

    def __len__(self) -> int:
        return self._length

    def label(self, index: int) -> int:
        return index % len(self.classes)

    def image(self, index: int) -> Image:
        label, num_classes, dims = self.label(index), len(self.classes), len(self._size)
        random = np.random.default_rng((self._seed, index))
        start, keys = int(random.integers(_PHASES)), random.integers(1 << 32, size=max(2, dims)).astype(np.uint32)
        angle, frequency = pi * label / num_classes, _PHASES / _STRIPE_PERIOD_PX
        down, across = round(frequency * sin(angle)), round(frequency * cos(angle))
        steps = (round(frequency * sin(angle) / 2), down, across)[-dims:]
        steps = steps if dims > 1 else (_PHASES * (label + 1) // (_STRIPE_PERIOD_PX + num_classes),)

        def read(*space: Interval) -> Pixels:
            places = np.ix_(*(np.arange(*interval, dtype=np.int64) for interval in space))
            phases = sum(step * place for step, place in zip(steps, places, strict=True))
            stripes = _WAVE[(phases + start) % _PHASES]
            scattered = [scatter(place.astype(np.uint32) + key) for place, key in zip(places, keys, strict=False)]
            noise = scatter(reduce(np.bitwise_xor, scattered))
            pixels = np.empty((*noise.shape, 3), np.uint8)
            for channel in range(3):
                tint = round(32 * cos(2 * angle + 2 * pi * channel / 3))
                # Bytes 0, 1, 2 of one hash are the noise of the three channels.
                grain = (noise >> np.uint32(8 * channel)).astype(np.uint8) >> (8 - _NOISE_BITS)
                pixels[..., channel] = np.clip(stripes + (96 + tint) + grain, 0, 255)
            return pixels

        return FunctionImage(self._size, read)


def scatter(words: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Scatter integers over all 32 bits: the finaliser of MurmurHash3."""
    words = words ^ (words >> np.uint32(16))
    words = words * np.uint32(0x85EBCA6B)
    words = words ^ (words >> np.uint32(13))
    words = words * np.uint32(0xC2B2AE35)
    return words ^ (words >> np.uint32(16))
