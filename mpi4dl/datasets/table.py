"""Labels of images in a table, `labels.csv`: one line for each image, and what its columns mean.

    file,grade                  classify      one column of names: the class of each image
    a/1.png,benign

    file,split,age              regress       one or several columns of numbers
    a/1.png,train,61.5

    file,tumour,stroma          multilabel    several columns of 0 and 1: which of them an image shows
    a/1.png,1,0

    file,time,event             survival      how long each was seen, and 1 if the event came then, 0 if not
    a/1.png,37.5,1

Values are separated by commas, semicolons or tabs. A column `split` says of each image whether it is for train, val or
test. What is learnt is told by the columns if it is not asked for: a column of numbers is to be estimated, unless it is
called `class` or `label`.
"""

import csv
import io
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from mpi4dl.datasets.base import DatasetError
from mpi4dl.datasets.files import open_regular
from mpi4dl.datasets.layout import TEST, TRAINING, VALIDATION

TABLE = "labels.csv"
FILE_COLUMNS = ("file", "filename", "file_name", "image", "path")
CLASS_COLUMNS = ("class", "label")
SURVIVAL = ("time", "event")
TASKS = ("classify", "multilabel", "regress", "survival")
_LAYOUT = "expected a line such as file,class and below it one for each image, such as a/1.png,benign"

Label = int | tuple[float, ...]


class Labelled(NamedTuple):
    """A line of the table: the name of the image, "train", "val", "test" or nothing, and what is to be learnt."""

    line: int
    name: str
    part: str
    label: Label


class Table(NamedTuple):
    """A task, the names of what a model gives for it, and the lines."""

    task: str
    classes: tuple[str, ...]
    rows: tuple[Labelled, ...]


class _Line(NamedTuple):
    number: int
    values: dict[str, str]


def read_table(path: Path, task: str | None = None, columns: Sequence[str] | None = None) -> Table:
    """The labels of a table for a task, or for the one that its columns tell; `columns` are those to learn, or all.

    Labels are indices into the classes of one column, and else numbers, one of each column; of survival (time, event).

    Raises:
        DatasetError: no such file, or a line of it that says what cannot be, by its number.
    """
    if task is not None and task not in TASKS:
        raise DatasetError(f"{path}: a table of labels is for one of {', '.join(TASKS)}, but {task} was asked for")
    file_column, found, lines = _lines(path)
    learnt = _learnt(path, [name for name in found if name not in (file_column, "split")], task, columns)
    for line in lines:
        for name in (file_column, *learnt, *(["split"] if "split" in found else [])):
            if not line.values[name]:
                raise _wrong(path, line, f"{name!r} is empty")
    _refuse_twice(path, file_column, lines)
    task = task or _task_told(learnt, lines)
    if task == "classify":
        classes, label = _class_of(path, learnt, lines)
    else:
        classes, label = learnt, _numbers_of(path, learnt, task)
        classes = ("risk",) if task == "survival" else classes
    rows = (Labelled(line.number, line.values[file_column], _part(path, line), label(line)) for line in lines)
    return Table(task, classes, tuple(rows))


def _lines(path: Path) -> tuple[str, list[str], list[_Line]]:
    """The column of file names, all columns, and what is in each line of them."""
    try:
        with open_regular(path) as file:
            text = file.read().decode("utf-8-sig")
    except OSError as error:
        raise DatasetError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise DatasetError(f"{path}: is no text in UTF-8 ({error}): save it as such") from error
    first = text.split("\n", 1)[0]
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=max(",;\t", key=first.count), strict=True)
    try:
        rows = [(reader.line_num, [value.strip() for value in row]) for row in reader]
    except csv.Error as error:
        raise DatasetError(f"{path}, line {reader.line_num}: is no line of a table: {error}") from error
    rows = [(number, row) for number, row in rows if any(row)]
    if not rows:
        raise DatasetError(f"{path}: is empty; {_LAYOUT}")
    number, header = rows[0]
    header = [name.casefold() if name.casefold() in (*FILE_COLUMNS, "split", *SURVIVAL) else name for name in header]
    twice = next((name for name in header if header.count(name) > 1), None)
    if twice is not None or "" in header:
        what = f"two columns {twice!r}" if twice else "a column without a name"
        raise DatasetError(f"{path}, line {number}: has {what}; {_LAYOUT}")
    named = [name for name in FILE_COLUMNS if name in header]
    if len(named) != 1:
        which = f"{' and '.join(named)}, of which one" if named else f"{', '.join(header)}: none of them"
        names = ", ".join(FILE_COLUMNS)
        raise DatasetError(f"{path}, line {number}: has {which} can be the column of file names ({names}); {_LAYOUT}")
    lines = []
    for number, row in rows[1:]:
        if len(row) != len(header):
            raise DatasetError(f"{path}, line {number}: has {len(row)} values for {len(header)} columns")
        lines.append(_Line(number, dict(zip(header, row, strict=True))))
    if not lines:
        raise DatasetError(f"{path}: names no image; {_LAYOUT}")
    return named[0], header, lines


