"""How well a model does on images with labels: metrics with intervals by the bootstrap, and a record of each image."""

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mpi4dl._progress import ProgressLine, ProgressOfImages
from mpi4dl._wording import aligned, counted, quietly
from mpi4dl.comm import Communicator, Refusal
from mpi4dl.datasets.base import IGNORED, BadImage, DatasetError, Image, Pixels, printable
from mpi4dl.datasets.files import planes_of
from mpi4dl.datasets.split import Named, Subset, in_whole
from mpi4dl.engine import BatchOutputs
from mpi4dl.geometry import Interval
from mpi4dl.inference.images import Coverage, open_files_of_run, open_labelled
from mpi4dl.inference.masks import Target, WindowInterval, Windows, targets_of
from mpi4dl.inference.model import Prediction, Predictor
from mpi4dl.inference.options import Evaluating, Inference
from mpi4dl.inference.pictures import Example, jpeg_of, scale_of
from mpi4dl.inference.records import NOT_NUMBERS, columns_of
from mpi4dl.inference.samples import (
    CONFUSION,
    WHY_NONE,
    WITHOUT_PICTURE,
    Judging,
    Measure,
    Measured,
    Problem,
    Samples,
    draw_curves,
    measured_by,
    members_of,
    shown,
    tables,
)
from mpi4dl.inference.tiled import Joined, TilesAlone
from mpi4dl.results.evaluations import write_evaluation
from mpi4dl.results.formats import Record, table
from mpi4dl.results.names import EXAMPLES
from mpi4dl.results.slides import places_of
from mpi4dl.tasks.curves import CallCounts, is_rule
from mpi4dl.tasks.formulas import as_targets
from mpi4dl.tasks.likeness import Likeness
from mpi4dl.tasks.measuring import is_undefined
from mpi4dl.tasks.metrics import MEASURES, overlaps
from mpi4dl.tasks.seams import Seams
from mpi4dl.tasks.task import ALIKE, LIKENESS, LPIPS, SEAMS, TASKS, Regress

MOST_EXAMPLES = 4  # of images that a model makes, in a picture
OVERLAPS = ("dice", "iou")  # also of each class
BAND_ROWS = 256  # of images that are compared at a time

if TYPE_CHECKING:
    from mpi4dl.inference.perceptual_distance import PerceptualDistance


@dataclass(frozen=True)
class LevelScores:
    """The metrics of slides, patients or images, their confusion matrix, and how they were called at thresholds.

    `calls` has for each class the threshold, and how many samples were called what; `records` are those of patients.
    """

    what: str
    count: int
    metrics: Mapping[str, Measured]
    confusion: list[Any] | None = None
    calls: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    records: Sequence[Record] = field(default=(), repr=False)


