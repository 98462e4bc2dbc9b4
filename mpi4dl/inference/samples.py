"""Predictions of slides, patients or images with their labels: metrics with intervals, thresholds and curves.

A patient's prediction is the mean over its slides, or the largest. Intervals are by the bootstrap over patients.
"""

import io
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from mpi4dl._palette import CURVES
from mpi4dl._wording import counted, literal, some, to_install
from mpi4dl.comm import Refusal
from mpi4dl.inference.options import Evaluating
from mpi4dl.results.formats import csv_lines
from mpi4dl.tasks.curves import (
    CallCounts,
    brier_score,
    calibration,
    calibration_error,
    chosen_threshold,
    is_rule,
)
from mpi4dl.tasks.measuring import measured_here
from mpi4dl.tasks.metrics import MEASURES, area_under_curve, average_precision, curve_of
from mpi4dl.tasks.task import Classify, MultiLabel, Task

COUNTED = ("accuracy", "balanced_accuracy", "f1")  # metrics of classes that follow from the confusion matrix
CONFUSION = "confusion"
MOST_CURVES = 10  # classes or labels; more have neither curves nor rates of their own
UNDEFINED = "undefined"

LEAST_SAMPLES = 10  # of fewer there are too few resamples that differ
WHY_NONE = f"an interval takes {LEAST_SAMPLES} images or more, and resamples that differ"


def shown(value: float, digits: int = 4) -> str:
    """A metric for people."""
    return UNDEFINED if math.isnan(value) else f"{value:.{digits}f}"


Measure = Callable[[Tensor], dict[str, float]]  # each metric of the samples of these numbers


@dataclass(frozen=True)
class Measured:
    """A metric over all images, and the ends of its interval; NaN where it, or they, are not defined."""

    value: float
    low: float
    high: float


class Problem(NamedTuple):
    """A class against all others: its name, "" of two classes, scores (N,), and which samples are of it (N,).

    `called` (N,) are those whose most probable class it is; None if a threshold decides.
    """

    name: str
    scores: Tensor
    positive: Tensor
    called: Tensor | None = None

    def calls(self, threshold: float, drawn: Tensor | None = None) -> CallCounts:
        every = (self.scores >= threshold) if self.called is None else self.called
        return (
            CallCounts.of(every, self.positive) if drawn is None else CallCounts.of(every[drawn], self.positive[drawn])
        )


@dataclass(frozen=True)
class Judging(Evaluating):
    """How probabilities become calls, and those of slides those of patients; and the intervals of metrics.

    `chosen` are thresholds that other samples chose by the rule `threshold`, for each level (slide, patient or image)
    and class, and `chosen_on` says which samples.
    """

    chosen: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    chosen_on: str = ""

    def place_of_positive(self, classes: Sequence[str]) -> int:
        """The number of the class of two that is looked for. Raises Refusal."""
        if self.positive is None:
            return 1
        if len(classes) != 2:
            raise Refusal(f"`positive` is for models of two classes, and this one has {len(classes)}: leave it out")
        if self.positive not in classes:
            raise Refusal(f"`positive` {self.positive} is none of the two classes, {some(classes)}")
        return classes.index(self.positive)


Group = TypeVar("Group", bound=Hashable)


def members_of(groups: Iterable[Group]) -> dict[Group, Tensor]:
    """The numbers of the samples of each group, of the group of each sample."""
    found: dict[Group, list[int]] = {}
    for number, group in enumerate(groups):
        found.setdefault(group, []).append(number)
    return {group: torch.tensor(numbers) for group, numbers in found.items()}


