"""Read boxes of TIFF files of any size: only the tiles (or strips) that a box touches are read and decoded.

tifffile parses the header, once; after that the file is closed, and each read opens it, fetches bytes with `os.pread`
and closes it again. So no handle is ever shared between threads or carried over a fork.
"""

import io
import logging
import os
import re
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import PIL.Image

from mpi4dl._wording import counted
from mpi4dl.datasets.base import BadImage, DatasetError, FunctionImage, Image, Pixels, blaming, package
from mpi4dl.datasets.colour import EXCHANGED, TAG, WHITE, bytes_of, rgb_of, upright
from mpi4dl.datasets.reader_process import OpenSlideLevel, ask, has_openslide, needs_openslide
from mpi4dl.geometry import Interval, ceil_div

# The meaning of the samples of a TIFF page: scale, colours, and conversion to RGB bytes.

# Values of tags of TIFF 6.0.
_MIN_IS_WHITE, _MIN_IS_BLACK, _RGB, _PALETTE, _INKS, _YCBCR = 0, 1, 2, 3, 5, 6
_UNCOMPRESSED = 1
_JPEG = 7
_JPEG_COMPRESSIONS = (6, _JPEG)  # their decoder hands out RGB
_UNSIGNED, _FLOAT = 1, 3
_FOUR_INKS = 1
_PREMULTIPLIED, _STRAIGHT = 1, 2

Samples = npt.NDArray[Any]


class Unsupported(DatasetError):
    """The TIFF file is stored in a way that is left to Pillow, which decodes it whole."""


class Scanned(BadImage):
    """The TIFF file is one of those of scanners whose pixels only OpenSlide knows."""


def colouring(page: Any, num_planes: int, ome: str | None) -> Callable[[Samples], Pixels]:
    """A function that makes RGB bytes of samples (h, w, n) of a page, of which `num_planes` like it are the colours, or
    just 1. `ome` is what OME-XML says of it.

    White is the largest sample that the file declares, or that of its type: of unsigned integers the largest of
    BitsPerSample bits, or MaxSampleValue or OME's SignificantBits if they say of fewer bits; of floating point
    SMaxSampleValue. (A MaxSampleValue that is not the largest of some number of bits is the brightest pixel of this one
    image, by which nothing is scaled.)

    Raises:
        Unsupported: other colours than grey, RGB, and YCbCr in JPEG.
        ValueError: colours or types of samples that no picture has, or that Pillow would show wrong.
    """
    photometric, count = int(page.photometric), page.samplesperpixel * num_planes
    if photometric == _INKS and page.tags.valueof("InkSet", _FOUR_INKS) != _FOUR_INKS:
        raise ValueError("stores inks other than cyan, magenta, yellow and black: convert it to RGB")
    if photometric == _PALETTE and np.max(page.colormap) <= WHITE:
        raise ValueError("has a palette of 8 bits where TIFF has 16: convert it to RGB, such as with ImageMagick")
    if photometric == _YCBCR and page.compression == _UNCOMPRESSED and page.tags.valueof("YCbCrSubSampling") != (1, 1):
        raise ValueError("stores YCbCr of fewer colours than pixels: convert it to RGB, such as with ImageMagick")
    jpeg = photometric == _YCBCR and page.compression in _JPEG_COMPRESSIONS
    if photometric not in (_MIN_IS_WHITE, _MIN_IS_BLACK, _RGB) and not jpeg:
        raise Unsupported
    # Channels that the writer did not call colours are three greys.
    colours = 3 if photometric in (_RGB, _YCBCR) or count == 3 else 1
    if count - colours not in (0, 1) or (num_planes > 1 and count != colours):
        raise ValueError(f"has {count} channels; expected 1 (grey) or 3 (colour), and alpha")
    bits = page.bitspersample
    if not isinstance(bits, int) or page.dtype is None:
        raise ValueError(f"stores samples of {bits} bits and format {page.sampleformat}: convert it to 8 or 16 bits")
    top: float | None = None
    if page.sampleformat == _FLOAT:
        top = float(np.max(page.tags.valueof("SMaxSampleValue", 1.0)))
    elif page.sampleformat == _UNSIGNED:
        most = max(0, int(np.max(page.tags.valueof("MaxSampleValue", 0))))
        significant = re.search(r'\bSignificantBits="(\d{1,2})"', ome or "")
        declared = (most.bit_length() if (most + 1) & most == 0 else 0, int(significant[1]) if significant else 0)
        top = float(2 ** min([bits, *filter(None, declared)]) - 1)
    extra = page.extrasamples[-1] if count > colours and page.extrasamples else 0

    def convert(samples: Samples) -> Pixels:
        pixels = bytes_of(samples, top)
        if photometric == _MIN_IS_WHITE:
            pixels = np.concatenate([WHITE - pixels[..., :colours], pixels[..., colours:]], axis=2)
        if count > colours and extra not in (_PREMULTIPLIED, _STRAIGHT):
            pixels = pixels[..., :-1]
        return rgb_of(pixels, alpha=extra in (_PREMULTIPLIED, _STRAIGHT), premultiplied=extra == _PREMULTIPLIED)

    return convert


