"""Counts of units and of commands, as tests compare them."""

import torch

from mpi4dl.estimate.dry_run import look_ahead, stream_of
from mpi4dl.options.config import Config
from mpi4dl.options.declare import with_values
from mpi4dl.options.tasks import with_defaults
from mpi4dl.parallel.costs.cost_model import Profiler
from mpi4dl.parallel.costs.sites import Units, on_one_rank
from mpi4dl.parallel.costs.units import count_units
from mpi4dl.parallel.plan import Plan


def count_flops(units: Units, image: tuple[int, ...]) -> list[float]:
    """The FLOPs of each unit's forward pass, on all of a microbatch of this shape: of products and convolutions."""
    return [unit.flops for unit in count_units(units, on_one_rank(image), backward=False)]


def memory_of_command(config: Config, plan: Plan, num_classes: int = 2, channels: int = 3) -> int:
    """The bytes that all ranks of a training need together, if its samples are as these numbers say.

    Labels are unknown here, so that outputs of any shape are taken.
    """
    if config.data.task == "auto":
        config = with_values(config, {"task": "regress" if config.data.text is None else "language"})
    config = with_defaults(config)
    device = torch.device("cpu")
    stream = stream_of(config, plan, num_classes, channels, device)
    found = look_ahead(
        config, plan, num_classes, channels, balance="flops", profiler=Profiler.of_user(), stream=stream, device=device
    )
    return sum(found.rank_memory.of_ranks(plan.zero, config.parallel.offload == "disk")) * plan.replicas