def measured_by(measure: Measure, members: Mapping[Any, Tensor], count: int, judging: Judging) -> dict[str, Measured]:
    """Each metric of `count` samples, with its interval by the bootstrap over groups, whose `members` these are.

    It holds a share `judging.level` of the metric of groups that are drawn anew, with replacement; draws for which it
    is not defined, as where a class is missing, are left out. Efron 1979, "Bootstrap methods: another look at the
    jackknife".
    """
    generator, groups, draws = torch.Generator().manual_seed(0), [*members.values()], []
    for _ in range(judging.resamples if len(groups) >= LEAST_SAMPLES else 0):
        drawn = torch.randint(len(groups), (len(groups),), generator=generator)
        draws.append(measure(drawn if len(groups) == count else torch.cat([groups[n] for n in drawn.tolist()])))
    ends = torch.tensor([(1 - judging.level) / 2, (1 + judging.level) / 2], dtype=torch.float64)
    found: dict[str, Measured] = {}
    for name, value in measure(torch.arange(count)).items():
        known = [draw[name] for draw in draws if not math.isnan(draw[name])]
        interval = torch.tensor(known, dtype=torch.float64).quantile(ends).tolist() if known else [math.nan] * 2
        found[name] = Measured(value, *interval if interval[0] != interval[1] else [math.nan] * 2)
    return found


