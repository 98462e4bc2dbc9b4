"""The writer of very large slides, small: files that the training command reads."""

from pathlib import Path

import numpy as np

from examples import gigapixel_slide
from mpi4dl import datasets
from mpi4dl.datasets.files import open_image
from mpi4dl.geometry import Interval


def test_slides_are_read_in_boxes(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr("sys.argv", ["gigapixel_slide.py", "--out", str(tmp_path), "--size", "1100"])
    monkeypatch.setattr(gigapixel_slide.tiles, "__defaults__", (700,))
    gigapixel_slide.main()
    training, validation = datasets.open(tmp_path, size=(64, 64))
    assert (len(training), len(validation), training.classes) == (2, 2, ("negative", "positive"))
    image = open_image(tmp_path / "train" / "positive" / "slide.tif")
    assert image.size == (1100, 1100)
    whole = image.read(Interval(0, 1100), Interval(0, 1100))
    assert np.array_equal(image.read(Interval(600, 1100), Interval(37, 90)), whole[600:, 37:90])
    assert whole.std() > 10  # tissue, not white