@dataclass(frozen=True, kw_only=True)
class Scores(LevelScores):
    """The result of an evaluation: the same on all ranks, but for `records` and `levels`, which rank 0 has.

    `confusion[i][j]` counts what is class i and was taken for class j, pixels of masks; of labels that may occur
    together it has such a matrix for each. `bad` says which images could not be read. With `crops` records say which
    share of an image was `seen`. `root` is the folder that names of images begin in. `patients` are there for slides.
    `levels` are the predictions of images, or of slides and of patients. `pictures` are files of examples by name.
    """

    task: str
    classes: tuple[str, ...]
    bad: Mapping[str, str]
    crops: bool = False
    remarks: tuple[str, ...] = ()
    root: str | None = None
    patients: LevelScores | None = None
    thresholds: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    levels: Sequence[Samples] = field(default=(), repr=False)
    pictures: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    judging: Judging = field(default_factory=Judging)

    def table(self) -> Iterator[str]:
        """The metrics, with their intervals if there are any, and the confusion matrix, in lines."""
        if self.patients is None:
            yield from self._level(self)
        else:
            yield f"by {self.what}, {self.count} of {counted(self.patients.count, 'patient')}:"
            yield from self._level(self)
            if self.patients.count < self.count:
                yield ""
                yield f"by patient, {self.patients.count}:"
                yield from self._level(self.patients)
            else:
                yield f"each patient has one {self.what}: by patient it is the same"
        yield from self.remarks

    def _level(self, of: LevelScores) -> Iterator[str]:
        intervals = self.judging.resamples > 0
        head = ("metric", "value", *((f"{100 * self.judging.level:g} % from", "to") if intervals else ()))
        known = {name for name, m in of.metrics.items() if not math.isnan(m.low)}
        ends = {name: (f"{m.low:.4f}", f"{m.high:.4f}") if name in known else ("-", "-")
                for name, m in of.metrics.items()}  # fmt: skip
        rows = [(name, shown(m.value), *(ends[name] if intervals else ())) for name, m in of.metrics.items()]
        yield from aligned([head, *rows], {"metric"})
        if intervals and len(known) < len(rows):
            drawn: LevelScores = self.patients or self
            kinds = f"{drawn.what}s"
            yield f"-: {WHY_NONE.replace('images', kinds)}; {counted(drawn.count, drawn.what)} evaluated"
        if of.confusion is not None and not isinstance(of.confusion[0][0], list):
            yield ""
            yield "rows: labels; columns: predictions"
            names = [printable(name) for name in self.classes]
            cells = [(name, *map(str, row)) for name, row in zip(names, of.confusion, strict=True)]
            yield from aligned([("", *names), *cells], {""})

    def files(self) -> tuple[dict[str, bytes], tuple[str, ...]]:
        """More files by their names, such as curves.csv, and what is to be said of them."""
        if not self.levels or not self.levels[0].problems(self.judging):
            return {**self.pictures}, ()
        found = tables(self.levels, self.judging)
        try:
            return {**found, "curves.png": draw_curves(self.levels, self.judging)}, ()
        except ImportError:
            return found, (WITHOUT_PICTURE,)

    def write(self, path: Path, told: Mapping[str, Any], more: Mapping[str, bytes] | None = None) -> tuple[str, ...]:
        """All files, and `more` by their names, in place of an evaluation that was there before.

        Returns what is to be said of them. Raises OSError.
        """
        found = {**told, "task": self.task, "classes": self.classes, "what": self.what, **self._as_json(self)}
        if self.patients is not None:
            found["patients"] = self._as_json(self.patients)
        found |= {"bad": self.bad, "root": self.root, "remarks": self.remarks}
        known = any("patient" in record for record in self.records)
        columns = columns_of(TASKS[self.task], self.classes, True, crops=self.crops, patients=known)
        columns[-1:-1] = [name for name in (LPIPS, *SEAMS) if any(name in record for record in self.records)]
        if any("fold" in record for record in self.records):
            columns.insert(columns.index("patient") + 1, "fold")
        files, remarks = self.files()
        files |= {"evaluation.csv": table(columns, self.records), **(more or {})}
        if self.patients is not None:
            columns = columns_of(TASKS[self.task], self.classes, True)
            columns = ["patient", "slides", *(name for name in columns if name not in ("image", "error"))]
            if TASKS[self.task].dense or TASKS[self.task].makes_images:  # whose patients have metrics of their own
                columns = [*self.patients.records[0]]
            files["patients.csv"] = table(columns, self.patients.records)
        write_evaluation(path, found, files)
        return remarks

    def _as_json(self, of: LevelScores) -> dict[str, Any]:
        metrics = {name: {**asdict(found), "level": self.judging.level} for name, found in of.metrics.items()}
        return {"count": of.count, "metrics": metrics, "confusion": of.confusion, "calls": of.calls}


def score(
    model: Predictor,
    images: Named,
    judging: Judging,
    *,
    speaks: bool = False,
    seams: tuple[int, ...] | None = None,
    lpips: str | None = None,
) -> Scores:
    """Evaluate a model on images with labels; of one that makes images, also the seams of tiles: see `TilesAlone`; and
    by a file of weights their `PerceptualDistance`.

    Collective; raises Refusal on all ranks if no image can be read.
    """
    found: _Collected
    if seams is not None or lpips is not None or model.task.makes_images:
        found = _Pictures(model, images, seams, lpips)
    else:
        found = (_Masks if model.task.dense else _Answers)(model, images)
    images = found.images
    noun = model.assembly.source.noun
    with closing(ProgressOfImages(len(images), speaks and model.comm.rank == 0, noun)) as progress:
        for seen in model.predictions(found.looked_at, found.wanted):
            with model.comm.together():
                found.add(seen)
            ended = [*map(found.ended, (*seen.indices, *seen.errors))]
            progress.advance(sum(ended), sum(ended[len(seen.indices) :]))
    if not found.count:
        raise Refusal(f"none of {len(images)} {noun}s can be read: {next(iter(found.bad.values()), 'there are none')}")
    found.look_again(speaks)
    remarks = found.coverage.summary()
    if found.undefined:
        what = counted(found.undefined, noun)
        remarks.append(f"the model's outputs of {what} are not numbers (NaN), and so no metric is one")
    kept: dict[str, Any] = {"records": [found.records[index] for index in sorted(found.records)], "bad": found.bad}
    root = in_whole(images)[0].root
    kept["pictures"] = found.pictures()
    kept |= {"crops": found.coverage.crops, "count": found.count, "remarks": tuple(remarks), "judging": judging}
    kept["root"] = None if root is None else str(root.absolute())
    scores = None
    with model.comm.together((ValueError, TypeError, RuntimeError)):
        if model.comm.rank == 0:
            scores = found.scores(speaks, kept)
    shared = model.comm.broadcast_object(scores and replace(scores, records=(), levels=(), pictures={}))
    return shared if scores is None else scores


