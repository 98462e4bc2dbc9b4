"""mpi4dl.datasets.arrays: the authors' pickled batches, and nothing but these."""

import os
import pickle
import re
import struct

import numpy as np
import pytest

from mpi4dl.datasets import DatasetError
from mpi4dl.datasets.arrays import is_cifar, load_cifar
from tests.datasets.boxes import whole

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
