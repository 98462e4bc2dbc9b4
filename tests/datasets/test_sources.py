"""mpi4dl.datasets.sources: one function opens whatever the user names."""

import re

import numpy as np
import PIL.Image
import pytest

from mpi4dl import datasets
from mpi4dl.datasets import DatasetError


def put(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    PIL.Image.new("RGB", (4, 4)).save(path)


def sizes(pair):
    return tuple(len(dataset) for dataset in pair)


def test_synthetic_images_of_training_and_validation_differ():
    train, val = datasets.open("synthetic", size=(8, 9), num_classes=3, num_train=7, num_val=4, seed=5)
    assert sizes((train, val)) == (7, 4)
    assert train.classes == val.classes == ("class 0", "class 1", "class 2")
    image = train.image(0)
    assert image.size == (8, 9)
    assert [val.label(i) for i in range(4)] == [7 % 3, 8 % 3, 9 % 3, 10 % 3]


def test_a_folder_with_a_validation_part_is_taken_as_it_is(tmp_path):
    for name in ("train/a/1.png", "train/a/2.png", "train/b/1.png", "val/b/1.png", "test/a/1.png"):
        put(tmp_path / name)
    train, val = datasets.open(str(tmp_path))
    assert sizes((train, val)) == (3, 1)
    assert train.classes == val.classes == ("a", "b")
    assert val.label(0) == 1


def test_a_folder_of_classes_is_split(tmp_path):
    for name in "ab":
        for i in range(10):
            put(tmp_path / name / f"{i}.png")
    training, validation = datasets.open(tmp_path, validation_fraction=0.3)
    assert len(training) + len(validation) == 20
    names = [part.name(i) for part in (training, validation) for i in range(len(part))]
    assert sorted(names) == sorted(f"{name}/{i}.png" for name in "ab" for i in range(10))
    assert [sum(name.startswith(each) for name in names[len(training) :]) for each in "ab"] == [3, 3]


def test_npz(tmp_path):
    x, y = np.zeros((10, 4, 4, 3), np.uint8), np.arange(10) % 2
    np.savez(tmp_path / "a.npz", x=x, y=y)
    assert sum(sizes(datasets.open(tmp_path / "a.npz", validation_fraction=0.4))) == 10
    np.savez(tmp_path / "b.npz", x_train=x, y_train=y, x_test=x[:3], y_test=y[:3])
    assert sizes(datasets.open(tmp_path / "b.npz")) == (10, 3)


def test_cifar(tmp_path):
    (tmp_path / "batches.meta").write_bytes(b"")
    with pytest.raises(DatasetError, match=r"batches\.meta: is no readable CIFAR batch"):
        datasets.open(tmp_path)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere", "nowhere: no such file or folder; expected 'synthetic', a folder of images or an .npz"),
        ("nowhere.npz", "nowhere.npz: no such file; expected arrays"),
    ],
)
def test_sources_that_do_not_exist(source, message):
    with pytest.raises(DatasetError, match=re.escape(message)):
        datasets.open(source)


def test_synthetic_sets_need_images():
    with pytest.raises(DatasetError, match="num_train=0, num_val=3: needs at least 1 of each"):
        datasets.open("synthetic", num_train=0, num_val=3)
