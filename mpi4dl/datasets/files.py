"""Which reader opens an image file; whatever a reader stumbles over becomes one kind of error here.

`open_image`: pictures and slides in colours. `open_stored_picture`: with the channels and the depth of the file.
"""

import io
import os
import re
import warnings
from collections.abc import Callable, Collection, Sequence
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import numpy.typing as npt
import PIL.Image

from mpi4dl._files import open_regular
from mpi4dl._wording import counted, mebibytes
from mpi4dl.datasets import tiff
from mpi4dl.datasets.base import BadImage, FunctionImage, Image, Pixels, Values, blaming, finite, package, unit_values
from mpi4dl.datasets.colour import TAG, WHITE, in_strips, rgb_of_pillow, upright
from mpi4dl.datasets.reader_process import open_with_openslide
from mpi4dl.datasets.tiff import Unsupported
from mpi4dl.geometry import Interval

# Read PNG, JPEG and other images that have to be decoded whole, with Pillow.

_TOO_LARGE = (PIL.Image.DecompressionBombError, PIL.Image.DecompressionBombWarning)
_SMALL_BYTES = 1 << 18
_STRIP_PIXELS = 1 << 20  # converted at a time, so that little is alive beside the decoded image and the result

# Pillow warns of a large picture, or of odd metadata, at each reading on each rank. What matters is raised.
warnings.filterwarnings("ignore", module=r"PIL\.")


