"""Whole-slide images in DICOM: which files are one slide, and whether all of them are there. OpenSlide reads pixels.

    slides/a/0.dcm   series 1, 40 000 x 30 000 px, frames 1 to 900 of 1 200    slide `a`, named by its folder;
    slides/a/1.dcm   series 1, 40 000 x 30 000 px, frames 901 to 1 200         its file is 0.dcm, of the finest level
    slides/a/2.dcm   series 1, 10 000 x  7 500 px
    slides/b/3.dcm   series 2, 20 000 x 20 000 px                              slide `3`: `b` has two
    slides/b/4.dcm   series 3, 20 000 x 20 000 px                              slide `4`

A slide is a series of instances in one folder. A level is an instance, or a concatenation of several. OpenSlide leaves
out files that it cannot read, and shows tiles of missing ones as glass: so the headers are read here as well.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpi4dl._files import open_regular
from mpi4dl._wording import counted, some
from mpi4dl.datasets.base import BadImage, blaming, package
from mpi4dl.datasets.files import DICOM
from mpi4dl.datasets.listed import files_at
from mpi4dl.geometry import ceil_div

WHOLE_SLIDE = "1.2.840.10008.5.1.4.1.1.77.1.6"  # VL Whole Slide Microscopy Image Storage
DEFLATED = "1.2.840.10008.1.2.1.99"  # whose header inflates to any size
LONG_VALUE_BYTES = 1 << 16  # of values that no header needs, and that are not read
_OPTICAL_PATHS = 0x00480105  # the first element behind those that are read
_NEEDED = (
    *("ImageType", "SOPInstanceUID", "SeriesInstanceUID", "SOPInstanceUIDOfConcatenationSource"),
    *("InConcatenationNumber", "InConcatenationTotalNumber", "DimensionOrganizationType"),
    *("NumberOfFrames", "Rows", "Columns", "TotalPixelMatrixRows", "TotalPixelMatrixColumns"),
)


# pydicom warns of values that DICOM does not allow, at each reading on each rank. What matters is raised.
warnings.filterwarnings("ignore", module=r"pydicom\.")


@dataclass(frozen=True)
class Instance:
    """What a file says of itself.

    `image` is the instance, or that which it is a part of: number `part` of `parts`, if it says so. `size` is (rows,
    columns) of the level and `tile` of its tiles, of which the file has `frames`. `volume`: it is a level, not a label
    or an overview. `sparse`: tiles of glass may be left out.
    """

    path: Path
    series: str
    image: str
    volume: bool
    size: tuple[int, int]
    tile: tuple[int, int]
    frames: int
    sparse: bool
    part: int
    parts: int | None


class NoSlide(BadImage):
    """A DICOM file of something else."""


def read_instance(path: Path) -> Instance:
    """The header of a DICOM file. Raises BadImage; NoSlide of another image; and DatasetError without pydicom."""
    pydicom = package("pydicom", f"{path}: reading {DICOM}")
    reader = package("pydicom.filereader", f"{path}: reading {DICOM}")
    with blaming(path), open_regular(path) as file:
        try:
            meta = reader.read_file_meta_info(path)
        except pydicom.errors.InvalidDicomError as error:
            raise BadImage(path, "is no DICOM file: it is damaged, or its extension is wrong") from error
        kind = str(meta.get("MediaStorageSOPClassUID", ""))
        if kind != WHOLE_SLIDE:
            what = pydicom.uid.UID(kind).name or "a file of no kind"
            raise NoSlide(path, f"is {what}, not a whole-slide image (VL Whole Slide Microscopy)")
        if str(meta.get("TransferSyntaxUID", "")) == DEFLATED:
            raise BadImage(path, "is deflated as a whole, so that no tile can be read alone: convert it")
        header = reader.read_partial(
            file,
            stop_when=lambda tag, vr, length: tag >= _OPTICAL_PATHS,
            defer_size=LONG_VALUE_BYTES,
            specific_tags=[pydicom.tag.Tag(name) for name in _NEEDED],
        )
        found = {name: header.get(name) for name in _NEEDED}
        lacks = [name for name in ("SeriesInstanceUID", "SOPInstanceUID") if not found[name]]
        numbers = [
            _number(found[name]) for name in ("TotalPixelMatrixRows", "TotalPixelMatrixColumns", "Rows", "Columns")
        ]
        if lacks or not all(numbers):
            wanting = some(lacks) or "the size of the slide or of its tiles"
            raise BadImage(path, f"does not say {wanting}: it is damaged, or no whole-slide image")
        rows, cols, *tile = numbers
        form = found["ImageType"]
        return Instance(
            path,
            str(found["SeriesInstanceUID"]),
            str(found["SOPInstanceUIDOfConcatenationSource"] or found["SOPInstanceUID"]),
            not isinstance(form, str) and form is not None and "VOLUME" in form,
            (rows, cols),
            (tile[0], tile[1]),
            _number(found["NumberOfFrames"]) or 1,
            str(found["DimensionOrganizationType"]) == "TILED_SPARSE",
            _number(found["InConcatenationNumber"]),
            _number(found["InConcatenationTotalNumber"]) or None,
        )


def _number(value: Any) -> int:
    """A positive whole number; 0 for others."""
    found = float(value) if isinstance(value, int | float) else 0.0
    return int(found) if math.isfinite(found) and found > 0 else 0


def _instances(paths: Sequence[Path]) -> tuple[list[Instance], list[BadImage]]:
    """The whole-slide instances among files, and why others cannot be read; those of something else are left out."""
    found, damaged = [], []
    for path in sorted(paths):
        try:
            found.append(read_instance(path))
        except NoSlide:
            continue
        except BadImage as error:
            damaged.append(error)
    return found, damaged


def _main(instances: Sequence[Instance]) -> Instance:
    """The first file of the finest level of a slide."""
    levels = [each for each in instances if each.volume] or instances
    return min(levels, key=lambda each: (-each.size[0] * each.size[1], each.path.name))


def grouped(paths: Sequence[Path]) -> Sequence[Sequence[Path]]:
    """The files of each slide among the DICOM files of a folder, the main file first.

    Where there are none, files that cannot be read are slides of their own, which opening them will say.
    """
    found, damaged = _instances(paths)
    series: dict[str, list[Instance]] = {}
    for each in found:
        series.setdefault(each.series, []).append(each)
    of_each = [[_main(files).path, *(each.path for each in files)] for files in series.values()]
    return of_each or [[error.path] for error in damaged]


def checked(path: Path) -> Path:
    """The file by which OpenSlide opens a slide, given one of its files or its folder.

    Raises:
        BadImage: the folder has no slide or several; a file of the slide is missing or damaged.
        DatasetError: pydicom is not installed.
    """
    whole = path.is_dir()
    folder = path if whole else path.parent
    asked = None if whole else read_instance(path)
    with blaming(folder):
        paths = files_at(folder)
    found, damaged = _instances(paths)
    series = sorted({each.series for each in found})
    if asked is None and not damaged and len(series) != 1:
        names = [_main([each for each in found if each.series == one]).path.name for one in series]
        what = f"has {len(series)} slides: name one by a file of it, such as {some(names, 2)}" if series else ""
        raise BadImage(path, what or f"has no whole-slide image: its files of DICOM end in {DICOM}")
    if damaged:
        raise BadImage(
            damaged[0].path,
            f"{damaged[0].reason}; it may be a part of a slide in its folder: restore or remove it",
        )
    chosen = series[0] if asked is None else asked.series
    mine = [each for each in found if each.series == chosen]
    levels = [each for each in mine if each.volume]
    if not levels:
        raise BadImage(path, "has no level of a pyramid, but labels or overviews alone: a file of the slide is missing")
    for image in {each.image: None for each in levels}:
        parts = [each for each in levels if each.image == image]
        level = f"level of {parts[0].size[1]} x {parts[0].size[0]} px"
        remedy = f"a file is missing in {parts[0].path.parent}: copy all {DICOM} files of the series"
        total = max((each.parts or 1 for each in parts), default=1)
        lacks = total - len({each.part for each in parts})
        if lacks > 0:
            raise BadImage(path, f"lacks {counted(lacks, 'file')} of {total} of its {level}: {remedy}")
        tiles = math.prod(ceil_div(side, tile) for side, tile in zip(parts[0].size, parts[0].tile, strict=True))
        frames = sum(each.frames for each in {each.part: each for each in parts}.values())
        if frames < tiles and not any(each.sparse for each in parts):
            raise BadImage(path, f"has {frames} of {tiles} tiles of its {level}: {remedy}")
        if frames > tiles:  # of which OpenSlide shows the first ones
            told = f"has {frames} tiles in its {level}, which has room for {tiles}"
            raise BadImage(path, f"{told}: write each of its optical paths or depths to a series of its own")
    return _main(levels).path
