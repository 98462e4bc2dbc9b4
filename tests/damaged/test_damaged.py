"""A file from outside, however it is damaged, is read, or refused by one line: no other error, crash, hang or memory.

Each is read as training and prediction read it, in a process of limited memory and CPU seconds.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.damaged.kinds import kinds

SOME, MANY, AT_ONCE = 2, 1000, 100


def problems(folder: Path, first: int, count: int, names: list[str]) -> list[str]:
    """What went wrong with so many files of each kind, from a number on."""
    command = [sys.executable, "-m", "tests.damaged.worker", str(folder), str(first), str(count), *names]
    ended = subprocess.run(command, capture_output=True, text=True)
    lines = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    found = [f"{line['kind']} {line['which']}: {line['problem']}" for line in lines if "problem" in line]
    if ended.returncode:
        last = f"{lines[-1]['kind']} {lines[-1]['which']}" if lines else "nothing"
        found.append(f"{last}: the process ended with code {ended.returncode}: {ended.stderr[-1500:]}")
    assert lines
    return found


def test_some_of_each_kind(tmp_path: Path) -> None:
    assert problems(tmp_path, 0, SOME, [*kinds()]) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", range(0, MANY, AT_ONCE))
@pytest.mark.parametrize("kind", kinds())
def test_many_of_each_kind(tmp_path: Path, kind: str, first: int) -> None:
    assert problems(tmp_path, first, AT_ONCE, [kind]) == []
