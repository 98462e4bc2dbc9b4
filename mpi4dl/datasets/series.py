"""Volumes in DICOM: a series of CT, MR or PET, a file for each slice. A rank reads the slices of its own box alone.

    patients/p1/0001.dcm   series 1, slice at z = -120 mm      volume `p1`, named by its folder
    patients/p1/0002.dcm   series 1, slice at z = -117 mm
    patients/p2/0001.dcm   series 2                            volumes `p2/0001.dcm` and `p2/0009.dcm`: two in a folder
    patients/p2/0009.dcm   series 3

Slices are in the order of their places along the normal of the image plane (DICOM PS3.3, C.7.6.2). Values have the
units that RescaleSlope and RescaleIntercept, or a Modality LUT, give, such as Hounsfield units.
"""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mpi4dl.datasets.base import BadImage, Opened, Slices, blaming, package
from mpi4dl.datasets.files import is_dicom

_NEEDED = [
    *("SeriesInstanceUID", "InstanceNumber", "ImagePositionPatient", "ImageOrientationPatient", "NumberOfFrames"),
    *("Rows", "Columns", "SamplesPerPixel", "RescaleSlope", "RescaleIntercept"),
]
_SIDES = ("RL", "AP", "IS")  # of each axis of DICOM, to which smaller and larger numbers run
_UNEVEN = 0.1  # of the distance of slices, by which it may differ
_UNREADABLE = "cannot be read as DICOM"


class _Slice(NamedTuple):
    path: Path
    series: str
    place: tuple[float, ...]  # of its first pixel, along its rows, its columns and their normal
    shape: tuple[int, int]
    plane: tuple[float, ...]
    problem: str = ""  # why it is none, but something else of a series


def grouped(paths: Sequence[Path]) -> Sequence[Sequence[Path]]:
    """The files of each volume among the DICOM files of a folder.

    Files that cannot be read are volumes of their own, which opening them will say. Raises DatasetError without
    pydicom.
    """
    series: dict[str, list[Path]] = {}
    for path in paths:
        try:
            series.setdefault(_slice(path).series, []).append(path)
        except BadImage:
            series.setdefault(str(path), []).append(path)
    return [*series.values()]


def open_series(path: Path) -> Opened:
    """The series of a folder, or that of a file with the others of its folder, headers read and pixels not.

    Raises BadImage, also where slices have other sizes, planes or distances than others.
    """
    if path.is_dir():
        slices = [_slice(each) for each in _inside(path)]
    else:  # reports and pictures may be of its series
        _slice(path)
        slices = [each for each in map(_told, files_of(path)) if not each.problem]
    if not slices or len({each.series for each in slices}) > 1:
        raise BadImage(path, f"has {len({each.series for each in slices})} series of DICOM: expected one")
    slices.sort(key=lambda each: each.place[-1])
    first = slices[0]
    odd = next((each for each in slices if (each.shape, each.plane) != (first.shape, first.plane)), None)
    if odd is not None:
        what = "lies in another plane" if odd.shape == first.shape else f"has {odd.shape[0]} x {odd.shape[1]} pixels"
        raise BadImage(odd.path, f"{what} than {first.path.name} of its series: write the volume as NIfTI")
    *aside, steps = np.diff([each.place for each in slices], axis=0).T
    usual = float(np.median(steps)) if len(steps) else 0.0
    wrong = next((i for i, step in enumerate(steps) if abs(step - usual) > _UNEVEN * abs(usual) or step <= 0), None)
    if wrong is not None:
        after, before = slices[wrong + 1], slices[wrong]
        raise BadImage(
            path,
            f"has slices {usual:g} mm apart, but {after.path.name} is {steps[wrong]:g} mm behind {before.path.name}: a "
            "slice is missing or there twice; restore it, or write the volume as NIfTI",
        )

    tilted = next((i for i, moved in enumerate(np.hypot(*aside)) if moved > _UNEVEN * usual), None)
    if tilted is not None:
        after, before = slices[tilted + 1], slices[tilted]
        raise BadImage(
            path,
            f"has slices that do not lie straight behind each other, such as {after.path.name} behind "
            f"{before.path.name}: a tilted gantry; correct it as you write the volume as NIfTI",
        )

    def read_part(wanted: Slices) -> npt.NDArray[Any]:
        depth, rows, cols = wanted
        chosen = slices[depth]
        if not chosen:
            height, width = (len(range(*cut.indices(n))) for cut, n in zip((rows, cols), slices[0].shape, strict=True))
            return np.empty((0, height, width), np.float32)
        return np.stack([_pixels(each.path)[rows, cols] for each in chosen])

    return Opened((len(slices), *first.shape), read_part, np.dtype(np.float32), scaled=True, axes=_axes(first.plane))


