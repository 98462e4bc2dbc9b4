"""Own datasets, as documented; those of PyTorch and torchvision; what is wrong with others."""

import inspect
import re
import textwrap
from typing import NamedTuple

import numpy as np
import PIL.Image
import pytest
import torch
from torch.utils.data import TensorDataset

from mpi4dl._torchvision import import_torchvision
from mpi4dl.datasets import BadImage, Dataset, DatasetError, Loader, View, adapt
from mpi4dl.datasets.base import WholeImage
from mpi4dl.datasets.split import split
from mpi4dl.geometry import Box, Interval

import_torchvision()
import torchvision  # noqa: E402

SIZE = (6, 8)


def boxes(n):
    return [Box(Interval(0, n), Interval(1, 4), Interval(2, 8))]


def first_batch(dataset, **options):
    view = View(SIZE, mean=(0.0,) * dataset.channels, std=(1.0,) * dataset.channels)
    return next(Loader(dataset, view, min(4, len(dataset)), boxes, **options).epoch(0))


def test_the_documented_example(tmp_path):
    lines = inspect.getdoc(Dataset).split("\n")
    code = textwrap.dedent("\n".join(line for line in lines if line.startswith("    ") or not line).strip("\n"))
    assert len([line for line in code.split("\n") if line]) <= 25
    names = {}
    exec(code, names)
    arrays = np.random.default_rng(0).integers(0, 256, (4, *SIZE, 3), np.uint8)
    for number, pixels in enumerate(arrays):
        path = tmp_path / ("healthy", "tumour")[number % 2] / f"{number}.npy"
        path.parent.mkdir(exist_ok=True)
        np.save(path, pixels)
    dataset = adapt(names["Scans"](tmp_path))
    assert (dataset.task, dataset.classes, dataset.channels) == ("classify", ("healthy", "tumour"), 3)
    batch = first_batch(dataset)
    assert batch.labels.tolist() == [0, 0, 1, 1]
    read = (batch.tiles[0] * 255).round().byte().permute(0, 2, 3, 1).numpy()
    assert np.array_equal(read, arrays[[0, 2, 1, 3], 1:4, 2:8])


