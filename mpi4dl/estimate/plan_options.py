"""The options of the command `plan` beside those of a training."""

from dataclasses import dataclass

from mpi4dl.options.declare import option, same_as
from mpi4dl.options.kinds import BOOLEAN, BYTES, COUNT, NAME, choice, optional


@dataclass(frozen=True)
class Shown:
    """Options of the overview."""

    timeline: str | None = option(
        None,
        "file for a drawing of the timeline of a step, FILE.png or FILE.txt; none: no file",
        optional(NAME),
        flag_only=True,
        brief="FILE.png or FILE.txt for the timeline of a step",
    )


@dataclass(frozen=True)
class Searched:
    """The search for the fastest plan."""

    search: bool = option(
        False,
        "search for the fastest plans for --ranks ranks, instead of showing one plan; --ranks alone does the same",
        BOOLEAN,
        flag_only=True,
        brief="show the fastest of all plans for --ranks",
    )
    ranks: int | None = option(
        None,
        "number of ranks of the search",
        optional(COUNT),
        flag_only=True,
        brief="number of ranks of the search",
        known_as=same_as("n np gpus devices num-gpus world-size nproc"),
    )
    ranks_per_node: int | None = option(
        None,
        "number of ranks on a node, within which ranks share features; none: all",
        optional(COUNT),
        flag_only=True,
    )
    memory: int | None = option(
        None,
        "memory of each rank, such as 4GiB; none: no limit",
        optional(BYTES),
        flag_only=True,
        brief="how much memory each rank has, such as 4GiB",
        known_as=same_as("memory-per-gpu gpu-memory max-memory"),
    )


@dataclass(frozen=True)
class OnMachine:
    """Another machine, and what is known of computation there."""

    machine: str | None = option(
        None,
        "TOML file that describes the machine, as `mpi4dl doctor --save` writes it; none: this one",
        optional(NAME),
        flag_only=True,
    )
    timings: str | None = option(
        None,
        "file of the times of the model's layers, made elsewhere by --time-only; none: timed here, or by the machine's "
        "rates",
        optional(NAME),
        flag_only=True,
    )
    time_only: str | None = option(
        None, "time the model's layers on small tiles, write them to this file, and end", optional(NAME), flag_only=True
    )
    scaling: str | None = option(
        None,
        "curves of the fastest plans from few ranks to --ranks: strong, of the same batch, or weak, whose batch grows "
        "with the ranks, as a table and as scaling-strong.png or scaling-weak.png; none: no curves",
        optional(choice("strong", "weak")),
        flag_only=True,
    )