def _axes(plane: Sequence[float]) -> str:
    """To which sides of a patient columns, rows and slices run, by the numbers of ImageOrientationPatient."""
    if len(plane) != 6:
        return ""
    sides = [(float(each[axis]), axis) for each in _directions(plane) for axis in [int(np.abs(each).argmax())]]
    return "".join(_SIDES[axis][length > 0] for length, axis in sides)


def _directions(plane: Sequence[float]) -> list[npt.NDArray[np.float64]]:
    return [np.asarray(plane[:3]), np.asarray(plane[3:]), np.cross(plane[:3], plane[3:])]


def files_of(path: Path) -> list[Path]:
    """The files in the folder of a file that are of its series. Raises BadImage."""
    mine = _told(path).series
    return [each for each in _inside(path.parent) if _told(each).series == mine]


def _inside(folder: Path) -> list[Path]:
    return sorted(each for each in folder.iterdir() if not each.name.startswith(".") and is_dicom(each))


def _slice(path: Path) -> _Slice:
    """The header of a slice. Raises BadImage."""
    found = _told(path)
    if found.problem:
        raise BadImage(path, found.problem)
    return found


def _told(path: Path) -> _Slice:
    """The header of a file, whatever it is. Raises BadImage."""
    with blaming(path, _UNREADABLE):
        told = path.stat()
    return _header(path, told.st_size, told.st_mtime_ns)


@lru_cache(maxsize=1 << 16)
def _header(path: Path, num_bytes: int, written: int) -> _Slice:
    """The header of a file of this size and time of writing, without what is behind it. Raises BadImage."""
    pydicom, reader = (package(name, f"{path}: reading it") for name in ("pydicom", "pydicom.filereader"))
    with blaming(path, _UNREADABLE), path.open("rb") as file:
        tags = [pydicom.tag.Tag(name) for name in _NEEDED]
        found = reader.read_partial(file, lambda tag, vr, length: tag > max(tags), specific_tags=tags)
    place: tuple[float, ...]
    series, place, shape, problem = str(found.get("SeriesInstanceUID") or path), (0.0, 0.0, np.nan), (0, 0), ""
    plane: tuple[float, ...] = ()
    try:
        frames, samples = (int(found.get(name) or 1) for name in ("NumberOfFrames", "SamplesPerPixel"))
        plane = tuple(round(float(number), 4) for number in found.get("ImageOrientationPatient") or ())
        corner = [float(number) for number in found.get("ImagePositionPatient") or ()]
        shape = (int(found.Rows), int(found.Columns))
        if len(plane) == 6 and len(corner) == 3:
            place = tuple(float(np.dot(direction, corner)) for direction in _directions(plane))
        else:
            place = 0.0, 0.0, float(found.InstanceNumber)
        _ = found.SeriesInstanceUID
        if frames > 1 or samples > 1 or not np.all(np.isfinite(place)):
            what = f"{frames} frames" if frames > 1 else f"{samples} samples in a pixel" if samples > 1 else "no place"
            problem = f"has {what}: a slice of a series has one grey image; write the volume as NIfTI"
    except (AttributeError, TypeError, ValueError) as error:
        problem = f"is no slice of a series of DICOM ({error})"
    return _Slice(path, series, place, shape, plane, problem)


def _pixels(path: Path) -> npt.NDArray[np.float32]:
    """The values of a slice in their units. Raises BadImage."""
    pydicom, pixels = (package(name, f"{path}: reading it") for name in ("pydicom", "pydicom.pixels"))
    with blaming(path, _UNREADABLE):
        found = pydicom.dcmread(path)
    with blaming(path):
        values: npt.NDArray[Any] = pixels.apply_modality_lut(found.pixel_array, found)
    return values.astype(np.float32)
