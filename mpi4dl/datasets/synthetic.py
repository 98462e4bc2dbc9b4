"""Images computed from a formula: any number, any size, no files, and labels that can be learnt."""

from functools import reduce
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

    def name(self, index: int) -> str:
        return str(index)

    def label(self, index: int) -> int:
        return index % len(self.classes)

    def image(self, index: int) -> Image:
        return _Stripes(self._size, self.label(index), len(self.classes), (self._seed, index))


class _Stripes:
    def __init__(self, size: tuple[int, ...], label: int, num_classes: int, key: tuple[int, int]) -> None:
        self.size = size
        random = np.random.default_rng(key)
        self._start = int(random.integers(_PHASES))
        dims = len(size)
        self._keys = [np.uint32(k) for k in random.integers(1 << 32, size=max(2, dims))]
        angle, frequency = pi * label / num_classes, _PHASES / _STRIPE_PERIOD_PX
        steps = (round(frequency * sin(angle) / 2), round(frequency * sin(angle)), round(frequency * cos(angle)))
        self._steps = steps[-dims:] if dims > 1 else (_PHASES * (label + 1) // (_STRIPE_PERIOD_PX + num_classes),)
        self._tint = [round(32 * cos(2 * angle + 2 * pi * channel / 3)) for channel in range(3)]

    def read(self, *space: Interval) -> Pixels:
        places = np.ix_(*(np.arange(*interval, dtype=np.int64) for interval in space))
        phases = sum(step * place for step, place in zip(self._steps, places, strict=True))
        stripes = _WAVE[(phases + self._start) % _PHASES]
        scattered = [_mix(place.astype(np.uint32) + key) for place, key in zip(places, self._keys, strict=False)]
        noise = _mix(reduce(np.bitwise_xor, scattered))
        pixels = np.empty((*noise.shape, 3), np.uint8)
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
