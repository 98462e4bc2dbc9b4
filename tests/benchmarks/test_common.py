"""Common parts of benchmarks: turns, tables, conditions, the comparison of results, and wrong options."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import options as declared
from benchmarks.common import results, turns
from benchmarks.common.compare import compare, read
from benchmarks.common.options import Options
from benchmarks.common.report import publish
from benchmarks.common.results import MIB, Column, Conditions, pyplot, share_cores, spread, table
from benchmarks.common.turns import Contestant, beside_plain, take_turns
from tests.benchmarks.checks import answered, assert_picture, options_of
from tests.pool.zygote import ROOT, python

ALONE = """
import os, sys
from benchmarks.common.turns import answer_turns

name, score, log = sys.argv[1:]
turns = []
print("[Gloo] Rank 0 is connected to 0 peer ranks.", flush=True)

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
from benchmarks.common.turns import answer_turns
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
from benchmarks.common.turns import answer_turns

answer_turns(lambda: time.sleep(1.0) or {})
"""


@pytest.fixture
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "executable", python())


def fake(name: str, score: float, log: Path) -> Contestant:
    return Contestant(name, 1, ["-c", ALONE, name, str(score), str(log)])


def turns_in(log: Path) -> tuple[list[str], set[int]]:
    """The turns that were taken, in order, and the processes that took them."""
    lines = [line.rsplit(maxsplit=1) for line in log.read_text().splitlines()]
    return [turn for turn, _ in lines], {int(pid) for _, pid in lines}


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.mark.usefixtures("_in_the_repository")
def test_contestants_take_turns_after_a_warm_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.txt"
    contestants = [fake("a", 1.0, log), fake("b", 10.0, log)]
    take_turns(contestants, rounds=2)
    taken, pids = turns_in(log)
    assert taken == ["a 1", "b 1", "a 2", "b 2", "a 3", "b 3"]
    assert len(pids) == 2
    assert not any(map(alive, pids))
    assert [contestant.of("score") for contestant in contestants] == [[2.0, 3.0], [20.0, 30.0]]
    assert capsys.readouterr().err == "round 1 of 2\nround 2 of 2\n"


@pytest.mark.usefixtures("_in_the_repository")
def test_a_contestant_that_dies_is_named_and_no_other_is_left_running(tmp_path: Path) -> None:
    survivor = fake("survivor", 1.0, log := tmp_path / "log.txt")
    mortal = Contestant("mortal", 1, ["-c", "input(); raise SystemExit(3)"])
    with pytest.raises(SystemExit, match=r"^mortal ended: exit code 3$"):
        take_turns([survivor, mortal], rounds=1)
    (pid,) = turns_in(log)[1]
    assert not alive(pid)


@pytest.mark.usefixtures("_in_the_repository")
def test_a_contestant_that_hangs_is_named_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "ANSWER_SECONDS", 0.2)
    hanging = Contestant("sleeper", 1, ["-c", "import time; time.sleep(60)"])
    with pytest.raises(SystemExit, match=r"^sleeper hangs: no answer for 0 s$"):
        take_turns([hanging], rounds=1)


@pytest.mark.usefixtures("_in_the_repository")
def test_ranks_answer_once_together_and_sleep_until_their_turn() -> None:
    ranks = Contestant("ranks", 2, ["-c", TOGETHER])
    take_turns([ranks, Contestant("sleeper", 1, ["-c", SLEEPER])], rounds=1)
    (answer,) = ranks.answers
    assert answer["total"] == 3
    assert answer["waited"] > 0.9
    assert answer["busiest"] < 0.15


def test_ratios_are_taken_turn_by_turn() -> None:
    ours, theirs = answered("ours", 1, x=[1.0, 9.0, 4.0]), answered("theirs", 1, x=[2.0, 3.0, 4.0])
    assert ours.over(theirs, ratio="x") == {"ratio": 1.0, "ratio_min": 0.5, "ratio_max": 3.0}
    assert ours.spreads("x") == {"x": 4.0, "x_min": 1.0, "x_max": 9.0}


def images(name: str, ranks: int, speeds: list[float], mebibytes: list[int]) -> Contestant:
    return answered(
        name,
        ranks,
        images_per_second=speeds,
        cpu_seconds_per_image=[2 / speed for speed in speeds],
        work_seconds_per_image=[1 / speed for speed in speeds],
        peak_bytes=[size * MIB for size in mebibytes],
    )


def test_speed_and_memory_are_beside_plain_pytorch() -> None:
    contestants = [
        images("plain", 1, [1.0, 2.0, 4.0], [100, 200, 100]),
        images("1x2", 2, [1.0, 1.0, 6.0], [60, 100, 40]),
    ]
    plain, tiled = (beside_plain(contestant, contestants) for contestant in contestants)
    assert (plain["name"], plain["speed_ratio"], plain["memory_ratio"]) == ("plain", 1.0, 1.0)
    assert tiled | {} == tiled | {"ranks": 2, "images_per_second": 1.0, "speed_ratio": 1.0}  # no ratio of medians
    assert (tiled["speed_ratio_min"], tiled["speed_ratio_max"], tiled["cpu_seconds_per_image"]) == (0.5, 1.5, 2)
    assert tiled["memory_ratio"] == 0.5


def test_a_table_has_medians_with_their_ends_and_dashes() -> None:
    rows = [{"name": "plain PyTorch", "seconds": None}, {"name": "2x2", **spread("seconds", [0.5, 2.25, 0.875])}]
    assert table(rows, [Column("", "name"), Column("ms", "seconds", 1, 1e3, ends=True)]).splitlines() == [
        "                  ms       (min-max)",
        "plain PyTorch      -               -",
        "2x2            875.0  (500.0-2250.0)",
    ]


def test_results_say_how_and_on_what_they_were_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "v1.5"
    options = options_of("halo", f"--grids 1x2,2x2 --rounds 3 --out {out}")
    figure, axis = pyplot().subplots()
    axis.plot([1, 2])
    publish(options, "title", "text", figure, [{"x": 1.5}], more=2)
    assert capsys.readouterr().out == f"title\ntext\nsaved {out}.json, {out}.png\n"
    saved = json.loads(Path(f"{out}.json").read_text())
    assert saved["environment"]["torch"] == version("torch")
    assert saved["environment"]["cores"] == len(os.sched_getaffinity(0))
    assert {"commit", "machine", "date", "load", "cores_of_others", "loaded", "threads", "mpi"} == saved[
        "conditions"
    ].keys()
    assert (saved["results"]["benchmark"], saved["results"]["measurements"]) == ("halo", [{"x": 1.5}])
    assert saved["results"]["settings"]["grids"] == "1x2,2x2"
    assert "out" not in saved["results"]["settings"]
    assert_picture(f"{out}.png")


@pytest.mark.parametrize(("busy", "own", "loaded"), [(100.0, 99.0, False), (1e6, 1.0, True)])
def test_a_machine_is_loaded_if_others_use_its_cores(
    busy: float, own: float, loaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "_busy_seconds", lambda: 0.0)
    monkeypatch.setattr(results, "_own_seconds", lambda: 0.0)
    conditions = Conditions()
    conditions._began -= 100.0
    monkeypatch.setattr(results, "_busy_seconds", lambda: busy)
    monkeypatch.setattr(results, "_own_seconds", lambda: own)
    found = conditions.found()
    assert found["cores_of_others"] == pytest.approx((busy - own) / 100, rel=0.1)
    assert found["loaded"] is loaded


def test_cores_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5, 3, 4})
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: kept.append(cores))
    assert [share_cores(wanted) for wanted in (2, 8)] == [2, 3]
    assert kept == [[3, 4], [3, 4, 5]]


def result(path: Path, seconds: list[float], loaded: bool = False, **row: Any) -> Path:
    rows = [{"name": "ring", "ranks": 2, **spread("seconds", seconds), "count": 7, "note": None, "wrong": "x", **row}]
    conditions = {"commit": "abc", "date": "today", "machine": "here", "load": 0.1, "cores_of_others": 1.5}
    content = {
        "environment": {"cpu": "fast", "cores": 2},
        "conditions": {**conditions, "loaded": loaded},
        "results": {"settings": {"rounds": len(seconds)}, "measurements": rows, "wait": {"cpu_seconds": 2.0}},
    }
    path.write_text(json.dumps(content))
    return path


def test_two_results_are_compared_with_their_noise(tmp_path: Path) -> None:
    old = read(result(tmp_path / "old.json", [1.0, 2.0, 3.0]))
    new = read(result(tmp_path / "new.json", [4.0, 5.0, 8.0, 9.0], loaded=True, count=8))
    lines = compare(old, new).splitlines()
    assert "LOADED" not in lines[0]
    assert "LOADED" in lines[1]
    assert "--rounds 3, then 4" in lines[2]
    cells = [line.split() for line in lines[3:]]
    assert cells[1] == "ring, ranks 2 seconds 2 6.5 3.25 1.33-9.00 *".split()
    assert cells[2] == "ring, ranks 2 count 7 8 1.14 no spread".split()
    assert cells[3] == "wait cpu_seconds 2 2 1.00 no spread".split()
    assert len(compare(old, new, only="cpu").splitlines()) == 5


def test_results_without_a_common_number_cannot_be_compared(tmp_path: Path) -> None:
    old, other = result(tmp_path / "old.json", [1.0]), result(tmp_path / "b.json", [1.0], name="gather")
    assert "only in one of both: gather, ranks 2" in compare(read(old), read(other))
    with pytest.raises(ValueError, match="no number in common"):
        compare(read(old), read(other), only="count")
    (tmp_path / "c.json").write_text('{"results": []}')
    with pytest.raises(ValueError, match="no result of a benchmark"):
        read(tmp_path / "c.json")


def test_every_published_result_can_be_read() -> None:
    """Also those of before: their machine's load is unknown."""
    files = [file for file in (ROOT / "docs/results").glob("*.json") if file.stem not in ("torchvision", "failures")]
    assert len(files) > 15
    for file in files:
        found = read(file)
        assert found.rows, file
        assert "load unknown" in found.describe() or "commit" in found.describe()


