"""Timelines of a simulated table, as text for a terminal, as a PNG, and as SVG for a page."""

from pathlib import Path
from statistics import median
from typing import BinaryIO
from xml.etree.ElementTree import Element, SubElement, tostring

from mpi4dl.parallel.tables.simulator import Simulation
from mpi4dl.parallel.tables.table import Action

LETTERS = {"forward": "F", "backward": "B", "input": "I", "weight": "W"}
NAMES = {"forward": "forward", "backward": "backward", "input": "input gradient", "weight": "weight gradient"}
# One hue a kind of work, the mirrored copy lighter; told apart in grey and by colour-blind eyes too.
COLOURS = {
    ("forward", 0): "#2f6fb0",
    ("forward", 1): "#a9cdee",
    ("backward", 0): "#c8571b",
    ("backward", 1): "#f7bf94",
    ("input", 0): "#c8571b",
    ("input", 1): "#f7bf94",
    ("weight", 0): "#3c7d4f",
    ("weight", 1): "#b3dcbb",
}


def as_text(simulation: Simulation, max_columns: int = 240) -> str:
    """One line a rank, time to the right, and a line of what it comes to.

    F3 is the forward of microbatch 3, B, I and W its backward and the halves of one, small letters the mirrored copy;
    F2.3 says stage 2, where ranks hold several. An action too short for its name shows its letter only.
    """
    many = _hold_several_stages(simulation)
    labels = {span: _label(span.action, many) for row in simulation.rows for span in row}
    widest = 1 + max((len(label) for label in labels.values()), default=0)
    makespan = simulation.makespan_seconds
    shortest = min((s.end_seconds - s.start_seconds for s in labels if s.end_seconds > s.start_seconds), default=1.0)
    columns_per_second = min(widest / shortest, max_columns / makespan if makespan else 1.0)
    digits = len(str(len(simulation.rows) - 1))
    lines = []
    for rank, row in enumerate(simulation.rows):
        line = ""
        for span in row:
            start, end = (round(seconds * columns_per_second) for seconds in span[1:])
            line = line.ljust(start) + _box(labels[span], end - start)
        lines.append(f"rank {rank:>{digits}} |{line.rstrip()}")
    return "\n".join([*lines, summary(simulation)])


def summary(simulation: Simulation) -> str:
    """Makespan, bubble and peak memory in one line."""
    return (
        f"{simulation.makespan_seconds:.4g} s, bubble {100 * simulation.bubble:.1f} %, "
        f"at most {_bytes(max(simulation.peak_bytes))} of activations on a rank"
    )