@dataclass(frozen=True)
class Samples:
    """Predictions (N, ...) and targets (N, ...) of samples of a level: slide, patient or image.

    `of` says which patient, or other group, each is of: groups are drawn as a whole for intervals. `of_patients`: these
    are patients, whose predictions can be judged, too.
    """

    level: str
    task: Task
    classes: tuple[str, ...]
    names: tuple[str, ...]
    of: tuple[str, ...]
    outputs: Tensor
    targets: Tensor
    of_patients: bool = False

    @classmethod
    def joined(cls, parts: Sequence["Samples"]) -> "Samples":
        """Samples of one kind behind each other."""
        first = parts[0]
        names, of = (tuple(name for part in parts for name in getattr(part, key)) for key in ("names", "of"))
        tensors = (torch.cat([getattr(part, key) for part in parts]) for key in ("outputs", "targets"))
        outputs, targets = tensors
        return cls(first.level, first.task, first.classes, names, of, outputs, targets, first.of_patients)

    def members(self) -> dict[str, Tensor]:
        return members_of(self.of)

    def by_patient(self, judging: Judging) -> tuple["Samples", tuple[str, ...]]:
        """One sample for each patient, and remarks on patients whose slides have different labels."""
        members = self.members()
        place = judging.place_of_positive(self.classes) if self.binary else 1
        outputs = torch.stack([self._combined(self.outputs[own], judging.patients, place) for own in members.values()])
        targets = torch.stack([self._label(self.targets[own], place) for own in members.values()])
        unlike = [name for name, own in members.items() if not bool((self.targets[own] == self.targets[own[0]]).all())]
        told = f"{self.level}s of {counted(len(unlike), 'patient')} have different labels: {self._rule()}"
        remarks = (told,) * bool(unlike)
        names = tuple(members)
        return Samples("patient", self.task, self.classes, names, names, outputs, targets), remarks

    @property
    def binary(self) -> bool:
        return isinstance(self.task, Classify) and self.outputs.shape[1] == 2

    def _combined(self, outputs: Tensor, how: str, place: int) -> Tensor:
        if how == "mean":
            return outputs.mean(0)
        if self.binary:
            most = outputs[:, place].amax()
            return torch.stack((1 - most, most) if place else (most, 1 - most))
        most = outputs.amax(0)
        return most / most.sum() if isinstance(self.task, Classify) else most

    def _label(self, targets: Tensor, place: int) -> Tensor:
        if self.binary:
            return targets.new_tensor(place) if bool((targets == place).any()) else targets[0]
        if isinstance(self.task, Classify):
            times = Counter(targets.tolist())
            return targets.new_tensor(max(times, key=lambda label: (times[label], label)))
        if isinstance(self.task, MultiLabel):
            return targets.amax(0)
        if self.task.name == "survival":
            return targets[int(targets[:, 0].argmax())]
        return targets.mean(0)

    def _rule(self) -> str:
        if self.binary:
            return f"a patient is positive if one {self.level} is"
        if isinstance(self.task, Classify):
            return f"a patient has the most frequent class of its {self.level}s, of equally frequent ones the last"
        if isinstance(self.task, MultiLabel):
            return f"a patient has the labels of all its {self.level}s"
        return "a patient has the longest time" if self.task.name == "survival" else "a patient has their mean"

    def problems(self, judging: Judging) -> list[Problem]:
        """Each class against all others, of two classes the one that is looked for; empty of other tasks."""
        if self.binary:
            place = judging.place_of_positive(self.classes)
            return [Problem("", self.outputs[:, place], self.targets == place)]
        judging.place_of_positive(self.classes)
        several = range(self.outputs.shape[1]) if isinstance(self.task, Classify | MultiLabel) else ()
        if not 0 < len(several) <= MOST_CURVES:
            return []
        if isinstance(self.task, MultiLabel):
            return [Problem(self.classes[c], self.outputs[:, c], self.targets[:, c] == 1) for c in several]
        if judging.threshold != 0.5:
            raise Refusal(
                f"`threshold` {judging.threshold} is for two classes or labels; of {len(several)} classes the most "
                "probable one is called"
            )
        best = self.outputs.argmax(1)
        return [Problem(self.classes[c], self.outputs[:, c], self.targets == c, best == c) for c in several]

    def named(self, problem: Problem, judging: Judging) -> str:
        return problem.name or self.classes[judging.place_of_positive(self.classes)]

    def thresholds(self, judging: Judging) -> dict[str, float]:
        """The threshold of each class: as given, as chosen on other samples, or else chosen on these."""
        problems = [each for each in self.problems(judging) if each.called is None]
        if not is_rule(judging.threshold):
            return {each.name: float(judging.threshold) for each in problems}
        rule, chosen = str(judging.threshold), judging.chosen.get(self.level, {})
        return {
            each.name: chosen[each.name]
            if judging.chosen
            else chosen_threshold(rule, curve_of(each.scores, each.positive))
            for each in problems
        }

    def measure(self, judging: Judging) -> Measure:
        """What measures some of the samples, by thresholds that all of them decide."""
        thresholds, problems = self.thresholds(judging), self.problems(judging)
        names = [name for name in self.task.metric_names if name != CONFUSION]

        def values(drawn: Tensor) -> dict[str, float]:
            outputs, targets, found = self.outputs[drawn], self.targets[drawn], dict[str, float]()
            if isinstance(self.task, Classify):
                size = self.task.num_outputs
                counts = torch.bincount(targets * size + outputs.argmax(1), minlength=size * size)
                found |= {name: float(MEASURES[name](counts.view(size, size).double())) for name in COUNTED}
            for each in problems:
                behind = f" {each.name}" if each.name else ""
                scores, positive = each.scores[drawn], each.positive[drawn]
                found[f"auc{behind}"] = area_under_curve(scores, positive)
                found[f"average_precision{behind}"] = average_precision(scores, positive)
                rates = each.calls(thresholds.get(each.name, 0.0), drawn).rates()
                found |= {f"{rate}{behind}": value for rate, value in rates.items()}
                if isinstance(self.task, MultiLabel) or self.binary:
                    found[f"ece{behind}"] = calibration_error(scores, positive)
            if isinstance(self.task, Classify):
                found["brier"] = brier_score(outputs, targets)
                if not self.binary:
                    best, number = outputs.max(1)
                    found["ece"] = calibration_error(best, number == targets)
            makers = self.task.metrics([name for name in names if name not in found])
            others = measured_here(makers, outputs, targets)
            found |= {name: value if isinstance(value, float) else math.nan for name, value in others.items()}
            return {name: found[name] for name in names} | found

        return values

    def confusion(self) -> list[Any] | None:
        """How often each class was taken for each, or of labels for each of them; None of other tasks."""
        if CONFUSION not in self.task.metric_names:
            return None
        return measured_here(self.task.metrics([CONFUSION]), self.outputs, self.targets)[CONFUSION]  # type: ignore

    def records(self, times: Mapping[str, int]) -> list[dict[str, Any]]:
        """A record of each patient with this number of slides, as the table of patients has it."""
        answers = (self.task.answer(self.classes, *pair) for pair in zip(self.outputs, self.targets, strict=True))
        return [
            {"patient": name, "slides": times[name], **said} for name, said in zip(self.names, answers, strict=True)
        ]


