"""Tissue on a thumbnail: its share of each patch, and its outlines, in pixels of level 0."""

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import scipy.ndimage
import tifffile

from mpi4dl.comm import Communicator
from mpi4dl.datasets.base import BadImage, DatasetError, Pixels, WholeImage
from mpi4dl.datasets.slides.compose import composition, write_slide
from mpi4dl.datasets.slides.dataset import SlideFolder, SlideOptions
from mpi4dl.datasets.slides.slide import Level, Slide, SlideFile, open_slide
from mpi4dl.datasets.slides.tissue import OUTLINE, TissueMask, find_tissue, tissue_of
from mpi4dl.datasets.slides.windows import GridWindows, RandomWindows
from mpi4dl.geometry import Interval
from mpi4dl.slides import slides
from tests.datasets.boxes import contains
from tests.pool.ranks import Ranks, RanksFailed


@pytest.mark.parametrize(("downsample", "patch"), [(1.0, 16), (2.0, 8), (4.0, 12), (2.0, 7)])
def test_shares_are_means_of_the_mask(downsample: float, patch: int) -> None:
    """The mask has a pixel for 8 x 8 of level 0, and patches of any size are made of parts of them."""
    mask = np.random.default_rng(3).random((20, 33)) < 0.4
    slide = Slide(SlideFile(Path("x"), (Level(WholeImage(np.zeros((160, 264, 3), np.uint8)), 1.0),)), downsample)
    found = TissueMask(mask, (8.0, 8.0)).shares(slide, patch)
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
    for picture in (glass, np.full((50, 50, 3), 255, np.uint8)):
        mask, shows_glass = tissue_of(picture)
        assert not mask.any()
        assert shows_glass


TISSUE, DARK, GLASS = (200, 140, 190), (110, 50, 140), (243, 241, 242)


def noisy(colour: tuple[int, int, int], shape: tuple[int, int] = (500, 500), spread: float = 8) -> Pixels:
    return np.random.default_rng(0).normal(colour, spread, (*shape, 3)).clip(0, 255).astype(np.uint8)


@pytest.mark.parametrize("colour", [TISSUE, (235, 200, 222), (190, 160, 130)])
def test_a_picture_full_of_tissue_is_tissue_throughout(
    tmp_path: Path, colour: tuple[int, int, int], caplog: pytest.LogCaptureFixture
) -> None:
    """Also with a dark square in it, or in an even tone."""
    for square in (0, 100):
        pixels = noisy(colour)
        pixels[200:][:square, 200:][:, :square] = noisy(DARK, (square, square))
        PIL.Image.fromarray(pixels).save(tmp_path / f"{square}.png")
        assert find_tissue(open_slide(tmp_path / f"{square}.png")).share > 0.99
        assert f"{square}.png: shows no glass" in caplog.text


def test_real_tissue_without_glass_is_not_parted_by_its_stain() -> None:
    """A part of the colon by immunohistochemistry that is brown and blue throughout; the whole shows glass, too."""
    data = pytest.importorskip("skimage.data")
    whole = data.immunohistochemistry()
    mask, shows_glass = tissue_of(whole[:128, 128:256])
    assert mask.mean() > 0.97
    assert not shows_glass
    mask, shows_glass = tissue_of(whole)
    assert shows_glass
    assert 0.3 < mask.mean() < 0.7


