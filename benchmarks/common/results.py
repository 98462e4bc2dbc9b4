"""Results of benchmarks: the conditions they were measured under, tables, JSON and pictures."""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from mpi4dl._files import write_durably
from mpi4dl._wording import aligned

PACKAGES = ("mpi4dl", "torch", "mpi4py", "numpy")
MPI_LIBRARY = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
TICKS = os.sysconf("SC_CLK_TCK")  # of /proc/stat, in a second
LOADED = 0.1  # of all cores, by other programs


def share_cores(wanted: int) -> int:
    """Keep this process, and those that it starts, to so many cores, or as many as there are."""
    cores = sorted(os.sched_getaffinity(0))[:wanted]
    os.sched_setaffinity(0, cores)
    return len(cores)


def environment() -> dict[str, Any]:
    """The machine and the libraries: measurements with different ones cannot be compared."""
    cpu, info = "", Path("/proc/cpuinfo")
    if info.exists():
        cpu = next((x.split(":")[1].strip() for x in info.read_text().splitlines() if x.startswith("model name")), "")
    packages = {name: version(name) for name in PACKAGES}
    return {"cpu": cpu, "cores": len(os.sched_getaffinity(0)), "python": platform.python_version(), **packages}


class Conditions:
    """Under which conditions this process and its jobs measure, from here on."""

    def __init__(self) -> None:
        self._began, self._load = time.perf_counter(), os.getloadavg()[0]
        self._others = _busy_seconds() - _own_seconds()

    def found(self) -> dict[str, Any]:
        """The conditions so far.

        `load` is the load average at the beginning. `cores_of_others`: how many cores other programs used on average.
        Call it while no job runs: the CPU time of a job counts for this process when the job has ended.
        """
        others = (_busy_seconds() - _own_seconds() - self._others) / (time.perf_counter() - self._began)
        return {
            "commit": _commit(),
            "machine": platform.node(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "load": round(self._load, 2),
            "cores_of_others": round(max(0.0, others), 2),
            "loaded": others > LOADED * (os.cpu_count() or 1),
            "threads": os.environ.get("OMP_NUM_THREADS"),
            "mpi": _first_line_of(sys.executable, "-c", MPI_LIBRARY),
        }


@cache
def _first_line_of(*command: str) -> str | None:
    """The first line that a command prints; None if it fails."""
    with suppress(OSError, subprocess.SubprocessError, IndexError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        return " ".join(done.stdout.splitlines()[0].split())
    return None


def _commit() -> str | None:
    """The commit of the checkout that this package lies in, and whether files differ from it."""
    git = ("git", "-C", str(Path(__file__).parent))
    commit = _first_line_of(*git, "rev-parse", "HEAD")
    changed = _first_line_of(*git, "status", "--porcelain", "--untracked-files=no")
    return f"{commit} and changes" if commit and changed else commit


def _busy_seconds() -> float:
    """The busy time of all cores of this machine since its start; 0 where the system does not report it."""
    with suppress(OSError):
        user, nice, system, _, _, *interrupts = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9])
        return (user + nice + system + sum(interrupts)) / TICKS
    return 0.0


def _own_seconds() -> float:
    """The busy time of this process, and of its children that have ended."""
    return sum(os.times()[:4])


MIB = 2**20


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """The median of values as `name`, and their ends as `name`_min and `name`_max."""
    return {name: median(values), f"{name}_min": min(values), f"{name}_max": max(values)}


def save_json(path: Path, content: dict[str, Any]) -> None:
    """Write results with the environment. An old file stays whole until the new one replaces it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, (json.dumps({"environment": environment(), **content}, indent=2) + "\n").encode())


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


def mebibytes(head: str, key: str, digits: int = 0) -> Column:
    return Column(head, key, digits, 1 / MIB)


def table(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    """A line for each row; the first column is text, all others are numbers."""
    head = [text for column in columns for text in column.heads()]
    lines = [head, *([cell for column in columns for cell in column.cells(row)] for row in rows)]
    return "\n".join(aligned(lines, {head[0]}))


def pyplot() -> Any:
    """matplotlib.pyplot, which draws to files alone, without frames around the plots."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
    return pyplot


def save_figure(figure: Any, path: Path) -> None:
    if figure.get_layout_engine() is None:
        figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
