"""mpi4dl.datasets.pairs: pictures keep channels and depth, targets move as their inputs do, and mistakes are named."""

from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import numpy.typing as npt
import PIL.Image
import pytest
import tifffile
import torch

from mpi4dl import datasets
from mpi4dl.datasets import Augmentation, BadImage, DatasetError, Loader, View
from mpi4dl.datasets.kinds import PICTURES
from mpi4dl.datasets.pairs import open_stored_picture
from mpi4dl.datasets.sources import open_files
from mpi4dl.geometry import Box, Interval
from mpi4dl.options.config import ConfigError, parse
from mpi4dl.options.data import build_augment
from mpi4dl.options.sources import source_of
from mpi4dl.options.tasks import with_task


def write(path: Path, values: npt.NDArray[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".png" and values.dtype == np.uint16:
        path.write_bytes(imagecodecs.png_encode(values))
    elif path.suffix == ".tif":
        options = {"tile": (16, 16)} if values.shape[0] > 20 else {}
        tifffile.imwrite(path, values, photometric="rgb" if values.ndim == 3 else "minisblack", **options)
    else:
        PIL.Image.fromarray(values).save(path)
    return path


def picture(dtype: str, channels: int = 3, size: tuple[int, int] = (21, 30), seed: int = 0) -> npt.NDArray[Any]:
    values = np.random.default_rng(seed).random((*size, channels))
    made = values.astype(dtype) if dtype == "float32" else (values * np.iinfo(dtype).max).astype(dtype)
    return made if channels > 1 else made[..., 0]


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("suffix", "dtype"),
    [(".png", "uint8"), (".png", "uint16"), (".tif", "uint8"), (".tif", "uint16"), (".tif", "float32")],
)
def test_values_are_those_of_the_file(tmp_path: Path, suffix: str, dtype: str, channels: int) -> None:
    values = picture(dtype, channels)
    found = open_stored_picture(write(tmp_path / f"a{suffix}", values))
    assert (found.size, found.channels, found.depth) == ((21, 30), channels, dtype)
    top = 1 if dtype == "float32" else np.iinfo(dtype).max
    expected = values.reshape(21, 30, channels)[3:20, 5:17]
    read = found.read(Interval(3, 20), Interval(5, 17))
    if dtype == "uint8":
        assert read.dtype == np.uint8
        assert np.array_equal(read, expected)
    else:
        assert read.dtype == np.float32
        assert np.array_equal(read, (expected / top).astype(np.float32))


@pytest.mark.parametrize(("mode", "said"), [("RGBA", "RGBA"), ("LA", "LA"), ("CMYK", "CMYK")])
def test_other_channels_are_refused(tmp_path: Path, mode: str, said: str) -> None:
    path = tmp_path / ("a.jpg" if mode == "CMYK" else "a.png")
    PIL.Image.new(mode, (8, 8)).save(path)
    with pytest.raises(BadImage, match=f"{said}.*expected 1 channel"):
        open_stored_picture(path)


def test_other_types_are_refused(tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "a.tif", np.zeros((8, 8), np.int32))
    with pytest.raises(BadImage, match=r"1 values of int32.*expected 1"):
        open_stored_picture(tmp_path / "a.tif")


@pytest.mark.parametrize("view", [
    View((16, 20), "crop", Augmentation(flip_rows=True, flip_cols=True), mean=(0, 0, 0), std=(1, 1, 1)),
    View((40, 40), "crop", Augmentation(flip_cols=True, turns=4), mean=(0, 0, 0), std=(1, 1, 1)),
    View((40, 44), "pad", Augmentation(flip_rows=True), mean=(0, 0, 0), std=(1, 1, 1)),
    View((16, 16), "crop", Augmentation(turns=4, degrees=20.0, scale=(0.8, 1.2)), mean=(0, 0, 0), std=(1, 1, 1)),
])  # fmt: skip
@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_targets_move_as_their_inputs(tmp_path: Path, view: View, dtype: str) -> None:
    """Where a target equals its input, both tiles of a batch do."""
    for number in range(4):
        values = picture(dtype, size=(21 + number, 30), seed=number)
        for folder in ("inputs", "targets"):
            write(tmp_path / folder / f"{number}.tif", values)
    files = open_files(tmp_path)
    assert (files.task, files.classes, files.channels) == ("image", ("red", "green", "blue"), 3)
    whole = [Box(*(Interval(0, side) for side in (4, *view.size)))]
    for epoch in range(3):
        (batch,) = Loader(files, view, 4, lambda count: whole).epoch(epoch)
        assert batch.labels.dtype == torch.float32
        assert torch.allclose(batch.labels, batch.tiles[0], rtol=0, atol=1e-7)
        assert len({float(sample.mean()) for sample in batch.labels}) == 4


def pairs(root: Path, count: int = 3, **targets: Any) -> Path:
    for number in range(count):
        write(root / "inputs" / f"p{number}.png", picture("uint8", 1, seed=number))
        write(root / "targets" / f"p{number}.tif", picture("uint16", **targets, seed=number))
    return root


def test_a_table_names_targets(tmp_path: Path) -> None:
    pairs(tmp_path)
    lines = [f"inputs/p{n}.png,targets/p{n}.tif,{part}" for n, part in enumerate(("train", "val", "test"))]
    (tmp_path / "pairs.csv").write_text("\n".join(["image,target,split", *lines]))
    training, validation = datasets.open(tmp_path / "pairs.csv", task="image")
    assert (len(training), len(validation)) == (1, 1)
    assert (training.channels, training.classes, training.values) == (1, ("red", "green", "blue"), "uint16")
    whole = (Interval(0, 21), Interval(0, 30))
    stored = tifffile.imread(tmp_path / "targets/p1.tif")
    assert np.array_equal(validation.label(0).read(*whole), (stored / 65535).astype(np.float32))


def test_parts_of_a_folder(tmp_path: Path) -> None:
    pairs(tmp_path / "train")
    pairs(tmp_path / "val", count=2)
    training, validation = datasets.open(tmp_path)
    assert (training.task, len(training), len(validation)) == ("image", 3, 2)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda root: (root / "targets/p1.tif").unlink(), r"p1.png: has no target: add .*p1.png"),
        (
            lambda root: write(root / "targets/p1.tif", picture("uint16", size=(21, 29))),
            r"p1.tif: is a target of 21 x 29 pixels, but its input .*p1.png has 21 x 30: they must be equal",
        ),
        (
            lambda root: write(root / "targets/p1.tif", picture("uint16", 1)),
            "p1.tif: has 1 channel, but other targets have 3",
        ),
        (
            lambda root: write(root / "targets/p2.tif", picture("uint8")),
            "p2.tif: has 8 bits, but other targets have 16 bits",
        ),
        (
            lambda root: write(root / "inputs/p2.png", picture("uint8")),
            "p2.png: has 3 channels, but other inputs have 1",
        ),
    ],
)
def test_what_is_wrong_with_pairs(tmp_path: Path, spoil: Any, message: str) -> None:
    pairs(tmp_path)
    spoil(tmp_path)
    with pytest.raises(DatasetError, match=message):
        open_files(tmp_path)


