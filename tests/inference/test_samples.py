"""Metrics by slide and by patient: those of scikit-learn over means or maxima; intervals draw patients."""

import csv
import io
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import sklearn.metrics as reference
import torch

from mpi4dl.comm import Refusal
from mpi4dl.inference.samples import Judging, Samples
from mpi4dl.inference.scoring import Scores, scores_of
from mpi4dl.tasks.losses import concordance
from mpi4dl.tasks.task import TASKS

KEPT: Mapping[str, Any] = {"records": (), "bad": {}, "root": None, "crops": False, "count": 40, "remarks": ()}


def slides(task: str, classes: tuple[str, ...], num_patients: int = 12, count: int = 40, seed: int = 0) -> Samples:
    """Slides of patients who have several; probabilities with ties."""
    random = np.random.default_rng(seed)
    patients = [f"p{n}" for n in (*range(num_patients), *random.integers(0, num_patients, count - num_patients))]
    size = len(classes)
    values = np.round(random.random((count, size)), 1) + 0.05
    labels: Any = {name: n % size for n, name in enumerate(dict.fromkeys(patients))}
    targets = torch.tensor([labels[name] for name in patients])
    if task == "classify":
        values /= values.sum(1, keepdims=True)
    elif task == "multilabel":
        targets = torch.from_numpy((random.random((count, size)) < 0.5).astype(float))
    elif task == "survival":
        times = {name: (float(random.integers(1, 9)), float(random.integers(0, 2))) for name in patients}
        targets = torch.tensor([times[name] for name in patients], dtype=torch.float64)
    else:
        targets = torch.from_numpy(random.random((count, size)))
    names = tuple(f"s{n}" for n in range(count))
    return Samples("slide", TASKS[task](size), classes, names, tuple(patients), torch.from_numpy(values), targets, True)


def by_patient(found: Samples, values: torch.Tensor, how: Any) -> np.ndarray:
    return np.stack([how(values[own].numpy(), axis=0) for own in found.members().values()])


def scored(found: Samples, resamples: int = 0, **judging: Any) -> Scores:
    return scores_of(found, Judging(resamples=resamples, **judging), **KEPT)


def test_two_classes_by_slide_and_by_patient() -> None:
    found = slides("classify", ("normal", "tumour"))
    scores = scored(found, threshold=0.4)
    assert scores.patients is not None
    means, true = by_patient(found, found.outputs, np.mean)[:, 1], by_patient(found, found.targets, np.max)
    for level, probabilities, labels in (
        (scores.metrics, found.outputs[:, 1].numpy(), found.targets.numpy()),
        (scores.patients.metrics, means, true),
    ):
        expected = {
            "auc": reference.roc_auc_score(labels, probabilities),
            "average_precision": reference.average_precision_score(labels, probabilities),
            "brier": reference.brier_score_loss(labels, probabilities),
            "sensitivity": reference.recall_score(labels, probabilities >= 0.4),
            "specificity": reference.recall_score(1 - labels, probabilities < 0.4),
            "ppv": reference.precision_score(labels, probabilities >= 0.4),
            "npv": reference.precision_score(1 - labels, probabilities < 0.4),
            "balanced_accuracy": reference.balanced_accuracy_score(labels, probabilities > 0.5),
        }
        assert {name: level[name].value for name in expected} == pytest.approx(expected)
    largest = by_patient(found, found.outputs, np.max)[:, 1]
    most = scored(found, patients="max").patients
    assert most is not None
    assert most.metrics["auc"].value == pytest.approx(reference.roc_auc_score(true, largest))
    other = scored(found, positive="normal")
    assert other.metrics["average_precision"].value == pytest.approx(
        reference.average_precision_score(1 - found.targets.numpy(), found.outputs[:, 0].numpy())
    )
    with pytest.raises(Refusal, match=r"`positive` benign .* normal, tumour"):
        scored(found, positive="benign")


def test_several_classes_one_against_all_others() -> None:
    classes = ("1_1", "grade 2", "grade 3")
    found = slides("classify", classes)
    scores = scored(found)
    assert scores.patients is not None
    means, true = by_patient(found, found.outputs, np.mean), by_patient(found, found.targets, np.max)
    metrics = scores.patients.metrics
    assert metrics["auc"].value == pytest.approx(reference.roc_auc_score(true, means, multi_class="ovr"))
    assert metrics["brier"].value == pytest.approx(reference.brier_score_loss(true, means, labels=[0, 1, 2]))
    for number, name in enumerate(classes):
        assert metrics[f"auc {name}"].value == pytest.approx(reference.roc_auc_score(true == number, means[:, number]))
        called = means.argmax(1) == number
        assert metrics[f"sensitivity {name}"].value == pytest.approx(reference.recall_score(true == number, called))
    with pytest.raises(Refusal, match="two classes or labels"):
        scored(found, threshold="youden")
    most = scored(found, patients="max").patients
    assert most is not None
    assert all(sum(each["probabilities"].values()) == pytest.approx(1) for each in most.records)


