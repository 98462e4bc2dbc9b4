"""mpi4dl.datasets.split: no patient on two sides, exact shares of strata, and the same for every order of samples."""

from collections import Counter
from collections.abc import Iterable
from fractions import Fraction
from functools import partial
from math import floor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpi4dl.datasets import DatasetError
from mpi4dl.datasets.kinds import SLIDES as OF_SLIDES
from mpi4dl.datasets.samples import Sample
from mpi4dl.datasets.split import (
    Subset,
    check_parts,
    fold_of,
    fold_table,
    split,
    split_patients,
    split_rows,
    strata_of,
)

# For each slide its patient and its class; a patient may have slides of several classes.
SLIDES = st.lists(st.tuples(st.integers(0, 30).map(str), st.integers(0, 3)), min_size=2, max_size=60).filter(
    lambda slides: len({patient for patient, _ in slides}) >= 2
)
HUNDREDTHS = st.integers(1, 99).map(lambda number: number / 100)


split_slides = partial(split_rows, kind=OF_SLIDES)


def by_patient(patients: list[str], values: list[Any]) -> dict[str, Any]:
    """The value of each patient, all of whose slides have the same."""
    found: dict[str, set[Any]] = {}
    for patient, value in zip(patients, values, strict=True):
        found.setdefault(patient, set()).add(value)
    assert all(len(each) == 1 for each in found.values()), "a patient is on two sides"
    return {patient: next(iter(each)) for patient, each in found.items()}


@given(SLIDES, HUNDREDTHS, st.integers(0, 3))
def test_shares_of_patients_are_exact_and_none_is_on_two_sides(
    slides: list[tuple[str, int]], fraction: float, seed: int
) -> None:
    patients, labels = [patient for patient, _ in slides], [label for _, label in slides]
    strata = strata_of("classify", patients, labels)
    sides = by_patient(patients, split_patients(patients, strata, fraction, seed))
    stratum_of = by_patient(patients, strata)
    sizes, held = Counter(stratum_of.values()), Counter(stratum_of[name] for name, side in sides.items() if side)
    for stratum, size in sizes.items():
        if size > 1:
            assert 1 <= held[stratum] < size
    exact = Fraction(round(100 * fraction), 100)
    total = floor(exact * len(sides) + Fraction(1, 2))
    least, most = sum(size > 1 for size in sizes.values()), sum(max(size - 1, 1) for size in sizes.values())
    assert sum(sides.values()) == min(max(total, least, 1), most, len(sides) - 1)
    if all(1 <= exact * size <= size - 1 for size in sizes.values()):  # nothing but rounding
        assert all(abs(held[stratum] - exact * size) < 1 for stratum, size in sizes.items())


@pytest.mark.parametrize(
    ("sizes", "fraction", "held"),
    [
        ((60, 40), 0.35, [21, 14]),
        ((10, 7, 7), 0.25, [2, 2, 2]),  # of 2.5, 1.75 and 1.75: the largest remainders are rounded up
        ((10, 2, 2), 0.1, [1, 1, 1]),  # of 1, 0.2 and 0.2: each of two has one on both sides
        ((3, 3), 0.25, [1, 1]),  # 1.5 in all, halves up
        ((6, 10), 0.25, [1, 3]),  # of 1.5 and 2.5: what remains is of the larger one
        ((1, 1, 1, 1), 0.5, [1, 1, 0, 0]),
    ],
)
def test_shares_of_strata(sizes: tuple[int, ...], fraction: float, held: list[int]) -> None:
    stratum_of = {f"{stratum}/{i}": stratum for stratum, size in enumerate(sizes) for i in range(size)}
    patients = [name for i, name in enumerate(stratum_of) for _ in range(1 + i % 3)]
    found = by_patient(patients, split_patients(patients, [stratum_of[name] for name in patients], fraction, 0))
    counts = Counter(stratum_of[name] for name, side in found.items() if side)
    assert [counts[stratum] for stratum in range(len(sizes))] == held


