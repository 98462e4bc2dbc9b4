"""Tasks: outputs, loss, metrics and defaults of each, and how labels and predictions are counted, named and written.

A task whose labels have a new form has a `datasets.labels.LabelForm` of its name too.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import nan
from typing import Any, ClassVar

import torch
from torch import Tensor

from mpi4dl._wording import counted, some
from mpi4dl.comm import Communicator, Refusal
from mpi4dl.datasets import BadImage, pixels_of
from mpi4dl.tasks.formulas import IGNORED, BatchLoss, OfHeads, TokenCrossEntropy, as_targets, main_output
from mpi4dl.tasks.losses import (
    balanced_weights,
    build_loss,
    require_logits,
    shape_in_words,
    times_and_events,
    weights_of_counts,
)
from mpi4dl.tasks.measuring import NO_CLASS
from mpi4dl.tasks.metrics import THRESHOLD, make_metric

MOST_SHOWN = 4  # numbers of a label, for people
MOST_RANKED_CLASSES = 100  # of which `--metrics auto` keeps and sorts all probabilities

Record = dict[str, Any]  # of a prediction: values, or values by name


def usual(**changes: Any) -> Mapping[str, Any]:
    """Values of training options that nobody gives, with the changes that are the habit of a task.

    AdamW with a rate and a decay as in the recipes of timm and torchvision, for batches of a few images; warm-up, and
    half a cosine to 0; pictures mirrored from left to right, as these recipes do.
    """
    values = {"optimizer": "AdamW", "lr": 1e-3, "optimizer_options": {"weight_decay": 0.05}, "flip": "horizontal"}
    return {**values, "lr_schedule": "cosine", "warmup": 0.05, "epochs": 10, **changes}


@dataclass(frozen=True)
class Task:
    """A task. `loss` is None for the task's own, the name of one, or a function of outputs and targets.

    `num_classes`: how many classes, labels or numbers are predicted. `loss_options` are those of losses by name;
    `auxiliary` is what auxiliary heads count by beside the main one, None: as is customary.
    """

    num_classes: int
    loss: Any = None
    loss_options: Mapping[str, Any] = field(default_factory=dict)
    auxiliary: float | None = None

    name: ClassVar[str] = ""
    default_loss: ClassVar[str] = ""
    metric_names: ClassVar[tuple[str, ...]] = ()
    monitor: ClassVar[str] = "loss"
    accuracy: ClassVar[bool] = False  # whether validation counts it beside the loss
    dense: ClassVar[bool] = False  # whether outputs are masks, classes of pixels
    makes_images: ClassVar[bool] = False  # whether outputs are images of values
    of_text: ClassVar[bool] = False
    defaults: ClassVar[Mapping[str, Any]] = usual()  # options of training, by name

    @property
    def usual_metrics(self) -> tuple[str, ...]:
        """The metrics of `--metrics auto`."""
        return tuple(name for name in self.metric_names if name != "confusion")

    @property
    def objective(self) -> Callable[[Any, Any], Tensor]:
        """The objective of the engine: functions of the user's own see all that the model returns."""
        if self.loss is None or isinstance(self.loss, str):
            return OfHeads(self.own_loss(), self.require, self.auxiliary)
        if isinstance(self.loss, BatchLoss):
            return OfHeads(self.loss, self.require, self.auxiliary)
        if not callable(self.loss):
            raise ValueError(f"`loss` is a {type(self.loss).__name__}, but must be a name or a function")
        return self.loss

    def own_loss(self) -> BatchLoss:
        return build_loss(self.loss or self.default_loss, **self.loss_options)

    @property
    def ignore_index(self) -> int:
        return int(self.loss_options.get("ignore_index", IGNORED))

    @property
    def num_outputs(self) -> int:
        """How many outputs the model is to have, or channels."""
        return self.num_classes

    @property
    def binary(self) -> bool:
        """Whether outputs are of pixels, of which each may be of several classes."""
        return False

    def require(self, outputs: Any, targets: Any) -> None:
        """Raise Refusal unless a model's main output, and the targets, are as this task has them."""

    def predictions(self, outputs: Any) -> Any:
        """Predictions from the model's outputs: probabilities, or the numbers themselves."""
        return main_output(outputs)

    def measured(self, outputs: Any, targets: Any) -> Any:
        """The values that metrics compare with targets."""
        return self.predictions(outputs)

    def metrics(self, names: Sequence[str] | None = None) -> dict[str, Callable[[], Any]]:
        """A factory of each metric, by name; None: the usual ones of this task.

        Raises ValueError for a name that is none.
        """
        asked = self.usual_metrics if names is None else names
        unknown = [name for name in asked if name not in self.metric_names]
        if unknown:
            known = ", ".join(self.metric_names) or "none by name"
            raise ValueError(f"`metrics` {unknown[0]!r} is unknown for `task` {self.name}, whose are: {known}")
        kind = self.counted_as
        return {name: partial(make_metric, kind, name, self.num_classes, self.ignore_index) for name in asked}

    @property
    def counted_as(self) -> str:
        return self.name

    @classmethod
    def label_counts(cls, dataset: Any) -> list[int] | None:
        """How many samples of a dataset have each class or label; None of other labels."""
        return None

    @classmethod
    def described(cls, training: Any, validation: Any) -> str:
        """What is learnt of these datasets, as the first lines of a run say it behind the number of samples."""
        counts = [cls.label_counts(dataset) or [] for dataset in (training, validation)]
        shown = [f"{name} ({a} + {b})" for name, a, b in zip(training.classes, *counts, strict=True)]
        return f"in {counted(len(training.classes), 'class', 'classes')}: {some(shown)}"

    def balanced_weights(self, dataset: Any, comm: Communicator | None) -> Sequence[float] | None:
        """Weights of classes by which rare ones count as much as others; None where labels have no classes.

        Collective over `comm`, whose ranks share the work of counting pixels.
        """
        return None

    def names(self, classes: Sequence[str]) -> tuple[str, ...]:
        """A name for each output: those of `classes`, and numbers where there are fewer."""
        return (*classes[: self.num_outputs], *map(str, range(len(classes), self.num_outputs)))

    @classmethod
    def words(cls, value: Tensor, classes: Sequence[str]) -> str:
        """A label, or `predictions`, of one sample, for people."""
        return ", ".join(f"{float(number):.3g}" for number in value.reshape(-1)[:MOST_SHOWN])

    @classmethod
    def answer(cls, classes: Sequence[str], outputs: Tensor, label: Tensor | None = None) -> Record:
        """A record of one sample: what its `predictions` say, and its label if there is one."""
        values, true = _numbers(outputs), _numbers(label)
        if len(values) > 1:
            said = {} if true is None else {"labels": dict(zip(classes, true, strict=True))}
            return {**said, "predictions": dict(zip(classes, values, strict=True))}
        return {**({} if true is None else {"label": true[0]}), "prediction": values[0]}

    @classmethod
    def blank(cls, classes: Sequence[str], labelled: bool, apart: bool) -> Record:
        """A record as one of a sample is, of zeros; with a mask of each class, if these are `apart`."""
        label = torch.zeros(cls.label_size(len(classes))) if labelled else None
        return cls.answer(classes, torch.zeros(len(classes)), label)

    @classmethod
    def label_size(cls, num_classes: int) -> int:
        """How many numbers the label of a sample has."""
        return num_classes


