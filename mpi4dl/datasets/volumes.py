"""Which reader opens a file of one volume: arrays of NumPy, stacks of TIFF pages, NIfTI; a rank reads its own box.

    .npy           mapped into memory: what is read is the box
    .npz           unpacked whole
    .tif, .tiff    mapped where pages are one block without compression; else the pages of the box's depth are decoded
    .nii, .nii.gz  NIfTI by nibabel: the box, if it is not compressed; axes (x, y, z) become depth z, rows y, columns x
    .zarr          arrays and OME-Zarr: the chunks that the box touches are decoded
    .dcm           series of DICOM by pydicom: the slices of the box are decoded, see series.py

All have the depth first, then rows and columns; channels, if there are any, are before or behind these.

Units of values: those of NIfTI and DICOM are as they are, in the units that slope and intercept give, however they are
stored; so are those of floating point in other files. Integers of other files are shares of the largest of their type.
"""

from collections.abc import Callable, Mapping
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mpi4dl._files import open_regular
from mpi4dl.datasets import series, tiff
from mpi4dl.datasets.base import BadImage, Opened, Slices, Values, blaming, finite, package, unit_values
from mpi4dl.datasets.files import DICOM, ZARR_SUFFIXES, check_unpacked, is_dicom, is_zarr
from mpi4dl.geometry import Interval

AXES = 3
MOST_CHANNELS = 4
AS_THEY_ARE = "as they are"
_AXES = ", axes "


def alike(values: str, others: str) -> bool:
    """Whether volumes are read alike by their `values`; where one does not know its axes, they may be."""
    (mine, _, axes), (theirs, _, their_axes) = values.partition(_AXES), others.partition(_AXES)
    return mine == theirs and (axes == their_axes or not axes or not their_axes)


def other_axes(mine: str, theirs: str, of: str) -> str:
    """What is wrong with a volume whose axes run to other sides."""
    return f"has axes {mine}, but {of} {theirs}: turn it, such as by nibabel.as_closest_canonical"


def lies_elsewhere(mask: Any, image: Any) -> str | None:
    """What is wrong with a mask of the size of a volume that has other places, by more than a voxel, if both say it."""
    mine, theirs = (getattr(each, "affine", None) for each in (mask, image))
    if mine is None or theirs is None:
        return None
    corners = np.array([[*corner[::-1], 1] for corner in product(*((0, side - 1) for side in image.size))])
    farthest = np.linalg.norm((corners @ (mine - theirs).T)[:, :AXES], axis=1).max()
    if farthest <= np.linalg.norm(theirs[:AXES, :AXES], axis=0).max():
        return None
    told = f"lies up to {farthest:.4g} mm from where its image does"
    return f"{told}: write it with the affine of its image, if it is of it"


def open_volume(path: Path) -> "VolumeFile":
    """Open a file of one volume, by its extension.

    Raises:
        BadImage: the file cannot be read, is damaged, or no volume; so does `read` of what this returns.
        DatasetError: the package that reads this format is not installed.
    """
    with blaming(path):
        if not path.is_dir():
            open_regular(path).close()
        of_dicom = DICOM if not is_zarr(path) and (path.is_dir() or is_dicom(path)) else None
        suffix = of_dicom or next((suffix for suffix in VOLUME_SUFFIXES if path.name.lower().endswith(suffix)), None)
        if suffix is None:
            raise BadImage(path, f"is no volume: those end in {' '.join(VOLUME_SUFFIXES)}")
        return VolumeFile(path, VOLUME_SUFFIXES[suffix](path))


class VolumeFile:
    """A volume, of which boxes can be read.

    Attributes:
        values: what they are read as, "as they are" or "over 32767", with `axes` behind it.
        axes: to which sides of a patient columns, rows and slices run, such as RAS; empty: unknown.
        Both have to be alike in all volumes of a set.
    """

    def __init__(self, path: Path, opened: Opened) -> None:
        shape = opened.shape
        if len(shape) not in (AXES, AXES + 1) or prod(shape) == 0:
            raise BadImage(path, f"has shape {tuple(shape)}: expected depth, rows and columns, and perhaps channels")
        self._path, self._read_part, self._scaled = path, opened.read_part, opened.scaled
        dtype = np.dtype(opened.dtype)
        self.axes, self.affine = opened.axes, opened.affine
        self.values = AS_THEY_ARE if opened.scaled or dtype.kind not in "iu" else f"over {np.iinfo(dtype).max}"
        self.values += _AXES + self.axes if self.axes else ""
        self._channel: int | None = None  # which dim
        if len(shape) > AXES:
            likely = AXES if shape[AXES] <= MOST_CHANNELS else 0
            self._channel = likely if opened.channel is None else opened.channel
            if shape[self._channel] > MOST_CHANNELS:
                if opened.channel is not None:
                    told = f"has {shape[self._channel]} values, such as times, in each place"
                    raise BadImage(path, f"{told}: expected up to {MOST_CHANNELS}, its channels")
                raise BadImage(path, f"has shape {tuple(shape)}: neither the first nor the last are channels")
        self.channels = 1 if self._channel is None else shape[self._channel]
        self.size = tuple(n for dim, n in enumerate(shape) if dim != self._channel)

    def require(self, channels: int, values: str | None, noun: str) -> None:
        """Raise BadImage if other volumes have other channels, or values of another kind."""
        if self.channels != channels:
            raise BadImage(self._path, f"has {self.channels} channels where others have {channels}")
        if values is not None and not alike(values, self.values):
            if values.partition(_AXES)[0] == self.values.partition(_AXES)[0]:
                raise BadImage(self._path, other_axes(self.axes, values.partition(_AXES)[2], "other volumes"))
            raise BadImage(
                self._path,
                f"values are read {self.values}, but those of other volumes {values}: write all of a set as NIfTI, or "
                "all in one type, such as .npy of float32 in the units that you mean",
            )

    def read(self, *space: Interval) -> Values:
        with blaming(self._path):
            values = self.stored(*space)
            return finite(self._path, unit_values(values, values.dtype.kind in "iu" and self._scaled))

    def stored(self, *space: Interval) -> npt.NDArray[Any]:
        """A box of the values as they are stored, with their channels last."""
        with blaming(self._path):
            slices = [slice(*interval) for interval in space]
            if self._channel is not None:
                slices.insert(self._channel, slice(None))
            part = np.asarray(self._read_part(tuple(slices)))
            part = part[..., None] if self._channel is None else np.moveaxis(part, self._channel, -1)
            wanted = (*(interval.length for interval in space), self.channels)
            if part.shape != wanted:
                raise BadImage(self._path, f"gives values of shape {part.shape} where {wanted} were asked for")
            return part


