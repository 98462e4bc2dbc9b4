"""benchmarks.turns: contestants work in turn, one at a time, and use no core while others do."""

import sys
from pathlib import Path

import pytest

from benchmarks import turns
from benchmarks.turns import Contestant, median, ratios, take_turns
from tests.pool.zygote import ROOT, python

ALONE = """
import os, sys
from benchmarks.turns import answer_turns

name, score, log = sys.argv[1:]
turns = []

def work():
    turns.append(name)
    with open(log, "a") as file:
        print(name, len(turns), os.getpid(), file=file)
    return {"score": float(score) * len(turns)}

answer_turns(work)
"""
TOGETHER = """
import sys, time
import torch
from benchmarks.turns import answer_turns
from mpi4dl.comm import world

comm = world()
began, cpu = time.perf_counter(), time.process_time()

def work():
    global began, cpu
    waited, used = time.perf_counter() - began, time.process_time() - cpu
    busiest = comm.all_reduce(torch.tensor(used / waited, dtype=torch.float64), "max")
    total = comm.all_reduce(torch.tensor(comm.rank + 1))
    began, cpu = time.perf_counter(), time.process_time()
    return {"total": int(total), "busiest": float(busiest), "waited": waited}

answer_turns(work, comm)
"""
SLEEPER = """
import time
from benchmarks.turns import answer_turns

answer_turns(lambda: time.sleep(1.0) or {})
"""


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "executable", python())


def fake(name: str, score: float, log: Path) -> Contestant:
    return Contestant(name, 1, ["-c", ALONE, name, str(score), str(log)])


def read(log: Path) -> tuple[list[str], set[int]]:
    """The turns that were taken, in order, and the processes that took them."""
    lines = [line.rsplit(maxsplit=1) for line in log.read_text().splitlines()]
    return [turn for turn, _ in lines], {int(pid) for _, pid in lines}


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_contestants_take_turns_after_a_warm_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.txt"
    contestants = [fake("a", 1.0, log), fake("b", 10.0, log)]
    take_turns(contestants, rounds=2)
    turns, pids = read(log)
    assert turns == ["a 1", "b 1", "a 2", "b 2", "a 3", "b 3"]
    assert len(pids) == 2
    assert not any(map(alive, pids))
    assert [contestant.answers for contestant in contestants] == [
        [{"score": 2.0}, {"score": 3.0}],
        [{"score": 20.0}, {"score": 30.0}],
    ]
    assert capsys.readouterr().err == "round 1 of 2\nround 2 of 2\n"


def test_a_contestant_that_dies_is_named_and_no_other_is_left_running(tmp_path: Path) -> None:
    survivor = fake("survivor", 1.0, log := tmp_path / "log.txt")
    mortal = Contestant("mortal", 1, ["-c", "input(); raise SystemExit(3)"])
    with pytest.raises(SystemExit, match=r"^mortal ended: exit code 3$"):
        take_turns([survivor, mortal], rounds=1)
    (pid,) = read(log)[1]
    assert not alive(pid)


def test_a_contestant_that_hangs_is_named_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "ANSWER_SECONDS", 0.2)
    hanging = Contestant("sleeper", 1, ["-c", "import time; time.sleep(60)"])
    with pytest.raises(SystemExit, match=r"^sleeper hangs: no answer for 0 s$"):
        take_turns([hanging], rounds=1)


def test_ranks_answer_once_together_and_sleep_until_their_turn() -> None:
    ranks = Contestant("ranks", 2, ["-c", TOGETHER])
    take_turns([ranks, Contestant("sleeper", 1, ["-c", SLEEPER])], rounds=1)
    (answer,) = ranks.answers
    assert answer["total"] == 3
    assert answer["waited"] > 0.9
    assert answer["busiest"] < 0.15


def test_ratios_are_taken_round_by_round() -> None:
    ours, theirs = Contestant("ours", 1, []), Contestant("theirs", 1, [])
    ours.answers, theirs.answers = [{"x": 1.0}, {"x": 9.0}, {"x": 4.0}], [{"x": 2.0}, {"x": 3.0}, {"x": 4.0}]
    assert ratios(ours, theirs, "x") == [0.5, 3.0, 1.0]
    assert median([0.5, 3.0, 1.0]) == 1.0
