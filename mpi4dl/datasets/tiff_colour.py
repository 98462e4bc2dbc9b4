"""What the samples of a TIFF page mean: how they are scaled, which are colours, and how they become RGB bytes."""

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from mpi4dl.datasets.base import Pixels
from mpi4dl.datasets.colour import WHITE, bytes_of, rgb_of, rgb_of_inks

# Values of tags of TIFF 6.0.
_MIN_IS_WHITE, _MIN_IS_BLACK, _RGB, _PALETTE, _INKS, _YCBCR = 0, 1, 2, 3, 5, 6
_COLOURS = {_MIN_IS_WHITE: 1, _MIN_IS_BLACK: 1, _RGB: 3, _PALETTE: 1, _INKS: 4, _YCBCR: 3}
_JPEG_COMPRESSIONS = (6, 7)  # their decoder hands out RGB
_UNSIGNED, _FLOAT = 1, 3
_FOUR_INKS = 1
_PREMULTIPLIED, _STRAIGHT = 1, 2
_MAX_SAMPLE, _INK_SET, _MAX_FLOAT_SAMPLE = "MaxSampleValue", "InkSet", "SMaxSampleValue"

Samples = npt.NDArray[Any]


class Unsupported(Exception):
    """The TIFF file is stored in a way that is left to another reader."""


def colouring(page: Any, num_planes: int, ome: str | None) -> Callable[[Samples], Pixels]:
    """What makes RGB bytes of samples (h, w, n) of a page, of which `num_planes` like it are the colours, or just 1.

    `ome` is the file's OME-XML.

    Raises:
        Unsupported: other colours than grey, RGB, palettes, CMYK, and YCbCr in JPEG.
        ValueError: colours or types of samples that no picture has.
    """
    photometric, count = int(page.photometric), page.samplesperpixel * num_planes
    if photometric not in _COLOURS or (photometric == _YCBCR and page.compression not in _JPEG_COMPRESSIONS):
        raise Unsupported
    if photometric == _INKS and page.tags.valueof(_INK_SET, _FOUR_INKS) != _FOUR_INKS:
        raise ValueError("stores inks other than cyan, magenta, yellow and black: convert it to RGB")
    colours = _COLOURS[photometric]
    if colours == 1 and count == 3:
        colours = 3  # channels that the writer did not call colours
    if count - colours not in (0, 1) or (num_planes > 1 and count != colours):
        raise ValueError(f"has {count} channels; expected 1 (grey) or 3 (colour), and alpha")
    top = white_of(page, ome)
    if photometric == _PALETTE:
        return _by_palette(page)
    extra = page.extrasamples[-1] if count > colours and page.extrasamples else 0

    def convert(samples: Samples) -> Pixels:
        pixels = bytes_of(samples, top)
        if photometric == _MIN_IS_WHITE:
            pixels = np.concatenate([WHITE - pixels[..., :colours], pixels[..., colours:]], axis=2)
        if photometric == _INKS:
            pixels = np.concatenate([rgb_of_inks(pixels[..., :4]), pixels[..., 4:]], axis=2)
        if count > colours and extra not in (_PREMULTIPLIED, _STRAIGHT):
            pixels = pixels[..., :-1]
        return rgb_of(pixels, alpha=extra in (_PREMULTIPLIED, _STRAIGHT), premultiplied=extra == _PREMULTIPLIED)

    return convert


def white_of(page: Any, ome: str | None) -> float | None:
    """The largest sample that the file declares, or None where it declares no other than that of its type.

    That is, of integers, the largest of BitsPerSample bits, or MaxSampleValue or OME's SignificantBits if they say of
    fewer bits; of floating point, SMaxSampleValue. (A MaxSampleValue that is not the largest of some number of bits is
    the brightest pixel of this one image, by which nothing is scaled.)

    Raises:
        ValueError: samples of different or unknown types.
    """
    bits, dtype = page.bitspersample, page.dtype
    if not isinstance(bits, int) or dtype is None:
        raise ValueError(f"stores samples of {bits} bits and format {page.sampleformat}: convert it to 8 or 16 bits")
    if page.sampleformat == _FLOAT:
        declared = page.tags.valueof(_MAX_FLOAT_SAMPLE)
        top = float(np.max(declared)) if isinstance(declared, int | float | tuple) else 1.0
        return top if math.isfinite(top) and top > 0 else 1.0
    if page.sampleformat != _UNSIGNED:
        return None
    declared = page.tags.valueof(_MAX_SAMPLE)
    most = max(declared) if isinstance(declared, tuple) else declared
    if isinstance(most, int) and most > 0 and (most + 1) & most == 0:
        bits = min(bits, most.bit_length())
    significant = re.search(r'\bSignificantBits="(\d{1,2})"', ome or "")
    if significant and int(significant[1]) > 0:
        bits = min(bits, int(significant[1]))
    return float(2**bits - 1)


def _by_palette(page: Any) -> Callable[[Samples], Pixels]:
    found = page.colormap
    if found is None or found.ndim != 2 or found.shape[0] != 3:
        raise ValueError("has no palette, though its pixels are numbers of one: it is damaged")
    palette = found.T if found.max(initial=0) <= WHITE else found.T >> 8
    colours = palette.astype(np.uint8)

    def convert(samples: Samples) -> Pixels:
        numbers = samples[..., 0].astype(np.int64)
        if numbers.size and numbers.max() >= len(colours):
            raise ValueError(f"has pixels beyond the {len(colours)} colours of its palette: it is damaged")
        return colours[numbers]

    return convert
