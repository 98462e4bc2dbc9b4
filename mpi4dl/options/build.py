"""What a configuration asks a training to compute: the plan, the engine's options, and all of it as a spec."""

import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from mpi4dl._files import read_regular
from mpi4dl._wording import counted
from mpi4dl.options.config import Config, ConfigError, Parallel, Training, parse
from mpi4dl.options.declare import flags_for, saying, with_values, without_flags
from mpi4dl.options.models import build_model
from mpi4dl.options.optimizers import build_optimizer, build_schedule, groups_of
from mpi4dl.options.sources import source_of
from mpi4dl.parallel.inputs import batch_shape, of_tokens, space_of
from mpi4dl.parallel.plan import Plan

if TYPE_CHECKING:
    from mpi4dl.parallel.streaming.patches import PatchOptions


def build_plan(config: Config) -> Plan:
    """The plan that the flags ask for. Replicas have local batches where images differ in size.

    Raises ValueError where flags contradict each other, or the data.
    """
    asked = {name: getattr(config.parallel, name) for name in Plan.options()}
    asked["microbatches"] *= config.training.accumulate
    plan = Plan.of(**asked)
    source = source_of(config)
    local = source.own_sizes and plan.data > 1 and not plan.bidirectional
    if local and plan.experts * max(plan.batch_ways) == 1:
        plan = replace(plan, local_batches=True)
    source.require_plan(plan)
    if source.own_sizes:
        _require_own_sizes(config, plan)
    return plan


