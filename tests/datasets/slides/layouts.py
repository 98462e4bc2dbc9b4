"""Slides as scanners lay them out: small files of known pixels, with the labels and overviews that lie beside them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tifffile

Pixels = npt.NDArray[np.uint8]
TILE = 128
MPP = 0.5


@dataclass(frozen=True)
class Layout:
    """A file that a scanner could have written of a picture of this size, and what it must be read as."""

    write: Callable[[Path, Sequence[Pixels], Pixels], None]
    ending: str
    vendor: str
    size: tuple[int, int] = (768, 512)
    tolerance: int = 0  # of colours
    tifffile: str = ""  # its name of a scanner's format that it does not read truly


def picture(size: Sequence[int]) -> Pixels:
    """Smooth colours that differ everywhere."""
    rows, cols = np.meshgrid(*(np.linspace(0, 1, side) for side in size), indexing="ij")
    planes = (np.sin(9 * rows) * np.cos(5 * cols), np.cos(4 * rows + 7 * cols), rows * cols - 0.5)
    return np.stack([np.uint8(np.round(110 + 90 * plane)) for plane in planes], axis=-1)


def pyramid(pixels: Pixels, count: int = 3) -> list[Pixels]:
    """The picture, and the means of 2 x 2 pixels of each level before."""
    levels = [pixels]
    for _ in range(count - 1):
        rows, cols = (side // 2 for side in levels[-1].shape[:2])
        means = levels[-1][: 2 * rows, : 2 * cols].reshape(rows, 2, cols, 2, 3).mean((1, 3))
        levels.append(np.uint8(np.round(means)))
    return levels


def label_of(size: Sequence[int]) -> Pixels:
    """A label of other colours, of the proportions of the slide, and as large as the next level would be."""
    found = np.full((size[0] // 8, size[1] // 8, 3), 240, np.uint8)
    found[::3] = (10, 20, 30)
    return found


TILED: dict[str, Any] = {"photometric": "rgb", "tile": (TILE, TILE), "compression": "zlib", "metadata": None}
STRIPED: dict[str, Any] = {"photometric": "rgb", "rowsperstrip": 16, "compression": "zlib", "metadata": None}
APERIO = "Aperio Image Library v12.0.15\n"


def aperio(path: Path, levels: Sequence[Pixels], label: Pixels) -> None:
    height, width = levels[0].shape[:2]
    told = f"{width}x{height} [0,0 {width}x{height}] ({TILE}x{TILE}) RGB|AppMag = 20|MPP = {MPP}"
    with tifffile.TiffWriter(path) as file:
        file.write(levels[0], description=APERIO + told, subfiletype=0, **TILED)
        file.write(levels[-1], description=f"{APERIO}{told} -> thumbnail", subfiletype=0, **STRIPED)
        for level in levels[1:]:
            rows, cols = level.shape[:2]
            file.write(level, description=f"{APERIO}{told} -> {cols}x{rows}", subfiletype=0, **TILED)
        file.write(label, description=f"{APERIO}label {label.shape[1]}x{label.shape[0]}", subfiletype=1, **STRIPED)
        file.write(label, description=f"{APERIO}macro {label.shape[1]}x{label.shape[0]}", subfiletype=9, **STRIPED)


def philips(path: Path, levels: Sequence[Pixels], label: Pixels) -> None:
    """Levels are padded to whole tiles, and say their pixel spacing."""
    spacings = [f'"{MPP / 1000 * 2**number:.9f}" "{MPP / 1000 * 2**number:.9f}"' for number in range(len(levels))]
    one = (
        '<DataObject ObjectType="PixelDataRepresentation">'
        '<Attribute Name="DICOM_PIXEL_SPACING" Group="0x0028" Element="0x0030" PMSVR="IDoubleArray">{}</Attribute>'
        '<Attribute Name="PIIM_PIXEL_DATA_REPRESENTATION_NUMBER" Group="0x1001" Element="0x8B02" PMSVR="IUInt16">{}'
        "</Attribute></DataObject>"
    )
    parts = "".join(one.format(spacing, number) for number, spacing in enumerate(spacings))
    told = (
        '<?xml version="1.0" encoding="UTF-8" ?><DataObject ObjectType="DPUfsImport">'
        '<Attribute Name="DICOM_MANUFACTURER" Group="0x0008" Element="0x0070" PMSVR="IString">Hamamatsu</Attribute>'
        '<Attribute Name="PIM_DP_SCANNED_IMAGES" Group="0x301D" Element="0x1003" PMSVR="IDataObjectArray"><Array>'
        '<DataObject ObjectType="DPScannedImage">'
        '<Attribute Name="PIM_DP_IMAGE_TYPE" Group="0x301D" Element="0x1004" PMSVR="IString">WSI</Attribute>'
        f'<Attribute Name="DICOM_PIXEL_SPACING" Group="0x0028" Element="0x0030" PMSVR="IDoubleArray">{spacings[0]}'
        "</Attribute>"
        '<Attribute Name="PIIM_PIXEL_DATA_REPRESENTATION_SEQUENCE" Group="0x1001" Element="0x8B01" '
        f'PMSVR="IDataObjectArray"><Array>{parts}</Array></Attribute></DataObject></Array></Attribute></DataObject>'
    )
    with tifffile.TiffWriter(path) as file:
        for number, level in enumerate(levels):
            padding = [(0, -side % TILE) for side in level.shape[:2]]
            description = told if number == 0 else f"level={number}"
            padded = np.pad(level, [*padding, (0, 0)], constant_values=255)
            options = TILED | {"software": "Philips DP v1.0"}
            file.write(padded, description=description, subfiletype=int(number > 0), **options)
        file.write(label, description="Label", subfiletype=1, **STRIPED)
        file.write(label, description="Macro", subfiletype=1, **STRIPED)


def ventana(path: Path, levels: Sequence[Pixels], label: Pixels) -> None:
    """The first page is the label."""
    told = f'<?xml version="1.0"?><iScan Magnification="20" ScanRes="{MPP}" UnitNumber="1"></iScan>'.encode()
    with tifffile.TiffWriter(path) as file:
        tags = [(700, 1, len(told), told, True)]
        file.write(label, description="Label Image", extratags=tags, subfiletype=0, **STRIPED)
        for number, level in enumerate(levels):
            described = f"level={number} mag={20 / 2**number:g} quality=95"
            file.write(level, description=described, subfiletype=int(number > 0), **TILED)


def leica(path: Path, levels: Sequence[Pixels], label: Pixels) -> None:
    """The first image is the overview of the whole glass."""
    height, width = levels[0].shape[:2]
    nm = [round(side * MPP * 1000) for side in (width, height)]

    def image(name: str, sizes: Sequence[tuple[int, int]], first: int, view: Sequence[int], objective: str) -> str:
        dimensions = "".join(
            f'<dimension sizeX="{cols}" sizeY="{rows}" r="{number}" ifd="{first + number}" />'
            for number, (rows, cols) in enumerate(sizes)
        )
        return (
            f'<image name="{name}" uuid="urn:uuid:{name}"><creationDate>2012-01-01T00:00:00Z</creationDate>'
            '<device model="Leica SCN400;Leica SCN" version="1.5.1" />'
            f'<pixels sizeX="{sizes[0][1]}" sizeY="{sizes[0][0]}">{dimensions}</pixels>'
            f'<view sizeX="{view[0]}" sizeY="{view[1]}" offsetX="0" offsetY="0" spacingZ="0" />'
            f"<scanSettings><objectiveSettings><objective>{objective}</objective></objectiveSettings>"
            "<illuminationSettings><illuminationSource>brightfield</illuminationSource></illuminationSettings>"
            "</scanSettings></image>"
        )

    sizes = [level.shape[:2] for level in levels]
    resolution = {"resolution": (1e4 / MPP, 1e4 / MPP), "resolutionunit": 3}
    glass = [16 * side for side in nm]
    told = (
        '<?xml version="1.0"?><scn xmlns="http://www.leica-microsystems.com/scn/2010/10/01" '
        f'uuid="urn:uuid:x"><collection name="a" uuid="urn:uuid:y" sizeX="{glass[0]}" sizeY="{glass[1]}">'
        f"<barcode>MQ==</barcode>{image('macro', [label.shape[:2]], 0, glass, '0.6')}"
        f"{image('slide', sizes, 1, nm, '20')}</collection></scn>"
    )
    with tifffile.TiffWriter(path, bigtiff=True) as file:
        file.write(label, description=told, **TILED)
        for number, level in enumerate(levels):
            file.write(level, subfiletype=int(number > 0), **TILED, **resolution)


def ome(path: Path, levels: Sequence[Pixels], label: Pixels) -> None:
    """The first image is the overview; the levels of the second are in SubIFDs."""
    mpp = {"PhysicalSizeX": MPP, "PhysicalSizeY": MPP}
    options = {**TILED, "metadata": None}
    with tifffile.TiffWriter(path, ome=True) as file:
        file.write(label, **{**options, "metadata": {"Name": "macro", "PhysicalSizeX": 8.0, "PhysicalSizeY": 8.0}})
        file.write(levels[0], subifds=len(levels) - 1, **{**options, "metadata": {"Name": "slide", **mpp}})
        for level in levels[1:]:
            file.write(level, subfiletype=1, **options)


def hamamatsu(path: Path, levels: Sequence[Pixels], label: Pixels) -> None:
    """Levels are one JPEG each, and say their magnification; a page of magnification -1 is the overview."""
    options = {"photometric": "rgb", "compression": "jpeg", "compressionargs": {"level": 98}, "metadata": None}
    per_cm = 1e4 / MPP
    with tifffile.TiffWriter(path) as file:
        for number, level in enumerate([*levels, label]):
            power = -1.0 if number == len(levels) else 20 / 2**number
            tags = [(65420, 4, 1, 1, True), (65421, 11, 1, power, True)]
            tags += [(65422, 9, 1, 0, True), (65423, 9, 1, 0, True), (65424, 9, 1, 0, True)]
            resolution = {"resolution": (per_cm / 2**number,) * 2, "resolutionunit": 3}
            file.write(level, extratags=tags, rowsperstrip=level.shape[0], **options, **resolution)


OVERLAP = TILE // 2


def trestle(path: Path, levels: Sequence[Pixels], label: Pixels) -> None:
    """Tiles overlap, as the description says of each level; XResolution is in microns per pixel."""
    told = "Background Color=E6E6E6;White Balance=ECECEC;Objective Power=20;JPEG Quality=70;OverlapsXY="
    told += f" {OVERLAP} {OVERLAP}" * len(levels)
    options = TILED | {"description": told, "software": "MedScan 2.5", "resolution": (MPP, MPP), "resolutionunit": 1}
    with tifffile.TiffWriter(path) as file:
        for number, level in enumerate(levels):
            starts = [range(0, side - OVERLAP, TILE - OVERLAP) for side in level.shape[:2]]
            tiles = [level[top : top + TILE, left : left + TILE] for top in starts[0] for left in starts[1]]
            shape = (TILE * len(starts[0]), TILE * len(starts[1]), 3)
            file.write(iter(tiles), shape=shape, dtype=np.uint8, subfiletype=int(number > 0), **options)


def generic(path: Path, levels: Sequence[Pixels], label: Pixels, reduced: int = 1) -> None:
    """Tiles of nobody's, and a label that does not say that it is one."""
    per_cm = 1e4 / MPP
    with tifffile.TiffWriter(path) as file:
        for number, level in enumerate(levels):
            resolution = {"resolution": (per_cm, per_cm), "resolutionunit": 3} if number == 0 else {}
            file.write(level, subfiletype=reduced * int(number > 0), **TILED, **resolution)
        file.write(label, subfiletype=0, **TILED)


def unmarked(path: Path, levels: Sequence[Pixels], label: Pixels) -> None:
    generic(path, levels, label, reduced=0)


LAYOUTS: dict[str, Layout] = {
    "Aperio SVS": Layout(aperio, ".svs", "aperio"),
    "Aperio .tif": Layout(aperio, ".tif", "aperio"),
    "Philips, square": Layout(philips, ".tiff", "philips", size=(640, 640), tifffile="philips"),
    "Philips, oblong": Layout(philips, ".tiff", "philips", size=(1280, 384), tifffile="philips"),
    "Ventana": Layout(ventana, ".tif", "ventana", tifffile="bif"),
    "Leica": Layout(leica, ".tif", "leica", tolerance=2, tifffile="scn"),
    "OME-TIFF": Layout(ome, ".ome.tif", "OME-TIFF"),
    "Hamamatsu": Layout(hamamatsu, ".tif", "hamamatsu", tolerance=6, tifffile="hamamatsu"),
    "Trestle": Layout(trestle, ".tif", "trestle", size=(1024, 512), tifffile="trestle"),
    "generic": Layout(generic, ".tif", "TIFF"),
    "generic without NewSubfileType": Layout(unmarked, ".tif", "TIFF"),
}
