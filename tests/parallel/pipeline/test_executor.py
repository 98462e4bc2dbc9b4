"""mpi4dl.parallel.pipeline.executor: what a run of a table keeps, draws and records."""

import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.common.meter import ActivationMeter
from mpi4dl.comm import Communicator
from mpi4dl.engine import Engine
from mpi4dl.parallel.cut import split
from mpi4dl.parallel.pipeline.local_stages import LocalStages
from mpi4dl.parallel.plan import Plan
from tests.pool.ranks import Ranks, on_ranks
from tests.support.short_runs import DROPPING, Task, batch_of, model_of, optimizer_of, tiles_of

NUM_STAGES, NUM_MICROBATCHES = 4, 8
ONES = ((1, 1),) * NUM_STAGES


class _Layer(nn.Module):
    """A layer of a known size of activations."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.convolution(x).sigmoid()


class _Last(nn.Module):
    """The same with a head, so that all stages are alike."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = _Layer()
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).mean((2, 3)))


def build() -> nn.Module:
    return nn.Sequential(*[_Layer() for _ in range(NUM_STAGES - 1)], _Last())


def engine_of(comm: Communicator, plan: Plan, px: int) -> Engine:
    stages = split(
        build,
        plan,
        comm,
        balance=(1,) * plan.num_stages,
        image=(1, 4, px, px),
        whole=("0", "1", "2", "3"),
    )
    return Engine(stages, plan, torch.optim.SGD(stages.parameters(), lr=0.1), F.cross_entropy, comm=comm)


def step(engine: Engine, batch_size: int, px: int) -> None:
    reads = engine.reads(batch_size, (px, px))
    tiles = [torch.zeros(read.box.batch.length, 4, px, px) for read in reads]
    engine.step(tiles, torch.zeros(batch_size, dtype=torch.int64), (px, px))


def kept_bytes(comm: Communicator, plan: Plan, batch_size: int) -> int:
    """The most that autograd keeps on this rank in a step."""
    engine, meter = engine_of(comm, plan, px=32), ActivationMeter()
    with meter.counting():
        step(engine, batch_size, 32)
    assert meter.live_bytes == 0
    return meter.peak_bytes


@pytest.mark.exhaustive
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
@pytest.mark.exhaustive
def test_gems_doubles_the_batch_and_keeps_hardly_more(ranks: Ranks, schedule: str) -> None:
    one_way = Plan(ONES, microbatches=4, schedule=schedule)
    both = Plan(ONES, microbatches=4, schedule=schedule, bidirectional=1)
    alone = ranks(NUM_STAGES).run(kept_bytes, one_way, 8)
    together = ranks(NUM_STAGES).run(kept_bytes, both, 16)
    assert max(together) <= 1.1 * max(alone)


def drawn_by_the_user(comm: Communicator, task: Task, plan: Plan, seed: int) -> tuple[list[list[float]], list[float]]:
    """What a user's own `torch.rand` gives before, between and after steps and validations; the losses, with dropout.

    Python's and NumPy's generators are not touched.
    """
    torch.manual_seed(seed)
    if plan.num_stages > 1:
        model = split(lambda: model_of(task), plan, comm, image=(task.batch, 3, *task.size))
    else:
        model = LocalStages.whole(model_of(task), plan, comm)
    engine = Engine(model, plan, optimizer_of(task, model), F.cross_entropy, comm=comm)
    before = (random.getstate(), np.random.get_state()[1].tolist())  # engines give ranks of one image those of rank 0
    torch.manual_seed(seed)
    drawn, losses = [torch.rand(3).tolist()], []
    for number in range(2):
        images, targets = batch_of(task, number)
        losses.append(engine.step(tiles_of(images, engine), targets, task.size).loss)
        drawn.append(torch.rand(3).tolist())
        engine.evaluate([(tiles_of(images, engine, training=False), targets)], task.size)
        drawn.append(torch.rand(3).tolist())
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    return drawn, losses


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(Plan(((1, 2),)), marks=pytest.mark.exhaustive),
        Plan(((1, 2), (1, 1)), microbatches=2),
        Plan(((1, 1), (1, 1)), microbatches=1, bidirectional=1),
    ],
    ids=str,
)
def test_the_users_random_numbers_follow_from_the_users_seed(ranks: Ranks, plan: Plan) -> None:
    """A step of one stage draws from the user's stream, as plain PyTorch does; stages have their own streams."""
    found = {seed: ranks(plan.num_ranks).run(drawn_by_the_user, DROPPING, plan, seed) for seed in (3, 4)}
    for seed, outcomes in found.items():
        drawn, losses = outcomes[0]
        assert outcomes == [(drawn, losses)] * plan.num_ranks
        generator = torch.Generator().manual_seed(seed)
        undisturbed = [torch.rand(3, generator=generator).tolist() for _ in drawn]
        assert (drawn == undisturbed) == (plan.num_stages > 1)
        assert len({number for numbers in drawn for number in numbers}) == 3 * len(drawn)
    assert found[3][0][1] != found[4][0][1]
    assert found[3][0][0] != found[4][0][0]


@on_ranks(4)
def test_a_profile_reads_like_the_timeline(comm: Communicator) -> None:
    """The actions of this rank's row, and the ranges in a profile of a step that are named after actions; any waits."""
    plan = Plan(((1, 1),) * NUM_STAGES, microbatches=4)
    engine = engine_of(comm, plan, 8)
    step(engine, 8, 8)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        step(engine, 8, 8)
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    names = [event.name.removeprefix("mpi4dl:") for event in events if event.name.startswith("mpi4dl:")]
    row = plan.table()[comm.rank % plan.ranks_per_replica]
    assert [name for name in names if " of stage " in name] == [str(action) for action in row]
    assert "wait" in names


@on_ranks(2)
def test_messages_to_other_nodes_are_driven_behind_each_module(comm: Communicator) -> None:
    """Two layers of two modules, or one of them and one of four, and the stage itself, for two microbatches.

    Behind a stage that is not the last there is no gradient of one tensor.
    """
    plan, drives = Plan(ONES[:2], microbatches=2), 0

    def probe() -> None:
        nonlocal drives
        drives += 1

    stages = split(build, plan, comm, balance=(2, 2), image=(1, 4, 8, 8), whole=("0", "1", "2", "3"))
    engine = Engine(stages, plan, torch.optim.SGD(stages.parameters(), lr=0.1), F.cross_entropy, comm=comm)
    comm.node.probe = probe
    try:
        step(engine, 2, 8)
    finally:
        comm.node.probe = None
    assert drives == [2 * (5 + 4), 2 * (7 + 7)][comm.rank]
    assert not torch.nn.modules.module._global_forward_hooks
