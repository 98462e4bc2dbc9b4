"""What is estimated: a training, and what is known of its samples."""

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch.utils import _pytree as pytree

from mpi4dl._wording import Tell, quietly
from mpi4dl.datasets import DatasetError
from mpi4dl.engine.precision import AUTOCAST
from mpi4dl.engine.runner import terms_of
from mpi4dl.estimate.memory import HEAP_KEPT, HEAP_RETURNED, OF_TENSORS
from mpi4dl.estimate.plan_estimate import Estimator, units_of
from mpi4dl.geometry import even_cuts
from mpi4dl.models.patches import patches_in
from mpi4dl.options.build import TrainingSpec
from mpi4dl.options.declare import ConfigError, saying
from mpi4dl.options.parts import blaming
from mpi4dl.options.sections.parallel import Parallel
from mpi4dl.options.sources import DataSource
from mpi4dl.parallel.costs.cost_model import Profiler
from mpi4dl.parallel.costs.meter import needs_values
from mpi4dl.parallel.disk import Keep
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.streaming.leading_part import segments_of
from mpi4dl.parallel.streaming.memory_limit import StreamConstraints
from mpi4dl.tasks.formulas import num_samples
from mpi4dl.tasks.task import Task

MOST_LOOKED_AT = 16
MOST_TRIED = 1 << 24  # values of outputs that a loss is tried on


@dataclass(frozen=True)
class SlidePatches:
    """How many patches training takes of a slide, as the `mean` over `looked_at` slides; `all` that show tissue, or
    some of them.
    """

    mean: float
    looked_at: int
    all: bool = True


@dataclass
class Workload(TrainingSpec):
    """A training to estimate: `patches` are those with tissue of slides, `num_batches` the batches of an epoch.

    `targets` are those of a batch, for the loss of the `task`; where they are unknown, outputs of any form are taken.
    """

    patches: SlidePatches | None = None
    num_batches: int = 0
    task: Task | None = None
    targets: Any = None

    def require_loss(self, outputs: Any) -> None:
        """Raise ConfigError if the loss cannot be computed of such outputs of the model and targets of these samples.

        It is tried on zeros. Of many there are only shapes, and a loss that looks at values is taken to do.
        """
        shapes = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
        if self.task is None or self.targets is None or not (shapes and shapes[0].dim()):
            return
        size = min(len(shapes[0]), num_samples(self.targets))
        device = "cpu" if sum(each.numel() for each in shapes) <= MOST_TRIED else "meta"

        def like(leaf: torch.Tensor, values: bool) -> torch.Tensor:
            found = leaf[:size] if leaf.dim() else leaf
            return found.to(device) if values else torch.zeros_like(found, device=device, requires_grad=True)

        loss, name = self.task.objective, self.training.loss or self.task.default_loss
        made = pytree.tree_map_only(torch.Tensor, partial(like, values=False), outputs)
        targets = pytree.tree_map_only(torch.Tensor, partial(like, values=True), self.targets)
        with blaming("loss", name):
            try:
                terms_of(loss, made, targets)
            except Exception as error:
                if device == "cpu" or not needs_values(error):
                    raise

    @property
    def patches_each(self) -> float:
        """The patches of a sample: those with tissue if they were counted, else all of an image."""
        everything = patches_in(self.batch[2:], self.patch or 1)
        return everything if self.patches is None else self.patches.mean

    def one_tile(self, plan: Plan) -> tuple["Workload", Plan]:
        """The patches that each rank runs at once, as an image of its own, and the plan of replicas that do so.

        Both are unchanged without patches.
        """
        options, patch = self.patches_by(plan), self.patch
        if options is None or patch is None:
            return self, plan
        tiles, data = ((1,) * len(plan.tiles[0]),), plan.data * plan.batch_ways[0] * prod(plan.tiles[0])
        plan = replace(plan, tiles=tiles, batch_ways=(), data=data, local_batches=plan.experts == 1)
        size, samples = (patch, patch * options.at_once), plan.replicas * plan.num_microbatches
        return replace(self.of_batches(samples, size), patches=None), plan

    def estimator(self, plan: Plan | None, device: torch.device, profiler: Profiler) -> Estimator:
        """An estimator of any plan, or of one: then a model of one stage need not be traceable. Raises ValueError."""
        batch, model, chosen, engine = self.batch, self.model(), self.parallel, self.engine
        if plan is None and self.patch is not None:
            raise ConfigError(f"plans are searched for models that see whole images, not `patches` {self.patch}")
        cut = plan is None or plan.num_stages > 1 or chosen.stream is not None
        with saying(self.name):
            units = units_of(model, batch if plan is None else plan.microbatch(batch), cut)
        asked = None if chosen.stream_segments is None else segments_of(chosen.stream_segments)
        disk = Keep("disk") if chosen.stream_keep is None else None
        heap = HEAP_KEPT if chosen.keep_freed_memory else HEAP_RETURNED
        return Estimator(
            units,
            batch,
            profiler,
            device,
            optimizer=self.optimizer,
            allocator=OF_TENSORS if device.type == "cuda" else heap,
            low_precision=AUTOCAST[engine["precision"]] if engine["low_precision_weights"] else None,
            averaged=engine["ema"] is not None,
            constraints=StreamConstraints(chosen.stream_until, chosen.stream_norm, asked, kept_outputs(chosen), disk),
            styles=self.styles,
        )


def kept_outputs(parallel: Parallel) -> Keep:
    """Where the outputs of segments are kept."""
    return Keep(parallel.stream_keep or "device")


def patches_of_slides(source: DataSource, training: Any, tell: Tell = quietly) -> SlidePatches | None:
    """The patches with tissue of slides all over the list; None without slides, or if none of them can be read."""
    count, taken = source.patches_of(training), []
    if count is None:
        return None
    chosen = even_cuts(len(training), min(len(training), MOST_LOOKED_AT))[:-1]
    for number, index in enumerate(chosen):
        tell("counting patches with tissue", number, len(chosen))
        with suppress(DatasetError, OSError):  # training says what is wrong with a slide
            taken.append(count(index))
    return SlidePatches(sum(taken) / len(taken), len(taken), source.slides.most_patches is None) if taken else None
