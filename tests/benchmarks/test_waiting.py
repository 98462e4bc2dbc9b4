"""benchmarks.waiting: ratios within a turn, flags, and a whole benchmark of short waits."""

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks.turns import Contestant
from benchmarks.waiting import Rounds, as_tables, parse, summarise
from tests.benchmarks.checks import assert_picture, assert_refused
from tests.pool.zygote import ROOT, python

SHORT = Contestant(
    "latency", 2, [], [{"4": {"ours": ours, "spinning": 10.0, "raw": 5.0}} for ours in (10.0, 20.0, 8.0)]
)
LONG = Contestant("long", 2, [], [{"cpu_seconds": 0.25}])
LINES = [
    "there and back  ours us  only spinning us  raw mpi4py us  speed    (min-max)\n"
    "--------------  -------  ----------------  -------------  -----  -----------\n"
    "4 KiB              10.0              10.0            5.0   1.00  (0.50-1.25)",
    "a wait of 10 s costs 0.25 CPU seconds",
    "resnet18 at 256 px: 4.00 steps/s alone, 2.00 beside another job of as many ranks: 0.50 (0.50-0.75); "
    "as it works, 0.62 is the most",
]


def test_the_results_as_tables() -> None:
    results = summarise(parse(["--kilobytes", "4"]), SHORT, LONG, Rounds([4.0] * 3, [2.0, 2.0, 3.0], [0.8] * 3))
    assert as_tables(results) == LINES


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--kilobytes", "4k"], "write them as 4,64,1024"),
        (["--kilobytes", "0"], "at least one kilobyte"),
        (["--wait-seconds", "0"], "--wait-seconds is 0.0, but must be positive"),
    ],
)
def test_flags_that_make_no_sense(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(parse, flags, message, capsys)


@pytest.mark.exhaustive
def test_a_tiny_benchmark_from_end_to_end(tmp_path: Path) -> None:
    out = tmp_path / "waiting"
    flags = ["--kilobytes", "1,4", "--iterations", "3", "--wait-seconds", "0.1", "--train-seconds", "0.1"]
    command = [python(), "-m", "benchmarks.waiting", *flags, "--rounds", "1", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    results = json.loads(Path(f"{out}.json").read_text())["results"]
    assert [row["kilobytes"] for row in results["latency"]] == [1, 4]
    assert all(row["ours_microseconds"] > 0 for row in results["latency"])
    assert results["side_by_side"]["beside_steps_per_second"] > 0
    assert done.stdout.rstrip().endswith(f"saved {out}.json and {out}.png")
    assert_picture(f"{out}.png")
