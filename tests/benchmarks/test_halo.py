"""benchmarks.halo: the exchange by hand is right, a wrong one is refused, and a whole benchmark on a tiny image."""

import json
import math
import subprocess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks import halo
from benchmarks.halo import MEASURES, RawExchange, as_tables, parse, summarise
from benchmarks.turns import Contestant
from mpi4dl.comm import Communicator, Refusal
from mpi4dl.geometry import even_cuts
from mpi4dl.parallel import spatial
from tests.benchmarks.checks import assert_picture, assert_refused
from tests.pool.ranks import Ranks
from tests.pool.zygote import ROOT, python

KEYS = {
    "measure", "grid", "ranks", "size_px", "moved_bytes", "microseconds", "baseline_microseconds", "ratio",
    "ratio_min", "ratio_max", "difference_microseconds",
}  # fmt: skip
RATES = {"megabytes_per_second", "baseline_megabytes_per_second"}
ANSWERS: list[dict[str, Any]] = [
    {"32": {"sent_bytes": 1000, "strips": [ours, 10.0], "forward": [ours, 20.0], "forward_backward": [ours, 20.0],
            "convolution": [ours, 5.0]}}
    for ours in (10.0, 20.0, 60.0)
]  # fmt: skip
TABLES = """
strips alone
           kB sent  ours us  raw mpi4py us  ratio    (min-max)  ours MB/s  raw MB/s
---------  -------  -------  -------------  -----  -----------  ---------  --------
1x2 32 px      1.0       20             10   2.00  (1.00-6.00)         50       100

exchange, forward
           kB sent  ours us  raw mpi4py us  ratio    (min-max)  ours MB/s  raw MB/s
---------  -------  -------  -------------  -----  -----------  ---------  --------
1x2 32 px      1.0       20             20   1.00  (0.50-3.00)         50        50

exchange, forward and backward
           kB sent  ours us  raw mpi4py us  ratio    (min-max)  ours MB/s  raw MB/s
---------  -------  -------  -------------  -----  -----------  ---------  --------
1x2 32 px      2.0       20             20   1.00  (0.50-3.00)        100       100

convolution, forward and backward
           kB sent  with exchange us  without us  ratio     (min-max)  difference us
---------  -------  ----------------  ----------  -----  ------------  -------------
1x2 32 px      2.0                20           5   4.00  (2.00-12.00)             15"""


def run(*flags: str) -> "subprocess.CompletedProcess[str]":
    command = [python(), "-m", "benchmarks.halo", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT)


def window(padded: Tensor, rows: int, cols: int, rank: int, halo: int, around: int) -> Tensor:
    """The tile of a rank, with a border of `around`, cut out of the whole image that is padded by `halo`."""
    high, wide = (even_cuts(padded.shape[dim] - 2 * halo, parts) for dim, parts in ((-2, rows), (-1, cols)))
    row, col = divmod(rank, cols)
    low, margin = halo - around, halo + around
    return padded[..., high[row] + low : high[row + 1] + margin, wide[col] + low : wide[col + 1] + margin]


def by_hand_body(comm: Communicator, rows: int, cols: int, halo: int) -> None:
    whole = torch.randint(-8, 9, (2, 3, 13, 11), dtype=torch.float64)
    tile = window(F.pad(whole, [halo] * 4), rows, cols, comm.rank, halo, 0)
    raw = RawExchange(comm.mpi, (rows, cols), tile, halo)
    expected = window(F.pad(whole, [halo] * 4), rows, cols, comm.rank, halo, halo)
    assert torch.equal(raw.forward(tile), expected)
    padded = F.pad(tile, [halo] * 4)
    raw.swap(padded)
    assert torch.equal(padded, expected)

    # What the gradients of all ranks' padded tiles add up to, computed by autograd on the whole image.
    leaf = whole.clone().requires_grad_()
    windows = [window(F.pad(leaf, [halo] * 4), rows, cols, rank, halo, halo) for rank in range(comm.size)]
    gradients = [torch.randint(-8, 9, each.shape).double() for each in windows]
    torch.autograd.backward(windows, gradients)
    assert leaf.grad is not None
    home = window(F.pad(leaf.grad, [halo] * 4), rows, cols, comm.rank, halo, 0)
    assert torch.equal(raw.adjoint(gradients[comm.rank]), home)


@pytest.mark.parametrize(("rows", "cols", "halo"), [(1, 2, 1), (2, 1, 3), (2, 2, 2), (3, 2, 1), (2, 4, 2)])
@pytest.mark.sample(1)
def test_the_exchange_by_hand_is_that_of_the_whole_image(ranks: Ranks, rows: int, cols: int, halo: int) -> None:
    ranks(rows * cols).run(by_hand_body, rows, cols, halo)


