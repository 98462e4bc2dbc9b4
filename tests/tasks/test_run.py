"""Tasks as options name them: errors in one sentence, and a run with metrics that ends when they stop growing."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import mpi4dl
from mpi4dl._numbers import typed
from mpi4dl.comm import Communicator, Refusal
from mpi4dl.datasets import DatasetError, adapt
from mpi4dl.datasets.labels import FORMS
from mpi4dl.datasets.samples import read_samples
from mpi4dl.engine import Engine, Evaluation
from mpi4dl.inference.records import columns_of
from mpi4dl.inference.samples import Judging, Measured, measured_by, members_of
from mpi4dl.options.config import ConfigError, parse
from mpi4dl.options.declare import with_values
from mpi4dl.options.tasks import build_metrics, build_task, directions, monitored, with_defaults, with_task
from mpi4dl.parallel.plan import Plan
from mpi4dl.tasks.directions import HIGHER_IS_BETTER
from mpi4dl.tasks.formulas import IGNORED, BatchLoss, heads_of
from mpi4dl.tasks.losses import balanced_weights, build_loss
from mpi4dl.tasks.measuring import measured_here
from mpi4dl.tasks.task import TASKS
from mpi4dl.training.resuming import Best
from tests.pool.ranks import Ranks, on_ranks
from tests.pool.zygote import ROOT
from tests.support.commands import read_metrics
from tests.support.short_runs import tiles_of
from tests.tasks.cases import Small, in_batches

HERE = "tests.tasks.test_run"
NAN, LABELS = math.nan, [0, 0, 0, 1, 2, 2]


class Labelled:
    """Images of classes, of labels, or with masks."""

    channels = 3
    classes: tuple[str, ...] = ()

    def __init__(self, task: str = "classify", count: int = 8) -> None:
        self.task, self.count = task, count

    def __len__(self) -> int:
        return self.count

    def label(self, index: int) -> Any:
        if self.task == "multilabel":
            return [index % 2, int(index == 0), 1]
        if self.task == "classify":
            return LABELS[index % 6]
        mask = np.zeros((16, 12), np.int64)
        mask[3 : 9 + index % 4, 4:9], mask[0] = 1, IGNORED
        return mask

    def image(self, index: int) -> Any:
        return Pixels(self.label(index), index)


class Pixels:
    size = (16, 12)

    def __init__(self, mask: Any, index: int) -> None:
        noise = np.random.default_rng(index).random((16, 12, 3), dtype=np.float32)
        self.values = noise * 0.3 + (mask == 1)[..., None] * np.float32(0.5)

    def read(self, rows: Any, cols: Any) -> Any:
        return self.values[slice(*rows), slice(*cols)]


class Pixelwise(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, num_classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).relu())


def undirected(predictions: torch.Tensor, targets: torch.Tensor) -> float:
    return float(predictions.mean())


class Brier:
    """Of torchmetrics' form, whose attribute says the direction."""

    higher_is_better = False

    def update(self, predictions: torch.Tensor, targets: torch.Tensor) -> None: ...

    def compute(self) -> float:
        return 0.0


class Directed(Brier):
    """It says its direction when it is made."""

    higher_is_better = None  # type: ignore[assignment]

    def __init__(self) -> None:
        self.higher_is_better = True  # type: ignore[assignment]


def plain_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.sum()


class OwnLoss:
    def __init__(self, class_weights: Any = None) -> None:
        self.class_weights = class_weights

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return outputs.sum()


