"""What a report shows of runs: numbers by step, options as text, and images that were judged best and worst."""

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mpi4dl._numbers import number_in
from mpi4dl._wording import counted
from mpi4dl.options.kinds import dump
from mpi4dl.results.evaluations import SavedEvaluation, evaluations_in
from mpi4dl.results.formats import Record, reading
from mpi4dl.results.names import CONFIG, METRICS, PORTRAIT
from mpi4dl.results.runs import FolderResults, fold_folders
from mpi4dl.runs.folder import RunSnapshot
from mpi4dl.tasks.directions import higher_is_better

ALIKE = ("dice", "iou", "pixel_accuracy", "ssim")  # of masks, and of images
COORDINATES = ("phase", "step", "epoch")
TAIL_LINES = 12


class Judged(NamedTuple):
    """One image: `probability` is that of its own class, None if it is not known; `wrong` how far the prediction is.

    Of masks and made images `probability` is the measure that `prediction` names, and there is no label.
    """

    image: str
    label: str
    prediction: str
    probability: float | None
    wrong: float


class ShownRun:
    """A run to report of, under a name that no other has. Raises ValueError for what is no run, and DamagedResult."""

    def __init__(self, path: Path, name: str) -> None:
        if not path.is_dir():
            raise ValueError(f"{path}: no such folder; name the folder of a run, such as runs/resnet18-20260131-120000")
        if not (path / CONFIG).is_file() and not (path / METRICS).is_file():
            raise ValueError(
                f"{path} is no folder of a run: it has neither {CONFIG} nor {METRICS}; name one that mpi4dl train wrote"
            )
        self.path, self.name, found = path, name, FolderResults(path)
        self.options, self.remarks = flattened(found.config), list[str]()
        for step, tables in found.later_configs.items():
            new = flattened(tables)
            changed = {key: value for key, value in new.items() if self.options.get(key) != value}
            words = ", ".join(f"{key} {self.options.get(key, '-')} -> {value}" for key, value in changed.items())
            self.remarks.append(f"it went on after step {step} with {words or 'the same options'}")
            self.options = self.options | new
        self.versions, self.state = flattened(found.versions), found.state
        with reading(path / PORTRAIT):
            self.portrait = RunSnapshot.of(found.snapshot) if found.snapshot else None
        self.title = self.portrait.title if self.portrait else self.options.get("model.model", "")
        self.records = [(line["phase"], line["step"], dict(_numbers(line))) for line in found.metrics]
        matrices = (
            (line["step"], value) for line in found.metrics[::-1] for value in line.values() if is_matrix(value)
        )
        self.last_matrix: tuple[int, list[list[float]]] | None = next(matrices, None)
        self.task, self.classes = str(found.model.get("task", "")), tuple(found.model.get("classes", ()))
        self.directions, self.evaluations = found.higher_is_better, found.evaluated()
        self.tail = found.log[-TAIL_LINES:]

    def higher_is_better(self, metric: str) -> bool | None:
        """As the run recorded it, or as it is declared for metrics of this name; None if nobody says so."""
        found = self.directions.get(metric, self.directions.get(metric.partition("/")[0]))
        return higher_is_better(metric) if found is None else found

    def series(self, phase: str, metric: str) -> list[tuple[int, float]]:
        """The values of a metric by step."""
        return [(step, numbers[metric]) for of, step, numbers in self.records if of == phase and metric in numbers]

    def metrics(self, phase: str) -> dict[str, None]:
        """The names of those with a value, in order."""
        return dict.fromkeys(name for of, _, numbers in self.records if of == phase for name in numbers)


def read_runs(paths: Sequence[Path]) -> list[ShownRun]:
    """The runs in these folders, named by as much of the end of each path as tells them apart. Raises ValueError.

    A folder of folds is all of their runs, of which the first one has its evaluations, too.
    """
    folders = [(path, [*fold_folders(path).values()]) for path in paths]
    paths = [each for path, folds in folders for each in folds or [path]]
    parts = [path.absolute().parts for path in paths]
    depth = 1
    while depth < max(map(len, parts)) and len({part[-depth:] for part in parts}) < len(set(parts)):
        depth += 1
    names = ["/".join(part[-depth:]) for part in parts]
    names = [f"{n} ({names[:i].count(n) + 1})" if n in names[:i] else n for i, n in enumerate(names)]
    found = [ShownRun(path, name) for path, name in zip(paths, names, strict=True)]
    for path, folds in folders:
        if folds:
            first = found[paths.index(folds[0])]
            first.evaluations = [*evaluations_in(path), *first.evaluations]
    return found


def flattened(tables: Mapping[str, Any]) -> dict[str, str]:
    """Values of tables as text, by "table.key"; text as it is."""
    found: dict[str, str] = {}
    for name, value in tables.items():
        if isinstance(value, dict):
            found |= {f"{name}.{key}": shown(each) for key, each in value.items()}
        else:
            found[name] = shown(value)
    return found


def shown(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(each, str) for each in value):
        return shlex.join(value)
    try:
        return dump(value)
    except (TypeError, ValueError):
        return str(value)


def is_matrix(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], list) and not isinstance(value[0][0], list)


def _numbers(line: Record) -> Iterator[tuple[str, float]]:
    for key, value in line.items():
        values = value if isinstance(value, list) else [value]
        if key not in COORDINATES and all(isinstance(each, int | float) and each is not True for each in values):
            yield from ((key if len(values) == 1 else f"{key} {i}", float(each)) for i, each in enumerate(values))


def judged(evaluation: SavedEvaluation) -> list[Judged]:
    """The images of an evaluation that can be looked at. The similarity of masks counts like a probability."""
    found = []
    with reading(evaluation.path.with_suffix(".csv")):
        for row in evaluation.records:
            measure = next((name for name in ALIKE if name in row), None)
            label, prediction = (str(row.get(key, "")) for key in ("label", "prediction"))
            if measure is not None:
                found.append(Judged(row["image"], "", measure, float(row[measure]), 0.0))
            elif label and prediction:
                a, b, own = (number_in(row.get(key)) for key in ("label", "prediction", f"probability {label}"))
                far = float(label != prediction) if a is None or b is None else abs(a - b)
                found.append(Judged(row["image"], label, prediction, own, far))
    return found


def extremes(images: Sequence[Judged], count: int) -> tuple[list[Judged], list[Judged]]:
    """The images that were judged best, and worst, by the probability of their own class, or by how far off it was."""

    def badness(one: Judged) -> tuple[float, float]:
        return (one.wrong, 0.0) if one.probability is None else (-one.probability, one.wrong)

    order = sorted(images, key=badness)
    half = min(count, -(-len(order) // 2))
    return order[:half], order[::-1][: min(count, len(order) - half)]


def finite(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    return [(step, value) for step, value in points if math.isfinite(value)]


def not_finite(run: ShownRun) -> list[str]:
    """The warning about values that are not finite."""
    found = []
    for phase in ("train", "validation"):
        for metric in run.metrics(phase):
            steps = [step for step, value in run.series(phase, metric) if not math.isfinite(value)]
            if steps:
                count = counted(len(steps), "report")
                found.append(f"{phase} {metric} is not finite in {count}, the first at step {steps[0]}")
    return found
