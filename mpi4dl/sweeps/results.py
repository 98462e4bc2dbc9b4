"""Results of a sweep: plans with their turns or failures in a file that it continues, as table, CSV and picture."""

import csv
import io
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from itertools import combinations
from pathlib import Path
from statistics import median
from textwrap import wrap
from typing import TYPE_CHECKING, Any, NamedTuple

from mpi4dl._files import read_regular, write_durably
from mpi4dl._palette import BLUE, ORANGE
from mpi4dl._wording import aligned, literal
from mpi4dl.sweeps.job import Outcome
from mpi4dl.sweeps.space import Space, Sweep, decided_flags

if TYPE_CHECKING:
    from mpi4dl.estimate.plan_estimate import PlanEstimate
    from mpi4dl.parallel.plan import Plan


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
MEASURED = (  # the numbers of a row that are None if the plan failed
    *("images_per_second", "images_per_second_min", "images_per_second_max", "cpu_seconds_per_image"),
    *("work_seconds_per_image", "idle_share", "peak_bytes", "activation_bytes", "threads_of_a_rank"),
)
LONGEST = 110  # characters of a reason in a table


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """The median of values as `name`, and their ends as `name`_min and `name`_max."""
    return {name: median(values), f"{name}_min": min(values), f"{name}_max": max(values)}