def _numbers(values: Tensor | None) -> Any:
    return None if values is None else values.double().reshape(-1).tolist()


DENSE = "(batch, classes, height, width), of the size of masks"


def _refuse(outputs: Any, targets: Any, task: str, wanted: str) -> None:
    told = f" for targets of {shape_in_words(targets)}" if isinstance(targets, Tensor) else ""
    raise Refusal(
        f"the model's output has {shape_in_words(outputs)}, but `task` {task} needs {wanted}{told}: choose another "
        "`model`, or the `task` that it is for"
    )


class Classify(Task):
    """One class for each image: outputs (N, classes), targets (N,), or (N, classes) of probabilities."""

    name = "classify"
    default_loss = "cross_entropy"
    accuracy = True
    metric_names = ("accuracy", "balanced_accuracy", "f1", "auc", "average_precision", "confusion")

    @property
    def usual_metrics(self) -> tuple[str, ...]:
        """Without the accuracy, which comes with the loss, and without curves of so many classes that it takes long."""
        few = ("auc",) if self.num_classes <= MOST_RANKED_CLASSES else ()
        return ("balanced_accuracy", "f1", *few)

    def require(self, outputs: Any, targets: Any) -> None:
        require_logits(outputs)
        if targets.shape not in (outputs.shape[:1], outputs.shape):
            _refuse(outputs, targets, self.name, "(batch, classes)")

    def predictions(self, outputs: Any) -> Any:
        return main_output(outputs).softmax(1)

    @classmethod
    def label_counts(cls, dataset: Any) -> list[int] | None:
        labels = [dataset.label(index) for index in range(len(dataset))]
        return [labels.count(number) for number in range(len(dataset.classes))]

    def balanced_weights(self, dataset: Any, comm: Communicator | None) -> Sequence[float] | None:
        """n / (classes * number) of n labels."""
        labels = [int(dataset.label(index)) for index in range(len(dataset))]
        return balanced_weights(labels, self.num_classes)

    @classmethod
    def words(cls, value: Tensor, classes: Sequence[str]) -> str:
        number = int(value if value.dim() == 0 else value.argmax())
        return classes[number] if number < len(classes) else f"class {number}"

    @classmethod
    def answer(cls, classes: Sequence[str], outputs: Tensor, label: Tensor | None = None) -> Record:
        values = _numbers(outputs)
        best = max(range(len(values)), key=lambda number: (values[number], -number))
        said = {} if label is None else {"label": classes[int(label)]}
        return {**said, "prediction": classes[best], "probabilities": dict(zip(classes, values, strict=True))}

    @classmethod
    def label_size(cls, num_classes: int) -> int:
        return 1


