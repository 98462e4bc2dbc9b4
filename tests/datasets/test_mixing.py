"""mpi4dl.datasets.augment, .sampling and .transforms: alike on all ranks, box by box, and again when a run goes on."""

import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import PIL.Image
import pytest
import torch

from mpi4dl.datasets import Augmentation, DatasetError, Loader, Variation, View
from mpi4dl.datasets.arrays import Synthetic
from mpi4dl.datasets.augment import Mixup, vary_colour
from mpi4dl.datasets.loader import balanced, class_counts
from mpi4dl.datasets.sources import open_files
from mpi4dl.datasets.transform import Pointwise
from mpi4dl.geometry import Box, GridShape, Interval
from tests.datasets.boxes import noise_image
from tests.datasets.sharing import owned

SIZE = (12, 10)
DATASET = Synthetic(11, (15, 13), num_classes=3)
MIXUP = Mixup(0.4, 3, seed=5)
whole = owned(GridShape(1, 1, 1), SIZE, 0)
VIEW = View(SIZE, augmentation=Augmentation(flip_rows=True, contrast=0.3), seed=4)


def loader(boxes_of, **options):
    return Loader(DATASET, VIEW, 4, boxes_of, seed=1, shuffle=True, **options)


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("grid", [GridShape(1, 2, 2), GridShape(4, 1, 1), GridShape(2, 3, 1)])
def test_ranks_mix_their_boxes_of_what_is_mixed_on_one(grid, lazy):
    """The partner of a sample may be another rank's; shares and partners are those of the plain batch."""
    plain = list(loader(whole).epoch(2))
    for number, batch in enumerate(loader(whole, mixup=MIXUP).epoch(2)):
        before, (share, partners) = plain[number], MIXUP.draw(2, batch.indices)
        assert sorted(partners) == list(range(len(partners)))
        expected = share * before.tiles[0] + (1 - share) * before.tiles[0][list(partners)]
        torch.testing.assert_close(batch.tiles[0], expected, rtol=0, atol=1e-6)
        classes = torch.nn.functional.one_hot(before.labels, 3).float()
        assert torch.equal(batch.labels, share * classes + (1 - share) * classes[list(partners)])
        for rank in range(grid.size):
            part = next(loader(owned(grid, SIZE, rank), mixup=MIXUP, lazy=lazy).epoch(2, start=number))
            (box,) = owned(grid, SIZE, rank)(len(batch.indices))
            tile = part.tiles[0]
            if lazy:
                tile = tile.read(Box(Interval(0, box.batch.length), *box.space))
            assert torch.equal(tile, batch.tiles[0][(slice(*box.batch), slice(None), *(slice(*i) for i in box.space))])
            assert torch.equal(part.labels, batch.labels)


def test_a_sample_is_lost_with_its_partner(tmp_path):
    for name in ("a/0", "a/1", "b/2", "b/3", "b/4"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        PIL.Image.new("RGB", (20, 20), (9,) * 3).save(tmp_path / f"{name}.png")
    (tmp_path / "b/2.png").write_bytes(b"")
    mixup, errors = Mixup(1.0, 2), set()
    for rank in range(5):
        options = {"on_bad_image": "report", "mixup": mixup}
        (batch,) = Loader(open_files(tmp_path), View(SIZE), 5, owned(GridShape(5, 1, 1), SIZE, rank), **options).epoch(
            0
        )
        errors |= set(batch.errors)
        assert len({*batch.errors.values()}) <= 1
    assert errors == {2, mixup.draw(0, (0, 1, 2, 3, 4)).partners.index(2)}


def test_mixed_numbers_and_what_cannot_be():
    labels = torch.tensor([[1.0], [3.0]])
    assert MIXUP.labels(labels, MIXUP.draw(0, (0, 1))._replace(share=0.25, partners=(1, 0))).tolist() == [[2.5], [1.5]]
    with pytest.raises(DatasetError, match="mixup=-1: the parameter of the Beta distribution must be above 0"):
        Mixup(-1, 2)


def test_balanced_epochs_show_each_class_equally_often():
    labels = [0] * 50 + [2] * 7 + [5] * 4
    seen = Counter()
    for epoch in range(20):
        order = balanced(labels, 3, epoch)
        counts = Counter(labels[index] for index in order)
        assert len(order) == len(labels)
        assert sorted(counts.values()) == [20, 20, 21]
        assert balanced(labels, 3, epoch) == order
        of_rare = Counter(index for index in order if labels[index] == 5)
        assert sorted(of_rare.values())[0] >= 5  # all of them, before one comes again
        seen |= Counter(order)
    assert len(seen) == len(labels)
    assert all(balanced(labels, 3, a) != balanced(labels, 3, b) for a, b in pairwise(range(5)))


def test_a_balanced_epoch_is_resumed():
    options = {"sampling": "balanced", "mixup": MIXUP, "num_workers": 2}
    all_of_it = [(b.indices, b.labels.tolist()) for b in loader(whole, **options).epoch(3)]
    assert [(b.indices, b.labels.tolist()) for b in loader(whole, **options).epoch(3, start=1)] == all_of_it[1:]
    assert class_counts(DATASET) == (4, 4, 3)


def darker(pixels, random):
    """Drawn once for an image, whatever box of it is asked for."""
    return pixels if random is None else (pixels * random.uniform(0.5, 1.0)).astype(pixels.dtype)


def inverted(pixels):
    return 255 - pixels


def test_a_transform_makes_of_boxes_what_it_makes_of_the_whole():
    transform = Pointwise(darker)
    transform.check(2, 3)
    view = View(SIZE, augmentation=Augmentation(), seed=4, transform=transform)
    image, variation = DATASET.image(0), view.variation(0, 1)
    all_of_it = view.tile(image, Interval(0, 12), Interval(0, 10), variation=variation)
    part = view.tile(image, Interval(3, 7), Interval(2, 9), variation=variation)
    assert np.array_equal(part, all_of_it[:, 3:7, 2:9])
    assert not np.array_equal(all_of_it, View(SIZE).tile(image, *whole(1)[0].space, variation=variation))
    assert not np.array_equal(all_of_it, view.tile(image, *whole(1)[0].space, variation=view.variation(0, 2)))
    still = View(SIZE, transform=transform)  # validation
    assert np.array_equal(still.tile(image, *whole(1)[0].space), View(SIZE).tile(image, *whole(1)[0].space))
    Pointwise(inverted).check(2, 3)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda pixels: pixels - pixels.mean().astype(np.uint8),
            "makes of a box of pixels another one than of the whole",
        ),
        (lambda pixels: np.roll(pixels, 1, axis=1), "makes of a box of pixels another one than of the whole"),
        (lambda pixels: pixels + np.random.default_rng().integers(9, size=3, dtype=np.uint8), "be the same each time"),
        (
            lambda pixels, random: pixels * (random or np.random).random(pixels.shape),
            "give it a second argument, `random`",
        ),
        (
            lambda pixels, random: pixels * (random.random(pixels.shape) if random else 1.0),
            "another one than of the whole",
        ),
        (lambda pixels: pixels[::2], r"makes uint8 of shape \(3, 6, 3\) from a box of shape \(6, 6, 3\)"),
        (lambda pixels: pixels.astype(np.int64), "makes int64 of shape"),
        (lambda pixels, random, more: pixels, "takes pixels, random, more: expected pixels, or pixels and random"),
        (3, "the transform 3 cannot be called"),
    ],
)
def test_transforms_that_boxes_cannot_have(function, message):
    with pytest.raises(DatasetError, match=message):
        Pointwise(function).check(2, 3)


