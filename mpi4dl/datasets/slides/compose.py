"""Compose synthetic slides with lesions: pyramidal TIFF of any size, tile by tile, with a table and annotations.

Tissue is blobs of stained texture on white glass. Slides of the class `tumour` have lesions too: discs of large dark
nuclei in pale plasm, far smaller than the tissue. The mean colour of a lesion is that of the tissue around it, so that
it vanishes where a slide is reduced until nuclei blur. Everything follows from the seed and the place of a pixel alone,
so that a slide of 65,536 px takes no more memory than one of 1,024 px.
"""

import csv
import io
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mpi4dl._files import Replacement, map_new, naming, write_durably
from mpi4dl.datasets.arrays import scatter
from mpi4dl.datasets.base import DatasetError, Pixels
from mpi4dl.datasets.slides.geojson import collection, feature

CLASSES = ("normal", "tumour")
TILE = 256  # px
ANNOTATIONS = "annotations"
TABLE = "slides.csv"
MOST_LESION = 0.01
SMALLEST_LEVEL = 1024  # px, of the longer side
GLASS = (243, 242, 244)
STROMA, EPITHELIUM, NUCLEI = (226, 168, 204), (190, 116, 178), (92, 56, 130)
LESION_NUCLEI = (58, 22, 70)
NUCLEI_ABOVE, LESION_NUCLEI_ABOVE = 0.45, 0.255  # noise above which a pixel belongs to a nucleus
NUCLEI_SHARE, LESION_NUCLEI_SHARE = 0.169, 0.3  # the shares of pixels for which `_noise` is above these
MICROMETRES_IN_CM = 10_000
FORMATS = (".tif", ".ome.tif", ".svs")
APERIO = (
    "Aperio Image Library mpi4dl\n{width}x{height} [0,0 {width}x{height}] ({tile}x{tile})|AppMag = {power}|MPP = {mpp}"
)

Place = tuple[float, float]  # row, column


class Disc(NamedTuple):
    """A disc of level 0: its centre (row, column) and its radius, in pixels."""

    row: float
    col: float
    radius: float