MAGIC = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")

# A tile or strip, which is decoded at once, is not larger than the largest picture that Pillow decodes whole.
MOST_PIXELS_AT_ONCE = 178_956_970

# JPEG XR, by both of its numbers: at some damaged files its decoder ends the process.
DEADLY = (22610, 34934)
# Of these (LERC, JPEG XL) Pillow does not know the size before they are decoded: in a process with a limit too.
UNMEASURED = (*DEADLY, 34887, 50002, 52546)
PICTURES = (6, 7, 33003, 33004, 33005, 33007, 34712, 34892, 34933, 50001)  # JPEG, JPEG 2000, PNG, WebP
MOST_SPARE = 4  # times as many pixels as its tile a picture may have
VALUES = ("uint8", "uint16", "int16", "float32")  # types of pictures whose values are read as they are stored
GDAL_NODATA = 42113  # a tag: the value of pixels that have none, as text
# Tags of GeoTIFF: scale of pixels, tie points, transformation, directory of keys, and their numbers and texts.
GEO_TAGS = (33550, 33922, 34264, 34735, 34736, 34737)
SEGMENT_TAGS = {"dataoffsets": {273, 324}, "databytecounts": {279, 325}}  # of strips and of tiles, by tifffile's names
LOSSY = (6, 7, *DEADLY, 33007, 34892)  # JPEG, JPEG XR, and JPEG under other numbers

# Of JPEG: a segment begins with its mark, kind and length; that of a frame has bits, height and width then.
START_OF_JPEG, SCAN_OF_JPEG, END_OF_JPEG, MARK = b"\xff\xd8", b"\xff\xda", b"\xff\xd9", 0xFF
FRAME = struct.Struct(">BBHBHH")
ZEROS_OF_MISSING = 64  # zeros instead of the end of a JPEG, in files of which not all was copied
FRAMES = (0xC0, 0xC1, 0xC2)  # baseline, extended, progressive
BEFORE_FRAME = (0xC4, 0xDB, 0xDD, *range(0xE0, 0xF0), 0xFE)  # tables, restart interval, applications, comment

# Without OpenSlide, tifffile shows other pictures than there are: padded or overlapping tiles, the label as the slide,
# levels of other factors. Aperio's pages it shows truly, except two kinds of JPEG 2000 whose colours are no RGB.
SCANNERS = ("philips", "bif", "scn")  # by tifffile's names
TRESTLE = "MedScan"  # how the tag Software begins
HAMAMATSU = 65420  # a tag
APERIO_YCC = (33003, 33004)
UNTRUE = ("bif", "trestle", "svs")  # of these also the finest level
BESIDE = re.compile(r"\b(label|macro|thumbnail|overview)\b", re.IGNORECASE)
MASK, MACRO = 4, 9  # of the tag NewSubfileType: a bit of TIFF 6.0, and what Aperio calls the overview
# A page is compared with the next finer one at SPOTS x SPOTS spots. JPEG and other resampling change less than that.
SPOTS, SPOT_PX, MOST_UNLIKE = 4, 32, 12.0
BLANK = 225  # and brighter in each colour: glass

# tifffile logs what it also raises, or what is checked here: without a handler, Python prints that for each reading.
logging.getLogger("tifffile").addHandler(logging.NullHandler())


def open_tiff(path: Path, indices: bool = False) -> Image:
    """The image of a TIFF file (of a pyramid: its full resolution), as RGB bytes, upright; or its `indices` of classes,
    (rows, columns) of integers.

    Raises:
        BadImage: damaged, truncated, a stack of images, or with a number of channels that no colour image has.
        Unsupported: intact, but of colours that this reader leaves to Pillow.
    """
    image, _, inside = _opened_as(_Indices if indices else _Tiff, path)
    return image if indices or inside is None else _on_white(image, inside)


