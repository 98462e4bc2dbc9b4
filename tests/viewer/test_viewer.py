"""The viewer: slides by number with their predictions, exact tiles, maps, and nothing else of the machine."""

import asyncio
import dataclasses
import io
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import PIL.Image
import pytest

from mpi4dl._signatures import signature_of
from mpi4dl.datasets.base import LastMade
from mpi4dl.datasets.slides.compose import Cohort
from mpi4dl.datasets.slides.dataset import SlideFolder, SlideOptions
from mpi4dl.datasets.slides.geojson import collection, feature, squares
from mpi4dl.datasets.slides.slide import Resolution, Slide, open_slide
from mpi4dl.geometry import Interval
from mpi4dl.inference.maps import PatchMap, geojson
from mpi4dl.results.formats import DamagedResult, as_object, read_object
from mpi4dl.results.slides import record_of
from mpi4dl.viewer.app import make_app
from mpi4dl.viewer.reading import Pyramid, SlideReader
from mpi4dl.viewer.results import read_results
from tests.datasets.test_pairs import picture, write
from tests.pool.zygote import ROOT
from tests.viewer.browser import chromium, page

PATCH = 64
EVIL = "<img src=x onerror=alert(1)>.tif"
TITLE = "attention"


PLACES = "predictions.json"  # where predictions say where slides are


@pytest.fixture(autouse=True)
def beside_the_slides(predicted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded places below the current folder are followed."""
    monkeypatch.chdir(predicted.parent)


@pytest.fixture(scope="module")
def predicted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of predictions of four slides: one was renamed to what a page could take for an element."""
    folder = tmp_path_factory.mktemp("viewed")
    cohort = Cohort(4, 1, 1500, (0.5,), (".tif", ".ome.tif"), 0.009)
    for number in range(len(cohort)):
        cohort.write(folder / "slides", number)
    (folder / "slides" / "slide_002.tif").rename(folder / "slides" / EVIL)
    (folder / "slides" / "slides.csv").write_text(cohort.table().replace("slide_002.tif", EVIL))
    slides = SlideFolder(folder / "slides" / "slides.csv", SlideOptions(Resolution(mpp=1.0)), label_columns=())
    out = folder / "out"
    (out / "maps").mkdir(parents=True)
    (out / PLACES).write_text(as_object({"settings": {}, "slides": record_of(slides)}))
    lines = []
    for index in range(len(slides)):
        places = slides.tissue_patches(index, PATCH).tolist()
        values = np.random.default_rng(index).random(len(places)).astype(np.float32)
        name = f"maps/slide_{index:03d}.geojson"
        found = PatchMap(places, values, PATCH, TITLE)
        (out / name).write_text(geojson(slides.image(index), found))
        probabilities = {"normal": 0.25, "tumour": 0.75}
        lines.append(
            {"image": slides.name(index), "prediction": "tumour", "probabilities": probabilities, "maps": [name]}
        )
    (out / "predictions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return out


def copied(predicted: Path, folder: Path) -> Path:
    shutil.copytree(predicted, folder / "out")
    return folder / "out"


def evaluation(out: Path, rows: str, task: str = "classify", **told: Any) -> None:
    (out / "evaluation.csv").write_text(rows)
    (out / "evaluation.json").write_text(as_object({"task": task, "root": None, **told}))


def ask(app: Any, path: str, method: str = "GET") -> tuple[int, dict[str, str], bytes]:
    """The status, headers and body of a request, whose path is left as it is."""
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False} if not sent else await asyncio.Future()

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b""}
    scope |= {"headers": [(b"host", b"localhost")], "scheme": "http", "http_version": "1.1", "root_path": ""}
    asyncio.run(app(scope, receive, send))
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], headers, b"".join(each.get("body", b"") for each in sent[1:])


def value(app: Any, path: str, status: int = 200) -> Any:
    answered, _, body = ask(app, path)
    assert answered == status, body
    return json.loads(body)


def pixels(app: Any, path: str) -> np.ndarray:
    status, headers, body = ask(app, path)
    assert (status, headers["content-type"]) == (200, "image/png" if path.endswith("png") else "image/jpeg"), body
    return np.asarray(PIL.Image.open(io.BytesIO(body)))


