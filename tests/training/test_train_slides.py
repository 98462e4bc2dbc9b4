"""Slides from a table to heat maps: what plain PyTorch learns of whole slides, by any plan, and equal predictions."""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl.comm import Communicator, world
from mpi4dl.datasets.loader import shuffled
from mpi4dl.datasets.slides.slide import open_slide
from mpi4dl.datasets.slides.tissue import find_tissue
from mpi4dl.engine import Engine
from mpi4dl.evaluate import evaluate
from mpi4dl.geometry import Interval, ceil_div
from mpi4dl.models.patches import GatedAttention, PatchModel
from mpi4dl.options.build import build_plan
from mpi4dl.options.config import ConfigError, parse
from mpi4dl.options.models import build_model
from mpi4dl.options.sources import in_folder_of_fold, source_of, with_frame
from mpi4dl.parallel.pipeline.local_stages import LocalStages
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.streaming.patches import PatchOptions, stream_patches
from mpi4dl.parallel.streaming.stream_tiles import Pixels
from mpi4dl.plan import main as plan
from mpi4dl.predict import predict
from mpi4dl.runs.samples import RunSamples
from mpi4dl.train import train
from mpi4dl.training.data import Images
from mpi4dl.viewer.reading import SlideReader, read_map
from mpi4dl.viewer.results import read_results
from tests.datasets.slides.dicom import series
from tests.pool.ranks import Ranks
from tests.support.commands import losses_of, plain_steps, read_lines, read_rows, refused, run_train, said, words
from tests.support.short_runs import EXACT
from tests.support.tiny import TINY_RESNET, tiny_resnet

PATCH, MPP = 64, 0.5
COMMON = (
    f"--mpp {MPP} --patches {PATCH} --patches-at-once 40 --model {TINY_RESNET} "
    "--batch-size 2 --num-workers 1 --val-fraction 0.34 --optimizer SGD --lr 0.05 --lr-schedule constant --epochs 1 "
    "--log-interval 1 --no-tensorboard --seed 3"
)


def flags_of(cohort: Path, folder: Path, more: str = "") -> list[str]:
    return words("--slides", cohort / "slides.csv", COMMON, more, "--run-folder", folder)


def in_turn(slides: Any, epochs: int) -> Iterator[tuple[int, ...]]:
    """The slides of each step of two, in the order of the seed."""
    order = [i for epoch in range(epochs) for i in shuffled(len(slides), 3, epoch)]
    return zip(order[::2], order[1::2], strict=False)


def patches_of(slides: Any, index: int) -> Tensor:
    """The patches of a slide that show tissue, out of the whole slide: (P, 3, PATCH, PATCH), normalized."""
    slide = slides.image(index)
    height, width = slide.size
    white = np.full((height + PATCH, width + PATCH, 3), 255, np.uint8)
    white[:height, :width] = slide.read(Interval(0, height), Interval(0, width))
    found = []
    for row, col in slides.tissue_patches(index, PATCH).tolist():
        patch = white[row * PATCH :, col * PATCH :][:PATCH, :PATCH]
        found.append(torch.from_numpy(patch.transpose(2, 0, 1) / np.float32(255)))
    return (torch.stack(found) - 0.5) / 0.25


