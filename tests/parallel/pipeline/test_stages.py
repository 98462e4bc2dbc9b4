"""Stages, pipelines, GEMS, tiles and replicas together: every combination trains as a plain PyTorch loop does."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl.comm import Communicator
from mpi4dl.engine import Engine
from mpi4dl.parallel.cut import split
from mpi4dl.parallel.plan import Plan
from tests.pool.ranks import Ranks
from tests.support.short_runs import (
    ALIASED,
    ATTENDING,
    DEEP,
    DENSE,
    DROPPING,
    TORCHVISION,
    UNUSED,
    Outcome,
    Task,
    assert_like,
    batch_of,
    build,
    check,
    label,
    model_of,
    optimizer_of,
    plain,
    tiles_of,
    train,
)

# In smaller images, or fewer of them, batch norm sees so few values that plain PyTorch differs from itself by more
# than `EXACT` if it only computes in another memory format. An optimizer that divides by the gradient does likewise.
RESNET = replace(DEEP, batch=8)
UNET = replace(DENSE, batch=8)
AMOEBANET = Task("amoebanetd", (64, 64), batch=16, model_options=(("num_layers", 3), ("num_filters", 16))).with_engine(
    clip_norm=1.0
)

ONE = (1, 1)
SQUARE, VERTICAL, HORIZONTAL = (2, 2), (1, 2), (2, 1)
SLICINGS = {"square": SQUARE, "vertical": VERTICAL, "horizontal": HORIZONTAL}
SCHEDULES = {
    "LP": Plan(schedule="layer", microbatches=2),
    "PP": Plan(schedule="1f1b", microbatches=4),
    "GEMS+LP": Plan((ONE, ONE), schedule="layer", bidirectional=1, microbatches=1),
    "GEMS+PP": Plan((ONE, ONE), schedule="1f1b", bidirectional=1, microbatches=2),
}


def combination(name: str, data: int, slicing: str = "") -> Plan:
    """As MPI4DL names them: three stages of one rank each, or with SP a stage on tiles in front of one or two others.

    Eight ranks are the most that there are, so that a square leaves no room for a second replica.
    """
    if not slicing:
        return replace(SCHEDULES[name], tiles=(ONE,) * 3, batch_ways=(), data=data)
    behind = 1 if slicing == "square" or data == 1 else 2
    return replace(SCHEDULES[name], tiles=(SLICINGS[slicing], *(ONE,) * behind), batch_ways=(), data=data)


def everything() -> Iterator[Any]:
    """Each combination, with one replica and two, in each slicing, of which a choice is always run."""
    slicings = [(1, "square"), *((data, slicing) for slicing in ("vertical", "horizontal") for data in (1, 2))]
    for task, first in ((RESNET, 0), (AMOEBANET, 0), (UNET, 2)):
        for i, name in enumerate(SCHEDULES, start=first):
            chosen = slicings[i % len(slicings)] if i % 2 else (1 + i // 2 % 2, "")
            for j, where in enumerate([(1, ""), (2, ""), *slicings]):
                always = (where == chosen and task is not AMOEBANET) or (task is RESNET and (i + j) % 4 == 0)
                yield pytest.param(task, combination(name, *where), marks=[] if always else pytest.mark.exhaustive)


@pytest.mark.parametrize(("task", "plan"), list(everything()), ids=label)
@pytest.mark.sample(2)
def test_every_combination_equals_plain_pytorch(ranks: Ranks, task: Task, plan: Plan) -> None:
    check(ranks, task, plan)


FURTHER = {
    "ways of the last stage": Plan((ONE, ONE), (1, 2), microbatches=2),
    "ways of the first stage, on tiles": Plan((VERTICAL, ONE), (2, 1), microbatches=2),
    "ways come and go": Plan((ONE, ONE, ONE), (1, 2, 1), data=2, microbatches=2),
    "more tiles behind": Plan((ONE, SQUARE), microbatches=2),
    "fewer and fewer tiles": Plan((SQUARE, VERTICAL, ONE), microbatches=2),
    "other tiles": Plan((HORIZONTAL, VERTICAL), data=2, microbatches=2),
    "the same tiles": Plan((HORIZONTAL, HORIZONTAL), microbatches=2, schedule="gpipe"),
    "four stages": Plan((ONE,) * 4, microbatches=4),
    "more stages than microbatches": Plan((ONE,) * 4, data=2, microbatches=1),
    "gpipe": Plan((ONE, ONE), microbatches=3, schedule="gpipe"),
    "chunks": Plan((ONE, ONE), microbatches=4, schedule="interleaved", chunks=2),
    "chunks on tiles": Plan((VERTICAL, ONE), data=2, microbatches=3, schedule="interleaved", chunks=2),
    "chunks of one place": Plan((VERTICAL,), microbatches=2, schedule="interleaved", chunks=3),
    "zero bubble": Plan((ONE,) * 3, microbatches=4, schedule="zero-bubble"),
    "zero bubble on tiles": Plan((HORIZONTAL, ONE), data=2, microbatches=3, schedule="zero-bubble"),
    "zero bubble in both directions": Plan((VERTICAL, ONE), microbatches=2, schedule="zero-bubble", bidirectional=1),
    "two pairs of waves": Plan((ONE, ONE), microbatches=2, bidirectional=2),
    "two pairs of waves on tiles": Plan((VERTICAL, ONE), data=2, microbatches=1, bidirectional=2, schedule="gpipe"),
    "both directions with ways": Plan((ONE, ONE), (2, 1), microbatches=2, bidirectional=1),
    "both directions on the same tiles": Plan((VERTICAL, VERTICAL), microbatches=2, bidirectional=1),
    "one stage in microbatches": Plan((SQUARE,), data=2, microbatches=2),
}
PIPELINE = Plan((VERTICAL, ONE), microbatches=2)
MIRRORED = Plan((VERTICAL, ONE), microbatches=1, bidirectional=1)
BOTH = {"pipeline": PIPELINE, "mirrored": MIRRORED}


def further() -> Iterator[Any]:
    """Two of three; random plans are tried besides (test_random_plans.py)."""
    for number, (name, plan) in enumerate(FURTHER.items()):
        yield pytest.param(plan, marks=pytest.mark.exhaustive if number % 3 == 1 else [], id=name)


@pytest.mark.parametrize("plan", list(further()))
@pytest.mark.sample(2)
def test_stages_of_any_grids_in_any_order_equal_plain_pytorch(ranks: Ranks, plan: Plan) -> None:
    check(ranks, RESNET, plan)


@pytest.mark.parametrize(
    ("batch", "plan"),
    [
        (7, Plan((VERTICAL, ONE), microbatches=4)),
        (7, Plan((ONE, ONE), data=2, microbatches=2)),
        (7, Plan((ONE, ONE), (1, 2), microbatches=3)),
        (7, Plan((ONE, ONE), bidirectional=1, microbatches=2)),
    ],
    ids=label,
)
@pytest.mark.sample(2)
def test_microbatches_need_not_be_equal(ranks: Ranks, batch: int, plan: Plan) -> None:
    """The validation ends with a batch of one image, which is less than every plan here has microbatches."""
    check(ranks, replace(RESNET, batch=batch), plan)


@pytest.mark.parametrize(
    "plan",
    [
        Plan((VERTICAL, VERTICAL), microbatches=2),
        Plan((ONE, SQUARE), microbatches=2),
        Plan((SQUARE, HORIZONTAL), microbatches=2, schedule="zero-bubble"),
        Plan((ONE, VERTICAL), data=2, microbatches=2),
        Plan((VERTICAL, HORIZONTAL), bidirectional=1, microbatches=2),
        Plan((VERTICAL, ONE), (1, 2), microbatches=2),
        Plan((ONE, VERTICAL), microbatches=2, schedule="interleaved", chunks=2),
    ],
    ids=label,
)
@pytest.mark.sample(2)
def test_a_class_for_every_pixel_from_a_last_stage_on_tiles(ranks: Ranks, plan: Plan) -> None:
    check(ranks, UNET, plan)


@pytest.mark.parametrize("plan", BOTH.values(), ids=BOTH.keys())
@pytest.mark.parametrize("task", [RESNET, UNET], ids=str)
@pytest.mark.sample(1)
def test_recomputing_stages_changes_nothing(ranks: Ranks, task: Task, plan: Plan) -> None:
    check(ranks, task.with_engine(recompute=True), plan)


def test_recomputing_leaves_the_halves_of_a_backward_exact(ranks: Ranks) -> None:
    check(ranks, RESNET.with_engine(recompute=True), replace(PIPELINE, schedule="zero-bubble"))


@pytest.mark.parametrize("plan", BOTH.values(), ids=BOTH.keys())
@pytest.mark.sample(1)
def test_the_norm_to_clip_is_that_of_all_stages(ranks: Ranks, plan: Plan) -> None:
    task = RESNET.with_engine(clip_norm=0.5)
    check(ranks, task, plan)
    assert min(step.gradient_norm for step in plain(task, plan.num_microbatches).steps) > 0.5


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("plan", BOTH.values(), ids=BOTH.keys())
@pytest.mark.sample(1)
def test_parameters_that_play_no_part_stay_as_they_are(ranks: Ranks, plan: Plan, optimizer: str) -> None:
    task = replace(UNUSED, optimizer=optimizer)
    check(ranks, task, plan)
    expected = plain(task, plan.num_microbatches)
    begin = build(task)[0].state_dict()
    for name in ("forgotten.weight", "frozen.weight"):
        assert torch.equal(expected.state[name], begin[name])
        assert expected.gradients.get(name) is None


@pytest.mark.parametrize(
    "plan",
    [
        Plan((VERTICAL, VERTICAL, ONE), microbatches=2),
        Plan((ONE, ONE, ONE), data=2, microbatches=2),
        Plan((ONE, ONE, ONE), microbatches=1, bidirectional=1),
        Plan((ONE, ONE, ONE), microbatches=2, schedule="zero-bubble"),
    ],
    ids=label,
)
@pytest.mark.sample(1)
def test_a_stage_may_have_no_parameters(ranks: Ranks, plan: Plan) -> None:
    check(ranks, replace(UNUSED, balance=(2, 2, 1)), plan)


@pytest.mark.parametrize(
    ("task", "plan"),
    [
        (TORCHVISION, Plan((VERTICAL, VERTICAL, ONE), microbatches=2)),
        pytest.param(
            Task("densenet121", (71, 45), batch=8).with_engine(clip_norm=1.0),
            Plan((ONE, ONE, ONE), microbatches=2),
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=label,
)
@pytest.mark.exhaustive
def test_models_of_torchvision_in_three_stages(ranks: Ranks, task: Task, plan: Plan) -> None:
    check(ranks, task, plan)


def test_a_layer_of_several_names_is_where_one_of_them_is_used(ranks: Ranks) -> None:
    check(ranks, ALIASED, Plan((ONE, ONE), microbatches=2))


@pytest.mark.parametrize("counts", [(3, 4), (4, 3), (5, 2)], ids=str)
@pytest.mark.sample(1)
def test_a_transformer_is_cut_around_its_class_token(ranks: Ranks, counts: tuple[int, int]) -> None:
    """What is handed on may be a view of a parameter, which has no history where none is recorded."""
    check(ranks, replace(ATTENDING, balance=counts), Plan((ONE, ONE), data=2, microbatches=2))


def dropped(ranks: Ranks, plan: Plan, recompute: bool = False) -> list[Outcome]:
    """Outcomes with dropout, where all ranks that hold a value have the same bits of it."""
    outcomes = ranks(plan.num_ranks).run(train, DROPPING.with_engine(recompute=recompute), plan)
    bits: dict[str, str] = {}
    for outcome in outcomes:
        for name, digest in outcome.digests.items():
            assert bits.setdefault(name, digest) == digest, name
    return outcomes


@pytest.mark.parametrize("plan", [*BOTH.values(), replace(MIRRORED, data=2)], ids=label)
@pytest.mark.sample(1)
def test_the_same_seed_gives_the_same_bits(ranks: Ranks, plan: Plan) -> None:
    first, second = (dropped(ranks, plan) for _ in range(2))
    assert [a.digests for a in first] == [b.digests for b in second]
    assert [a.steps for a in first] == [b.steps for b in second]


@pytest.mark.parametrize("plan", BOTH.values(), ids=BOTH.keys())
@pytest.mark.sample(1)
def test_dropout_is_drawn_alike_when_it_is_recomputed(ranks: Ranks, plan: Plan) -> None:
    kept = dropped(ranks, plan)[0]
    assert_like(dropped(ranks, plan, recompute=True)[0], kept)


def test_dropout_does_not_depend_on_the_schedule(ranks: Ranks) -> None:
    kept = dropped(ranks, PIPELINE)[0]
    assert_like(dropped(ranks, replace(PIPELINE, schedule="zero-bubble"))[0], kept)
    assert kept.steps[0].loss != pytest.approx(dropped(ranks, MIRRORED)[0].steps[0].loss, rel=1e-6), "no dropout"


def small_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """So small that fp16 does not overflow."""
    return 0.01 * F.cross_entropy(outputs, targets)


def with_autocast(comm: Communicator, task: Task, plan: Plan, precision: str) -> Engine:
    stages = split(lambda: model_of(task).float(), plan, comm, image=(task.batch, 3, *task.size))
    return Engine(stages, plan, optimizer_of(task, stages), small_loss, comm=comm, precision=precision)


def step(engine: Engine, task: Task, number: int) -> tuple[float, float]:
    images, targets = batch_of(task, number)
    result = engine.step(tiles_of(images.float(), engine), targets, task.size)
    return result.loss, result.gradient_norm


def first_steps(comm: Communicator, task: Task, plan: Plan, precision: str) -> list[tuple[float, float]]:
    engine = with_autocast(comm, task, plan, precision)
    return [step(engine, task, number) for number in range(2)]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("plan", [*BOTH.values(), replace(PIPELINE, schedule="zero-bubble")], ids=label)
@pytest.mark.sample(1)
def test_autocast_stays_near_full_precision(ranks: Ranks, plan: Plan, precision: str) -> None:
    exact = plain(RESNET, plan.num_microbatches).steps[0]
    for (loss, norm), second in ranks(plan.num_ranks).run(first_steps, RESNET, plan, precision):
        assert loss == pytest.approx(0.01 * exact.loss, rel=0.02)
        assert norm == pytest.approx(0.01 * exact.gradient_norm, rel=0.1)
        assert loss != pytest.approx(0.01 * exact.loss, rel=1e-6), "it was not on"
        assert all(map(math.isfinite, second))


def with_infinite_gradients(module: nn.Module, values: Any, outputs: Any) -> None:
    first = outputs if isinstance(outputs, Tensor) else outputs[0]
    first.register_hook(lambda gradient: gradient * math.inf)


def overflow_on(comm: Communicator, plan: Plan, rank: int) -> tuple[list[bool], list[bool], list[float]]:
    """Three steps of fp16, where gradients in a rank's stage are infinite in the second: norms, moves and scales."""
    engine = with_autocast(comm, RESNET, plan, "fp16")
    finite, moved, scales = [], [], []
    for number in range(3):
        parameters = list(engine.stages.parameters())
        stage = next(s for s in range(plan.num_stages) for d in range(plan.num_directions) if rank in plan.ranks(d, s))
        modules = [engine.stages.modules_of[stage]] if number == 1 and stage in engine.stages.modules_of else []
        hooks = [module.register_forward_hook(with_infinite_gradients) for module in modules]
        before = [p.detach().clone() for p in parameters]
        finite.append(math.isfinite(step(engine, RESNET, number)[1]))
        moved.append(not all(torch.equal(a, b) for a, b in zip(before, parameters, strict=True)))
        scales.append(engine.scaler.scale)
        for hook in hooks:
            hook.remove()
    return finite, moved, scales


@pytest.mark.parametrize("plan", BOTH.values(), ids=BOTH.keys())
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.sample(1)
def test_an_infinite_gradient_in_one_stage_makes_all_ranks_leave_the_step_out(
    ranks: Ranks, plan: Plan, rank: int
) -> None:
    for finite, moved, scales in ranks(plan.num_ranks).run(overflow_on, plan, rank):
        assert finite == moved == [True, False, True]
        assert scales == [scales[0], scales[0] / 2, scales[0] / 2]
