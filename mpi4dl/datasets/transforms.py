"""A transform of the user's, pixel by pixel: what each rank may do to its own box of an image, alone."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from mpi4dl.datasets.augment import TRANSFORM_STREAM
from mpi4dl.datasets.base import DatasetError, Values
from mpi4dl.datasets.randomness import DatasetRandomness

_TRIED_PX = 6  # each side of what it is tried on
_TRIES = 8  # as so many samples
_PROBED_PX = 32  # at most so many along each side of a box are transformed a second time, as a part of it
_ROUNDED = 16  # pixels that may differ in the last bits, or 1 in 100: loops over short arrays round otherwise


class Pointwise:
    """A function of the pixels of a box, (rows, columns, channels), that makes as many of them.

    It is called with uint8, or float32 whose range is 0 to 1, of any box, and gives either. What it makes of a pixel
    must follow from this pixel alone: a convolution, a histogram or a resize looks at others, which are on other ranks.
    With a second argument it gets a random generator, which is the same for all boxes of a sample in an epoch, and None
    in validation: the same numbers must be drawn for a box of any size.

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