class MultiLabel(Task):
    """Any number of labels for each image: outputs (N, labels), targets (N, labels) of 0 and 1."""

    name = "multilabel"
    default_loss = "bce"
    metric_names = ("accuracy", "f1", "auc", "average_precision", "confusion")

    def own_loss(self) -> BatchLoss:
        chosen = self.loss or self.default_loss
        binary = {"binary": True} if {"dice", "focal"} & set(chosen.split("+")) else {}
        return build_loss(chosen, **{**binary, **self.loss_options})

    def require(self, outputs: Any, targets: Any) -> None:
        if not isinstance(outputs, Tensor) or outputs.dim() != 2 or outputs.shape != targets.shape:
            _refuse(outputs, targets, self.name, "(batch, labels), as many as targets have")

    def predictions(self, outputs: Any) -> Any:
        return main_output(outputs).sigmoid()

    @classmethod
    def label_counts(cls, dataset: Any) -> list[int] | None:
        labels = [dataset.label(index) for index in range(len(dataset))]
        return [int(sum(each[number] for each in labels)) for number in range(len(dataset.classes))]

    def balanced_weights(self, dataset: Any, comm: Communicator | None) -> Sequence[float] | None:
        """Of each label how many samples have it not, for one that has."""
        table = torch.stack([torch.as_tensor(dataset.label(index)) for index in range(len(dataset))]).double()
        has = (table == 1).sum(0)
        return [float(n) for n in torch.where(has > 0, (table == 0).sum(0) / has.clamp(min=1), 1.0)]

    @classmethod
    def words(cls, value: Tensor, classes: Sequence[str]) -> str:
        there = (value > THRESHOLD).nonzero().flatten()
        return ", ".join(classes[i] if i < len(classes) else f"label {i}" for i in there) or "none"

    @classmethod
    def answer(cls, classes: Sequence[str], outputs: Tensor, label: Tensor | None = None) -> Record:
        named = dict(zip(classes, _numbers(outputs), strict=True))
        said: Record = {}
        if label is not None:
            said["labels"] = {name: int(x) for name, x in zip(classes, _numbers(label), strict=True)}
        said["predictions"] = {name: int(value > THRESHOLD) for name, value in named.items()}
        return {**said, "probabilities": named}