def save_json(path: Path, content: dict[str, Any]) -> None:
    """Write results with the environment. An old file stays whole until the new one replaces it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, (json.dumps({"environment": environment(), **content}, indent=2) + "\n").encode())


@dataclass
class Tried:
    """A plan: its flags for the training, its estimate, the answer of each turn, and the reason if it failed."""

    plan: str
    ranks: int
    flags: list[str]
    predicted: dict[str, float] | None = None
    turns: list[dict[str, Any]] = field(default_factory=list)
    failure: str | None = None

    @classmethod
    def by(cls, plan: "Plan", estimate: "PlanEstimate | None") -> "Tried":
        from mpi4dl.estimate.plan_estimate import plan_flags

        flags = [word for flag in plan_flags(plan).items() for word in flag]
        if estimate is None:
            return cls(plan.describe(), plan.num_ranks, flags)
        predicted = {"images_per_second": estimate.samples_per_second, "peak_bytes": estimate.num_bytes}
        return cls(str(estimate), plan.num_ranks, [*flags, *estimate.saving], predicted)

    @property
    def key(self) -> str:
        return shlex.join(self.flags)

    @property
    def measured(self) -> bool:
        return bool(self.turns) and self.failure is None

    def take(self, outcome: Outcome) -> None:
        if outcome.answer is None:
            self.failure = outcome.failure
        else:
            self.turns.append(outcome.answer)

    def row(self, training: tuple[str, ...]) -> dict[str, Any]:
        """Medians over the turns, the estimate, and the command that trains so; None where there is no number."""
        parts = dict(zip(self.flags[::2], self.flags[1::2], strict=False))
        start = ["mpirun", "-n", str(self.ranks), "python", "-m", "mpi4dl.train"]
        predicted = self.predicted or {}
        return {
            "plan": self.plan,
            "ranks": self.ranks,
            **{name: parts[f"--{name}"] for name in vars(Space)["__dataclass_fields__"] if f"--{name}" in parts},
            "tiles": parts["--tiles"],
            "schedule": parts["--schedule"],
            **(self._medians() if self.measured else dict.fromkeys(MEASURED)),
            "predicted_images_per_second": predicted.get("images_per_second"),
            "predicted_peak_bytes": predicted.get("peak_bytes"),
            "turns": len(self.turns),
            "failure": self.failure,
            "command": shlex.join([*start, *training, *self.flags]),
        }

    def _medians(self) -> dict[str, float]:
        def of_an_image(key: str) -> float:
            return median([turn[key] / turn["images"] for turn in self.turns])

        idle = [turn["idle_seconds"] / (turn["seconds"] * self.ranks) for turn in self.turns]
        return {
            **spread("images_per_second", [turn["images"] / turn["seconds"] for turn in self.turns]),
            "cpu_seconds_per_image": of_an_image("cpu_seconds"),
            "work_seconds_per_image": of_an_image("work_seconds"),
            "idle_share": median(idle),
            "peak_bytes": median([turn["peak_bytes"] for turn in self.turns]),
            "activation_bytes": median([max(turn["activation_bytes_of_ranks"]) for turn in self.turns]),
            "threads_of_a_rank": self.turns[-1]["threads_of_a_rank"],
        }


class Results:
    """The plans of a sweep, read from the file of its name if there is one, and saved there.

    `asked_before`: the same command began the file. Raises ValueError if the file was measured with other options,
    versions or cores, or is not one of a sweep.
    """

    def __init__(self, sweep: Sweep, cores: int) -> None:
        self.path, self.cores, self.conditions = Path(f"{sweep.out}.json"), cores, Conditions()
        self.asked: dict[str, Any] = json.loads(json.dumps({"space": asdict(sweep.space), "best": sweep.best}))
        self.settings = settings_of(sweep, cores)
        self.tried: list[Tried] = []
        self.asked_before = False
        if self.path.exists():
            self._read()

    def _read(self) -> None:
        try:
            there = json.loads(read_regular(self.path))
            before, found = there["results"]["settings"] | there["environment"], there["results"]
            self.tried = [Tried(**each) for each in found["plans"]]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{self.path} is no file of a sweep: choose another --out") from None
        before = training_options(()) | before  # options that are new since then had their defaults
        for name, value in (self.settings | environment()).items():
            if before.get(name) != value:
                raise ValueError(
                    f"{self.path} was measured with {name} {before.get(name)}, and this is {value}: numbers of both "
                    "cannot be compared, so choose another --out"
                )
        self.asked_before = found["asked"] == self.asked

    def add(self, plans: list[Tried]) -> list[Tried]:
        """These plans, with the turns that they had before. Saves the new ones."""
        known = {each.key: each for each in self.tried}
        self.tried += [each for each in plans if each.key not in known]
        self.save()
        return [known.get(each.key, each) for each in plans]

    def save(self) -> None:
        found = {"settings": self.settings, "asked": self.asked, "plans": [asdict(each) for each in self.tried]}
        save_json(self.path, {"conditions": self.conditions.found(), "results": found})

    def rows(self, training: tuple[str, ...]) -> list[dict[str, Any]]:
        """All plans, the fastest first and those that failed last, numbered; and whether one is on the front."""
        rows = [each.row(training) for each in self.tried]
        rows.sort(key=lambda row: (row["images_per_second"] is None, -(row["images_per_second"] or 0.0)))
        best = front(rows)
        return [
            {"number": number, **row, "on_front": any(row is each for each in best)}
            for number, row in enumerate(rows, 1)
        ]


def front(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The Pareto front: no other plan is as fast and as small, and better in one of both."""
    there = measured(rows)

    def beats(one: dict[str, Any], other: dict[str, Any]) -> bool:
        a = one["images_per_second"], -one["peak_bytes"]
        b = other["images_per_second"], -other["peak_bytes"]
        return a != b and a[0] >= b[0] and a[1] >= b[1]

    return [row for row in there if not any(beats(other, row) for other in there)]


def measured(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["images_per_second"] is not None]


def settings_of(sweep: Sweep, cores: int) -> dict[str, Any]:
    """The settings of measurements besides their plans: the options of the training, and how a job measures."""
    plan = {*decided_flags(), *(f"--{name}" for name in vars(sweep.space))}
    training = {flag: value for flag, value in training_options(sweep.training).items() if flag not in plan}
    how = {"--steps": sweep.steps, "--warm-up": sweep.warm_up, "--memory": sweep.memory, "--cores": cores}
    return {**training, **how, "LD_PRELOAD": os.environ.get("LD_PRELOAD")}


def training_options(flags: Sequence[str]) -> dict[str, str]:
    """The value of every option of a training with these flags, by its flag."""
    from mpi4dl.options.config import parse as parse_training
    from mpi4dl.options.config import shared_options

    return {f"--{name.replace('_', '-')}": value for name, value in shared_options(parse_training(flags)).items()}


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


COLUMNS = (
    Column("plan", "name"),
    Column("ranks", "ranks"),
    Column("images/s", "images_per_second", 2, ends=True),
    Column("estimate", "predicted_images_per_second", 2),
    Column("CPU s", "cpu_seconds_per_image", 2),
    Column("idle %", "idle_share", 0, 100),
    mebibytes("peak MiB", "peak_bytes", 1),
    mebibytes("estimate", "predicted_peak_bytes", 1),
    Column("front", "mark"),
)


