"""The picture of a sweep: images/s against memory with the Pareto front, and estimates beside measurements."""

from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

from mpi4dl._palette import BLUE, ORANGE
from mpi4dl.sweeps.results import MIB, measured, shortened

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
    text.text(0, 1, "\n".join(lines), va="top", family="monospace", fontsize=8, transform=text.transAxes)
    figure.suptitle(heading, fontsize=9)
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
