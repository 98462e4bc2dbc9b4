"""How files of results are written and read: objects and lines of JSON, and tables. Own files are read strictly.

    NAME.json     an object with a `version`; it also holds for the lines and tables beside it
    NAME.jsonl    an object a line, on disk as soon as it is added; the last line of a running job may be half written
    NAME.csv      a table for spreadsheets; empty cells are unknown

JSON has no infinity and no not-a-number: they are written as the strings "inf", "-inf" and "nan".
"""

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from mpi4dl._files import naming, read_regular, write_durably
from mpi4dl._numbers import as_cell, number_in, of_cell, parse_json
from mpi4dl.options.declare import ConfigError

VERSION = 1
LONGEST_REASON = 200  # characters

Record = dict[str, Any]


class DamagedResult(ConfigError):
    """A file of results that is damaged, or of another version; the message names it."""


@contextmanager
def reading(path: Path | str) -> Iterator[None]:
    """Make one error, which names the file, of whatever is wrong with its content. Errors of the system pass."""
    try:
        yield
    except (DamagedResult, OSError):
        raise
    except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError, csv.Error) as error:
        reason = " ".join(str(error).split())[:LONGEST_REASON]
        raise DamagedResult(
            f"{path}: is damaged ({type(error).__name__}: {reason}): restore it, or make it anew"
        ) from error


def finite(value: Any) -> Any:
    """The value in a form that JSON can hold: infinity and not-a-number as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def as_object(content: Mapping[str, Any]) -> str:
    """The text of a file that has this content."""
    return json.dumps({"version": VERSION, **finite(content)}, indent=1, allow_nan=False) + "\n"


def write_object(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a file as a whole. Raises OSError."""
    write_durably(path, as_object(content).encode())


def read_object(path: Path) -> Record:
    """The content of such a file. Raises OSError, DamagedResult."""
    return parse_object(read_regular(path), path)


def read_part(path: Path, name: str) -> Record:
    """The object of this name in such a file. Raises OSError, DamagedResult."""
    content = read_object(path)
    with reading(path):
        if not isinstance(content[name], dict):
            raise ValueError(f"its {name} are no object")
    return content[name]


def parse_object(text: bytes | str, where: Path | str) -> Record:
    """The content of such a text, which was found there. Raises DamagedResult."""
    with reading(where):
        found = parse_json(text)
        if not isinstance(found, dict):
            raise ValueError("it is no object")
        version = found.pop("version")
    if version != VERSION:
        raise DamagedResult(f"{where}: has format {version}, but this version of mpi4dl reads {VERSION}: make it anew")
    return found


class Lines:
    """A file of records that grows by a line, and keeps what was in it."""

    def __init__(self, path: Path) -> None:
        self.path, self._file = path, path.open("ab", buffering=0)

    def append(self, line: bytes) -> None:
        """On disk when this returns. Raises OSError."""
        with naming(self.path):
            while line:
                line = line[self._file.write(line) :]

    def close(self) -> None:
        self._file.close()


def as_line(record: Mapping[str, Any]) -> bytes:
    return (json.dumps(finite(record), allow_nan=False) + "\n").encode()


def read_lines(path: Path) -> list[Record]:
    """The records of a file of lines, but for a half-written last one. Raises OSError, DamagedResult."""
    found = []
    for number, line in enumerate(read_regular(path).split(b"\n")[:-1], 1):
        with reading(path):
            record = parse_json(line)
            if not isinstance(record, dict):
                raise ValueError(f"line {number} is no object")
            found.append(record)
    return found


# The columns of nested records, such as `probability tumour` of {"probabilities": {"tumour": 0.9}}.
SINGULAR = {
    "labels": "label",
    "predictions": "prediction",
    "probabilities": "probability",
    "pixels": "pixels",
    "masks": "mask",
}
NESTED = {column: key for key, column in SINGULAR.items()}
TEXTS = ("image", "patient", "error", "mask")  # columns that are text, whatever they look like


def flat(record: Mapping[str, Any]) -> Record:
    """A record as a line of a table has it."""
    found: Record = {}
    for key, value in record.items():
        if isinstance(value, Mapping):
            found |= {f"{SINGULAR.get(key, key)} {name}": each for name, each in value.items()}
        else:
            found[key] = value
    return found


def nested(row: Mapping[str, Any]) -> Record:
    """The record that `flat` made this of."""
    found: Record = {}
    for column, value in row.items():
        first, _, name = column.partition(" ")
        if name and first in NESTED:
            found.setdefault(NESTED[first], {})[name] = value
        else:
            found[column] = value
    return found


def csv_lines(*rows: Sequence[Any]) -> bytes:
    """Lines of a table; NaN is an empty cell. Names of files that are no UTF-8 stay the bytes that they are."""
    text = io.StringIO()
    for row in rows:
        cells = ("" if isinstance(value, float) and math.isnan(value) else as_cell(value) for value in row)
        csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode(errors="surrogateescape")


def table_row(columns: Sequence[str], record: Mapping[str, Any]) -> bytes:
    values = flat(record)
    return csv_lines([values.get(name, "") for name in columns])


def table(columns: Sequence[str], records: Sequence[Mapping[str, Any]]) -> bytes:
    return b"".join([csv_lines(columns), *(table_row(columns, record) for record in records)])


def read_table(path: Path, texts: Sequence[str] = TEXTS) -> list[Record]:
    """The rows of a table without empty cells; numbers are such, but in columns of `texts`. Raises as `read_lines`."""
    found = []
    with reading(path):
        content = read_regular(path).decode(errors="surrogateescape")
        columns, *rows = csv.reader(io.StringIO(content, newline=""))
        for cells in rows:
            row: Record = {}
            for column, cell in zip(columns, cells, strict=True):
                if cell:
                    number = None if column.partition(" ")[0] in texts else number_in(cell)
                    row[column] = of_cell(cell) if number is None else number
            found.append(row)
    return found


def is_below(name: str) -> bool:
    """Whether a name with slashes is of something below a folder, as far as its text says."""
    path = PurePosixPath(name)
    leaves = ".." in path.parts or path.is_absolute() or PureWindowsPath(name).drive
    return bool(name) and "\0" not in name and not leaves


def below(root: Path, name: str) -> Path:
    """The file that a file of results names, which lies below `root`, also where links lead. Raises DamagedResult."""
    if not is_below(name) or not (root / name).resolve().is_relative_to(root.resolve()):
        raise DamagedResult(
            f"{root}: its results name the file {name!r}, which lies outside, and is not followed: remove it"
        )
    return root / name