def task_by(flags: str, task: str = "classify", num_classes: int = 3) -> tuple[Any, dict[str, Any], str | None]:
    dataset = Labelled(task, 6)
    config = with_task(parse(flags.split()), dataset)
    learnt = build_task(config, dataset, num_classes)
    learnt.objective  # noqa: B018
    metrics = build_metrics(config, learnt)
    return learnt, metrics, monitored(config, learnt, metrics)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--loss crossentropy", "`loss` 'crossentropy' is unknown: choose of cross_entropy, bce, dice, focal, mse"),
        ("--loss huber --loss-options gama=1", "`loss` huber does not take gama; its options are: delta"),
        ("--loss focal --loss-options gamma=-1", "`gamma` is -1, but must be at least 0"),
        ("--loss cox --loss-options ties=exact", "`ties` is 'exact', but must be one of efron, breslow"),
        ("--loss nowhere.py:loss", "`loss` nowhere.py:loss: there is no file nowhere.py"),
        ("--class-weights 1,2", "`class_weights` has 2 numbers, but there are 3 classes: give one for each"),
        ("--class-weights 0,0,0", "`class_weights` [0.0, 0.0, 0.0] must be at least 0, and not all of them 0"),
        ("--task regress --class-weights balanced", "`class_weights` balanced counts labels, which `task` regress has"),
        ("--task segment --loss bce --class-weights balanced", "`class_weights` balanced counts labels, which `task`"),
        ("--task regress --label-smoothing 0.1", "`loss` mse does not take label_smoothing; its options are: none"),
        ("--task language", "`task` language is not for images: choose one of images, or auto"),
        ("--text stdlib --task segment", "`task` segment is not for text: choose language or masked, or auto"),
        ("--metrics auroc", "`metrics` auroc: `task` classify has accuracy, balanced_accuracy, f1, auc"),
        ("--task segment --metrics auc", "`metrics` auc: `task` segment has pixel_accuracy, dice, iou, confusion"),
        ("--metrics no_such_module:Metric", "`metrics` no_such_module:Metric: there is no module no_such_module"),
        (
            "--metrics f1 --monitor val_auc",
            "`monitor` val_auc is not measured: choose of val_loss, val_accuracy, val_f1,",
        ),
        (
            f"--metrics {HERE}:undirected --monitor val_undirected",
            "`monitor` val_undirected: it is unknown whether higher",
        ),
        (f"--loss {HERE}:plain_loss --class-weights 1,2,3", "`class_weights` is not taken by the own `loss`"),
        (f"--loss {HERE}:OwnLoss --label-smoothing 0.1", "`label_smoothing` is not taken by the own `loss`"),
        ("--weight-column w", "`weight_column` w: samples have no table with such a column"),
        ("--patience 3 --eval-every none", "`monitor` and `patience` look at validations, of which `eval_every` none"),
    ],
)
def test_what_cannot_be_learnt_or_measured_is_refused(flags: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        task_by(flags)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--mixup 0.2", "`weight_column` w: `mixup` 0.2 mixes samples of several weights"),
        (f"--loss {HERE}:plain_loss", "`weight_column` w: your own loss gets no weights"),
        ("--loss cross_entropy+cox", "`weight_column` w: `loss` cox compares samples with each other"),
        ("--task survival", "`weight_column` w: `loss` cox compares samples with each other"),
    ],
)
def test_weights_of_samples_are_refused_where_a_loss_cannot_have_them(flags: str, message: str) -> None:
    dataset: Any = Labelled("survival" if "survival" in flags else "classify", 6)
    dataset.weights = [1.0] * 6
    config = with_task(parse(["--weight-column", "w", *flags.split()]), dataset)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        build_task(config, dataset, 3)


