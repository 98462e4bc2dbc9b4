"""Random tables of labels as clinics write them, against what was meant: labels, patients, splits, folds, resolutions.

A sheet is a meaning and a way to write it: delimiters, quotes, encodings, decimal commas, spellings of columns and of
values that are not there. With a mistake in it, it must be refused.
"""

import csv
import io
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from mpi4dl.datasets import DatasetError
from mpi4dl.datasets.kinds import PICTURES, SLIDES
from mpi4dl.datasets.samples import read_samples
from mpi4dl.datasets.table import as_number
from tests.pool.ranks import Ranks

MARKS_UNSURE = "may part thousands or decimals"  # a refusal that a table without a mistake may get
CLASSES = (
    *("benign", "tumour", "Gleason 3+4", "in situ", "größer", "G1, low", 'so-called "atypia"', "a;b", "x\ty", "0", "1"),
    *("2", "10", "003", "HER2+", "MSI-H", "Ja", "none", "no", "unknown", "癌", "3.5", "1e2"),
)
NUMBERS = (0.0, 1.0, 2.0, 61.0, 0.5, 37.25, 1234.5, -3.75, 0.0001, 12.0, 100.125)
FILES = ("s1.svs", "s2.tiff", "a/s3.ndpi", "a/s4.ome.tif", "b/s4.png", "b/s 5.svs", "c/TCGA-AA-0001-01Z-00-DX1.5F.svs")
MISSING = ("", "NA", "n/a", "NaN", "-", "#N/A", "missing", "?")
HEADERS: Mapping[str, tuple[str, ...]] = {
    "slide": ("slide_id", "Slide ID", "slide", "Slide-Name", "file", "FILENAME"),
    "patient": ("case_id", "Patient ID", "PatientID", "patient", "subject"),
    "split": ("split", "Split"),
    "fold": ("fold", "Fold"),
    "mpp": ("mpp", "MPP", "Microns per Pixel"),
    "class": ("label", "Label", "class", "Class"),
}
IMAGE_HEADERS = ("file", "Filename", "image", "path")
PARTS = {"train": ("train", "Train", "training"), "val": ("val", "valid", "dev"), "test": ("test", "TEST")}
MISTAKES = (
    *(
        "slide twice",
        "no such slide",
        "one of two slides",
        "no label",
        "one class in two ways",
        "patient in two splits",
    ),
    *("no patient", "no number", "decimals in two ways", "a value too many", "a column twice", "no such split"),
    *("no event", "time below zero", "no resolution"),
)


@dataclass(frozen=True)
class Row:
    """What a line means."""

    file: str
    slide: str
    patient: str
    label: str | tuple[float, ...]
    split: str = ""
    fold: int | None = None
    mpp: float | None = None


@dataclass(frozen=True)
class Sheet:
    """Rows, what they are for, how they are written, and at most one mistake, `at` some row."""

    rows: tuple[Row, ...]
    task: str
    headers: tuple[tuple[str, str], ...]
    of_slides: bool = True
    says_task: bool = True
    delimiter: str = ","
    quoted: bool = False
    encoding: str = "utf-8"
    newline: str = "\n"
    announced: bool = False
    decimal: str = "."
    padded: bool = False
    empty_columns: int = 0
    empty_lines: bool = False
    notes: bool = False
    order: int = 0
    missing: str = ""
    mistake: str | None = None
    at: int = 0

    @property
    def names(self) -> list[str]:
        """The columns of labels."""
        label = dict(self.headers)["class"]
        if self.task == "classify":
            return [label]
        if self.task == "survival":
            return ["time", "event"]
        return ["age", "depth"][: len(self.rows[0].label)]

    def records(self) -> list[dict[str, str]]:
        headers, found = dict(self.headers), []
        for number, row in enumerate(self.rows):
            record = {headers["slide"]: row.slide}
            if self.of_slides or self.notes:
                record[headers["patient"]] = row.patient
            if any(each.split for each in self.rows):
                words = PARTS[row.split] if row.split else ("",)
                record[headers["split"]] = words[number % len(words)]
            if any(each.fold is not None for each in self.rows):
                record[headers["fold"]] = self.missing if row.fold is None else str(row.fold)
            if any(each.mpp is not None for each in self.rows):
                record[headers["mpp"]] = self.missing if row.mpp is None else self.number(row.mpp)
            values = [row.label] if isinstance(row.label, str) else [*map(self.number, row.label)]
            record |= dict(zip(self.names, values, strict=True))
            if self.notes:
                record["notes"] = f'seen{self.delimiter} "twice"\nby two'
            found.append(record)
        return found

    def number(self, value: float) -> str:
        return f"{value:g}".replace(".", self.decimal)

    def content(self) -> bytes:
        records = self.records()
        columns = [*records[0]]
        columns = columns[self.order % len(columns) :] + columns[: self.order % len(columns)]
        lines = [columns] + [[record[name] for name in columns] for record in records]
        if self.mistake is not None:
            make_mistake(self, lines)
        text = io.StringIO(newline="")
        if self.announced:
            text.write(f"sep={self.delimiter}{self.newline}")
        quoting = csv.QUOTE_ALL if self.quoted else csv.QUOTE_MINIMAL
        writer = csv.writer(text, delimiter=self.delimiter, quoting=quoting, lineterminator=self.newline)
        for line in lines:
            pad = " " if self.padded and not self.quoted else ""
            writer.writerow(
                [*(pad + value if '"' not in value else value for value in line), *[""] * self.empty_columns]
            )
            if self.empty_lines:
                text.write(self.delimiter * (len(line) - 1) + self.newline)
        return text.getvalue().encode(self.encoding)