@given(SLIDES, HUNDREDTHS, st.integers(0, 3), st.randoms())
def test_the_order_of_slides_changes_nothing(
    slides: list[tuple[str, int]], fraction: float, seed: int, random: Any
) -> None:
    def decided(order: list[tuple[str, int]]) -> list[dict[str, Any]]:
        patients, labels = [patient for patient, _ in order], [label for _, label in order]
        found = []
        for task, values in (("classify", labels), ("regress", [(n / 3,) for n in labels]), (None, labels)):
            strata = strata_of(task, patients, values)
            found.append(by_patient(patients, split_patients(patients, strata, fraction, seed)))
            found.append(by_patient(patients, fold_of(patients, strata, 2, seed)))
        return found

    shuffled = slides.copy()
    random.shuffle(shuffled)
    assert decided(slides) == decided(shuffled)


def test_the_seed_decides_and_the_split_is_this_one_on_every_machine() -> None:
    patients = [f"p{i}" for i in range(12)]
    strata = [i % 2 for i in range(12)]
    held = {seed: [p for p, side in zip(patients, split_patients(patients, strata, 0.25, seed), strict=True) if side]
            for seed in (0, 1)}  # fmt: skip
    assert held == {0: ["p2", "p3", "p4"], 1: ["p3", "p4", "p6"]}
    assert fold_of(patients, strata, 3, 0) == [2, 2, 0, 0, 1, 0, 2, 1, 1, 1, 0, 2]


@given(SLIDES, st.integers(2, 6), st.integers(0, 3))
def test_each_patient_is_in_one_fold_and_folds_are_alike(slides: list[tuple[str, int]], folds: int, seed: int) -> None:
    patients, labels = [patient for patient, _ in slides], [label for _, label in slides]
    strata = strata_of("classify", patients, labels)
    if folds > len({*patients}):
        with pytest.raises(DatasetError, match=rf"{folds} is more than the {len({*patients})} patients"):
            fold_of(patients, strata, folds, seed)
        return
    found = by_patient(patients, fold_of(patients, strata, folds, seed))
    stratum_of = by_patient(patients, strata)
    for stratum in (None, *{*strata}):
        sizes = Counter(fold for name, fold in found.items() if stratum in (None, stratum_of[name]))
        counts = [sizes[fold] for fold in range(folds)]
        assert max(counts) - min(counts) <= 1
        assert stratum is not None or min(counts) >= 1


