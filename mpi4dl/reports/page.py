"""One page of one or several runs: everything in one file, nothing from a network, whatever the runs' names are.

`reading` reads the folders; page.html is the template. The template escapes all text that it is given; the pictures are
made as trees of elements, which escape theirs.
"""

import base64
import io
import math
import tomllib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from xml.etree.ElementTree import Element, SubElement, tostring

from markupsafe import Markup

from mpi4dl._files import leads_to, read_regular, write_durably
from mpi4dl._palette import CURVES, PURPOSES
from mpi4dl._wording import counted
from mpi4dl.options.config import default_toml
from mpi4dl.parallel.tables.drawing import as_svg, legend, summary
from mpi4dl.reports.reading import (
    ShownRun,
    extremes,
    finite,
    flattened,
    is_matrix,
    judged,
    not_finite,
    read_runs,
)
from mpi4dl.results.evaluations import SavedEvaluation, beside
from mpi4dl.results.formats import reading
from mpi4dl.results.names import EXAMPLES

# Curves as SVG: small, readable on a phone, in the page's own colours and letters, with values to point at.

WIDTH, HEIGHT = 360, 210
LEFT, RIGHT, TOP, BOTTOM = 50, 10, 10, 24
MOST_POINTS = 300  # of a curve that are drawn
MOST_DOTS = 60
DECADES = 1.3  # that values must span for a logarithmic axis

Points = Sequence[tuple[int, float]]
Scale = Callable[[float], float]


@dataclass(frozen=True)
class Curve:
    """Values by step; `dots` marks each of them, as of validations."""

    name: str
    points: Points
    colour: str
    dots: bool = False


def colour_of(number: int) -> str:
    return CURVES[number % len(CURVES)]


def number_text(value: float) -> str:
    """Four digits, large counts with k, M, G."""
    if not math.isfinite(value):
        return str(value)
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.4g}{unit}"
    return f"{value:.4g}"


