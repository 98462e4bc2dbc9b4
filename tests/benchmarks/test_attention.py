"""benchmarks.attention: ratios turn by turn, flags, and a whole benchmark of short sequences."""

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks.attention import WAYS, as_table, parse, summarise
from benchmarks.turns import Contestant
from tests.benchmarks.checks import assert_picture, assert_refused
from tests.pool.zygote import ROOT, python

ANSWERS = {"ring": (2.0, 1.0, 4.0), "gather": (4.0, 4.0, 4.0), "plain": (8.0, 8.0, 9.0)}
TABLE = """
tokens  ring MiB  gather MiB  plain MiB  ring / gather    (min-max)  ring s  gather s  plain s
------  --------  ----------  ---------  -------------  -----------  ------  --------  -------
64           2.0         4.0        8.0           0.50  (0.25-1.00)    1.00      1.00     1.00
"""


def test_the_results_as_a_table() -> None:
    contestants = [
        Contestant(way, 4, [], [{"mebibytes": found, "seconds": 1.0} for found in ANSWERS[way]]) for way in WAYS
    ]
    assert as_table([summarise(64, contestants)]) == TABLE.strip()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tokens", "4k"], "write them as 1024,4096"),
        (["--tokens", "3"], "each of 4 ranks needs one token"),
        (["--ranks", "1"], "two ranks or more"),
        (["--heads", "0"], "--heads is 0, but must be at least 1"),
    ],
)
def test_flags_that_make_no_sense(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(parse, flags, message, capsys)


@pytest.mark.exhaustive
def test_a_tiny_benchmark_from_end_to_end(tmp_path: Path) -> None:
    out = tmp_path / "attention"
    flags = ["--tokens", "5,16", "--ranks", "2", "--heads", "2", "--features", "4", "--rounds", "1", "--causal"]
    command = [python(), "-m", "benchmarks.attention", *flags, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    results = json.loads(Path(f"{out}.json").read_text())["results"]
    assert [row["tokens"] for row in results["results"]] == [5, 16]
    assert all(row["ring_seconds"] > 0 for row in results["results"])
    assert done.stdout.rstrip().endswith(f"saved {out}.json and {out}.png")
    assert_picture(f"{out}.png")
