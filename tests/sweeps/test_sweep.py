"""mpi4dl.sweep: all legal plans and no other, jobs that fail, going on, tables, and a tiny sweep as it is."""

import csv
import json
import os
import time
from collections.abc import Callable
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import pytest

from mpi4dl import sweep
from mpi4dl.options.build import build_plan
from mpi4dl.options.config import parse as parse_training
from mpi4dl.parallel.plan import Plan
from mpi4dl.sweeps.job import Outcome, reason, run_job
from mpi4dl.sweeps.results import Results, Tried, accuracy, as_csv, as_table, front, in_order, plot
from mpi4dl.sweeps.space import Space, legal, parse, training_of
from tests.benchmarks.checks import assert_picture
from tests.pool.zygote import ROOT

SMALL = ["--model", "small_resnet", "--image-size", "32", "--batch-size", "4"]
TWO = [*SMALL, "--ranks", "2", "--grids", "1x1,1x2", "--stages", "1,2", "--data", "1", "--microbatches", "2"]
SPACE = Space(
    ranks=(1, 4),
    grids=((1, 1), (1, 2), (1, 3), (2, 2)),
    stages=(1, 2, 3),
    schedules=("1f1b", "gpipe", "interleaved", "zero-bubble"),
    bidirectional=(0, 1),
    data=(1, 2),
    zero=(0, 2),
    microbatches=(1, 2, 3),
    chunks=(1, 2),
)


def answer(speed: float, mebibytes: float = 64.0) -> dict[str, Any]:
    return {
        "images": 8,
        "seconds": 8 / speed,
        "cpu_seconds": 4.0,
        "work_seconds": 2.0,
        "idle_seconds": 8 / speed,
        "peak_bytes": int(mebibytes * 2**20),
        "activation_bytes_of_ranks": [2**20, 2**21],
        "threads_of_a_rank": 1,
    }


def tried(plan: Plan, *speeds: float, mebibytes: float = 64.0, predicted: Any = None) -> Tried:
    found = Tried.by(plan, None)
    found.turns, found.predicted = [answer(speed, mebibytes) for speed in speeds], predicted
    return found


def brute_force() -> set[Any]:
    """The trainings of all combinations of the space that a plan accepts, with any grids that do not grow."""
    found = set()
    for stages, chunks in product(SPACE.stages, SPACE.chunks):
        for tiles in product(SPACE.grids, repeat=stages // chunks if stages % chunks == 0 else 0):
            sizes = [prod(grid) for grid in tiles]
            if not tiles or sizes != sorted(sizes, reverse=True) or len(set(tiles)) > min(2, len(set(sizes))):
                continue
            rest = product(
                SPACE.data, SPACE.microbatches, SPACE.schedules, SPACE.bidirectional, SPACE.zero, SPACE.ranks
            )
            for data, microbatches, schedule, bidirectional, zero, ranks in rest:
                try:
                    plan = Plan(tiles, (), data, microbatches, schedule, bidirectional, chunks, zero)
                    if plan.problem(ranks, (32, 32), 4) is None:
                        found.add(training_of(plan))
                except ValueError:
                    continue
    return found


def test_all_legal_plans_are_run_once_each() -> None:
    plans = legal(SPACE, (32, 32), 4)
    done = [training_of(plan) for plan in plans]
    assert len(done) == len(set(done))
    assert set(done) == brute_force()
    assert {plan.num_ranks for plan in plans} == {1, 4}
    assert Plan(((1, 3), (1, 1)), microbatches=2, schedule="zero-bubble", zero=2) in plans
    assert Plan(((2, 2),), zero=2) in plans
    assert Plan(zero=2) not in plans  # no two ranks share weights: the same training as without
    assert Plan(((1, 2), (1, 2)), schedule="gpipe") not in plans  # a single microbatch: the same table as of 1f1b


def test_each_plan_is_trained_by_flags_that_make_it_whatever_a_file_says(tmp_path: Path) -> None:
    (tmp_path / "other.toml").write_text('[parallel]\ndata = 2\ntiles = "2x2"\nbatch_ways = 2\n')
    for plan in legal(SPACE, (32, 32), 4):
        flags = Tried.by(plan, None).flags
        assert build_plan(parse_training(["--config", str(tmp_path / "other.toml"), *flags])) == plan


JOBS = {
    "said = 1; print('noise'); print('{\"x\": 1}')": Outcome({"x": 1}, None),
    "raise KeyError('x y')": Outcome(None, "KeyError: 'x y'"),
    "import sys; print('mpi4dl: too  large', file=sys.stderr); sys.exit(2)": Outcome(None, "too large"),
    "import os; os._exit(7)": Outcome(None, "exit code 7"),
    "print('no answer')": Outcome(None, "it ended without an answer"),
}


@pytest.mark.parametrize("program", JOBS)
def test_a_job_leaves_its_answer_or_one_line_that_says_why_not(program: str) -> None:
    assert run_job(1, ["-c", program], 60.0) == JOBS[program]


@pytest.mark.exhaustive
def test_a_job_that_takes_too_long_is_ended_with_all_of_its_ranks(tmp_path: Path) -> None:
    program = "import os, sys, time; open(f'{sys.argv[1]}/{os.getpid()}', 'w').close(); time.sleep(600)"
    found = run_job(2, ["-c", program, str(tmp_path)], 3.0)
    assert found == Outcome(None, "it took longer than the limit of 3 s")
    pids = [int(file.name) for file in tmp_path.iterdir()]
    deadline = time.monotonic() + 30.0
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [pid for pid in pids if alive(pid)] == []


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_process_that_was_killed_may_have_been_out_of_memory() -> None:
    assert reason(137, "some noise") == "exit code 137: out of memory?"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[str]]:
    """Runs sweeps whose jobs answer at once, or not; returns the plans whose jobs were started."""
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)
    monkeypatch.setattr("mpi4dl.estimate.workload.Workload.estimator", lambda *_: None)
    monkeypatch.setattr("mpi4dl.estimate.search.estimates", lambda estimator, plans: [None] * len(plans))
    monkeypatch.setattr(sweep, "plot", lambda *_: None)
    monkeypatch.setattr(sweep, "save_figure", lambda *_: None)

    def start(*flags: str, job: Callable[[list[str]], Outcome] = lambda words: Outcome(answer(8.0), None)) -> list[str]:
        plans: list[str] = []

        def run(ranks: int, arguments: list[str], seconds: float) -> Outcome:
            plans.append(build_plan(parse_training(arguments[arguments.index("--") + 1 :])).describe())
            return job(arguments)

        monkeypatch.setattr(sweep, "run_job", run)
        sweep.main([*TWO, "--turns", "2", "--out", str(tmp_path / "s"), *flags])
        return plans

    return start


