"""Results of a benchmark as a table, as JSON with what they were measured on, and as a plot."""

import argparse
import json
import os
import platform
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


def environment() -> dict[str, Any]:
    """What a result was measured on."""
    cpu = ""
    info = Path("/proc/cpuinfo")
    if info.exists():
        cpu = next((x.split(":")[1].strip() for x in info.read_text().splitlines() if x.startswith("model name")), "")
    packages = {name: version(name) for name in ("mpi4dl", "torch", "mpi4py", "numpy")}
    return {"cpu": cpu, "cores": len(os.sched_getaffinity(0)), "python": platform.python_version(), **packages}


def save_json(path: Path, results: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"environment": environment(), "results": results}, indent=2) + "\n")


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """The flags that a result depends on."""
    return {name: value for name, value in vars(options).items() if name not in ("worker", "out")}


def pyplot() -> Any:
    """matplotlib.pyplot, drawing to files alone."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save_figure(figure: Any, path: Path) -> None:
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