def test_what_options_leave_open_follows_from_the_labels() -> None:
    task, metrics, monitor = task_by("--class-weights balanced --metrics auc,f1 --patience 2")
    assert (task.name, list(metrics), monitor) == ("classify", ["auc", "f1"], ("loss", False, 2))
    assert task_by("--monitor val_auc")[2] == ("auc", True, None)
    assert list(task_by("--monitor val_average_precision")[1]) == [
        "balanced_accuracy",
        "f1",
        "auc",
        "average_precision",
    ]
    assert "auc" not in task_by("", num_classes=1000)[1]
    assert task.loss_options["class_weights"] == pytest.approx((6 / 9, 2.0, 1.0))
    assert balanced_weights([0, 0, 2], 3) == (0.75, 0.0, 1.5)
    task, metrics, monitor = task_by("--class-weights balanced --monitor val_auc", "multilabel")
    assert (task.name, "auc" in metrics, monitor) == ("multilabel", True, ("auc", True, None))
    assert task.loss_options["class_weights"] == (1.0, 5.0, 0.0)
    assert task_by("--patience 1", "segment")[2] == ("dice", True, 1)
    masks = np.stack([Labelled("segment").label(index) for index in range(6)])
    with_class = [(masks == number).sum() for number in (0, 1)]  # class 2 has no pixel, and ignored ones do not count
    weights = task_by("--class-weights balanced", "segment")[0].loss_options["class_weights"]
    assert weights == pytest.approx((*(sum(with_class) / (2 * n) for n in with_class), 0.0))
    assert with_task(parse(["--text", "stdlib"]), None).data.task == "language"


def test_images_as_targets_are_refused_unless_a_task_is_named() -> None:
    images = torch.rand(4, 3, 8, 8)
    values, masks = (adapt(torch.utils.data.TensorDataset(images, each)) for each in (images, images.round()))
    with pytest.raises(ConfigError, match=r"shape \(3, 8, 8\), and no mask: .* `task` regress"):
        with_task(parse(["--dataset", "a.py:B"]), values)
    assert with_task(parse(["--dataset", "a.py:B"]), masks).data.task == "segment"
    assert with_task(parse(["--dataset", "a.py:B", "--task", "regress"]), values).data.task == "regress"


@pytest.mark.parametrize(
    ("name", "outputs", "targets", "message"),
    [
        ("classify", (2, 3, 4), (2,), "the model's output has shape (2, 3, 4), but `task` classify, images with one"),
        ("classify", (2, 3), (2, 4, 4), "the model's output has shape (2, 3), but `task` classify needs (batch"),
        ("multilabel", (2, 3), (2, 4), "the model's output has shape (2, 3), but `task` multilabel needs (batch"),
        ("regress", (2, 3), (2,), "the model's output has shape (2, 3), but `task` regress needs a number for each"),
        ("segment", (2, 3, 4, 4), (2, 8, 8), "the model's output has shape (2, 3, 4, 4), but `task` segment needs"),
        ("survival", (2, 3), (2, 2), "the model's output has shape (2, 3), but `task` survival needs one risk"),
        ("survival", (2, 1), (2, 3), "the targets of survival are (time, event) of each sample, (N,) each or (N, 2)"),
    ],
)  # fmt: skip
def test_outputs_that_are_not_the_tasks_are_refused(name: str, outputs: Any, targets: Any, message: str) -> None:
    with pytest.raises(Refusal) as refused:
        TASKS[name](3).objective(torch.zeros(outputs), torch.zeros(targets, dtype=torch.int64))
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize("target", [3, -1])
def test_a_class_that_there_is_none_of_is_refused(target: int) -> None:
    with pytest.raises(Refusal, match=f"^a target is class {target}, but"):
        build_loss("dice+cross_entropy")(torch.zeros(1, 3, 2, 2), torch.full((1, 2, 2), target))


@pytest.mark.parametrize("name", ["dice", "focal", "cross_entropy+dice"])
def test_means_of_classes_are_refused_by_losses_that_take_classes(name: str) -> None:
    """Mixup makes targets (N, C); by dice they met outputs (N, C) as if they were of another shape."""
    with pytest.raises(Refusal, match=r"^targets \(2, 3\) have a number for each output"):
        build_loss(name)(torch.zeros(2, 3), torch.full((2, 3), 1 / 3))


