"""The folder of a run as it is found: what is missing or damaged in it becomes a remark, never an error.

A run that was killed leaves a last line that is half written, no weights, or nothing but its options; another one was
written by another version. All of that can be looked at.
"""

import csv
import io
import math
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from mpi4dl._files import read_regular
from mpi4dl._numbers import number_in, of_cell, parse_json
from mpi4dl._wording import counted
from mpi4dl.options.kinds import dump
from mpi4dl.runs.folder import METRICS, PORTRAIT, RunSnapshot
from mpi4dl.tasks.directions import MEASURES, higher_is_better, read_directions

# Evaluations in the folder of a run: what was found of each image, and metrics with their intervals.
#
#     evaluation*.csv     a line an image: image, label, prediction, `probability NAME` of each class, error; of masks
#                          how like they are, instead of label and prediction: dice, iou or accuracy
#     evaluation*.json    {"metrics": {NAME: {"value": 0.9, "low": 0.8, "high": 0.95, "level": 0.95}}, "classes": [...],
#                          "confusion": [[...]], "images": FOLDER, "root": FOLDER}
#
# They lie in the folder or in folders of it that are named so. The two files of one name are one evaluation; each may
# be missing, and so may every key and column but `image`. Labels are names of classes, or numbers.

PREFIX = "evaluation"
PROBABILITY = "probability"
ALIKE = ("dice", "iou", "pixel_accuracy")  # of masks
MOST_CLASSES = 1000  # that a matrix is made of
MOST_REMARKS = 3
# Errors of reading a damaged file.
DAMAGED = (OSError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError, csv.Error)


class Judged(NamedTuple):
    """One image: `probability` is that of its own class, None if it is not known; `wrong` how far the prediction is."""

    image: str
    label: str
    prediction: str
    probability: float | None
    wrong: float


class Scored(NamedTuple):
    """A metric and its interval, if there is one; `of` says how that was found."""

    value: float
    low: float | None = None
    high: float | None = None
    of: str = ""


@dataclass(frozen=True)
class Evaluated:
    """An evaluation; `matrix[i][j]` counts images of class i that were taken for class j.

    `root` is the folder that names of images begin in, as far as it was recorded.
    """

    name: str
    folder: Path
    images_at: str
    metrics: Mapping[str, Scored]
    classes: tuple[str, ...]
    matrix: Sequence[Sequence[float]] | None
    images: tuple[Judged, ...]
    root: str = ""


def is_matrix(value: Any) -> bool:
    """Whether it is a square of numbers."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(row, list) and len(row) == len(value) for row in value)
        and all(isinstance(each, int | float) and not isinstance(each, bool) for row in value for each in row)
    )


def evaluations_in(run: Path) -> tuple[list[Evaluated], list[str]]:
    """Those in a run's folder, and what of them cannot be read."""
    files = [*run.glob(f"{PREFIX}*.*"), *run.glob(f"{PREFIX}*/*.*")]
    stems = sorted({file.with_suffix("") for file in files if file.suffix in (".csv", ".json")})
    found: list[Evaluated] = []
    faults: list[str] = []
    for stem in stems:
        name = str(stem.relative_to(run))
        try:
            evaluated = _read_evaluation(stem, name, faults)
        except DAMAGED as error:
            faults.append(f"{name} is damaged: {' '.join(str(error).split())[:200]}")
            continue
        if evaluated is not None:
            found.append(evaluated)
    return found, faults


def _read_evaluation(stem: Path, name: str, faults: list[str]) -> Evaluated | None:
    """None for what is something else. Raises as what reads and parses does."""
    told: Any = {}
    rows: list[dict[str, str]] = []
    for suffix in (".json", ".csv"):
        file = stem.with_name(stem.name + suffix)
        if file.exists():
            text = read_regular(file).decode(errors="surrogateescape")
            if suffix == ".json":
                told = parse_json(text)
            else:
                read = csv.DictReader(io.StringIO(text, newline=""))
                rows = [{k: of_cell(v) if isinstance(v, str) else v for k, v in row.items()} for row in read]
    if isinstance(told, list):  # of images alone
        rows, told = rows or [{k: str(v) for k, v in row.items()} for row in told if isinstance(row, dict)], {}
    if not told and not (rows and "image" in rows[0]):
        return None
    images, left_out = _images(rows)
    faults += [f"{name}: {why}" for why in left_out[:MOST_REMARKS]]
    if len(left_out) > MOST_REMARKS:
        faults.append(f"{name}: ... and {len(left_out) - MOST_REMARKS} images more have no result")
    classes = tuple(map(str, told.get("classes") or _classes(rows)))
    matrix = told.get("confusion")
    if not is_matrix(matrix):
        matrix = None
    named = set(classes) >= {each for one in images for each in (one.label, one.prediction) if each}
    if matrix is None and any(one.label for one in images) and named and len(classes) <= MOST_CLASSES:
        matrix = _counted(images, classes)
    metrics = _metrics(told.get("metrics", {}))
    if not metrics and any(one.label for one in images):
        metrics = _from(images, numbers=not named)
    at, root = (str(told.get(key) or "") for key in ("images", "root"))
    return Evaluated(name, stem.parent, at, metrics, classes, matrix, images, root)


