"""Which samples train, validate and test: by patient, and strata such as classes keep their shares.

    strata = strata_of(table.task, [row.patient for row in table.rows], [row.label for row in table.rows])
    validates = split_patients([row.patient for row in table.rows], strata, fraction=0.2, seed=0)
    folds = fold_of([row.patient for row in table.rows], strata, folds=5, seed=0)
    rows, remarks = split_rows(table.rows, table.task, table.classes, fraction=0.2, seed=0)  # by whatever says it

Shares count patients, not samples; a sample of which no patient is known is its own. Within a stratum, a hash of the
seed and the patient's name decides. So a split is the same on all machines and for all orders of samples.
"""

import csv
import hashlib
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import floor, fsum
from numbers import Real
from pathlib import Path
from typing import Any, Protocol

from mpi4dl._wording import counted, some
from mpi4dl.datasets.base import Dataset, DatasetError, Image, drawn, task_of
from mpi4dl.datasets.kinds import PICTURES, FileKind
from mpi4dl.datasets.labels import files_of, of_values
from mpi4dl.datasets.samples import Sample, read_split_file, require_patients_apart
from mpi4dl.datasets.table import found_in

MOST_BINS = 4  # of numbers, whose quantiles are strata
_PARTS = ("train", "val", "test")
_NOTHING_KNOWN: Mapping[str, bool] = {}


class Named(Dataset, Protocol):
    """A dataset whose samples have names that stay theirs when others come or go."""

    def name(self, index: int) -> str: ...


class Subset:
    """Some samples of a dataset, in the given order.

    Attributes:
        values: the form in which values of volumes are read; None for images. input_values: that of pictures of which
            others are made.
        compared: whether ranks compare what they have of a sample.
    """

    def __init__(self, whole: Named, indices: Sequence[int]) -> None:
        self.whole, self.indices = whole, indices
        self.classes = whole.classes
        self.channels = whole.channels
        self.task = task_of(whole)
        self.values: str | None = getattr(whole, "values", None)
        self.input_values: str | None = getattr(whole, "input_values", None)
        self.compared = bool(getattr(whole, "compared", False))

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def draws(self) -> bool:
        """Whether the samples are varied by random numbers of the dataset's own."""
        return bool(getattr(self.whole, "draws", False))

    @property
    def weights(self) -> list[float] | None:
        """What the loss of each sample is multiplied by, as a table says it; None if it does not."""
        rows = getattr(self.whole, "rows", ())
        return [rows[index].weight for index in self.indices] if rows and rows[0].weight is not None else None

    def drawn(self, key: tuple[int, ...]) -> "Subset":
        """The samples as they are drawn by a key."""
        whole = drawn(self.whole, key)
        return self if whole is self.whole else Subset(whole, self.indices)

    def tissue_patches(self, index: int, patch: int, key: tuple[int, ...] = ()) -> Any:
        """The patches of a sample that show tissue, as `SlideFolder.tissue_patches`; None for other images."""
        find = getattr(self.whole, "tissue_patches", None)
        return None if find is None else find(self.indices[index], patch, key)

    def name(self, index: int) -> str:
        return self.whole.name(self.indices[index])

    def label(self, index: int) -> Any:
        return self.whole.label(self.indices[index])

    def image(self, index: int) -> Image:
        return self.whole.image(self.indices[index])


def in_whole(part: Named) -> tuple[Any, Sequence[int]]:
    """The dataset that samples are of, and their numbers in it."""
    return (part.whole, part.indices) if isinstance(part, Subset) else (part, range(len(part)))


def split(
    dataset: Named,
    fraction: float,
    seed: int = 0,
    validating: Mapping[str, bool] = _NOTHING_KNOWN,
    *,
    validates: bool = True,
) -> tuple[Subset, Subset]:
    """The samples of a dataset to train on, and those to validate with, as `split_patients` splits them by name.

    A dataset that `tells_patients` has `patients`, one for each sample, whose samples are on one side. It may have
    `strata`, a number for each sample, such as its class. `validating` says it of samples that were split before, by
    name. There may be none to validate with where nothing `validates`. Raises as `split_patients`.
    """
    indices = range(len(dataset))
    names = [dataset.name(index) for index in indices]
    whole: Any = dataset
    known = getattr(whole, "tells_patients", False)
    patients = whole.patients if known else names
    strata = getattr(whole, "strata", [0] * len(names))
    aside = split_patients(
        patients, strata, fraction, seed, validating, names, validates, "patients" if known else "samples"
    )
    training, validation = ([i for i, held in enumerate(aside) if held is part] for part in (False, True))
    return Subset(dataset, training), Subset(dataset, validation)


