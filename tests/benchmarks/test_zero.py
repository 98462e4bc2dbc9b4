"""benchmarks.zero: all variants train alike, live tensors are counted, and a tiny run with its table."""

import json
import subprocess
from pathlib import Path

import pytest
import torch

from benchmarks.bursts import first_losses, gloo
from benchmarks.live import LiveTensors
from benchmarks.zero import NAMES, PLAIN, as_table, count_bytes, parse, summarise
from benchmarks.zero_variants import VARIANTS, Task
from mpi4dl.comm import Communicator
from tests.benchmarks.checks import assert_picture, assert_refused
from tests.pool.ranks import Ranks
from tests.pool.zygote import ROOT, python

TURNS = [{PLAIN: 0.1, "ZeRO-3": ours, "FSDP2": 0.4, "ZeRO-1": 0.2} for ours in (0.1, 0.2, 0.8)]  # without ZeRO-1's peer
MEMORY = {name: {"live_bytes": 1600, "peak_bytes": 3 << 20} for name in TURNS[0]}
TABLE = """
               step ms  over plain  over its peer    (min-max)  bytes per parameter  formula  peak MiB
-------------  -------  ----------  -------------  -----------  -------------------  -------  --------
plain PyTorch      100        1.00              -            -                16.00    16.00         3
ZeRO-3             200        2.00           0.50  (0.25-2.00)                16.00     4.00         3
FSDP2              400        4.00              -            -                16.00     4.00         3
ZeRO-1             200        2.00              -            -                16.00    10.00         3"""


def test_the_table_of_medians_and_ratios_within_a_turn() -> None:
    rows = summarise(TURNS, MEMORY, num_ranks=4, num_parameters=100)
    assert "\n" + as_table(rows) == TABLE


def test_every_variant_has_the_formula_of_its_paper() -> None:
    formulas = {name: VARIANTS[name].formula(4) for name in (PLAIN, *NAMES)}
    assert formulas == {
        PLAIN: 16, "ZeRO-0": 16, "DDP": 16, "ZeRO-1": 10, "ZeroRedundancyOptimizer": 10, "ZeRO-2": 7, "FSDP2-kept": 4,
        "ZeRO-3": 4, "FSDP2": 4,
    }  # fmt: skip


def variants_body(comm: Communicator) -> dict[str, list[float]]:
    task = Task(features=16, num_layers=2, samples=2, size_px=32, ranks=comm.size)
    with gloo(comm):
        return {name: first_losses(comm, VARIANTS[name].make(task, comm).step, 3) for name in (PLAIN, *NAMES)}


def test_all_variants_train_as_plain_pytorch_does(ranks: Ranks) -> None:
    found = ranks(2).run(variants_body)[0]
    expected = found[PLAIN]
    assert expected[2] < expected[1] < expected[0]
    assert found == {name: pytest.approx(expected, rel=1e-5) for name in (PLAIN, *NAMES)}


def test_the_number_of_parameters_is_counted_without_any() -> None:
    task = Task(features=16, num_layers=2, samples=2, size_px=32, ranks=2)
    assert task.num_parameters == sum(p.numel() for p in task.model().parameters())


def memory_body(comm: Communicator, name: str) -> float:
    task = Task(features=64, num_layers=2, samples=1, size_px=16, ranks=comm.size)
    with gloo(comm):
        VARIANTS[name].make(task, comm).step()
        live = LiveTensors()
        trained = VARIANTS[name].make(task, comm)
        trained.step()
        return max(count_bytes(trained, live)) / task.num_parameters


@pytest.mark.parametrize(
    "name", ["ZeRO-2", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("ZeRO-0", "FSDP2"))]
)
def test_memory_is_that_of_the_formula(ranks: Ranks, name: str) -> None:
    for found in ranks(2).run(memory_body, name):
        assert found == pytest.approx(VARIANTS[name].formula(2), rel=0.03)


def test_live_tensors_count_each_storage_once() -> None:
    before = torch.zeros(1000)
    live = LiveTensors()
    flat = torch.zeros(100)
    views = [flat[:50], flat[50:].view(5, 10), before[:1]]
    assert live.num_bytes() == 400 + before.nbytes
    del flat, views
    assert live.num_bytes() == 0
    assert live.num_bytes([None, before]) == before.nbytes


@pytest.mark.exhaustive
def test_a_tiny_benchmark_from_end_to_end(tmp_path: Path) -> None:
    out = tmp_path / "new" / "v1.5"
    flags = ["--features", "32", "--layers", "1", "--steps", "1", "--rounds", "1", "--variants", "ZeRO-1"]
    command = [python(), "-m", "benchmarks.zero", *flags, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    saved = json.loads(Path(f"{out}.json").read_text())["results"]
    rows = saved["contestants"]
    assert [row["name"] for row in rows] == [PLAIN, "ZeRO-1"]
    assert as_table(rows) in done.stdout
    for row, expected in zip(rows, (16, 12), strict=True):
        assert row["bytes_per_parameter_by_formula"] == expected
        assert row["bytes_per_parameter"] == pytest.approx(expected, rel=0.1)
        assert row["median_seconds"] > 0
        assert row["over_plain"] == pytest.approx(row["median_seconds"] / rows[0]["median_seconds"])
    assert_picture(f"{out}.png")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ranks", "1"], "--ranks is 1, but ZeRO shares out what at least 2 ranks have"),
        (["--features", "100"], "--features 100 --image-size 32: 8 must divide the one, 16 the other"),
        (["--variants", "ZeRO-1,ZeRO-4"], "--variants ZeRO-4: choose of ZeRO-0, DDP, ZeRO-1"),
        (["--rounds", "0"], "--rounds is 0, but must be at least 1"),
    ],
)
def test_flags_that_cannot_be_measured_are_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_refused(parse, flags, message, capsys)