def _on_white(image: Image, inside: Image) -> Image:
    """A picture that is white where its mask is 0."""
    return FunctionImage(
        image.size, lambda *space: np.where(inside.read(*space)[..., None], image.read(*space), np.uint8(WHITE))
    )


def open_values(path: Path, bands: Sequence[int] = ()) -> tuple[Image, int, str, float | None, Image | None]:
    """The same with values as they are stored, of all channels, or of these, counted from 1.

    With it come the number of channels, the type of values, the value of pixels that have none, and the mask of the
    file, 0 where pixels have none. Raises BadImage.
    """
    image, stored, inside = _opened_as(partial(_Values, bands=bands), path)
    return image, len(stored.blank), stored.blank.dtype.name, stored.no_data, inside


def has_bands(path: Path) -> bool:
    """Whether a picture is neither grey nor of three colours, with or without opacity. Raises BadImage, Unsupported."""
    with opened(path) as file:
        first = file.pages[0]
        count, opaque = len(_planes(path, file)) * first.samplesperpixel, {_PREMULTIPLIED, _STRAIGHT}
        shown = int(first.photometric) in (_MIN_IS_BLACK, _RGB)
        return shown and count - bool(opaque & {*first.extrasamples}) not in (1, 3)


def geo_tags(path: Path, *others: int) -> list[tuple[int, int, int, Any, bool]]:
    """The tags that say where on Earth the pixels of a picture lie, with `others` if there are such, as tifffile writes
    them; none of other pictures. Raises BadImage.
    """
    if path.is_dir():
        return []
    with path.open("rb") as file:
        if file.read(4) not in MAGIC:
            return []
    with opened(path) as file:
        tags = file.pages[0].tags
        found = [tags[code] for code in (*GEO_TAGS, *others) if code in tags]
        placed = any(tag.code in GEO_TAGS for tag in found)
        return [(tag.code, int(tag.dtype), tag.count, tag.value, True) for tag in found if placed]


def chosen_bands(path: Path, bands: Sequence[int], count: int) -> list[int]:
    """The places of these bands, counted from 1, among `count`; of all without any. Raises BadImage."""
    if max(bands, default=0) > count:
        raise BadImage(path, f"has {counted(count, 'channel')}, and `channels` names number {max(bands)}")
    return [band - 1 for band in bands] or [*range(count)]


def _opened_as(kind: "Callable[..., _Tiff]", path: Path) -> "tuple[Image, Any, Image | None]":
    """The image upright, as it is stored, and the mask that the file has of it, if there is one."""
    with opened(path) as file:
        scanner = _scanner(file)
        if scanner in UNTRUE:
            told = f"is a scanner's TIFF ({scanner}), whose tiles overlap or whose colours are no RGB"
            raise Scanned(path, f"{told}: convert it to RGB")
        _check_segments(path, file.pages[0])
        _check_directories(path, file)
        pages, number = _pages_of_slide(path, file)
        stored, tag = kind(path, pages, _pixels_in(file.ome_metadata, number)), pages[0].tags.valueof(TAG)
        mask = _mask_of(path, file, stored)
        return upright(stored, tag), stored, upright(mask, tag) if mask else None


