"""The plan that a configuration asks for, and how the engine trains by it."""

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mpi4dl._wording import counted
from mpi4dl.options.config import Config, ConfigError
from mpi4dl.options.parts import call, load
from mpi4dl.options.sources import source_of
from mpi4dl.parallel.inputs import batch_shape, of_tokens, space_of
from mpi4dl.parallel.plan import Plan


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
    return plan


def options_of_plan(plan: Plan, accumulate: int = 1) -> dict[str, Any]:
    """The values of the options that ask for this plan: the inverse of `build_plan`.

    Raises ValueError if so many accumulated batches do not divide the microbatches evenly.
    """
    if plan.microbatches % accumulate:
        raise ValueError(f"`accumulate` {accumulate} does not divide {plan.microbatches} microbatches")
    return {**plan.asked(), "microbatches": plan.microbatches // accumulate}


def batch_of(config: Config, channels: int) -> tuple[int, ...]:
    """The shape of a batch of images of so many channels, or of tokens, which have none."""
    return batch_shape(config.samples_per_step, channels, config.data.image_size)


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


def number_of_steps(config: Config, num_batches: int) -> int:
    """How many steps a run makes whose epochs have so many batches."""
    steps, limit = config.training.epochs * num_batches, config.training.max_steps
    return steps if limit is None else min(steps, limit)


def build_callbacks(config: Config) -> list[Any]:
    """The callbacks of a run. Raises ConfigError."""
    made = [load("callbacks", part) for part in config.run.callbacks]
    return [call("callbacks", part) if inspect.isclass(part) else part for part in made]
