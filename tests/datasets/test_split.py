"""mpi4dl.datasets.split: samples of a dataset are split by patient or name, in exact shares of each stratum."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpi4dl.datasets import DatasetError
from mpi4dl.datasets.split import Subset, split


class Labelled:
    channels = 3
    classes = tuple("abcdef")

    def __init__(self, names):
        self.names = list(names)

    def __len__(self):
        return len(self.names)

    def name(self, index):
        return self.names[index]

    def label(self, index):
        return index % 6

    def image(self, index):
        return index


HUNDRED = [f"a/{i}.png" for i in range(100)]


def names(subset):
    return {subset.name(i) for i in range(len(subset))}


@given(st.sets(st.text(max_size=5)), st.sets(st.sampled_from(HUNDRED), max_size=50), st.integers(0, 9))
def test_samples_that_come_or_go_move_no_other_of_a_run_that_goes_on(new, gone, seed):
    before = split(Labelled(HUNDRED), 0.3, seed)
    known = {name: part is before[1] for part in before for name in names(part)}
    after = split(Labelled(sorted({*HUNDRED, *new} - gone)), 0.3, seed, known)
    for old, now in zip(before, after, strict=True):
        assert names(old) - gone <= names(now)
        assert names(now) <= names(old) | new


def test_the_share_is_the_fraction_of_each_stratum_and_patients_are_whole():
    dataset = Labelled(f"{i}.png" for i in range(1000))
    training, validation = split(dataset, 0.2)
    assert names(training).isdisjoint(names(validation))
    assert (len(training), len(validation)) == (800, 200)
    dataset.strata = [int(i < 100) for i in range(1000)]
    assert sum(i < 100 for i in split(dataset, 0.2)[1].indices) == 20
    dataset.tells_patients, dataset.patients = True, [str(index // 5) for index in range(1000)]
    held = split(dataset, 0.2)[1].indices
    assert len({i // 5 for i in held}) == 40
    assert len(held) == 200


def test_a_larger_share_keeps_what_a_smaller_one_set_aside():
    assert names(split(Labelled(HUNDRED), 0.1)[1]) < names(split(Labelled(HUNDRED), 0.4)[1])


def test_the_seed_decides():
    chosen = [names(split(Labelled(HUNDRED), 0.2, seed)[1]) for seed in (0, 0, 1)]
    assert chosen[0] == chosen[1] != chosen[2]


def test_samples_that_were_split_before_stay_where_they_were():
    known = {"a/0.png": True, "a/1.png": False, "gone": True}
    for fraction in (0.05, 0.95):
        training, validation = split(Labelled(HUNDRED), fraction, validating=known)
        assert "a/0.png" in names(validation)
        assert "a/1.png" in names(training)


def test_names_in_no_encoding_have_a_place_too():
    assert sum(len(part) for part in split(Labelled([*HUNDRED, "a/\udcff.png"]), 0.3)) == 101


def test_a_subset_renumbers_its_samples():
    subset = Subset(Labelled("xyz"), [2, 1])
    assert (len(subset), subset.label(0), subset.image(1), subset.name(1)) == (2, 2, 1, "y")
    assert subset.classes == tuple("abcdef")


@pytest.mark.parametrize("fraction", [0, 1, -0.5, 1.5])
def test_fractions_that_cannot_be(fraction):
    message = f"`val_fraction` {fraction}: the share set aside for validation must be in (0, 1)"
    with pytest.raises(DatasetError, match=re.escape(message)):
        split(Labelled(HUNDRED), fraction)


def test_one_sample_trains_where_nothing_validates():
    with pytest.raises(DatasetError, match="needs two samples or more, but there are 1"):
        split(Labelled(HUNDRED[:1]), 0.2)
    assert [len(part) for part in split(Labelled(HUNDRED[:1]), 0.2, validates=False)] == [1, 0]
