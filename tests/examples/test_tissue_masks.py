"""The small set for segmentation: masks lie on what they are of, and the halves of the tissue stay apart."""

import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from skimage import data

from examples import tissue_masks
from mpi4dl import datasets


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("masks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["tissue_masks", "--out", str(folder)])
        tissue_masks.main()
    return folder


def test_it_is_a_set_of_masks_with_named_classes(written: Path) -> None:
    training, validation = datasets.open(written, size=(128, 128), task="segment")
    assert (len(training), len(validation)) == (48, 16)
    assert training.classes == validation.classes == tissue_masks.CLASSES
    for part, count in tissue_masks.PARTS.items():
        masks = [np.asarray(Image.open(written / part / "masks" / f"{n:03d}.png")) for n in range(count)]
        assert all(set(np.unique(mask)) <= {0, 1, 2} for mask in masks)
        assert all((2 in mask) == (n % 4 == 0) for n, mask in enumerate(masks))


def test_masks_lie_on_what_they_are_of(written: Path) -> None:
    for number in range(0, 48, 4):  # the cell is brighter than what it floats in
        picture = np.asarray(Image.open(written / "train" / "images" / f"{number:03d}.png"))[..., 0].astype(float)
        mask = np.asarray(Image.open(written / "train" / "masks" / f"{number:03d}.png")) == 2
        assert picture[mask].mean() > picture[~mask].mean() + 50


def test_the_halves_stay_apart(written: Path) -> None:
    tissue = data.immunohistochemistry()
    halves = {"train": tissue[:, :256], "val": tissue[:, 256:]}
    for part, half in halves.items():
        crop = np.asarray(Image.open(written / part / "images" / "001.png"))
        places = np.argwhere((half[:385, :129] == crop[0, 0]).all(-1))
        assert any(np.array_equal(half[r : r + 128, c : c + 128], crop) for r, c in places)
