"""Intact files of every kind that a codec here can write, and ways to damage them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import PIL.Image
import pytest
import tifffile

from mpi4dl.datasets import BadImage, open_image
from mpi4dl.geometry import Interval
from tests.datasets.boxes import smooth_image

FAXES = ("group3", "group4", "tiff_ccitt") if hasattr(imagecodecs, "CCITTFAX4") else ()

Write = Callable[[Path], None]

SIZE = (70, 90)
LOSSLESS = ("none", "packbits", "lzw", "zlib", "zstd", "lzma", "webp", "png", "jpegxl", "jpeg2000", "lerc")
LOSSY = ("jpeg", "jpegxr")


def kinds() -> dict[str, tuple[str, Write]]:
    """The suffix of each kind, and what writes an intact file of it."""
    rgb = PIL.Image.fromarray(smooth_image(*SIZE))
    grey = smooth_image(*SIZE)[..., 0]
    found: dict[str, tuple[str, Write]] = {}

    def picture(name: str, suffix: str, image: PIL.Image.Image, **options: Any) -> None:
        found[name] = (suffix, lambda path: image.save(path, **options))

    def tiff(name: str, pixels: Any, **options: Any) -> None:
        def write(path: Path) -> None:
            try:
                tifffile.imwrite(path, pixels, **options)
            except NotImplementedError as error:  # imagecodecs 2024 reads 12 bits, and cannot write them
                pytest.skip(f"imagecodecs: {error}")

        found[f"tiff {name}"] = (".tif", write)

    exif = PIL.Image.Exif()
    exif[274] = 6
    picture("png", ".png", rgb, exif=exif)
    picture("png palette", ".png", rgb.quantize(16), transparency=3)
    picture("png 16 bit", ".png", PIL.Image.fromarray(grey.astype(np.uint16) * 257))
    picture("png alpha", ".png", rgb.convert("RGBA"))
    picture("png 1 bit", ".png", rgb.convert("1"))
    picture("jpeg", ".jpg", rgb, exif=exif)
    picture("jpeg progressive", ".jpg", rgb, progressive=True)
    picture("jpeg CMYK", ".jpg", rgb.convert("CMYK"))
    picture("webp", ".webp", rgb)
    picture("bmp", ".bmp", rgb)
    picture("tiff palette", ".tif", rgb.quantize(16), tiffinfo={274: 6})
    for code in FAXES:
        picture(f"tiff {code}", ".tif", rgb.convert("1"), compression=code)
    picture("tiff YCbCr", ".tif", rgb.convert("YCbCr"))
    for compression in (*LOSSLESS, *LOSSY):
        options: dict[str, Any] = {"photometric": "rgb", "compression": compression}
        tiff(f"{compression} tiles", smooth_image(*SIZE), tile=(32, 32), **options)
        tiff(f"{compression} strips", smooth_image(*SIZE), rowsperstrip=17, **options)
    tiff("big", smooth_image(*SIZE), tile=(32, 32), compression="zlib", bigtiff=True)
    tiff("big-endian", smooth_image(*SIZE), tile=(32, 32), byteorder=">", photometric="rgb")
    tiff("predictor", smooth_image(*SIZE), tile=(32, 32), compression="zlib", predictor=True, photometric="rgb")
    tiff("16 bit", grey.astype(np.uint16) * 257, compression="lzw", rowsperstrip=16)
    tiff("12 bit", grey.astype(np.uint16) * 16, bitspersample=12)
    tiff("32 bit", grey.astype(np.uint32) << 24)
    tiff("float", (grey / 255).astype(np.float32), compression="zlib", predictor=True)
    tiff("1 bit", grey > 127, photometric="minisblack")
    tiff("CMYK", np.asarray(rgb.convert("CMYK")), photometric="separated")
    tiff("planes", np.ascontiguousarray(smooth_image(*SIZE).transpose(2, 0, 1)), photometric="rgb", tile=(32, 32))
    channels = np.ascontiguousarray(smooth_image(*SIZE).transpose(2, 0, 1))
    options = {"photometric": "minisblack", "metadata": {"axes": "CYX"}}
    tiff("OME", channels, ome=True, tile=(32, 32), compression="zlib", **options)
    slide = {"tile": (32, 32), "photometric": "rgb", "compression": "jpeg"}
    found["svs"] = (".svs", lambda path: tifffile.imwrite(path, smooth_image(*SIZE), **slide))
    tiff("ImageJ", channels, imagej=True, metadata={"axes": "CYX"})
    return found


def damaged(content: bytes, random: np.random.Generator) -> bytes:
    """The bytes of a file, with some cut off, changed, zeroed, repeated or left out."""
    spoilt = bytearray(content)
    # Half of all damage is near one of the ends, where headers and tables are.
    near = int(random.integers(min(400, len(spoilt))))
    place = [int(random.integers(len(spoilt))), near, len(spoilt) - 1 - near, near][random.integers(4)]
    length = int(2 ** random.uniform(0, 9))
    match random.integers(6):
        case 0:
            return bytes(spoilt[:place])
        case 1:
            spoilt[place] ^= 1 << int(random.integers(8))
        case 2:
            for _ in range(length):
                spoilt[int(random.integers(len(spoilt)))] = int(random.integers(256))
        case 3:
            spoilt[place : place + length] = bytes(len(spoilt[place : place + length]))
        case 4:
            spoilt[place : place + 4] = random.choice([b"\xff\xff\xff\xff", b"\x00\x00\x00\x80", b"\x01\x00\x00\x00"])
        case 5:
            del spoilt[place : place + length]
    return bytes(spoilt)


def spoil(folder: Path, kind: str, count: int, seed: int = 0) -> Iterator[Path]:
    """So many damaged files of a kind, one after the other under one name."""
    suffix, write = kinds()[kind]
    path = folder / f"damaged{suffix}"
    write(path)
    content = path.read_bytes()
    random = np.random.default_rng((seed, *kind.encode()))
    for _ in range(count):
        path.write_bytes(damaged(content, random))
        yield path


def outcome(path: Path) -> str:
    """ "an image" or "BadImage of" the file; whatever else a reader does is raised."""
    try:
        image = open_image(path)
        for rows, cols in _boxes(*image.size):
            pixels = image.read(rows, cols)
            assert pixels.shape == (rows.length, cols.length, 3)
            assert pixels.dtype == np.uint8
    except BadImage as error:
        return f"BadImage of {error.path.name}"
    return "an image"


def _boxes(height: int, width: int) -> Iterator[tuple[Interval, Interval]]:
    """All of an image of ordinary size, and two corners of one whose header now says something else."""
    if height * width <= 4 * SIZE[0] * SIZE[1]:
        yield Interval(0, height), Interval(0, width)
    yield Interval(0, min(20, height)), Interval(0, min(20, width))
    yield Interval(max(0, height - 20), height), Interval(max(0, width - 20), width)
