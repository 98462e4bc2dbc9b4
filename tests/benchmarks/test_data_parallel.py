"""benchmarks.data_parallel: a tiny run, its table, and that contestants which train otherwise are refused."""

import json
import math
import subprocess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks.bursts import gloo
from benchmarks.data_parallel import DDP, OURS, OURS_PER_RANK, PLAIN, SYNCHRONISED, Contests, as_table, parse, summarise
from benchmarks.turns import Contestant
from mpi4dl.comm import Communicator, Refusal
from tests.benchmarks.checks import assert_picture, assert_refused
from tests.pool.ranks import Ranks
from tests.pool.zygote import ROOT, python

TINY = ["--model", "small_resnet", "--batch-size", "2", "--image-size", "32", "--steps", "1", "--rounds", "1"]
ALONE: list[dict[str, Any]] = [{"seconds": {OURS: 0.5, DDP: 0.5, PLAIN: 0.4}} for _ in range(3)]
TOGETHER: list[dict[str, Any]] = [{"seconds": {OURS: ours, DDP: 1.0, OURS_PER_RANK: 0.5}} for ours in (0.5, 1.0, 2.0)]
TABLE = """                     ranks  images/s of a rank  images/s in all  median step ms  over DDP    (min-max)
-------------------  -----  ------------------  ---------------  --------------  --------  -----------
plain PyTorch            1        10.0 +- 0.0      10.0 +- 0.0             400      1.25  (1.25-1.25)
ours                     1         8.0 +- 0.0       8.0 +- 0.0             500      1.00  (1.00-1.00)
DDP                      1         8.0 +- 0.0       8.0 +- 0.0             500      1.00  (1.00-1.00)
ours                     2         4.7 +- 4.9       9.3 +- 9.8            1000      1.00  (0.50-2.00)
ours, norm per rank      2         8.0 +- 0.0      16.0 +- 0.0             500      2.00  (2.00-2.00)
DDP                      2         4.0 +- 0.0       8.0 +- 0.0            1000      1.00  (1.00-1.00)"""


def results() -> list[dict[str, Any]]:
    return summarise([Contestant("1", 1, [], ALONE), Contestant("2", 2, [], TOGETHER)], batch_size=4)


def test_means_deviations_and_ratios_within_a_turn() -> None:
    row = next(r for r in results() if (r["name"], r["ranks"]) == (OURS, 2))
    assert row["images_per_second_of_a_rank"] == pytest.approx((8 + 4 + 2) / 3)
    assert row["spread"] == pytest.approx(1.96 * math.sqrt(56 / 9))
    assert row["speed_over_ddp"] == 1.0
    assert (row["speed_over_ddp_min"], row["speed_over_ddp_max"]) == (0.5, 2.0)


def test_the_table_of_results() -> None:
    assert as_table(results()).split() == TABLE.split()


def wrong_body(comm: Communicator) -> str:
    """The sum of gradients per rank is left out: each rank trains on its own."""

    def alone(self: Contests) -> Any:
        return self.loop(self.model(), self.images, self.labels)

    with gloo(comm), mock.patch.object(Contests, "ours_per_rank", alone), pytest.raises(Refusal) as caught:
        Contests(parse(TINY), comm, torch.float64).check()
    return str(caught.value)


def test_nothing_is_measured_where_a_contestant_trains_otherwise(ranks: Ranks) -> None:
    first, second = ranks(2).run(wrong_body)
    assert first == second
    assert "ours, norm per rank: the loss of step 1 is" in first


@pytest.mark.exhaustive
def test_a_tiny_benchmark_from_end_to_end(tmp_path: Path) -> None:
    out = tmp_path / "new" / "v1.5"
    command = [python(), "-m", "benchmarks.data_parallel", *TINY, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    saved = json.loads(Path(f"{out}.json").read_text())["results"]
    rows = saved["contestants"]
    assert [(row["name"], row["ranks"]) for row in rows] == [
        (PLAIN, 1), (OURS, 1), (DDP, 1), (OURS, 2), (OURS_PER_RANK, 2), (DDP, 2),
    ]  # fmt: skip
    for row in rows:
        assert row["images_per_second_of_a_rank"] == pytest.approx(2 / row["median_seconds"])
    assert saved["not_measured"] == {SYNCHRONISED: "SyncBatchNorm layers only work with GPU modules"}
    assert as_table(rows) in done.stdout
    assert_picture(f"{out}.png")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ranks", "two"], "--ranks two: write them as 1,2,4"),
        (["--ranks", "0,2"], "--ranks 0,2: a job has 1 rank at least"),
        (["--batch-size", "0"], "--batch-size is 0, but must be at least 1"),
    ],
)
def test_flags_that_cannot_be_measured_are_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_refused(parse, flags, message, capsys)
