"""Evaluations in the folder of a run: what was found of each image, and metrics with their intervals.

    evaluation*.csv     a line an image: image, label, prediction, `probability NAME` of each class, error; of masks
                         how like they are, instead of label and prediction: dice, iou or accuracy
    evaluation*.json    {"metrics": {NAME: {"value": 0.9, "low": 0.8, "high": 0.95, "level": 0.95}}, "classes": [...],
                         "confusion": [[...]], "images": FOLDER, "root": FOLDER}

They lie in the folder or in folders of it that are named so. The two files of one name are one evaluation; each may be
missing, and so may every key and column but `image`. Labels are names of classes, or numbers.
"""

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mpi4dl._files import read_regular

PREFIX = "evaluation"
PROBABILITY = "probability"
ALIKE = ("dice", "iou", "pixel_accuracy")  # of masks
MOST_CLASSES = 1000  # that a matrix is made of
MOST_REMARKS = 3
# What reading a file raises that is not what it should be.
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
            evaluated = _read(stem, name, faults)
        except DAMAGED as error:
            faults.append(f"{name} is damaged: {' '.join(str(error).split())[:200]}")
            continue
        if evaluated is not None:
            found.append(evaluated)
    return found, faults


def _read(stem: Path, name: str, faults: list[str]) -> Evaluated | None:
    """None for what is something else. Raises as what reads and parses does."""
    told: Any = {}
    rows: list[dict[str, str]] = []
    for suffix in (".json", ".csv"):
        file = stem.with_name(stem.name + suffix)
        if file.exists():
            text = read_regular(file).decode(errors="surrogateescape")
            if suffix == ".json":
                told = json.loads(text)
            else:
                rows = list(csv.DictReader(io.StringIO(text, newline="")))
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
    return found if any(_number(each) is None or each.lstrip("-").isdecimal() for each in found) else []


def _class_of(column: str | None) -> str | None:
    """The class whose probability a column has: `probability cat`, `probability:cat`, `probability_cat`."""
    if column is None or not column.startswith(PROBABILITY) or len(column) < len(PROBABILITY) + 2:
        return None
    return column[len(PROBABILITY) + 1 :]


def _images(rows: Sequence[Mapping[str, str]]) -> tuple[tuple[Judged, ...], list[str]]:
    """What is judged, and of what is not, why. Masks are judged by how like they are, as by a probability."""
    found, left_out = [], []
    for row in rows:
        image, label, prediction = (row.get(column) or "" for column in ("image", "label", "prediction"))
        if row.get("error"):
            left_out.append(f"{image}: {row['error']}")
        elif image and (alike := next((n for c in ALIKE if (n := _number(row.get(c))) is not None), None)) is not None:
            found.append(Judged(image, "", "", alike, 0.0))
        elif image and label and prediction:
            probability = next((_number(row[c]) for c in row if _class_of(c) == label), None)
            a, b = _number(label), _number(prediction)
            far = float(label != prediction) if a is None or b is None else abs(a - b)
            found.append(Judged(image, label, prediction, probability, far))
    return tuple(found), left_out


def _number(text: str | None) -> float | None:
    try:
        number = float(text or "")
    except ValueError:
        return None
    return number if math.isfinite(number) else None


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
        value, low, high = (_number(str(several.get(key))) for key in ("value", "low", "high"))
        if value is not None:
            known = low is not None and high is not None
            how = f"{100 * float(several.get('level', 0.95)):g} % of resamples" if known else ""
            found[str(name)] = Scored(value, low, high, how)
    return found


def _from(images: Sequence[Judged], numbers: bool) -> dict[str, Scored]:
    """What follows from the predictions for images, of which no metrics are told: the accuracy, or the mean error."""
    import torch

    from mpi4dl.tasks.bootstrap import WHY_NONE, bootstrap

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
