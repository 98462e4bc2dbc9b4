"""Read CIFAR-10 and CIFAR-100 from the folder of pickled batches that their authors distribute.

A pickle can run any code when it is loaded. These need only NumPy's array constructor, so nothing else is let in.
"""

import pickle
from pathlib import Path
from typing import Any

import numpy as np

from mpi4dl.datasets.arrays import ArrayDataset
from mpi4dl.datasets.base import DatasetError
from mpi4dl.datasets.files import open_regular

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
    train, test = (_dataset([folder / name for name in files], label_key, classes) for files in (training, test_files))
    return train, test


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
            return _empty_array
        if module == "numpy" and name == "dtype":
            return _dtype
        if module == "numpy" and name == "ndarray":
            return np.ndarray
        raise pickle.UnpicklingError(f"asks for {module}.{name}, which no CIFAR file needs")


def _empty_array(kind: type, shape: tuple[int, ...], code: bytes) -> Any:
    return np.ndarray(shape, code.decode())


def _dtype(code: bytes | str, align: int = 0, copy: int = 0) -> np.dtype[Any]:
    # The files of 2009 pass 0 and 1 where NumPy now insists on False and True.
    return np.dtype(code.decode() if isinstance(code, bytes) else code, bool(align), bool(copy))


def _load(file: Path, *keys: bytes) -> dict[bytes, Any]:
    try:
        with open_regular(file) as stream:
            content = _ArraysOnly(stream, encoding="bytes").load()
    except FileNotFoundError as error:
        raise DatasetError(f"{file}: no such file, although CIFAR has it: unpack the archive again") from error
    except Exception as error:  # a damaged pickle makes the unpickler stumble in many ways
        raise DatasetError(f"{file}: is no readable CIFAR batch: {error}") from error
    missing = [key.decode() for key in keys if not isinstance(content, dict) or key not in content]
    if missing:
        raise DatasetError(f"{file}: has no {', '.join(missing)}, as CIFAR's files have: unpack the archive again")
    return content
