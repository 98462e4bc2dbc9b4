"""How the fastest plans scale with the number of ranks, and up to where each kind of parallelism pays.

    strong     the same batch on more ranks        ideal: images/s in proportion to the ranks
    weak       a batch that grows with the ranks   the same, from the fewest ranks on which the model fits

Nothing is streamed. A kind pays as long as twice the ranks give at least PAYS times the images a second.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from itertools import pairwise
from math import log2, prod
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from mpi4dl._palette import CURVES
from mpi4dl._wording import Tell, aligned, counted, literal, quietly
from mpi4dl.estimate.plan_estimate import Estimator, PlanEstimate
from mpi4dl.estimate.search import MANY_PLANS, promising
from mpi4dl.geometry import ceil_div
from mpi4dl.parallel.plan import Plan

PAYS = 1.4
SIZE_INCHES = (8.0, 5.0)


ALL = "all together"
KINDS: Mapping[str, Set[str]] = MappingProxyType(
    {"tiles": {"tiles"}, "stages": {"stages"}, "replicas": {"data"}, "tensor": {"tensor", "others"}, ALL: set()}
)


def is_of(plan: Plan, kind: str) -> bool:
    """Whether a plan has several ranks by this kind of parallelism alone."""
    ways = {"tiles": max(map(prod, plan.tiles)), "stages": plan.num_stages, "data": plan.data, "tensor": plan.tensor}
    ways["others"] = plan.experts * max(plan.batch_ways)
    return kind == ALL or all(number == 1 or name in KINDS[kind] for name, number in ways.items())


class Point(NamedTuple):
    """The fastest plan of a kind on a number of ranks; None if none fits. `smallest` is the one that needs least."""

    kind: str
    num_ranks: int
    best: PlanEstimate | None
    smallest: PlanEstimate | None = None

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
    """The fastest plan of each kind on each of these numbers of ranks, of plans `plans_for(ranks, batch_size)`.

    Of many plans those are looked at that are of one kind of parallelism, or near the best on fewer ranks.
    """
    found: list[Point] = []
    estimator.streams = False
    batch_size, fewest = estimator.image[0], None
    good: list[Plan] = []
    for step, num_ranks in enumerate(numbers):

        def of_all(doing: str, done: int, total: int, told: str = f"{num_ranks} of {numbers[-1]} ranks") -> None:
            tell(f"{told}: {doing}", done, total)

        of_all("listing plans", 0, 0)
        size = batch_size if not weak or fewest is None else batch_size * num_ranks // fewest
        estimator.image = (size, *estimator.image[1:])
        plans = plans_for(num_ranks, size)
        if len(plans) > MANY_PLANS and step:
            plans = near(plans, good, log2(num_ranks / numbers[step - 1]))
        estimates = promising(estimator, plans, most_bytes, of_all)
        fitting = [each for each in estimates if each.num_bytes <= most_bytes]
        if fitting and fewest is None:
            fewest = num_ranks
        for kind in KINDS:
            own = [each for each in estimates if is_of(each.plan, kind)]
            best = max(
                (each for each in own if each.num_bytes <= most_bytes),
                key=lambda each: each.samples_per_second,
                default=None,
            )
            found.append(Point(kind, num_ranks, best, min(own, key=lambda each: each.num_bytes, default=None)))
        good = _good(fitting, estimates)
    return found


SEEDS = 8  # of the best plans on fewer ranks, near which plans are looked at
STEPS = 1.0  # doublings of one thing, beyond those of the ranks, within which a plan is near another one


def _good(fitting: Sequence[PlanEstimate], estimates: Sequence[PlanEstimate]) -> list[Plan]:
    """The fastest plans, or where none fits the smallest, each of other stages, tiles or replicas."""
    if fitting:
        ranked = sorted(fitting, key=lambda each: -each.samples_per_second)
    else:
        ranked = sorted(estimates, key=lambda each: each.num_bytes)
    return list({_measures(each.plan): each.plan for each in reversed(ranked)}.values())[::-1][:SEEDS]


def near(plans: Sequence[Plan], good: Sequence[Plan], doublings: float) -> list[Plan]:
    """Those of plans that are of one kind of parallelism, or like a good one on fewer ranks.

    With twice the ranks, so many times (`doublings`), they differ from it by as many doublings, or by STEPS more.
    """
    seeds = [_measures(plan) for plan in good]

    def is_near(plan: Plan) -> bool:
        own = _measures(plan)
        return any(sum(abs(a - b) for a, b in zip(own, seed, strict=True)) <= doublings + STEPS for seed in seeds)

    return [plan for plan in plans if any(is_of(plan, kind) for kind in KINDS if kind != ALL) or is_near(plan)]


def _measures(plan: Plan) -> tuple[float, ...]:
    """How much of each kind of parallelism a plan has, in doublings."""
    tiles = [log2(prod(each)) for each in plan.tiles]
    mean = (tiles[0] + tiles[-1]) / 2
    numbers = plan.data, plan.tensor, plan.experts, plan.num_microbatches, len(plan.tiles)
    return *map(log2, numbers), mean


def stops_paying(points: Iterable[Point]) -> int | None:
    """The number of ranks from which on twice as many give less than PAYS times the speed; None if they always pay."""
    fitting = [point for point in points if point.best is not None]
    for few, many in pairwise(fitting):
        if many.speed < few.speed * PAYS ** log2(many.num_ranks / few.num_ranks):
            return few.num_ranks
    return None


def scaling_lines(
    points: Sequence[Point],
    ranks_per_node: int | None,
    num_tokens: int | None = None,
    most_bytes: float = float("inf"),
) -> Iterator[str]:
    """The table of the fastest plans, and up to where each kind pays. Samples of text have so many tokens.

    They end with what a plan lacks on ranks of so many bytes where none fits.
    """
    best = [point for point in points if point.kind == ALL]
    first = next((point for point in best if point.best is not None), None)
    if first is None:
        yield "no plan fits on any of these numbers of ranks"
        yield from _missing(best, most_bytes)
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
    yield from _missing(best, most_bytes)


def _missing(points: Sequence[Point], most_bytes: float) -> Iterator[str]:
    """How much memory the smallest plan lacks on most of the ranks on which none fits, and what would fit."""
    without = [point for point in points if point.best is None and point.smallest is not None]
    if not without or most_bytes == float("inf"):
        return
    last = without[-1]
    assert last.smallest is not None
    needed, there = (f"{size / 2**20:,.0f} MiB" for size in (last.smallest.num_bytes, most_bytes))
    more = f"{(last.smallest.num_bytes - most_bytes) / 2**20:,.0f} MiB more than the {there} of a rank"
    yield f"on {counted(last.num_ranks, 'rank')} the smallest plan needs {needed}, {more}: {last.smallest}"
    yield "smaller batches, larger numbers of ranks, or `stream` need less"


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
        if not any(point.num_ranks > 1 for point in own) and kind != ALL:
            continue
        if not own:
            continue
        width = 2.5 if kind == ALL else 1.5
        places, speeds = [point.num_ranks for point in own], [(num_tokens or 1) * point.speed for point in own]
        axes.plot(places, speeds, marker="o", color=color, linewidth=width, label=kind)
        if kind == ALL:
            ideal = [speeds[0] * number / places[0] for number in places]
            axes.plot(places, ideal, color="0.6", linestyle="--", linewidth=1, label="ideal")
        end = stops_paying(own)
        if end is not None:
            axes.plot([end], [speeds[places.index(end)]], "x", color=color, markersize=12)
    numbers = sorted({point.num_ranks for point in points})
    axes.set_xticks(numbers, [str(number) for number in numbers])
    axes.set_xlabel("ranks (x: from here on twice as many give less than 1.4 times)")
    axes.set_ylabel(f"{'tokens' if num_tokens else 'images'}/s, estimated")
    axes.set_title(literal(title))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
