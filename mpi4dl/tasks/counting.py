"""Metrics of classes: from counts of what was taken for what, and from the order of probabilities.

Nothing here needs torchmetrics, which takes seconds to import.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Measure = Callable[[Tensor], Tensor]


def confusion(counts: Tensor) -> Tensor:
    return counts


def accuracy(counts: Tensor) -> Tensor:
    """The share of what was right; also of counts (labels, 2, 2)."""
    return counts.diagonal(dim1=-2, dim2=-1).sum() / counts.sum()


def balanced_accuracy(counts: Tensor) -> Tensor:
    """The mean, over classes that there are, of the share that was found."""
    return _mean_of(counts.diagonal(), counts.sum(1))


def _overlap(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Of each class: what was rightly found, and what was found plus what there was."""
    if counts.dim() == 3:
        return counts[:, 1, 1], counts[:, 1].sum(1) + counts[:, :, 1].sum(1)
    return counts.diagonal(), counts.sum(0) + counts.sum(1)


def dice(counts: Tensor) -> Tensor:
    """2 |P T| / (|P| + |T|) over all pixels, which is F1; the mean over classes that there are, or were found."""
    both, total = _overlap(counts)
    return _mean_of(2 * both, total)


def iou(counts: Tensor) -> Tensor:
    """|P T| / |P or T| over all pixels; the mean over classes that there are, or were found."""
    both, total = _overlap(counts)
    return _mean_of(both, total - both)


def _mean_of(part: Tensor, whole: Tensor) -> Tensor:
    there = whole > 0
    return (part[there] / whole[there]).mean()


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
        cells = 4 * labels + 2 * targets.long() + (predictions > 0.5)
        cells = cells[targets != self.ignore_index]
        self.counts += torch.bincount(cells, minlength=self.counts.numel()).view(self.counts.shape)

    def _grow(self, size: int) -> None:
        """The labels are those of the task."""


class Auc:
    """The area under the ROC curve: of two classes of the second, of more the mean of each against the others.

    Classes that all samples have, or none, are left out: it is NaN if nothing is left. Equal probabilities count half,
    as in Hanley and McNeil 1982, "The meaning and use of the area under a receiver operating characteristic curve".
    """

    def __init__(self, num_classes: int, ignore_index: int) -> None:
        self.ignore_index = ignore_index
        self.seen: list[tuple[Tensor, Tensor]] = []

    def update(self, probabilities: Tensor, targets: Tensor) -> None:
        self.seen.append(_counted(probabilities.double(), targets, self.ignore_index))

    def merge_state(self, other: "Auc") -> None:
        self.seen += other.seen

    def compute(self) -> Tensor:
        probabilities, targets = (torch.cat(parts) for parts in zip(*self.seen, strict=True))
        size = probabilities.shape[1]
        wanted: Sequence[int] = (1,) if size == 2 else range(size)
        areas = [area for c in wanted if (area := area_under_curve(probabilities[:, c], targets == c)) is not None]
        return torch.tensor(areas or [torch.nan], dtype=torch.float64).mean()


def area_under_curve(scores: Tensor, positive: Tensor) -> float | None:
    """How probable it is that one of `positive` (N,) has a higher score (N,) than another; None without both kinds."""
    num_positive = int(positive.sum())
    num_others = len(positive) - num_positive
    if not num_positive or not num_others:
        return None
    _, places, numbers = torch.unique(scores, return_inverse=True, return_counts=True)
    of_positive = torch.bincount(places, weights=positive.double(), minlength=len(numbers))
    of_others = numbers - of_positive
    below = of_others.cumsum(0) - of_others
    return float((of_positive * (below + of_others / 2)).sum() / (num_positive * num_others))


def _counted(predictions: Tensor, targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Targets that count, and their predictions. Probabilities (N, classes), as of mixed samples, become classes."""
    mixed = targets.dim() == 2 and predictions.is_floating_point()
    targets = targets.argmax(1) if mixed else targets.long()
    counts = targets != ignore_index
    return predictions[counts], targets[counts]


MEASURES: Mapping[str, Measure] = {
    "accuracy": accuracy,
    "pixel_accuracy": accuracy,
    "balanced_accuracy": balanced_accuracy,
    "confusion": confusion,
    "f1": dice,
    "dice": dice,
    "iou": iou,
}
KINDS = {"classify": OfCounts, "segment": OfCounts, "multilabel": OfLabels}


def makes(task: str, name: str) -> bool:
    """Whether `make` knows this metric of a task."""
    return task in KINDS and (name in MEASURES or (task, name) == ("classify", "auc"))


def make(task: str, name: str, num_classes: int, ignore_index: int) -> Any:
    """A fresh metric of classes, by name."""
    if name == "auc":
        return Auc(num_classes, ignore_index)
    return KINDS[task](num_classes, MEASURES[name], ignore_index)


# Intervals of metrics by the bootstrap: the metric of samples drawn anew, with replacement, again and again.

LEAST_SAMPLES = 10  # of fewer there are too few resamples that differ
WHY_NONE = f"an interval takes {LEAST_SAMPLES} images or more, and resamples that differ"


class Bounds(NamedTuple):
    """The ends of an interval that holds a share `level` of the resampled metric, and how often it was defined.

    The ends are NaN where there is no interval: of too few samples, or of resamples that all give the same.
    """

    low: float
    high: float
    defined: int


def bootstrap(
    metric: Callable[[Tensor], float],
    num_samples: int,
    *,
    num_resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> Bounds:
    """The percentile interval of `metric(numbers)`, a function of the numbers (int64, (num_samples,)) of samples.

    A sample is what was drawn independently, such as an image, not a pixel. Resamples of which the metric is not a
    number, as where a class is missing, are left out. Efron 1979, "Bootstrap methods: another look at the jackknife".
    """
    if num_samples < 1 or num_resamples < 1 or not 0 < level < 1:
        raise ValueError(
            f"`num_samples` {num_samples} and `num_resamples` {num_resamples} must be at least 1, and `level` {level} "
            "between 0 and 1"
        )
    generator = torch.Generator().manual_seed(seed)
    draws = (torch.randint(num_samples, (num_samples,), generator=generator) for _ in range(num_resamples))
    found = [value for value in map(metric, draws) if not math.isnan(value)]
    if not found:
        return Bounds(math.nan, math.nan, 0)
    ends = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    low, high = torch.tensor(found, dtype=torch.float64).quantile(ends).tolist()
    if num_samples < LEAST_SAMPLES or low == high:
        low = high = math.nan
    return Bounds(low, high, len(found))
