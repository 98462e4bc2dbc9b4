"""Probabilities of one class against all others: curves, thresholds, rates at a threshold, and calibration.

    curve = curve_of(scores, positive)               # ROC and precision-recall at each threshold
    threshold = chosen_threshold("youden", curve)    # on validation samples
    CallCounts.of(scores >= threshold, positive).rates()    # sensitivity, specificity, ppv and npv

`scores` (N,) are probabilities, `positive` (N,) says which samples are of the class. A sample is called positive if its
score is at least the threshold. What is not defined, as the sensitivity without a positive, is NaN.
"""

import math
import re
from typing import NamedTuple

import torch
from torch import Tensor

from mpi4dl.tasks.metrics import ThresholdCurve

RATES = ("sensitivity", "specificity", "ppv", "npv")
NUM_BINS = 10  # of probabilities, for calibration
_RULE = re.compile(r"(sensitivity|specificity)=(.+)")


def is_rule(threshold: float | str) -> bool:
    """Whether samples choose this threshold."""
    return isinstance(threshold, str)


def chosen_threshold(rule: str, curve: ThresholdCurve) -> float:
    """The threshold that a rule chooses on a curve; NaN if it has no positives or no negatives.

    | rule | threshold |
    | --- | --- |
    | youden | the one of the largest sensitivity + specificity, the highest of equally good ones |
    | sensitivity=S | the highest one of a sensitivity of S at least |
    | specificity=S | the lowest one of a specificity of S at least |
    """
    if not curve.num_positive or not curve.num_negative:
        return math.nan
    found = _RULE.fullmatch(rule)
    if found is None:
        return float(curve.thresholds[int((curve.sensitivity + curve.specificity).argmax())])
    asked, enough = float(found[2]), getattr(curve, found[1])
    fitting = torch.nonzero(enough >= asked).flatten()
    return float(curve.thresholds[fitting[0] if found[1] == "sensitivity" else fitting[-1]])


class CallCounts(NamedTuple):
    """How many samples were called what they are, and what they are not."""

    true_positives: int
    false_positives: int
    false_negatives: int
    true_negatives: int

    @classmethod
    def of(cls, called: Tensor, positive: Tensor) -> "CallCounts":
        both, num_called, num_positive = int((called & positive).sum()), int(called.sum()), int(positive.sum())
        return cls(both, num_called - both, num_positive - both, len(positive) - num_called - num_positive + both)

    def rates(self) -> dict[str, float]:
        """The rates of `RATES`, NaN where nothing is counted."""
        tp, fp, fn, tn = self
        pairs = ((tp, fn), (tn, fp), (tp, fp), (tn, fn))
        return {
            name: share / (share + rest) if share + rest else math.nan
            for name, (share, rest) in zip(RATES, pairs, strict=True)
        }


class Bin(NamedTuple):
    """Samples with a probability in [low, high), the last in [low, high]: how many, mean probability, and how often."""

    low: float
    high: float
    num_samples: int
    probability: float
    frequency: float


def calibration(scores: Tensor, positive: Tensor, num_bins: int = NUM_BINS) -> list[Bin]:
    """How often samples are positive, by their probability, in bins of equal width: the reliability diagram."""
    scores = scores.double()
    numbers = (scores * num_bins).floor().long().clamp(0, num_bins - 1)
    counts = torch.bincount(numbers, minlength=num_bins)
    sums = torch.bincount(numbers, weights=scores, minlength=num_bins)
    of_positive = torch.bincount(numbers, weights=positive.double(), minlength=num_bins)
    means = ((total / counts).tolist() for total in (sums, of_positive))
    ends = (number / num_bins for number in range(num_bins + 1))
    edges = [*ends]
    return [Bin(*row) for row in zip(edges, edges[1:], counts.tolist(), *means, strict=False)]


def calibration_error(scores: Tensor, positive: Tensor, num_bins: int = NUM_BINS) -> float:
    """The expected calibration error: the mean distance of probability and frequency in bins, weighted by their counts.

    Guo et al. 2017, "On calibration of modern neural networks".
    """
    if not len(scores):
        return math.nan
    bins = calibration(scores, positive, num_bins)
    return sum(each.num_samples * abs(each.probability - each.frequency) for each in bins if each.num_samples) / len(
        scores
    )


def brier_score(probabilities: Tensor, classes: Tensor) -> float:
    """The mean squared error of probabilities (N, classes), summed over classes, of two classes that of the second.

    Brier 1950, "Verification of forecasts expressed in terms of probability".
    """
    if not len(classes):
        return math.nan
    true = torch.nn.functional.one_hot(classes, probabilities.shape[1]).double()
    total = (probabilities.double() - true).square().sum(1).mean()
    return float(total / 2 if probabilities.shape[1] == 2 else total)
