"""Results of a benchmark: a table, JSON with the conditions of the measurement, and pictures."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.options import Options
from benchmarks.common.results import Column, Row, save_figure, save_json

NAME, RANKS = Column("", "name"), Column("ranks", "ranks")


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
