"""Metrics by name, which add up over ranks, as scikit-learn has them.

A metric has `update(predictions, targets)`, `merge_state(other)` and `compute()`. All count in float64.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpi4dl.tasks import losses
from mpi4dl.tasks.measuring import OfAll

Measure = Callable[[Tensor], Tensor]
THRESHOLD = 0.5  # of the probability above which a label counts as there


def confusion(counts: Tensor) -> Tensor:
    return counts


def accuracy(counts: Tensor) -> Tensor:
    """The share of what was right; also of counts (labels, 2, 2)."""
    return counts.diagonal(dim1=-2, dim2=-1).sum() / counts.sum()


def balanced_accuracy(counts: Tensor) -> Tensor:
    """The mean, over classes that there are, of the share that was found."""
    return (counts.diagonal() / counts.sum(1)).nanmean()


def overlaps(measure: str, counts: Tensor) -> Tensor:
    """The dice or iou of each class; NaN if it is nowhere, and was not found."""
    if counts.dim() == 3:
        both, total = counts[:, 1, 1], counts[:, 1].sum(1) + counts[:, :, 1].sum(1)
    else:
        both, total = counts.diagonal(), counts.sum(0) + counts.sum(1)
    return 2 * both / total if measure == "dice" else both / (total - both)


def dice(counts: Tensor) -> Tensor:
    """2 |P T| / (|P| + |T|) over all pixels, which is F1; the mean over classes that there are, or were found."""
    return overlaps("dice", counts).nanmean()


def iou(counts: Tensor) -> Tensor:
    """|P T| / |P or T| over all pixels; the mean over classes that there are, or were found."""
    return overlaps("iou", counts).nanmean()


class OfCounts:
    """A number that follows from how often each class (row) was taken for each (column).

    `update(predictions, targets)` takes probabilities (N, classes) and classes (N,), or classes of any shape twice. A
    model may have outputs for more classes than `num_classes`.
    """

    def __init__(self, num_classes: int, measure: Measure, ignore_index: int) -> None:
        self.measure, self.ignore_index = measure, ignore_index
        self.counts = torch.zeros((num_classes, num_classes), dtype=torch.int64)

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        predictions, targets = _counted(predictions, targets, self.ignore_index)
        if predictions.is_floating_point():
            self._grow(predictions.shape[1])
            predictions = predictions.argmax(1)
        elif len(predictions):
            self._grow(int(predictions.max()) + 1)
        size = len(self.counts)
        self.counts += torch.bincount(targets * size + predictions, minlength=size**2).view(size, size)

    def _grow(self, size: int) -> None:
        more = size - len(self.counts)
        if more > 0:
            self.counts = torch.nn.functional.pad(self.counts, (0, more, 0, more))

    def merge_state(self, other: "OfCounts") -> None:
        self._grow(len(other.counts))
        other._grow(len(self.counts))
        self.counts += other.counts

    def compute(self) -> Tensor:
        found = self.measure(self.counts.double())
        return found.long() if self.measure is confusion else found


class OfLabels(OfCounts):
    """The same where there are several labels: (labels, 2, 2), a label that is there if its probability is over 0.5.

    `update(probabilities, targets)` takes (N, labels, ...) twice, targets 0 and 1.
    """

    def __init__(self, num_labels: int, measure: Measure, ignore_index: int) -> None:
        super().__init__(num_labels, measure, ignore_index)
        self.counts = torch.zeros((num_labels, 2, 2), dtype=torch.int64)

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        labels = torch.arange(len(self.counts)).view(-1, *[1] * (targets.dim() - 2))
        cells = 4 * labels + 2 * targets.long() + (predictions > THRESHOLD)
        cells = cells[targets != self.ignore_index]
        self.counts += torch.bincount(cells, minlength=self.counts.numel()).view(self.counts.shape)

    def _grow(self, size: int) -> None:
        """The labels are those of the task."""


def _counted(predictions: Tensor, targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Targets that count, and their predictions. Probabilities (N, classes), as of mixed samples, become classes."""
    targets = _classes(targets) if predictions.is_floating_point() else targets.long()
    counts = targets != ignore_index
    return predictions[counts], targets[counts]


