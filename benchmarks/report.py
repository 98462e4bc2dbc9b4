"""Results of a benchmark: medians with their spread, a table, JSON with what they were measured on, and a plot."""

import argparse
import json
import os
import platform
import statistics
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned; the first row is the head, the first column is text, all others are numbers."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """The median of what was found in the turns as `name`, and the ends as `name`_min and `name`_max."""
    return {name: statistics.median(values), f"{name}_min": min(values), f"{name}_max": max(values)}


def between(row: dict[str, Any], name: str) -> str:
    """The ends of a spread, for a table."""
    return f"({row[f'{name}_min']:.2f}-{row[f'{name}_max']:.2f})"


def error_bars(rows: Sequence[dict[str, Any]], name: str) -> list[list[float]]:
    """How far the ends of spreads are from their medians, as matplotlib wants it."""
    return [[abs(row[f"{name}_{end}"] - row[name]) for row in rows] for end in ("min", "max")]


def environment() -> dict[str, Any]:
    """What a result was measured on."""
    cpu = ""
    info = Path("/proc/cpuinfo")
    if info.exists():
        cpu = next((x.split(":")[1].strip() for x in info.read_text().splitlines() if x.startswith("model name")), "")
    packages = {name: version(name) for name in ("mpi4dl", "torch", "mpi4py", "numpy")}
    return {"cpu": cpu, "cores": len(os.sched_getaffinity(0)), "python": platform.python_version(), **packages}


def save_json(path: Path, results: Any) -> None:
    """Write results with what they were measured on; a file that is there stays whole until it is replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps({"environment": environment(), "results": results}, indent=2) + "\n")
    new.replace(path)


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """The flags that a result depends on."""
    return {name: value for name, value in vars(options).items() if name not in ("worker", "out")}


def pyplot() -> Any:
    """matplotlib.pyplot, drawing to files alone, without frames around the plots."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
    return pyplot


def save_figure(figure: Any, path: Path) -> None:
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def publish(options: argparse.Namespace, results: dict[str, Any], figure: Any) -> None:
    """Write the results with the flags that led to them, and the figure, where `--out` says."""
    save_json(Path(f"{options.out}.json"), {"settings": settings(options), **results})
    save_figure(figure, Path(f"{options.out}.png"))
    print(f"saved {options.out}.json and {options.out}.png")
