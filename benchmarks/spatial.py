"""Spatial parallelism against plain PyTorch: images/s and peak memory per rank, with the same number of cores in all.

    python -m benchmarks.spatial --model resnet50 --size 1024 --grids 1x2,2x2 --cores 2
    python -m benchmarks.spatial --model unet3d --size 96x96x96 --grids 1x1x2,2x1x1,2x2x1

Every grid is a job of its own under mpirun; they and plain PyTorch in one process take turns. Memory is the peak of the
process (of a rank: the largest), weights, gradients and all, above one that has imported everything; CPU time and work
are those of `mpi4dl.sweeps.meter`. What a user sees after some steps, and with other allocators of memory:

    python -m benchmarks.spatial --allocators default,keep,tcmalloc,jemalloc --age 50
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.allocators import HELP, environments, least_memory, use, with_each
from benchmarks.report import between, error_bars, publish, pyplot, spread, table
from benchmarks.turns import Contestant, answer_turns, median, on_grids, plain_for, ratios, sides, take_turns

PLAIN = "plain"
MEDIANS = ("cpu_seconds_per_image", "work_seconds_per_image", "peak_bytes")


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.spatial", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="resnet50", help="a model of mpi4dl.models or torchvision")
    parser.add_argument("--model-options", default="", help="keyword arguments of the model, such as num_filters=16")
    parser.add_argument("--size", default="1024", help="of all sides of the images, or of each: 96x96x64")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--grids", default="1x2,2x1,2x2", help="grids of tiles, such as 1x2,2x2")
    parser.add_argument("--cores", type=int, default=2, help="threads of plain PyTorch; the ranks share as many")
    parser.add_argument("--steps", type=int, default=1, help="training steps in a turn")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each contestant")
    parser.add_argument("--allocators", default="keep", help=HELP)
    parser.add_argument(
        "--age", type=int, default=0, help="steps before the first turn: memory grows in the first hundreds"
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path, default=Path("results/spatial"), help="where to write .json and .png")
    parser.add_argument("--allocator", default="default", help=argparse.SUPPRESS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    try:
        environments(options.allocators)
    except ValueError as problem:
        parser.error(f"--allocators {problem}")
    try:
        size, grids = sides(options.size), [sides(grid) for grid in options.grids.split(",")]
    except ValueError:
        parser.error(
            f"--size {options.size} --grids {options.grids}: write them as 1024 and 1x2,2x2, or 96x96x64, 2x2x1"
        )
    if len({len(grid) for grid in grids}) > 1 or len(size) not in (1, len(grids[0])):
        parser.error(f"--size {options.size} --grids {options.grids}: a size and grids are of the same axes")
    options.size = "x".join(map(str, size * len(grids[0]) if len(size) == 1 else size))
    return options


def model_of(options: argparse.Namespace) -> Any:
    """The model, of 10 classes; a vision transformer is made for the size of the images."""
    from mpi4dl import models
    from mpi4dl.options.kinds import KEYWORDS

    size = sides(options.size)
    own = {"image_size": size[0]} if options.model.startswith("vit_") else {}
    return models.build(options.model, 10, **own, **KEYWORDS.check(KEYWORDS.read(options.model_options)))


def loss_of(outputs: Any, targets: Any = None) -> Any:
    """Cross entropy of each image, or of each pixel; what is to be found is class 0."""
    import torch
    from torch.nn import functional as F

    shape = (outputs.shape[0], *outputs.shape[2:])
    return F.cross_entropy(outputs, torch.zeros(shape, dtype=torch.int64, device=outputs.device))


def worker(options: argparse.Namespace) -> None:
    """One contestant: a training step of plain PyTorch, or of the engine on a grid."""
    import torch

    from mpi4dl._torchvision import import_torchvision
    from mpi4dl.comm import world
    from mpi4dl.sweeps.meter import Meter

    import_torchvision()
    use(options.allocator)
    comm = None if options.worker == PLAIN else world()
    torch.set_num_threads(options.cores if comm is None else max(1, options.cores // comm.size))
    device = torch.device(options.device)
    meter = Meter(device, comm)
    step = plain_step(options, device) if comm is None else engine_step(options, device, comm)

    for _ in range(options.age):
        step()

    def turn() -> dict[str, Any]:
        found, images = meter.measure(step, options.steps), options.batch_size * options.steps
        return {
            "images_per_second": images / found["seconds"],
            "cpu_seconds_per_image": found["cpu_seconds"] / images,
            "work_seconds_per_image": found["work_seconds"] / images,
            "peak_bytes": found["peak_bytes"],
        }

    answer_turns(turn, comm)


def plain_step(options: argparse.Namespace, device: Any) -> Callable[[], Any]:
    import torch

    model = model_of(options).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    image = torch.randn(options.batch_size, 3, *sides(options.size), device=device)

    def step() -> None:
        optimizer.zero_grad()
        loss = loss_of(model(image))
        loss.backward()
        optimizer.step()
        loss.item()

    return step


def engine_step(options: argparse.Namespace, device: Any, comm: Any) -> Callable[[], Any]:
    import torch

    from mpi4dl.engine import Engine
    from mpi4dl.parallel.plan import Plan

    model, size = model_of(options).to(device), sides(options.size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    engine = Engine(model, Plan((sides(options.worker),)), optimizer, loss_of, comm=comm)
    (read,) = engine.reads(options.batch_size, size)
    tile = torch.randn(options.batch_size, 3, *(interval.length for interval in read.box.space), device=device)
    return lambda: engine.step(tile, torch.zeros(options.batch_size), size)


def main() -> None:
    options = parse(sys.argv[1:])
    if options.worker:
        worker(options)
        return
    arguments = ["-m", "benchmarks.spatial", *sys.argv[1:], "--worker"]
    contestants = with_each(
        [Contestant(PLAIN, 1, [*arguments, PLAIN]), *on_grids(options.grids, arguments)], options.allocators
    )
    take_turns(contestants, options.rounds)
    results = summarise(contestants)
    shape = options.size.replace("x", " x ")
    title = f"{options.model}, {shape} px, batch {options.batch_size}, {options.cores} cores in all"
    print(title)
    print(as_table(results))
    publish(options, {"contestants": results}, plot(results, title))


def summarise(contestants: list[Contestant]) -> list[dict[str, Any]]:
    """Medians, and the medians of the ratios to plain PyTorch with the same allocator in the same round.

    `memory_over_least` is over plain PyTorch with the allocator with which it needs least.
    """
    least, results = least_memory(contestants), []
    for contestant in contestants:
        plain = plain_for(contestant, contestants)
        speed, memory = (ratios(contestant, plain, key) for key in ("images_per_second", "peak_bytes"))
        results.append(
            {
                "name": contestant.label,
                "ranks": contestant.ranks,
                "images_per_second": median([answer["images_per_second"] for answer in contestant.answers]),
                **{key: median([answer[key] for answer in contestant.answers]) for key in MEDIANS},
                **spread("speed_ratio", speed),
                "memory_ratio": median(memory),
                "memory_over_least": median([answer["peak_bytes"] for answer in contestant.answers]) / least,
            }
        )
    return results


def as_table(results: list[dict[str, Any]]) -> str:
    head = ("ranks", "images/s", "ratio", "(min-max)", "CPU s/image", "work s/image", "peak MiB per rank", "ratio")
    rows = [("", *head, "over least")]
    for r in results:
        speed, memory = f"{r['images_per_second']:.3f}", f"{r['peak_bytes'] / 2**20:.0f}"
        over = (f"{r['speed_ratio']:.3f}", between(r, "speed_ratio"))
        cpu = (f"{r[key]:.2f}" for key in ("cpu_seconds_per_image", "work_seconds_per_image"))
        ratio = (f"{r['memory_ratio']:.3f}", f"{r['memory_over_least']:.3f}")
        rows.append((r["name"], str(r["ranks"]), speed, *over, *cpu, memory, *ratio))
    return table(rows)


def plot(results: list[dict[str, Any]], title: str) -> Any:
    """Two bar charts side by side: speed, and memory of a rank, both over plain PyTorch's."""
    figure, axes = pyplot().subplots(1, 2, figsize=(max(9.0, 1.1 * len(results)), 3.6))
    names = [f"{r['name']}\n{r['ranks']} rank{'s' if r['ranks'] > 1 else ''}" for r in results]
    colors = ["0.6" if r["name"].startswith(PLAIN) else "tab:blue" for r in results]
    for axis, key, label in ((axes[0], "speed_ratio", "images/s"), (axes[1], "memory_ratio", "peak memory of a rank")):
        bars = axis.bar(names, [r[key] for r in results], color=colors)
        axis.bar_label(bars, fmt="%.2f", label_type="center", color="white")
        axis.axhline(1.0, color="0.3", linewidth=0.8, linestyle="--")
        axis.set_ylabel(f"{label}\n(plain PyTorch = 1)")
    ends = error_bars(results, "speed_ratio")
    axes[0].errorbar(names, [r["speed_ratio"] for r in results], ends, fmt="none", ecolor="0.2", capsize=3)
    figure.suptitle(title, fontsize=11)
    return figure


if __name__ == "__main__":
    main()
