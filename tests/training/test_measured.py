"""Plans measured by short trainings: which run, what is kept of them, tables, failures, and a real one."""

import csv
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mpi4dl import plan as command
from mpi4dl._wording import quietly
from mpi4dl.estimate.plan_estimate import Measurement, PlanEstimate
from mpi4dl.estimate.plan_options import Measuring
from mpi4dl.estimate.search import table
from mpi4dl.options.build import build_plan
from mpi4dl.options.config import parse
from mpi4dl.options.declare import with_values
from mpi4dl.parallel.plan import Plan
from mpi4dl.runs.folder import METRICS
from mpi4dl.training import measured as measuring
from mpi4dl.training.measured import SHORT, Record, measured, reason, run_job
from tests.pool.zygote import ROOT
from tests.support.tiny import TINY_RESNET

MIB = 2**20
PLANS = [
    PlanEstimate(Plan(((1, 2),)), 4.0, 64 * MIB, True),
    PlanEstimate(Plan(data=2), 3.0, 96 * MIB, True),
    PlanEstimate(Plan(((1, 1), (1, 1)), microbatches=2), 2.0, 32 * MIB, True, recompute=True),
]
FLAGS = ["--model", TINY_RESNET, "--image-size", "32", "--tiles", "2x2"]
Started = Callable[..., tuple[list[Plan], list[PlanEstimate]]]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Started:
    """Measures by jobs that write three reports at once, or fail; returns the plans of the jobs, and the result."""

    def start(*failures: str | None, flags: list[str] = FLAGS, **how: Any) -> tuple[list[Plan], list[PlanEstimate]]:
        left, jobs = list(failures), []

        def run(ranks: int, arguments: list[str], seconds: float) -> str | None:
            config = parse(arguments[2:])
            jobs.append(build_plan(config))
            assert config.run.run_folder is not None
            folder = Path(config.run.run_folder)
            folder.mkdir()
            rows = [{"images_per_second": speed, "data_wait": 0.5, "comm_wait": 0.0, "peak_memory_bytes": MIB * speed}
                    for speed in (1, 50, 2 * ranks)]  # fmt: skip
            (folder / METRICS).write_text("\n".join(map(json.dumps, rows)))
            return left.pop(0) if left else None

        monkeypatch.setattr(measuring, "run_job", run)
        options = Measuring(measure_folder=str(tmp_path / "m"), **{"measure": (3,), **how})
        return jobs, measured(PLANS, flags, options, quietly)

    return start