def test_datasets_of_pytorch_and_torchvision(tmp_path):
    images = torch.rand(5, 2, *SIZE)
    for targets, task, classes in (
        (torch.randint(0, 3, (5,)), "classify", ()),
        (torch.rand(5), "regress", ("0",)),
        (torch.rand(5, 2), "regress", ("0", "1")),
        (torch.randint(0, 2, (5, 3)), "multilabel", ("0", "1", "2")),
        (torch.randint(0, 3, (5, *SIZE)), "segment", ()),
    ):
        dataset = adapt(TensorDataset(images, targets))
        assert (dataset.task, dataset.classes, dataset.channels) == (task, classes, 2)
        batch = first_batch(dataset)
        assert torch.equal(batch.labels, targets[:4])
        assert torch.equal(batch.tiles[0], images[:4, :, 1:4, 2:])
    assert "TensorDataset gives whole samples: each rank reads all of an image" in dataset.remarks[0]

    fake = adapt(torchvision.datasets.FakeData(6, (3, *SIZE), 4))
    assert fake.classes == ("0", "1", "2", "3")
    expected = np.asarray(torchvision.datasets.FakeData(6, (3, *SIZE), 4)[1][0])[1:4, 2:]
    assert np.array_equal((first_batch(fake).tiles[0][1] * 255).round().byte().permute(1, 2, 0).numpy(), expected)

    for name in ("cat/0.png", "cat/1.png", "dog/2.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        PIL.Image.new("RGB", SIZE[::-1], (int(name[-5]) * 9,) * 3).save(tmp_path / name)
    (tmp_path / "dog/2.png").write_bytes(b"damaged")
    folder = adapt(torchvision.datasets.ImageFolder(str(tmp_path)))
    assert folder.classes == ("cat", "dog")
    batch = first_batch(folder, on_bad_image="report")
    assert batch.labels.tolist() == [0, 0, 1]
    assert list(batch.errors) == [2]
    assert batch.errors[2].startswith("ImageFolder[2]: cannot be read: cannot identify image file")


@pytest.mark.parametrize(
    ("targets", "asked", "found"),
    [
        (torch.tensor([[0.0, 1.0], [1.0, 0.0]]), "auto", "such as \\[0.0, 1.0\\], which may be classes or amounts"),
        (torch.tensor([1.0, 0.0]), "auto", "such as 1.0, which may be classes or amounts"),
        (torch.tensor([1.0, 0.5]), "auto", "regress"),
        (torch.tensor([[0.0, 1.0], [1.0, 0.5]]), "auto", "regress"),  # the first alone may be multilabel
        (torch.tensor([[0], [3]]), "auto", "classify"),
        (torch.tensor([[0.0, 1.0], [1.0, 0.0]]), "multilabel", "multilabel"),
        (torch.tensor([[0.0, 1.0], [1.0, 0.0]]), "regress", "regress"),
        (torch.tensor([[0.0, 1.0], [1.0, 0.0]]), "classify", "which are none for `task` classify"),
        (torch.tensor([[0.0, 1.0], [1.0, 0.5]]), "multilabel", "which are none for `task` multilabel"),
        (torch.tensor([[7.0, 1.0], [9.0, 0.0]]), "survival", "survival"),
        (torch.tensor([1, 0]), "segment", "which are none for `task` segment"),
    ],
)
def test_labels_are_for_the_task(targets, asked, found):
    samples = TensorDataset(torch.rand(2, 3, *SIZE), targets)
    if " " not in found:
        assert adapt(samples, asked).task == found
        return
    with pytest.raises(DatasetError, match=found):
        adapt(samples, asked)


class Masks:
    """As OxfordIIITPet and VOCSegmentation give them: pictures of Pillow, a mask of the image's own size."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        mask = np.full((9 + index, 12), 255, np.uint8)
        mask[2:6, 3:9] = index
        return {"img": PIL.Image.new("RGB", mask.shape[::-1]), "mask": PIL.Image.fromarray(mask)}


def test_masks_of_pillow():
    dataset = adapt(Masks())
    assert dataset.task == "segment"
    labels = first_batch(dataset).labels
    assert labels.shape == (3, *SIZE)
    assert labels[1].unique().tolist() == [-100, 1]


class Targets:
    """Whose samples have other labels than the attribute that is called as torchvision calls it."""

    classes = ("low", "high")

    def __init__(self, labels):
        self.labels, self.targets = labels, [0, 1, 5, 1, 0, 1]

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return np.full((*SIZE, 3), index, np.uint8), self.labels[index]


def test_labels_are_those_of_samples_where_targets_say_others():
    assert adapt(Targets([0, 1, 5, 1, 0, 1])).tells_labels
    changed = adapt(Targets([1, 0, 1, 0, 1, 0]))
    assert ([changed.label(index) for index in range(6)], changed.tells_labels) == ([1, 0, 1, 0, 1, 0], False)
    with pytest.raises(DatasetError, match="has 5 in `targets` for sample 2, but gives 1 as its label"):
        first_batch(adapt(Targets([0, 1, 1, 1, 0, 1])))


class Swapped(NamedTuple):
    """A sample in another order than a tuple has it."""

    mask: np.ndarray
    image: np.ndarray


class Listed(list):
    """Samples in a list, which is no pair of datasets."""


def test_the_fields_of_a_sample_go_before_their_order():
    images = [np.full((*SIZE, 3), index, np.uint8) for index in range(3)]
    masks = [np.eye(*SIZE, dtype=np.int64) for _ in images]
    batch = first_batch(adapt(Listed(Swapped(*each) for each in zip(masks, images, strict=True))))
    assert torch.equal(batch.labels[0], torch.from_numpy(masks[0]))
    assert batch.tiles[0].shape[1] == 3


def test_black_and_white_masks_of_pillow_are_refused():
    white = PIL.Image.fromarray(np.eye(*SIZE, dtype=np.uint8) * 255)
    with pytest.raises(DatasetError, match="hold nothing but 0 and 255, and 255 is ignored"):
        adapt(Listed([(PIL.Image.new("RGB", SIZE[::-1]), white)] * 4))


class Broken:
    """A dataset with one thing wrong."""

    channels, classes = 3, ("a", "b")

    def __init__(self, **wrong):
        self.wrong = wrong
        if "channels" in wrong:
            self.channels = wrong["channels"]
        if "classes" in wrong:
            self.classes = wrong["classes"]
        for name in {"patient", "name"} & {*wrong}:
            setattr(self, name, wrong[name])

    def __len__(self):
        return self.wrong.get("length", 4)

    def label(self, index):
        return self.wrong.get("labels", [0, 1, 0, 1])[index]

    def image(self, index):
        return self.wrong.get("image", WholeImage(np.zeros((*SIZE, 3), np.uint8)))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"length": 0}, "the dataset Broken has no samples"),
        ({"channels": "3"}, "the dataset Broken has '3' channels: it must be a number of at least 1"),
        ({"channels": 1}, "the image of Broken[0] gives uint8 values of shape (6, 8, 3) for a box of 6 x 8 pixels"),
        ({"classes": "ab"}, "the dataset Broken has classes 'ab': expected their names"),
        ({"classes": {"b": 1, "a": 0}}, "has classes {'b': 1, 'a': 0}: expected their names, in a list"),
        ({"labels": [[1, 0], [0, 1], [1, 1], [2, 0]]}, "[2, 0] as the label of sample 3, but multilabel needs 0 or 1"),
        (
            {"name": lambda index: f"scan {index % 3}"},
            "the dataset Broken calls samples 0 and 3 'scan 0': a name is of",
        ),
        ({"patient": "p1"}, "the dataset Broken has `patient` 'p1': expected a function patient(index)"),
        ({"labels": [0, 1, "b", 1]}, "the dataset Broken gives 'b' as the label of sample 2: expected a class"),
        ({"labels": [0, 1, [1, 0], 1]}, "labels of one number and, of sample 2, of 2 numbers: all must be alike"),
        ({"image": np.zeros((6, 8, 3))}, "the image of Broken[0] is a ndarray: it needs size, such as"),
        ({"image": WholeImage(np.zeros(3))}, "the image of Broken[0] has size (): expected pixels along 1 to 3 axes"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(wrong, message):
    with pytest.raises(DatasetError, match=re.escape(message)):
        first_batch(adapt(Broken(**wrong)))


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (object(), "the dataset object has no __len__, label, image, channels: it needs"),
        ((Masks(), Masks(), Masks()), "3 datasets: expected one, or a pair"),
        ((Broken(), Broken(classes=("b", "a"))), "Broken and Broken, to train on and to validate with, have classes"),
        (
            TensorDataset(torch.rand(4, 3, 5, 5)),
            "the dataset TensorDataset gives 1 things as sample 0: expected",
        ),
        (
            TensorDataset(torch.rand(4, 3), torch.rand(4)),
            "gives an image 0 of float32 and shape (3,): expected",
        ),
        ([("image", 1), ("image", 2)], "the dataset tuple gives a str as sample 0: expected (image, target)"),
    ],
)
def test_what_is_no_dataset(found, message):
    with pytest.raises(DatasetError, match=re.escape(message)):
        adapt(found)


def test_a_file_of_the_users_that_is_not_there_is_a_bad_image():
    class Gone(Broken):
        def image(self, index):
            return WholeImage(np.load("/nowhere.npy")) if index == 1 else super().image(index)

    with pytest.raises(BadImage, match=r"Gone\[1\]: cannot be read: \[Errno 2\] No such file"):
        first_batch(adapt(Gone()))


def test_samples_of_a_patient_of_an_own_dataset_stay_together():
    class Scans(torch.utils.data.Dataset):
        classes = ("a", "b")

        def __len__(self):
            return 12

        def __getitem__(self, index):
            return torch.full((3, 4, 4), float(index)), index % 2

        def patient(self, index):
            return index // 3

    found, listed = adapt(Scans()), TensorDataset(torch.rand(12, 3, *SIZE), torch.arange(12) % 2)
    assert found.patients == [str(index // 3) for index in range(12)]
    listed.patients = np.arange(12) // 3
    assert adapt(listed).patients == found.patients
    assert adapt(torch.utils.data.Subset(Scans(), [7, 0, 1])).patients == ["2", "0", "0"]
    training, validation = split(found, 0.25)
    assert len({index // 3 for index in validation.indices}) == 1
    assert len(validation) == 3
    assert len(training) == 9


@pytest.mark.parametrize(
    ("labels", "strata"),
    [
        ([0, 0, 1, 0, 0, 0, 0, 0, 1, 0], [0, 0, 1, 0, 0, 0, 0, 0, 1, 0]),
        ([0.5, 2.5, 3.5, 1.5], [0, 2, 3, 1]),  # quarters
        ([[0.5, 9.0], [2.5, 1.0], [3.5, 1.0], [1.5, 1.0]], [0, 2, 3, 1]),
        ([[1, 0], [1, 1], [0, 0], [1, 0]], [0, 1, -1, 0]),  # the rarest label that it has
    ],
)
def test_labels_of_own_datasets_are_strata(labels, strata):
    found = adapt(Broken(length=len(labels), labels=labels))
    assert found.strata == strata
    if len(strata) == 10:
        assert sorted(strata[index] for index in split(found, 0.2)[1].indices) == [0, 1]


def test_masks_and_labels_that_need_images_are_one_stratum():
    assert adapt(Masks()).strata == [0] * 3
    assert adapt(TensorDataset(torch.rand(4, 3, *SIZE), torch.tensor([0, 1, 0, 1]))).strata == [0] * 4
