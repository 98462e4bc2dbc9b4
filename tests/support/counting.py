"""Counts of units and of commands, as tests compare them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mpi4dl.estimate.dry_run import look_ahead, stream_of
from mpi4dl.estimate.memory import HEAP_KEPT, Allocator, BuildOptimizer
from mpi4dl.estimate.plan_estimate import Estimator, units_of
from mpi4dl.estimate.summary import PlanSummary, overview
from mpi4dl.estimate.workload import Workload
from mpi4dl.options.config import Config
from mpi4dl.options.declare import with_values
from mpi4dl.options.tasks import with_defaults
from mpi4dl.parallel.costs.cost_model import Profiler
from mpi4dl.parallel.costs.sites import Units, on_one_rank
from mpi4dl.parallel.costs.store import Store
from mpi4dl.parallel.costs.units import count_units
from mpi4dl.parallel.pipeline.split import outline
from mpi4dl.parallel.plan import Plan

CPU = torch.device("cpu")
COUNTED = Store()  # of all tests of this process


def count_flops(units: Units, image: tuple[int, ...]) -> list[float]:
    """The FLOPs of each unit's forward pass, on all of a microbatch of this shape: of products and convolutions."""
    return [unit.flops for unit in count_units(units, on_one_rank(image), backward=False)]


def untimed(*_: Any) -> Any:
    raise RuntimeError("it looks at values")


def summary_of(
    name: str,
    build: Callable[[], nn.Module],
    plan: Plan,
    image: tuple[int, ...],
    profiler: Profiler | None = None,
    optimizer: BuildOptimizer | None = None,
    allocator: Allocator = HEAP_KEPT,
    **options: Any,
) -> PlanSummary:
    """The overview of a model; without a `profiler` by counted FLOPs."""
    units = units_of(outline(build).train(), plan.microbatch(image), plan.num_stages > 1)
    profiler = profiler or Profiler(COUNTED, time=untimed)
    return overview(name, Estimator(units, image, profiler, CPU, optimizer, allocator), plan, **options)


def memory_of_command(config: Config, plan: Plan, num_classes: int = 2, channels: int = 3) -> int:
    """The bytes that all ranks of a training need together, if its samples are as these numbers say.

    Labels are unknown here, so that outputs of any shape are taken.
    """
    if config.data.task == "auto":
        config = with_values(config, {"task": "regress" if config.data.text is None else "language"})
    config = with_defaults(config)
    work = Workload(config, num_classes, channels)
    found = look_ahead(work, plan, CPU, stream_of(work, plan, CPU), balance="flops")
    return sum(found.rank_memory.of_ranks(plan.zero, config.parallel.offload == "disk")) * plan.replicas
