"""`mpi4dl.results.open`: rows that pandas takes, of what jobs wrote."""

import json
import math
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

import mpi4dl.results
from mpi4dl.results.evaluations import SavedEvaluation, file_of_evaluation, write_evaluation
from mpi4dl.results.formats import as_line, flat, nested, read_lines, read_table, table
from tests.inference.cases import CLASSES, train_nothing, write_images


def test_results_of_a_run_are_rows(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train_nothing(run)
    write_images(tmp_path / "new", 3)
    model = mpi4dl.TrainedModel(run)
    records = list(model.predict(tmp_path / "new", run / "predictions-new"))
    for label, path in zip(CLASSES, sorted((tmp_path / "new").rglob("*.png")), strict=True):
        (tmp_path / "test" / label.replace("/", "")).mkdir(parents=True)
        (tmp_path / "test" / label.replace("/", "") / path.name).write_bytes(path.read_bytes())
    scores = model.evaluate(tmp_path / "test", run, resamples=20)
    reports = [{"phase": "train", "step": 1, "loss": math.inf}, {"phase": "validation", "step": 2, "accuracy": 0.5}]
    (run / "metrics.jsonl").write_bytes(b"".join(map(as_line, reports)) + b'{"phase"')
    found = mpi4dl.results.open(run)
    assert found.metrics == reports
    assert [row["prediction"] for row in found.predictions] == [each["prediction"] for each in records]
    assert found.predictions[0][f"probability {CLASSES[0]}"] == records[0]["probabilities"][CLASSES[0]]
    assert {row["folder"] for row in found.predictions} == {"predictions-new"}
    rows = {(row["by"], row["metric"]): row["value"] for row in found.evaluations}
    assert rows["image", "accuracy"] == scores.metrics["accuracy"].value
    (evaluation,) = found.evaluated()
    assert [row["label"] for row in evaluation.records] == [each["label"] for each in scores.records]
    assert found.config["model"]["model"] == "small_resnet"
    assert found.model["classes"] == list(CLASSES)
    assert found.snapshot == {}
    for each in (found.metrics, found.predictions, found.evaluations):
        json.dumps(each)


def test_reading_needs_neither_torch_nor_mpi(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"phase": "train", "step": 1}\n')
    read = f"import sys, mpi4dl.results as r; r.open({str(tmp_path)!r}).metrics"
    code = read + "; print({'torch', 'mpi4py'} & {*sys.modules})"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == "set()\n"


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such folder"):
        mpi4dl.results.open(tmp_path / "none")
    assert mpi4dl.results.open(tmp_path).metrics == []


@pytest.mark.parametrize(
    ("record", "texts"),
    [
        ({"image": "1", "prediction": "2", "probabilities": {"2": 0.5, "=b c": 0.5}}, ("image", "prediction")),
        ({"image": "a\udcff", "labels": {"x y": 1.0}, "predictions": {"x y": 0.0}}, ("image",)),
        ({"image": "-a", "pixels": {"a": 3.0}, "masks": {"a": "masks/a"}}, ("image", "mask")),
    ],
)
def test_a_table_gives_back_its_records(tmp_path: Path, record: dict[str, Any], texts: tuple[str, ...]) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(table([*flat(record)], [record]))
    assert [nested(row) for row in read_table(path, texts)] == [record]


def test_a_half_written_line_is_none(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(as_line({"a": 1}) + as_line({"b": 2})[:-1])
    assert read_lines(path) == [{"a": 1}]


def test_an_evaluation_leaves_none_of_another(tmp_path: Path) -> None:
    now, told = datetime(2026, 1, 31), {"task": "classify", "what": "image", "metrics": {}}
    first = file_of_evaluation(tmp_path, None, now)
    write_evaluation(first, told, {"evaluation.csv": b"image\n", "curves.csv": b"", "patients.csv": b""})
    second = file_of_evaluation(tmp_path, None, now)
    assert second == tmp_path / "evaluation-20260131-000000-2.json"
    assert file_of_evaluation(tmp_path, None, now) != second  # which nobody has written yet
    for path in tmp_path.glob(".*.new"):
        path.unlink()
    write_evaluation(first, told, {"evaluation.csv": b"image\na\n"})
    assert sorted(path.name for path in tmp_path.iterdir()) == [first.with_suffix(".csv").name, first.name]
    assert SavedEvaluation(first).records == [{"image": "a"}]
