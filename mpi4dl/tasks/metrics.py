"""Metrics by name: torchmetrics counts, and what its counts leave open is decided here, as scikit-learn has it.

torchmetrics takes seconds to import: this module is imported where a metric is made, on ranks that have outputs.
"""

from typing import Any

import torch
from torch import Tensor

from mpi4dl._torchvision import import_torchvision
from mpi4dl.tasks import losses

import_torchvision()

from torchmetrics import Metric  # noqa: E402
from torchmetrics.classification import (  # noqa: E402
    MulticlassAveragePrecision,
    MultilabelAUROC,
    MultilabelAveragePrecision,
)
from torchmetrics.regression import MeanAbsoluteError, MeanSquaredError  # noqa: E402
from torchmetrics.utilities import dim_zero_cat  # noqa: E402


class _OfAnyNumbers:
    """Takes 0 and 1 as numbers of any type, as tables of labels have them; torchmetrics takes whole ones."""

    def update(self, preds: Tensor, target: Tensor) -> None:
        super().update(preds, target.long())  # type: ignore[misc]


def _mean_over_classes(each: Tensor, defined: Tensor) -> Tensor:
    """The mean over the classes of which the metric is defined; of two classes, that of the second."""
    if len(each) == 2:
        return each[1] if defined[1] else each.new_tensor(torch.nan)
    return each[defined].mean()


class AveragePrecision(MulticlassAveragePrecision):
    """The average precision: of two classes of the second, of more the mean, without classes that no sample has."""

    def __init__(self, num_classes: int, ignore_index: int) -> None:
        super().__init__(num_classes, average=None, ignore_index=ignore_index, validate_args=False)

    def compute(self) -> Tensor:  # type: ignore[override]
        return _mean_over_classes(super().compute(), _numbers(self) > 0)


def _numbers(metric: Any) -> Tensor:
    return torch.bincount(dim_zero_cat(metric.target), minlength=metric.num_classes)


class AucOfLabels(_OfAnyNumbers, MultilabelAUROC):
    """The mean of the areas under the ROC curves of labels that some samples have, and some do not."""

    def __init__(self, num_labels: int, ignore_index: int) -> None:
        super().__init__(num_labels, average=None, ignore_index=ignore_index, validate_args=False)

    def compute(self) -> Tensor:  # type: ignore[override]
        each, targets = super().compute(), dim_zero_cat(self.target)
        return each[(targets == 1).any(0) & (targets == 0).any(0)].mean()


class AveragePrecisionOfLabels(_OfAnyNumbers, MultilabelAveragePrecision):
    """The mean average precision of labels that some samples have."""

    def __init__(self, num_labels: int, ignore_index: int) -> None:
        super().__init__(num_labels, average=None, ignore_index=ignore_index, validate_args=False)

    def compute(self) -> Tensor:  # type: ignore[override]
        return super().compute()[(dim_zero_cat(self.target) == 1).any(0)].mean()


class RSquared(Metric):
    """1 - (sum of squared errors) / (sum of squared deviations from the mean); the mean over outputs (N, K).

    Sums are of targets less the first one, so that nothing cancels where all are far from 0, as it would in
    torchmetrics' R2Score. NaN of fewer than 2 targets; targets that are all alike give 1 if all errors are 0, or 0.
    """

    full_state_update = False
    count: Tensor
    origin: Tensor
    sums: Tensor
    squares: Tensor
    errors: Tensor
    STATES = ("count", "origin", "sums", "squares", "errors")

    def __init__(self) -> None:
        super().__init__()
        for name in self.STATES:
            self.add_state(name, torch.zeros((), dtype=torch.float64))

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

    def merge_state(self, incoming_state: Any) -> None:
        self._combine(*(getattr(incoming_state, name) for name in self.STATES))

    def compute(self) -> Tensor:
        if self.count < 2:
            return torch.tensor(torch.nan)
        deviations = self.squares - self.sums.square() / self.count
        constant = (self.squares == 0) | (deviations <= 0)
        found = 1 - self.errors / torch.where(constant, 1, deviations)
        return torch.where(constant, (self.errors == 0).double(), found).mean()


class Concordance(Metric):
    """Harrell's concordance index of risks (N,) or (N, 1): `survival.concordance`."""

    full_state_update = False
    risks: list[Tensor]
    times: list[Tensor]
    events: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        for name in ("risks", "times", "events"):
            self.add_state(name, [], dist_reduce_fx="cat")

    def update(self, risk: Tensor, targets: Any) -> None:
        time, event = losses.times_and_events(targets)
        self.risks.append(risk.reshape(-1))
        self.times.append(time)
        self.events.append(event)

    def compute(self) -> Tensor:
        found = losses.concordance(*(dim_zero_cat(state) for state in (self.risks, self.times, self.events)))
        return torch.tensor(found, dtype=torch.float64)


def make(task: str, name: str, num_classes: int, ignore_index: int) -> Any:
    """A fresh metric of a task, by name."""
    if task == "regress":
        errors = {"mae": MeanAbsoluteError, "mse": MeanSquaredError, "r2": RSquared}
        return MeanSquaredError(squared=False) if name == "rmse" else errors[name]()
    if task == "survival":
        return Concordance()
    if task == "multilabel":
        return {"auc": AucOfLabels, "average_precision": AveragePrecisionOfLabels}[name](num_classes, ignore_index)
    return AveragePrecision(num_classes, ignore_index)