def as_png(simulation: Simulation, path: Path | str | BinaryIO) -> None:
    """The timeline as a picture, in a file: a lane a rank, a box an action with its microbatch, coloured by kind."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch, Rectangle

    makespan = simulation.makespan_seconds or 1.0
    spans = [span for row in simulation.rows for span in row]
    many = _hold_several_stages(simulation)
    labels = {span: _label(span.action, many)[1:] for span in spans}
    typical = median(span.end_seconds - span.start_seconds for span in spans) or makespan
    lane_inches = min(40.0, max(6.0, makespan / typical * (0.42 if many else 0.32)))
    width, height = lane_inches + 2.2, 1.9 + 0.36 * len(simulation.rows)
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    for rank, row in enumerate(simulation.rows):
        for span in row:
            seconds = span.end_seconds - span.start_seconds
            colour = COLOURS[span.action.kind, span.action.direction]
            corner = (span.start_seconds, rank - 0.44)
            axes.add_patch(Rectangle(corner, seconds, 0.88, facecolor=colour, edgecolor="white", linewidth=0.8))
            points = 72 * lane_inches * seconds / makespan
            size = min(9.0, 1.3 * points / max(1, len(labels[span])))
            if size >= 4.5:
                ink = "black" if span.action.direction else "white"
                middle = span.start_seconds + seconds / 2
                axes.text(middle, rank, labels[span], ha="center", va="center_baseline", fontsize=size, color=ink)
    axes.set_xlim(0, makespan)
    axes.set_ylim(len(simulation.rows) - 0.5, -0.5)
    axes.set_xlabel("time (s); idle ranks are grey" + ("; numbers are stage.microbatch" if many else ""))
    idle = [f"rank {rank}  {100 * bubble:.0f} % idle" for rank, bubble in enumerate(simulation.bubbles)]
    axes.set_yticks(range(len(idle)), idle)
    axes.tick_params(axis="y", length=0)
    axes.set_facecolor("#eeeeee")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.set_title(summary(simulation), fontsize=10, loc="left")
    patches = [Patch(color=colour, label=name) for colour, name in legend(simulation)]
    figure.legend(
        handles=patches,
        loc="outside lower center",
        ncols=min(len(patches), int(width / 2.4)),
        frameon=False,
        fontsize=9,
    )
    figure.savefig(path, dpi=130, format="png")


def as_svg(simulation: Simulation) -> str:
    """The same as an SVG element, as wide as its actions need, whose boxes say when they run if one points at them."""
    makespan = simulation.makespan_seconds or 1.0
    spans = [span for row in simulation.rows for span in row]
    many = _hold_several_stages(simulation)
    typical = median(span.end_seconds - span.start_seconds for span in spans) or makespan if spans else makespan
    left, lane, scale = 58, 22, min(4000.0, max(300.0, makespan / typical * (32 if many else 20))) / makespan
    width, height = left + makespan * scale + 76, lane * len(simulation.rows)
    look = {"viewBox": f"0 0 {width:.0f} {height + 18}", "width": f"{width:.0f}", "height": str(height + 18)}
    picture = Element("svg", {**look, "role": "img", "aria-label": summary(simulation), "font-size": "11"})
    for rank, (row, bubble) in enumerate(zip(simulation.rows, simulation.bubbles, strict=True)):
        top, middle = lane * rank, str(lane * rank + 15)
        ink = {"fill": "currentColor", "y": middle}
        SubElement(picture, "text", {**ink, "x": "0"}).text = f"rank {rank}"
        idle = {"x": str(left), "y": str(top + 1), "width": f"{makespan * scale:.1f}", "height": str(lane - 2)}
        SubElement(picture, "rect", {**idle, "fill": "#9994"})
        for action, start, end in row:
            label = _label(action, many)
            size = {"x": f"{left + start * scale:.1f}", "width": f"{(end - start) * scale:.1f}"}
            fill = {"fill": COLOURS[action.kind, action.direction], "stroke": "white", "stroke-width": "0.7"}
            box = SubElement(picture, "rect", {**idle, **size, **fill})
            SubElement(box, "title").text = f"{action}: {start:.4g} to {end:.4g} s"
            if (end - start) * scale >= 6.5 * (len(label) - 1) + 2:
                place = {"x": f"{left + (start + end) / 2 * scale:.1f}", "y": middle, "text-anchor": "middle"}
                colour = "black" if action.direction else "white"
                SubElement(picture, "text", {**place, "fill": colour, "pointer-events": "none"}).text = label[1:]
        SubElement(picture, "text", {**ink, "x": f"{width - 70:.0f}"}).text = f"{100 * bubble:.0f} % idle"
    for seconds, anchor in ((0.0, "start"), (makespan, "end")):
        place = {"x": f"{left + seconds * scale:.0f}", "y": str(height + 13), "text-anchor": anchor}
        SubElement(picture, "text", {**place, "fill": "currentColor"}).text = f"{seconds:.4g} s"
    return tostring(picture, encoding="unicode")


def legend(simulation: Simulation) -> list[tuple[str, str]]:
    """What the colours of its actions mean: each with its name."""
    used = {(span.action.kind, span.action.direction) for row in simulation.rows for span in row}
    return [
        (colour, NAMES[kind] + (", mirrored copy" if direction else ""))
        for (kind, direction), colour in COLOURS.items()
        if (kind, direction) in used
    ]


def _hold_several_stages(simulation: Simulation) -> bool:
    stages = ({(span.action.direction, span.action.stage) for span in row} for row in simulation.rows)
    return any(len({stage for direction, stage in held if direction == d}) > 1 for held in stages for d in (0, 1))


def _label(action: Action, many: bool) -> str:
    letter = LETTERS[action.kind]
    where = f"{action.stage}." if many else ""
    return (letter.lower() if action.direction else letter) + where + str(action.microbatch)


def _box(label: str, columns: int) -> str:
    """A label and a rule behind it as long as the action, with a gap before the next one."""
    if columns < len(label):
        return label[0] * columns
    return label + "-" * (columns - len(label) - 1) + " " * (columns > len(label))


def _bytes(count: int) -> str:
    size, units = float(count), iter(("B", "KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while size >= 1024 and unit != "TiB":
        size, unit = size / 1024, next(units)
    return f"{size:.4g} {unit}"
