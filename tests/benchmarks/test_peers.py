"""benchmarks.peers: who computes the same, what is compared with whom, and a tiny run from end to end."""

import argparse
import json
import subprocess
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from benchmarks.bursts import first_losses
from benchmarks.peers import as_table, difference, reference_of, summarise
from benchmarks.peers_options import ENGINE, GLOO, METHODS, SIDES, Case, Contest, contests, num_stages, parse
from benchmarks.peers_variants import Task, join, plain
from benchmarks.turns import Contestant
from mpi4dl.comm import Communicator
from tests.benchmarks.checks import assert_picture, assert_refused
from tests.pool.ranks import Ranks
from tests.pool.zygote import ROOT, python

MEBIBYTE = 2**20
AMOEBA, TRANSFORMER = {"num_layers": 3, "num_filters": 8}, {"num_layers": 6, "features": 16}
EVERYONE = [Contest(method, side) for method in METHODS for side in SIDES]
FEW = {
    "amoebanetd": [Contest("1f1b", GLOO), Contest("zero-bubble", ENGINE)],
    "transformer": [Contest("interleaved", ENGINE), Contest("FSDP2", GLOO), Contest("DDP", ENGINE)],
}
TABLE = """
               images/s    (min-max)  CPU s  work s  idle s  peak MiB   over gloo    (min-max)   CPU  work  memory
-------------  --------  -----------  -----  ------  ------  --------  ----------  -----------  ----  ----  ------
plain PyTorch      2.00  (1.00-4.00)  2.000   2.000   0.500       100           -            -     -     -       -
1f1b, gloo         4.00  (2.00-5.00)  2.000   2.000   0.500        80           -            -     -     -       -
1f1b, backend      4.00  (2.00-5.00)  2.000   2.000   0.500        80  other loss            -     -     -       -
1f1b, engine       4.00  (4.00-6.00)  3.000   1.000   0.500        40        1.20  (0.80-3.00)  1.50  0.50    0.50"""


def tasks() -> list[Task]:
    return [Task("amoebanetd", AMOEBA, 32, 8, 4), Task("transformer", TRANSFORMER, 32, 8, 4)]


def losses_body(comm: Communicator, task: Task, chosen: list[Contest]) -> dict[Contest, list[float]]:
    """What the contestants' steps give on all ranks together."""
    found = {}
    for contest in chosen:
        stages = num_stages(contest, comm.size)
        joined = join(task, contest, task.counts(stages) if stages > 1 else (), comm)
        with joined.group, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what torch.distributed has to say of AmoebaNet's views
            found[contest] = [loss * comm.size for loss in first_losses(comm, joined.make(), 2)]
    return found


def assert_all_train_as_plain_pytorch_does(ranks: Ranks, task: Task, chosen: list[Contest], size: int) -> None:
    for contest, losses in ranks(size).run(losses_body, task, chosen)[0].items():
        number = reference_of(contest, Case(task.model, size), task.num_microbatches)
        step = plain(replace(task, num_microbatches=number))
        assert losses == pytest.approx([step(), step()], rel=1e-5), contest