def _open_picture(path: Path, file: BinaryIO) -> Image:
    """An image whose header is read at once, and whose pixels are decoded, all of them, at the first `read`.

    A small file, whose bytes are in memory, is opened once. A larger one is opened again for its pixels.

    Raises:
        BadImage: not an image, or larger than Pillow's own limit. Damaged ones raise what Pillow raises.
    """
    try:
        small = io.BytesIO(file.getvalue()) if isinstance(file, io.BytesIO) else None
        image = PIL.Image.open(small or file)
        # Not the override for PNG, which decodes all pixels to find what may stand behind them.
        orientation = None if image.format == "TIFF" else PIL.Image.Image.getexif(image).get(TAG)
    except _TOO_LARGE as error:
        reason = f"is too large to be decoded whole ({error}): convert it to a tiled TIFF in RGB or grey"
        raise BadImage(path, f"{reason}, of which boxes can be read") from error
    except PIL.UnidentifiedImageError as error:
        reason = "is not an image of a kind that Pillow knows: the file is damaged, or its extension is wrong"
        raise BadImage(path, reason) from error
    size, decoded = image.size, None if small is None else image

    def strip(rows: Interval, cols: Interval) -> Pixels:
        nonlocal decoded
        if decoded is None:
            # By its path, Pillow 13 maps an uncompressed TIFF that stands on its side with its sides exchanged.
            with path.open("rb") as stream, PIL.Image.open(stream) as found:
                found.load()
            decoded = found
        decoded.load()
        if decoded.size != size:
            raise BadImage(path, f"has {decoded.size} pixels where its header says {size}")
        box = (cols.start, rows.start, cols.stop, rows.stop)
        return rgb_of_pillow(decoded if box == (0, 0, *size) else decoded.crop(box))

    def read(rows: Interval, cols: Interval) -> Pixels:
        return in_strips(strip, rows, cols, max(1, _STRIP_PIXELS // max(1, cols.length)))

    # Pillow itself turns what is in a TIFF file.
    return upright(FunctionImage(size[::-1], read), orientation)


SLIDE_SUFFIXES = (".svs", ".ndpi", ".mrxs", ".scn", ".vms", ".vmu", ".bif", ".svslide")
PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff")
ZARR_SUFFIXES = (".zarr", ".ome.zarr")
SUFFIXES = PICTURE_SUFFIXES + SLIDE_SUFFIXES + ZARR_SUFFIXES
DICOM = ".dcm"  # of files that are a slide together with others in their folder
WHOLE_SLIDES = (*PICTURE_SUFFIXES, *SLIDE_SUFFIXES, DICOM)
# As scanners and archives name files of DICOM: without an ending, or by identifiers of digits and points.
_NAMED_OTHERWISE = re.compile(r"(?!DICOMDIR$)([^.]*|.*\.([0-9]+|ima))", re.IGNORECASE)


def is_dicom(path: Path) -> bool:
    """Whether a file is of DICOM: by its ending, or by its first bytes where it has none, or one of digits."""
    if path.name.lower().endswith(DICOM):
        return True
    try:
        if not _NAMED_OTHERWISE.fullmatch(path.name):
            return False
        with open_regular(path) as file:
            return file.read(132)[128:] == b"DICM"
    except OSError:  # what cannot be read says nothing
        return False


def is_zarr(path: Path) -> bool:
    """Whether a path is a folder of Zarr, which is one image: nothing in there is an image of its own."""
    return path.name.lower().endswith(ZARR_SUFFIXES) and path.is_dir()


def open_image(path: Path) -> Image:
    """Open an image file: scanners' formats by their extension, TIFF and the rest by their first bytes.

    Raises:
        BadImage: the file cannot be read, is empty, damaged, or no image; so does `read` of what this returns.
        DatasetError: the package that reads this format is not installed.
    """
    if is_zarr(path):
        stored = open_stored_picture(path)
        if stored.channels not in (1, 3):
            raise BadImage(path, f"has {stored.channels} channels, and colours have 1 or 3: choose some by `channels`")
        return shown(stored)
    with blaming(path), open_regular(path, _SMALL_BYTES) as file:
        magic = file.read(4)
        if not magic:
            raise BadImage(path, "is empty (0 bytes)")
        scanned = path.suffix.lower() in SLIDE_SUFFIXES
        if magic in tiff.MAGIC and not scanned:
            try:
                return _checked(path, tiff.open_tiff(path))
            except tiff.Scanned:
                scanned = True
            except Unsupported:
                pass
        if scanned:
            return _checked(path, tiff.scanned_level(open_with_openslide(path)[0], path))
        return _checked(path, _open_picture(path, file))


def _checked(path: Path, image: Image) -> Image:
    """The image of a reader, whose errors become `BadImage`."""

    def read(*space: Interval) -> Pixels:
        with blaming(path):
            pixels = image.read(*space)
            if pixels.dtype != np.uint8 or pixels.shape != (*[interval.length for interval in space], 3):
                asked = " x ".join(map(str, space))
                raise BadImage(path, f"gives {pixels.dtype} pixels of shape {pixels.shape} for {asked}")
        return pixels

    return FunctionImage(image.size, read)


def check_unpacked(path: Path, archive: Any, names: Collection[str]) -> None:
    """Raise BadImage if these arrays of an open .npz file unpack to more than the memory of this machine."""
    members = [each for each in archive.zip.infolist() if each.filename.removesuffix(".npy") in names]
    unpacked, memory = sum(each.file_size for each in members), _memory_bytes()
    if unpacked > memory:
        raise BadImage(
            path,
            f"unpacks to {mebibytes(unpacked)}, more than the {mebibytes(memory)} of memory here: it is damaged, or "
            "write its arrays as .npy, of which parts can be read",
        )


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


# Inputs and targets of a model that makes images out of images, and rasters of several bands, keep their channels and
# their depth: 8 or 16 bits, or 32 of floating point.

TARGET_SUFFIXES = (".png", ".tif", ".tiff", *ZARR_SUFFIXES)
DEPTHS = {
    "uint8": "8 bits",
    "uint16": "16 bits",
    "int16": "16 bits with a sign",
    "float32": "32 bits of floating point",
}
# Which channels of pictures are read: as colours of 8 bits, all as they are stored, or these, counted from 1; auto: all
# of those that are neither grey nor of three colours.
Channels = Literal["auto", "rgb", "all"] | tuple[int, ...]
_CHANNELS = {"1": 1, "L": 1, "I": 1, "I;16": 1, "RGB": 3, "P": 3}  # by Pillow's modes
_PNG = b"\x89PNG"
_BIT_DEPTH = 24  # where a PNG file has it


SCALES = (1, 2, 4)  # how many times as large as inputs targets may be


def channel_names(count: int) -> tuple[str, ...]:
    """The names of so many channels."""
    known = {1: ("grey",), 3: ("red", "green", "blue")}
    return known.get(count) or tuple(f"band {number}" for number in range(1, count + 1))


class StoredPicture:
    """A picture of `channels`, whose `values` are of the type `depth` in its file.

    Pixels of `no_data` have none, nor have those where `inside`, a mask, is 0.
    Of a target, `scale` says how many times as large as its input it is.
    `gaps`: pixels that are not-a-number have no data; of other images they are errors.
    """

    gaps = True

    def __init__(
        self,
        path: Path,
        stored: Image,
        channels: int,
        depth: str,
        no_data: float | None = None,
        inside: Image | None = None,
    ) -> None:
        self.path, self.size, self.channels, self.values = path, stored.size, channels, depth
        self.scale, self._stored, self._no_data, self._inside = 1, stored, no_data, inside

    def read(self, *space: Interval) -> Values:
        """A box, (rows, columns, channels): uint8, or float32 that is 0 to 1 of 16 bits, and as stored of 32.

        Where no data is marked by a value or a mask, it is float32, and not-a-number there. Raises BadImage.
        """
        with blaming(self.path):
            stored = self._stored.read(*space)
            values = unit_values(stored)
            if self._no_data is not None:
                values = np.where(stored == self._no_data, np.float32(np.nan), _unit(values))
            if self._inside is not None:
                values = np.where(self._inside.read(*space)[..., None], _unit(values), np.float32(np.nan))
            return finite(self.path, values, gaps=True)

    def require(self, channels: int, depth: str | None, noun: str) -> None:
        """Raise BadImage if other pictures of this kind have other channels, or another depth."""
        if self.channels != channels:
            has = counted(self.channels, "channel")
            raise BadImage(self.path, f"has {has}, but other {noun}s have {channels}: write all {noun}s alike")
        if depth is not None and self.values != depth:
            told = f"has {DEPTHS[self.values]}, but other {noun}s have {DEPTHS[depth]}"
            raise BadImage(self.path, f"{told}: write all {noun}s alike")

    def require_size_of(self, image: Any) -> None:
        """Raise BadImage if this target is not `scale` times as large as its input."""
        if tuple(self.size) != tuple(self.scale * side for side in image.size):
            mine, others = (" x ".join(map(str, each)) for each in (self.size, image.size))
            told = f"is a target of {mine} pixels, but its input {getattr(image, 'path', '')} has {others}"
            larger = f"{' or '.join(map(str, SCALES[1:]))} times as many along each side in all pairs"
            usual = f"{self.scale} times as many along each side, as in the first pair"
            raise BadImage(self.path, f"{told}: they must be {f'equal, or {larger}' if self.scale == 1 else usual}")

    def blocks(self) -> "Image":
        """The target as an image of the size of its input: channels are `scale` x `scale` pixels in rows, each of all
        channels.
        """
        scale = self.scale
        if scale == 1:
            return self

        def read(rows: Interval, cols: Interval) -> Values:
            pixels = self.read(*(Interval(each.start * scale, each.stop * scale) for each in (rows, cols)))
            inner = pixels.reshape(rows.length, scale, cols.length, scale, -1).swapaxes(1, 2)
            return inner.reshape(rows.length, cols.length, -1)

        return FunctionImage(tuple(side // scale for side in self.size), read)


def as_rgb(values: Values) -> Pixels:
    """Pixels (rows, columns, channels) of bytes, or of 0 to 1, in colours of bytes; of other channels than 3 the first
    three, or the first in grey.
    """
    values = values[..., : 3 if values.shape[-1] > 2 else 1]
    shown = values if values.dtype == np.uint8 else np.rint(np.nan_to_num(values).clip(0, 1) * WHITE)
    return np.broadcast_to(shown, (*values.shape[:-1], 3)).astype(np.uint8)


def shown(stored: StoredPicture) -> Image:
    """A stored picture in colours of 8 bits, as people look at it: values below 0 and above 1 become 0 and 1."""
    return FunctionImage(stored.size, lambda *space: as_rgb(stored.read(*space)))


def open_stored_picture(path: Path, bands: Sequence[int] = ()) -> StoredPicture:
    """A picture, its header read and its pixels not; with all its channels, or with these, counted from 1.

    Raises BadImage, also for other channels or another depth than there are names for.
    """
    with blaming(path):
        if is_zarr(path):
            from mpi4dl.datasets import zarrs

            found = zarrs.ZarrImage(path, bands)
            if found.dtype not in tiff.VALUES:
                raise BadImage(path, f"has values of {found.dtype}: expected {', '.join(tiff.VALUES)}")
            return StoredPicture(path, found, len(found.bands), found.dtype)
        with open_regular(path) as file:
            head = file.read(_BIT_DEPTH + 1)
        if not head:
            raise BadImage(path, "is empty (0 bytes)")
        if head[:4] in tiff.MAGIC:
            return StoredPicture(path, *tiff.open_values(path, bands))
        wide = head[:4] == _PNG and head[-1] == 16
        with PIL.Image.open(path) as image:
            transparent = "transparency" in image.info
            if image.mode not in _CHANNELS or transparent or (image.mode.startswith("I") and not wide):
                told = f"has pixels of {image.mode}{' with transparency' * transparent}"
                raise BadImage(path, f"{told}: expected 1 channel (grey) or 3 (RGB), of 8 or 16 bits")
            count = _CHANNELS[image.mode]
            places = tiff.chosen_bands(path, bands, count)

            def pixels(opened: PIL.Image.Image) -> npt.NDArray[Any]:
                if wide:  # of three channels Pillow has 8 bits
                    codecs = package("imagecodecs", f"{path}: reading PNG of 16 bits", "tifffile", "imagecodecs")
                    found: npt.NDArray[Any] = codecs.png_decode(path.read_bytes())
                else:
                    found = np.asarray(opened.convert("RGB" if count == 3 else "L"))
                return found.reshape(*opened.size[::-1], count)[..., places]

            return StoredPicture(path, picture(path, image, pixels), len(places), "uint16" if wide else "uint8")


def picture(path: Path, image: PIL.Image.Image, pixels: Callable[[PIL.Image.Image], npt.NDArray[Any]]) -> Image:
    """A picture as Pillow opened it, upright, of which all is decoded at the first `read`."""

    @cache
    def decoded() -> npt.NDArray[Any]:
        with PIL.Image.open(path) as opened:
            return pixels(opened)

    stored = FunctionImage(image.size[::-1], lambda *space: decoded()[tuple(slice(*each) for each in space)])
    return upright(stored, PIL.Image.Image.getexif(image).get(TAG))


def planes_of(pixels: Values) -> npt.NDArray[np.float32]:
    """Pixels (rows, columns, channels) as a target: (channels, rows, columns), 0 to 1; 0 where there is no data."""
    values = np.moveaxis(_unit(pixels), -1, 0)
    return np.ascontiguousarray(np.where(np.isnan(values), np.float32(0), values))


def _unit(pixels: Values) -> npt.NDArray[np.float32]:
    """Values of 0 to 1 as float32."""
    return pixels.astype(np.float32) / np.float32(WHITE if pixels.dtype == np.uint8 else 1)
