"""Cross-validation: means and intervals over folds are those of scipy, and what is undefined is left out and shown."""

import csv
import io
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import scipy.stats

from mpi4dl.inference.folds import Summary, summary_lines, summary_table
from mpi4dl.inference.samples import Measured
from mpi4dl.inference.scoring import LevelScores, Scores

VALUES = {"auc": (0.8, 0.9, 0.7, math.nan), "npv": (math.nan, math.nan, 0.5, math.nan), "brier": (0.1, 0.1, 0.1, 0.1)}


def folds_of(values: dict[str, Sequence[float]]) -> dict[int, Scores]:
    found = {}
    for fold in range(4):
        metrics = {name: Measured(of[fold], math.nan, math.nan) for name, of in values.items()}
        kept: Any = {"records": (), "bad": {}, "confusion": None, "count": 3, "what": "slide"}
        of_patients = LevelScores("patient", 2, metrics)
        kept |= {"task": "classify", "classes": ("a", "b"), "metrics": metrics, "patients": of_patients}
        found[fold] = Scores(**kept)
    return found


@pytest.mark.parametrize("level", [0.9, 0.95])
def test_summaries_are_those_of_scipy(level: float) -> None:
    for values in VALUES.values():
        found = Summary.of(values, level)
        known = np.array([value for value in values if not math.isnan(value)])
        assert found.values == tuple(values)
        assert found.mean == pytest.approx(known.mean())
        if len(known) < 2:
            assert all(map(math.isnan, (found.deviation, found.low, found.high)))
            continue
        assert found.deviation == pytest.approx(known.std(ddof=1), abs=1e-15)
        if known.std() > 1e-12:
            interval = scipy.stats.t.interval(level, len(known) - 1, known.mean(), scipy.stats.sem(known))
            assert (found.low, found.high) == pytest.approx(interval)


def test_the_table_of_folds() -> None:
    found = folds_of(VALUES)
    rows = list(csv.DictReader(io.StringIO(summary_table(found, 0.95).decode())))
    assert [(row["level"], row["metric"]) for row in rows] == [
        (level, name) for level in ("slide", "patient") for name in VALUES
    ]
    assert [row["fold 3"] for row in rows[:3]] == ["", "", "0.1"]
    assert float(rows[0]["mean"]) == pytest.approx(0.8)
    told = "\n".join(summary_lines(found, 0.95))
    assert "undefined" in told
    assert "nan" not in told
