"""Pictures that a model makes, written a few rows at a time: PNG of 8 bits, TIFF of more; Zarr of what is Zarr."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import PIL.Image

from mpi4dl._files import Replacement, naming, remove
from mpi4dl.comm import Refusal
from mpi4dl.datasets.base import Pixels, package
from mpi4dl.datasets.colour import WHITE
from mpi4dl.datasets.files import SCALES, ShownPicture, StoredPicture, as_rgb
from mpi4dl.datasets.transform import STRIDE_PX
from mpi4dl.geometry import Interval, ceil_div
from mpi4dl.inference.masks import GREY, RGB, PngFile

if TYPE_CHECKING:
    from mpi4dl.inference.class_maps import SlidePicture

BYTES, ZARR = "uint8", ".zarr"
CHUNK_PX = 512
PNG_KINDS = {1: GREY, 3: RGB}  # by channels


def scale_of(made: Sequence[int], sizes: Iterable[Sequence[int]]) -> int:
    """How many times as large as inputs of these sizes, padded, outputs of up to this size are. Raises Refusal."""
    seen = [max(ceil_div(side, STRIDE_PX) * STRIDE_PX for side in sides) for sides in zip(*sizes, strict=True)]
    scale = made[0] // seen[0]
    if scale not in SCALES or [scale * side for side in seen] != [*made]:
        told, shown = ("x".join(map(str, each)) for each in (made, seen))
        raise Refusal(f"the model's outputs have {told} pixels for images of {shown}: expected as many, 2 or 4 times")
    return scale


def suffix_of(depth: str | None, channels: int) -> str:
    """How files of pictures of this depth end."""
    return ".png" if depth == BYTES and channels in PNG_KINDS else ".tif"


class TiffFile:
    """An uncompressed TIFF file with these tags, written from top to bottom, which is there when it is whole.

    Raises OSError.
    """

    beside: tuple[Path, ...] = ()  # more files of a mask

    def __init__(self, path: Path, size: tuple[int, ...], channels: int, depth: str, tags: Sequence[Any] = ()) -> None:
        tifffile = package("tifffile", f"{path}: writing TIFF", "tifffile", "imagecodecs")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._new = Replacement(path)
        shape, shown = (*size, channels)[: 2 + (channels > 1)], "rgb" if channels == 3 else "minisblack"
        try:
            with naming(path):
                how = {"photometric": shown, "planarconfig": "contig" if channels > 1 else None, "extratags": tags}
                tifffile.imwrite(self._new.temporary, shape=shape, dtype=depth, **how)
                with tifffile.TiffFile(self._new.temporary) as file:
                    offset = file.pages[0].dataoffsets[0]
                self._file = self._new.temporary.open("r+b")
                self._file.seek(offset)
        except OSError:
            self._new.drop()
            raise
        self.path, self._depth = path, depth

    def write(self, where: tuple[slice, ...], rows: npt.NDArray[Any]) -> None:
        """The next rows, (rows, width, channels)."""
        with naming(self.path):
            self._file.write(np.ascontiguousarray(rows, self._depth).tobytes())

    def close(self) -> None:
        with naming(self.path):
            self._file.close()
        self._new.keep()

    def drop(self) -> None:
        with suppress(OSError):
            self._file.close()
        self._new.drop()


class ZarrFile:
    """An image in a folder of OME-Zarr 0.5, written from top to bottom, which is there when it is whole: (channels,
    rows, columns), or (rows, columns) of one channel. Raises OSError.
    """

    beside: tuple[Path, ...] = ()  # more files of a mask

    def __init__(self, path: Path, size: tuple[int, ...], channels: int, depth: str) -> None:
        zarr = package("zarr", f"{path}: writing Zarr", "mpi4dl[zarr]")
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self._new = path, path.with_name(f".{path.name}.new")
        axes, shape = ("yx", size) if channels == 1 else ("cyx", (channels, *size))
        named = [{"name": axis, "type": "channel" if axis == "c" else "space"} for axis in axes]
        level = {"path": "0", "coordinateTransformations": [{"type": "scale", "scale": [1.0] * len(axes)}]}
        try:
            with naming(path):
                group = zarr.open_group(store=str(self._new), mode="w")
                group.attrs["ome"] = {"version": "0.5", "multiscales": [{"axes": named, "datasets": [level]}]}
                chunks = [min(CHUNK_PX, side) if axis in "yx" else 1 for axis, side in zip(axes, shape, strict=True)]
                self._array = group.create_array("0", shape=shape, chunks=chunks, dtype=depth, dimension_names=[*axes])
        except OSError:
            self.drop()
            raise
        self._rows: list[npt.NDArray[Any]] = []
        self._top, self._depth = 0, depth

    def write(self, where: tuple[slice, ...], rows: npt.NDArray[Any]) -> None:
        """The next rows, (rows, width, channels), or (rows, width)."""
        self._rows.append(rows.reshape(*rows.shape[:2], -1))
        if sum(map(len, self._rows)) >= CHUNK_PX:
            self._flush(CHUNK_PX)

    def _flush(self, multiple: int) -> None:
        """Write rows, as many times this number of them as there are: each chunk once."""
        rows = np.concatenate(self._rows)
        count = len(rows) // multiple * multiple
        values = np.moveaxis(rows[:count], -1, 0).astype(self._depth)
        with naming(self.path):
            self._array[..., self._top : self._top + count, :] = values if self._array.ndim == 3 else values[0]
        self._rows, self._top = [rows[count:]], self._top + count

    def close(self) -> None:
        if self._rows:
            self._flush(1)
        with naming(self.path):
            remove(self.path)
            self._new.replace(self.path)

    def drop(self) -> None:
        with suppress(OSError):
            remove(self._new)


SHOWN_PX, GAP_PX = 160, 8


class Example:
    """The middle of an image, of what a model made of it from top to bottom, and of its target, side by side.

    It has `SHOWN_PX` pixels of the target at most, along each side.
    """

    def __init__(self, image: StoredPicture, target: StoredPicture) -> None:
        self._image, self._target = image, target
        sides = [min(SHOWN_PX // target.scale, side) for side in image.size]
        self._box = [
            Interval((n - side) // 2, (n - side) // 2 + side) for n, side in zip(image.size, sides, strict=True)
        ]
        self._rows, self._cols = (Interval(target.scale * at.start, target.scale * at.stop) for at in self._box)
        self._made: list[npt.NDArray[Any]] = []

    def add(self, rows: slice, made: npt.NDArray[Any]) -> None:
        """The next rows, (channels, rows, columns)."""
        here = slice(*(min(max(at - rows.start, 0), made.shape[1]) for at in self._rows))
        self._made.append(made[:, here, slice(*self._cols)])

    def pixels(self) -> Pixels:
        """The picture. Raises BadImage."""
        scale, made = self._target.scale, np.moveaxis(np.concatenate(self._made, 1), 0, -1)
        image = ShownPicture(self._image).read(*self._box).repeat(scale, 0).repeat(scale, 1)
        gap = np.full((len(image), GAP_PX, 3), WHITE, np.uint8)
        target = ShownPicture(self._target).read(self._rows, self._cols)
        return np.concatenate((image, gap, as_rgb(made), gap, target), 1)


def jpeg_of(examples: Sequence[Pixels]) -> bytes:
    """Examples below each other, as JPEG."""
    width, file = max(each.shape[1] for each in examples), BytesIO()
    padded = [np.pad(e, ((0, GAP_PX), (0, width - e.shape[1]), (0, 0)), constant_values=WHITE) for e in examples]
    PIL.Image.fromarray(np.concatenate(padded)).save(file, "JPEG", quality=90)
    return file.getvalue()


class PictureFile:
    """The picture that a model made of one image of this `size`, from rows that come from top to bottom.

    Values below 0, or of integers with a sign below -1, and above 1 become these, unless `depth` is of floating point.
    `undefined`: some are no numbers. `file` is what it is written to, if that is no PNG or TIFF file of its own.
    """

    def __init__(
        self,
        path: Path,
        size: tuple[int, int],
        channels: int,
        depth: str | None,
        tags: Sequence[Any] = (),
        file: "SlidePicture | None" = None,
    ) -> None:
        self.path, self._size, self._depth, self.undefined = path, size, depth or "float32", False
        self._file: PngFile | TiffFile | ZarrFile | SlidePicture
        if file is not None:
            self._file = file
        elif path.suffix == ".png":
            self._file = PngFile(path, size, PNG_KINDS[channels])
        elif path.suffix == ZARR:
            self._file = ZarrFile(path, size, channels, self._depth)
        else:
            self._file = TiffFile(path, size, channels, self._depth, tags)

    def write(self, where: tuple[slice, ...], rows: npt.NDArray[Any]) -> None:
        """Rows (channels, rows, width) of what the model sees, of which the image is the upper left corner."""
        height, width = self._size
        values = np.moveaxis(rows[:, : max(0, height - where[-2].start), :width], 0, -1)
        self.undefined |= bool(np.isnan(values).any())
        if self.undefined or not values.size:
            return
        if self._depth != "float32":
            limits = np.iinfo(self._depth)
            values = np.rint(values.clip(np.sign(limits.min), 1) * np.float64(limits.max))
        self._file.write(where, values.astype(self._depth))

    def close(self) -> None:
        """The file is there when this returns, unless some outputs are not numbers: then there is none."""
        self._file.drop() if self.undefined else self._file.close()

    def drop(self) -> None:
        self._file.drop()