def make_mistake(sheet: Sheet, lines: list[list[str]]) -> None:
    """Make the mistake of a sheet in its lines; the first of these is that of the names of columns."""
    headers, at = dict(sheet.headers), 1 + sheet.at % len(sheet.rows)
    place = {role: lines[0].index(name) for role, name in headers.items() if name in lines[0]}
    first = lines[0].index(sheet.names[0])
    line = lines[at]
    if sheet.mistake == "slide twice":
        lines.append([*line])
    elif sheet.mistake == "no such slide":
        line[place["slide"]] = "s99"
    elif sheet.mistake == "one of two slides":
        line[place["slide"]] = "s4"
    elif sheet.mistake in ("no label", "no number"):
        line[first] = sheet.missing if sheet.mistake == "no label" else ("12 mm", "1e400", "inf", "1..5", "½")[at % 5]
    elif sheet.mistake == "one class in two ways":
        lines.append([*line])
        lines[-1][place["slide"]], lines[-1][first] = "s2.tiff", line[first].swapcase()
    elif sheet.mistake == "patient in two splits":
        other = 1 + at % len(sheet.rows)
        lines[other][place["patient"]] = line[place["patient"]]
        line[place["split"]], lines[other][place["split"]] = "train", "test"
    elif sheet.mistake == "no patient":
        line[place["patient"]] = sheet.missing
    elif sheet.mistake == "decimals in two ways":
        line[first], lines[1 + at % len(sheet.rows)][first] = "1,5", "2.5"
    elif sheet.mistake == "a value too many":
        line.append("x")
    elif sheet.mistake == "a column twice":
        for each in lines:
            each.append(each[first])
    elif sheet.mistake == "no such split":
        line[place["split"]] = "trian"
    elif sheet.mistake == "no event":
        line[lines[0].index("event")] = "2"
    elif sheet.mistake == "time below zero":
        line[first] = "-1"
    elif sheet.mistake == "no resolution":
        line[place["mpp"]] = ("0", "-0.25", "TRUE", "x")[at % 4]


def can_have(sheet: Sheet, mistake: str) -> bool:
    """Whether a mistake can be made in a sheet, and is one."""
    several, numbers = len(sheet.rows) > 1, sheet.task != "classify"
    columns = {*sheet.records()[0]}
    headers = dict(sheet.headers)
    return {
        "no such slide": sheet.of_slides,
        "one of two slides": sheet.of_slides,
        "one class in two ways": not numbers
        and len(sheet.rows) < len(FILES)
        and not any(row.file == "s2.tiff" for row in sheet.rows)
        and sheet.rows[sheet.at % len(sheet.rows)].label.swapcase()  # type: ignore[union-attr]
        != sheet.rows[sheet.at % len(sheet.rows)].label,
        "patient in two splits": sheet.of_slides and several and headers["split"] in columns,
        "no patient": sheet.of_slides,
        "no number": numbers,
        "decimals in two ways": numbers and several,
        "no such split": headers["split"] in columns,
        "no event": sheet.task == "survival",
        "time below zero": sheet.task == "survival",
        "no resolution": sheet.of_slides and headers["mpp"] in columns,
    }.get(mistake, True)


def problem(_: Ranks, sheet: Sheet) -> str | None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file in FILES:
            (folder / file).parent.mkdir(exist_ok=True)
            (folder / file).touch()
        path = folder / "table.csv"
        path.write_bytes(sheet.content())
        task = sheet.task if sheet.says_task else None
        try:
            read = read_samples(path, SLIDES if sheet.of_slides else PICTURES, task=task, label_columns=sheet.names)
        except DatasetError as error:
            if sheet.mistake is not None or MARKS_UNSURE in str(error):
                return None
            return f"refused a table without a mistake: {error}".replace(name, "")
    if sheet.mistake is not None:
        return f"read a table with a mistake: {sheet.mistake}"
    return compare(sheet, read)