@given(SLIDES, HUNDREDTHS, HUNDREDTHS, st.booleans())
def test_patients_that_were_split_before_stay(
    slides: list[tuple[str, int]], before: float, now: float, by_slide: bool
) -> None:
    """Half of the slides were there before, and a run is resumed with all of them and another share."""
    patients, strata = [patient for patient, _ in slides], [label for _, label in slides]
    names = [f"slide {i}" for i in range(len(slides))]
    half = max(2, len(slides) // 2)
    if len({*patients[:half]}) < 2:
        return
    old = split_patients(patients[:half], strata[:half], before, 0)
    known = dict(zip(names if by_slide else patients, old, strict=False))
    sides = by_patient(patients, split_patients(patients, strata, now, 0, known, names))
    assert {patient: sides[patient] for patient in patients[:half]} == by_patient(patients[:half], old)


def test_new_patients_bring_a_split_to_its_share() -> None:
    patients = [f"p{i}" for i in range(20)]
    old = split_patients(patients[:10], [0] * 10, 0.3, 0)
    now = split_patients(patients, [0] * 20, 0.3, 1, dict(zip(patients, old, strict=False)))
    assert (sum(old), sum(now), now[:10]) == (3, 6, old)


@pytest.mark.parametrize(
    ("patients", "fraction", "known", "parts"),
    [
        ("pq", 0, {}, ["`val_fraction` 0"]),
        ("pq", 1.0, {}, ["`val_fraction` 1.0"]),
        ("pq", -0.5, {}, ["`val_fraction` -0.5: the share set aside for validation must be in (0, 1)"]),
        ("pq", 1.5, {}, ["`val_fraction` 1.5"]),
        ("pp", 0.5, {}, ["two patients", "1"]),
        ("", 0.5, {}, ["two patients", "0"]),
        ("pq", 0.5, {"p": True, "q": True}, ["none of 2 patients to train on"]),
        ("pq", 0.5, {"p": False, "q": False}, ["none of 2 patients to validate with"]),
        ("pqp", 0.5, {"s0": True, "s2": False}, ["'p'", "train", "'s2'", "val", "'s0'"]),
        ("pqp", 0.5, {"p": True, "s2": False}, ["'p'", "train", "'s2'", "val"]),
    ],
)
def test_splits_that_cannot_be(patients: str, fraction: float, known: dict[str, bool], parts: list[str]) -> None:
    with pytest.raises(DatasetError) as caught:
        split_patients([*patients], [0] * len(patients), fraction, 0, known, [f"s{i}" for i in range(len(patients))])
    assert [part for part in parts if part not in str(caught.value)] == [], caught.value


def test_one_fold_is_none() -> None:
    with pytest.raises(DatasetError, match="`folds` 1"):
        fold_of(["p", "q"], [0, 0], 1, 0)


@pytest.mark.parametrize(
    ("task", "patients", "labels", "strata"),
    [
        ("classify", "ppppqr", [0, 1, 1, 0, 0, 2], [1, 1, 1, 1, 0, 2]),  # as many of both: the highest
        ("classify", "ppp", [0, 0, 2], [0, 0, 0]),  # the most frequent
        ("survival", "pqrp", [(3.0, 1.0), (1.0, 0.0), (9.0, 1.0), (4.0, 0.0)], [1, 0, 1, 1]),
        ("multilabel", "pqrss", [(1, 0), (1, 1), (0, 0), (1, 0), (0, 1)], [0, 1, -1, 1, 1]),
        ("regress", "abcdefgh", [(float(n),) for n in (7, 0, 1, 2, 3, 4, 5, 6)], [3, 0, 0, 1, 1, 2, 2, 3]),
        ("regress", "abcd", [(1.0,), (1.0,), (1.0,), (2.0,)], [0, 0, 0, 3]),  # equal ones are together
        ("regress", "aab", [(0.0,), (10.0,), (1.0,)], [2, 2, 0]),  # by the mean of the patient
        (None, "pq", [None, None], [0, 0]),
    ],
)
def test_strata(task: str | None, patients: str, labels: list[Any], strata: list[int]) -> None:
    assert strata_of(task, [*patients], labels) == strata


def test_a_patient_of_several_strata_belongs_to_the_most_frequent_or_highest() -> None:
    """Patients 0 to 3 have one slide each of 0 and 1, and two others of 0: strata of four and two patients."""
    patients = ["0", "0", "1", "1", "2", "2", "3", "3", "4", "5"]
    strata = [0, 1, 1, 0, 0, 1, 1, 0, 0, 0]
    sides = by_patient(patients, split_patients(patients, strata, 0.5, 0))
    assert (sum(sides[name] for name in "0123"), sides["4"] + sides["5"]) == (2, 1)


def row(line: int, patient: str, part: str, label: Any = None) -> Sample:
    return Sample(line, f"s{line}", f"s{line}.svs", patient, part, label=label)


@pytest.mark.parametrize(
    ("task", "classes", "labels", "warnings"),
    [
        ("classify", ("x", "y"), {"train": [0, 1], "val": [0], "test": [1, 0]}, [["val", "'y'"]]),
        (None, (), {"train": [0, 1, 2], "val": [1]}, [["val", "0, 2"]]),
        ("classify", ("x", "y", "z"), {"train": [0, 1], "val": [0, 1, 2]}, [["train", "'z'"]]),
        ("multilabel", ("x", "y"), {"train": [(1.0, 1.0)], "test": [(0.0, 1.0)]}, [["test", "'x'"]]),
        ("survival", ("risk",), {"train": [(1.0, 1.0)], "val": [(1.0, 0.0)]}, [["val", "event"]]),
        ("regress", ("dose",), {"train": [(1.0,)], "val": [(1.0,)]}, []),
        (None, ("x", "y"), {"train": [None], "val": [None]}, []),
        ("classify", ("x", "y"), {"": [0, 1]}, []),
    ],
)
def test_classes_that_a_part_lacks(
    task: str | None, classes: tuple[str, ...], labels: dict[str, list[Any]], warnings: list[list[str]]
) -> None:
    given_rows = [
        row(n, f"{part}{n}", part, label) for part, all_of in labels.items() for n, label in enumerate(all_of)
    ]
    found = check_parts(given_rows, task, classes)
    assert len(found) == len(warnings)
    assert all(word in warning for words, warning in zip(warnings, found, strict=True) for word in words)


def rows_of(slides: list[tuple[str, int]]) -> tuple[Sample, ...]:
    return tuple(
        Sample(n + 2, f"s{n}", f"a/s{n}.svs", f"p{patient}", label=label) for n, (patient, label) in enumerate(slides)
    )


@settings(max_examples=60)
@given(SLIDES, st.integers(2, 4), st.integers(0, 3), st.booleans(), st.data())
def test_every_way_to_split_keeps_patients_whole(
    tmp_path_factory: pytest.TempPathFactory,
    slides: list[tuple[str, int]],
    folds: int,
    seed: int,
    by_file: bool,
    data: st.DataObject,
) -> None:
    """Folds, some with slides for tests apart; and the file that keeps them gives the same, also to a larger table."""
    rows = rows_of(slides)
    names = sorted({row.patient for row in rows})
    tests = data.draw(st.sets(st.sampled_from(names), max_size=len(names) - 1), label="patients for tests")
    rows = tuple(row._replace(split="test" if row.patient in tests else "") for row in rows)
    how: dict[str, Any] = {"fraction": 0.3, "seed": seed, "folds": folds}
    if folds > len(names) - len(tests):
        with pytest.raises(DatasetError, match="more than"):
            split_slides(rows, "classify", **how)
        return
    path: Path = tmp_path_factory.getbasetemp() / "of_folds.csv"  # no other test takes it for that of its runs
    held_out: list[str] = []
    for fold in range(folds):
        found, _ = split_slides(rows, "classify", fold=fold, **how)
        parts = by_patient([row.patient for row in found], [row.split for row in found])
        assert {name for name, part in parts.items() if part == "test"} == tests
        held_out += [name for name, part in parts.items() if part == "val"]
        if not by_file:
            continue
        if fold == 0:
            path.write_text(fold_table(found), newline="")
        more = (*rows, Sample(99, "new", "new.svs", "new patient", label=0))
        again, remarks = split_slides(more, "classify", fold=fold, split_file=path, **how | {"seed": seed + 1})
        assert [row.split for row in again] == [*(row.split for row in found), ""]
        assert any("1 slide not in" in remark and "new" in remark for remark in remarks)
    assert sorted(held_out) == [name for name in names if name not in tests]


@pytest.mark.parametrize(
    "name", ["s0", "s0.ome", "s0.ome.tif", "a/s0.ome", "a/s0.ome.tif", "./a/s0.ome.tif", "a\\s0.ome.tif", "slide 0"]
)
def test_a_split_file_may_name_slides_with_or_without_folder_and_ending(tmp_path: Path, name: str) -> None:
    (tmp_path / "split.csv").write_text(f"slide_id,split\n{name},val\ns1,train\n")
    first, second = rows_of([("0", 0), ("1", 1)])
    rows = (first._replace(path="a/s0.ome.tif", name="slide 0"), second)
    found, _ = split_slides(rows, "classify", fraction=0.3, seed=0, split_file=tmp_path / "split.csv")
    assert [row.split for row in found] == ["val", "train"]


@pytest.mark.parametrize(
    ("text", "how", "remarks"),
    [
        ("slide_id,split\ns0,train\ns1,train\ns2,val\ns3,val\n", {}, ["split by SPLIT"]),
        ("slide_id,split\ns0,train\ns1,train\ns2,test\ns3,train\n", {},
         ["split by SPLIT", "SPLIT has no slides for val: those for test validate"]),
        ("slide_id,split\ns0,train\ns2,val\ns3,test\n", {},
         ["1 slide not in SPLIT, and left out: s1", "split by SPLIT",
          "1 slide is for tests, and not used in training"]),
        (None, {}, ["split by patient, stratified by label"]),
        (None, {"folds": 2}, ["fold 0 of 2 validates, split by patient"]),
        (None, {"parts": ["train"] * 4}, ["split by the table"]),
        (None, {"parts": ["train", "train", "val", "test"]},
         ["split by the table", "1 slide is for tests, and not used in training"]),
        (None, {"parts": ["", "", "", "test"], "folds": 2},
         ["fold 0 of 2 validates, split by patient", "1 slide is for tests, and in no fold"]),
    ],
)  # fmt: skip
def test_remarks_say_who_is_where(tmp_path: Path, text: str | None, how: dict[str, Any], remarks: list[str]) -> None:
    file = tmp_path / "split.csv"
    parts = how.get("parts", [""] * 4)
    rows = tuple(
        each._replace(split=part)
        for each, part in zip(rows_of([("0", 0), ("0", 1), ("2", 1), ("3", 0)]), parts, strict=True)
    )
    if text is not None:
        file.write_text(text)
    split_file = None if text is None else file
    found = split_slides(rows, "classify", fraction=0.3, seed=0, folds=how.get("folds"), split_file=split_file)[1]
    assert [each.replace(str(file), "SPLIT") for each in found if "class" not in each] == remarks


@pytest.mark.parametrize(
    ("text", "how", "words"),
    [
        ("slide_id,split\ns0,train\ns9,val\n", {}, ["line 3", "s9 is no", "in the table"]),
        ("slide_id,split\ns0,train\ns0.svs,val\n", {}, ["line 3", "s0.svs", "line 2"]),
        ("slide_id,split\ns0,train\ns2,val\n", {"folds": 3}, ["one split", "`folds` 3", "splits_0.csv"]),
        ("slide_id,split\ns0,train\ns1,val\n", {}, ["line 3: patient 'p0' is in val by 's1'", "'s0' of line 2"]),
        ("slide_id,fold\ns0,0\ns2,1\n", {}, ["has folds", "`fold`"]),
        ("slide_id,fold\ns0,1\ns2,2\n", {"folds": 2}, ["folds 1, 2", "0 to 1"]),
        ("slide_id,fold\ns0,0\ns1,1\n", {"folds": 2}, ["line 3", "'p0'", "fold 1", "fold 0"]),
    ],
)
def test_split_files_that_do_not_fit(tmp_path: Path, text: str, how: dict[str, Any], words: list[str]) -> None:
    (tmp_path / "split.csv").write_text(text)
    rows = rows_of([("0", 0), ("0", 1), ("2", 1)])
    with pytest.raises(DatasetError) as caught:
        split_slides(rows, "classify", fraction=0.3, seed=0, split_file=tmp_path / "split.csv", **how)
    assert [word for word in ["split.csv", *words] if word not in str(caught.value)] == [], caught.value


# Datasets by the names of their samples


class Labelled:
    channels = 3
    classes = tuple("abcdef")

    def __init__(self, names: Iterable[str]) -> None:
        self.names = list(names)

    def __len__(self) -> int:
        return len(self.names)

    def name(self, index: int) -> str:
        return self.names[index]

    def label(self, index: int) -> int:
        return index % 6

    def image(self, index: int) -> Any:
        return index


HUNDRED = [f"a/{i}.png" for i in range(100)]


def names(subset: Subset) -> set[str]:
    return {subset.name(i) for i in range(len(subset))}


@given(st.sets(st.text(max_size=5)), st.sets(st.sampled_from(HUNDRED), max_size=50), st.integers(0, 9))
def test_samples_that_come_or_go_move_no_other_of_a_run_that_goes_on(new: set[str], gone: set[str], seed: int) -> None:
    before = split(Labelled(HUNDRED), 0.3, seed)
    known = {name: part is before[1] for part in before for name in names(part)}
    after = split(Labelled(sorted({*HUNDRED, *new} - gone)), 0.3, seed, known)
    for old, now in zip(before, after, strict=True):
        assert names(old) - gone <= names(now)
        assert names(now) <= names(old) | new


def test_the_share_is_the_fraction_of_each_stratum_and_patients_are_whole() -> None:
    dataset: Any = Labelled(f"{i}.png" for i in range(1000))
    training, validation = split(dataset, 0.2)
    assert names(training).isdisjoint(names(validation))
    assert (len(training), len(validation)) == (800, 200)
    dataset.strata = [int(i < 100) for i in range(1000)]
    assert sum(i < 100 for i in split(dataset, 0.2)[1].indices) == 20
    dataset.tells_patients, dataset.patients = True, [str(index // 5) for index in range(1000)]
    held = split(dataset, 0.2)[1].indices
    assert len({i // 5 for i in held}) == 40
    assert len(held) == 200


def test_a_larger_share_keeps_what_a_smaller_one_set_aside() -> None:
    assert names(split(Labelled(HUNDRED), 0.1)[1]) < names(split(Labelled(HUNDRED), 0.4)[1])


def test_names_in_no_encoding_have_a_place_too() -> None:
    assert sum(len(part) for part in split(Labelled([*HUNDRED, "a/\udcff.png"]), 0.3)) == 101


def test_one_sample_trains_where_nothing_validates() -> None:
    with pytest.raises(DatasetError, match="needs two samples or more, but there are 1"):
        split(Labelled(HUNDRED[:1]), 0.2)
    assert [len(part) for part in split(Labelled(HUNDRED[:1]), 0.2, validates=False)] == [1, 0]
