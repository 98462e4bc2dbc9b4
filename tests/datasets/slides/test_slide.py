"""Slides of several formats at any resolution: the same pixels in every box, and what is missing named."""

from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageCms
import pytest
import tifffile

from mpi4dl.datasets import BadImage, DatasetError
from mpi4dl.datasets.base import WholeImage
from mpi4dl.datasets.files import open_image
from mpi4dl.datasets.reader_process import OpenSlideLevel
from mpi4dl.datasets.slides.annotations import RegionMask, read_annotations
from mpi4dl.datasets.slides.compose import FORMATS, Composition, Disc, composition, write_slide
from mpi4dl.datasets.slides.geojson import collection, feature, outlines, squares
from mpi4dl.datasets.slides.slide import Level, Resolution, Slide, SlideFile, open_slide
from mpi4dl.datasets.tiff import AperioLevel
from mpi4dl.geometry import Interval
from mpi4dl.options.config import parse
from mpi4dl.options.sources import source_of
from tests.datasets.slides.layouts import APERIO, LAYOUTS, MPP, TILED, label_of, picture, pyramid
from tests.pool.job import mpirun

SIDE = 2100  # px: two levels


def whole(slide: Slide) -> np.ndarray:
    return slide.read(*(Interval(0, side) for side in slide.size))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("slides")
    small = Composition((SIDE, SIDE - 400), 0.5, 7, (Disc(900, 800, 500),), (Disc(900, 800, 60),))
    for ending in FORMATS:
        write_slide(found / f"slide{ending}", small)
    return found