def test_a_slide_without_tissue_is_named_and_has_no_patch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No patch, no window of a grid or at random, and no white picture in its place."""
    PIL.Image.fromarray(noisy(GLASS, spread=1)).save(tmp_path / "empty.png")
    slides = SlideFolder(tmp_path, SlideOptions(), label_columns=())
    whole = SlideFolder(tmp_path, SlideOptions(white_background=True), label_columns=()).image(0)
    reads: tuple[Callable[[], Any], ...] = (
        lambda: slides.tissue_patches(0, 64),
        lambda: RandomWindows(slides, [0], (64, 64), 1).image(0),
        lambda: whole.read(Interval(0, 64), Interval(0, 64)),
    )
    for read in reads:
        with pytest.raises(BadImage, match=r"empty\.png: shows no tissue"):
            read()
    assert "empty.png: shows no tissue" in caplog.text
    with pytest.raises(DatasetError, match="none of 1 slides"):
        GridWindows(slides, [0], (64, 64))
    PIL.Image.fromarray(noisy(TISSUE)).save(tmp_path / "full.png")
    both = SlideFolder(tmp_path, SlideOptions(), label_columns=())
    assert {*GridWindows(both, [0, 1], (64, 64)).indices} == {1}


def test_tissue_of_a_composed_slide(tmp_path: Path) -> None:
    slide = composition(11, 2048, 0.5, True, 0.004)
    write_slide(tmp_path / "slide.tif", slide)
    opened = open_slide(tmp_path / "slide.tif")
    found = find_tissue(opened)
    inside = slide._tissue(np.arange(0, slide.size[0]), np.arange(0, slide.size[1]))
    assert found.share == pytest.approx(inside.mean(), abs=0.01)
    polygons = json.loads(found.geojson())["features"]
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
    found = TissueMask(mask, (2.0, 2.0), (100, 50))
    polygons = json.loads(found.geojson())["features"]
    assert len(polygons) == 2
    for row, col, expected in ((5, 6, True), (11, 13, False), (14, 17, True), (2, 2, False), (25, 34, True)):
        assert contains(polygons, 100 + 2 * (row + 0.5), 50 + 2 * (col + 0.5)) == expected, (row, col)


def slides_command(comm: Communicator, *argv: str) -> None:
    slides(comm, argv)


def compose(comm: Communicator, *argv: str) -> None:
    slides_command(comm, "compose", *argv)


def test_slides_are_checked_and_outlined_by_any_table_whatever_its_labels(ranks: Ranks, tmp_path: Path) -> None:
    compose_here = (str(tmp_path), "--patients", "2", "--size", "512")
    ranks(2).run(compose, *compose_here)
    names = sorted(path.name for path in tmp_path.glob("*.tif"))
    lines = ["Fall,Patient,Bild,label,class", *(f"{n},{n},{name},," for n, name in enumerate(names))]
    (tmp_path / "other.csv").write_text("\n".join(lines))
    columns = ("--slide-column", "Bild", "--patient-column", "Fall")
    ranks(2).run(slides_command, "check", str(tmp_path / "other.csv"), *columns)
    out = tmp_path / "outlines"
    ranks(2).run(slides_command, "tissue", str(tmp_path / "other.csv"), *columns, "--out", str(out))
    assert sorted(path.stem for path in out.glob("*.png")) == names
    with pytest.raises(RanksFailed, match="--slide-column"):
        ranks(2).run(slides_command, "check", str(tmp_path / "other.csv"))


def test_a_check_reads_all_levels_through(ranks: Ranks, tmp_path: Path) -> None:
    """A tile of JPEG is cut off, in the level that training would read at some resolution."""
    write_slide(tmp_path / "slide.svs", composition(11, 2600, 0.5, True, 0.004))
    (tmp_path / "slides.csv").write_text("slide\nslide.svs\n")
    ranks(1).run(slides_command, "check", str(tmp_path / "slides.csv"))
    with tifffile.TiffFile(tmp_path / "slide.svs") as file:
        levels = [page for page in file.pages if page.is_tiled][:2]
        tiles = [(page.dataoffsets[0], page.databytecounts[0]) for page in levels]
    whole = (tmp_path / "slide.svs").read_bytes()
    for start, count in tiles:
        content = bytearray(whole)
        content[start + count // 2 : start + count] = bytes(count - count // 2)
        (tmp_path / "slide.svs").write_bytes(content)
        with pytest.raises(RanksFailed, match="1 slide of 1 cannot be used"):
            ranks(1).run(slides_command, "check", str(tmp_path / "slides.csv"))


def test_composing_with_other_options_never_mixes_with_slides_of_before(ranks: Ranks, tmp_path: Path) -> None:
    """The same options continue; so do they without the records of what is done."""
    argv = (str(tmp_path), "--patients", "2", "--size")
    ranks(2).run(compose, *argv, "512")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*")}
    (tmp_path / "slide_001.tif").unlink()
    for missing in ("slides.csv", "compose.jsonl"):
        (tmp_path / missing).unlink()
        ranks(2).run(compose, *argv, "512")
        assert {path: path.read_bytes() for path in tmp_path.rglob("*.*")} == before
    for other in (("640",), ("512", "--slides-each", "2")):
        with pytest.raises(RanksFailed, match=r"has results with `.*: name another folder"):
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
