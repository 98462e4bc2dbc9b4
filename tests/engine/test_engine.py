"""mpi4dl.engine: training by any plan equals a plain PyTorch loop over the whole images and the whole batch."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl.comm import Communicator
from mpi4dl.engine import Engine
from mpi4dl.parallel.plan import Plan
from tests.pool.ranks import Ranks
from tests.support.short_runs import (
    BOTH,
    DATA_2,
    DEEP,
    DENSE,
    DROPPING,
    NARROWING,
    NUM_STEPS,
    SMALL,
    TORCHVISION,
    UNEVEN,
    UNUSED,
    Task,
    TILES_1x2,
    TILES_2x2,
    assert_like,
    batch_of,
    build,
    check,
    plain,
    tiles_of,
    train,
)

FLOAT = torch.float32
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize("plan", [TILES_1x2, TILES_2x2, DATA_2, BOTH], ids=str)
@pytest.mark.parametrize("task", [SMALL, DEEP], ids=str)
@pytest.mark.sample(3)
def test_three_steps_equal_plain_pytorch(ranks: Ranks, task: Task, plan: Plan) -> None:
    check(ranks, task, plan)


@pytest.mark.exhaustive
def test_a_model_of_torchvision_equals_plain_pytorch(ranks: Ranks) -> None:
    check(ranks, TORCHVISION, BOTH)


@pytest.mark.parametrize(("task", "plan"), [(UNEVEN, DATA_2), (UNEVEN, BOTH), (NARROWING, TILES_2x2)], ids=str)
@pytest.mark.sample(1)
def test_parts_need_not_be_equal_nor_filled(ranks: Ranks, task: Task, plan: Plan) -> None:
    check(ranks, task, plan)


@pytest.mark.parametrize("plan", [TILES_2x2, BOTH], ids=str)
@pytest.mark.sample(1)
def test_a_class_for_every_pixel_with_targets_of_the_whole_image(ranks: Ranks, plan: Plan) -> None:
    check(ranks, DENSE, plan)


@pytest.mark.parametrize("task", [SMALL, DEEP, DENSE], ids=str)
@pytest.mark.sample(1)
def test_recomputing_changes_nothing(ranks: Ranks, task: Task) -> None:
    check(ranks, task.with_engine(recompute=True), BOTH)


@pytest.mark.parametrize("clip_norm", [0.1, 1e9])
@pytest.mark.sample(1)
def test_clipping_equals_plain_pytorch(ranks: Ranks, clip_norm: float) -> None:
    task = SMALL.with_engine(clip_norm=clip_norm)
    check(ranks, task, BOTH)
    clipped, free = plain(task), plain(SMALL)
    assert min(step.gradient_norm for step in free.steps) > 0.1
    assert max(step.gradient_norm for step in free.steps) < 1e9
    assert (clipped.steps != free.steps) == (clip_norm == 0.1)


@pytest.mark.parametrize("plan", [BOTH, Plan(data=2, zero=2), Plan(((1, 1), (1, 1)), microbatches=2)], ids=str)
@pytest.mark.sample(2)
def test_clipping_of_each_element_equals_plain_pytorch(ranks: Ranks, plan: Plan) -> None:
    task = SMALL.with_engine(clip_value=0.01)
    check(ranks, task, plan)
    assert plain(task).steps[1:] != plain(SMALL).steps[1:]


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_parameters_that_play_no_part_stay_as_they_are(ranks: Ranks, optimizer: str) -> None:
    task = Task(UNUSED.model, UNUSED.size, optimizer=optimizer)
    check(ranks, task, BOTH)
    begin = build(task)[0].state_dict()
    for name in ("forgotten.weight", "frozen.weight"):
        assert torch.equal(plain(task).state[name], begin[name])


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("plan", [TILES_2x2, BOTH], ids=str)
@pytest.mark.sample(1)
def test_the_same_seed_gives_the_same_bits(ranks: Ranks, plan: Plan, recompute: bool) -> None:
    task = DROPPING.with_engine(recompute=recompute)
    first, second = (ranks(plan.num_ranks).run(train, task, plan) for _ in range(2))
    assert [a.digests for a in first] == [b.digests for b in second]
    assert [a.steps for a in first] == [b.steps for b in second]
    assert all(a.digests == first[0].digests for a in first)


def test_dropout_is_drawn_alike_when_it_is_recomputed(ranks: Ranks) -> None:
    kept, again = (
        ranks(4).run(train, DROPPING.with_engine(recompute=recompute), TILES_2x2)[0] for recompute in (False, True)
    )
    assert_like(again, kept)


def recomputed(comm: Communicator, recompute: bool) -> tuple[int, int]:
    """How many batches a batch norm counted in three steps, and how often its forward ran."""
    model, optimizer = build(SMALL)
    engine = Engine(model, TILES_1x2, optimizer, F.cross_entropy, comm=comm, recompute=recompute)
    norm = model.get_submodule("stage2_block1.norm1")
    calls: list[int] = []
    norm.register_forward_hook(lambda *_: calls.append(1))
    for number in range(NUM_STEPS):
        images, targets = batch_of(SMALL, number)
        engine.step(tiles_of(images, engine), targets, SMALL.size)
    return int(norm.num_batches_tracked), len(calls)


def test_recomputing_runs_blocks_twice_and_counts_batches_once(ranks: Ranks) -> None:
    assert ranks(2).run(recomputed, False) == [(NUM_STEPS, NUM_STEPS)] * 2
    assert ranks(2).run(recomputed, True) == [(NUM_STEPS, 2 * NUM_STEPS)] * 2


def small_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """So small that neither fp16 overflows nor the rounding of a step grows in the next."""
    return 0.01 * F.cross_entropy(outputs, targets)


def autocast_by_engine(
    comm: Communicator, plan: Plan, precision: str, recompute: bool
) -> tuple[list[float], list[float]]:
    model, optimizer = build(SMALL)
    options = {"precision": precision, "recompute": recompute}
    engine = Engine(model.to(FLOAT), plan, optimizer, small_loss, comm=comm, **options)
    results = []
    for number in range(NUM_STEPS):
        images, targets = batch_of(SMALL, number)
        results.append(engine.step(tiles_of(images.to(FLOAT), engine), targets, SMALL.size))
    return [result.loss for result in results], [result.gradient_norm for result in results]


def autocast_by_plain_pytorch(precision: str) -> tuple[list[float], list[float]]:
    model, optimizer = build(SMALL)
    model.to(FLOAT)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    losses, norms = [], []
    for number in range(NUM_STEPS):
        images, targets = batch_of(SMALL, number)
        optimizer.zero_grad()
        with torch.autocast("cpu", AUTOCAST[precision]):
            loss = small_loss(model(images.to(FLOAT)), targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), float("inf"))))
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()))
    return losses, norms


@pytest.mark.parametrize("precision", AUTOCAST)
@pytest.mark.sample(1)
def test_autocast_stays_near_plain_autocast(ranks: Ranks, precision: str) -> None:
    losses, norms = autocast_by_plain_pytorch(precision)
    assert all(math.isfinite(norm) for norm in norms)
    for plan, recompute in ((TILES_2x2, False), (BOTH, True)):
        for our_losses, our_norms in ranks(4).run(autocast_by_engine, plan, precision, recompute):
            assert our_losses == pytest.approx(losses, rel=0.05)
            assert our_norms == pytest.approx(norms, rel=0.05)
            assert our_losses[0] != pytest.approx(0.01 * plain(SMALL).steps[0].loss, rel=1e-5), "it was not on"


def overflow(comm: Communicator, clip_norm: float | None) -> tuple[list[float], list[bool], bool]:
    """Steps of fp16 whose scaled gradients overflow at first: their norms, and which of them moved the weights."""
    model, optimizer = build(SMALL)

    def large(outputs: Tensor, targets: Tensor) -> Tensor:
        return 300 * F.cross_entropy(outputs, targets)

    engine = Engine(model.to(FLOAT), TILES_1x2, optimizer, large, comm=comm, precision="fp16", clip_norm=clip_norm)
    images, targets = batch_of(SMALL, 0)
    norms, moved = [], [False]
    while not moved[-1] and len(moved) < 20:
        before = [p.detach().clone() for p in model.parameters()]
        norms.append(engine.step(tiles_of(images.to(FLOAT), engine), targets, SMALL.size).gradient_norm)
        moved.append(not all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)))
    return norms, moved[1:], all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.sample(1)
def test_fp16_leaves_out_steps_that_overflow_until_its_scale_fits(ranks: Ranks, clip_norm: float | None) -> None:
    for norms, moved, finite in ranks(2).run(overflow, clip_norm):
        assert moved == [False] * (len(moved) - 1) + [True]
        assert len(moved) > 1
        assert [math.isfinite(norm) for norm in norms] == moved
        assert finite