def test_slides_are_listed_with_labels_of_the_table_and_their_losses(predicted: Path) -> None:
    app = make_app(read_results(predicted))
    found = {each["name"]: each for each in value(app, "/api/slides")["slides"]}
    assert [*found] == sorted(["slide_000.tif", "slide_001.ome.tif", EVIL, "slide_003.ome.tif"])
    one, other = found["slide_001.ome.tif"], found["slide_000.tif"]
    assert (one["patient"], one["label"], one["prediction"], one["wrong"]) == ("patient_001", "tumour", "tumour", False)
    assert (other["label"], other["wrong"], other["annotations"]) == ("normal", True, False)
    assert one["loss"] == pytest.approx(-math.log(0.75))
    assert other["loss"] == pytest.approx(-math.log(0.25))
    assert one["probability"] == 0.75
    assert all(each["map"] for each in found.values())
    assert one["annotations"]


def test_tiles_are_the_pixels_of_the_slide_at_each_level(predicted: Path) -> None:
    results = read_results(predicted)
    app = make_app(results)
    facts = value(app, "/api/slides/1")
    slide = open_slide(results.slides[1].path or Path())
    assert (facts["height"], facts["width"]) == slide.size
    assert (facts["mpp"], facts["magnification"], facts["origin"]) == (0.5, 20, [0, 0])
    pyramid = Pyramid(slide.size)
    assert facts["levels"] == pyramid.last + 1 >= 3
    for level in range(facts["levels"]):
        down = 2 ** (pyramid.last - level)
        view = slide.at(down)
        whole = view.read(*(Interval(0, side) for side in view.size))
        rows, cols = (range(math.ceil(side / down / facts["tile"])) for side in slide.size)
        base = f"/api/slides/1/tiles/{level}"
        stitched = np.concatenate(
            [np.concatenate([pixels(app, f"{base}/{col}_{row}.png") for col in cols], 1) for row in rows], 0
        )
        assert stitched.shape[:2] == tuple(math.ceil(side / down) for side in slide.size)
        height, width = view.size
        assert np.array_equal(stitched[:height, :width], whole)
        lossy = pixels(app, f"{base}/0_0.jpg").astype(float)
        assert np.abs(lossy - pixels(app, f"{base}/0_0.png")).mean() < 8
    for place in (f"{facts['levels']}/0_0", "0/1_0", f"{facts['levels'] - 1}/0_99"):
        value(app, f"/api/slides/1/tiles/{place}.png", 404)
    assert max(pixels(app, "/api/slides/1/thumbnail").shape) == 256


def test_maps_and_annotations_have_the_values_and_places_of_their_files(predicted: Path) -> None:
    results = read_results(predicted)
    app = make_app(results)
    for number, slide in enumerate(results.slides):
        found = value(app, f"/api/slides/{number}/map")
        assert slide.map is not None
        features = json.loads(slide.map.read_text())["features"]
        assert (found["title"], found["side"]) == (TITLE, 2 * PATCH)
        for row, col, here, each in zip(found["rows"], found["cols"], found["values"], features, strict=True):
            x, y = each["geometry"]["coordinates"][0][0]
            assert [found["origin"][0] + col * found["side"], found["origin"][1] + row * found["side"]] == [x, y]
            assert here == each["properties"]["measurements"][TITLE]
    annotated = next(i for i, slide in enumerate(results.slides) if slide.annotation is not None)
    path = results.slides[annotated].annotation
    assert path is not None
    content = json.loads(path.read_text())
    regions = value(app, f"/api/slides/{annotated}/annotations")["regions"]
    for each, drawn in zip(regions, content["features"], strict=True):
        corners = drawn["geometry"]["coordinates"][0]
        assert np.allclose(each["rings"][0][: len(corners) - 1], corners[:-1], atol=0.01)
    plain = next(i for i, slide in enumerate(results.slides) if slide.annotation is None)
    assert "no annotation" in value(app, f"/api/slides/{plain}/annotations", 404)["error"]


