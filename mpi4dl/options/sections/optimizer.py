"""The optimizer, its schedule, and what begins trained or stays as it is."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mpi4dl.options.declare import instead, option, same_as
from mpi4dl.options.kinds import (
    AUTO,
    BOOLEAN,
    COUNT_OR_SHARE,
    EPOCHS,
    KEYWORDS,
    LORA,
    NAME,
    NOT_NEGATIVE,
    NUMBERS,
    PART,
    PATTERNS,
    POSITIVE,
    PROPER_FRACTION,
    TEXT,
    choice,
    optional,
    or_auto,
)


@dataclass(frozen=True)
class Optimizer:
    """The optimizer, the learning rate and its schedule."""

    optimizer: Any = option(
        AUTO,
        "a class of torch.optim, or your own such as my_code.py:Lion; auto: AdamW",
        PART,
        brief="a class of torch.optim, or your own",
        known_as=same_as("opt optim optimizer-name"),
    )
    lr: float = option(
        AUTO,
        "the learning rate; auto: by the task, 0.01 for SGD, or the default of another optimizer",
        or_auto(NOT_NEGATIVE),
        brief="the learning rate",
        known_as=same_as("learning-rate base-lr lr0 initial-lr"),
    )
    optimizer_options: Mapping[str, Any] = option(
        AUTO,
        "keyword arguments of the optimizer, such as momentum=0.9; auto: for AdamW the weight decay for the task",
        or_auto(KEYWORDS),
        known_as=same_as("opt-args optimizer-args optim-args")
        | instead("use {option} momentum={value} with --optimizer SGD", "momentum sgd-momentum")
        | instead("use {option} weight_decay={value}", "weight-decay wd")
        | instead("use {option} betas=(0.9,0.999)", "betas opt-betas adam-beta1 adam-beta2")
        | instead("use {option} eps={value}", "eps opt-eps adam-epsilon")
        | instead("use {option} momentum=0.9,nesterov=true with --optimizer SGD", "nesterov"),
    )
    scheduler: str = option(
        "",
        "a class of torch.optim.lr_scheduler; empty: a constant learning rate",
        TEXT,
        known_as=instead("use {option} ExponentialLR --scheduler-options gamma={value}", "learning-rate-decay"),
    )
    scheduler_options: Mapping[str, Any] = option(
        {}, "keyword arguments of the scheduler, such as milestones=[30,60]", KEYWORDS, needs=("scheduler",)
    )
    lr_schedule: str = option(
        AUTO,
        "how the learning rate falls to 0 over the steps: not (constant), linearly, or as half a cosine; auto: cosine, "
        "unless there is a --scheduler",
        choice(AUTO, "constant", "linear", "cosine"),
        known_as=same_as("lr-scheduler-type sched lr-policy")
        | instead("use {option} linear or cosine, or --scheduler with a class of PyTorch", "lr-scheduler")
        | instead("use --scheduler CosineAnnealingLR --scheduler-options T_max=EPOCHS,eta_min={value}", "min-lr"),
    )
    warmup: int | float = option(
        AUTO,
        "number or share of the first steps, in which the learning rate rises from a hundredth; auto: 0.05, or 0 for a "
        "constant rate",
        or_auto(COUNT_OR_SHARE),
        known_as=same_as("warmup-steps num-warmup-steps warmup-ratio")
        | instead("use {option} N, which counts steps, not epochs", "warmup-epochs lr-warmup-epochs"),
    )
    clip_norm: float | None = option(
        None,
        "clip the norm of the gradient; none: no limit",
        optional(POSITIVE),
        known_as=same_as("clip-grad clip-grad-norm max-grad-norm gradient-clip-val grad-clip gradient-clipping"),
    )
    clip_value: float | None = option(None, "clip each element of the gradient; none: no limit", optional(POSITIVE))


@dataclass(frozen=True)
class Tuning:
    """Fine-tuning: initial weights, frozen parameters, rates by name, EMA."""

    weights: str | None = option(
        None,
        "initial weights: a file of PyTorch or safetensors, a run, torchvision's such as ResNet50_Weights.DEFAULT, or "
        "pretrained, those of the model's package, both from its cache; none: random",
        optional(NAME),
        brief="initial weights: a file, a run, or pretrained",
        known_as=same_as("pretrained-weights initial-checkpoint init-checkpoint load-from init-from finetune")
        | instead("use {option} pretrained", "pretrained"),
    )
    strict: bool = option(
        False, "refuse weights if any name or shape differs from the model's", BOOLEAN, needs=("weights",)
    )
    freeze: tuple[str, ...] = option(
        (),
        "parameters to freeze, such as layer1.*,bn*",
        PATTERNS,
        known_as=same_as("freeze-layers")
        | instead("use {option} with patterns of names, such as layer1.*,bn*", "freeze-backbone"),
    )
    lora: Mapping[str, Any] | None = option(
        None,
        "train low-rank adapters of the linear layers whose names end so, and the last layer or the aggregator; r: "
        "rank, alpha: scale times r, dropout, train: more modules to train; none: no adapters",
        optional(LORA),
        brief="train low-rank adapters of some layers alone",
    )
    unfreeze: tuple[tuple[int, str], ...] = option(
        (), "frozen parameters to train from an epoch on, such as 3:layer4.*,5:layer3.*", EPOCHS
    )
    eval_mode: tuple[str, ...] = option(
        (), "modules that stay in evaluation mode during training, such as bn*,*.bn*", PATTERNS
    )
    lr_of: Mapping[str, float] = option(
        {}, "learning rates of parameters by name; the first match counts: head.*=0.01,layer4.*=0.001", NUMBERS
    )
    weight_decay_of: Mapping[str, float] = option(
        {}, "weight decays of parameters by name, such as *.bias=0,*bn*=0", NUMBERS
    )
    ema: float | None = option(
        None,
        "decay of an average of the weights, such as 0.999, for validation and ema.safetensors; none: no average",
        optional(PROPER_FRACTION),
        known_as=same_as("model-ema-decay ema-decay") | instead("use {option} 0.999", "model-ema"),
    )