class Precise(nn.Module):
    """A tiny ResNet that computes in float64."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.resnet = tiny_resnet(num_classes).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.resnet(normalized(x.double()))  # type: ignore[no-any-return]


OWN = (
    f"--mpp {MPP} --model small_resnet --model-options num_filters=4 --batch-size 1 --accumulate 2 --num-workers 1 "
    "--val-fraction 0.34 --optimizer SGD --lr 0.002 --lr-schedule constant --epochs 1 --log-interval 1 --seed 3 "
    "--no-tensorboard --flip none --eval-every none"
)


AS_BYTES = f"--mean 0 --std {1 / 255}"


def normalized(pixels: Tensor) -> Tensor:
    return (pixels / 255 - 0.5) / 0.25


def shown_whole(slides: Any, index: int) -> Tensor:
    """The bytes of a whole slide, white where it has no tissue and up to a multiple of 32 px: (1, 3, H, W)."""
    slide = slides.image(index).at(slides.image(index).downsample)
    height, width = slide.size
    white = np.full((ceil_div(height, 32) * 32, ceil_div(width, 32) * 32, 3), 255, np.uint8)
    cells = find_tissue(slide).cells(slide).repeat(32, 0).repeat(32, 1)[:height, :width]
    white[:height, :width][cells] = slide.read(Interval(0, height), Interval(0, width))[cells]
    return torch.from_numpy(white.transpose(2, 0, 1))[None].float()


ONE_EACH = "--batch-size 2 --accumulate 1"
WHOLE_PLANS = ["--tiles 1x2", f"--data 2 {ONE_EACH}"] + [
    pytest.param(plan, marks=pytest.mark.exhaustive)
    for plan in (
        "--tiles 1x2 --stream 3x2",
        f"--tiles 1x2 --data 2 {ONE_EACH} --zero 3",
        f"--data 2 {ONE_EACH} --stream 2x2",
        "--tiles 1x1 --stages 2",
        "--tiles 2x2 --stream 2x2 --stream-segments 2",
        "--tiles 1x1 --stream 4x4",
    )
]


@pytest.mark.parametrize("plan", WHOLE_PLANS)
def test_whole_slides_of_their_own_sizes_are_those_of_a_plain_loop(
    ranks: Ranks, cohort: Path, tmp_path: Path, plan: str
) -> None:
    """Of six sizes, in three formats and two magnifications; in training, evaluation and prediction."""
    own = OWN.replace("small_resnet --model-options num_filters=4", f"{__file__}:Precise")
    flags = words("--slides", cohort / "slides.csv", own, AS_BYTES, plan)
    run = run_train(ranks, tmp_path / "run", *flags)
    config = with_frame(parse(flags))
    training, validation = source_of(config).open()
    assert len({tuple(training.image(index).size) for index in range(len(training))}) == len(training)
    model = build_model(config, 2, 3)

    def loss_of(index: int) -> Tensor:
        return F.cross_entropy(model(shown_whole(training, index)), torch.tensor([training.label(index)]))

    losses = (torch.stack([*map(loss_of, batch)]).mean() for batch in in_turn(training, 1))
    expected = plain_steps(torch.optim.SGD(model.parameters(), lr=config.optimizer.lr), losses)
    assert losses_of(run)[:2] == pytest.approx(expected, rel=1e-6)
    model.eval()
    argv = [str(run), "--slides", str(cohort), "--out", str(tmp_path / "out"), "--no-maps"]
    if config.parallel.data > 1:
        argv += ["--data", str(config.parallel.data), "--tiles", "x".join(map(str, config.parallel.tiles[0]))]
    ranks(build_plan(config).num_ranks).run(said, predict, argv)
    for index, line in enumerate(read_lines(tmp_path / "out" / "predictions.jsonl")):
        with torch.no_grad():
            values = model(shown_whole(validation.whole, index)).softmax(1)[0].tolist()
        assert list(line["probabilities"].values()) == pytest.approx(values, abs=1e-6)


@pytest.mark.parametrize(
    "plan",
    [
        "--tiles 1x2",
        pytest.param("--tiles 1x1", marks=pytest.mark.exhaustive),
        pytest.param("--tiles 1x2 --data 2 --zero 3", marks=pytest.mark.exhaustive),
    ],
)
def test_patches_of_slides_are_those_of_a_plain_loop(ranks: Ranks, cohort: Path, tmp_path: Path, plan: str) -> None:
    """Of slides in three formats and two magnifications, by an encoder with batch norms over all patches of a step."""
    flags = flags_of(cohort, tmp_path / "run", f"--flip none --lr 0.01 --eval-every none {plan}")
    run = run_train(ranks, tmp_path / "run", *flags)
    config = with_frame(parse(flags))
    training, _ = source_of(config).open()
    model = build_model(config, 2, 3)
    assert isinstance(model, PatchModel)

    def loss_of(batch: tuple[int, ...]) -> Tensor:
        patches = [patches_of(training, index) for index in batch]
        logits = model.aggregate(model.encoder(torch.cat(patches)), [*map(len, patches)])
        return F.cross_entropy(logits, torch.tensor([training.label(index) for index in batch]))

    optimizer = torch.optim.SGD(model.parameters(), lr=config.optimizer.lr)
    assert losses_of(run)[:2] == pytest.approx(plain_steps(optimizer, map(loss_of, in_turn(training, 1))), rel=1e-4)


def test_the_patches_of_a_step_and_their_passes_are_counted_before_it(
    ranks: Ranks, cohort: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those with tissue, as training takes them; by the plan and by a run."""
    flags = flags_of(cohort, tmp_path / "run", "--tiles 1x2")
    training, _ = source_of(with_frame(parse(flags))).open()
    counts = [len(training.tissue_patches(index, PATCH)) for index in range(len(training))]  # type: ignore[attr-defined]
    most = 20
    assert min(counts) < most < max(counts)
    mean = rf"\(the mean of {len(counts)} slides\)"
    [ran, _] = ranks(2).run(said, train, [*flags, "--dry-run"])
    of = f"about {round(2 * sum(counts) / len(counts))} patches with tissue"
    pattern = rf"{of}, (\d+) x forward and \1 x backward {mean}.*--most-patches"
    assert len(re.findall(pattern, ran)) == 1
    plan([*flags, "--stream-norm", "running", "--most-patches", str(most)])
    num_patches = 2 * sum(min(count, most) for count in counts) / len(counts)
    pattern = rf"about {round(num_patches)} patches with tissue, 1 x forward and 1 x backward {mean}$"
    assert re.search(pattern, capsys.readouterr().out, re.MULTILINE)


