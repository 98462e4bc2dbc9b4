"""Pictures that a model makes, written a few rows at a time: PNG of 8 bits, TIFF of more; Zarr of what is Zarr."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from io import BufferedIOBase, BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import PIL.Image
import torch
from torch import Tensor, nn

from mpi4dl._files import hidden_name, naming, remove
from mpi4dl.comm import Refusal
from mpi4dl.datasets.base import Pixels, package
from mpi4dl.datasets.colour import WHITE
from mpi4dl.datasets.files import SCALES, StoredPicture, as_rgb
from mpi4dl.datasets.transform import STRIDE_PX
from mpi4dl.geometry import Interval
from mpi4dl.inference.masks import MappedFile, write_png
from mpi4dl.parallel.pipeline.decisions import trial
from mpi4dl.parallel.pipeline.split import image_dtype

ZARR = ".zarr"
CHUNK_PX, CHUNK_DEPTH = 512, 16


def scale_of(made: Sequence[int], sizes: Iterable[Sequence[int]]) -> int:
    """How many times as large as inputs of these sizes outputs of up to this size are. Raises Refusal."""
    seen = [*map(max, zip(*sizes, strict=True))]
    scale = made[0] // seen[0]
    if scale not in SCALES or [scale * side for side in seen] != [*made]:
        told, shown = ("x".join(map(str, each)) for each in (made, seen))
        raise Refusal(f"the model's outputs have {told} pixels for images of {shown}: expected as many, 2 or 4 times")
    return scale


TRIED_PX, REMAINDERS = 256, 8


def stride_of(model: nn.Module, channels: int, pictures: Callable[[Any], Tensor]) -> int:
    """Of how many pixels the sides of images are multiples that this model, on the meta device, makes pictures of.

    It is 1 for a model that takes any size, and at most that of most models. Dry runs with sides of different
    remainders find it.
    """

    def takes(*sides: int) -> bool:
        image = torch.empty(1, channels, *sides, dtype=image_dtype(model), device="meta")
        try:
            with torch.no_grad(), trial(model), torch.device("meta"):
                made = pictures(model.eval()(image))
            return scale_of(made.shape[2:], [sides]) > 0
        except (RuntimeError, ValueError, AssertionError, TypeError, LookupError):
            return False

    def takes_multiples_of(stride: int) -> bool:
        sides = [TRIED_PX + stride * more for more in range(REMAINDERS)]
        return all(takes(*each) for each in zip(sides, sides[::-1], strict=True))

    return next(filter(takes_multiples_of, (1, 2, 4, 8, 16)), STRIDE_PX)


def suffix_of(depth: str | None, channels: int) -> str:
    """How files of pictures of this depth end."""
    return ".png" if depth == "uint8" and channels in (1, 3) else ".tif"


def tiff_header(
    path: Path, shape: tuple[int, ...], depth: str, tags: Sequence[Any] = ()
) -> Callable[[BufferedIOBase], Any]:
    """What writes an uncompressed TIFF file with these tags, up to its pixels: (rows, columns), or with channels."""
    tifffile = package("tifffile", f"{path}: writing TIFF", "tifffile", "imagecodecs")
    how: dict[str, Any] = {"shape": shape, "dtype": depth, "extratags": tags, "returnoffset": True}
    how |= {"photometric": "rgb" if shape[2:] == (3,) else "minisblack"}
    how |= {"planarconfig": "contig"} if len(shape) == 3 else {}
    return lambda file: file.seek(tifffile.imwrite(file, **how)[0])


def write_zarr(path: Path, pixels: npt.NDArray[Any], space: str = "yx") -> None:
    """Write an image, (rows, columns) or with channels behind, or by `space` zyx a volume, as a folder of OME-Zarr 0.5.

    Channels become the first axis. Raises OSError.
    """
    zarr = package("zarr", f"{path}: writing Zarr", "mpi4dl[zarr]")
    values = pixels if pixels.ndim == len(space) else np.moveaxis(pixels, -1, 0)
    axes, new = f"c{space}"[-values.ndim :], path.with_name(f"{hidden_name(path)}.new")
    named = [{"name": axis, "type": "channel" if axis == "c" else "space"} for axis in axes]
    level = {"path": "0", "coordinateTransformations": [{"type": "scale", "scale": [1.0] * len(axes)}]}
    most = {"y": CHUNK_PX, "x": CHUNK_PX, "z": CHUNK_DEPTH, "c": 1}
    chunks = [min(most[axis], side) for axis, side in zip(axes, values.shape, strict=True)]
    try:
        with naming(path):
            group = zarr.open_group(store=str(new), mode="w")
            group.attrs["ome"] = {"version": "0.5", "multiscales": [{"axes": named, "datasets": [level]}]}
            array = group.create_array(
                "0", shape=values.shape, chunks=chunks, dtype=values.dtype, dimension_names=[*axes]
            )
            for top in range(0, values.shape[-2], CHUNK_PX):
                array[..., top : top + CHUNK_PX, :] = values[..., top : top + CHUNK_PX, :]
            remove(path)
            new.replace(path)
    finally:
        with suppress(OSError):
            remove(new)


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
        scale, made = self._target.scale, np.moveaxis(np.concatenate(self._made, 1), 0, -1)
        image = as_rgb(self._image.read(*self._box)).repeat(scale, 0).repeat(scale, 1)
        gap = np.full((len(image), GAP_PX, 3), WHITE, np.uint8)
        target = as_rgb(self._target.read(self._rows, self._cols))
        return np.concatenate((image, gap, as_rgb(made), gap, target), 1)


def jpeg_of(examples: Sequence[Pixels]) -> bytes:
    """Examples below each other, as JPEG."""
    width, file = max(each.shape[1] for each in examples), BytesIO()
    padded = [np.pad(e, ((0, GAP_PX), (0, width - e.shape[1]), (0, 0)), constant_values=WHITE) for e in examples]
    PIL.Image.fromarray(np.concatenate(padded)).save(file, "JPEG", quality=90)
    return file.getvalue()


class PictureFile(MappedFile):
    """The picture that a model made of one image, as large as the array, from rows that come from top to bottom.

    Values below 0, or of integers with a sign below -1, and above 1 become these, unless it is of floating point.
    """

    def write(self, where: tuple[slice, ...], values: npt.NDArray[Any]) -> None:
        """Rows (channels, rows, width) of what the model sees, of which the image is the upper left corner."""
        (height, width), top, depth = self._array.shape[:2], where[-2].start, self._array.dtype
        values = np.moveaxis(values[:, : max(0, height - top), :width], 0, -1)
        self.undefined |= bool(np.isnan(values).any())
        if self.undefined or not values.size:
            return
        if depth.kind != "f":
            limits = np.iinfo(depth)
            values = np.rint(values.clip(np.sign(limits.min), 1) * np.float64(limits.max))
        rows = self._array[top : top + len(values)]
        rows[:] = values.reshape(rows.shape)


def picture_file(
    path: Path, size: Sequence[int], channels: int, depth: str | None, tags: Sequence[Any] = ()
) -> PictureFile:
    """The PNG or TIFF file of a picture of this size, or the folder of Zarr, as `path` ends."""
    shape, depth = (*size, channels)[: 2 + (channels > 1)], depth or "float32"
    if path.suffix in (".png", ZARR):
        return PictureFile(path, shape, depth, encode=write_png if path.suffix == ".png" else write_zarr)
    return PictureFile(path, shape, depth, tiff_header(path, shape, depth, tags))