def as_table(rows: Sequence[dict[str, Any]]) -> str:
    """All plans, `*` those on the front, failures, and how far estimates are off."""
    numbered = [{**row, "name": f"{row['number']}: {row['plan']}", "mark": "*" * row["on_front"]} for row in rows]
    failed = [f"{row['name']}: failed: {shortened(row['failure'])}" for row in numbered if row["failure"]]
    return "\n".join([table(measured(numbered), COLUMNS), *failed, *accuracy(rows)])


def shortened(reason: str) -> str:
    return reason if len(reason) <= LONGEST else f"{reason[: LONGEST - 3]}..."


def accuracy(rows: Sequence[dict[str, Any]]) -> list[str]:
    """How far off estimates are, and the share of pairs of plans that they put into the measured order."""
    found = []
    for key, what in (("images_per_second", "images/s, ranks with a core each"), ("peak_bytes", "memory")):
        pairs = [(row[f"predicted_{key}"], row[key]) for row in measured(rows) if row[f"predicted_{key}"]]
        if pairs:
            off = median([abs(guess / there - 1) for guess, there in pairs])
            ratio = median([guess / there for guess, there in pairs])
            line = f"estimate of {what}: off by {100 * off:.0f} % (median; {ratio:.2f} of the measurement)"
            order = in_order(pairs)
            found.append(line if order is None else f"{line}, {100 * order:.0f} % of pairs in the measured order")
    return found


def in_order(pairs: Sequence[tuple[float, float]]) -> float | None:
    """The share of pairs of plans whose estimates differ as their measurements do; None without two plans apart."""
    apart = [((a[0] - b[0]) * (a[1] - b[1])) for a, b in combinations(pairs, 2) if a[1] != b[1]]
    return sum(sign > 0 for sign in apart) / len(apart) if apart else None