class Regress(Task):
    """Numbers: outputs of the targets' shape, or (N, 1, ...) beside targets (N, ...)."""

    name = "regress"
    default_loss = "mse"
    metric_names = ("mae", "mse", "rmse", "r2")
    monitor = "mae"
    defaults = usual(flip="none")  # numbers may be places or directions

    def require(self, outputs: Any, targets: Any) -> None:
        if not isinstance(outputs, Tensor) or as_targets(outputs, targets).shape != targets.shape:
            _refuse(outputs, targets, self.name, "a number for each target")

    def measured(self, outputs: Any, targets: Any) -> Any:
        return as_targets(main_output(outputs), targets)

    @classmethod
    def described(cls, training: Any, validation: Any) -> str:
        labels = zip(*(training.label(index) for index in range(len(training))), strict=True)
        ranges = [f"{name} ({min(found):g} to {max(found):g})"
                  for name, found in zip(training.classes, labels, strict=True)]  # fmt: skip
        return f"to tell {counted(len(training.classes), 'number')}: {some(ranges)}"

    def names(self, classes: Sequence[str]) -> tuple[str, ...]:
        return ("value",) if not classes and self.num_outputs == 1 else super().names(classes)


LIKENESS = ("psnr", "ssim", "mae")  # how alike two images are
LPIPS = "lpips"  # how unlike they are to a network
SEAMS = ("seams", "seams_tiled", "seams_target", "psnr_tiled")  # beside an image that is made in tiles


class MakeImage(Regress):
    """Images out of images: outputs and targets (N, channels, H, W), values from 0 to 1. Metrics clip no outputs."""

    name = "image"
    default_loss = "l1"
    metric_names = ("psnr", "mae", "mse", "rmse")
    monitor = "psnr"
    defaults = usual(optimizer_options={"weight_decay": 0.0})  # which restoration is trained without
    makes_images = True

    @property
    def usual_metrics(self) -> tuple[str, ...]:
        return ("psnr", "mae")

    def require(self, outputs: Any, targets: Any) -> None:
        if not isinstance(outputs, Tensor) or outputs.dim() < 4:
            wanted = "(batch, channels, height, width), as of `model` unet or smp/Unet"
            _refuse(outputs, targets, self.name, wanted)
        super().require(outputs, targets)

    @classmethod
    def blank(cls, classes: Sequence[str], labelled: bool, apart: bool) -> Record:
        return dict.fromkeys(LIKENESS, 0) if labelled else {"prediction": ""}

    @classmethod
    def described(cls, training: Any, validation: Any) -> str:
        return f"each with a target of {counted(len(training.classes), 'channel')}: {some(training.classes)}"


ALIKE = ("pixel_accuracy", "dice", "iou")  # how alike two masks are


class Segment(Task):
    """A class for each pixel: outputs (N, classes, H, W), masks (N, H, W); or (N, classes, H, W) of 0 and 1, which may
    overlap, for losses of which bce is one, or by their option `binary`. Volumes and lines are alike.
    """

    name = "segment"
    default_loss = "cross_entropy"
    metric_names = (*ALIKE, "confusion")
    monitor = "dice"
    defaults = usual(optimizer_options={"weight_decay": 0.01})  # as SegFormer: Xie et al. 2021
    dense = True

    @property
    def binary(self) -> bool:
        by_name = self.loss is None or isinstance(self.loss, str)
        names = (self.loss or self.default_loss).split("+") if by_name else []
        return bool(self.loss_options.get("binary", "bce" in names))

    @property
    def counted_as(self) -> str:
        return "multilabel" if self.binary else self.name

    def own_loss(self) -> BatchLoss:
        chosen = self.loss or self.default_loss
        binary = {"binary": self.binary} if {"dice", "focal"} & set(chosen.split("+")) else {}
        rest = {key: value for key, value in self.loss_options.items() if key != "binary"}
        return build_loss(chosen, **rest, **binary)

    def require(self, outputs: Any, targets: Any) -> None:
        if not isinstance(outputs, Tensor) or outputs.dim() < 3:
            _refuse(outputs, targets, self.name, f"{DENSE}, as of `model` unet, fcn_resnet50 or smp/Unet")
        wanted = outputs.shape if self.binary else (outputs.shape[0], *outputs.shape[2:])
        if targets.shape != wanted:
            _refuse(outputs, targets, self.name, DENSE + (" (batch, classes, height, width)" if self.binary else ""))

    def predictions(self, outputs: Any) -> Any:
        found = main_output(outputs)
        return found.sigmoid() if self.binary else found.softmax(1)

    def measured(self, outputs: Any, targets: Any) -> Any:
        """The mask, which takes less memory than probabilities: NO_CLASS, or NaN, where outputs are not numbers."""
        found = main_output(outputs)
        if self.binary:
            return (found > 0).to(found.dtype).masked_fill(found.isnan(), nan)
        return found.argmax(1).masked_fill(found.isnan().any(1), NO_CLASS)

    @classmethod
    def blank(cls, classes: Sequence[str], labelled: bool, apart: bool) -> Record:
        named = dict.fromkeys(classes, 0)
        masks: Record = {"masks": named} if apart else {"mask": ""}
        return dict.fromkeys(ALIKE, 0) if labelled else {**masks, "pixels": named}

    @classmethod
    def described(cls, training: Any, validation: Any) -> str:
        return f"each with a mask of {counted(len(training.classes), 'class', 'classes')}: {some(training.classes)}"

    def balanced_weights(self, dataset: Any, comm: Communicator | None) -> Sequence[float] | None:
        """Of pixels, each of one class; a mask that cannot be read counts for nothing here."""
        if self.binary:
            return None
        counts = torch.zeros(self.num_classes, dtype=torch.int64)
        rank, size = (0, 1) if comm is None else (comm.rank, comm.size)
        for index in range(rank, len(dataset), size):
            with suppress(BadImage):
                for values in pixels_of(dataset.label(index)):
                    found = torch.as_tensor(values).flatten().long()
                    found = found[(found >= 0) & (found < self.num_classes)]
                    counts += torch.bincount(found, minlength=self.num_classes)
        return weights_of_counts(counts if comm is None else comm.all_reduce(counts))


