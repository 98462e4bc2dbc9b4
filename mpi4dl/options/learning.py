"""The options of what is learnt and measured."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mpi4dl.options.declare import instead, option, same_as
from mpi4dl.options.kinds import (
    BOOLEAN,
    COUNT,
    EPOCHS,
    NAME,
    NUMBERS,
    PARTS,
    PATTERNS,
    PROPER_FRACTION,
    SHARE,
    WEIGHTS,
    choice,
    optional,
)

TASK_NAMES = ("classify", "multilabel", "regress", "segment", "survival", "language", "masked")


@dataclass(frozen=True)
class Learning:
    """Metrics, weights of classes, the best weights, and early stopping."""

    metrics: tuple[Any, ...] = option(
        ("auto",),
        "metrics of validation besides the loss, such as auc,confusion, or your own: my_code.py:Metric; auto: by the "
        "task, and --monitor; none: no metrics",
        PARTS,
        known_as=same_as("metric eval-metric eval-metrics"),
    )
    class_weights: str | tuple[float, ...] | None = option(
        None,
        "weight of each class in the loss: a number for each, or balanced, inverse to its number of samples",
        optional(WEIGHTS),
        known_as=same_as("class-weight pos-weight"),
    )
    label_smoothing: float = option(
        0.0,
        "share of each label that is spread over all classes, in losses of probabilities",
        SHARE,
        known_as=same_as("smoothing label-smoothing-factor"),
    )
    monitor: str | None = option(
        None,
        "the metric that selects best.safetensors: val_loss, or a metric such as val_auc; none: with --patience by "
        "the task",
        optional(NAME),
        known_as=same_as("metric-for-best-model checkpoint-metric"),
    )
    monitor_mode: str = option(
        "auto",
        "whether lower (min) or higher (max) values of --monitor are better; auto: by the metric, or "
        "`higher_is_better` of your own",
        choice("auto", "min", "max"),
        known_as=instead("use {option} max", "greater-is-better"),
    )
    patience: int | None = option(
        None,
        "stop after this number of validations without improvement; none: never",
        optional(COUNT),
        known_as=same_as("early-stopping-patience")
        | instead("use {option} N, which counts validations that were no better", "early-stopping"),
    )


# The options of fine-tuning: initial weights, and settings of parameters and modules by their names.


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
    strict: bool = option(False, "refuse weights if any name or shape differs from the model's", BOOLEAN)
    freeze: tuple[str, ...] = option(
        (),
        "parameters to freeze, such as layer1.*,bn*",
        PATTERNS,
        known_as=same_as("freeze-layers")
        | instead("use {option} with patterns of names, such as layer1.*,bn*", "freeze-backbone"),
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