def scores_of(samples: Samples, judging: Judging, speaks: bool = False, **kept: Any) -> Scores:
    """The scores of samples and, of slides, of their patients. Raises Refusal for a threshold that cannot be."""
    levels, remarks = [samples], tuple(kept.pop("remarks"))
    if samples.of_patients:
        patients, more = samples.by_patient(judging)
        levels, remarks = [samples, patients], remarks + more
        remarks += (
            f"a patient's prediction is the {judging.patients} over its {samples.level}s; intervals draw patients",
        )
    thresholds = {each.level: each.thresholds(judging) for each in levels}
    with ProgressLine() if speaks and judging.resamples else nullcontext(quietly) as progress:
        found = []
        for each in levels:
            progress(f"computing metrics and intervals by {each.level}")
            calls = {
                each.named(problem, judging): _calls(problem, thresholds[each.level].get(problem.name))
                for problem in each.problems(judging)
            }
            metrics = measured_by(each.measure(judging), each.members(), len(each.of), judging)
            found.append(LevelScores(each.level, len(each.names), metrics, each.confusion(), calls))
    of_patients = None
    if len(found) > 1:
        of_patients = replace(found[1], records=levels[1].records(Counter(samples.of)))
    if samples.problems(judging):
        remarks += tuple(_about_thresholds(found, judging))
    return Scores(
        task=samples.task.name, classes=samples.classes, metrics=found[0].metrics, confusion=found[0].confusion,
        what=samples.level, calls=found[0].calls, patients=of_patients, thresholds=thresholds, levels=levels,
        judging=judging, remarks=remarks, **kept,
    )  # fmt: skip


def judging_by(
    comm: Communicator,
    source: str,
    chosen: Inference,
    asked: Evaluating,
    images: Any,
    speaks: bool = True,
) -> Judging:
    """How predictions are judged; a rule for a threshold chooses it on the validation images of the run.

    Where these are what is evaluated, as no `images` and no slides are given, the rule has no thresholds yet.
    Collective; raises Refusal on all ranks if the validation images cannot be read.
    """
    judging, threshold = Judging(**vars(asked)), asked.threshold
    on_others = asked.slides or asked.features or images is not None or asked.part not in (None, "val")
    if not is_rule(threshold) or not on_others:
        return judging
    model = Predictor(source, chosen, comm)
    own = f"the validation {model.assembly.source.noun}s of the run"
    try:
        if model.trained.source.of_slides:
            validation, which = open_files_of_run(comm, model.trained, model.folder, "val")
        else:
            validation, which = open_labelled(comm, model.trained, None)
        if comm.rank == 0 and speaks:
            print(f"the threshold is chosen on {which}", flush=True)
        found = score(model, validation, replace(judging, resamples=0), speaks=speaks).thresholds
    except Refusal as problem:
        raise Refusal(
            f"`threshold` {threshold} is chosen on {own}, never on others, and that failed: {problem}; give a number"
        ) from problem
    undefined = [level for level, values in found.items() if any(map(math.isnan, values.values()))]
    if undefined or not any(found.values()):
        why = "have not both, with and without the class" if undefined else "have no probabilities of classes"
        raise Refusal(f"`threshold` {threshold} is chosen on {own}, which {why}: give a number")
    return replace(judging, chosen=found, chosen_on=which)


def _calls(problem: Problem, threshold: float | None) -> dict[str, float]:
    found = problem.calls(0.0 if threshold is None else threshold)._asdict()
    return found if threshold is None else {"threshold": threshold, **found}


