"""The flags of benchmarks.sweep, and the plans that they ask for."""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from itertools import product
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.turns import numbers, sides

if TYPE_CHECKING:
    from mpi4dl.options.config import Config
    from mpi4dl.parallel.plan import Plan

USAGE = "python -m benchmarks.sweep --ranks 4 [--grids 1x1,2x2] [--stages 1,2,4] ... [flags of mpi4dl train ...]"
DESCRIPTION = (
    "Train by every legal plan of a search space, or by those that the planner takes for the fastest, each in a job "
    "of its own, and lay images/s and memory beside what was foreseen."
)
NUMBERS = ("ranks", "stages", "bidirectional", "data", "zero", "microbatches", "chunks")
POSITIVE = ("steps", "turns", "cores", "best")


@dataclass(frozen=True)
class Space:
    """What each part of a plan may be; `grids` are those of stages."""

    ranks: tuple[int, ...]
    grids: tuple[tuple[int, ...], ...]
    stages: tuple[int, ...]
    schedules: tuple[str, ...]
    bidirectional: tuple[int, ...]
    data: tuple[int, ...]
    zero: tuple[int, ...]
    microbatches: tuple[int, ...]
    chunks: tuple[int, ...]


@dataclass(frozen=True)
class Sweep:
    """What was asked for: which plans, how they are measured, and `training`, the flags of what is trained."""

    space: Space
    best: int | None
    steps: int
    warm_up: int
    turns: int
    time_limit: float
    memory: int | None
    cores: int | None
    again: bool
    out: Path
    training: tuple[str, ...]

    def config(self, flags: Sequence[str] = ()) -> "Config":
        """What is trained by a plan of these flags; by the plan of all defaults if there are none."""
        from mpi4dl.options.config import parse as parse_training

        grid = "x".join(map(str, self.space.grids[0]))  # by which one number is a size of images, or of volumes
        return parse_training([*self.training, *(flags or ("--tiles", "x".join("1" * (grid.count("x") + 1))))])


def parse(argv: list[str]) -> Sweep:
    """What a command line asks for. Ends with exit code 2 and one sentence if that cannot be."""
    parser = argparse.ArgumentParser(usage=USAGE, description=DESCRIPTION, allow_abbrev=False)
    space = parser.add_argument_group("the search space: lists with commas, of which all legal plans are run")
    space.add_argument("--ranks", default="4", help="of how many ranks plans are, all of which they use")
    space.add_argument(
        "--grids", default="1x1,1x2,2x2", help="tiles of a stage; later stages may have another one of fewer tiles"
    )
    space.add_argument("--stages", default="1,2,4", help="into how many the model is cut")
    space.add_argument(
        "--schedules", default="1f1b", help="layer, gpipe, 1f1b, interleaved (with --chunks), zero-bubble"
    )
    space.add_argument("--bidirectional", default="0", help="GEMS: pairs of waves through a mirrored copy; 0: none")
    space.add_argument("--data", default="1,2,4", help="replicas")
    space.add_argument("--zero", default="0", help="ZeRO stages")
    space.add_argument("--microbatches", default="1,2,4", help="into how many a batch is cut, in each wave")
    space.add_argument("--chunks", default="1,2", help="stages of a rank, of the interleaved schedule")
    how = parser.add_argument_group("how they are measured")
    how.add_argument(
        "--best", type=int, help="run the so many plans that the planner takes for the fastest of all instead"
    )
    how.add_argument("--turns", type=int, default=3, help="jobs of each plan, one after the other with all other plans")
    how.add_argument("--warm-up", type=int, default=1, help="steps of a job that are not measured")
    how.add_argument("--steps", type=int, default=3, help="steps of a job that are")
    how.add_argument("--time-limit", type=float, default=600.0, help="seconds that a job may take, its start included")
    how.add_argument("--memory", help="what each rank may use at most, such as 2GiB; none: what there is")
    how.add_argument("--cores", type=int, help="which all ranks of a plan share; none: all that there are")
    how.add_argument("--retry", action="store_true", help="try again what failed, where a sweep goes on")
    how.add_argument("--out", type=Path, default=Path("results/sweep"), help="how .json, .csv and .png begin")
    given, training = parser.parse_known_args(argv)
    for name in POSITIVE:
        if getattr(given, name) is not None and getattr(given, name) < 1:
            parser.error(f"--{name} is {getattr(given, name)}, but must be at least 1")
    if given.warm_up < 0 or given.time_limit <= 0:
        parser.error(f"--warm-up {given.warm_up} --time-limit {given.time_limit:g}: not less than 0, and more than 0")
    found: dict[str, Any] = {"schedules": tuple(given.schedules.split(","))}
    try:
        found |= {name: tuple(dict.fromkeys(numbers(getattr(given, name)))) for name in NUMBERS}
        found["grids"] = tuple(dict.fromkeys(map(sides, given.grids.split(","))))
    except ValueError:
        asked = " ".join(f"--{name} {getattr(given, name)}" for name in (*NUMBERS, "grids"))
        parser.error(f"{asked}: write numbers as 1,2,4 and grids as 1x1,2x2")
    measured = {name: getattr(given, name) for name in ("best", "steps", "warm_up", "turns", "time_limit", "cores")}
    try:
        memory = None if given.memory is None else memory_of(given.memory)
        require_words(found)
        sweep = Sweep(
            Space(**found), **measured, memory=memory, again=given.retry, out=given.out, training=tuple(training)
        )
        require_plain_images(sweep)
    except ValueError as problem:
        parser.error(str(problem))
    return sweep


