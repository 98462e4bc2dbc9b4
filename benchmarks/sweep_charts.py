"""What a sweep found: a table, a CSV, and images/s against memory with the plans that no other one beats in both."""

import csv
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from textwrap import wrap
from typing import Any

from benchmarks.report import pyplot, table
from benchmarks.turns import median

MIB = 2**20
MOST_FAILED = 10
MOST_NAMED = 30  # plans that a picture names beside it
LONGEST = 110  # characters of a reason in a table
FRONT, OTHERS, FORESEEN, FAILED = "tab:orange", "tab:blue", "0.55", "tab:red"
SIDES = ((-8, 5), (7, 4), (7, -10), (-7, -10), (0, 9), (0, -15), (14, -3), (-14, -3))  # of a point, for its number


def measured(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["images_per_second"] is not None]


def as_table(rows: Sequence[dict[str, Any]]) -> str:
    """All plans, `*` those on the front, how far the forecast is off, and what failed."""
    head = ("plan", "ranks", "images/s", "(min-max)", "forecast", "CPU s", "idle %", "peak MiB", "forecast", "")
    lines = [head]
    for row in measured(rows):
        ends = f"({row['images_per_second_min']:.2f}-{row['images_per_second_max']:.2f})"
        speed, size = row["predicted_images_per_second"], row["predicted_peak_bytes"]
        lines.append(
            (
                f"{row['number']}: {row['plan']}",
                str(row["ranks"]),
                f"{row['images_per_second']:.2f}",
                ends,
                "-" if speed is None else f"{speed:.2f}",
                f"{row['cpu_seconds_per_image']:.2f}",
                f"{100 * row['idle_share']:.0f}",
                f"{row['peak_bytes'] / MIB:.1f}",
                "-" if size is None else f"{size / MIB:.1f}",
                "*" * row["on_front"],
            )
        )
    failed = [f"{row['number']}: {row['plan']}: failed: {shortened(row['failure'])}" for row in rows if row["failure"]]
    return "\n".join([table(lines), *failed, *accuracy(rows)])


def shortened(reason: str) -> str:
    return reason if len(reason) <= LONGEST else f"{reason[: LONGEST - 3]}..."


def accuracy(rows: Sequence[dict[str, Any]]) -> list[str]:
    """How far off forecasts were, and how often the planner puts two plans into the order in which they were found."""
    names = (("images_per_second", "images/s, ranks with a core each"), ("peak_bytes", "memory"))
    found = []
    for key, what in names:
        pairs = [(row[f"predicted_{key}"], row[key]) for row in measured(rows) if row[f"predicted_{key}"]]
        if pairs:
            off = median([abs(guess / there - 1) for guess, there in pairs])
            ratio = median([guess / there for guess, there in pairs])
            line = f"forecast of {what}: off by {100 * off:.0f} % (median; {ratio:.2f} of what was measured)"
            order = in_order(pairs)
            found.append(line if order is None else f"{line}, {100 * order:.0f} % of pairs in the order that was found")
    return found


def in_order(pairs: Sequence[tuple[float, float]]) -> float | None:
    """The share of pairs of plans whose forecasts differ as their measurements do; None without two plans apart."""
    apart = [((a[0] - b[0]) * (a[1] - b[1])) for a, b in combinations(pairs, 2) if a[1] != b[1]]
    return sum(sign > 0 for sign in apart) / len(apart) if apart else None


def as_csv(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """One line for each plan, of all that a row knows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else ["plan"])
        writer.writeheader()
        writer.writerows(rows)


def plot(rows: Sequence[dict[str, Any]], heading: str) -> Any:
    """Images/s against peak memory, the front drawn; what was foreseen beside it; the plans by their numbers."""
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
    """A plan in few words, without what it has not."""
    stages = f"{row['stages']} stages " if row["stages"] != "1" else ""
    chunks = f" in {row['chunks']} chunks" if row["chunks"] != "1" else ""
    gems = f" GEMS {row['bidirectional']}" if row["bidirectional"] != "0" else ""
    times = f" {row['schedule']} x{row['microbatches']}" if (row["microbatches"], row["stages"]) != ("1", "1") else ""
    data = f" data {row['data']}" if row["data"] != "1" else ""
    zero = f" zero {row['zero']}" if row["zero"] != "0" else ""
    return f"{stages}{row['tiles']}{chunks}{times}{gems}{data}{zero}"


def pareto(axis: Any, rows: Sequence[dict[str, Any]]) -> None:
    """The plans as points with their numbers; the front as steps, up to which there is nothing."""
    points = [(row["peak_bytes"] / MIB, row["images_per_second"]) for row in rows]
    on_front = sorted(point for point, row in zip(points, rows, strict=True) if row["on_front"])
    axis.step(
        *zip(*on_front, strict=True), where="post", color=FRONT, linewidth=1.2, label="front: none beats these in both"
    )
    for point, row in zip(points, rows, strict=True):
        ends = [[row["images_per_second"] - row["images_per_second_min"]]]
        ends += [[row["images_per_second_max"] - row["images_per_second"]]]
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

    Those on the front stand above it on the left, where there is nothing.
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
    """What a second of a core brings, which other work on the machine, and waits, change little."""
    for row in rows:
        point = row["peak_bytes"] / MIB, 1 / max(row["work_seconds_per_image"], 1e-9)
        axis.plot(*point, "o", markersize=4, color=FRONT if row["on_front"] else OTHERS)
    axis.set(xlabel="peak MiB", ylabel="images a CPU second", ylim=(0, None))
    axis.margins(0.1)


def against(axis: Any, rows: Sequence[dict[str, Any]], key: str, what: str, unit: float) -> None:
    """Forecasts over measurements; on the line they are the same."""
    known = [row for row in rows if row[f"predicted_{key}"]]
    found, guessed = [row[key] / unit for row in known], [row[f"predicted_{key}"] / unit for row in known]
    most = 1.08 * max([*found, *guessed], default=1.0)
    axis.plot((0, most), (0, most), color=FORESEEN, linewidth=1)
    axis.scatter(found, guessed, s=16, color=OTHERS)
    axis.set(xlim=(0, most), ylim=(0, most), xlabel=f"{what}, measured", ylabel=f"{what}, forecast")
