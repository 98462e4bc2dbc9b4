"""mpi4dl.tasks.measuring and .metrics: over ranks they are scikit-learn's on the union, to the last digits."""

import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from sklearn import metrics as reference
from torch import Tensor, nn

from mpi4dl.comm import Communicator
from mpi4dl.engine import Engine, Evaluation
from mpi4dl.parallel.cut import split
from mpi4dl.parallel.pipeline.local_stages import LocalStages
from mpi4dl.parallel.plan import Plan
from mpi4dl.tasks.losses import build_loss, concordance
from mpi4dl.tasks.metrics import make_metric, overlaps
from mpi4dl.tasks.task import Classify, MultiLabel, Regress, Segment, Survive, Task
from tests.pool.ranks import Ranks
from tests.tasks.cases import IGNORED, NUM_CLASSES, SIZE, Dense, Small, images_of, in_batches, targets_of

EXACT = 1e-12
NUM_LABELS = 5
UNEVEN, TILES = Plan(data=4), Plan(((2, 2),))
STAGES = Plan(((1, 1), (1, 2)), data=1, microbatches=2)


class Rounded(nn.Module):
    """Predictions of few values, so that many are equal."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return (self.model(x) * 8).round() / 8 + 1e-9


class Case(NamedTuple):
    """A task, its model and targets, and metrics by scikit-learn of all predictions and targets."""

    task: Task
    model: Callable[[], nn.Module]
    targets: Any
    metrics: dict[str, Callable[[Any, Any], Any]]


def labels_with_one_missing(count: int) -> Tensor:
    """Labels of 5 classes, of which no sample has the class 3."""
    labels = torch.randint(NUM_LABELS - 1, (count,), generator=torch.Generator().manual_seed(5))
    return torch.where(labels == 3, 4, labels)


def over_classes(curve: Any) -> Callable[[Any, Any], float]:
    """The mean of one class against the others, of classes that there are."""

    def of(labels: Any, shares: Any) -> float:
        there = [c for c in range(shares.shape[1]) if 0 < (labels == c).sum() < len(labels)]
        return float(np.mean([curve(labels == c, shares[:, c]) for c in there]))

    return of


def over_labels(curve: Any) -> Callable[[Any, Any], float]:
    def of(targets: Any, shares: Any) -> float:
        there = [c for c in range(targets.shape[1]) if 0 < targets[:, c].sum() < len(targets)]
        return float(np.mean([curve(targets[:, c], shares[:, c]) for c in there]))

    return of


def of_classes(function: Any, **options: Any) -> Callable[[Any, Any], Any]:
    def of(labels: Any, shares: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a class that was found, but is not there
            return function(labels, shares.argmax(1), **options)

    return of


def of_pixels(function: Any, **options: Any) -> Callable[[Any, Any], Any]:
    def of(masks: Any, outputs: Any) -> Any:
        counted = masks != IGNORED
        return function(masks[counted], outputs.argmax(1)[counted], **options)

    return of


def slow_concordance(targets: Any, risk: Any) -> float:
    """Pair by pair."""
    (time, event), found = targets, [0.0, 0.0]
    for i in range(len(time)):
        for j in range(len(time)):
            if event[i] and (time[i] < time[j] or (time[i] == time[j] and not event[j])):
                found[0] += (risk[i] > risk[j]) + 0.5 * (risk[i] == risk[j])
                found[1] += 1
    return float(found[0] / found[1])


def some_labels(count: int) -> Tensor:
    """Of the labels the second is on every sample, the third on none."""
    labels = torch.randint(2, (count, NUM_LABELS), generator=torch.Generator().manual_seed(3))
    labels[:, 1], labels[:, 2] = 1, 0
    return labels


def far_targets(count: int) -> Tensor:
    """Numbers around 1e6, of which a sum of squares less the square of a sum would have no digit left."""
    return 1e6 + torch.randn(count, 2, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def with_ties(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(6)
    time = torch.randint(1, 6, (count,), generator=generator).double()
    return time, torch.randint(2, (count,), generator=generator)


def masks_of(count: int) -> Tensor:
    masks = targets_of("mask", count)
    return torch.where(masks == 1, 2, masks)  # one class is missing


def five() -> nn.Module:
    return Rounded(Small(NUM_LABELS)).double()


def two() -> nn.Module:
    return Rounded(Small(2)).double()


def one() -> nn.Module:
    return Rounded(Small(1)).double()


def dense() -> nn.Module:
    return Rounded(Dense()).double()


CASES = {
    "classify": Case(
        Classify(NUM_LABELS),
        five,
        labels_with_one_missing,
        {
            "accuracy": of_classes(reference.accuracy_score),
            "balanced_accuracy": of_classes(reference.balanced_accuracy_score),
            "f1": of_classes(reference.f1_score, average="macro"),
            "auc": over_classes(reference.roc_auc_score),
            "average_precision": over_classes(reference.average_precision_score),
            "confusion": of_classes(reference.confusion_matrix, labels=range(NUM_LABELS)),
        },
    ),
    "multilabel": Case(
        MultiLabel(NUM_LABELS),
        five,
        some_labels,
        {
            "accuracy": lambda y, p: ((p > 0.5) == y).mean(),
            "auc": over_labels(reference.roc_auc_score),
            "confusion": lambda y, p: reference.multilabel_confusion_matrix(y, p > 0.5),
        },
    ),
    "regress": Case(
        Regress(2),
        two,
        far_targets,
        {
            "mae": reference.mean_absolute_error,
            "mse": reference.mean_squared_error,
            "rmse": lambda y, p: math.sqrt(reference.mean_squared_error(y, p)),
            "r2": reference.r2_score,
        },
    ),
    "survival": Case(Survive(1), one, with_ties, {"concordance": lambda y, p: slow_concordance(y, p[:, 0])}),
    "segment": Case(
        Segment(NUM_CLASSES, loss_options={"ignore_index": IGNORED}),
        dense,
        masks_of,
        {
            "pixel_accuracy": of_pixels(reference.accuracy_score),
            "dice": of_pixels(reference.f1_score, average="macro"),
            "iou": of_pixels(reference.jaccard_score, average="macro"),
            "confusion": of_pixels(reference.confusion_matrix, labels=range(NUM_CLASSES)),
        },
    ),
}
COUNT = 13


def measured(comm: Communicator, name: str, plan: Plan) -> Evaluation:
    case = CASES[name]
    if plan.num_stages > 1:
        held = split(case.model, plan, comm, seed=0, image=(4, 3, *SIZE))
    else:
        torch.manual_seed(0)
        held = LocalStages.whole(case.model(), plan, comm)
    engine = Engine(held, plan, torch.optim.SGD(held.parameters(), lr=0.1), case.task.objective, comm=comm)
    batches = in_batches(engine, images_of(COUNT), case.targets(COUNT), batch=5)
    return engine.evaluate(batches, SIZE, case.task.metrics([*case.metrics]), case.task.measured)


def check(ranks: Ranks, name: str, plan: Plan) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    with torch.no_grad():
        predictions = case.task.predictions(case.model()(images_of(COUNT))).numpy()
    targets = case.targets(COUNT)
    plain = tuple(x.numpy() for x in targets) if isinstance(targets, tuple) else targets.numpy()
    found = ranks(plan.num_ranks).run(measured, name, plan)
    assert all(evaluation == found[0] for evaluation in found)
    for metric, function in case.metrics.items():
        expected = function(plain, predictions)
        assert np.allclose(found[0].metrics[metric], expected, rtol=EXACT, atol=0), metric


@pytest.mark.parametrize(("name", "plan"), [*((name, UNEVEN) for name in CASES), ("segment", TILES)], ids=str)
def test_metrics_are_those_of_scikit_learn_on_the_union(ranks: Ranks, name: str, plan: Plan) -> None:
    check(ranks, name, plan)


@pytest.mark.exhaustive
@pytest.mark.parametrize("plan", [UNEVEN, TILES, STAGES, Plan(((1, 2),), data=2, microbatches=2), Plan()], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_every_metric_under_every_plan(ranks: Ranks, name: str, plan: Plan) -> None:
    if plan.num_microbatches == 1 or name != "survival":
        check(ranks, name, plan)


class Sum:
    """A metric of somebody's own, which knows nothing of ranks but how two are added."""

    def __init__(self) -> None:
        self.total = 0.0

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        self.total += float((predictions * (targets.unsqueeze(1) if targets.dim() < predictions.dim() else 1)).sum())

    def merge_state(self, other: "Sum") -> None:
        self.total += other.total

    def compute(self) -> dict[str, Any]:
        return {"total": self.total, "pair": (1, torch.tensor([2]))}


