"""A configuration becomes a model over ranks, in the same steps for training, prediction and generation.

assembly = assemble(config, comm)              own code -> plan -> cores -> device -> GPU wire
model = assembly.hold(num_outputs, channels)   built, cut by the plan, on the device of each rank
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from mpi4dl._memory import keep_freed_memory, return_freed_memory
from mpi4dl._randomness import seed_python
from mpi4dl.comm import Communicator, Refusal
from mpi4dl.datasets import DatasetError
from mpi4dl.engine.precision import choose_kernels
from mpi4dl.options import parts
from mpi4dl.options.build import TrainingSpec, build_plan
from mpi4dl.options.config import Config, ConfigError
from mpi4dl.options.declare import saying
from mpi4dl.options.models import without_rules
from mpi4dl.options.sources import DataSource, source_of
from mpi4dl.parallel.pipeline.local_stages import LocalStages
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.spatial import NoRule

# Options that may name code of the user's, by the section of a configuration that has them.
OWN_PARTS = {
    "model": "model",
    "dataset": "data",
    "transforms": "data",
    "optimizer": "optimizer",
    "loss": "training",
    "metrics": "learning",
    "callbacks": "run",
}


@dataclass(frozen=True)
class ModelAssembly:
    """Where the model of a configuration lies: the ranks, the plan, and the device of this rank.

    `prints` are fingerprints of the files with code of the user's, by option and part.
    """

    config: Config
    comm: Communicator
    plan: Plan
    device: torch.device
    prints: Mapping[tuple[str, str], str | None]

    @property
    def source(self) -> DataSource:
        """Where the samples of the model come from."""
        return source_of(self.config)

    def hold(self, num_outputs: int, channels: int) -> LocalStages:
        """This rank's stages of the model, on its device. Collective; raises Refusal on all ranks.

        The random numbers that training draws follow from `seed`, in one stage or several.
        """
        with self.comm.together((ValueError, TypeError)):
            return hold_model(TrainingSpec(self.config, num_outputs, channels), self.plan, self.comm, self.device)

    def running(self, num_outputs: int, channels: int) -> AbstractContextManager[None]:
        """Run the model in here: operators without a rule are gathered or refused, and errors name the model."""
        return blaming_the_model(TrainingSpec(self.config, num_outputs, channels), self.plan)


def prints_of(config: Config, own: Collection[str] = tuple(OWN_PARTS)) -> dict[tuple[str, str], str | None]:
    """Fingerprints of the files of the user's `own` parts, by option and part, which are loaded. Raises ConfigError."""
    found: dict[tuple[str, str], str | None] = {}
    for name in own:
        part = getattr(getattr(config, OWN_PARTS[name]), name)
        for each in part if isinstance(part, tuple) else () if part is None else (part,):
            if parts.is_own(each):
                parts.load(name, each)
                found[name, parts.part_name(each)] = parts.print_of(each)
    return found


def assemble(
    config: Config, comm: Communicator, own: Collection[str] = tuple(OWN_PARTS), *, num_samples: int | None = None
) -> ModelAssembly:
    """Load the user's `own` parts that a configuration names, and find its plan and device on each rank. Collective.

    `num_samples` are those of a batch; None: batches follow from what is asked of the model later.

    Raises:
        Refusal: on all ranks: a part cannot be loaded or differs between ranks, or the plan does not fit.
    """
    with comm.together((ValueError,)):
        prints = prints_of(config, own)
    comm.agree(None, **{f"the file of `{name}` {part}": each for (name, part), each in prints.items()})
    with comm.together((ValueError,)):
        source_of(config).require_model()
        plan = build_plan(config)
    size = config.data.image_size
    comm.agree(plan.wrong_world(comm.size) if num_samples is None else plan.problem(comm.size, size, num_samples))
    comm.node.share_cores(config.parallel.threads)
    keep_freed_memory(config.parallel.keep_freed_memory)
    with comm.together((ValueError,)):
        device = comm.node.device(config.parallel.device)
    if device.type == "cuda":
        choose_kernels(config.parallel.deterministic, config.parallel.tf32)
    if device.type == "cuda" or config.parallel.gpu_wire == "nccl":
        comm.choose_gpu_wire(config.parallel.gpu_wire)
    return ModelAssembly(config, comm, plan, device, prints)


