"""Weak and strong scaling of large images to thousands of ranks, estimated on machines that are described as data.

    python -m benchmarks run scaling
    python -m benchmarks run scaling --models resnet50 --machines lassen --sizes 16384 --most-ranks 512

Nothing runs on such a machine. Layers are counted on small tiles on one core here, and take the seconds that the rates
of the machine's file give them. Messages take the seconds of its links. `strong` trains the same batch on more ranks.
`weak` starts with one image on the fewest ranks on which a plan fits, and the batch grows with the ranks.

Of each kind of parallelism, and of all together, the fastest plan that fits into a rank's memory is kept, or else the
smallest one. A kind pays as long as twice the ranks give at least 1.4 times the images/s. Parameters are not cut
(`tensor` 1), nothing is streamed, and SGD with momentum is the optimizer. Numbers are of float32, on Selene of bfloat16
with float32 masters, since the rate in its file is that of bfloat16.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.common.options import Option, Options, batch_size, count, counts, listed
from benchmarks.common.report import save
from benchmarks.common.results import Column, table
from mpi4dl._palette import CURVES
from mpi4dl._wording import counted
from mpi4dl.options.kinds import TEXT

if TYPE_CHECKING:
    from torch import nn

    from mpi4dl.estimate.plan_estimate import PlanEstimate
    from mpi4dl.estimate.scaling import Point
    from mpi4dl.parallel.costs.cost_model import Profiler
    from mpi4dl.parallel.costs.machine import Machine

NUM_CLASSES = 1000
MODELS: dict[str, dict[str, Any]] = {
    "resnet50": {},
    "small_resnet": {},
    "amoebanetd": {"num_layers": 18, "num_filters": 416},  # the defaults of MPI4DL
}
LOW_PRECISION = ("selene",)  # machines whose rate is that of bfloat16: there weights and activations are of it
WAYS = ("strong", "weak")
FOLDER = Path("examples/machines")
OPTIONS = (
    Option("--models", listed(TEXT), "resnet50", "models of mpi4dl.models"),
    Option("--machines", listed(TEXT), "lassen,selene", f"files of {FOLDER}"),
    counts("--sizes", "8192,16384,32768,65536", "heights and widths of the images, in pixels"),
    count("--most-ranks", 2048, "ranks at most; from 1 on, always twice as many"),
    batch_size(32, "images of a step of strong scaling"),
)
QUICK = {"models": "small_resnet", "machines": "lassen", "sizes": "2048,8192", "most_ranks": 8, "batch_size": 4}
COLUMNS = (
    Column("", "name"),
    Column("fits from", "fits_from"),
    Column("pays up to", "pays_to"),
    Column("ranks", "ranks"),
    Column("images/s", "speed", 3),
    Column("efficiency %", "efficiency", 0),
    Column("plan", "plan"),
)


class Case(NamedTuple):
    """A curve: a model for images of a size, on a machine."""

    model: str
    machine: str
    way: str
    size: int

    def __str__(self) -> str:
        return f"{self.model} on {self.machine}, {self.size:,} px, {self.way}"


def check(options: Options) -> str | None:
    unknown = [name for name in options.models if name not in MODELS]
    if unknown:
        return f"--models {unknown[0]}: choose of {', '.join(MODELS)}"
    missing = [name for name in options.machines if not (FOLDER / f"{name}.toml").is_file()]
    if missing:
        return f"--machines {missing[0]}: there is no {FOLDER / missing[0]}.toml"
    return None


def builder(name: str) -> "partial[nn.Module]":
    from mpi4dl import models

    return partial(models.build, name, NUM_CLASSES, **MODELS[name])


def run(options: Options) -> None:

    from mpi4dl._progress import ProgressLine
    from mpi4dl.estimate.machine_file import load_machine
    from mpi4dl.parallel.costs.cost_model import Profiler
    from mpi4dl.parallel.pipeline.split import Cuttable, outline

    found: dict[Case, list[Point]] = {}
    limits: dict[str, float] = {}
    with ProgressLine() as progress:
        for model in options.models:
            for name in options.machines:
                progress(f"building {model}")
                whole = outline(builder(model)).train()
                cuttable = Cuttable(whole.bfloat16() if name in LOW_PRECISION else whole)
                machine = load_machine(str(FOLDER / f"{name}.toml"))
                limits[name] = float("inf") if machine.memory is None else machine.memory
                profiler = Profiler.of_user(machine=machine, small=True)
                for size in options.sizes:
                    for way in WAYS:
                        case = Case(model, name, way, size)
                        tell = partial(_tell, progress, case)
                        found[case] = points_of(options, case, cuttable, machine, profiler, tell)
    rows = [row for case, points in found.items() for row in rows_of(case, points, limits[case.machine])]
    ends = [summary_of(case, points) for case, points in found.items()]
    print(table(ends, COLUMNS), flush=True)
    figures = {
        f"_{model}_{name}": draw([row for row in rows if (row["model"], row["machine"]) == (model, name)], options)
        for model in options.models
        for name in options.machines
    }
    save(options, {"summary": ends, "measurements": rows}, figures)


def _tell(progress: Any, case: Case, doing: str, done: int = 0, total: int = 0) -> None:
    progress(f"{case}; {doing}", done, total)


def points_of(
    options: Options, case: Case, cuttable: Any, machine: "Machine", profiler: "Profiler", tell: Any
) -> "list[Point]":
    """The fastest plans of a curve, of one kind and of all kinds together."""
    import torch

    from mpi4dl.estimate.plan_estimate import Estimator
    from mpi4dl.estimate.scaling import numbers_of_ranks, scaling_points
    from mpi4dl.estimate.search import candidates

    images = options.batch_size if case.way == "strong" else 1
    image = (images, 3, case.size, case.size)
    optimizer = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
    estimator = Estimator(cuttable, image, profiler, torch.device("cpu"), optimizer, streams=False)

    def plans(num_ranks: int, batch_size: int) -> list[Any]:
        return list(candidates(num_ranks, len(cuttable), (batch_size, *image[1:])))

    numbers = numbers_of_ranks(min(options.most_ranks, machine.num_ranks))
    limit = float("inf") if machine.memory is None else machine.memory
    return scaling_points(estimator, plans, numbers, case.way == "weak", limit, tell)


def rows_of(case: Case, points: "list[Point]", most_bytes: float) -> Iterator[dict[str, Any]]:
    """A row for each kind and number of ranks, with what the step is spent on, or how much memory is missing."""
    from mpi4dl.estimate.scaling import KINDS, stops_paying

    ends = {kind: stops_paying([point for point in points if point.kind == kind]) for kind in KINDS}
    for point in points:
        row = {
            **case._asdict(),
            "kind": point.kind,
            "ranks": point.num_ranks,
            "name": f"{case}, {point.kind}, {point.num_ranks}",
        }
        if point.best is not None:
            time = point.best.time
            assert time is not None
            spent = {name: seconds / time.seconds for name, seconds in time.parts._asdict().items()}
            row["last_that_pays"] = ends[point.kind] == point.num_ranks
            yield {**row, "speed": point.speed, "step_seconds": time.seconds, **_told(point.best), "spent": spent}
        elif point.smallest is not None:
            lacks = (point.smallest.num_bytes - most_bytes) / 2**30
            yield {**row, "speed": None, **_told(point.smallest), "lacks_gibibytes": lacks}


def _told(estimate: "PlanEstimate") -> dict[str, Any]:
    return {"plan": str(estimate), "gibibytes": estimate.num_bytes / 2**30}


def summary_of(case: Case, points: "list[Point]") -> dict[str, Any]:
    """From how many ranks on a plan fits, up to where more of them pay, and the plan on most ranks."""
    from mpi4dl.estimate.scaling import ALL, KINDS, stops_paying

    kinds = {}
    for kind in KINDS:
        own = [point for point in points if point.kind == kind and point.best is not None]
        if own:
            kinds[kind] = {"fits_from": own[0].num_ranks, "pays_to": stops_paying(own) or own[-1].num_ranks}
    best = [point for point in points if point.kind == ALL and point.best is not None]
    row = {"name": str(case), **case._asdict(), "kinds": kinds}
    if not best:
        smallest = points[-1].smallest
        return {**row, "ranks": points[-1].num_ranks, **({} if smallest is None else _told(smallest))}
    first, last = best[0], best[-1]
    share = last.speed / first.speed * first.num_ranks / last.num_ranks
    told = {"ranks": last.num_ranks, "speed": last.speed, "efficiency": 100 * share, **_told(last.best)}  # type: ignore[arg-type]
    return {**row, **kinds[ALL], **told}


def draw(rows: list[dict[str, Any]], options: Options) -> Any:
    """Images/s over ranks by kind of parallelism: a row of panels for strong and for weak scaling."""
    from matplotlib.figure import Figure

    from mpi4dl.estimate.scaling import ALL, KINDS

    sizes = list(dict.fromkeys(row["size"] for row in rows))
    numbers = sorted({row["ranks"] for row in rows})
    figure = Figure((4.2 * len(sizes) + 0.6, 8.8), layout="constrained")
    panels = figure.subplots(len(WAYS), len(sizes), squeeze=False, sharex=True)
    for axes, (way, size) in zip(panels.flat, ((way, size) for way in WAYS for size in sizes), strict=True):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=10)
        for color, kind in zip(CURVES[1:] + CURVES[:1], [*KINDS][::-1], strict=False):
            own = [row for row in rows if (row["way"], row["size"], row["kind"]) == (way, size, kind)]
            draw_kind(axes, own, kind, color, wide=kind == ALL)
            axes.set_xlim(numbers[0] / 1.4, numbers[-1] * 1.4)
            if kind == ALL:
                draw_missing(axes, own)
        axes.set_xticks(numbers, [str(number) for number in numbers], rotation=60, fontsize=8)
        axes.minorticks_off()
        axes.set_title(f"{size:,} px, {way} scaling", fontsize=10)
        axes.grid(color="0.9")
    for axes in panels[:, 0]:
        axes.set_ylabel("images/s, estimated")
    for axes in panels[-1]:
        axes.set_xlabel("ranks")
    model, machine = rows[0]["model"], rows[0]["machine"]
    legend(figure, panels, f"{model} on {machine}: strong scaling of {options.batch_size} images, and weak scaling")
    return figure


def draw_kind(axes: Any, rows: list[dict[str, Any]], kind: str, color: str, wide: bool) -> None:
    """A curve, with a cross where it stops to pay."""
    fits = [row for row in rows if row["speed"] is not None]
    if not fits or (fits[-1]["ranks"] == 1 and not wide):
        return
    places, speeds = [row["ranks"] for row in fits], [row["speed"] for row in fits]
    if wide:
        ideal = [speeds[0] * place / places[0] for place in places]
        axes.plot(places, ideal, "--", color="0.6", linewidth=1, label="ideal")
    axes.plot(places, speeds, "o-", color=color, linewidth=4 if wide else 1.6, alpha=0.45 if wide else 1, label=kind)
    for row in fits:
        if row["last_that_pays"]:
            axes.plot([row["ranks"]], [row["speed"]], "x", color=color, markersize=12, markeredgewidth=2.5, zorder=5)


def draw_missing(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Where no plan fits, shaded, and how much memory the smallest plan lacks on most of these ranks."""
    missing = [row for row in rows if row["speed"] is None]
    if not missing:
        return
    last, fits = missing[-1], [row["ranks"] for row in rows if row["speed"] is not None]
    left, right = axes.get_xlim()
    axes.axvspan(left, (last["ranks"] * fits[0]) ** 0.5 if fits else right, color="0.93", zorder=0)
    text = f"nothing fits:\neach of {counted(last['ranks'], 'rank')}\nlacks {last['lacks_gibibytes']:.1f} GiB"
    axes.text(0.03, 0.97, text, transform=axes.transAxes, fontsize=8, verticalalignment="top", color="0.3")


def legend(figure: Any, panels: Any, title: str) -> None:
    """One for all panels, with what marks mean."""
    from matplotlib.lines import Line2D

    known = {}
    for axes in panels.flat:
        for line, label in zip(*axes.get_legend_handles_labels(), strict=True):
            known.setdefault(label, line)
    cross = Line2D([], [], linestyle="", marker="x", color="0.3", markersize=9, markeredgewidth=2)
    known["from here on twice the ranks give less than 1.4 times"] = cross
    figure.legend(list(known.values()), list(known), loc="outside lower center", ncols=len(known), fontsize=9)
    figure.suptitle(title)
