"""Annotations of slides as masks: by other packages' geometry, equal in any tiling; damaged files have one message."""

import gzip
import json
import math
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import PIL.Image
import pytest
import tifffile
from skimage.measure import points_in_poly

from mpi4dl.datasets.base import IGNORED, BadImage, DatasetError, WholeImage
from mpi4dl.datasets.slides.annotations import FARTHEST, RegionMask, read_annotations
from mpi4dl.datasets.slides.compose import annotations, composition
from mpi4dl.datasets.slides.dataset import SlideFolder, SlideOptions
from mpi4dl.datasets.slides.masks import MaskOptions
from mpi4dl.datasets.slides.slide import Level, Resolution, Slide, SlideFile
from mpi4dl.geometry import Interval

SIZE = (90, 130)
STAR = [[60 + 37.3 * math.cos(k * 1.88), 45 + 33.7 * math.sin(k * 1.88)] for k in range(10)]  # crosses itself
OUTER = [[10.2, 8.9], [70.4, 5.1], [88.8, 60.3], [30.1, 80.7], [10.2, 8.9]]
HOLE = [[30, 30], [50, 30], [50, 52], [30, 52], [30, 30]]
WEDGE = [[100, 60], [126, 60], [113, 84]]
FEATURES = [
    {"type": "Feature", "geometry": {"type": "Polygon", "coordinates": [OUTER, HOLE]},
     "properties": {"classification": {"name": "Tumor", "color": [200, 0, 0]}}},
    {"type": "Feature", "geometry": {"type": "MultiPolygon", "coordinates": [[STAR], [WEDGE]]},
     "properties": {"classification": {"names": ["Stroma", "Dense"]}}},
    {"type": "Feature", "geometry": {"type": "Polygon", "coordinates": [[[40, 40], [60, 40], [60, 48], [40, 48]]]},
     "properties": {"pathClassId": "Immune"}},
    {"type": "Feature", "geometry": {"type": "Polygon", "coordinates": [[[0, 0], [9, 0], [9, 4], [0, 4]]]},
     "properties": {"classification": {"name": "Ignore*"}}},
    {"type": "Feature", "geometry": {"type": "Polygon", "coordinates": [[[0, 0], [130, 0], [130, 90], [0, 90]]]},
     "properties": {"objectType": "annotation"}},
    {"type": "Feature", "geometry": {"type": "Point", "coordinates": [3, 4]}, "properties": {}},
]  # fmt: skip
NUMBERS = {"Tumor": 1, "Stroma: Dense": 2, "Immune": 3, "Ignore*": IGNORED}


def slide_of(downsample: float = 1.0, origin: tuple[int, int] = (0, 0)) -> Slide:
    image = WholeImage(np.zeros((*SIZE, 3), np.uint8))
    rows, cols = (Interval(first, side) for first, side in zip(origin, SIZE, strict=True))
    return Slide(SlideFile(Path("slide.tif"), (Level(image, 1.0),), 0.5, bounds=(rows, cols)), downsample)


def written(folder: Path, content: Any, name: str = "a.geojson") -> Path:
    path = folder / name
    text = content if isinstance(content, str | bytes) else json.dumps(content)
    data = text if isinstance(text, bytes) else text.encode()
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path


def expected_of(slide: Slide) -> npt.NDArray[np.int64]:
    """Of each centre of a pixel, the last polygon around it, by scikit-image."""
    height, width = slide.size
    centres = np.stack(np.meshgrid(np.arange(width) + 0.5, np.arange(height) + 0.5), -1).reshape(-1, 2)
    places = centres * slide.downsample + slide.origin[::-1]
    found = np.zeros(len(places), np.int64)
    for feature in FEATURES[:4]:
        name = feature["properties"].get("classification", {})  # type: ignore[attr-defined]
        name = name.get("name") or ": ".join(name.get("names", ["Immune"]))
        polygons = feature["geometry"]["coordinates"]  # type: ignore[index]
        for rings in polygons if feature["geometry"]["type"] == "MultiPolygon" else [polygons]:  # type: ignore[index]
            inside = np.zeros(len(places), bool)
            for ring in rings:
                inside ^= points_in_poly(places, ring)
            found[inside] = NUMBERS[name]
    return found.reshape(height, width)


