"""Write one very large slide, block by block, from the tissue of `tissue_slides`: 32768 x 32768 px take a few minutes.

    python examples/gigapixel_slide.py --out data/gigapixel/train/tissue/slide.tif --size 32768

A few blocks of 4096 x 4096 px are composed; the slide is laid with them, each mirrored and turned in its own way. It is
a tiled TIFF with JPEG compression, as slide scanners write them, of which any box can be read without the rest.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from examples.tissue_slides import JPEG_QUALITY, compose, load_tissue

BLOCK_PX, TILE_PX = 4096, 512
NUM_BLOCKS = 6

Pixels = npt.NDArray[np.uint8]


def tiles(size_px: int, seed: int, block_px: int = BLOCK_PX) -> Iterator[Pixels]:
    """The tiles of the slide, row by row, (512, 512, 3) each; those at its end are filled up with white."""
    tissue = load_tissue(0)
    blocks = [compose(tissue, block_px, bool(i % 2), np.random.default_rng((seed, i))) for i in range(NUM_BLOCKS)]
    random = np.random.default_rng(seed)
    count = -(-size_px // block_px)
    for row in range(count):
        strip = np.concatenate([_turned(blocks[random.integers(NUM_BLOCKS)], random) for _ in range(count)], axis=1)
        height = min(block_px, size_px - row * block_px)
        for top in range(0, height, TILE_PX):
            for left in range(0, size_px, TILE_PX):
                tile = np.full((TILE_PX, TILE_PX, 3), 255, np.uint8)
                part = strip[top : min(top + TILE_PX, height), left : min(left + TILE_PX, size_px)]
                tile[: part.shape[0], : part.shape[1]] = part
                yield tile


def _turned(block: Pixels, random: np.random.Generator) -> Pixels:
    turned = np.rot90(block, int(random.integers(4)))
    return turned[::-1] if random.random() < 0.5 else turned


def write(path: Path, size_px: int, seed: int = 0) -> None:
    """Write the slide beside `path`, and rename it when it is complete."""
    import tifffile

    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    tifffile.imwrite(
        unfinished,
        tiles(size_px, seed),
        shape=(size_px, size_px, 3),
        dtype=np.uint8,
        bigtiff=True,
        photometric="rgb",
        tile=(TILE_PX, TILE_PX),
        compression="jpeg",
        compressionargs={"level": JPEG_QUALITY},
        description="Synthetic composition of real tissue (skimage.data.immunohistochemistry); no diagnostic data.",
        metadata=None,
    )
    unfinished.rename(path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write one very large slide of composed tissue.")
    parser.add_argument("--out", type=Path, required=True, help="the file, such as slide.tif")
    parser.add_argument("--size", type=int, default=32768, help="side in pixels (default: 32768)")
    parser.add_argument("--seed", type=int, default=0, help="for other slides (default: 0)")
    options = parser.parse_args()
    write(options.out, options.size, options.seed)
    print(f"{options.out}: {options.size} x {options.size} px, {options.out.stat().st_size / 2**20:,.0f} MiB")


if __name__ == "__main__":
    main()