def _learnt(path: Path, found: list[str], task: str | None, columns: Sequence[str] | None) -> tuple[str, ...]:
    """The columns that are labels."""
    unknown = next((name for name in columns or () if name not in found), None)
    if unknown is not None:
        raise DatasetError(f"{path}: has no column {unknown!r} of labels, but {', '.join(found) or 'none'}")
    if not found:
        raise DatasetError(f"{path}: has no column of labels beside the file names; {_LAYOUT}")
    if task == "survival" or (task is None and columns is None and set(found) == set(SURVIVAL)):
        missing = next((name for name in SURVIVAL if name not in found), None)
        if missing is not None:
            raise DatasetError(f"{path}: has no column {missing!r}: survival needs time and event")
        return SURVIVAL
    learnt = tuple(columns or found)
    if task == "classify" and len(learnt) > 1:
        raise DatasetError(
            f"{path}: has the columns {', '.join(learnt)}, but a class is one column: name it by `label_columns`"
        )
    return learnt


def _task_told(learnt: tuple[str, ...], lines: Sequence[_Line]) -> str:
    if learnt == SURVIVAL:
        return "survival"
    values = [_number(line.values[name]) for line in lines for name in learnt]
    if len(learnt) == 1:
        return "classify" if learnt[0].casefold() in CLASS_COLUMNS or None in values else "regress"
    return "multilabel" if {*values} <= {0.0, 1.0} else "regress"


def _number(text: str) -> float | None:
    try:
        found = float(text)
    except ValueError:
        return None
    return found if math.isfinite(found) else None


def _class_of(
    path: Path, learnt: tuple[str, ...], lines: Sequence[_Line]
) -> tuple[tuple[str, ...], Callable[[_Line], Label]]:
    (name,) = learnt
    found = {line.values[name] for line in lines}
    numbered = all(text.isdecimal() for text in found)
    classes = tuple(sorted(found, key=lambda text: (int(text) if numbered else 0, text)))
    if len(classes) < 2:
        raise DatasetError(f"{path}: all images have {name} {classes[0]!r}; a classifier needs two classes or more")
    places = {text: number for number, text in enumerate(classes)}
    return classes, lambda line: places[line.values[name]]


def _numbers_of(path: Path, learnt: tuple[str, ...], task: str) -> Callable[[_Line], Label]:
    def label(line: _Line) -> Label:
        numbers = []
        for name in learnt:
            number, text = _number(line.values[name]), line.values[name]
            if number is None:
                raise _wrong(path, line, f"{name!r} is {text!r}, but {task} needs a number")
            if number not in (0, 1) and (task == "multilabel" or name == "event"):
                raise _wrong(path, line, f"{name!r} is {text!r}, but {task} needs 0 or 1")
            if number < 0 and task == "survival":
                raise _wrong(path, line, f"{name!r} is {text!r}, but no time is negative")
            numbers.append(number)
        return tuple(numbers)

    return label


def _part(path: Path, line: _Line) -> str:
    asked = line.values.get("split", "")
    for part, names in (("train", TRAINING), ("val", VALIDATION), ("test", TEST)):
        if asked.casefold() in names:
            return part
    if asked:
        raise _wrong(path, line, f"'split' is {asked!r}, but must be train, val or test")
    return ""


def _refuse_twice(path: Path, column: str, lines: Sequence[_Line]) -> None:
    seen: dict[str, int] = {}
    for line in lines:
        name = line.values[column]
        if name in seen:
            raise _wrong(path, line, f"names {name} again, which line {seen[name]} does already")
        seen[name] = line.number


def _wrong(path: Path, line: _Line, problem: str) -> DatasetError:
    return DatasetError(f"{path}, line {line.number}: {problem}")


def found_in(path: Path, rows: Sequence[Labelled], names: Sequence[str]) -> Iterator[tuple[Labelled, str]]:
    """Each line of a table, and the file it means: by its path, or by its name alone, with or without the ending.

    Raises:
        DatasetError: a line names none of the files, or one of several, or one that another line means too.
    """
    by_name: dict[str, list[str]] = {}
    for name in names:
        base = name.rpartition("/")[2]
        for short in {base, base.partition(".")[0], name.rpartition(".")[0]}:
            by_name.setdefault(short, []).append(name)
    known, used = set(names), dict[str, int]()
    for row in rows:
        asked = row.name.replace("\\", "/").removeprefix("./")
        found = [asked] if asked in known else by_name.get(asked, [])
        if len(found) != 1:
            which = (
                "no image" if not found else f"one of {len(found)} images, such as {' and '.join(sorted(found)[:2])}"
            )
            raise DatasetError(f"{path}, line {row.line}: {row.name} is {which} below {path.parent}")
        if found[0] in used:
            raise DatasetError(
                f"{path}, line {row.line}: {row.name} is {found[0]}, as line {used[found[0]]} is already"
            )
        used[found[0]] = row.line
        yield row, found[0]
