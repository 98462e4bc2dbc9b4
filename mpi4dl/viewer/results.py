"""The results of slides that a folder has: their predictions, labels, maps and annotations, and where the slides are.

predictions.jsonl and .json         as `mpi4dl predict` writes them, with maps/NAME.geojson or masks/NAME.geojson
evaluation*.csv, evaluation*.json  as `mpi4dl evaluate` writes them: predictions beside labels

A folder may have both; then they are shown together, if they are of images of one folder. Of a run's folder the newest
results are taken. Contents of these files are data from elsewhere: names and paths in them lead nowhere but below the
folders that they are about.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mpi4dl._files import leads_to
from mpi4dl._numbers import number_in
from mpi4dl._signatures import is_signed
from mpi4dl.datasets import kinds
from mpi4dl.datasets.base import DatasetError, printable
from mpi4dl.datasets.files import WHOLE_SLIDES
from mpi4dl.datasets.samples import Sample, SampleTable, read_samples, without_suffix
from mpi4dl.datasets.slides.annotations import POLYGONS
from mpi4dl.results.evaluations import SavedEvaluation
from mpi4dl.results.formats import Record, below, is_below, nested, read_object, reading
from mpi4dl.results.names import IMAGES, PREDICTIONS
from mpi4dl.results.runs import FolderResults, predictions_in
from mpi4dl.results.slides import KEY

NO_COLUMNS: Mapping[str, str] = MappingProxyType({})
GEOJSON, CLASS_MAP = ".geojson", ".ome.tif"
LEAST_PROBABILITY = 1e-12
LONGEST_PLACE = 200  # characters of a remark


@dataclass(frozen=True)
class ViewedSlide:
    """A slide and what is known of it.

    Attributes:
        name: as predictions name it.
        path: its file; None if nobody says where it is, or `error` says why not.
        label, prediction: as text; empty where there is none.
        probability: that of the prediction.
        loss: how far the prediction is from the label: cross-entropy for classes, the absolute error for numbers,
            1 - Dice for masks.
        wrong: whether the prediction is another class than the label; None for other tasks, and without a label.
        error: why the slide could not be predicted or found.
        map: the GeoJSON file of its map.
        annotation: the file of its annotation, with polygons.
        classes: the GeoJSON file of its predicted regions of classes.
        in_bounds: whether coordinates of annotations and classes begin where the scanner began.
        mpp: microns per pixel of level 0 of a slide that does not say them.
        made: the picture that a model made of it.
        is_picture: whether it is a picture of any depth, of which a model made another, and no slide.
    """

    name: str
    path: Path | None
    patient: str = ""
    label: str = ""
    prediction: str = ""
    probability: float | None = None
    loss: float | None = None
    wrong: bool | None = None
    error: str = ""
    map: Path | None = None
    annotation: Path | None = None
    classes: Path | None = None
    in_bounds: bool = False
    mpp: float | None = None
    made: Path | None = None
    is_picture: bool = False


@dataclass(frozen=True)
class SlideResults:
    """The slides of a folder, in the order of their names, and sentences for the reader."""

    title: str
    slides: tuple[ViewedSlide, ...]
    remarks: tuple[str, ...] = ()


def read_results(
    folder: Path,
    slides: Path | None = None,
    slides_folder: Path | None = None,
    mpp: float | None = None,
    columns: Mapping[str, str] = NO_COLUMNS,
    label_columns: Sequence[str] | None = None,
) -> SlideResults:
    """The results in a folder.

    Args:
        folder: as `mpi4dl predict` or `mpi4dl evaluate` wrote it, or that of a run.
        slides: the table or folder of slides, if not the one recorded.
        slides_folder: where the slides of the table are, if not where they were.
        mpp: microns per pixel of slides that do not say them.
        columns, label_columns: those of the table, as of `read_samples`, if they have other names than usual ones.

    Raises:
        ValueError: the folder has no results. OSError: it cannot be read.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: {'is no folder' if folder.exists() else 'no such folder'}: {_EXPECTED}")
    remarks: list[str] = []
    found = FolderResults(folder)
    predicted = _newest(found.predicted(), "predictions", remarks)
    evaluated = _newest([each.path for each in found.evaluated() if each.path.parent == folder], "evaluations", remarks)
    if predicted is None and evaluated is None:
        raise ValueError(f"{folder}: has no predictions.jsonl and no evaluation.json: {_EXPECTED}")
    roots = {str(_recorded(*each).get("root")) for each in ((predicted, None), (None, evaluated)) if any(each)}
    if predicted is not None and evaluated is not None and len(roots - {"None"}) > 1:
        predictions = predicted / f"{PREDICTIONS.name}.jsonl"
        newer = max(predictions, evaluated, key=lambda path: path.stat().st_mtime_ns)
        remarks.append(f"predictions and evaluations are of other images: the newer is shown, {newer.name}")
        predicted, evaluated = (predicted, None) if newer == predictions else (None, evaluated)
    records: dict[str, Record] = {}
    if evaluated is not None:
        records |= {row["image"]: nested(row) for row in SavedEvaluation(evaluated).records}
    for record in [] if predicted is None else predictions_in(predicted):
        records[record["image"]] = records.get(record["image"], {}) | record
    if slides is not None and not slides.exists():
        raise ValueError(f"--slides {slides}: no such file or folder")
    told = _recorded(predicted, evaluated)
    with reading(evaluated or folder if predicted is None else predicted / _PLACES):
        place = _Place(told, slides, slides_folder, folder, (columns, label_columns), remarks)
        records = {place.name_of(name): record for name, record in records.items()}
    with reading(evaluated or folder if predicted is None else predicted / f"{PREDICTIONS.name}.jsonl"):
        viewed = tuple(
            _viewed(name, record, place, predicted, mpp)
            for name, record in sorted((place.records() | records).items(), key=lambda item: item[0])
        )
    return SlideResults(str(folder.resolve().name), viewed, tuple(remarks))


