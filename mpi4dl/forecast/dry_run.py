"""What training would take, said without training: parameters, activations, messages, the timeline."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from mpi4dl._wording import counted
from mpi4dl.engine import Engine
from mpi4dl.engine.precision import AUTOCAST
from mpi4dl.forecast.anatomy import HEAP_KEPT, HEAP_RETURNED, OF_TENSORS, Allocator
from mpi4dl.forecast.outlook import Forecaster
from mpi4dl.forecast.overview import Overview, overview, samples_in_words, samples_of
from mpi4dl.forecast.passes import passes_of_patches
from mpi4dl.models.patches import PatchModel, patches_in
from mpi4dl.options.build import engine_options
from mpi4dl.options.config import Config, ConfigError
from mpi4dl.options.kinds import part_name
from mpi4dl.options.models import bag_options, build_model, tensor_styles
from mpi4dl.options.optimizers import build_optimizer
from mpi4dl.parallel import spatial
from mpi4dl.parallel.costs.prices import Clockwork
from mpi4dl.parallel.costs.timing import planned_cuts
from mpi4dl.parallel.inputs import batch_shape
from mpi4dl.parallel.pipeline.split import outline
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.streaming.choice import Wanted
from mpi4dl.parallel.tensor.cutting import with_cuts
from mpi4dl.tasks.losses import require_logits
from mpi4dl.tasks.task import Task


def title(config: Config, engine: Engine) -> str:
    """What is trained, and how, in one line."""
    shown = samples_in_words(batch_of(config, 0 if config.data.text is not None else 1))
    return (
        f"{config.model_name}, {engine.held.num_parameters:,} parameters, on {counted(engine.comm.size, 'rank')}: "
        f"{engine.plan.describe()}, {shown}, batches of {config.samples_per_step}, "
        f"{engine.device.type}"
    )


def goal(config: Config, engine: Engine, task: Task, num_steps: int) -> str:
    """The task, its loss, the optimizer, the steps and how many parameters are trained, in one line."""
    chosen, held = config.optimizer, engine.held
    rate = f"learning rate {chosen.lr:g}"
    if chosen.scheduler or chosen.lr_schedule != "constant":
        rate += f" by {chosen.scheduler or chosen.lr_schedule}"
    trained = sum(math.prod(held.shapes[name][0]) for name in held.trained if name in held.shapes)
    loss = part_name(config.training.loss or task.default_loss)
    parts = [f"task {task.name}, loss {loss}, {part_name(chosen.optimizer)}, {rate}, {counted(num_steps, 'step')}"]
    if config.training.max_steps is None:
        parts.append(f" in {counted(config.training.epochs, 'epoch')}")
    if trained != held.num_parameters:
        parts.append(f"; {trained:,} of {held.num_parameters:,} parameters are trained")
    return "".join(parts)


def batch_of(config: Config, channels: int) -> tuple[int, ...]:
    """The shape of a batch of images of so many channels, or of tokens, which have none."""
    return batch_shape(config.samples_per_step, channels, config.data.image_size)


def without_effect(config: Config, engine: Engine) -> list[str]:
    """What to say of options that were given and change nothing here."""
    chosen, plan = config.parallel, engine.plan
    shared = any(len(plan.holders(stage)) > 1 for stage in range(plan.num_stages))
    found = []
    if chosen.offload == "cpu" and engine.device.type == "cpu":
        found.append("`offload` cpu has no effect: the model is on the CPU itself; `offload` disk saves memory there")
    if chosen.zero and not shared:
        found.append(
            f"`zero` {chosen.zero} has no effect: no two ranks hold the same weights; `data` and `tiles` make such"
        )
    if chosen.zero and shared and chosen.allreduce != "auto":
        found.append(f"`allreduce` {chosen.allreduce} has no effect: `zero` {chosen.zero} shares gradients out instead")
    if chosen.balance != "auto" and plan.num_stages == 1:
        found.append("`balance` has no effect: the model is in one stage; `stages` says in how many")
    return found


def look_ahead(config: Config, plan: Plan, num_classes: int, channels: int, **options: Any) -> Overview:
    """What training by this configuration would be; `options` are others of `overview`.

    Of patches one visit is looked at, an image that has just so many of them for each rank, and all are counted.
    """
    chosen = engine_options(config)
    shown, bags = config, bag_options(config, plan)
    if bags is not None:
        rows, cols = plan.shape(0).space
        patch = config.model.patches or 1
        size, samples = (rows * patch, cols * patch * bags.at_once), plan.shape(0).batch * plan.num_microbatches
        visit = replace(config.data, image_size=size, batch_size=samples)
        training = replace(config.training, accumulate=1)
        shown = replace(config, data=visit, training=training, model=replace(config.model, min_tissue=0.0))
        options["stream"] = None
    found = overview(
        config.model_name,
        lambda: build_model(shown, num_classes, channels),
        plan,
        batch_of(shown, channels),
        optimizer=partial(build_optimizer, config),
        accept=require_logits if config.data.task in ("auto", "classify") and config.data.text is None else anything,
        allocator=allocator_of(config, str(options.get("device", "cpu"))),
        low_precision=AUTOCAST[chosen["precision"]] if chosen["low_precision_weights"] else None,
        averaged=config.tuning.ema is not None,
        styles=tensor_styles(config),
        recompute=config.training.recompute,
        **options,
    )
    if bags is None:
        return found
    whole, model = batch_of(config, channels), outline(lambda: build_model(config, num_classes, channels)).train()
    assert isinstance(model, PatchModel)
    passes = passes_of_patches(config, plan, model, bags, channels)
    patches = whole[0] * patches_in(config.data.image_size, model.patch)
    share = samples * patches_in(size, model.patch) / patches
    remark = f"{bags.remark}; {counted(passes.visits, 'visit')} of each rank in every pass over them"
    return found.of_patches(whole, passes, share, remark)


def anything(outputs: Any) -> None:
    """Outputs of other tasks are known by their targets."""


def allocator_of(config: Config, device: str) -> Allocator:
    """Who gives out memory there, as the flags choose it."""
    if device.startswith("cuda"):
        return OF_TENSORS
    return HEAP_KEPT if config.parallel.keep_freed_memory else HEAP_RETURNED


def require_rules(config: Config, plan: Plan, num_classes: int, channels: int) -> None:
    """Raise ValueError if a model in one stage calls what has no rule, on tiles or a batch that ranks share.

    A model in several stages is not looked at: which of its stages share what is known to their ranks.
    """
    if plan.num_stages > 1 or plan.is_plain(0) or config.model.patches is not None:
        return
    batch = batch_of(config, channels)
    try:
        model = outline(lambda: build_model(config, num_classes, channels))
        cuts = planned_cuts(model, plan, tensor_styles(config))
        spatial.require_rules(
            model, (samples_of(plan, batch), *batch[1:]), plan.shape(0), partial(with_cuts, cutting=cuts)
        )
    except (spatial.NoRule, ValueError) as problem:
        raise ValueError(f"`model` {config.model_name}: {problem}") from problem


def explain(config: Config, engine: Engine, num_classes: int, channels: int) -> Iterator[str]:
    """What each operator of a model in one stage sends, or who holds which stage; and the memory of a rank."""
    held = engine.held
    clockwork, balance = Clockwork.of_user(), held.counts if held.plan.num_stages > 1 else "flops"
    found = look_ahead(
        config, held.plan, num_classes, channels, balance=balance, clockwork=clockwork, stream=held.stream
    )
    yield title(config, engine)
    if engine.plan.num_stages == 1 and config.model.patches is None:
        model = held.modules_of[0]
        if held.cutting:  # of which the rank has no more than its part
            model = outline(lambda: build_model(config, num_classes, channels))
        try:
            as_held = partial(with_cuts, cutting=held.cutting)
            yield str(spatial.explain(model.train(), batch_of(config, channels), held.parts[0, 0].grid, as_held))
        except spatial.NoRule as problem:
            raise ValueError(f"`model` {config.model_name}: {problem}") from problem
        yield from (*found.sums(), *found.streaming(), *found.memory())
    elif config.model.patches is not None:
        yield from (*found.streaming(), *found.memory())
    else:
        yield from (*found.stages(), *found.sums(), *found.images())
        yield from (*found.streaming(), *found.memory(), *found.ranks())


def build_forecaster(
    config: Config, num_classes: int, channels: int, clockwork: Clockwork, device: torch.device
) -> Forecaster:
    """What foresees plans of this configuration. Raises ValueError where they are not of whole images."""
    if config.model.patches is not None:
        raise ConfigError(f"plans are searched for models that see whole images, not `patches` {config.model.patches}")
    chosen = engine_options(config)
    return Forecaster(
        lambda: build_model(config, num_classes, channels),
        batch_of(config, channels),
        clockwork,
        device,
        partial(build_optimizer, config),
        allocator_of(config, device.type),
        AUTOCAST[chosen["precision"]] if chosen["low_precision_weights"] else None,
        config.tuning.ema is not None,
        Wanted(config.parallel.stream_until, config.parallel.stream_norm, config.parallel.stream_segments),
        tensor_styles(config),
    )
