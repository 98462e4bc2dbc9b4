"""Pairs of pictures keep channels and depth, targets move as their inputs do, and mistakes are named."""

from dataclasses import replace
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
from mpi4dl.datasets.files import open_stored_picture
from mpi4dl.datasets.kinds import PICTURES
from mpi4dl.datasets.labels import FORMS
from mpi4dl.datasets.sources import TargetFiles, open_files
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
    assert (found.size, found.channels, found.values) == ((21, 30), channels, dtype)
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


def test_a_picture_of_16_bits_with_the_ending_of_another_is_refused(tmp_path: Path) -> None:
    PIL.Image.fromarray(picture("uint16", 1)).save(tmp_path / "a.png", format="JPEG2000")
    with pytest.raises(BadImage, match="has pixels of I;16"):
        open_stored_picture(tmp_path / "a.png")


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


@pytest.mark.parametrize("scale", [2, 4])
@pytest.mark.parametrize("view", [
    View((16, 20), "crop", Augmentation(flip_rows=True, flip_cols=True), mean=(0, 0, 0), std=(1, 1, 1)),
    View((40, 40), "crop", Augmentation(flip_cols=True, turns=4), mean=(0, 0, 0), std=(1, 1, 1)),
    View((40, 44), "pad", Augmentation(flip_rows=True), mean=(0, 0, 0), std=(1, 1, 1)),
])  # fmt: skip
def test_larger_targets_move_as_their_inputs(tmp_path: Path, scale: int, view: View) -> None:
    """Values are places: those of a target begin with those of its input, and are of neighbours everywhere."""
    for number in range(4):
        for folder, times in (("inputs", 1), ("targets", scale)):
            rows, cols = np.mgrid[: times * (21 + number), : times * 30] + times  # 0 is padding
            places = np.stack([rows, cols, np.ones_like(rows)], 2).astype(np.float32)
            write(tmp_path / folder / f"{number}.tif", places)
    files = open_files(tmp_path)
    assert isinstance(files, TargetFiles)
    assert files.target_scale == scale
    whole = [Box(*(Interval(0, side) for side in (4, *view.size)))]
    for epoch in range(4):
        (batch,) = Loader(files, view, 4, lambda count: whole).epoch(epoch)
        assert batch.labels.shape == (4, 3, *(scale * side for side in view.size))
        blocks = batch.tiles[0].repeat_interleave(scale, 2).repeat_interleave(scale, 3)
        assert torch.equal(batch.labels[:, :2] // scale, blocks[:, :2])
        inside = batch.labels[:, 2] > 0
        assert torch.equal(inside, blocks[:, 2] > 0)
        for axis in (1, 2):
            steps = batch.labels[:, :2].diff(dim=axis + 1).abs().sum(1)
            both = inside.narrow(axis, 1, steps.shape[axis]) & inside.narrow(axis, 0, steps.shape[axis])
            assert both.any()
            assert (steps[both] == 1).all()


def test_targets_of_bytes_are_padded_white(tmp_path: Path) -> None:
    write(tmp_path / "inputs" / "a.png", picture("uint8", size=(8, 8)))
    write(tmp_path / "targets" / "a.png", picture("uint8", size=(16, 16)))
    files, view = open_files(tmp_path), View((12, 8), "crop", mean=(0, 0, 0), std=(1, 1, 1))
    label = view.target(files.label(0))
    assert label.shape == (3, 24, 16)
    assert (label[:, :4] == 1).all()
    assert (label[:, 20:] == 1).all()
    assert np.array_equal(label[:, 4:20], np.moveaxis(picture("uint8", size=(16, 16)), 2, 0).astype(np.float32) / 255)


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


def test_targets_of_another_task_are_values_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers ask the form of labels what its files hold, not for the name of a task."""
    form = replace(FORMS["image"], task="depth", files="depth", folders=("images", "depths"), column="depth")
    monkeypatch.setitem(FORMS, "depth", form)  # type: ignore[arg-type]
    pairs(tmp_path)
    for before, after in zip(("inputs", "targets"), form.folders, strict=True):
        (tmp_path / before).rename(tmp_path / after)
    lines = [f"images/p{n}.png,depths/p{n}.tif" for n in range(3)]
    (tmp_path / "pairs.csv").write_text("\n".join(["image,depth", *lines]))
    for found in (open_files(tmp_path), open_files(tmp_path / "pairs.csv", task="depth")):
        assert isinstance(found, TargetFiles)
        assert (found.task, found.values, len(found)) == ("depth", "uint16", 3)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda root: (root / "targets/p1.tif").unlink(), r"p1.png: has no target: add .*p1.png"),
        (
            lambda root: write(root / "targets/p1.tif", picture("uint16", size=(21, 29))),
            r"p1.tif: is a target of 21 x 29 pixels, but its input .*p1.png has 21 x 30: they must be equal",
        ),
        (
            lambda root: write(root / "targets/p1.tif", picture("uint16", size=(42, 60))),
            "p1.tif: is a target of 42 x 60 pixels, but its input .*they must be equal, or 2 or 4 times as many",
        ),
        (
            lambda root: write(root / "targets/p0.tif", picture("uint16", size=(42, 60))),
            "p1.tif: is a target of 21 x 30 pixels, but its input .*must be 2 times as many.* first pair",
        ),
        (
            lambda root: write(root / "targets/p0.tif", picture("uint16", size=(63, 90))),
            "p0.tif: is a target of 63 x 90 pixels, but its input .*must be equal",
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
        (
            lambda root: write(root / "inputs/p2.png", picture("uint16", 1)),
            "p2.png: has 16 bits, but other inputs have 8 bits",
        ),
    ],
)
def test_what_is_wrong_with_pairs(tmp_path: Path, spoil: Any, message: str) -> None:
    pairs(tmp_path)
    spoil(tmp_path)
    with pytest.raises(DatasetError, match=message):
        open_files(tmp_path)


def test_channels_that_no_input_has_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadImage, match="and `channels` names number 7"):
        open_files(pairs(tmp_path), channels=(7, 1))


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
        ("--features some", "`task` image is for pairs of pictures or slides, not for features"),
        ("--image-size 8x8x8", "`task` image is for pictures, but `image_size` has 3 numbers"),
        ("--patches 32", "`task` image makes whole images, and `patches` gives one answer for all"),
        ("--fit resize", "`fit` resize does not: choose crop or pad"),
        ("--fit own --batch-size 1", "`fit` own does not: choose crop or pad"),
        ("--random-crop", "`random_crop` scales them"),
    ],
)
def test_what_is_not_there_is_refused(flags: str, message: str) -> None:
    config = parse(["--task", "image", *flags.split()])
    with pytest.raises(ConfigError, match=message):
        source_of(config).prepared()


@pytest.mark.parametrize(("flags", "name"), [("--rotate-degrees 10", "rotate_degrees"), ("--scale 0.8,1.2", "scale")])
def test_larger_targets_are_not_turned_a_little(tmp_path: Path, flags: str, name: str) -> None:
    flags = f"--images {pairs(tmp_path, size=(42, 60))} --image-size 16 --model unet {flags}"
    source = source_of(with_task(parse(flags.split()), open_files(tmp_path, PICTURES)))
    with pytest.raises(ConfigError, match=f"`{name}` is for targets of the size of their inputs.*2 times as large"):
        source.describe(*source.open(), None)


def test_mixed_images_and_moved_pixels_are_refused(tmp_path: Path) -> None:
    flags = ["--images", str(pairs(tmp_path)), "--image-size", "16", "--model", "unet"]
    config = with_task(parse([*flags, "--mixup", "0.2"]), open_files(tmp_path, PICTURES))
    source = source_of(config)
    images = type("Images", (), {"training": source.open()[0], "validation": source.open()[1], "fit": "crop"})
    with pytest.raises(ConfigError, match="labels to image have no means"):
        source.loaders(images, lambda count: [], lambda count: [])
    with pytest.raises(ConfigError, match="moves pixels, and targets would stay"):
        build_augment(parse([*flags, "--augment", "RandomRotation(degrees=10)"]), 1, "image")
