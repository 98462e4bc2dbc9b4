"""Read whole-slide images at any resolution: scanners' formats and DICOM by OpenSlide, TIFF and OME, plain pictures.

    level 0     40 000 x 30 000 px, 0.25 um per pixel
    level 1     10 000 x  7 500 px, 1 um per pixel
    a view      20 000 x 15 000 px, 0.5 um per pixel: resampled from level 0, the nearest finer level, box by box

All coordinates that leave this module are pixels of the full level 0, as QuPath, CLAM and TRIDENT have them.
"""

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from xml.etree import ElementTree

import numpy as np
import numpy.typing as npt

from mpi4dl._files import open_regular
from mpi4dl._wording import counted, some
from mpi4dl.datasets import tiff
from mpi4dl.datasets.base import BadImage, FunctionImage, Image, Pixels, blaming
from mpi4dl.datasets.files import SLIDE_SUFFIXES, is_dicom, is_zarr, open_image
from mpi4dl.datasets.reader_process import has_openslide, open_with_openslide, vendor_of
from mpi4dl.datasets.slides import dicom
from mpi4dl.datasets.stains import Recolour
from mpi4dl.datasets.transform import Frame, crop, resize
from mpi4dl.geometry import Interval

MPP_AT_1X = 10.0  # um per pixel: 20x is 0.5, 40x is 0.25
SAME = 0.01  # resolutions that differ by this share are one, and nothing is resampled
SAME_MPP = 0.05  # of microns per pixel: files round theirs
MOST_ENLARGED = 0.9  # a slide may be this share of the resolution asked for, or finer
LEAST_MPP, MOST_MPP = 0.01, 20.0  # um per pixel of slides; other values in a file are those of screens or printers

CELL_PX = 32  # px of the resolution that is read, of cells that show tissue or white

Cells = npt.NDArray[np.bool_]
Corner = tuple[int, int]  # row and column of a slide at its resolution
Place = TypeVar("Place", float, npt.NDArray[np.float64])

_MICROMETRES = {"m": 1e6, "cm": 1e4, "mm": 1e3, "µm": 1.0, "\u03bcm": 1.0, "um": 1.0, "nm": 1e-3, "inch": 25400.0}
_MICROMETRES |= {"micron": 1.0, "microns": 1.0, r"\u00B5m": 1.0}  # as ImageJ writes them
_UNITS = {2: "inch", 3: "cm"}  # of the TIFF tag ResolutionUnit
APERIO = ".svs"  # which tifffile reads, too


class Level(NamedTuple):
    """One image of a pyramid: `downsample` pixels of level 0 for each of its pixels."""

    image: Image
    downsample: float


@dataclass(frozen=True)
class SlideFile:
    """A slide as its file has it.

    `levels` begin with the finest. `mpp` are microns per pixel of level 0, `magnification` that of its objective; None
    where the file does not say. `bounds` are the rows and columns of level 0 that the scanner scanned. `profile` is an
    ICC profile of its colours. `vendor` is the scanner's format as OpenSlide names it, or that of a picture.
    Pixels that are not square are read as square ones of their longer side, which is `mpp`, and each of which has
    `aspect` (down, across) pixels of level 0. `other_mpp` are those of tags of resolution, if OME-XML or a
    description, which go before them, say others.
    """

    path: Path
    levels: tuple[Level, ...]
    mpp: float | None = None
    magnification: float | None = None
    bounds: tuple[Interval, Interval] | None = None
    profile: bytes | None = None
    vendor: str = ""
    aspect: tuple[float, float] = (1.0, 1.0)
    other_mpp: float | None = None

    @property
    def size(self) -> tuple[int, ...]:
        """(height, width) of level 0, in pixels."""
        return self.levels[0].image.size

    def described(self) -> str:
        """Size, levels, resolution and vendor, in a line."""
        size = "{1} x {0} px".format(*self.size)
        if self.bounds is not None and tuple(each.length for each in self.bounds) != tuple(self.size):
            size = f"{self.bounds[1].length} x {self.bounds[0].length} px scanned of {size}"
        levels = ", ".join(f"{level.downsample:.4g}" for level in self.levels)
        mpp = "no microns per pixel" if self.mpp is None else f"{self.mpp:.4g} um per pixel"
        mpp += "" if self.other_mpp is None else f" (its tags say {self.other_mpp:.4g})"
        power = "" if self.magnification is None else f", {self.magnification:g}x"
        return f"{size}, levels {levels}, {mpp}{power}, {self.vendor or 'an image'}"