def require_words(found: dict[str, Any]) -> None:
    """Raise ValueError for what no plan can be: such plans would be left out, as if they were not legal."""
    from mpi4dl.parallel.plan import ZERO_STAGES
    from mpi4dl.parallel.tables.schedules import SCHEDULES

    for name in NUMBERS:
        least = 0 if name in ("bidirectional", "zero") else 1
        if min(found[name]) < least:
            raise ValueError(f"--{name} {min(found[name])}: it must be at least {least}")
    for name, known in (("schedules", tuple(SCHEDULES)), ("zero", ZERO_STAGES)):
        unknown = [each for each in found[name] if each not in known]
        if unknown:
            raise ValueError(f"--{name} {unknown[0]}: choose of {', '.join(map(str, known))}")


def memory_of(text: str) -> int:
    from mpi4dl.options.kinds import BYTES

    try:
        return int(BYTES.check(BYTES.read(text)))
    except ValueError:
        raise ValueError(f"--memory is {text!r}, but must be {BYTES.wanted}") from None


def decided_flags() -> set[str]:
    """The flags of the training that a plan decides."""
    from mpi4dl.options.config import Config
    from mpi4dl.options.declare import options_of
    from mpi4dl.parallel.plan import Plan

    options = options_of(Config)
    return {options[name].flag for name in (*Plan.options(), "accumulate")}


def require_plain_images(sweep: Sweep) -> None:
    """Raise ValueError for flags of the training that a plan decides, or that it has none for."""
    decided = decided_flags()
    for word in sweep.training:
        if word.split("=")[0] in decided:
            own = ", ".join(f"--{leaf.name}" for leaf in fields(Space))
            raise ValueError(f"{word} is for each plan to decide: say what plans may be by {own}")
    config = sweep.config()
    if config.data.text is not None or config.model.patches is not None:
        raise ValueError("sweeps train on whole images: not with --text, nor --patches")


def legal(space: Space, image_size: Sequence[int], batch_size: int) -> list["Plan"]:
    """All plans of the space that such batches can be trained by, one of those that are the same training.

    Two plans are that if they have the same ranks and table, and share out the same: the schedule of a single
    microbatch, ZeRO where no ranks share weights.
    """
    found: dict[Any, Plan] = {}
    for plan in plans_of(space):
        if any(plan.problem(ranks, image_size, batch_size) is None for ranks in space.ranks):
            with suppress(ValueError):  # no table for so many microbatches
                found.setdefault(what_is_done(plan), plan)
    return list(found.values())


def plans_of(space: Space) -> Iterator["Plan"]:
    """Everything in the space that is a plan, whatever for."""
    from mpi4dl.parallel.plan import Plan

    for stages, chunks, data in product(space.stages, space.chunks, space.data):
        for tiles in () if stages % chunks else places(space.grids, stages // chunks):
            rest = product(space.microbatches, space.schedules, space.bidirectional, space.zero)
            for microbatches, schedule, bidirectional, zero in rest:
                with suppress(ValueError):
                    yield Plan(tiles, (), data, microbatches, schedule, bidirectional, chunks, zero)


def places(grids: Sequence[tuple[int, ...]], number: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Grids of so many places: the first ones have the same, all others the same one of fewer tiles."""
    for first in grids:
        yield (first,) * number
        for later in grids:
            if prod(later) < prod(first):
                yield from ((first,) * i + (later,) * (number - i) for i in range(1, number))


def what_is_done(plan: "Plan") -> Any:
    """What plans of the same training have in common. Raises ValueError if it cannot be scheduled."""
    shared = tuple(plan.zero_at(stage) for stage in range(plan.num_stages))
    return plan.tiles, plan.data, plan.chunks, plan.num_directions, plan.num_microbatches, plan.table(), shared