class Lonely(Sum):
    merge_state = None  # type: ignore[assignment]


class FailingAtTheEnd(Sum):
    def compute(self) -> dict[str, Any]:
        raise KeyError("of the user's own")


class FailingLate(Sum):
    def update(self, predictions: Tensor, targets: Tensor) -> None:
        raise ValueError(f"cannot count {tuple(predictions.shape)}")


def largest(predictions: Tensor, targets: Tensor) -> float:
    return float(predictions.max())


def with_own(comm: Communicator, plan: Plan, metrics: dict[str, Any], undefined: bool = False) -> Any:
    """Metrics of dense outputs on tiles, or what was raised."""
    torch.manual_seed(0)
    model = dense()
    if undefined:
        model.model.last.bias.data[0] = torch.nan  # type: ignore[union-attr,operator]
    engine = Engine(model, plan, torch.optim.SGD(model.parameters(), lr=0.1), lambda x, y: x.sum(), comm=comm)
    try:
        return engine.evaluate(in_batches(engine, images_of(3), masks_of(3)), SIZE, metrics).metrics
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def loss_of_nothing(comm: Communicator, plan: Plan) -> float:
    """The loss of masks of which no pixel counts."""
    model = dense()
    loss = build_loss("cross_entropy", ignore_index=IGNORED)
    engine = Engine(model, plan, torch.optim.SGD(model.parameters(), lr=0.1), loss, comm=comm)
    masks = torch.full_like(masks_of(3), IGNORED)
    return engine.evaluate(in_batches(engine, images_of(3), masks), SIZE).loss