def as_csv(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write a line for each plan, with all fields of its row."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else ["plan"])
    writer.writeheader()
    writer.writerows(rows)
    write_durably(path, text.getvalue().encode())


MOST_FAILED = 10
MOST_NAMED = 30  # plans that a picture names beside it
FRONT, OTHERS, DIAGONAL = ORANGE, BLUE, "0.55"
SIDES = ((-8, 5), (7, 4), (7, -10), (-7, -10), (0, 9), (0, -15), (14, -3), (-14, -3))  # of a point, for its number


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


def plot(rows: Sequence[dict[str, Any]], heading: str) -> Any:
    """Images/s against peak memory with the front, estimates beside measurements, and the plans by their numbers."""
    plots = pyplot()
    there = measured(rows)
    failed = [row for row in rows if row["failure"]]
    named = there[:MOST_NAMED] + [row for row in there[MOST_NAMED:] if row["on_front"]]
    lines = [f"{'*' if row['on_front'] else ' '} {row['number']:>2}  {short(row)}" for row in named]
    if len(named) < len(there):
        lines.append(f"  and {len(there) - len(named)} more in the table")
    lines += ["", "failed:"] * bool(failed)
    for row in failed[:MOST_FAILED]:
        lines.append(f"  {row['number']:>2}  {short(row)}")
        lines += [f"      {line}" for line in wrap(shortened(row["failure"]), 56)]
    height = max(7.5, 0.17 * len(lines) + 1.2)
    figure = plots.figure(figsize=(15, height))
    left, right = figure.add_gridspec(1, 2, width_ratios=(2.2, 1))
    grid = left.subgridspec(2, 3, height_ratios=(1.7, 1), hspace=0.3, wspace=0.45)
    pareto(figure.add_subplot(grid[0, :]), there)
    worked(figure.add_subplot(grid[1, 0]), there)
    against(figure.add_subplot(grid[1, 1]), there, "images_per_second", "images/s", 1.0)
    against(figure.add_subplot(grid[1, 2]), there, "peak_bytes", "peak MiB", MIB)
    text = figure.add_subplot(right)
    text.axis("off")
    text.text(0, 1, "\n".join(map(literal, lines)), va="top", family="monospace", fontsize=8, transform=text.transAxes)
    figure.suptitle(literal(heading), fontsize=9)
    return figure


def short(row: dict[str, Any]) -> str:
    """A plan in few words, without parts that it does not have."""
    stages = f"{row['stages']} stages " if row["stages"] != "1" else ""
    chunks = f" in {row['chunks']} chunks" if row["chunks"] != "1" else ""
    gems = f" GEMS {row['bidirectional']}" if row["bidirectional"] != "0" else ""
    times = f" {row['schedule']} x{row['microbatches']}" if (row["microbatches"], row["stages"]) != ("1", "1") else ""
    data = f" data {row['data']}" if row["data"] != "1" else ""
    zero = f" zero {row['zero']}" if row["zero"] != "0" else ""
    return f"{stages}{row['tiles']}{chunks}{times}{gems}{data}{zero}"


def pareto(axis: Any, rows: Sequence[dict[str, Any]]) -> None:
    """The plans as points with their numbers, and the front as steps."""
    points = [(row["peak_bytes"] / MIB, row["images_per_second"]) for row in rows]
    on_front = sorted(point for point, row in zip(points, rows, strict=True) if row["on_front"])
    axis.step(
        *zip(*on_front, strict=True), where="post", color=FRONT, linewidth=1.2, label="front: none beats these in both"
    )
    for point, row in zip(points, rows, strict=True):
        ends = [[abs(row[f"images_per_second_{end}"] - row["images_per_second"])] for end in ("min", "max")]
        color = FRONT if row["on_front"] else OTHERS
        axis.errorbar(*point, yerr=ends, fmt="o", markersize=5, color=color, ecolor="0.85", elinewidth=1)
    axis.set_xlabel("peak memory of the largest rank (MiB), above imports")
    axis.set_ylabel("images/s (median, min-max)")
    axis.margins(0.08)
    axis.set_ylim(bottom=0)
    axis.legend(loc="upper left", frameon=False, fontsize=8)
    number(axis, points, rows)


def number(axis: Any, points: Sequence[tuple[float, float]], rows: Sequence[dict[str, Any]]) -> None:
    """Write the number of each plan on that side of its point that is farthest from other points and numbers.

    Numbers on the front stand above it on the left, where no points are.
    """
    axis.figure.canvas.draw()
    there = [tuple(axis.transData.transform(point)) for point in points]
    taken = list(there)

    def place(x: float, y: float, side: tuple[int, int]) -> tuple[float, float]:
        return x + 1.4 * side[0], y + 1.4 * (side[1] + 3)

    for (x, y), point, row in zip(there, points, rows, strict=True):
        rooms = {
            side: min((a - c) ** 2 + (b - d) ** 2 for c, d in taken)
            for side in SIDES[:1] * row["on_front"] or SIDES
            for a, b in [place(x, y, side)]
        }
        side = max(rooms, key=lambda each: rooms[each])
        taken.append(place(x, y, side))
        style = {"weight": "bold", "color": FRONT} if row["on_front"] else {"color": "0.25"}
        axis.annotate(str(row["number"]), point, side, textcoords="offset points", ha="center", fontsize=8, **style)


def worked(axis: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Images of a CPU second, which waits and other programs on the machine change little."""
    for row in rows:
        point = row["peak_bytes"] / MIB, 1 / max(row["work_seconds_per_image"], 1e-9)
        axis.plot(*point, "o", markersize=4, color=FRONT if row["on_front"] else OTHERS)
    axis.set(xlabel="peak MiB", ylabel="images a CPU second", ylim=(0, None))
    axis.margins(0.1)


def against(axis: Any, rows: Sequence[dict[str, Any]], key: str, what: str, unit: float) -> None:
    """Estimates over measurements; on the line they are equal."""
    known = [row for row in rows if row[f"predicted_{key}"]]
    found, guessed = [row[key] / unit for row in known], [row[f"predicted_{key}"] / unit for row in known]
    most = 1.08 * max([*found, *guessed], default=1.0)
    axis.plot((0, most), (0, most), color=DIAGONAL, linewidth=1)
    axis.scatter(found, guessed, s=16, color=OTHERS)
    axis.set(xlim=(0, most), ylim=(0, most), xlabel=f"{what}, measured", ylabel=f"{what}, estimate")
