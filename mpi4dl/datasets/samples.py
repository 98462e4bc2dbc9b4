"""The table of samples: which file, label, patient and split each sample has, from a CSV file or a folder.

    file,class                          one line for each image
    a/1.png,benign

    slide_id,case_id,label              one line for each slide, as CLAM writes them
    s1,p1,tumour

    file,patient,age,split              a split of your own: train, val or test
    a/1.png,p1,61.5,train

    file;patient;time;event;fold;mpp    survival, folds, and microns per pixel of slides that do not know theirs
    a/s1.svs;p1;37,5;1;0;0,25

    file,mask                           masks, to segment
    a/1.png,masks/1.png

    image,target                        pictures that a model learns to make
    a/1.png,stained/1.png

Images, volumes, slides and features of slides have the same columns. They are found by the names in `ROLES` and
`LABEL_COLUMNS`, or named by the user. `Slide ID`, `slide-id` and `SlideID` are slide_id. Delimiters, encodings, numbers
and missing values are those of table.py.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from mpi4dl._wording import counted, quoted, some
from mpi4dl.datasets.base import DatasetError
from mpi4dl.datasets.kinds import FEATURES, PICTURES, FileKind
from mpi4dl.datasets.labels import FORMS, SURVIVAL, files_of
from mpi4dl.datasets.listed import PARTS
from mpi4dl.datasets.table import (
    FEW_VALUES,
    CsvTable,
    Label,
    LabelColumns,
    Line,
    as_number,
    folded_column,
    folded_name,
    found_in,
    identifies,
    learnt_columns,
    part_named,
    require_apart,
    require_one_way,
    require_values,
    says_none,
)

TABLE = "labels.csv"  # beside images
# The usual names of the columns of each role, as `folded_column` writes them. A column of files goes before one of
# identifiers, which name files where there is no other.
FILES = ("file", "filename", "file_name", "path", "slide_file")
IDENTIFIERS = ("slide_id", "slide", "slide_name", "image", "image_id", "wsi", "wsi_id")
ROLES: Mapping[str, tuple[str, ...]] = {
    "slide": (*FILES, *IDENTIFIERS),
    "patient": (
        *("case_id", "case", "patient_id", "patient", "subject_id", "subject"),
        *("case_submitter_id", "participant_id", "participant"),
    ),
    "split": ("split",),
    "fold": ("fold",),
    "mpp": ("mpp", "microns_per_pixel"),
    "annotation": ("annotation", "annotations", "mask"),
    "weight": (),  # a column `weight` may be that of bodies: the user names it
}
# Of patients also other names, where a table has none of the usual ones.
_WHO, _NUMBER = "case|patient|patienten|pat|subject|participant|donor", "id|no|nr|num|number|nummer|name|code|key|uid"
_OF_PATIENTS = re.compile(
    rf"({_WHO})(_?({_NUMBER}))?|({_NUMBER}|n|numéro|identifiant)_?(du_|de_)?({_WHO})|patient(in|e|_e)|mrn|pid|ipp|"
    rf"(fall|dossier|proband|probanden)_?({_NUMBER})|(n|no|numéro|identifiant)_?(de_|du_)?dossier"
)
MAY_BE_WEIGHTS = ("weight", "weights", "sample_weight")
LABEL_COLUMNS = ("label", "labels", "class", "target")
CLASS_COLUMNS = ("label", "labels", "class")  # whole numbers in these are classes
MASK_PRINT = "mask_print"
LOSS_WEIGHT = "loss_weight"
COVARIATES = "covariates"
OF_FILES = ("bytes", "crc32", MASK_PRINT, LOSS_WEIGHT, COVARIATES)  # in the table of a run
_NO_COLUMNS: Mapping[str, str] = {}
_SPLIT_LAYOUT = "expected columns train, val and test that list samples, or columns file or slide_id and split or fold"
_BARCODE = re.compile(r"(TCGA-[A-Z0-9]{2}-[A-Z0-9]{4})(?![A-Z0-9])", re.IGNORECASE)  # 12 characters name the patient
_INDEX = re.compile(r"Unnamed: [0-9]+")  # pandas' name for a column without one
_FOLDED_NUMBER = re.compile(r"0*([0-9]+)([.,]0+)?")
_ZEROS = re.compile(r"(?<![0-9.,])0+(?=[0-9]+(?![0-9a-z]))")  # before the digits of a number in a name
_NOBODY = ("none", "unknown", "unbekannt", "anonymous", "anonym")
_SHORTENED = re.compile(r"[0-9][.,][0-9]+E\+[0-9]+")
_OF_KIND = re.compile(r"(?<![^/])([^/]*[^a-z0-9/])?(h5|pt)([^a-z0-9/][^/]*)?/")  # folders such as pt_files/
MOST_FOLDS = 1_000_000


class Sample(NamedTuple):
    """A line of the table of samples.

    Attributes:
        line: its line in the file, from 1; 0 if there is no file.
        name: its identifier, as in the file.
        path: its file, relative to the folder of samples, with slashes.
        patient: the patient that it is of.
        split: train, val or test; empty if nothing says it.
        fold: the number of its fold, from 0; None if nothing says it.
        label: a class index, or a tuple of numbers; None without labels.
        mpp: microns per pixel of level 0, as the table says; None if it does not.
        annotation: the file of its mask or annotation, as in the table; None if it has none.
        weight: what its loss is multiplied by in training; None if no column says it.
        covariates: columns and texts, as `covariates.read_cells` reads them.
    """

    line: int
    name: str
    path: str
    patient: str
    split: str = ""
    fold: int | None = None
    label: Label | None = None
    mpp: float | None = None
    annotation: str | None = None
    weight: float | None = None
    covariates: tuple[tuple[str, str | None], ...] = ()


class SampleTable(NamedTuple):
    """The samples of a table or folder.

    Attributes:
        task: classify, multilabel, regress, survival or segment; None without labels.
        classes: names of classes, or of the columns of numbers; "risk" for survival.
        rows: the samples, in the order of the table, or of the names of their files.
        columns: the column taken for each role: slide, patient, label and others. Several labels have commas between.
        remarks: sentences about decisions that the user should know.
    """

    task: str | None
    classes: tuple[str, ...]
    rows: tuple[Sample, ...]
    columns: Mapping[str, str]
    remarks: tuple[str, ...] = ()


def read_samples(
    path: Path,
    kind: FileKind = PICTURES,
    *,
    folder: Path | None = None,
    task: str | None = None,
    label_columns: Sequence[str] | None = None,
    classes: tuple[str, ...] | None = None,
    columns: Mapping[str, Any] = _NO_COLUMNS,
) -> SampleTable:
    """Read a table of samples, or a folder of slides whose subfolders may be their classes.

    Args:
        path: the table, or the folder.
        kind: what its files are.
        folder: where the files are, also in subfolders; by default the folder of the table.
        task: what the labels are for; by default the one task that the columns can mean.
        label_columns: the columns of labels; by default one of `LABEL_COLUMNS`, or all that identify nobody. With an
            empty sequence no label is read, as for prediction.
        classes: the classes and their order, if they must agree with those of training.
        columns: the column that the user named for a role of `ROLES`; and `Covariate`s, as COVARIATES.

    Raises:
        DatasetError: the table is wrong, which names the file and the line; or a file is missing.
        ValueError: a role that `ROLES` does not have.
    """
    asked_covariates: Sequence[Any] = columns.get(COVARIATES, ())
    unknown = sorted({*columns} - {*ROLES, COVARIATES})
    if unknown:
        raise ValueError(f"no role {unknown[0]!r} of columns: expected {', '.join(ROLES)}")
    if path.is_dir():
        if {*columns} - {"weight"} or label_columns or folder is not None:
            raise DatasetError(f"{path}: is a folder of slides, and has no columns: name a table, such as slides.csv")
        return read_folder(path, kind, task, classes, label_columns is None)
    columns = {role: name for role, name in columns.items() if role != COVARIATES}
    table = open_table(path, kind, columns.values())
    for name in table.columns if task is not None and files_of(task) else ():
        if folded_column(name) == FORMS[str(task)].column:
            columns = {"annotation": name, **columns}
    from mpi4dl.datasets.covariates import read_cells

    found = _Columns(table, columns, label_columns or ())
    taken, lines = found.taken, table.lines
    require_values([taken["slide"]], lines)
    usual_labels = [name for name in table.columns if folded_column(name) in LABEL_COLUMNS]
    named_labels = usual_labels if label_columns is None else label_columns
    roles = {name: role for role, name in taken.items()} | dict.fromkeys(named_labels, "label")
    stand_beside, covariates = read_cells(table, asked_covariates, roles)
    spoken_for = {*taken.values(), *stand_beside}
    others = [name for name in table.columns if name not in spoken_for and not _INDEX.fullmatch(name)]
    usual = {name for names in ROLES.values() for name in names} | {*OF_FILES}
    may_be_labels = [name for name in others if folded_column(name) not in usual or name in (label_columns or ())]
    found_task, names, learnt, labels = _labels(found, may_be_labels, task, label_columns, classes)
    patients, remarks = found.patients(kind)
    parts, folds, annotations = found.parts(), found.folds(), found.values("annotation")
    mpps = found.amounts("mpp", "microns per pixel, from 0.01 to 100", lambda number: 0.01 <= number <= 100)
    weights = found.amounts("weight", "a finite number, 0 or more", lambda number: number >= 0)
    bare = next((line for line, weight in zip(lines, weights, strict=True) if weight is None), None)
    if bare is not None and "weight" in taken:
        raise bare.wrong(f"{taken['weight']!r} is empty: fill in the weight, or leave the line out")
    root = folder if folder is not None else path.parent
    targets = [line.values[name] for name in table.columns if folded_column(name) == "target" for line in lines]
    slides = [line.values[taken["slide"]] for line in lines]
    others_files = {*annotations, *targets} - {*slides}  # which are no samples of their own
    files, parts_of = samples_below(root, kind, others_files)
    asked = [_below(root, name) for name in slides]
    asked = _instead([parts_of.get(name, name) for name in asked], kind, files)
    numbers = [line.number for line in lines]
    paths = found_in(path, [*zip(numbers, asked, strict=True)], files, kind, f"below {root}", kind.missing)
    said = (parts, folds, labels, mpps, annotations, weights, covariates)
    rows = tuple(map(Sample, numbers, slides, paths, patients, *said))
    require_patients_apart(rows, path)
    unused = [name for name in others if name not in learnt and folded_column(name) not in OF_FILES]
    if learnt:
        taken["label"] = ", ".join(learnt)
    if stand_beside:
        taken[COVARIATES] = ", ".join(stand_beside)
    if task is None and found_task is not None:
        remarks += (f"the task is {found_task}, as the columns tell: `task` says otherwise",)
    if unused:
        remarks += (f"columns not used: {some(unused, 10)}",)
    if "weight" not in taken:
        maybe = [name for name in unused if folded_column(name) in MAY_BE_WEIGHTS]
        remarks += tuple(f"`weight_column` {name} would weigh each {kind.noun} in the loss" for name in maybe[:1])
    for name in unused if "patient" not in taken else ():
        if identifies(name) and len({line.values[name] for line in lines}) < len(lines):
            remarks += (f"`patient_column` {name} would keep {kind.nouns} that are alike there together",)
    shared = [name for name, times in Counter(filter(None, annotations)).items() if times > 1]
    if shared:
        of_several = counted(len(shared), "annotation is", "annotations are")
        remarks += (f"warning: {of_several} named by several {kind.nouns}: {some(shared, 3)}",)
    if len(files) > len(rows):
        remarks += (f"{counted(len(files) - len(rows), kind.noun, kind.nouns)} below {root} not in the table",)
    return SampleTable(found_task, names, rows, taken, remarks)


def open_table(path: Path, kind: FileKind = PICTURES, named: Collection[str] = ()) -> CsvTable:
    """A table of samples, which may have columns that the user named. Raises DatasetError."""

    def names_files(column: str) -> bool:
        return folded_column(column) in ROLES["slide"] or column in named

    return CsvTable(path, SURVIVAL, names_files, kind.layout, kind.noun, numbered=kind.tells_patients)


class _Columns:
    """The columns of a table that are `taken` for a role, and what lines have there.

    Raises DatasetError for two columns of a role, for none of files, and for values of others than are wanted.
    """

    def __init__(self, table: CsvTable, named: Mapping[str, str], labels: Sequence[str]) -> None:
        where, header = f"{table.path}, line {table.header_line}", table.columns
        taken: dict[str, str] = {}
        for role, asked in named.items():
            found = table.named(asked)
            if role == "weight" and not found:  # tables to evaluate or to predict of lack it
                continue
            if len(found) != 1:
                other = f"no column {asked!r}, but {some(header)}" if not found else f"{' and '.join(found)}"
                raise DatasetError(f"{where}: has {other}: choose the column of the {role} by `{role}_column`")
            taken[role] = found[0]
        spoken_for = {*taken.values(), *labels}
        for role, usual in ROLES.items():
            if role in taken:
                continue
            found = [name for name in header if folded_column(name) in usual]
            if role == "slide":
                found = [name for name in found if folded_column(name) in FILES] or found
            if role == "patient":
                found = found or [name for name in header if _OF_PATIENTS.fullmatch(folded_column(name))]
            if role == "split":  # whatever it is called, such as set or phase
                found = found or [name for name in header if _says_parts({line.values[name] for line in table.lines})]
            found = [name for name in found if name not in spoken_for] or (found[:1] if role == "slide" else [])
            if len(found) > 1:
                choose = "leave one of them" if role in ("split", "fold", "mpp") else f"choose it by `{role}_column`"
                raise DatasetError(
                    f"{where}: has {' and '.join(found)}, of which one can be the column of the {role}: {choose}"
                )
            if not found and role == "slide":
                raise DatasetError(
                    f"{where}: has {some(header)}: none of them can be the column of file names ({', '.join(usual)}): "
                    f"name it by `slide_column`; {table.layout}"
                )
            if found:
                taken[role] = found[0]
        self.table, self.taken = table, {role: taken[role] for role in ROLES if role in taken}

    def values(self, role: str) -> list[str | None]:
        """The value of each line in the column of a role; None where it says none, or there is no such column."""
        texts = [line.values[self.taken[role]] if role in self.taken else "" for line in self.table.lines]
        return [None if says_none(text) else text for text in texts]

    def amounts(self, role: str, wanted: str, allowed: Callable[[float], bool]) -> list[float | None]:
        """The number of each line in the column of a role."""
        texts, column, found = self.values(role), self.taken.get(role, ""), list[float | None]()
        said = [line for line, text in zip(self.table.lines, texts, strict=True) if text is not None]
        LabelColumns(self.table, (column,), said).require_one_decimal_mark()
        for line, text in zip(self.table.lines, texts, strict=True):
            found.append(None if text is None or text.isalpha() else as_number(text))
            if text is not None and (found[-1] is None or not allowed(found[-1])):
                raise line.wrong(f"{column!r} is {quoted(text)}, but must be {wanted}")
        return found

    def folds(self) -> list[int | None]:
        found = self.amounts("fold", "a whole number, 0 or more", lambda n: 0 <= n < MOST_FOLDS and n.is_integer())
        return [None if number is None else int(number) for number in found]

    def parts(self, required: bool = True) -> list[str]:
        """For what each line is: train, val, test, or nothing without that column."""
        lines, column = self.table.lines, self.taken.get("split")
        require_values([column] if column and required else [], lines, "write train, val or test")
        texts = [line.values[column] if column else "" for line in lines]
        for line, text in zip(lines, texts, strict=True):
            if text and not part_named(text):
                raise line.wrong(f"{column!r} is {text!r}, but must be train, val or test")
        return [part_named(text) for text in texts]

    def patients(self, kind: FileKind) -> tuple[list[str], tuple[str, ...]]:
        """The patient of each line, and a remark if no column says it."""
        lines, column = self.table.lines, self.taken.get("patient")
        if column is None:
            names = [line.values[self.taken["slide"]] for line in lines]
            return patients_of(names, kind, "name the column of patients by `patient_column`")
        for line in lines:
            text = line.values[column]
            if says_none(text) or text.casefold() in _NOBODY:
                what = f"is {text!r}, which says that there is no value" if text else "is empty"
                raise line.wrong(f"{column!r} {what}: fill in the patient, or leave the line out")
            if _SHORTENED.fullmatch(text):
                told = "which a spreadsheet made of a longer number"
                raise line.wrong(f"{column!r} is {text!r}, {told}: format the column as text, and fill it in again")
        require_one_way(column, lines, _folded_patient, "patient")
        return [line.values[column] for line in lines], ()


def _says_parts(texts: set[str]) -> bool:
    """Whether these values of a column name parts: training, and another one."""
    named = {part_named(text) for text in texts - {""}}
    return "" not in named and "train" in named and len(named) > 1


def _labels(
    found: _Columns,
    others: list[str],
    task: str | None,
    columns: Sequence[str] | None,
    classes: tuple[str, ...] | None,
) -> tuple[str | None, tuple[str, ...], tuple[str, ...], Sequence[Label | None]]:
    """The task, the classes, the columns of labels, and the label of each line. Raises DatasetError."""
    table, taken, lines = found.table, found.taken, found.table.lines
    nothing = [None] * len(lines)
    tabled = [form.task for form in FORMS.values() if form.in_tables]
    of_files = files_of(task)
    if task is not None and task not in tabled and not of_files:
        raise DatasetError(f"{table.path}: a table is for one of {', '.join(tabled)}, but {task} was asked for")
    if of_files:
        if "annotation" not in taken:
            raise DatasetError(
                f"{table.path}: has {some(table.columns)}, but {task} needs a column {of_files} or annotation: name it "
                "by `annotation_column`"
            )
        return task, classes or (), (), nothing
    if columns is not None and not columns:
        return None, classes or (), (), nothing
    asked, named = columns, [name for name in others if folded_column(name) in LABEL_COLUMNS]
    if columns is None and task != "multilabel" and (task is None or not FORMS[task].columns):
        # The column by its usual name, or those of survival.
        survival = task is None and {*SURVIVAL} <= {*others}
        where = f"{table.path}, line {table.header_line}"
        if survival and named:
            told = f"has {named[0]}, and time and event: choose one by `label_columns`, or by `task`"
            raise DatasetError(f"{where}: {told}")
        if len(named) > 1:
            told = f"has {' and '.join(named)}, of which one can be the column of labels: choose it by `label_columns`"
            raise DatasetError(f"{where}: {told}")
        asked = SURVIVAL if survival else tuple(named) or None
    if asked is None and task is None and all(map(identifies, others)):
        return ("segment" if "annotation" in taken else None), classes or (), (), nothing
    learnt = learnt_columns(table, others, task, asked)
    read = LabelColumns(table, learnt, lines, CLASS_COLUMNS)
    told, names, labels = read.labels(task, columns is not None, classes)
    renamed = columns is not None and FORMS[told].named_by_column and not {*names} & {*(classes or names)}
    if renamed and classes is not None and len(classes) == len(names):
        names = classes  # the user named the columns of another table, in the order of those of training
    return told, names, learnt, labels


def _folded_patient(text: str) -> str:
    """The normal form of a patient: 007 and 7.0 are 7, as spreadsheets and pandas write numbers, and P-007 is p-7."""
    name = folded_name(text)
    number = _FOLDED_NUMBER.fullmatch(name)
    return number[1] if number else _ZEROS.sub("", name)


def patients_of(names: Sequence[str], kind: FileKind, remedy: str) -> tuple[list[str], tuple[str, ...]]:
    """The patients in the TCGA barcodes of samples, or else each sample as its own; and a remark with a remedy."""
    barcodes = [_BARCODE.match(re.split(r"[/\\]", name)[-1]) for name in names]
    found = sum(code is not None for code in barcodes)
    patients = [code[1].upper() if code else name for code, name in zip(barcodes, names, strict=True)]
    own = f"each {'other ' * bool(found)}{kind.noun} is its own patient: {remedy}"
    if not found:
        return patients, (own,) * kind.tells_patients
    kept = f"patients are the first 12 characters of {counted(found, 'TCGA barcode')}"
    return patients, (kept if found == len(names) else f"{kept}; {own}",)


def samples_below(
    folder: Path, kind: FileKind, without: Collection[str | None] = ()
) -> tuple[list[str], dict[str, str]]:
    """The samples below a folder, in order, but for the files of annotations; and the sample that a file is a part of.

    Raises DatasetError for none.
    """
    found, parts_of = kind.below(folder)
    annotations = {_below(folder, name.replace("\\", "/").removeprefix("./")) for name in without if name}
    found = [name for name in found if name not in annotations]
    if not found:
        raise DatasetError(f"{folder}: has no {kind.nouns}: {kind.nouns} end in {' '.join(kind.suffixes)}")
    if kind is FEATURES:  # CLAM writes NAME.pt beside NAME.h5, which says more
        keys = {name: _OF_KIND.sub("", without_suffix(name, kind.suffixes)) for name in found}
        said = {key for name, key in keys.items() if not name.lower().endswith(".pt")}
        found = [name for name, key in keys.items() if not name.lower().endswith(".pt") or key not in said]
    return found, parts_of


def _instead(names: Sequence[str], kind: FileKind, files: Sequence[str]) -> list[str]:
    """The names of files where a table may name others, without endings: all with their folders, or all without."""
    if not kind.stands_for:
        return list(names)
    short = [without_suffix(name.replace("\\", "/").removeprefix("./"), kind.stands_for) for name in names]
    known = {without_suffix(file, kind.suffixes) for file in files}
    in_folders = any("/" in name and name in known for name in short)
    return [name if name in known or in_folders else name.rpartition("/")[2] for name in short]


def without_suffix(name: str, suffixes: Sequence[str]) -> str:
    """A name without the longest of these endings that it has, in upper or lower case."""
    found = max((each for each in suffixes if name.lower().endswith(each)), key=len, default="")
    return name[: len(name) - len(found)]


def _below(folder: Path, name: str) -> str:
    """A name relative to a folder, if it is an absolute path in there."""
    path = Path(name)
    inside = path.is_absolute() and path.is_relative_to(folder.absolute())
    return path.relative_to(folder.absolute()).as_posix() if inside else name


def require_patients_apart(rows: Sequence[Sample], path: Path | None = None) -> None:
    """Raises DatasetError if samples of one patient are in two splits, or in two folds; `path` is their table."""
    for place_of in (attrgetter("split"), _fold_of):
        first: dict[str, Sample] = {}
        for row in rows:
            here = place_of(row)
            other = first.setdefault(row.patient, row) if here else row
            if place_of(other) != here:
                where = f"{path}, line {row.line}: " if path else ""
                raise DatasetError(
                    f"{where}patient {row.patient!r} is in {here} by {_told(row)}, but in {place_of(other)} by "
                    f"{_told(other)}: all that is of a patient belongs together"
                )


def require_annotations(table: Path, rows: Sequence[Sample], noun: str) -> None:
    """Raises DatasetError for a sample without an annotation, such as a mask or a target."""
    bare = next((row for row in rows if row.annotation is None), None)
    if bare is not None:
        raise DatasetError(f"{table}, line {bare.line}: {bare.name} has no {noun}: name one, or leave the line out")


def _fold_of(row: Sample) -> str:
    return "" if row.fold is None else f"fold {row.fold}"


def _told(row: Sample) -> str:
    return f"{row.name!r}" + (f" of line {row.line}" if row.line else "")


def read_folder(
    folder: Path, kind: FileKind, task: str | None, classes: tuple[str, ...] | None, labelled: bool = True
) -> SampleTable:
    """The slides below a folder, in subfolders train, val and test or not, in subfolders of classes or not."""
    paths, _ = samples_below(folder, kind)
    parts = [""] * len(paths)
    inner = paths
    if all("/" in path and path.partition("/")[0].casefold() in PARTS for path in paths):
        parts = [part_named(path.partition("/")[0]) for path in paths]
        inner = [path.partition("/")[2] for path in paths]
    folders = [path.rpartition("/")[0].partition("/")[0] for path in inner]
    labels: list[int | None] = [None] * len(paths)
    remarks: tuple[str, ...] = ()
    if labelled and task not in (None, "classify"):
        of = files_of(task) or "label"
        raise DatasetError(f"{folder}: is a folder of slides, but {task} needs a table of {of}s, such as slides.csv")
    # Downloads from the GDC have a folder for each slide: classes are known ones, or few, of several slides on average.
    names = {*folders}
    known = classes is not None and names <= {*classes}
    are_classes = known or ("" not in names and 2 <= len(names) <= min(FEW_VALUES, len(folders) // 2))
    if labelled and (task is not None or are_classes):
        loose = next((path for path, name in zip(paths, folders, strict=True) if not name), None)
        if loose is not None:
            raise DatasetError(f"{folder}: {loose} is in no subfolder of a class: give a table, such as slides.csv")
        other = next((name for name in folders if classes is not None and name not in classes), None)
        if classes is not None and other is not None:
            told = f"has the class {other!r}, but the classes of training are {', '.join(classes)}"
            raise DatasetError(f"{folder}: {told}")
        require_apart(sorted(names), folder)
        task, classes = "classify", classes or tuple(sorted(names))
        if len(classes) < 2:
            told = f"has only slides of class {classes[0]!r}; a classifier needs two subfolders or more"
            raise DatasetError(f"{folder}: {told}")
        labels = [classes.index(name) for name in folders]
        remarks = (f"classes are the subfolders of {folder}: {some(classes, 10)}",)
    else:
        task = None
        remarks = (f"slides of {folder} have no labels",)
    # Names without endings; of files with equal names, with their folders.
    short = [without_suffix(path, kind.suffixes) for path in paths]
    bases = [name.rpartition("/")[2] for name in short]
    times, first = Counter(bases), dict[str, str]()
    slides = [base if times[base] == 1 else name for base, name in zip(bases, short, strict=True)]
    for name, path in zip(slides, paths, strict=True):
        if first.setdefault(name, path) != path:
            raise DatasetError(f"{folder}: has {first[name]} and {path}: one file of each name")
    patients, more = patients_of(slides, kind, "a table, such as slides.csv, can name the patients")
    rows = tuple(
        Sample(0, slide, path, patient, part, label=label)
        for slide, path, patient, part, label in zip(slides, paths, patients, parts, labels, strict=True)
    )
    require_patients_apart(rows)
    return SampleTable(task, classes or (), rows, {}, remarks + more)


def read_split_file(path: Path) -> tuple[Sample, ...]:
    """The part or the fold of each sample that a split file names; other things of samples are empty.

    The file has columns train, val and test that list samples, as CLAM's `splits_0.csv`. Or these columns have TRUE and
    FALSE for the samples of the first column, as `splits_0_bool.csv`. Or it has a line for each sample, its split,
    its fold, or both.

    Raises:
        DatasetError: no such columns, or a sample in two parts or twice, which names the file and the line.
    """

    def names_slides(column: str) -> bool:
        return column.casefold() in PARTS or folded_column(column) in ROLES["slide"]

    table = CsvTable(path, (), names_slides, _SPLIT_LAYOUT, "sample", numbered=True)
    if any(folded_column(name) in ("split", "fold") for name in table.columns):
        columns = _Columns(table, _NO_COLUMNS, ())
        taken = columns.taken
        needed = [taken[role] for role in ("slide", "split") if role in taken]
        require_values(needed[:1] if "fold" in taken else needed, table.lines)
        parts, folds = columns.parts("fold" not in taken), columns.folds()
        found = [
            Sample(line.number, line.values[taken["slide"]], "", "", part, fold)
            for line, part, fold in zip(table.lines, parts, folds, strict=True)
        ]
    else:
        found = [Sample(line.number, slide, "", "", part) for line, slide, part in _listed(table)]
    first: dict[str, Sample] = {}
    for each in found:
        other = first.setdefault(each.name, each)
        if other is not each:
            place, before = (one.split or _fold_of(one) or "nothing" for one in (each, other))
            again = f"is in {place}, but line {other.line} has it in {before}"
            again = f"is named by line {other.line} already" if place == before else again
            raise DatasetError(f"{path}, line {each.line}: {each.name!r} {again}: name it once")
    if not found:
        raise DatasetError(f"{path}: names no sample; {_SPLIT_LAYOUT}")
    return tuple(found)


def _listed(table: CsvTable) -> Iterator[tuple[Line, str, str]]:
    """The samples below columns train, val and test, with their lines and parts. Raises DatasetError."""
    header, lines = f"{table.path}, line {table.header_line}", table.lines
    columns: dict[str, str] = {}
    for name in table.columns:
        part = part_named(name)
        if part and columns.setdefault(part, name) != name:
            raise DatasetError(f"{header}: has {columns[part]} and {name}, of which one can be {part}")
    if "train" not in columns or len(columns) < 2:
        raise DatasetError(f"{header}: has {some(table.columns)}; {_SPLIT_LAYOUT}")
    texts = {line.values[column].casefold() for line in lines for column in columns.values()}
    if not texts <= {"true", "false"}:
        for line in lines:
            for part, column in columns.items():
                if not says_none(line.values[column]):
                    yield line, line.values[column], part
        return
    slides = next((name for name in lines[0].values if name not in columns.values()), None)
    if slides is None:
        raise DatasetError(f"{table.path}: has TRUE and FALSE, but no column of samples beside; {_SPLIT_LAYOUT}")
    for line in lines:
        if not line.values[slides]:
            raise line.wrong("names no sample")
        for part, column in columns.items():
            if line.values[column].casefold() == "true":
                yield line, line.values[slides], part
