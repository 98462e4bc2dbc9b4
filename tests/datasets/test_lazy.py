"""Images that are read when somebody asks: any box of them is that box of the tiles which a loader would have read."""

import numpy as np
import pytest
import torch

from mpi4dl import datasets
from mpi4dl.datasets.arrays import ArrayDataset
from mpi4dl.datasets.loader import Loader
from mpi4dl.datasets.transform import View
from mpi4dl.datasets.transformed import LazyImages
from mpi4dl.geometry import Box, Interval


def loaders(lazy: bool) -> Loader:
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (5, 40, 30, 3), dtype=np.uint8)
    view = View((24, 33), augmentation=datasets.Augmentation(crop=0.7, flip_rows=True, flip_cols=True, brightness=0.3))
    whole = Interval(0, 24), Interval(0, 33)
    return Loader(
        ArrayDataset(images, np.arange(5), tuple("abcde")),
        view,
        2,
        lambda n: [Box(Interval(0, n), *whole)],
        shuffle=True,
        lazy=lazy,
    )


def test_a_box_is_that_of_the_tile() -> None:
    for lazy, ready in zip(loaders(True).epoch(3), loaders(False).epoch(3), strict=True):
        (images,), (tile,) = lazy.tiles, ready.tiles
        assert isinstance(images, LazyImages)
        assert isinstance(tile, torch.Tensor)
        assert images.shape == tile.shape
        assert images.dtype == tile.dtype
        last = Interval(len(tile) - 1, len(tile))
        for box in (Box(last, Interval(5, 17), Interval(0, 33)), Box(Interval(0, 1), Interval(0, 1), Interval(32, 33))):
            expected = tile[(slice(*box.batch), slice(None), slice(*box.rows), slice(*box.cols))]
            torch.testing.assert_close(images.read(box), expected, rtol=0, atol=1e-6)
        assert torch.equal(
            images[[len(tile) - 1]].read(Box(Interval(0, 1), *box.space)), images.read(Box(last, *box.space))
        )
        assert torch.equal(lazy.labels, ready.labels)


def test_an_image_that_cannot_be_opened_is_found_with_its_batch() -> None:
    class Broken(ArrayDataset):
        def image(self, index: int):  # type: ignore[no-untyped-def]
            if index == 1:
                raise datasets.BadImage("1", "broken")
            return super().image(index)

    images = np.zeros((2, 8, 8, 3), dtype=np.uint8)
    box = Box(Interval(0, 2), Interval(0, 8), Interval(0, 8))
    loader = Loader(
        Broken(images, np.arange(2), ("a", "b")), View((8, 8)), 2, lambda n: [box], on_bad_image="report", lazy=True
    )
    (batch,) = loader.epoch(0)
    assert list(batch.errors) == [1]
    with pytest.raises(datasets.BadImage):
        batch.tiles[0].read(box)  # type: ignore[union-attr]