ALL = Augmentation(crop=0.5, flip_rows=True, flip_cols=True, brightness=0.3, contrast=0.3, saturation=0.3)


def test_the_same_seed_epoch_and_sample_vary_alike_and_others_do_not():
    assert ALL.draw(1, 2, 3) == ALL.draw(1, 2, 3)
    assert len({ALL.draw(1, 2, 3), ALL.draw(0, 2, 3), ALL.draw(1, 0, 3), ALL.draw(1, 2, 0)}) == 4


def test_values_stay_in_their_ranges_and_flips_happen_half_of_the_time():
    drawn = [ALL.draw(0, 0, index) for index in range(400)]
    assert all(0.5 <= v.crop <= 1 and 0 <= v.down <= 1 and 0 <= v.across <= 1 for v in drawn)
    assert all(0.7 <= factor <= 1.3 for v in drawn for factor in (v.brightness, v.contrast, v.saturation))
    assert 140 < sum(v.flip_rows for v in drawn) < 260
    assert 140 < sum(v.flip_cols for v in drawn) < 260
    assert 60 < sum(v.flip_rows and v.flip_cols for v in drawn) < 140


def test_turning_one_option_off_leaves_the_others_as_they_were():
    assert replace(ALL, flip_rows=False).draw(0, 0, 1) == replace(ALL.draw(0, 0, 1), flip_rows=False)
    assert replace(ALL, crop=1.0).draw(0, 0, 1) == replace(ALL.draw(0, 0, 1), crop=1.0)


def test_nothing_to_vary_is_the_identity_but_for_the_place_of_crops():
    drawn = Augmentation(flip_cols=False).draw(0, 0, 0)
    assert replace(drawn, down=0.5, across=0.5, deep=0.5) == Variation()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"crop": 0.0}, "crop=0.0: the smallest share of a side to keep must be in (0, 1]"),
        ({"crop": 1.5}, "crop=1.5: the smallest share of a side to keep must be in (0, 1]"),
        ({"contrast": -0.1}, "contrast=-0.1: a strength must be in [0, 1]"),
        ({"saturation": 2}, "saturation=2: a strength must be in [0, 1]"),
    ],
)
def test_wrong_strengths(wrong, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Augmentation(**wrong)


def test_colours_follow_their_definitions():
    pixels = np.array([[[100, 150, 50]]], np.uint8)
    grey = 0.299 * 100 + 0.587 * 150 + 0.114 * 50
    varied = vary_colour(pixels, Variation(brightness=1.1, contrast=0.8, saturation=0.5)).ravel()
    expected = [1.1 * (127.5 + 0.8 * (0.5 * value + 0.5 * grey - 127.5)) for value in (100, 150, 50)]
    np.testing.assert_allclose(varied, expected, rtol=1e-5)


def test_colours_are_limited():
    pixels = np.array([[[0, 255, 128]]], np.uint8)
    assert vary_colour(pixels, Variation(brightness=2, contrast=2)).ravel().tolist() == [0, 255, 255]


def test_saturation_of_grey_images_is_refused():
    with pytest.raises(ValueError, match=r"saturation needs images of 3 channels, these have 1: set saturation=0"):
        vary_colour(noise_image(3, 3, 1), Variation(saturation=0.5))