def _about_thresholds(levels: Sequence[LevelScores], judging: Judging) -> Iterator[str]:
    """What sensitivity, specificity, ppv and npv are of."""
    if not any("threshold" in calls for level in levels for calls in level.calls.values()):
        yield "sensitivity, specificity, ppv and npv of a class are by the most probable class"
        return
    for level in levels:
        for name, calls in level.calls.items():
            at = calls["threshold"]
            if math.isnan(at):
                yield f"no threshold for {name} by {level.what}: {judging.threshold} needs samples with and without it"
                continue
            tp, fp, fn, tn = (calls[key] for key in CallCounts._fields)
            yield (
                f"sensitivity, specificity, ppv and npv by {level.what} are for {printable(name)}, from a probability "
                f"of {at:.4g} on: true positives {tp}, false positives {fp}, false negatives {fn}, true negatives {tn}"
            )
    if is_rule(judging.threshold):
        yield (
            f"the threshold is that of {judging.threshold} on {judging.chosen_on}"
            if judging.chosen
            else f"warning: {judging.threshold} chose the threshold on the same samples: its rates are optimistic"
        )


def mean_of(values: Sequence[Mapping[str, float]], where_defined: Collection[str]) -> Measure:
    """The mean of each metric over images, or patients; of these metrics over those of which they are defined."""
    columns = {name: torch.tensor([each[name] for each in values], dtype=torch.float64) for name in values[0]}
    kinds = {name: torch.nanmean if name in where_defined else torch.mean for name in columns}
    return lambda drawn: {name: float(kinds[name](column[drawn])) for name, column in columns.items()}


def about_evaluation(model: Predictor, evaluated: Named, **asked: Any) -> Record:
    """What the file of an evaluation says besides the scores: the model, where slides are, and what was asked for."""
    found = {"source": str(model.source), "weights": str(model.weights), "plan": str(model.plan)}
    return {**found, "precision": model.precision, **asked, **places_of(evaluated)}


def patients_of(images: Any) -> list[str] | None:
    """The patient of each image, if they are known."""
    whole, indices = in_whole(images)
    return [whole.patients[index] for index in indices] if getattr(whole, "tells_patients", False) else None


class _LabelledWindows(Windows):
    """Windows of slides with their masks, of which each pixel of a slide counts in one."""

    def label(self, index: int) -> Any:
        position, intervals, _ = self.place(index)
        target, mask = self.targets[position], self.images.label(self.indices[position])
        return mask if target.num_in_all == 1 else _core_of(mask, target, intervals)

    def classes_not_seen(self, position: int, part: slice, num_classes: int) -> Tensor:
        """How many pixels of each class are in a part of the windows that are not looked at. Raises BadImage."""
        target, found = self.targets[position], torch.zeros(num_classes, dtype=torch.int64)
        others = [*target.not_chosen()][part]
        if others:
            mask = self.images.label(self.indices[position])
            for intervals in others:
                true = _core_of(mask, target, intervals).read(*(Interval(0, side) for side in target.frame))
                known = torch.from_numpy(true[(true >= 0) & (true < num_classes)])
                found += torch.bincount(known, minlength=num_classes)
        return found


def _core_of(mask: Any, target: Target, intervals: Sequence[WindowInterval]) -> Image:
    """The part of a mask that a window decides."""
    from mpi4dl.datasets.slides.slide import window

    (row, col), (down, across) = target.corner(intervals), (cut.core.shift(-cut.start) for cut in intervals)
    core = window(mask, (row + down.start, col + across.start), (down.length, across.length), IGNORED)
    return window(core, (-down.start, -across.start), target.frame, IGNORED)


