"""The options of what is learnt and measured."""

from dataclasses import dataclass
from typing import Any

from mpi4dl.options.declare import option
from mpi4dl.options.kinds import COUNT, NAME, PARTS, SHARE, WEIGHTS, choice, optional

TASK_NAMES = ("classify", "multilabel", "regress", "segment", "survival", "language", "masked")
OF_TEXT = ("language", "masked")


@dataclass(frozen=True)
class Learning:
    metrics: tuple[Any, ...] = option(
        ("auto",),
        "what validation measures beside the loss, such as auc,confusion, or an own one: my_code.py:Metric; auto: what "
        "suits the task, and --monitor; none: nothing",
        PARTS,
    )
    class_weights: str | tuple[float, ...] | None = option(
        None,
        "how much each class counts in the loss: one number for each, or balanced, the less the more samples it has",
        optional(WEIGHTS),
    )
    label_smoothing: float = option(
        0.0, "the share of each label that is given to all classes alike, in losses of probabilities", SHARE
    )
    monitor: str | None = option(
        None,
        "what tells the best weights, which are kept in best.safetensors: val_loss, or a metric such as val_auc; none: "
        "with --patience what suits the task",
        optional(NAME),
    )
    monitor_mode: str = option(
        "auto",
        "whether lower (min) or higher (max) values of --monitor are better; auto: as the metric says, by "
        "`higher_is_better` of an own one",
        choice("auto", "min", "max"),
    )
    patience: int | None = option(
        None, "stop after so many validations in a row that were no better; none: never", optional(COUNT)
    )