TILES, STAGES = (
    "tiles(1x2) x data(1), microbatches(2), 1f1b",
    "stages(2: 1x1 + 1x1 tiles) x data(1), microbatches(2), 1f1b",
)


def test_a_sweep_goes_on_where_it_was_broken_off(
    started: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = iter([Outcome(answer(8.0), None), Outcome(None, "too large"), KeyboardInterrupt])

    def broken_off(words: list[str]) -> Outcome:
        outcome = next(jobs)
        if outcome is KeyboardInterrupt:
            raise KeyboardInterrupt
        return outcome

    with pytest.raises(SystemExit) as left:
        started(job=broken_off)
    assert left.value.code == 130
    assert "too large" in capsys.readouterr().out
    assert started() == [TILES]  # its second turn; what failed is not tried again
    assert started() == []
    assert started("--retry") == [STAGES] * 2
    assert started("--turns", "3") == [TILES, STAGES]
    assert started("--schedules", "1f1b,gpipe") == [TILES.replace("1f1b", "gpipe"), STAGES.replace("1f1b", "gpipe")] * 2
    assert "about 0 s left" in capsys.readouterr().err
    assert len(json.loads((tmp_path / "s.json").read_text())["results"]["plans"]) == 4


def test_what_was_measured_otherwise_is_not_added_to(
    started: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started()
    for flags, named in ((["--batch-size", "8"], "--batch-size 4, and this is 8"), (["--steps", "9"], "--steps 3")):
        with pytest.raises(SystemExit) as left:
            started(*flags)
        assert left.value.code == 2
        assert f"s.json was measured with {named}" in capsys.readouterr().err
    there = json.loads((tmp_path / "s.json").read_text())
    del there["results"]["settings"]["--clip-norm"]  # as if this option were new
    (tmp_path / "s.json").write_text(json.dumps(there))
    assert started() == []
    (tmp_path / "s.json").write_text('{"results": []}')
    with pytest.raises(SystemExit) as left:
        started()
    assert left.value.code == 2
    assert "is no file of a sweep: choose another --out" in capsys.readouterr().err


def test_the_table_the_csv_and_the_picture(tmp_path: Path) -> None:
    asked = parse([*TWO, "--out", str(tmp_path / "s")], "")
    results = Results(asked, 2)
    predicted = {"images_per_second": 3.0, "peak_bytes": 96 * 2**20}
    results.tried = [
        tried(Plan(data=2), 1.0, 2.0, 4.0, predicted=predicted),
        tried(Plan(((1, 2),)), 3.0, mebibytes=128, predicted=predicted),
        tried(Plan(((1, 1), (1, 1))), 1.0, mebibytes=100),
        tried(Plan(((1, 1), (1, 1)), microbatches=2)),
    ]
    results.tried[3].take(Outcome(None, "x" * 200))
    rows = results.rows(asked.training)
    assert [(row["number"], row["images_per_second"], row["on_front"]) for row in rows] == [
        (1, 3.0, True), (2, 2.0, True), (3, 1.0, False), (4, None, False)
    ]  # fmt: skip
    lines = as_table(rows).splitlines()
    assert lines[2].split() == "2: tiles(1x1) x data(2) 2 2.00 (1.00-4.00) 3.00 0.50 50 64.0 96.0 *".split()
    assert lines[4].endswith(f"failed: {'x' * 107}...")
    assert lines[5:] == [
        f"estimate of {what} of the measurement), 0 % of pairs in the measured order"
        for what in ("images/s, ranks with a core each: off by 25 % (median; 1.25", "memory: off by 38 % (median; 1.12")
    ]
    as_csv(rows, tmp_path / "s.csv")
    with (tmp_path / "s.csv").open(newline="") as file:
        first, *_, last = csv.DictReader(file)
    assert (first["tiles"], first["peak_bytes"], first["on_front"]) == ("1x2", str(128 * 2**20), "True")
    assert (last["images_per_second"], last["failure"], last["microbatches"]) == ("", "x" * 200, "2")
    assert first["command"].startswith("mpirun -n 2 python -m mpi4dl.train --model small_resnet --image-size 32 ")
    plot(rows, "what").savefig(tmp_path / "s.png")
    assert_picture(tmp_path / "s.png")


def test_the_front_has_equals_and_nothing_that_is_beaten() -> None:
    points = [(1.0, 5), (1.0, 5), (2.0, 5), (2.0, 6), (3.0, 9), (2.5, 9), (None, 1)]
    rows = [{"images_per_second": speed, "peak_bytes": size} for speed, size in points]
    assert [(row["images_per_second"], row["peak_bytes"]) for row in front([*rows, dict(rows[2])])] == [
        (2.0, 5), (3.0, 9), (2.0, 5)
    ]  # fmt: skip


def test_the_order_of_forecasts() -> None:
    assert in_order([(1.0, 10.0), (2.0, 20.0), (3.0, 5.0)]) == 1 / 3
    assert in_order([(1.0, 10.0)]) is None
    assert accuracy([]) == []


@pytest.mark.parametrize(
    "flags",
    [
        ["--ranks", "0"],
        ["--ranks", "four"],
        ["--schedules", "1f1b,gpip"],
        ["--zero", "0,4"],
        ["--grids", "2by2"],
        ["--turns", "0"],
        ["--time-limit", "0"],
        ["--memory", "much"],
        ["--tiles", "2x2"],
        ["--stage", "2"],
        ["--text", "stdlib"],
    ],
    ids=" ".join,
)
def test_wrong_flags_are_refused_by_their_names(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        sweep.main(flags)
    assert left.value.code == 2
    (problem,) = capsys.readouterr().err.splitlines()
    assert flags[0] in problem
    assert flags[1].split(",")[-1] in problem or flags[0] in ("--tiles", "--text", "--stage")


def test_a_space_without_a_legal_plan_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^no plan of --ranks 3 --grids 1x1,1x2 .* is legal for a batch of 4: "):
        sweep.estimated(parse([*TWO, "--ranks", "3", "--stages", "1"], ""))


@pytest.mark.exhaustive
def test_a_tiny_sweep_of_which_one_plan_is_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Eight images at once need some 100 MiB more than one by one; the limit is between the two."""
    out = tmp_path / "new" / "s"
    flags = ["--model", "small_resnet", "--image-size", "512", "--batch-size", "8", "--ranks", "1", "--grids", "1x1"]
    flags += ["--stages", "1", "--data", "1", "--microbatches", "1,8", "--turns", "1", "--steps", "1", "--warm-up", "0"]
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("mpi4dl.estimate.search.TIMING_SECONDS", 0.1)
    sweep.main([*flags, "--memory", "80MiB", "--out", str(out)])
    told = capsys.readouterr()
    found = json.loads(Path(f"{out}.json").read_text())["results"]["plans"]
    assert [(each["plan"], len(each["turns"])) for each in found] == [
        ("tiles(1x1) x data(1)", 0),
        ("tiles(1x1) x data(1), microbatches(8), 1f1b", 1),
    ]
    assert found[0]["failure"].startswith("out of memory: rank 0 takes ")
    assert all(each["predicted"]["peak_bytes"] > 0 for each in found)
    assert found[1]["turns"][0]["peak_bytes"] < 80 * 2**20
    assert "failed: out of memory: rank 0 takes " in told.out
    assert len(Path(f"{out}.csv").read_text().splitlines()) == 3
    assert_picture(f"{out}.png")