def _classes(targets: Tensor) -> Tensor:
    """Targets (N, classes) of probabilities, as of mixed samples, become the most probable class."""
    return targets.argmax(1) if targets.dim() == 2 else targets.long()


def mean_area(
    area: Callable[[Tensor, Tensor], float],
    ignore_index: int,
    labels: bool,
    probabilities: Tensor,
    targets: Tensor,
) -> float:
    """The area under a curve of samples in the order of their probabilities (N, classes).

    Of two classes it is that of the second, of more the mean of each against the others, and of `labels` the mean.
    Classes of which it is not defined are left out: it is NaN if nothing is left.
    """
    size, targets = probabilities.shape[1], targets.long() if labels else _classes(targets)
    areas = []
    for c in (1,) if size == 2 and not labels else range(size):
        own, positive = (targets[:, c], 1) if labels else (targets, c)
        known = own != ignore_index
        areas.append(area(probabilities[known, c], own[known] == positive))
    return float(torch.tensor(areas, dtype=torch.float64).nanmean())


class ThresholdCurve(NamedTuple):
    """Counts at each threshold (K,), from infinity down through the scores that occur.

    `called` and `found` count the samples that are called positive, and the positives among them.
    """

    thresholds: Tensor
    called: Tensor
    found: Tensor
    num_positive: int
    num_negative: int

    @property
    def sensitivity(self) -> Tensor:
        """The share of positives that are called so, or recall, (K,)."""
        return _shares(self.found, self.num_positive)

    @property
    def specificity(self) -> Tensor:
        """The share of negatives that are not called positive, (K,)."""
        return _shares(self.num_negative - self.called + self.found, self.num_negative)

    @property
    def precision(self) -> Tensor:
        """The share of positives among those that are called so, (K,)."""
        return self.found.double() / self.called  # 0 / 0 is NaN


def _shares(counts: Tensor, whole: int) -> Tensor:
    return counts.double() / whole if whole else torch.full(counts.shape, math.nan, dtype=torch.float64)


def curve_of(scores: Tensor, positive: Tensor) -> ThresholdCurve:
    """The curve of all thresholds at which something changes; equal scores are called together."""
    values, places, numbers = torch.unique(scores.double(), return_inverse=True, return_counts=True)
    of_positive = torch.bincount(places[positive], minlength=len(values))
    none = torch.zeros(1, dtype=torch.int64)
    called, found = (torch.cat((none, counts.flip(0).cumsum(0))) for counts in (numbers, of_positive))
    top = torch.tensor([math.inf], dtype=torch.float64)
    num_positive = int(positive.sum())
    return ThresholdCurve(torch.cat((top, values.flip(0))), called, found, num_positive, len(positive) - num_positive)


def area_under_curve(scores: Tensor, positive: Tensor) -> float:
    """How probable it is that one of `positive` (N,) has a higher score (N,) than another; NaN without both kinds.

    It is the area under the ROC curve. Equal scores count half, as in Hanley and McNeil 1982, "The meaning and use of
    the area under a receiver operating characteristic curve".
    """
    curve = curve_of(scores, positive)
    pairs = curve.num_positive * curve.num_negative
    return float(torch.trapezoid(curve.found.double(), curve.called - curve.found) / pairs) if pairs else math.nan


def average_precision(scores: Tensor, positive: Tensor) -> float:
    """The mean, over `positive` (N,), of the precision at their scores (N,); NaN without any."""
    curve = curve_of(scores, positive)
    total = (curve.found.diff() * curve.precision[1:]).sum()
    return float(total / curve.num_positive) if curve.num_positive else math.nan