class _Collected(ABC):
    """The results so far: records on all ranks, of images that can be read and of others. Subclasses measure them."""

    def __init__(self, model: Predictor, images: Named, whole: bool = False) -> None:
        self.model, self.images, self.task = model, images, model.task
        self.looked_at = images
        self.records: dict[int, Record] = {}
        self.bad: dict[str, str] = {}
        self.count = 0
        self.undefined = 0  # images of which some output is not a number
        self.indices: list[int] = []
        self.metric_names: Sequence[str] = model.task.metric_names
        self.patients = patients_of(images)
        self.coverage = Coverage(model.comm, model, images, whole=whole)

    @abstractmethod
    def wanted(self, outputs: Any) -> Tensor:
        """What is compared with labels, of the outputs of the model."""

    @abstractmethod
    def _take(self, seen: Prediction, outputs: BatchOutputs) -> None:
        """Add the outputs of a batch. Collective."""

    @abstractmethod
    def _measured(self, speaks: bool, kept: dict[str, Any]) -> Scores:
        """The scores, all outputs being numbers, on rank 0."""

    def scores(self, speaks: bool, kept: dict[str, Any]) -> Scores:
        """How well the model does, on rank 0, with what is `kept` of all images; of outputs that are no numbers NaN."""
        if not self.undefined:
            return self._measured(speaks, kept)
        nothing = Measured(math.nan, math.nan, math.nan)
        return self._scores({name: nothing for name in self.metric_names if name != CONFUSION}, None, kept)

    def _scores(self, metrics: Mapping[str, Measured], confusion: list[Any] | None, kept: dict[str, Any]) -> Scores:
        task, noun = self.model.about.task, self.model.assembly.source.noun
        return Scores(task=task, classes=self.model.classes, metrics=metrics, confusion=confusion, what=noun, **kept)

    def _scores_by(self, measure: Measure, confusion: list[Any] | None, kept: dict[str, Any]) -> Scores:
        """The scores by a measure of images; with patients also the means of what it is of each patient."""
        if self.patients is None:
            metrics = measured_by(measure, members_of(range(self.count)), self.count, kept["judging"])
            return self._scores(metrics, confusion, kept)
        members = members_of(self.patients[index] for index in self.indices)
        metrics, count = measured_by(measure, members, self.count, kept["judging"]), len(members)
        of_each = [measure(own) for own in members.values()]
        means = measured_by(mean_of(of_each, of_each[0]), members_of(range(count)), count, kept["judging"])
        records = [
            {"patient": patient, "slides": len(own), **found}
            for (patient, own), found in zip(members.items(), of_each, strict=True)
        ]
        patients = LevelScores("patient", count, means, records=records)
        return self._scores(metrics, confusion, {**kept, "patients": patients})

    def _place(self, index: int) -> tuple[int, bool]:
        """The image of a sample that the model sees, and whether it is the last one of that."""
        return index, True

    def ended(self, index: int) -> bool:
        """Whether all of an image was looked at, with this sample."""
        return self._place(index)[1]

    def pictures(self) -> dict[str, bytes]:
        """Pictures of examples, files by their names, on rank 0."""
        return {}

    def look_again(self, speaks: bool) -> None:  # noqa: B027
        """Look at images a second time, in another way, if that was asked for. Collective."""

    def add(self, seen: Prediction) -> None:
        for index, error in seen.errors.items():
            self._fail(self._place(index)[0], printable(error))
        if seen.outputs is not None:
            self._take(seen, seen.outputs)

    def _fail(self, index: int, error: str) -> None:
        if index not in self.records:
            self.bad[self.images.name(index)] = error
            self.records[index] = {**self._named(index), "error": error}

    def _record(self, index: int, said: Record | None) -> None:
        """Add the record of an image, with the share that the model saw if that may be a part; None: no numbers."""
        self.indices.append(index)
        self.count += 1
        if said is None:
            self.undefined += 1
            said = {"error": NOT_NUMBERS}
        elif self.coverage.crops:
            said = {**said, "seen": self.coverage.add(self.images, index)}
        self.records[index] = {**self._named(index), **said}

    def _named(self, index: int) -> Record:
        named = {"image": self.images.name(index)}
        return named if self.patients is None else {**named, "patient": self.patients[index]}


class _Answers(_Collected):
    """Answers of whole images or slides: their predictions and targets."""

    def __init__(self, model: Predictor, images: Named) -> None:
        super().__init__(model, images)
        self.seen: list[tuple[Tensor, Tensor]] = []

    def wanted(self, outputs: Any) -> Tensor:
        return self.task.predictions(outputs)

    def _take(self, seen: Prediction, outputs: BatchOutputs) -> None:
        if outputs.dense:
            raise Refusal(f"the model's outputs are dense, but it is evaluated to {self.model.about.task}: predict")
        whole = outputs.whole
        if whole is None:
            self.count += len(seen.indices)  # which rank 0 records
            return
        values, targets = whole.double(), seen.labels
        targets = targets.double() if targets.is_floating_point() else targets
        if isinstance(self.task, Regress):
            values = as_targets(values, targets)
        self.seen.append((values, targets))
        for index, value, label in zip(seen.indices, values, targets, strict=True):
            self._record(index, None if is_undefined(value) else self.task.answer(self.model.classes, value, label))

    def samples(self) -> Samples:
        """The predictions and targets, of images or slides. Those of all images are numbers."""
        outputs, targets = (torch.cat(parts) for parts in zip(*self.seen, strict=True))
        names = tuple(self.images.name(index) for index in self.indices)
        of = names if self.patients is None else tuple(self.patients[index] for index in self.indices)
        noun, known = self.model.assembly.source.noun, self.patients is not None
        return Samples(noun, self.task, self.model.classes, names, of, outputs, targets, known)

    def _measured(self, speaks: bool, kept: dict[str, Any]) -> Scores:
        return scores_of(self.samples(), speaks=speaks, **kept)


