"""The planning command: `python -m mpi4dl.plan --stages 4 --microbatches 8`, with the flags of `mpi4dl.train`.

It says what training by these flags would be, without MPI, and without making the model's values.
"""

import shlex
import sys
from argparse import ArgumentParser, BooleanOptionalAction
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mpi4dl.options.config import Config, ConfigError, to_toml
from mpi4dl.options.declare import option, parse_options
from mpi4dl.options.kinds import BOOLEAN, BYTES, COUNT, NAME, POSITIVE, optional
from mpi4dl.options.words import spelling

if TYPE_CHECKING:
    from mpi4dl.forecast.overview import Overview
    from mpi4dl.trainer.images import Images
    from mpi4dl.trainer.texts import Texts

USAGE = "python -m mpi4dl.plan [--timeline FILE] [--rank-gflops X] [--config FILE] [--FLAG VALUE ...]"
DESCRIPTION = (
    "Show what training by these flags would be: stages, tiles, messages, memory and a timeline. No MPI needed."
)
USER_ERROR = 2


@dataclass(frozen=True)
class Shown:
    timeline: str | None = option(
        None,
        "where to draw the timeline of a step, as FILE.png or FILE.txt; none: nowhere",
        optional(NAME),
        flag_only=True,
    )
    rank_gflops: float = option(
        50.0, "what a rank is assumed to compute per second, in GFLOP, unless it is measured", POSITIVE, flag_only=True
    )


@dataclass(frozen=True)
class Searched:
    search: bool = option(
        False,
        "show the fastest of all plans for --ranks ranks, instead of the one that flags name, as --ranks alone does",
        BOOLEAN,
        flag_only=True,
    )
    ranks: int | None = option(None, "for how many ranks to search", optional(COUNT), flag_only=True)
    ranks_per_node: int | None = option(
        None,
        "how many of them share a node, as those who share features are to; none: all",
        optional(COUNT),
        flag_only=True,
    )
    memory: int | None = option(
        None, "how much memory each rank has, such as 4GiB; none: any", optional(BYTES), flag_only=True
    )


@dataclass(frozen=True)
class PlanConfig(Config):
    shown: Shown = field(default_factory=Shown)
    searched: Searched = field(default_factory=Searched)


def main(argv: Sequence[str] | None = None) -> None:
    """Print what the command line `argv` would train; whatever is wrong with it ends in one message."""
    try:
        show(list(sys.argv[1:] if argv is None else argv))
    except (ValueError, OSError) as problem:
        print(f"mpi4dl: {spelling(PlanConfig)(str(problem))}", file=sys.stderr)
        sys.exit(USER_ERROR)


def show(argv: Sequence[str]) -> None:
    """Print the overview, and draw its timeline. Raises ValueError."""
    config = parse_options(PlanConfig, argv, USAGE, DESCRIPTION)
    if config.run.print_config:
        print(to_toml(Config(**{section.name: getattr(config, section.name) for section in fields(Config)})), end="")
        return
    if config.searched.memory is not None and config.searched.ranks is None:
        raise ConfigError("--memory is what each of --ranks ranks has: say how many there are")
    timeline = None if config.shown.timeline is None else Path(config.shown.timeline)
    if timeline is not None:
        require_drawable(timeline)
    if config.searched.search or config.searched.ranks is not None:
        print("\n".join(searched(config, training_flags(argv))))
        return
    found = planned(config, training_flags(argv))
    print(spelling(PlanConfig)(str(found)))
    if timeline is not None:
        draw(found, timeline)


def planned(config: PlanConfig, flags: Sequence[str]) -> "Overview":
    """The overview of what `flags` would train, of which `config` was made.

    Raises ValueError for what the training would refuse, as far as that can be seen without its ranks.
    """
    import torch
    from torch import nn

    from mpi4dl.forecast.dry_run import look_ahead, require_rules
    from mpi4dl.options import build
    from mpi4dl.options.models import check_text, without_rules
    from mpi4dl.options.optimizers import build_optimizer, build_schedule
    from mpi4dl.parallel.costs.prices import Clockwork
    from mpi4dl.trainer.visiting import stream_of

    plan = build.build_plan(config)
    check_text(config, plan)
    images = opened(config)
    num_classes, channels = images.number_of_classes(config), images.channels
    num_batches = len(images.loaders(config, lambda _: [], lambda _: [])[0])
    optimizer = build_optimizer(config, [nn.Parameter(torch.zeros(2, 2))])
    build_schedule(config, optimizer).begin(build.number_of_steps(config, num_batches))
    with without_rules(config):
        require_rules(config, plan, num_classes, channels)
    with as_a_rank(config, plan.num_ranks) as device:
        stream = stream_of(config, plan, num_classes, channels, torch.device(device))
        return look_ahead(
            config,
            plan,
            num_classes,
            channels,
            balance=config.parallel.balance,
            device=device,
            clockwork=replace(Clockwork.of_user(), rank_gflops=config.shown.rank_gflops),
            stream=stream,
            command=shlex.join(["mpirun", "-n", str(plan.num_ranks), "python", "-m", "mpi4dl.train", *flags]),
        )


