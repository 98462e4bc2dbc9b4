"""Tables in CSV files: their text, and what columns of labels mean.

    file,grade                  classify      one column of names, or of 0 and 1: the class of each sample
    file,split,age              regress       one or several columns of numbers
    file,tumour,stroma          multilabel    several columns of 0 and 1: which of them a sample shows
    file,time,event             survival      how long each was seen, and 1 if the event came then, 0 if not

Values are separated by commas, semicolons or tabs; the text is UTF-8, or UTF-16 as Excel writes it. Columns that
identify a patient or sample, such as `patient_id`, are no labels.

If no task is given, it follows from the columns, provided that they can mean only one. A column of few whole numbers
may be classes or amounts, and one of names and numbers, or with a missing value, is refused with the line. A number may
have a decimal comma, if no number of the table has a point. TRUE and FALSE are 1 and 0.
"""

import csv
import io
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mpi4dl._files import open_regular, read_at_most
from mpi4dl._wording import counted, quoted
from mpi4dl.datasets.base import DatasetError, blaming
from mpi4dl.datasets.kinds import FileKind
from mpi4dl.datasets.labels import FORMS, SURVIVAL
from mpi4dl.datasets.listed import TEST, TRAINING, VALIDATION

MOST_BYTES = 1 << 29  # of a table, which is read as a whole
FEW_VALUES = 20  # so many whole numbers may be classes
_EXACT_DIGITS = 16  # numbers with fewer digits differ as floating point
_DELIMITERS = ",;\t"
_MINUS = "\u2212"
# Identifiers of patients or samples, and numbers of lines; not class_id.
_IDENTIFIED = "case|patient|pat|subject|person|slide|sample|specimen|study|series|donor|block|scan|accession|barcode"
_IDENTIFIER = re.compile(
    rf"({_IDENTIFIED})s?(_?(id|ids|no|nr|number|name|code|key|barcode|uid))?|id|uid|uuid|mrn|pid|index|row|nr|no|fold|"
    r"(?!.*(class|label|categor|type|grade|stage|group|target|diagnos))(.*_)(id|uid|uuid)"
)
# Values that say that there is none; Excel's errors too.
_MISSING = frozenset(
    ("", "nan", "na", "n/a", "n.a.", "n.a", "n. a.", "n / a", "#n/a", "#na", "<na>", "null", "nil", "missing", "nat",
     "not available", "not reported", "not applicable", "n.d.", "n.d", "n. d.", "k.a.", "k. a.", "?", "-", "--", "---",
     "'--", "\u2013", "\u2014", ".", "#value!", "#div/0!", "#ref!", "#name?", "#num!", "#null!")
)  # fmt: skip
_NONE = re.compile(r"None|\[(?i:not .*|unknown|discrepancy)\]")  # as Python and archives of cohorts write it
_TRUTH = {"true": 1.0, "false": 0.0}
_NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*|,[0-9]+)?|[.,][0-9]+)([eE][+-]?[0-9]+)?")
_WITH_UNIT = re.compile(rf"({_NUMBER.pattern})\s*([^\W\d_][^\d\s]*|[^\w\s.,+-]\S*)")
_MAYBE_THOUSANDS = re.compile(r"[+-]?[1-9][0-9]{0,2}([.,][0-9]{3})+")
_THOUSANDS = re.compile(r"[+-]?[1-9][0-9]{0,2}(['\u2019\s][0-9]{3})+([.,][0-9]+)?")

Label = int | tuple[float, ...]


class Line(NamedTuple):
    """A line of a table that is not empty: its number in the file, from 1, its text of each column, and the table."""

    number: int
    values: dict[str, str]
    path: Path

    def wrong(self, problem: str) -> DatasetError:
        """An error that names the file and the line."""
        return DatasetError(f"{self.path}, line {self.number}: {problem}")