@pytest.mark.parametrize("ending", FORMATS)
def test_levels_and_resolution_are_read(folder: Path, ending: str) -> None:
    slide = open_slide(folder / f"slide{ending}")
    assert slide.size == (SIDE, SIDE - 400)
    assert slide.mpp == pytest.approx(0.5, rel=1e-6)
    assert [level.image.size for level in slide.file.levels] == [(SIDE, SIDE - 400), (SIDE // 2, (SIDE - 400) // 2)]
    assert slide.file.magnification == (20 if ending == ".svs" else None)


@pytest.mark.parametrize("ending", FORMATS)
@pytest.mark.parametrize(
    "resolution", [Resolution(mpp=0.5), Resolution(mpp=0.85), Resolution(magnification=5), Resolution(level=1)]
)
def test_a_box_has_the_pixels_of_the_whole(folder: Path, ending: str, resolution: Resolution) -> None:
    slide = open_slide(folder / f"slide{ending}", resolution)
    every = whole(slide)
    rows, cols = slide.size
    for box in (
        (Interval(0, rows // 2), Interval(0, cols)),
        (Interval(3, 3), Interval(0, 5)),
        (Interval(rows - 7, rows), Interval(cols - 301, cols)),
        (Interval(rows // 3, rows // 3 + 11), Interval(5, cols - 6)),
    ):
        found = slide.read(*box)
        assert np.array_equal(found, every[slice(*box[0]), slice(*box[1])])


@pytest.mark.parametrize("resolution", [Resolution(level=1), Resolution(mpp=1.3)])
def test_levels_that_are_no_whole_number_of_times_smaller(tmp_path: Path, resolution: Resolution) -> None:
    """Of odd sides: OpenSlide blends pixels of such a level by where a box begins, but not here."""
    write_slide(tmp_path / "odd.svs", Composition((2107, 1813), 0.5, 7, (Disc(900, 800, 700),), ()))
    slide = open_slide(tmp_path / "odd.svs", resolution)
    assert slide.file.levels[1].downsample != 2
    every = whole(slide)
    rows, cols = slide.size
    for box in ((Interval(1, rows), Interval(0, cols)), (Interval(500, 530), Interval(301, 702))):
        assert np.array_equal(slide.read(*box), every[slice(*box[0]), slice(*box[1])])


def test_formats_and_levels_show_the_same(folder: Path) -> None:
    """To the noise of JPEG, which each level is compressed by once more."""
    shown = [whole(open_slide(folder / f"slide{ending}", Resolution(mpp=2.0))).astype(int) for ending in FORMATS]
    for other in shown[1:]:
        assert np.array_equal(other, shown[0])
    full = Slide(SlideFile(Path("x"), (open_slide(folder / "slide.tif").file.levels[0],), 0.5), 4.0)
    assert np.abs(whole(full).astype(int) - shown[0]).mean() < 1.5


@pytest.mark.parametrize("name", LAYOUTS)
def test_slides_are_read_as_scanners_lay_them_out(name: str, tmp_path: Path) -> None:
    """No label is a level, no overview is the slide, and padded levels have their true factors."""
    layout = LAYOUTS[name]
    levels, path = pyramid(picture(layout.size)), tmp_path / f"slide{layout.ending}"
    layout.write(path, levels, label_of(layout.size))
    found = open_slide(path)
    assert (found.size, found.mpp, found.file.vendor) == (layout.size, pytest.approx(MPP), layout.vendor)
    assert [level.downsample for level in found.file.levels][:3] == pytest.approx([1.0, 2.0, 4.0])
    as_picture = open_image(path).read(*(Interval(0, side) for side in layout.size))
    assert np.abs(as_picture.astype(int) - levels[0]).max() <= layout.tolerance
    true = SlideFile(path, tuple(Level(WholeImage(level), 2.0**number) for number, level in enumerate(levels)), MPP)
    for mpp in (0.5, 0.8, 2.0, 5.0):
        resolution = Resolution(mpp=mpp)
        read, expected = (whole(slide) for slide in (open_slide(path, resolution), Slide(true, mpp / MPP)))
        assert read.shape == expected.shape
        inner = np.abs(read.astype(int) - expected)[3:-3, 3:-3]  # beyond what Leica scanned it is white
        assert inner.max() <= layout.tolerance, mpp


@pytest.mark.parametrize("masks", [3, 1])
def test_slides_are_white_outside_of_the_masks_in_their_files(tmp_path: Path, masks: int) -> None:
    """As GDAL writes them. A level without a mask is left out, since nobody says what counts of its pixels."""
    levels, path = pyramid(picture((768, 512))), tmp_path / "masked.tif"
    with tifffile.TiffWriter(path) as file:
        for number, level in enumerate(levels):
            inside = np.ones(level.shape[:2], bool)
            inside[: 256 >> number, 128 >> number :] = False
            file.write(np.where(inside[..., None], level, np.uint8(0)), subfiletype=int(number > 0), **TILED)
            if number < masks:
                file.write(inside, photometric=4, subfiletype=4 + int(number > 0), tile=(128, 128), metadata=None)
            level[~inside] = 255
    assert len(open_slide(path).file.levels) == masks
    assert np.array_equal(whole(open_slide(path)), levels[0])
    if masks == 3:
        assert np.array_equal(whole(open_slide(path, Resolution(level=2))), levels[2])
    else:
        assert (whole(open_slide(path).thumbnail(192))[:60, 36:] == 255).all()


@pytest.mark.parametrize("name", LAYOUTS)
def test_without_openslide_slides_are_read_as_they_are_or_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = LAYOUTS[name]
    path = tmp_path / f"slide{layout.ending}"
    layout.write(path, pyramid(picture(layout.size)), label_of(layout.size))
    with_openslide = open_slide(path)
    expected = [whole(open_slide(path, Resolution(mpp=mpp))) for mpp in (0.5, 0.8, 2.0)]
    monkeypatch.setattr("mpi4dl.datasets.reader_process.find_spec", lambda name: None)
    if layout.tifffile:
        said = rf"reading a scanner's TIFF \({layout.tifffile}\) needs openslide; run .* openslide-python openslide-bin"
        with pytest.raises(DatasetError, match=said):
            open_slide(path)
        return
    found = open_slide(path)
    assert (found.size, found.mpp) == (with_openslide.size, with_openslide.mpp)
    assert found.file.described() == with_openslide.file.described()
    for mpp, pixels in zip((0.5, 0.8, 2.0), expected, strict=True):
        assert np.array_equal(whole(open_slide(path, Resolution(mpp=mpp))), pixels)


@pytest.mark.parametrize("order", [(2, 0, 1), (2, 1, 0)])
def test_the_slide_is_the_largest_page(tmp_path: Path, order: tuple[int, ...]) -> None:
    """Also where a thumbnail, or the coarsest level, comes first and says nothing."""
    levels, path = pyramid(picture((512, 384))), tmp_path / "a.tif"
    with tifffile.TiffWriter(path) as file:
        for number in order:
            file.write(levels[number], tile=(128, 128), photometric="rgb", metadata=None)
    found = open_slide(path)
    assert [level.downsample for level in found.file.levels] == [1, 2, 4]
    assert np.array_equal(whole(found), levels[0])
    assert np.array_equal(open_image(path).read(*(Interval(0, side) for side in found.size)), levels[0])


def test_two_sections_in_an_ome_tiff_are_refused(tmp_path: Path) -> None:
    """Of one size, or of one resolution; an overview and a label beside a slide are neither."""
    pixels = picture((512, 384))
    others = [(pixels[:300], "B", 0.5), (pixels, "", None), (pixels[:100, :90], "macro", 0.5), (pixels[:99], "", 8.0)]
    for number, (other, name, mpp) in enumerate(others):
        path = tmp_path / f"{number}.ome.tif"
        with tifffile.TiffWriter(path, ome=True) as file:
            for image, told, size in ((pixels, "A", 0.5), (other, name, mpp)):
                sizes = {} if size is None else {"PhysicalSizeX": size, "PhysicalSizeY": size}
                file.write(image, tile=(128, 128), photometric="rgb", metadata={"axes": "YXS", "Name": told, **sizes})
        if number > 1:
            assert np.array_equal(whole(open_slide(path)), pixels)
            continue
        with pytest.raises(BadImage, match="has 2 images that may be the slide: A, "):
            open_slide(path)


@pytest.mark.parametrize("compression", ["jpegxr", "lerc"])
def test_levels_in_subifds_are_read_of_their_own_pages(tmp_path: Path, compression: str) -> None:
    """Also of kinds that another process decodes, which has to find the page again."""
    levels, path = pyramid(picture((512, 384))), tmp_path / "a.tif"
    how: dict[str, Any] = {"tile": (128, 128), "photometric": "rgb", "compression": compression, "metadata": None}
    with tifffile.TiffWriter(path) as file:
        file.write(levels[0], subifds=2, **how)
        for level in levels[1:]:
            file.write(level, subfiletype=1, **how)
    found = open_slide(path).file.levels
    assert len(found) == 3
    for level, expected in zip(found, levels, strict=True):
        read = level.image.read(*(Interval(0, side) for side in level.image.size))
        assert np.abs(read.astype(int) - expected).max() <= 4 * (compression == "jpegxr")


def test_a_small_page_of_something_else_is_no_level(tmp_path: Path) -> None:
    with tifffile.TiffWriter(tmp_path / "a.tif") as file:
        file.write(picture((72, 72)), **TILED)
        file.write(np.ascontiguousarray(picture((24, 24))[::-1, ::-1]), **TILED)
    assert [level.downsample for level in open_slide(tmp_path / "a.tif").file.levels] == [1]


def test_the_objective_is_that_of_the_image(tmp_path: Path) -> None:
    lenses = "".join(
        f'<Objective ID="Objective:0:{n}" NominalMagnification="{power}"/>' for n, power in enumerate((1, 20))
    )
    images = "".join(
        f'<Image ID="Image:{n}" Name="{name}"><ObjectiveSettings ID="Objective:0:{n}"/><Pixels ID="Pixels:{n}" '
        f'DimensionOrder="XYCZT" Type="uint8" SizeX="{side}" SizeY="{side}" SizeC="3" SizeZ="1" SizeT="1">'
        f'<Channel ID="Channel:{n}:0" SamplesPerPixel="3"/><TiffData IFD="{n}" PlaneCount="1"/></Pixels></Image>'
        for n, (name, side) in enumerate((("macro", 40), ("slide", 256)))
    )
    space = 'xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06"'
    told = f'<OME {space}><Instrument ID="Instrument:0">{lenses}</Instrument>{images}</OME>'
    with tifffile.TiffWriter(tmp_path / "a.ome.tif") as file:
        for side, description in ((40, told), (256, None)):
            file.write(picture((side, side)), description=description, **TILED)
    found = open_slide(tmp_path / "a.ome.tif").file
    assert (found.size, found.magnification) == ((256, 256), 20)


def test_oblong_pixels_of_a_slide_that_was_stored_turned(tmp_path: Path) -> None:
    """Resolutions are those of rows and columns as they are stored."""
    turned: list[Any] = [(274, "H", 1, 6, True)]
    told: dict[str, Any] = {"resolution": (1e4 / MPP, 1e4 / (2 * MPP)), "resolutionunit": 3, "extratags": turned}
    tifffile.imwrite(tmp_path / "a.tif", picture((100, 120)), photometric="rgb", **told)
    found = open_slide(tmp_path / "a.tif")
    assert (found.file.size, found.size, found.file.aspect) == ((120, 100), (60, 100), pytest.approx((2, 1)))


@pytest.mark.parametrize("ending", [".tif", ".ome.tif"])
def test_oblong_pixels_are_read_as_square_ones(ending: str, tmp_path: Path) -> None:
    """Whoever says it, the resolution of TIFF or OME; places in files are those of level 0."""
    levels, path = pyramid(picture((768, 512))), tmp_path / f"a{ending}"
    told: dict[str, Any] = {"resolution": (1e4 / MPP, 2e4 / MPP), "resolutionunit": 3}
    sides = {"PhysicalSizeX": MPP, "PhysicalSizeY": MPP / 2} if ending == ".ome.tif" else {}
    with tifffile.TiffWriter(path, ome=ending == ".ome.tif") as file:
        file.write(levels[0].repeat(2, 0), subifds=2, tile=(128, 128), photometric="rgb", metadata=sides, **told)
        for level in levels[1:]:
            file.write(level.repeat(2, 0), subfiletype=1, tile=(128, 128), photometric="rgb", metadata=None)
    slide = open_slide(path)
    assert (slide.size, slide.mpp, slide.file.size) == ((768, 512), pytest.approx(MPP), (1536, 512))
    assert [level.downsample for level in slide.file.levels] == [1.0, 2.0, 4.0]
    assert slide.in_level_0(10, 5) == pytest.approx((20, 5))
    true = SlideFile(path, tuple(Level(WholeImage(level), 2.0**number) for number, level in enumerate(levels)), MPP)
    for mpp in (0.5, 0.8, 2.0):
        read, expected = (whole(each) for each in (open_slide(path, Resolution(mpp=mpp)), Slide(true, mpp / MPP)))
        assert read.shape == expected.shape
        assert np.abs(read.astype(int) - expected).max() <= 4, mpp
    (ring,) = squares(np.array([[200.0, 50.0]]), (200.0, 40.0))
    (tmp_path / "a.geojson").write_text(collection([feature([ring], "Tumor")]))
    mask = RegionMask(read_annotations(tmp_path / "a.geojson"), slide, {"Tumor": 1})
    shown = mask.read(*(Interval(0, side) for side in slide.size)) == 1
    assert np.array_equal(np.argwhere(shown)[[0, -1]], [[100, 50], [199, 89]])
    assert shown.sum() == 100 * 40
    ((outline,),) = outlines(shown, slide.scale)
    corners = np.array(outline)
    assert np.abs([*corners.min(0), *corners.max(0)] - np.array([50, 200, 90, 400])).max() <= 1


LINES = {
    "Aperio SVS": "512 x 768 px, levels 1, 2, 4, 0.5 um per pixel, 20x, aperio",
    "Aperio .tif": "512 x 768 px, levels 1, 2, 4, 0.5 um per pixel, 20x, aperio",
    "Philips, square": "640 x 640 px, levels 1, 2, 4, 0.5 um per pixel, philips",
    "Philips, oblong": "384 x 1280 px, levels 1, 2, 4, 0.5 um per pixel, philips",
    "Ventana": "512 x 768 px, levels 1, 2, 4, 0.5 um per pixel, 20x, ventana",
    "Leica": "512 x 768 px scanned of 8192 x 12288 px, levels 1, 2, 4, 0.5 um per pixel, 20x, leica",
    "OME-TIFF": "512 x 768 px, levels 1, 2, 4, 0.5 um per pixel, OME-TIFF",
    "Hamamatsu": "512 x 768 px, levels 1, 2, 4, 8, 16, 32, 0.5 um per pixel, 20x, hamamatsu",
    "Trestle": "512 x 1024 px, levels 1, 2, 4, 0.5 um per pixel, 20x, trestle",
    "generic": "512 x 768 px, levels 1, 2, 4, 0.5 um per pixel, TIFF",
    "generic without NewSubfileType": "512 x 768 px, levels 1, 2, 4, 0.5 um per pixel, TIFF",
}


def test_check_prints_what_each_layout_says(tmp_path: Path) -> None:
    """Size, levels, microns per pixel, magnification and vendor."""
    assert LINES.keys() == LAYOUTS.keys()
    expected = set()
    for number, (name, layout) in enumerate(LAYOUTS.items()):
        path = tmp_path / f"slide{number}{layout.ending}"
        layout.write(path, pyramid(picture(layout.size)), label_of(layout.size))
        expected.add(f"{path.name}: {LINES[name]}")
    job = mpirun(2, "-m", "mpi4dl.slides", "check", str(tmp_path))
    assert job.code == 0, job.stderr
    assert {line for line in job.stdout.splitlines() if line.startswith("slide")} == expected


def test_the_nearest_finer_level_is_read(folder: Path) -> None:
    file = open_slide(folder / "slide.tif").file
    assert open_slide(folder / "slide.tif", Resolution(mpp=1.0)).size == file.levels[1].image.size
    reads: list[int] = []

    class Watched(WholeImage):
        def read(self, *space: Interval) -> np.ndarray:
            reads.append(self.size[0])
            return super().read(*space)  # type: ignore[return-value]

    levels = tuple(Level(Watched(np.zeros((side, side, 3), np.uint8)), 400 / side) for side in (400, 200, 50))
    for downsample, expected in ((1.0, 400), (1.9, 400), (2.0, 200), (2.01, 200), (7.9, 200), (8.0, 50), (20.0, 50)):
        reads.clear()
        whole(Slide(SlideFile(Path("x"), levels), downsample))
        assert set(reads) == {expected}, downsample


def test_scanner_bounds_are_cut_out_and_places_are_of_level_0(folder: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (120, 160, 3), np.uint8)
    file = SlideFile(Path("x"), (Level(WholeImage(pixels), 1.0),), 0.25, None, (Interval(20, 100), Interval(30, 150)))
    slide = Slide(file)
    assert slide.size == (80, 120)
    assert np.array_equal(whole(slide), pixels[20:100, 30:150])
    half = Slide(file, 2.0)
    assert half.size == (40, 60)
    assert half.mpp == 0.5
    assert half.in_level_0(10, 5) == (40.0, 40.0)


def test_a_slide_without_a_resolution_is_named_with_what_to_say(tmp_path: Path) -> None:
    PIL.Image.new("RGB", (64, 64)).save(tmp_path / "a.png")
    assert open_slide(tmp_path / "a.png").mpp is None
    with pytest.raises(BadImage, match=r"a\.png.*`mpp` 0\.5.*`assume_mpp`"):
        open_slide(tmp_path / "a.png", Resolution(mpp=0.5))
    slide = open_slide(tmp_path / "a.png", Resolution(mpp=0.5, assumed_mpp=0.25))
    assert (slide.size, slide.mpp) == ((32, 32), 0.5)
    # 72 or 300 pixels an inch are those of a screen or a printer.
    tifffile.imwrite(tmp_path / "b.tif", np.zeros((64, 64, 3), np.uint8), resolution=(300, 300), resolutionunit=2)
    assert open_slide(tmp_path / "b.tif").mpp is None
    # ImageJ names the unit in its description.
    for unit, microns in (("micron", 1), (r"\u00B5m", 1), ("um", 1), ("nm", 1e-3), ("cm", 1e4), ("pixel", None)):
        pixels, per_unit = np.zeros((64, 64, 3), np.uint8), (microns or 1) / 0.5
        tifffile.imwrite(tmp_path / "c.tif", pixels, imagej=True, resolution=(per_unit,) * 2, metadata={"unit": unit})
        assert open_slide(tmp_path / "c.tif").mpp == (microns and pytest.approx(0.5, rel=1e-5))


@pytest.mark.parametrize(
    ("resolution", "message"),
    [
        (Resolution(mpp=0.25), r"0\.5 um per pixel, which is coarser than `mpp` 0\.25.*choose `mpp` 0\.5"),
        (Resolution(magnification=40), r"coarser than `magnification` 40, 0\.25 um per pixel"),
        (Resolution(level=2), r"no level 2, but 2 levels, 0 to 1"),
    ],
)
def test_a_resolution_that_a_slide_does_not_have(folder: Path, resolution: Resolution, message: str) -> None:
    with pytest.raises(BadImage, match=rf"slide\.tif: .*{message}"):
        open_slide(folder / "slide.tif", resolution)


def test_two_resolutions_at_once_are_refused() -> None:
    with pytest.raises(ValueError, match="mpp and level both say"):
        Resolution(mpp=0.5, level=1)


def test_colours_are_those_of_the_profile(tmp_path: Path) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (40, 50, 3), np.uint8)
    profile = PIL.ImageCms.ImageCmsProfile(PIL.ImageCms.createProfile("LAB")).tobytes()
    srgb = PIL.ImageCms.ImageCmsProfile(PIL.ImageCms.createProfile("sRGB")).tobytes()
    same = Slide(SlideFile(Path("x"), (Level(WholeImage(pixels), 1.0),), profile=srgb))
    assert np.abs(whole(same).astype(int) - pixels).max() <= 1
    assert np.array_equal(same.read(Interval(3, 9), Interval(4, 20)), whole(same)[3:9, 4:20])
    other = Slide(SlideFile(Path("x.svs"), (Level(WholeImage(pixels), 1.0),), profile=profile))
    with pytest.raises(BadImage, match=r"x\.svs.*ICC profile"):
        whole(other)


def test_a_folder_of_zarr_is_no_slide(tmp_path: Path) -> None:
    (tmp_path / "a.zarr").mkdir()
    (tmp_path / "a.zarr" / "zarr.json").write_text("{}")
    with pytest.raises(BadImage, match="is a folder of Zarr, which is no slide"):
        open_slide(tmp_path / "a.zarr")


def test_a_damaged_slide_is_named(folder: Path, tmp_path: Path) -> None:
    for ending in FORMATS:
        content = (folder / f"slide{ending}").read_bytes()
        (tmp_path / f"cut{ending}").write_bytes(content[: len(content) // 3])
        with pytest.raises(BadImage, match=f"cut{ending}"):
            whole(open_slide(tmp_path / f"cut{ending}"))


@pytest.mark.parametrize("colours", [{}, {"photometric": "ycbcr", "subsampling": (2, 2)}], ids=["RGB", "YCbCr"])
def test_tiles_of_svs_are_read_here_as_openslide_reads_them(tmp_path: Path, colours: dict[str, Any]) -> None:
    """And by it, where tiles are missing: it fills them by those of a finer level."""
    path, levels = tmp_path / "slide.svs", pyramid(picture((500, 701)))
    with tifffile.TiffWriter(path) as file:
        for level in levels:
            file.write(level, description=f"{APERIO}|MPP = 0.5", **TILED | {"compression": "jpeg"} | colours)
    for number, (level, downsample) in enumerate(open_slide(path).file.levels):
        assert isinstance(level, AperioLevel)
        assert level._image is not None
        scanned = OpenSlideLevel(path, number, level.size, downsample)
        every = [Interval(0, side) for side in level.size]
        for box in (every, [Interval(side // 3, side) for side in level.size]):
            assert np.array_equal(level.read(*box), scanned.read(*box))
    every = [Interval(0, side) for side in levels[1].shape[:2]]
    before = open_slide(path).file.levels[1].image.read(*every)
    with tifffile.TiffFile(path, mode="r+b") as file:
        file.pages[1].tags["TileByteCounts"].overwrite([0, *file.pages[1].databytecounts[1:]])
    finest, (coarser, _), _ = open_slide(path).file.levels
    assert finest.image._image is not None  # type: ignore[attr-defined]
    assert coarser._image is None  # type: ignore[attr-defined]
    assert np.abs(coarser.read(*every).astype(int) - before).mean() < 3


@pytest.mark.parametrize("ending", [".svs", ".tif"])
def test_a_tile_of_which_not_all_was_copied_is_named(tmp_path: Path, ending: str) -> None:
    """Decoders show grey, or any colours, for zeros behind the first part of a JPEG."""
    path = tmp_path / f"slide{ending}"
    tifffile.imwrite(path, picture((500, 701)), description=f"{APERIO}|MPP = 0.5", **TILED | {"compression": "jpeg"})
    with tifffile.TiffFile(path) as file:
        start, count = file.pages[0].dataoffsets[1], file.pages[0].databytecounts[1]
    content = bytearray(path.read_bytes())
    content[start + count // 2 : start + count] = bytes(count - count // 2)
    path.write_bytes(content)
    slide = open_slide(path)
    slide.read(Interval(0, 100), Interval(0, 100))
    with pytest.raises(BadImage, match=f"slide{ending}: has a JPEG in tile 1 that ends in zeros"):
        whole(slide)


def test_a_composition_does_not_depend_on_boxes() -> None:
    slide = composition(5, 900, 0.5, True, 0.005)
    height, width = slide.size
    every = slide.pixels(slice(0, height), slice(0, width))
    assert np.array_equal(slide.pixels(slice(100, 333), slice(200, 201)), every[100:333, 200:201])
    assert slide.lesion_share == pytest.approx(0.005, rel=1e-6)
    (lesion,) = slide.lesions
    assert not np.array_equal(every, composition(6, 900, 0.5, True, 0.005).pixels(slice(0, height), slice(0, width)))
    assert all(
        centre - lesion.radius >= 0 and centre + lesion.radius <= side
        for centre, side in zip(lesion[:2], (height, width), strict=True)
    )


def test_a_table_that_knows_another_resolution_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The slide's own counts; a table is for slides that do not say theirs."""
    how: dict[str, Any] = {"photometric": "rgb", "resolution": (20000, 20000), "resolutionunit": "CENTIMETER"}
    tifffile.imwrite(tmp_path / "a.tif", np.zeros((64, 64, 3), np.uint8), **how)
    tifffile.imwrite(tmp_path / "b.tif", np.zeros((64, 64, 3), np.uint8), **how)
    (tmp_path / "slides.csv").write_text("slide,label,mpp\na,x,0.25\nb,y,0.502\n")
    source = source_of(parse(["--slides", str(tmp_path / "slides.csv"), "--mpp", "1", "--patches", "32"]))
    assert source.framed().data.image_size == (32, 32)
    (told,) = caplog.messages
    assert told == "1 slide with other microns per pixel than the table, which are taken: a.tif (0.5, not 0.25)"


def test_tags_that_know_another_resolution_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """OME-XML counts, and tags of a screen say nothing."""
    for name, dots in (("a", 20000), ("b", 40000), ("c", 28)):
        how: dict[str, Any] = {"photometric": "rgb", "resolution": (dots, dots), "resolutionunit": "CENTIMETER"}
        sizes = {"axes": "YXS", "PhysicalSizeX": 0.25, "PhysicalSizeY": 0.25}
        tifffile.imwrite(tmp_path / f"{name}.ome.tif", np.zeros((64, 64, 3), np.uint8), metadata=sizes, **how)
    source = source_of(parse(["--slides", str(tmp_path), "--mpp", "1", "--patches", "16"]))
    assert source.framed().data.image_size == (16, 16)
    (told,) = caplog.messages
    assert (
        told == "1 slide with other microns per pixel than tags of the file, which are taken: a.ome.tif (0.25, not 0.5)"
    )
    assert "0.25 um per pixel (its tags say 0.5)" in open_slide(tmp_path / "a.ome.tif").file.described()
