"""mpi4dl.datasets.arrays: .npz files of images, CIFAR as its authors distribute it, and synthetic images."""

import os
import pickle
import re
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpi4dl.datasets import DatasetError
from mpi4dl.datasets.arrays import Synthetic, is_cifar, load_cifar, load_npz
from mpi4dl.datasets.volumes import open_volume
from mpi4dl.geometry import Interval
from tests.datasets.boxes import cuts, tiles, whole

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
        ({"x_train": IMAGES, "x_val": IMAGES}, "has x_val, but x_test validates"),
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


ROWS = np.random.default_rng(0).integers(0, 256, (3, 3072), np.uint8)
PIXELS = ROWS.reshape(3, 3, 32, 32).transpose(0, 2, 3, 1)


class Python2Pickler(pickle._Pickler):
    """Writes bytes as Python 2 wrote its strings, which is how CIFAR's files are."""

    def save(self, item, save_persistent_id=True):
        if isinstance(item, bytes):
            self.write(pickle.BINSTRING + struct.pack("<i", len(item)) + item)
        else:
            super().save(item, save_persistent_id)


def dump(path, content):
    with path.open("wb") as file:
        Python2Pickler(file, protocol=2).dump(content)


@pytest.fixture
def ten(tmp_path):
    dump(tmp_path / "batches.meta", {b"label_names": [b"cat", b"dog", b"eel"]})
    for i in range(1, 6):
        dump(tmp_path / f"data_batch_{i}", {b"data": ROWS, b"labels": [0, 1, 2], b"filenames": [b"x"] * 3})
    dump(tmp_path / "test_batch", {b"data": ROWS[::-1].copy(), b"labels": [2, 1, 0]})
    return tmp_path


def refused(folder, message):
    with pytest.raises(DatasetError, match=re.escape(message)):
        load_cifar(folder)


def test_ten_classes(ten):
    assert is_cifar(ten)
    training, test = load_cifar(ten)
    assert (len(training), len(test), training.channels) == (15, 3, 3)
    assert training.classes == test.classes == ("cat", "dog", "eel")
    assert [training.label(i) for i in range(6)] == [0, 1, 2, 0, 1, 2]
    assert np.array_equal(training.image(4).read(*whole(32, 32)), PIXELS[1])
    assert np.array_equal(test.image(0).read(*whole(32, 32)), PIXELS[2])


def test_hundred_classes(tmp_path):
    dump(tmp_path / "meta", {b"fine_label_names": [b"apple", b"bear"], b"coarse_label_names": [b"fruit"]})
    for name in ("train", "test"):
        dump(tmp_path / name, {b"data": ROWS, b"fine_labels": [0, 1, 1], b"coarse_labels": [0, 0, 0]})
    assert is_cifar(tmp_path)
    training, _ = load_cifar(tmp_path)
    assert training.classes == ("apple", "bear")
    assert training.label(2) == 1


def test_a_missing_batch(ten):
    (ten / "data_batch_4").unlink()
    refused(ten, "data_batch_4: no such file, although CIFAR has it: unpack the archive again")


def test_a_truncated_batch(ten):
    path = ten / "data_batch_2"
    path.write_bytes(path.read_bytes()[:5000])
    refused(ten, f"{path}: is no readable CIFAR batch: pickle data was truncated")


def test_other_content(ten):
    dump(ten / "test_batch", {b"pictures": ROWS})
    refused(ten, "test_batch: has no data, labels, as CIFAR's files have: unpack the archive again")
    dump(ten / "test_batch", [1, 2])
    refused(ten, "test_batch: has no data, labels")
    dump(ten / "test_batch", {b"data": ROWS[:, :9], b"labels": [0, 1, 2]})
    refused(ten, "test_batch: holds uint8 images of shape (3, 9); expected uint8 (3, 3072)")
    dump(ten / "test_batch", {b"data": ROWS, b"labels": [0, 1, 3]})
    refused(ten, "test_batch: has labels outside 0 to 2")


class Attack:
    def __reduce__(self):
        return os.mkdir, ("/tmp/this-must-not-be-made-by-a-pickle",)


def test_code_in_a_pickle_is_not_run(ten):
    dump(ten / "test_batch", {b"data": Attack(), b"labels": [0]})
    refused(ten, "test_batch: is no readable CIFAR batch: asks for posix.mkdir, which no CIFAR file needs")
    assert not os.path.exists("/tmp/this-must-not-be-made-by-a-pickle")


@given(st.data())
def test_tiles_are_parts_of_the_whole(data):
    height, width = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 70))
    dataset = Synthetic(
        20, (height, width), num_classes=data.draw(st.integers(2, 12)), seed=data.draw(st.integers(0, 9))
    )
    image = dataset.image(data.draw(st.integers(0, 19)))
    pixels = image.read(*whole(height, width))
    assert pixels.dtype == np.uint8
    for rows, cols in tiles(data.draw(cuts(height)), data.draw(cuts(width))):
        tile = image.read(rows, cols)
        assert np.array_equal(tile, pixels[rows.start : rows.stop, cols.start : cols.stop])


def test_a_far_corner_of_an_enormous_image():
    image = Synthetic(1, (10**6, 10**6)).image(0)
    corner = image.read(Interval(10**6 - 3, 10**6), Interval(10**6 - 2, 10**6))
    assert np.array_equal(corner[2:, 1:], image.read(Interval(10**6 - 1, 10**6), Interval(10**6 - 1, 10**6)))


def test_images_depend_on_seed_and_index():
    def pixels(seed, index):
        return Synthetic(20, (16, 16), seed=seed).image(index).read(*whole(16, 16)).tobytes()

    assert pixels(0, 3) == pixels(0, 3)
    assert len({pixels(0, 3), pixels(0, 13), pixels(1, 3)}) == 3


def test_the_mean_colours_of_the_classes_differ():
    dataset = Synthetic(6, (64, 64), num_classes=3)
    assert [dataset.label(i) for i in range(6)] == [0, 1, 2, 0, 1, 2]
    means = [dataset.image(i).read(*whole(64, 64)).mean(axis=(0, 1)) for i in range(6)]
    for i in range(3):
        assert np.abs(means[i] - means[i + 3]).max() < 4
        assert np.abs(means[i] - means[(i + 1) % 3]).max() > 20


@pytest.mark.parametrize(("length", "size", "num_classes"), [(0, (8, 8), 2), (4, (0, 8), 2), (4, (8, 8), 1)])
def test_images_that_cannot_be(length, size, num_classes):
    message = rf"{length} synthetic images of {size[0]} x 8 pixels in {num_classes} classes: needs at least 1 image"
    with pytest.raises(DatasetError, match=message):
        Synthetic(length, size, num_classes)
