"""How memory and speed of a training step grow with the image: plain PyTorch, tiles, recomputation, streaming.

    python -m benchmarks run gigapixel --sizes 1024,2048,4096,8192,16384

    plain             one process, two threads; `recompute`: with its blocks recomputed
    tiles             1x2 tiles on two ranks of one thread; with and without recomputation
    streaming         one rank of two threads, in tiles of --tile px; batch norm by running statistics, or exact
    tiles + streaming two ranks, each streaming its own tile
    patches           two ranks share patches of 256 px, which the model encodes, for gated attention

Pixels are made when they are read, from a formula, so that no image lies on disk, and in memory only where a contestant
wants it. Memory is the peak of the rank that needs most, above a process that has imported everything
(`benchmarks.common.meter`). A contestant that would need more than --memory, four times its need at half the size, ends
there.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.common import options as declared
from benchmarks.common.charts import Lines, lines
from benchmarks.common.options import Option, Options, listed
from benchmarks.common.report import NAME, RANKS, publish
from benchmarks.common.results import MIB, Column, mebibytes, table
from benchmarks.common.turns import answer_turns, measure_once
from mpi4dl._wording import counted
from mpi4dl.options.kinds import POSITIVE, choice

PATCH = 256  # px


@dataclass(frozen=True)
class Kind:
    """How a contestant trains: on how many ranks, each with a tile, with what recomputed or streamed."""

    name: str
    ranks: int
    recompute: bool = False
    norms: str | None = None
    segments: int = 1
    patches: bool = False


KINDS = (
    Kind("plain", 1),
    Kind("plain, recompute", 1, recompute=True),
    Kind("tiles", 2),
    Kind("tiles, recompute", 2, recompute=True),
    Kind("streaming, running", 1, norms="running"),
    Kind("streaming, exact", 1, norms="exact", segments=6),
    Kind("tiles + streaming, running", 2, norms="running"),
    Kind("tiles + streaming, exact", 2, norms="exact", segments=6),
    Kind("patches, running", 2, norms="running", patches=True),
    Kind("patches, exact", 2, norms="exact", segments=6, patches=True),
)
NAMES = tuple(kind.name for kind in KINDS)
OPTIONS = (
    Option("--model", str, "small_resnet", "a model of mpi4dl.models or torchvision"),
    declared.counts("--sizes", "1024,2048,4096,8192", "heights and widths of the images, in pixels"),
    Option("--kinds", listed(choice(*NAMES), ";"), ";".join(NAMES), "contestants, with ; between them"),
    declared.count("--tile", 1024, "side of a streamed tile without its margin, in pixels"),
    Option("--pooled", bool, False, "small_resnet, streamed up to and with its pooling"),
    Option("--until", str, None, "the last module that is streamed"),
    Option("--memory", POSITIVE, 16.0, "GiB of all ranks together"),
    declared.steps(1),
    declared.CORES,
)
QUICK = {"sizes": "64,128", "tile": 64, "kinds": "plain;tiles + streaming, exact"}
COLUMNS = (
    NAME,
    RANKS,
    Column("px", "size_px"),
    mebibytes("peak MiB of a rank", "peak_bytes"),
    Column("megapixels/s", "megapixels_per_second", 2),
    Column("CPU s/megapixel", "cpu_seconds_per_megapixel", 2),
)


def work(options: Options) -> None:
    """One contestant at one size."""
    import torch

    from benchmarks.common.meter import Meter
    from benchmarks.common.ranks import begin
    from mpi4dl._torchvision import import_torchvision

    import_torchvision()
    name, size = options.worker
    kind = KINDS[NAMES.index(name)]
    comm = begin(max(1, options.cores // kind.ranks))
    meter = Meter(torch.device("cpu"), comm)
    step = step_of(options, kind, size, comm)
    step()

    def turn() -> dict[str, Any]:
        found = meter.measure(step, options.steps)
        pixels = options.steps * size**2 / 1e6
        return {
            "megapixels_per_second": pixels / found["seconds"],
            "cpu_seconds_per_megapixel": found["cpu_seconds"] / pixels,
            "peak_bytes": found["peak_bytes"],
        }

    answer_turns(turn, comm)


def step_of(options: Options, kind: Kind, size: int, comm: Any) -> Callable[[], Any]:
    """A step of the engine; on one rank, without streaming, it runs plain PyTorch on plain tensors."""
    import torch
    from torch.nn import functional as F

    from benchmarks.common.models import Waves
    from mpi4dl import models
    from mpi4dl.engine import Engine
    from mpi4dl.models.patches import GatedAttention, PatchModel, headless
    from mpi4dl.parallel.cut import split
    from mpi4dl.parallel.pipeline.local_stages import LocalStages
    from mpi4dl.parallel.plan import Plan
    from mpi4dl.parallel.streaming.leading_part import StreamOptions
    from mpi4dl.parallel.streaming.patches import PatchOptions, stream_patches

    plan, images = Plan(((1, kind.ranks),)), Waves(torch.Size((1, 3, size, size)))

    def build() -> torch.nn.Module:
        torch.manual_seed(0)
        model = models.build(options.model, 10)
        if options.pooled:
            body = list(model.children())[:-1]
            return torch.nn.Sequential(
                *body, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(64, 10)
            )
        return model

    if kind.patches:
        assert kind.norms is not None
        encoder = build()
        model = PatchModel(encoder, GatedAttention(headless(encoder, 10), 10), PATCH)
        patches = PatchOptions(max(1, options.tile**2 // PATCH**2), kind.norms, kind.segments)
        stream_patches(model, patches)
        held = LocalStages.whole(model, plan, comm, patches)
    elif kind.norms is None:
        held = LocalStages.whole(build(), plan, comm)
    else:
        counts = (max(1, size // options.tile), max(1, size // options.tile // kind.ranks))
        until = "7" if options.pooled else options.until
        stream = StreamOptions(counts, until, kind.norms, kind.segments)
        held = split(build, plan, comm, image=tuple(images.shape), stream=stream)
    optimizer = torch.optim.SGD(held.parameters(), lr=0.001)
    engine = Engine(held, plan, optimizer, F.cross_entropy, comm=comm, recompute=kind.recompute)
    (read,) = engine.reads(1, (size, size))
    tile = images.read(read.box) if kind.norms is None else images
    return lambda: engine.step([tile], torch.zeros(1, dtype=torch.int64), (size, size))


def run(options: Options) -> None:
    rows: list[dict[str, Any]] = []
    for name in options.kinds:
        kind, known = KINDS[NAMES.index(name)], 0.0
        for size in options.sizes:
            if kind.norms is None and known * kind.ranks * 4 > options.memory * 2**30:
                print(f"{name} ends: {size} px would take more than {options.memory:g} GiB", file=sys.stderr)
                break
            found = measure_once(options.contestant(f"{name}, {size} px", kind.ranks, (name, size)))
            known = found["peak_bytes"]
            rows.append({"name": name, "ranks": kind.ranks, "size_px": size, **found})
            print(f"{name}, {size} px: {known / MIB:.0f} MiB", file=sys.stderr)
    title = f"{options.model}, batch 1, {counted(options.cores, 'core')} in all"
    publish(options, title, table(rows, COLUMNS), draw(rows, title), rows)


def draw(rows: list[dict[str, Any]], title: str) -> Any:
    """Memory and speed against the side of the image, both logarithmic."""
    kinds = (("peak_bytes", "peak memory of a rank (MiB)", 1 / MIB), ("megapixels_per_second", "megapixels/s", 1.0))
    panels = [
        Lines(rows, "size_px", key, lambda r: r["name"], "side of the image (px)", label, scale=scale, log="xy")
        for key, label, scale in kinds
    ]
    return lines(panels, title)
