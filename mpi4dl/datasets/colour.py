"""Colours and orientation: whatever samples a file stores become upright red, green and blue bytes.

Every conversion looks at one pixel at a time, so a tile is converted exactly as it is within the whole image. One rule
scales all samples: the range that the file declares, or else that of their type (65535 -> 255; floating point: 0 to 1),
and never the image's own brightest pixel.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import PIL.Image

from mpi4dl.datasets.base import FunctionImage, Image, Pixels
from mpi4dl.geometry import Interval

WHITE = 255

_TABLE_BITS = 16
_FLOAT_TOLERANCE = 1e-3  # what compression and resampling may add to the range
_KINDS_OF_NUMBERS = "uif"


def bytes_of(samples: npt.NDArray[Any], top: float | None = None) -> Pixels:
    """Scale samples to bytes: 0 becomes 0, or for signed integers the least of their type, and `top` becomes 255.

    Without `top` that is the largest value of the type; of floating point, 1.

    Raises:
        ValueError: floating point samples outside the range, or that are no numbers; a type that is no real number.
    """
    if samples.dtype == np.uint8 and top in (None, WHITE):
        return samples
    if samples.dtype == np.bool_:
        return samples.astype(np.uint8) * np.uint8(WHITE)
    if samples.dtype.kind not in _KINDS_OF_NUMBERS:
        raise ValueError(f"stores samples of type {samples.dtype}: expected integers or floating point")
    if samples.dtype.kind == "f":
        top = 1.0 if top is None else top
        share = samples.astype(np.float64) / top
        least, most = (float(samples.min()), float(samples.max())) if samples.size else (0.0, 0.0)
        if not -_FLOAT_TOLERANCE * top <= least <= most <= (1 + _FLOAT_TOLERANCE) * top:
            raise ValueError(
                f"stores floating-point values from {least:g} to {most:g}, but 0 is black and {top:g} is white: divide "
                "them by the largest that there can be, or say it in the tag SMaxSampleValue"
            )
        return np.rint(WHITE * np.clip(share, 0.0, 1.0, out=share), out=share).astype(np.uint8)
    info = np.iinfo(samples.dtype)
    top = info.max if top is None else int(top)
    if samples.dtype.kind == "u" and info.bits <= _TABLE_BITS:
        return _table(top)[np.minimum(samples, samples.dtype.type(min(top, info.max)))]
    share = (samples.astype(np.float64) - info.min) / (top - info.min)
    return np.rint(WHITE * np.minimum(share, 1.0, out=share), out=share).astype(np.uint8)


@cache
def _table(top: int) -> Pixels:
    return ((np.arange(top + 1, dtype=np.int64) * WHITE + top // 2) // top).astype(np.uint8)


def over_white(colour: Pixels, alpha: Pixels, premultiplied: bool = False) -> Pixels:
    """Lay (h, w, channels) pixels with an (h, w) opacity over a white page, as slides are."""
    if alpha.size and alpha.min() == WHITE:
        return colour
    weight = alpha[..., None].astype(np.uint16)
    page = WHITE * (WHITE - weight)
    ink = colour.astype(np.uint16) * (np.uint16(WHITE) if premultiplied else weight)
    return ((np.minimum(ink, WHITE * WHITE - page) + page + 127) // WHITE).astype(np.uint8)


def in_strips(read: Callable[[Interval, Interval], Pixels], rows: Interval, cols: Interval, height: int) -> Pixels:
    """The pixels (h, w, 3) of a box, of which few rows are read at once, so that little is alive beside the result."""
    if 0 < rows.length <= height and cols.length:
        return read(rows, cols)
    pixels = np.empty((rows.length, cols.length, 3), np.uint8)
    for strip in rows.strips(height) if cols.length else ():
        pixels[strip.start - rows.start : strip.stop - rows.start] = read(strip, cols)
    return pixels


def rgb_of(pixels: Pixels, alpha: bool = False, premultiplied: bool = False) -> Pixels:
    """Three bytes per pixel from bytes (h, w, n), where n is 1 (grey) or 3 (colour), and one more where `alpha`.

    Raises:
        ValueError: another number of samples.
    """
    colour = pixels[..., :-1] if alpha else pixels
    if colour.shape[2] not in (1, 3):
        raise ValueError(f"has {colour.shape[2]} channels where grey (1) or colour (3) is expected")
    if alpha:
        colour = over_white(colour, pixels[..., -1], premultiplied)
    return np.repeat(colour, 3, axis=2) if colour.shape[2] == 1 else colour


def rgb_of_pillow(image: PIL.Image.Image) -> Pixels:
    """Three bytes per pixel, (height, width, 3), from a Pillow image of any mode.

    Raises:
        ValueError: floating-point pixels outside 0 to 1.
    """
    if image.mode.startswith("I"):
        # 16-bit grey: Pillow has called it "I;16", "I;16B" and, before version 11, plain "I".
        return rgb_of(bytes_of(np.clip(np.asarray(image), 0, 65535).astype(np.uint16)[..., None]))
    if image.mode == "F":
        return rgb_of(bytes_of(np.asarray(image)[..., None]))
    if image.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in image.info:
        samples = np.asarray(image.convert("RGBA"))
        return over_white(samples[..., :3], samples[..., 3])
    rgb = image if image.mode == "RGB" else image.convert("RGB")
    return np.frombuffer(rgb.tobytes(), np.uint8).reshape(rgb.height, rgb.width, 3)


# Pictures that were stored turned or mirrored, as their EXIF or TIFF tag says, shown upright.

TAG = 274  # of EXIF and of TIFF

# The value of the tag: are rows and columns exchanged, and is the result then flipped top to bottom, left to right?
_STEPS = {
    2: (False, False, True),
    3: (False, True, True),
    4: (False, True, False),
    5: (True, False, False),
    6: (True, False, True),
    7: (True, True, True),
    8: (True, True, False),
}
EXCHANGED = tuple(value for value, (exchanged, _, _) in _STEPS.items() if exchanged)


def upright(image: Image, orientation: object) -> Image:
    """The image as it is meant to be seen; what is no orientation changes nothing."""
    steps = _STEPS.get(orientation) if isinstance(orientation, int) else None
    if steps is None:
        return image
    exchanged, flip_rows, flip_cols = steps
    height, width = image.size[::-1] if exchanged else image.size

    def read(rows: Interval, cols: Interval) -> npt.NDArray[Any]:
        rows = Interval(height - rows.stop, height - rows.start) if flip_rows else rows
        cols = Interval(width - cols.stop, width - cols.start) if flip_cols else cols
        pixels = image.read(cols, rows).swapaxes(0, 1) if exchanged else image.read(rows, cols)
        return pixels[:: -1 if flip_rows else 1, :: -1 if flip_cols else 1]

    return FunctionImage((height, width), read)