def place(name: str, seed: int) -> float:
    """Where in [0, 1) a name lies, anywhere alike."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(errors="surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest) / 2**64


def strata_of(task: str | None, patients: Sequence[str], labels: Sequence[Any]) -> list[Any]:
    """The stratum of each sample for `split_patients` and `fold_of`; samples of one patient have the same.

    | task | stratum of a patient |
    | --- | --- |
    | classify | the most frequent class of its samples; of equally frequent ones the highest index |
    | multilabel | of the labels that a sample of it has, the one that the fewest patients have; -1 without any |
    | survival | 1 if a sample of it has the event, else 0 |
    | regress | the quantile of the mean of its first number, of at most four |
    | segment | 1 if a sample of it has an annotation, else 0 |
    | others | 0 |

    Args:
        task: what the labels are for; None without labels.
        patients: the patient of each sample.
        labels: the label of each sample, as `Sample` has it; to segment, whether it has an annotation.
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
    elif files_of(task):
        found = {patient: int(any(own)) for patient, own in of.items()}
    elif task == "regress":
        means = {patient: fsum(label[0] for label in own) / len(own) for patient, own in of.items()}
        below = {value: number for number, value in reversed([*enumerate(sorted(means.values()))])}  # equal ones alike
        found = {patient: below[value] * MOST_BINS // len(means) for patient, value in means.items()}
    else:
        found = dict.fromkeys(of, 0)
    return [found[patient] for patient in patients]


def _labels(task: str | None, rows: Sequence[Sample]) -> list[Any]:
    """What the samples are stratified by."""
    return [row.annotation is not None if files_of(task) else row.label for row in rows]


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
    names: Sequence[str] | None = None,
    validates: bool = True,
    noun: str = "patients",
) -> list[bool]:
    """Choose the patients to validate with: for each sample, whether it validates.

    `fraction` of the patients validate, rounded to a whole number, halves up. Strata share them by the method of the
    largest remainder. Each stratum of two patients or more has one on each side, which goes before the exact total.

    A patient with samples of several strata belongs to the most frequent, and of equally frequent ones to the highest.
    `known` says of patients, or of samples by their `names`, whether they validated before. They stay there, and new
    patients bring each stratum as near to its share as they can. Where nothing `validates` one patient is enough, who
    trains. `noun` is what is split, for messages.

    Raises:
        DatasetError: a fraction outside (0, 1), fewer than two patients, a patient on both sides in `known`, or
            nothing left on one side.
    """
    if not 0.0 < fraction < 1.0:
        raise DatasetError(f"`val_fraction` {fraction}: the share set aside for validation must be in (0, 1)")
    groups = _patients_by_stratum(patients, strata, seed)
    num_patients = sum(map(len, groups))
    if num_patients < 2 and not validates:
        return [False] * len(patients)
    if num_patients < 2:
        raise DatasetError(f"`val_fraction` {fraction} needs two {noun} or more, but there are {num_patients}")
    known = known or _NOTHING_KNOWN
    sides = {patient: known[patient] for patient in patients if patient in known}
    first: dict[str, str] = {}
    for patient, name in zip(patients, names or patients, strict=True):
        if name in known and sides.setdefault(patient, known[name]) != known[name]:
            parts = [("val" if validates else "train") for validates in (known[name], sides[patient])]
            other = repr(first[patient]) if patient in first else "its name"
            raise DatasetError(
                f"patient {patient!r} is in {parts[0]} by {name!r}, but in {parts[1]} by {other}, in the split "
                "that was kept"
            )
        if name in known:
            first.setdefault(patient, name)
    for group, wanted in zip(groups, _shares([*map(len, groups)], Fraction(str(fraction))), strict=True):
        new = [patient for patient in group if patient not in sides]
        more = max(0, wanted - sum(sides.get(patient, False) for patient in group))
        sides |= {patient: number < more for number, patient in enumerate(new)}
    held = [sides[patient] for patient in patients]
    if all(held) or not any(held):
        nothing = "train on" if all(held) else "validate with"
        raise DatasetError(f"the split that was kept leaves none of {num_patients} {noun} to {nothing}")
    return held


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
    """The fold of each sample, from 0; numbers of patients differ by at most one, in all and in each stratum.

    `patients`, `strata` and `seed` as in `split_patients`. Raises DatasetError for fewer than two folds, or for more
    than patients.
    """
    if folds < 2:
        raise DatasetError(f"`folds` {folds}: cross-validation needs two folds or more")
    dealt = [patient for group in _patients_by_stratum(patients, strata, seed) for patient in group]
    if folds > len(dealt):
        raise DatasetError(f"`folds` {folds} is more than the {len(dealt)} patients: each fold needs one or more")
    found = {patient: number % folds for number, patient in enumerate(dealt)}
    return [found[patient] for patient in patients]


