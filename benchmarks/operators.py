"""Interpolation, padding and pooling on tiles against plain PyTorch on an image of a tile's size: CPU ms of one thread.

    python -m benchmarks.operators --tile 256 --channels 32

                   ours: one image on a grid of two ranks          plain: on each rank by itself
                    _______________ _______________                 _______________
                   |    rank 0     |    rank 1     |               |               |
                   |    tile px    |    tile px    |               |    tile px    |
                   |_______________|_______________|               |_______________|

`forward` is the call alone, `backward` that of its gradient alone; both count what the exchange of strips takes. The
time is CPU time, the least of some calls, on the rank where that is longest. Ours and plain take turns.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.report import between, error_bars, publish, pyplot, spread, table
from benchmarks.turns import Contestant, answer_turns, grid_shape, median, on_grids, take_turns

if TYPE_CHECKING:
    import torch

    from mpi4dl.comm import Communicator

Operator = Callable[["torch.Tensor"], "torch.Tensor"]
PASSES = ("forward", "backward")
TOLERANCE = 1e-9


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.operators", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--grid", default="1x2", help="the grid of tiles, such as 1x2")
    parser.add_argument("--tile", type=int, default=256, help="height and width of a rank's tile, in pixels")
    parser.add_argument("--channels", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--channels-last", action="store_true", help="lay the channels of a pixel side by side")
    parser.add_argument("--operators", default="", help="only those with one of these in their names: bilinear,area")
    parser.add_argument("--iterations", type=int, default=5, help="calls in a turn")
    parser.add_argument("--rounds", type=int, default=7, help="turns")
    parser.add_argument("--out", type=Path, default=Path("results/operators"), help="where to write .json and .png")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    for name in ("channels", "batch_size", "iterations", "rounds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}, but must be at least 1")
    try:
        rows, cols = grid_shape(options.grid)
    except ValueError:
        parser.error(f"--grid {options.grid}: write it as 1x2")
    if min(rows, cols) < 1 or rows * cols < 2 or options.tile < 8:
        parser.error(f"--grid {options.grid} --tile {options.tile}: it takes two tiles or more, each of 8 px at least")
    return options


def operators(chosen: str) -> dict[str, Operator]:
    """All of them by name, or those with one of the chosen words in theirs."""
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
    words = chosen.split(",")
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


def worker(options: argparse.Namespace) -> None:
    """All operators on the grid; an answer has by operator, contestant and pass the CPU milliseconds."""
    import torch

    from mpi4dl._memory import keep_freed_memory
    from mpi4dl.comm import world
    from mpi4dl.parallel import spatial

    keep_freed_memory()
    torch.set_num_threads(1)
    comm = world()
    torch.manual_seed(0)
    layout = torch.channels_last if options.channels_last else torch.contiguous_format
    grid = spatial.Grid(comm, *grid_shape(options.grid))
    image = torch.randn(
        options.batch_size, options.channels, *(options.tile * parts for parts in grid.shape.space), dtype=torch.float64
    )
    chosen = operators(options.operators)
    for name, operator in chosen.items():
        # In float32 PyTorch rounds the places of pixels, in a large image more than in a tile.
        error = float((spatial.gather(operator(spatial.shard(image, grid))) - operator(image)).abs().max())
        wrong = f"{name} differs from PyTorch's by {error:.1e}: nothing was measured"
        comm.agree(wrong if error > TOLERANCE else None)
    tiles = spatial.shard(image.float(), grid)
    tile = tiles.local.clone(memory_format=layout).requires_grad_()
    ours, plain = tiles.like(tile), tile.detach().clone(memory_format=layout).requires_grad_()

    def turn() -> dict[str, Any]:
        return {
            name: {who: cpu_ms(comm, operator, x, options.iterations) for who, x in (("ours", ours), ("plain", plain))}
            for name, operator in chosen.items()
        }

    answer_turns(turn, comm)


def main() -> None:
    options = parse(sys.argv[1:])
    if not operators(options.operators):
        raise SystemExit(f"no operator has one of {options.operators} in its name")
    if options.worker:
        worker(options)
        return
    contestants = on_grids(options.grid, ["-m", "benchmarks.operators", *sys.argv[1:], "--worker"])
    take_turns(contestants, options.rounds)
    (contestant,) = contestants
    results = summarise(contestant)
    layout = "channels last" if options.channels_last else "channels first"
    title = f"tiles of {options.tile} x {options.tile} px on {options.grid}, batch {options.batch_size}, "
    title += f"{options.channels} channels, float32, {layout}: CPU ms, 1 thread a rank"
    print(title)
    print(as_table(results))
    publish(options, {"measurements": results}, plot(results, title))


def summarise(contestant: Contestant) -> list[dict[str, Any]]:
    """Medians over the turns, and the medians of ours over plain within a turn."""
    results = []
    for name in contestant.answers[0]:
        turns = [answer[name] for answer in contestant.answers]
        row: dict[str, Any] = {"operator": name}
        for part in PASSES:
            for who in ("ours", "plain"):
                row[f"{who}_{part}_ms"] = median([turn[who][part] for turn in turns])
            row |= spread(f"{part}_ratio", [turn["ours"][part] / turn["plain"][part] for turn in turns])
        results.append(row)
    return results


def as_table(results: list[dict[str, Any]]) -> str:
    rows = [("", *(f"{part} {column}" for part in PASSES for column in ("plain", "ours", "ratio", "(min-max)")))]
    for r in results:
        cells: list[str] = []
        for part in PASSES:
            cells += [f"{r[f'{who}_{part}_ms']:.2f}" for who in ("plain", "ours")]
            cells += [f"{r[f'{part}_ratio']:.2f}", between(r, f"{part}_ratio")]
        rows.append((r["operator"], *cells))
    return table(rows)


def plot(results: list[dict[str, Any]], title: str) -> Any:
    """The ratios of both passes to plain PyTorch's, operator by operator."""
    figure, axes = pyplot().subplots(figsize=(8, 1.4 + 0.32 * len(results)))
    places = range(len(results))
    for part, shift, color in zip(PASSES, (-0.2, 0.2), ("tab:blue", "tab:orange"), strict=True):
        values = [r[f"{part}_ratio"] for r in results]
        ends = error_bars(results, f"{part}_ratio")
        bars = {"height": 0.38, "color": color, "label": part, "xerr": ends, "ecolor": "0.3"}
        axes.barh([place + shift for place in places], values, **bars)
    axes.axvline(1.0, color="0.3", linewidth=0.8, linestyle="--")
    axes.set_yticks(places, [r["operator"] for r in results])
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.set_xlabel("CPU time over plain PyTorch's")
    axes.legend(frameon=False)
    figure.suptitle(title, fontsize=9)
    return figure


if __name__ == "__main__":
    main()