def _mask_of(path: Path, file: Any, stored: Image) -> Image | None:
    """The mask that a file has of an image of its, 0 where pixels have no values. Raises BadImage."""
    masks = (page for page in file.pages if _is_mask(page) and page.shape[:2] == stored.size)
    return next((_Indices(path, [page], None) for page in masks), None)


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A file by tifffile. What goes wrong in here is raised as BadImage, DatasetError or Unsupported."""
    tifffile = package("tifffile", f"{path}: reading TIFF", "tifffile", "imagecodecs")
    told = "has no readable TIFF header, it is truncated or damaged"
    with blaming(path, told), tifffile.TiffFile(path, _multifile=False) as file:
        yield file


class PageFacts(NamedTuple):
    """What a TIFF file says of its image: OME-XML and which image of it, description, pixels per unit (x, y), the unit,
    an ICC profile.
    """

    ome: str
    number: int
    description: str
    resolution: tuple[float, float] | None
    resolution_unit: int
    profile: bytes | None


def open_levels(path: Path) -> tuple[tuple[Image, ...], PageFacts]:
    """The levels of a pyramid in a TIFF file, as RGB bytes, from the finest on, and what the file says of them.

    A level is any further page, or SubIFD of the slide's page, that shows the same picture with fewer pixels: of the
    same samples, of the same proportions to a pixel, and, if it is a page, of about the same colours at the same
    places. Labels and overviews of the whole glass are no slide. A file without such pages has one level. Levels are
    white outside of their masks; a level has one if the slide has.

    Raises:
        BadImage, Unsupported: as `open_tiff`. DatasetError: a scanner's format, which needs OpenSlide.
    """
    with opened(path) as file:
        _check_directories(path, file)
        scanner = _scanner(file)
        if scanner is not None and not has_openslide():
            raise needs_openslide(path, f"a scanner's TIFF ({scanner})")
        pages, number = _pages_of_slide(path, file)
        first = pages[0]
        tag = first.tags.valueof(TAG)

        def image(pages: Sequence[Any]) -> tuple[Image, bool]:
            _check_segments(path, pages[0])
            stored = _Tiff(path, pages, _pixels_in(file.ome_metadata, number))
            mask = _mask_of(path, file, stored)
            return upright(_on_white(stored, mask) if mask else stored, tag), mask is not None

        finest, masked = image(pages)
        levels = [finest]
        others = [page for page in file.pages if page.index != first.index and not _is_beside(page)]
        inner = list(first.pages or ())
        wanted = filter(partial(_reduces, first), (*inner, *others) if len(pages) == 1 else ())
        for page in sorted(wanted, key=_pixels_of, reverse=True):
            if _pixels_of(page) < prod(levels[-1].size):
                smaller, has_mask = image([page])
                if has_mask == masked and (page in inner or _shows_the_same(levels[-1], smaller)):
                    levels.append(smaller)
        sides = (_ratio(first.tags.valueof(name)) for name in ("XResolution", "YResolution"))
        across, down = [*sides][:: -1 if tag in EXCHANGED else 1]
        return tuple(levels), PageFacts(
            file.ome_metadata or "",
            number,
            first.description or "",
            (across, down) if across and down else None,
            int(first.tags.valueof("ResolutionUnit", 2)),
            first.tags.valueof("InterColorProfile"),
        )


def _pages_of_slide(path: Path, file: Any) -> tuple[Sequence[Any], int]:
    """The page that is the slide, or one for each of its colours; and the number of its image in OME-XML."""
    first = file.pages[0]
    if file.is_ome and len(file.series) > 1:
        named = [number for number, each in enumerate(file.series) if not BESIDE.search(each.name or "")]
        number = max(named or range(len(file.series)), key=lambda number: prod(file.series[number].keyframe.shape[:2]))
        return _planes(path, file, number), number
    # The largest: a thumbnail or a label may come first, and say nothing.
    shown = (page for page in file.pages if not _is_beside(page))
    page = max(shown, key=lambda page: _pixels_of(page.keyframe), default=first)
    # No label is larger than its slide.
    pages = _planes(path, file) if page is first or _pixels_of(page) < _pixels_of(first) else [page]
    size = pages[0].imagelength, pages[0].imagewidth
    alike = [each for each in file.pages if (each.keyframe.imagelength, each.keyframe.imagewidth) == size]
    if len(alike) > len(pages) and not any(map(_is_beside, alike)):
        raise BadImage(path, f"has {len(alike)} pages of {size[1]} x {size[0]} px: write each to a file of its own")
    return pages, 0


def _pixels_in(ome: str | None, number: int) -> str:
    """What OME-XML says of the pixels of one of its images; nothing without it."""
    return "".join(re.split(r"<(?:\w+:)?Pixels\b", ome or "")[number + 1 : number + 2])


def _scanner(file: Any) -> str | None:
    """The scanner's format of a file whose pages only OpenSlide knows; None for others."""
    for page in file.pages[:2]:
        if page.software.startswith(TRESTLE):
            return "trestle"
        if HAMAMATSU in page.tags:
            return "hamamatsu"
        if page.is_svs and int(page.compression) in APERIO_YCC:
            return "svs"
        named = next((name for name in SCANNERS if getattr(page, f"is_{name}")), None)
        if named is not None:
            return named
    return None


def _is_beside(page: Any) -> bool:
    """Whether a page says that it is a label, an overview, or a mask."""
    described = "" if getattr(page, "is_ome", False) else getattr(page, "description", "") or ""
    return _kind(page) == MACRO or _is_mask(page) or bool(BESIDE.search(described))


def _is_mask(page: Any) -> bool:
    """Whether a page says which pixels of another page have values."""
    return bool(_kind(page) & MASK)


def _kind(page: Any) -> int:
    return page.tags.valueof("NewSubfileType", 0) if hasattr(page, "tags") else 0


