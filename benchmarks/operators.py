"""Interpolation, padding and pooling on tiles against plain PyTorch on an image of a tile's size: CPU ms of one thread.

    python -m benchmarks run operators --tile 256 --channels 32

                   ours: one image on a grid of two ranks          plain: on each rank by itself
                    _______________ _______________                 _______________
                   |    rank 0     |    rank 1     |               |               |
                   |    tile px    |    tile px    |               |    tile px    |
                   |_______________|_______________|               |_______________|

`forward` is the call alone, `backward` that of its gradient alone; both count what the exchange of strips takes. The
time is CPU time, the least of some calls, on the rank where that is longest. Ours and plain take turns.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.common import options as declared
from benchmarks.common.charts import OTHERS, Bars, bars
from benchmarks.common.options import GRID, Option, Options, listed
from benchmarks.common.report import publish
from benchmarks.common.results import Column, spread, table
from benchmarks.common.turns import Contestant, answer_turns, take_turns
from mpi4dl.options.kinds import TEXT, integer

if TYPE_CHECKING:
    import torch

    from mpi4dl.comm import Communicator

Operator = Callable[["torch.Tensor"], "torch.Tensor"]
PASSES = ("forward", "backward")
TOLERANCE = 1e-9
OPTIONS = (
    Option("--grid", GRID, "1x2", "the grid of tiles, such as 1x2"),
    Option(
        "--tile",
        integer("a whole number of at least 8", lambda n: n >= 8),
        256,
        "height and width of a rank's tile, in pixels",
    ),
    declared.count("--channels", 32),
    declared.batch_size(1),
    Option("--channels-last", bool, False, "lay the channels of a pixel side by side"),
    Option("--operators", listed(TEXT), "", "only those with one of these in their names: bilinear,area"),
    declared.count("--iterations", 5, "calls in a turn"),
    declared.rounds(7),
)
QUICK = {"tile": 8, "channels": 2, "iterations": 1, "rounds": 1}
COLUMNS = [Column("", "operator")]
for each in PASSES:
    COLUMNS += [Column(f"{each} {who}", f"{who}_{each}_ms", 2) for who in ("plain", "ours")]
    COLUMNS.append(Column(f"{each} ratio", f"{each}_ratio", 2, ends=True))


def check(options: Options) -> str | None:
    if len(options.grid) != 2 or math.prod(options.grid) < 2:
        return f"--grid {options.grid}: it takes two tiles or more, such as 1x2"
    return None if operators(options.operators) else f"--operators: no name has one of {options.operators}"


def operators(words: Sequence[str] = ("",)) -> dict[str, Operator]:
    """Operators by name: those with one of these words in it."""
    from torch.nn import functional as F

    def resize(mode: str, **options: Any) -> Operator:
        return lambda x: F.interpolate(x, mode=mode, **options)

    def resize_to(mode: str, factor: float, **options: Any) -> Operator:
        """To a given size that no short period leads to."""
        return lambda x: F.interpolate(x, [int(n * factor) + 1 for n in x.shape[-2:]], mode=mode, **options)

    def pad(mode: str) -> Operator:
        return lambda x: F.pad(x, (3, 3, 3, 3), mode=mode)

    found: dict[str, Operator] = {}
    for mode in ("nearest", "nearest-exact", "bilinear", "bicubic", "area"):
        found |= {f"{mode} x{factor}": resize(mode, scale_factor=factor) for factor in (2, 3, 1.5, 0.5)}
        found |= {f"{mode} to x{factor} + 1": resize_to(mode, factor) for factor in (1.5, 0.5)}
    for mode in ("bilinear", "bicubic"):
        found |= {f"{mode} corners x{f}": resize(mode, scale_factor=f, align_corners=True) for f in (2, 0.5)}
        found |= {f"{mode} antialias x{f}": resize(mode, scale_factor=f, antialias=True) for f in (1.5, 0.5, 0.3)}
        found[f"{mode} antialias to x0.5 + 1"] = resize_to(mode, 0.5, antialias=True)
    found |= {f"pad {mode}": pad(mode) for mode in ("constant", "reflect", "replicate", "circular")}
    found |= {"adaptive max to 7": lambda x: F.adaptive_max_pool2d(x, 7)}
    found |= {"adaptive average to 7": lambda x: F.adaptive_avg_pool2d(x, 7)}
    return {name: operator for name, operator in found.items() if any(word in name for word in words)}


def cpu_ms(comm: "Communicator", operator: Operator, x: Any, iterations: int) -> dict[str, float]:
    """CPU milliseconds of one call, and of its gradient, on the rank where it takes longest. Collective."""
    import torch

    from mpi4dl.parallel import spatial

    leaf = x.local if isinstance(x, spatial.SpatialTensor) else x
    gradient: torch.Tensor | None = None
    found = []
    for _ in range(iterations + 1):
        comm.barrier()
        began = time.process_time()
        y = operator(x)
        done = time.process_time()
        local = y.local if isinstance(y, spatial.SpatialTensor) else y
        gradient = torch.randn_like(local) if gradient is None else gradient
        comm.barrier()
        began_backward = time.process_time()
        torch.autograd.grad(local, leaf, gradient)
        found.append([done - began, time.process_time() - began_backward])
    least = 1e3 * torch.tensor(found[1:], dtype=torch.float64).amin(0)  # the first one is not counted
    return dict(zip(PASSES, comm.all_reduce(least, "max").tolist(), strict=True))


def work(options: Options) -> None:
    """All operators on the grid; an answer has by operator, contestant and pass the CPU milliseconds."""
    import torch

    from benchmarks.common.ranks import begin
    from mpi4dl.parallel import spatial

    comm = begin()
    torch.manual_seed(0)
    layout = torch.channels_last if options.channels_last else torch.contiguous_format
    tiled = spatial.Grid(comm, *options.grid)
    size = [options.tile * parts for parts in options.grid]
    image = torch.randn(options.batch_size, options.channels, *size, dtype=torch.float64)
    chosen = operators(options.operators)
    for name, operator in chosen.items():
        # In float32 PyTorch rounds the places of pixels, in a large image more than in a tile.
        error = float((spatial.gather(operator(spatial.shard(image, tiled))) - operator(image)).abs().max())
        wrong = f"{name} differs from PyTorch's by {error:.1e}: nothing was measured"
        comm.agree(wrong if error > TOLERANCE else None)
    tiles = spatial.shard(image.float(), tiled)
    tile = tiles.local.clone(memory_format=layout).requires_grad_()
    ours, plain = tiles.like(tile), tile.detach().clone(memory_format=layout).requires_grad_()

    def turn() -> dict[str, Any]:
        return {
            name: {who: cpu_ms(comm, operator, x, options.iterations) for who, x in (("ours", ours), ("plain", plain))}
            for name, operator in chosen.items()
        }

    answer_turns(turn, comm)


def run(options: Options) -> None:
    contestant = options.contestant(str(options.grid), math.prod(options.grid))
    take_turns([contestant], options.rounds)
    rows = summarise(contestant)
    tiles = f"tiles of {options.tile} x {options.tile} px on {contestant.name}, batch {options.batch_size}"
    layout = f"float32, channels {'last' if options.channels_last else 'first'}"
    title = f"{tiles}, {options.channels} channels, {layout}: CPU ms, 1 thread a rank"
    publish(options, title, table(rows, COLUMNS), draw(rows, title), rows)


def summarise(contestant: Contestant) -> list[dict[str, Any]]:
    """Medians over the turns, and the medians of ours over plain within a turn."""
    rows = []
    for name in contestant.answers[0]:
        turns = contestant.of(name)
        row: dict[str, Any] = {"operator": name}
        for part in PASSES:
            for who in ("ours", "plain"):
                row |= spread(f"{who}_{part}_ms", [turn[who][part] for turn in turns])
            row |= spread(f"{part}_ratio", [turn["ours"][part] / turn["plain"][part] for turn in turns])
        rows.append(row)
    return rows


def draw(rows: list[dict[str, Any]], title: str) -> Any:
    """The ratios of both passes to plain PyTorch's, operator by operator."""
    panels = [Bars(f"{part}_ratio", f"{part}: CPU time over plain PyTorch's", baseline=1.0) for part in PASSES]
    return bars(rows, panels, title, [OTHERS] * len(rows), [row["operator"] for row in rows])
