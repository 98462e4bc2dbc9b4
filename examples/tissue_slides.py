"""Write a set of slides to learn from: synthetic compositions of real tissue, no download needed.

The tissue is the immunohistochemistry image that scikit-image ships (human colon, brown DAB stain on the glands, blue
haematoxylin counterstain). Every slide is *composed*: many small pieces of brown-free tissue, each turned at random,
laid over each other with soft edges; single stained cells strewn about; and one larger pasted piece. On a positive
slide that piece is stained gland, on a negative one it is brown-free tissue of the same shape and edge. So neither the
seams, nor the pasting, nor the mere presence of brown tells the label: only a stained *region* does.

These slides are no diagnostic data and nothing medical follows from them. Training and validation slides are made of
disjoint halves of the image, left and right.

    python -m examples.tissue_slides --out data/tissue
"""

import argparse
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Canvas = npt.NDArray[np.float32]

CLASSES = ("negative", "positive")
PARTS = ("train", "val")
TILE_PX = 256
README = "README.txt"
TIFF_OPTIONS: Mapping[str, Any] = MappingProxyType(
    {
        "photometric": "rgb",
        "compression": "jpeg",
        "compressionargs": {"level": 90},
        "description": "Synthetic composition of real tissue (skimage.data.immunohistochemistry); no diagnostic data.",
        "metadata": None,
    }
)

PIECE_PX = 64
PIECE_STEP_PX = 38
JITTER_PX = 12
REGION_PX = (60, 120)
CELL_PX = (6, 16)
MAX_CELLS = 50
FEATHER = 0.3

# Optical density of DAB, as skimage.color.rgb2hed gives it, above which a pixel counts as brown.
BROWN = 0.03
DEFAULT_TRAIN, DEFAULT_VAL, DEFAULT_SIZE_PX = 200, 80, 1024


class Corners(NamedTuple):
    """Where the square windows of one side length begin that hold almost only one kind of tissue: (count, 2)."""

    side: int
    top_left: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Tissue:
    """One half of the image, and where it has brown-free pieces, brown cells and brown regions."""

    pixels: npt.NDArray[np.uint8]
    plain: Corners
    cells: Corners
    regions: Corners


@dataclass(frozen=True)
class Slide:
    """A slide to write: its file, size, half of the image, and seed."""

    path: Path
    size_px: int
    part: int
    positive: bool
    key: tuple[int, ...]


def load_tissue(part: int) -> Tissue:
    """The left half of the image for training (part 0), the right half for validation (part 1)."""
    from skimage.color import rgb2hed
    from skimage.data import immunohistochemistry

    image = immunohistochemistry()
    middle = image.shape[1] // 2
    half = slice(0, middle) if part == 0 else slice(middle, None)
    brown = (rgb2hed(image)[..., 2] > BROWN)[:, half]
    glass = (image.min(axis=2) > 225)[:, half]
    plain = (_window_mean(brown, PIECE_PX) < 0.005) & (_window_mean(glass, PIECE_PX) < 0.3)
    cells = _window_mean(brown, CELL_PX[1]) > 0.98
    regions = _window_mean(brown, REGION_PX[1]) > 0.9
    return Tissue(
        np.ascontiguousarray(image[:, half]),
        Corners(PIECE_PX, np.argwhere(plain)),
        Corners(CELL_PX[1], np.argwhere(cells)),
        Corners(REGION_PX[1], np.argwhere(regions)),
    )


def _window_mean(mask: npt.NDArray[np.bool_], side: int) -> npt.NDArray[np.float64]:
    """The share of True in every side x side window, by its top left corner."""
    total = np.pad(mask, ((1, 0), (1, 0))).cumsum(axis=0).cumsum(axis=1).astype(np.float64)
    return (total[side:, side:] - total[:-side, side:] - total[side:, :-side] + total[:-side, :-side]) / side**2


def compose(tissue: Tissue, size_px: int, positive: bool, random: np.random.Generator) -> npt.NDArray[np.uint8]:
    """One slide, (size_px, size_px, 3). The same random numbers give the same slide but for the pasted region."""
    stained = _stain_strength(tissue.pixels, random)
    canvas = _quilt(stained, tissue.plain, size_px, size_px, random)
    for _ in range(random.integers(MAX_CELLS + 1)):
        _paste(canvas, _piece(stained, tissue.cells, random), _shape(CELL_PX, random), random)
    shape = _shape(REGION_PX, random)
    side = tissue.regions.side
    region = _piece(stained, tissue.regions, random)
    decoy = _quilt(stained, tissue.plain, side, side, random)
    _paste(canvas, region if positive else decoy, shape, random)
    return np.clip(canvas + 0.5, 0, 255).astype(np.uint8)


def _stain_strength(pixels: npt.NDArray[np.uint8], random: np.random.Generator) -> Canvas:
    """Make all stains stronger or weaker, as staining varies: optical density is -log(intensity), here multiplied."""
    strength = random.uniform(0.7, 1.3) * random.uniform(0.95, 1.05, 3)
    return (255.0 * (pixels / 255.0) ** strength).astype(np.float32)


def _quilt(source: Canvas, corners: Corners, height: int, width: int, random: np.random.Generator) -> Canvas:
    """Cover an area with overlapping, softly edged pieces, each turned and mirrored at random."""
    margin = PIECE_PX
    # What shows through where the pieces leave a gap must be brown-free as well.
    ground = np.mean([_piece(source, corners, random).mean(axis=(0, 1)) for _ in range(20)], axis=0)
    canvas = np.full((height + 2 * margin, width + 2 * margin, 3), ground, np.float32)
    mask = _soft_ellipse(PIECE_PX, PIECE_PX)
    places = [(y, x) for y in range(0, height + margin, PIECE_STEP_PX) for x in range(0, width + margin, PIECE_STEP_PX)]
    random.shuffle(places)
    jitter = random.integers(-JITTER_PX, JITTER_PX + 1, (len(places), 2))
    for (y, x), (dy, dx) in zip(places, jitter, strict=True):
        top, left = max(0, y + dy), max(0, x + dx)
        under = canvas[top : top + PIECE_PX, left : left + PIECE_PX]
        piece = _piece(source, corners, random)[: under.shape[0], : under.shape[1]]
        under += mask[: under.shape[0], : under.shape[1]] * (piece - under)
    return canvas[margin : margin + height, margin : margin + width]


