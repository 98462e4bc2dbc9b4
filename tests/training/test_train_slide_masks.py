"""Slides to segment, from annotations to class maps: plain PyTorch on whole slides, by any plan; equal predictions."""

import json
import re
import shutil
from collections.abc import Iterator
from math import pi
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl.datasets.base import IGNORED
from mpi4dl.datasets.loader import shuffled
from mpi4dl.datasets.slides.slide import open_slide
from mpi4dl.datasets.slides.windows import GridWindows, RandomWindows
from mpi4dl.evaluate import evaluate
from mpi4dl.geometry import Interval
from mpi4dl.models import build
from mpi4dl.options.config import parse
from mpi4dl.options.models import build_model
from mpi4dl.options.sources import source_of, with_frame
from mpi4dl.predict import predict
from mpi4dl.train import train
from tests.pool.ranks import Ranks
from tests.support.commands import losses_of, plain_steps, read_lines, refused, run_train, said, truncate, words
from tests.support.short_runs import EXACT, write_mixed_cohort

MPP = 2.0
COMMON = (
    f"--task segment --mpp {MPP} --model unet --model-options num_filters=4,depth=2 --num-workers 0 --flip none "
    "--val-fraction 0.25 --optimizer SGD --lr 0.05 --lr-schedule constant --epochs 1 --no-tensorboard --seed 3"
)