def test_the_loss_of_nothing_that_counts_is_no_number(ranks: Ranks) -> None:
    assert all(map(math.isnan, ranks(4).run(loss_of_nothing, TILES)))


def test_metrics_of_ones_own_on_tiles(ranks: Ranks) -> None:
    found = ranks(4).run(with_own, TILES, {"own": Sum, "object": Sum()})
    torch.manual_seed(0)
    outputs, masks = dense()(images_of(3)).detach(), masks_of(3)
    total = float((outputs * masks.unsqueeze(1)).sum())
    for metrics in found:
        assert metrics["own/total"] == pytest.approx(total, rel=1e-10)
        assert metrics["object/total"] == metrics["own/total"]
        assert metrics["own/pair"] == [1.0, [2]]


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"alone": Lonely}, "`metrics` has alone, to which several ranks added, but Lonely has no merge_state"),
        ({"late": FailingLate}, "cannot count (3, 3, 12, 11)"),
        ({"wrong": FailingAtTheEnd}, "of the user's own"),
        ({"function": largest}, "`metrics` has function, a function of all predictions at once, but these are tiles"),
        ({"nothing": 3}, "`metrics` has nothing, a int, but a metric is an object with update"),
    ],
)
def test_a_metric_that_cannot_be_is_refused_on_all_ranks(ranks: Ranks, metrics: Any, message: str) -> None:
    assert all(message in found for found in ranks(4).run(with_own, TILES, metrics))


def test_a_prediction_that_is_no_number_makes_metrics_of_all_none(ranks: Ranks) -> None:
    for metrics in ranks(4).run(with_own, TILES, {"own": Sum}, True):
        assert math.isnan(metrics["own"])
    assert ranks(1).run(with_own, Plan(), {"own": largest})[0]["own"] > 0


@pytest.mark.parametrize("size", [2, 4])
def test_auc_with_ties_and_missing_classes(size: int) -> None:
    drawn = torch.Generator().manual_seed(1)
    scores = torch.randint(5, (60, size), generator=drawn).double()
    labels = torch.randint(size, (60,), generator=drawn)
    parts = [make_metric("classify", "auc", size, IGNORED) for _ in range(2)]
    for part, rows in zip(parts, (slice(0, 7), slice(7, None)), strict=True):
        part.update(scores[rows], labels[rows])
    parts[0].merge_state(parts[1])
    each = [reference.roc_auc_score(labels == c, scores[:, c]) for c in range(size)]
    assert float(parts[0].compute()) == pytest.approx(each[1] if size == 2 else np.mean(each), rel=EXACT)
    alone = make_metric("classify", "auc", size, IGNORED)
    alone.update(scores, torch.zeros(60, dtype=torch.int64))
    assert math.isnan(float(alone.compute()))


def test_a_death_counts_before_those_who_left_at_its_time() -> None:
    """Risks agree with the only two pairs: 2 died before 3 left, and at the time when 1 left."""
    times, events = torch.tensor([2.0, 2.0, 3.0]), torch.tensor([0, 1, 0])
    assert concordance(torch.tensor([1.0, 4.0, 2.0]), times, events) == 1.0
    assert concordance(torch.tensor([4.0, 4.0, 5.0]), times, events) == 0.25
    assert math.isnan(concordance(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 2.0]), torch.tensor([1, 1])))


@pytest.mark.parametrize("number", range(3))
def test_overlaps_of_one_class_are_those_of_scikit_learn(number: int) -> None:
    drawn = torch.Generator().manual_seed(2)
    found, true = torch.randint(3, (2, 50), generator=drawn)
    counts = torch.bincount(true * 3 + found, minlength=9).view(3, 3)
    for measure, function in (("dice", reference.f1_score), ("iou", reference.jaccard_score)):
        assert overlaps(measure, counts)[number] == pytest.approx(function(true == number, found == number))
    counts[number] = counts[:, number] = 0
    assert math.isnan(overlaps("dice", counts)[number])


def test_a_model_may_have_outputs_for_more_classes() -> None:
    parts = [make_metric("classify", "balanced_accuracy", 2, IGNORED) for _ in range(2)]
    parts[0].update(torch.eye(3)[[0, 2]], torch.tensor([0, 1]))
    parts[1].update(torch.eye(2)[[1]], torch.tensor([1]))
    parts[1].merge_state(parts[0])
    assert float(parts[1].compute()) == 0.75