def test_the_command_lists_runs_and_compares(tmp_path: Path) -> None:
    def command(*words: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "benchmarks", *words], capture_output=True, text=True, timeout=600, cwd=ROOT
        )

    listed = command("list")
    assert [line.split()[0] for line in listed.stdout.splitlines()] == declared.names()
    assert [command(*words).returncode for words in ((), ("run", "nothing"), ("run",), ("nothing",))] == [0, 2, 2, 2]
    old = str(result(tmp_path / "old.json", [1.0]))
    compared = command("compare", old, old)
    assert (compared.returncode, compared.stdout.count("1.00")) == (0, 3)
    assert command("compare", old, str(tmp_path / "none.json")).returncode == 2


def test_no_benchmark_imports_torch_or_mpi_before_it_works() -> None:
    program = (
        "import sys\nfrom benchmarks.common import options\nfor name in options.names():\n    options.load(name)\n"
    )
    program += "print(sorted({'mpi4py', 'torch', 'matplotlib'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert (done.stdout, done.stderr) == ("[]\n", "")


COMMON = {"--rounds", "--steps", "--ranks", "--device", "--threads", "--cores", "--grids"}


def test_common_options_mean_the_same_everywhere() -> None:
    helps: dict[str, set[str]] = {}
    for name in declared.names():
        for option in declared.load(name).OPTIONS:
            if option.flag in COMMON:
                helps.setdefault(option.flag, set()).add(option.help)
    assert {flag: len(found) for flag, found in helps.items()} == dict.fromkeys(COMMON, 1)


