"""What is estimated: a configuration, and what is known of its samples."""

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from mpi4dl._progress import Tell, quietly
from mpi4dl.datasets import DatasetError
from mpi4dl.engine.precision import AUTOCAST
from mpi4dl.estimate.memory import HEAP_KEPT, HEAP_RETURNED, OF_TENSORS
from mpi4dl.estimate.plan_estimate import Estimator, units_of
from mpi4dl.geometry import even_cuts
from mpi4dl.models.patches import patches_in
from mpi4dl.options.build import batch_of, engine_options
from mpi4dl.options.config import Config, ConfigError
from mpi4dl.options.models import build_model, patch_options, tensor_styles
from mpi4dl.options.optimizers import build_optimizer
from mpi4dl.options.sources import DataSource, source_of
from mpi4dl.parallel.costs.cost_model import Profiler
from mpi4dl.parallel.disk import Keep
from mpi4dl.parallel.pipeline.split import outline
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.streaming.leading_part import segments_of
from mpi4dl.parallel.streaming.memory_limit import StreamConstraints

MOST_LOOKED_AT = 16


@dataclass(frozen=True)
class SlidePatches:
    """How many patches training takes of a slide, as the `mean` over `looked_at` slides."""

    mean: float
    looked_at: int


@dataclass(frozen=True)
class Workload:
    """A training to estimate: `patches` are those with tissue of slides, `num_batches` the batches of an epoch."""

    config: Config
    num_classes: int
    channels: int
    patches: SlidePatches | None = None
    num_batches: int = 0

    @property
    def name(self) -> str:
        return self.config.model_name

    @property
    def num_tokens(self) -> int | None:
        """The tokens of a sample of text."""
        return source_of(self.config).tokens

    @property
    def batch(self) -> tuple[int, ...]:
        """The shape of a batch, (N, C, H, W), or (N, T) of tokens."""
        return batch_of(self.config, self.channels)

    @property
    def patches_each(self) -> float:
        """The patches of a sample: those with tissue if they were counted, else all of an image."""
        config = self.config
        everything = patches_in(config.data.image_size, config.model.patches or 1)
        return everything if self.patches is None else self.patches.mean

    def model(self) -> nn.Module:
        """The model on the meta device."""
        return outline(lambda: build_model(self.config, self.num_classes, self.channels)).train()

    def one_tile(self, plan: Plan) -> "Workload":
        """The patches that each rank runs at once, as one image; unchanged without patches."""
        config = self.config
        options, patch = patch_options(config, plan), config.model.patches
        if options is None or patch is None:
            return self
        rows, cols = plan.shape(0).space
        size, samples = (rows * patch, cols * patch * options.at_once), plan.shape(0).batch * plan.num_microbatches
        config = replace(
            config,
            data=replace(config.data, image_size=size, batch_size=samples),
            training=replace(config.training, accumulate=1),
            model=replace(config.model, min_tissue=0.0),
        )
        return replace(self, config=config, patches=None)

    def of_batches(self, size: int) -> "Workload":
        """The same with batches of this size."""
        return replace(self, config=replace(self.config, data=replace(self.config.data, batch_size=size)))

    def estimator(self, plan: Plan | None, device: torch.device, profiler: Profiler) -> Estimator:
        """An estimator of any plan, or of one: then a model of one stage need not be traceable. Raises ValueError."""
        config, batch, model = self.config, self.batch, self.model()
        chosen, engine = config.parallel, engine_options(config)
        if plan is None and config.model.patches is not None:
            raise ConfigError(
                f"plans are searched for models that see whole images, not `patches` {config.model.patches}"
            )
        cut = plan is None or plan.num_stages > 1 or chosen.stream is not None
        try:
            units = units_of(model, batch if plan is None else plan.microbatch(batch), cut)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from error
        asked = None if chosen.stream_segments is None else segments_of(chosen.stream_segments)
        disk = Keep("disk") if chosen.stream_keep is None else None
        heap = HEAP_KEPT if chosen.keep_freed_memory else HEAP_RETURNED
        return Estimator(
            units,
            batch,
            profiler,
            device,
            optimizer=partial(build_optimizer, config),
            allocator=OF_TENSORS if device.type == "cuda" else heap,
            low_precision=AUTOCAST[engine["precision"]] if engine["low_precision_weights"] else None,
            averaged=config.tuning.ema is not None,
            constraints=StreamConstraints(chosen.stream_until, chosen.stream_norm, asked, kept_outputs(config), disk),
            styles=tensor_styles(config),
        )


def kept_outputs(config: Config) -> Keep:
    """Where the outputs of segments are kept."""
    return Keep(config.parallel.stream_keep or "device")


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
    return SlidePatches(sum(taken) / len(taken), len(taken)) if taken else None
