"""benchmarks.spatial: medians over rounds, ratios within a round, and a whole benchmark on a tiny model."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.spatial import as_table, summarise
from benchmarks.turns import Contestant
from tests.benchmarks.checks import assert_picture
from tests.pool.zygote import ROOT, python

MEBIBYTE = 2**20


def contestant(name: str, ranks: int, speeds: list[float], mebibytes: list[int]) -> Contestant:
    answers: list[dict[str, Any]] = [
        {
            "images_per_second": speed,
            "cpu_seconds_per_image": 2 / speed,
            "work_seconds_per_image": 1 / speed,
            "peak_bytes": size * MEBIBYTE,
        }
        for speed, size in zip(speeds, mebibytes, strict=True)
    ]
    return Contestant(name, ranks, [], answers)


CONTESTANTS = [
    contestant("plain", 1, [1.0, 2.0, 4.0], [100, 200, 100]),
    contestant("1x2", 2, [1.0, 1.0, 6.0], [60, 100, 50]),
]
TABLE = """\
       ranks  images/s  ratio    (min-max)  CPU s/image  work s/image  peak MiB per rank  ratio  over least
-----  -----  --------  -----  -----------  -----------  ------------  -----------------  -----  ----------
plain      1     2.000  1.000  (1.00-1.00)         1.00          0.50                100  1.000       1.000
1x2        2     1.000  1.000  (0.50-1.50)         2.00          1.00                 60  0.500       0.600"""


def test_ratios_are_medians_of_rounds_not_ratios_of_medians() -> None:
    plain, halves = summarise(CONTESTANTS)
    assert plain == {
        "name": "plain", "ranks": 1, "images_per_second": 2.0, "cpu_seconds_per_image": 1.0,
        "work_seconds_per_image": 0.5, "peak_bytes": 100 * MEBIBYTE, "speed_ratio": 1.0,
        "speed_ratio_min": 1.0, "speed_ratio_max": 1.0, "memory_ratio": 1.0, "memory_over_least": 1.0,
    }  # fmt: skip
    assert halves == {
        "name": "1x2", "ranks": 2, "images_per_second": 1.0, "cpu_seconds_per_image": 2.0,
        "work_seconds_per_image": 1.0, "peak_bytes": 60 * MEBIBYTE, "speed_ratio": 1.0,
        "speed_ratio_min": 0.5, "speed_ratio_max": 1.5, "memory_ratio": 0.5, "memory_over_least": 0.6,
    }  # fmt: skip


def test_ratios_are_to_plain_pytorch_with_the_same_allocator() -> None:
    kept = [contestant("plain", 1, [4.0], [50]), contestant("1x2", 2, [2.0], [40])]
    for each in kept:
        each.allocator = "keep"
    found = summarise([*CONTESTANTS, *kept])
    assert [row["name"] for row in found] == ["plain", "1x2", "plain, keep", "1x2, keep"]
    assert [(row["memory_ratio"], row["memory_over_least"]) for row in found] == [
        (1, 2),
        (0.5, 1.2),
        (1, 1),
        (0.8, 0.8),
    ]
    assert found[3]["speed_ratio"] == 0.5


def test_the_table_of_results() -> None:
    assert as_table(summarise(CONTESTANTS)) == TABLE


def test_a_tiny_benchmark_from_end_to_end(tmp_path: Path) -> None:
    out = tmp_path / "new" / "v1.5"
    flags = ["--model", "small_resnet", "--size", "64", "--grids", "1x2", "--rounds", "1", "--out", str(out)]
    done = subprocess.run(
        [python(), "-m", "benchmarks.spatial", *flags], capture_output=True, text=True, timeout=600, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    title, *lines, saved = done.stdout.splitlines()
    assert title == "small_resnet, 64 x 64 px, batch 1, 2 cores in all"
    assert saved == f"saved {out}.json and {out}.png"
    results = json.loads(Path(f"{out}.json").read_text())["results"]
    assert results["settings"]["size"] == "64x64"
    assert lines == as_table(results["contestants"]).splitlines()
    plain, halves = results["contestants"]
    assert (plain["name"], plain["ranks"], halves["name"], halves["ranks"]) == ("plain", 1, "1x2", 2)
    assert plain["images_per_second"] > 0
    assert halves["cpu_seconds_per_image"] > 0
    assert halves["speed_ratio"] == pytest.approx(halves["images_per_second"] / plain["images_per_second"])
    assert halves["memory_ratio"] == pytest.approx(halves["peak_bytes"] / plain["peak_bytes"])
    assert_picture(f"{out}.png")


def test_a_benchmark_of_what_does_not_exist_ends_with_the_reason(tmp_path: Path) -> None:
    flags = ["--model", "resnet19", "--grids", "1x2", "--rounds", "1", "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [python(), "-m", "benchmarks.spatial", *flags], capture_output=True, text=True, timeout=600, cwd=ROOT
    )
    assert done.returncode != 0
    assert "model 'resnet19' is unknown" in done.stderr
    assert "plain ended: exit code 1" in done.stderr
    assert list(tmp_path.iterdir()) == []
