"""The training command over two nodes equals the same on one, to the bit; a node that dies ends the job at once."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.common.nodes import BURST_BYTES, ROOT, Cluster
from mpi4dl.datasets.slides.compose import Cohort
from tests.support.batch_scripts import SCRIPTS, Batch
from tests.support.commands import TINY, TRAIN, losses_of, train_command
from tests.support.interrupted import WEIGHTS, assert_the_same_run, saved_steps

RUN = (*TINY, "--num-samples", "16", "--epochs", "1", "--no-tensorboard")
PLANS = {
    "tiles": "--tiles 1x4",
    "stages": "--stages 2 --tiles 1x2,1x2 --microbatches 2",
    "replicas": "--data 4 --batch-size 8",
    "zero": "--tiles 1x2 --data 2 --zero 3",
}


def assert_near(folder: Path, tolerance: float) -> None:
    """The weights of both runs are equal but for the order of sums."""
    two, one = (load_file(folder / run / WEIGHTS) for run in ("two", "one"))
    for value in two:
        torch.testing.assert_close(two[value], one[value], rtol=tolerance, atol=tolerance / 10)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.exhaustive
def test_two_nodes_train_as_one(cluster: Cluster, tmp_path: Path, name: str) -> None:
    flags = (*RUN, *PLANS[name].split())
    over_two = cluster.run(2, *TRAIN, *flags, "--run-folder", str(tmp_path / "two"))
    assert over_two.returncode == 0, over_two.stderr
    assert train_command(4, *flags, "--run-folder", str(tmp_path / "one")).code == 0
    if name == "replicas":  # on one node the two levels are one, which adds up in another order
        assert_near(tmp_path, 1e-5)
    else:
        assert_the_same_run(tmp_path / "two", tmp_path / "one")


SMALL = (
    "--mpp 1 --patches 64 --model small_resnet --model-options num_filters=4 --weights none --max-steps 2 "
    "--log-interval 1 --num-workers 0 --no-tensorboard --save-every none"
).split()


@pytest.mark.exhaustive
def test_the_batch_script_of_two_nodes_trains_on_slides(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command of `cpu.sbatch`, with small slides and a small encoder."""
    slides = Cohort(6, 1, 700, (0.5,), (".tif",), 0.009)
    for number in range(len(slides)):
        slides.write(tmp_path / "slides", number)
    (tmp_path / "slides" / "slides.csv").write_text(slides.table())
    monkeypatch.setenv("TABLE", str(tmp_path / "slides" / "slides.csv"))
    for run in ("two", "one"):
        monkeypatch.setenv("RUN", str(tmp_path / run))
        (tmp_path / f"job {run}").mkdir()
        [[name, *words]] = Batch(SCRIPTS / "cpu.sbatch").commands(tmp_path / f"job {run}", *SMALL, ranks=4)
        assert name == "train"
        if run == "two":
            over_two = cluster.run(2, *TRAIN, *words)
            assert over_two.returncode == 0, over_two.stderr
        else:
            assert train_command(4, *words).code == 0
    assert_the_same_run(tmp_path / "two", tmp_path / "one")


@pytest.mark.exhaustive
def test_a_checkpoint_of_two_nodes_is_resumed_by_one(cluster: Cluster, tmp_path: Path) -> None:
    flags = (*RUN, "--tiles", "1x2", "--data", "2", "--run-folder", str(tmp_path / "run"))
    begun = cluster.run(2, *TRAIN, *flags, "--max-steps", "2")
    assert begun.returncode == 0, begun.stderr
    assert train_command(4, *flags, "--resume", "auto").code == 0
    assert train_command(4, *RUN, "--tiles", "1x2", "--data", "2", "--run-folder", str(tmp_path / "whole")).code == 0
    assert (tmp_path / "run" / WEIGHTS).read_bytes() == (tmp_path / "whole" / WEIGHTS).read_bytes()


@pytest.mark.parametrize("plan", ["--tiles 1x4", "--plan auto --resume auto"])
@pytest.mark.exhaustive
def test_the_job_ends_with_one_message_when_a_node_dies(cluster: Cluster, tmp_path: Path, plan: str) -> None:
    """By `--plan auto --resume auto` the same command goes on with the node that is left, as if nothing had been."""
    flags = (*RUN, "--epochs", "100000", "--log-interval", "1")
    go_on = (*flags, *plan.split(), "--run-folder", str(tmp_path / "run"), "--save-every", "2")
    with cluster.start(2, *TRAIN, *go_on) as job:
        assert job.stdout is not None
        for line in job.stdout:
            if "step 4 " in line:
                break
        found = subprocess.run(
            ["ip", "netns", "pids", f"{cluster.prefix}nodeb"], capture_output=True, text=True, check=True, timeout=60
        )
        began = time.monotonic()
        for process in map(int, found.stdout.split()):
            os.kill(process, signal.SIGKILL)
        _, error = job.communicate(timeout=300)
    assert job.returncode != 0
    assert time.monotonic() - began < 300
    assert error.count("Traceback") <= 1, error
    if "auto" in plan:
        last = str(saved_steps(tmp_path / "run")[0] + 3)
        assert train_command(2, *go_on, "--max-steps", last).code == 0
        assert train_command(1, *flags, "--run-folder", str(tmp_path / "whole"), "--max-steps", last).code == 0
        assert losses_of(tmp_path / "run") == pytest.approx(losses_of(tmp_path / "whole"), rel=1e-4)


