"""Write a small set to learn segmentation from: crops of real tissue, and of a cell, with masks; no download needed.

The tissue is the immunohistochemistry picture that scikit-image ships (human colon, brown DAB stain on the glands), the
cell its picture of one that floats in saline. Masks are made by thresholds: of the smoothed optical density of DAB, and
Otsu's of the smoothed brightness of the cell. Tissue to train on and to validate with comes from disjoint halves of the
picture; the cell is the same in both, turned and scaled by other numbers. Nothing medical follows from any of it.

    python -m examples.tissue_masks --out data/masks
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image
from skimage import data
from skimage.color import rgb2hed
from skimage.filters import gaussian, threshold_otsu
from skimage.transform import resize, rotate

CLASSES = ("background", "stained", "cell")
SIDE_PX = 128
BROWN = 0.02  # optical density of DAB, smoothed
CELL_EVERY = 4  # every fourth picture is one of the cell
PARTS = {"train": 48, "val": 16}

Pixels = npt.NDArray[Any]


def tissue() -> tuple[Pixels, Pixels]:
    """The picture, and where it is stained."""
    picture = data.immunohistochemistry()
    return picture, (gaussian(rgb2hed(picture)[..., 2], 1.5) > BROWN).astype(np.uint8) * CLASSES.index("stained")


def cell() -> tuple[Pixels, Pixels]:
    """The picture, and where the cell is."""
    picture = data.cell()
    smooth = gaussian(picture.astype(float), 3)
    mask = (smooth > threshold_otsu(smooth)).astype(np.uint8) * CLASSES.index("cell")
    return np.repeat(picture[..., None], 3, axis=2), mask


def tissue_crop(rng: np.random.Generator, picture: Pixels, mask: Pixels, part: str) -> tuple[Pixels, Pixels]:
    """A crop of the left half to train on, of the right one to validate with."""
    width = picture.shape[1] // 2
    row = int(rng.integers(picture.shape[0] - SIDE_PX + 1))
    col = int(rng.integers(width - SIDE_PX + 1)) + (width if part == "val" else 0)
    place = slice(row, row + SIDE_PX), slice(col, col + SIDE_PX)
    return picture[place], mask[place]


def cell_crop(rng: np.random.Generator, picture: Pixels, mask: Pixels) -> tuple[Pixels, Pixels]:
    """A crop with the cell in it, somewhere, turned and scaled."""
    rows, cols = (int(np.mean(found)) for found in np.nonzero(mask))
    angle, side = float(rng.uniform(0, 360)), int(rng.integers(150, 260))
    place = tuple(
        slice(start, start + side) for start in (int(c - side / 2 + rng.integers(-30, 31)) for c in (rows, cols))
    )
    inside = tuple(slice(max(0, s.start), s.stop) for s in place)
    turned = rotate(picture, angle, center=(cols, rows), mode="reflect", preserve_range=True)[inside]
    turned_mask = rotate(mask, angle, center=(cols, rows), order=0, preserve_range=True)[inside]
    shown = resize(turned, (SIDE_PX, SIDE_PX), preserve_range=True)
    return shown.round().astype(np.uint8), resize(
        turned_mask, (SIDE_PX, SIDE_PX), order=0, preserve_range=True, anti_aliasing=False
    ).astype(np.uint8)


def main() -> None:
    """Write `images/` and `masks/` below `train/` and `val/`, and the names of classes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("data/masks"))
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    rng, of_tissue, of_cell = np.random.default_rng(asked.seed), tissue(), cell()
    for part, count in PARTS.items():
        for kind in ("images", "masks"):
            (asked.out / part / kind).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            crop = cell_crop(rng, *of_cell) if number % CELL_EVERY == 0 else tissue_crop(rng, *of_tissue, part)
            for kind, pixels in zip(("images", "masks"), crop, strict=True):
                Image.fromarray(pixels).save(asked.out / part / kind / f"{number:03d}.png")
    (asked.out / "classes.txt").write_text("\n".join(CLASSES) + "\n")
    print(f"{PARTS['train']} + {PARTS['val']} pictures of {SIDE_PX} px with masks: {asked.out}")


if __name__ == "__main__":
    main()
