"""What a configuration names, built: the model, the images, the optimizer, the learning rate's schedule."""

import inspect
import os
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mpi4dl import datasets, models
from mpi4dl._files import read_regular
from mpi4dl._memory import return_freed_memory
from mpi4dl._wording import counted
from mpi4dl.comm import Communicator, Refusal
from mpi4dl.datasets.split import Named
from mpi4dl.datasets.view import Fit
from mpi4dl.models.aggregators import AGGREGATORS, headless
from mpi4dl.models.patches import COLOUR, PatchModel, patches_in
from mpi4dl.models.registry import takes, takes_channels
from mpi4dl.options.config import Config, ConfigError
from mpi4dl.options.declare import nearest
from mpi4dl.parallel.costs.prices import Clockwork
from mpi4dl.parallel.costs.timing import Column, time_column
from mpi4dl.parallel.inputs import batch_shape
from mpi4dl.parallel.pipeline.held import ChooseStream, Held, split
from mpi4dl.parallel.pipeline.split import outline, unfit
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.spatial import NoRule, gathering
from mpi4dl.parallel.streaming.bags import BagOptions, visit_patches
from mpi4dl.parallel.streaming.opening import StreamOptions
from mpi4dl.parallel.streaming.rehearsal import CannotStream

PER_STEP = ("OneCycleLR", "CyclicLR")
RGB = ("red", "green", "blue")


def by_torch_name(kind: str, home: Any, base: type, name: str, *args: Any, **options: Any) -> Any:
    """An instance of the class `name` of a torch module. Raises ConfigError for unknown names and options."""
    known = [n for n, c in vars(home).items() if inspect.isclass(c) and issubclass(c, base) and c is not base]
    if name not in known:
        raise ConfigError(f"--{kind} {name}: {home.__name__} has no such class{nearest(name, known)}")
    kind_of = getattr(home, name)
    legal = list(inspect.signature(kind_of).parameters)[len(args) :]
    for option in options:
        if option not in legal:
            raise ConfigError(f"--{kind} {name} has no option {option}{nearest(option, legal)}")
    try:
        return kind_of(*args, **options)
    except Exception as error:  # torch raises anything for values that it cannot use
        raise ConfigError(f"--{kind} {name} does not take these options {dict(options)}: {error}") from None


def build_plan(config: Config) -> Plan:
    """The plan that the flags ask for. Raises ValueError where they contradict each other."""
    chosen = config.parallel
    return Plan.of(
        stages=chosen.stages,
        tiles=chosen.tiles,
        batch_ways=chosen.batch_ways,
        data=chosen.data,
        microbatches=chosen.microbatches,
        schedule=chosen.schedule,
        bidirectional=chosen.bidirectional,
        chunks=chosen.chunks,
        zero=chosen.zero,
        tensor=chosen.tensor,
        sequence=chosen.sequence,
        experts=chosen.experts,
        moe=chosen.moe,
        moe_pieces=chosen.moe_pieces,
    )


def engine_options(config: Config) -> dict[str, Any]:
    """How the engine trains. Raises ConfigError where options contradict each other."""
    chosen = config.training
    if chosen.low_precision_weights and chosen.precision == "fp32":
        raise ConfigError("--low-precision-weights are kept in the type of --precision: choose bf16 or fp16")
    place, folder = config.parallel.offload, config.parallel.offload_folder
    if folder is not None and place != "disk":
        raise ConfigError(f"--offload-folder {folder} is for --offload disk, but this is --offload {place}")
    if folder is not None and not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"--offload-folder {folder}: no such folder, or one that cannot be written; name another")
    return {
        "precision": chosen.precision,
        "low_precision_weights": chosen.low_precision_weights,
        "recompute": chosen.recompute,
        "halo": config.parallel.halo,
        "clip_norm": config.optimizer.clip_norm,
        "offload": config.parallel.offload,
        "offload_folder": config.parallel.offload_folder,
        "all_reduce": config.parallel.allreduce,
    }


def build_datasets(config: Config, validating: Mapping[str, bool] | None = None) -> tuple[Named, Named]:
    """The training and the validation images; `validating` says of some, by name, which they were before."""
    held_out = max(1, round(config.data.num_samples * config.data.val_fraction))
    return datasets.open(
        config.data.images,
        size=config.data.image_size,
        num_classes=config.model.num_classes or 10,
        num_train=config.data.num_samples,
        num_val=held_out,
        validation_fraction=config.data.val_fraction,
        seed=config.training.seed,
        validating=validating,
    )