class Survive(Task):
    """How long until an event: outputs (N,) or (N, 1), the risk; targets (time, event), (N,) each, or (N, 2)."""

    name = "survival"
    default_loss = "cox"
    metric_names = ("concordance",)
    monitor = "concordance"
    defaults = usual(lr=2e-4, optimizer_options={"weight_decay": 0.01}, flip="none")  # as MCAT: Chen et al. 2021

    @property
    def num_outputs(self) -> int:
        return 1

    def require(self, outputs: Any, targets: Any) -> None:
        time, _ = times_and_events(targets)
        if not isinstance(outputs, Tensor) or outputs.shape not in ((len(time),), (len(time), 1)):
            _refuse(outputs, targets, self.name, "one risk for each sample, (batch, 1)")

    @classmethod
    def described(cls, training: Any, validation: Any) -> str:
        events = sum(int(training.label(index)[1]) for index in range(len(training)))
        return f"to tell survival; {counted(events, 'event')} among those to train on"

    def names(self, classes: Sequence[str]) -> tuple[str, ...]:
        return ("risk",)

    @classmethod
    def answer(cls, classes: Sequence[str], outputs: Tensor, label: Tensor | None = None) -> Record:
        true = _numbers(label)
        said = {} if true is None else {"time": true[0], "event": int(true[1])}
        return {**said, "risk": _numbers(outputs)[0]}

    @classmethod
    def label_size(cls, num_classes: int) -> int:
        return 2


class Language(Task):
    """The next token of text: outputs (N, T, vocabulary), targets (N, T), -100 where nothing is asked for."""

    name = "language"
    default_loss = "cross_entropy"
    of_text = True
    # As GPT-3 with 125 million parameters: Brown et al. 2020.
    defaults = usual(lr=6e-4, optimizer_options={"weight_decay": 0.1, "betas": [0.9, 0.95]}, epochs=1, flip="none")

    def own_loss(self) -> BatchLoss:
        if self.loss not in (None, "cross_entropy"):
            raise ValueError(f"`loss` {self.loss!r} is not for `task` {self.name}: its loss is cross_entropy")
        smoothing = float(self.loss_options.get("label_smoothing", 0.0))
        return TokenCrossEntropy(ignore_index=self.ignore_index, label_smoothing=smoothing)


class Masked(Language):
    """Tokens of text that were hidden."""

    name = "masked"


TASKS: Mapping[str, type[Task]] = {
    task.name: task for task in (Classify, MultiLabel, Regress, MakeImage, Segment, Survive, Language, Masked)
}