@pytest.fixture(scope="module")
def short_run(ranks: Ranks, cohort: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two steps."""
    folder = tmp_path_factory.mktemp("runs") / "short"
    ranks(1).run(train, flags_of(cohort, folder, "--max-steps 2"))
    return folder


@pytest.fixture(scope="module")
def predicted(ranks: Ranks, cohort: Path, short_run: Path) -> Path:
    """What it predicts of all slides."""
    out = short_run.with_name("predicted")
    ranks(1).run(said, predict, words(short_run, "--slides", cohort / "slides.csv", "--out", out))
    return out


def test_one_rank_and_two_predict_the_same_and_draw_the_same_maps_where_the_patches_are(
    ranks: Ranks, cohort: Path, short_run: Path, predicted: Path, tmp_path: Path
) -> None:
    """In pixels of the full level 0, in GeoJSON, and by their microns per pixel in OME-TIFF."""
    told = ranks(2).run(said, predict, words(short_run, "--slides", cohort, "--out", tmp_path / "out --tiles 1x2"))
    assert "6 slides looked at" in told[0]
    folders = predicted, tmp_path / "out"
    found = [read_lines(out / "predictions.jsonl") for out in folders]
    rows = read_rows(tmp_path / "out" / "predictions.csv")
    assert [row["image"] for row in rows] == [each["image"] for each in found[1]]
    slides = source_of(with_frame(parse(flags_of(cohort, short_run)))).open_files(labelled=False)
    for index, (one, two) in enumerate(zip(*found, strict=True)):
        assert one["image"] == two["image"] == slides.name(index)
        assert one["probabilities"] == pytest.approx(two["probabilities"], abs=1e-5)
        grid, other = (tifffile.imread(out / one["maps"][2]) for out in folders)
        assert np.array_equal(np.isnan(grid), np.isnan(other))
        assert grid == pytest.approx(other, abs=1e-5, nan_ok=True)
        with tifffile.TiffFile(predicted / one["maps"][2]) as file:
            assert f'PhysicalSizeX="{PATCH * MPP}"' in (file.ome_metadata or "")
        places, side = slides.tissue_patches(index, PATCH).tolist(), PATCH * slides.image(index).downsample
        shown = json.loads((predicted / one["maps"][1]).read_text())["features"]
        corners = [tuple(each["geometry"]["coordinates"][0][0]) for each in shown]
        assert corners == [pytest.approx((col * side, row * side)) for row, col in places]
        values = [each["properties"]["measurements"]["attention"] for each in shown]
        assert [grid[row, col] for row, col in places] == pytest.approx(values, abs=1e-6)
        assert (sum(values), np.nansum(grid)) == pytest.approx((1, 1), abs=1e-4)


def test_maps_that_are_gone_are_drawn_again_and_others_are_refused(
    ranks: Ranks, cohort: Path, short_run: Path, predicted: Path, tmp_path: Path
) -> None:
    out = shutil.copytree(predicted, tmp_path / "out")
    argv = words(short_run, "--slides", cohort / "slides.csv", "--out", out)
    assert "6 slides done before" in ranks(1).run(said, predict, argv)[0]
    lost = next((out / "maps").glob("*001*.png"))
    lost.unlink()
    assert "5 slides done before" in ranks(1).run(said, predict, argv)[0]
    assert lost.is_file()
    assert "maps 'attention', not 'none'" in ranks(1).run(refused, predict, [*argv, "--no-maps"])[0]


@dataclass(frozen=True)
class Chosen(Pixels):
    """Whole slides in float64, of which the same patches are used in each step: a source of images."""

    places: tuple[tuple[tuple[int, int], ...], ...]

    def __getitem__(self, positions: Any) -> "Chosen":
        return Chosen(self.values[list(positions)], tuple(self.places[i] for i in positions))

    def tissue_patches(self, position: int, patch: int) -> list[tuple[int, int]]:
        return [*self.places[position]]


@dataclass(frozen=True)
class OfPatches:
    """A model of patches, and images (4, C, H, W) of which it sees some: one of one image, and all of another."""

    channels: int
    size: tuple[int, int]
    patch_size: int
    at_once: int
    places: tuple[tuple[tuple[int, int], ...], ...]

    def model(self) -> PatchModel:
        torch.manual_seed(5)
        if self.patch_size == 1:  # features
            return PatchModel(nn.Flatten(), GatedAttention(self.channels, 2, 4), 1).double()
        encoder = nn.Sequential(
            nn.Conv2d(3, 6, 3, 2, 1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 8, 3, 1, 1), nn.BatchNorm2d(8),
            nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )  # fmt: skip
        return PatchModel(encoder, GatedAttention(8, 2, 4), 8).double()

    def samples(self) -> tuple[Tensor, Tensor]:
        torch.manual_seed(1)
        return torch.randn(4, self.channels, *self.size, dtype=torch.float64), torch.tensor([0, 1, 1, 0])


ALL = tuple((row, col) for row in range(5) for col in range(7))
OF_SLIDES = OfPatches(3, (40, 56), 8, 2, (((0, 0), (1, 3), (4, 6)), ((2, 2),), ALL, ((0, 6), (3, 1))))
OF_BAGS = OfPatches(6, (1, 9), 1, 9, tuple(tuple((0, i) for i in range(count)) for count in (3, 1, 9, 6)))


def steps_in_float64(comm: Communicator, task: OfPatches, plan: Plan) -> tuple[list[float], dict[str, Tensor]]:
    images, labels = task.samples()
    model, options = task.model(), PatchOptions(task.at_once)
    stream_patches(model, options, task.channels)
    stages = LocalStages.whole(model, plan, comm, options)
    engine = Engine(stages, plan, torch.optim.AdamW(stages.parameters(), lr=0.1), F.cross_entropy, comm=comm)
    losses = []
    for _ in range(3):
        tiles = [Chosen(images, task.places)[range(*read.box.batch)] for read in engine.reads(4, task.size)]
        losses.append(engine.step(tiles, labels, task.size).loss)
    return losses, engine.gather_state() or {}


@pytest.mark.parametrize(
    ("task", "plan"),
    [
        pytest.param(OF_SLIDES, Plan(((1, 2),)), id="patches-tiles", marks=pytest.mark.exhaustive),
        pytest.param(OF_SLIDES, Plan(((1, 2),), data=2), id="patches-tiles and replicas"),
        pytest.param(OF_BAGS, Plan(((1, 2),)), id="bags-tiles"),
        pytest.param(OF_BAGS, Plan(((1, 2),), data=2, zero=1, microbatches=2), id="bags-tiles, replicas and ZeRO"),
    ],
)
def test_patches_that_slides_choose_and_bags_are_exact_in_float64(ranks: Ranks, task: OfPatches, plan: Plan) -> None:
    """Batch norm takes the statistics of all patches of the batch."""
    (losses, state), *_ = ranks(plan.num_ranks).run(steps_in_float64, task, plan)
    images, labels = task.samples()
    model, side = task.model().train(), task.patch_size
    patches = [
        images[i, :, side * row :, side * col :][:, :side, :side]
        for i, places in enumerate(task.places)
        for row, col in places
    ]
    counts = [*map(len, task.places)]
    outputs = (model.aggregate(model.encoder(torch.stack(patches)), counts) for _ in losses)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    assert losses == pytest.approx(plain_steps(optimizer, (F.cross_entropy(each, labels) for each in outputs)), EXACT)
    for name, value in model.state_dict().items():
        assert torch.allclose(state[name], value, rtol=0, atol=1e-9), name


def split_by(flags: list[str], folder: Path) -> dict[str, str]:
    """The part of each slide, which is then kept in a folder as that of a run."""
    config = in_folder_of_fold(parse([*flags, "--run-folder", str(folder)]))
    training, validation = source_of(config).open()
    place = Path(config.run.run_folder or "")
    place.mkdir(parents=True, exist_ok=True)
    Images(training, validation, "pad", ()).record(world(), place)
    return {row.name: row.split for row in training.whole.rows}  # type: ignore[attr-defined]


def test_a_split_that_a_run_kept_is_taken_again(cohort: Path, tmp_path: Path) -> None:
    """Also those of other folds, where the table has changed since, and the seed."""

    def split(more: str, folder: str, slides: Path = cohort / "slides.csv") -> dict[str, str]:
        return split_by(words("--slides", slides, COMMON, more), tmp_path / folder)

    once = split("", "run")
    assert split(f"--split-file {tmp_path / 'run' / 'samples.csv'} --seed 4", "again") == once
    assert split("--seed 5", "other") != once

    folds = [split(f"--folds 3 --fold {fold}", "cv") for fold in range(2)]
    less = tmp_path / "less.csv"
    less.write_text("\n".join((cohort / "slides.csv").read_text().splitlines()[:-1]))
    with pytest.raises(ValueError, match=r"folds\.csv, line 7: .*no slide in the table"):
        split(f"--slides-folder {cohort} --seed 9 --folds 3 --fold 2", "cv", less)
    folds.append(split("--seed 9 --folds 3 --fold 2", "cv"))
    assert sorted(slide for parts in folds for slide, part in parts.items() if part == "val") == sorted(once)
    assert sorted(path.name for path in (tmp_path / "cv").iterdir()) == ["fold_0", "fold_1", "fold_2", "folds.csv"]

    clam, names = tmp_path / "splits", sorted(once)
    clam.mkdir()
    (clam / "splits_1.csv").write_text(f",train,val,test\n0,{names[0]},{names[2]},{names[3]}\n1,{names[1]},,\n")
    found = split(f"--split-file {clam} --folds 9 --fold 1", "clam")
    assert [found[name] for name in names] == ["train", "train", "val", "test", "", ""]


@pytest.mark.exhaustive
def test_slides_in_dicom_are_trained_on_and_shown_as_their_originals(
    ranks: Ranks, cohort: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "dicom"
    for path in sorted(cohort.glob("slide_*")):
        file = open_slide(path).file
        levels = [image.read(*(Interval(0, side) for side in image.size)) for image, _ in file.levels]
        series(folder / path.name.partition(".")[0], levels, file.mpp)  # type: ignore[arg-type]
    text = (cohort / "slides.csv").read_text()
    (folder / "slides.csv").write_text(re.sub(r"(slide_[0-9]+)[.a-z]+,", r"\1,", text))
    for slides, run in ((cohort, "original"), (folder, "run")):
        ranks(1).run(train, flags_of(slides, tmp_path / run, "--max-steps 1 --eval-every none"))
    assert losses_of(tmp_path / "run") == losses_of(tmp_path / "original")
    ranks(2).run(said, predict, words(tmp_path / "run", "--slides", folder, "--out", tmp_path / "out"))
    shown = read_results(tmp_path / "out").slides
    assert sorted(slide.name for slide in shown) == sorted(path.name for path in folder.iterdir() if path.is_dir())
    assert all(slide.map is not None and SlideReader(shown).thumbnail(n) for n, slide in enumerate(shown))


def test_an_image_size_in_which_a_slide_does_not_fit_is_refused(tmp_path: Path) -> None:
    """Also if another slide has the longest side."""
    for name, size in (("long", (20, 90)), ("high", (70, 60))):
        tifffile.imwrite(tmp_path / f"{name}.tif", np.full((*size, 3), 200, np.uint8), photometric="rgb")
    (tmp_path / "slides.csv").write_text("slide_id,label\nlong,a\nhigh,b\n")
    for fit in ("pad", "own"):
        flags = ["--slides", str(tmp_path / "slides.csv"), "--fit", fit, "--image-size"]
        with pytest.raises(ConfigError, match=r"high\.tif has 70x60 px, more than .*choose 96x96"):
            with_frame(parse([*flags, "64x96"]))
        with_frame(parse([*flags, "70x90"]))
    flags = ["--slides", str(tmp_path / "slides.csv")]
    for more, before in ((["--fit", "crop"], None), ([], "crop")):  # as the run had it that goes on
        with pytest.raises(ConfigError, match="`fit` crop takes windows of `image_size`"):
            with_frame(parse([*flags, *more]), lambda before=before: before)


def test_a_damaged_slide_ends_training_and_not_a_prediction(
    ranks: Ranks, cohort: Path, short_run: Path, tmp_path: Path
) -> None:
    other = Path(shutil.copytree(cohort, tmp_path / "slides"))
    (damaged,) = other.glob("slide_003*")
    damaged.write_bytes(damaged.read_bytes()[: damaged.stat().st_size // 2])
    told = ranks(2).run(said, predict, words(short_run, "--slides", other, "--out", tmp_path / "out"))
    assert "6 slides looked at, 1 of which could not be read" in told[0]
    viewed = {slide.name: slide for slide in read_results(tmp_path / "out").slides}
    assert [name for name, slide in viewed.items() if slide.error] == [damaged.name]
    assert all((slide.map is None) == bool(slide.error) for slide in viewed.values())
    argv = flags_of(other, tmp_path / "again", "--val-fraction 0.2")
    for each in ranks(2).run(refused, train, [*argv, "--tiles", "1x2"]):
        assert "slide_003" in each


def test_a_slide_without_tissue_is_left_out_or_ends_training(ranks: Ranks, cohort: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(cohort, tmp_path / "slides"))
    (blank,) = other.glob("slide_000*")
    white, mpp = np.full((300, 300, 3), 243, np.uint8), (20000, 20000)
    tifffile.imwrite(blank, white, tile=(128, 128), photometric="rgb", resolution=mpp, resolutionunit="CENTIMETER")
    argv = flags_of(other, tmp_path / "run", "--val-fraction 0.2 --tiles 1x2 --epochs 1")
    assert all("shows no tissue" in each for each in ranks(2).run(refused, train, argv))
    argv = flags_of(other, tmp_path / "again", "--val-fraction 0.2 --tiles 1x2 --epochs 1 --on-bad-image skip")
    assert "1 unreadable image skipped" in ranks(2).run(said, train, argv)[0]


def test_evaluation_reads_slides_as_training_did(
    ranks: Ranks, cohort: Path, short_run: Path, predicted: Path, tmp_path: Path
) -> None:
    """Those that validated, and others by a table, at the resolution of training; pictures as they are are refused."""
    found = {each["image"]: each["probabilities"] for each in read_lines(predicted / "predictions.jsonl")}
    for more, count in (("", 2), (f"--slides {cohort / 'slides.csv'} --threshold youden", 6)):
        out = tmp_path / f"of{count}"
        ranks(2).run(evaluate, words(short_run, more, "--out", out, "--resamples 0"))
        rows = read_rows(out / "evaluation.csv")
        assert len(rows) == count
        told = json.loads((out / "evaluation.json").read_text())
        chosen = "on the 2 val slides of the run" in " ".join(told["remarks"])
        assert (len(told["warnings"]), chosen) == ((2, True) if more else (0, False))
        patients = [row["patient"] for row in rows]
        assert [row["patient"] for row in read_rows(out / "patients.csv")] == patients
        assert not more or patients == [f"patient_{n:03}" for n in range(6)]
        viewed = read_results(out).slides
        assert [(slide.path, slide.label) for slide in viewed] == [
            (cohort / row["image"], row["label"]) for row in rows
        ]
        assert {slide.annotation is not None for slide in viewed if slide.label == "tumour"} == {True}
        told["slides"]["in_bounds"] = True  # as nobody's evaluation has signed it: its places are not followed
        (out / "evaluation.json").write_text(json.dumps(told))
        assert {slide.path for slide in read_results(out).slides} == {None}
        for row in rows:
            assert float(row["probability tumour"]) == pytest.approx(found[row["image"]]["tumour"], abs=1e-5)
    for act in (evaluate, predict):
        assert "--slides" in ranks(1).run(refused, act, [str(short_run), "--images", str(cohort)])[0]


def test_all_folds_go_on_and_are_summarised(ranks: Ranks, cohort: Path, tmp_path: Path) -> None:
    """A fold that was trained by itself, as on a cluster, is finished; each patient is predicted by one run."""
    folder = tmp_path / "cv"
    flags = flags_of(cohort, folder, "--max-steps 1 --folds 2 --eval-every none --save-every none --batch-size 1")
    ranks(1).run(said, train, [*flags, "--fold", "1"])
    assert "needs two" in ranks(1).run(refused, evaluate, [str(folder)])[0]
    (told,) = ranks(1).run(said, train, [*flags, "--fold", "all", "--resume", "auto"])
    assert f"fold 1 of 2 is finished: {folder / 'fold_1'}" in told
    assert told.index("fold 0 of 2:") < told.index("fold 1 of 2 is")
    for other in ("--lr 0.5", "--model-options num_filters=6", "--augment flip"):
        (refusal,) = ranks(1).run(refused, train, [*flags, "--fold", "all", "--resume", "auto", *other.split()])
        assert other.split()[0] in refusal
        assert "fold_0 was trained with" in refusal
    (of_train,) = folder.glob("evaluation-*.csv")
    ranks(2).run(said, evaluate, words(folder, "--out", tmp_path / "out", "--resamples 0"))
    found = [read_rows(path) for path in (of_train, tmp_path / "out" / "evaluation.csv")]
    for rows in found:
        assert sorted(row["patient"] for row in rows) == [f"patient_{n:03}" for n in range(6)]
        for row in rows:
            kept = RunSamples.read(folder / f"fold_{row['fold']}" / "samples.csv")
            (line,) = (each for each in kept.samples if each.file == row["image"])
            assert (line.patient, line.label, line.split) == (row["patient"], row["label"], "val")
    assert [float(row["probability tumour"]) for row in found[0]] == pytest.approx(
        [float(row["probability tumour"]) for row in found[1]], abs=1e-5
    )
    places = json.loads((tmp_path / "out" / "evaluation.json").read_text())["slides"]
    assert (Path(places["root"]), {*places["slides"]}) == (cohort, {row["image"] for row in found[0]})
    for row in read_rows(tmp_path / "out" / "cross-validation.csv"):
        values = [float(row[name]) for name in ("fold 0", "fold 1") if row[name]]
        assert not values or float(row["mean"]) == pytest.approx(np.mean(values))
    assert "--resume" in ranks(1).run(refused, train, [*flags, "--fold", "all"])[0]
    assert "youden" in ranks(1).run(refused, evaluate, [str(folder), "--threshold", "youden"])[0]
    kept_elsewhere = (folder / "fold_1" / "samples.csv").rename(tmp_path / "kept.csv")
    (refusal,) = ranks(1).run(refused, train, [*flags, "--fold", "all", "--resume", "auto"])
    assert "is missing, the samples of a finished fold" in refusal
    kept_elsewhere.rename(folder / "fold_1" / "samples.csv")
    config = folder / "fold_1" / "config.toml"
    config.write_text(re.sub(r"\nseed = \d+", "\nseed = 77", config.read_text()))
    assert "seed" in ranks(1).run(refused, evaluate, [str(folder)])[0]


def all_predicted(comm: Communicator, lines: list[list[str]]) -> None:
    """Predict several times in the same processes, which load what draws maps once."""
    for argv in lines:
        said(comm, predict, argv)


def plain_maps(model: nn.Module, image: Tensor) -> tuple[Tensor, Tensor]:
    """HiResCAM of the last feature map, and the mean gradient of squares of 32 px, by plain autograd: (h, w) each."""
    x = image.clone().requires_grad_()
    features = model[:-1](x)  # type: ignore[index]
    logits = model[-1](features)[0]  # type: ignore[index]
    of_features, of_pixels = torch.autograd.grad(logits[1] - logits[0], (features, x))
    return (of_features * features).sum(1)[0].detach(), F.avg_pool2d(of_pixels.abs().sum(1), 32)[0]


def flags_of_whole(cohort: Path, pool: str) -> list[str]:
    own = OWN.replace("num_filters=4", f"num_filters=4,pool={pool}")
    return words("--slides", cohort / "slides.csv", own, "--max-steps 1")


@pytest.fixture(scope="module")
def whole(ranks: Ranks, cohort: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step on whole slides."""
    return run_train(ranks, tmp_path_factory.mktemp("whole") / "run", *flags_of_whole(cohort, "avg"))


WAYS: dict[str, dict[int, tuple[str, ...]]] = {  # of pooling: what is predicted by how many ranks
    "avg": {2: ("--tiles 1x2 --stream 2x3", "--tiles 1x2 --maps gradient --stream 2x1")},
    "max": {
        1: ("--maps activation", "--stream 3x2 --map-class tumour", "--map-layer stage3_block2", "--maps gradient"),
        4: ("--tiles 2x2", "--tiles 2x2 --stream 2x2", "--tiles 2x2 --maps gradient"),
    },
}


@pytest.mark.parametrize("pool", ["avg", pytest.param("max", marks=pytest.mark.exhaustive)])
def test_cells_of_whole_slides_are_those_of_plain_autograd(
    ranks: Ranks, cohort: Path, whole: Path, tmp_path: Path, pool: str
) -> None:
    """Class activation and input gradients, by tiles and by streaming, and in the right places of level 0."""
    flags, table = flags_of_whole(cohort, pool), tmp_path / "two.csv"
    run = whole if pool == "avg" else run_train(ranks, tmp_path / "run", *flags)
    config = with_frame(parse(flags))
    model = build_model(config, 2, 3)
    model.load_state_dict(load_file(run / "model.safetensors"))
    slides = source_of(config).open_files(labelled=False)
    names = [slides.name(index) for index in range(2)]
    assert slides.image(0).downsample != slides.image(1).downsample
    table.write_text("\n".join(("slide", *names)))
    expected = [plain_maps(model.eval(), normalized(shown_whole(slides, index))) for index in range(2)]
    ways = WAYS[pool]
    outs = {more: tmp_path / more.replace(" ", "") for each in ways.values() for more in each}
    common = words(run, "--slides", table, "--slides-folder", cohort)
    for count, each in ways.items():
        ranks(count).run(all_predicted, [words(*common, "--out", outs[more], more) for more in each])
    for more, out in outs.items():
        kind = "gradient" if "gradient" in more else "activation"
        lines = read_lines(out / "predictions.jsonl")
        assert [line["image"] for line in lines] == names
        for line, slide, maps in zip(lines, map(slides.image, range(2)), expected, strict=True):
            plain = maps[kind == "gradient"].numpy()
            rows, cols = (ceil_div(side, 32) for side in slide.size)
            found = tifffile.imread(out / line["maps"][2])
            assert found == pytest.approx(plain[:rows, :cols], rel=1e-4, abs=1e-4 * float(np.abs(plain).max()))
            features = json.loads((out / line["maps"][1]).read_text())["features"]
            values = [each["properties"]["measurements"][f"{kind} tumour"] for each in features]
            kept = np.flatnonzero(found) if found.any() else np.arange(found.size)
            assert values == pytest.approx(found.ravel()[kept].tolist())
            corners = np.array([each["geometry"]["coordinates"][0][0] for each in features])
            places = np.array([*np.ndindex(rows, cols)])[kept, ::-1]
            assert corners == pytest.approx(places * 32 * slide.downsample)
        shown = {slide.name: read_map(slide.map) for slide in read_results(out).slides if slide.map is not None}
        assert [*shown] == names
        assert {each["title"] for each in shown.values()} == {f"{kind} tumour"}


WRONG_MAPS = {
    "--maps attention": "whole slides",
    "--map-layer stem --stream 2x2": "it is streamed",
    "--map-class what": "what",
    "--map-layer what": "head.linear",
    "--maps activation --data 2 --tiles 1x1": "replicas",
}


@pytest.mark.parametrize("more", WRONG_MAPS)
def test_which_maps_are_refused(ranks: Ranks, whole: Path, cohort: Path, tmp_path: Path, more: str) -> None:
    argv = words(whole, "--slides", cohort / "slides.csv", "--out", tmp_path / "out", more)
    for told in ranks(2 if "data" in more else 1).run(refused, predict, argv):
        assert WRONG_MAPS[more] in told
