"""How memory and speed of a training step grow with the image: plain PyTorch, tiles, recomputation, streaming.

    python -m benchmarks.gigapixel --sizes 1024,2048,4096,8192,16384

    plain             one process, two threads; `recompute`: with its blocks recomputed
    tiles             1x2 tiles on two ranks of one thread; with and without recomputation
    streaming         one rank of two threads, in visits of --tile px; batch norm by running statistics, or exact
    tiles + streaming two ranks, each visiting its own tile
    patches           two ranks share patches of 256 px, which the model encodes, for gated attention

Pixels are made when they are read, from a formula, so that no image lies on disk, nor in memory but where a contestant
wants it so. Memory is the peak of the rank that needs most, above a process that has imported everything
(`mpi4dl.sweeps.meter`).
A contestant that would need more than --memory, four times what it needed at half the size, ends there.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import publish, pyplot, table
from benchmarks.turns import Contestant, answer_turns, measure_once

MIB = 2**20
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
COLOURS = dict(
    zip((kind.name for kind in KINDS), ("0.3", "0.6", *(f"C{i}" for i in (0, 1, 2, 3, 4, 5, 6, 9))), strict=True)
)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gigapixel", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="small_resnet", help="a model of mpi4dl.models or torchvision")
    parser.add_argument("--sizes", default="1024,2048,4096,8192", help="heights and widths of the images, in pixels")
    parser.add_argument("--kinds", default=";".join(k.name for k in KINDS), help="contestants, with ; between them")
    parser.add_argument("--tile", type=int, default=1024, help="side of what a visit owns, in pixels")
    parser.add_argument("--pooled", action="store_true", help="small_resnet, streamed up to and with its pooling")
    parser.add_argument("--until", default=None, help="the last module that is streamed")
    parser.add_argument("--memory", type=float, default=16.0, help="GiB of all ranks together")
    parser.add_argument("--steps", type=int, default=1, help="training steps that are measured, after one that is not")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("results/gigapixel"), help="where to write .json and .png")
    parser.add_argument("--worker", nargs=2, metavar=("KIND", "SIZE"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    unknown = set(options.kinds.split(";")) - {kind.name for kind in KINDS}
    if unknown:
        parser.error(f"--kinds {', '.join(sorted(unknown))}: choose of {'; '.join(kind.name for kind in KINDS)}")
    return options


def worker(options: argparse.Namespace) -> None:
    """One contestant at one size."""
    import torch

    from mpi4dl._memory import keep_freed_memory
    from mpi4dl._torchvision import import_torchvision
    from mpi4dl.comm import world
    from mpi4dl.sweeps.meter import Meter

    import_torchvision()
    keep_freed_memory(True)
    name, size = options.worker[0], int(options.worker[1])
    kind = next(kind for kind in KINDS if kind.name == name)
    comm = world()
    torch.set_num_threads(max(1, options.cores // comm.size))
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


def step_of(options: argparse.Namespace, kind: Kind, size: int, comm: Any) -> Callable[[], Any]:
    """A step of the engine; on one rank, without streaming, it runs plain PyTorch on plain tensors."""
    import torch
    from torch.nn import functional as F

    from benchmarks.waves import Waves
    from mpi4dl import models
    from mpi4dl.engine import Engine
    from mpi4dl.models.patches import GatedAttention, PatchModel, headless
    from mpi4dl.parallel.pipeline.local_stages import LocalStages, split
    from mpi4dl.parallel.plan import Plan
    from mpi4dl.parallel.streaming.leading_part import StreamOptions
    from mpi4dl.parallel.streaming.patches import BagOptions, visit_patches

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
        bags = BagOptions(max(1, options.tile**2 // PATCH**2), kind.norms, kind.segments)
        visit_patches(model, bags)
        held = LocalStages.whole(model, plan, comm, bags)
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


def main() -> None:
    options = parse(sys.argv[1:])
    if options.worker:
        worker(options)
        return
    results: list[dict[str, Any]] = []
    for name in options.kinds.split(";"):
        kind = next(kind for kind in KINDS if kind.name == name)
        known = 0.0
        for size in map(int, options.sizes.split(",")):
            streams = kind.norms is not None
            if not streams and known * kind.ranks * 4 > options.memory * 2**30:
                print(f"{name} ends: {size} px would take more than {options.memory:g} GiB", file=sys.stderr)
                break
            arguments = ["-m", "benchmarks.gigapixel", *sys.argv[1:], "--worker", name, str(size)]
            found = measure_once(Contestant(f"{name}, {size} px", kind.ranks, arguments))
            known = found["peak_bytes"]
            results.append({"name": name, "ranks": kind.ranks, "size_px": size, **found})
            print(f"{name}, {size} px: {known / MIB:.0f} MiB", file=sys.stderr)
    print(as_table(results))
    publish(
        options, {"measurements": results}, plot(results, f"{options.model}, batch 1, {options.cores} cores in all")
    )


def as_table(results: list[dict[str, Any]]) -> str:
    rows = [("", "ranks", "px", "peak MiB of a rank", "megapixels/s", "CPU s/megapixel")]
    for r in results:
        figures = (f"{r['peak_bytes'] / MIB:.0f}", f"{r['megapixels_per_second']:.2f}")
        rows.append((r["name"], str(r["ranks"]), str(r["size_px"]), *figures, f"{r['cpu_seconds_per_megapixel']:.2f}"))
    return table(rows)


def plot(results: list[dict[str, Any]], title: str) -> Any:
    """Memory and speed against the side of the image, both logarithmic."""
    figure, axes = pyplot().subplots(1, 2, figsize=(11, 4.6))
    for axis, key, label, scale in (
        (axes[0], "peak_bytes", "peak memory of a rank (MiB)", 1 / MIB),
        (axes[1], "megapixels_per_second", "megapixels/s", 1.0),
    ):
        for name in dict.fromkeys(r["name"] for r in results):
            its = [r for r in results if r["name"] == name]
            sizes, values = [r["size_px"] for r in its], [r[key] * scale for r in its]
            axis.plot(sizes, values, marker="o", label=name, color=COLOURS[name])
        ticks = sorted({r["size_px"] for r in results})
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(ticks, [str(tick) for tick in ticks])
        axis.set_xlabel("side of the image (px)")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.suptitle(title, fontsize=11)
    figure.tight_layout()
    return figure


if __name__ == "__main__":
    main()