def _open_npy(path: Path) -> Opened:
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    return Opened(array.shape, array.__getitem__, array.dtype)


def _open_npz(path: Path) -> Opened:
    with open_regular(path) as stream, np.load(stream, allow_pickle=False) as file:
        if len(file.files) != 1:
            raise BadImage(path, f"has {len(file.files)} arrays, {', '.join(file.files[:4])}: expected one, the volume")
        check_unpacked(path, file, file.files)
        array = file[file.files[0]]
    return Opened(array.shape, array.__getitem__, array.dtype)


def _open_nifti(path: Path) -> Opened:
    nibabel = package("nibabel", f"{path}: reading it")
    file: Any = nibabel.load(path)
    stored = file.dataobj
    if len(stored.shape) < AXES:
        raise BadImage(path, f"has shape {stored.shape}: expected x, y and z")
    x, y, z, *rest = stored.shape

    def read_part(slices: Slices) -> npt.NDArray[Any]:
        depth, rows, cols, *others = slices
        part = np.asarray(stored[(cols, rows, depth, *others)])
        return part.transpose(2, 1, 0, *range(AXES, part.ndim))

    known = file.header["qform_code"] > 0 or file.header["sform_code"] > 0
    axes = "".join(nibabel.aff2axcodes(file.affine)) if known else ""
    affine = np.asarray(file.affine) if known else None
    return Opened((z, y, x, *rest), read_part, stored.dtype, True, axes, AXES if rest else None, affine)


def _open_stack(path: Path) -> Opened:
    with tiff.opened(path) as file:
        series = file.series[0]
        shape, dtype, offset = series.shape, series.dtype, series.dataoffset
        page_dims = len(series.keyframe.shape)
        if file.is_ome and series.kind != "ome" and " FileName=" in file.ome_metadata:
            raise BadImage(path, "has pages in other files, which are not read: write the volume to one file")
        channel = next((series.axes.index(axis) for axis in "CS" if axis in series.axes and len(shape) > AXES), None)
        # Where nobody named the axes, tifffile writes a stack as channels of ImageJ.
        wrong = {"T"} if len(shape) > AXES else {"S"} if file.is_imagej else {*"CS"}
        if wrong & {*series.axes}:
            raise BadImage(path, f"has axes {series.axes}, {shape}: expected depth, rows and columns, and channels")
        if offset is not None:
            mapped = np.memmap(path, np.dtype(dtype).newbyteorder(file.byteorder), "r", offset, shape)
            return Opened(shape, mapped.__getitem__, dtype, channel=channel)

    def read_part(slices: Slices) -> npt.NDArray[Any]:
        stacked = len(shape) - page_dims  # dims of which each place is a page
        places = np.arange(prod(shape[:stacked])).reshape(shape[:stacked])[slices[:stacked]]
        with tiff.opened(path) as file:
            pages, descriptor = file.series[0].pages, file.filehandle.fileno()
            found = [
                tiff.samples_of(path, pages[place], descriptor)[slices[stacked:]] for place in places.ravel().tolist()
            ]
        if not found:
            return np.empty([len(range(*s.indices(n))) for s, n in zip(slices, shape, strict=True)], dtype)
        return np.stack(found).reshape(*places.shape, *found[0].shape)

    return Opened(shape, read_part, dtype, channel=channel)


def _open_zarr(path: Path) -> Opened:
    from mpi4dl.datasets import zarrs

    return zarrs.open_volume(path)


# How to open a file of each kind, or a folder of DICOM.
VOLUME_SUFFIXES: Mapping[str, Callable[[Path], Opened]] = {
    ".npy": _open_npy,
    ".npz": _open_npz,
    ".tif": _open_stack,
    ".tiff": _open_stack,
    ".nii": _open_nifti,
    ".nii.gz": _open_nifti,
    DICOM: series.open_series,
    **dict.fromkeys(ZARR_SUFFIXES, _open_zarr),
}