def hold_model(spec: TrainingSpec, plan: Plan, comm: Communicator, device: torch.device) -> LocalStages:
    """The stages of `ModelAssembly.hold`. Raises ValueError on all ranks."""
    chosen, stream = spec.parallel, None
    if (chosen.stream, chosen.stream_until, chosen.memory_limit) != (None, None, None):
        from mpi4dl.estimate.dry_run import measured_speeds, stream_of
        from mpi4dl.estimate.workload import Workload

        own = measured_speeds(chosen, device, comm.node.local_size) if comm.rank == 0 else None
        speeds = comm.broadcast_object(own)
        stream = stream_of(Workload(spec.config, spec.num_outputs, spec.channels), plan, device, speeds)
    torch.manual_seed(spec.training.seed)
    seed_python(spec.training.seed)
    patches = spec.patches_by(plan)
    if patches is None and (plan.num_stages > 1 or stream is not None):
        return _cut_model(spec, plan, comm, device, stream)
    model = spec.build()
    if patches is None:
        return LocalStages.whole(model, plan, comm, styles=spec.styles, device=device)
    from mpi4dl.models.patches import PatchModel
    from mpi4dl.parallel.streaming.patches import stream_patches

    assert isinstance(model, PatchModel)
    with saying(f"`stream_segments` {patches.segments} of `model` {spec.name}"):
        stream_patches(model.to(device), patches, spec.channels)
    return LocalStages.whole(model, plan, comm, patches)


def _cut_model(spec: TrainingSpec, plan: Plan, comm: Communicator, device: torch.device, stream: Any) -> LocalStages:
    """A model of several stages, or of one whose images are streamed."""
    from mpi4dl.parallel.costs.cost_model import Profiler
    from mpi4dl.parallel.costs.timing import Seconds, time_units
    from mpi4dl.parallel.cut import split
    from mpi4dl.parallel.streaming.margins import CannotStream

    def time_and_tidy(*site: Any) -> Seconds:
        """Time units, and leave no trace of that in the memory of this rank, which is to be that of training."""
        found = time_units(*site)
        return_freed_memory()
        return found

    try:
        return split(
            spec.build,
            plan,
            comm,
            device=device,
            seed=spec.training.seed,
            balance=spec.parallel.balance,
            image=plan.microbatch(spec.batch),
            profiler=Profiler.of_user(time=time_and_tidy),
            stream=stream,
            styles=spec.styles,
            check=spec.parallel.check,
        )
    except ConfigError:
        raise
    except CannotStream as error:
        asked = spec.parallel.stream
        named = asked if isinstance(asked, str) else "x".join(map(str, asked or ()))
        raise ConfigError(f"`stream` {named}: {error}") from error
    except ValueError as error:
        raise ConfigError(f"`model` {spec.name}: {error}") from error


@contextmanager
def blaming_the_model(spec: TrainingSpec, plan: Plan) -> Iterator[None]:
    """Train in here: errors of operators without a rule, or that the plain model makes too, become a Refusal."""
    try:
        with without_rules(spec.parallel):
            yield
    except Refusal:
        raise
    except DatasetError as problem:  # no model's fault: a package that reads such images is not installed
        raise Refusal(str(problem)) from problem
    except (RuntimeError, AssertionError, ValueError) as problem:  # NoRule is one: shapes are those of the whole
        from mpi4dl.parallel.pipeline.split import outline, unfit

        model = outline(spec.build)
        reason = unfit(model, plan.microbatch(spec.batch))
        if reason is None and not isinstance(problem, NoRule | ValueError):
            raise
        raise Refusal(f"`model` {spec.name}: {reason or problem}") from problem