def test_heads_are_found_whatever_a_model_returns() -> None:
    main, other = torch.zeros(1), torch.ones(1)
    assert heads_of({"aux": other, "out": main, "hidden": None}) == (main, ((0.5, other),), None)
    assert heads_of((main, None, other)) == (main, ((0.3, other),), None)
    assert heads_of([main, other], 0.1) == (main, ((0.1, other),), None)


@on_ranks(4)
def test_a_loss_of_whole_batches_takes_no_microbatches(comm: Communicator) -> None:
    model = Small(1)
    plan = Plan(data=4, microbatches=2)
    with pytest.raises(Refusal, match=r"^the loss compares all samples"):
        Engine(model, plan, torch.optim.SGD(model.parameters(), lr=0.1), TASKS["survival"](1).objective, comm=comm)


class OverlapOfAll(BatchLoss):
    """One less the overlap of two masks, as fractions of the largest probability in the whole batch."""

    @property
    def whole_batch(self) -> bool:
        return True

    def sums(self, outputs: Any, targets: Any) -> Sequence[torch.Tensor]:
        inside = outputs[:, 1].sigmoid()
        return (len(outputs) - (inside * targets).sum() / inside.amax() / inside[0].numel(),)

    def weights(self, targets: Any) -> Sequence[float]:
        return (len(targets),)


def dense() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Conv2d(3, 2, 3, padding=1), torch.randn(5, 3, 12, 8), torch.randint(2, (5, 12, 8))


def evaluated_dense(comm: Communicator, plan: Plan) -> float:
    model, images, masks = dense()
    engine = Engine(model, plan, torch.optim.SGD(model.parameters(), lr=0.1), OverlapOfAll(), comm=comm)
    parts = [slice(i, i + 2) for i in (0, 2, 4)]
    batches = [(tiles_of(images[part], engine, training=False), masks[part]) for part in parts]
    return engine.evaluate(batches, (12, 8)).loss


def test_a_loss_of_all_samples_sees_dense_outputs_whole(ranks: Ranks) -> None:
    model, images, masks = dense()
    expected = OverlapOfAll()(model(images), masks).item()
    for plan in (Plan(), Plan(((2, 2),))):
        assert ranks(plan.num_ranks).run(evaluated_dense, plan) == pytest.approx([expected] * plan.num_ranks, rel=1e-6)


def test_what_counts_for_nothing_teaches_nothing() -> None:
    outputs = torch.randn(2, 3, 4, 4, requires_grad=True)
    loss = build_loss("cross_entropy+dice")(outputs, torch.full((2, 4, 4), IGNORED))
    loss.backward()
    assert float(loss.detach()) == pytest.approx(0, abs=1e-6)
    assert outputs.grad is not None
    assert not outputs.grad.any()


def test_the_best_is_told_by_the_metrics_direction() -> None:
    higher, lower = (0.5, NAN, 0.7, 0.7, math.inf), (NAN, 3.0, 2.0, NAN, -math.inf)
    for monitor, values, best in (("auc", higher, 2), ("mae", lower, 2)):
        found = Best(monitor, monitor == "auc", patience=2)
        seen = [found.see(Evaluation(1.0, None, 4, {monitor: value}), n) for n, value in enumerate(values)]
        assert (found.step, found.enough, seen.index(True)) == (best, True, 0 if monitor == "auc" else 1)
        other, turned = Best(monitor, monitor == "auc", patience=None), Best(monitor, monitor != "auc", patience=None)
        state = typed(Best, json.loads(json.dumps(asdict(found))), "its best")
        other.go_on(state)
        turned.go_on(state)
        assert replace(other, patience=2) == found
        assert turned.step == 0  # what was best in the other direction says nothing
    with pytest.raises(ValueError, match=r"^`monitor` val_confusion is no number here: choose of val_loss$"):
        Best("confusion", True, None).see(Evaluation(1.0, None, 4, {"confusion": [[1]]}), 1)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (f"--metrics {HERE}:Brier --monitor val_Brier", ("Brier", False)),
        (f"--metrics {HERE}:Directed --monitor val_Directed", ("Directed", True)),
        ("--metrics torchmetrics:MeanSquaredError --monitor val_MeanSquaredError", ("MeanSquaredError", False)),
        ("--metrics torchmetrics:R2Score --monitor val_R2Score", ("R2Score", True)),
    ],
)
def test_the_metric_says_its_direction(flags: str, expected: tuple[str, bool]) -> None:
    task, metrics, monitor = task_by(flags)
    assert monitor == (*expected, None)
    told = directions(task, metrics, monitor)
    assert told[expected[0]] == expected[1]
    assert (told["loss"], told["accuracy"]) == (False, True)


