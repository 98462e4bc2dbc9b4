"""Random variation of training images, decided once for the whole image and alike on all ranks; mixup.

The augmentation of a sample follows from (seed, epoch, sample) alone, and each output pixel from the same pixel of the
input. Ranks with tiles of one image agree without communication.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

from mpi4dl.datasets.base import DatasetError, Values

# Keeps random numbers for several purposes apart where their seeds are equal.
AUGMENT_STREAM, SHUFFLE_STREAM, MIXUP_STREAM, TRANSFORM_STREAM, DATASET_STREAM = 1, 2, 3, 4, 5

NUM_DRAWN = 19  # random numbers of a sample; more of them leave the first ones as they are

_LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601, as in PIL's conversion to grey
_GREY = 127.5


@dataclass(frozen=True)
class Variation:
    """The augmentation of one image. The default is what validation does: the centre, and nothing else.

    `crop` is the share of each side that a resized image shows. `down` and `across` in [0, 1] place the crop, of
    resized images and of slides, and `deep` that of volumes. The image is flipped, then turned by so many
    `quarter_turns` counterclockwise, as `np.rot90` does. `stains` are the numbers of `stain_variation`; (): none.
    `brightness`, `contrast` and `saturation` are factors. Before all this the crop is turned by so many `degrees`
    counterclockwise, and enlarged by `scale`. `key` is (seed, epoch, sample), and the number of the repeat
    if there is one: a transform of the user's draws by it. In validation it is empty.
    """

    crop: float = 1.0
    down: float = 0.5
    across: float = 0.5
    flip_rows: bool = False
    flip_cols: bool = False
    brightness: float = 1.0
    contrast: float = 1.0
    saturation: float = 1.0
    deep: float = 0.5
    flip_depth: bool = False
    quarter_turns: int = 0
    stains: tuple[float, ...] = ()
    degrees: float = 0.0
    scale: float = 1.0
    key: tuple[int, ...] = field(default=(), compare=False)

    def places(self, num_axes: int) -> tuple[float, ...]:
        """Where the crop is along each of the axes of an image of so many."""
        return (self.deep, self.down, self.across)[-num_axes:]

    def flips(self, num_axes: int) -> tuple[bool, ...]:
        """Which of them are mirrored, before rows and columns are swapped if the image is `transposed`.

        A quarter turn mirrors columns and transposes, a half turn mirrors both.
        """
        rows, cols = self.quarter_turns in (2, 3), self.quarter_turns in (1, 2)
        return (self.flip_depth, self.flip_rows != rows, self.flip_cols != cols)[-num_axes:]

    @property
    def moves(self) -> bool:
        """Whether pixels come from places between pixels."""
        return (self.degrees, self.scale) != (0.0, 1.0)

    @property
    def transposed(self) -> bool:
        """Whether rows and columns are swapped."""
        return self.quarter_turns % 2 == 1


@dataclass(frozen=True)
class Augmentation:
    """From which ranges a `Variation` is drawn; images that are cropped are also cropped at a random place.

    `crop` is the smallest share of each side that is kept where an image is resized (1: all of it). `flip_rows` turns
    half of the images upside down, `flip_cols` mirrors half of them left to right, `flip_depth` turns half of the
    volumes front to back. `turns` of 4 turn by 0, 90, 180 or 270 degrees, of 2 by 0 or 180, alike often. A colour
    strength s draws its factor from [1 - s, 1 + s]. With a strength s of `stains` the concentration of each stain gets
    such a factor, too, and then something from [-s, s] is added. Small rotations are by up to `degrees` in both
    directions, and scales from `scale`, the least and the most.

    Raises:
        ValueError: a strength outside [0, 1], a `crop` outside (0, 1], other `turns`, or a scale that cannot be.
    """

    crop: float = 1.0
    flip_rows: bool = False
    flip_cols: bool = True
    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    flip_depth: bool = False
    turns: int = 1
    stains: float = 0.0
    degrees: float = 0.0
    scale: tuple[float, float] = (1.0, 1.0)

    def __post_init__(self) -> None:
        if self.turns not in (1, 2, 4):
            raise ValueError(f"turns={self.turns}: an image has 1, 2 or 4 of them")
        if not 0.0 < self.crop <= 1.0:
            raise ValueError(f"crop={self.crop}: the smallest share of a side to keep must be in (0, 1]")
        if not 0.0 < self.scale[0] <= self.scale[1]:
            raise ValueError(f"scale={self.scale}: needs the least scale, above 0, and the most")
        for name in ("brightness", "contrast", "saturation", "stains"):
            strength = getattr(self, name)
            if not 0.0 <= strength <= 1.0:
                raise ValueError(f"{name}={strength}: a strength must be in [0, 1]; 0 leaves the colours alone")

    def draw(self, seed: int, epoch: int, index: int, repeat: int = 0) -> Variation:
        """The augmentation of sample `index` in `epoch`, at its `repeat`-th occurrence, counted from 0.

        It is the same on every rank, in every order.
        """
        key = (seed, epoch, index, repeat) if repeat else (seed, epoch, index)
        # Every number is drawn whether it is used or not, so that one option does not change another's numbers.
        u = np.random.default_rng((AUGMENT_STREAM, *key)).random(NUM_DRAWN).tolist()
        return Variation(
            crop=1.0 - (1.0 - self.crop) * u[0],
            down=u[1],
            across=u[2],
            flip_rows=self.flip_rows and u[3] < 0.5,
            flip_cols=self.flip_cols and u[4] < 0.5,
            brightness=_factor(self.brightness, u[5]),
            contrast=_factor(self.contrast, u[6]),
            saturation=_factor(self.saturation, u[7]),
            deep=u[8],
            flip_depth=self.flip_depth and u[9] < 0.5,
            quarter_turns=int(self.turns * u[10]) * (4 // self.turns) % 4,
            stains=tuple(self.stains * (2.0 * x - 1.0) + (n < 3) for n, x in enumerate(u[11:17]))
            if self.stains
            else (),
            degrees=self.degrees * (2.0 * u[17] - 1.0),
            scale=self.scale[0] + (self.scale[1] - self.scale[0]) * u[18],
            key=key,
        )


def _factor(strength: float, u: float) -> float:
    return 1.0 + strength * (2.0 * u - 1.0)


def vary_colour(
    pixels: Values,
    variation: Variation,
    mean: Sequence[float] = (),
    out: npt.NDArray[np.float32] | None = None,
) -> npt.NDArray[np.float32]:
    """The planes of an image with its colours changed.

    Of bytes saturation, then contrast about mid-grey, then brightness are changed, and the result is limited to
    [0, 255] once. Floating point has neither a grey nor limits: its contrast changes about `mean`.

    Takes (rows, columns, channels), returns float32 (channels, rows, columns), in `out` if given; of volumes and
    sequences likewise.

    Raises:
        ValueError: a saturation other than 1 for bytes that have not three channels.
    """
    planes = np.empty((pixels.shape[-1], *pixels.shape[:-1]), np.float32) if out is None else out
    planes[...] = np.moveaxis(pixels, -1, 0)
    if (variation.brightness, variation.contrast, variation.saturation) == (1.0, 1.0, 1.0):
        return planes
    gain = np.float32(variation.brightness * variation.contrast)
    if pixels.dtype != np.uint8:
        planes *= gain
        for plane, middle in zip(planes, mean, strict=True):
            plane += np.float32(variation.brightness * middle * (1.0 - variation.contrast))
        return planes
    offset = np.float32(variation.brightness * _GREY * (1.0 - variation.contrast))
    if variation.saturation == 1.0:
        planes *= gain
    elif len(planes) == 3:
        # Written out plane by plane: a matrix product may round differently for tiles of different sizes.
        red, green, blue = (plane * np.float32(weight) for plane, weight in zip(planes, _LUMA, strict=True))
        grey = (red + green + blue) * (gain * np.float32(1.0 - variation.saturation))
        planes *= gain * np.float32(variation.saturation)
        planes += grey
    else:
        raise ValueError(f"saturation needs images of 3 channels, these have {len(planes)}: set saturation=0")
    planes += offset
    return np.clip(planes, 0.0, 255.0, out=planes)


# Mixup: training on weighted means of two images and of their labels, alike on all ranks.
#
# Zhang et al., mixup: Beyond Empirical Risk Minimization, ICLR 2018: x = s a + (1 - s) b, with s ~ Beta(alpha, alpha)
# for a batch, and b the images of the batch in another order. The mean is taken pixel by pixel, so a rank that reads a
# box of an image reads the same box of its partner, wherever else that lies.


class Blend(NamedTuple):
    """Each sample of a batch counts `share`, and the one at its place in `partners`, a position, the rest."""

    share: float
    partners: tuple[int, ...]


@dataclass(frozen=True)
class Mixup:
    """Mixes by shares from Beta(`alpha`, `alpha`); labels that are a class become shares of `num_classes` classes.

    Raises:
        DatasetError: an alpha that is not above 0.
    """

    alpha: float
    num_classes: int
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.alpha > 0:
            raise DatasetError(f"mixup={self.alpha}: the parameter of the Beta distribution must be above 0")

    def draw(self, epoch: int, indices: tuple[int, ...]) -> Blend:
        """How the batch of these samples is mixed: the same on every rank, and whenever the batch is read."""
        random = np.random.default_rng((MIXUP_STREAM, self.seed, epoch, *indices))
        share = float(random.beta(self.alpha, self.alpha))
        return Blend(share, tuple(random.permutation(len(indices)).tolist()))

    def labels(self, labels: torch.Tensor, blend: Blend) -> torch.Tensor:
        """The labels of the mixed batch: floating point, (N, classes) where labels were classes."""
        if labels.dim() == 1 and not labels.is_floating_point():
            labels = F.one_hot(labels, self.num_classes)
        whole = labels.to(torch.get_default_dtype())
        return blend.share * whole + (1.0 - blend.share) * whole[list(blend.partners)]