@pytest.mark.parametrize("name", ["a.geojson", "a.json.gz"])
@pytest.mark.parametrize(("downsample", "origin"), [(1.0, (0, 0)), (1.7, (0, 0)), (0.83, (7, 12))])
def test_masks_are_those_of_scikit_image_in_any_box(
    tmp_path: Path, name: str, downsample: float, origin: tuple[int, int]
) -> None:
    slide = slide_of(downsample, origin)
    content = FEATURES if name.endswith(".gz") else {"type": "FeatureCollection", "features": FEATURES}
    mask = RegionMask(read_annotations(written(tmp_path, content, name)), slide, NUMBERS)
    height, width = mask.size
    whole = mask.read(Interval(0, height), Interval(0, width))
    assert np.array_equal(whole, expected_of(slide))
    assert {*np.unique(whole)} == {0, *NUMBERS.values()} - ({IGNORED} if origin != (0, 0) else set())
    for side in (7, 33):
        for top in range(0, height, side):
            for left in range(0, width, side + 4):
                rows, cols = Interval(top, min(top + side, height)), Interval(left, min(left + side + 4, width))
                assert np.array_equal(mask.read(rows, cols), whole[top : rows.stop, left : cols.stop])


def test_geojson_of_all_layouts_is_read_in_little_memory(tmp_path: Path) -> None:
    """Of all layouts of GeoJSON, and without all of them as Python objects: these take seven times the file's size."""
    indented = json.dumps({"bbox": [1, 2], "features": FEATURES[:2], "type": "FeatureCollection"}, indent=2)
    for content in (FEATURES[:2], indented, f"\ufeff \n{indented}\r\n"):
        assert len(read_annotations(written(tmp_path, content)).regions) == 3
    for content in (FEATURES[0], FEATURES[0]["geometry"]):
        assert len(read_annotations(written(tmp_path, content)).regions) == 1
    for content in ("[]", '{"features": []}'):
        assert not read_annotations(written(tmp_path, content)).regions
    ring = [[1000.25 + n, 2000.75 + n % 7] for n in range(250)]
    feature = {"type": "Feature", "geometry": {"type": "Polygon", "coordinates": [ring]}}
    path = written(tmp_path, [feature] * 250)
    tracemalloc.start()
    read_annotations(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * path.stat().st_size


def test_areas_and_places_are_those_of_shapely(tmp_path: Path) -> None:
    shapely = pytest.importorskip("shapely")
    found = read_annotations(written(tmp_path, FEATURES))
    tumour = shapely.Polygon(OUTER, [HOLE])
    whole = [Interval(0, side) for side in slide_of(0.1).size]
    for downsample, number, shape in ((0.1, 1, tumour), (0.1, 3, shapely.box(40, 40, 60, 48))):
        only = {"Tumor": 1} if number == 1 else {"Immune": 3}
        mask = RegionMask(found, slide_of(downsample), only)
        area = (mask.read(*whole) == number).sum() * downsample**2
        assert area == pytest.approx(shape.area, rel=1e-3)
        random = np.random.default_rng(0)
        for _ in range(30):
            place = mask.place(number, random)
            assert place is not None
            row, col = place
            assert shape.buffer(0.3).contains(shapely.Point((col + 0.5) * downsample, (row + 0.5) * downsample))


ASAP = """<?xml version="1.0"?><ASAP_Annotations><Annotations>
<Annotation Name="a" Type="Polygon" PartOfGroup="Tumor" Color="#F4FA58"><Coordinates>
<Coordinate Order="1" X="70,5" Y="5.25" /><Coordinate Order="0" X="10.5" Y="9" />
<Coordinate Order="2" X="80" Y="60" /></Coordinates></Annotation>
<Annotation Name="b" Type="Rectangle" PartOfGroup="Stroma"><Coordinates>
<Coordinate Order="0" X="20" Y="20" /><Coordinate Order="1" X="60" Y="20" />
<Coordinate Order="2" X="60" Y="30" /><Coordinate Order="3" X="20" Y="30" /></Coordinates></Annotation>
<Annotation Name="c" Type="Dot" PartOfGroup="Tumor"><Coordinates><Coordinate Order="0" X="1" Y="1" /></Coordinates>
</Annotation><Annotation Name="d" Type="Spline" PartOfGroup="None"><Coordinates>
<Coordinate Order="0" X="1" Y="1" /><Coordinate Order="1" X="2" Y="1" /><Coordinate Order="2" X="2" Y="3" />
</Coordinates></Annotation></Annotations><AnnotationGroups><Group Name="Tumor" PartOfGroup="None" /></AnnotationGroups>
</ASAP_Annotations>"""


def test_xml_of_asap(tmp_path: Path) -> None:
    found = read_annotations(written(tmp_path, ASAP.encode(), "a.xml"))
    assert [region.name for region in found.regions] == ["Tumor", "Stroma", ""]
    assert found.regions[0].rings[0].tolist() == [[10.5, 9], [70.5, 5.25], [80, 60]]
    space, classes = [Interval(0, side) for side in SIZE], {"Tumor": 1, "Stroma": 2}
    whole = RegionMask(found, slide_of(), classes).read(*space)
    assert (whole == 2).sum() == 400
    of_two = re.sub(r'<Coordinate Order="[13]" X="[26]0" Y="[23]0" />', "", ASAP)  # opposite corners
    found = read_annotations(written(tmp_path, of_two.encode(), "b.xml"))
    assert len(found.regions[1].rings[0]) == 4
    assert np.array_equal(RegionMask(found, slide_of(), classes).read(*space), whole)
    triangle = [[10.5, 9], [70.5, 5.25], [80, 60]]
    centres = np.argwhere(np.ones(SIZE))[:, ::-1] + 0.5
    inside = points_in_poly(centres, triangle).reshape(SIZE)
    assert np.array_equal((whole > 0) & ~(whole == 2), inside & ~(whole == 2))


def feature_with(coordinates: Any, kind: str = "Polygon") -> list[Any]:
    return [{"type": "Feature", "geometry": {"type": kind, "coordinates": coordinates}, "properties": {}}]


PLACES = '[{"geometry": {"type": "Polygon", "coordinates": [[[%s, 2], [3, 4], [5, 6]]]}}]'
BOMB = b'<!DOCTYPE a [<!ENTITY b "bbbb"><!ENTITY c "&b;&b;">]><ASAP_Annotations>&c;</ASAP_Annotations>'
FILE = b'<!DOCTYPE a [<!ENTITY b SYSTEM "file:///etc/passwd">]><ASAP_Annotations>&b;</ASAP_Annotations>'
DAMAGED: dict[str, tuple[str, Any, str]] = {
    "truncated": ("a.geojson", json.dumps(FEATURES).encode()[:300], "truncated or damaged"),
    "empty": ("a.geojson", b" ", "is empty"),
    "binary": ("a.geojson", bytes(range(128, 256)), "UTF-8"),
    "a number": ("a.geojson", 7, "list of features"),
    "features of text": ("a.geojson", {"features": "all"}, "list of features"),
    "a feature of text": ("a.geojson", ["Tumor"], "feature 1"),
    "no geometry": ("a.geojson", [{"type": "Feature", "geometry": {"type": "Circle"}}], "Circle"),
    "class of numbers": ("a.geojson", [{**FEATURES[0], "properties": {"classification": [3]}}], "class of feature 1"),
    "flat": ("a.geojson", feature_with([1, 2, 3]), "where feature 1 needs"),
    "corners of text": ("a.geojson", feature_with([[["1", "2"], [3, 4], [5, 6]]]), "corner of feature 1"),
    "huge": ("a.geojson", feature_with([[[0, 0], [1e9, 0], [5, 5]]]), "1000000000.0"),
    "integers without end": ("a.geojson", PLACES % ("1" + "0" * 999), "feature 1"),
    "NaN": ("a.geojson", feature_with([[[0, 0], [math.nan, 0], [5, 5]]]), "NaN"),
    "infinity": ("a.geojson", PLACES % "1e999", "feature 1"),
    "nested": ("a.geojson", b"[" * 100_000, "nested"),
    "a comma more": ("a.geojson", json.dumps(FEATURES).encode()[:-1] + b",]", "truncated or damaged"),
    "no comma": ("a.geojson", b'{"type": "FeatureCollection" "features": []}', "truncated or damaged"),
    "text behind": ("a.geojson", json.dumps(FEATURES).encode() + b" x", "Extra data"),
    "packed": ("a.geojson.gz", None, "cannot be read"),
    "truncated xml": ("a.xml", ASAP.encode()[:400], "truncated or damaged"),
    "another xml": ("a.xml", b"<Annotations/>", "ASAP_Annotations"),
    "a circle": ("a.xml", ASAP.replace("Spline", "Circle").encode(), "type 'Circle' of an annotation"),
    "entities": ("a.xml", BOMB, "document type"),
    "entities of UTF-16": ("a.xml", BOMB.decode().encode("utf-16"), "document type"),
    "files as entities": ("a.xml", FILE, "document type"),
    "coordinates of text": ("a.xml", ASAP.replace('"80"', '"east"').encode(), "corner"),
    "coordinates of nan": ("a.xml", ASAP.replace('"80"', '"nan"').encode(), "corner"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files_are_named(tmp_path: Path, name: str) -> None:
    file, content, message = DAMAGED[name]
    path = written(tmp_path, FEATURES if content is None else content, file)
    if content is None:
        path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(BadImage) as raised:
        read_annotations(path)
    told = str(raised.value)
    assert str(path) in told
    assert message in told
    assert "\n" not in told
    assert len(told) < len(str(path)) + 250


def test_deep_geometry_and_huge_places_are_bounded(tmp_path: Path) -> None:
    geometry: Any = {"type": "Polygon", "coordinates": [OUTER]}
    for _ in range(50):
        geometry = {"type": "GeometryCollection", "geometries": [geometry]}
    with pytest.raises(BadImage, match="in one another"):
        read_annotations(written(tmp_path, geometry))
    wide = feature_with([[[-FARTHEST, -FARTHEST], [FARTHEST, -FARTHEST], [FARTHEST, FARTHEST], [-FARTHEST, FARTHEST]]])
    mask = RegionMask(read_annotations(written(tmp_path, wide)), slide_of(), {"": 1})
    assert mask.read(Interval(0, 90), Interval(0, 130)).all()
    with pytest.raises(BadImage, match="not on the slide"):
        mask.require_on_slide()


def folder_of(root: Path, files: dict[str, Any], **options: Any) -> SlideFolder:
    """Slides of SIZE with these annotations, a line of the table for each."""
    lines = ["slide_id,case_id,annotation"]
    for number, (name, content) in enumerate(files.items()):
        image = np.random.default_rng(number).integers(0, 255, (*SIZE, 3), np.uint8)
        PIL.Image.fromarray(image).save(root / f"s{number}.png")
        if isinstance(content, np.ndarray):
            tifffile.imwrite(root / name, content) if name.endswith(".tif") else PIL.Image.fromarray(content).save(
                root / name
            )
        elif content is not None:
            written(root, content, name)
        lines.append(f"s{number},p{number},{'' if content is None else name}")
    (root / "slides.csv").write_text("\n".join(lines) + "\n")
    known = SlideOptions(options.pop("resolution", Resolution()), masks=MaskOptions(**options))
    return SlideFolder(root / "slides.csv", known, task="segment")


def test_classes_are_those_of_all_files(tmp_path: Path) -> None:
    """Background first; features without class are left out, unless none has a class; slides without annotation."""
    tumour = [FEATURES[0], FEATURES[4]]
    found = folder_of(tmp_path, {"a.geojson": FEATURES, "b.geojson": tumour, "c.geojson": None})
    assert found.classes == ("background", "Immune", "Stroma: Dense", "Tumor")
    assert any("2 of 8 polygons have no class" in each for each in found.remarks)
    assert any("1 slide without annotation: background" in each for each in found.remarks)
    assert not found.label(2).read(Interval(0, 90), Interval(0, 130)).any()
    ignoring = folder_of(tmp_path, {"a.geojson": tumour, "b.geojson": None}, ignores_unannotated=True)
    assert ignoring.classes == ("background", "Tumor")
    values = ignoring.label(0).read(Interval(0, 90), Interval(0, 130))
    assert {*np.unique(values)} == {1, IGNORED}
    nameless = folder_of(tmp_path, {"a.geojson": FEATURES[4:]})
    assert nameless.classes == ("background", "annotated")
    assert nameless.label(0).read(Interval(0, 90), Interval(0, 130)).all()
    ignored = folder_of(tmp_path, {"a.geojson": [FEATURES[4], FEATURES[3]]}).label(0)
    values, counts = np.unique(ignored.read(Interval(0, 90), Interval(0, 130)), return_counts=True)
    assert (values.tolist(), counts.tolist()) == ([IGNORED, 1], [36, 90 * 130 - 36])


def test_pictures_of_any_resolution_are_masks(tmp_path: Path) -> None:
    """The nearest pixel of the picture, box by box; 255 is ignored."""
    small = np.random.default_rng(1).integers(0, 3, (45, 65)).astype(np.uint8)
    small[:4] = 255
    found = folder_of(tmp_path, {"m0.png": small, "m1.tif": np.kron(small, np.ones((4, 4), np.uint8))})
    assert found.classes == ("0", "1", "2")
    doubled = np.where(small == 255, IGNORED, small.astype(np.int64)).repeat(2, 0).repeat(2, 1)
    for index in range(2):
        mask = found.label(index)
        assert np.array_equal(mask.read(Interval(0, 90), Interval(0, 130)), doubled)
        assert np.array_equal(mask.read(Interval(11, 37), Interval(5, 99)), doubled[11:37, 5:99])
    other = folder_of(tmp_path, {"m0.png": small[:20]})
    with pytest.raises(BadImage, match="same extent"):
        other.label(0)


NOTHING = np.zeros(SIZE, np.uint8)
REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "of two kinds": (lambda root: folder_of(root, {"a.geojson": FEATURES, "b.png": NOTHING}), "one kind"),
    "of no class": (lambda root: folder_of(root, {"a.geojson": FEATURES[5:]}), "no polygon of a class"),
    "none": (lambda root: folder_of(root, {"a.geojson": None}), "names no annotation"),
    "of another ending": (lambda root: folder_of(root, {"a.ndpa": FEATURES}), "files of these end in"),
    "damaged": (lambda root: folder_of(root, {"a.geojson": b"{"}), "a.geojson"),
    "in two spellings": (
        lambda root: folder_of(root, {"a.geojson": FEATURES, "b.geojson": json.dumps(FEATURES).replace("Tu", "tu")}),
        "has the classes 'Tumor' and 'tumor': write one class in one way",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_annotations_that_are_refused(tmp_path: Path, name: str) -> None:
    act, message = REFUSED[name]
    with pytest.raises(DatasetError, match=message):
        act(tmp_path)


def test_a_missing_file_is_named_with_its_line(tmp_path: Path) -> None:
    folder_of(tmp_path, {"a.geojson": FEATURES, "b.geojson": FEATURES})
    (tmp_path / "b.geojson").unlink()
    with pytest.raises(DatasetError, match=r"slides.csv, line 3: .*b.geojson is not there"):
        SlideFolder(tmp_path / "slides.csv", SlideOptions(), task="segment")


def test_coordinates_may_begin_at_the_bounds(tmp_path: Path) -> None:
    found = read_annotations(written(tmp_path, FEATURES[:1]))
    slide = slide_of(1.0, (7, 12))
    moved = RegionMask(found, slide, NUMBERS, corner=slide.origin).read(Interval(0, 83), Interval(0, 118))
    plain = RegionMask(found, slide_of(), NUMBERS).read(Interval(0, 83), Interval(0, 118))
    assert np.array_equal(moved, plain)


def test_masks_of_composed_slides(tmp_path: Path) -> None:
    slide = composition(11, 2048, 0.5, True, 0.004)
    (lesion,) = slide.lesions
    found = read_annotations(written(tmp_path, json.loads(annotations(slide))))
    image = WholeImage(np.broadcast_to(np.uint8(0), (*slide.size, 3)))
    mask = RegionMask(found, Slide(SlideFile(Path("x"), (Level(image, 1.0),)), 2.0), {"Tumor": 1})
    area = mask.read(*(Interval(0, side) for side in mask.size)).sum() * 4
    assert area == pytest.approx(math.pi * lesion.radius**2, rel=0.01)