@pytest.mark.exhaustive
def test_the_benchmark_of_sums_finds_two_nodes(cluster: Cluster, tmp_path: Path) -> None:
    """The node that ranks see is their own, so that two levels are two."""
    flags = "--nodes 2 --ranks 4 --sizes 4 --dtypes float32 --rounds 1 --iterations 2".split()
    command = [sys.executable, "-m", "benchmarks", "run", "allreduce", *flags, "--out", str(tmp_path / "sums")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        "all-reduce, half of the ranks on each of two nodes\n4 ranks, float32: microseconds\n"
    )
    assert "two-level" in done.stdout


@pytest.mark.exhaustive
def test_tokens_cross_the_network_to_their_experts(cluster: Cluster, tmp_path: Path) -> None:
    """Over two nodes of two ranks a journey is two, which adds up in another order than over one node."""
    flags = (
        "--text stdlib --model gpt --model-options num_layers=2,hidden=32,num_heads=2,num_experts=8 --context 32 "
        "--batch-size 8 --experts 4 --max-steps 3 --val-fraction 0.01 --eval-every none --no-tensorboard "
        "--optimizer SGD --lr-schedule constant"
    ).split()
    over_two = cluster.run(2, *TRAIN, *flags, "--run-folder", str(tmp_path / "two"))
    assert over_two.returncode == 0, over_two.stderr
    assert train_command(4, *flags, "--run-folder", str(tmp_path / "one")).code == 0
    assert_near(tmp_path, 1e-4)


DELAYED = """
import torch
from benchmarks.common.emulated import MonotonicClock, Network, emulated
from mpi4dl.comm import world
from mpi4dl.parallel.costs.cost_model import Link, measure_link

comm = world()
with emulated(comm, Network(Link(0.0, 0.0), Link(0.05, 0.0), ranks_per_node=2), MonotonicClock()) as delayed:
    assert delayed.nodes() == comm.nodes() == [[0, 1], [2, 3]]
    near, far = delayed.split_by_node(), measure_link(delayed, torch.device("cpu"))
    assert near.all_gather_object(near.rank) == [0, 1]
    if comm.rank == 0:
        print(far.latency_seconds)
"""


EXCHANGED = """
import time
import torch
from mpi4dl.comm import world

comm = world()
message = torch.zeros(1 << 20)
comm.barrier()
began = time.monotonic()
if comm.rank == 0:
    comm.send(message, 1)
    comm.recv(message, 1)
else:
    comm.recv(message, 0)
    comm.send(message, 0)
if comm.rank == 0:
    print(time.monotonic() - began)
"""


@pytest.mark.exhaustive
def test_messages_go_through_the_cable_at_its_rate(slow_cluster: Cluster) -> None:
    done = slow_cluster.run(1, "-c", EXCHANGED)
    assert done.returncode == 0, done.stderr
    assert slow_cluster.carried_bytes() >= 4 << 20
    # A cable may have up to a burst ahead of its rate.
    assert float(done.stdout) >= 2 * ((4 << 20) - BURST_BYTES) / 20e6


DRIVEN = """
import time
import torch
from mpi4dl.comm import world

comm = world()
message = torch.full((1 << 22,), float(1 - comm.rank))
request = comm.isend(message, 1) if comm.rank == 0 else comm.irecv(message, 0)
end = time.monotonic() + 120.0
while not bool((message == 1.0).all()) and time.monotonic() < end:  # as if it computed
    comm.node.drive()
arrived = comm.irecv(torch.zeros(1), 1) if comm.rank == 0 else comm.isend(torch.zeros(1), 0)
while not arrived.test():
    comm.node.drive()
print(bool((message == 1.0).all()))
request.wait()
"""


@pytest.mark.exhaustive
def test_messages_between_nodes_go_on_while_ranks_compute(cluster: Cluster) -> None:
    done = cluster.run(1, "-c", DRIVEN)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("True") == 2  # lines of two ranks may mix


@pytest.mark.exhaustive
def test_messages_between_nodes_are_as_late_as_asked(cluster: Cluster) -> None:
    done = cluster.run(2, "-c", DELAYED)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) >= 0.05
