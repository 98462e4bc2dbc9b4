"""How the fastest plans scale with the number of ranks, and up to where each kind of parallelism pays.

    strong     the same batch on more ranks        ideal: images/s in proportion to the ranks
    weak       a batch that grows with the ranks   the same, from the fewest ranks on which the model fits

Nothing is streamed. A kind pays as long as twice the ranks give at least PAYS times the images a second.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import log2
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from mpi4dl._palette import CURVES
from mpi4dl._progress import Tell, quietly
from mpi4dl._wording import aligned, counted
from mpi4dl.estimate.plan_estimate import Estimator, PlanEstimate
from mpi4dl.estimate.search import promising
from mpi4dl.geometry import ceil_div
from mpi4dl.parallel.plan import Plan

PAYS = 1.4
SIZE_INCHES = (8.0, 5.0)
Kind = Callable[[Plan], bool]


def _is_plain(plan: Plan) -> bool:
    return plan.tensor * plan.experts * max(plan.batch_ways) == 1


def _tiles(plan: Plan) -> bool:
    return _is_plain(plan) and plan.num_stages == 1 and plan.data == 1


def _stages(plan: Plan) -> bool:
    return _is_plain(plan) and plan.data == 1 and all(set(tiles) == {1} for tiles in plan.tiles)


def _replicas(plan: Plan) -> bool:
    return _is_plain(plan) and plan.num_stages == 1 and set(plan.tiles[0]) == {1}


def _tensor(plan: Plan) -> bool:
    return plan.num_stages == 1 and plan.data == 1 and set(plan.tiles[0]) == {1}


KINDS: Mapping[str, Kind] = MappingProxyType(
    {"tiles": _tiles, "stages": _stages, "replicas": _replicas, "tensor": _tensor, "all together": lambda plan: True}
)


class Point(NamedTuple):
    """The fastest plan of a kind on a number of ranks; None if none fits."""

    kind: str
    num_ranks: int
    best: PlanEstimate | None

    @property
    def speed(self) -> float:
        return 0.0 if self.best is None else self.best.samples_per_second


def numbers_of_ranks(most: int) -> list[int]:
    """1, 2, 4 and so on, up to the most."""
    return [*(2**e for e in range(most.bit_length()) if 2**e < most), most]


def scaling_points(
    estimator: Estimator,
    plans_for: Callable[[int, int], Sequence[Plan]],
    numbers: Sequence[int],
    weak: bool,
    most_bytes: float = float("inf"),
    tell: Tell = quietly,
) -> list[Point]:
    """The fastest plan of each kind on each of these numbers of ranks, of plans `plans_for(ranks, batch_size)`."""
    found: list[Point] = []
    estimator.streams = False
    batch_size, fewest = estimator.image[0], None
    for step, num_ranks in enumerate(numbers):
        tell("numbers of ranks", step, len(numbers))
        size = batch_size if not weak or fewest is None else batch_size * num_ranks // fewest
        estimator.image = (size, *estimator.image[1:])
        estimates = promising(estimator, plans_for(num_ranks, size), most_bytes)
        fitting = [each for each in estimates if each.num_bytes <= most_bytes]
        if fitting and fewest is None:
            fewest = num_ranks
        for kind, belongs in KINDS.items():
            own = [each for each in fitting if belongs(each.plan)]
            best = max(own, key=lambda each: each.samples_per_second, default=None)
            found.append(Point(kind, num_ranks, best))
    return found


def stops_paying(points: Iterable[Point]) -> int | None:
    """The number of ranks from which on twice as many give less than PAYS times the speed; None if they always pay."""
    fitting = [point for point in points if point.best is not None]
    for few, many in pairwise(fitting):
        if many.speed < few.speed * PAYS ** log2(many.num_ranks / few.num_ranks):
            return few.num_ranks
    return None


def scaling_lines(points: Sequence[Point], ranks_per_node: int | None, num_tokens: int | None = None) -> Iterator[str]:
    """The table of the fastest plans, and up to where each kind pays. Samples of text have so many tokens."""
    best = [point for point in points if point.kind == "all together"]
    first = next((point for point in best if point.best is not None), None)
    if first is None:
        yield "no plan fits on any of these numbers of ranks"
        return
    each, what = (num_tokens, "tokens") if num_tokens else (1, "images")
    rows = [["ranks", f"{what}/s", "efficiency", *["node-hours"] * (ranks_per_node is not None), "plan"]]
    for point in best:
        if point.best is None:
            rows.append([str(point.num_ranks), "-", "-", *["-"] * (ranks_per_node is not None), "none fits"])
            continue
        share = point.speed / first.speed * first.num_ranks / point.num_ranks
        cells = [str(point.num_ranks), f"{each * point.speed:.3g}", f"{100 * share:.0f} %"]
        if ranks_per_node is not None:
            nodes = ceil_div(point.num_ranks, ranks_per_node)
            cells.append(f"{1000 / point.speed * nodes / 3600:.3g}")
        rows.append([*cells, str(point.best)])
    yield from aligned(rows, left={"plan"})
    if ranks_per_node is not None:
        yield f"node-hours are those of 1,000 {'samples' if num_tokens else 'images'}, of whole nodes"
    for kind in KINDS:
        own = [point for point in points if point.kind == kind and point.best is not None]
        if not any(point.num_ranks > 1 for point in own):
            continue
        end = stops_paying(own)
        until = f"{'as far as' if end is None else 'up to'} {counted(end or own[-1].num_ranks, 'rank')}"
        yield f"{kind}: fit from {counted(own[0].num_ranks, 'rank')} on, and pay {until}"


def draw_scaling(points: Sequence[Point], title: str, path: Path, num_tokens: int | None = None) -> None:
    """A PNG of images or tokens a second over ranks, by kind. Raises ImportError without matplotlib, and OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(SIZE_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for color, kind in zip(CURVES, KINDS, strict=False):
        own = [point for point in points if point.kind == kind and point.best is not None]
        if not any(point.num_ranks > 1 for point in own) and kind != "all together":
            continue
        if not own:
            continue
        width = 2.5 if kind == "all together" else 1.5
        places, speeds = [point.num_ranks for point in own], [(num_tokens or 1) * point.speed for point in own]
        axes.plot(places, speeds, marker="o", color=color, linewidth=width, label=kind)
        if kind == "all together":
            ideal = [speeds[0] * number / places[0] for number in places]
            axes.plot(places, ideal, color="0.6", linestyle="--", linewidth=1, label="ideal")
        end = stops_paying(own)
        if end is not None:
            axes.plot([end], [speeds[places.index(end)]], "x", color=color, markersize=12)
    numbers = sorted({point.num_ranks for point in points})
    axes.set_xticks(numbers, [str(number) for number in numbers])
    axes.set_xlabel("ranks (x: from here on twice as many give less than 1.4 times)")
    axes.set_ylabel(f"{'tokens' if num_tokens else 'images'}/s, estimated")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