def split_rows(
    rows: Sequence[Sample],
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
    validates: bool = True,
    table: Path | str = "the table",
    kind: FileKind = PICTURES,
) -> tuple[tuple[Sample, ...], tuple[str, ...]]:
    """The samples with their part (train, val, test, or nothing if it is left out) and fold, and remarks on them.

    A split file decides, or else the table's columns, `folds`, or `fraction`, in this order. With `folds` samples for
    tests stay apart, and the others of `fold` validate; by `of_fold` the split file is that of `fold` alone. `known` is
    as in `split_patients`, of paths of samples. Where nothing `validates` there may be nothing for it. `table` and
    `kind` are for messages.

    Raises:
        DatasetError: a patient in two parts, which names both samples; a file and folds that do not go together.
    """
    remarks: tuple[str, ...] = ()
    where = str(table)
    if split_file is not None:
        where = str(split_file)
        rows, remarks = _placed(rows, split_file, kind)
        require_patients_apart(rows, split_file)
        remarks += (f"split by {split_file}",)
        chosen = any(row.split in ("train", "val") for row in rows)
        if folds is not None and chosen and not of_fold:
            raise DatasetError(
                f"{split_file} has one split, and `folds` {folds} asks for as many: name the folder of splits_0.csv, "
                "splits_1.csv and so on by `split_file`, or a table with a column fold"
            )
        if folds is None and not chosen:
            raise DatasetError(f"{split_file} has folds, and no split: choose one by `folds` and `fold`")
        folds = None if chosen else folds
    if folds is not None:
        # Those of the table or file, or new ones; samples for tests stay apart.
        left_out = [split_file is not None and row.fold is None for row in rows]
        free = [n for n, row in enumerate(rows) if row.split != "test" and not left_out[n]]
        given = {rows[n].fold for n in free}
        if None in given and len(given) > 1:
            missing = [rows[n].name for n in free if rows[n].fold is None]
            without = counted(len(missing), kind.noun, kind.nouns)
            raise DatasetError(f"{where}: {without} without a fold, and others have one: {some(missing)}")
        if given == {None}:
            patients = [rows[n].patient for n in free]
            strata = strata_of(task, patients, _labels(task, [rows[n] for n in free]))
            numbers = fold_of(patients, strata, folds, seed)
        else:
            numbers = [rows[n].fold or 0 for n in free]
            if {*numbers} != {*range(folds)}:
                raise DatasetError(
                    f"{where} has the folds {some([*map(str, sorted({*numbers}))])}, but `folds` {folds} are numbered "
                    f"from 0 to {folds - 1}: choose another number of `folds`, or number them so"
                )
        placed = dict(zip(free, numbers, strict=True))
        found = tuple(
            row._replace(split="val" if placed[n] == fold else "train", fold=placed[n])
            if n in placed
            else row._replace(split=row.split if row.split == "test" else "", fold=None)
            for n, row in enumerate(rows)
        )
        remarks += (f"fold {fold} of {folds} validates, split by patient", *check_parts(found, task, kind=kind))
        return found, (*remarks, *_for_tests(found, kind, "in no fold"))
    if not any(row.split for row in rows):
        names, patients = [row.path for row in rows], [row.patient for row in rows]
        strata = strata_of(task, patients, _labels(task, rows))
        aside = split_patients(patients, strata, fraction, seed, known, names, validates)
        rows = tuple(
            row._replace(split="val" if validates else "train") for row, validates in zip(rows, aside, strict=True)
        )
        by = "" if of_values(task) else "whether there are annotations" if files_of(task) else "label"
        if any(row.fold is not None for row in rows):
            remarks += (f"the folds of {where} are not used: `folds` would validate one of them",)
        of_patients = kind.tells_patients or any(row.patient != row.name for row in rows)
        how = ["by patient"] * of_patients + [f"stratified by {by}"] * bool(by)
        return rows, (f"split {', '.join(how) or 'at random'}", *remarks)
    remarks += check_parts(rows, task, classes, kind)
    if not any(row.split == "val" for row in rows) and any(row.split == "test" for row in rows):
        rows = tuple(row._replace(split="val") if row.split == "test" else row for row in rows)
        remarks += (f"{where} has no {kind.nouns} for val: those for test validate",)
    remarks += (f"split by the {'folders' if Path(table).is_dir() else 'table'}",) if split_file is None else ()
    return tuple(rows), (*remarks, *_for_tests(rows, kind, "not used in training"))


