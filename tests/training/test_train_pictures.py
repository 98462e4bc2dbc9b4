"""Images out of images: every plan trains as plain PyTorch, and makes and judges the pictures that it does."""

import json
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import tifffile
import torch
from skimage import metrics
from torch import Tensor, nn
from torch.nn import functional as F

import mpi4dl
from mpi4dl import models
from mpi4dl._torchvision import import_torchvision
from mpi4dl.comm import Communicator
from mpi4dl.datasets.files import open_stored_picture
from mpi4dl.datasets.masks import open_stored
from mpi4dl.geometry import Interval
from mpi4dl.inference import pictures
from mpi4dl.inference.masks import MappedFile
from mpi4dl.parallel.pipeline.split import outline
from mpi4dl.results import open as open_results
from tests.datasets.test_pairs import picture, write
from tests.pool.ranks import Ranks, RanksFailed
from tests.support.commands import assert_plain, losses_of, made_whole, plain_losses, read_rows, run_train, words
from tests.support.tiny import IN_FLOAT64, in_float64

COMMON = (
    "--model unet --model-options num_filters=4,depth=2 --image-size 32x48 --batch-size 2 --num-workers 0 --epochs 1 "
    "--eval-every none --log-interval 1 --lr 0.02 --optimizer SGD --lr-schedule constant --flip all --images"
)
OPTIONS = {"gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False, "data_range": 1}


def write_pairs(root: Path, depth: str) -> Path:
    """8 pairs of different sizes: grey of 16 bits, and a target in colours."""
    for number in range(8):
        size = (40 + 3 * number, 61 - 2 * number)
        write(root / "inputs" / f"p{number}.png", picture("uint16", 1, size, number))
        suffix = ".png" if depth == "uint8" else ".tif"
        write(root / "targets" / f"p{number}{suffix}", picture(depth, 3, size, number))
    return root


def plain_model(channels: int = 1) -> nn.Module:
    return models.build("unet", 3, in_channels=channels, num_filters=4, depth=2)


PLANS = ["--tiles 1x2", "--tiles 2x2", "--tiles 1x2 --data 2 --zero 2", "--tiles 2x1,1x1 --stages 2"]


@pytest.mark.parametrize("plan", [*PLANS, "--tiles 1x2 --stream 2x2"])
@pytest.mark.sample(2)
def test_training_by_every_plan(ranks: Ranks, tmp_path: Path, plan: str) -> None:
    flags = words(COMMON, write_pairs(tmp_path / "pairs", "float32"))
    wide = "--model", IN_FLOAT64, "--model-options name=unet,num_filters=4,depth=2"
    run = run_train(ranks, tmp_path / "run", *flags, *wide, plan)
    build = partial(in_float64, 3, name="unet", num_filters=4, depth=2)
    assert_plain(run, flags, build, F.l1_loss, "crop")


def test_a_run_goes_on_on_other_tiles(ranks: Ranks, tmp_path: Path) -> None:
    flags, run = words(COMMON, write_pairs(tmp_path / "pairs", "uint8"), "--resume auto"), tmp_path / "run"
    run_train(ranks, run, *flags, "--tiles 1x2 --max-steps 2 --save-every 2")
    run_train(ranks, run, *flags, "--tiles 2x1")
    expected = plain_losses([*flags, "--run-folder", str(run)], plain_model, F.l1_loss, "crop")
    assert losses_of(run) == pytest.approx(expected, rel=1e-4)


def use(
    comm: Communicator,
    run: Path,
    pairs: Path,
    out: Path,
    plan: dict[str, str],
    seams: str | None = None,
    lpips: str | None = None,
) -> list[str]:
    """A body: predict of the inputs, evaluate on the pairs; what is wrong with any."""
    model = mpi4dl.TrainedModel(run, comm=comm, **plan)
    found = [*model.predict((pairs if pairs.is_dir() else pairs.parent) / "inputs", out)]
    model.evaluate(pairs, out, resamples=10, seams=seams, lpips=lpips)
    return [record["error"] for record in found if "error" in record]


def reference(run: Path, pairs: Path, name: str) -> tuple[Tensor, Tensor]:
    """What the plain model makes of a whole image; and the target."""
    values = np.asarray(PIL.Image.open(pairs / "inputs" / f"{name}.png")) / 65535
    made = made_whole(plain_model(), torch.from_numpy(values.astype(np.float32))[None], run)
    path = next((pairs / "targets").glob(f"{name}.*"))
    target = tifffile.imread(path) if path.suffix == ".tif" else np.asarray(PIL.Image.open(path))
    top = 1 if target.dtype == np.float32 else np.iinfo(target.dtype).max
    return made, torch.from_numpy((target / top).astype(np.float32)).permute(2, 0, 1)


@pytest.mark.parametrize(
    ("depth", "plan"),
    [
        pytest.param("uint8", {"tiles": "2x2"}, marks=pytest.mark.exhaustive),
        ("uint8", {"tiles": "1x2", "data": "2"}),
        ("uint16", {"tiles": "1x2", "stages": "2"}),
        ("float32", {"tiles": "1x2", "stream": "2x2"}),
    ],
)
def test_pictures_and_their_metrics_are_those_of_whole_images(
    ranks: Ranks, tmp_path: Path, depth: str, plan: dict[str, str]
) -> None:
    """Sizes differ, so that no tile is like another; pictures have the size and the depth of targets."""
    pairs, out = write_pairs(tmp_path / "pairs", depth), tmp_path / "out"
    run = run_train(ranks, tmp_path / "run", COMMON, pairs, "--max-steps 2")
    count = (4 if plan["tiles"] == "2x2" else 2) * int(plan.get("stages", 1)) * int(plan.get("data", 1))
    assert all(found == [] for found in ranks(count).run(use, run, pairs, out, plan))
    rows = {row["image"]: row for row in read_rows(out / "evaluation.csv")}
    assert len(rows) == 8
    for row in read_rows(out / "predictions.csv"):
        name = Path(row["image"]).stem
        made, target = reference(run, pairs, name)
        file = out / row["prediction"]
        found = np.asarray(PIL.Image.open(file)) if file.suffix == ".png" else tifffile.imread(file)
        assert found.dtype == depth
        stored = made.permute(1, 2, 0).numpy()
        if depth == "float32":
            assert np.allclose(found, stored, rtol=0, atol=1e-5)
        else:
            top = np.iinfo(depth).max
            assert found.shape == stored.shape
            assert np.abs(found - np.rint(stored.clip(0, 1) * np.float64(top))).max() <= max(1, top * 1e-5)
        judged = rows[f"inputs/p{name[1:]}.png"]
        x, y = made.double().numpy(), target.double().numpy()
        assert float(judged["psnr"]) == pytest.approx(metrics.peak_signal_noise_ratio(y, x, data_range=1), rel=1e-5)
        similar = metrics.structural_similarity(y, x, channel_axis=0, **OPTIONS)
        assert float(judged["ssim"]) == pytest.approx(similar, rel=1e-4, abs=1e-6)
        assert float(judged["mae"]) == pytest.approx(np.abs(x - y).mean(), rel=1e-5)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_pictures_in_16_bits(ranks: Ranks, tmp_path: Path, precision: str) -> None:
    pairs, out = write_pairs(tmp_path / "pairs", "uint16"), tmp_path / "out"
    run = run_train(ranks, tmp_path / "run", COMMON, pairs, "--max-steps 2")
    assert ranks(2).run(use, run, pairs, out, {"tiles": "1x2", "precision": precision}) == [[], []]
    for row in read_rows(out / "predictions.csv"):
        made, _ = reference(run, pairs, Path(row["image"]).stem)
        found = tifffile.imread(out / row["prediction"])
        assert np.abs(found / 65535 - made.clip(0, 1).permute(1, 2, 0).numpy()).max() < 0.1


@pytest.mark.parametrize(("name", "kind"), [("alexnet", "alex"), ("squeezenet1_1", "squeeze"), ("vgg16", "vgg")])
@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore:.*pretrained", "ignore:Arguments other than a weight enum")
def test_the_perceptual_distance_is_that_of_lpips(ranks: Ranks, tmp_path: Path, name: str, kind: str) -> None:
    pairs, file = write_pairs(tmp_path / "pairs", "uint16"), tmp_path / "weights.pth"
    run = run_train(ranks, tmp_path / "run", COMMON, pairs, "--max-steps 1")
    own = getattr(import_torchvision().models, name)().features.state_dict()
    torch.save({f"features.{key}": value for key, value in own.items()}, file)
    plain = import_module("lpips").LPIPS(net=kind, pnet_rand=True, verbose=False)
    plain.net.load_state_dict({key: own[key.partition(".")[2]] for key in plain.net.state_dict()})
    ranks(2).run(use, run, pairs, tmp_path / "out", {"tiles": "1x2"}, None, str(file))
    rows = read_rows(tmp_path / "out" / "evaluation.csv")
    assert len(rows) == 8
    for row in rows:
        made, target = reference(run, pairs, Path(row["image"]).stem)
        with torch.no_grad():
            expected = float(plain(made[None], target[None], normalize=True))
        assert float(row["lpips"]) == pytest.approx(expected, rel=1e-4)
    torch.save({"features.0.weight": torch.ones(64, 3, 7, 7)}, file)
    with pytest.raises(RanksFailed, match="has not the weights of torchvision's alexnet"):
        ranks(2).run(use, run, pairs, tmp_path / "out", {"tiles": "1x2"}, None, str(file))


def test_patients_have_the_mean_of_their_images(ranks: Ranks, tmp_path: Path) -> None:
    pairs, patients = write_pairs(tmp_path / "pairs", "uint8"), "aabbbbcc"
    rows = [f"inputs/p{i}.png,targets/p{i}.png,{patient}" for i, patient in enumerate(patients)]
    (pairs / "pairs.csv").write_text("\n".join(["image,target,patient", *rows]))
    run = run_train(ranks, tmp_path / "run", COMMON, pairs, "--max-steps 1")
    ranks(2).run(use, run, pairs / "pairs.csv", tmp_path / "out", {"tiles": "1x2"})
    images, found = (read_rows(tmp_path / "out" / name) for name in ("evaluation.csv", "patients.csv"))
    assert [(row["patient"], row["slides"]) for row in found] == [("a", "2"), ("b", "4"), ("c", "2")]
    told = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    for name in ("psnr", "ssim", "mae"):
        means = [np.mean([float(row[name]) for row in images if row["patient"] == each["patient"]]) for each in found]
        assert [float(each[name]) for each in found] == pytest.approx(means)
        assert told["patients"]["metrics"][name]["value"] == pytest.approx(np.mean(means))


def test_a_target_of_another_size_is_a_record_with_an_error(ranks: Ranks, tmp_path: Path) -> None:
    pairs = write_pairs(tmp_path / "pairs", "uint8")
    run = run_train(ranks, tmp_path / "run", COMMON, pairs, "--max-steps 1")
    write(pairs / "targets" / "p4.png", picture("uint8", 3, (9, 9)))
    for number in range(20):  # so that p4 is not among those that are looked at
        write(pairs / "inputs" / f"a{number}.png", picture("uint16", 1, (33, 33), number))
        write(pairs / "targets" / f"a{number}.png", picture("uint8", 3, (33, 33), number))
    ranks(2).run(use, run, pairs, tmp_path / "out", {"tiles": "1x2"})
    rows = {Path(row["image"]).stem: row for row in read_rows(tmp_path / "out" / "evaluation.csv")}
    wrong = [name for name, row in rows.items() if row["error"]]
    assert wrong == ["p4"]
    assert "9 x 9 pixels, but its input" in rows["p4"]["error"]
    write(tmp_path / "others" / "inputs" / "b.png", picture("uint8", 1, (33, 33)))
    write(tmp_path / "others" / "targets" / "b.png", picture("uint8", 3, (33, 33)))
    with pytest.raises(RanksFailed, match="inputs have 8 bits, but training had 16 bits"):
        ranks(1).run(use, run, tmp_path / "others", tmp_path / "others_out", {})
    lines = (tmp_path / "others_out" / "predictions.jsonl").read_text()
    assert "has 8 bits, but other inputs have 16 bits" in lines
    assert open_results(run) is not None


def seams_of(image: Tensor, side: int, overlap: int, scale: int = 1) -> float:
    """The steps of an image across the borders of tiles over those beside them, line by line."""
    across, beside = [], []
    for axis in (1, 2):
        length = image.shape[axis]
        ends = {scale * k for start in starts(length // scale, side, overlap) for k in (start, start + side)}
        borders = {k for k in ends if 0 < k < length}
        for k in range(1, length):
            step = (image.select(axis, k) - image.select(axis, k - 1)).double().abs().flatten()
            if k in borders:
                across.append(step)
            elif {k - 1, k + 1} & borders:
                beside.append(step)
    return float(torch.cat(across).mean() / torch.cat(beside).mean())


def starts(length: int, side: int, overlap: int) -> list[int]:
    return [*range(0, length - side, side - overlap), length - side]


def in_tiles(make: Callable[[Tensor], Tensor], x: Tensor, side: int, overlap: int) -> Tensor:
    """An image (channels, H, W) made in tiles, each alone, with their mean where they overlap."""
    sums, covers = torch.zeros(3, *x.shape[1:]), torch.zeros(x.shape[1:])
    for row in starts(x.shape[1], side, overlap):
        for col in starts(x.shape[2], side, overlap):
            where = np.s_[..., row : row + side, col : col + side]
            sums[where] += make(x[where])
            covers[where] += 1
    return sums / covers


def test_seams_of_tiles_that_are_made_alone(ranks: Ranks, tmp_path: Path) -> None:
    pairs, out = tmp_path / "pairs", tmp_path / "out"
    for number, size in enumerate([(64, 96), (70, 101), (32, 75), (20, 30)]):
        write(pairs / "inputs" / f"p{number}.tif", picture("float32", 1, size, number))
        write(pairs / "targets" / f"p{number}.tif", picture("float32", 3, size, number))
    options = "norm=instance,num_filters=4,depth=2"
    run = run_train(ranks, tmp_path / "run", COMMON, pairs, f"--model-options {options} --val-fraction 0.5")
    model = models.build("unet", 3, in_channels=1, num_filters=4, depth=2, norm="instance")
    for overlap, plan in ((0, {"tiles": "1x2"}), (8, {"data": "2"})):
        ranks(2).run(use, run, pairs, out, plan, f"32,{overlap}" if overlap else "32")
        rows = {Path(row["image"]).stem: row for row in read_rows(out / "evaluation.csv")}
        for name in ("p0", "p1", "p2"):
            x = torch.from_numpy(tifffile.imread(pairs / f"inputs/{name}.tif"))[None]
            target = torch.from_numpy(tifffile.imread(pairs / f"targets/{name}.tif")).permute(2, 0, 1)
            whole, tiled = made_whole(model, x, run), in_tiles(partial(made_whole, model), x, 32, overlap)
            expected = [seams_of(each, 32, overlap) for each in (whole, tiled, target)]
            found = [float(rows[name][column]) for column in ("seams", "seams_tiled", "seams_target")]
            assert found == pytest.approx(expected, rel=1e-4)
            psnr = metrics.peak_signal_noise_ratio(target.numpy(), tiled.numpy(), data_range=1)
            assert float(rows[name]["psnr_tiled"]) == pytest.approx(psnr, rel=1e-4)
            assert abs(expected[1] - expected[0]) > 0.01
        assert rows["p3"]["psnr_tiled"] == rows["p3"]["psnr"]  # of one tile


UPSCALE = """from torch import nn

def build(num_classes, in_channels, scale=2):
    return nn.Sequential(
        nn.Conv2d(in_channels, 16, 5, padding=2), nn.ReLU(), nn.Conv2d(16, num_classes * scale**2, 3, padding=1),
        nn.PixelShuffle(scale),
    )
"""


def test_pictures_larger_than_their_inputs(ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training by replicas of tiles, pictures and their metrics by tiles, are those of plain PyTorch at 2 times."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "upscale.py").write_text(UPSCALE)
    for number in range(6):
        size = (40 + 3 * number, 61 - 2 * number)
        write(tmp_path / "pairs" / "inputs" / f"p{number}.tif", picture("float32", 1, size, number))
        larger = picture("float32", 3, (2 * size[0], 2 * size[1]), number)
        write(tmp_path / "pairs" / "targets" / f"p{number}.tif", larger)
    flags = words(
        COMMON, tmp_path / "pairs", f"--model {tmp_path}/upscale.py:build --model-options scale=2 --rotate quarter",
        "--image-size 32",
    )  # fmt: skip
    run, out = run_train(ranks, tmp_path / "run", *flags, "--tiles 1x2 --data 2"), tmp_path / "out"
    builder: dict[str, Any] = {}
    exec(UPSCALE, builder)
    found: list[nn.Module] = []

    def build(channels: int) -> nn.Module:
        found.append(builder["build"](3, channels))
        return found[0]

    assert losses_of(run) == pytest.approx(plain_losses(flags, build, F.l1_loss, "crop"), rel=1e-4)
    (model,) = found
    assert ranks(2).run(use, run, tmp_path / "pairs", out, {"tiles": "1x2"}, "32") == [[], []]
    rows = {Path(row["image"]).stem: row for row in read_rows(out / "evaluation.csv")}
    with PIL.Image.open(out / "examples.jpg") as shown:
        assert shown.size == (3 * 2 * 61 + 2 * 8, sum(2 * (40 + 3 * number) + 8 for number in range(4)))
    for row in read_rows(out / "predictions.csv"):
        name = Path(row["image"]).stem
        x = torch.from_numpy(tifffile.imread(tmp_path / f"pairs/inputs/{name}.tif"))[None]
        target = torch.from_numpy(tifffile.imread(tmp_path / f"pairs/targets/{name}.tif")).permute(2, 0, 1)
        made = made_whole(model, x)
        assert np.allclose(tifffile.imread(out / row["prediction"]), made.permute(1, 2, 0), rtol=0, atol=1e-5)
        psnr = metrics.peak_signal_noise_ratio(target.numpy(), made.numpy(), data_range=1)
        assert float(rows[name]["psnr"]) == pytest.approx(psnr, rel=1e-5)
        assert float(rows[name]["seams"]) == pytest.approx(seams_of(made, 32, 0, 2), rel=1e-4)


class OfMultiples(nn.Sequential):
    """A model of images whose sides are multiples of 4 px."""

    def __init__(self, num_classes: int, in_channels: int) -> None:
        inner = nn.Conv2d(16 * in_channels, 16 * num_classes, 3, padding=1)
        super().__init__(nn.PixelUnshuffle(4), inner, nn.PixelShuffle(4))


class Looking(nn.Conv2d):
    """A model that looks at values, which a dry run has not."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) if input.sum() > 0 else input


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda: nn.Conv2d(1, 3, 3, padding=1), 1),
        (lambda: nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.PixelShuffle(2)), 1),
        (lambda: OfMultiples(3, 1), 4),
        (lambda: nn.Sequential(nn.Conv2d(1, 3, 3, stride=2, padding=1), nn.Upsample(scale_factor=2)), 2),
        (lambda: Looking(1, 3, 3, padding=1), 32),
    ],
)
def test_images_are_padded_no_more_than_a_model_needs(build: Callable[[], nn.Module], expected: int) -> None:
    assert pictures.stride_of(outline(build), 1, lambda outputs: outputs) == expected


def test_pictures_of_a_model_that_takes_some_sizes(ranks: Ranks, tmp_path: Path) -> None:
    pairs, out = write_pairs(tmp_path / "pairs", "float32"), tmp_path / "out"
    model = "--model", f"{__name__}:{OfMultiples.__name__}"
    flags = COMMON.replace("--model unet --model-options num_filters=4,depth=2", "")
    run = run_train(ranks, tmp_path / "run", *model, flags, pairs, "--max-steps 1")
    assert ranks(2).run(use, run, pairs, out, {"tiles": "1x2"}) == [[], []]
    for row in read_rows(out / "predictions.csv"):
        name = Path(row["image"]).stem
        values = (np.asarray(PIL.Image.open(pairs / "inputs" / f"{name}.png")) / 65535).astype(np.float32)
        height, width = values.shape
        padded = F.pad(torch.from_numpy(values)[None], (0, -width % 4, 0, -height % 4))
        made = made_whole(OfMultiples(3, 1), padded, run)[:, :height, :width].permute(1, 2, 0)
        assert np.allclose(tifffile.imread(out / row["prediction"]), made, rtol=0, atol=1e-5)


def test_pictures_of_zarr_are_zarr(ranks: Ranks, tmp_path: Path) -> None:
    """They have the values of TIFF files of the same inputs, and what is done is not done again."""
    zarr = pytest.importorskip("zarr")
    pairs = write_pairs(tmp_path / "pairs", "uint16")
    for path in [*(pairs / "inputs").iterdir()]:
        values = np.asarray(PIL.Image.open(path))
        array = zarr.create_array(
            store=str(tmp_path / "z" / "inputs" / f"{path.stem}.zarr"), shape=values.shape, chunks=(16, 16), dtype="u2"
        )
        array[:] = values
    run = run_train(ranks, tmp_path / "run", COMMON, pairs, "--max-steps 2")
    for folder in (pairs, tmp_path / "z"):
        assert all(found == [] for found in ranks(2).run(predicted, run, folder / "inputs", folder / "out"))
    made = sorted((tmp_path / "z" / "out" / "images").iterdir())
    assert [path.name for path in made] == [f"p{number}.zarr" for number in range(8)]
    for path in made:
        found = open_stored_picture(path)
        stored = tifffile.imread(pairs / "out" / "images" / f"{path.stem}.tif")
        assert np.array_equal(np.moveaxis(zarr.open(str(path), mode="r")["0"][:], 0, -1), stored)
        assert (found.size, found.channels, found.values) == (stored.shape[:2], 3, "uint16")
    before = {path: path.stat().st_mtime_ns for path in made}
    (made[3] / "0" / "zarr.json").unlink()
    ranks(2).run(predicted, run, tmp_path / "z" / "inputs", tmp_path / "z" / "out")
    assert [path.name for path in made if path.stat().st_mtime_ns != before[path]] == ["p3.zarr"]
    assert open_stored_picture(made[3]).channels == 3


def predicted(comm: Communicator, run: Path, inputs: Path, out: Path) -> list[str]:
    found = mpi4dl.TrainedModel(run, comm=comm, tiles="1x2").predict(inputs, out)
    return [record["error"] for record in found if "error" in record]


def test_a_mask_of_zarr_is_written_by_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("zarr")
    monkeypatch.setattr(pictures, "CHUNK_PX", 16)
    classes = np.random.default_rng(0).integers(0, 9, (50, 21))
    for again in (False, True):  # the second takes the place of the first
        file = MappedFile(tmp_path / "a.zarr", (50, 21), "uint8", encode=pictures.write_zarr)
        for top in range(0, 50, 7):
            file.write((slice(top, min(top + 7, 50)), slice(0, 21)), classes[top : top + 7])
        assert again == (tmp_path / "a.zarr").exists()
        file.close()
    assert np.array_equal(open_stored(tmp_path / "a.zarr").read(Interval(0, 50), Interval(0, 21)), classes)
    assert [path.name for path in tmp_path.iterdir()] == ["a.zarr"]
