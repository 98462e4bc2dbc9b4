"""The options of the command `plan` beside those of a training."""

from dataclasses import dataclass, replace
from functools import partial

from mpi4dl.options.declare import option, same_as
from mpi4dl.options.kinds import BOOLEAN, BYTES, COUNT, COUNTS, NAME, POSITIVE, choice, optional

flag = partial(option, flag_only=True)


@dataclass(frozen=True)
class Shown:
    """Options of the overview."""

    timeline: str | None = flag(
        None,
        "file for a drawing of the timeline of a step, FILE.png or FILE.txt; none: no file",
        optional(NAME),
    )


@dataclass(frozen=True)
class Searched:
    """The search for the fastest plan."""

    search: bool = flag(
        False,
        "search for the fastest plans for --ranks ranks, instead of showing one plan; --ranks alone does the same",
        BOOLEAN,
    )
    ranks: int | None = flag(
        None,
        "number of ranks of the search",
        optional(COUNT),
        brief="show the fastest of all plans for so many ranks",
        known_as=same_as("n np gpus devices num-gpus world-size nproc"),
    )
    ranks_per_node: int | None = flag(
        None,
        "number of ranks on a node, within which ranks share features; none: all",
        optional(COUNT),
    )
    memory: int | None = flag(
        None,
        "memory of each rank, such as 4GiB; none: no limit",
        optional(BYTES),
        brief="how much memory each rank has, such as 4GiB",
        known_as=same_as("memory-per-gpu gpu-memory max-memory"),
    )


@dataclass(frozen=True)
class OnMachine:
    """Another machine, and what is known of computation there."""

    machine: str | None = flag(
        None,
        "TOML file that describes the machine, as `mpi4dl doctor --save` writes it; none: this one",
        optional(NAME),
    )
    timings: str | None = flag(
        None,
        "file of the times of the model's layers, made elsewhere by --time-only; none: timed here, or by the machine's "
        "rates",
        optional(NAME),
    )
    time_only: str | None = flag(
        None, "time the model's layers on small tiles, write them to this file, and end", optional(NAME)
    )
    scaling: str | None = flag(
        None,
        "curves of the fastest plans from few ranks to --ranks: strong, of the same batch, or weak, whose batch grows "
        "with the ranks, as a table and as scaling-strong.png or scaling-weak.png; none: no curves",
        optional(choice("strong", "weak")),
    )


MEASURED = replace(
    optional(COUNTS),
    wanted="a number of plans, or lines of the table such as 2,5",
    metavar="N|N,N,...",
    switch=("3", "none"),
)


@dataclass(frozen=True)
class Measuring:
    """Short trainings by the plans that are shown."""

    measure: tuple[int, ...] | None = flag(
        None,
        "train shortly by the best N plans of the search, or by those lines of its table, such as 2,5; the flag alone: "
        "by the best 3; without a search: by the plan of the flags",
        MEASURED,
        brief="train shortly by the best N plans, to measure them",
    )
    measure_steps: int = flag(3, "measured steps of each training, after one that does not count", COUNT)
    measure_turns: int = flag(1, "trainings by each plan, in turn with the others", COUNT)
    measure_limit: float = flag(600.0, "seconds of each training, its start included", POSITIVE)
    measure_folder: str = flag(
        "results/measured",
        "folder of the measurements; plans that are measured there are not run again",
        NAME,
    )