class _Masks(_Collected):
    """Masks: of each image, how many pixels of each class were taken for which one.

    The model may look at `windows` of them, in order. Labels that may overlap are layers of two classes each.
    """

    def __init__(self, model: Predictor, images: Named) -> None:
        self.windows: _LabelledWindows | None = None
        if model.by_windows:  # slides are seen whole
            whole, found = in_whole(images)
            images = Subset(whole, [*dict.fromkeys(found)])
            every = range(len(images))
            self.windows = _LabelledWindows(images, every, targets_of(model, images, every))
        super().__init__(model, images, whole=model.by_windows)
        self.looked_at, self.metric_names = self.windows or images, ALIKE
        self.layers, self.size = (self.task.num_outputs, 2) if self.task.binary else (1, self.task.num_outputs)
        self._open: dict[int, tuple[Tensor, int]] = {}  # pixels counted, and windows with what is no number
        self.counts: list[Tensor] = []

    def wanted(self, outputs: Any) -> Tensor:
        return self.task.measured(outputs, None)

    def _place(self, index: int) -> tuple[int, bool]:
        if self.windows is None:
            return index, True
        image, _, last = self.windows.place(index)
        return image, last

    def _take(self, seen: Prediction, outputs: BatchOutputs) -> None:
        """Each rank counts the pixels that it has."""
        size, layers, axes = self.size, self.layers, len(self.model.trained.size)
        found = torch.zeros((len(seen.indices), layers, size * size), dtype=torch.int64)
        undefined = torch.zeros(len(seen.indices), dtype=torch.int64)
        for where, values in outputs.pieces:
            values = values.reshape(len(values), layers, *values.shape[-axes:])
            for of_image, number in zip(values, range(where[0].start, where[0].stop), strict=True):
                labels = seen.labels[number].reshape(layers, *seen.labels.shape[-axes:])
                for layer, predicted in enumerate(of_image):
                    if is_undefined(predicted):
                        undefined[number] += 1
                        continue
                    true = labels[layer][where[-axes:]].long()
                    known = (true >= 0) & (true < size)
                    pairs = true[known] * size + predicted.long()[known]
                    found[number, layer] += torch.bincount(pairs, minlength=size * size)
        self.model.comm.all_reduce(found)
        self.model.comm.all_reduce(undefined)
        for index, counts, wrong in zip(
            seen.indices, found.view(-1, layers, size, size), undefined.tolist(), strict=True
        ):
            image, last = self._place(index)
            before, already = self._open.pop(image, (torch.zeros_like(counts), 0))
            self._open[image] = before + counts, already + wrong
            if last:
                self._end(image, *self._open.pop(image))

    def _end(self, image: int, counts: Tensor, undefined: int) -> None:
        """Add an image all of whose windows were looked at. Collective."""
        if image in self.records:
            return
        if self.windows is not None and not self.task.binary:
            error = self._add_not_seen(image, counts[0])
            if error is not None:
                self._fail(image, error)
                return
        self.counts.append(counts if self.task.binary else counts[0])
        alike = {name: float(MEASURES[name](self.counts[-1].double())) for name in ALIKE}
        self._record(image, None if undefined else alike)

    def _add_not_seen(self, image: int, total: Tensor) -> str | None:
        """Count the pixels of windows without tissue, which are of the first class; the error of their mask, if any."""
        assert self.windows is not None
        comm, error = self.model.comm, None
        try:
            found = self.windows.classes_not_seen(image, slice(comm.rank, None, comm.size), len(total))
        except DatasetError as problem:
            found, error = torch.zeros(len(total), dtype=torch.int64), printable(str(problem))
        error = next((each for each in comm.all_gather_object(error) if each is not None), None)
        comm.all_reduce(found)
        total[:, 0] += found
        return error

    def _measured(self, speaks: bool, kept: dict[str, Any]) -> Scores:
        counts = torch.stack(self.counts).double()

        def measure(drawn: Tensor) -> dict[str, float]:
            total = counts[drawn].sum(0)
            found = {name: float(MEASURES[name](total)) for name in ALIKE}
            pairs = () if self.task.binary else zip(*(overlaps(each, total).tolist() for each in OVERLAPS), strict=True)
            for name, values in zip(self.model.classes, pairs, strict=False):
                found |= {f"{each} {name}": value for each, value in zip(OVERLAPS, values, strict=True)}
            return found

        return self._scores_by(measure, counts.sum(0).long().tolist(), kept)