def training_flags(argv: Sequence[str]) -> list[str]:
    """The flags that are for the training too, as they were given."""
    own = ArgumentParser(add_help=False, allow_abbrev=False)
    for item in (*fields(Shown), *fields(Searched)):
        flag = "--" + item.name.replace("_", "-")
        if item.type is bool:
            own.add_argument(flag, action=BooleanOptionalAction)
        else:
            own.add_argument(flag)
    return own.parse_known_args(list(argv))[1]


def searched(config: PlanConfig, flags: Sequence[str]) -> list[str]:
    """A table of the fastest plans, and the command that starts each. Raises ValueError."""
    import torch

    from mpi4dl.forecast.dry_run import build_forecaster
    from mpi4dl.forecast.ranked import ranked
    from mpi4dl.forecast.search import candidates, degrees_of, search
    from mpi4dl.parallel.costs.prices import Clockwork

    num_ranks, asked = config.searched.ranks, config.searched.memory
    if num_ranks is None:
        raise ConfigError("--search needs --ranks: for how many ranks to look")
    together = config.searched.ranks_per_node or num_ranks
    if num_ranks % together:
        raise ConfigError(
            f"--ranks {num_ranks} are no multiple of --ranks-per-node {together}: all nodes must have as many"
        )
    images = opened(config)
    num_classes, channels = images.number_of_classes(config), images.channels
    clockwork = replace(Clockwork.of_user(), rank_gflops=config.shown.rank_gflops)
    with as_a_rank(config, num_ranks) as device:
        forecaster = build_forecaster(config, num_classes, channels, clockwork, torch.device(device))
        degrees = degrees_of(forecaster.cuttable.model, num_ranks, together, forecaster.styles)
        plans = candidates(num_ranks, len(forecaster.cuttable), forecaster.image, degrees)
        found = search(forecaster, plans, float("inf") if asked is None else asked)
    return ranked(found, num_ranks, asked, flags, None if config.data.text is None else config.data.context)


def opened(config: Config) -> "Images | Texts":
    """What is trained on. Raises ValueError and OSError."""
    from mpi4dl.trainer.images import open_alone
    from mpi4dl.trainer.texts import open_text_alone

    return open_alone(config) if config.data.text is None else open_text_alone(config)


@contextmanager
def as_a_rank(config: Config, num_ranks: int) -> Iterator[str]:
    """Compute in here as a rank of the training would: on which device, with the threads and the memory that it has.

    Ranks are taken to share this machine. Where a GPU was asked for and is not here, it cannot be timed.
    """
    import torch

    from mpi4dl._memory import keep_freed_memory
    from mpi4dl.comm.node import cores

    before = torch.get_num_threads()
    torch.set_num_threads(max(1, cores() // num_ranks))
    keep_freed_memory(config.parallel.keep_freed_memory)
    try:
        yield "cuda" if config.parallel.device != "cpu" and torch.cuda.is_available() else "cpu"
    finally:
        torch.set_num_threads(before)


def require_drawable(path: Path) -> None:
    """Raise ConfigError unless a timeline can be drawn to such a file."""
    if path.suffix not in (".png", ".txt"):
        raise ConfigError(f"--timeline {path}: the name must end in .png or .txt")
    if path.suffix == ".png":
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            raise ConfigError(
                f"--timeline {path} needs matplotlib: pip install matplotlib, or draw to a .txt file"
            ) from None


def draw(found: "Overview", path: Path) -> None:
    """Write the timeline, and say where."""
    from mpi4dl.parallel.tables.drawing import as_png, as_text

    try:
        if path.suffix == ".png":
            as_png(found.simulation, path)
        else:
            path.write_text(as_text(found.simulation) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--timeline {path}: {error.strerror}") from None
    print(f"timeline: {path}")


if __name__ == "__main__":
    main()
