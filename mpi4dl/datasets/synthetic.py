"""Images computed from a formula: any number, any size, no files, and labels that can be learnt."""

from math import cos, pi, sin

import numpy as np
import numpy.typing as npt

from mpi4dl.datasets.base import DatasetError, Image, Pixels
from mpi4dl.geometry import Interval

# Everything is integer arithmetic on global coordinates, so a tile cannot differ from the whole by rounding.
_PHASES = 256
_STRIPE_PERIOD_PX = 12
_WAVE = np.round(80 * np.sin(2 * pi * np.arange(_PHASES) / _PHASES)).astype(np.int16)
_NOISE_BITS = 6


class Synthetic:
    """Noisy stripes whose direction and tint tell the class; class i % num_classes for image i.

    Raises:
        DatasetError: no images, fewer than two classes, or an empty size.
    """

    channels = 3

    def __init__(self, length: int, size: tuple[int, int], num_classes: int = 10, seed: int = 0) -> None:
        if length < 1 or num_classes < 2 or min(size) < 1:
            asked = f"{length} synthetic images of {size[0]} x {size[1]} pixels in {num_classes} classes"
            raise DatasetError(f"{asked}: needs at least 1 image, 1 x 1 pixels and 2 classes")
        self.classes = tuple(f"class {i}" for i in range(num_classes))
        self._length, self._size, self._seed = length, size, seed

    def __len__(self) -> int:
        return self._length

    def name(self, index: int) -> str:
        return str(index)

    def label(self, index: int) -> int:
        return index % len(self.classes)

    def image(self, index: int) -> Image:
        return _Stripes(self._size, self.label(index), len(self.classes), (self._seed, index))


class _Stripes:
    def __init__(self, size: tuple[int, int], label: int, num_classes: int, key: tuple[int, int]) -> None:
        self.height, self.width = size
        random = np.random.default_rng(key)
        self._start = int(random.integers(_PHASES))
        self._keys = [np.uint32(k) for k in random.integers(1 << 32, size=2)]
        angle, frequency = pi * label / num_classes, _PHASES / _STRIPE_PERIOD_PX
        self._down, self._across = round(frequency * sin(angle)), round(frequency * cos(angle))
        self._tint = [round(32 * cos(2 * angle + 2 * pi * channel / 3)) for channel in range(3)]

    def read(self, rows: Interval, cols: Interval) -> Pixels:
        row, col = np.arange(*rows, dtype=np.int64)[:, None], np.arange(*cols, dtype=np.int64)
        stripes = _WAVE[(self._start + self._down * row + self._across * col) % _PHASES]
        noise = _mix(_mix(row.astype(np.uint32) + self._keys[0]) ^ _mix(col.astype(np.uint32) + self._keys[1]))
        pixels = np.empty((rows.length, cols.length, 3), np.uint8)
        for channel, tint in enumerate(self._tint):
            # Bytes 0, 1, 2 of one hash are the noise of the three channels.
            grain = (noise >> np.uint32(8 * channel)).astype(np.uint8) >> (8 - _NOISE_BITS)
            pixels[..., channel] = np.clip(stripes + (96 + tint) + grain, 0, 255)
        return pixels


def _mix(words: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Scatter integers over all 32 bits: the finaliser of MurmurHash3."""
    words = words ^ (words >> np.uint32(16))
    words = words * np.uint32(0x85EBCA6B)
    words = words ^ (words >> np.uint32(13))
    words = words * np.uint32(0xC2B2AE35)
    return words ^ (words >> np.uint32(16))
