"""How a sample becomes an image of the training size: resized or cropped, varied, and by a transform of the user's.

    a box of the frame -> resized or cropped -> turned a little and scaled -> flipped -> turned -> stains varied
    -> a transform of the user's -> transforms by name -> saturation, contrast, brightness -> normalised

Slides are normalised to a reference stain before, where they are read. Masks go the same way up to the turn.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import ceil, floor, prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import PIL.Image

from mpi4dl.datasets.affine import Affine, at_nearest, bilinear
from mpi4dl.datasets.augment import TRANSFORM_STREAM, Augmentation, Variation, vary_colour
from mpi4dl.datasets.base import IGNORED, DatasetError, FunctionImage, Image, Values
from mpi4dl.datasets.colour import WHITE
from mpi4dl.datasets.files import planes_of
from mpi4dl.datasets.randomness import DatasetRandomness
from mpi4dl.geometry import Interval, ceil_div

if TYPE_CHECKING:
    from mpi4dl.datasets.covariates import Covariate
    from mpi4dl.datasets.files import StoredPicture
    from mpi4dl.datasets.named import NamedTransform

# Make an image of any size fill a frame of the training size, by cropping or by resizing, one box at a time.
#
# Whatever box is asked for, its pixels are those that the whole frame has there. Pillow resizes pictures; volumes and
# sequences are resized here, by the same filter.

# A block of the resized frame is always computed as a whole, in the same way, so that rounding cannot depend on the box
# that was asked for. It shrinks for large reductions, to bound the source pixels that it is computed from.
BLOCK_PX = 256
BLOCK_SOURCE_PX = 4096
SLAB = 16  # of a volume, so many slices are resized at once
READ_AT_ONCE = 1 << 23  # pixels of a mask


class Frame(NamedTuple):
    """One axis of a frame: `size` pixels that show the source from `start` on, `scale` source pixels for each."""

    size: int
    start: float
    scale: float

    @property
    def block(self) -> int:
        return max(1, min(BLOCK_PX, floor(BLOCK_SOURCE_PX / self.scale)))

    def blocks(self, wanted: Interval) -> list[Interval]:
        """The blocks of the frame that a wanted interval touches."""
        return [each.intersect(Interval(0, self.size)) for each in wanted.blocks(self.block)]


def crop(image: Any, corner: Sequence[int], space: Sequence[Interval], outside: int | None = None) -> Any:
    """A box of the frame whose first pixel lies at `corner` of an image or a mask.

    Beyond the image all is `outside`; without one, pictures are white there, and anything else is 0.
    """
    sources = [interval.shift(first) for interval, first in zip(space, corner, strict=True)]
    inside = [source.intersect(Interval(0, size)) for source, size in zip(sources, image.size, strict=True)]
    part = image.read(*inside)
    lengths = tuple(interval.length for interval in space)
    if part.shape[: len(lengths)] == lengths:
        return part
    if outside is None:
        outside = WHITE if part.dtype == np.uint8 and part.ndim == 3 else 0
    pixels = np.full((*lengths, *part.shape[len(lengths) :]), outside, part.dtype)
    pixels[within(inside, sources)] = part
    return pixels


def resize(image: Image, frames: Sequence[Frame], space: Sequence[Interval]) -> Values:
    """A box of the image resized to a frame: linear along each axis and antialiased, as `PIL.Image.resize` does."""
    if len(frames) == 2:
        down, across = (frame.blocks(each) for frame, each in zip(frames, space, strict=True))
        strips = [np.concatenate([_resize_block(image, frames, (rows, cols)) for cols in across], 1) for rows in down]
        return np.concatenate(strips)[within(space, (down[0], across[0]))]
    first, *others = space
    slabs = first.strips(SLAB) or [first]
    return np.concatenate([_resize_slab(image, frames, (slab, *others)) for slab in slabs])


def _resize_slab(image: Image, frames: Sequence[Frame], space: Sequence[Interval]) -> npt.NDArray[np.float32]:
    taps = [_taps(*each) for each in zip(frames, space, image.size, strict=True)]
    part = image.read(*(Interval(int(where.min(initial=size)), int(where.max(initial=0)) + 1)
                        if where.size else Interval(0, 0)
                        for (where, _), size in zip(taps, image.size, strict=True)))  # fmt: skip
    values = part.astype(np.float32) / np.float32(WHITE) if part.dtype == np.uint8 else part.astype(np.float32)
    for axis, (where, weights) in enumerate(taps):
        # Sums tap by tap: a product of matrices may round differently for other boxes.
        taken, values = values, np.zeros((*values.shape[:axis], len(where), *values.shape[axis + 1 :]), np.float32)
        shape = [-1 if each == axis else 1 for each in range(values.ndim)]
        for at, weight in zip((where - where.min(initial=1 << 62)).T, weights.T, strict=True):
            values += taken.take(at, axis) * weight.reshape(shape)
    return values


def _taps(frame: Frame, wanted: Interval, limit: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """For each pixel of the frame the source pixels that it is made of, and their weights; the same in any box."""
    reach = max(1.0, frame.scale)
    centre = frame.start + (np.arange(*wanted, dtype=np.float64) + 0.5) * frame.scale
    where = np.floor(centre - reach).astype(np.int64)[:, None] + np.arange(ceil(2 * reach) + 1)
    weights = np.maximum(0.0, 1.0 - np.abs(where + 0.5 - centre[:, None]) / reach) * ((where >= 0) & (where < limit))
    weights /= weights.sum(1, keepdims=True)
    return np.clip(where, 0, limit - 1), weights.astype(np.float32)


def _resize_block(image: Image, frames: Sequence[Frame], block: Sequence[Interval]) -> Values:
    boxes, inner = [], list[tuple[float, float]]()
    for frame, each, side in zip(frames, block, image.size, strict=True):
        start, stop = (frame.start + at * frame.scale for at in each)
        reach = max(1.0, frame.scale)  # a triangle filter reads one output pixel more on both sides
        box = Interval(floor(start - reach), ceil(stop + reach)).intersect(Interval(0, side))
        boxes.append(box)
        inner.append((max(0.0, start - box.start), min(float(box.length), stop - box.start)))
    part, ((top, bottom), (left, right)) = image.read(*boxes), inner
    how: Any = (block[1].length, block[0].length), PIL.Image.Resampling.BILINEAR, (left, top, right, bottom)
    if part.shape[2] == 3 and part.dtype == np.uint8:
        return np.asarray(PIL.Image.fromarray(part).resize(*how))
    planes = [PIL.Image.fromarray(part[..., c]).resize(*how) for c in range(part.shape[2])]
    return np.stack([np.asarray(plane) for plane in planes], axis=2)


def nearest(
    read: Callable[..., npt.NDArray[Any]], places: Sequence[npt.NDArray[np.int64]], out: npt.NDArray[Any]
) -> None:
    """Put the pixels of a mask at these places, in order along each axis, into `out`; few of its rows at once."""
    first, *others = places
    space = [Interval(int(at[0]), int(at[-1]) + 1) for at in others]
    step = max(1, int(READ_AT_ONCE / prod(each.length for each in space) * len(first) / (first[-1] - first[0] + 1)))
    for start in range(0, len(first), step):
        rows = first[start : start + step]
        part = read(Interval(int(rows[0]), int(rows[-1]) + 1), *space)
        out[start : start + step] = part[np.ix_(rows - rows[0], *(at - at[0] for at in others))]


# A transform of the user's, pixel by pixel: what each rank may do to its own box of an image, alone.

_TRIED_PX = 6  # each side of what it is tried on
_TRIES = 8  # as so many samples
_PROBED_PX = 32  # at most so many along each side of a box are transformed a second time, as a part of it
_ROUNDED = 16  # pixels that may differ in the last bits, or 1 in 100: loops over short arrays round otherwise


class Pointwise:
    """A function of the pixels of a box, (rows, columns, channels), that makes as many of them.

    It is called with uint8, or float32 whose range is 0 to 1, of any box, and gives either. Each output pixel must
    follow from the same input pixel alone: a convolution, a histogram or a resize reads others, which are on other
    ranks. With a second argument it gets a random generator, which is the same for all boxes of a sample in an epoch,
    and None in validation: the same numbers must be drawn for a box of any size.

        def darker(pixels, random):
            return pixels if random is None else (pixels * random.uniform(0.8, 1.0)).astype(pixels.dtype)

    Raises:
        DatasetError: it is no such function.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name = getattr(function, "__qualname__", type(function).__name__)
        if not callable(function):
            raise DatasetError(f"the transform {function!r} cannot be called: it must be a function of pixels")
        try:
            takes = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty]
        except (ValueError, TypeError):  # a function in C, such as np.sqrt
            takes = []
        places = [p for p in takes if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        if len(places) > 2 or any(p.kind is p.KEYWORD_ONLY for p in takes):
            names = ", ".join(p.name for p in takes)
            raise DatasetError(f"the transform {self.name} takes {names}: expected pixels, or pixels and random")
        self._function, self._draws = function, len(places) == 2

    def __call__(self, pixels: Values, key: tuple[int, ...]) -> Values:
        """The pixels of a box as they become; `key` is that of the sample, or empty in validation.

        A part in the middle of the box is transformed alone, too, by the same random numbers. So what a transform does
        only now and then is found when it does it, however rarely that is, and from whatever generator it draws.

        Raises:
            DatasetError: the part differs.
        """
        shape = pixels.shape[:-1]
        sides = [min(max(1, n // 2), _PROBED_PX) for n in shape]
        part = tuple(slice((n - side) // 2, (n - side) // 2 + side) for n, side in zip(shape, sides, strict=True))
        alone = pixels[part].copy()
        made = self._made(pixels, key)
        if alone.size and alone.shape != pixels.shape and not _alike(self._made(alone, key), made[part]):
            raise DatasetError(
                f"the transform {self.name} makes of a box of pixels another one than of the whole image: what it "
                "makes of a pixel must follow from this pixel alone, and random numbers from its second argument, as "
                "many for a box of any size"
            )
        return made

    def _made(self, pixels: Values, key: tuple[int, ...]) -> Values:
        random = np.random.default_rng((TRANSFORM_STREAM, *key)) if key else None
        found = self._function(pixels, random) if self._draws else self._function(pixels)
        made = found if isinstance(found, np.ndarray) else np.asarray(found)
        if made.shape != pixels.shape or made.dtype.kind not in "uf" or (made.dtype.kind == "u" and made.itemsize > 1):
            raise DatasetError(
                f"the transform {self.name} makes {made.dtype} of shape {made.shape} from a box of shape "
                f"{pixels.shape}: it must make as many pixels, uint8 or floating point"
            )
        return made if made.dtype == np.uint8 else made.astype(np.float32)

    def check(self, num_axes: int, channels: int, pictures: bool = True) -> None:
        """Try it on a few pixels. Raises DatasetError if what it makes of a box is not what it makes of the whole."""
        random = np.random.default_rng(0)
        whole: npt.NDArray[Any] = random.integers(0, 256, (_TRIED_PX,) * num_axes + (channels,), np.uint8)
        whole = whole if pictures else (whole / 255).astype(np.float32)
        half, randomness = _TRIED_PX // 2, DatasetRandomness(self._function)
        boxes: list[Any] = [np.s_[:half], np.s_[half:], np.s_[..., :half, :], np.s_[..., -1:, :]]
        for key in ((), *((0, 0, number) for number in range(_TRIES))):
            with randomness.seeded(0):
                made = self._made(whole.copy(), key)
            if randomness.drawn:
                raise DatasetError(
                    f"the transform {self.name} draws from {' and '.join(sorted(randomness.drawn))}, which other ranks "
                    "draw from at other times, and in validation too: give it a second argument, `random`, and draw "
                    "from that"
                )
            if not all(np.array_equal(self._made(whole[box].copy(), key), made[box], equal_nan=True) for box in boxes):
                raise DatasetError(
                    f"the transform {self.name} makes of a box of pixels another one than of the whole image: what it "
                    "makes of a pixel must follow from this pixel alone, and be the same each time"
                )


def _alike(found: Values, expected: Values) -> bool:
    """Whether pixels are equal, but for the rounding of a few."""
    if found.dtype != expected.dtype:
        return False
    if found.dtype != np.uint8:
        return bool(np.isclose(found, expected, rtol=1e-5, atol=1e-6, equal_nan=True).all())
    far = np.abs(found.astype(np.int16) - expected)
    return int(far.max()) <= 1 and np.count_nonzero(far) <= max(_ROUNDED, far.size // 100)


Fit = Literal["resize", "crop", "pad", "own"]

STRIDE_PX = 32  # sides of images of their own size are multiples of it: the stride of most models


def as_fit(text: object) -> Fit:
    """A text as one of them; "resize" for any other, as in files of early versions."""
    return next((each for each in get_args(Fit) if each == text), "resize")


# Per-channel mean and standard deviation of ImageNet, for values in [0, 1]: what published weights were trained with.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

# By name, (mean, standard deviation) of each of three channels, or of any channel.
NORMALISATIONS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "imagenet": (IMAGENET_MEAN, IMAGENET_STD),
    "half": ((0.5,), (0.5,)),
}


@dataclass(frozen=True)
class View:
    """The frame of `size` (height, width) pixels in which every sample is shown, and how it is normalised.

    Volumes have a size of three numbers, the depth first, sequences one. `mean` and `std` are of values between 0 and
    1: of bytes over 255, of other integers over the largest of their type, of floating point as it is. `transform` is
    what the user does to pixels before, and `augment` are transforms by name of training images. Pixels without data
    are 0 after that.

    `fit` says how an image, of whatever format, fills it: "resize" to exactly this size, or "crop" a window of this
    size (padded where the image is smaller, pictures with white, others with 0), or "pad", where the image begins at
    the upper left corner and may not be larger. By "own" each image has a view of its own size, `for_image`, in which
    it is padded to multiples of `stride` px. Without an `augmentation` the view is the centre, unchanged, as in
    validation. By a quarter turn the image fills a frame whose last two sides are swapped, which is then turned; or
    patches of `patch` px, if given, are turned where they are. `covariates` are columns with cells beside a sample.

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
    patch: int | None = None
    augment: tuple["NamedTransform", ...] = ()
    covariates: tuple["Covariate", ...] = ()
    stride: int = STRIDE_PX

    def __post_init__(self) -> None:
        if min(self.size) < 1:
            raise ValueError(f"size={self.size}: each side must be at least 1 pixel")
        if self.fit not in FITTED:
            raise ValueError(f"fit={self.fit!r}: expected one of {', '.join(FITTED)}")
        if len(self.mean) != len(self.std) or min(self.std) <= 0:
            raise ValueError(f"mean={self.mean}, std={self.std}: one of each per channel, and every std above 0")

    def for_image(self, size: Sequence[int], variation: Variation | None = None) -> "View":
        """The view of an image of this size (height, width), which is varied."""
        if not self.own_sizes:
            return self
        sides = _swapped(size) if variation is not None and variation.transposed else size
        return replace(self, size=tuple(ceil_div(side, self.stride) * self.stride for side in sides), fit="pad")

    @property
    def own_sizes(self) -> bool:
        """Whether each image has a view of its own size."""
        return FITTED[self.fit].own_sizes

    def variation(self, index: int, epoch: int, repeat: int = 0) -> Variation:
        """The augmentation of sample `index` in `epoch`, at its `repeat`-th occurrence, counted from 0."""
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
        variation = variation or Variation()
        named = self.augment if variation.key else ()
        read = space if all(each.pointwise for each in named) else self._units(space)
        pixels = self.pixels(image, *read, variation=variation)
        if variation.stains:
            if pixels.dtype != np.uint8 or pixels.shape[-1] != 3:
                raise ValueError(
                    f"stains need pictures of 3 channels of bytes, these have {pixels.shape[-1]} of {pixels.dtype}: "
                    "set stains=0"
                )
            from mpi4dl.datasets.stains import stain_variation

            pixels = stain_variation(variation.stains)(pixels)  # type: ignore[arg-type]
        if self.transform is not None:
            pixels = self.transform(pixels, variation.key)
        for number, each in enumerate(named):
            if each.pointwise or self.patch is None:
                pixels = each(pixels, variation.key, number)
                continue
            made = np.empty_like(pixels)  # each whole patch draws for itself
            for row, col in product(*(range(0, length, self.patch) for length in pixels.shape[:2])):
                place = ((read[0].start + row) // self.patch, (read[1].start + col) // self.patch)
                unit = np.s_[row : row + self.patch, col : col + self.patch]
                made[unit] = each(pixels[unit], (*variation.key, *place), number)
            pixels = made
        if read != space:
            pixels = pixels[within(space, read)]
        if pixels.shape[-1] != len(self.mean):
            raise ValueError(f"mean={self.mean} is for {len(self.mean)} channels, the image has {pixels.shape[-1]}")
        planes, top = vary_colour(pixels, variation, self.mean, out), 255.0 if pixels.dtype == np.uint8 else 1.0
        for plane, mean, std in zip(planes, self.mean, self.std, strict=True):
            plane *= np.float32(1.0 / (top * std))
            plane -= np.float32(mean / std)
        if getattr(image, "gaps", False) and pixels.dtype != np.uint8:
            planes[np.isnan(planes)] = 0
        return planes

    def pixels(self, image: Image, *space: Interval, variation: Variation | None = None) -> Values:
        """A box of the fitted, flipped and turned image, its colours untouched, (rows, columns, channels)."""
        num_axes, variation = len(self.size), variation or Variation()
        if len(space) != num_axes or len(image.size) != num_axes:
            raise ValueError(f"a box of {len(space)} and an image of {len(image.size)} axes, in a frame of {num_axes}")
        if not all(Interval(0, size).covers(interval) for size, interval in zip(self.size, space, strict=True)):
            frame = " x ".join(map(str, self.size))
            raise ValueError(f"the box {' x '.join(map(str, space))} lies outside the frame of {frame} pixels")
        if not variation.transposed:
            return self._flipped(image, space, variation)
        if self.patch is None:
            upright = replace(self, size=_swapped(self.size))
            return upright._flipped(image, _swapped(space), variation).swapaxes(-2, -3)
        wider = self._units(space)
        return _transposed_patches(self._flipped(image, wider, variation), self.patch)[within(space, wider)]

    def _units(self, space: Sequence[Interval]) -> tuple[Interval, ...]:
        """The whole patches that a box touches, or the whole frame if there are none."""
        if self.patch is None:
            return tuple(Interval(0, size) for size in self.size)
        return tuple(
            Interval(each.start // self.patch * self.patch, min(ceil_div(each.stop, self.patch) * self.patch, size))
            for each, size in zip(space, self.size, strict=True)
        )

    def _flipped(self, image: Image, space: Sequence[Interval], variation: Variation) -> Values:
        """A box of the fitted and flipped image, before rows and columns are swapped."""
        flips = variation.flips(len(self.size))
        turned = [
            Interval(size - interval.stop, size - interval.start) if flip else interval
            for size, interval, flip in zip(self.size, space, flips, strict=True)
        ]
        fitted = FITTED[self.fit](self.size, image.size, variation)
        is_mask = isinstance(image, _MaskPixels)
        read = partial(fitted.nearest if is_mask else fitted.pixels, image)
        if variation.moves:
            if len(self.size) != 2:
                raise ValueError(f"degrees {variation.degrees:g} and scale {variation.scale:g} are for pictures")
            shown = tuple(axis.size for axis in fitted.axes)
            affine = Affine(variation.degrees, variation.scale, shown, self.patch)
            pixels = affine.pixels(turned, read, at_nearest if is_mask else bilinear)
        else:
            pixels = read(*turned)
        return pixels[tuple(slice(None, None, -1 if flip else 1) for flip in flips)]

    def target(self, target: "StoredPicture", variation: Variation | None = None) -> npt.NDArray[np.float32]:
        """The target of an image, transformed like the image: (channels, *size), 0 to 1; of a `scale` times as much.

        Its pixels are moved as those of the image are, with `scale` x `scale` of them for each. Nothing changes their
        colours, and they are not normalised.

        Raises:
            BadImage: the file cannot be decoded.
        """
        scale, variation = target.scale, variation or Variation()
        moved = self.pixels(target.blocks(), *(Interval(0, side) for side in self.size), variation=variation)
        if scale == 1:
            return planes_of(moved)
        rows, cols, _ = moved.shape
        inner = moved.reshape(rows, cols, scale, scale, -1)
        flipped = tuple(slice(None, None, -1 if flip else 1) for flip in variation.flips(2))
        inner = inner[(slice(None), slice(None), *flipped)]
        inner = inner.swapaxes(2, 3) if variation.transposed else inner
        return planes_of(inner.swapaxes(1, 2).reshape(rows * scale, cols * scale, -1))

    def mask(
        self, mask: npt.NDArray[Any] | Image, variation: Variation | None = None, values: bool = False
    ) -> npt.NDArray[Any]:
        """The mask (..., height, width) of an image, transformed like the image: (..., *size).

        It is cropped, resized, flipped and turned with its image; resizing takes the nearest value, since a mean of two
        classes is none of them. Where a crop reaches beyond the image, integers are -100, which PyTorch's losses
        ignore, and floating point is not-a-number; `values` of pixels, which are no mask, are 0. Of a
        mask that is read, it is the part that is shown.

        Raises:
            BadImage: the file of a mask cannot be decoded.
        """
        shown = _MaskPixels(mask, len(self.size))
        shown.outside = 0 if values else shown.outside
        found = self.pixels(shown, *(Interval(0, side) for side in self.size), variation=variation)
        return np.ascontiguousarray(np.moveaxis(found, -1, 0)).reshape(*shown.others, *self.size)


class Cropped:
    """How an image of these `sides` fills a frame: by a window of this size, padded where the image is smaller."""

    own_sizes = False  # whether each image has a frame of its own size
    windows, scales = True, False  # whether a frame is a window of an image; whether its scale is another one

    def __init__(self, frame: Sequence[int], sides: Sequence[int], variation: Variation) -> None:
        self.frame, self.sides, self._share = frame, sides, variation.crop
        self.axes = [self.axis(*each) for each in zip(frame, sides, variation.places(len(frame)), strict=True)]

    def axis(self, size: int, side: int, position: float) -> Frame:
        """What the frame shows along an axis; a negative room to move is padding, shared by both sides."""
        free = side - size
        return Frame(size, -(-free // 2) if free < 0 else min(free, int(position * (free + 1))), 1.0)

    def pixels(self, image: Image, *space: Interval) -> Values:
        """A box of the fitted image; beyond the frame, it is white, or what is there."""
        return crop(image, [int(axis.start) for axis in self.axes], space)

    def nearest(self, mask: Any, *space: Interval) -> npt.NDArray[Any]:
        """The same of the nearest pixels of a mask."""
        places = [self.source(axis, np.arange(*wanted)) for axis, wanted in zip(self.axes, space, strict=True)]
        inside = [np.flatnonzero((at >= 0) & (at < side)) for at, side in zip(places, self.sides, strict=True)]
        found = np.full((*map(len, places), prod(mask.others)), mask.outside, mask.dtype)
        if all(map(len, inside)):
            part = found[tuple(slice(int(each[0]), int(each[-1]) + 1) for each in inside)]
            nearest(mask.read, [at[each] for at, each in zip(places, inside, strict=True)], part)
        return found

    def source(self, axis: Frame, at: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Which row, or column, of the image is nearest to these of the frame; outside of it there is none."""
        return np.floor(axis.start + (at + 0.5) * axis.scale).astype(np.int64)


class _OwnSized(Cropped):
    own_sizes, windows = True, False


class _Padded(Cropped):
    windows = False

    def axis(self, size: int, side: int, position: float) -> Frame:
        return Frame(min(size, side), 0, 1.0)

    def pixels(self, image: Image, *space: Interval) -> Values:
        if any(side > most for side, most in zip(self.sides, self.frame, strict=True)):
            sides, frame = ("x".join(map(str, each)) for each in (self.sides, self.frame))
            raise DatasetError(f"an image of {sides} px is larger than `image_size` {frame}: `fit` pad cuts nothing")
        return super().pixels(image, *space)


class _Scaled(Cropped):
    windows, scales = False, True

    def axis(self, size: int, side: int, position: float) -> Frame:
        shown = side * self._share
        return Frame(size, position * (side - shown), shown / size)

    def pixels(self, image: Image, *space: Interval) -> Values:
        def resized(*box: Interval) -> Values:
            if not any(interval.empty for interval in box):
                return resize(image, self.axes, box)
            pixel = resize(image, self.axes, [Interval(0, 1)] * len(box))
            return np.empty((*(interval.length for interval in box), pixel.shape[-1]), pixel.dtype)

        whole = FunctionImage(tuple(axis.size for axis in self.axes), resized)
        return crop(whole, (0,) * len(space), space)

    def source(self, axis: Frame, at: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return np.where((at >= 0) & (at < axis.size), super().source(axis, at), -1)


FITTED: dict[str, type[Cropped]] = {"resize": _Scaled, "crop": Cropped, "pad": _Padded, "own": _OwnSized}


class _MaskPixels:
    """A mask (..., height, width) as an image whose channels are its first dims, and what is outside of it."""

    def __init__(self, mask: npt.NDArray[Any] | Image, num_axes: int) -> None:
        self._mask = mask
        sides: Any = mask.shape if isinstance(mask, np.ndarray) else mask.size
        self.others, self.size = sides[:-num_axes], tuple(sides[-num_axes:])
        is_float = isinstance(mask, np.ndarray) and mask.dtype.kind == "f"
        self.dtype = mask.dtype if isinstance(mask, np.ndarray) and is_float else np.dtype(np.int64)
        self.outside = np.nan if is_float else IGNORED

    def read(self, *space: Interval) -> npt.NDArray[Any]:
        if not isinstance(self._mask, np.ndarray):
            return self._mask.read(*space)[..., None]
        box = self._mask.reshape(-1, *self.size)[(slice(None), *(slice(*each) for each in space))]
        return np.moveaxis(box, 0, -1)


def within(space: Sequence[Interval], of: Sequence[Interval]) -> tuple[slice, ...]:
    """Where a box lies in a larger one."""
    return tuple(slice(own.start - all.start, own.stop - all.start) for own, all in zip(space, of, strict=True))


def _swapped(sides: Sequence[Any]) -> tuple[Any, ...]:
    """With the last two sides of the space in each other's place."""
    return (*sides[:-2], sides[-1], sides[-2])


def _transposed_patches(values: npt.NDArray[Any], patch: int) -> npt.NDArray[Any]:
    """Values (..., rows, columns, channels) whose whole patches are transposed, each where it is."""
    *others, rows, cols, channels = values.shape
    down, across = rows // patch, cols // patch
    made = values.copy()
    inner = made[..., : down * patch, : across * patch, :].reshape(*others, down, patch, across, patch, channels)
    made[..., : down * patch, : across * patch, :] = inner.swapaxes(-2, -4).reshape(
        *others, down * patch, across * patch, channels
    )
    return made
