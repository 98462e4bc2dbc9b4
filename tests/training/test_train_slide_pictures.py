"""Slides of one stain out of slides of another: training, pictures and metrics are those of plain PyTorch."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from skimage import metrics
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl import models
from mpi4dl.datasets.slides.slide import Resolution, open_slide
from mpi4dl.evaluate import evaluate
from mpi4dl.geometry import Interval
from mpi4dl.inference import class_maps
from mpi4dl.options.config import parse
from mpi4dl.options.sources import source_of
from mpi4dl.predict import predict
from mpi4dl.train import train
from mpi4dl.viewer.reading import SlideReader
from mpi4dl.viewer.results import read_results
from tests.pool.ranks import Ranks
from tests.support.commands import losses_of, made_whole, plain_losses, read_rows, refused, run_train, said, words
from tests.support.short_runs import write_mixed_cohort

MPP = 2.0
COMMON = (
    f"--task image --mpp {MPP} --model unet --model-options num_filters=4,depth=2 --num-workers 0 --optimizer SGD "
    "--lr 0.02 --lr-schedule constant --epochs 2 --no-tensorboard --val-fraction 0.25 --eval-every none "
    "--log-interval 1"
)
CROPS = "--fit crop --image-size 64 --crops-each 2 --batch-size 2 --flip all --rotate quarter"
OPTIONS = {"gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False, "data_range": 1}


@pytest.fixture(scope="module")
def cohort(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Slides of several sizes, formats and magnifications, each with a slide of other colours, which says less."""
    folder = write_mixed_cohort(tmp_path_factory.mktemp("cohort"), 4)
    lines = ["slide,target,patient"]
    (folder / "stained").mkdir()
    for number, path in enumerate(sorted(path for path in folder.iterdir() if path.suffix in (".tif", ".svs"))):
        slide = open_slide(path)
        whole = slide.read(*(Interval(0, side) for side in slide.size))
        about = {"axes": "YXS", "PhysicalSizeX": slide.file.mpp, "PhysicalSizeY": slide.file.mpp}
        name = f"stained/{path.name.partition('.')[0]}" + (".ome.tif" if number % 2 else ".tif")
        ome = name.endswith(".ome.tif")
        how: dict[str, Any] = {"ome": True, "metadata": about} if ome else {}
        tifffile.imwrite(folder / name, 255 - whole[..., ::-1] // 2, tile=(128, 128), photometric="rgb", **how)
        lines.append(f"{path.name},{name},p{number}")
    (folder / "stains.csv").write_text("\n".join(lines) + "\n")
    return folder


def flags_of(cohort: Path, more: str = "") -> list[str]:
    return words("--slides", cohort / "stains.csv", COMMON, more)


def plain_model(channels: int = 3) -> nn.Module:
    return models.build("unet", 3, in_channels=channels, num_filters=4, depth=2)


@pytest.mark.parametrize(
    ("more", "plan"),
    [
        (CROPS, "--tiles 1x2 --data 2 --zero 2"),
        pytest.param(CROPS, "--tiles 2x2", marks=pytest.mark.exhaustive),
        pytest.param(CROPS, "--tiles 1x2,1x1 --stages 2", marks=pytest.mark.exhaustive),
        pytest.param("--batch-size 1 --flip all", "--tiles 1x2", marks=pytest.mark.exhaustive),
        ("--batch-size 1 --flip all", "--tiles 1x2 --stream 2x2"),
    ],
)
def test_training_on_windows_and_on_whole_slides(
    ranks: Ranks, cohort: Path, tmp_path: Path, more: str, plan: str
) -> None:
    flags = flags_of(cohort, more)
    run = run_train(ranks, tmp_path / "run", *flags, plan)
    assert losses_of(run) == pytest.approx(plain_losses([*flags, *words(plan)], plain_model, F.l1_loss), rel=1e-4)


def reference(run: Path, path: Path, target: Path) -> tuple[Tensor, Tensor]:
    """What the plain model makes of a whole slide; and the target."""
    slide = open_slide(path, Resolution(mpp=MPP))
    stained = open_slide(target, Resolution(mpp=MPP, assumed_mpp=slide.file.mpp))
    x, y = (
        torch.from_numpy(each.read(*(Interval(0, side) for side in each.size)).astype(np.float32)).permute(2, 0, 1)
        for each in (slide, stained)
    )
    return made_whole(plain_model(), x / 255, run), y / 255


@pytest.mark.parametrize("plan", [{"tiles": "1x2"}, {"tiles": "1x2", "stream": "2x2"}])
@pytest.mark.sample(1)
def test_pictures_of_slides_and_their_metrics(
    ranks: Ranks, cohort: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: dict[str, str]
) -> None:
    """Trained on windows, the model sees each slide whole; its pictures are pyramids of the model's resolution."""
    run, out = tmp_path / "run", tmp_path / "out"
    run_train(ranks, run, *flags_of(cohort, f"{CROPS} --max-steps 3"), "--tiles 1x2")
    chosen = [word for name, value in plan.items() for word in (f"--{name}", value)]
    asked = words(run, "--slides", cohort / "stains.csv", "--out", out)
    told = ranks(2).run(said, predict, [*asked, *chosen])[0]
    assert "4 slides looked at" in told
    ranks(2).run(evaluate, [*asked, *chosen, "--resamples", "10"])
    judged = {row["image"]: row for row in read_rows(out / "evaluation.csv")}
    stems = {line.split(",")[0]: line.split(",")[1] for line in (cohort / "stains.csv").read_text().split()[1:]}
    for row in read_rows(out / "predictions.csv"):
        made, target = reference(run, cohort / row["image"], cohort / stems[row["image"]])
        found = tifffile.imread(out / row["prediction"])
        stored = np.rint(made.permute(1, 2, 0).numpy().clip(0, 1) * np.float64(255))
        assert found.shape == stored.shape
        assert found.dtype == np.uint8
        assert np.abs(found - stored).max() <= 1
        opened = open_slide(out / row["prediction"])
        assert opened.file.mpp == pytest.approx(MPP)
        x, y = made.double().numpy(), target.double().numpy()
        scores = judged[row["image"]]
        assert float(scores["psnr"]) == pytest.approx(metrics.peak_signal_noise_ratio(y, x, data_range=1), rel=1e-5)
        similar = metrics.structural_similarity(y, x, channel_axis=0, **OPTIONS)
        assert float(scores["ssim"]) == pytest.approx(similar, rel=1e-4, abs=1e-6)
        assert scores["patient"].startswith("p")
    shown = SlideReader(read_results(out).slides)
    for number, other in shown.made.items():
        assert shown.tile(number, 0, 0, 0)
        assert shown.tile(other, 0, 0, 0)
        assert shown.facts(other)["mpp"] == pytest.approx(MPP)
    assert len(shown.made) == 4


def test_levels_of_a_pyramid_are_means(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(class_maps, "SMALLEST_LEVEL", 16)
    monkeypatch.setattr(class_maps, "TILE", 16)
    pixels = np.random.default_rng(0).integers(0, 256, (75, 41, 3), dtype=np.uint8)
    tifffile.imwrite(tmp_path / "slide.tif", pixels, photometric="rgb")
    slide = open_slide(tmp_path / "slide.tif")
    class_maps.write_picture(slide, ["red", "green", "blue"], tmp_path / "made.ome.tif", pixels)
    levels = open_slide(tmp_path / "made.ome.tif").file.levels
    assert [level.image.size for level in levels] == [(75, 41), (38, 21), (19, 11)]
    level = pixels
    for each in levels:
        assert np.array_equal(each.image.read(*(Interval(0, side) for side in each.image.size)), level)
        level = np.pad(level, ((0, len(level) % 2), (0, level.shape[1] % 2), (0, 0)), mode="edge").astype(int)
        level = (level[::2, ::2] + level[1::2, ::2] + level[::2, 1::2] + level[1::2, 1::2] + 2) // 4
    assert len([*tmp_path.iterdir()]) == 2


def test_slides_may_be_targets_of_each_other_and_of_themselves(cohort: Path, tmp_path: Path) -> None:
    rows = [line.split(",") for line in (cohort / "stains.csv").read_text().split()[1:]]
    (one, made, _), (other, *_) = (row for row in rows if row[1].endswith(".ome.tif"))
    table = tmp_path / "both.csv"
    table.write_text(f"slide,target,patient\n{one},{made},p0\n{made},{one},p0\n{other},{other},p1\n")
    config = parse(words("--slides", table, "--slides-folder", cohort, COMMON, CROPS))
    whole: Any = source_of(config).open()[0].whole
    assert [whole.path(index) for index in range(3)] == [cohort / name for name in (one, made, other)]
    assert all(whole.label(index).size == whole.image(index).size for index in range(3))
    assert "split by patient" in whole.remarks


def test_wrong_targets_are_named(ranks: Ranks, cohort: Path, tmp_path: Path) -> None:
    """A slide without a target, one that is not there, another size, and options that need classes."""
    lines = (cohort / "stains.csv").read_text().splitlines()
    flags = words(COMMON, CROPS, "--slides-folder", cohort, "--run-folder", tmp_path / "run", "--slides")
    for number, (line, expected) in enumerate(
        [
            (lines[1].replace(lines[1].split(",")[1], ""), "has no target: name one, or leave the line out"),
            (lines[1].replace("stained/", "stained/none"), "is not there: correct its name"),
        ]
    ):
        table = tmp_path / f"{number}.csv"
        table.write_text("\n".join([lines[0], line, *lines[2:]]))
        told = ranks(1).run(refused, train, [*flags, str(table)])
        assert all(expected in each for each in told), told
    swapped = [line.split(",") for line in lines[1:3]]
    swapped[0][1], swapped[1][1] = swapped[1][1], swapped[0][1]
    table = tmp_path / "swapped.csv"
    table.write_text("\n".join([lines[0], *map(",".join, swapped), *lines[3:]]))
    told = ranks(1).run(refused, train, [*flags, str(table), "--slides-folder", str(cohort)])[0]
    assert "at this resolution: register targets" in told
    for more, expected in {
        "--crops-on-classes 0.5": "--task image has no classes: leave out --crops-on-classes",
        "--loss l1+ms_ssim": "--loss ms_ssim compares pictures (N, channels, height, width) of 176 px or more",
        "--fit pad --image-size auto": "--crops-each is for windows of slides: say --fit crop, and --task",
    }.items():
        told = ranks(1).run(refused, train, [*flags, str(cohort / "stains.csv"), *words(more)])[0]
        assert expected in told
    flags = words(COMMON, CROPS, "--run-folder", tmp_path / "run", "--slides", cohort)
    assert "image needs a table of targets" in ranks(1).run(refused, train, flags)[0]