CURVE_COLUMNS = ("level", "class", "threshold", "sensitivity", "specificity", "precision", "called", "found")
BIN_COLUMNS = ("level", "class", "from", "to", "count", "mean probability", "frequency")


def tables(levels: Sequence[Samples], judging: Judging) -> dict[str, bytes]:
    """ROC and precision-recall curves, and reliability diagrams, of all levels and classes: CSV files by name.

    Empty cells are undefined.
    """
    curves, bins = [], []
    for samples in levels:
        for problem in samples.problems(judging):
            begin = samples.level, samples.named(problem, judging)
            of = curve_of(problem.scores, problem.positive)
            columns = (of.thresholds, of.sensitivity, of.specificity, of.precision, of.called, of.found)
            curves += [(*begin, *row) for row in zip(*(column.tolist() for column in columns), strict=True)]
            bins += [(*begin, *row) for row in calibration(problem.scores, problem.positive)]
    return {"curves.csv": csv_lines(CURVE_COLUMNS, *curves), "calibration.csv": csv_lines(BIN_COLUMNS, *bins)}


def draw_curves(levels: Sequence[Samples], judging: Judging) -> bytes:
    """A PNG with the ROC, precision-recall and calibration curves. Raises ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.4), layout="constrained")
    roc, precise, reliable = figure.subplots(1, 3)
    lines = [(samples, problem) for samples in levels for problem in samples.problems(judging)]
    several = len(levels) > 1 and len(levels[0].problems(judging)) > 1
    for number, (samples, problem) in enumerate(
        lines if not several else [each for each in lines if each[0] is levels[-1]]
    ):
        colour, curve = CURVES[number % len(CURVES)], curve_of(problem.scores, problem.positive)
        told = " ".join(filter(None, (samples.level + "s" if not problem.name or several else "", problem.name)))
        name = literal(told)
        areas = [area(problem.scores, problem.positive) for area in (area_under_curve, average_precision)]
        for axes, across, up, area in (
            (roc, 1 - curve.specificity, curve.sensitivity, areas[0]),
            (precise, curve.sensitivity, curve.precision, areas[1]),
        ):
            label = f"{name}: {shown(area, 3)}"
            axes.plot(across, up, color=colour, label=label, drawstyle="default" if axes is roc else "steps-pre")
        rates = None if problem.called is not None else samples.thresholds(judging)[problem.name]
        if rates is not None and curve.num_positive and curve.num_negative:
            here = problem.calls(rates).rates()
            dot = {"color": colour, "marker": "o", "linestyle": "", "label": f"at the threshold {rates:.3g}"}
            roc.plot(1 - here["specificity"], here["sensitivity"], **dot)
            precise.plot(here["sensitivity"], here["ppv"], **dot)
        bins = [each for each in calibration(problem.scores, problem.positive) if each.num_samples]
        error = calibration_error(problem.scores, problem.positive)
        reliable.plot([each.probability for each in bins], [each.frequency for each in bins], color=colour, alpha=0.6)
        sizes = [12 + 120 * each.num_samples / len(problem.scores) for each in bins]
        reliable.scatter([each.probability for each in bins], [each.frequency for each in bins], sizes, color=colour,
                         label=f"{name}: {error:.3f}")  # fmt: skip
    for axes, title, below, aside in (
        (roc, "ROC: area under the curve", "1 - specificity", "sensitivity"),
        (precise, "precision-recall: average precision", "sensitivity (recall)", "precision (PPV)"),
        (reliable, "expected calibration error", "mean predicted probability", "observed frequency"),
    ):
        axes.set(title=title, xlabel=below, ylabel=aside, xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), aspect="equal")
        axes.spines[["top", "right"]].set_visible(False)
        if axes is not precise:
            axes.plot((0, 1), (0, 1), color="0.6", linewidth=0.8, linestyle="--", zorder=0)
        axes.legend(fontsize=8, loc="lower left" if axes is precise else "lower right" if axes is roc else "upper left")
    file = io.BytesIO()
    FigureCanvasAgg(figure).print_png(file)
    return file.getvalue()


WITHOUT_PICTURE = f"the curves are not drawn: install matplotlib by {to_install('matplotlib')}"
