"""benchmarks.operators: medians and ratios, and a whole benchmark on tiny tiles."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.operators import as_table, operators, parse, summarise
from benchmarks.turns import Contestant
from tests.benchmarks.checks import assert_picture, assert_refused
from tests.pool.zygote import ROOT, python

ANSWERS: list[dict[str, Any]] = [
    {"pad": {"ours": {"forward": ours, "backward": 3.0}, "plain": {"forward": 2.0, "backward": 6.0}}}
    for ours in (1.0, 2.0, 6.0)
]
TABLE = """
     forward plain  forward ours  forward ratio  forward (min-max)  backward plain  backward ours  backward ratio  backward (min-max)
---  -------------  ------------  -------------  -----------------  --------------  -------------  --------------  ------------------
pad           2.00          2.00           1.00        (0.50-3.00)            6.00           3.00            0.50         (0.50-0.50)"""  # noqa: E501


def run(*flags: str) -> "subprocess.CompletedProcess[str]":
    command = [python(), "-m", "benchmarks.operators", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT)


def test_medians_of_turns_and_ratios_within_a_turn() -> None:
    assert summarise(Contestant("1x2", 2, [], ANSWERS)) == [
        {
            "operator": "pad", "ours_forward_ms": 2.0, "plain_forward_ms": 2.0, "forward_ratio": 1.0,
            "forward_ratio_min": 0.5, "forward_ratio_max": 3.0, "ours_backward_ms": 3.0, "plain_backward_ms": 6.0,
            "backward_ratio": 0.5, "backward_ratio_min": 0.5, "backward_ratio_max": 0.5,
        }
    ]  # fmt: skip


def test_the_table_of_results() -> None:
    assert as_table(summarise(Contestant("1x2", 2, [], ANSWERS))) == TABLE[1:]


def test_operators_are_chosen_by_words_in_their_names() -> None:
    assert {"pad circular", "area x2", "bicubic corners x0.5"} < operators("").keys()
    assert operators("circular,adaptive").keys() == {"pad circular", "adaptive max to 7", "adaptive average to 7"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--grid", "1x1"], "--grid 1x1 --tile 256: it takes two tiles or more, each of 8 px at least"),
        (["--tile", "4"], "--grid 1x2 --tile 4: it takes two tiles or more, each of 8 px at least"),
        (["--grid", "two"], "--grid two: write it as 1x2"),
        (["--rounds", "0"], "--rounds is 0, but must be at least 1"),
    ],
)
def test_flags_that_make_no_sense_are_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_refused(parse, flags, message, capsys)


def test_a_tiny_benchmark_from_end_to_end(tmp_path: Path) -> None:
    out = tmp_path / "new" / "v1.5"
    flags = ["--tile", "8", "--channels", "2", "--iterations", "1", "--rounds", "1", "--channels-last"]
    done = run(*flags, "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert (
        "tiles of 8 x 8 px on 1x2, batch 1, 2 channels, float32, channels last: CPU ms, 1 thread a rank" in done.stdout
    )
    written = json.loads(Path(f"{out}.json").read_text())["results"]
    assert [row["operator"] for row in written["measurements"]] == list(operators(""))
    assert_picture(Path(f"{out}.png"))
