"""Which losses and metrics are better when higher: the one declaration of it. It imports no torch, for reports."""

from collections.abc import Mapping
from typing import Any

# Of every loss and metric of ours, whether higher is better. Options, the best weights and reports read this alone.
HIGHER_IS_BETTER: Mapping[str, bool] = {
    "loss": False,
    "bits_per_byte": False,
    "mae": False,
    "lpips": False,
    "mse": False,
    "rmse": False,
    "accuracy": True,
    "balanced_accuracy": True,
    "pixel_accuracy": True,
    "f1": True,
    "auc": True,
    "average_precision": True,
    "dice": True,
    "iou": True,
    "r2": True,
    "psnr": True,
    "ssim": True,
    "concordance": True,
}


def higher_is_better(name: str, metric: Any = None) -> bool | None:
    """Whether higher values of a metric are better; None if nobody says so.

    Args:
        name: as a validation calls it, without `val_`; `NAME/KEY` is one of several values of the metric NAME.
        metric: the user's own metric of this name: an object, a class or a function, whose attribute `higher_is_better`
            counts, as torchmetrics' metrics have it. Of a collection it is that of the metric KEY.
    """
    own, _, key = name.partition("/")
    if metric is not None:
        found = getattr(metric, "higher_is_better", None)
        if key and not isinstance(found, bool):
            try:
                found = getattr(metric[key], "higher_is_better", None)
            except (TypeError, KeyError, AttributeError, IndexError):
                found = None
        if isinstance(found, bool):
            return found
    return HIGHER_IS_BETTER.get(key or own)