def test_coordinates_are_those_of_level_0_where_the_scanner_left_out_a_part(
    predicted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MRXS slides have such bounds: pictures begin at them, and so do annotations of QuPath if the user says so."""
    bounds = Interval(100, 900), Interval(260, 1100)

    def bounded(path: Path, resolution: Resolution) -> Slide:
        return Slide(dataclasses.replace(open_slide(path).file, bounds=bounds), 1.0, resolution.assumed_mpp)

    monkeypatch.setattr("mpi4dl.viewer.reading.open_slide", bounded)
    results = read_results(predicted)
    number = next(i for i, slide in enumerate(results.slides) if slide.annotation is not None)
    slide = results.slides[number]
    app = make_app(results)
    facts = value(app, f"/api/slides/{number}")
    assert (facts["origin"], facts["height"], facts["width"]) == ([260, 100], 800, 840)
    whole = open_slide(slide.path or Path())
    expected = whole.read(Interval(100, 612), Interval(260, 772))
    assert np.array_equal(pixels(app, f"/api/slides/{number}/tiles/{facts['levels'] - 1}/0_0.png"), expected)
    corners = []
    for in_bounds in (False, True):
        reader = SlideReader([dataclasses.replace(slide, in_bounds=in_bounds)])
        corners.append(json.loads(reader.regions("annotation", 0))["regions"][0]["rings"][0][0])
    assert corners[1] == pytest.approx([corners[0][0] + 260, corners[0][1] + 100])


def test_regions_of_predicted_classes_are_read_beside_their_maps(predicted: Path, tmp_path: Path) -> None:
    out = copied(predicted, tmp_path)
    (out / "masks").mkdir()
    polygons = [squares(np.array([[64, 128]]), (32, 32)), squares(np.array([[0, 0]]), (16, 16))]
    text = collection([feature(polygons[0], "tumour"), feature(polygons[1], "stroma")])
    (out / "masks" / "slide_000.geojson").write_text(text)
    record = {"image": "slide_000.tif", "mask": "masks/slide_000.ome.tif", "pixels": {"background": 300, "tumour": 100}}
    (out / "predictions.jsonl").write_text(json.dumps(record) + "\n")
    results = read_results(out)
    assert results.slides[0].prediction == "background 75 %, tumour 25 %"
    evaluation(out, "image,pixel_accuracy,dice,iou,error\nslide_000.tif,0.9,0.75,0.6,\n", "segment")
    assert read_results(out).slides[0].loss == 0.25
    found = value(make_app(results), "/api/slides/0/classes")
    assert found["names"] == ["tumour", "stroma"]
    assert [each["name"] for each in found["regions"]] == [0, 1]
    assert found["regions"][0]["rings"][0][0] == [128, 64]
    (out / "predictions.jsonl").write_text(json.dumps({**record, "mask": "../slide_000.ome.tif"}) + "\n")
    with pytest.raises(DamagedResult, match="outside"):
        read_results(out)


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """Predictions of pictures: of one of 16 bits, and one of floating point, of twice the size, are made others."""
    folder = tmp_path / "predicted"
    for number, (depth, suffix) in enumerate((("uint16", ".png"), ("float32", ".tif"))):
        write(tmp_path / "inputs" / f"p{number}{suffix}", picture(depth, 1, (40, 60), number))
        write(folder / "images" / f"p{number}{suffix}", picture(depth, 3, (80, 120), number))
    lines = [{"image": f"p{n}{s}", "prediction": f"images/p{n}{s}"} for n, s in enumerate((".png", ".tif"))]
    (folder / "predictions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    root = {"root": str(tmp_path / "inputs")}
    (folder / PLACES).write_text(as_object({"settings": {}, "slides": {**root, "signature": signature_of(root)}}))
    return folder


def test_pictures_that_a_model_made_are_slides_beside_their_inputs(made: Path) -> None:
    app = make_app(read_results(made))
    listed = value(app, "/api/slides")["slides"]
    assert [(each["name"], each["prediction"], each["made"]) for each in listed] == [
        ("p0.png", "", 2),
        ("p1.tif", "", 3),
    ]
    for number, depth in enumerate(("uint16", "float32")):
        for at, channels, size in ((number, 1, (40, 60)), (number + 2, 3, (80, 120))):
            facts = value(app, f"/api/slides/{at}")
            assert (facts["height"], facts["width"]) == size
            stored = picture(depth, channels, size, number) / (65535 if depth == "uint16" else 1)
            expected = np.rint(255 * stored.reshape(*size, channels)).astype(np.uint8)
            found = pixels(app, f"/api/slides/{at}/tiles/0/0_0.png")
            assert np.array_equal(found, np.broadcast_to(expected, (*size, 3)))


def test_an_evaluation_alone_and_with_predictions_is_shown(predicted: Path, tmp_path: Path) -> None:
    out = copied(predicted, tmp_path)
    rows = (
        "image,label,prediction,probability normal,probability tumour,error\n"
        "slide_000.tif,tumour,normal,0.9,0.1,\nslide_001.ome.tif,,,,,was torn\n"
    )
    evaluation(out, rows)
    both = {slide.name: slide for slide in read_results(out).slides}
    assert (both["slide_000.tif"].label, both["slide_000.tif"].prediction) == ("tumour", "tumour")
    evaluation(out, rows, root=str(tmp_path / "elsewhere"))
    for when, name, label in ((1, "predictions.jsonl", "normal"), (-1, "evaluation.json", "tumour")):
        os.utime(out / "evaluation.json", ns=((out / "predictions.jsonl").stat().st_mtime_ns - when,) * 2)
        apart = read_results(out)
        assert (apart.slides[0].label, apart.remarks[0][-len(name) :]) == (label, name)
    told = {"slides": read_object(out / PLACES)["slides"]}
    for path in (PLACES, "predictions.jsonl"):
        (out / path).unlink()
    evaluation(out, rows, **told)
    first, second = read_results(out).slides
    assert (first.wrong, first.probability, first.map) == (True, 0.9, None)
    assert first.loss == pytest.approx(-math.log(0.1))
    assert second.error == "was torn"
    assert first.path is not None
    assert first.path.is_file()
    (tmp_path / "run").mkdir()
    out.rename(tmp_path / "run" / "predictions-slides")
    shutil.copy(tmp_path / "run" / "predictions-slides" / "evaluation.csv", tmp_path / "run")
    shutil.copy(tmp_path / "run" / "predictions-slides" / "evaluation.json", tmp_path / "run")
    assert len(read_results(tmp_path / "run").slides) == 2


def test_slides_of_features_alone_are_found_beside_their_table(predicted: Path, tmp_path: Path) -> None:
    (tmp_path / "features").mkdir()
    rows = "image,label,prediction\nslide_003.ome.h5,tumour,normal\n"
    told: dict[str, Any] = {"root": str(tmp_path / "features"), "slides": {"slide_003.ome.h5": {"file": None}}}
    for source in (predicted.parent / "slides" / "slides.csv", tmp_path / "features"):
        evaluation(tmp_path, rows, slides={**told, "source": str(source)})
        results = read_results(tmp_path)
        (found,) = results.slides
        if source.is_file():
            assert (found.name, found.patient, results.remarks) == ("slide_003.ome.tif", "patient_003", ())
            assert found.path == source.parent / found.name
            assert found.annotation is not None
        else:
            assert found.path is None
            assert "--slides" in results.remarks[0]


def test_what_is_missing_or_damaged_is_an_error_of_that_slide_alone(predicted: Path, tmp_path: Path) -> None:
    out = copied(predicted, tmp_path)
    slides = tmp_path / "slides"
    shutil.copytree(predicted.parent / "slides", slides)
    (slides / "slide_000.tif").unlink()
    (slides / EVIL).write_bytes((slides / EVIL).read_bytes()[:2000])
    names = [slide.name for slide in read_results(out).slides]
    (out / "maps" / "slide_000.geojson").unlink()
    for index, text in ((1, "{"), (2, '{"features": [{"geometry": 3}]}'), (3, "[" * 100_000)):
        (out / "maps" / f"slide_{index:03d}.geojson").write_text(text)
    with (out / "predictions.jsonl").open("a") as file:
        file.write('{"image": "slide_0')
    results = read_results(out, slides_folder=slides)
    assert any("slide_000.tif" in remark for remark in results.remarks)
    app = make_app(results)
    for name in ("slide_000.tif", EVIL):
        number = names.index(name)
        for path in ("", "/thumbnail", "/tiles/0/0_0.jpg"):
            assert name in value(app, f"/api/slides/{number}{path}", 422)["error"]
    assert value(app, f"/api/slides/{names.index('slide_001.ome.tif')}")["mpp"] == 0.5
    for number in range(4):
        assert "slide_00" in value(app, f"/api/slides/{number}/map", 422)["error"]


@pytest.mark.parametrize("name", ["predictions.jsonl", PLACES, "maps/slide_000.geojson", "evaluation.csv"])
def test_absurd_numbers_in_any_place_are_an_error_of_a_slide_or_of_the_file(
    predicted: Path, tmp_path: Path, name: str
) -> None:
    out = copied(predicted, tmp_path)
    line = {"image": "slide_000.tif", "prediction": {"a": 1.5}, "label": {"a": 2.5}, "dice": 0.5, "pixels": {"a": 7}}
    if name == "predictions.jsonl":
        (out / name).write_text(json.dumps(line) + "\n")
    if name == "evaluation.csv":
        (out / "predictions.jsonl").unlink()
        evaluation(out, "image,label,prediction,dice\nslide_000.tif,1.5,2.5,0.5\n", "segment")
    text = (out / name).read_text()
    places = [found.span() for found in re.finditer(r"(?<![\w.])-?[0-9]+(?:\.[0-9]+)?(?![\w.])|null", text)]
    for number in ("9" * 400, "1e308", "1e-320", "NaN", "-1"):
        for first, last in places[:: max(1, len(places) // 5)]:
            (out / name).write_text(text[:first] + number + text[last:])
            try:
                app = make_app(read_results(out))
            except DamagedResult:
                continue
            assert len(value(app, "/api/slides")["slides"]) in (1, 4)
            for path in ("", "/map"):
                assert ask(app, f"/api/slides/0{path}")[0] in (200, 404, 422)


@pytest.mark.parametrize("name", ["../outside.tif", "/etc/hostname", "a/../../outside.tif", "C:/outside.tif"])
def test_names_and_paths_in_predictions_lead_nowhere_else(predicted: Path, tmp_path: Path, name: str) -> None:
    out = copied(predicted, tmp_path)
    (tmp_path / "secret.geojson").write_text((out / "maps" / "slide_000.geojson").read_text())
    (out / "maps" / "linked.geojson").symlink_to(tmp_path / "secret.geojson")
    maps = ["../secret.geojson", str(tmp_path / "secret.geojson"), "maps/linked.geojson", "maps/../../secret.geojson"]
    lines = [{"image": name, "prediction": "normal", "maps": [each]} for each in maps]
    for line in lines:
        (out / "predictions.jsonl").write_text(json.dumps(line) + "\n")
        with pytest.raises(DamagedResult, match="outside"):
            read_results(out)
    (out / "predictions.jsonl").write_text(json.dumps({"image": name, "prediction": "normal"}) + "\n")
    (slide,) = read_results(out).slides
    assert slide.path is None
    app = make_app(read_results(out))
    assert "leads out" in value(app, "/api/slides/0/tiles/0/0_0.png", 422)["error"]


@pytest.mark.parametrize("key", ["root", "source", "annotation", "link"])
def test_recorded_places_outside_are_followed_only_where_the_user_names_them(
    predicted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """As in a folder of predictions that somebody else sent."""
    slides, elsewhere = predicted.parent / "slides", tmp_path / "work" / "here"
    elsewhere.mkdir(parents=True)
    monkeypatch.chdir(elsewhere)
    out = copied(predicted, elsewhere)
    told = read_object(out / PLACES)["slides"]
    own = elsewhere / "slides"
    own.mkdir()
    (own / "slides.csv").write_text("slide\nslide_001.ome.tif\n")
    annotation = next(slides.glob("annotations/*1.geojson"))
    places = {"root": str(own), "source": str(own / "slides.csv")}
    if key in places:
        told |= places | {key: told[key], "slides": {}}
    else:
        for each in told["slides"].values():
            each["annotation"] = str(annotation) if key == "annotation" else str(own / "link.geojson")
        told |= {"root": str(own), "source": str(own)}
    if key == "link":
        (own / "link.geojson").symlink_to(annotation)
        (own / "slide_001.ome.tif").symlink_to(slides / "slide_001.ome.tif")
    (out / PLACES).write_text(as_object({"settings": {}, "slides": told}))
    for each in read_results(out).slides:
        assert each.annotation is None
        assert each.path is None or not each.path.exists()
        assert each.label == ""
    named = {each.name: each for each in read_results(out, slides / "slides.csv").slides}["slide_001.ome.tif"]
    assert named.annotation == annotation
    assert named.path is not None
    assert named.path.samefile(slides / "slide_001.ome.tif")


def test_no_path_leads_to_other_files_and_only_get_is_answered(predicted: Path) -> None:
    app = make_app(read_results(predicted))
    for path in (
        "/static/../app.py",
        "/static/..%2fapp.py",
        "/static//etc/passwd",
        "/static/./viewer.js",
        "/static/%2e%2e/app.py",
        "/../view.py",
        "/api/slides/4",
        "/api/slides/-1",
        "/api/slides/slide_000.tif",
        "/api/slides/0/tiles/0/0_0.svg",
        "/api/slides/0/tiles/0/../../../x.png",
        f"/api/slides/{'9' * 6000}",
        "/docs",
        "/openapi.json",
    ):
        assert ask(app, path)[0] == 404, path
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "HEAD", "TRACE"):
        assert ask(app, "/api/slides", method)[0] == 405
    for path in ("/", "/static/viewer.js", "/api/slides", "/nowhere", "/api/slides/0/tiles/0/0_0.jpg"):
        _, headers, _ = ask(app, path)
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert not any(name.startswith("access-control") for name in headers)
    _, headers, body = ask(app, "/")
    assert not re.search(rb"<script>|\son\w+=|https?://|style=", body)


def test_caches_are_bounded_and_keep_what_was_used_last() -> None:
    cache, made = LastMade(10, len), list[int]()

    def get(key: int, size: int) -> None:
        assert cache(key, lambda: (made.append(key), bytes(size))[1]) == bytes(size)

    for key in (1, 2, 1, 3, 1, 2):  # of 4 bytes each: 3 takes the place of 2
        get(key, 4)
    assert made == [1, 2, 3, 2]
    get(4, 100)
    get(1, 4)
    assert made == [1, 2, 3, 2, 4, 1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("{there}", "{there}: has no predictions.jsonl and no evaluation"),
        ("{there}/none", "{there}/none: no such folder: name a folder that mpi4dl predict"),
        ("{out} --slides {there}/none.csv", "--slides {there}/none.csv: no such file"),
        ("{out} --host 203.0.113.1 --port 0", "cannot listen on 203.0.113.1:0"),
        ("{out} --port 99999", "99999"),
        ("{out} --assume-mpp -1", "--assume-mpp is '-1', but must be a number greater than 0"),
    ],
)
def test_what_the_command_refuses(
    predicted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    from mpi4dl.view import main

    with pytest.raises(SystemExit) as ended:
        main([word.format(there=tmp_path, out=predicted) for word in words.split()])
    assert ended.value.code == 2
    assert message.format(there=tmp_path) in capsys.readouterr().err


@contextmanager
def viewing(
    predicted: Path,
    num_files: int = 1024,
    err: int | None = None,
    end: signal.Signals = signal.SIGTERM,
    num_slides: int = 4,
) -> Iterator[str]:
    """Where the command serves the predictions, with so many open files at most, until `end`, which is a success."""
    viewer = [sys.executable, "-m", "mpi4dl.view", str(predicted), "--port", "0"]
    command = ["sh", "-c", f'ulimit -n {num_files}; exec "$@"', "sh", *viewer]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            found = re.fullmatch(rf"{num_slides} slides of \S+ at (http://127\.0\.0\.1:\d+)\n", said)
            assert found, said
            yield found[1]
        finally:
            process.send_signal(end)
    assert process.returncode == 0


@pytest.fixture(scope="module")
def address(predicted: Path) -> Iterator[str]:
    with viewing(predicted) as found:
        yield found


@pytest.mark.parametrize("num_files", [pytest.param(760, marks=pytest.mark.exhaustive), 300])
def test_silent_connections_shut_out_nobody_also_with_few_files(
    predicted: Path, tmp_path: Path, num_files: int
) -> None:
    with (tmp_path / "err").open("w+") as err, ExitStack() as within:
        address = within.enter_context(viewing(predicted, num_files, err.fileno(), signal.SIGINT))
        host, port = address.removeprefix("http://").split(":")
        for number in range(400):
            within.enter_context(socket.create_connection((host, int(port)), 60))
            if number % 100 == 99:
                assert httpx.get(f"{address}/api/slides", timeout=60).status_code == 200
    assert (tmp_path / "err").read_text() == ""


def test_the_command_serves_slides_to_this_machine(address: str) -> None:
    assert len(httpx.get(f"{address}/api/slides").json()["slides"]) == 4
    assert httpx.get(f"{address}/static/%2e%2e%2fapp.py").status_code == 404
    assert httpx.get(f"{address}/api/slides/0/tiles/0/0_0.jpg").headers["content-type"] == "image/jpeg"


@pytest.mark.skipif(chromium() is None, reason="no chromium is installed")
def test_a_browser_draws_slides_maps_and_annotations(address: str, tmp_path: Path) -> None:
    drawn = (
        "(() => {{ const c = document.querySelector({!r}); const d = c.getContext('2d')"
        ".getImageData(0, 0, c.width, c.height).data; let n = 0;"
        "for (let i = 0; i < d.length; i += 4) n += d[i + 3] > 0 && d[i + 1] < 200; return n; }})()"
    )
    slide, overlay = drawn.format("#zoom .openseadragon-canvas canvas"), drawn.format("#overlay")
    with page(tmp_path / "chromium") as shown:
        shown.size(1280, 800)
        shown.go(address)
        shown.wait("document.querySelectorAll('#list a').length === 4")
        assert shown.value("document.querySelector('#list strong').textContent") == EVIL  # with the largest loss
        assert shown.value("document.scripts.length") == 2
        shown.value("location.hash = state.all.find((each) => each.annotations).number")
        shown.wait("viewer !== null && state.map !== null && state.polygons.length > 0")
        shown.wait(f"{slide} > 1000 && {overlay} > 1000")
        with_map = shown.value(overlay)
        shown.value("$('show-map').click()")
        lines = shown.value(overlay)
        assert 0 < lines < with_map / 2  # those of the annotations
        shown.value("$('show-annotations').click()")
        assert shown.value(overlay) == 0
        shown.value("$('show-outlines').click()")
        assert shown.value(overlay) > 0
        shown.value("highest(), void viewer.viewport.goHome(true)")
        assert "rank1 of " in shown.value("$('info').textContent")
        x, y = shown.value(
            "(() => { const t = transform(), m = state.map, b = $('stage').getBoundingClientRect();"
            "return [b.left + t.x + (m.origin[0] + (m.cols[3] + .5) * m.side) * t.scale,"
            "b.top + t.y + (m.origin[1] + (m.rows[3] + .5) * m.side) * t.scale]; })()"
        )
        shown.click(x, y)
        shown.wait("state.chosen === 3")
        shown.size(390, 844, phone=True)
        for hash_ in ("", "0"):
            shown.value(f"location.hash = '{hash_}'")
            shown.wait("document.documentElement.scrollWidth <= innerWidth && innerWidth === 390")
            shown.wait(f"document.body.classList.contains('open') === {str(bool(hash_)).lower()}")
        assert shown.problems == []


@pytest.mark.skipif(chromium() is None, reason="no chromium is installed")
def test_a_browser_divides_an_input_from_what_was_made_of_it(made: Path, tmp_path: Path) -> None:
    with viewing(made, num_slides=2) as address, page(tmp_path / "chromium") as shown:
        shown.go(f"{address}/#0")
        shown.wait("viewer && viewer.world.getItemCount() === 2 && viewer.world.getItemAt(1).getClip() !== null")
        assert shown.value("[viewer.world.getItemAt(1).getClip().x, $('controls').hidden]") == [60, False]
        shown.value("$('split').value = 25; $('split').dispatchEvent(new Event('input'))")
        assert shown.value("viewer.world.getItemAt(1).getClip().x") == 30
        assert shown.value("viewer.world.getItemAt(1).getBounds().width") == 1
        assert shown.problems == []


def test_slides_of_a_moved_folder_are_found_by_the_table_named(predicted: Path, tmp_path: Path) -> None:
    out = copied(predicted, tmp_path)
    (out / PLACES).unlink()
    lost = read_results(out)
    assert all(slide.path is None for slide in lost.slides)
    assert "--slides" in " ".join(lost.remarks)
    found = read_results(out, predicted.parent / "slides" / "slides.csv", mpp=0.3)
    assert [slide.path for slide in found.slides] == [slide.path for slide in read_results(predicted).slides]
    assert {slide.mpp for slide in found.slides} == {0.3}
