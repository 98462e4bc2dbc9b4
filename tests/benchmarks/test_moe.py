"""benchmarks.moe: who takes part, flags, and a whole benchmark of a small layer, with the bytes of the formulas."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from benchmarks.moe import as_table, contestants, parse, summarise
from tests.benchmarks.checks import assert_picture, assert_refused
from tests.pool.zygote import ROOT, python


def test_times_are_compared_with_tensor_parallelism_on_as_many_ranks() -> None:
    options = parse(["--ranks", "2", "--tokens", "8"])
    found = contestants(options)
    names = [("experts", 1), ("tensor", 2), ("whole experts", 2), ("experts", 2)]
    assert [(each.name, each.ranks) for each in found] == names
    for each, seconds in zip(found, (1.0, 2.0, 3.0, 1.0), strict=True):
        answer = {"seconds": seconds, "cpu": 1.0, "bytes": 64.0, "formula": 64.0, "leaving": 4, "came": 7.0}
        each.answers += [answer, answer]
    rows = summarise(options, found)
    assert [row["over_tensor"] for row in rows] == [1.0, 1.0, 1.5, 0.5]
    assert rows[1]["bytes"] == 8
    assert "whole experts      2              8        8" in as_table(rows)
    found[2].answers[0]["came"] = 8.0
    with pytest.raises(SystemExit, match=re.escape("whole experts on 2 ranks made 8.0, one process 7.0")):
        summarise(options, found)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ranks", "4k"], "write them as 1,2,4"),
        (["--ranks", "0"], "each is at least 1"),
        (["--top-k", "0"], "--top-k is 0, but must be at least 1"),
        (["--ranks", "16"], "16 ranks share 8 experts"),
    ],
)
def test_flags_that_make_no_sense(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(parse, flags, message, capsys)


@pytest.mark.exhaustive
def test_a_tiny_benchmark_from_end_to_end(tmp_path: Path) -> None:
    out = tmp_path / "moe"
    flags = ["--tokens", "12", "--ranks", "2,3", "--hidden", "4", "--ff-dim", "4", "--rounds", "1", "--steps", "1"]
    command = [python(), "-m", "benchmarks.moe", *flags, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    rows = json.loads(Path(f"{out}.json").read_text())["results"]["contestants"]
    assert all(row["bytes"] == pytest.approx(row["formula"]) for row in rows)
    assert [row["ranks"] for row in rows] == [1, 2, 2, 2, 3, 3, 3]
    assert_picture(f"{out}.png")
