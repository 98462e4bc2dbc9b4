"""Charts of results: bars and lines, with the ends of spreads."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.common.results import pyplot
from mpi4dl._palette import CURVES
from mpi4dl._wording import counted

Row = Mapping[str, Any]
MOST_NAMES = 6  # beside the lines of a panel
PLAIN, OTHERS, PEERS, THIRD = "0.6", "tab:blue", "tab:orange", "tab:cyan"


def ends(rows: Sequence[Row], key: str, scale: float = 1.0) -> list[list[float]] | None:
    """How far the ends of spreads are from their medians, as matplotlib wants it; None without a spread."""
    if f"{key}_min" not in rows[0]:
        return None
    return [[scale * abs(row[f"{key}_{end}"] - row[key]) for row in rows] for end in ("min", "max")]


@dataclass(frozen=True)
class Bars:
    """A horizontal bar for each row. `part` is a key of which a darker bar, `mark` one of which a line, is drawn."""

    key: str
    label: str
    scale: float = 1.0
    digits: int = 2
    baseline: float | None = None
    part: str = ""
    mark: str = ""

    def draw(self, axis: Any, rows: Sequence[Row], colors: Sequence[str]) -> None:
        places, values = range(len(rows)), [self.scale * (row[self.key] or 0.0) for row in rows]
        error = {"xerr": ends(rows, self.key, self.scale), "error_kw": {"ecolor": "0.3"}, "capsize": 2}
        axis.barh(places, values, color=colors, alpha=0.45 if self.part else 1.0, **error)
        if self.part:
            axis.barh(places, [self.scale * row[self.part] for row in rows], color=colors)
        tips = [max(v, self.scale * row.get(f"{self.key}_max", 0.0)) for v, row in zip(values, rows, strict=True)]
        for place, row in enumerate(rows):
            text = "" if row[self.key] is None else f" {values[place]:.{self.digits}f}"
            axis.text(tips[place], place, text, verticalalignment="center", fontsize=8)
            if self.mark and row[self.mark] is not None:
                axis.vlines(self.scale * row[self.mark], place - 0.45, place + 0.45, color="black", linewidth=2)
        if self.baseline is not None:
            axis.axvline(self.baseline, color="0.3", linewidth=0.8, linestyle="--")
        marks = [self.scale * row[self.mark] for row in rows if self.mark and row[self.mark] is not None]
        axis.set_xlim(0, 1.25 * max([*tips, *marks, self.baseline or 0.0]) or 1.0)
        axis.set_xlabel(self.label)


def bars(
    rows: Sequence[Row], panels: Sequence[Bars], title: str, colors: Sequence[str], names: Sequence[str] = ()
) -> Any:
    """Panels beside each other, with a bar for each row in each of them. Names are those of the rows by default."""
    names = names or [f"{row['name']}, {counted(row['ranks'], 'rank')}" for row in rows]
    figure, axes = pyplot().subplots(
        1, len(panels), figsize=(1.5 + 4.0 * len(panels), 0.32 * len(rows) + 1.8), sharey=True, squeeze=False
    )
    for axis, panel in zip(axes[0], panels, strict=True):
        panel.draw(axis, rows, colors)
    axes[0][0].set_yticks(range(len(rows)), names, fontsize=8)
    axes[0][0].invert_yaxis()
    figure.suptitle(title, fontsize=10, wrap=True)
    return figure


@dataclass(frozen=True)
class Lines:
    """A line for each value of `by`: `key` over `x`. `log` names logarithmic axes. `formula` is a thin line's key.

    `dots`: few places, each of which is a tick.
    """

    rows: Sequence[Row]
    x: str
    key: str
    by: Callable[[Row], str]
    xlabel: str
    label: str
    title: str = ""
    scale: float = 1.0
    log: str = ""
    formula: str = ""
    dots: bool = True

    def draw(self, axis: Any, names: Sequence[str]) -> None:
        """Draw with the colors that the names have in all panels."""
        groups: dict[str, list[Row]] = {}
        for row in self.rows:
            groups.setdefault(self.by(row), []).append(row)
        for name, its in groups.items():
            number, its = names.index(name), sorted(its, key=lambda row: row[self.x])
            xs, values = [row[self.x] for row in its], [self.scale * row[self.key] for row in its]
            style = {"color": f"C{number % 10}", "linestyle": "-" if number < 10 else "--"}
            marks, error = "o" if self.dots else "", ends(its, self.key, self.scale)
            axis.errorbar(xs, values, yerr=error, marker=marks, capsize=3, label=name, **style)
            if self.formula:
                axis.plot(xs, [self.scale * row[self.formula] for row in its], linewidth=0.8, color=style["color"])
        if "x" in self.log:
            axis.set_xscale("log", base=2)
        if "y" in self.log:
            axis.set_yscale("log")
        elif self.dots:
            axis.set_ylim(bottom=0)
        if self.dots:
            ticks = sorted({row[self.x] for row in self.rows})
            axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.grid(color="0.9")
        axis.set(xlabel=self.xlabel, ylabel=self.label, title=self.title)


def lines(panels: Sequence[Lines], title: str, columns: int = 2) -> Any:
    """Panels in rows of so many columns; many names stand once, beside them."""
    rows = -(-len(panels) // columns)
    names = list(dict.fromkeys(panel.by(row) for panel in panels for row in panel.rows))
    many = len(names) > MOST_NAMES
    figure, axes = pyplot().subplots(
        rows,
        columns,
        figsize=(4.8 * columns + 2.0 * many, 3.6 * rows + 0.4),
        squeeze=False,
        layout="constrained" if many else None,
    )
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    for axis, panel in zip(axes.flat, panels, strict=False):
        panel.draw(axis, names)
        if not many:
            axis.legend(frameon=False, fontsize=7)
    if many:
        shown = {name: line for axis in axes.flat for line, name in zip(*axis.get_legend_handles_labels(), strict=True)}
        figure.legend([shown[name] for name in names], names, frameon=False, fontsize=8, loc="outside right center")
    figure.suptitle(title, fontsize=10, wrap=True)
    return figure


def estimates(rows: Sequence[Row], by: Callable[[Row], str], title: str, marks: str) -> Any:
    """Estimated against measured milliseconds, in `marks` of a color for each value of `by`."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    figure = Figure((6.5, 6))
    axes = figure.add_subplot()
    groups = list(dict.fromkeys(map(by, rows)))
    for color, group in zip(CURVES * len(groups), groups, strict=False):
        both = [(row["measured_ms"], row["estimated_ms"]) for row in rows if by(row) == group]
        axes.loglog(*zip(*both, strict=True), marks, color=color, label=group)
    ends = [f(row[key] for row in rows for key in ("measured_ms", "estimated_ms")) for f in (min, max)]
    axes.loglog(ends, ends, "--", color="0.6", label="alike")
    axes.set(xlabel="measured ms", ylabel="estimated ms", title=title)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter("{x:,g}")
        axis.set_minor_formatter(NullFormatter())
    axes.legend(fontsize="small")
    return figure