def _decoded(path: Path) -> str:
    """The text of a table. Raises DatasetError."""
    with blaming(path), open_regular(path) as file:
        content = read_at_most(file, MOST_BYTES)
    if len(content) > MOST_BYTES:
        raise DatasetError(
            f"{path}: has more than {MOST_BYTES >> 20} MiB, but a table has a short line for each sample: leave out "
            "other columns, or divide it"
        )
    encoding = "utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise DatasetError(
            f"{path}, line {line}: is no text in UTF-8 ({error.reason}), nor in UTF-16 with its mark: save it as "
            "UTF-8, in Excel as 'CSV UTF-8'"
        ) from error
    if "\0" in text:
        line = text[: text.index("\0")].count("\n") + 1
        raise DatasetError(f"{path}, line {line}: has a NUL, which no text has: save the table as UTF-8")
    return text


def _delimiter(path: Path, text: str, names_files: Callable[[str], bool]) -> str:
    """The delimiter of the columns: the one that gives a column of file names. Raises DatasetError."""
    first = next((line for line in text.split("\n") if line.strip()), "").rstrip("\r")
    if re.fullmatch(r"sep=[,;\t]", first):  # as Excel has it
        return first[-1]
    found = []
    for mark in _DELIMITERS if any(mark in first for mark in _DELIMITERS) else ():
        names = [name.strip().strip('"').strip() for name in first.split(mark)]
        found += [mark] if any(map(names_files, names)) else []
    if len(found) > 1:
        marks = " and ".join("a tab" if each == "\t" else each for each in found)
        raise DatasetError(f"{path}, line 1: may be separated by {marks}: separate all columns by one of them")
    return found[0] if found else max(_DELIMITERS, key=first.count)


class CsvTable:
    """The text of a table: its columns by name, and what each line has in them.

    Args:
        known: names of columns. A column that differs from one of them only in case gets that name.
        names_files: whether a column of this name may name files. It tells which delimiter a table has.
        layout: what a table looks like, for errors.
        rows_of: what lines are about, for errors.
        numbered: whether the first column may have no name also where it does not number lines.

    Attributes:
        header_line: the line of the names of columns, from 1.
        columns: the names of columns, without a first one that has none.

    Raises:
        DatasetError: the file cannot be read, is no text or empty, or two columns have one name.
    """

    def __init__(
        self,
        path: Path,
        known: Sequence[str],
        names_files: Callable[[str], bool],
        layout: str,
        rows_of: str,
        numbered: bool = False,
    ) -> None:
        self.path, self.layout, self.rows_of = path, layout, rows_of
        text = _decoded(path)
        self.delimiter = _delimiter(path, text, names_files)
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=self.delimiter, strict=True)
        try:
            rows = [(reader.line_num, [value.strip() for value in row]) for row in reader]
        except csv.Error as error:
            raise DatasetError(f"{path}, line {reader.line_num}: is no line of a table: {error}") from error
        rows = [(number, row) for number, row in rows if any(row)]
        rows = rows[1:] if rows and rows[0][1][0].startswith("sep=") else rows
        if not rows:
            raise DatasetError(f"{path}: is empty; {layout}")
        (self.header_line, header), *self._rows = rows
        # Spreadsheets write columns that are empty from the first line to the last.
        width = max(number for _, row in rows for number, value in enumerate(row, 1) if value)
        header = header[:width]
        header = [name.casefold() if name.casefold() in known else name for name in header]
        times = Counter(name.casefold() for name in header)
        twice = next((name for name in header if times[name.casefold()] > 1), None)
        numbered = numbered or all(row[0].isdecimal() for _, row in self._rows)  # as pandas numbers lines
        if "" in header[numbered:] or twice is not None:
            what = f"two columns {twice!r}" if twice else "a column without a name"
            raise DatasetError(f"{path}, line {self.header_line}: has {what}; {layout}")
        self._header = header
        self.columns = [name for name in header if name]

    @cached_property
    def lines(self) -> list[Line]:
        """The lines below the names of columns. Raises DatasetError for one of another length, and for none."""
        lines = []
        for number, row in self._rows:
            values = row[: len(self._header)] if not any(row[len(self._header) :]) else row
            if len(values) != len(self._header):
                raise DatasetError(f"{self.path}, line {number}: has {len(row)} values for {len(self._header)} columns")
            lines.append(Line(number, dict(zip(self._header, values, strict=True)), self.path))
        if not lines:
            raise DatasetError(f"{self.path}: names no {self.rows_of}; {self.layout}")
        return lines

    def named(self, asked: str) -> list[str]:
        """The column of this name, or else those that differ from it only in form."""
        same = [name for name in self.columns if folded_column(name) == folded_column(asked)]
        return [asked] if asked in self.columns else same


