"""The fuzz targets: some cases of each, what they found before, and that a wrong case is noticed, shrunk and kept."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from tests.pool.ranks import Ranks
from tools.nets.damaged.kinds import kinds
from tools.nets.fuzz import found, operators, running, trainings
from tools.nets.fuzz.running import Hunt
from tools.nets.fuzz.targets import TARGETS, Target, problems

SEED = 100
SOME = {"trainings": 3, "commands": 4, "requests": 8, "texts": 2, "operators": 8, "tables": 80}
SOME |= {"stacks": 12, "stages": 4, "streams": 2, "loops": 8}
LONG = ("trainings", "commands", "requests")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.exhaustive if name in LONG else ()) for name in SOME]
)
def test_some_cases(ranks: Ranks, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "FOLDER", tmp_path)
    hunt = Hunt(ranks, time.monotonic() + 3600)
    hunt.round(TARGETS[name], SEED, SOME[name])
    assert [path.read_text() for path in hunt.scripts] == []
    assert hunt.words[name]["exact"]


@pytest.mark.parametrize("name", [*found.TRAININGS, *found.TEXTS])
def test_a_training_that_went_wrong_once_is_exact(ranks: Ranks, name: str) -> None:
    assert trainings.problem(ranks, {**found.TRAININGS, **found.TEXTS}[name]) is None


@pytest.mark.parametrize("words", found.REFUSED)
def test_a_training_that_crashed_once_is_refused(ranks: Ranks, words: str) -> None:
    said = trainings.problem(ranks, found.REFUSED[words])
    assert said is not None
    assert said.startswith("refused: Refusal")
    assert words in said


@pytest.mark.parametrize("name", found.OPERATORS)
def test_statements_that_went_wrong_once_are_exact(ranks: Ranks, name: str) -> None:
    assert operators.problem(ranks, found.OPERATORS[name]) is None


def test_a_damaged_file_of_any_kind_is_read_or_refused_by_one_line(tmp_path: Path) -> None:
    """As training and prediction read it: no other error, crash, hang or memory."""
    assert problems(tmp_path, 0, 1, [*kinds()]) == []


def large(ranks: Ranks, case: Any) -> str | None:
    """A problem of numbers above 10."""
    if case == 7:
        return "refused: it is 7"
    return f"{case} is large" if case > 10 else None


def test_a_case_that_goes_wrong_is_shrunk_and_kept(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "FOLDER", tmp_path)
    monkeypatch.setattr(running, "ROOT", tmp_path)
    hunt = Hunt(ranks, time.monotonic() + 3600)
    hunt.round(Target("numbers", __name__, lambda: st.integers(0, 1000), large), 3, 50)
    assert hunt.words["numbers"]["wrong"] == 1
    (script,) = hunt.scripts
    assert "try_alone(large, 11)" in script.read_text().replace("problem", "large")
    assert "11 is large" in script.read_text()
    assert "--targets numbers --seed 3 --cases 50\n" in script.read_text()


@pytest.mark.exhaustive
def test_a_kept_case_is_a_script(tmp_path: Path) -> None:
    text = running.SCRIPT.format(said="", repeat="", module="tools.nets.fuzz.targets", case=("TOML", 0))
    folder = Path(__file__).parent.parent.parent
    script = tmp_path / "case.py"
    script.write_text(text.replace("Path(__file__).resolve().parent.parent", repr(str(folder))))
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "nothing is wrong\n"), ended.stderr