def _require_own_sizes(config: Config, plan: Plan) -> None:
    """Raise ConfigError if images of their own size would have to share a microbatch, or have partners."""
    data, ways = config.data, plan.replicas_together * max(plan.batch_ways)
    if ways > 1:
        raise ConfigError(
            f"{plan} shares out the images of a microbatch, and by `fit` own they differ in size: choose `tiles`, "
            "by which ranks share each image, `data` alone, by which each replica has images of its own, or `fit` "
            "pad"
        )
    if plan.bidirectional:
        raise ConfigError(
            f"`bidirectional` {plan.bidirectional} evaluates two images at once, and by `fit` own they differ in "
            "size: leave it out, or choose `fit` pad"
        )
    replicas, microbatches = plan.replicas, config.parallel.microbatches
    if data.batch_size != replicas * microbatches:
        asked = f"`batch_size` {data.batch_size} with `microbatches` {microbatches}"
        asked += f" of each of `data` {replicas}" if replicas > 1 else ""
        steps = max(1, data.batch_size * config.training.accumulate // replicas)
        raise ConfigError(
            f"{asked}: by `fit` own images differ in size, so a microbatch has one: choose `batch_size` {replicas} "
            f"and `accumulate` {steps}, or `fit` pad"
        )
    if data.mixup:
        raise ConfigError(f"`mixup` {data.mixup} mixes images of one size: choose `fit` pad or resize, not own")
    if not source_of(config).is_pictures:
        raise ConfigError("`fit` own is for pictures and slides: leave it out")


def options_of_plan(plan: Plan, accumulate: int = 1) -> dict[str, Any]:
    """The values of the options that ask for this plan: the inverse of `build_plan`.

    Raises ValueError if so many accumulated batches do not divide the microbatches evenly.
    """
    if plan.microbatches % accumulate:
        raise ValueError(f"`accumulate` {accumulate} does not divide {plan.microbatches} microbatches")
    return {**plan.asked(), "microbatches": plan.microbatches // accumulate}


def title_of(name: str, num_parameters: int, plan: Plan, image: Sequence[int], samples: str = "") -> str:
    """The model, the plan, and the samples of such a batch, in one line; `samples` describes them otherwise."""
    size, ranks = " x ".join(map(str, space_of(image))), counted(plan.num_ranks, "rank")
    shown = samples or (f"samples of {size} tokens" if of_tokens(image) else f"images of {size} px")
    return f"{name}, {num_parameters:,} parameters, on {ranks}: {plan.describe()}, {shown}, batches of {image[0]}"


def engine_options(config: Config) -> dict[str, Any]:
    """How the engine trains. Raises ConfigError where options contradict each other."""
    chosen = config.training
    if chosen.low_precision_weights and chosen.precision == "fp32":
        raise ConfigError("`low_precision_weights` are kept in the type of `precision`: choose bf16 or fp16")
    if config.optimizer.clip_norm is not None and config.optimizer.clip_value is not None:
        raise ConfigError("`clip_norm` and `clip_value` both clip the gradient: choose one")
    return {
        "precision": chosen.precision,
        "low_precision_weights": chosen.low_precision_weights,
        "recompute": chosen.recompute,
        "clip_norm": config.optimizer.clip_norm,
        "clip_value": config.optimizer.clip_value,
        "ema": config.tuning.ema,
        "offload": config.parallel.offload,
    }


def number_of_steps(training: Training, num_batches: int) -> int:
    """How many steps a run makes whose epochs have so many batches."""
    steps, limit = training.epochs * num_batches, training.max_steps
    return steps if limit is None else min(steps, limit)


def flags_with(given: Sequence[str], decided: Callable[[Parallel, int], Mapping[str, Any]]) -> list[str]:
    """The flags of a training that are `given`, but for the options that `decided(parallel, accumulate)` decides.

    A balance that is given is read by it.
    """
    names = decided(Parallel(), 1)
    others = without_flags(Config, given, (name for name in names if name != "balance"))
    config = parse(others)
    return [*others, *flags_for(config, decided(config.parallel, config.training.accumulate))]


@dataclass
class TrainingSpec:
    """What a training computes: the model for so many outputs, and images of so many channels, its plan and optimizer.

    Attributes:
        name: that of the model.
        patch: the side of the patches in which the model sees images; None if it sees them whole.
        batch: the shape of the samples of a step, (N, C, H, W), or (N, T) of tokens, which have no channels.
    """

    config: Config
    num_outputs: int
    channels: int

    def __post_init__(self) -> None:
        config, data = self.config, self.config.data
        self.name, self.source, self.patch = config.model_name, source_of(config), config.model.patches
        self.parallel, self.training, self.tuning, self.run = (
            config.parallel,
            config.training,
            config.tuning,
            config.run,
        )
        self.batch_size, self.streams_images = data.batch_size, config.streams_images
        self.batch = batch_shape(config.samples_per_step, self.channels, data.image_size)

    @property
    def engine(self) -> dict[str, Any]:
        """How the engine trains. Raises ConfigError."""
        return engine_options(self.config)

    @property
    def styles(self) -> dict[str, str] | None:
        """How parameters are cut, by the file that is named; None if by the table for the model. Raises ConfigError."""
        name = self.parallel.tensor_styles
        if name is None:
            return None
        with saying(f"`tensor_styles` {name}", OSError, ValueError, RecursionError):
            found = tomllib.loads(read_regular(Path(name)).decode("utf-8-sig"))
        if not all(isinstance(style, str) for style in found.values()):
            raise ConfigError(f'`tensor_styles` {name}: expected lines such as "blocks.*.up" = "column"')
        return found

    def build(self) -> nn.Module:
        return build_model(self.config, self.num_outputs, self.channels)

    def model(self) -> nn.Module:
        from mpi4dl.parallel.pipeline.split import outline

        return outline(self.build).train()

    def patches_by(self, plan: Plan) -> "PatchOptions | None":
        """How patches are streamed by a plan; None if the model sees whole images. Raises ConfigError where options
        contradict.
        """
        chosen, parallel = self.config.model, self.parallel
        if not chosen.sees_patches:
            return None
        if plan.num_stages > 1 or plan.bidirectional:
            raise ConfigError(
                f"`patches` {chosen.patches} takes one stage, whose ranks share the patches: `tiles` "
                f"1x{plan.num_stages} instead of `stages`"
            )
        if parallel.stream is not None:
            raise ConfigError("`stream` is for images that the model sees whole; `patches` run one after the other")
        from mpi4dl.parallel.disk import Keep
        from mpi4dl.parallel.streaming.leading_part import segments_of
        from mpi4dl.parallel.streaming.patches import PatchOptions

        at_once, patches = self.source.patches_shown(chosen.patches_at_once, parallel.stream_norm)
        remark = f"{patches}, aggregated by {chosen.aggregator}"
        keep = Keep(parallel.stream_keep or "device")
        return PatchOptions(at_once, parallel.stream_norm, segments_of(parallel.stream_segments), keep, remark)

    def plan(self, **changed: Any) -> Plan:
        """The plan of the configuration with these options `changed`. Raises ConfigError."""
        return build_plan(with_values(self.config, changed))

    def optimizer(self, parameters: Iterable[Any]) -> torch.optim.Optimizer:
        return build_optimizer(self.config, parameters)

    def require_training(self, num_batches: int) -> None:
        """Raise ConfigError for frozen parameters, an optimizer or a schedule that cannot be, of epochs of so many
        batches.
        """
        groups_of(self.config, self.model())
        optimizer = self.optimizer([nn.Parameter(torch.zeros(2, 2))])
        build_schedule(self.config, optimizer).begin(number_of_steps(self.training, num_batches))

    def of_batches(self, size: int, image_size: tuple[int, ...] | None = None) -> Self:
        """The same with batches of this size; with an `image_size` these are made of patches, in one step."""
        changed: dict[str, Any] = {"batch_size": size}
        if image_size is not None:
            changed |= {"image_size": image_size, "accumulate": 1, "min_tissue": 0.0}
        return replace(self, config=with_values(self.config, changed))