@dataclass(frozen=True)
class Resolution:
    """The resolution at which slides are read; without any of them, that of level 0.

    `mpp`: microns per pixel. `magnification`: 20 is 0.5 um per pixel, by the objective where the file has no microns
    per pixel. `level`: a level of the file. `assumed_mpp`: microns per pixel of level 0 of slides that do not say it.
    """

    mpp: float | None = None
    magnification: float | None = None
    level: int | None = None
    assumed_mpp: float | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("mpp", "magnification", "level") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} both say at which resolution slides are read: choose one")

    def downsample(self, slide: SlideFile) -> float:
        """How many pixels of level 0 make one pixel, along each axis.

        Raises:
            BadImage: the slide does not have this resolution, or does not say which one it has.
        """
        if self.level is not None:
            if not 0 <= self.level < len(slide.levels):
                has = (
                    f"{len(slide.levels)} levels, 0 to {len(slide.levels) - 1}" if len(slide.levels) > 1 else "level 0"
                )
                raise BadImage(slide.path, f"has no level {self.level}, but {has}")
            return slide.levels[self.level].downsample
        mpp = slide.mpp or self.assumed_mpp
        if self.mpp is None and self.magnification is None:
            return 1.0
        if self.mpp is not None:
            asked, wanted = f"`mpp` {self.mpp:g}", self.mpp
        else:
            assert self.magnification is not None
            asked, wanted = f"`magnification` {self.magnification:g}", MPP_AT_1X / self.magnification
            if mpp is None and slide.magnification is not None:
                mpp = MPP_AT_1X / slide.magnification
        if mpp is None:
            raise BadImage(
                slide.path,
                f"does not say how many microns a pixel has, which {asked} needs: give them by `assume_mpp`, such as "
                "0.25 for 40x, or in a column `mpp` of the table",
            )
        if mpp * MOST_ENLARGED > wanted:
            raise BadImage(
                slide.path,
                f"has {mpp:.4g} um per pixel, which is coarser than {asked}"
                + ("" if self.mpp is not None else f", {wanted:.4g} um per pixel")
                + f": choose `mpp` {mpp:.4g} or more",
            )
        found = wanted / mpp
        close = [level.downsample for level in slide.levels if abs(level.downsample / found - 1) <= SAME]
        return close[0] if close else found


