"""mpi4dl.datasets.arrays: .npz files of images."""

import re

import numpy as np
import pytest

from mpi4dl.datasets import DatasetError
from mpi4dl.datasets.arrays import load_npz
from mpi4dl.datasets.volumes import open_volume
from tests.datasets.boxes import whole

IMAGES = np.random.default_rng(0).integers(0, 256, (6, 5, 7, 3), np.uint8)
LABELS = np.array([0, 1, 2, 0, 1, 2])


def save(tmp_path, **arrays):
    np.savez_compressed(tmp_path / "a.npz", **arrays)
    return tmp_path / "a.npz"


def pixels(dataset, index):
    image = dataset.image(index)
    return image.read(*whole(*image.size))


def test_training_and_test_arrays(tmp_path):
    training, test = load_npz(save(tmp_path, x_train=IMAGES, y_train=LABELS, x_test=IMAGES[4:], y_test=LABELS[4:] + 1))
    assert (len(training), len(test), training.channels) == (6, 2, 3)
    assert training.classes == test.classes == ("0", "1", "2", "3")
    assert test.label(1) == 3
    assert np.array_equal(pixels(test, 1), IMAGES[5])


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        (IMAGES.transpose(0, 3, 1, 2), IMAGES),
        (IMAGES[..., 0], IMAGES[..., :1]),
        (IMAGES[..., :1].transpose(0, 3, 1, 2), IMAGES[..., :1]),
        (IMAGES.astype(np.uint16) * 257, IMAGES),
        ((IMAGES / 255).astype(np.float32), IMAGES),
        (IMAGES > 127, np.where(IMAGES > 127, 255, 0)),
    ],
    ids=["channels first", "grey", "grey, channels first", "16 bit", "floating point", "1 bit"],
)
def test_layouts_of_images(tmp_path, stored, expected):
    dataset, nothing = load_npz(save(tmp_path, x=stored, y=LABELS[:, None].astype(np.uint8)))
    assert nothing is None
    assert dataset.channels == expected.shape[3]
    assert np.array_equal(pixels(dataset, 3), expected[3])
    assert [dataset.label(i) for i in range(6)] == LABELS.tolist()


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": IMAGES}, "has no y; expected arrays x_train, y_train, x_test, y_test, or x, y; found x"),
        ({"x_train": IMAGES, "y_train": LABELS}, "has no x_test, y_test; expected arrays"),
        ({"z": IMAGES}, "has no x, y; expected arrays x_train, y_train, x_test, y_test, or x, y; found nothing"),
        ({"x": IMAGES, "y": LABELS[:3]}, "x has 6 images and y has 3 labels: they must be as many"),
        ({"x": IMAGES[0, 0], "y": LABELS}, "x has shape (7, 3); expected (count, height, width) or"),
        ({"x": IMAGES[:0], "y": LABELS}, "x has shape (0, 5, 7, 3); expected"),
        ({"x": IMAGES[..., :2], "y": LABELS}, "x has shape (6, 5, 7, 2); expected"),
        (
            {"x": IMAGES * 1.0, "y": LABELS},
            "x stores floating-point values from 0 to 255, but 0 is black and",
        ),
        ({"x": IMAGES, "y": LABELS / 2}, "y has shape (6,) and type float64; expected (count,) class numbers from 0"),
        ({"x": IMAGES, "y": LABELS - 1}, "y has shape (6,) and type int64; expected (count,) class numbers from 0"),
        (
            {"x_train": IMAGES, "y_train": LABELS, "x_test": IMAGES[..., 0], "y_test": LABELS},
            "x_train has 3 channels, x_test has 1: they must be equal",
        ),
    ],
)
def test_arrays_that_cannot_be(tmp_path, arrays, message):
    path = save(tmp_path, **arrays)
    with pytest.raises(DatasetError, match=re.escape(f"{path}: {message}")):
        load_npz(path)


def test_arrays_larger_than_memory(tmp_path, monkeypatch):
    """A small file may unpack to any size."""
    monkeypatch.setattr("mpi4dl.datasets.files._memory_bytes", lambda: 1 << 20)
    path = save(tmp_path, x=np.zeros((1000, 40, 40), np.uint8), y=np.zeros(1000, int))
    assert path.stat().st_size < 1 << 14
    with pytest.raises(DatasetError, match=r"a\.npz: unpacks to 1\.5 MiB, more than the 1\.0 MiB of memory here"):
        load_npz(path)
    np.savez_compressed(path, x=np.zeros((200, 100, 100), np.uint8))
    with pytest.raises(DatasetError, match=r"a\.npz: unpacks to 1\.9 MiB"):
        open_volume(path)


def lone(path):
    with path.open("wb") as file:
        np.save(file, IMAGES)


DAMAGE = {
    "empty": lambda path: path.write_bytes(b""),
    "a half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "most": lambda path: path.write_bytes(path.read_bytes()[: 9 * path.stat().st_size // 10]),
    "a byte": lambda path: path.write_bytes(bytes(b ^ (0xFF * (n == 300)) for n, b in enumerate(path.read_bytes()))),
    "no archive": lone,
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_files(tmp_path, name):
    path = save(tmp_path, x=IMAGES, y=LABELS)
    DAMAGE[name](path)
    with pytest.raises(DatasetError, match=r"a\.npz: is no readable \.npz file, it is damaged or something else"):
        load_npz(path)


def test_pickled_objects_are_not_loaded(tmp_path):
    path = save(tmp_path, x=IMAGES, y=np.array([{}] * 6, object))
    with pytest.raises(DatasetError, match="Object arrays cannot be loaded"):
        load_npz(path)
