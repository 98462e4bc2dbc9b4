"""mpi4dl.datasets.sources and .listed: one sub-folder per class, parts of images, and ways to get these wrong."""

import os
import re

import numpy as np
import PIL.Image
import pytest
import tifffile

from mpi4dl.datasets import BadImage, DatasetError
from mpi4dl.datasets.kinds import PICTURES, SLIDES, VOLUMES
from mpi4dl.datasets.listed import OtherFile, class_folders, parts
from mpi4dl.datasets.sources import open_files
from tests.datasets.boxes import noise_image, whole


def put(path, value=0, size=(4, 5)):
    path.parent.mkdir(parents=True, exist_ok=True)
    PIL.Image.new("RGB", size[::-1], (value,) * 3).save(path)


def listed(root, classes=None):
    return open_files(root, classes=classes)


def test_classes_and_files_are_in_order(tmp_path):
    for name in ("dog/b.png", "dog/a.PNG", "cat/z.jpeg", "cat/deep/er/c.png", "cat/y.bmp"):
        put(tmp_path / name)
    (tmp_path / "dog/notes.txt").write_text("no image")
    (tmp_path / "dog/._a.png").write_text("what a Mac leaves behind")
    (tmp_path / ".cache").mkdir()
    (tmp_path / "README").write_text("no class")
    dataset = listed(tmp_path)
    assert dataset.classes == ("cat", "dog")
    names = [str(dataset.path(i).relative_to(tmp_path)) for i in range(len(dataset))]
    assert names == ["cat/deep/er/c.png", "cat/y.bmp", "cat/z.jpeg", "dog/a.PNG", "dog/b.png"]
    assert [dataset.label(i) for i in range(len(dataset))] == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("name", ["b.JP2", "b.gif"])
def test_pictures_of_a_kind_that_is_not_read_are_named(tmp_path, caplog, name):
    for each in ("cat/a.png", f"cat/{name}", "dog/c.png"):
        put(tmp_path / each)
    assert len(listed(tmp_path)) == 2
    (told,) = caplog.messages
    assert told.startswith(f"1 file below {tmp_path / 'cat'} left out: {name}: images end in .png .jpg")


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (SLIDES, ("a.tif", "b.czi")),
        (VOLUMES, ("a.npy", "b.nrrd")),
        (PICTURES, ("a.png", "b.dcm")),
        (PICTURES, ("a.png", "b.nii.gz")),
        (PICTURES, ("a.png", "IM1")),
    ],
)
def test_samples_of_a_kind_that_is_not_read_are_named(tmp_path, caplog, kind, names):
    for name in names:
        (tmp_path / name).write_bytes(bytes(128) + b"DICM")
    assert kind.below(tmp_path)[0] == [names[0]]
    assert f"left out: {names[1]}" in caplog.text


def test_tables_of_other_names_are_named(tmp_path):
    for each in ("p1/a.png", "p2/b.png"):
        put(tmp_path / each)
    assert listed(tmp_path).remarks == ()
    (tmp_path / "Labels.csv").write_text("file,class\n")
    (told,) = listed(tmp_path).remarks
    assert f"tables of {tmp_path} are not read: Labels.csv; `images` {tmp_path}/NAME.csv would read one" in told


def test_subfolders_that_may_be_patients_are_named(tmp_path):
    for name in ("a/p1/1.png", "b/p2/1.png"):
        put(tmp_path / name)
    (told,) = listed(tmp_path).remarks
    assert told.startswith("images of one subfolder, such as a/p1, may train and validate: if it is of one patient")


def test_sizes_and_formats_may_be_mixed(tmp_path):
    for name, value, size in (("0.png", 0, (2, 2)), ("a/1.png", 10, (4, 5)), ("b/2.png", 20, (7, 3))):
        put(tmp_path / name, value, size)
    assert listed(tmp_path).remarks == (f"1 image is of no class in {tmp_path}, and left out",)
    pixels = noise_image(96, 80)
    tifffile.imwrite(tmp_path / "b/3.tif", pixels, tile=(32, 32), photometric="rgb")
    tifffile.imwrite(tmp_path / "b/4.svs", pixels, tile=(32, 32), photometric="rgb")
    dataset = listed(tmp_path)
    images = [dataset.image(i) for i in range(len(dataset))]
    assert [i.size for i in images] == [
        (4, 5),
        (7, 3),
        (96, 80),
        (96, 80),
    ]
    assert (images[1].read(*whole(7, 3)) == 20).all()
    for slide in images[2:]:
        assert np.array_equal(slide.read(*whole(96, 80)), pixels)


def test_a_class_may_be_a_link_to_a_folder(tmp_path):
    put(tmp_path / "elsewhere/1.png")
    put(tmp_path / "root/a/1.png")
    (tmp_path / "root/b").symlink_to(tmp_path / "elsewhere")
    assert len(listed(tmp_path / "root")) == 2