@pytest.mark.parametrize(
    ("name", "flags", "option"),
    [
        ("allreduce", "--sizes big", "--sizes"),
        ("allreduce", "--ranks 1", "--ranks"),
        ("allreduce", "--dtypes float32,int8", "--dtypes"),
        ("attention", "--tokens 3", "--tokens"),
        ("curves", "one=.", "NAME=FOLDER"),
        ("generate", "--rates 0", "--rates"),
        ("generate", "--precision fp32,int2", "--precision"),
        ("gigapixel", "--kinds plain;none", "--kinds"),
        ("halo", "--grids 2by2", "--grids"),
        ("halo", "--sizes 8 --grids 1x4 --halo 3", "--halo"),
        ("moe", "--ranks 16", "--ranks"),
        ("operators", "--tile 4", "--tile"),
        ("operators", "--operators nothing", "--operators"),
        ("peers", "--models resnet50", "--models"),
        ("peers", "--methods 1f1b,dualpipe", "--methods"),
        ("peers", "--ranks 3", "--ranks"),
        ("peers", "--batch-size 12", "--batch-size"),
        ("spatial", "--size 96x96x96", "--size"),
        ("spatial", "--grids 1x2,1x1x2", "--grids"),
        ("stages", "--configurations PP,DP", "--configurations"),
        ("stages", "--microbatches 3", "--microbatches"),
        ("stages", "--sleep --configurations SP+PP", "--configurations"),
        ("stages", "--batch-size 2", "batch_size"),
        ("stages", "--schedules 2f2b", "2f2b"),
        ("stages", "--schedules interleaved", "--schedules"),
        ("tensor_parallel", "--ways theirs", "--ways"),
        ("zero", "--features 100", "--features"),
        ("zero", "--variants ZeRO-1,ZeRO-4", "--variants"),
        ("gpu", "", "--cpu"),
        ("gpu", "--cpu --openmpi /no/such", "--openmpi /no/such"),
        ("zero", "--rounds 0", "--rounds"),
    ],
)
def test_options_that_cannot_be_measured_are_refused(
    name: str, flags: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        options_of(name, flags)
    assert stop.value.code == 2
    assert option in capsys.readouterr().err.splitlines()[-1]


def test_quick_and_other_presets_give_way_to_what_is_given() -> None:
    def of(flags: str) -> tuple[Any, ...]:
        options: Options = options_of("stages", flags)
        return options.stages, options.configurations, options.rounds

    assert of("--sleep") == (4, ("LP", "PP", "GEMS+LP", "GEMS+PP"), 7)
    assert of("--quick") == (2, ("SP+GEMS+PP",), 1)
    assert of("--sleep --quick --rounds 3 --stages 2") == (2, ("PP",), 3)