def test_every_metric_of_ours_has_a_direction() -> None:
    for task in TASKS.values():
        assert all(name in HIGHER_IS_BETTER for name in {*task.metric_names, task.monitor} - {"confusion"})


def test_an_own_loss_is_given_class_weights() -> None:
    assert task_by(f"--loss {HERE}:OwnLoss --class-weights balanced")[0].loss.class_weights == pytest.approx(
        (6 / 9, 2.0, 1.0)
    )


def test_the_task_of_the_guide_for_contributors_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its label form is read from a table; its loss, metrics, defaults and records are its own."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    blocks = [
        block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "Count" in block or "FORM" in block
    ]
    made: dict[str, Any] = {"__name__": "guide"}
    for block in blocks:
        exec(block, made)
    monkeypatch.setitem(TASKS, "count", made["Count"])  # type: ignore[arg-type]
    monkeypatch.setitem(FORMS, "count", made["FORM"])  # type: ignore[arg-type]
    (tmp_path / "labels.csv").write_text("file,cells\na.png,3\nb.png,7\n")
    for name in "ab":
        (tmp_path / f"{name}.png").touch()
    table = read_samples(tmp_path / "labels.csv", task="count")
    assert (table.classes, [row.label for row in table.rows]) == (("cells",), [(3.0,), (7.0,)])
    (tmp_path / "labels.csv").write_text("file,cells\na.png,3.5\n")
    with pytest.raises(DatasetError, match=r"line 2: 'cells' is '3\.5', but count needs whole numbers"):
        read_samples(tmp_path / "labels.csv", task="count")
    config = with_defaults(with_values(parse([]), {"task": "count"}))
    task = build_task(config, None, 1)
    assert (config.data.flip, list(build_metrics(config, task))) == ("horizontal", ["mae", "rmse"])
    outputs, targets = torch.tensor([[2.0], [-3.0]]), torch.tensor([[3.0], [0.0]])
    assert float(task.objective(outputs, targets)) == pytest.approx((0.5 + 2.5) / 2)
    found = measured_here(task.metrics(["mae"]), task.predictions(outputs), targets)
    assert found == {"mae": pytest.approx(0.5)}
    assert columns_of(type(task), ("cells",), labelled=True) == ["image", "label", "prediction", "error"]
    assert task.answer(("cells",), torch.tensor([2.6]), torch.tensor([3.0])) == {"label": 3, "prediction": 3}


@pytest.mark.parametrize("name", ["classify", "segment"])
@on_ranks(4)
def test_outputs_that_are_not_numbers_are_no_class(comm: Communicator, name: str) -> None:
    """Class 0 is right everywhere, and argmax makes class 0 of NaN: outputs are right, but for one that may be NaN."""
    dense = name == "segment"
    model = nn.Conv2d(3, 3, 1) if dense else nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3))
    images, targets = torch.zeros(4, 3, 8, 8), torch.zeros((4, 8, 8) if dense else 4, dtype=torch.int64)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.tensor([1.0, 0, 0]) if p.dim() == 1 else torch.zeros_like(p))
    task, plan = TASKS[name](3), Plan(((2, 2),))
    engine = Engine(model, plan, torch.optim.SGD(model.parameters(), lr=0.1), task.objective, comm=comm)
    for undefined in (False, True):
        images[3, 0, 7, 7] = NAN if undefined else 0
        batches = in_batches(engine, images, targets, batch=2)
        found = engine.evaluate(batches, (8, 8), task.metrics(task.metric_names[:1]), task.measured)
        values = [*found.metrics.values(), *([] if found.accuracy is None else [found.accuracy])]
        assert all(math.isnan(value) if undefined else value == 1 for value in values if isinstance(value, float))