def build_views(config: Config, channels: int, fit: Fit) -> tuple[datasets.View, datasets.View]:
    """How training images are shown, varied at random, and how validation images are."""
    data = config.data
    augmentation = datasets.Augmentation(
        crop=0.8 if data.random_crop else 1.0,
        flip_rows=data.flip,
        flip_cols=data.flip,
        brightness=data.jitter,
        contrast=data.jitter,
        saturation=data.jitter if channels == len(RGB) else 0.0,
        flip_depth=data.flip,
    )
    common: Mapping[str, Any] = {"fit": fit, "mean": (data.mean,) * channels, "std": (data.std,) * channels}
    training = datasets.View(data.image_size, augmentation=augmentation, seed=config.training.seed, **common)
    return training, datasets.View(data.image_size, **common)


def number_of_steps(config: Config, num_batches: int) -> int:
    """How many steps a run makes whose epochs have so many batches."""
    steps, limit = config.training.epochs * num_batches, config.training.max_steps
    return steps if limit is None else min(steps, limit)


def build_model(config: Config, num_classes: int, channels: int) -> nn.Module:
    """The whole model, the same on every rank that uses the same seed; for so many channels if it has the option."""
    torch.manual_seed(config.training.seed)
    name, options = config.model.model, config.model.model_options
    tokens, asked = takes(name) == "tokens", "--text" if config.data.text is not None else "--images"
    if tokens != (config.data.text is not None):
        raise ConfigError(f"--model {name} takes {takes(name)}, which {asked} {'have' if tokens else 'has'} not")
    if tokens:
        options = {"vocabulary": num_classes, "context": config.data.context, **options}
        if config.data.document_mask:  # the end of a document is the last of the tokenizer's, before the mask
            options["separator"] = num_classes - (2 if config.data.task == "masked" else 1)
    elif takes_channels(name):
        options = {"in_channels": channels, **options}
    try:
        model = models.build(name, None if tokens else num_classes, **options)
    except TypeError as error:
        raise ConfigError(f"--model {name} does not take these options {dict(options)}: {error}") from None
    return model if config.model.patches is None else _of_patches(config, model, num_classes, channels)


def _of_patches(config: Config, encoder: nn.Module, num_classes: int, channels: int) -> PatchModel:
    """The model that looks at patches by this encoder. Raises ConfigError if it cannot."""
    chosen, patch = config.model, config.model.patches
    assert patch is not None
    if chosen.min_tissue and channels != len(RGB):
        raise ConfigError(
            f"--min-tissue {chosen.min_tissue}: tissue is found by its colour, and images have "
            f"{counted(channels, 'channel')}"
        )
    try:
        patches_in(config.data.image_size, patch)
        num_features = headless(encoder, num_classes)
    except ValueError as error:
        raise ConfigError(f"--patches {patch} of --model {chosen.model}: {error}") from None
    aggregator = AGGREGATORS[chosen.aggregator](num_features, num_classes)
    return PatchModel(encoder, aggregator, patch, chosen.min_tissue, COLOUR / config.data.std)


def hold_model(
    config: Config,
    plan: Plan,
    num_classes: int,
    channels: int,
    comm: Communicator,
    device: torch.device,
    stream: StreamOptions | ChooseStream | None = None,
) -> Held:
    """This rank's stages of the model, on its device. Raises ValueError on all ranks if there are none. Collective.

    The first stage may `stream` its images. The random numbers that training draws follow from --seed, in one
    stage or several.
    """
    torch.manual_seed(config.training.seed)
    check_text(config, plan)
    bags = bag_options(config, plan)
    if bags is not None:
        model = build_model(config, num_classes, channels).to(device)
        assert isinstance(model, PatchModel)
        try:
            visit_patches(model, bags, channels)
        except ValueError as error:
            raise ConfigError(f"--stream-segments {bags.segments} of --model {config.model.model}: {error}") from error
        return Held.whole(model, plan, comm, bags)
    if plan.num_stages == 1 and stream is None:
        model = build_model(config, num_classes, channels)
        return Held.whole(model, plan, comm, styles=tensor_styles(config), device=device)
    try:
        return split(
            lambda: build_model(config, num_classes, channels),
            plan,
            comm,
            device=device,
            seed=config.training.seed,
            balance=config.parallel.balance,
            image=_microbatch(config, plan, channels),
            clockwork=replace(Clockwork.of_user(), time=time_and_tidy),
            stream=stream,
            styles=tensor_styles(config),
        )
    except ConfigError:
        raise
    except CannotStream as error:
        asked = config.parallel.stream
        named = asked if isinstance(asked, str) else "x".join(map(str, asked or ()))
        raise ConfigError(f"--stream {named}: {error}") from error
    except ValueError as error:
        raise ConfigError(f"--model {config.model.model}: {error}") from error


