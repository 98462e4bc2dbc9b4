"""Two evaluations of one model on the same images beside each other, such as by bf16 and by fp32.

metric      bf16     fp32    difference            by slide, and by patient
accuracy    0.9500   0.9500      0.0000
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor

from mpi4dl._wording import aligned, counted
from mpi4dl.datasets.base import printable
from mpi4dl.inference.samples import UNDEFINED, Measured, Samples
from mpi4dl.inference.scoring import Scores
from mpi4dl.results.formats import csv_lines
from mpi4dl.tasks.task import Classify, MultiLabel


class Differences(NamedTuple):
    """How far the predictions of a level are apart: of each sample the largest `apart` (N,), and who is `changed` (N,).

    `changed` are samples whose class, or one of whose labels, is another; None of other tasks.
    """

    names: tuple[str, ...]
    apart: Tensor
    changed: Tensor | None


@dataclass(frozen=True)
class Comparison:
    """The scores `first` and `second` of the same images by two ways to compute, whose names are `ways`. For rank 0."""

    ways: tuple[str, str]
    first: Scores
    second: Scores

    @cached_property
    def differences(self) -> tuple[Differences, ...]:
        """Those of slides and of patients, or of images; empty of masks, and where outputs are not numbers."""
        num_levels = len([*self._levels()])
        pairs = zip(self.first.levels[:num_levels], self.second.levels, strict=False)
        return tuple(_differences(one, two) for one, two in pairs if one.names == two.names)

    def _levels(self) -> Iterator[tuple[str, Mapping[str, Measured], Mapping[str, Measured]]]:
        """The metrics by each level: by patient, too, if a patient has several slides."""
        yield self.first.what, self.first.metrics, self.second.metrics
        one, two = self.first.patients, self.second.patients
        if one is not None and two is not None and one.count < self.first.count:
            yield "patient", one.metrics, two.metrics

    def lines(self) -> Iterator[str]:
        """The table of metrics, and how far predictions are apart, for people."""
        for level, ones, twos in self._levels():
            yield f"by {level}:"
            rows = [
                (name, _shown(one), _shown(two), _shown(one - two)) for name, (one, two) in _beside(ones, twos).items()
            ]
            yield from aligned([("metric", *self.ways, "difference"), *rows], {"metric"})
            yield ""
        for samples, found in zip(self.first.levels, self.differences, strict=False):
            where = int(found.apart.argmax())
            what = "probabilities" if found.changed is not None else "predictions"
            line = (
                f"{what} by {samples.level} differ by {float(found.apart.max()):.3g} at most "
                f"({printable(found.names[where])}), by {float(found.apart.mean()):.3g} on average"
            )
            if found.changed is not None:
                changed = int(found.changed.sum())
                line += f"; {counted(changed, 'prediction')} of {len(found.names)} changed"
            yield line

    def as_json(self) -> dict[str, Any]:
        metrics = {
            level: {name: dict(zip(self.ways, values, strict=True)) for name, values in _beside(ones, twos).items()}
            for level, ones, twos in self._levels()
        }
        found: dict[str, Any] = {"precisions": self.ways, "metrics": metrics}
        for samples, each in zip(self.first.levels, self.differences, strict=False):
            found.setdefault("largest_difference", {})[samples.level] = float(each.apart.max())
            if each.changed is not None:
                found.setdefault("changed_predictions", {})[samples.level] = int(each.changed.sum())
        return found

    def table(self) -> bytes:
        """A line for each slide or image: its predictions by both, and the largest difference, as a CSV file."""
        columns = [f"{name} {way}" for name in _columns(self.first) for way in self.ways]
        rows: list[list[Any]] = [["image", *columns, "largest difference", "changed"]]
        pairs = zip(self.first.levels[:1], self.second.levels[:1], self.differences, strict=False)
        for one, two, found in pairs:
            for n, name in enumerate(found.names):
                values = zip(_flat(one.outputs[n]), _flat(two.outputs[n]), strict=True)
                changed = "" if found.changed is None else int(found.changed[n])
                numbers = [round(value, 6) for pair in values for value in pair]
                rows.append([name, *numbers, float(found.apart[n]), changed])
        return csv_lines(*rows)


def _differences(one: Samples, two: Samples) -> Differences:
    apart = (one.outputs - two.outputs).abs().reshape(len(one.names), -1).amax(1)
    changed = None
    if isinstance(one.task, Classify):
        changed = one.outputs.argmax(1) != two.outputs.argmax(1)
    elif isinstance(one.task, MultiLabel):
        changed = ((one.outputs >= 0.5) != (two.outputs >= 0.5)).any(1)
    return Differences(one.names, apart, changed)


def _beside(ones: Mapping[str, Measured], twos: Mapping[str, Measured]) -> dict[str, tuple[float, float]]:
    return {name: (ones[name].value, twos[name].value) for name in ones if name in twos}


def _columns(scores: Scores) -> list[str]:
    """What predictions are called: the probability of each class, or the values by name."""
    if not scores.levels:
        return []
    task, width = scores.levels[0].task, len(_flat(scores.levels[0].outputs[0]))
    if isinstance(task, Classify | MultiLabel):
        return [f"probability {name}" for name in scores.classes]
    return ["prediction"] if width == 1 else [f"prediction {name}" for name in scores.classes[:width]]


def _flat(values: Tensor) -> list[float]:
    found: list[float] = values.reshape(-1).tolist()
    return found


def _shown(value: float) -> str:
    return UNDEFINED if math.isnan(value) else f"{value:.4f}"
