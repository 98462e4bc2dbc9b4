"""benchmarks.bursts: who computes something else is refused, and a step takes as long as on the slowest rank."""

import time

import pytest
import torch
import torch.distributed

from benchmarks.bursts import burst_seconds, first_losses, gloo, must_agree
from mpi4dl.comm import Communicator, Refusal
from tests.commands import refusal
from tests.pool.job import mpirun
from tests.pool.ranks import Ranks


def losses_body(comm: Communicator) -> list[float]:
    remaining = [[1.0, 0.5], [3.0, 1.5]][comm.rank]
    return first_losses(comm, lambda: remaining.pop(0), 2)


@pytest.mark.exhaustive
def test_losses_are_the_means_over_the_ranks(ranks: Ranks) -> None:
    assert ranks(2).run(losses_body) == [[2.0, 1.0]] * 2


def refused_body(comm: Communicator) -> str:
    must_agree(comm, "close", [1.0, 2.00001], [1.0, 2.0], 1e-4)
    with pytest.raises(Refusal) as caught:
        must_agree(comm, "far", [1.0, 2.1 if comm.rank else 2.0, 9.0], [1.0, 2.0, 3.0], 1e-4)
    return str(caught.value)


@pytest.mark.exhaustive
def test_losses_that_differ_are_refused_on_all_ranks(ranks: Ranks) -> None:
    first, second = ranks(2).run(refused_body)
    assert first == second
    assert "far: the loss of step 2 is 9.000000 instead of 3.000000: nothing was measured" in first


def slow_body(comm: Communicator) -> tuple[float, int]:
    calls = []

    def step() -> float:
        calls.append(1)
        time.sleep(0.05 * comm.rank)
        return 0.0

    return burst_seconds(comm, step, 3, torch.device("cpu")), len(calls)


def test_a_burst_is_as_long_as_on_the_slowest_rank(ranks: Ranks) -> None:
    for seconds, calls in ranks(2).run(slow_body):
        assert 0.05 <= seconds < 0.5
        assert calls == 4


def gloo_body(comm: Communicator) -> tuple[float, bool]:
    with gloo(comm):
        value = torch.tensor(float(comm.rank + 1))
        torch.distributed.all_reduce(value)
    return float(value), torch.distributed.is_initialized()


def test_gloo_has_the_same_ranks_and_ends(ranks: Ranks) -> None:
    assert ranks(2).run(gloo_body) == [(3.0, False)] * 2
    assert ranks(2).run(gloo_body) == [(3.0, False)] * 2


REFUSED = """
from benchmarks.bursts import gloo
from mpi4dl.comm import world

with gloo(world()):
    world().agree("nothing was measured")
"""


def test_a_refusal_is_said_while_gloo_is_there() -> None:
    assert refusal(mpirun(2, "-c", REFUSED)) == "nothing was measured"