def _piece(source: Canvas, corners: Corners, random: np.random.Generator) -> Canvas:
    top, left = corners.top_left[random.integers(len(corners.top_left))]
    piece = source[top : top + corners.side, left : left + corners.side]
    turned = np.rot90(piece, int(random.integers(4)))
    return turned[::-1] if random.random() < 0.5 else turned


def _shape(side_px: tuple[int, int], random: np.random.Generator) -> tuple[int, int]:
    height, width = random.integers(side_px[0], side_px[1] + 1, 2)
    return int(height), int(width)


def _paste(canvas: Canvas, piece: Canvas, shape: tuple[int, int], random: np.random.Generator) -> None:
    """Blend the middle of a piece into a random place, with a soft elliptical edge."""
    height, width = min(shape[0], piece.shape[0]), min(shape[1], piece.shape[1])
    top, left = random.integers(canvas.shape[0] - height + 1), random.integers(canvas.shape[1] - width + 1)
    y, x = (piece.shape[0] - height) // 2, (piece.shape[1] - width) // 2
    under = canvas[top : top + height, left : left + width]
    under += _soft_ellipse(height, width) * (piece[y : y + height, x : x + width] - under)


def _soft_ellipse(height: int, width: int) -> Canvas:
    """A mask (height, width, 1): 1 inside an ellipse, 0 outside, falling smoothly over its outer part."""
    y, x = (2.0 * (np.arange(n) + 0.5) / n - 1.0 for n in (height, width))
    inside = np.clip((1.0 - np.hypot(y[:, None], x)) / FEATHER, 0.0, 1.0)
    return (inside * inside * (3.0 - 2.0 * inside)).astype(np.float32)[..., None]


def write_slide(slide: Slide, tissue: Tissue) -> None:
    import tifffile

    pixels = compose(tissue, slide.size_px, slide.positive, np.random.default_rng(slide.key))
    tifffile.imwrite(
        slide.path,
        pixels,
        tile=(TILE_PX, TILE_PX),
        **TIFF_OPTIONS,
    )


def plan(folder: Path, counts: tuple[int, int], size_px: int, seed: int) -> list[Slide]:
    """Which slides to write: in each part, as many negative as positive ones."""
    slides = []
    for part, count in enumerate(counts):
        for number in range(count):
            positive = number % 2 == 1
            path = folder / PARTS[part] / CLASSES[positive] / f"{number:05d}.tif"
            slides.append(Slide(path, size_px, part, positive, (seed, part, number)))
    return slides


def write_all(out: Path, counts: tuple[int, int], size_px: int, seed: int) -> None:
    """Write every slide into a folder beside `out`, and rename it when it is complete.

    Raises:
        FileExistsError: `out` exists but was not written by this program with the same settings.
    """
    settings = f"train={counts[0]} val={counts[1]} size_px={size_px} seed={seed}\n"
    note = f"Synthetic compositions of real tissue (skimage.data.immunohistochemistry); no diagnostic data.\n{settings}"
    if out.exists():
        readme = out / README
        if readme.is_file() and readme.read_text() == note:
            print(f"{out}: already there, nothing to do ({settings.strip()})")
            return
        what = f"exists, but is not this set of slides ({settings.strip()})"
        raise FileExistsError(f"{out}: {what}: remove it or choose another --out")
    unfinished = out.with_name(f"{out.name}.unfinished-{os.getpid()}")
    try:
        _write_slides(unfinished, plan(unfinished, counts, size_px, seed))
        (unfinished / README).write_text(note)
        unfinished.rename(out)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    print(f"{out}: done; these are synthetic compositions of real tissue")


def _write_slides(folder: Path, slides: list[Slide]) -> None:
    for part in PARTS:
        for name in CLASSES:
            (folder / part / name).mkdir(parents=True)
    tissues = [load_tissue(part) for part in range(len(PARTS))]
    began = time.perf_counter()
    for done, slide in enumerate(slides, 1):
        write_slide(slide, tissues[slide.part])
        if done % 40 == 0 or done == len(slides):
            written_bytes = sum(file.path.stat().st_size for file in slides[:done])
            print(
                f"{done}/{len(slides)} slides, {written_bytes / 1e6:.0f} MB, {time.perf_counter() - began:.0f} s",
                flush=True,
            )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="the folder to make")
    parser.add_argument(
        "--train", type=_at_least(2), default=DEFAULT_TRAIN, help="training slides (default: %(default)s)"
    )
    parser.add_argument(
        "--val", type=_at_least(2), default=DEFAULT_VAL, help="validation slides (default: %(default)s)"
    )
    parser.add_argument(
        "--size", type=_at_least(128), default=DEFAULT_SIZE_PX, help="side in pixels (default: %(default)s)"
    )
    parser.add_argument("--seed", type=_at_least(0), default=0, help="for other slides (default: %(default)s)")
    options = parser.parse_args(arguments)
    try:
        write_all(options.out, (options.train, options.val), options.size, options.seed)
    except FileExistsError as error:
        parser.error(str(error))


def _at_least(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of at least {least}")
        return int(text)

    return parse


if __name__ == "__main__":
    main()
