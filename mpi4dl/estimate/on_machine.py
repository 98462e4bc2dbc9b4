"""Plans for another machine: timings of layers to take along, and curves over numbers of ranks."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mpi4dl._files import unwritable
from mpi4dl._progress import Tell, quietly
from mpi4dl._wording import counted, to_install
from mpi4dl.estimate.planning import (
    OnMachine,
    Searched,
    TrainedOn,
    as_a_rank,
    candidates_for,
    most_bytes,
    require_ranks,
)
from mpi4dl.options.config import Config, ConfigError

if TYPE_CHECKING:
    from mpi4dl.parallel.costs.cost_model import Profiler


def scaled(
    config: Config,
    asked: Searched,
    on: OnMachine,
    profiler: "Profiler",
    samples: TrainedOn,
    tell: Tell = quietly,
) -> list[str]:
    """Curves of the fastest plans from one rank on, as a table, and as a picture in `on.curves`."""
    from mpi4dl.estimate.scaling import draw_scaling, numbers_of_ranks, scaling_lines, scaling_points

    if Path(on.curves).suffix != ".png":
        raise ConfigError(f"--curves {on.curves}: the name must end in .png")
    require_new("--curves", on.curves)
    most, limit = require_ranks(asked, profiler), most_bytes(asked, profiler)
    tell("building the model", 0, 0)
    with as_a_rank(config, most) as device:
        found = candidates_for(config, asked, profiler, samples, most, device)
        points = scaling_points(found.estimator, found.plans, numbers_of_ranks(most), on.scaling == "weak", limit, tell)
    tokens = None if config.data.text is None else config.data.context
    described = [] if profiler.machine is None else [profiler.machine.describe()]
    lines = [*described, *scaling_lines(points, found.ranks_per_node, tokens, limit)]
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
    config: Config, asked: Searched, path: str, profiler: "Profiler", samples: TrainedOn, tell: Tell = quietly
) -> str:
    """Time the layers of a model on the small tiles that plans for up to so many ranks need, and write the file."""
    import torch

    from mpi4dl.estimate.scaling import numbers_of_ranks
    from mpi4dl.parallel.costs.store import Store, machine

    num_ranks = require_ranks(asked, profiler)
    require_new("--time-only", path)
    tell("building the model", 0, 0)
    with as_a_rank(config, num_ranks) as device:
        on = machine(torch.device(device))["on"]
        store = Store(measured_on=on if isinstance(on, str) else f"{on[0]}, {counted(on[1], 'thread')}")
        small = replace(profiler, store=store, small=True)
        found = candidates_for(config, asked, small, samples, num_ranks, device)
        plans = (plan for ranks in numbers_of_ranks(num_ranks) for plan in found.plans(ranks))
        sites, refused = {site: None for plan in plans for site in found.estimator.sites(plan)}, []
        for number, site in enumerate(sites):
            tell("shapes of tiles that were timed", number, len(sites))
            try:
                small.costs(found.estimator.cuttable, site, torch.device(device))
            except (RuntimeError, ValueError, AssertionError) as error:  # as a search leaves such plans out
                refused.append(str(error).partition("\n")[0])
        if len(refused) == len(sites):
            why = refused[0] if refused else "there is no plan for so many ranks and such batches"
            raise ConfigError(f"{config.model_name} cannot be timed: {why}")
    try:
        store.save(path)
    except OSError as error:
        raise ConfigError(f"--time-only {path}: {error.strerror}") from None
    return f"timings of the layers of {config.model_name} on small tiles: {path}"
