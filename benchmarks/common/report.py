"""Results of a benchmark: a table, JSON with the conditions of the measurement, and pictures."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common.options import Options
from mpi4dl._wording import aligned
from mpi4dl.sweeps.results import MIB, save_figure, save_json

Row = Mapping[str, Any]


class Column(NamedTuple):
    """A column of a table: `key` of each row, as text or with so many digits. `ends` adds those of its spread."""

    head: str
    key: str
    digits: int | None = None
    scale: float = 1.0
    ends: bool = False

    def heads(self) -> list[str]:
        return [self.head, *["(min-max)"] * self.ends]

    def cells(self, row: Row) -> list[str]:
        value = row.get(self.key)
        if value is None:
            return ["-"] * (1 + self.ends)
        if self.digits is None:
            return [str(value)]
        found = [f"{value * self.scale:.{self.digits}f}"]
        if self.ends:
            low, high = (self.scale * row[f"{self.key}_{end}"] for end in ("min", "max"))
            found.append(f"({low:.{self.digits}f}-{high:.{self.digits}f})")
        return found


NAME, RANKS = Column("", "name"), Column("ranks", "ranks")


def mebibytes(head: str, key: str, digits: int = 0) -> Column:
    return Column(head, key, digits, 1 / MIB)


def table(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    """A line for each row; the first column is text, all others are numbers."""
    head = [text for column in columns for text in column.heads()]
    lines = [head, *([cell for column in columns for cell in column.cells(row)] for row in rows)]
    return "\n".join(aligned(lines, {head[0]}))


def save(options: Options, results: Row, figures: Mapping[str, Any]) -> None:
    """Write the results, and figures by the ends of their names, where `--out` says."""
    content = {"benchmark": options.name, "settings": options.settings(), **results}
    save_json(Path(f"{options.out}.json"), {"conditions": options.conditions.found(), "results": content})
    paths = [f"{options.out}.json", *(f"{options.out}{end}.png" for end in figures)]
    for path, figure in zip(paths[1:], figures.values(), strict=True):
        save_figure(figure, Path(path))
    print("saved " + ", ".join(paths))


def publish(options: Options, title: str, text: str, figure: Any, rows: Sequence[Row], **more: Any) -> None:
    """Print the title and a table; write the rows, and the figure."""
    print(f"{title}\n{text}", flush=True)
    save(options, {**more, "measurements": rows}, {"": figure})
