"""`mpi4dl slides hits`: the patch with the highest value is looked up in the annotation."""

import csv
import json
import os
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import h5py
import numpy as np
import pytest
import tifffile

from mpi4dl.comm import Communicator, Refusal
from mpi4dl.datasets.slides.dataset import SlideFolder, SlideOptions
from mpi4dl.datasets.slides.features import FeatureFolder
from mpi4dl.datasets.slides.geojson import collection, feature, squares
from mpi4dl.datasets.slides.slide import Resolution
from mpi4dl.inference.maps import PatchMap, geojson
from mpi4dl.results.formats import as_object
from mpi4dl.results.slides import record_of
from mpi4dl.slides import slides
from mpi4dl.viewer.hits import Hit, csv_of
from mpi4dl.viewer.results import read_results
from tests.pool.ranks import Ranks

PATCH, MPP = 16, 0.5  # patches at half the resolution of level 0, so of 32 px there
PEAKS = ((1, 1), (2, 3), (0, 2), (1, 2))  # (row, column) of the highest patch of each slide
LESIONS = (  # (row, column, side) in level 0, and class
    [(40, 40, 20, "tumour")],  # inside the patch of (32, 32), and around its centre
    [(60, 92, 8, "tumour")],  # the patch begins at (64, 96): only its corner
    [(96, 0, 20, "tumour")],  # elsewhere
    [(32, 64, 32, "Ignore*"), (0, 0, 9, "tumour")],
)
EXPECTED = [(True, True), (True, False), (False, False), (False, False)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Predictions of slides of 160 x 128 px, with maps; the last one has no map, and one without annotation."""
    lines = ["slide,annotation"]
    for number in range(len(PEAKS) + 2):
        pixels = np.full((128, 160, 3), 200, np.uint8)
        description = f"Aperio |AppMag = 40|MPP = {MPP / 2}"
        tifffile.imwrite(tmp_path / f"s{number}.tif", pixels, tile=(64, 64), description=description, metadata=None)
        lesions = LESIONS[number] if number < len(PEAKS) else LESIONS[0]
        text = collection(
            feature(squares(np.array([[row, col]]), (side, side)), name) for row, col, side, name in lesions
        )
        (tmp_path / f"s{number}.geojson").write_text(text)
        lines.append(f"s{number}.tif,{'' if number == len(PEAKS) else f's{number}.geojson'}")
    (tmp_path / "slides.csv").write_text("\n".join(lines))
    slides = SlideFolder(tmp_path / "slides.csv", SlideOptions(Resolution(mpp=MPP)), label_columns=())
    out = tmp_path / "out"
    (out / "maps").mkdir(parents=True)
    (out / "predictions.json").write_text(as_object({"settings": {}, "slides": record_of(slides)}))
    records = []
    places = [(row, col) for row in range(4) for col in range(5)]
    for index in range(len(PEAKS) + 1):
        values = np.random.default_rng(index).random(len(places)).astype(np.float32)
        values[places.index(PEAKS[index % len(PEAKS)])] = 2
        name = f"maps/s{index}.geojson"
        (out / name).write_text(geojson(slides.image(index), PatchMap(places, values, PATCH, "contribution")))
        records.append({"image": slides.name(index), "prediction": "tumour", "maps": [name]})
    (out / "predictions.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    return out


def hits(comm: Communicator, *argv: str) -> str:
    with redirect_stdout(StringIO()) as out:
        slides(comm, ["hits", *argv])
    return out.getvalue()


@pytest.mark.parametrize("count", [1, 2])
def test_the_highest_patch_is_looked_up_in_the_annotation(ranks: Ranks, folder: Path, count: int) -> None:
    for argv in ([], ["--slides", str(folder.parent / "slides.csv")]):
        told, *others = ranks(count).run(hits, str(folder), *argv)
        lines = [line for line in told.splitlines() if line.startswith("s")]
        assert not any(others)
        assert len(lines) == (5 if argv else 4)  # of the table also the one without a map
        for (row, col), (overlaps, inside), line in zip(PEAKS, EXPECTED, lines, strict=False):
            assert f"at x {32 * col + 16}, y {32 * row + 16} (32 x 32 px)" in line
            assert ("in tumour" in line, "with its centre" in line) == (overlaps, inside)
        assert "overlaps an annotation on 2 (50.0 %)" in told
        assert "centre of the patch is in one on 1 (25.0 %)" in told
        with (folder / "hits.csv").open() as file:
            rows = list(csv.DictReader(file))
        for (row, col), (overlaps, inside), found in zip(PEAKS, EXPECTED, rows, strict=True):
            assert (float(found["x"]), float(found["y"])) == (32 * col + 16, 32 * row + 16)
            assert (found["annotated"], found["centre_annotated"]) == (str(int(overlaps)), str(int(inside)))
            assert ("tumour" in found["classes"].split(";")) == overlaps
    (told, *_) = ranks(count).run(hits, str(folder), "--classes", "Ignore*")
    assert "1 slide with" in told
    assert "in Ignore* with its centre" in told


def test_predictions_of_features_are_shown_on_their_slides(ranks: Ranks, folder: Path) -> None:
    bags = folder.parent / "features"
    bags.mkdir()
    for number in range(len(PEAKS) + 1):
        with h5py.File(bags / f"s{number}.h5", "w") as file:
            file["features"] = np.zeros((3, 2), np.float32)
    of_features = FeatureFolder(bags, SlideOptions(Resolution()), folder=bags, slides=folder.parent, label_columns=())
    (folder / "predictions.json").write_text(as_object({"settings": {}, "slides": record_of(of_features)}))
    lines = (folder / "predictions.jsonl").read_text().replace(".tif", ".h5")
    (folder / "predictions.jsonl").write_text(lines)
    assert [slide.path for slide in read_results(folder).slides] == [
        folder.parent / f"s{number}.tif" for number in range(len(PEAKS) + 1)
    ]
    (told,) = ranks(1).run(hits, str(folder), "--slides", str(folder.parent / "slides.csv"))
    assert "overlaps an annotation on 2 (50.0 %)" in told
    before = of_features.told(0)
    os.utime(folder.parent / "s0.tif", (1, 1))  # as if it was another one, which the map is to be drawn over
    assert of_features.told(0) != before


def refused(comm: Communicator, *argv: str) -> str:
    with pytest.raises((Refusal, ValueError)) as raised:
        hits(comm, *argv)
    return str(raised.value)


def test_what_is_refused(ranks: Ranks, folder: Path) -> None:
    for told in ranks(2).run(refused, str(folder), "--slides", "nowhere.csv"):
        assert "nowhere.csv" in told
    for told in ranks(2).run(refused, str(folder), "--classes", "Tumour"):  # the name of a class is as it is written
        assert "--classes Tumour" in told
        assert "regions of Ignore*, tumour" in told


def test_the_columns_of_a_table_are_named(ranks: Ranks, folder: Path) -> None:
    """As the command says, where they have other names than usual ones."""
    other = folder.parent / "other.csv"
    lines = (folder.parent / "slides.csv").read_text().splitlines()
    other.write_text(
        "\n".join(
            ["Scan,Regions,Diagnosis", *(f"{line},{'tumour' if line[1] < '3' else 'normal'}" for line in lines[1:])]
        )
    )
    (told,) = ranks(1).run(hits, str(folder), "--slides", str(other))
    assert "name it by --slide-column" in told
    named = ["--slide-column", "Scan", "--annotation-column", "Regions", "--label-columns", "Diagnosis"]
    (told,) = ranks(1).run(hits, str(folder), "--slides", str(other), *named)
    assert "overlaps an annotation on 2 (50.0 %)" in told
    shown = read_results(folder, other, None, None, {"slide": "Scan", "annotation": "Regions"}, ["Diagnosis"]).slides
    assert [slide.label for slide in shown] == ["tumour"] * 3 + ["normal"] * 3


def test_names_in_no_encoding_reach_the_table_as_they_are() -> None:
    hit = Hit("s\udcff.tif", 2.0, (16.0, 48.0), (32.0, 32.0), True, True, ("tum\ud800our",))
    assert b"s\xff.tif,2.0,48.0,16.0,32.0,1,1,tum\\ud800our\n" in csv_of([hit])
    assert str(hit).encode().startswith(b"s\\udcff.tif: highest 2")