class Stale(RawExchange):
    """Rank 1 forgets a corner."""

    def forward(self, tile: Tensor) -> Tensor:
        padded = super().forward(tile)
        if self.mpi.rank == 1:
            padded[..., -2, 0] += 1
        return padded


class Lossy(RawExchange):
    """Rank 0 forgets what its neighbours add to its gradients."""

    def adjoint(self, gradient: Tensor) -> Tensor:
        result = super().adjoint(gradient)
        return self.tile_of(gradient).clone() if self.mpi.rank == 0 else result


def refused_body(comm: Communicator, kind: type[RawExchange]) -> str:
    options = parse(["--grids", "1x2", "--sizes", "16", "--channels", "2"])
    with mock.patch.object(halo, "RawExchange", kind), pytest.raises(Refusal) as caught:
        halo.contests(options, 16, spatial.Grid(comm, 1, 2))
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Stale, "rank 1: the padded tensor differs between our exchange and raw mpi4py's: nothing was measured"),
        (Lossy, "the gradient of the tile differs between our exchange and raw mpi4py's: nothing was measured"),
    ],
)
def test_nothing_is_measured_where_the_results_differ(ranks: Ranks, kind: type[RawExchange], message: str) -> None:
    assert ranks(2).run(refused_body, kind) == [message, message]


def test_medians_of_turns_and_ratios_within_a_turn() -> None:
    strips, *_, convolution = summarise([Contestant("1x2", 2, [], ANSWERS)])
    assert strips == {
        "measure": "strips", "grid": "1x2", "ranks": 2, "size_px": 32, "moved_bytes": 1000, "microseconds": 20.0,
        "baseline_microseconds": 10.0, "ratio": 2.0, "ratio_min": 1.0, "ratio_max": 6.0,
        "difference_microseconds": 10.0, "megabytes_per_second": 50.0, "baseline_megabytes_per_second": 100.0,
    }  # fmt: skip
    assert convolution["difference_microseconds"] == 15.0
    assert convolution["moved_bytes"] == 2000


def test_the_tables_of_results() -> None:
    assert as_tables(summarise([Contestant("1x2", 2, [], ANSWERS)])) == TABLES


@pytest.mark.exhaustive
def test_a_tiny_benchmark_from_end_to_end(tmp_path: Path) -> None:
    out = tmp_path / "new" / "v1.5"
    flags = ["--sizes", "32", "--grids", "1x2", "--channels", "4", "--iterations", "2", "--rounds", "1"]
    done = run(*flags, "--out", str(out))
    assert done.returncode == 0, done.stderr
    title, *lines, saved = done.stdout.splitlines()
    assert title == "halo of 1, 4 channels, batch 1, float32, cpu"
    assert saved == f"saved {out}.json and {out}.png"
    results = json.loads(Path(f"{out}.json").read_text())["results"]
    assert results["settings"]["sizes"] == "32"
    assert "\n".join(lines) == as_tables(results["measurements"])
    assert [row["measure"] for row in results["measurements"]] == list(MEASURES)
    for row in results["measurements"]:
        assert set(row) == (KEYS if row["measure"] == "convolution" else KEYS | RATES)
        numbers = {k: v for k, v in row.items() if k not in ("measure", "grid", "difference_microseconds")}
        assert all(math.isfinite(number) and number > 0 for number in numbers.values()), numbers
        assert row["moved_bytes"] == 32 * 4 * 4 * MEASURES[row["measure"]].trips
        assert row["ratio"] == pytest.approx(row["microseconds"] / row["baseline_microseconds"])
    assert_picture(f"{out}.png")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--grids", "2by2"], "--sizes 256,512,1024 --grids 2by2: write them as 256,512 and 1x2,2x2"),
        (["--sizes", "big"], "--sizes big --grids 1x2,2x1,2x2: write them as 256,512 and 1x2,2x2"),
        (["--grids", "1x1"], "--grids 1x1: an exchange takes two ranks or more, as 1x2"),
        (["--rounds", "0"], "--rounds is 0, but must be at least 1"),
        (
            ["--sizes", "8", "--grids", "1x4", "--halo", "3"],
            "8 px on a grid of 1x4 are tiles of 2 px, less than --halo 3, which would reach beyond the neighbour",
        ),
    ],
)
def test_flags_that_cannot_be_measured_are_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_refused(parse, flags, message, capsys)