class Slide:
    """A slide at one resolution, of which any box can be read; it keeps no open file.

    It is white in cells of `CELL_PX` x `CELL_PX` px where `cells_of` (rows, columns) is False, and `recolour` makes
    other pixels of its pixels, each by itself.

    Attributes:
        size: (height, width) in pixels of this resolution, of what the scanner scanned.
        downsample: the resolution of level 0 over this one.
        scale: pixels of level 0 for each pixel, (down, across): both `downsample`, if they are square.
        origin: the pixel of level 0 (row, column) at the upper left corner.
        mpp: microns per pixel of this resolution; None if nobody says it.
    """

    def __init__(
        self,
        file: SlideFile,
        downsample: float = 1.0,
        assumed_mpp: float | None = None,
        cells_of: "Callable[[Slide], Cells] | None" = None,
        recolour: Recolour | None = None,
    ) -> None:
        self.file, self.downsample, self._assumed, self._cells_of = file, downsample, assumed_mpp, cells_of
        self._recolour = recolour
        whole = tuple(Interval(0, side) for side in file.size)
        bounds = file.bounds or whole
        self.origin = (bounds[0].start, bounds[1].start)
        self.scale = (downsample * file.aspect[0], downsample * file.aspect[1])
        self.size = tuple(
            max(1, round(interval.length / scale)) for interval, scale in zip(bounds, self.scale, strict=True)
        )
        mpp = file.mpp or assumed_mpp
        self.mpp = None if mpp is None else mpp * downsample
        fine_enough = [level for level in file.levels if level.downsample <= downsample * (1 + SAME / 2)]
        self._level = fine_enough[-1] if fine_enough else file.levels[0]

    @property
    def level(self) -> int:
        """The number of the level that is read."""
        return self.file.levels.index(self._level)

    def read(self, *space: Interval) -> Pixels:
        """The pixels of a box (rows, columns, 3), uint8: the same in every box that has them."""
        kept = None
        if self._cells_of is not None:
            # Cells without tissue are white, and are not read where the box has no other.
            kept = self._cells[np.ix_(*(np.arange(*interval) // CELL_PX for interval in space))][..., None]
            if not kept.any():
                return np.full((*kept.shape[:2], 3), 255, np.uint8)
        pixels = self._scanned(*space)
        if self._recolour is not None and pixels.size:
            pixels = self._recolour(pixels)
        return pixels if kept is None else np.where(kept, pixels, np.uint8(255))

    @cached_property
    def _cells(self) -> Cells:
        assert self._cells_of is not None
        return self._cells_of(self.at(self.downsample))

    def _scanned(self, *space: Interval) -> Pixels:
        level, factors = self._level, [scale / self._level.downsample for scale in self.scale]
        starts = [first / level.downsample for first in self.origin]
        with blaming(self.file.path):
            if all(abs(factor - 1) <= SAME / 2 for factor in factors):
                pixels = crop(level.image, [*map(round, starts)], space)  # sizes are rounded: perhaps beyond it
            else:
                frames = [Frame(*each) for each in zip(self.size, starts, factors, strict=True)]
                pixels = resize(level.image, frames, space)
            if self._colours is None or not pixels.size:
                return pixels
            import PIL.ImageCms

            image = PIL.Image.fromarray(np.ascontiguousarray(pixels))
            return np.asarray(PIL.ImageCms.applyTransform(image, self._colours))

    def at(self, downsample: float) -> "Slide":
        """The slide as it was scanned at another resolution."""
        return Slide(self.file, downsample, self._assumed)

    def thumbnail(self, longest: int) -> "Slide":
        """The slide with sides of at most so many pixels, read from a low level."""
        height, width = (side * self.downsample for side in self.size)
        return self.at(max(1.0, max(height, width) / longest))

    def places(self, patches: Any, side: float) -> "tuple[Slide, Any, float]":
        """Where the `patches` (row, column) of a map of `side` px each lie: the slide, their places and their side."""
        return self, patches, side

    def in_level_0(self, row: Place, col: Place) -> tuple[Place, Place]:
        """The place (row, column) of the full level 0 of a place in pixels of this resolution; or of arrays of them."""
        return self.origin[0] + row * self.scale[0], self.origin[1] + col * self.scale[1]

    @cached_property
    def _colours(self) -> Any:
        """A transform from the slide's colours to sRGB; None if it has no profile of them."""
        if not self.file.profile:
            return None
        import PIL.ImageCms

        with blaming(self.file.path, "has an ICC profile that cannot be used"):
            source = PIL.ImageCms.getOpenProfile(io.BytesIO(self.file.profile))
            return PIL.ImageCms.buildTransform(source, PIL.ImageCms.createProfile("sRGB"), "RGB", "RGB")


def window(image: Image, corner: Corner, size: tuple[int, ...], outside: int | None = None) -> Image:
    """A window of a slide, or of a picture or mask of one; what lies beyond is `outside`, as of `crop`."""
    return FunctionImage(size, lambda *space: crop(image, corner, space, outside))


def open_slide(path: Path, resolution: Resolution | None = None) -> Slide:
    """A slide at a resolution, its header read and its pixels not. Of DICOM it is a file of it, or its folder.

    Raises BadImage, also where it does not have this resolution, and DatasetError without the package that reads it.
    """
    resolution = resolution or Resolution()
    with blaming(path):
        file = _opened(path)
    return Slide(file, resolution.downsample(file), resolution.assumed_mpp)


def _opened(path: Path) -> SlideFile:
    if is_zarr(path):
        raise BadImage(path, "is a folder of Zarr, which is no slide: name it by `images`, or convert it to TIFF")
    if path.is_dir() or is_dicom(path):
        return _openslide_file(path, dicom.checked(path))
    with open_regular(path) as file:
        magic = file.read(4)
    if not magic:
        raise BadImage(path, "is empty (0 bytes)")
    if path.suffix.lower() in SLIDE_SUFFIXES and (has_openslide() or path.suffix.lower() != APERIO):
        return _openslide_file(path, path)
    if magic in tiff.MAGIC:
        if vendor_of(path) is not None:  # which knows its pages from labels, and the factors of its levels
            return _openslide_file(path, path)
        with suppress(tiff.Unsupported):  # Pillow may read it
            images, page = tiff.open_levels(path)
            height, width = images[0].size
            levels = (Level(image, math.sqrt((height / image.size[0]) * (width / image.size[1]))) for image in images)
            _require_one_slide(path, page, images)
            mpp, aspect, power, other = _described(page)
            vendor = "OME-TIFF" if page.ome else "aperio" if page.description.startswith("Aperio") else "TIFF"
            return SlideFile(path, tuple(levels), mpp, power, None, page.profile, vendor, aspect, other)
    return SlideFile(path, (Level(open_image(path), 1.0),), vendor=path.suffix.lower().lstrip("."))


def _openslide_file(path: Path, main: Path) -> SlideFile:
    """A slide of a path, which OpenSlide opens by its main file."""
    header, profile = open_with_openslide(main)
    found: Mapping[str, str] = header["properties"]
    levels = tuple(
        Level(tiff.scanned_level(header, main, number), float(downsample))
        for number, downsample in enumerate(header["downsamples"])
    )
    across, down = _number(found.get("openslide.mpp-x")), _number(found.get("openslide.mpp-y"))
    mpp, aspect = _square(across, down)
    sides = [_number(found.get(f"openslide.bounds-{name}")) for name in ("y", "height", "x", "width")]
    bounds = None
    if all(side is not None for side in sides):
        top, height, left, width = (int(side or 0) for side in sides)
        rows, cols = Interval(top, top + height), Interval(left, left + width)
        whole = levels[0].image.size
        if height > 0 and width > 0 and Interval(0, whole[0]).covers(rows) and Interval(0, whole[1]).covers(cols):
            bounds = rows, cols
    power = _number(found.get("openslide.objective-power"))
    vendor = found.get("openslide.vendor", "")
    return SlideFile(path, levels, mpp, power, bounds, bytes(profile) or None, vendor, aspect)


def _described(page: "tiff.PageFacts") -> tuple[float | None, tuple[float, float], float | None, float | None]:
    """Microns per pixel, aspect and magnification of a TIFF page; and other microns per pixel of its tags."""
    sides, power = _of_ome(page.ome, page.number) if page.ome else ((None, None), None)
    mpp, aspect = _square(*sides)
    if mpp is None:
        said = re.search(r"\bMPP\s*=\s*([0-9.]+)", page.description)
        mpp = plausible_mpp(_number(said[1]) if said else None)
    if power is None:
        said = re.search(r"\bAppMag\s*=\s*([0-9.]+)", page.description)
        power = _number(said[1]) if said else None
    tagged, of_tags = None, (1.0, 1.0)
    imagej = re.match(r"ImageJ=.*?^unit=([^\n]+)", page.description, re.DOTALL | re.MULTILINE)  # goes before the tag
    unit = _MICROMETRES.get(imagej[1] if imagej else _UNITS.get(page.resolution_unit, ""))
    if page.resolution and unit:
        tagged, of_tags = _square(unit / page.resolution[0], unit / page.resolution[1])
    if mpp is None:
        return tagged, of_tags, power, None
    return mpp, aspect, power, None if tagged is None or math.isclose(tagged, mpp, rel_tol=SAME_MPP) else tagged


def _of_ome(ome: str, number: int) -> tuple[tuple[float | None, float | None], float | None]:
    """Microns per pixel (x, y) and magnification of an image of OME-XML."""
    every, images, lenses = (_elements(ome, tag) for tag in ("Pixels", "Image", "Objective"))
    inner = [each for image in images[number : number + 1] for each in image if "ObjectiveSettings" in each.tag]
    used = {each.get("ID") for each in inner}
    lens = next((each for each in lenses if each.get("ID") in used), next(iter(lenses), None))
    power = None if lens is None else _number(lens.get("NominalMagnification"))
    return (_sides(every[number]) if number < len(every) else (None, None)), power


def _elements(ome: str, tag: str) -> list[ElementTree.Element]:
    """The elements of OME-XML of this tag; none of other texts, or of one with entities."""
    if "<!DOCTYPE" in ome or "<!ENTITY" in ome:
        return []
    try:
        return [each for each in ElementTree.fromstring(ome).iter() if each.tag.rpartition("}")[2] == tag]
    except ElementTree.ParseError:
        return []


def _sides(pixels: ElementTree.Element) -> tuple[float | None, float | None]:
    """Microns per pixel (x, y) of `Pixels`."""
    sides = []
    for axis in "XY":
        size = _number(pixels.get(f"PhysicalSize{axis}"))
        unit = _MICROMETRES.get(pixels.get(f"PhysicalSize{axis}Unit", "µm"))
        sides.append(None if size is None or unit is None else size * unit)
    return sides[0], sides[1]


def _require_one_slide(path: Path, page: "tiff.PageFacts", levels: Sequence[Image]) -> None:
    """Raise BadImage if another image of OME-XML has the slide's size, or its resolution and is no level of it.

    Labels and overviews have neither.
    """
    images, every = _elements(page.ome, "Image"), _elements(page.ome, "Pixels")
    if not page.number < len(every) == len(images):
        return
    names = [str(each.get("Name") or each.get("ID")) for each in images]
    sizes = [(_number(each.get("SizeY")), _number(each.get("SizeX"))) for each in every]
    mine, (mpp, _) = sizes[page.number], _sides(every[page.number])
    smaller = [tuple(level.size) for level in levels[1:]]
    others = [
        name
        for number, name in enumerate(names)
        if number != page.number
        and not tiff.BESIDE.search(name)
        and (sizes[number] == mine or (mpp and _sides(every[number])[0] == mpp and sizes[number] not in smaller))
    ]
    if others:
        told = f"has {counted(1 + len(others), 'image')} that may be the slide: {some([names[page.number], *others])}"
        raise BadImage(path, f"{told}: write each to a file of its own")


def _square(across: float | None, down: float | None) -> tuple[float | None, tuple[float, float]]:
    """Microns per pixel, and aspect; None where nobody says them, or says what no slide has."""
    across, down = plausible_mpp(across), plausible_mpp(down)
    if across is None or down is None:
        return None, (1.0, 1.0)
    longer = max(across, down)
    if longer <= (1 + SAME) * min(across, down):
        return math.sqrt(across * down), (1.0, 1.0)
    return longer, (longer / down, longer / across)


def _number(text: object) -> float | None:
    """A positive number, or 0; None for what is none."""
    try:
        found = float(str(text).replace(",", "."))
    except ValueError:
        return None
    return found if math.isfinite(found) and found >= 0 else None


def plausible_mpp(mpp: float | None) -> float | None:
    """Microns per pixel that a slide may have; None for others."""
    return mpp if mpp is not None and LEAST_MPP <= mpp <= MOST_MPP else None
