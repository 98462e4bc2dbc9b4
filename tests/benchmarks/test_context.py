"""benchmarks.context: memory over that of the fewest ranks, flags, and a whole benchmark of short sequences."""

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks.context import as_table, contestants, parse, summarise
from tests.benchmarks.checks import assert_picture, assert_refused
from tests.pool.zygote import ROOT, python


def test_memory_is_compared_with_the_same_way_on_fewer_ranks() -> None:
    found = contestants(parse(["--ranks", "1,4", "--tokens", "32"]))
    assert [(each.name, each.ranks, each.arguments[-1]) for each in found] == [
        ("ring", 1, "plain"),
        ("gather", 1, "plain"),
        ("ring", 4, "ring"),
        ("gather", 4, "gather"),
    ]
    assert [each.arguments[-3] for each in found] == ["32", "32", "128", "128"]
    for each, sizes in zip(found, ((2, 2), (2, 4), (2, 4), (6, 8)), strict=True):
        each.answers += [{"mebibytes": size, "seconds": 1.0} for size in sizes]
    rows = summarise(found)
    assert [row["over_fewest"] for row in rows] == [1, 1, 1.5, 2.5]
    assert "gather      4            7.0               2.50  (2.00-3.00)" in as_table(rows)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ranks", "4k"], "write them as 1,2,4"),
        (["--ranks", "0"], "a job has 1 rank at least"),
        (["--heads", "0"], "--heads is 0, but must be at least 1"),
    ],
)
def test_flags_that_make_no_sense(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(parse, flags, message, capsys)


@pytest.mark.exhaustive
def test_a_tiny_benchmark_from_end_to_end(tmp_path: Path) -> None:
    out = tmp_path / "context"
    flags = ["--tokens", "5", "--ranks", "1,2", "--heads", "2", "--features", "4", "--rounds", "1", "--causal"]
    command = [python(), "-m", "benchmarks.context", *flags, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    rows = json.loads(Path(f"{out}.json").read_text())["results"]["contestants"]
    assert [row["ranks"] for row in rows] == [1, 1, 2, 2]
    assert_picture(f"{out}.png")
