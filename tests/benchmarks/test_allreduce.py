"""The all-reduce benchmark: a tiny run, its tables, and that a contestant which sums wrongly stops it."""

import json
import math
import subprocess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks import allreduce
from benchmarks.allreduce import as_tables, parse, summarise
from benchmarks.turns import Contestant
from mpi4dl.comm import Communicator, Refusal
from tests.benchmarks.checks import assert_picture, assert_refused
from tests.pool.ranks import Ranks
from tests.pool.zygote import ROOT, python

ANSWERS: list[dict[str, Any]] = [
    {
        "float32": {
            "16": {"library": 9.0, "picked": picked, "gloo": 100.0, "raw mpi4py": 10.0, "algorithm": "direct"},
            "4": {"library": 5.0, "picked": picked, "gloo": 50.0, "raw mpi4py": 4.0, "algorithm": "library"},
        },
        "bfloat16": {"4": {"library": 5.0, "picked": picked, "gloo": 50.0, "algorithm": "library"}},
    }
    for picked in (5.0, 10.0, 30.0)
]
TABLES = """2 ranks, float32: microseconds
KB  library  picked  gloo  raw mpi4py  picked / gloo  picked / raw mpi4py  picked is
--  -------  ------  ----  ----------  -------------  -------------------  ---------
4         5      10    50           4           0.20                 2.50    library
16        9      10   100          10           0.10                 1.00     direct

2 ranks, bfloat16: microseconds
KB  library  picked  gloo  picked / gloo  picked is
--  -------  ------  ----  -------------  ---------
4         5      10    50           0.20    library"""


def run(*flags: str) -> "subprocess.CompletedProcess[str]":
    command = [python(), "-m", "benchmarks.allreduce", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT)


def test_medians_of_turns_and_ratios_within_a_turn() -> None:
    rows = summarise([Contestant("2", 2, [], ANSWERS)])
    assert rows[0] == {
        "ranks": 2,
        "dtype": "float32",
        "size_kb": 16,
        "picked": "direct",
        "microseconds": {"library": 9.0, "picked": 10.0, "gloo": 100.0, "raw mpi4py": 10.0},
        "picked_over": {"library": 10 / 9, "gloo": 0.1, "raw mpi4py": 1.0},
    }
    assert [(row["dtype"], row["size_kb"]) for row in rows] == [("float32", 16), ("float32", 4), ("bfloat16", 4)]


def test_the_tables_of_results() -> None:
    assert as_tables(summarise([Contestant("2", 2, [], ANSWERS)])) == TABLES


def refused_body(comm: Communicator) -> str:
    """Gloo is replaced by what forgets the sum on rank 1."""

    def wrong(flat: torch.Tensor) -> None:
        comm.all_reduce(flat).mul_(2 if comm.rank == 1 else 1)

    with mock.patch("torch.distributed.all_reduce", wrong), pytest.raises(Refusal) as caught:
        allreduce.contests(comm)
    return str(caught.value)


@pytest.mark.exhaustive
def test_nothing_is_measured_where_a_contestant_sums_wrongly(ranks: Ranks) -> None:
    assert ranks(2).run(refused_body) == ["rank 1: gloo sums wrongly: nothing was measured"] * 2


def raw_body(comm: Communicator) -> list[float]:
    flat = torch.full((3,), float(comm.rank))
    allreduce.raw(comm)(flat)
    return flat.tolist()


@pytest.mark.exhaustive
def test_the_all_reduce_by_hand_sums(ranks: Ranks) -> None:
    assert ranks(3).run(raw_body) == [[3.0] * 3] * 3


@pytest.mark.exhaustive
def test_a_tiny_benchmark_from_end_to_end(tmp_path: Path) -> None:
    out = tmp_path / "new" / "v1.5"
    flags = ["--ranks", "2,4", "--sizes", "4,2048", "--iterations", "2", "--rounds", "1", "--out", str(out)]
    done = run(*flags)
    assert done.returncode == 0, done.stderr
    *lines, saved = done.stdout.splitlines()
    assert saved == f"saved {out}.json and {out}.png"
    results = json.loads(Path(f"{out}.json").read_text())["results"]
    assert results["settings"]["sizes"] == "4,2048"
    rows = results["measurements"]
    assert "\n".join(lines) == as_tables(rows)
    assert [(row["ranks"], row["dtype"], row["size_kb"]) for row in rows] == [
        (ranks, dtype, size) for ranks in (2, 4) for dtype in ("float32", "bfloat16") for size in (4, 2048)
    ]
    for row in rows:
        expected = {"library", "direct", "ring", "picked", "gloo"}
        expected |= {"two-level"} if row["ranks"] == 4 else set()
        expected |= {"raw mpi4py"} if row["dtype"] == "float32" else set()
        assert set(row["microseconds"]) == expected
        assert set(row["picked_over"]) == expected - {"picked"}
        assert all(math.isfinite(x) and x > 0 for x in row["microseconds"].values())
        for name, ratio in row["picked_over"].items():
            assert ratio == pytest.approx(row["microseconds"]["picked"] / row["microseconds"][name])
        assert row["picked"] in expected - {"picked", "gloo", "raw mpi4py"}
    assert_picture(f"{out}.png")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--sizes", "big"], "--sizes big --ranks 2,4: write them as 4,64,1024 and 2,4"),
        (
            ["--ranks", "1"],
            "--sizes 4,16,64,256,1024,4096,16384,65536 --ranks 1: a sum takes 1 KB and 2 ranks at least",
        ),
        (["--sizes", "0"], "--sizes 0 --ranks 2,4: a sum takes 1 KB and 2 ranks at least"),
        (["--dtypes", "float32,int8"], "--dtypes has 'int8', but may only name float32, bfloat16"),
        (["--rounds", "0"], "--rounds is 0, but must be at least 1"),
    ],
)
def test_flags_that_cannot_be_measured_are_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_refused(parse, flags, message, capsys)
