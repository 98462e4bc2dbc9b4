"""benchmarks.gpu: its stages on the CPU, what becomes of jobs that fail or hang, and the page."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu
from benchmarks.common.options import Options
from benchmarks.gpu import DONE, LEFT_OUT, NAMES, Job, Results, environment_of, page, stages_of
from tests.benchmarks.checks import options_of
from tests.benchmarks.test_benchmarks import benchmarks

IN_TABLES = 1e-8  # of models with batch norms of few pixels
CHEAP = ("environment", "norms")
TIMED = ("steps", "attention", "stream", "profile")


def options(folder: Path, flags: str = "") -> Options:
    return options_of("gpu", f"--cpu --out {folder}/gpu --page {folder}/gpu.md {flags}")


@pytest.mark.parametrize(
    "stage", [pytest.param(name, marks=[] if name in CHEAP else [pytest.mark.exhaustive]) for name in NAMES]
)
def test_a_stage_from_end_to_end(stage: str, tmp_path: Path) -> None:
    done = benchmarks("run", "gpu", *f"--cpu --stages {stage} --out {tmp_path}/gpu --page {tmp_path}/gpu.md".split())
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "gpu.json").read_text())["results"]
    wanted = stages_of(True, (64, 96))[stage]
    assert len(results["jobs"]) == len(wanted.jobs)
    assert {row["outcome"] for row in results["jobs"]} == {LEFT_OUT if stage == "direct" else DONE}
    rows = results["measurements"]
    assert all(row["stage"] == stage for row in rows)
    assert bool(rows) == (stage != "direct")
    assert all(row.get("num_wrong", 0) == 0 and row.get("error", 0.0) < IN_TABLES for row in rows)
    assert all(row.get("same_bits", True) and row.get("same_tokens", True) for row in rows)
    assert all(row["seconds"] > 0 for row in rows if stage in TIMED)
    line = next(line for line in (tmp_path / "gpu.md").read_text().splitlines() if line.startswith(f"| {stage} "))
    assert (LEFT_OUT if stage == "direct" else f"| {DONE} |") in line


def program(text: str) -> Job:
    return Job("own", 0, {}, ("-c", text))


HANGS = """
import json, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(json.dumps({"ranks": 0, "pid": child.pid}), flush=True)
time.sleep(600)
"""


def test_a_job_that_hangs_ends_with_all_that_it_started_and_leaves_what_it_found(tmp_path: Path) -> None:
    results = Results(options(tmp_path))
    with (tmp_path / "log").open("w+") as errors:
        results.take("steps", program(HANGS), 5.0, errors)
    saved = json.loads((tmp_path / "gpu.json").read_text())["results"]
    ((found,), (ended,)) = (saved["measurements"], saved["jobs"])
    assert ended["outcome"] == "killed at its limit of 5 s"
    deadline = time.monotonic() + 60
    while Path(f"/proc/{found['pid']}").exists() and "zombie" not in Path(f"/proc/{found['pid']}/status").read_text():
        assert time.monotonic() < deadline


def test_a_job_that_fails_says_why_and_other_stages_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stages(cpu: bool, sizes: Any) -> dict[str, gpu.Stage]:
        fails = program("print('{\"ranks\": 0, \"error\": 0.5}'); print('a line'); raise KeyError('the reason')")
        return stages_of(cpu, sizes) | {
            "norms": gpu.Stage("", 60, [program('print(\'{"ranks": 0, "num_wrong": 0}\')')]),
            "doctor": gpu.Stage("", 60, [fails]),
        }

    monkeypatch.setattr(gpu, "stages_of", stages)
    gpu.run(options(tmp_path, "--stages norms"))
    with pytest.raises(SystemExit, match="own"):
        gpu.run(options(tmp_path, "--stages doctor"))
    saved = json.loads((tmp_path / "gpu.json").read_text())["results"]
    assert [(row["stage"], row["outcome"]) for row in saved["jobs"]] == [
        ("norms", DONE),
        ("doctor", "failed: KeyError: 'the reason'"),
    ]
    found = [{key: value for key, value in row.items() if key != "stage"} for row in saved["measurements"]]
    assert found == [
        {"ranks": 0, "num_wrong": 0},
        {"ranks": 0, "error": 0.5},
        {"ranks": 0, "job": "own, ranks 0", "printed": ["a line"]},
    ]
    text = (tmp_path / "gpu.md").read_text()
    assert "| done | 0 wrong |" in text
    assert "KeyError" in text
    assert "| 5e-01 |" in text
    assert "not run" in text


def test_results_of_another_commit_do_not_stay(tmp_path: Path) -> None:
    own = options(tmp_path, "--stages norms")
    Results(own).end("doctor", program(""), DONE, 1.0)
    assert [row["stage"] for row in Results(own).ended] == ["doctor"]
    saved = json.loads((tmp_path / "gpu.json").read_text())
    saved["conditions"]["commit"] = "another"
    (tmp_path / "gpu.json").write_text(json.dumps(saved))
    assert Results(own).ended == []


def test_the_page_has_ratios_to_plain_and_words_that_stay_in_their_cells() -> None:
    step = {"stage": "steps", "model": "m", "size": 64, "precision": "fp32", "ranks": 1}
    rows = [step | {"how": "plain", "seconds": 2.0}, step | {"how": "rules", "seconds": 5.0, "note": "a|b\nc"}]
    conditions = {"mpi": "MPICH", "commit": "abc", "date": "today"}
    text = page({"conditions": conditions, "results": {"jobs": [], "measurements": rows}})
    assert "| m | 64 | fp32 | 1 | rules | 5 | 2.5 | a\\|b c |" in text or "| 5 | a\\|b c | 2.5 |" in text
    assert "no card (CPU)" in text


def test_an_openmpi_comes_before_others_and_keeps_what_the_user_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("bin/mpirun", "lib/libmpi.so.40"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    monkeypatch.setenv("OMPI_MCA_pml", "ob1")
    own = options(tmp_path, f"--openmpi {tmp_path}")
    job = Job("exact", 2, openmpi=True)
    found = environment_of(own, job)
    assert found["PATH"].split(os.pathsep)[0] == str(tmp_path / "bin")
    assert found["MPI4PY_LIBMPI"] == str(tmp_path / "lib/libmpi.so.40")
    assert found["OMPI_MCA_pml"] == "ob1"
    assert gpu.command_of(own, job)[:4] == [str(tmp_path / "bin/mpirun"), "-n", "2", sys.executable]
    assert "MPI4PY_LIBMPI" not in environment_of(own, Job("exact", 2))
