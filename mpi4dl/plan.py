"""The planning command: `mpi4dl plan --stages 4 --microbatches 8`, with the flags of `mpi4dl train`.

It describes a training with these flags, or searches for the fastest plan, without MPI and without the model in memory.
`--measure` starts short trainings by plans, and shows their speed and memory beside the estimates.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path

from mpi4dl._progress import ProgressLine
from mpi4dl.estimate.plan_options import Measuring, OnMachine, Searched, Shown
from mpi4dl.options.command import CommandLine, LocalCommand
from mpi4dl.options.config import Config, ConfigError
from mpi4dl.options.declare import require_effect, saying, with_values, without_flags
from mpi4dl.options.sections.parallel import Parallel

USAGE = "[--timeline FILE] [--config FILE] [--FLAG VALUE ...]"
DESCRIPTION = "Show what a plan needs, search for the fastest, and --measure some. Only --measure needs MPI."


@dataclass(frozen=True)
class PlanConfig(Config):
    shown: Shown = field(default_factory=Shown)
    searched: Searched = field(default_factory=Searched)
    on_machine: OnMachine = field(default_factory=OnMachine)
    measuring: Measuring = field(default_factory=Measuring)


def show(asked_for: CommandLine[PlanConfig]) -> None:
    """Print the overview, and draw its timeline. Raises ValueError."""
    config, argv = asked_for.config, asked_for.argv
    if config.run.print_config:
        from mpi4dl.training.setup import to_print

        print(to_print(Config(**{section.name: getattr(config, section.name) for section in fields(Config)})), end="")
        return
    from mpi4dl.estimate.planning import planned, profiler_of, scaled, searched, time_layers

    asked, shown, flags = config.searched, config.shown, training_flags(argv)
    on = config.on_machine
    profiler = profiler_of(on)
    searches = asked.search or asked.ranks is not None
    if on.time_only is not None and (on.scaling is not None or on.timings is not None or on.machine is not None):
        raise ConfigError("--time-only times layers here, and ends: leave out --machine, --timings and --scaling")
    if config.measuring.measure is not None and (on.time_only or on.scaling):
        raise ConfigError("--measure trains by plans, and --time-only and --scaling show none: leave it out")
    if asked.memory is not None and asked.ranks is None and (profiler.machine is None or not (searches or on.scaling)):
        raise ConfigError("--memory is what each of --ranks ranks has: say how many there are")
    timeline = None if shown.timeline is None else timeline_of(shown.timeline)
    from mpi4dl.estimate.search import table
    from mpi4dl.training.fastest_plan import chosen_by
    from mpi4dl.training.measured import measured
    from mpi4dl.training.setup import with_samples

    if config.parallel.plan is not None and not searches:
        raise ConfigError("`plan` auto is for a training: here --ranks N shows the fastest plans")
    require_effect(with_values(config, {"stream_norm": Parallel.stream_norm}) if searches else config)  # it may stream
    measures, found = config.measuring.measure is not None, None
    with ProgressLine() as progress, _as_a_message():
        progress("reading the data")
        work = with_samples(config, progress)
        measure = partial(measured, flags=flags, how=config.measuring, tell=progress)
        if on.time_only is not None:
            lines = time_layers(work, asked, on.time_only, profiler, progress)
        elif on.scaling is not None:
            lines = scaled(work, asked, on, profiler, progress)
        elif searches:
            lines = searched(work, asked, profiler, flags, progress, measure)
            if taken := chosen_by(config.parallel):
                lines.append(f"{taken}: searched, not kept as given; leave out --ranks to see the plan of these flags")
        else:
            found = planned(work, profiler, flags, progress)
            lines = [str(found)]
            if measures:
                lines += ["", *table(measure([found.estimate], searched=False), None, work.source.tokens)]
    print(asked_for.spell("\n".join(lines)))
    if measures:
        print(f"measurements: {config.measuring.measure_folder}")
    if found is not None and timeline is not None:
        from mpi4dl.parallel.tables.drawing import draw

        with saying(f"--timeline {timeline}", OSError):
            draw(found.simulation, timeline)
        print(f"timeline: {timeline}")


@contextmanager
def _as_a_message() -> Iterator[None]:
    """Timings that a file lacks are the user's to add."""
    from mpi4dl.parallel.costs.cost_model import MissingTimings

    try:
        yield
    except MissingTimings as missing:
        raise ConfigError(str(missing)) from None


def training_flags(argv: Sequence[str]) -> list[str]:
    """The flags that are for the training too, as they were given."""
    return without_flags(
        PlanConfig, argv, (each.name for part in (Shown, Searched, OnMachine, Measuring) for each in fields(part))
    )


def timeline_of(asked: str) -> Path:
    """Where the timeline is to be drawn. Raises ConfigError where it cannot be."""
    path = Path(asked)
    if path.suffix not in (".png", ".txt"):
        raise ConfigError(f"--timeline {path}: the name must end in .png or .txt")
    return path


plan = LocalCommand("plan", show, PlanConfig, USAGE, DESCRIPTION)
main = plan.main

if __name__ == "__main__":
    main()