def identifies(column: str) -> bool:
    """Whether a column of this name identifies a patient or sample, and is no label."""
    return _IDENTIFIER.fullmatch(folded_column(column)) is not None


def folded_column(column: str) -> str:
    """The normal form of a column's name: `Slide ID`, `slide-id` and `SlideID` are slide_id."""
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", column.strip())
    return re.sub(r"[\W_]+", "_", name).strip("_").casefold()


def learnt_columns(
    table: CsvTable, found: list[str], task: str | None, columns: Sequence[str] | None
) -> tuple[str, ...]:
    """The columns that are labels, of those `found` that may be. Raises DatasetError."""
    path = table.path
    unknown = next((name for name in columns or () if name not in found), None)
    if unknown is not None:
        raise DatasetError(f"{path}: has no column {unknown!r} of labels, but {', '.join(found) or 'none'}")
    named = next((name for name in columns or () if identifies(name)), None)
    if named is not None:
        raise DatasetError(
            f"{path}: the column {named!r} identifies a patient or sample, and is no label: name others "
            "by `label_columns`, or rename it"
        )
    others = [name for name in found if not identifies(name)]
    if not others:
        beside = f", and beside {', '.join(found)}, which say who or what it is of" if found else ""
        raise DatasetError(f"{path}: has no column of labels beside the file names{beside}; {table.layout}")
    for form in (each for each in FORMS.values() if each.columns):
        if task == form.task or (task is None and set(columns or others) == set(form.columns)):
            missing = next((name for name in form.columns if name not in found), None)
            if missing is not None:
                needs = " and ".join(form.columns)
                raise DatasetError(f"{path}: has no column {missing!r}: {form.task} needs {needs}")
            return form.columns
    learnt = tuple(columns or others)
    if task == "classify" and len(learnt) > 1:
        raise DatasetError(
            f"{path}: has the columns {', '.join(learnt)}, but a class is one column: name it by `label_columns`"
        )
    return learnt


def as_number(text: str) -> float | None:
    """A text as a number of float32; None if it is none."""
    if text.casefold() in _TRUTH:
        return _TRUTH[text.casefold()]
    if not _NUMBER.fullmatch(text):
        return None
    found = float(text.replace(",", "."))
    return found if math.isfinite(found) and abs(found) <= np.finfo(np.float32).max else None


def says_none(text: str) -> bool:
    """Whether a value says that there is none: it is empty, NaN, NA, a dash or the like."""
    return text.casefold() in _MISSING or _NONE.fullmatch(text) is not None


