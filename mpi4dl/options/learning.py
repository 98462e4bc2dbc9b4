"""The options of what is learnt and measured."""

from dataclasses import dataclass
from typing import Any

from mpi4dl.options.declare import instead, option, same_as
from mpi4dl.options.kinds import COUNT, NAME, PARTS, SHARE, WEIGHTS, choice, optional

TASK_NAMES = ("classify", "multilabel", "regress", "segment", "survival", "language", "masked")
OF_TEXT = ("language", "masked")


@dataclass(frozen=True)
class Learning:
    """Metrics, weights of classes, the best weights, and early stopping."""

    metrics: tuple[Any, ...] = option(
        ("auto",),
        "what validation measures beside the loss, such as auc,confusion, or an own one: my_code.py:Metric; auto: what "
        "suits the task, and --monitor; none: nothing",
        PARTS,
        known_as=same_as("metric eval-metric eval-metrics"),
    )
    class_weights: str | tuple[float, ...] | None = option(
        None,
        "how much each class counts in the loss: one number for each, or balanced, the less the more samples it has",
        optional(WEIGHTS),
        known_as=same_as("class-weight pos-weight"),
    )
    label_smoothing: float = option(
        0.0,
        "the share of each label that is given to all classes alike, in losses of probabilities",
        SHARE,
        known_as=same_as("smoothing label-smoothing-factor"),
    )
    monitor: str | None = option(
        None,
        "what tells the best weights, which are kept in best.safetensors: val_loss, or a metric such as val_auc; none: "
        "with --patience what suits the task",
        optional(NAME),
        known_as=same_as("metric-for-best-model checkpoint-metric"),
    )
    monitor_mode: str = option(
        "auto",
        "whether lower (min) or higher (max) values of --monitor are better; auto: as the metric says, by "
        "`higher_is_better` of an own one",
        choice("auto", "min", "max"),
        known_as=instead("use {option} max", "greater-is-better"),
    )
    patience: int | None = option(
        None,
        "stop after so many validations in a row that were no better; none: never",
        optional(COUNT),
        known_as=same_as("early-stopping-patience")
        | instead("use {option} N, which counts validations that were no better", "early-stopping"),
    )
