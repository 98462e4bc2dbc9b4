"""Read boxes of TIFF files of any size: only the tiles (or strips) that a box touches are read and decoded.

tifffile parses the header, once; after that the file is closed, and each read opens it, fetches bytes with `os.pread`
and closes it again. So no handle is ever shared between threads or carried over a fork.
"""

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mpi4dl.datasets.base import BadImage, DatasetError, Pixels
from mpi4dl.datasets.colour import WHITE, rgb_of
from mpi4dl.geometry import Interval, ceil_div

MAGIC = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")

# Values of the TIFF 6.0 tags that this reader handles itself.
_MIN_IS_WHITE, _MIN_IS_BLACK, _RGB, _YCBCR = 0, 1, 2, 6
_JPEG_COMPRESSIONS = (6, 7)
_PREMULTIPLIED, _STRAIGHT = 1, 2


class TiffImage:
    """The first page of a TIFF file (of a pyramid: its full resolution), as RGB bytes.

    Raises:
        BadImage: no TIFF, truncated, or with a number of channels that no colour image has.
        Unsupported: intact, but stored in a way that this reader leaves to Pillow (palettes, CMYK, 1 bit, ...).
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._page = page = _first_page(path)
        _check_complete(path, page)
        if page.samplesperpixel not in (1, 2, 3, 4):
            raise BadImage(path, f"has {page.samplesperpixel} channels; expected 1 (grey) or 3 (colour), and alpha")
        if not _handled(page):
            raise Unsupported(path)
        self.height: int = page.imagelength
        self.width: int = page.imagewidth
        self.tiled = bool(page.is_tiled)
        self._tile_height: int = page.tilelength if page.is_tiled else min(page.rowsperstrip, self.height)
        self._tile_width: int = page.tilewidth if page.is_tiled else self.width
        if min(self.height, self.width, self._tile_height, self._tile_width) < 1:
            raise BadImage(path, "has no pixels: it is damaged")
        self._tiles_down = ceil_div(self.height, self._tile_height)
        self._tiles_across = ceil_div(self.width, self._tile_width)
        self._planes = page.samplesperpixel if page.planarconfig == 2 else 1
        expected = self._tiles_down * self._tiles_across * self._planes
        if len(page.dataoffsets) != expected:
            raise BadImage(path, f"lists {len(page.dataoffsets)} tiles where its size needs {expected}: it is damaged")

    def read(self, rows: Interval, cols: Interval) -> Pixels:
        pixels = np.full((rows.length, cols.length, 3), WHITE, np.uint8)
        try:
            descriptor = os.open(self._path, os.O_RDONLY)
        except OSError as error:
            raise BadImage(self._path, f"cannot be read: {error.strerror}") from error
        try:
            for down, across in self._touched(rows, cols):
                top, left = down * self._tile_height, across * self._tile_width
                samples = self._tile(descriptor, down, across)
                if samples is None:
                    continue
                inside_rows = rows.intersect(Interval(top, top + samples.shape[0]))
                inside_cols = cols.intersect(Interval(left, left + samples.shape[1]))
                part = samples[_slice(inside_rows, top), _slice(inside_cols, left)]
                pixels[_slice(inside_rows, rows.start), _slice(inside_cols, cols.start)] = self._colour(part)
        finally:
            os.close(descriptor)
        return pixels

    def _touched(self, rows: Interval, cols: Interval) -> Iterator[tuple[int, int]]:
        if rows.empty or cols.empty:
            return
        for down in range(rows.start // self._tile_height, ceil_div(rows.stop, self._tile_height)):
            for across in range(cols.start // self._tile_width, ceil_div(cols.stop, self._tile_width)):
                yield down, across

    def _tile(self, descriptor: int, down: int, across: int) -> npt.NDArray[Any] | None:
        """The samples (rows, columns, samples) of one tile, or None where the file leaves it out as empty."""
        planes = []
        for plane in range(self._planes):
            index = (plane * self._tiles_down + down) * self._tiles_across + across
            samples = self._segment(descriptor, index)
            if samples is None:
                return None
            planes.append(samples)
        return planes[0] if len(planes) == 1 else np.concatenate(planes, axis=2)

    def _segment(self, descriptor: int, index: int) -> npt.NDArray[Any] | None:
        offset, num_bytes = self._page.dataoffsets[index], self._page.databytecounts[index]
        if offset == 0 or num_bytes == 0:
            return None
        data = os.pread(descriptor, num_bytes, offset)
        if len(data) < num_bytes:
            raise BadImage(self._path, f"is truncated: tile {index} has {len(data)} of {num_bytes} bytes")
        try:
            samples = self._page.decode(data, index, jpegtables=self._page.jpegtables)[0]
        except Exception as error:  # each codec has its own kinds of error for bytes that it cannot decode
            raise BadImage(self._path, f"tile {index} cannot be decoded: {error}") from error
        return samples[0]

    def _colour(self, samples: npt.NDArray[Any]) -> Pixels:
        page = self._page
        if page.photometric == _MIN_IS_WHITE:
            samples = np.iinfo(samples.dtype).max - samples
        if page.samplesperpixel in (1, 3):
            return rgb_of(samples)
        kind = page.extrasamples[-1] if page.extrasamples else 0
        if kind not in (_PREMULTIPLIED, _STRAIGHT):
            return rgb_of(samples[..., :-1])
        return rgb_of(samples, alpha=True, premultiplied=kind == _PREMULTIPLIED)


class Unsupported(Exception):
    """The TIFF file is stored in a way that is left to another reader."""


def _slice(interval: Interval, origin: int) -> slice:
    return slice(interval.start - origin, interval.stop - origin)


def _first_page(path: Path) -> Any:
    try:
        import tifffile
    except ImportError as error:
        raise DatasetError(f"{path}: reading TIFF needs tifffile: run pip install tifffile imagecodecs") from error
    try:
        with tifffile.TiffFile(path) as file:
            page = file.pages[0]
            # Both are looked up in the file when first used, and it is closed by then.
            _ = page.decode, page.jpegtables
    except Exception as error:  # a damaged header makes the parser stumble in many ways
        raise BadImage(path, f"has no readable TIFF header, it is truncated or damaged: {error}") from error
    return page


def _handled(page: Any) -> bool:
    ycbcr_jpeg = page.photometric == _YCBCR and page.compression in _JPEG_COMPRESSIONS
    known_colours = page.photometric in (_MIN_IS_WHITE, _MIN_IS_BLACK, _RGB) or ycbcr_jpeg
    known_samples = page.bitspersample in (8, 16) and page.dtype in ("uint8", "uint16")
    return known_colours and known_samples and page.imagedepth == 1


def _check_complete(path: Path, page: Any) -> None:
    """See that the file holds all that its header speaks of, so that every rank rejects it and not only the one whose
    tile is missing. (tifffile opens a truncated file, with fewer pages and no error.) The tiles of further pages, which
    are never read, are not looked at.
    """
    file_bytes = path.stat().st_size
    offsets = np.asarray(page.dataoffsets, np.uint64)
    ends = np.where(offsets > 0, offsets + np.asarray(page.databytecounts, np.uint64), 0)
    if ends.size and ends.max() > file_bytes:
        missing = int((ends > file_bytes).sum())
        raise BadImage(path, f"is truncated: {missing} of {ends.size} tiles lie beyond its {file_bytes} bytes")
    with path.open("rb") as file:
        header = file.read(16)
        order = "<" if header[:2] == b"II" else ">"
        big = struct.unpack(order + "H", header[2:4])[0] == 43
        # Classic: 4-byte offsets, 2-byte entry counts, 12-byte entries. BigTIFF: 8, 8 and 20.
        offset_code, count_code, entry_bytes = ("Q", "Q", 20) if big else ("I", "H", 12)
        (offset,) = struct.unpack_from(order + offset_code, header, 8 if big else 4)
        seen: set[int] = set()
        while offset and offset not in seen:
            seen.add(offset)
            try:
                file.seek(offset)
                (count,) = struct.unpack(order + count_code, file.read(struct.calcsize(count_code)))
                file.seek(count * entry_bytes, os.SEEK_CUR)
                (offset,) = struct.unpack(order + offset_code, file.read(struct.calcsize(offset_code)))
            except (struct.error, OSError, OverflowError, ValueError) as error:
                reason = f"is truncated: the directory of page {len(seen)} lies beyond its {file_bytes} bytes"
                raise BadImage(path, reason) from error