def chart(curves: Sequence[Curve], title: str) -> str:
    """Curves over steps; the axis of values is logarithmic where positive ones span more than DECADES."""
    shown = [Curve(c.name, thinned(finite(c.points)), c.colour, c.dots) for c in curves]
    values = [value for curve in shown for _, value in curve.points]
    if not values:
        return ""
    steps = [step for curve in shown for step, _ in curve.points]
    low, high = min(values), max(values)
    logarithmic = low > 0 and math.log10(high / low) > DECADES
    down, up = (math.log10(low), math.log10(high)) if logarithmic else (low, high)
    if up == down:
        up, down = up + (abs(up) or 1) * 0.05, down - (abs(down) or 1) * 0.05
    margin = 0.04 * (up - down)
    down, up = down - margin, up + margin
    first, last = min(steps), max(max(steps), min(steps) + 1)

    def x(step: float) -> float:
        return LEFT + (step - first) / (last - first) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        height = math.log10(value) if logarithmic else value
        return HEIGHT - BOTTOM - (height - down) / (up - down) * (HEIGHT - TOP - BOTTOM)

    picture = Element("svg", viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img")
    picture.set("aria-label", f"{title} by step")
    for value in log_ticks(down, up) if logarithmic else ticks(down, up):
        at = _n(y(value))
        SubElement(picture, "line", {"class": "grid", "x1": str(LEFT), "x2": str(WIDTH - RIGHT), "y1": at, "y2": at})
        label = SubElement(picture, "text", {"class": "tick", "x": str(LEFT - 5), "y": at, "dy": "0.35em"})
        label.set("text-anchor", "end")
        label.text = number_text(value)
    for step in (tick for tick in ticks(first, last, 4) if tick == int(tick)):
        label = SubElement(picture, "text", {"class": "tick", "x": _n(x(step)), "y": str(HEIGHT - 8)})
        label.set("text-anchor", "middle")
        label.text = number_text(step)
    for curve in shown:
        _draw(picture, curve, x, y)
    return tostring(picture, encoding="unicode")


def _draw(picture: Element, curve: Curve, x: Scale, y: Scale) -> None:
    places = [(_n(x(step)), _n(y(value))) for step, value in curve.points]
    line = {"points": " ".join(map(",".join, places)), "stroke": curve.colour}
    SubElement(picture, "polyline", line | {"class": "validation" if curve.dots else "curve"})
    alone = curve.dots or len(places) == 1
    for (cx, cy), (step, value) in zip(places, curve.points, strict=True) if len(places) <= MOST_DOTS else ():
        look = {"r": "3", "fill": curve.colour} if alone else {"r": "6", "class": "spot"}
        dot = SubElement(picture, "circle", {"cx": cx, "cy": cy, **look})
        SubElement(dot, "title").text = f"{curve.name}, step {step}: {number_text(value)}"


def thinned(points: Points) -> list[tuple[int, float]]:
    """Few of many points, with the lowest and the highest of each stretch, so that no peak is lost."""
    if len(points) <= MOST_POINTS:
        return list(points)
    length = -(-2 * len(points) // MOST_POINTS)
    found = []
    for start in range(0, len(points), length):
        stretch = points[start : start + length]
        ends = {min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])}
        found += sorted(ends)
    return found


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About so many round numbers from low to high."""
    rough = (high - low) / count
    size = 10.0 ** math.floor(math.log10(rough))
    step = size * next(factor for factor in (1, 2, 5, 10) if factor * size >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Round numbers between these powers of ten: few enough to be read."""
    exponents = range(math.floor(low), math.ceil(high) + 1)
    few = high - low < 3
    found = [factor * 10.0**e for e in exponents for factor in ((1, 2, 5) if few else (1,))]
    inside = [value for value in found if 10.0**low <= value <= 10.0**high]
    return inside[:: max(1, -(-len(inside) // 7))]


def _n(value: float) -> str:
    return f"{value:.1f}"


# Small pictures of images on disk, to be shown inside a page.

SIDE_PX = 160
MOST_PIXELS = 1 << 26  # of an image that is decoded for this; slides are larger
MOST_BYTES = 1 << 28
MOST_INLINED_BYTES = 1 << 20


def image_folders(root: Path) -> list[Path]:
    """Where names of images may begin below a source: in it, in its parts, and beside the masks of either."""
    from mpi4dl.datasets.listed import TEST, VALIDATION, subfolders  # with torch, which takes seconds

    try:
        parts = [root / name for name in subfolders(root) if name.casefold() in VALIDATION | TEST]
    except (OSError, ValueError):
        parts = []
    return [*parts, root]


def find(name: str, folders: Sequence[Path], homes: Sequence[Path]) -> Path | None:
    """The file that a report calls so, as it is or in one of these folders, if it lies in one of the `homes`."""
    paths = (*(folder / name for folder in folders), Path(name))
    return next((path for path in paths if leads_to(path, homes) and path.is_file()), None)


def thumbnail(path: Path | None) -> str | None:
    """A JPEG as the source of an <img>, or None for what is not there, is too large, or cannot be read."""
    from PIL import Image

    try:
        if path is None or path.stat().st_size > MOST_BYTES:
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with Image.open(io.BytesIO(read_regular(path))) as image:
                if image.width * image.height > MOST_PIXELS:
                    return None
                image.draft("RGB", (2 * SIDE_PX, 2 * SIDE_PX))
                small = image.convert("RGB")
        small.thumbnail((SIDE_PX, SIDE_PX))
        file = io.BytesIO()
        small.save(file, "JPEG", quality=80)
    except Exception:  # decoders raise of every kind, and a report goes on without a picture
        return None
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


def _inlined(path: Path) -> str | None:
    """A JPEG as the source of an <img>, as it is; None if there is none, or it is too large."""
    if path.is_symlink() or not path.is_file() or path.stat().st_size > MOST_INLINED_BYTES:
        return None
    return "data:image/jpeg;base64," + base64.b64encode(read_regular(path)).decode()


PAGE = "page.html"
NOTHING = "-"
OPERATION: tuple[str, ...] = ("images_per_second", "tokens_per_second", "data_wait", "comm_wait", "peak_memory_bytes")
OPERATION += ("learning_rate", "skipped_steps", "loss_scale")
SHARES = ("data_wait", "comm_wait", "dropped_tokens")
MOST_EXAMPLES = 6
MOST_IN_MATRIX = 24  # classes of a matrix that is shown whole
MOST_CONFUSIONS = 20
MOST_MODULES = 60
MOST_RANKS = 16
OF_LOSS = ("training.loss", "training.loss_options", "learning.class_weights", "learning.label_smoothing")
OF_EACH_START = ("run_folder", "resume", "dry_run")  # which say nothing of what was trained


class Row(NamedTuple):
    """A line of a table of runs: `marked` if they differ."""

    name: str
    cells: list[str]
    marked: bool


def write(paths: Sequence[Path], out: Path, images: Path | None = None) -> list[str]:
    """Write the page of these runs; returns what there is to say. Raises ValueError for what is no run, and OSError.

    Pictures are shown that lie below the folder of a run, the folder that it is in, the current one, or `images`.
    """
    runs = read_runs(paths)
    write_durably(out, page(runs, images).encode(errors="replace"))
    said = [f"{run.name}: {remark}" for run in runs for remark in run.remarks]
    return [*said, f"{out}: {counted(len(runs), 'run')}, {out.stat().st_size / 1024:.0f} KiB"]


def page(runs: Sequence[ShownRun], images: Path | None = None) -> str:
    """The page as HTML, with pictures as `write` says."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    options, others = configurations(runs)
    return environment.get_template(PAGE).render(
        title=runs[0].name if len(runs) == 1 else f"{len(runs)} runs",
        runs=[
            {"run": r, "colour": colour_of(i), "remarks": [*r.remarks, *not_finite(r)], "path": r.path.absolute()}
            for i, r in enumerate(runs)
        ],
        results=list(results(runs)),
        learning=list(_charts(runs, operation=False)),
        operation=list(_charts(runs, operation=True)),
        speeds=list(speeds(runs)),
        evaluations=[found for run in runs for found in _evaluations(run, images)],
        memory=[found for run in runs if (found := _memory(run))],
        timelines=[_timeline(run) for run in runs if run.portrait is not None],
        models=[_model(run) for run in runs if run.portrait is not None],
        options=options,
        others=others,
        versions=table(runs, [_versions(run) for run in runs]),
        many=len(runs) > 1,
    )


def table(runs: Sequence[ShownRun], values: Sequence[Mapping[str, str]]) -> list[Row]:
    """Everything that some run has, with what each run has; what differs comes first."""
    rows = []
    for name in dict.fromkeys(name for each in values for name in each):
        cells = [each.get(name, NOTHING) for each in values]
        rows.append(Row(name, cells, len(set(cells)) > 1))
    return sorted(rows, key=lambda row: not row.marked)


def configurations(runs: Sequence[ShownRun]) -> tuple[list[Row], list[Row]]:
    """The options that differ between runs, or from their defaults; and all others."""
    defaults = flattened(tomllib.loads(default_toml()))
    first: list[Row] = []
    rest: list[Row] = []
    for row in table(runs, [run.options for run in runs]):
        if row.name.rpartition(".")[2] in OF_EACH_START:
            rest.append(row._replace(marked=False))
        else:
            usual = all(cell in (NOTHING, defaults.get(row.name)) for cell in row.cells)
            (rest if usual and not row.marked else first).append(row)
    return first, rest


def _versions(run: ShownRun) -> dict[str, str]:
    found = {name: " ".join(text.split()) for name, text in run.versions.items()}
    if "mpi" in found:
        found["mpi"] = found["mpi"].partition(" MPICH Device")[0][:120]
    return found


def named(metric: str) -> tuple[str, float]:
    """How a metric is called, and what its values are multiplied by to be read."""
    if metric.endswith("_bytes"):
        return metric.removesuffix("_bytes").replace("_", " ") + ", MiB", 2.0**-20
    if metric in SHARES:
        return metric.replace("_", " ") + ", %", 100.0
    return metric.replace("images_per_second", "images/s").replace("_", " "), 1.0


def _points(run: ShownRun, phase: str, metric: str) -> list[tuple[int, float]]:
    _, factor = named(metric)
    return [(step, value * factor) for step, value in run.series(phase, metric)]


def _names(runs: Sequence[ShownRun], operation: bool, phases: Sequence[str] = ("train", "validation")) -> list[str]:
    found = dict.fromkeys(name for phase in phases for run in runs for name in run.metrics(phase))
    return [name for name in found if name.startswith(OPERATION) == operation]


def _charts(runs: Sequence[ShownRun], operation: bool) -> Iterator[tuple[str, Markup]]:
    for metric in _names(runs, operation):
        name, _ = named(metric)
        curves = [
            Curve(f"{run.name}, {phase}", points, colour_of(number), phase != "train")
            for number, run in enumerate(runs)
            for phase in ("train", "validation")
            if (points := _points(run, phase, metric))
        ]
        picture = chart(curves, name)
        if picture:
            yield name, Markup(picture)


def results(runs: Sequence[ShownRun]) -> Iterator[dict[str, Any]]:
    """For each phase and metric: of each run the last value, and the best with its step.

    The best of several runs is marked among those that can be compared: of one task, a loss of one function.
    """
    for phase in ("validation", "train"):
        for metric in _names(runs, operation=False, phases=(phase,)):
            name, _ = named(metric)
            cells: list[dict[str, Any]] = []
            compared: dict[Any, list[tuple[float, dict[str, Any]]]] = {}
            for run in runs:
                points = _points(run, phase, metric)
                good, higher = finite(points), run.higher_is_better(metric)
                last = number_text(points[-1][1]) if points else NOTHING
                cells.append({"last": last, "best": NOTHING, "top": False})
                if good and higher is not None:
                    step, value = (max if higher else min)(good, key=lambda point: point[1])
                    cells[-1]["best"] = f"{number_text(value)} at step {step}"
                    of_loss = tuple(run.options.get(name, "") for name in OF_LOSS) if metric == "loss" else ()
                compared.setdefault((run.task, *of_loss, higher), []).append((value, cells[-1]))
            for (*_, higher), some in compared.items():
                top = (max if higher else min)(value for value, _ in some)
                for value, cell in some if len(some) > 1 else ():
                    cell["top"] = value == top
            told = {run.higher_is_better(metric) for run in runs if metric in run.metrics(phase)}
            direction = told.pop() if len(told) == 1 else None
            words = {True: "higher is better", False: "lower is better", None: "no direction is known"}
            yield {"name": f"{phase} {name}", "direction": words[direction], "cells": cells}


def speeds(runs: Sequence[ShownRun]) -> Iterator[Row]:
    """Medians over all reports of a run of what it was like, and the most memory."""
    for metric in _names(runs, operation=True):
        if metric.startswith(("learning_rate", "loss_scale")):
            continue
        name, _ = named(metric)
        peak = metric.endswith("_bytes")
        values = [[value for _, value in finite(_points(run, "train", metric))] for run in runs]
        cells = [NOTHING if not each else number_text(max(each) if peak else median(each)) for each in values]
        yield Row(f"{name} ({'most' if peak else 'median'})", cells, False)


def _evaluations(run: ShownRun, images: Path | None) -> Iterator[dict[str, Any]]:
    """Those of a run, or the last confusion matrix that its validations reported."""
    if not run.evaluations and run.last_matrix is not None:
        step, matrix = run.last_matrix
        yield _shown(f"{run.name}: validation at step {step}", run.classes, matrix)
    for one in run.evaluations:
        with reading(one.path):
            found = _evaluation(run, one, images)
        yield found


def _evaluation(run: ShownRun, one: SavedEvaluation, images: Path | None) -> dict[str, Any]:
    told = one.told
    own = one.path.is_relative_to(run.path)  # or of all folds
    title = f"{run.name}: {one.path.relative_to(run.path).with_suffix('')}" if own else f"all folds: {one.path.stem}"
    homes = [Path(), run.path.resolve().parent, *([] if images is None else [images])]
    folders = [*([] if images is None else image_folders(images)), *([Path(told["root"])] if told["root"] else [])]
    for root in () if told["root"] else (told.get("images"), run.options.get("data.images")):
        folders += image_folders(Path(root)) if root and root != "none" else []
    folders += [one.path.parent, run.path]
    looked_at = judged(one)
    rows = [row for row in one.metrics() if row["by"] == told["what"]]
    matrix = told["confusion"] if is_matrix(told["confusion"]) else None
    return {
        **_shown(title, told["classes"], matrix),
        "metrics": [(row["metric"], number_text(row["value"]), *_between(row)) for row in rows],
        "count": len(looked_at),
        "made": _inlined(beside(one.path, EXAMPLES)),
        "examples": [
            (what, [{"judged": each, "source": thumbnail(find(each.image, folders, homes))} for each in some])
            for what, some in zip(("Best", "Worst"), extremes(looked_at, MOST_EXAMPLES), strict=True)
            if some
        ],
    }


def _shown(title: str, classes: Sequence[str], matrix: Sequence[Sequence[float]] | None) -> dict[str, Any]:
    """An evaluation of which there is no more than a confusion matrix."""
    names = [*classes, *(f"class {i}" for i in range(len(classes), len(matrix or ())))]
    found = {"matrix": _matrix(names, matrix or ()), "confusions": _confusions(names, matrix or ())}
    return {"title": title, "metrics": [], "count": 0, "examples": [], "made": None, **found}


def _between(row: Mapping[str, Any]) -> tuple[str, str]:
    if not (math.isfinite(row["low"]) and math.isfinite(row["high"])):
        return "", ""
    ends = f"{number_text(row['low'])} to {number_text(row['high'])}"
    return ends, f"{100 * row['confidence']:g} % of resamples"


def _matrix(names: Sequence[str], matrix: Sequence[Sequence[float]]) -> dict[str, Any] | None:
    """Rows are the classes that images have, columns those they were taken for."""
    if not matrix or len(matrix) > MOST_IN_MATRIX:
        return None
    rows = []
    for i, row in enumerate(matrix):
        total = sum(row) or 1.0
        rows.append([(number_text(n), f"{0.7 * max(0.0, min(1.0, n / total)):.3f}", i == j) for j, n in enumerate(row)])
    return {"classes": names, "rows": rows}


def _confusions(names: Sequence[str], matrix: Sequence[Sequence[float]]) -> list[tuple[str, str, str]]:
    """Of a matrix too large to be shown, which classes were most often taken for which others."""
    if len(matrix) <= MOST_IN_MATRIX:
        return []
    pairs = [(n, names[i], names[j]) for i, row in enumerate(matrix) for j, n in enumerate(row) if i != j and n]
    return [(a, b, number_text(n)) for n, a, b in sorted(pairs, key=lambda p: -p[0])[:MOST_CONFUSIONS]]


def _memory(run: ShownRun) -> dict[str, Any] | None:
    """A bar for each rank, as long as its peak beside that of the rank with most."""
    if run.portrait is None or not run.portrait.memory:
        return None
    ranks = run.portrait.memory
    purposes = list(dict.fromkeys(name for rank in ranks for name in rank))
    colours = {name: PURPOSES[i % len(PURPOSES)] for i, name in enumerate(purposes)}
    most = max(sum(rank.values()) for rank in ranks) or 1
    order = sorted(enumerate(ranks), key=lambda item: -sum(item[1].values()))[:MOST_RANKS]
    bars = []
    for number, rank in sorted(order):
        parts = [(f"{name}: {n / 2**20:,.1f} MiB", f"{100 * n / most:.2f}", colours[name]) for name, n in rank.items()]
        bars.append({"rank": number, "parts": parts, "together": f"{sum(rank.values()) / 2**20:,.0f} MiB"})
    left = len(ranks) - len(bars)
    cells = [[name, *(f"{rank.get(name, 0) / 2**20:,.1f}" for _, rank in sorted(order))] for name in purposes]
    return {"name": run.name, "bars": bars, "legend": list(colours.items()), "left": left, "table": cells}


def _timeline(run: ShownRun) -> dict[str, Any]:
    assert run.portrait is not None
    drawn = run.portrait.timeline
    found: dict[str, Any] = {"name": run.name, "plan": run.portrait.plan, "picture": None, "legend": [], "words": ""}
    if drawn is None or not any(drawn.rows):
        return found
    words = summary(drawn).rpartition(", at most")[0]
    source = f" ({run.portrait.source})" if run.portrait.source else ""
    return found | {"picture": Markup(as_svg(drawn)), "legend": legend(drawn), "words": f"a step of {words}{source}"}


def _model(run: ShownRun) -> dict[str, Any]:
    assert run.portrait is not None
    rows = [(name, f"{values:,}", f"{trained:,}") for name, values, trained in run.portrait.modules]
    return {"name": run.name, "rows": rows[:MOST_MODULES], "left": max(0, len(rows) - MOST_MODULES)}
