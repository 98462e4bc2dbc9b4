"""The mutation net itself: what is changed, and that a mutant comes and goes in a running process."""

import argparse
import gc
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tools.nets.mutation import __main__ as command
from tools.nets.mutation.judge import KILLED, SURVIVED, Verdict
from tools.nets.mutation.mutants import Mutant, code_of, mutants_of
from tools.nets.mutation.swap import put_in, take_out

SOURCE = '''
from functools import lru_cache

LIMIT = 3


@lru_cache(maxsize=8)
def area(height: int, width: int = 2) -> int:
    """Of a box."""
    if height < 0:
        raise ValueError(f"{height + 1} is no height")
    return height * width


class Box:
    def __init__(self, size: int) -> None:
        self.size = -size

    def parts(self, count: int) -> list[int]:
        def part(i: int) -> int:
            return self.size // count if i and not i == 1 else min(i, count)

        found = [part(i) for i in range(count)]
        found.sort()
        return found
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    (tmp_path / "boxes_to_change.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("boxes_to_change")
    del sys.modules["boxes_to_change"]


def test_each_change_is_found_once(module: ModuleType) -> None:
    found = [(mutant.function, mutant.kind, mutant.was, mutant.now) for mutant in mutants_of(module.__name__)]
    assert found == [
        ("area", "number", "0", "1"),
        ("area", "comparison", "height < 0", "height <= 0"),
        ("area", "operator", "height * width", "height + width"),
        ("Box.__init__", "sign", "-size", "size"),
        ("Box.parts", "number", "1", "2"),
        ("Box.parts", "comparison", "i == 1", "i != 1"),
        ("Box.parts", "condition", "not i == 1", "i == 1"),
        ("Box.parts", "condition", "i and (not i == 1)", "i or not i == 1"),
        ("Box.parts", "operator", "self.size // count", "self.size * count"),
        ("Box.parts", "function", "min(i, count)", "max(i, count)"),
        ("Box.parts", "statement", "found.sort()", "pass"),
    ]


def test_every_mutant_is_code_of_its_function(module: ModuleType) -> None:
    for mutant in mutants_of(module.__name__):
        changed, original = code_of(mutant), code_of(mutant, original=True)
        assert changed.co_qualname == mutant.function
        assert changed != original


def test_a_mutant_comes_and_goes(module: ModuleType) -> None:
    """And with it what functions remember; also where all is frozen, as it is once tests are collected."""
    box = module.Box(6)
    gc.freeze()
    for mutant in mutants_of(module.__name__):
        if mutant.kind == "operator":
            assert (module.area(4, 2), box.parts(3)) == (8, [-2, 0, 1])
            assert put_in(None, mutant) == 1
            found = module.area(4, 2), box.parts(3)
            assert found == ((6, [-2, 0, 1]) if mutant.function == "area" else (8, [-18, 0, 1]))
            assert take_out(None, mutant) == 1
    assert (module.area(4, 2), box.parts(3)) == (8, [-2, 0, 1])


def test_those_that_survived_are_shown_to_further_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutants = [Mutant("mpi4dl.geometry.boxes", n, "Box.empty", 1, "sign", "-1", "1") for n in range(3)]
    before = [
        Verdict(mutants[0], KILLED, 1.0, ("a",)),
        Verdict(mutants[1], SURVIVED, 1.0, ("a",)),
        Verdict(mutants[2], SURVIVED, 3.0, ("a", "b")),
    ]
    seen = {"test": "a", "seconds": 1.0, "seen": ["mpi4dl/geometry/boxes.py:Box.empty"]}
    (tmp_path / "seen").mkdir()
    lines = [json.dumps({**seen, "test": test}) for test in ("a", "b")]
    (tmp_path / "seen" / "main.jsonl").write_text("\n".join(lines))
    (tmp_path / "verdicts.json").write_text(json.dumps([each._asdict() for each in before]))
    shown: list[Any] = []
    monkeypatch.setattr(command, "FOLDER", tmp_path)
    monkeypatch.setattr(command, "VERDICTS", tmp_path / "verdicts.json")
    monkeypatch.setattr(command, "judge_all", lambda told, arguments, judged: shown.append((told, judged)))
    command.again(argparse.Namespace(seconds=60.0))
    assert shown == [([(mutants[1], ("b",))], [before[0], before[2]])]
