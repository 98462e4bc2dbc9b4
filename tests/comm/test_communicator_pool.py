"""Communicators that nobody holds go back to MPI, which has some two thousand of them."""

import gc

import pytest
import torch
from torch import nn

from mpi4dl.comm import Communicator
from mpi4dl.engine import Engine
from mpi4dl.parallel import spatial
from mpi4dl.parallel.plan import Plan
from tests.pool.ranks import Ranks, on_ranks


def make_and_drop(comm: Communicator, grids: int, engines: int) -> int:
    for _ in range(grids):
        spatial.Grid(comm, rows=1, cols=2).along((1,))
        comm.split(0)
    for _ in range(engines):
        model = nn.Sequential(nn.Conv2d(1, 1, 1), nn.Flatten(), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = Engine(model, Plan(data=2), optimizer, nn.functional.cross_entropy, comm=comm)
        engine.step([torch.ones(1, 1, 2, 2)], torch.tensor([0, 1]), (2, 2))
    del engine, model, optimizer
    gc.collect()
    comm.split(0)
    return len(comm.pool)


@pytest.mark.exhaustive
def test_grids_and_engines_may_be_made_and_dropped_for_ever(ranks: Ranks) -> None:
    """More communicators than any MPI has."""
    assert max(ranks(2).run(make_and_drop, 5000, 5000)) < 20


@on_ranks(2)
def test_what_is_held_lives_on(comm: Communicator) -> None:
    kept = comm.split(0)
    for _ in range(300):
        comm.split(0)
    total = kept.all_reduce(torch.ones(2))
    total, alive = total.tolist(), len(comm.pool)
    assert total == [2.0, 2.0]
    assert alive <= 3