LAYOUT = "expected <folder>/<class>/*.png, or <folder>/train/<class>/*.png and <folder>/val/<class>/*.png"
WRONG = {  # the folder, what is in it, the classes of training, and the message
    "no such folder": ("nowhere", (), None, f"ROOT/nowhere: no such folder; {LAYOUT}"),
    "a file": ("a.png", ("a.png",), None, "a.png: is a file, not a folder of images, nor a table, which ends in .csv"),
    "nothing in it": ("", (), None, "ROOT: has no class folders; expected <folder>/<class>/*.png"),
    "no classes": (
        "", ("a.png",), None, "has no class folders; it has images of its own: move them into one sub-folder per class"
    ),
    "a class without images": (
        "", ("a/1.png", "b/1.gif"), None,
        "ROOT/b: this class has no images: add some, or remove the folder; files count as images if they end in .png "
        ".jpg .jpeg .bmp .webp .tif .tiff .svs .ndpi .mrxs",
    ),
    "one class": ("", ("a/1.png",), None, "has only one class folder, 'a'; a classifier needs two or more"),
    "training alone": (
        "", ("train/a/1.png",), None,
        "has only one class folder, 'train': add ROOT/val, or give ROOT/train; a classifier needs two",
    ),
    "one class in two spellings": (
        "", ("Tumor/1.png", "tumor /1.png"), None, "has the classes 'Tumor' and 'tumor ': write one class in one way"
    ),
    "another class": (
        "", ("z/1.png",), ("a", "b"), "has the class 'z', but the training set has only a, b: rename or remove it"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_folders_that_cannot_be_are_refused(tmp_path, name):
    folder, names, classes, message = WRONG[name]
    for each in names:
        put(tmp_path / each)
    with pytest.raises(DatasetError, match=re.escape(message.replace("ROOT", str(tmp_path)))):
        listed(tmp_path / folder, classes)


def test_given_classes_keep_their_numbers(tmp_path):
    put(tmp_path / "c/1.png")
    dataset = listed(tmp_path, ("a", "b", "c"))
    assert dataset.classes == ("a", "b", "c")
    assert dataset.label(0) == 2


def test_parts_have_the_given_classes(tmp_path):
    """As an evaluation opens the images of a run."""
    for name in ("train/b/1.png", "val/a/1.png", "val/b/1.png"):
        put(tmp_path / "of_classes" / name)
    for number, name in enumerate(("train/images", "train/masks", "val/images", "val/masks")):
        put(tmp_path / "of_masks" / name / "1.png", number)
    found = listed(tmp_path / "of_classes", ("c", "b", "a"))
    assert [(row.label, row.split) for row in found.rows] == [(1, "train"), (2, "val"), (1, "val")]
    assert [row.split for row in listed(tmp_path / "of_masks", ("a", "b")).rows] == ["train", "val"]


def test_a_file_that_is_another_than_was_listed_is_refused(tmp_path):
    for name in ("a/1.png", "b/1.png", "b/2.png"):
        put(tmp_path / name, 7)
    dataset = listed(tmp_path)
    put(tmp_path / "a/1.png", 7, (40, 50))
    (tmp_path / "b/1.png").unlink()
    size = dataset.files[0].num_bytes
    with pytest.raises(OtherFile, match=rf"a/1\.png: has \d+ bytes here, but had {size} when it was listed: all ranks"):
        dataset.image(0)
    with pytest.raises(OtherFile, match=r"b/1\.png: is not there here, but was listed: all ranks must see"):
        dataset.image(1)
    assert dataset.image(2).size[0] == 4


def test_other_content_of_the_same_size_is_noticed_by_its_print(tmp_path):
    for name in ("a/1.bmp", "a/2.bmp", "b/1.bmp"):
        put(tmp_path / name, 7, (60, 60))
    dataset = listed(tmp_path)
    mine = dataset.prints(slice(0, None, 2), "on rank 1")
    theirs = listed(tmp_path).prints(slice(1, None, 2), "on rank 0")
    dataset.expect([mine[0], *theirs, mine[1]])
    for index in range(3):
        dataset.image(index)
    put(tmp_path / "a/2.bmp", 8, (60, 60))
    with pytest.raises(OtherFile, match=r"a/2\.bmp: has other content on rank 1 than elsewhere, though as many bytes"):
        dataset.image(1)


def test_what_cannot_be_read_has_no_print_and_is_a_bad_image(tmp_path):
    for name in ("a/1.png", "b/1.png"):
        put(tmp_path / name)
    (tmp_path / "a/0.png").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "a/2.png")
    dataset = listed(tmp_path)
    prints = dataset.prints(slice(None), "on rank 0")
    assert [one is None for one in prints] == [True, False, True, False]
    dataset.expect(prints)
    for index in (0, 2):
        with pytest.raises(BadImage, match="cannot be read"):
            dataset.image(index)


def test_names_do_not_steer_the_terminal(tmp_path):
    for name in ("a/\x1b[31m\u202e.png", "b/\udcff\n.png"):
        put(tmp_path / name)
        (tmp_path / name).write_bytes(b"damaged")
    dataset = listed(tmp_path)
    for index, shown in enumerate([r"a/\x1b[31m\u202e.png", r"b/\udcff\n.png"]):
        with pytest.raises(BadImage) as caught:
            dataset.image(index)
        assert str(caught.value).startswith(f"{tmp_path}/{shown}: ")
        assert str(caught.value).isprintable()


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
    [
        ["cat", "dog"],
        ["train", "bus", "car"],
        ["control/p1", "control/p2", "test/p1", "test/p2"],
        ["control", "test"],
        ["valid", "invalid"],
        ["train"],
        [],
        ["Test", "a"],
    ],
    ids=str,
)
def test_classes_that_are_called_like_a_part(tmp_path, folders):
    assert parts(make(tmp_path, *folders)) is None
    assert class_folders(tmp_path) == tuple(sorted({each.partition("/")[0] for each in folders}))


@pytest.mark.parametrize(
    ("folders", "message"),
    [
        (["train", "Train", "val"], "has Train and train, which may be the same part of the images: leave one of them"),
        (["train", "val", "valid"], "has val and valid, which may be the same part"),
        (["train", "training"], "has train, training, which are no classes, and together no parts to train on and to"),
        (["val", "test"], "has val, test, which are no classes"),
        (["cat", "dog", "val/cat", "val/dog"], "has val, which are no classes"),
        (["train/cat", "train/dog", "raw"], "has train, which are no classes"),
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