_PLACES = f"{PREDICTIONS.name}.json"
_EXPECTED = "name a folder that mpi4dl predict --slides or mpi4dl evaluate --slides wrote, or that of a run"


def _recorded(predicted: Path | None, evaluated: Path | None) -> Record:
    """What predictions or an evaluation say of their slides; empty if nothing does. Raises OSError, DamagedResult."""
    places = None if predicted is None else predicted / _PLACES
    slides: Record = {} if places is None or not places.exists() else read_object(places).get(KEY) or {}
    if slides or evaluated is None:
        return slides
    about = SavedEvaluation(evaluated).told
    return about.get(KEY) or {"root": about.get("root")}


def _newest(found: Sequence[Path], what: str, remarks: list[str]) -> Path | None:
    order = sorted(found, key=lambda path: (path.stat().st_mtime_ns, path.name))
    if len(order) > 1:
        remarks.append(f"of {len(order)} {what} the newest is shown: {order[-1].name}")
    return order[-1] if order else None


class _Place:
    """Where slides are, and their patients, labels and annotations: by what was recorded, and by the table itself."""

    def __init__(
        self,
        told: Mapping[str, Any],
        slides: Path | None,
        slides_folder: Path | None,
        folder: Path,
        named: tuple[Mapping[str, str], Sequence[str] | None],
        remarks: list[str],
    ) -> None:
        self._listed = slides is not None  # by the user, who wants to see all of them
        named_by_user = [each if each.is_dir() else each.parent for each in (slides, slides_folder) if each is not None]
        self._named = bool(named_by_user)
        own = is_signed({name: value for name, value in told.items() if name != "signature"}, told.get("signature"))
        self._homes = [Path("/")] if own else [Path(), folder.resolve().parent, *named_by_user]
        source = slides or self._recorded_place(told.get("source"), remarks)
        columns = told.get("columns")
        self._recorded: dict[str, Record] = told.get("slides", {})
        self.of_slides = bool(self._recorded)
        files = [each["file"] for each in self._recorded.values() if "file" in each]
        only_features = slides is None and bool(files) and source is not None and source.is_dir()
        of_slides = not files or any(files)  # otherwise what was recorded is the folder of features
        root = self._recorded_place(told.get("root"), remarks) if slides is None and of_slides else None
        if source is not None and (of_slides or not only_features):
            root = root or (source if source.is_dir() else source.parent)
        self.root = slides_folder or root
        self._table: SampleTable | None = None
        self._rows: dict[str, Sample] = {}
        self._by_stem: dict[str, str] = {}
        self._beside = None if source is None else source.parent
        self.in_bounds = told.get("in_bounds") is True
        if source is not None and source.exists() and not only_features:
            kept = columns if slides is None and columns else {}
            kept = {role: kept[role] for role in ("slide", "patient") if role in kept}
            self._read(source, {**kept, **named[0]}, named[1], remarks)
        if self.root is None:
            remarks.append("nothing says where the slides are: name their table or folder by --slides")
        elif not self.root.is_dir():
            remarks.append(f"the folder of slides {self.root} is gone: name it by --slides-folder")

    def _recorded_place(self, text: str | None, remarks: list[str]) -> Path | None:
        """A place that was recorded; None, with a remark, if it is not there, or where nobody has said to look."""
        if not text:
            return None
        if leads_to(Path(text), self._homes):
            return Path(text).expanduser()
        remark = (
            f"{printable(text)[:LONGEST_PLACE]}, where the slides were, is gone, or lies outside of this folder: name "
            "the table or folder of the slides by --slides"
        )
        if remark not in remarks:
            remarks.append(remark)
        return None

    def file(self, name: str) -> Path | None:
        """The file of a slide; None if nobody says where it is. Links are followed in folders that the user named."""
        if self.root is None or not is_below(name):
            return None
        path = self.root / name
        return path if self._named or leads_to(path, self._homes) or not os.path.lexists(path) else None

    def _read(self, source: Path, columns: Mapping[str, str], labels: Sequence[str] | None, remarks: list[str]) -> None:
        folder = None if source.is_dir() else self.root
        columns, labels = ({}, None) if source.is_dir() else (columns, labels)
        try:
            self._table = read_samples(source, kinds.SLIDES, folder=folder, columns=columns, label_columns=labels)
        except (DatasetError, OSError) as error:
            try:
                self._table = read_samples(source, kinds.SLIDES, folder=folder, columns=columns, label_columns=())
            except (DatasetError, OSError):
                remarks.append(f"labels and annotations of the table are not shown: {printable(str(error))}")
                return
            remarks.append(f"labels of the table are not shown: {printable(str(error))}")
        self._rows = {row.path: row for row in self._table.rows}
        self._by_stem = {without_suffix(row.path, WHOLE_SLIDES): row.path for row in self._table.rows}

    def name_of(self, name: str) -> str:
        """The slide that a record is of, from the folder of slides on; records of features name files of features."""
        if not name.lower().endswith(kinds.FEATURES.suffixes):
            return name
        recorded = self._recorded.get(name, {})
        stem = without_suffix(name, kinds.FEATURES.suffixes)
        found = self._by_stem.get(stem) or str(recorded.get("file") or name)
        self._recorded.setdefault(found, recorded)
        return found

    def records(self) -> dict[str, Record]:
        """Slides without predictions: those of a table or folder that the user named."""
        return {name: {} for name in self._rows} if self._listed else {}

    def row(self, name: str) -> tuple[str, str | None, float | None]:
        """The patient, the annotation and the microns per pixel of a slide."""
        row = self._rows.get(name)
        if row is not None:
            return row.patient, row.annotation, row.mpp
        recorded = self._recorded.get(name, {})
        return _text(recorded.get("patient")), recorded.get("annotation"), None

    def assumed_mpp(self, name: str) -> float | None:
        mpp = number_in(self._recorded.get(name, {}).get("mpp"))
        return mpp if mpp is not None and mpp > 0 else None

    def label(self, name: str) -> Any:
        """The label of a slide in the table as predictions have it; None without one."""
        row, table = self._rows.get(name), self._table
        if row is None or table is None or row.label is None:
            return None
        if isinstance(row.label, int) and table.task == "classify":
            return table.classes[row.label]
        values = row.label if isinstance(row.label, Sequence) else (row.label,)
        if table.task == "survival":
            return dict(zip(("time", "event"), values, strict=False))
        return values[0] if len(values) == 1 else dict(zip(table.classes, values, strict=False))

    def annotation(self, name: str) -> Path | None:
        text = (self.row(name)[1] or "").replace("\\", "/")
        own = self._listed and name in self._rows  # in a table that the user named
        homes = [Path("/")] if own else self._homes
        for folder in (self._beside, self.root):
            if text.lower().endswith(POLYGONS) and folder is not None and leads_to(folder / text, homes):
                return folder / text
        return None


