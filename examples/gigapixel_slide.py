"""Write very large slides, block by block, from the tissue of `tissue_slides`: four of 32768 x 32768 px take a minute.

    python examples/gigapixel_slide.py --out data/gigapixel --size 32768

One of each class is to be trained on, and one to validate with, in folders as `mpi4dl train --images` takes them. A few
blocks of 4096 x 4096 px are composed for each; it is laid with them, each mirrored and turned in its own way. They are
tiled TIFFs with JPEG compression, as slide scanners write them, of which any box can be read without the rest.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from examples.tissue_slides import CLASSES, PARTS, TIFF_OPTIONS, compose, load_tissue

BLOCK_PX, TILE_PX = 4096, 512
NUM_BLOCKS = 6

Pixels = npt.NDArray[np.uint8]


def tiles(size_px: int, part: int, positive: bool, seed: int, block_px: int = BLOCK_PX) -> Iterator[Pixels]:
    """The tiles of the slide, row by row, (512, 512, 3) each; those at its end are filled up with white."""
    tissue, key = load_tissue(part), (seed, part, int(positive))
    blocks = [compose(tissue, block_px, positive, np.random.default_rng((*key, i))) for i in range(NUM_BLOCKS)]
    random = np.random.default_rng(key)
    count = -(-size_px // block_px)
    for row in range(count):
        strip = np.concatenate([_turned(blocks[random.integers(NUM_BLOCKS)], random) for _ in range(count)], axis=1)
        height = min(block_px, size_px - row * block_px)
        for top in range(0, height, TILE_PX):
            for left in range(0, size_px, TILE_PX):
                tile = np.full((TILE_PX, TILE_PX, 3), 255, np.uint8)
                pixels = strip[top : min(top + TILE_PX, height), left : min(left + TILE_PX, size_px)]
                tile[: pixels.shape[0], : pixels.shape[1]] = pixels
                yield tile


def _turned(block: Pixels, random: np.random.Generator) -> Pixels:
    turned = np.rot90(block, int(random.integers(4)))
    return turned[::-1] if random.random() < 0.5 else turned


def write(path: Path, size_px: int, part: int, positive: bool, seed: int = 0) -> None:
    """Write a slide beside `path`, and rename it when it is complete."""
    import tifffile

    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    tifffile.imwrite(
        unfinished,
        tiles(size_px, part, positive, seed),
        shape=(size_px, size_px, 3),
        dtype=np.uint8,
        bigtiff=True,
        tile=(TILE_PX, TILE_PX),
        **TIFF_OPTIONS,
    )
    unfinished.rename(path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write very large slides of composed tissue.")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write to")
    parser.add_argument("--size", type=int, default=32768, help="side in pixels (default: 32768)")
    parser.add_argument("--seed", type=int, default=0, help="for other slides (default: 0)")
    options = parser.parse_args()
    for part, folder in enumerate(PARTS):
        for positive, name in enumerate(CLASSES):
            path = options.out / folder / name / "slide.tif"
            write(path, options.size, part, bool(positive), options.seed)
            print(f"{path}: {options.size} x {options.size} px, {path.stat().st_size / 2**20:,.0f} MiB", flush=True)


if __name__ == "__main__":
    main()
