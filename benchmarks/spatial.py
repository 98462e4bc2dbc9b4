"""Spatial parallelism against plain PyTorch: images/s and peak memory per rank, with the same number of cores in all.

    python -m benchmarks run spatial --model resnet50 --size 1024 --grids 1x2,2x2 --cores 2
    python -m benchmarks run spatial --model unet3d --size 96x96x96 --grids 1x1x2,2x1x1,2x2x1
    python -m benchmarks run spatial --model amoebanetd --size 512 --grids 2x2 --behind 1 --cores 1

Each grid is a job; they and plain PyTorch in one process take turns. Memory is the peak of the process (of a rank: the
largest), weights, gradients and all, above one that has imported everything; CPU time and work are those of
`benchmarks.common.meter`. All keep freed memory, as the training command does.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.common import options as declared
from benchmarks.common.charts import OTHERS, PLAIN, Bars, bars
from benchmarks.common.options import GRID, Option, Options
from benchmarks.common.report import NAME, RANKS, publish
from benchmarks.common.results import Column, mebibytes, table
from benchmarks.common.turns import answer_turns, beside_plain, take_turns
from mpi4dl._wording import counted

OPTIONS = (
    Option("--model", str, "resnet50", "a model of mpi4dl.models or torchvision"),
    Option("--model-options", str, "", "keyword arguments of the model, such as num_filters=16"),
    Option("--size", GRID, "1024", "of all sides of the images, or of each: 96x96x64"),
    declared.batch_size(1),
    declared.grids("1x2,2x1,2x2"),
    Option("--behind", int, 0, "pipeline stages without tiles behind that on tiles; microbatches of one image"),
    declared.CORES,
    declared.steps(1),
    declared.rounds(7),
    declared.DEVICE,
)
QUICK = {"model": "small_resnet", "size": "64", "grids": "1x2", "rounds": 1}
COLUMNS = (
    NAME,
    RANKS,
    Column("images/s", "images_per_second", 3),
    Column("ratio", "speed_ratio", 3, ends=True),
    Column("CPU s/image", "cpu_seconds_per_image", 2),
    Column("work s/image", "work_seconds_per_image", 2),
    mebibytes("peak MiB per rank", "peak_bytes"),
    Column("ratio", "memory_ratio", 3),
)


def check(options: Options) -> str | None:
    axes = {len(grid) for grid in options.grids}
    if len(axes) > 1 or len(options.size) not in (1, *axes):
        return "--size, --grids: a size and all grids have the same axes"
    return None


def size_of(options: Options) -> tuple[int, ...]:
    axes = len(options.grids[0])
    return options.size * axes if len(options.size) == 1 else options.size


def model_of(options: Options) -> Any:
    """The model, of 10 classes; a vision transformer is made for the size of the images."""
    from mpi4dl import models
    from mpi4dl.options.kinds import KEYWORDS

    own = {"image_size": size_of(options)[0]} if options.model.startswith("vit_") else {}
    return models.build(options.model, 10, **own, **KEYWORDS.check(KEYWORDS.read(options.model_options)))


def loss_of(outputs: Any, targets: Any = None) -> Any:
    """Cross entropy of each image, or of each pixel, with class 0."""
    import torch
    from torch.nn import functional as F

    shape = (outputs.shape[0], *outputs.shape[2:])
    return F.cross_entropy(outputs, torch.zeros(shape, dtype=torch.int64, device=outputs.device))


def work(options: Options) -> None:
    """One contestant: training steps of plain PyTorch, or of the engine on a grid."""
    import torch

    from benchmarks.common.meter import Meter
    from benchmarks.common.ranks import image_turn
    from mpi4dl._memory import keep_freed_memory
    from mpi4dl._torchvision import import_torchvision
    from mpi4dl.comm import world

    import_torchvision()
    keep_freed_memory()
    comm = world() if options.worker else None
    torch.set_num_threads(options.cores if comm is None else max(1, options.cores // comm.size))
    device = torch.device(options.device)
    meter = Meter(device, comm)
    step = plain_step(options, device) if comm is None else engine_step(options, device, comm)
    answer_turns(lambda: image_turn(meter, step, options.steps, options.batch_size), comm)


def plain_step(options: Options, device: Any) -> Callable[[], Any]:
    import torch

    from benchmarks.common.ranks import loop

    model = model_of(options).to(device)
    image = torch.randn(options.batch_size, 3, *size_of(options), device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return loop(model, optimizer, (image, torch.zeros(options.batch_size)), loss_of=loss_of)


def engine_step(options: Options, device: Any, comm: Any) -> Callable[[], Any]:
    import torch

    from mpi4dl.engine import Engine
    from mpi4dl.parallel.cut import split
    from mpi4dl.parallel.plan import Plan

    size, whole = size_of(options), ((1,) * len(options.worker),) * options.behind
    plan = Plan((tuple(options.worker), *whole), microbatches=options.batch_size if whole else 1)
    model = split(partial(model_of, options), plan, comm, image=(1, 3, *size)) if whole else model_of(options)
    optimizer = torch.optim.SGD(model.to(device).parameters(), lr=0.01)
    engine = Engine(model, plan, optimizer, loss_of, comm=comm)
    tiles = [
        torch.randn(read.box.batch.length, 3, *(interval.length for interval in read.box.space), device=device)
        for read in engine.reads(options.batch_size, size)
    ]
    return lambda: engine.step(tiles, torch.zeros(options.batch_size), size)


def run(options: Options) -> None:
    tiled = [options.contestant(str(grid), math.prod(grid) + options.behind, grid) for grid in options.grids]
    contestants = [options.contestant("plain", 1), *tiled]
    take_turns(contestants, options.rounds)
    rows = [beside_plain(contestant, contestants) for contestant in contestants]
    size = " x ".join(map(str, size_of(options)))
    title = f"{options.model}, {size} px, batch {options.batch_size}, {counted(options.cores, 'core')} in all"
    publish(options, title, table(rows, COLUMNS), draw(rows, title), rows)


def draw(rows: list[dict[str, Any]], title: str) -> Any:
    """Speed, and memory of a rank, both over plain PyTorch's."""
    panels = [
        Bars("speed_ratio", "images/s, plain PyTorch = 1", baseline=1.0),
        Bars("memory_ratio", "peak memory of a rank, plain PyTorch = 1", baseline=1.0),
    ]
    return bars(rows, panels, title, [PLAIN if row["name"].startswith("plain") else OTHERS for row in rows])