def _viewed(name: str, record: Record, place: _Place, predicted: Path | None, mpp: float | None) -> ViewedSlide:
    patient, _, table_mpp = place.row(name)
    label = record.get("label", record.get("labels"))
    label = place.label(name) if label is None else label
    prediction = record.get(
        "prediction", record.get("predictions", record.get("risk", _shares(record.get("pixels", {}))))
    )
    numbers: dict[str, float] = record.get("probabilities", {})
    alike, made = record.get("dice"), None
    if prediction is None and alike is not None:
        prediction = f"Dice {alike:.3f}"
    if predicted is not None and not numbers and _text(prediction).startswith(f"{IMAGES}/"):
        made, prediction = below(predicted, str(prediction)), None
    heat = classes = None
    if predicted is not None:
        heat = next((below(predicted, each) for each in record.get("maps", ()) if each.endswith(GEOJSON)), None)
        mask = str(record.get("mask"))
        beside = below(predicted, f"{mask.removesuffix(CLASS_MAP)}{GEOJSON}") if mask.endswith(CLASS_MAP) else None
        classes = beside if beside is not None and beside.is_file() else None
    error, path = _text(record.get("error")), place.file(name)
    if not is_below(name):
        error = "its name leads out of the folder of slides, and is not followed"
    return ViewedSlide(
        name,
        path,
        patient,
        _text(label),
        _text(prediction),
        number_in(numbers.get(prediction)) if isinstance(prediction, str) else None,
        number_in(_loss(label, prediction, numbers) if alike is None else 1 - alike),
        _text(label) != _text(prediction) if isinstance(prediction, str) and numbers and label is not None else None,
        error,
        heat,
        place.annotation(name),
        classes,
        place.in_bounds,
        table_mpp or mpp or place.assumed_mpp(name),
        made,
        made is not None and not place.of_slides,
    )


