"""benchmarks.report: medians with their ends, tables that line up, and results that say what they were measured on."""

import argparse
import json
import os
import platform
from importlib.metadata import version
from pathlib import Path

import pytest

from benchmarks.report import between, environment, error_bars, publish, pyplot, save_json, spread, table
from tests.benchmarks.checks import assert_picture

ROWS = [("", "ranks", "images/s"), ("plain PyTorch", "1", "0.512"), ("2x2", "4", "12.5")]
TABLE = """\
               ranks  images/s
-------------  -----  --------
plain PyTorch      1     0.512
2x2                4      12.5"""


def test_the_first_column_is_text_and_the_others_are_numbers() -> None:
    assert table(ROWS) == TABLE


def test_results_are_saved_with_their_environment(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "results.json"
    save_json(path, [{"speed": 1.5}])
    saved = json.loads(path.read_text())
    assert saved == {"environment": environment(), "results": [{"speed": 1.5}]}
    assert saved["environment"]["torch"] == version("torch")
    assert saved["environment"]["python"] == platform.python_version()
    assert saved["environment"]["cores"] == len(os.sched_getaffinity(0))


def test_a_median_has_its_ends() -> None:
    row = spread("ratio", [0.5, 2.25, 0.875])
    assert row == {"ratio": 0.875, "ratio_min": 0.5, "ratio_max": 2.25}
    assert between(row, "ratio") == "(0.50-2.25)"
    assert error_bars([row, spread("ratio", [1.0])], "ratio") == [[0.375, 0.0], [1.375, 0.0]]


def test_what_is_published_says_how_it_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "v1.5"
    figure, axis = pyplot().subplots()
    axis.plot([1, 2])
    publish(argparse.Namespace(out=out, rounds=7, worker=None), {"measurements": [1]}, figure)
    assert capsys.readouterr().out == f"saved {out}.json and {out}.png\n"
    assert json.loads(Path(f"{out}.json").read_text())["results"] == {"settings": {"rounds": 7}, "measurements": [1]}
    assert_picture(f"{out}.png")
