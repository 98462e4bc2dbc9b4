"""Columns of the table of slides whose values stand beside the embedding of each slide: numbers, and classes.

    covariates                 age, sex, site:class
    fitted to the patients     age: mean 58.2, deviation 9.1; sex: f, m; site: 1, 4
    that are trained on
    a slide with 61, f and 4   (61 - 58.2) / 9.1, 1, 0, 0, 1

A missing number is 0, the mean. A missing class is zeros, and so is one that no slide to train on has.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from math import sqrt
from statistics import fmean
from typing import Any, NamedTuple

from mpi4dl._wording import counted, quoted, some
from mpi4dl.datasets.base import DatasetError
from mpi4dl.datasets.table import (
    CsvTable,
    LabelColumns,
    as_number,
    folded_name,
    require_one_way,
    says_none,
)

CLASS = ":class"  # behind the name of a column whose numbers are classes
_WHOLE = re.compile(r"([0-9]+)[.,]0+")  # pandas writes 1.0 where another line has no value

Cells = tuple[tuple[str, str | None], ...]  # of a sample: each column and its text, None where it has none


class Covariate(NamedTuple):
    """A column, by the name that was asked for.

    Attributes:
        column: its name.
        is_class: whether numbers are classes, too.
        fit: the mean and the deviation of numbers, or the classes; () before training.
    """

    column: str
    is_class: bool = False
    fit: tuple[Any, ...] = ()

    @classmethod
    def read(cls, entry: Any) -> "Covariate":
        """That of `age` or `site:class`, or of a list of this and what it was fitted to. Raises ValueError."""
        given = [entry] if isinstance(entry, str) else [*entry] if isinstance(entry, list | tuple) else []
        if not given or not given[0] or not isinstance(given[0], str):
            raise ValueError(entry)
        text, *fit = (part.strip() if isinstance(part, str) else part for part in given)
        column = text.removesuffix(CLASS)
        numbers = [each for each in fit if isinstance(each, float)]
        classes = [each for each in fit if isinstance(each, str)]
        of_numbers = len(numbers) == 2 and numbers[1] > 0 and column == text
        if not column or (fit and len(classes) < len(fit) and (classes or not of_numbers)):
            raise ValueError(text)
        return cls(column, column != text, tuple(fit))

    @property
    def text(self) -> str:
        return self.column + CLASS * self.is_class

    @property
    def of_numbers(self) -> bool:
        return bool(self.fit) and isinstance(self.fit[0], float)

    @property
    def width(self) -> int:
        """How many numbers of a slide it is; before training 1."""
        return 1 if self.of_numbers else max(1, len(self.fit))

    def numbers(self, cell: str | None) -> list[float]:
        """The numbers of a slide whose cell has this text. Raises ValueError for no number where there must be one."""
        if not self.of_numbers:
            return [float(cell is not None and _as_class(cell) == each) for each in self.fit]
        number = self.fit[0] if cell is None else as_number(cell)
        if number is None:
            raise ValueError(cell)
        return [(number - self.fit[0]) / self.fit[1]]

    def described(self) -> str:
        if self.of_numbers:
            return f"{self.column} (mean {self.fit[0]:.6g}, deviation {self.fit[1]:.6g})"
        return f"{self.column} ({some(self.fit, 10)})"


def _as_class(cell: str) -> str:
    whole = _WHOLE.fullmatch(cell)
    return whole[1] if whole else cell


def read_cells(table: CsvTable, asked: Sequence[Covariate], taken: Mapping[str, str]) -> tuple[list[str], list[Cells]]:
    """The columns of covariates, and the cells of each line; `taken` says of other columns what they are for.

    Raises DatasetError.
    """
    where, columns = f"{table.path}, line {table.header_line}", []
    for each in asked:
        found = table.named(each.column)
        if len(found) != 1:
            has = f"two columns {each.column!r}" if found else f"no column {each.column!r}"
            raise DatasetError(f"{where}: has {has} of covariates, but {some(found or table.columns)}")
        if found[0] in taken:
            what = f"{found[0]!r} is the column of the {taken[found[0]]}"
            raise DatasetError(f"{where}: {what}: leave it out of `covariates`")
        texts = [line for line in table.lines if not says_none(line.values[found[0]])]
        column = LabelColumns(table, (found[0],), texts)
        remedy = f"name it by `covariates` {each.column}:class"
        of_numbers = each.of_numbers if each.fit else not each.is_class and column.require_numbers_or_words(remedy)
        if of_numbers:
            column.require_one_decimal_mark()
        elif not each.fit:
            require_one_way(found[0], texts, folded_name, "class")
        columns.append(found[0])
    cells = [[None if says_none(line.values[name]) else line.values[name] for name in columns] for line in table.lines]
    names = [each.column for each in asked]
    return columns, [tuple(zip(names, own, strict=True)) for own in cells]


def fitted(asked: Sequence[Covariate], rows: Sequence[Any], indices: Sequence[int]) -> tuple[Covariate, ...]:
    """The covariates, fitted to the patients of the samples `indices` of a table, each patient once.

    A column all of whose cells are numbers has numbers. Of a patient with several slides their mean counts. Raises
    DatasetError for a column without any value to train on.
    """
    found = []
    for place, each in enumerate(asked):
        cells = [row.covariates[place][1] for row in rows]
        of: dict[str, list[str]] = {}
        for index in indices:
            if cells[index] is not None:
                of.setdefault(rows[index].patient, []).append(cells[index])
        if not of:
            raise DatasetError(f"`covariates` {each.text}: no slide to train on has a value: leave the column out")
        fit: tuple[Any, ...] = tuple(sorted({_as_class(cell) for own in of.values() for cell in own}))
        if not each.is_class and all(cell is None or as_number(cell) is not None for cell in cells):
            values = [fmean(as_number(cell) or 0.0 for cell in own) for own in of.values()]
            mean = fmean(values)
            fit = mean, sqrt(fmean((value - mean) ** 2 for value in values)) or 1.0
        found.append(each._replace(fit=fit))
    return tuple(found)


def remarks(covariates: Sequence[Covariate], rows: Sequence[Any], table: Any) -> Iterator[str]:
    """Remarks on cells of samples: missing ones, and classes that training did not see.

    Raises DatasetError for no number where training had numbers.
    """
    for place, each in enumerate(covariates):
        cells = [(row, row.covariates[place][1]) for row in rows]
        missing, there = [row.name for row, cell in cells if cell is None], [each for each in cells if each[1]]
        if each.of_numbers:
            wrong = next(((row, cell) for row, cell in there if as_number(cell) is None), None)
            if wrong is not None:
                raise DatasetError(
                    f"{table}, line {wrong[0].line}: {each.column!r} is {quoted(wrong[1])}, but training had numbers"
                )
        instead = "its mean" if each.of_numbers else "no class"
        if missing:
            slides = counted(len(missing), "slide")
            yield f"covariate {each.column}: no value of {slides}, taken for {instead}: {some(missing, 3)}"
        if not each.of_numbers:
            new = [f"{row.name} ({cell})" for row, cell in there if _as_class(cell) not in each.fit]
            if new:
                seen = f"{counted(len(new), 'slide')} of classes that training did not have, taken for no class"
                yield f"warning: covariate {each.column}: {seen}: {some(new, 3)}"