def test_the_best_or_the_named_plans_are_measured_in_turns(started: Started, tmp_path: Path) -> None:
    first, second, third = (each.plan for each in PLANS)
    jobs, found = started("too large", measure_turns=2)
    assert jobs == [first, second, third, second, third]
    assert found[0].measured == Measurement(0.0, 0, "too large")
    assert found[1].measured == Measurement(27.0, 4 * MIB)  # of the steps after the first one
    jobs, found = started(measure=(1,))
    assert jobs == [first]  # what failed is tried again
    assert [each.measured for each in found] == [Measurement(27.0, 4 * MIB), None, None]
    assert started(measure=(2, 3))[0] == []
    assert started(measure=(3,), measure_turns=3)[0] == [first, first, second, third]
    assert started(measure=(9,), flags=[*FLAGS, "--batch-size", "8"])[0] == [first, second, third]
    (tmp_path / "m" / "other.json").write_text("{}")
    assert started(measure=(2, 3), measure_steps=1)[0] == [second, third]
    with (tmp_path / "m" / "plans.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 8
    assert {row["command"].split(" --")[0] for row in rows} == {"mpirun -n 2 python -m mpi4dl.train"}


def test_other_options_in_a_file_are_another_measurement(started: Started, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    for size, num_jobs in ((4, 3), (4, 0), (8, 3)):
        file.write_text(f"[data]\nbatch_size = {size}\n")
        assert len(started(flags=["--config", str(file)])[0]) == num_jobs


@pytest.mark.parametrize(
    "flags",
    [
        ["--scheduler", "OneCycleLR", "--scheduler-options", "max_lr=0.1,total_steps=2"],
        ["--warmup", "1000", "--monitor", "val_loss", "--patience", "2", "--lr", "0.5"],
        ["--resume", "auto", "--dry-run", "--save-every", "1", "--callbacks", "my.py:Notify", "--epochs", "1"],
    ],
    ids=lambda flags: flags[0],
)
def test_a_training_that_is_measured_is_short(flags: list[str]) -> None:
    record = Record.of(PLANS[1], PLANS[1].flags([*FLAGS, *flags]), Measuring(measure_steps=5))
    wanted = {**SHORT, "max_steps": 6, "epochs": 6}
    assert parse(record.command[6:]) == with_values(parse(PLANS[1].flags([*FLAGS, *flags])), wanted)


def test_the_table_has_measurements_beside_estimates() -> None:
    found = [
        PLANS[0]._replace(measured=Measurement(5.0, 80 * MIB)),
        PLANS[1]._replace(measured=Measurement(4.0, 120 * MIB)),
        PLANS[2]._replace(measured=Measurement(0.0, 0, "too large")),
        PLANS[2],
    ]
    lines = list(table(found, 100 * MIB, None))
    assert [line.split()[:7] for line in lines[:3]] == [
        ["images/s", "measured", "memory", "measured", "plan"],
        ["1", "4", "5", "64", "MiB", "80", "MiB"],
        ["2", "3", "4", "96", "MiB", "120", "MiB"],
    ]
    assert lines[4].split()[:5] == ["4", "2", "-", "32", "MiB"]
    assert lines[5:] == [
        "2: takes more than 100 MiB",
        "3: failed: too large",
        "no other measured plan beats 1 in both speed and memory",
        "estimates are off by 22 % in speed and 20 % in memory (medians)",
    ]
    assert list(table(found[3:], None, 10))[1].split()[:3] == ["1", "20", "32"]


JOBS = {
    "print('noise')": None,
    "raise KeyError('x y')": "KeyError: 'x y'",
    "import sys; print('mpi4dl: waits, 5 s\\nmpi4dl: too  large', file=sys.stderr); sys.exit(2)": "too large",
    "import os; os._exit(7)": "exit code 7",
}


@pytest.mark.parametrize("program", JOBS)
def test_a_job_that_fails_leaves_one_line_that_says_why(program: str) -> None:
    assert run_job(1, ["-c", program], 60.0) == JOBS[program]


def test_a_process_that_was_killed_may_have_been_out_of_memory() -> None:
    assert reason(137, "some noise") == "exit code 137: out of memory?"


@pytest.mark.exhaustive
def test_a_job_that_takes_too_long_is_ended_with_all_of_its_ranks(tmp_path: Path) -> None:
    program = "import os, sys, time; open(f'{sys.argv[1]}/{os.getpid()}', 'w').close(); time.sleep(600)"
    assert run_job(2, ["-c", program, str(tmp_path)], 3.0) == "it took longer than the limit of 3 s"
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


IMPOSSIBLE = {
    "two": "--measure is 'two', but must be a number of plans, or lines of the table",
    "0": "--measure is '0', but must be",
    "3 --ranks 2 --scaling weak": "--measure trains by plans, and --time-only and --scaling",
    "1,999 --ranks 1": "--measure 999: the search found ",
}


@pytest.mark.parametrize("flags", IMPOSSIBLE)
def test_a_measurement_that_cannot_be_is_refused(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        command.main([*FLAGS[:4], "--measure", *flags.split()])
    assert left.value.code == 2
    assert f"mpi4dl: {IMPOSSIBLE[flags]}" in capsys.readouterr().err


@pytest.mark.sample(1)
def test_a_plan_is_measured_by_a_real_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two stages, whose modules of PyTorch, of some 50 MiB, are no memory of the model."""
    monkeypatch.chdir(ROOT)
    flags = [*FLAGS[:4], "--batch-size", "2", "--stages", "2", "--measure", "--measure-steps", "1"]
    command.main([*flags, "--measure-folder", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"measurements: {tmp_path}"
    (file,) = tmp_path.glob("*.json")
    found = json.loads(file.read_text())
    (turn,) = found["turns"]
    assert f"{turn['samples_per_second']:.3g}" in lines[-3].split()
    assert 0 < turn["peak_bytes"] < 40 * MIB
    assert found["estimated_bytes"] > 0
    assert len(list(tmp_path.iterdir())) == 2  # nothing is left of the training
