"""Losses by name, and those of the training command: cross entropy of images with one label each, or of tokens."""

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mpi4dl.comm import Refusal
from mpi4dl.tasks.formulas import (
    IGNORED,
    BatchLoss,
    BinaryCrossEntropy,
    Counting,
    CrossEntropy,
    Dice,
    Difference,
    Focal,
    SumOfLosses,
)
from mpi4dl.tasks.heads import OfHeads, main_output
from mpi4dl.tasks.survival import Cox


def cross_entropy(
    class_weights: Sequence[float] | None = None, ignore_index: int = IGNORED, label_smoothing: float = 0.0
) -> BatchLoss:
    return CrossEntropy(_counting(class_weights, ignore_index), label_smoothing)


def bce(
    class_weights: Sequence[float] | None = None, ignore_index: int = IGNORED, label_smoothing: float = 0.0
) -> BatchLoss:
    return BinaryCrossEntropy(_counting(class_weights, ignore_index), label_smoothing)


def dice(class_weights: Sequence[float] | None = None, ignore_index: int = IGNORED, binary: bool = False) -> BatchLoss:
    return Dice(_counting(class_weights, ignore_index), binary)


def focal(
    class_weights: Sequence[float] | None = None,
    ignore_index: int = IGNORED,
    gamma: float = 2.0,
    binary: bool = False,
) -> BatchLoss:
    return Focal(_counting(class_weights, ignore_index), gamma, binary)


def mse() -> BatchLoss:
    return Difference(F.mse_loss)


def l1() -> BatchLoss:
    return Difference(F.l1_loss)


def huber(delta: float = 1.0) -> BatchLoss:
    return Difference(F.huber_loss, delta=delta)


def cox(ties: str = "efron") -> BatchLoss:
    return Cox(ties)


LOSSES: Mapping[str, Callable[..., BatchLoss]] = {
    function.__name__: function for function in (cross_entropy, bce, dice, focal, mse, l1, huber, cox)
}


def build_loss(name: str, **options: Any) -> BatchLoss:
    """The loss of this name, or the sum of several, as in "dice+cross_entropy"; each takes the options that it knows.

    Raises ValueError for a name that is none, and for options that none of them takes, or that are no values for it.
    """
    names = [each.strip() for each in name.split("+")]
    unknown = [each for each in names if each not in LOSSES]
    if unknown:
        close = difflib.get_close_matches(unknown[0].lower(), LOSSES, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ValueError(
            f"`loss` {unknown[0]!r} is unknown: choose of {', '.join(LOSSES)}, several with + between them, or your "
            f"own such as my_code.py:loss{hint}"
        )
    taken = [set(inspect.signature(LOSSES[each]).parameters) for each in names]
    stray = options.keys() - set().union(*taken)
    if stray:
        known = ", ".join(sorted(set().union(*taken))) or "none"
        raise ValueError(f"`loss` {name} does not take {', '.join(sorted(stray))}; its options are: {known}")
    losses = []
    for each, known_options in zip(names, taken, strict=True):
        try:
            losses.append(LOSSES[each](**{key: value for key, value in options.items() if key in known_options}))
        except TypeError as error:
            raise ValueError(f"`loss` {each} cannot take {options}: {error}") from None
    return losses[0] if len(losses) == 1 else SumOfLosses(losses, (1.0,) * len(losses))


def _counting(class_weights: Sequence[float] | None, ignore_index: int) -> Counting:
    if class_weights is not None and (min(class_weights) < 0 or not sum(class_weights) > 0):
        raise ValueError(f"`class_weights` {list(class_weights)} must be at least 0, and not all of them 0")
    return Counting(None if class_weights is None else tuple(map(float, class_weights)), ignore_index)


def balanced_weights(labels: Sequence[int] | Tensor, num_classes: int) -> tuple[float, ...]:
    """For each class n / (classes * how many of the n labels are it), as scikit-learn balances; 0 without any."""
    return weights_of_counts(torch.bincount(torch.as_tensor(labels).flatten(), minlength=num_classes))


def weights_of_counts(counts: Tensor) -> tuple[float, ...]:
    """The same, of how many labels are of each class."""
    counts = counts.double()
    shares = counts.sum() / (int((counts > 0).sum()) * counts)
    return tuple(torch.where(counts > 0, shares, 0.0).tolist())


def require_logits(outputs: Any, targets: Any = None) -> None:
    """Raise Refusal unless a model's outputs, or the main one of them, are one row of logits per image."""
    logits = main_output(outputs)
    if not isinstance(logits, Tensor) or logits.dim() != 2:
        raise Refusal(
            f"the model's output has {shape_in_words(logits)}, but `task` classify, images with one label each, needs "
            "(batch, classes): choose another `model`, or the `task` that it is for"
        )


def shape_in_words(x: Any) -> str:
    return f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"type {type(x).__name__}"


classification_loss = OfHeads(cross_entropy(), require_logits)
token_loss = OfHeads(CrossEntropy(Counting(), classes_last=True))
