"""The flags of benchmarks.stages: what is compared on what, as plans."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.allocators import HELP, environments
from benchmarks.turns import grid_shape

if TYPE_CHECKING:
    from mpi4dl.parallel.plan import Plan

DESCRIPTION = "Stages, tiles and mirrored copies against plain PyTorch: images/s, memory of a rank, and idle time."
SLEEP = "sleep"
CONFIGURATIONS = ("SP", *(kind + way for kind in ("", "SP+", "GEMS+", "SP+GEMS+") for way in ("LP", "PP")))
INTERLEAVED, CHUNKS = "interleaved", 2
SLEEP_PX = 8
TITLES = {"amoebanetd": "AmoebaNet-D", "resnet_v2": "ResNet-v2", SLEEP: "stages that sleep"}
OPTIONS = {"amoebanetd": {"num_layers": 3, "num_filters": 48}, "resnet_v2": {"depth": 20, "num_filters": 8}}
QUICK_OPTIONS = {"amoebanetd": {"num_layers": 3, "num_filters": 8}, "resnet_v2": {"depth": 11, "num_filters": 4}}
QUICK = {"sizes": "64", "configurations": "SP+GEMS+PP", "rounds": 1, "steps": 1}
SLEEPING = {
    "stages": 4,
    "microbatches": 8,
    "batch_size": 8,
    "steps": 1,
    "configurations": "LP,PP,GEMS+LP,GEMS+PP",
    "schedules": "gpipe,1f1b,interleaved,zero-bubble",
}
QUICK_SLEEPING = {"configurations": "PP", "schedules": "gpipe,1f1b", "rounds": 1}


class Case(NamedTuple):
    """What contestants are compared on."""

    model: str
    size_px: int


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stages", description=DESCRIPTION)
    parser.add_argument("--models", default="amoebanetd,resnet_v2", help="models of mpi4dl.models")
    parser.add_argument("--num-layers", type=int, help="of amoebanetd, instead of 3")
    parser.add_argument("--num-filters", type=int, help="of all models, instead of 48 (amoebanetd) and 8 (resnet_v2)")
    parser.add_argument("--depth", type=int, help="of resnet_v2, instead of 20")
    parser.add_argument("--sizes", default="128,256", help="heights and widths of the images, in pixels")
    parser.add_argument(
        "--configurations",
        default="LP,PP,SP+LP,SP+PP,GEMS+LP,GEMS+PP,SP+GEMS+PP",
        help=f"of {', '.join(CONFIGURATIONS)}",
    )
    parser.add_argument("--stages", type=int, default=2, help="into how many LP and PP cut the model")
    balances = ("auto", "flops", "memory", "measured")
    parser.add_argument("--balance", default="auto", choices=balances, help="of the stages")
    parser.add_argument("--tiles", default="1x2", help="grid of SP, over the first stage")
    parser.add_argument("--microbatches", type=int, default=4, help="of a batch; with GEMS half of them each way")
    parser.add_argument(
        "--schedules", default="1f1b", help="of PP; interleaved cuts twice as many stages, not for GEMS"
    )
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2, help="training steps in a turn")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each contestant")
    parser.add_argument("--allocators", default="keep", help=HELP)
    parser.add_argument(
        "--age", type=int, default=0, help="steps before the first turn: memory grows in the first ones"
    )
    parser.add_argument("--cores", type=int, default=2, help="of plain PyTorch; the ranks share as many")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--sleep", action="store_true", help="4 stages that sleep instead of --models")
    parser.add_argument("--quick", action="store_true", help="tiny models and one round, to see that it works")
    parser.add_argument("--timeline", help="FILE.png: where to draw what ranks do in a step of the first PP")
    parser.add_argument("--out", type=Path, default=Path("results/stages"), help="how names of .json and .png begin")
    parser.add_argument("--allocator", default="default", help=argparse.SUPPRESS)
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    flags = parser.parse_args(argv)
    for asked, defaults in (
        (flags.quick, QUICK),
        (flags.sleep, SLEEPING),
        (flags.quick and flags.sleep, QUICK_SLEEPING),
    ):
        if asked:
            parser.set_defaults(**defaults)
    options = parser.parse_args(argv)
    for name in ("stages", "microbatches", "batch_size", "steps", "rounds", "cores"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}, but must be at least 1")
    unknown = [name for name in options.configurations.split(",") if name not in CONFIGURATIONS]
    if unknown:
        parser.error(f"--configurations {','.join(unknown)}: choose of {', '.join(CONFIGURATIONS)}")
    if options.timeline and not (options.timeline.endswith(".png") and "PP" in options.configurations):
        parser.error(
            f"--timeline {options.timeline} --configurations {options.configurations}: it draws a .png of the first PP"
        )
    if options.sleep and cuts_images(options):
        parser.error(f"--sleep --configurations {options.configurations}: stages that sleep have no tiles, omit SP")
    if "GEMS" in options.configurations and options.microbatches % 2:
        parser.error(f"--microbatches {options.microbatches} cannot be halved for GEMS: use an even number")
    try:
        environments(options.allocators)
    except ValueError as problem:
        parser.error(f"--allocators {problem}")
    try:
        cases(options), grid_shape(options.tiles)
    except ValueError:
        parser.error(f"--sizes {options.sizes} --tiles {options.tiles}: write them as 128,256 and 1x2")
    return options


def cuts_images(options: argparse.Namespace) -> bool:
    return any("SP" in name.split("+") for name in options.configurations.split(","))


def cases(options: argparse.Namespace) -> list[Case]:
    if options.sleep:
        return [Case(SLEEP, SLEEP_PX)]
    return [Case(model, int(size)) for model in options.models.split(",") for size in options.sizes.split(",")]


def plans(options: argparse.Namespace) -> "dict[str, Plan]":
    """A plan for each configuration, and for each schedule where it has a choice. Raises ValueError."""
    from mpi4dl.parallel.plan import Plan

    found: dict[str, Plan] = {}
    schedules = options.schedules.split(",")
    for name in options.configurations.split(","):
        words = name.split("+")
        gems, pipelined = "GEMS" in words, "PP" in words
        stages = options.stages if pipelined or "LP" in words else 1
        tiles = [grid_shape(options.tiles) if "SP" in words else (1, 1)] + [(1, 1)] * (stages - 1)
        offered = [s for s in schedules if not (gems and s == INTERLEAVED)] if pipelined else ["layer"]
        if not offered:
            raise ValueError(f"{name} --schedules {options.schedules}: GEMS needs another than {INTERLEAVED}")
        for schedule in offered:
            chunks = CHUNKS if schedule == INTERLEAVED else 1
            label = f"{name} {schedule}" if pipelined and len(schedules) > 1 else name
            microbatches, pairs = (options.microbatches // 2, 1) if gems else (options.microbatches, 0)
            found[label] = Plan(tuple(tiles), (), 1, microbatches, schedule, pairs, chunks)
    return found


def model_options(options: argparse.Namespace, model: str) -> dict[str, int]:
    """What the model is built with: our small ones, unless flags say otherwise; of other models nothing but flags."""
    chosen = dict((QUICK_OPTIONS if options.quick else OPTIONS).get(model, {}))
    flags = {"num_layers": options.num_layers, "num_filters": options.num_filters, "depth": options.depth}
    return chosen | {k: v for k, v in flags.items() if v is not None and (k in chosen or not chosen)}


def title(options: argparse.Namespace, model: str, most_ranks: int) -> str:
    """What was trained on how many cores."""
    numbers = ", ".join(f"{name} {value}" for name, value in model_options(options, model).items())
    what = TITLES.get(model, model) + (f" ({numbers})" if numbers and model != SLEEP else "")
    batch = f"batch {options.batch_size} in {options.microbatches} microbatches"
    where = f"up to {most_ranks} ranks on {options.cores} core{'s' if options.cores > 1 else ''} in all"
    tiles = f", SP tiles {options.tiles}" if cuts_images(options) else ""
    return f"{what}, {batch}, {options.stages} stages{tiles}, {options.device}, {where}"
