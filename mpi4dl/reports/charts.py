"""Curves as SVG: small, readable on a phone, in the page's own colours and letters, with values to point at."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element, SubElement, tostring

from mpi4dl.reports.reading import finite

# Told apart by colour-blind eyes too (Okabe and Ito, 2008), darkened where white paper needs it.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#6a3d9a", "#555555")
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
    return COLOURS[number % len(COLOURS)]


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