def _loss(label: Any, prediction: Any, probabilities: Mapping[str, float]) -> float | None:
    """How far a prediction is from a label; the mean over several."""
    if isinstance(prediction, str) and probabilities:
        own = probabilities.get(_text(label))
        return None if own is None else -math.log(max(own, LEAST_PROBABILITY))
    if isinstance(label, dict) and isinstance(prediction, dict):
        if probabilities:
            pairs = [(label[name], probabilities[name]) for name in label if name in probabilities]
            losses = [-math.log(max(share if there else 1 - share, LEAST_PROBABILITY)) for there, share in pairs]
        else:
            losses = [abs(label[name] - prediction[name]) for name in label if name in prediction]
        return sum(losses) / len(losses) if losses else None
    a, b = (None if isinstance(each, dict) else number_in(each) for each in (label, prediction))
    return None if a is None or b is None else abs(a - b)


def _shares(pixels: Mapping[str, float]) -> dict[str, str] | None:
    """The share of each class in a class map."""
    total = sum(pixels.values())
    return {name: f"{100 * count / total:.2g} %" for name, count in pixels.items()} if total > 0 else None


def _text(value: Any) -> str:
    """A label or prediction for the reader: names of several that are there, and numbers with four digits."""
    if value is None:
        return ""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(each)}" for name, each in value.items())
    if isinstance(value, str):
        return printable(value)
    return f"{value:.4g}" if isinstance(value, int | float) else ""
