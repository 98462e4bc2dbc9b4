"""mpi4dl.parallel.pipeline.executor: what a run of a table keeps, and how long ranks stand idle in it."""

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl.comm import Communicator
from mpi4dl.engine import Engine
from mpi4dl.parallel.pipeline.held import split
from mpi4dl.parallel.pipeline.simulator import Costs, Simulation, simulate
from mpi4dl.parallel.plan import Plan
from mpi4dl.runtime.memory import ActivationMeter
from tests.pool.ranks import Ranks

NUM_STAGES, NUM_MICROBATCHES = 4, 8
FORWARD_SECONDS, BACKWARD_SECONDS = 0.03, 0.06
MOST_STEPS, TOLERANCE = 20, 0.1
ONES = ((1, 1),) * NUM_STAGES


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(FORWARD_SECONDS)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        time.sleep(BACKWARD_SECONDS)
        return gradient


class _Layer(nn.Module):
    """A layer of a known size of activations, which may take its time."""

    def __init__(self, sleeps: bool) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(4, 4, 3, padding=1)
        self.sleeps = sleeps

    def forward(self, x: Tensor) -> Tensor:
        x = self.convolution(x).sigmoid()
        return _Sleep.apply(x) if self.sleeps else x


class _Last(nn.Module):
    """The same with a head, so that all stages are alike."""

    def __init__(self, sleeps: bool) -> None:
        super().__init__()
        self.layer = _Layer(sleeps)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).mean((2, 3)))


def build(sleeps: bool) -> nn.Module:
    return nn.Sequential(*[_Layer(sleeps) for _ in range(NUM_STAGES - 1)], _Last(sleeps))


def engine_of(comm: Communicator, plan: Plan, sleeps: bool, px: int) -> Engine:
    held = split(
        lambda: build(sleeps),
        plan,
        comm,
        balance=(1,) * plan.num_stages,
        image=(1, 4, px, px),
        whole=("0", "1", "2", "3"),
    )
    return Engine(held, plan, torch.optim.SGD(held.parameters(), lr=0.1), F.cross_entropy, comm=comm)


def step(engine: Engine, batch_size: int, px: int) -> None:
    reads = engine.reads(batch_size, (px, px))
    tiles = [torch.zeros(read.box.batch.length, 4, px, px) for read in reads]
    engine.step(tiles, torch.zeros(batch_size, dtype=torch.int64), (px, px))


def measured_bubble(comm: Communicator, plan: Plan, expected: float) -> float:
    """In the fastest of some steps, since a busy machine only makes them slower: three, or more until it is so."""
    engine = engine_of(comm, plan, sleeps=True, px=8)
    step(engine, plan.num_microbatches, 8)
    engine.executor.records = True
    found: list[Simulation] = []
    bubble = 0.0
    while len(found) < 3 or (len(found) < MOST_STEPS and bubble != pytest.approx(expected, rel=TOLERANCE)):
        step(engine, plan.num_microbatches, 8)
        rows = comm.all_gather_object(tuple(engine.executor.spans))
        found.append(Simulation(tuple(rows), (0,) * comm.size))
        bubble = min(found, key=lambda simulation: simulation.makespan_seconds).bubble
    return bubble


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_measured_bubble_is_the_simulated_one(ranks: Ranks, schedule: str) -> None:
    """Stages sleep, since there may be fewer cores than ranks: what is measured is the executor's own waiting."""
    plan = Plan(ONES, microbatches=NUM_MICROBATCHES, schedule=schedule)
    costs = Costs.equal(NUM_STAGES, FORWARD_SECONDS, BACKWARD_SECONDS)
    simulated = simulate(plan.table(), plan.placement, costs).bubble
    measured = ranks(NUM_STAGES).run(measured_bubble, plan, simulated)
    assert measured[0] == pytest.approx(simulated, rel=TOLERANCE)
    assert simulated == pytest.approx((NUM_STAGES - 1) / (NUM_MICROBATCHES + NUM_STAGES - 1))


def kept_bytes(comm: Communicator, plan: Plan, batch_size: int) -> int:
    """The most that autograd keeps on this rank in a step."""
    engine, meter = engine_of(comm, plan, sleeps=False, px=32), ActivationMeter()
    with meter.counting():
        step(engine, batch_size, 32)
    assert meter.live_bytes == 0
    return meter.peak_bytes


def test_1f1b_keeps_as_many_microbatches_as_stages_follow_and_gpipe_all(ranks: Ranks) -> None:
    def of(schedule: str, microbatches: int) -> list[int]:
        return ranks(NUM_STAGES).run(
            kept_bytes, Plan(ONES, microbatches=microbatches, schedule=schedule), 2 * microbatches
        )

    one = of("layer", 1)
    gpipe, one_f_one_b = of("gpipe", NUM_MICROBATCHES), of("1f1b", NUM_MICROBATCHES)
    # Labels and what the loss keeps of them, a few bytes an image, are views of what the microbatches share.
    few_bytes = 32 * NUM_MICROBATCHES
    assert gpipe == pytest.approx([NUM_MICROBATCHES * kept for kept in one], rel=0, abs=few_bytes)
    assert one_f_one_b == pytest.approx([(NUM_STAGES - s) * kept for s, kept in enumerate(one)], rel=0, abs=few_bytes)


@pytest.mark.parametrize("schedule", ["layer", "gpipe", "1f1b"])
def test_gems_doubles_the_batch_and_keeps_hardly_more(ranks: Ranks, schedule: str) -> None:
    one_way = Plan(ONES, microbatches=4, schedule=schedule)
    both = Plan(ONES, microbatches=4, schedule=schedule, bidirectional=1)
    alone = ranks(NUM_STAGES).run(kept_bytes, one_way, 8)
    together = ranks(NUM_STAGES).run(kept_bytes, both, 16)
    assert max(together) <= 1.1 * max(alone)
