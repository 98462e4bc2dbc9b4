"""Small pictures of images on disk, to be shown inside a page."""

import base64
import io
import warnings
from collections.abc import Sequence
from pathlib import Path

from mpi4dl._files import read_regular

SIDE_PX = 160
MOST_PIXELS = 1 << 26  # of an image that is decoded for this; slides are larger
MOST_BYTES = 1 << 28


def image_folders(root: Path) -> list[Path]:
    """Where names of images may begin below a source: in it, in its parts, and beside the masks of either."""
    from mpi4dl.datasets.layout import TEST, VALIDATION, subfolders  # with torch, which takes seconds
    from mpi4dl.datasets.segmented import IMAGES

    try:
        parts = [root / name for name in subfolders(root) if name.casefold() in VALIDATION | TEST]
    except (OSError, ValueError):
        parts = []
    return [folder for part in (*parts, root) for folder in (part / IMAGES, part)]


def find(name: str, folders: Sequence[Path]) -> Path | None:
    """The file that a report calls so, as it is or in one of these folders."""
    for path in (*(folder / name for folder in folders), Path(name)):
        try:
            if path.is_file():
                return path
        except (OSError, ValueError):  # a name too long for a file, or with a zero in it
            continue
    return None


def thumbnail(path: Path) -> str | None:
    """A JPEG as the source of an <img>, or None for what is too large, or cannot be read."""
    from PIL import Image

    try:
        if path.stat().st_size > MOST_BYTES:
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with Image.open(io.BytesIO(read_regular(path))) as image:
                if image.width * image.height > MOST_PIXELS:
                    return None
                image.draft("RGB", (2 * SIDE_PX, 2 * SIDE_PX))
                small = image.convert("RGB")
        small.thumbnail((SIDE_PX, SIDE_PX))
        file = io.BytesIO()
        small.save(file, "JPEG", quality=80)
    except Exception:  # decoders raise of every kind, and a report goes on without a picture
        return None
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
