"""Plans for another machine: timings of layers to take along, and curves over numbers of ranks."""

from pathlib import Path

from mpi4dl._files import unwritable
from mpi4dl._progress import Tell, quietly
from mpi4dl._wording import counted, to_install
from mpi4dl.estimate.planning import Searched, TrainedOn, as_a_rank, candidates_for, require_ranks
from mpi4dl.estimate.target import OnMachine, PlanTarget
from mpi4dl.options.config import Config, ConfigError


def scaled(
    config: Config,
    asked: Searched,
    on: OnMachine,
    target: PlanTarget,
    samples: TrainedOn,
    rank_gflops: float,
    tell: Tell = quietly,
) -> list[str]:
    """Curves of the fastest plans from one rank on, as a table, and as a picture in `on.curves`."""
    from mpi4dl.estimate.scaling import draw_scaling, numbers_of_ranks, scaling_lines, scaling_points

    if Path(on.curves).suffix != ".png":
        raise ConfigError(f"--curves {on.curves}: the name must end in .png")
    require_new("--curves", on.curves)
    most, most_bytes = require_ranks(asked, target.num_ranks), target.most_bytes(asked.memory)
    tell("building the model", 0, 0)
    with as_a_rank(config, most) as device:
        found = candidates_for(config, asked, target, samples, rank_gflops, most, device)
        limit = float("inf") if most_bytes is None else most_bytes
        points = scaling_points(found.estimator, found.plans, numbers_of_ranks(most), on.scaling == "weak", limit, tell)
    tokens = None if config.data.text is None else config.data.context
    lines = [*target.words(), *scaling_lines(points, found.ranks_per_node, tokens, limit)]
    size = f"{tokens} tokens" if tokens else f"{'x'.join(map(str, found.estimator.image[2:]))} px"
    title = f"{config.model_name}, {size}: {on.scaling} scaling"
    try:
        draw_scaling(points, title, Path(on.curves), tokens)
    except ImportError:
        return [*lines, f"the curves are not drawn: install matplotlib by {to_install('matplotlib')}"]
    except OSError as error:
        raise ConfigError(f"--curves {on.curves}: {error.strerror}") from None
    return [*lines, f"curves: {on.curves}"]


def require_new(flag: str, path: str) -> None:
    """Raise ConfigError, before minutes are spent, where a flag names a file that is there, or cannot be made."""
    problem = unwritable(flag, path)
    if problem is not None:
        raise ConfigError(problem)


def time_layers(
    config: Config, asked: Searched, on: OnMachine, samples: TrainedOn, rank_gflops: float, tell: Tell = quietly
) -> str:
    """Time the layers of a model on the small tiles that plans for up to so many ranks need, and write the file."""
    import torch

    from mpi4dl.estimate.scaling import numbers_of_ranks
    from mpi4dl.parallel.costs.scaled import ScaledProfiler, TimingsFile
    from mpi4dl.parallel.costs.timing import machine as this_machine

    num_ranks = require_ranks(asked)
    assert on.time_only is not None
    require_new("--time-only", on.time_only)
    file = TimingsFile(on.time_only)
    tell("building the model", 0, 0)
    with as_a_rank(config, num_ranks) as device:
        found = candidates_for(config, asked, PlanTarget(timings=file), samples, rank_gflops, num_ranks, device)
        on_this = this_machine(torch.device(device))["on"]
        file.measured_on = on_this if isinstance(on_this, str) else f"{on_this[0]}, {counted(on_this[1], 'thread')}"
        found.estimator.clockwork = timing = ScaledProfiler(file)
        plans = (plan for ranks in numbers_of_ranks(num_ranks) for plan in found.plans(ranks))
        sites, refused = {site: None for plan in plans for site in found.estimator.sites(plan)}, []
        for number, site in enumerate(sites):
            tell("shapes of tiles that were timed", number, len(sites))
            try:
                timing.column(found.estimator.cuttable, site, torch.device(device), 1)
            except (RuntimeError, ValueError, AssertionError) as error:  # as a search leaves such plans out
                refused.append(str(error).partition("\n")[0])
        if len(refused) == len(sites):
            why = refused[0] if refused else "there is no plan for so many ranks and such batches"
            raise ConfigError(f"{config.model_name} cannot be timed: {why}")
    try:
        file.save()
    except OSError as error:
        raise ConfigError(f"--time-only {on.time_only}: {error.strerror}") from None
    return f"timings of the layers of {config.model_name} on small tiles: {on.time_only}"