class _WithoutLabels(Subset):
    """Images of which no labels are read."""

    def label(self, index: int) -> Any:
        return 0


class _Pictures(_Collected):
    """Images that the model makes: of each how alike it is to its target, which rank 0 reads band by band.

    With `seams` also how it shows the borders of tiles, and how an image does that is made in these, each alone. With
    `lpips` rank 0 keeps the rows of an image, and all ranks compare it once more.
    """

    def __init__(self, model: Predictor, images: Named, seams: tuple[int, ...] | None, lpips: str | None) -> None:
        super().__init__(model, images)
        self.metric_names, self.looked_at = LIKENESS, _WithoutLabels(images, range(len(images)))
        self.alike: dict[int, dict[str, float]] = {}
        self.examples: list[Pixels] = []
        self.tiles: TilesAlone | None = None
        self.distance: PerceptualDistance | None = None
        if lpips is not None:
            from mpi4dl.inference import perceptual_distance

            wrong = not model.task.makes_images or self.task.num_outputs not in (1, 3)
            model.comm.agree("`lpips` is of grey or RGB pictures that a model makes" if wrong else None)
            self.distance = perceptual_distance.PerceptualDistance(model.comm, model.assembly.device, lpips)
            self.metric_names = (*self.metric_names, LPIPS)
        if seams is not None:
            other = "`seams` are of pictures that a model makes, as files have them"
            model.comm.agree(None if model.trained.makes_pictures else other)
            with model.comm.together((ValueError,)):
                self.tiles = TilesAlone.of(seams)
            self.metric_names = (*self.metric_names, *SEAMS)

    def wanted(self, outputs: Any) -> Tensor:
        return self.task.predictions(outputs)

    def _take(self, seen: Prediction, outputs: BatchOutputs) -> None:
        pairs: dict[int, _Pair] = {}
        scale = scale_of(outputs.extent()[1:], seen.sizes)
        for where, values in outputs.bands(BAND_ROWS):
            number = where[0].start
            if number not in pairs:
                pairs[number] = self._pair(seen.indices[number], scale)
                pairs[number].rows = None if self.distance is None else []
            pairs[number].add(where[-2], values[0])
        found = {seen.indices[number]: pair.result() for number, pair in pairs.items()}
        for index, pair in zip(found, pairs.values(), strict=True):
            if len(self.examples) < MOST_EXAMPLES and pair.example is not None and isinstance(found[index], dict):
                self.examples.append(pair.example.pixels())
        for index, alike in self.model.comm.broadcast_object(found).items():
            if isinstance(alike, str):
                self._fail(index, alike)
                continue
            self.alike[index] = alike
            if self.distance is not None and alike:
                own = next((each for number, each in pairs.items() if seen.indices[number] == index), None)
                alike[LPIPS] = self.distance.of(None if own is None else own.whole())
            self._record(index, {**alike} or None)

    def pictures(self) -> dict[str, bytes]:
        return {EXAMPLES: jpeg_of(self.examples)} if self.examples else {}

    def _pair(self, index: int, scale: int) -> "_Pair":
        return _Pair(self.images, index, scale, self.model.trained.makes_pictures, self.tiles)

    def look_again(self, speaks: bool) -> None:
        """The same images in tiles, each made alone."""
        if self.tiles is None:
            return
        comm, target_of = self.model.comm, self.tiles.target
        sizes = comm.from_first(lambda: {i: self.images.image(i).size for i in self.indices if self.alike[i]})
        targets = {i: target for i, size in sizes.items() if (target := target_of(size)).num_in_all > 1}
        indices, tiles = [*targets], Windows(self.images, [*targets], [*targets.values()])
        joined: dict[int, tuple[Joined, _Pair]] = {}
        found: dict[int, dict[str, float] | str] = {}
        with closing(ProgressOfImages(len(tiles), speaks and comm.rank == 0, "tile")) as progress:
            for seen in self.model.predictions(tiles, self.wanted):
                comm.agree(next(iter(seen.errors.values()), None))
                assert seen.outputs is not None
                with comm.together():
                    scale = scale_of(seen.outputs.extent()[1:], seen.sizes)
                    for where, values in seen.outputs.bands(scale * self.tiles.side):
                        position, intervals, last = tiles.place(seen.indices[where[0].start])
                        if position not in joined:
                            pair = self._pair(indices[position], scale)
                            joined[position] = Joined(tiles.targets[position], scale, pair.add), pair
                        joined[position][0].add(intervals, values[0])
                        if last:
                            image, pair = joined.pop(position)
                            image.close()
                            found[indices[position]] = pair.result()
                progress.advance(len(seen.indices), 0)
        found = comm.broadcast_object(found)
        for index, whole in self.alike.items():
            alike = found.get(index, whole)  # which of one tile is the same
            if isinstance(alike, str):
                raise Refusal(alike)
            whole |= {f"{name}_tiled": alike.get(name, math.nan) for name in ("seams", "psnr")}
            self.records[index] |= {name: whole[name] for name in SEAMS if name in whole and "seams" in alike}

    def _measured(self, speaks: bool, kept: dict[str, Any]) -> Scores:
        values = [{name: self.alike[index][name] for name in self.metric_names} for index in self.indices]
        measure = mean_of(values, SEAMS)  # an image of one tile has no seam
        return self._scores_by(measure, None, kept)