class LabelColumns:
    """The values that lines have in columns that are learnt, and what they can mean.

    `of_classes` are names of columns that have classes, also where these are numbers.
    """

    def __init__(
        self, table: CsvTable, names: tuple[str, ...], lines: Sequence[Line], of_classes: Sequence[str] = ()
    ) -> None:
        self._path, self._names, self._lines, self._delimiter = table.path, names, lines, table.delimiter
        self._of_classes, self._rows_of = of_classes, table.rows_of

    def labels(
        self, task: str | None, chosen: bool, classes: tuple[str, ...] | None
    ) -> tuple[str, tuple[str, ...], list[Label]]:
        """The task, the classes or names of numbers, and the label of each line.

        `chosen`: the user named the columns. `classes` fixes the classes and their order. Raises DatasetError.
        """
        task = task or self.task(chosen)
        if task == "classify":
            return task, *self.classes(classes)
        return task, FORMS[task].classes or self._names, self.numbers(task)

    def _texts(self, name: str) -> list[str]:
        return [line.values[name] for line in self._lines]

    def require_one_decimal_mark(self) -> None:
        """Raises DatasetError unless it is sure which mark of numbers is that of decimals."""
        texts = [(line, name, line.values[name]) for line in self._lines for name in self._names]
        numbers = [each for each in texts if _NUMBER.fullmatch(each[2]) or _MAYBE_THOUSANDS.fullmatch(each[2])]
        commas, points = ([each for each in numbers if mark in each[2]] for mark in ",.")
        if commas and points:
            (line, name, text), (other, _, first) = points[0], commas[0]
            raise line.wrong(
                f"{name!r} is {text!r}, but line {other.number} has {first!r}: write all decimals with a point"
            )
        # Where a semicolon separates, as where decimals have commas, a point may part thousands.
        marked = commas or (points if self._delimiter == ";" else [])
        if marked and all(_MAYBE_THOUSANDS.fullmatch(text) for *_, text in marked):
            line, name, text = marked[0]
            mark = "comma" if commas else "point"
            raise line.wrong(
                f"{name!r} is {quoted(text)}, whose {mark} may part thousands or decimals: write numbers without "
                "the former, and one with other than three decimals"
            )

    def task(self, chosen: bool) -> str:
        """The one task that the columns can mean; `chosen`: they were named by the user. Raises DatasetError."""
        names = self._names
        fixed = next((form.task for form in FORMS.values() if form.columns == names), None)
        if fixed is not None:
            return fixed
        if len(names) == 1:
            return self._task_of_one(names[0])
        self.require_one_decimal_mark()
        amounts = {name: [as_number(text) for text in self._texts(name)] for name in names}
        for name, found in amounts.items():
            words = [text for text, number in zip(self._texts(name), found, strict=True) if number is None]
            if words and all(says_none(text) for text in words):
                self._refuse_missing(name)
        if not any(None in found for found in amounts.values()):
            if all({*found} <= {0.0, 1.0} for found in amounts.values()):
                return "multilabel"
            unsure = any(
                name.casefold() in self._of_classes or {*found} <= {0.0, 1.0} or self._few(found)
                for name, found in amounts.items()
            )
            if not unsure and not set(SURVIVAL) <= set(names):
                return "regress"
            if chosen:
                raise DatasetError(
                    f"{self._path}: the columns {', '.join(names)} may be numbers or classes: say `task` regress, or "
                    "name the column of a class by `label_columns`"
                )
        raise DatasetError(
            f"{self._path}: has the columns {', '.join(names)}, which are several numbers, or 0 and 1, only in part: "
            "name those that are learnt by `label_columns`, and say `task` if they may mean several"
        )

    def _task_of_one(self, name: str) -> str:
        self._refuse_missing(name)
        found = [as_number(text) for text in self._texts(name)]
        if name.casefold() in self._of_classes:
            if not all(re.search("[0-9]", text) for text in self._texts(name)):
                self.require_numbers_or_words("say `task` classify")
            if None not in found and not all(number is not None and number.is_integer() for number in found):
                raise DatasetError(
                    f"{self._path}: the column {name!r} has numbers that are not whole, which may be classes or "
                    "amounts: say `task` classify or regress"
                )
            if len({*self._texts(name)}) > max(FEW_VALUES, len(found) // 2):
                raise DatasetError(
                    f"{self._path}: the column {name!r} has {len({*self._texts(name)})} values in {len(found)} lines, "
                    f"such as {self._texts(name)[0]!r}, which may be no classes: say `task` classify, or regress for "
                    "amounts"
                )
            return "classify"
        self.require_one_decimal_mark()
        if self.require_numbers_or_words("say `task` classify"):
            if {*found} <= {0.0, 1.0}:
                return "classify"
            if self._few(found):
                raise DatasetError(
                    f"{self._path}: the column {name!r} has {len({*found})} whole numbers, which may be classes or "
                    "amounts: say `task` classify or regress"
                )
            return "regress"
        if all(map(_THOUSANDS.fullmatch, self._texts(name))):
            raise self._lines[0].wrong(
                f"{name!r} is {self._lines[0].values[name]!r}, which parts thousands: write numbers without marks "
                "between digits, or say `task` classify"
            )
        measured = [_WITH_UNIT.fullmatch(text) for text in self._texts(name)]
        if len({each and each[each.re.groups] for each in measured}) == 1 and measured[0]:
            raise DatasetError(
                f"{self._path}: the column {name!r} has numbers with a unit, such as {measured[0][0]!r}: write the "
                "numbers alone, or say `task` classify"
            )
        if len({*self._texts(name)}) == len(found) > FEW_VALUES:
            raise DatasetError(
                f"{self._path}: the column {name!r} has another value in each line, such as "
                f"{self._texts(name)[0]!r}: name the labels by `label_columns`, or say `task` classify"
            )
        return "classify"

    def require_numbers_or_words(self, remedy: str) -> bool:
        """Whether the values of the column are numbers, rather than words. Raises DatasetError if both are there."""
        (name,) = self._names
        found = [as_number(text) for text in self._texts(name)]
        if None not in found:
            return True
        if any(number is not None for number in found):
            word, amount = found.index(None), next(i for i, number in enumerate(found) if number is not None)
            raise self._lines[word].wrong(
                f"{name!r} is {self._lines[word].values[name]!r}, which is no number, but line "
                f"{self._lines[amount].number} has {self._lines[amount].values[name]!r}: mend it, or {remedy} "
                "if both are classes"
            )
        return False

    def _few(self, numbers: Sequence[float | None]) -> bool:
        """Whether numbers may be those of classes: whole ones, few, that come again."""
        values = {*numbers}
        whole = all(value is not None and value.is_integer() for value in values)
        return whole and not values <= {0.0, 1.0} and len(values) <= min(FEW_VALUES, max(1, len(numbers) // 2))

    def _refuse_missing(self, name: str) -> None:
        """Raises DatasetError for a value of a class that says that there is none."""
        for line in self._lines:
            text = line.values[name]
            if says_none(text):
                what = "is empty" if not text else f"is {text!r}, which says that there is no value"
                raise line.wrong(f"{name!r} {what}: leave the line out, or fill it in; a class needs another name")

    def classes(self, known: tuple[str, ...] | None) -> tuple[tuple[str, ...], list[Label]]:
        """The classes of the column, and which one each line says. Raises DatasetError."""
        path, (name,) = self._path, self._names
        self._refuse_missing(name)
        require_one_way(name, self._lines, _folded, "class")
        found = {*self._texts(name)}
        numbered = all(re.fullmatch("[0-9]+", text) for text in found)
        classes = tuple(sorted(found, key=partial(_order, numbered)))
        if known is not None:
            other = next((line for line in self._lines if line.values[name] not in known), None)
            if other is not None:
                asked = other.values[name]
                raise other.wrong(f"{name!r} is {asked!r}, but the classes of training are {', '.join(known)}")
            classes = known
        if len(classes) < 2:
            raise DatasetError(
                f"{path}: all {self._rows_of}s have {name} {classes[0]!r}; a classifier needs two classes or more"
            )
        places = {text: number for number, text in enumerate(classes)}
        return classes, [places[text] for text in self._texts(name)]

    def numbers(self, task: str) -> list[Label]:
        """The numbers of each line, one of each column. Raises DatasetError."""
        self.require_one_decimal_mark()
        found: list[Label] = []
        for line in self._lines:
            numbers = []
            for name in self._names:
                text = line.values[name]
                number = as_number(text)
                if number is None or (task == "regress" and text.casefold() in _TRUTH):
                    what = "is empty" if not text else f"is {quoted(text)}"
                    raise line.wrong(f"{name!r} {what}, but {task} needs a number: mend it, or leave the line out")
                problem = FORMS[task].wrong(name, number)
                if problem:
                    raise line.wrong(f"{name!r} is {text!r}, but {problem}")
                numbers.append(number)
            found.append(tuple(numbers))
        return found


def _folded(text: str) -> str:
    """The normal form of a class name: without differences of case, spaces and the form of numbers."""
    name = folded_name(text)
    number = as_number(name)
    return repr(number) if number is not None and len(name) < _EXACT_DIGITS else name


def folded_name(text: str) -> str:
    """The normal form of a name: without differences of case, spaces and dashes, nor characters that nobody sees."""
    kinds = [(char, unicodedata.category(char)) for char in unicodedata.normalize("NFKC", text).casefold()]
    shown = ("-" if kind == "Pd" or char == _MINUS else char for char, kind in kinds if kind != "Cf")
    return " ".join("".join(shown).split())


def require_apart(names: Iterable[str], where: Path) -> None:
    """Raises DatasetError for two names of classes, of more than a letter, that differ but have one normal form."""
    first: dict[str, str] = {}
    for name in (each for each in names if len(each) > 1):
        other = first.setdefault(folded_name(name), name)
        if other != name:
            raise DatasetError(f"{where}: has the classes {other!r} and {name!r}: write one class in one way")


def _order(numbered: bool, text: str) -> tuple[int, str, str]:
    """The order of classes: of numbers, however long, by what they say."""
    digits = text.lstrip("0") if numbered else ""
    return len(digits), digits, text


def require_one_way(column: str, lines: Sequence[Line], folded: Callable[[str], str], what: str) -> None:
    """Raises DatasetError for two values of a column that differ but have one normal form; `what` they name."""
    written: dict[str, Line] = {}
    for line in lines:
        text = line.values[column]
        first = written.setdefault(folded(text), line)
        if first.values[column] != text:
            raise line.wrong(
                f"{column!r} is {text!r}, but line {first.number} has {first.values[column]!r}: write one {what} in "
                "one way"
            )


def require_values(columns: Sequence[str], lines: Sequence[Line], remedy: str = "fill it in") -> None:
    """Raises DatasetError for a line in which one of these columns is empty."""
    for line in lines:
        for column in columns:
            if not line.values[column]:
                raise line.wrong(f"{column!r} is empty: {remedy}, or leave the line out")


def part_named(word: str) -> str:
    """train, val or test for a word that means it, such as Training or dev; else nothing."""
    kinds = (("train", TRAINING), ("val", VALIDATION), ("test", TEST))
    return next((part for part, words in kinds if word.casefold() in words), "")


def _composed(name: str) -> str:
    """A name with each letter and its marks as one character, as macOS does not write names of files."""
    return unicodedata.normalize("NFC", name)


def found_in(
    path: Path, asked: Sequence[tuple[int, str]], names: Sequence[str], kind: FileKind, where: str, remedy: str
) -> list[str]:
    """The file that each line of a table means, by its path, or by its name alone, with or without the ending.

    `asked` are lines and what they say; `names` are those of files of a `kind`. `where` they are, and the remedy if one
    is not, are for errors.

    Raises:
        DatasetError: a line names none of the files, or one of several, or one that another line means too.
    """
    by_name: dict[str, list[str]] = {}
    by_stem: dict[str, list[str]] = {}  # without the last ending alone, as of TCGA-AA-0001-DX1.<UUID>.svs
    for name in names:
        shown = _composed(name)
        base = shown.rpartition("/")[2]
        by_stem.setdefault(base.rpartition(".")[0], []).append(name)
        for short in {shown, base, base.partition(".")[0], shown.rpartition(".")[0]}:
            by_name.setdefault(short, []).append(name)
    known, used, paths = set(names), dict[str, int](), []
    for line, text in asked:
        name = text.replace("\\", "/").removeprefix("./")
        shown = _composed(name)
        found = [name] if name in known else by_name.get(shown) or by_stem.get(shown, [])
        if len(found) != 1:
            several = f"one of {counted(len(found), kind.noun, kind.nouns)}, such as {' and '.join(sorted(found)[:2])}"
            which, advice = (several, "") if found else (f"no {kind.noun}", remedy)
            raise DatasetError(f"{path}, line {line}: {text} is {which} {where}{advice}")
        if found[0] in used:
            raise DatasetError(f"{path}, line {line}: {text} is {found[0]}, as line {used[found[0]]} is already")
        used[found[0]] = line
        paths.append(found[0])
    return paths
