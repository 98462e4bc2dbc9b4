"""Splits of slides by patient: the slides of a patient are together, and strata such as classes keep their shares.

    strata = strata_of(table.task, [row.patient for row in table.rows], [row.label for row in table.rows])
    validates = split_patients([row.patient for row in table.rows], strata, fraction=0.2, seed=0)
    folds = fold_of([row.patient for row in table.rows], strata, folds=5, seed=0)
    rows, remarks = split_rows(table.rows, table.task, table.classes, fraction=0.2, seed=0)  # by whatever says it

Shares count patients, not slides. Within a stratum, a hash of the seed and the patient's name decides. So a split is
the same on all machines and for all orders of slides.
"""

import csv
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import floor, fsum
from numbers import Real
from pathlib import Path
from typing import Any

from mpi4dl._wording import counted, some
from mpi4dl.datasets.base import DatasetError
from mpi4dl.datasets.labels import SURVIVAL
from mpi4dl.datasets.slides.tables import SlideRow, SlideTable, read_split_file, require_patients_apart
from mpi4dl.datasets.split import place

MOST_BINS = 4  # of numbers, whose quantiles are strata
_PARTS = ("train", "val", "test")
_NOTHING_KNOWN: Mapping[str, bool] = {}


def strata_of(task: str | None, patients: Sequence[str], labels: Sequence[Any]) -> list[Any]:
    """The stratum of each slide for `split_patients` and `fold_of`; slides of one patient have the same.

    | task | stratum of a patient |
    | --- | --- |
    | classify | the most frequent class of its slides; of equally frequent ones the highest index |
    | multilabel | of the labels that a slide of it has, the one that the fewest patients have; -1 without any |
    | survival | 1 if a slide of it has the event, else 0 |
    | regress | the quantile of the mean of its first number, of at most four |
    | segment | 1 if a slide of it has an annotation, else 0 |
    | others | 0 |

    Args:
        task: what the labels are for; None without labels.
        patients: the patient of each slide.
        labels: the label of each slide, as `SlideRow` has it; to segment, whether it has an annotation.
    """
    of: dict[str, list[Any]] = {}
    for patient, label in zip(patients, labels, strict=True):
        of.setdefault(patient, []).append(label)
    if task == "classify":
        found = {patient: _most_frequent(own) for patient, own in of.items()}
    elif task == "multilabel":
        has = {
            patient: [n for n, values in enumerate(zip(*own, strict=True)) if any(values)]
            for patient, own in of.items()
        }
        times = Counter(n for own in has.values() for n in own)
        found = {patient: min(own, key=lambda n: (times[n], n), default=-1) for patient, own in has.items()}
    elif task == "survival":
        found = {patient: int(max(event for _, event in own)) for patient, own in of.items()}
    elif task == "segment":
        found = {patient: int(any(own)) for patient, own in of.items()}
    elif task == "regress":
        found = _quantiles({patient: fsum(label[0] for label in own) / len(own) for patient, own in of.items()})
    else:
        found = dict.fromkeys(of, 0)
    return [found[patient] for patient in patients]


def _labels(task: str | None, rows: Sequence[SlideRow]) -> list[Any]:
    """What the slides are stratified by."""
    return [row.annotation is not None if task == "segment" else row.label for row in rows]