class _Pair:
    """What a model makes of an image, and its target: compared from top to bottom, as far as the image goes."""

    def __init__(self, images: Named, index: int, scale: int, own_size: bool, tiles: TilesAlone | None) -> None:
        self._alike, self._error, self._undefined = Likeness(), "", False
        self._seams: dict[str, Seams] = {}
        self.rows: list[tuple[Tensor, Tensor]] | None = None  # of both, where they are kept
        self.example: Example | None = None
        try:
            self._target = images.label(index)
            if own_size:
                image: Any = images.image(index)
                self._target.require_size_of(image)
                if self._target.scale != scale:
                    told = (
                        f"is {self._target.scale} times as large as its input, and what the model makes {scale} times"
                    )
                    raise BadImage(self._target.path, told)
                self.example = Example(image, self._target)
                size, borders = self._target.size, [] if tiles is None else tiles.borders(image.size)
                borders = [[scale * at for at in along] for along in borders]
                self._seams = {name: Seams(size, borders) for name in ("seams", "seams_target") if borders}
        except DatasetError as error:
            self._error = printable(str(error))

    def add(self, rows: slice, made: Tensor) -> None:
        """The next rows of what the model makes, (channels, rows, columns)."""
        if self._error:
            return
        try:
            target = self._rows(rows)
        except DatasetError as error:
            self._error = printable(str(error))
            return
        made = made[:, : target.shape[1], : target.shape[2]]
        self._undefined |= is_undefined(made)
        if made.shape != target.shape:
            self._error = f"the target has shape {tuple(target.shape)}, but the model makes {tuple(made.shape)}"
        elif made.numel():
            self._alike.add(made, target)
            if self.rows is not None:
                self.rows.append((made.float().cpu(), target.float()))
            if self.example is not None:
                self.example.add(rows, made.numpy())
            for seams, rows_of in zip(self._seams.values(), (made, target), strict=False):
                seams.add(rows_of)

    def _rows(self, rows: slice) -> Tensor:
        target = self._target
        if not hasattr(target, "read"):
            whole = torch.as_tensor(target)
            return (whole if whole.dim() == 3 else whole[None])[:, rows]
        height, width = target.size
        pixels = target.read(Interval(min(rows.start, height), min(rows.stop, height)), Interval(0, width))
        return torch.from_numpy(planes_of(pixels))

    def whole(self) -> tuple[Tensor, Tensor]:
        """Both images, of which all rows are kept."""
        made, target = (torch.cat(each, 1) for each in zip(*(self.rows or ()), strict=True))
        return made, target

    def result(self) -> dict[str, float] | str:
        """The metrics; nothing if outputs are no numbers; or the error."""
        seams = {name: found.value() for name, found in self._seams.items()}
        return self._error or ({} if self._undefined else {**self._alike.values(), **seams})
