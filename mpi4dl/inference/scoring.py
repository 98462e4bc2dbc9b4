"""How well a model does on images with labels: metrics with intervals by the bootstrap, and a record of each image."""

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpi4dl._files import write_durably
from mpi4dl._progress import ProgressOfImages
from mpi4dl._wording import aligned, counted
from mpi4dl.comm import Refusal
from mpi4dl.datasets.base import printable
from mpi4dl.datasets.listed import ListedFiles
from mpi4dl.datasets.split import Named, Subset
from mpi4dl.inference.images import Coverage, seen_of
from mpi4dl.inference.model import Prediction, Predictor
from mpi4dl.inference.records import ALIKE, NOT_NUMBERS, Record, columns_of, is_undefined, table_row
from mpi4dl.runs.folder import finite
from mpi4dl.tasks.formulas import as_targets
from mpi4dl.tasks.measuring import measured_here
from mpi4dl.tasks.metrics import MEASURES, WHY_NONE, bootstrap
from mpi4dl.tasks.task import TASKS, Regress, Task

COUNTED = ("accuracy", "balanced_accuracy", "f1")  # metrics of classes that follow from the confusion matrix
CONFUSION = "confusion"


@dataclass(frozen=True)
class Measured:
    """A metric over all images, and the ends of its interval; NaN where it, or they, are not defined."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Scores:
    """The result of an evaluation: the same on all ranks, but for the `records`, one of each image, which rank 0 has.

    `confusion[i][j]` counts what is class i and was taken for class j, pixels of masks; of labels that may occur
    together it has such a matrix for each. `bad` says which images could not be read. With `crops` records say which
    share of an image was `seen`. `root` is the folder that names of images begin in.
    """

    task: str
    classes: tuple[str, ...]
    count: int
    metrics: Mapping[str, Measured]
    confusion: list[Any] | None
    records: Sequence[Record]
    bad: Mapping[str, str]
    crops: bool = False
    remarks: tuple[str, ...] = ()
    root: str | None = None

    def table(self, level: float, intervals: bool = True) -> Iterator[str]:
        """The metrics, with their intervals if there are any, and the confusion matrix, in lines."""
        head = ("metric", "value", *((f"{100 * level:g} % from", "to") if intervals else ()))
        known = {name for name, m in self.metrics.items() if not math.isnan(m.low)}
        ends = {name: (f"{m.low:.4f}", f"{m.high:.4f}") if name in known else ("-", "-")
                for name, m in self.metrics.items()}  # fmt: skip
        rows = [(name, f"{m.value:.4f}", *(ends[name] if intervals else ())) for name, m in self.metrics.items()]
        yield from aligned([head, *rows], {"metric"})
        if intervals and len(known) < len(rows):
            yield f"-: {WHY_NONE}; {counted(self.count, 'image')} evaluated"
        if self.confusion is not None and _is_square(self.confusion):
            yield ""
            yield "rows: what it is; columns: what it was taken for"
            names = [printable(name) for name in self.classes]
            cells = [(name, *map(str, row)) for name, row in zip(names, self.confusion, strict=True)]
            yield from aligned([("", *names), *cells], {""})
        yield from self.remarks

    def write(self, json_path: Path, csv_path: Path, told: Mapping[str, Any], level: float) -> None:
        """Both files, each at once. Raises OSError."""
        measured = {
            name: {"value": m.value, "low": m.low, "high": m.high, "level": level} for name, m in self.metrics.items()
        }
        found = {**told, "task": self.task, "classes": self.classes, "count": self.count, "metrics": measured}
        found |= {"confusion": self.confusion, "bad": self.bad, "records": csv_path.name, "root": self.root}
        columns = columns_of(TASKS[self.task], self.classes, True, crops=self.crops)
        lines = [table_row(columns, None), *(table_row(columns, record) for record in self.records)]
        json_path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(csv_path, b"".join(lines))
        write_durably(json_path, (json.dumps(finite(found), indent=1, allow_nan=False) + "\n").encode())


def _is_square(confusion: list[Any]) -> bool:
    return not isinstance(confusion[0][0], list)


def file_names(folder: Path, out: Path | None, now: datetime) -> tuple[Path, Path]:
    """The files of an evaluation: in the folder that was asked for, or new ones, with the date, in that of the run."""
    if out is not None:
        return out / "evaluation.json", out / "evaluation.csv"
    dated = f"evaluation-{now:%Y%m%d-%H%M%S}"
    for stem in itertools.chain([dated], (f"{dated}-{number}" for number in itertools.count(2))):
        names = folder / f"{stem}.json", folder / f"{stem}.csv"
        if not any(name.exists() for name in names):
            break
    return names


def score(model: Predictor, images: Named, *, resamples: int, level: float, speaks: bool = False) -> Scores:
    """Evaluate a model on images with labels. Collective; raises Refusal on all ranks if none can be read."""
    found = _Collected(model, images)
    of = (lambda outputs: model.task.measured(outputs, None)) if found.dense else model.task.predictions
    with closing(ProgressOfImages(len(images), speaks and model.comm.rank == 0)) as progress:
        for seen in model.predictions(images, of):
            with model.comm.together():
                found.add(seen)
            progress.advance(len(seen.indices) + len(seen.errors), len(seen.errors))
    if not found.count:
        raise Refusal(f"none of {len(images)} images can be read: {next(iter(found.bad.values()), 'there are none')}")
    told = None
    with model.comm.together((ValueError, TypeError, RuntimeError)):
        if model.comm.rank == 0:
            told = found.metrics(resamples, level)
    metrics, confusion = model.comm.broadcast_object(told)
    records = [found.records[index] for index in sorted(found.records)]
    remarks = found.coverage.summary()
    if found.undefined:
        what = counted(found.undefined, "image")
        remarks.append(f"the model's outputs of {what} are not numbers (NaN), and so no metric is one")
    remarks = model.comm.broadcast_object(remarks)
    return Scores(
        model.about.task,
        model.classes,
        found.count,
        metrics,
        confusion,
        records,
        found.bad,
        found.coverage.crops,
        tuple(remarks),
        _root_of(images),
    )


def _root_of(images: Any) -> str | None:
    """The folder that names of images begin in, if they are files."""
    whole = images.whole if isinstance(images, Subset) else images
    return str(whole.root.absolute()) if isinstance(whole, ListedFiles) else None


def _undefined(predicted: Tensor) -> bool:
    """Whether a part of a mask is of outputs that are not numbers."""
    if not predicted.numel():
        return False
    return bool(predicted.isnan().any()) if predicted.is_floating_point() else int(predicted.min()) < 0


class _Collected:
    """The results so far: on rank 0 records, predictions and targets, or counts of pixels for each image."""

    def __init__(self, model: Predictor, images: Named) -> None:
        self.model, self.images = model, images
        self.task: Task = model.task
        self.dense, self.binary = self.task.dense, self.task.binary
        self.records: dict[int, Record] = {}
        self.bad: dict[str, str] = {}
        self.count = 0
        self.seen: list[tuple[Tensor, Tensor]] = []
        self.counts: list[Tensor] = []
        self.undefined = 0  # images of which some output is not a number
        self.coverage = Coverage(model.comm, model, images)

    def _with_share(self, index: int, said: Record) -> Record:
        """A record, with the share of the image that the model saw if that may be a part."""
        record = {"image": self.images.name(index), **said}
        if self.coverage.crops:
            share = seen_of(self.images.image(index).size, self.model.config.data.image_size)
            if share < 1 and not self.model.may_crop:
                raise Refusal(self.coverage.refusal(self.images.name(index), share))
            self.coverage.add(share)
            record["seen"] = share
        return record

    def add(self, seen: Prediction) -> None:
        for index, error in seen.errors.items():
            self.bad[self.images.name(index)] = printable(error)
            self.records[index] = {"image": self.images.name(index), "error": printable(error)}
        if seen.outputs is None:
            return
        self.count += len(seen.indices)
        if self.dense:
            self._add_counts(seen)
        elif seen.outputs.dense:
            raise Refusal(f"the model's outputs are dense, but it is evaluated to {self.model.about.task}: predict")
        elif seen.outputs.whole is not None:
            outputs, targets = seen.outputs.whole.double(), seen.labels
            targets = targets.double() if targets.is_floating_point() else targets
            if isinstance(self.task, Regress):
                outputs = as_targets(outputs, targets)
            self.seen.append((outputs, targets))
            for index, values, label in zip(seen.indices, outputs, targets, strict=True):
                if is_undefined(values):
                    self.undefined += 1
                    self.records[index] = {"image": self.images.name(index), "error": NOT_NUMBERS}
                    continue
                said = self.task.answer(self.model.classes, values, label)
                self.records[index] = self._with_share(index, said)

    def _add_counts(self, seen: Prediction) -> None:
        """Of each image, how many pixels of each class were taken for which one: each rank counts its own."""
        assert seen.outputs is not None
        size = 2 if self.binary else self.task.num_outputs
        layers = self.task.num_outputs if self.binary else 1
        found = torch.zeros((len(seen.indices), layers, size * size), dtype=torch.int64)
        undefined = torch.zeros(len(seen.indices), dtype=torch.int64)
        for where, values in seen.outputs.pieces:
            for place, number in enumerate(range(where[0].start, where[0].stop)):
                for layer in range(layers):
                    predicted = values[place, layer] if self.binary else values[place]
                    if _undefined(predicted):
                        undefined[number] += 1
                        continue
                    predicted = predicted.long()
                    true = seen.labels[number, layer] if self.binary else seen.labels[number]
                    true = true[where[2:] if self.binary else where[1:]].long()
                    known = (true >= 0) & (true < size)
                    pairs = true[known] * size + predicted[known]
                    found[number, layer] += torch.bincount(pairs, minlength=size * size)
        self.model.comm.all_reduce(found)
        self.model.comm.all_reduce(undefined)
        counts = found.view(len(seen.indices), *((layers,) if self.binary else ()), size, size)
        self.counts.append(counts)
        for number, (index, each) in enumerate(zip(seen.indices, counts, strict=True)):
            if undefined[number]:
                self.undefined += 1
                self.records[index] = {"image": self.images.name(index), "error": NOT_NUMBERS}
                continue
            alike = {name: float(MEASURES[name](each.double())) for name in ALIKE}
            self.records[index] = self._with_share(index, alike)

    def metrics(self, resamples: int, level: float) -> tuple[dict[str, Measured], list[Any] | None]:
        """The metrics of the task with intervals, and how classes were confused."""
        functions, confusion = self._of_pixels() if self.dense else self._of_images()
        everyone = torch.arange(self.count)
        found: dict[str, Measured] = {}
        for name, function in functions.items():
            if self.undefined:
                found[name] = Measured(math.nan, math.nan, math.nan)
                continue
            low, high = math.nan, math.nan
            if resamples and self.count > 1:
                low, high, _ = bootstrap(function, self.count, num_resamples=resamples, level=level)
            found[name] = Measured(function(everyone), low, high)
        return found, None if self.undefined else confusion

    def _of_pixels(self) -> tuple[dict[str, Callable[[Tensor], float]], list[Any]]:
        counts = torch.cat(self.counts).double()

        def function(of: Any) -> Callable[[Tensor], float]:
            return lambda drawn: float(of(counts[drawn].sum(0)))

        return {name: function(MEASURES[name]) for name in ALIKE}, counts.sum(0).long().tolist()

    def _of_images(self) -> tuple[dict[str, Callable[[Tensor], float]], list[Any] | None]:
        outputs, targets = (torch.cat(parts) for parts in zip(*self.seen, strict=True))
        task = self.task

        def plain(name: str) -> Callable[[Tensor], float]:
            makers = task.metrics([name])

            def value(drawn: Tensor) -> float:
                found = measured_here(makers, outputs[drawn], targets[drawn])[name]
                return float(found) if isinstance(found, float) else math.nan

            return value

        functions = {name: plain(name) for name in task.metric_names if name != CONFUSION}
        if CONFUSION not in task.metric_names:
            return functions, None
        if not task.accuracy:
            return functions, measured_here(task.metrics([CONFUSION]), outputs, targets)[CONFUSION]  # type: ignore
        size = task.num_outputs
        pairs = targets * size + outputs.argmax(1)

        def of_counts(of: Any) -> Callable[[Tensor], float]:
            def value(drawn: Tensor) -> float:
                return float(of(torch.bincount(pairs[drawn], minlength=size * size).view(size, size).double()))

            return value

        functions |= {name: of_counts(MEASURES[name]) for name in COUNTED}
        confusion = torch.bincount(pairs, minlength=size * size).view(size, size)
        return functions, confusion.tolist()
