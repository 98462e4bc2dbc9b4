"""Every benchmark from end to end in tiny sizes; and the command line that lists, runs and compares them."""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import options as declared
from tests.benchmarks.checks import assert_picture
from tests.pool.zygote import ROOT, python
from tests.support.commands import train_command

BY_DEFAULT = ("zero",)  # all others are exhaustive
SIZES = "num_layers=1,hidden=16,num_heads=2"


def benchmarks(*words: str) -> "subprocess.CompletedProcess[str]":
    command = [python(), "-m", "benchmarks", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT)


@pytest.fixture(scope="session")
def a_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training of a few steps on text."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "texts").mkdir()
    for number in range(12):
        (folder / "texts" / f"{number}.txt").write_text(f"some words of text {number} " * 20)
    flags = ["--text", str(folder / "texts"), "--context", "8"]
    flags += ["--model", "gpt", "--model-options", SIZES]
    flags += ["--batch-size", "4", "--max-steps", "4", "--log-interval", "2", "--val-fraction", "0.5"]
    job = train_command(1, *flags, "--no-tensorboard", "--run-folder", str(folder / "run"))
    assert job.code == 0, job.stderr
    return folder / "run"


def arguments(name: str, request: pytest.FixtureRequest) -> list[str]:
    """What a benchmark needs beside its options."""
    if name not in ("curves", "gpt"):
        return []
    run = request.getfixturevalue("a_run")
    return [str(run)] if name == "gpt" else [f"one={run}", f"two={run}"]


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in BY_DEFAULT else [pytest.mark.exhaustive]) for n in declared.names()],
)
def test_a_benchmark_from_end_to_end(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    out = tmp_path / "new" / "v1.5"
    page = ["--page", str(tmp_path / "page.md")] if name == "torchvision_models" else []
    done = benchmarks("run", name, *arguments(name, request), "--quick", *page, "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert f"saved {out}.json" in done.stdout
    saved = json.loads(Path(f"{out}.json").read_text())
    if name == "torchvision_models":
        assert {row["outcome"] for row in saved["models"].values()} == {"exact"}
        assert "squeezenet1_1" in (tmp_path / "page.md").read_text()
        return
    conditions, results = saved["conditions"], saved["results"]
    assert {"commit", "machine", "date", "load", "threads", "mpi", "loaded"} <= conditions.keys()
    assert (results["benchmark"], results["settings"]["quick"]) == (name, True)
    assert results["measurements"]
    assert all(number > 0 for row in results["measurements"] for key, number in row.items() if is_cost(key, number))
    pictures = [path.strip(",") for path in done.stdout.splitlines()[-1].split() if ".png" in path]
    assert pictures
    for picture in pictures:
        assert_picture(picture)
    CHECKS.get(name, lambda rows: None)(results["measurements"])


def is_cost(key: str, value: Any) -> bool:
    if "idle" in key or "difference" in key or not isinstance(value, int | float):
        return False
    return key.endswith(("seconds", "per_second", "peak_bytes"))


def _halo(rows: Sequence[dict[str, Any]]) -> None:
    assert [row["moved_bytes"] for row in rows] == [32 * 4 * 4 * trips for trips in (1, 1, 2, 2)]


def _moe(rows: Sequence[dict[str, Any]]) -> None:
    assert all(row["bytes"] == pytest.approx(row["formula"]) for row in rows)
    assert [row["ranks"] for row in rows] == [1, *[2] * 3, *[3] * 3]


def _peers(rows: Sequence[dict[str, Any]]) -> None:
    assert [row["side"] for row in rows] == ["plain PyTorch", "gloo", "backend", "engine"]
    assert all(row["wrong"] is None and len(row["losses"]) == 2 for row in rows)
    assert rows[0]["work_seconds"] == rows[0]["cpu_seconds"]  # it waits for nobody
    assert rows[3]["work_seconds"] < rows[3]["cpu_seconds"]


def _stages(rows: Sequence[dict[str, Any]]) -> None:
    plain, both = rows
    assert (plain["measured_bubble"], both["ranks"]) == (None, 3)
    assert all(0 < both[bubble] < 1 for bubble in ("measured_bubble", "simulated_bubble"))
    assert both["peak_bytes"] == max(both["peak_bytes_of_ranks"])


def _zero(rows: Sequence[dict[str, Any]]) -> None:
    for row, expected in zip(rows[:2], (16, 12), strict=True):
        assert row["bytes_per_parameter_by_formula"] == expected
        assert row["bytes_per_parameter"] == pytest.approx(expected, rel=0.1)


def _generate(rows: Sequence[dict[str, Any]]) -> None:
    """Tokens and their probabilities are the same by all ways, to the bit."""
    assert {row["alike"] for row in rows} == {1.0}
    assert len(rows) == 12


def _allreduce(rows: Sequence[dict[str, Any]]) -> None:
    assert {row["name"] for row in rows} >= {"library", "direct", "ring", "two-level", "picked", "gloo", "raw mpi4py"}
    assert {(row["ranks"], row["dtype"], row["size_kb"]) for row in rows} == {
        (ranks, dtype, size) for ranks in (2, 4) for dtype in ("float32", "bfloat16") for size in (4, 2048)
    }


def _gpt(rows: Sequence[dict[str, Any]]) -> None:
    assert rows[0]["validation"] == pytest.approx(rows[1]["validation"], rel=1e-3)


CHECKS = {
    "allreduce": _allreduce,
    "generate": _generate,
    "gpt": _gpt,
    "halo": _halo,
    "moe": _moe,
    "peers": _peers,
    "stages": _stages,
    "zero": _zero,
}