@pytest.mark.parametrize("task", tasks(), ids=lambda task: task.model)
@pytest.mark.sample(1)
def test_contestants_train_as_plain_pytorch_does(ranks: Ranks, task: Task) -> None:
    assert_all_train_as_plain_pytorch_does(ranks, task, FEW[task.model], 2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("task", tasks(), ids=lambda task: task.model)
def test_all_contestants_train_as_plain_pytorch_does(ranks: Ranks, task: Task) -> None:
    assert_all_train_as_plain_pytorch_does(ranks, task, EVERYONE, 4)  # our backend wants all ranks of the pool


def test_the_plain_loop_is_the_mean_over_its_microbatches() -> None:
    task = tasks()[1]
    images, labels = task.batch()
    with torch.no_grad():
        expected = float(F.cross_entropy(task.layers()(images), labels))
    for number in (1, 4):
        assert plain(replace(task, num_microbatches=number))() == pytest.approx(expected, rel=1e-5)


def options(*flags: str) -> argparse.Namespace:
    return parse(["--steps", "1", "--methods", "1f1b", *flags])


def answers(speeds: list[float], cpu: float, work: float, mebibytes: int, loss: float) -> list[dict[str, Any]]:
    return [
        {
            "images_per_second": speed,
            "cpu_seconds": cpu,
            "work_seconds": work,
            "idle_seconds": 0.5,
            "peak_bytes": mebibytes * MEBIBYTE,
            "peak_bytes_of_ranks": [mebibytes * MEBIBYTE],
            "losses": [2.5, loss],
        }
        for speed in speeds
    ]


def contestants() -> list[Contestant]:
    return [
        Contestant("plain PyTorch", 1, [], answers([1, 2, 4], 2, 2, 100, 2.0)),
        Contestant("1f1b, gloo", 2, [], answers([5, 2, 4], 2, 2, 80, 2.00001)),
        Contestant("1f1b, backend", 2, [], answers([5, 2, 4], 2, 2, 80, 2.1)),
        Contestant("1f1b, engine", 2, [], answers([4, 6, 4.8], 3, 1, 40, 2.0)),
    ]


def test_ratios_are_to_the_same_over_gloo_unless_the_loss_is_another() -> None:
    rows = summarise(Case("transformer", 2), {"8": [2.5, 2.0, 1.5]}, contestants(), options())
    assert [row["peer"] for row in rows] == [None, None, None, "1f1b, gloo"]
    assert rows[2]["wrong"] == "the loss of step 1 is 2.100000 instead of 2.000000"
    assert rows[3]["over_peer_images_per_second"] == pytest.approx(1.2)
    assert rows[3]["over_plain_images_per_second"] == 3.0
    rows[3]["images_per_second"] = 4.0
    assert "\n" + as_table(rows) == TABLE


def test_each_allocator_has_its_own_peers() -> None:
    others = contestants()
    for each in others:
        each.allocator = "default"
    found = summarise(Case("transformer", 2), {"8": [2.5, 2.0, 1.5]}, [*contestants(), *others], options())
    assert [row["peer"] for row in found if row["side"] == ENGINE] == ["1f1b, gloo", "1f1b, gloo, default"]


def test_losses_are_compared_as_far_as_there_are_any() -> None:
    assert difference([1.0, 2.0], [1.0, 2.0 + 1e-5, 3.0]) is None
    assert difference([1.0, 2.0], [1.0, 2.01]) == "the loss of step 1 is 2.000000 instead of 2.010000"
    assert difference([float("nan")], [1.0]) is not None


def test_side_by_side_stand_those_who_train_alike() -> None:
    assert [str(contest) for contest in contests(options("--sides", "gloo,engine"))] == [
        "plain PyTorch", "1f1b, gloo", "1f1b, engine",
    ]  # fmt: skip


@pytest.mark.exhaustive
def test_a_tiny_benchmark_from_end_to_end(tmp_path: Path) -> None:
    out = tmp_path / "new" / "v1.5"
    flags = ["--quick", "--models", "transformer", "--ranks", "2", "--methods", "1f1b"]
    command = [python(), "-m", "benchmarks.peers", *flags, "--allocators", "default", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    saved = json.loads(Path(f"{out}.json").read_text())["results"]
    rows = saved["measurements"]
    assert saved["problems"] == []
    assert as_table(rows) in done.stdout
    assert [row["name"] for row in rows] == ["plain PyTorch", "1f1b, gloo", "1f1b, backend", "1f1b, engine"]
    for row in rows:
        assert row["wrong"] is None
        assert len(row["losses"]) == 2
        assert min(row["peak_bytes"], row["images_per_second"]) > 0
        assert 0 < row["work_seconds"] <= row["cpu_seconds"]
    assert rows[0]["work_seconds"] == rows[0]["cpu_seconds"]  # it waits for nobody
    assert rows[3]["work_seconds"] < rows[3]["cpu_seconds"]
    assert_picture(f"{out}_transformer_2.png")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--models", "resnet50"], "--models resnet50: choose of amoebanetd, transformer"),
        (["--methods", "1f1b,dualpipe"], "--methods dualpipe: choose of gpipe, 1f1b"),
        (["--ranks", "1,2"], "--ranks 1,2: peers share out what at least 2 ranks have"),
        (["--ranks", "3"], "--batch-size 16 --microbatches 8 --ranks 3: ranks must divide the microbatches"),
        (["--batch-size", "12"], "--batch-size 12 --microbatches 8 --ranks 2: ranks must divide the microbatches"),
        (["--allocators", "hoard"], "hoard: choose of default, keep, return, tcmalloc, jemalloc"),
        (["--rounds", "0"], "--rounds is 0, but must be at least 1"),
    ],
)
def test_flags_that_cannot_be_measured_are_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_refused(parse, flags, message, capsys)
