"""Slides and maps that are written here open in tifffile, OpenSlide and shapely: size, levels, resolution, places."""

import json
import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import shapely
import tifffile
from openslide import OpenSlide
from scipy import ndimage
from shapely.geometry import shape

from mpi4dl.datasets.slides.compose import FORMATS, Composition, Disc, write_slide
from mpi4dl.datasets.slides.geojson import outlines
from mpi4dl.datasets.slides.slide import Slide, open_slide
from mpi4dl.geometry import Interval
from mpi4dl.inference.class_maps import geojson as regions
from mpi4dl.inference.class_maps import levels_of, write_pyramid
from mpi4dl.inference.maps import PatchMap, write_map

SIZE, MPP = (2100, 1700), 0.5
COMPOSED = Composition(SIZE, MPP, 7, (Disc(900, 800, 500),), (Disc(900, 800, 60),))


def slide_in(folder: Path, ending: str = ".tif") -> Slide:
    write_slide(folder / f"slide{ending}", COMPOSED)
    return open_slide(folder / f"slide{ending}")


def physical_sizes(path: Path) -> list[float]:
    """Microns per pixel along x and y, by the OME-XML of a file."""
    with tifffile.TiffFile(path) as file:
        (pixels,) = (
            each for each in ElementTree.fromstring(file.ome_metadata or "").iter() if each.tag.endswith("}Pixels")
        )
    assert {pixels.get(f"PhysicalSize{axis}Unit", "µm") for axis in "XY"} == {"µm"}
    return [float(pixels.attrib[f"PhysicalSize{axis}"]) for axis in "XY"]


@pytest.mark.parametrize("ending", FORMATS)
def test_composed_slides_open_in_tifffile_and_openslide(tmp_path: Path, ending: str) -> None:
    ours = slide_in(tmp_path, ending)
    sizes = [level.image.size for level in ours.file.levels]
    assert sizes[0] == SIZE
    assert len(sizes) == 2
    with tifffile.TiffFile(ours.file.path) as file:
        series = file.series[0]
        assert (
            [level.shape[:2] for level in series.levels] == sizes
            if len(series.levels) > 1
            else series.shape[:2] == SIZE
        )
        pixels = series.levels[0].asarray()
    assert np.array_equal(pixels, ours.read(*(Interval(0, side) for side in SIZE)))
    if ending == ".ome.tif":
        assert physical_sizes(ours.file.path) == pytest.approx([MPP, MPP])
    with OpenSlide(str(ours.file.path)) as theirs:
        assert [size[::-1] for size in theirs.level_dimensions] == sizes[: theirs.level_count]
        assert theirs.level_count == (1 if ending == ".ome.tif" else 2)  # OpenSlide knows no levels of OME
        assert np.array_equal(
            np.asarray(theirs.read_region((300, 500), 0, (200, 100)))[..., :3], pixels[500:600, 300:500]
        )
        if ending == ".svs":
            assert theirs.properties["openslide.vendor"] == "aperio"
            assert [float(theirs.properties[f"openslide.mpp-{axis}"]) for axis in "xy"] == pytest.approx([MPP, MPP])
            assert float(theirs.properties["openslide.objective-power"]) == pytest.approx(10 / MPP)


def test_class_maps_open_in_tifffile_and_their_regions_are_where_they_were(tmp_path: Path) -> None:
    slide = slide_in(tmp_path).at(2.0)
    classes_of = np.zeros(slide.size, np.uint8)
    classes_of[100:300, 200:500] = 1
    classes_of[150:200, 250:300] = 0
    classes_of[600:900, 50:90] = 2
    write_pyramid(tmp_path / "map.ome.tif", levels_of(classes_of), slide, ["background; tumour; stroma"])
    with tifffile.TiffFile(tmp_path / "map.ome.tif") as file:
        levels = file.series[0].levels
        for number, level in enumerate(levels):
            assert np.array_equal(level.asarray(), classes_of[:: 2**number, :: 2**number])
    assert physical_sizes(tmp_path / "map.ome.tif") == pytest.approx([2 * MPP, 2 * MPP])
    found = json.loads(regions(classes_of, slide, ("background", "tumour", "stroma")))["features"]
    shapes = {each["properties"]["classification"]["name"]: shape(each["geometry"]) for each in found}
    assert all(map(shapely.is_valid, shapes.values()))
    tumour = shapely.box(400, 200, 1000, 600) - shapely.box(500, 300, 600, 400)  # in pixels of level 0
    for name, expected in {"tumour": tumour, "stroma": shapely.box(100, 1200, 180, 1800)}.items():
        # Outlines are simplified by up to half a pixel of the map.
        assert shapes[name].symmetric_difference(expected).area < 0.5 * 2.0 * expected.length


def test_heat_maps_open_in_tifffile_and_their_tiles_are_where_patches_were(tmp_path: Path) -> None:
    slide = slide_in(tmp_path)
    places = [(row, col) for row in range(2, 6) for col in range(1, 4)]
    values = np.linspace(0, 1, len(places), dtype=np.float32)
    _, tiles, ome = write_map(tmp_path, Path("a"), slide, PatchMap(places, values, 256, "attention"))
    grid = tifffile.imread(ome)
    assert grid.shape == (6, 4)
    assert np.array_equal(grid[2:6, 1:4].ravel(), values)
    assert np.isnan(grid[:2]).all()
    assert physical_sizes(ome) == pytest.approx([256 * MPP, 256 * MPP])
    features = json.loads(tiles.read_text())["features"]
    for feature, (row, col), value in zip(features, places, values.tolist(), strict=True):
        found = shape(feature["geometry"])
        assert found.is_valid
        assert found.equals(shapely.box(256 * col, 256 * row, 256 * col + 256, 256 * row + 256))
        assert feature["properties"]["measurements"]["attention"] == pytest.approx(value)


def masks() -> dict[str, Any]:
    """Masks whose outlines are hard: noise, diagonals that touch in a corner, thin rings, a spiral."""
    random = np.random.default_rng(0)
    found = {f"noise {share}": random.random((60, 70)) < share for share in (0.05, 0.3, 0.5, 0.7, 0.95)}
    found["smooth noise"] = ndimage.gaussian_filter(random.random((200, 200)), 3) > 0.5
    y, x = np.mgrid[:80, :80] - 40
    radius, angle = np.hypot(y, x), np.arctan2(y, x)
    found |= {"rings": (radius.astype(int) // 2) % 2 == 0, "spiral": (radius / 6 + angle / math.tau) % 1 < 0.4}
    found |= {"chequers": (y + x) % 2 == 0, "diagonal": y == x, "all": y < 100}
    return found


@pytest.mark.parametrize("name", masks())
def test_outlines_are_valid_polygons_of_about_the_area_of_the_mask(name: str) -> None:
    mask = masks()[name]
    polygons = [shapely.Polygon(outer, holes) for outer, *holes in outlines(mask)]
    wrong = [shapely.is_valid_reason(each) for each in polygons if not each.is_valid]
    assert wrong == []
    if name in ("smooth noise", "all", "spiral"):
        assert sum(each.area for each in polygons) == pytest.approx(mask.sum(), rel=0.05)
