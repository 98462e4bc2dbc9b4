"""mpi4dl.datasets.listed: folders that are parts of the images are not taken for classes."""

import re

import pytest

from mpi4dl.datasets import DatasetError
from mpi4dl.datasets.listed import class_folders, parts


def make(root, *folders):
    for folder in folders:
        (root / folder).mkdir(parents=True)
    return root


@pytest.mark.parametrize(
    ("folders", "expected"),
    [
        (["train", "val"], ("train", "val", ())),
        (["train", "test"], ("train", "test", ())),
        (["train", "valid"], ("train", "valid", ())),
        (["training", "validation"], ("training", "validation", ())),
        (["Train", "Val"], ("Train", "Val", ())),
        (["TRAIN", "TEST"], ("TRAIN", "TEST", ())),
        (["training", "testing"], ("training", "testing", ())),
        (["train", "dev", "test"], ("train", "dev", ("test",))),
        (["train", "val", "notes", ".cache"], ("train", "val", ("notes",))),
    ],
    ids=str,
)
def test_parts_by_the_names_that_people_give_them(tmp_path, folders, expected):
    assert parts(make(tmp_path, *folders)) == expected


@pytest.mark.parametrize(
    "folders",
    [["cat", "dog"], ["train", "bus", "car"], ["control", "test"], ["valid", "invalid"], ["train"], [], ["Test", "a"]],
    ids=str,
)
def test_classes_that_are_called_like_a_part(tmp_path, folders):
    assert parts(make(tmp_path, *folders)) is None
    assert class_folders(tmp_path) == tuple(sorted(folders))


@pytest.mark.parametrize(
    ("folders", "message"),
    [
        (["train", "Train", "val"], "has Train and train, which may be the same part of the images: leave one of them"),
        (["train", "val", "valid"], "has val and valid, which may be the same part"),
        (["train", "training"], "has train, training, which are no classes, and together no parts to train on and to"),
        (["val", "test"], "has val, test, which are no classes"),
        (["cat", "dog", "val/cat", "val/dog"], "has val, which are no classes"),
    ],
    ids=str,
)
def test_parts_that_nobody_can_tell_apart_are_refused(tmp_path, folders, message):
    with pytest.raises(DatasetError, match=re.escape(f"{make(tmp_path, *folders)}: {message}")):
        parts(tmp_path)


def test_parts_inside_each_class_are_refused(tmp_path):
    make(tmp_path, "cat/train", "cat/val", "dog/train", "dog/val")
    assert parts(tmp_path) is None
    with pytest.raises(DatasetError, match=r"cat: has train and val inside a class; expected <folder>/<class>"):
        class_folders(tmp_path)