@dataclass(frozen=True)
class Composition:
    """A synthetic slide: its sides in pixels, microns per pixel, seed, and lesions."""

    size: tuple[int, int]
    mpp: float
    seed: int
    tissue: tuple[Disc, ...]
    lesions: tuple[Disc, ...]

    @property
    def lesion_share(self) -> float:
        """The share of the slide's area that lesions cover."""
        return sum(math.pi * lesion.radius**2 for lesion in self.lesions) / math.prod(self.size)

    def pixels(self, rows: slice, cols: slice) -> Pixels:
        """The pixels of a box of level 0: (rows, columns, 3), uint8."""
        y, x = np.arange(rows.start, rows.stop), np.arange(cols.start, cols.stop)
        found = np.full((len(y), len(x), 3), GLASS, np.float32)
        inside = self._tissue(y, x)
        if inside.any():
            found[inside] = self._stained(y, x)[inside]
        found += _noise(self.seed + 1, y, x, 1.0)[..., None] * 4
        return np.clip(np.rint(found), 0, 255).astype(np.uint8)

    def _tissue(self, y: npt.NDArray[Any], x: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Discs whose edges are ragged."""
        inside = np.zeros((len(y), len(x)), bool)
        for disc in self.tissue:
            near = _distance(disc, y, x)
            if near.min() <= disc.radius * 1.2:
                inside |= near <= disc.radius * (1 + 0.15 * _noise(self.seed + 2, y, x, disc.radius / 4))
        return inside

    def _stained(self, y: npt.NDArray[Any], x: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """Stroma and epithelium in patches, with small nuclei.

        In lesions nuclei are large, crowded and dark, in plasm so pale that the mean colour stays the same.
        """
        stroma, epithelium, usual, dark = np.asarray((STROMA, EPITHELIUM, NUCLEI, LESION_NUCLEI), np.float32)
        share = np.clip(0.5 + _noise(self.seed + 3, y, x, 60 / self.mpp), 0, 1)[..., None]
        found: npt.NDArray[np.float32] = stroma * (1 - share) + epithelium * share
        near = np.zeros(found.shape[:2], bool)
        for lesion in self.lesions:
            near |= _distance(lesion, y, x) <= lesion.radius
        mean = found[near] * (1 - NUCLEI_SHARE) + usual * NUCLEI_SHARE
        found[_noise(self.seed + 4, y, x, 4 / self.mpp) > NUCLEI_ABOVE] = usual
        if near.any():
            found[near] = (mean - dark * LESION_NUCLEI_SHARE) / (1 - LESION_NUCLEI_SHARE)
            found[near & (_noise(self.seed + 6, y, x, 6 / self.mpp) > LESION_NUCLEI_ABOVE)] = dark
        found += _noise(self.seed + 5, y, x, 2 / self.mpp)[..., None] * 14
        return found


def _distance(disc: Disc, y: npt.NDArray[Any], x: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    return np.hypot((y - disc.row)[:, None], (x - disc.col)[None])


def _noise(seed: int, y: npt.NDArray[Any], x: npt.NDArray[Any], scale: float) -> npt.NDArray[np.float32]:
    """Smooth noise from -1 to 1 that changes over `scale` pixels: value noise, by a hash of the corners around a place.

    The same place has the same value, whatever box it is asked in.
    """
    down, across = y / max(scale, 1.0), x / max(scale, 1.0)
    top, left = np.floor(down).astype(np.int64), np.floor(across).astype(np.int64)
    if scale <= 1:
        return _hashed(seed, top, left)
    v, u = ((share * share * (3 - 2 * share)).astype(np.float32) for share in (down - top, across - left))
    v, u = v[:, None], u[None]
    upper = _hashed(seed, top, left) * (1 - u) + _hashed(seed, top, left + 1) * u
    lower = _hashed(seed, top + 1, left) * (1 - u) + _hashed(seed, top + 1, left + 1) * u
    return (upper * (1 - v) + lower * v).astype(np.float32, copy=False)


def _hashed(seed: int, rows: npt.NDArray[np.int64], cols: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """A number from -1 to 1 for each row and column."""
    down, across = rows.astype(np.uint32) * np.uint32(0x85EBCA6B), cols.astype(np.uint32) * np.uint32(0xC2B2AE35)
    mixed = scatter(down[:, None] ^ across[None] ^ np.uint32((seed * 0x9E3779B1) & 0xFFFFFFFF))
    return mixed.astype(np.float32) / np.float32(2**31) - 1


def composition(seed: int, size: int, mpp: float, tumour: bool, lesion_share: float) -> Composition:
    """A slide of about `size` px: sides differ by up to a fifth. Lesions cover `lesion_share` of its area.

    A lesion lies in tissue, wholly.
    """
    random = np.random.default_rng((seed, 31))
    height, width = (int(size * random.uniform(0.8, 1.0)) for _ in range(2))
    least = min(height, width)
    tissue = tuple(
        Disc(random.uniform(0.3, 0.7) * height, random.uniform(0.3, 0.7) * width, random.uniform(0.15, 0.28) * least)
        for _ in range(3)
    )
    lesions: list[Disc] = []
    if tumour:
        radius = math.sqrt(lesion_share * height * width / math.pi)
        home = max(tissue, key=lambda disc: disc.radius)
        angle, reach = random.uniform(0, 2 * math.pi), random.uniform(0, max(0.0, 0.8 * home.radius - radius))
        lesions.append(Disc(home.row + reach * math.sin(angle), home.col + reach * math.cos(angle), radius))
    return Composition((height, width), mpp, seed, tissue, tuple(lesions))


def write_slide(path: Path, slide: Composition, progress: Callable[[], object] = lambda: None) -> None:
    """Write a slide as a pyramidal TIFF of tiles in JPEG, by its ending as plain TIFF, OME-TIFF or Aperio SVS.

    `progress` is called before each row of tiles. Raises OSError; the file is there once it is whole.
    """
    import tifffile

    height, width = slide.size
    sides = [(height, width)]
    while max(sides[-1]) >= 2 * SMALLEST_LEVEL:
        sides.append((math.ceil(sides[-1][0] / 2), math.ceil(sides[-1][1] / 2)))
    options: dict[str, Any] = {"tile": (TILE, TILE), "compression": "jpeg", "photometric": "rgb", "dtype": np.uint8}
    options |= {"compressionargs": {"level": 90}, "resolutionunit": "CENTIMETER", "software": "mpi4dl"}
    ome, aperio = path.name.endswith(".ome.tif"), path.suffix == ".svs"
    told = APERIO.format(width=width, height=height, tile=TILE, power=round(10 / slide.mpp), mpp=slide.mpp)
    with naming(path), Replacement(path) as temporary, temporary.open("wb") as file, ExitStack() as stack:
        stores = [stack.enter_context(TemporaryFile(dir=path.parent)) for _ in sides[1:]]
        smaller = [map_new(store, np.uint8, (*each, 3)) for store, each in zip(stores, sides[1:], strict=True)]
        writer = stack.enter_context(tifffile.TiffWriter(file, bigtiff=True, ome=ome))
        for number, level in enumerate(sides):
            read = (lambda *box, of=smaller[number - 1]: of[box]) if number else slide.pixels
            density = MICROMETRES_IN_CM / (slide.mpp * 2**number)
            writer.write(
                _tiles(level, read, smaller[number] if number < len(smaller) else None, progress),
                shape=(*level, 3),
                subifds=len(smaller) if ome and number == 0 else None,
                subfiletype=1 if number and not aperio else 0,
                resolution=(density, density),
                metadata={"axes": "YXS", "PhysicalSizeX": slide.mpp, "PhysicalSizeY": slide.mpp} if ome else None,
                description=told if aperio else None,
                **options,
            )


def _tiles(
    size: tuple[int, int],
    read: Callable[[slice, slice], Pixels],
    smaller: npt.NDArray[np.uint8] | None,
    progress: Callable[[], object],
) -> Iterator[Pixels]:
    """The tiles of a level, row by row; the means of 2 x 2 pixels go into the next `smaller` level."""
    for top in range(0, size[0], TILE):
        progress()
        for left in range(0, size[1], TILE):
            tile = read(slice(top, min(top + TILE, size[0])), slice(left, min(left + TILE, size[1])))
            if smaller is not None:
                even = np.pad(tile, [(0, side % 2) for side in tile.shape[:2]] + [(0, 0)], mode="edge")
                quarters = even.reshape(even.shape[0] // 2, 2, even.shape[1] // 2, 2, 3).mean((1, 3))
                rows, cols = (
                    slice(first // 2, first // 2 + n) for first, n in zip((top, left), quarters.shape, strict=False)
                )
                smaller[rows, cols] = np.rint(quarters)
            yield tile


def annotations(slide: Composition) -> str:
    """The lesions of a slide as GeoJSON of QuPath, as polygons of 64 corners."""
    angles = np.linspace(0, 2 * np.pi, 65)
    return collection(
        feature(
            [[[float(disc.col + disc.radius * np.cos(a)), float(disc.row + disc.radius * np.sin(a))] for a in angles]],
            "Tumor",
        )
        for disc in slide.lesions
    )


@dataclass(frozen=True)
class Cohort:
    """Synthetic slides of so many patients, of whom every second one has a tumour.

    Slides take turns in `formats` and microns per pixel, and are of up to `size` px. Lesions cover `lesion_share` of
    the area of a tumour slide.

    Raises:
        DatasetError: a number, a format or a share that cannot be.
    """

    patients: int = 20
    slides_each: int = 1
    size: int = 8192
    mpps: Sequence[float] = (0.5,)
    formats: Sequence[str] = FORMATS[:1]
    lesion_share: float = 0.0004
    seed: int = 0

    def __post_init__(self) -> None:
        unknown = [each for each in self.formats if each not in FORMATS]
        if unknown or not self.formats or not self.mpps:
            raise DatasetError(f"formats are of {', '.join(FORMATS)}, not {', '.join(unknown) or 'none'}")
        if min(self.patients, self.slides_each) < 1 or self.size < 2 * TILE or min(self.mpps) <= 0:
            raise DatasetError(
                f"{self.patients} patients with {self.slides_each} slides of {self.size} px, {min(self.mpps)} um per "
                f"pixel: needs one or more of each, {2 * TILE} px or more, and more than 0 um"
            )
        if not 0 < self.lesion_share < MOST_LESION:
            raise DatasetError(f"lesions of {self.lesion_share} of the area: needs above 0, below {MOST_LESION}")

    def __len__(self) -> int:
        return self.patients * self.slides_each

    def name(self, number: int) -> str:
        """The file of a slide."""
        return f"slide_{number:03d}{self.formats[number % len(self.formats)]}"

    def composition(self, number: int) -> Composition:
        """A slide."""
        mpp, tumour = self.mpps[number % len(self.mpps)], self._has_tumour(number)
        return composition(self.seed * 100_003 + number, self.size, mpp, tumour, self.lesion_share)

    def _has_tumour(self, number: int) -> bool:
        return (number // self.slides_each) % 2 == 1

    def write(self, folder: Path, number: int, progress: Callable[[], object] = lambda: None) -> Path:
        """Write a slide, and `annotations/NAME.geojson` of a tumour slide.

        `progress` is called before each row of tiles.
        """
        (path, *beside), slide = self.files(folder, number), self.composition(number)
        (folder / ANNOTATIONS).mkdir(parents=True, exist_ok=True)
        write_slide(path, slide, progress)
        for each in beside:
            write_durably(each, annotations(slide).encode())
        return path

    def files(self, folder: Path, number: int) -> list[Path]:
        """The file of a slide, and that of its annotation if it has one."""
        return [folder / name for name in (self.name(number), self._annotation(number)) if name]

    def _annotation(self, number: int) -> str:
        return f"{ANNOTATIONS}/slide_{number:03d}.geojson" if self._has_tumour(number) else ""

    def table(self) -> str:
        """The text of `slides.csv`: case_id, slide_id, label, annotation."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(("case_id", "slide_id", "label", "annotation"))
        for number in range(len(self)):
            patient, label = f"patient_{number // self.slides_each:03d}", CLASSES[self._has_tumour(number)]
            writer.writerow((patient, self.name(number), label, self._annotation(number)))
        return text.getvalue()
