"""How a sample becomes an image of the training size, of which any rank reads its own box."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from mpi4dl.datasets import fit
from mpi4dl.datasets.augment import Augmentation, Variation, vary_colour
from mpi4dl.datasets.base import Image, Pixels
from mpi4dl.geometry import Interval

Fit = Literal["resize", "crop"]

# Per-channel mean and standard deviation of ImageNet, for values in [0, 1]: what published weights were trained with.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

IGNORED = -100  # the default of `ignore_index` in PyTorch's losses


@dataclass(frozen=True)
class View:
    """The frame of `size` (height, width) pixels in which every sample is shown, and how it is normalised.

    `fit` says how an image, of whatever format, fills it: "resize" to exactly this size, or "crop" a window of this
    size (padded with white where the image is smaller). Without an `augmentation` the view is the centre, unchanged:
    what validation wants.

    Raises:
        ValueError: a size, a fit, or a mean and std that cannot be.
    """

    size: tuple[int, int]
    fit: Fit = "resize"
    augmentation: Augmentation | None = None
    seed: int = 0
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD

    def __post_init__(self) -> None:
        if min(self.size) < 1:
            raise ValueError(f"size={self.size}: height and width must be at least 1 pixel")
        if self.fit not in get_args(Fit):
            raise ValueError(f"fit={self.fit!r}: expected one of {', '.join(get_args(Fit))}")
        if len(self.mean) != len(self.std) or min(self.std) <= 0:
            raise ValueError(f"mean={self.mean}, std={self.std}: one of each per channel, and every std above 0")

    def variation(self, index: int, epoch: int) -> Variation:
        """What happens to sample `index` in `epoch`."""
        return self.augmentation.draw(self.seed, epoch, index) if self.augmentation else Variation()

    def tile(
        self,
        image: Image,
        rows: Interval,
        cols: Interval,
        variation: Variation | None = None,
        out: npt.NDArray[np.float32] | None = None,
    ) -> npt.NDArray[np.float32]:
        """A box of the varied, normalised image: float32, (channels, rows, columns), in `out` if there is one.

        Tiles join without a seam.

        Raises:
            BadImage: the file cannot be decoded.
            ValueError: the box lies outside the frame, or mean and std are for another number of channels.
        """
        pixels = self.pixels(image, rows, cols, variation)
        if pixels.shape[2] != len(self.mean):
            raise ValueError(f"mean={self.mean} is for {len(self.mean)} channels, the image has {pixels.shape[2]}")
        planes = vary_colour(pixels, variation or Variation(), out)
        for plane, mean, std in zip(planes, self.mean, self.std, strict=True):
            plane *= np.float32(1.0 / (255.0 * std))
            plane -= np.float32(mean / std)
        return planes

    def pixels(self, image: Image, rows: Interval, cols: Interval, variation: Variation | None = None) -> Pixels:
        """A box of the fitted and flipped image, its colours untouched: uint8, (rows, columns, channels)."""
        height, width = self.size
        if not (Interval(0, height).covers(rows) and Interval(0, width).covers(cols)):
            raise ValueError(f"the box rows {rows}, columns {cols} lies outside the frame of {height} x {width} pixels")
        variation = variation or Variation()
        if variation.flip_rows:
            rows = Interval(height - rows.stop, height - rows.start)
        if variation.flip_cols:
            cols = Interval(width - cols.stop, width - cols.start)
        if self.fit == "crop":
            top = _corner(image.height - height, variation.down)
            left = _corner(image.width - width, variation.across)
            pixels = fit.crop(image, top, left, rows, cols)
        else:
            down = _frame(height, image.height, variation.crop, variation.down)
            across = _frame(width, image.width, variation.crop, variation.across)
            pixels = fit.resize(image, down, across, rows, cols)
        return pixels[:: -1 if variation.flip_rows else 1, :: -1 if variation.flip_cols else 1]

    def mask(self, mask: npt.NDArray[Any], variation: Variation | None = None) -> npt.NDArray[Any]:
        """What an image's mask, (..., height, width) of the image, is beside the varied image: (..., *size).

        It is cropped, resized and flipped with its image; resizing takes the nearest value, since a mean of two classes
        is none of them. Where a crop reaches beyond the image, integers are -100, which PyTorch's losses ignore, and
        floating point is not-a-number.
        """
        variation, (height, width) = variation or Variation(), self.size
        rows = self._sources(height, mask.shape[-2], variation.down, variation)
        cols = self._sources(width, mask.shape[-1], variation.across, variation)
        rows, cols = rows[:: -1 if variation.flip_rows else 1, None], cols[:: -1 if variation.flip_cols else 1]
        inside = (rows >= 0) & (rows < mask.shape[-2]) & (cols >= 0) & (cols < mask.shape[-1])
        shown = mask[..., np.clip(rows, 0, mask.shape[-2] - 1), np.clip(cols, 0, mask.shape[-1] - 1)]
        return shown if inside.all() else np.where(inside, shown, IGNORED if mask.dtype.kind == "i" else np.nan)

    def _sources(self, size: int, source: int, position: float, variation: Variation) -> npt.NDArray[np.int64]:
        """Which row, or column, of the source is nearest to each one of the frame; there may be none."""
        if self.fit == "crop":
            return np.arange(size) + _corner(source - size, position)
        frame = _frame(size, source, variation.crop, position)
        return np.minimum(np.floor(frame.start + (np.arange(size) + 0.5) * frame.scale).astype(np.int64), source - 1)


def _corner(free_px: int, position: float) -> int:
    """Where a window begins that has this much room to move; a negative room is padding, shared by both sides."""
    if free_px < 0:
        return -(-free_px // 2)
    return min(free_px, int(position * (free_px + 1)))


def _frame(size: int, source: int, share: float, position: float) -> fit.Frame:
    shown = source * share
    return fit.Frame(size, position * (source - shown), shown / size)
