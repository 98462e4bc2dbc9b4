"""The mean and the standard deviation of each channel of images, in float64.

Moments of parts are merged as by Chan et al. 1983, in the order of images, on any number of ranks.
"""

from collections.abc import Iterable
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mpi4dl.datasets.base import Image
from mpi4dl.datasets.colour import WHITE
from mpi4dl.geometry import Interval

STRIP_VALUES = 1 << 22  # read at a time


class ChannelMoments(NamedTuple):
    """Of each channel: how many pixels have data, their mean, and the sum of squared differences from it.

    In float64, as arrays or as tensors.
    """

    num_known: Any
    mean: Any
    squares: Any


def moments_of(image: Image, channels: int) -> ChannelMoments:
    """Those of an image with values of 0 to 1, as `View` normalises them. Raises BadImage."""
    first, *others = image.size
    step = max(1, STRIP_VALUES // max(1, prod(others) * channels))
    whole = [Interval(0, side) for side in others]
    return merged(_moments(image.read(strip, *whole)) for strip in Interval(0, first).strips(step))


def _moments(pixels: npt.NDArray[np.generic]) -> ChannelMoments:
    values = pixels.reshape(-1, pixels.shape[-1]).astype(np.float64)
    values /= WHITE if pixels.dtype == np.uint8 else 1
    known = ~np.isnan(values)
    count = known.sum(0).astype(np.float64)
    mean = np.where(known, values, 0).sum(0) / np.maximum(count, 1)
    return ChannelMoments(count, mean, np.where(known, (values - mean) ** 2, 0).sum(0))


def merged(parts: Iterable[ChannelMoments]) -> ChannelMoments:
    """The moments of all parts together, of which there is at least one."""
    count, mean, squares = next(parts := iter(parts))
    for part in parts:
        total = count + part.num_known
        share = part.num_known / (total + (total == 0))
        squares = squares + part.squares + (part.mean - mean) ** 2 * count * share
        count, mean = total, mean + (part.mean - mean) * share
    return ChannelMoments(count, mean, squares)