def test_a_wrong_pair_that_nobody_looked_at_is_found_when_it_is_read(tmp_path: Path) -> None:
    pairs(tmp_path, count=40)
    write(tmp_path / "targets/p11.tif", picture("uint16", size=(20, 30)))
    files = open_files(tmp_path)
    index = next(i for i in range(40) if "p11." in files.name(i))
    whole = [Box(Interval(0, 1), Interval(0, 16), Interval(0, 16))]
    loader = Loader(files, View((16, 16), "crop", mean=(0,), std=(1,)), 1, lambda count: whole, on_bad_image="report")
    batch = [*loader.epoch(0)][index]
    assert "20 x 30 pixels, but its input" in batch.errors[0]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--slides some --image-size auto", "`task` image is for pairs of pictures, not for slides"),
        ("--image-size 8x8x8", "`task` image is for pictures, but `image_size` has 3 numbers"),
        ("--patches 32", "`task` image makes whole images, and `patches` give one answer for all"),
        ("--fit resize", "`fit` resize does not: choose crop or pad"),
        ("--fit own --batch-size 1", "`fit` own does not: choose crop or pad"),
        ("--random-crop", "`random_crop` scales them"),
    ],
)
def test_what_is_not_there_is_refused(flags: str, message: str) -> None:
    config = parse(["--task", "image", *flags.split()])
    with pytest.raises(ConfigError, match=message):
        source_of(config).prepared()


def test_mixed_images_and_moved_pixels_are_refused(tmp_path: Path) -> None:
    flags = ["--images", str(pairs(tmp_path)), "--image-size", "16", "--model", "unet"]
    config = with_task(parse([*flags, "--mixup", "0.2"]), open_files(tmp_path, PICTURES))
    source = source_of(config)
    images = type("Images", (), {"training": source.open()[0], "validation": source.open()[1], "fit": "crop"})
    with pytest.raises(ConfigError, match="labels to image have no means"):
        source.loaders(images, lambda count: [], lambda count: [])
    with pytest.raises(ConfigError, match="moves pixels, and targets would stay"):
        build_augment(parse([*flags, "--augment", "RandomRotation(degrees=10)"]), 1, "image")