def _microbatch(config: Config, plan: Plan, channels: int) -> tuple[int, ...]:
    """The shape of a microbatch: (N, C, H, W) of images, (N, T) of tokens."""
    return batch_shape(max(1, config.data.batch_size // plan.num_microbatches), channels, config.data.image_size)


def tensor_styles(config: Config) -> dict[str, str] | None:
    """How parameters are cut, by the file that flags name; None if by the table for the model. Raises ConfigError."""
    name = config.parallel.tensor_styles
    if name is None:
        return None
    try:
        found = tomllib.loads(read_regular(Path(name)).decode())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--tensor-styles {name}: {error}") from None
    if not all(isinstance(style, str) for style in found.values()):
        raise ConfigError(f'--tensor-styles {name}: expected lines such as "blocks.*.up" = "column"')
    return found


def check_text(config: Config, plan: Plan) -> None:
    """Raises ConfigError for what is not done with text, or with parameters that are cut."""
    if config.data.text is not None and config.visits:
        raise ConfigError("--stream and --patches are for images, but --text was given")
    if plan.cuts_parameters and config.visits:
        raise ConfigError(f"{plan} with --stream or --patches: visits have whole parameters")


def bag_options(config: Config, plan: Plan) -> BagOptions | None:
    """How patches are visited; None if the model sees whole images. Raises ConfigError where options contradict."""
    chosen = config.model
    if chosen.patches is None:
        if chosen.min_tissue:
            raise ConfigError(f"--min-tissue {chosen.min_tissue} chooses patches, but --patches is missing")
        return None
    if plan.num_stages > 1 or plan.bidirectional:
        raise ConfigError(
            f"--patches {chosen.patches} takes one stage, whose ranks share the patches: --tiles 1x{plan.num_stages} "
            "instead of --stages"
        )
    if config.parallel.stream is not None:
        raise ConfigError("--stream is for images that the model sees whole; --patches are visited one after the other")
    rows, cols = (side // chosen.patches for side in config.data.image_size[-2:])
    which = f", those with at least {100 * chosen.min_tissue:g} % of tissue" if chosen.min_tissue else ""
    remark = (
        f"{rows} x {cols} patches of {chosen.patches} px in each image{which}: {chosen.patches_at_once} at once on "
        f"each rank, {config.parallel.stream_norm} norms, aggregated by {chosen.aggregator}"
    )
    return BagOptions(chosen.patches_at_once, config.parallel.stream_norm, config.parallel.stream_segments or 1, remark)


def time_and_tidy(*site: Any) -> Column:
    """Time atoms, and leave no trace of that in the memory of this rank, which is to be that of training."""
    found = time_column(*site)
    return_freed_memory()
    return found


@contextmanager
def blaming_the_model(config: Config, plan: Plan, num_classes: int, channels: int) -> Iterator[None]:
    """Train in here: errors of operators without a rule, or that the plain model makes too, become a Refusal."""
    name = config.model.model
    try:
        yield
    except Refusal:
        raise
    except datasets.DatasetError as problem:  # no model's fault: a package that reads such images is not installed
        raise Refusal(str(problem)) from problem
    except (RuntimeError, AssertionError, ValueError) as problem:  # NoRule is one: shapes are those of the whole
        model = outline(lambda: build_model(config, num_classes, channels))
        reason = unfit(model, _microbatch(config, plan, channels))
        if reason is None and not isinstance(problem, NoRule | ValueError):
            raise
        raise Refusal(f"--model {name}: {reason or problem}") from problem


def without_rules(config: Config) -> AbstractContextManager[None]:
    """Within it, operators without a rule are gathered or refused, as --no-rule says."""
    return gathering() if config.parallel.no_rule == "gather" else nullcontext()


def number_of_classes(config: Config, classes: Sequence[str]) -> int:
    """What was asked for, or else as many as the images have. Raises ConfigError if that is too few."""
    asked = config.model.num_classes
    if asked is not None and asked < len(classes):
        names = datasets.printable(", ".join(classes[:10]))
        raise ConfigError(f"--num-classes {asked}, but the images have {len(classes)}: {names}")
    return asked or len(classes)


def build_optimizer(config: Config, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    chosen = config.optimizer
    options = {"lr": chosen.lr, **chosen.optimizer_options}
    base = torch.optim.Optimizer
    optimizer = by_torch_name("optimizer", torch.optim, base, chosen.optimizer, parameters, **options)
    try:
        _trial(optimizer, lambda p: p.new_zeros((1,) * p.dim()))
    except Exception as error:
        raise ConfigError(f"--optimizer {chosen.optimizer} cannot make a step here: {error}") from None
    return optimizer


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """What an optimizer will keep beside the parameters, found by a step on others of the same shapes."""
    try:
        states = _trial(optimizer, lambda p: torch.empty_like(p, device="meta"))
    except (RuntimeError, NotImplementedError):  # its step looks at values, or has no kernel without them
        states = _trial(optimizer, torch.zeros_like)
    return sum(value.nbytes for state in states for value in state.values() if isinstance(value, Tensor))


def _trial(optimizer: torch.optim.Optimizer, like: Callable[[Tensor], Tensor]) -> list[Mapping[str, Any]]:
    """The state that an optimizer of this class and these options has after a step."""

    def parameter(p: Tensor) -> Tensor:
        value = like(p.detach()).requires_grad_()
        value.grad = torch.zeros_like(value)
        return value

    groups = [{**group, "params": [parameter(p) for p in group["params"]]} for group in optimizer.param_groups]
    trial: torch.optim.Optimizer = type(optimizer)(groups)  # type: ignore[call-arg]
    trial.step()
    return list(trial.state.values())


@dataclass
class Schedule:
    """The learning rate's schedule: most count epochs, a few count steps, one looks at the validation loss."""

    scheduler: Any

    @property
    def num_steps(self) -> int | None:
        """How many steps the schedule is for; None if it goes on for ever."""
        return getattr(self.scheduler, "total_steps", None)

    def require(self, num_steps: int) -> None:
        """Raise Refusal, alike on all ranks, if a run of so many steps is longer than the schedule."""
        if self.num_steps is not None and self.num_steps < num_steps:
            raise Refusal(f"--scheduler is for {self.num_steps} steps, but there will be {num_steps}")

    def after_step(self) -> None:
        if type(self.scheduler).__name__ in PER_STEP:
            self.scheduler.step()

    def after_epoch(self, validation_loss: float | None) -> None:
        if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            if validation_loss is not None:
                self.scheduler.step(validation_loss)
        elif self.scheduler is not None and type(self.scheduler).__name__ not in PER_STEP:
            self.scheduler.step()


def build_schedule(config: Config, optimizer: torch.optim.Optimizer) -> Schedule:
    chosen = config.optimizer
    if not chosen.scheduler:
        if chosen.scheduler_options:
            raise ConfigError(f"--scheduler-options {dict(chosen.scheduler_options)} are for no --scheduler: name one")
        return Schedule(None)
    home = torch.optim.lr_scheduler
    options = dict(chosen.scheduler_options)

    def schedule(of: torch.optim.Optimizer) -> Schedule:
        return Schedule(by_torch_name("scheduler", home, home.LRScheduler, chosen.scheduler, of, **options))

    trial_optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=chosen.lr, momentum=0.9)
    trial = schedule(trial_optimizer)
    try:
        trial_optimizer.step()
        trial.after_step()
        trial.after_epoch(1.0)
    except Exception as error:
        raise ConfigError(f"--scheduler {chosen.scheduler} cannot go on with {options}: {error}") from None
    return schedule(optimizer)