def mean_of(values: torch.Tensor, resamples: int, level: float = 0.95, undefined: Sequence[int] = ()) -> Measured:
    """Their mean, not defined of draws with some of these, and its interval."""

    def measure(drawn: torch.Tensor) -> dict[str, float]:
        return {"mean": NAN if {*undefined} & {*drawn.tolist()} else float(values[drawn].mean())}

    members = members_of(range(len(values)))
    return measured_by(measure, members, len(values), Judging(resamples=resamples, level=level))["mean"]


def test_the_bootstrap_covers_a_mean_as_often_as_it_says() -> None:
    generator, inside = torch.Generator().manual_seed(0), 0
    for _ in range(100):
        found = mean_of(values := torch.randn(40, generator=generator), 200, 0.9)
        inside += found.low <= 0 <= found.high
    assert 85 <= inside <= 97
    assert found == mean_of(values, 200, 0.9)
    partly, nowhere = (mean_of(values, 200, 0.9, undefined) for undefined in ([0], range(40)))
    assert partly.low < partly.high
    assert partly.low != found.low
    assert math.isnan(nowhere.low)


@pytest.mark.parametrize(
    ("scores", "known"),
    [([0.0, 0.0], False), ([0.2, 0.9], False), ([1.0] * 50, False), ([0.1 * i for i in range(10)], True)],
    ids=str,
)
def test_few_or_equal_samples_have_no_interval(scores: list[float], known: bool) -> None:
    """Of two images an interval is as long as chance has it; of equal scores it is 0 long, as if it were certain."""
    found = mean_of(torch.tensor(scores), 100)
    assert math.isnan(found.low) is math.isnan(found.high) is (not known)


def run(comm: Communicator, folder: Path, epochs: int, **options: Any) -> Evaluation | None:
    data = Labelled("segment"), Labelled("segment", 3)
    given: dict[str, Any] = {"model": Pixelwise, "num_classes": 2, "dataset": data}
    given |= {"image_size": (16, 12), "batch_size": 3, "num_workers": 0, "seed": 1, "optimizer": "Adam", "flip": False}
    given |= {"task": "segment", "loss": "dice+cross_entropy", "monitor": "val_dice", "run_folder": str(folder)}
    return mpi4dl.Trainer(comm=comm, epochs=epochs, tensorboard=False, **given | options).fit()


def short(comm: Communicator, folder: Path) -> Evaluation | None:
    return run(comm, folder, 9, tiles="2x2", lr=1e-9, patience=2)


def test_a_run_keeps_its_best_weights_and_ends_when_none_are_better(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks(4).run(short, tmp_path / "short")
    records = [record for record in read_metrics(tmp_path / "short") if record["phase"] == "validation"]
    assert [record["epoch"] for record in records] == [1, 2, 3]  # with such a learning rate nothing gets better
    assert [record.get("best", False) for record in records] == [True, False, False]
    assert {"dice", "iou", "pixel_accuracy"} <= records[0].keys()
    assert found[0] == found[1]
    assert found[0].metrics["dice"] == records[-1]["dice"]
    assert "val_dice was best" in (tmp_path / "short" / "log-rank0.txt").read_text()
    best, last = (load_file(tmp_path / "short" / f"{name}.safetensors") for name in ("best", "model"))
    assert best.keys() == last.keys()
    assert any(not torch.equal(best[name], last[name]) for name in best)