@pytest.fixture(scope="module")
def cohort(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Slides of several sizes and two magnifications; every second one has an annotated lesion."""
    return write_mixed_cohort(tmp_path_factory.mktemp("cohort"), 4)


def flags_of(cohort: Path, folder: Path, more: str = "") -> list[str]:
    return words("--slides", cohort / "slides.csv", COMMON, more, "--run-folder", folder)


class Precise(nn.Module):
    """A U-Net that computes in float64."""

    def __init__(self, num_classes: int, **options: Any) -> None:
        super().__init__()
        self.unet = build("unet", num_classes, **options).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.unet(x.double())  # type: ignore[no-any-return]


def whole_slide(slides: Any, index: int, frame: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """A slide in white and its mask among pixels that are ignored, float64."""
    slide, mask = slides.image(index), slides.label(index)
    whole = [Interval(0, side) for side in slide.size]
    image, classes = np.full((*frame, 3), 255, np.uint8), np.full(frame, IGNORED, np.int64)
    inside = tuple(slice(0, side) for side in slide.size)
    image[inside], classes[inside] = slide.read(*whole), mask.read(*whole)
    values = image.astype(np.float32) * np.float32(1 / (255 * 0.25)) - np.float32(0.5 / 0.25)
    return torch.from_numpy(values).permute(2, 0, 1).double(), torch.from_numpy(classes)


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param("--tiles 1x1", marks=pytest.mark.exhaustive),
        pytest.param("--tiles 1x2", marks=pytest.mark.exhaustive),
        "--tiles 1x2 --stream 2x2",
    ],
)
def test_steps_on_whole_slides_are_those_of_plain_pytorch(
    ranks: Ranks, cohort: Path, tmp_path: Path, plan: str
) -> None:
    """Slides have several sizes, and what lies beyond a slide counts for nothing."""
    more = f"--model {__file__}:Precise --loss cross_entropy --batch-size 2 --epochs 2 --log-interval 1"
    flags = flags_of(cohort, tmp_path / "run", f"{more} --eval-every none {plan}")
    run_train(ranks, tmp_path / "run", *flags)
    config = with_frame(parse(flags))
    training, _ = source_of(config).open()
    assert len({training.image(index).size for index in range(len(training))}) > 1
    model = build_model(config, 2, 3)

    def losses() -> Iterator[Tensor]:
        for epoch in range(2):
            samples = [
                whole_slide(training, index, config.data.image_size) for index in shuffled(len(training), 3, epoch)[:2]
            ]
            images, masks = (torch.stack(each) for each in zip(*samples, strict=True))
            assert (masks == IGNORED).any()
            yield F.cross_entropy(model(images), masks)

    expected = plain_steps(torch.optim.SGD(model.parameters(), lr=0.05), losses())
    assert losses_of(tmp_path / "run") == pytest.approx(expected, rel=EXACT)
    state = load_file(tmp_path / "run" / "model.safetensors")
    for name, value in model.state_dict().items():
        assert torch.allclose(state[name], value, rtol=0, atol=EXACT), name


@pytest.mark.parametrize(
    "more",
    [
        pytest.param("", marks=pytest.mark.exhaustive),
        "--fit crop --image-size 64 --crops-each 3 --crops-on-classes 0.5 --tissue 0.7 --on-bad-image skip",
    ],
)
def test_one_rank_and_two_predict_and_evaluate_the_same(ranks: Ranks, cohort: Path, tmp_path: Path, more: str) -> None:
    """Whole slides on tiles, and slides by windows; each class map has its slide's size, place and resolution."""
    run, table = tmp_path / "run", cohort / "slides.csv"
    ranks(2).run(train, flags_of(cohort, run, f"{more} --tiles 1x2 --batch-size 2 --max-steps 2"))
    for count in (1, 2):
        out = tmp_path / f"of{count}"
        common = words(run, "--slides", table, "--tiles", f"1x{count}", "--out")
        told = ranks(count).run(said, predict, words(*common, out))[0]
        assert "4 slides looked at" in told
        if more:
            seen, of = map(int, re.findall(r"(\d+) of (\d+) windows of slides show tissue", told)[0])
            assert 0 < seen < of
    ranks(2).run(evaluate, words(*common, out / "scores", "--resamples 0"))
    scores = json.loads((out / "scores" / "evaluation.json").read_text())
    asked = words(run, "--slides", table, "--out")
    alone = ranks(2).run(said, predict, words(*asked, tmp_path / "alone", "--data 2"))
    assert "no maps" not in alone[0]  # class maps are its maps
    slides = source_of(with_frame(parse(flags_of(cohort, run)))).open_files()
    confusion = np.zeros((2, 2), np.int64)
    found = [read_lines(tmp_path / f"of{count}" / "predictions.jsonl") for count in (1, 2)]
    for number, (one, two) in enumerate(zip(*found, strict=True)):
        maps = [tifffile.imread(tmp_path / f"of{count}" / one["mask"]) for count in (1, 2)]
        assert (maps[0] != maps[1]).mean() < 1e-3
        assert one["pixels"]["Tumor"] == (maps[0] == 1).sum()
        assert one["image"] == two["image"] == slides.name(number)
        opened = open_slide(tmp_path / "of1" / one["mask"])
        assert opened.size == slides.image(number).size == maps[0].shape
        assert opened.file.mpp == pytest.approx(MPP)
        true = slides.label(number).read(*(Interval(0, side) for side in opened.size))
        np.add.at(confusion, (true, maps[1]), 1)
        for name in one["beside"]:
            assert (tmp_path / "of1" / name).stat().st_size
    other = words(*asked, tmp_path / "of1", "--min-area 50")
    assert all("--min-area 0.0, not 50.0" in told for told in ranks(1).run(refused, predict, other))
    assert scores["confusion"] == confusion.tolist()
    both = confusion[1, 1]
    iou = both / (confusion[1].sum() + confusion[:, 1].sum() - both)
    assert scores["metrics"]["iou Tumor"]["value"] == pytest.approx(iou)


def test_damaged_slides_and_annotations_do_not_end_a_prediction_or_evaluation(
    ranks: Ranks, cohort: Path, tmp_path: Path
) -> None:
    run, other = tmp_path / "run", tmp_path / "slides"
    ranks(1).run(train, flags_of(cohort, run, "--fit crop --image-size 64 --batch-size 2 --max-steps 1"))
    shutil.copytree(cohort, other)
    for name in ("slide_002.svs", "annotations/slide_003.geojson"):
        truncate(other / name)
    asked = words(run, "--slides", other / "slides.csv", "--tiles 1x2 --out", tmp_path / "out")
    told = ranks(2).run(said, predict, asked)
    assert "4 slides looked at, 1 of which could not be read" in told[0]
    ranks(2).run(evaluate, [*asked, "--resamples", "0"])
    bad = json.loads((tmp_path / "out" / "evaluation.json").read_text())["bad"]
    assert [*bad] == ["slide_002.svs", "slide_003.tif"]
    assert "slide_003.geojson" in bad["slide_003.tif"]


def test_folders_to_predict_of_need_no_columns(cohort: Path) -> None:
    config = parse(["--slides", str(cohort), "--annotation-column", "annotation", "--patient-column", "case_id"])
    assert len(source_of(config).open_files(labelled=False)) == 4


def test_windows_are_drawn_in_tissue_and_on_classes(cohort: Path, tmp_path: Path) -> None:
    flags = flags_of(cohort, tmp_path, "--fit crop --image-size 48 --crops-each 5 --crops-on-classes 1")
    windows, grid = source_of(parse(flags)).open()
    assert isinstance(windows, RandomWindows)
    assert isinstance(grid, GridWindows)
    places = []
    for key in ((3, 0, 0), (3, 1, 0), (3, 0, 0)):
        drawn: Any = windows.drawn(key)
        places.append([drawn.corner(index) for index in range(len(drawn))])
        for index in range(len(drawn)):
            label = drawn.label(index).read(Interval(0, 48), Interval(0, 48))
            annotated = drawn._slides.rows[drawn.indices[index]].annotation is not None
            assert (label == 1).any() == annotated
            part = drawn.image(index).read(Interval(3, 9), Interval(1, 5))
            slide, (row, col) = drawn._slides.image(drawn.indices[index]), places[-1][index]
            assert np.array_equal(part, slide.read(Interval(row + 3, row + 9), Interval(col + 1, col + 5)))
    assert places[0] == places[2] != places[1]
    assert len({*places[0]}) > len(places[0]) // 2
    seen: dict[int, int] = {}
    for index in range(len(grid)):
        label = grid.label(index).read(Interval(0, 48), Interval(0, 48))
        seen[grid.indices[index]] = seen.get(grid.indices[index], 0) + int((label == 1).sum())
    for index, pixels in seen.items():
        slide = grid._slides.image(index)
        whole = grid._slides.label(index).read(*(Interval(0, side) for side in slide.size))
        assert pixels == (whole == 1).sum()


def test_polygons_of_class_maps_are_where_the_classes_are(tmp_path: Path) -> None:
    """By shapely, in pixels of level 0: areas, holes, and the least area."""
    from mpi4dl.datasets.base import WholeImage
    from mpi4dl.datasets.slides.slide import Level, Slide, SlideFile
    from mpi4dl.inference.class_maps import geojson

    shapely = pytest.importorskip("shapely")
    y, x = np.ogrid[:200, :300]
    found = np.zeros((200, 300), np.uint8)
    found[(y - 90) ** 2 + (x - 120) ** 2 < 70**2] = 1
    found[(y - 90) ** 2 + (x - 120) ** 2 < 30**2] = 2
    found[20:23, 280:283] = 1
    bounds = (Interval(40, 840), Interval(100, 1300))
    image = WholeImage(np.broadcast_to(np.uint8(255), (900, 1400, 3)))
    slide = Slide(SlideFile(Path("x"), (Level(image, 1.0),), 0.5, bounds=bounds), 4.0)
    classes = ("background", "Tumor", "Stroma")
    for options, count in (((), 3), ((50.0,), 2), ((0.0, True), 3)):
        features = json.loads(geojson(found, slide, classes, *options))["features"]
        assert len(features) == count
        shapes = {each["properties"]["classification"]["name"]: shapely.geometry.shape(each["geometry"])
                  for each in features if shapely.geometry.shape(each["geometry"]).area > 1000}  # fmt: skip
        assert all(shape.is_valid for shape in shapes.values())
        assert shapes["Tumor"].area == pytest.approx(16 * pi * (70**2 - 30**2), rel=0.02)
        assert shapes["Stroma"].area == pytest.approx(16 * pi * 30**2, rel=0.03)
        top, left = (0, 0) if options[1:] == (True,) else (40, 100)
        assert shapes["Stroma"].centroid.coords[0] == pytest.approx((left + 4 * 120.5, top + 4 * 90.5), abs=3)
