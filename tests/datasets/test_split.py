"""mpi4dl.datasets.split: every class is split by the same fraction, and the two parts are disjoint."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpi4dl.datasets import DatasetError
from mpi4dl.datasets.split import Subset, split


class Labelled:
    channels = 3

    def __init__(self, labels):
        self.labels = labels
        self.classes = tuple("abcdef")

    def __len__(self):
        return len(self.labels)

    def label(self, index):
        return self.labels[index]

    def image(self, index):
        return index


@given(st.lists(st.integers(0, 5), min_size=12), st.floats(0.01, 0.99), st.integers(0, 9))
def test_each_class_is_split_by_the_fraction(labels, fraction, seed):
    training, validation = split(Labelled([*labels, 0, 0]), fraction, seed)
    chosen = [[subset.image(i) for i in range(len(subset))] for subset in (training, validation)]
    assert sorted(chosen[0] + chosen[1]) == list(range(len(labels) + 2))
    for label in range(6):
        count = [*labels, 0, 0].count(label)
        aside = [validation.label(i) for i in range(len(validation))].count(label)
        assert abs(aside - fraction * count) <= 1
        assert (aside >= 1) == (count >= 2)
        assert aside < count or count == 0


def test_the_seed_decides():
    dataset = Labelled([0] * 50 + [1] * 50)

    def chosen(seed):
        _, validation = split(dataset, 0.2, seed)
        return [validation.image(i) for i in range(len(validation))]

    assert chosen(0) == chosen(0)
    assert chosen(0) != chosen(1)
    assert len(chosen(0)) == 20


def test_a_subset_renumbers_its_samples():
    subset = Subset(Labelled([0, 1, 2, 3]), [3, 1])
    assert (len(subset), subset.label(0), subset.image(1), subset.classes) == (2, 3, 1, tuple("abcdef"))


@pytest.mark.parametrize("fraction", [0, 1, -0.5, 1.5])
def test_fractions_that_cannot_be(fraction):
    message = f"validation_fraction={fraction}: the share set aside for validation must be in (0, 1)"
    with pytest.raises(DatasetError, match=re.escape(message)):
        split(Labelled([0, 0, 1, 1]), fraction)


def test_nothing_to_validate_with():
    message = "2 images in 6 classes leave none to validate with: a class needs two images"
    with pytest.raises(DatasetError, match=re.escape(message)):
        split(Labelled([0, 1]), 0.5)
