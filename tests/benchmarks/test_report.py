"""benchmarks.report: tables that line up, and results that say what they were measured on."""

import json
import os
import platform
from importlib.metadata import version
from pathlib import Path

from benchmarks.report import environment, save_json, table

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
