"""DICOM whole-slide images for tests, written by pydicom: an instance for each level, or for each part of a level."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.encaps import encapsulate
from pydicom.uid import (
    UID,
    ExplicitVRLittleEndian,
    JPEG2000Lossless,
    JPEGBaseline8Bit,
    RLELossless,
    VLWholeSlideMicroscopyImageStorage,
)

TILE = 64


def uid(*numbers: int) -> UID:
    return UID(".".join(map(str, (1, 2, 826, 0, 1, 3680043, 10, 511, *numbers))))


def series(
    folder: Path,
    levels: Sequence[np.ndarray],
    mpp: float | None = 0.5,
    *,
    number: int = 1,
    syntax: UID = ExplicitVRLittleEndian,
    parts: int = 1,
    sparse: bool = False,
    **more: Any,
) -> list[Path]:
    """Write the levels (rows, columns, 3) of a slide, the finest first, and return its files.

    Args:
        mpp: microns per pixel of the first level.
        number: of the series, of which several may be in one folder.
        syntax: the transfer syntax of the pixels.
        parts: files of each level, which is then a concatenation.
        sparse: whether each tile says where it is, and white ones are left out.
        more: other attributes of all files; None leaves one out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for level, pixels in enumerate(levels):
        rows, cols = pixels.shape[:2]
        corners = [(top, left) for top in range(0, rows, TILE) for left in range(0, cols, TILE)]
        tiles = [_tile(pixels, *corner) for corner in corners]
        if sparse:
            kept = [index for index, tile in enumerate(tiles) if tile.min() < 255]
            corners, tiles = [corners[index] for index in kept], [tiles[index] for index in kept]
        each = max(1, len(tiles) // parts)  # of the last one more
        for part in range(parts):
            which = slice(part * each, (part + 1) * each if part < parts - 1 else None)
            file = _instance(number, level, pixels.shape, syntax)
            if parts > 1:
                file.SOPInstanceUID = uid(number, level, 1 + part)
                file.SOPInstanceUIDOfConcatenationSource = uid(number, level, 0)
                file.ConcatenationUID = uid(number, level, 99)
                file.InConcatenationNumber, file.InConcatenationTotalNumber = 1 + part, parts
                file.ConcatenationFrameOffsetNumber = part * each
            if mpp is not None:
                spacing = mpp * levels[0].shape[0] / rows / 1000, mpp * levels[0].shape[1] / cols / 1000
                file.SharedFunctionalGroupsSequence = [_with(PixelMeasuresSequence=[_with(PixelSpacing=[*spacing])])]
            file.DimensionOrganizationType = "TILED_SPARSE" if sparse else "TILED_FULL"
            if sparse:
                places = [_place(top, left) for top, left in corners[which]]
                file.PerFrameFunctionalGroupsSequence = [_with(PlanePositionSlideSequence=[each]) for each in places]
            file.NumberOfFrames = len(tiles[which])
            _fill(file, tiles[which], syntax)
            for name, value in more.items():
                if value is None:
                    del file[name]
                else:
                    setattr(file, name, value)
            file.file_meta = FileMetaDataset()
            file.file_meta.TransferSyntaxUID = syntax
            file.file_meta.MediaStorageSOPClassUID = file.SOPClassUID
            file.file_meta.MediaStorageSOPInstanceUID = file.SOPInstanceUID
            written.append(folder / f"{number}_{level}_{part}.dcm")
            file.save_as(written[-1], enforce_file_format=True)
    return written


def _with(**attributes: Any) -> Dataset:
    found = Dataset()
    for name, value in attributes.items():
        setattr(found, name, value)
    return found


def _place(top: int, left: int) -> Dataset:
    return _with(ColumnPositionInTotalImagePixelMatrix=1 + left, RowPositionInTotalImagePixelMatrix=1 + top)


def _instance(number: int, level: int, shape: tuple[int, ...], syntax: UID) -> Dataset:
    forms = {JPEGBaseline8Bit: "YBR_FULL_422", JPEG2000Lossless: "YBR_RCT"}
    return _with(
        SOPClassUID=VLWholeSlideMicroscopyImageStorage,
        SOPInstanceUID=uid(number, level, 0),
        StudyInstanceUID=uid(number),
        SeriesInstanceUID=uid(number, 7),
        PatientID=f"patient {number}",
        Modality="SM",
        ImageType=["DERIVED", "PRIMARY", "VOLUME", "RESAMPLED" if level else "NONE"],
        Rows=TILE,
        Columns=TILE,
        TotalPixelMatrixRows=shape[0],
        TotalPixelMatrixColumns=shape[1],
        TotalPixelMatrixFocalPlanes=1,
        SamplesPerPixel=3,
        PhotometricInterpretation=forms.get(syntax, "RGB"),
        PlanarConfiguration=0,
        BitsAllocated=8,
        BitsStored=8,
        HighBit=7,
        PixelRepresentation=0,
    )


def _tile(pixels: np.ndarray, top: int, left: int) -> np.ndarray:
    tile = pixels[top : top + TILE, left : left + TILE]
    return np.pad(tile, [(0, TILE - side) for side in tile.shape[:2]] + [(0, 0)], constant_values=255)


def _fill(file: Dataset, tiles: Sequence[np.ndarray], syntax: UID) -> None:
    if syntax == ExplicitVRLittleEndian:
        file.add_new("PixelData", "OW", b"".join(tile.tobytes() for tile in tiles))
        return
    if syntax == RLELossless:
        encoded = [tile.tobytes() for tile in tiles]  # which nobody decodes
    elif syntax == JPEGBaseline8Bit:
        encoded = [imagecodecs.jpeg8_encode(tile, 90) for tile in tiles]
    else:
        lossless = syntax == JPEG2000Lossless
        how: dict[str, Any] = {"reversible": lossless, "mct": lossless, "level": 0 if lossless else 60}
        encoded = [imagecodecs.jpeg2k_encode(tile, codecformat="J2K", **how) for tile in tiles]
    file.PixelData = encapsulate(encoded)
    file["PixelData"].is_undefined_length = True
