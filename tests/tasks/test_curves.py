"""Curves, rates, thresholds and calibration are those of scikit-learn, with ties and single classes."""

import math

import numpy as np
import pytest
import sklearn.calibration
import sklearn.metrics as reference
import torch

from mpi4dl.tasks.curves import (
    RATES,
    CallCounts,
    brier_score,
    calibration,
    calibration_error,
    chosen_threshold,
)
from mpi4dl.tasks.metrics import curve_of

CASES = [(2, 0), (3, 1), (10, 2), (60, 3), (200, 4)]


def drawn(count: int, seed: int, ties: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores, of which many are equal, and what is positive: both kinds are there."""
    random = np.random.default_rng(seed)
    scores = np.round(random.random(count), 1 if ties else 12)
    positive = random.random(count) < (0.3 + scores) / 2
    positive[:2] = False, True
    return torch.from_numpy(scores), torch.from_numpy(positive)


@pytest.mark.parametrize("ties", [True, False])
@pytest.mark.parametrize(("count", "seed"), CASES)
def test_curves_are_those_of_scikit_learn(count: int, seed: int, ties: bool) -> None:
    scores, positive = drawn(count, seed, ties)
    curve = curve_of(scores, positive)
    false, true, thresholds = reference.roc_curve(positive, scores, drop_intermediate=False)
    assert curve.thresholds.tolist() == thresholds.tolist()
    assert curve.sensitivity.tolist() == pytest.approx(true, abs=1e-12)
    assert (1 - curve.specificity).tolist() == pytest.approx(false, abs=1e-12)
    precision, recall, cuts = reference.precision_recall_curve(positive, scores)
    assert curve.thresholds[1:].flip(0).tolist() == cuts.tolist()
    assert curve.precision[1:].flip(0).tolist() == pytest.approx(precision[:-1], abs=1e-12)
    assert curve.sensitivity[1:].flip(0).tolist() == pytest.approx(recall[:-1], abs=1e-12)


@pytest.mark.parametrize(("count", "seed"), CASES)
def test_rates_are_those_of_the_confusion_matrix(count: int, seed: int) -> None:
    scores, positive = drawn(count, seed)
    for threshold in (0.0, 0.3, 0.5, 1.1):
        called = scores >= threshold
        tn, fp, fn, tp = reference.confusion_matrix(positive, called, labels=[False, True]).ravel()
        assert CallCounts.of(called, positive) == (tp, fp, fn, tn)
        found = CallCounts.of(scores >= threshold, positive).rates()
        expected = [
            reference.recall_score(positive, called, zero_division=np.nan),
            reference.recall_score(~positive, ~called, zero_division=np.nan),
            reference.precision_score(positive, called, zero_division=np.nan),
            reference.precision_score(~positive, ~called, zero_division=np.nan),
        ]
        assert [found[name] for name in RATES] == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(("count", "seed"), CASES)
def test_thresholds_by_rules(count: int, seed: int) -> None:
    scores, positive = drawn(count, seed)
    every = [math.inf, *sorted({*scores.tolist()}, reverse=True)]
    found = {threshold: CallCounts.of(scores >= threshold, positive).rates() for threshold in every}
    sums = {threshold: each["sensitivity"] + each["specificity"] for threshold, each in found.items()}
    best = max(sums.values())
    curve = curve_of(scores, positive)
    assert chosen_threshold("youden", curve) == next(t for t in every if sums[t] > best - 1e-12)
    for share in (0.0, 0.5, 0.95, 1.0):
        sensitive = [t for t in every if found[t]["sensitivity"] >= share]
        specific = [t for t in every if found[t]["specificity"] >= share]
        assert chosen_threshold(f"sensitivity={share}", curve) == max(sensitive)
        assert chosen_threshold(f"specificity={share}", curve) == min(specific)


@pytest.mark.parametrize("positive", [True, False])
def test_one_class_alone_is_undefined(positive: bool) -> None:
    scores, of = torch.tensor([0.2, 0.7, 0.7]), torch.full((3,), positive)
    found = CallCounts.of(scores >= 0.5, of).rates()
    undefined = ("specificity",) if positive else ("sensitivity",)
    assert [name for name in RATES if math.isnan(found[name])] == list(undefined)
    assert math.isnan(chosen_threshold("youden", curve_of(scores, of)))
    none = CallCounts.of(scores >= 0.9, of).rates()
    assert math.isnan(none["ppv"])


@pytest.mark.parametrize(("count", "seed"), CASES)
def test_calibration(count: int, seed: int) -> None:
    scores, positive = drawn(count, seed, ties=False)
    frequency, probability = sklearn.calibration.calibration_curve(positive, scores, n_bins=10)
    counts, _ = np.histogram(scores, 10, (0, 1))
    expected = np.average(np.abs(frequency - probability), weights=counts[counts > 0])
    assert calibration_error(scores, positive) == pytest.approx(expected)
    bins = [each for each in calibration(scores, positive) if each.num_samples]
    assert [each.frequency for each in bins] == pytest.approx(frequency)
    assert [each.probability for each in bins] == pytest.approx(probability)
    two = torch.stack((1 - scores, scores), 1)
    assert brier_score(two, positive.long()) == pytest.approx(reference.brier_score_loss(positive, scores))
    random = torch.Generator().manual_seed(seed)
    three, labels = torch.rand(count, 3, generator=random, dtype=torch.float64), torch.arange(count) % 3
    three /= three.sum(1, keepdim=True)
    expected = reference.brier_score_loss(labels, three, labels=[0, 1, 2])
    assert brier_score(three, labels) == pytest.approx(expected)
    edges = calibration(torch.tensor([0.0, 0.1, 1.0]), torch.tensor([False, True, True]))
    assert [each.num_samples for each in edges] == [1, 1, 0, 0, 0, 0, 0, 0, 0, 1]