def _for_tests(rows: Sequence[Sample], kind: FileKind, where: str) -> list[str]:
    count = sum(row.split == "test" for row in rows)
    return [f"{counted(count, f'{kind.noun} is', f'{kind.nouns} are')} for tests, and {where}"] if count else []


def _placed(rows: Sequence[Sample], path: Path, kind: FileKind) -> tuple[tuple[Sample, ...], tuple[str, ...]]:
    """The samples by a split file: those that it does not name are left out. Lines are those of the file."""
    named, numbers = {row.name: row.path for row in rows}, {row.path: number for number, row in enumerate(rows)}
    lines, remedy = read_split_file(path), ": write it as the table does, or remove the line"
    asked = [(line.line, named.get(line.name, line.name)) for line in lines]
    found = found_in(path, asked, [*numbers], kind, "in the table", remedy)
    placed = [row._replace(split="", fold=None) for row in rows]
    for line, name in zip(lines, found, strict=True):
        row = placed[numbers[name]]
        placed[numbers[name]] = row._replace(line=line.line, split=line.split, fold=line.fold)
    left = [row.name for row in rows if row.path not in {*found}]
    said = f"{counted(len(left), kind.noun, kind.nouns)} not in {path}, and left out: {some(left)}"
    return tuple(placed), (said,) if left else ()


def check_parts(
    rows: Sequence[Sample], task: str | None = None, classes: Sequence[str] = (), kind: FileKind = PICTURES
) -> tuple[str, ...]:
    """Warnings about classes that a part lacks, of `classes`, or else of all that there are.

    Raises DatasetError for a patient in two parts.
    """
    require_patients_apart(rows)
    has: dict[str, set[int]] = {}
    for row in rows:
        if row.split:
            has.setdefault(row.split, set()).update(_shown(row.label, task))
    if task == "regress" or all(row.label is None for row in rows):
        return ()
    expected = {*range(len(classes))}.union(*(_shown(row.label, task) for row in rows))
    warnings: list[str] = []
    for part in (each for each in _PARTS if each in has):
        missing = sorted(expected - has[part])
        if task == "survival":
            warnings += [f"{part} has no {kind.noun} with an event"] * bool(missing)
        else:
            names = [repr(classes[number]) if classes else str(number) for number in missing]
            warnings += [f"{part} has no {kind.noun} of class {', '.join(names)}"] * bool(names)
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


def fold_table(rows: Sequence[Sample]) -> str:
    """The fold of each sample, and which are for tests, as text of a CSV file, which `read_split_file` reads."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["slide_id", "case_id", "split", "fold"])
    for row in rows:
        split = row.split if row.split == "test" else ""
        if split or row.fold is not None:
            writer.writerow([row.name, row.patient, split, "" if row.fold is None else row.fold])
    return text.getvalue()
