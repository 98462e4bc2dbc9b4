"""Tissue on a thumbnail: its share of each patch, and its outlines, in pixels of level 0."""

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import scipy.ndimage

from mpi4dl.comm import Communicator
from mpi4dl.datasets.base import WholeImage
from mpi4dl.datasets.slides.compose import composition, write_slide
from mpi4dl.datasets.slides.geojson import contains, polygons_of
from mpi4dl.datasets.slides.slide import Level, Slide, SlideFile, open_slide
from mpi4dl.datasets.slides.tissue import OUTLINE, TissueMask, find_tissue, tissue_of
from mpi4dl.geometry import Interval
from mpi4dl.slides import _parser
from tests.pool.ranks import Ranks, RanksFailed


@pytest.mark.parametrize(("downsample", "patch"), [(1.0, 16), (2.0, 8), (4.0, 12), (2.0, 7)])
def test_shares_are_means_of_the_mask(downsample: float, patch: int) -> None:
    """The mask has a pixel for 8 x 8 of level 0, and patches of any size are made of parts of them."""
    mask = np.random.default_rng(3).random((20, 33)) < 0.4
    slide = Slide(SlideFile(Path("x"), (Level(WholeImage(np.zeros((160, 264, 3), np.uint8)), 1.0),)), downsample)
    found = TissueMask(mask, 8.0).shares(slide, patch)
    side = int(patch * downsample)
    full = np.kron(mask, np.ones((8, 8)))
    rows, cols = (-(-length // side) for length in full.shape)
    padded = np.zeros((rows * side, cols * side))
    padded[: full.shape[0], : full.shape[1]] = full
    expected = padded.reshape(rows, side, cols, side).mean((1, 3))
    assert found.shape == (-(-slide.size[0] // patch), -(-slide.size[1] // patch))
    assert found == pytest.approx(np.where(expected * side**2 / 64 < 0.49, 0, expected), abs=1e-6)


def test_glass_alone_has_no_tissue() -> None:
    glass = np.random.default_rng(0).integers(238, 246, (100, 120, 3), np.uint8)
    assert not tissue_of(glass).any()
    assert not tissue_of(np.full((50, 50, 3), 255, np.uint8)).any()


def test_tissue_of_a_composed_slide(tmp_path: Path) -> None:
    slide = composition(11, 2048, 0.5, True, 0.004)
    write_slide(tmp_path / "slide.tif", slide)
    opened = open_slide(tmp_path / "slide.tif")
    found = find_tissue(opened)
    inside = slide._tissue(np.arange(0, slide.size[0]), np.arange(0, slide.size[1]))
    assert found.share == pytest.approx(inside.mean(), abs=0.01)
    polygons = polygons_of(json.loads(found.geojson()))
    (lesion,) = slide.lesions
    assert contains(polygons, lesion.row, lesion.col)
    assert not contains(polygons, 2, 2)
    with PIL.Image.open(io.BytesIO(found.picture(opened))) as picture:
        pixels = np.asarray(picture)
    outlined = (pixels == OUTLINE).all(2)
    assert (scipy.ndimage.binary_fill_holes(outlined) == found.mask).mean() > 0.999
    assert 0 < outlined.sum() < 0.1 * found.mask.sum()
    thumbnail = opened.thumbnail(max(found.mask.shape))
    view = thumbnail.read(*(Interval(0, side) for side in thumbnail.size))
    assert np.array_equal(pixels[~outlined], view[~outlined])


def test_holes_are_outside() -> None:
    mask = np.zeros((30, 40), bool)
    mask[4:26, 5:35] = True
    mask[10:20, 12:24] = False
    mask[13:16, 15:20] = True  # an island in the hole
    found = TissueMask(mask, 2.0, (100, 50))
    polygons = polygons_of(json.loads(found.geojson()))
    assert len(polygons) == 2
    for row, col, expected in ((5, 6, True), (11, 13, False), (14, 17, True), (2, 2, False), (25, 34, True)):
        assert contains(polygons, 100 + 2 * (row + 0.5), 50 + 2 * (col + 0.5)) == expected, (row, col)


def compose(comm: Communicator, *argv: str) -> None:
    options = _parser().parse_args(["compose", *argv])
    options.act(comm, options)


def test_composing_with_other_options_never_mixes_with_slides_of_before(ranks: Ranks, tmp_path: Path) -> None:
    """The same options continue; a folder of an older version has no record of them, but its table."""
    argv = (str(tmp_path), "--patients", "2", "--size")
    ranks(2).run(compose, *argv, "512")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*")}
    (tmp_path / "slide_001.tif").unlink()
    for missing in ("slides.csv", "compose.json"):
        (tmp_path / missing).unlink()
        ranks(2).run(compose, *argv, "512")
        assert {path: path.read_bytes() for path in tmp_path.rglob("*.*")} == before
    for other in (("640",), ("512", "--slides-each", "2")):
        with pytest.raises(RanksFailed, match="composed with other options: name another folder"):
            ranks(2).run(compose, *argv, *other)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.*")} == before


def test_lesions_have_the_mean_colour_of_tissue_and_another_texture() -> None:
    slide = composition(3, 4096, 0.5, tumour=True, lesion_share=0.009)
    disc, half = slide.lesions[0], int(slide.lesions[0].radius / 1.5)
    inside = (slice(int(c) - half, int(c) + half) for c in (disc.row, disc.col))
    lesion = slide.pixels(*inside).astype(float)
    usual = (
        replace(slide, lesions=())
        .pixels(*(slice(int(c) - half, int(c) + half) for c in (disc.row, disc.col)))
        .astype(float)
    )
    assert np.abs(lesion.mean((0, 1)) - usual.mean((0, 1))).max() < 8
    assert lesion.std((0, 1)).min() > 1.4 * usual.std((0, 1)).max()


def test_a_sign_of_life_for_each_row_of_tiles(tmp_path: Path) -> None:
    signs: list[None] = []
    slide = composition(3, 2000, 0.5, tumour=False, lesion_share=0.001)
    write_slide(tmp_path / "slide.tif", slide, lambda: signs.append(None))
    assert len(signs) >= slide.size[0] // 256