def test_numbers_labels_and_survival_by_patient() -> None:
    found = slides("regress", ("dose",))
    scores = scored(found)
    assert scores.patients is not None
    means, true = (by_patient(found, values, np.mean) for values in (found.outputs, found.targets))
    assert scores.patients.metrics["mae"].value == pytest.approx(np.abs(means - true).mean())
    assert scores.patients.metrics["r2"].value == pytest.approx(reference.r2_score(true, means))
    assert not scores.files()[0]

    found = slides("survival", ("risk",))
    scores = scored(found)
    assert scores.patients is not None
    means, true = by_patient(found, found.outputs, np.mean), by_patient(found, found.targets, np.max)
    expected = concordance(torch.from_numpy(means), *torch.from_numpy(true).T)
    assert scores.patients.metrics["concordance"].value == pytest.approx(expected)

    found = slides("multilabel", ("a", "b"))
    scores = scored(found)
    assert scores.patients is not None
    means, true = by_patient(found, found.outputs, np.mean), by_patient(found, found.targets, np.max)
    for number, name in enumerate(("a", "b")):
        both = {*true[:, number]} == {0, 1}
        expected = reference.roc_auc_score(true[:, number], means[:, number]) if both else math.nan
        assert scores.patients.metrics[f"auc {name}"].value == pytest.approx(expected, nan_ok=True)
    assert any("have different labels" in remark for remark in scores.remarks)


def test_one_class_alone_is_undefined_and_said_so() -> None:
    found = slides("classify", ("normal", "tumour"))
    alone = Samples(*(getattr(found, name) for name in ("level", "task", "classes", "names", "of", "outputs")),
                    torch.zeros_like(found.targets), True)  # fmt: skip
    scores = scored(alone, threshold="youden")
    assert scores.patients is not None
    for metrics in (scores.metrics, scores.patients.metrics):
        assert [math.isnan(metrics[name].value) for name in ("auc", "average_precision", "brier")] == [
            True,
            True,
            False,
        ]
    told = "\n".join(scores.table())
    assert "undefined" in told
    assert "nan" not in told
    assert "no threshold for tumour" in told


def test_intervals_draw_patients() -> None:
    """With each slide ten times, the interval is that of slides once each, not narrower."""
    once = slides("classify", ("normal", "tumour"), num_patients=40)
    assert len({*once.of}) == 40
    often = Samples.joined([once] * 10)
    one, ten = (scored(each, resamples=200).metrics for each in (once, often))
    for name in ("auc", "sensitivity", "brier"):
        assert (ten[name].value, ten[name].low, ten[name].high) == pytest.approx(
            (one[name].value, one[name].low, one[name].high)
        )
        assert one[name].low < one[name].high


def test_thresholds_are_chosen_elsewhere() -> None:
    """By slide and by patient; on the same samples a warning says so."""
    validation, test = (slides("classify", ("normal", "tumour"), seed=seed) for seed in (1, 2))
    chosen = scored(validation, threshold="youden").thresholds
    assert {*chosen} == {"slide", "patient"}
    scores = scored(test, threshold="youden", chosen=chosen, chosen_on="the 40 val slides of the run")
    assert scores.thresholds == chosen
    assert scores.patients is not None
    assert scores.patients.calls["tumour"]["threshold"] == chosen["patient"][""]
    assert any("on the 40 val slides of the run" in remark for remark in scores.remarks)
    assert any("optimistic" in remark for remark in scored(test, threshold="youden").remarks)


def test_files_of_curves() -> None:
    found = slides("classify", ("normal", "tumour"))
    files, _ = scored(found).files()
    rows = list(csv.DictReader(io.StringIO(files["curves.csv"].decode())))
    of_slides = [row for row in rows if row["level"] == "slide"]
    false, true, _ = reference.roc_curve(found.targets, found.outputs[:, 1], drop_intermediate=False)
    assert [float(row["sensitivity"]) for row in of_slides] == pytest.approx(true)
    assert [1 - float(row["specificity"]) for row in of_slides] == pytest.approx(false)
    bins = list(csv.DictReader(io.StringIO(files["calibration.csv"].decode())))
    assert sum(int(row["count"]) for row in bins if row["level"] == "patient") == 12
    assert files["curves.png"].startswith(b"\x89PNG")