class MeanError:
    """The mean of |prediction - target| to a power, over all numbers; or the root of that."""

    def __init__(self, power: int, root: bool = False) -> None:
        self.power, self.root = power, root
        self.total, self.count = torch.zeros((), dtype=torch.float64), 0

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        self.total = self.total + ((predictions - targets).double().abs() ** self.power).sum()
        self.count += targets.numel()

    def merge_state(self, other: "MeanError") -> None:
        self.total, self.count = self.total + other.total, self.count + other.count

    def compute(self) -> Tensor:
        mean = self.total / self.count
        return mean.sqrt() if self.root else mean


class PeakSignalToNoise(MeanError):
    """-10 log10 of the mean squared error, in decibels, of values from 0 to 1; infinite where nothing differs."""

    def __init__(self) -> None:
        super().__init__(2)

    def compute(self) -> Tensor:
        return -10 * super().compute().log10()


class RSquared:
    """1 - (sum of squared errors) / (sum of squared deviations from the mean); the mean over outputs (N, K).

    Sums are of targets less the first one, so that nothing cancels where all are far from 0. NaN of fewer than 2
    targets; targets that are all alike give 1 if all errors are 0, or 0.
    """

    def __init__(self) -> None:
        self.count = self.origin = self.sums = self.squares = self.errors = torch.zeros((), dtype=torch.float64)

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        if not targets.numel():
            return
        targets = targets.reshape(len(targets), -1) if targets.dim() < 3 else targets.reshape(-1, 1)
        errors, origin = (predictions.reshape(targets.shape) - targets).square().sum(0), targets[0]
        apart = targets - origin
        count = torch.tensor(float(len(targets)), dtype=torch.float64)
        self._combine(count, origin, apart.sum(0), apart.square().sum(0), errors)

    def _combine(self, count: Tensor, origin: Tensor, sums: Tensor, squares: Tensor, errors: Tensor) -> None:
        if not self.count:
            self.origin = origin
        apart = origin - self.origin
        self.squares = self.squares + squares + 2 * apart * sums + count * apart.square()
        self.sums, self.errors = self.sums + sums + count * apart, self.errors + errors
        self.count = self.count + count

    def merge_state(self, other: "RSquared") -> None:
        self._combine(other.count, other.origin, other.sums, other.squares, other.errors)

    def compute(self) -> Tensor:
        if self.count < 2:
            return torch.tensor(torch.nan)
        deviations = self.squares - self.sums.square() / self.count
        constant = (self.squares == 0) | (deviations <= 0)
        found = 1 - self.errors / torch.where(constant, 1, deviations)
        return torch.where(constant, (self.errors == 0).double(), found).mean()


def _concordance(risk: Tensor, targets: Any) -> float:
    return losses.concordance(risk, *losses.times_and_events(targets))


MEASURES: Mapping[str, Measure] = {
    "accuracy": accuracy,
    "pixel_accuracy": accuracy,
    "balanced_accuracy": balanced_accuracy,
    "confusion": confusion,
    "f1": dice,
    "dice": dice,
    "iou": iou,
}
OF_RANKS = {"auc": area_under_curve, "average_precision": average_precision}
OF_NUMBERS: Mapping[str, Callable[[], Any]] = {
    "mae": partial(MeanError, 1),
    "mse": partial(MeanError, 2),
    "rmse": partial(MeanError, 2, root=True),
    "r2": RSquared,
    "psnr": PeakSignalToNoise,
    "concordance": partial(OfAll, _concordance),
}


def make_metric(task: str, name: str, num_classes: int, ignore_index: int) -> Any:
    """A fresh metric of this name; of `task` multilabel samples have several labels."""
    labels = task == "multilabel"
    if name in OF_NUMBERS:
        return OF_NUMBERS[name]()
    if name in OF_RANKS:
        return OfAll(partial(mean_area, OF_RANKS[name], ignore_index, labels))
    return (OfLabels if labels else OfCounts)(num_classes, MEASURES[name], ignore_index)
