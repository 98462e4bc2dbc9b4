"""How a sample becomes an image of the training size, of which any rank reads its own box."""

from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from mpi4dl.datasets import fit
from mpi4dl.datasets.augment import Augmentation, Variation, vary_colour
from mpi4dl.datasets.base import IGNORED, Image, MaskImage, Values
from mpi4dl.datasets.transforms import Pointwise
from mpi4dl.geometry import Interval

Fit = Literal["resize", "crop"]

# Per-channel mean and standard deviation of ImageNet, for values in [0, 1]: what published weights were trained with.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

# By name, (mean, standard deviation) of each of three channels, or of any channel.
NORMALISATIONS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "imagenet": (IMAGENET_MEAN, IMAGENET_STD),
    "half": ((0.5,), (0.5,)),
}

MASK_ROWS = 1024  # so many rows of a mask are decoded at once


@dataclass(frozen=True)
class View:
    """The frame of `size` (height, width) pixels in which every sample is shown, and how it is normalised.

    Volumes have a size of three numbers, the depth first, sequences one. `mean` and `std` are of values between 0 and
    1: of bytes over 255, of other integers over the largest of their type, of floating point as it is. `transform` is
    what the user does to pixels before.

    `fit` says how an image, of whatever format, fills it: "resize" to exactly this size, or "crop" a window of this
    size (padded where the image is smaller, pictures with white, others with 0). Without an `augmentation` the view is
    the centre, unchanged: what validation wants.

    Raises:
        ValueError: a size, a fit, or a mean and std that cannot be.
    """

    size: tuple[int, ...]
    fit: Fit = "resize"
    augmentation: Augmentation | None = None
    seed: int = 0
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    transform: Pointwise | None = None

    def __post_init__(self) -> None:
        if min(self.size) < 1:
            raise ValueError(f"size={self.size}: each side must be at least 1 pixel")
        if self.fit not in get_args(Fit):
            raise ValueError(f"fit={self.fit!r}: expected one of {', '.join(get_args(Fit))}")
        if len(self.mean) != len(self.std) or min(self.std) <= 0:
            raise ValueError(f"mean={self.mean}, std={self.std}: one of each per channel, and every std above 0")

    def variation(self, index: int, epoch: int, repeat: int = 0) -> Variation:
        """What happens to sample `index` in `epoch`, where it comes for the `repeat`-th time, from 0 on."""
        return self.augmentation.draw(self.seed, epoch, index, repeat) if self.augmentation else Variation()

    def key(self, epoch: int, repeat: int = 0) -> tuple[int, ...]:
        """By what a dataset that varies its samples at random draws; in validation each time the same."""
        return (self.seed, epoch, repeat) if self.augmentation else ()

    def tile(
        self,
        image: Image,
        *space: Interval,
        variation: Variation | None = None,
        out: npt.NDArray[np.float32] | None = None,
    ) -> npt.NDArray[np.float32]:
        """A box of the varied, normalised image: float32, (channels, rows, columns), in `out` if there is one.

        Tiles join without a seam.

        Raises:
            BadImage: the file cannot be decoded.
            ValueError: the box lies outside the frame, or mean and std are for another number of channels.
        """
        pixels, variation = self.pixels(image, *space, variation=variation), variation or Variation()
        if self.transform is not None:
            pixels = self.transform(pixels, variation.key)
        if pixels.shape[-1] != len(self.mean):
            raise ValueError(f"mean={self.mean} is for {len(self.mean)} channels, the image has {pixels.shape[-1]}")
        planes, top = vary_colour(pixels, variation, self.mean, out), 255.0 if pixels.dtype == np.uint8 else 1.0
        for plane, mean, std in zip(planes, self.mean, self.std, strict=True):
            plane *= np.float32(1.0 / (top * std))
            plane -= np.float32(mean / std)
        return planes

    def pixels(self, image: Image, *space: Interval, variation: Variation | None = None) -> Values:
        """A box of the fitted and flipped image, its colours untouched, (rows, columns, channels), as `Image.read`."""
        num_axes, variation = len(self.size), variation or Variation()
        if len(space) != num_axes or len(image.size) != num_axes:
            raise ValueError(f"a box of {len(space)} and an image of {len(image.size)} axes, in a frame of {num_axes}")
        if not all(Interval(0, size).covers(interval) for size, interval in zip(self.size, space, strict=True)):
            frame = " x ".join(map(str, self.size))
            raise ValueError(f"the box {' x '.join(map(str, space))} lies outside the frame of {frame} pixels")
        flips, places = variation.flips(num_axes), variation.places(num_axes)
        turned = [
            Interval(size - interval.stop, size - interval.start) if flip else interval
            for size, interval, flip in zip(self.size, space, flips, strict=True)
        ]
        sides = list(zip(self.size, image.size, places, strict=True))
        if self.fit == "crop":
            pixels = fit.crop(image, [_corner(source - size, place) for size, source, place in sides], turned)
        else:
            frames = [_frame(size, source, variation.crop, place) for size, source, place in sides]
            pixels = fit.resize(image, frames, turned)
        return pixels[tuple(slice(None, None, -1 if flip else 1) for flip in flips)]

    def mask(self, mask: npt.NDArray[Any] | MaskImage, variation: Variation | None = None) -> npt.NDArray[Any]:
        """What an image's mask, (..., height, width) of the image, is beside the varied image: (..., *size).

        It is cropped, resized and flipped with its image; resizing takes the nearest value, since a mean of two classes
        is none of them. Where a crop reaches beyond the image, integers are -100, which PyTorch's losses ignore, and
        floating point is not-a-number. Of a mask that is read, it is the part that is shown.

        Raises:
            BadImage: the file of a mask cannot be decoded.
        """
        variation, num_axes = variation or Variation(), len(self.size)
        sides = mask.shape[-num_axes:] if isinstance(mask, np.ndarray) else mask.size
        places, flips = variation.places(num_axes), variation.flips(num_axes)
        sources = [
            self._sources(size, source, place, variation)[:: -1 if flip else 1]
            for size, source, place, flip in zip(self.size, sides, places, flips, strict=True)
        ]
        insides = [(found >= 0) & (found < source) for found, source in zip(sources, sides, strict=True)]
        clipped = [np.clip(found, 0, source - 1) for found, source in zip(sources, sides, strict=True)]
        places_of: tuple[Any, ...] = (Ellipsis, *np.ix_(*clipped))
        shown = mask[places_of] if isinstance(mask, np.ndarray) else _picked(mask, clipped)
        inside = reduce(np.logical_and, np.meshgrid(*insides, indexing="ij", sparse=True))
        return shown if inside.all() else np.where(inside, shown, IGNORED if shown.dtype.kind == "i" else np.nan)

    def _sources(self, size: int, source: int, position: float, variation: Variation) -> npt.NDArray[np.int64]:
        """Which row, or column, of the source is nearest to each one of the frame; there may be none."""
        if self.fit == "crop":
            return np.arange(size) + _corner(source - size, position)
        frame = _frame(size, source, variation.crop, position)
        return np.minimum(np.floor(frame.start + (np.arange(size) + 0.5) * frame.scale).astype(np.int64), source - 1)


def _picked(mask: MaskImage, places: list[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    """The pixels of a mask at these places along each axis, of which few more are in memory at once than are wanted."""
    first, *others = places
    space = [Interval(int(where.min()), int(where.max()) + 1) for where in others]
    inner = np.ix_(*(where - interval.start for where, interval in zip(others, space, strict=True)))
    shown = np.empty([len(where) for where in places], np.int64)
    at_once = max(1, MASK_ROWS * len(first) // (int(first.max()) - int(first.min()) + 1))
    for start in range(0, len(first), at_once):
        rows = first[start : start + at_once]
        part = mask.read(Interval(int(rows.min()), int(rows.max()) + 1), *space)
        shown[start : start + at_once] = part[rows - rows.min()][(slice(None), *inner)]
    return shown


def _corner(free_px: int, position: float) -> int:
    """Where a window begins that has this much room to move; a negative room is padding, shared by both sides."""
    if free_px < 0:
        return -(-free_px // 2)
    return min(free_px, int(position * (free_px + 1)))


def _frame(size: int, source: int, share: float, position: float) -> fit.Frame:
    shown = source * share
    return fit.Frame(size, position * (source - shown), shown / size)