def _quantiles(values: Mapping[str, float]) -> dict[str, int]:
    """The quantile of each value, from 0; equal values are in the same."""
    ordered = sorted(values.values())
    below = {value: number for number, value in reversed([*enumerate(ordered)])}
    return {name: below[value] * MOST_BINS // len(ordered) for name, value in values.items()}


def _most_frequent(strata: Sequence[Any]) -> Any:
    """The most frequent stratum; of equally frequent ones the highest."""
    times = Counter(strata)
    return max(times, key=lambda stratum: (times[stratum], *_order(stratum)))


def _order(stratum: Any) -> tuple[float, str]:
    """A key that orders strata of any type, numbers by their value."""
    return (float(stratum) if isinstance(stratum, Real) else 0.0, repr(stratum))


def _patients_by_stratum(patients: Sequence[str], strata: Sequence[Any], seed: int) -> list[list[str]]:
    """The patients of each stratum in the order of their hashes; large strata first."""
    of: dict[str, list[Any]] = {}
    for patient, stratum in zip(patients, strata, strict=True):
        of.setdefault(patient, []).append(stratum)
    groups: dict[Any, list[str]] = {}
    for patient in sorted(of, key=lambda name: (place(name, seed), name)):
        groups.setdefault(_most_frequent(of[patient]), []).append(patient)
    return [groups[stratum] for stratum in sorted(groups, key=lambda each: (-len(groups[each]), _order(each)))]


def split_patients(
    patients: Sequence[str],
    strata: Sequence[Any],
    fraction: float,
    seed: int,
    known: Mapping[str, bool] | None = None,
    slides: Sequence[str] | None = None,
) -> list[bool]:
    """Choose the patients to validate with: for each slide, whether it validates.

    `fraction` of the patients validate, rounded to a whole number, halves up. Strata share them by the method of the
    largest remainder. Each stratum of two patients or more has one on each side, which goes before the exact total.

    Args:
        patients: the patient of each slide.
        strata: the stratum of each slide, as of `strata_of`. A patient with several belongs to the most frequent, and
            of equally frequent ones to the highest.
        fraction: the share of patients that validate, in (0, 1).
        seed: decides which patients, with their names.
        known: of patients, or of slides, whether they validated before. They stay there, and new patients bring each
            stratum as near to its share as they can.
        slides: the name of each slide, if `known` has names of slides.

    Raises:
        DatasetError: a fraction outside (0, 1), fewer than two patients, a patient on both sides in `known`, or
            nothing left on one side.
    """
    if not 0.0 < fraction < 1.0:
        raise DatasetError(f"`val_fraction` {fraction}: the share set aside for validation must be in (0, 1)")
    groups = _patients_by_stratum(patients, strata, seed)
    num_patients = sum(map(len, groups))
    if num_patients < 2:
        raise DatasetError(f"`val_fraction` {fraction} needs two patients or more, but there are {num_patients}")
    sides = _known_sides(patients, known or _NOTHING_KNOWN, slides)
    for group, wanted in zip(groups, _shares([*map(len, groups)], Fraction(str(fraction))), strict=True):
        new = [patient for patient in group if patient not in sides]
        more = max(0, wanted - sum(sides.get(patient, False) for patient in group))
        sides |= {patient: number < more for number, patient in enumerate(new)}
    validates = [sides[patient] for patient in patients]
    if all(validates) or not any(validates):
        nothing = "train on" if all(validates) else "validate with"
        raise DatasetError(f"the split that was kept leaves none of {num_patients} patients to {nothing}")
    return validates


def _known_sides(patients: Sequence[str], known: Mapping[str, bool], slides: Sequence[str] | None) -> dict[str, bool]:
    """Of the patients that were split before, whether they validated. Raises DatasetError for one on both sides."""
    sides = {patient: known[patient] for patient in patients if patient in known}
    first: dict[str, str] = {}
    for patient, slide in zip(patients, slides or patients, strict=True):
        if slide not in known:
            continue
        if sides.setdefault(patient, known[slide]) != known[slide]:
            parts = [("val" if validates else "train") for validates in (known[slide], sides[patient])]
            other = f"slide {first[patient]!r}" if patient in first else "its name"
            raise DatasetError(
                f"patient {patient!r} is in {parts[0]} by slide {slide!r}, but in {parts[1]} by {other}, in the split "
                "that was kept"
            )
        first.setdefault(patient, slide)
    return sides


def _shares(sizes: Sequence[int], fraction: Fraction) -> list[int]:
    """How many of each stratum validate; their sum is the rounded share of all, if strata of two or more allow it."""
    low = [int(size > 1) for size in sizes]
    high = [size - int(size > 1) for size in sizes]
    exact = [fraction * size for size in sizes]
    counts = [min(max(floor(share), low[i]), high[i]) for i, share in enumerate(exact)]
    total = floor(fraction * sum(sizes) + Fraction(1, 2))
    total = min(max(total, sum(low), 1), sum(high), sum(sizes) - 1)
    while sum(counts) != total:
        step = 1 if sum(counts) < total else -1
        free = [i for i, count in enumerate(counts) if low[i] <= count + step <= high[i]]
        counts[max(free, key=lambda i: step * (exact[i] - counts[i]))] += step
    return counts


def fold_of(patients: Sequence[str], strata: Sequence[Any], folds: int, seed: int) -> list[int]:
    """The fold of each slide, from 0; numbers of patients differ by at most one, in all and in each stratum.

    Args:
        patients: the patient of each slide.
        strata: the stratum of each slide, as in `split_patients`.
        folds: how many there are.
        seed: decides which patients are together, with their names.

    Raises:
        DatasetError: fewer than two folds, or more folds than patients.
    """
    if folds < 2:
        raise DatasetError(f"`folds` {folds}: cross-validation needs two folds or more")
    dealt = [patient for group in _patients_by_stratum(patients, strata, seed) for patient in group]
    if folds > len(dealt):
        raise DatasetError(f"`folds` {folds} is more than the {len(dealt)} patients: each fold needs one or more")
    found = {patient: number % folds for number, patient in enumerate(dealt)}
    return [found[patient] for patient in patients]


def split_rows(
    rows: Sequence[SlideRow],
    task: str | None,
    classes: Sequence[str] = (),
    *,
    fraction: float,
    seed: int,
    known: Mapping[str, bool] | None = None,
    folds: int | None = None,
    fold: int = 0,
    split_file: Path | None = None,
    of_fold: bool = False,
    table: Path | str = "the table",
) -> tuple[tuple[SlideRow, ...], tuple[str, ...]]:
    """The slides with their part (train, val, test, or nothing if it is left out) and fold, and remarks on them.

    A split file decides, or else the table's columns, `folds`, or `fraction`, in this order. With `folds` slides for
    tests stay apart, and the others of `fold` validate.

    Args:
        rows: the slides, as a table has them.
        task, classes: what the labels are for, and the names of classes.
        fraction, seed, known: as in `split_patients`; `known` has paths of slides.
        folds, fold: how many folds there are, and which one validates.
        split_file: a file as of `read_split_file`, in place of the table's columns.
        of_fold: the split file is that of `fold`, and has no other.
        table: where the slides are from, for messages.

    Raises:
        DatasetError: a patient in two parts, which names both slides; a file and folds that do not go together.
    """
    remarks: tuple[str, ...] = ()
    where = str(table)
    if split_file is not None:
        where = str(split_file)
        rows, remarks = _placed(rows, split_file)
        require_patients_apart(rows, split_file)
        remarks += (f"split by {split_file}",)
        chosen = any(row.part in ("train", "val") for row in rows)
        if folds is not None and chosen and not of_fold:
            raise DatasetError(
                f"{split_file} has one split, and `folds` {folds} asks for as many: name the folder of splits_0.csv, "
                "splits_1.csv and so on by `split_file`, or a table with a column fold"
            )
        if folds is None and not chosen:
            raise DatasetError(f"{split_file} has folds, and no split: choose one by `folds` and `fold`")
        by_folds = folds if not chosen else None
    else:
        by_folds = folds
    if by_folds is not None:
        rows, more = _by_fold(rows, task, by_folds, fold, seed, where, split_file is not None)
        return rows, remarks + more
    if not any(row.part for row in rows):
        names, patients = [row.path for row in rows], [row.patient for row in rows]
        aside = split_patients(patients, strata_of(task, patients, _labels(task, rows)), fraction, seed, known, names)
        rows = tuple(
            row._replace(part="val" if validates else "train") for row, validates in zip(rows, aside, strict=True)
        )
        by = "whether there are annotations" if task == "segment" else "label"
        return rows, (f"split by patient, stratified by {by}",)
    remarks += check_parts(rows, task, classes)
    if not any(row.part == "val" for row in rows) and any(row.part == "test" for row in rows):
        rows = tuple(row._replace(part="val") if row.part == "test" else row for row in rows)
        remarks += (f"{where} has no slides for val: those for test validate",)
    for_tests = sum(row.part == "test" for row in rows)
    if split_file is None:
        remarks += ("split by the table",)
    if for_tests:
        remarks += (f"{counted(for_tests, 'slide is', 'slides are')} for tests, and not used in training",)
    return tuple(rows), remarks


def _placed(rows: Sequence[SlideRow], path: Path) -> tuple[tuple[SlideRow, ...], tuple[str, ...]]:
    """The slides by a split file: those that it does not name are left out. Lines are those of the file."""
    of: dict[str, set[int]] = {}
    for number, row in enumerate(rows):
        base = row.path.rpartition("/")[2]
        for name in {row.path, row.path.rpartition(".")[0], base, base.partition(".")[0], base.rpartition(".")[0]}:
            of.setdefault(name, set()).add(number)
    of |= {row.slide: {number} for number, row in enumerate(rows)}
    used: dict[int, int] = {}
    placed = [row._replace(part="", fold=None) for row in rows]
    for line in read_split_file(path):
        found = of.get(line.slide.replace("\\", "/").removeprefix("./"), set())
        where = f"{path}, line {line.line}: slide {line.slide!r} is"
        if len(found) != 1:
            which = f"one of {len(found)} slides, such as {rows[min(found)].path}" if found else "not in the table"
            raise DatasetError(f"{where} {which}: write it as the table does, or remove the line")
        (number,) = found
        if number in used:
            raise DatasetError(f"{where} {rows[number].path}, as that of line {used[number]} is: name it once")
        used[number] = line.line
        placed[number] = placed[number]._replace(line=line.line, part=line.part, fold=line.fold)
    left = [row.slide for number, row in enumerate(rows) if number not in used]
    said = f"{counted(len(left), 'slide')} not in {path}, and left out: {some(left)}"
    return tuple(placed), (said,) if left else ()


def _by_fold(
    rows: Sequence[SlideRow], task: str | None, folds: int, fold: int, seed: int, where: str, named_only: bool
) -> tuple[tuple[SlideRow, ...], tuple[str, ...]]:
    """The slides by folds, those of the table or file or new ones; those for tests stay apart."""
    left_out = [named_only and row.fold is None for row in rows]
    free = [n for n, row in enumerate(rows) if row.part != "test" and not left_out[n]]
    given = {rows[n].fold for n in free}
    if None in given and len(given) > 1:
        missing = [rows[n].slide for n in free if rows[n].fold is None]
        raise DatasetError(
            f"{where}: {counted(len(missing), 'slide')} without a fold, and others have one: {some(missing)}"
        )
    if given == {None}:
        patients = [rows[n].patient for n in free]
        numbers = fold_of(patients, strata_of(task, patients, _labels(task, [rows[n] for n in free])), folds, seed)
    else:
        numbers = [rows[n].fold or 0 for n in free]
        if {*numbers} != {*range(folds)}:
            raise DatasetError(
                f"{where} has the folds {some([*map(str, sorted({*numbers}))])}, but `folds` {folds} are numbered from "
                f"0 to {folds - 1}: choose another number of `folds`, or number them so"
            )
    placed = dict(zip(free, numbers, strict=True))
    found = tuple(
        row._replace(part="val" if placed[n] == fold else "train", fold=placed[n])
        if n in placed
        else row._replace(part=row.part if row.part == "test" else "", fold=None)
        for n, row in enumerate(rows)
    )
    remarks = (f"fold {fold} of {folds} validates, split by patient", *check_parts(found, task))
    for_tests = sum(row.part == "test" for row in found)
    if for_tests:
        remarks += (f"{counted(for_tests, 'slide is', 'slides are')} for tests, and in no fold",)
    return found, remarks


def check_parts(rows: Sequence[SlideRow], task: str | None = None, classes: Sequence[str] = ()) -> tuple[str, ...]:
    """Check which slides are for training, validation and tests; return warnings about classes that a part lacks.

    Args:
        rows: the slides. Those without a part are left out.
        task: what the labels are for; None means that labels are classes or missing.
        classes: the names of classes, for warnings, and those that each part must have; by default those of `rows`.

    Raises:
        DatasetError: a patient is in two parts, which names it, both slides and their lines.
    """
    require_patients_apart(rows)
    has: dict[str, set[int]] = {}
    for row in rows:
        if row.part:
            has.setdefault(row.part, set()).update(_shown(row.label, task))
    if task == "regress" or all(row.label is None for row in rows):
        return ()
    expected = {*range(len(classes))}.union(*(_shown(row.label, task) for row in rows))
    warnings: list[str] = []
    for part in (each for each in _PARTS if each in has):
        missing = sorted(expected - has[part])
        if task == "survival":
            warnings += [f"{part} has no slide with an event"] * bool(missing)
        else:
            names = [repr(classes[number]) if classes else str(number) for number in missing]
            warnings += [f"{part} has no slide of class {', '.join(names)}"] * bool(names)
    return tuple(warnings)


def _shown(label: Any, task: str | None) -> set[int]:
    """The classes that a label shows: its own, those that it has, or 0 for an event."""
    if label is None or task == "regress":
        return set()
    if task == "survival":
        return {0} if label[1] else set()
    if task == "multilabel":
        return {number for number, value in enumerate(label) if value}
    return {label}


def split_table(table: SlideTable, parts: Sequence[str], folds: Sequence[int | None] | None = None) -> str:
    """The split of slides as text of a CSV file, which `read_slides` and `read_split_file` read.

    It has the columns slide_id, case_id, those of labels if there are any, and split, or split and fold.

    Args:
        table: the slides.
        parts: train, val or test for each slide. Slides with neither a part nor a fold are left out.
        folds: the fold of each slide.
    """
    names = {None: (), "classify": ("label",), "survival": SURVIVAL, "segment": ()}.get(table.task, table.classes)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["slide_id", "case_id", *names, "split", *(["fold"] if folds else [])])
    for row, part, fold in zip(table.rows, parts, folds or [None] * len(parts), strict=True):
        if part or fold is not None:
            in_fold = ["" if fold is None else fold] if folds else []
            writer.writerow([row.slide, row.patient, *_written(row.label, table), part, *in_fold])
    return text.getvalue()


def _written(label: Any, table: SlideTable) -> list[str]:
    """A label as a table has it: the name of its class, or its numbers without loss."""
    if label is None:
        return []
    if table.task == "classify":
        return [table.classes[label]]
    return [repr(float(number)).removesuffix(".0") for number in label]
