"""Timelines of a simulated table: as text for a terminal, as SVG for pages, as an image for files and TensorBoard."""

from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from xml.etree.ElementTree import Element, SubElement, tostring

from mpi4dl._palette import IDLE, WORK
from mpi4dl.parallel.tables.schedules import Action
from mpi4dl.parallel.tables.simulator import Simulation

LETTERS = {"forward": "F", "backward": "B", "input": "I", "weight": "W"}
NAMES = {"forward": "forward", "backward": "backward", "input": "input gradient", "weight": "weight gradient"}


def draw(simulation: Simulation, path: Path) -> None:
    """Write a timeline to a .txt file as text, to any other one as a PNG."""
    if path.suffix == ".txt":
        path.write_text(as_text(simulation) + "\n", encoding="utf-8")
    else:
        as_image(simulation).save(path)


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
        f"{simulation.makespan_seconds:.4g} s, bubble {100 * simulation.bubble:.1f} % over all ranks, "
        f"at most {_bytes(max(simulation.peak_bytes))} of activations on a rank"
    )


LANE_PX, LETTER_PX, BEFORE_PX, BEHIND_PX = 22, 11, 62, 76


class Mark(NamedTuple):
    """A box, or a text at a place, in pixels; `words` is what a box stands for, or the text."""

    x: float
    y: float
    width: float
    colour: str
    words: str
    anchor: str = ""  # of a text: start, middle, end


def marks(simulation: Simulation) -> Iterator[Mark]:
    """The timeline as boxes, from the back to the front, and texts; wide enough for most labels."""
    makespan = simulation.makespan_seconds or 1.0
    spans = [span for row in simulation.rows for span in row]
    many = _hold_several_stages(simulation)
    typical = median([span.end_seconds - span.start_seconds for span in spans] or [0.0]) or makespan
    width = min(4000.0, max(300.0, makespan / typical * (32 if many else 20)))
    for rank, (row, bubble) in enumerate(zip(simulation.rows, simulation.bubbles, strict=True)):
        top, middle = LANE_PX * rank, LANE_PX * (rank + 0.5)
        yield Mark(0, middle, 0, "", f"rank {rank}", "start")
        yield Mark(BEFORE_PX, top, width, IDLE, "idle")
        for action, start, end in row:
            left, long = BEFORE_PX + start / makespan * width, (end - start) / makespan * width
            colour, label = WORK[action.kind, action.direction], _label(action, many)[1:]
            yield Mark(left, top, long, colour, f"{action}: {start:.4g} to {end:.4g} s")
            if long >= 6.5 * len(label) + 2:
                yield Mark(left + long / 2, middle, 0, "black" if action.direction else "white", label, "middle")
        yield Mark(BEFORE_PX + width + 6, middle, 0, "", f"{100 * bubble:.0f} % idle", "start")
    below = LANE_PX * (len(simulation.rows) + 0.5)
    yield Mark(BEFORE_PX, below, 0, "", "0 s", "start")
    yield Mark(BEFORE_PX + width, below, 0, "", f"{makespan:.4g} s", "end")


def _size(found: list[Mark]) -> tuple[int, int]:
    right = max(mark.x + mark.width for mark in found if not mark.anchor)
    return round(right) + BEHIND_PX, round(max(mark.y for mark in found)) + LANE_PX // 2


def as_svg(simulation: Simulation) -> str:
    """The timeline as an SVG element, whose boxes say when they run if one points at them."""
    found = [*marks(simulation)]
    width, height = map(str, _size(found))
    look = {"viewBox": f"0 0 {width} {height}", "width": width, "height": height, "font-size": str(LETTER_PX)}
    picture = Element("svg", {**look, "role": "img", "aria-label": summary(simulation)})
    for mark in found:
        if mark.anchor:
            place = {"x": f"{mark.x:.1f}", "y": f"{mark.y:.1f}", "dy": "0.36em", "text-anchor": mark.anchor}
            ink = {"fill": mark.colour or "currentColor", "pointer-events": "none"}
            SubElement(picture, "text", {**place, **ink}).text = mark.words
        else:
            place = {"x": f"{mark.x:.1f}", "y": f"{mark.y + 1:.1f}", "width": f"{mark.width:.1f}"}
            edge = {"height": str(LANE_PX - 2), "fill": mark.colour, "stroke": "white", "stroke-width": "0.7"}
            SubElement(SubElement(picture, "rect", {**place, **edge}), "title").text = mark.words
    return tostring(picture, encoding="unicode")


def as_image(simulation: Simulation, scale: int = 2) -> Any:
    """The timeline as an image of Pillow, with lines that say what colours mean and what it comes to."""
    from PIL import Image, ImageDraw, ImageFont

    found, meanings = [*marks(simulation)], legend(simulation)
    width, height = (scale * size for size in _size(found))
    font = ImageFont.load_default(LETTER_PX * scale)
    starts = [*accumulate((font.getlength(name) + 24 * scale for _, name in meanings), initial=0.0)]
    size = round(max(width, starts[-1])), height + 2 * LANE_PX * scale
    image = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(image)
    for mark in found:
        x, y = mark.x * scale, mark.y * scale
        if mark.anchor:
            anchor = {"start": "lm", "middle": "mm", "end": "rm"}[mark.anchor]
            draw.text((x, y), mark.words, mark.colour or "black", font, anchor)
        else:
            box = (x, y + scale, x + max(mark.width * scale - 1, 0), y + (LANE_PX - 1) * scale)
            draw.rectangle(box, mark.colour, outline="white")
    y = height + LANE_PX * scale // 2
    for x, (colour, name) in zip(starts, meanings, strict=False):
        draw.rectangle((x, y - 4 * scale, x + 8 * scale, y + 4 * scale), colour)
        draw.text((x + 11 * scale, y), name, "black", font, "lm")
    draw.text((0, y + LANE_PX * scale), summary(simulation), "black", font, "lm")
    return image


def legend(simulation: Simulation) -> list[tuple[str, str]]:
    """The colours of its actions, each with its name."""
    used = {(span.action.kind, span.action.direction) for row in simulation.rows for span in row}
    return [
        (colour, NAMES[kind] + (", mirrored copy" if direction else ""))
        for (kind, direction), colour in WORK.items()
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