def compare(sheet: Sheet, read: Any) -> str | None:
    wrong = []
    classes = sorted_classes({str(row.label) for row in sheet.rows}) if sheet.task == "classify" else None
    if read.task != sheet.task or (classes is not None and [*read.classes] != classes):
        wrong.append(f"task {read.task} of {read.classes}")
    for row, found in zip(sheet.rows, read.rows, strict=True):
        label = classes.index(str(row.label)) if classes else row.label
        if found.label != label or found.split != row.split:
            wrong.append(f"{row} is {found}")
        if sheet.of_slides:
            meant = (row.file, row.patient, row.fold, row.mpp)
            if (found.path, found.patient, found.fold, found.mpp) != meant:
                wrong.append(f"{row} is {found}")
    return "; ".join(wrong) or None


def sorted_classes(names: set[str]) -> list[str]:
    """Classes in their order: whole numbers by value."""
    if all(name.isdecimal() and name.isascii() for name in names):
        return sorted(names, key=lambda name: (int(name), name))
    return sorted(names)


# What is drawn.


@st.composite
def sheets(draw: st.DrawFn) -> Sheet:
    of_slides = draw(st.booleans())
    task = draw(st.sampled_from(("classify", "regress", "multilabel", "survival")))
    files = draw(st.lists(st.sampled_from(FILES), min_size=2, max_size=len(FILES), unique=True))
    headers = {role: draw(st.sampled_from(names)) for role, names in HEADERS.items()}
    if not of_slides:
        headers["slide"], headers["split"] = draw(st.sampled_from(IMAGE_HEADERS)), "split"
    delimiter = draw(st.sampled_from(",;\t"))
    decimal = draw(st.sampled_from(".,"))
    rows = labelled(draw, task, files, of_slides)
    sheet = Sheet(
        tuple(rows),
        task,
        tuple(headers.items()),
        of_slides,
        says_task=draw(st.booleans())
        or task != "classify"
        or all(as_number(str(row.label)) is not None for row in rows),
        delimiter=delimiter,
        quoted=draw(st.booleans()),
        encoding=draw(st.sampled_from(("utf-8", "utf-8-sig", "utf-16"))),
        newline=draw(st.sampled_from(("\n", "\r\n"))),
        announced=draw(st.booleans()),
        decimal=decimal,
        padded=draw(st.booleans()),
        empty_columns=draw(st.sampled_from((0, 0, 1, 3))),
        empty_lines=draw(st.booleans()),
        notes=draw(st.booleans()),
        order=draw(st.integers(0, 9)),
        missing=draw(st.sampled_from(MISSING)),
        at=draw(st.integers(0, 9)),
    )
    mistakes = [each for each in MISTAKES if can_have(sheet, each)]
    mistake = draw(st.sampled_from((None, None, None, *mistakes)))
    return Sheet(**{**sheet.__dict__, "mistake": mistake})


def labelled(draw: st.DrawFn, task: str, files: Sequence[str], of_slides: bool) -> list[Row]:
    """Rows of slides in these files; those of a patient are in one part and one fold."""
    patients = draw(st.lists(st.sampled_from(("p1", "P 2", "Müller, A.", "007", "11")), min_size=1, unique=True))
    parted, folded, resolved = (draw(st.booleans()) for _ in range(3))
    parts = {each: draw(st.sampled_from([*PARTS])) for each in patients}
    folds = {each: draw(st.none() | st.integers(0, 4)) for each in patients}
    names = draw(st.lists(st.sampled_from(CLASSES), min_size=2, max_size=3, unique=True))
    width = draw(st.integers(1, 2))
    rows = []
    for number, file in enumerate(files):
        patient = draw(st.sampled_from(patients))
        whole = draw(st.booleans()) or "s4" in file
        slide = file if whole or not of_slides else file.rpartition("/")[2].rpartition(".")[0]
        if draw(st.booleans()) and of_slides:
            slide = slide.replace("/", "\\")
        label: Any = names[number % 2 if number < 2 else draw(st.integers(0, len(names) - 1))]
        if task == "survival":
            label = (abs(draw(st.sampled_from(NUMBERS))), float(draw(st.booleans())))
        elif task == "multilabel":
            label = tuple(float(draw(st.booleans())) for _ in range(width))
        elif task == "regress":
            label = tuple(draw(st.sampled_from(NUMBERS)) for _ in range(width))
        rows.append(
            Row(
                file,
                slide,
                patient,
                label,
                parts[patient] if parted else "",
                folds[patient] if folded and of_slides else None,
                draw(st.sampled_from((None, 0.25, 0.5, 0.2428))) if resolved and of_slides else None,
            )
        )
    return rows
