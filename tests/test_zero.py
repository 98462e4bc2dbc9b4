"""ZeRO shares out what ranks would repeat, and trains as plain PyTorch does on the union of their batches."""

from dataclasses import replace

import pytest
from torch.nn import functional as F

from mpi4dl.comm import Communicator, Refusal
from mpi4dl.engine import Engine
from mpi4dl.parallel.plan import Plan
from tests.pool.ranks import Ranks
from tests.training import ATTENDING, DROPPING, UNUSED, Task, assert_like, batch_of, build, check, tiles_of, train

# Buckets so small that there are many, and that parameters are cut.
SMALL = Task("small_resnet", (32, 24), batch=16, model_options=(("num_filters", 4),), num_steps=5)
SMALL = SMALL.with_engine(bucket_bytes=1000, clip_norm=1.0)

PLANS = {
    "data2": Plan(data=2),
    "data4": Plan(data=4),
    "tiles": Plan(((1, 2),)),
    "tiles-data": Plan(((2, 1),), data=2),
    "accumulation": Plan(data=2, microbatches=2),
    "stages": Plan(((1, 1), (1, 1)), microbatches=2),
    "stages-data": Plan(((1, 1), (1, 1)), data=2, microbatches=2),
    "stages-tiles": Plan(((1, 2), (1, 1)), microbatches=2, schedule="gpipe"),
    "zero-bubble": Plan(((1, 1), (1, 1)), data=2, microbatches=2, schedule="zero-bubble"),
    "interleaved": Plan(((1, 2), (1, 2)), microbatches=2, schedule="interleaved", chunks=2),
    "gems": Plan(((1, 1), (1, 1)), bidirectional=1, microbatches=2),
    "gems-data": Plan(((1, 1), (1, 1)), bidirectional=1, data=2, microbatches=2),
    "gems-tiles": Plan(((1, 2), (1, 1)), bidirectional=1, microbatches=2),
    "gems-odd": Plan(((1, 1),) * 3, bidirectional=1),
}
OPTIMIZERS = ("SGD", "Adam", "AdamW", "RMSprop")
OFFLOADS = ("none", "cpu", "disk")


def cases() -> list[object]:
    """Every plan by every ZeRO stage, and every optimizer by every ZeRO stage and home; the others only on demand."""
    found = []
    for i, (name, plan) in enumerate(PLANS.items()):
        for zero in range(4):
            for j, optimizer in enumerate(OPTIMIZERS):
                for k, offload in enumerate(OFFLOADS):
                    chosen = (i + zero) % 4 == j and (i + zero) % 3 == k
                    marks = () if chosen or (name == "data2" and offload != "cpu") else (pytest.mark.exhaustive,)
                    case = (replace(plan, zero=zero), optimizer, offload)
                    found.append(pytest.param(*case, marks=marks, id=f"{name}-zero{zero}-{optimizer}-{offload}"))
    return found


@pytest.mark.parametrize(("plan", "optimizer", "offload"), cases())
def test_training_equals_plain_pytorch(ranks: Ranks, plan: Plan, optimizer: str, offload: str) -> None:
    options = dict(SMALL.engine_options)
    check(ranks, replace(SMALL, optimizer=optimizer).with_engine(**options, offload=offload), plan)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_transformer(ranks: Ranks, zero: int) -> None:
    """Its attention takes the parameters of a module that is never called."""
    check(ranks, ATTENDING.with_engine(bucket_bytes=500), Plan(data=2, zero=zero))


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_parameters_that_play_no_part_are_left_alone(ranks: Ranks, zero: int) -> None:
    check(ranks, UNUSED.with_engine(bucket_bytes=40, clip_norm=0.5), Plan(((1, 2),), zero=zero))


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_random_numbers_are_those_of_training_without_zero(ranks: Ranks, zero: int) -> None:
    task = DROPPING.with_engine(bucket_bytes=40)
    shared, repeated = (ranks(2).run(train, task, Plan(((1, 2),), zero=stage))[0] for stage in (zero, 0))
    assert_like(shared, repeated)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_an_optimizer_that_needs_whole_parameters_gets_them(ranks: Ranks, zero: int) -> None:
    check(ranks, replace(SMALL, optimizer="Adafactor"), Plan(data=4, zero=zero))


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("plan", [Plan(data=2), Plan(((1, 1), (1, 1)), data=2, microbatches=2)], ids=str)
def test_recomputed_blocks_find_their_parameters(ranks: Ranks, plan: Plan, zero: int) -> None:
    check(ranks, SMALL.with_engine(bucket_bytes=1000, recompute=True, clip_norm=0.1), replace(plan, zero=zero))


def come_apart(comm: Communicator, zero: int) -> list[str]:
    """What the check says before and after one rank changes one weight, or, under ZeRO 3, a buffer."""
    model, optimizer = build(SMALL)
    engine = Engine(model, Plan(data=comm.size, zero=zero), optimizer, F.cross_entropy, comm=comm)
    images, targets = batch_of(SMALL, 0)
    engine.step(tiles_of(images, engine), targets, SMALL.size)
    engine.check_replicas()
    if comm.rank == 1:
        (model.get_buffer if zero == 3 else model.get_parameter)(TOUCHED[zero == 3]).data[0] += 1e-9
    with pytest.raises(Refusal) as refused:
        engine.check_replicas()
    return [str(refused.value)]


TOUCHED = ("head.linear.weight", "stem.1.running_mean")


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_replicas_that_have_come_apart_are_found(ranks: Ranks, zero: int) -> None:
    for (said,) in ranks(3).run(come_apart, zero):
        assert said.startswith(f"replicas have come apart: {TOUCHED[zero == 3]} on ranks [1] of the 3")
