"""examples.tissue_slides: the slides are there, differ by the stained region only, and are made of disjoint tissue."""

import re

import numpy as np
import pytest
import tifffile
from skimage.color import rgb2hed
from skimage.data import immunohistochemistry

from examples.tissue_slides import BROWN, compose, load_tissue, main
from mpi4dl import datasets
from mpi4dl.geometry import Interval

SMALL = ["--train", "4", "--val", "2", "--size", "300"]


@pytest.fixture(scope="module")
def tissue():
    return load_tissue(0)


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "new" / "tissue"
    main(["--out", str(folder), *SMALL])
    return folder


def test_the_folders_are_what_datasets_open_expects(out):
    train, val = datasets.open(out)
    assert train.classes == val.classes == ("negative", "positive")
    assert [train.label(i) for i in range(len(train))] == [0, 0, 1, 1]
    assert [val.label(i) for i in range(len(val))] == [0, 1]
    slide = train.image(0)
    assert slide.size == (300, 300)
    assert slide.read(Interval(250, 300), Interval(0, 300)).shape == (50, 300, 3)


def test_every_text_says_that_the_slides_are_synthetic(out, capsys):
    path = next((out / "train/positive").glob("*.tif"))
    with tifffile.TiffFile(path) as file:
        assert "Synthetic composition of real tissue" in file.pages[0].description
        assert file.pages[0].tilewidth == 256
    assert "Synthetic compositions of real tissue" in (out / "README.txt").read_text()
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "synthetic compositions of real tissue" in " ".join(capsys.readouterr().out.split())


def test_a_second_run_does_nothing_and_other_settings_are_refused(out, capsys):
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    main(["--out", str(out), *SMALL])
    assert "already there, nothing to do (train=4 val=2 size_px=300 seed=0)" in capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        main(["--out", str(out), *SMALL, "--seed", "1"])
    assert caught.value.code == 2
    assert "seed=1): remove it or choose another --out" in capsys.readouterr().err
    assert before == {path: path.stat().st_mtime_ns for path in out.rglob("*")}


def test_a_run_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def fail(slide, tissue):
        raise OSError("disk full")

    monkeypatch.setattr("examples.tissue_slides.write_slide", fail)
    with pytest.raises(OSError, match="disk full"):
        main(["--out", str(tmp_path / "tissue"), *SMALL])
    assert list(tmp_path.iterdir()) == []


def test_a_positive_slide_differs_from_its_negative_twin_by_one_brown_region(tissue):
    for seed in range(3):
        negative, positive = (compose(tissue, 300, label, np.random.default_rng(seed)) for label in (False, True))
        changed = (negative != positive).any(axis=2)
        rows, cols = np.flatnonzero(changed.any(axis=1)), np.flatnonzero(changed.any(axis=0))
        assert 50 <= np.ptp(rows) < 120
        assert 50 <= np.ptp(cols) < 120
        middle = np.s_[rows.mean().astype(int) - 10 :, cols.mean().astype(int) - 10 :]
        brown = [(rgb2hed(slide[middle][:20, :20])[..., 2] > BROWN).mean() for slide in (negative, positive)]
        assert brown[0] < 0.3
        assert brown[1] > 0.6


def test_training_and_validation_tissue_are_disjoint_halves():
    left, right = (load_tissue(part).pixels for part in (0, 1))
    assert np.array_equal(np.concatenate([left, right], axis=1), immunohistochemistry())


def test_the_seed_decides(tissue):
    first, again, other = (compose(tissue, 200, True, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize("wrong", [["--train", "1"], ["--size", "12.5"], ["--seed", "-3"]])
def test_settings_that_cannot_be(wrong, tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--out", str(tmp_path / "tissue"), *wrong])
    assert caught.value.code == 2
    assert re.search(r"expected (a whole number of at least \d+|one argument)", capsys.readouterr().err)
