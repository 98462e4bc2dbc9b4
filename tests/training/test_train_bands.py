"""Rasters of several bands: every plan trains as plain PyTorch, by numbers measured over the training images alone."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import tifffile
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpi4dl
from mpi4dl import models
from mpi4dl.comm import Communicator
from mpi4dl.options.config import parse
from tests.datasets.test_bands import TILED, raster, write
from tests.pool.ranks import Ranks
from tests.support.commands import assert_plain, losses_of, made_whole, read_rows, run_train, words
from tests.support.tiny import IN_FLOAT64, in_float64

COMMON = (
    "--image-size 32 --batch-size 2 --num-workers 0 --epochs 1 --fit crop --eval-every none --log-interval 1 --lr 0.02 "
    "--optimizer SGD --optimizer-options momentum=0 --lr-schedule constant --mean measured --flip all --images"
)
UNET: dict[str, int] = {"num_filters": 4, "depth": 2}
OUTPUTS = {"classify": 2, "segment": 3, "image": 4}
MODELS = {"classify": ("resnet_v1", {"num_filters": 4, "depth": 8}), "segment": ("unet", UNET), "image": ("unet", UNET)}


def raster_of(number: int, bands: int = 6) -> Any:
    """One with a stripe without data."""
    values = raster("int16", bands, number) // 2 + 100 * number
    values[number : number + 4, :, 2] = -9999
    return values


def write_rasters(root: Path, task: str) -> Path:
    """6 rasters to train on and 2 to validate with, each with a class, a mask, or a raster of 4 bands."""
    for number in range(8):
        part, name = root / ("train" if number < 6 else "val"), f"{number}.tif"
        folder = {"classify": "ab"[number % 2], "segment": "images", "image": "inputs"}[task]
        write(part / folder / name, raster_of(number), no_data="-9999", planar=number % 2 == 0, **TILED)
        if task == "segment":
            (part / "masks").mkdir(exist_ok=True)
            mask = np.random.default_rng(number).integers(0, 3, (41, 53), np.uint8)
            PIL.Image.fromarray(mask).save(part / "masks" / f"{number}.png")
        elif task == "image":
            write(part / "targets" / name, raster("int16", 4, number))
    return root


def measured() -> tuple[tuple[float, ...], tuple[float, ...]]:
    known = np.ma.masked_equal(np.concatenate([raster_of(number) for number in range(6)]), -9999)
    shares = (known / 32767).astype(np.float32).astype(np.float64)
    return tuple(shares.mean((0, 1)).tolist()), tuple(shares.std((0, 1)).tolist())


def plain_model(task: str, channels: int = 6) -> nn.Module:
    name, options = MODELS[task]
    return models.build(name, OUTPUTS[task], in_channels=channels, **options)


def flags_of(root: Path, task: str) -> list[str]:
    name, options = MODELS[task]
    said = ",".join(f"{option}={value}" for option, value in options.items())
    return words("--model", name, "--model-options", said, COMMON, write_rasters(root, task))


PLANS = ["--tiles 1x2", "--tiles 2x2", "--tiles 1x2 --data 2 --zero 2", "--tiles 2x1,1x1 --stages 2"]


@pytest.mark.parametrize("task", MODELS)
@pytest.mark.parametrize("plan", [*PLANS, "--tiles 1x2 --stream 2x2"])
@pytest.mark.sample(2)
def test_training_by_every_plan(ranks: Ranks, tmp_path: Path, plan: str, task: str) -> None:
    flags = flags_of(tmp_path / "rasters", task)
    name, options = MODELS[task]
    said = ",".join(f"{option}={value}" for option, value in {"name": name, **options}.items())
    run = run_train(ranks, tmp_path / "run", *flags, "--model", IN_FLOAT64, "--model-options", said, plan)
    loss, (mean, std) = F.l1_loss if task == "image" else F.cross_entropy, measured()
    build = partial(in_float64, OUTPUTS[task], name=name, **options)
    assert_plain(run, flags, build, loss, mean=mean, std=std)


def test_a_run_goes_on_with_its_numbers(ranks: Ranks, tmp_path: Path) -> None:
    """Those of its training images when it began, also where there are more now."""
    flags, run = [*flags_of(tmp_path / "rasters", "classify"), "--resume", "auto"], tmp_path / "run"
    run_train(ranks, run, *flags, "--tiles 1x2 --max-steps 3 --save-every 3")
    numbers = parse(["--config", str(run / "config.toml")]).data
    assert numbers.mean == pytest.approx(measured()[0], rel=1e-9)
    assert numbers.std == pytest.approx(measured()[1], rel=1e-9)
    write(tmp_path / "rasters" / "train" / "a" / "more.tif", raster("int16"))
    run_train(ranks, run, *flags, "--tiles 2x1 --max-steps 6 --epochs 2")
    assert parse(["--config", str(run / "config.toml")]).data == numbers
    assert len(losses_of(run)) == 6
    (said,) = (run / "log-rank0.txt").read_text().split("--mean is that of the start: ")[1:]
    assert said.startswith(f"{numbers.mean[0]!r},")


def use(comm: Communicator, run: Path, images: Path, out: Path) -> list[str]:
    """A body: predict; what is wrong with any."""
    found = [*mpi4dl.TrainedModel(run, comm=comm, tiles="1x2").predict(images, out)]
    return [record["error"] for record in found if "error" in record]


def made_by(run: Path, number: int) -> Tensor:
    """What the plain model makes of a whole raster: (bands, H, W)."""
    values, (mean, std) = raster_of(number), (torch.tensor(each) for each in measured())
    x = torch.from_numpy((values / 32767).astype(np.float32))
    x = torch.where(torch.from_numpy(values == -9999), mean, x).permute(2, 0, 1)
    return made_whole(plain_model("image"), x, run, by=(mean[:, None, None], std[:, None, None]))


def test_rasters_are_made_of_rasters(ranks: Ranks, tmp_path: Path) -> None:
    """The files of predictions have the bands and the type of targets."""
    root = tmp_path / "rasters"
    flags = flags_of(root, "image")
    run = run_train(ranks, tmp_path / "run", *flags, "--max-steps 3")
    assert all(found == [] for found in ranks(2).run(use, run, root / "val" / "inputs", tmp_path / "out"))
    rows = read_rows(tmp_path / "out" / "predictions.csv")
    assert len(rows) == 2
    for row in rows:
        found = tifffile.imread(tmp_path / "out" / row["prediction"])
        assert (found.shape, found.dtype) == ((41, 53, 4), np.int16)
        made = made_by(run, int(Path(row["image"]).stem)).permute(1, 2, 0).numpy()
        assert np.abs(found - np.rint(made.clip(-1, 1) * 32767.0)).max() <= 1


def test_other_images_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    flags = flags_of(tmp_path / "rasters", "classify")
    run = run_train(ranks, tmp_path / "run", *flags, "--max-steps 1")
    write(tmp_path / "five" / "a.tif", raster("int16", 5))
    write(tmp_path / "unsigned" / "a.tif", raster("uint16"))
    assert all(found == [] for found in ranks(2).run(use, run, tmp_path / "rasters" / "val", tmp_path / "out"))
    for folder, message in (
        ("five", "the images have 5 channels, but the model was trained on 6"),
        ("unsigned", "images have 16 bits, but training had 16 bits with a sign"),
    ):
        with pytest.raises(Exception, match=message):
            ranks(2).run(use, run, tmp_path / folder, tmp_path / "out")


def test_a_channel_of_one_value_has_no_deviation(ranks: Ranks, tmp_path: Path) -> None:
    flags = flags_of(tmp_path / "rasters", "classify")
    for path in (tmp_path / "rasters").glob("*/*/*.tif"):
        values = raster_of(int(path.stem))
        values[..., 4] = 7
        write(path, values)
    with pytest.raises(Exception, match="channel 5 has one value in all training images"):
        run_train(ranks, tmp_path / "run", *flags, "--tiles 1x2")
    run_train(ranks, tmp_path / "run", *flags, "--tiles 1x2 --max-steps 1 --channels 4,3,2,6,1,3")
