"""Which reader opens an image file."""

from pathlib import Path

from mpi4dl.datasets import tiff
from mpi4dl.datasets.base import BadImage, Image
from mpi4dl.datasets.pillow import PillowImage
from mpi4dl.datasets.vendor import OpenSlideImage

SLIDE_SUFFIXES = (".svs", ".ndpi", ".mrxs", ".scn", ".vms", ".vmu", ".bif", ".svslide")
PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff")
SUFFIXES = PICTURE_SUFFIXES + SLIDE_SUFFIXES


def open_image(path: Path) -> Image:
    """Open an image file: scanners' formats by their extension, TIFF and the rest by their first bytes.

    Raises:
        BadImage: the file cannot be read, is empty, damaged, or no image.
        DatasetError: the package that reads this format is not installed.
    """
    if path.suffix.lower() in SLIDE_SUFFIXES:
        return OpenSlideImage(path)
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise BadImage(path, f"cannot be read: {error.strerror}") from error
    if not magic:
        raise BadImage(path, "is empty (0 bytes)")
    if magic not in tiff.MAGIC:
        return PillowImage(path)
    try:
        return tiff.TiffImage(path)
    except tiff.Unsupported:
        return PillowImage(path)
