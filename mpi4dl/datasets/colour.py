"""Turn whatever samples a file stores (grey, palette, alpha, 16 bit, ...) into red, green and blue bytes.

Every conversion looks at one pixel at a time, so a tile is converted exactly as it is within the whole image. In
particular 16-bit samples are scaled by their type's range (65535 -> 255), never by the image's own brightest pixel.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import PIL.Image

from mpi4dl.datasets.base import Pixels

WHITE = 255


def bytes_of(samples: npt.NDArray[Any]) -> Pixels:
    """Scale samples to bytes by the range of their type.

    Raises:
        ValueError: the type has no fixed range (floating point, 32-bit integers).
    """
    if samples.dtype == np.uint8:
        return samples
    if samples.dtype == np.bool_:
        return samples.astype(np.uint8) * np.uint8(WHITE)
    if samples.dtype == np.uint16:
        return ((samples.astype(np.uint32) + 128) // 257).astype(np.uint8)
    raise ValueError(f"stores samples of type {samples.dtype}, which have no fixed range: convert it to 8 or 16 bit")


def over_white(colour: Pixels, alpha: Pixels, premultiplied: bool = False) -> Pixels:
    """Lay (h, w, channels) pixels with an (h, w) opacity over a white page, as slides are."""
    if alpha.size and alpha.min() == WHITE:
        return colour
    weight = alpha[..., None].astype(np.uint16)
    page = WHITE * (WHITE - weight)
    ink = colour.astype(np.uint16) * (np.uint16(WHITE) if premultiplied else weight)
    return ((np.minimum(ink, WHITE * WHITE - page) + page + 127) // WHITE).astype(np.uint8)


def rgb_of(samples: npt.NDArray[Any], alpha: bool = False, premultiplied: bool = False) -> Pixels:
    """Three bytes per pixel from samples (h, w, n), where n is 1 (grey) or 3 (colour), and one more where `alpha`.

    Raises:
        ValueError: another number of samples, or a type without a fixed range.
    """
    pixels = bytes_of(samples)
    colour = pixels[..., :-1] if alpha else pixels
    if colour.shape[2] not in (1, 3):
        raise ValueError(f"has {colour.shape[2]} channels where grey (1) or colour (3) is expected")
    if alpha:
        colour = over_white(colour, pixels[..., -1], premultiplied)
    return np.repeat(colour, 3, axis=2) if colour.shape[2] == 1 else colour


def rgb_of_pillow(image: PIL.Image.Image) -> Pixels:
    """Three bytes per pixel, (height, width, 3), from a Pillow image of any mode.

    Raises:
        ValueError: floating-point pixels.
    """
    if image.mode.startswith("I"):
        # 16-bit grey: Pillow has called it "I;16", "I;16B" and, before version 11, plain "I".
        return rgb_of(np.clip(np.asarray(image), 0, 65535).astype(np.uint16)[..., None])
    if image.mode == "F":
        raise ValueError("stores floating-point pixels, which have no fixed range: convert it to 8 or 16 bit")
    if image.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in image.info:
        samples = np.asarray(image.convert("RGBA"))
        return over_white(samples[..., :3], samples[..., 3])
    return np.asarray(image.convert("RGB"))
