"""A dataset as PyTorch's DataLoader takes it, sample by sample: whole images, of which boxes are cut."""

import copy
import zlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import PIL.Image
import torch

from mpi4dl.datasets.base import IGNORED, DatasetError, WholeImage
from mpi4dl.datasets.colour import rgb_of_pillow
from mpi4dl.datasets.masks import IGNORE_INDEX, indices_of
from mpi4dl.datasets.randomness import DatasetRandomness

MOST_CHANNELS = 4
_KEPT = 4  # samples, of which the label was asked for and the image comes next


class MappedSamples:
    """`whole[index]` is (image, target), or a mapping with "image" and "label", as MONAI and Hugging Face have it.

    Random parts of it are drawn by a key, alike on all ranks, in the main thread: see randomness.py.

    Images are of Pillow, or tensors (channels, rows, columns), or arrays with channels last; bytes, or floating point
    whose range is 0 to 1. A picture of Pillow as the target is a mask, whose 255 is ignored.

    Raises:
        DatasetError: a sample is something else.
    """

    def __init__(self, whole: Any) -> None:
        self._whole, self._kind = whole, type(whole).__name__
        self.randomness = DatasetRandomness(whole)
        self._key: tuple[int, ...] = ()
        self._of_key = lru_cache(_KEPT)(self._load)
        self._labels: dict[int, Any] = {}
        targets = getattr(whole, "targets", None)
        # A transform of targets would be left out.
        if isinstance(targets, list | np.ndarray | torch.Tensor) and not getattr(whole, "target_transform", None):
            given = targets.tolist() if isinstance(targets, np.ndarray | torch.Tensor) else targets
            if len(given) == len(whole) and all(type(target) is int for target in given):
                self._labels = dict(enumerate(given))
        named = getattr(whole, "classes", None)
        if not named:
            counted = getattr(whole, "num_classes", 0)
            named = tuple(map(str, range(counted))) if isinstance(counted, int) else ()
        self.classes = tuple(named)
        if hasattr(whole, "task"):
            self.task = whole.task
        self.channels: int = self._sample(0)[0].shape[-1]

    def __len__(self) -> int:
        return len(self._whole)

    def drawn(self, key: tuple[int, ...]) -> "MappedSamples":
        """The samples as they are drawn by a key."""
        other = copy.copy(self)
        other._key = key
        return other

    def forget(self) -> None:
        """Ask for samples anew."""
        self._of_key.cache_clear()

    def label(self, index: int) -> Any:
        if index in self._labels:
            return self._labels[index]
        label = self._sample(index)[1]
        if np.ndim(label) < 2 and not self.randomness.drawn:
            self._labels[index] = label
        return label

    def image(self, index: int) -> "_Sample":
        return _Sample(self._sample(index)[0])

    def _sample(self, index: int) -> tuple[npt.NDArray[Any], Any]:
        return self._of_key(index, self._key)

    def _load(self, index: int, key: tuple[int, ...]) -> tuple[npt.NDArray[Any], Any]:
        with self.randomness.seeded(*key, index):
            return self._loaded(index)

    def _loaded(self, index: int) -> tuple[npt.NDArray[Any], Any]:
        found = self._whole[index]
        if isinstance(found, Mapping) and {"image", "label"} <= set(found):
            found = (found["image"], found["label"])
        if not isinstance(found, tuple | list) or len(found) != 2:
            what = f"{len(found)} things" if isinstance(found, tuple | list) else f"a {type(found).__name__}"
            raise DatasetError(f"the dataset {self._kind} gives {what} as sample {index}: expected (image, target)")
        return self._pixels(found[0], index), self._target(found[1], index)

    def _pixels(self, found: Any, index: int) -> npt.NDArray[Any]:
        if isinstance(found, PIL.Image.Image):
            return rgb_of_pillow(found)
        if isinstance(found, torch.Tensor):
            pixels = found.detach().cpu().numpy()
            pixels = pixels[..., None] if pixels.ndim == 2 else np.moveaxis(pixels, 0, -1)
        elif isinstance(found, np.ndarray):
            pixels = found[..., None] if found.ndim == 2 else found
            if pixels.shape[-1] > MOST_CHANNELS >= pixels.shape[0]:
                pixels = np.moveaxis(pixels, 0, -1)
        else:
            raise DatasetError(
                f"the dataset {self._kind} gives a {type(found).__name__} as image {index}: expected one of Pillow, a "
                "tensor (channels, rows, columns), or an array (rows, columns, channels)"
            )
        if not 3 <= pixels.ndim <= 4 or pixels.size == 0 or pixels.dtype.kind not in "biuf":
            raise DatasetError(
                f"the dataset {self._kind} gives an image {index} of {pixels.dtype} and shape {tuple(found.shape)}: "
                "expected numbers, as (channels, rows, columns) of a tensor, or with channels last of an array"
            )
        return pixels

    def _target(self, found: Any, index: int) -> Any:
        if isinstance(found, PIL.Image.Image):
            if found.mode not in ("1", "L", "P", "I", "I;16"):
                raise DatasetError(
                    f"the dataset {self._kind} gives a picture in colours ({found.mode}) as the target of sample "
                    f"{index}: a mask is grey or has a palette, of numbers of classes"
                )
            mask = indices_of(found).astype(np.int64)
            return np.where(mask == IGNORE_INDEX, IGNORED, mask)
        if isinstance(found, Mapping | str) or found is None:
            raise DatasetError(
                f"the dataset {self._kind} gives a {type(found).__name__} as the target of sample {index}: expected a "
                "class from 0 on, numbers, or a mask"
            )
        return found.detach().cpu() if isinstance(found, torch.Tensor) else found


class _Sample(WholeImage):
    """The image of a sample, which ranks compare by its `digest`."""

    @property
    def digest(self) -> int:
        return zlib.crc32(np.ascontiguousarray(self._pixels).data)