def _classes(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Those of which there are probabilities, or else all that occur, unless these are numbers that were measured."""
    if not rows:
        return []
    named = [name for column in rows[0] if (name := _class_of(column)) is not None]
    if named:
        return named
    found = sorted({row.get(column) or "" for row in rows for column in ("label", "prediction")} - {""})
    return found if any(number_in(each) is None or each.lstrip("-").isdecimal() for each in found) else []


def _class_of(column: str | None) -> str | None:
    """The class whose probability a column has: `probability cat`, `probability:cat`, `probability_cat`."""
    if column is None or not column.startswith(PROBABILITY) or len(column) < len(PROBABILITY) + 2:
        return None
    return column[len(PROBABILITY) + 1 :]


def _images(rows: Sequence[Mapping[str, str]]) -> tuple[tuple[Judged, ...], list[str]]:
    """Images with labels, and the reasons for those without. The similarity of masks counts like a probability."""
    found, left_out = [], []
    for row in rows:
        image, label, prediction = (row.get(column) or "" for column in ("image", "label", "prediction"))
        if row.get("error"):
            left_out.append(f"{image}: {row['error']}")
        elif (
            image and (alike := next((n for c in ALIKE if (n := number_in(row.get(c))) is not None), None)) is not None
        ):
            found.append(Judged(image, "", "", alike, 0.0))
        elif image and label and prediction:
            probability = next((number_in(row[c]) for c in row if _class_of(c) == label), None)
            a, b = number_in(label), number_in(prediction)
            far = float(label != prediction) if a is None or b is None else abs(a - b)
            found.append(Judged(image, label, prediction, probability, far))
    return tuple(found), left_out


def _counted(images: Sequence[Judged], classes: Sequence[str]) -> list[list[float]]:
    place = {name: i for i, name in enumerate(classes)}
    matrix = [[0.0] * len(classes) for _ in classes]
    for one in images:
        matrix[place[one.label]][place[one.prediction]] += 1
    return matrix


def _metrics(values: Mapping[str, Any]) -> dict[str, Scored]:
    """Metrics of one number; those with an interval are objects that have its ends too."""
    found = {}
    for name, told in values.items():
        several = told if isinstance(told, dict) else {"value": told}
        value, low, high = (number_in(several.get(key)) for key in ("value", "low", "high"))
        if value is not None:
            known = low is not None and high is not None
            how = f"{100 * float(several.get('level', 0.95)):g} % of resamples" if known else ""
            found[str(name)] = Scored(value, low, high, how)
    return found


def _from(images: Sequence[Judged], numbers: bool) -> dict[str, Scored]:
    """Metrics of predictions for images without recorded metrics: the accuracy, or the mean error."""
    import torch

    from mpi4dl.tasks.metrics import WHY_NONE, bootstrap

    scores = torch.tensor([one.wrong if numbers else float(not one.wrong) for one in images], dtype=torch.float64)
    low, high, _ = bootstrap(lambda draw: float(scores[draw].mean()), len(scores))
    known = not math.isnan(low)
    how = f"95 % of resamples of {len(scores)} images" if known else f"{WHY_NONE}; there are {len(scores)} images"
    found = Scored(float(scores.mean()), low if known else None, high if known else None, how)
    return {"mean absolute error" if numbers else "accuracy": found}


def extremes(evaluated: Evaluated, count: int) -> tuple[list[Judged], list[Judged]]:
    """The images that were judged best, and worst, by the probability of their own class, or by how far off it was."""

    def badness(one: Judged) -> tuple[float, float]:
        return (one.wrong, 0.0) if one.probability is None else (-one.probability, one.wrong)

    order = sorted(evaluated.images, key=badness)
    half = min(count, -(-len(order) // 2))
    return order[:half], order[::-1][: min(count, len(order) - half)]


CONFIG, VERSIONS, IMAGES, LOG, WEIGHTS, DESCRIPTION = (
    "config.toml",
    "versions.json",
    "images.json",
    "log-rank0.txt",
    "model.safetensors",
    "model.json",
)
LOG_BYTES = 1 << 16  # that are read, from its end
TAIL_LINES = 12
LOG_LINE = re.compile(r"\S+ \S+ [A-Z]+ mpi4dl[\w.]*: (.*)")
ENDS = ("done: ", "stopped by ", "ended by ")
COORDINATES = ("phase", "step", "epoch")
Number = int | float
Values = Mapping[str, Any]


class Recorded(NamedTuple):
    """One line of metrics.jsonl: `numbers` by name, those of nests as "nest/name"; `matrices` are lists of lists."""

    phase: str
    step: int
    numbers: dict[str, float]
    matrices: dict[str, list[list[float]]]


@dataclass(frozen=True)
class FoundRun:
    """A run's folder, as read. `options` and `versions` are text by name; `remarks` what is missing or damaged."""

    name: str
    path: Path
    title: str
    state: str
    options: Mapping[str, str]
    versions: Mapping[str, str]
    records: tuple[Recorded, ...]
    classes: tuple[str, ...]
    portrait: RunSnapshot | None
    evaluations: tuple[Evaluated, ...]
    tail: tuple[str, ...]
    remarks: tuple[str, ...]
    task: str = ""
    directions: Mapping[str, bool] = field(default_factory=dict)

    def higher_is_better(self, metric: str) -> bool | None:
        """As the run recorded it, or as it is declared for metrics of this name; None if nobody says so."""
        found = self.directions.get(metric, self.directions.get(metric.partition("/")[0]))
        return higher_is_better(metric) if found is None else found

    def series(self, phase: str, metric: str) -> list[tuple[int, float]]:
        """The values of a metric by step."""
        return [(r.step, r.numbers[metric]) for r in self.records if r.phase == phase and metric in r.numbers]

    def metrics(self, phase: str) -> dict[str, None]:
        """The names of those with a value, in order."""
        return dict.fromkeys(name for record in self.records if record.phase == phase for name in record.numbers)

    def last_matrix(self) -> tuple[str, list[list[float]]] | None:
        """The confusion matrix of the last validation that has one, and where it is from."""
        for record in reversed(self.records):
            for matrix in record.matrices.values():
                return f"validation at step {record.step}", matrix
        return None


def is_run(path: Path) -> bool:
    return (path / CONFIG).is_file() or (path / METRICS).is_file()


def read_runs(paths: Sequence[Path]) -> list[FoundRun]:
    """The runs in these folders, named so that no two have the same name. Raises ValueError for what is no run."""
    for path in paths:
        if not path.is_dir():
            raise ValueError(f"{path}: no such folder; name the folder of a run, such as runs/resnet18-20260131-120000")
        if not is_run(path):
            raise ValueError(
                f"{path} is no folder of a run: it has neither {CONFIG} nor {METRICS}; name one that mpi4dl train wrote"
            )
    return [_read(path, name) for path, name in zip(paths, _names(paths), strict=True)]


def _names(paths: Sequence[Path]) -> list[str]:
    """As much of the end of each path as tells them apart; of what is given twice, a number too."""
    parts = [path.absolute().parts for path in paths]
    depth = 1
    while depth < max(map(len, parts)) and len({part[-depth:] for part in parts}) < len(set(parts)):
        depth += 1
    names = ["/".join(part[-depth:]) for part in parts]
    return [f"{n} ({names[:i].count(n) + 1})" if n in names[:i] else n for i, n in enumerate(names)]


def _read(path: Path, name: str) -> FoundRun:
    remarks: list[str] = []

    def read(file: str, parse: Callable[[bytes], Any], otherwise: Any, why: str = "") -> Any:
        """The content of a file of the run; `otherwise`, with a remark, where it cannot be read."""
        try:
            return parse(read_regular(path / file))
        except FileNotFoundError:
            remarks.append(f"there is no {file}{why}")
        except OSError as error:
            remarks.append(f"{file} cannot be read: {error.strerror or error}")
        except DAMAGED as error:
            remarks.append(f"{file} is damaged: {' '.join(str(error).split())[:200]}")
        return otherwise

    options = read(CONFIG, lambda raw: flattened(tomllib.loads(raw.decode())), {})
    for later in sorted(path.glob("config-step-*.toml")):
        new = read(later.name, lambda raw: flattened(tomllib.loads(raw.decode())), {})
        changed = {key: value for key, value in new.items() if options.get(key) != value}
        words = ", ".join(f"{key} {options.get(key, '-')} -> {value}" for key, value in changed.items())
        step = int(re.sub(r"\D", "", later.stem) or 0)
        remarks.append(f"it went on after step {step} with {words or 'the same options'}")
        options = options | new
    records, damaged = read(METRICS, _records, ((), ()), ": nothing was reported")
    remarks += damaged
    tail = read(LOG, _tail, ())
    said = [found[1] for line in tail if (found := LOG_LINE.match(line))]
    portrait = read(PORTRAIT, lambda raw: RunSnapshot.of(parse_json(raw)), None, ": it has no timeline and no memory")
    task, directions = "", {}
    if (path / DESCRIPTION).exists():
        task = read(DESCRIPTION, lambda raw: str(parse_json(raw)["task"]), "")
    if (path / MEASURES).exists():
        directions = read(MEASURES, read_directions, {})
    evaluations, faults = evaluations_in(path)
    for fault in faults:
        remarks.append(fault)
    return FoundRun(
        name,
        path,
        portrait.title if portrait else options.get("model.model", ""),
        _state(path, said, records),
        options,
        read(VERSIONS, lambda raw: flattened(parse_json(raw)), {}),
        records,
        read(DESCRIPTION, lambda raw: tuple(map(str, parse_json(raw)["classes"])), ()),
        portrait,
        tuple(evaluations),
        tail[-TAIL_LINES:],
        tuple(remarks),
        task,
        directions,
    )


def flattened(tables: Any) -> dict[str, str]:
    """Values of tables as text, by "table.key"; text as it is."""
    if not isinstance(tables, dict):
        raise ValueError("it is no table")
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


def _records(raw: bytes) -> tuple[tuple[Recorded, ...], list[str]]:
    """Those of a file of metrics, and which of its lines are damaged."""
    found, damaged = [], []
    lines = raw.split(b"\n")
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                found.append(_recorded(parse_json(line)))
            except DAMAGED:
                damaged.append(number)
    if not damaged:
        return tuple(found), []
    first, rest = damaged[0], len(damaged) - 1
    half = "; it is half written, as by a run that was killed" if damaged == [len(lines)] else ""
    more = f", and {counted(rest, 'line')} more" if rest else ""
    return tuple(found), [f"of {METRICS} line {first}{more} cannot be read, and left out{half}"]


def _recorded(line: Any) -> Recorded:
    """Raises ValueError, TypeError or KeyError for what is no report."""
    if not isinstance(line, dict):
        raise ValueError("no object")
    phase, step = str(line.get("phase", "train")), line["step"]
    if not isinstance(step, int) or isinstance(step, bool):
        raise ValueError("no step")
    values = {key: value for key, value in line.items() if key not in COORDINATES}
    matrices = {key: value for key, value in _leaves(values) if is_matrix(value)}
    return Recorded(phase, step, dict(_numbers(values)), matrices)


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, "" if key == "metrics" else f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value


def _numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in _leaves(values):
        number = as_number(value)
        if number is not None:
            yield key, number
        elif isinstance(value, list) and value and all(as_number(each) is not None for each in value):
            alone = len(value) == 1
            yield from ((key if alone else f"{key} {i}", float(each)) for i, each in enumerate(value))


def as_number(value: Any) -> float | None:
    """A number as JSON has it, or as text where it is not finite."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, Number):
        return float(value)
    return float(value) if value in ("nan", "inf", "-inf") else None


def _tail(raw: bytes) -> tuple[str, ...]:
    """The last lines of a log."""
    return tuple(raw[-LOG_BYTES:].decode(errors="replace").splitlines())


def _state(path: Path, said: Sequence[str], records: Sequence[Recorded]) -> str:
    """How a run ended, as its log says."""
    reached = f" after step {records[-1].step}" if records else " before its first report"
    if said and said[-1].startswith(ENDS):
        return said[-1]
    if (path / WEIGHTS).is_file():
        return f"finished{reached}"
    return f"no end is recorded{reached}: it is still running, or was killed"


def finite(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    return [(step, value) for step, value in points if math.isfinite(value)]


def not_finite(run: FoundRun) -> list[str]:
    """The warning about values that are not finite."""
    found = []
    for phase in ("train", "validation"):
        for metric in run.metrics(phase):
            steps = [step for step, value in run.series(phase, metric) if not math.isfinite(value)]
            if steps:
                count = counted(len(steps), "report")
                found.append(f"{phase} {metric} is not finite in {count}, the first at step {steps[0]}")
    return found