def _shows_the_same(finer: Image, coarser: Image) -> bool:
    """Whether two images have about the same colours at the same places, which are not all blank."""
    told: list[float] = []
    spot_px = min(SPOT_PX, max(1, min(coarser.size) // (2 * SPOTS)))  # so that they do not overlap
    for spot in product(range(1, 2 * SPOTS, 2), repeat=2):
        colours = []
        for image in (coarser, finer):
            side = max(1, round(spot_px * image.size[0] / coarser.size[0]))
            starts = (
                min(max(0, size * at // (2 * SPOTS) - side // 2), size)
                for size, at in zip(image.size, spot, strict=True)
            )
            box = [Interval(start, min(start + side, size)) for start, size in zip(starts, image.size, strict=True)]
            colours.append(image.read(*box).mean((0, 1)))
        if min(map(np.min, colours)) < BLANK:
            told.append(float(np.abs(colours[0] - colours[1]).max()))
    return float(np.mean(told or [0.0])) <= MOST_UNLIKE


def _pixels_of(page: Any) -> int:
    return int(page.imagelength) * int(page.imagewidth)


def _reduces(first: Any, page: Any) -> bool:
    """Whether a page shows what the first page shows, with fewer pixels."""
    if not isinstance(getattr(page, "imagelength", None), int) or min(page.imagelength, page.imagewidth) < 1:
        return False
    alike = (page.samplesperpixel, page.bitspersample, page.sampleformat, page.imagedepth)
    if alike != (first.samplesperpixel, first.bitspersample, first.sampleformat, first.imagedepth):
        return False
    down, across = first.imagelength / page.imagelength, first.imagewidth / page.imagewidth
    # Sides are rounded, so each may be a pixel longer or shorter than the other side's ratio says.
    return min(down, across) > 1 and (
        abs(first.imagelength / across - page.imagelength) <= 1 or abs(first.imagewidth / down - page.imagewidth) <= 1
    )


def _ratio(value: Any) -> float | None:
    """A TIFF rational (numerator, denominator) as a number; None if it is none, or not positive."""
    try:
        numerator, denominator = value
        return numerator / denominator if numerator > 0 and denominator > 0 else None
    except (TypeError, ValueError):
        return None


def _pixels_of_jpeg(data: bytes) -> int | None:
    """The pixels of a JPEG by the header of its frame, if nothing but tables, comments and such comes before it."""
    at = len(START_OF_JPEG)
    while data.startswith(START_OF_JPEG) and len(data) >= at + FRAME.size:
        mark, kind, length, _, height, width = FRAME.unpack_from(data, at)
        if mark == MARK and kind in FRAMES:
            return int(height * width)
        if mark != MARK or kind not in BEFORE_FRAME or length < 2:
            break
        at += 2 + length
    return None


def _is_measured(path: Path, index: int, data: bytes, sides: tuple[int, int]) -> bool:
    """Whether the size of a tile that is a picture is known: a few bytes may claim any number of pixels.

    Raises BadImage for a picture that is far larger than the tile that it is to be, and for a JPEG that ends in zeros,
    for which decoders show grey, or any colours.
    """
    if (
        data.startswith(START_OF_JPEG)
        and not any(data[-ZEROS_OF_MISSING:])
        and data.rfind(END_OF_JPEG) < data.rfind(SCAN_OF_JPEG)
    ):
        raise BadImage(path, f"has a JPEG in tile {index} that ends in zeros: not all of it was copied")
    pixels = _pixels_of_jpeg(data)
    try:
        if pixels is None:
            with PIL.Image.open(io.BytesIO(data)) as picture:
                pixels = prod(picture.size)
    except (PIL.Image.DecompressionBombError, PIL.Image.DecompressionBombWarning):
        pixels = sys.maxsize
    except (OSError, SyntaxError, ValueError, LookupError, TypeError, struct.error, EOFError, ArithmeticError):
        return False
    if pixels > MOST_SPARE * prod(sides):
        told = f"{sides[0]} x {sides[1]}"
        raise BadImage(path, f"has a picture far larger than {told} pixels in tile {index}: it is damaged")
    return True


def samples_of(path: Path, page: Any, descriptor: int) -> Samples:
    """All samples of a page, in its own shape.

    Raises BadImage, also if its tiles are pictures far larger than it says.
    """
    kind, (down, *across) = int(page.keyframe.compression), page.keyframe.chunks
    elsewhere = kind in UNMEASURED
    if kind in PICTURES:
        for index, (offset, num_bytes) in enumerate(zip(page.dataoffsets, page.databytecounts, strict=True)):
            data = os.pread(descriptor, num_bytes, offset)
            elsewhere |= not _is_measured(path, index, data, (down, prod(across)))
    with blaming(path, "has a page that cannot be decoded"):
        return _elsewhere(path, page) if elsewhere else page.asarray()


def _elsewhere(path: Path, page: Any, index: int | None = None) -> Samples:
    """The samples of a page, or of one of its tiles, decoded in a process with a limit. Raises BadImage."""
    answer, content = ask("tifffile", path, (page.treeindex, index))
    if "error" in answer:
        what = f"a page of {_pixels_of(page.keyframe)} pixels" if index is None else f"tile {index}"
        raise BadImage(path, f"{what} cannot be decoded: {answer['error']}")
    return np.frombuffer(content, answer["dtype"]).reshape(answer["shape"])


class _Tiff:
    """Its pages are one with all colours, or one of each colour."""

    no_data: float | None = None  # the value of pixels that have none

    def __init__(self, path: Path, pages: Sequence[Any], ome: str | None) -> None:
        self._path, self._pages = path, pages
        first = pages[0]
        # Both are looked up in the file when first used, and it is closed by then.
        self._decode, self._jpegtables = first.decode, {page.index: page.jpegtables for page in pages}
        self._elsewhere, self._pictures = (int(first.compression) in kinds for kinds in (UNMEASURED, PICTURES))
        self.blank, self._colour = self._meaning(ome)
        height, width = self.size = first.imagelength, first.imagewidth
        down, across = self._sides = (
            (first.tilelength, first.tilewidth) if first.is_tiled else (min(first.rowsperstrip, height), width)
        )
        if min(height, width, down, across) < 1 or first.imagedepth != 1:
            raise BadImage(path, f"has {height} x {width} x {first.imagedepth} pixels: it is damaged")
        if down * across > MOST_PIXELS_AT_ONCE:
            what = f"{down} x {across} pixels that must be decoded at once"
            raise BadImage(path, f"stores {what}, which is too many: convert it to a TIFF of small tiles")
        self._tiles_down, self._tiles_across = ceil_div(height, down), ceil_div(width, across)
        self._planes = first.samplesperpixel if first.planarconfig == 2 else 1
        self._read = [*product(pages, range(self._planes))]  # in this order
        # Where rows lie in the file as they are, those that a box needs are read alone.
        self._row_shape = (across, first.samplesperpixel // self._planes)
        formats = np.unique(first.tags.valueof("SampleFormat", _UNSIGNED)).tolist()
        stored = (first.compression, first.predictor, first.fillorder, first.bitspersample, formats)
        self._plain_rows = stored == (_UNCOMPRESSED, 1, 1, 8, [_UNSIGNED])
        expected = self._tiles_down * self._tiles_across * self._planes
        for page in pages:
            _check_segments(path, page)
            if len(page.dataoffsets) != expected:
                found = f"lists {len(page.dataoffsets)} tiles where its size needs {expected}"
                raise BadImage(path, f"{found}: it is damaged")
            for name, codes in SEGMENT_TAGS.items():  # as numbers of Python's those of a slide take 10 MB
                packed = np.asarray(getattr(page, name), np.uint64)
                setattr(page, name, packed)
                for code in codes & {*getattr(page, "tags", {}).keys()}:
                    page.tags[code].value = packed

    def _meaning(self, ome: str | None) -> tuple[npt.NDArray[Any], Callable[[npt.NDArray[Any]], npt.NDArray[Any]]]:
        """The value of missing pixels, and a function that makes pixels of samples (rows, columns, samples)."""
        try:
            return np.full(3, WHITE, np.uint8), colouring(self._pages[0], len(self._pages), ome)
        except Unsupported as error:
            if self._pages[0].index == 0:  # which Pillow reads
                raise
            told = "has a smaller page before that of the picture, whose colours are neither grey nor RGB"
            raise BadImage(self._path, f"{told}: convert it to RGB") from error
        except ValueError as error:
            raise BadImage(self._path, str(error)) from error

    def read(self, *space: Interval) -> npt.NDArray[Any]:
        rows, cols = space
        pixels = np.empty((rows.length, cols.length, *self.blank.shape), self.blank.dtype)
        if not pixels.size:
            return pixels
        spans = map(_spans, space, self._sides)
        descriptor = os.open(self._path, os.O_RDONLY)
        try:
            for (down, inner_rows, outer_rows), (across, inner_cols, outer_cols) in product(*spans):
                part = pixels[outer_rows, outer_cols]
                samples = self._tile(descriptor, down, across, inner_rows)
                if samples is None:
                    part[...] = self.blank
                    continue
                found = samples[:, inner_cols]
                if found.shape[:2] != part.shape[:2]:
                    part[...] = self.blank
                part[: found.shape[0], : found.shape[1]] = self._colour(found)
        finally:
            os.close(descriptor)
        return pixels

    def _tile(self, descriptor: int, down: int, across: int, rows: slice) -> npt.NDArray[Any] | None:
        """The samples (rows, columns, samples) of rows of a tile, or None where the file leaves it out as empty."""
        place, tiles = down * self._tiles_across + across, self._tiles_down * self._tiles_across
        planes = [self._segment(descriptor, page, plane * tiles + place, rows) for page, plane in self._read]
        there = next((each for each in planes if each is not None), None)
        if there is None:
            return None
        found = [np.full_like(there, self.no_data or 0) if each is None else each for each in planes]
        return found[0] if len(found) == 1 else np.concatenate(found, axis=2)

    def _segment(self, descriptor: int, page: Any, index: int, rows: slice) -> npt.NDArray[Any] | None:
        offset, num_bytes = int(page.dataoffsets[index]), int(page.databytecounts[index])
        row_bytes = prod(self._row_shape)
        if offset == 0 or num_bytes == 0:
            return None
        left = max(0, os.fstat(descriptor).st_size - offset)
        if left < num_bytes:
            raise BadImage(self._path, f"is truncated: tile {index} has {left} of {num_bytes} bytes")
        if self._plain_rows and num_bytes >= self._sides[0] * row_bytes:
            count = rows.stop - rows.start
            data = os.pread(descriptor, count * row_bytes, offset + rows.start * row_bytes)
            return np.frombuffer(data, np.uint8).reshape(count, *self._row_shape)
        data = os.pread(descriptor, num_bytes, offset)
        if self._elsewhere or (self._pictures and not _is_measured(self._path, index, data, self._sides)):
            return _elsewhere(self._path, page, index)[0, rows]
        with blaming(self._path, f"tile {index} cannot be decoded"):
            return self._decode(data, index, jpegtables=self._jpegtables[page.index])[0][0, rows]


class AperioLevel(OpenSlideLevel):
    """A level of an SVS file. If all its tiles are there as JPEG, they are read here: in half of OpenSlide's time, and
    to the same bytes.
    """

    @cached_property
    def _image(self) -> Image | None:
        with suppress(DatasetError), opened(self._path) as file:  # OpenSlide says what is wrong
            tiled = [page for page in file.pages if page.is_tiled]
            pages = [page for page in tiled if (page.imagelength, page.imagewidth) == tuple(self.size)]
            if len(pages) == 1 and int(pages[0].compression) == _JPEG and all(pages[0].databytecounts):
                return _Tiff(self._path, pages, None)
        return None

    def read(self, *space: Interval) -> Pixels:
        return super().read(*space) if self._image is None else self._image.read(*space)


def scanned_level(header: Any, path: Path, number: int = 0) -> OpenSlideLevel:
    """A level of a file by what OpenSlide says of it."""
    width, height = header["levels"][number]
    kind = AperioLevel if header["properties"].get("openslide.vendor") == "aperio" else OpenSlideLevel
    return kind(path, number, (height, width), float(header["downsamples"][number]))


class _Indices(_Tiff):
    """A mask: pixels are numbers of classes, whatever colours they are shown in."""

    def _meaning(self, ome: str | None) -> tuple[npt.NDArray[Any], Callable[[npt.NDArray[Any]], npt.NDArray[Any]]]:
        first = self._pages[0]
        if len(self._pages) * first.samplesperpixel != 1 or first.dtype is None or first.dtype.kind not in "bui":
            found = f"{len(self._pages) * first.samplesperpixel} values of {first.dtype}"
            raise BadImage(self._path, f"has {found} in each pixel: a mask has one, the number of its class")
        if int(first.compression) in LOSSY:
            raise BadImage(self._path, "is compressed with loss, which changes classes: write it without")
        return np.zeros((), first.dtype), lambda samples: samples[..., 0]


class _Values(_Tiff):
    """A picture whose values are as they are stored, of all its bands or of some; missing tiles have no data, or 0.

    Bands that lie each in tiles of their own are read alone.
    """

    def __init__(self, path: Path, pages: Sequence[Any], ome: str | None, bands: Sequence[int]) -> None:
        self._bands = bands
        super().__init__(path, pages, ome)
        if len(self._read) > 1 and len(self._read) == len(pages) * pages[0].samplesperpixel:
            self._read = [self._read[band] for band in self._bands]
            self._colour = lambda samples: samples

    def _meaning(self, ome: str | None) -> tuple[npt.NDArray[Any], Callable[[npt.NDArray[Any]], npt.NDArray[Any]]]:
        first = self._pages[0]
        count, photometric = len(self._pages) * first.samplesperpixel, int(first.photometric)
        jpeg = photometric == _YCBCR and first.compression in _JPEG_COMPRESSIONS
        if str(first.dtype) not in VALUES or not (jpeg or photometric in (_MIN_IS_BLACK, _RGB)):
            told = f"has {count} values of {first.dtype} in each pixel, shown as {first.photometric.name}"
            raise BadImage(self._path, f"{told}: expected 1 (grey), 3 (RGB) or bands, of {', '.join(VALUES)}")
        self._bands = chosen_bands(self._path, self._bands, count)
        self.no_data = _no_data(first)
        blank = np.full(len(self._bands), self.no_data or 0, first.dtype)
        whole = self._bands == [*range(count)]
        return blank, lambda samples: samples if whole else samples[..., self._bands]


def _no_data(page: Any) -> float | None:
    """The value of pixels that have none, by the tag of GDAL; None if no pixel can have it."""
    text = str(page.tags.valueof(GDAL_NODATA, "")).strip(" \0")
    try:
        value = float(text)
        if page.dtype.kind == "f":  # writers round the least number of 32 bits, or say that of 64
            with np.errstate(over="ignore"):
                return float(page.dtype.type(text))
    except ValueError:
        return None
    limits = np.iinfo(page.dtype)
    return value if limits.min <= value <= limits.max else None


def _spans(wanted: Interval, side: int) -> list[tuple[int, slice, slice]]:
    """The tiles of an axis that an interval touches: of each its number, and the part in it and in the interval."""
    tiles = [(tile, tile.intersect(wanted)) for tile in wanted.blocks(side)]
    return [
        (tile.start // side, slice(*part.shift(-tile.start)), slice(*part.shift(-wanted.start))) for tile, part in tiles
    ]


def _planes(path: Path, file: Any, number: int = 0) -> Sequence[Any]:
    """The page that is the image of a series, or where channels are pages of their own (as OME's and ImageJ's CYX),
    these.
    """
    first = file.pages[0]
    if len(file.pages) == 1:
        return [first]
    series = file.series[number]
    if number:
        first = series.keyframe
    elif series.keyframe.index != first.index:
        return [first]
    lengths = dict(zip(series.axes, series.shape, strict=True))
    stacked = prod(length for axis, length in lengths.items() if axis not in "YXSC")
    planes = [page for page in series.pages if page is not None]
    if stacked != 1 or len(planes) != max(1, prod(series.shape) // prod(first.shape)):
        size = " x ".join(map(str, series.shape))
        raise BadImage(path, f"is a stack of images (axes {series.axes}, {size}): write each to a file of its own")
    return planes


def _check_segments(path: Path, page: Any) -> None:
    """See that the file holds all that a page lists, so that every rank rejects it and not only the one whose tile is
    missing. (tifffile opens a truncated file with no error.)
    """
    file_bytes = path.stat().st_size
    if len(page.dataoffsets) != len(page.databytecounts):
        raise BadImage(path, f"lists {len(page.dataoffsets)} tiles, and sizes of {len(page.databytecounts)}")
    offsets, counts = np.asarray(page.dataoffsets, np.uint64), np.asarray(page.databytecounts, np.uint64)
    if not ((offsets > 0) & (counts > 0)).any():
        raise BadImage(path, "has no pixels: it is damaged")
    ends = np.where(offsets > 0, offsets + counts, 0)
    if ends.max() > file_bytes or counts.max() > file_bytes:
        missing = int(((ends > file_bytes) | (counts > file_bytes)).sum())
        raise BadImage(path, f"is truncated: {missing} of {ends.size} tiles lie beyond its {file_bytes} bytes")


def _check_directories(path: Path, file: Any) -> None:
    """See that the directories of all pages are in the file. (tifffile opens a truncated file, with fewer pages.) The
    tiles of further pages, which are never read, are not looked at.
    """
    file.filehandle.seek(file.pages.next_page_offset)
    if file.filehandle.read(file.tiff.offsetsize) != bytes(file.tiff.offsetsize):
        raise BadImage(path, f"is truncated: the directory of a page lies beyond its {file.filehandle.size} bytes")
