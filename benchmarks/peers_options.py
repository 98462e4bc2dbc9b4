"""The flags of benchmarks.peers: who trains what, on how many ranks."""

import argparse
from pathlib import Path
from typing import NamedTuple

from benchmarks.allocators import HELP, environments
from benchmarks.turns import numbers

DESCRIPTION = "Pipelines and replicas against torch.distributed's: images/s, CPU time, work and memory."
TRANSFORMER = "transformer"
PIPELINES, REPLICAS = ("gpipe", "1f1b", "interleaved", "zero-bubble"), ("DDP", "FSDP2")
METHODS = PIPELINES + REPLICAS
ENGINE, GLOO, BACKEND = "engine", "gloo", "backend"
SIDES = (GLOO, BACKEND, ENGINE)
CHUNKS = 2
TITLES = {"amoebanetd": "AmoebaNet-D", TRANSFORMER: "transformer"}
OPTIONS = {"amoebanetd": {"num_layers": 6, "num_filters": 48}, TRANSFORMER: {"num_layers": 14, "features": 256}}
QUICK_OPTIONS = {"amoebanetd": {"num_layers": 3, "num_filters": 8}, TRANSFORMER: {"num_layers": 6, "features": 16}}
QUICK = {"size": 32, "batch_size": 8, "microbatches": 4, "steps": 1, "rounds": 1}


class Contest(NamedTuple):
    """How a contestant trains: by which schedule or kind of replicas, and whose. No method: plain PyTorch."""

    method: str
    side: str

    def __str__(self) -> str:
        return f"{self.method}, {self.side}" if self.method else self.side


PLAIN = Contest("", "plain PyTorch")


class Case(NamedTuple):
    """What contestants are compared on."""

    model: str
    ranks: int


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=DESCRIPTION)
    parser.add_argument("--models", default="amoebanetd,transformer", help=f"of {', '.join(OPTIONS)}")
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks, and of stages or replicas")
    parser.add_argument("--methods", default=",".join(METHODS), help="schedules, and kinds of replicas")
    parser.add_argument(
        "--sides",
        default=",".join(SIDES),
        help="gloo and backend: torch.distributed over gloo, and over ours; engine: ours",
    )
    parser.add_argument("--num-layers", type=int, help="instead of 6 of amoebanetd and 14 of the transformer")
    parser.add_argument("--width", type=int, help="filters of amoebanetd (48) or features of the transformer (256)")
    parser.add_argument("--size", type=int, default=128, help="height and width of the images, in pixels")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--microbatches", type=int, default=8, help="of a batch")
    parser.add_argument("--allocators", default="keep", help=HELP)
    parser.add_argument(
        "--age", type=int, default=0, help="steps before the first turn: memory grows in the first ones"
    )
    parser.add_argument("--steps", type=int, default=2, help="training steps in a turn")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each contestant")
    parser.add_argument("--quick", action="store_true", help="tiny models and one round, to see that it works")
    parser.add_argument("--out", type=Path, default=Path("results/peers"), help="how names of .json and .png begin")
    parser.add_argument("--allocator", default="default", help=argparse.SUPPRESS)
    parser.add_argument("--counts", help=argparse.SUPPRESS)
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    if parser.parse_args(argv).quick:
        parser.set_defaults(**QUICK)
    options = parser.parse_args(argv)
    for name in ("size", "batch_size", "microbatches", "steps", "rounds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}, but must be at least 1")
    for name, known in (("models", tuple(OPTIONS)), ("methods", METHODS), ("sides", SIDES)):
        unknown = [word for word in getattr(options, name).split(",") if word not in known]
        if unknown:
            parser.error(f"--{name} {','.join(unknown)}: choose of {', '.join(known)}")
    try:
        ranks = numbers(options.ranks)
        environments(options.allocators)
    except ValueError as problem:
        parser.error(f"--ranks {options.ranks} --allocators {options.allocators}: {problem}")
    if min(ranks) < 2:
        parser.error(f"--ranks {options.ranks}: peers share out what at least 2 ranks have")
    for count in ranks:
        if options.microbatches % count or options.batch_size % options.microbatches:
            parser.error(
                f"--batch-size {options.batch_size} --microbatches {options.microbatches} --ranks {count}: ranks must "
                "divide the microbatches, and these the batch, since torch.distributed counts unequal parts alike"
            )
    return options


def cases(options: argparse.Namespace) -> list[Case]:
    return [Case(model, ranks) for model in options.models.split(",") for ranks in numbers(options.ranks)]


def contests(options: argparse.Namespace) -> list[Contest]:
    """Plain PyTorch, then side by side all that train alike."""
    sides = options.sides.split(",")
    return [PLAIN, *(Contest(method, side) for method in options.methods.split(",") for side in sides)]


def model_options(options: argparse.Namespace, model: str) -> dict[str, int]:
    """What the model is built with."""
    chosen = dict((QUICK_OPTIONS if options.quick else OPTIONS)[model])
    layers, width = chosen
    flags = {layers: options.num_layers, width: options.width}
    return chosen | {name: value for name, value in flags.items() if value is not None}


def num_stages(contest: Contest, ranks: int) -> int:
    if contest.method not in PIPELINES:
        return 1
    return ranks * (CHUNKS if contest.method == "interleaved" else 1)


def title(options: argparse.Namespace, case: Case) -> str:
    """What was trained on how many ranks."""
    settings = ", ".join(f"{name} {value}" for name, value in model_options(options, case.model).items())
    batch = f"batch {options.batch_size} of {options.size} px in {options.microbatches} microbatches"
    return f"{TITLES[case.model]} ({settings}), {batch}, {case.ranks} ranks of one thread"
