"""Epochs and steps, the loss, precision, metrics, and when training ends."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mpi4dl.options.declare import instead, option, same_as
from mpi4dl.options.kinds import (
    AUTO,
    BOOLEAN,
    COUNT,
    KEYWORDS,
    NAME,
    PART,
    PARTS,
    SEED,
    SHARE,
    WEIGHTS,
    choice,
    optional,
    or_auto,
)
from mpi4dl.options.presets import PRESETS


@dataclass(frozen=True)
class Training:
    """Epochs and steps, the loss, precision, and validation."""

    preset: str = option(
        "none",
        "defaults for a kind of training; --print-config shows them",
        choice("none", *PRESETS),
        brief="defaults for finetune, mil, segment, gigapixel or pretrain",
        known_as=same_as("recipe"),
    )

    epochs: int = option(
        AUTO,
        "number of passes over all images; auto: by the task",
        or_auto(COUNT),
        brief="number of passes over all images",
        known_as=same_as("num-epochs max-epochs num-train-epochs n-epochs"),
    )
    accumulate: int = option(
        1,
        "number of batches of one step",
        COUNT,
        known_as=same_as(
            "grad-accum grad-accum-steps gradient-accumulation-steps accumulate-grad-batches accum-iter update-freq"
        ),
    )
    max_steps: int | None = option(
        None,
        "stop after this number of steps; none: after the epochs",
        optional(COUNT),
        known_as=same_as("max-iter max-iters num-steps train-iters iterations total-steps max-train-steps"),
    )
    loss: Any = option(
        None,
        "the loss: cross_entropy, bce, dice, focal, mse, l1, huber, charbonnier, ssim, ms_ssim, perceptual, cox, or a "
        "sum such as dice+focal; or your own such as my_code.py:loss(outputs, targets); none: by the task",
        optional(PART),
        brief="cross_entropy, dice, ... or your own",
        known_as=same_as("criterion loss-fn loss-function"),
    )
    loss_options: Mapping[str, Any] = option(
        {},
        "options of the loss, such as gamma=1.5, delta=0.5, ties=breslow, vgg=vgg16.pth, or arguments of your own",
        KEYWORDS,
    )
    precision: str = option(
        "fp32",
        "the type to compute in",
        choice("fp32", "bf16", "fp16"),
        brief="fp32, bf16 or fp16",
        known_as=same_as("dtype mixed-precision amp-dtype")
        | instead("use {option} bf16 or {option} fp16", "amp")
        | instead("use {option} fp16", "fp16 half")
        | instead("use {option} bf16", "bf16"),
    )
    low_precision_weights: bool = option(
        False, "keep the weights in bf16 or fp16, too, with fp32 master weights in the optimizer", BOOLEAN
    )
    recompute: bool = option(
        False,
        "recompute activations in the backward pass, to save memory",
        BOOLEAN,
        brief="recompute activations, to save memory",
        known_as=instead(
            "use {option}",
            "gradient-checkpointing grad-checkpointing activation-checkpointing activation-checkpoint "
            "checkpoint-activations recompute-activations",
        ),
    )
    seed: int = option(
        0, "the seed of weights, order and augmentation", SEED, known_as=same_as("random-seed manual-seed")
    )
    eval_every: int | None = option(
        1,
        "number of epochs between validations; none: no validation",
        optional(COUNT),
        known_as=same_as("check-val-every-n-epoch val-interval eval-freq")
        | instead("leave it out: each epoch ends with a validation; {option} N: each Nth", "enable-evaluation")
        | instead(
            "run the command evaluate, or name images for validation with {option}",
            "do-eval test-only evaluate validate",
        )
        | instead("use {option} N, which counts epochs", "eval-steps"),
    )


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
        known_as=same_as("metric-for-best-model checkpoint-metric")
        | instead("leave it out, or give your metric an attribute `higher_is_better`", "greater-is-better"),
    )
    patience: int | None = option(
        None,
        "stop after this number of validations without improvement; none: never",
        optional(COUNT),
        known_as=same_as("early-stopping-patience")
        | instead("use {option} N, which counts validations that were no better", "early-stopping"),
    )
