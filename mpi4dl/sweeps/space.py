"""The search space of a sweep: the flags that describe it, and its legal plans."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from itertools import product
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpi4dl._commands import typed
from mpi4dl.options.declare import CommandParser
from mpi4dl.options.kinds import BYTES, COUNT, COUNT_OR_ZERO, POSITIVE, SIDES, ZERO_STAGE, choice, listed, reader
from mpi4dl.parallel.tables.schedules import SCHEDULES

if TYPE_CHECKING:
    from mpi4dl.options.config import Config
    from mpi4dl.parallel.plan import Plan

USAGE = "--ranks 4 [--grids 1x1,2x2] [--stages 1,2,4] ... [flags of mpi4dl train ...]"


@dataclass(frozen=True)
class Space:
    """The values of each part of a plan; `grids` are those of stages."""

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
    """Which plans are measured, and how. `training` are flags of `mpi4dl train`."""

    space: Space
    best: int | None
    steps: int
    warm_up: int
    turns: int
    time_limit: float
    memory: int | None
    cores: int | None
    retry: bool
    out: Path
    training: tuple[str, ...]

    def config(self) -> "Config":
        """The options of the training, with the plan of all defaults."""
        from mpi4dl.options.config import parse as parse_training

        # By the number of sides of a grid, one number is a size of images or of volumes.
        return parse_training([*self.training, "--tiles", SIDES.raw([1] * len(self.space.grids[0]))])


def parse(argv: Sequence[str], description: str) -> Sweep:
    """The sweep of a command line. Raises ValueError if a flag is wrong."""
    name = typed("sweep")
    parser = CommandParser(prog=name, usage=f"{name} {USAGE}", description=description, allow_abbrev=False)
    add = parser.add_argument_group("the search space: lists with commas, of which all legal plans run").add_argument
    count, count_or_zero = reader(COUNT), reader(COUNT_OR_ZERO)
    counts, counts_or_zero = reader(listed(COUNT)), reader(listed(COUNT_OR_ZERO))
    add("--ranks", type=counts, default="4", help="numbers of ranks; a plan uses all of them")
    add(
        "--grids",
        type=reader(listed(SIDES)),
        default="1x1,1x2,2x2",
        help="tiles of a stage; later stages may have another grid of fewer tiles",
    )
    add("--stages", type=counts, default="1,2,4", help="numbers of stages")
    add("--schedules", type=reader(listed(choice(*SCHEDULES))), default="1f1b", help=", ".join(SCHEDULES))
    add("--bidirectional", type=counts_or_zero, default="0", help="GEMS: pairs of waves through a mirrored copy")
    add("--data", type=counts, default="1,2,4", help="numbers of replicas")
    add("--zero", type=reader(listed(ZERO_STAGE)), default="0", help="ZeRO stages")
    add("--microbatches", type=counts, default="1,2,4", help="microbatches of a batch, in each wave")
    add("--chunks", type=counts, default="1,2", help="stages of a rank, of the interleaved schedule")
    add = parser.add_argument_group("how they are measured").add_argument
    add("--best", type=count, help="run so many plans, those that the planner ranks first, instead of the space")
    add("--turns", type=count, default=3, help="jobs of each plan")
    add("--warm-up", type=count_or_zero, default=1, help="steps of a job before those that are measured")
    add("--steps", type=count, default=3, help="measured steps of a job")
    add("--time-limit", type=reader(POSITIVE), default=600.0, help="seconds of a job, its start included")
    add("--memory", type=reader(BYTES), help="bytes of each rank above its imports, such as 2GiB; none: no limit")
    add("--cores", type=count, help="cores that all ranks of a plan share; none: all")
    add("--retry", action="store_true", help="try failed plans again")
    add("--out", type=Path, default=Path("results/sweep"), help="how the names of .json, .csv and .png begin")
    given, training = parser.parse_known_args(argv)
    values = vars(given)
    space = Space(**{part.name: values.pop(part.name) for part in fields(Space)})
    sweep = Sweep(space, training=tuple(training), **values)
    _check(sweep)
    return sweep


def _check(sweep: Sweep) -> None:
    """Raise ValueError for flags that the plan decides, and for texts and patches."""
    config = sweep.config()  # before PyTorch is loaded, which takes seconds
    decided = decided_flags()
    for word in sweep.training:
        if word.split("=")[0] in decided:
            own = ", ".join(f"--{part.name}" for part in fields(Space))
            raise ValueError(f"{word}: each plan decides this; describe the plans by {own}")
    if config.data.text is not None or config.model.patches is not None:
        raise ValueError("a sweep trains on whole images: omit --text and --patches")


def decided_flags() -> set[str]:
    """The flags of the training that a plan decides."""
    from mpi4dl.options.config import Config
    from mpi4dl.options.declare import options_of
    from mpi4dl.parallel.plan import Plan

    options = options_of(Config)
    return {options[name].flag for name in (*Plan.options(), "accumulate")}


def legal(space: Space, image_size: Sequence[int], batch_size: int) -> list["Plan"]:
    """All plans of the space that can train such batches; of plans that are the same training, the first.

    Plans are the same training if they have the same ranks and table, and shard the same. Examples are the schedules
    of a single microbatch, and ZeRO where no ranks share weights.
    """
    found: dict[Any, Plan] = {}
    for plan in _plans(space):
        if any(plan.problem(ranks, image_size, batch_size) is None for ranks in space.ranks):
            with suppress(ValueError):  # no table for so many microbatches
                found.setdefault(training_of(plan), plan)
    return list(found.values())


def _plans(space: Space) -> Iterator["Plan"]:
    """All combinations of the space that are a plan."""
    from mpi4dl.parallel.plan import Plan

    for stages, chunks, data in product(space.stages, space.chunks, space.data):
        for tiles in () if stages % chunks else _places(space.grids, stages // chunks):
            rest = product(space.microbatches, space.schedules, space.bidirectional, space.zero)
            for microbatches, schedule, bidirectional, zero in rest:
                with suppress(ValueError):
                    yield Plan(tiles, (), data, microbatches, schedule, bidirectional, chunks, zero)


def _places(grids: Sequence[tuple[int, ...]], number: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Grids of so many places: the first ones have the same, all others the same one of fewer tiles."""
    for first in grids:
        yield (first,) * number
        for later in grids:
            if prod(later) < prod(first):
                yield from ((first,) * i + (later,) * (number - i) for i in range(1, number))


def training_of(plan: "Plan") -> Any:
    """A value that is equal for plans of the same training. Raises ValueError if the plan has no table."""
    sharded = tuple(plan.zero_at(stage) for stage in range(plan.num_stages))
    return plan.tiles, plan.data, plan.chunks, plan.num_directions, plan.num_microbatches, plan.table(), sharded
