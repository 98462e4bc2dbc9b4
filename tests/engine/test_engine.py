"""mpi4dl.engine: training by any plan equals a plain PyTorch loop over the whole images and the whole batch."""

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl.comm import Communicator
from mpi4dl.engine import Engine
from mpi4dl.engine.precision import AUTOCAST
from mpi4dl.parallel.cut import split
from mpi4dl.parallel.pipeline.local_stages import LocalStages
from mpi4dl.parallel.plan import Plan
from tests.pool.ranks import Ranks, on_ranks
from tests.support.short_runs import (
    ALIASED,
    ATTENDING,
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
    Outcome,
    Task,
    TILES_1x2,
    TILES_2x2,
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
DENSENET = Task("densenet121", (71, 45), batch=8).with_engine(clip_norm=1.0)

ONE, SQUARE, VERTICAL, HORIZONTAL = (1, 1), (2, 2), (1, 2), (2, 1)
PIPELINE = Plan((VERTICAL, ONE), microbatches=2)
MIRRORED = Plan((VERTICAL, ONE), microbatches=1, bidirectional=1)
STAGES = [PIPELINE, MIRRORED]
# As MPI4DL names them.
SCHEDULES = {
    "LP": Plan(schedule="layer", microbatches=2),
    "PP": Plan(schedule="1f1b", microbatches=4),
    "GEMS+LP": Plan((ONE, ONE), schedule="layer", bidirectional=1, microbatches=1),
    "GEMS+PP": Plan((ONE, ONE), schedule="1f1b", bidirectional=1, microbatches=2),
}
# Three stages of one rank each, or with SP a stage on tiles in front of one or two others; eight ranks at most.
PLACES = [
    *(((ONE,) * 3, data) for data in (1, 2)),
    ((SQUARE, ONE), 1),
    *(
        (tiles, data)
        for slicing in (VERTICAL, HORIZONTAL)
        for tiles, data in (((slicing, ONE), 1), ((slicing, ONE, ONE), 2))
    ),
]
COMBINATIONS = [
    replace(plan, tiles=tiles, batch_ways=(), data=data) for plan in SCHEDULES.values() for tiles, data in PLACES
]
FURTHER = [
    Plan((ONE, ONE), (1, 2), microbatches=2),  # ways of the last stage
    Plan((VERTICAL, ONE), (2, 1), microbatches=2),  # ways of the first stage, on tiles
    Plan((ONE, ONE, ONE), (1, 2, 1), data=2, microbatches=2),
    Plan((ONE, SQUARE), microbatches=2),
    Plan((SQUARE, VERTICAL, ONE), microbatches=2),
    Plan((HORIZONTAL, VERTICAL), data=2, microbatches=2),
    Plan((HORIZONTAL, HORIZONTAL), microbatches=2, schedule="gpipe"),
    Plan((ONE,) * 4, microbatches=4),
    Plan((ONE,) * 4, data=2, microbatches=1),  # more stages than microbatches
    Plan((ONE, ONE), microbatches=3, schedule="gpipe"),
    Plan((ONE, ONE), microbatches=4, schedule="interleaved", chunks=2),
    Plan((VERTICAL, ONE), data=2, microbatches=3, schedule="interleaved", chunks=2),
    Plan((VERTICAL,), microbatches=2, schedule="interleaved", chunks=3),
    Plan((ONE,) * 3, microbatches=4, schedule="zero-bubble"),
    Plan((HORIZONTAL, ONE), data=2, microbatches=3, schedule="zero-bubble"),
    Plan((VERTICAL, ONE), microbatches=2, schedule="zero-bubble", bidirectional=1),
    Plan((ONE, ONE), microbatches=2, bidirectional=2),  # two pairs of waves
    Plan((VERTICAL, ONE), data=2, microbatches=1, bidirectional=2, schedule="gpipe"),
    Plan((ONE, ONE), (2, 1), microbatches=2, bidirectional=1),
    Plan((VERTICAL, VERTICAL), microbatches=2, bidirectional=1),
    Plan((SQUARE,), data=2, microbatches=2),
]
# The validation ends with a batch of one image, which is less than every plan here has microbatches.
UNEQUAL = [
    Plan((VERTICAL, ONE), microbatches=4),
    Plan((ONE, ONE), data=2, microbatches=2),
    Plan((ONE, ONE), (1, 2), microbatches=3),
    Plan((ONE, ONE), bidirectional=1, microbatches=2),
]
# With a last stage that gives a class for every pixel.
LAST_ON_TILES = [
    Plan((VERTICAL, VERTICAL), microbatches=2),
    Plan((ONE, SQUARE), microbatches=2),
    Plan((SQUARE, HORIZONTAL), microbatches=2, schedule="zero-bubble"),
    Plan((ONE, VERTICAL), data=2, microbatches=2),
    Plan((VERTICAL, HORIZONTAL), bidirectional=1, microbatches=2),
    Plan((VERTICAL, ONE), (1, 2), microbatches=2),
    Plan((ONE, VERTICAL), microbatches=2, schedule="interleaved", chunks=2),
]
# With a stage that has no parameters.
THREE_STAGES = [
    Plan((VERTICAL, VERTICAL, ONE), microbatches=2),
    Plan((ONE, ONE, ONE), data=2, microbatches=2),
    Plan((ONE, ONE, ONE), microbatches=1, bidirectional=1),
    Plan((ONE, ONE, ONE), microbatches=2, schedule="zero-bubble"),
]


def some(number: int, tasks: Iterable[Task], plans: Iterable[Plan]) -> list[Any]:
    """Each task by each plan; so many, spread evenly over them, by default, and the others on demand."""
    cases = list(product(tasks, plans))
    kept = {(2 * i + 1) * len(cases) // (2 * number) for i in range(number)}
    return [pytest.param(*each, marks=[pytest.mark.exhaustive] * (i not in kept)) for i, each in enumerate(cases)]


CASES = [
    *some(2, [SMALL, DEEP], [TILES_1x2, TILES_2x2, DATA_2, BOTH]),
    *some(2, [UNEVEN, NARROWING], [DATA_2, TILES_2x2]),  # parts are neither equal nor filled
    *some(1, [DENSE], [TILES_2x2, BOTH]),
    *some(1, [task.with_engine(recompute=True) for task in (SMALL, DEEP, DENSE)], [BOTH]),
    *some(1, [SMALL.with_engine(clip_norm=norm) for norm in (0.1, 1e9)], [BOTH]),
    *some(1, [SMALL.with_engine(clip_value=0.01)], [BOTH, Plan(data=2, zero=2), Plan((ONE, ONE), microbatches=2)]),
    *some(1, [RESNET, AMOEBANET, UNET], COMBINATIONS),
    *some(2, [RESNET], FURTHER),
    *some(1, [replace(RESNET, batch=7)], UNEQUAL),
    *some(1, [UNET], LAST_ON_TILES),
    *some(1, [task.with_engine(recompute=True) for task in (RESNET, UNET)], STAGES),
    *some(1, [RESNET.with_engine(recompute=True)], [replace(PIPELINE, schedule="zero-bubble")]),
    *some(1, [RESNET.with_engine(clip_norm=0.5)], STAGES),
    *some(1, [replace(UNUSED, balance=(2, 2, 1))], THREE_STAGES),
    *some(1, [ALIASED], [Plan((ONE, ONE), microbatches=2)]),  # a layer of two names
    # A transformer is cut around its class token, a view of a parameter, which has no history where none is recorded.
    *some(
        1,
        [replace(ATTENDING, balance=cut) for cut in ((3, 4), (4, 3), (5, 2))],
        [Plan((ONE, ONE), data=2, microbatches=2)],
    ),
    *some(0, [TORCHVISION, DENSENET], [BOTH, *THREE_STAGES[:1]]),
]


@pytest.mark.parametrize(("task", "plan"), CASES, ids=label)
def test_training_equals_plain_pytorch(ranks: Ranks, task: Task, plan: Plan) -> None:
    check(ranks, task, plan)


def test_the_steps_that_are_clipped_are_those_that_should_be() -> None:
    free, norms = plain(SMALL).steps, [step.gradient_norm for step in plain(SMALL).steps]
    assert 0.1 < min(norms) < max(norms) < 1e9
    assert plain(SMALL.with_engine(clip_norm=0.1)).steps != free == plain(SMALL.with_engine(clip_norm=1e9)).steps
    assert plain(SMALL.with_engine(clip_value=0.01)).steps[1:] != free[1:]
    assert min(step.gradient_norm for step in plain(RESNET.with_engine(clip_norm=0.5), 2).steps) > 0.5


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("plan", [BOTH, *STAGES], ids=label)
@pytest.mark.sample(3)
def test_parameters_that_play_no_part_stay_as_they_are(ranks: Ranks, plan: Plan, optimizer: str) -> None:
    task = replace(UNUSED, optimizer=optimizer)
    check(ranks, task, plan)
    expected = plain(task, plan.num_microbatches)
    begin = build(task)[0].state_dict()
    for name in ("forgotten.weight", "frozen.weight"):
        assert torch.equal(expected.state[name], begin[name])
        assert expected.gradients.get(name) is None


class Aside(nn.Module):
    """Makes two predictions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.aside = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Linear(4, 3)
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(x).tanh()
        aside = self.aside(x.mean((2, 3)))
        return self.last(self.second(x).mean((2, 3))), aside


def loss_of_some(outputs: tuple[Tensor, Tensor], targets: Tensor, aside: int = 0) -> Tensor:
    """The loss of the first prediction, and of the other one if there is a class `aside` among the targets."""
    loss = F.cross_entropy(outputs[0], targets)
    return loss + F.cross_entropy(outputs[1], targets) if aside in targets else loss


class Detaching(Aside):
    """Trains its last layers alone."""

    def forward(self, x: Tensor) -> Any:
        return self.last(self.second(self.first(x).tanh()).detach().mean((2, 3)))


LEAVING_OUT = [Task(Aside, (12, 10), loss=partial(loss_of_some, aside=aside), optimizer="AdamW") for aside in (0, 9)]


@pytest.mark.parametrize("task", [*LEAVING_OUT, Task(Detaching, (12, 10), optimizer="AdamW")], ids=str)
@pytest.mark.parametrize("plan", [*STAGES, MIRRORED], ids=label)
@pytest.mark.sample(3)
def test_what_the_loss_leaves_out_has_no_gradient(ranks: Ranks, plan: Plan, task: Task) -> None:
    check(ranks, task, plan)


class Showing(Aside):
    """Returns a weight for the loss."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.last(self.second(self.first(x).tanh()).mean((2, 3))), self.last.weight


def loss_of_weight(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs[0], targets) + outputs[1].square().sum()


@pytest.mark.parametrize("plan", [DATA_2, *STAGES], ids=label)
def test_a_loss_uses_a_weight_that_the_model_returns(ranks: Ranks, plan: Plan) -> None:
    check(ranks, Task(Showing, (12, 10), loss=loss_of_weight), plan)


def dropped(ranks: Ranks, plan: Plan, recompute: bool = False) -> list[Outcome]:
    """Outcomes with dropout, where all ranks that hold a value have the same bits of it."""
    outcomes = ranks(plan.num_ranks).run(train, DROPPING.with_engine(recompute=recompute), plan)
    bits: dict[str, str] = {}
    for outcome in outcomes:
        for name, digest in outcome.digests.items():
            assert bits.setdefault(name, digest) == digest, name
    return outcomes


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("plan", [TILES_2x2, BOTH, *STAGES, replace(MIRRORED, data=2)], ids=label)
@pytest.mark.sample(2)
def test_the_same_seed_gives_the_same_bits(ranks: Ranks, plan: Plan, recompute: bool) -> None:
    first, second = (dropped(ranks, plan, recompute) for _ in range(2))
    assert [a.digests for a in first] == [b.digests for b in second]
    assert [a.steps for a in first] == [b.steps for b in second]


@pytest.mark.parametrize("plan", [TILES_2x2, *STAGES], ids=label)
@pytest.mark.sample(2)
def test_dropout_is_drawn_alike_when_it_is_recomputed(ranks: Ranks, plan: Plan) -> None:
    assert_like(dropped(ranks, plan, recompute=True)[0], dropped(ranks, plan)[0])


def test_dropout_does_not_depend_on_the_schedule(ranks: Ranks) -> None:
    kept = dropped(ranks, PIPELINE)[0]
    assert_like(dropped(ranks, replace(PIPELINE, schedule="zero-bubble"))[0], kept)
    assert kept.steps[0].loss != pytest.approx(dropped(ranks, MIRRORED)[0].steps[0].loss, rel=1e-6), "no dropout"


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


def large_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return 300 * F.cross_entropy(outputs, targets)


def with_autocast(comm: Communicator, task: Task, plan: Plan, precision: str, **options: Any) -> Engine:
    torch.manual_seed(0)
    if plan.num_stages > 1:
        stages = split(lambda: model_of(task).float(), plan, comm, image=(task.batch, 3, *task.size))
    else:
        stages = LocalStages.whole(model_of(task).float(), plan, comm)
    return Engine(stages, plan, optimizer_of(task, stages), task.loss, comm=comm, precision=precision, **options)


def step(engine: Engine, task: Task, number: int) -> tuple[float, float]:
    images, targets = batch_of(task, number)
    result = engine.step(tiles_of(images.float(), engine), targets, task.size)
    return result.loss, result.gradient_norm


def first_steps(
    comm: Communicator, task: Task, plan: Plan, precision: str, recompute: bool
) -> list[tuple[float, float]]:
    engine = with_autocast(comm, task, plan, precision, recompute=recompute)
    return [step(engine, task, number) for number in range(2)]


def steps_by_plain_autocast(task: Task, precision: str) -> list[tuple[float, float]]:
    model, optimizer = build(task)
    model.float()
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    found = []
    for number in range(2):
        images, targets = batch_of(task, number)
        optimizer.zero_grad()
        with torch.autocast("cpu", AUTOCAST[precision]):
            loss = task.loss(model(images.float()), targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        found.append((float(loss.detach()), float(nn.utils.clip_grad_norm_(model.parameters(), float("inf")))))
        scaler.step(optimizer)
        scaler.update()
    return found


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.sample(1)
def test_autocast_stays_near_plain_autocast(ranks: Ranks, precision: str) -> None:
    task = replace(SMALL, loss=small_loss)
    wanted = steps_by_plain_autocast(task, precision)
    assert all(math.isfinite(norm) for _, norm in wanted)
    for plan in (TILES_2x2, BOTH):
        for found in ranks(4).run(first_steps, task, plan, precision, plan == BOTH):
            assert [*sum(found, ())] == pytest.approx([*sum(wanted, ())], rel=0.05)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("plan", [TILES_2x2, BOTH, *STAGES, replace(PIPELINE, schedule="zero-bubble")], ids=label)
@pytest.mark.sample(3)
def test_autocast_stays_near_full_precision(ranks: Ranks, plan: Plan, precision: str) -> None:
    task = replace(RESNET, loss=small_loss)
    exact = plain(task, plan.num_microbatches).steps
    for found in ranks(plan.num_ranks).run(first_steps, task, plan, precision, plan == BOTH):
        for (loss, norm), expected in zip(found, exact, strict=False):
            assert loss == pytest.approx(expected.loss, rel=0.02)
            assert norm == pytest.approx(expected.gradient_norm, rel=0.2)
        assert found[0][0] != pytest.approx(exact[0].loss, rel=1e-6), "it was not on"


@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.sample(1)
@on_ranks(2)
def test_fp16_leaves_out_steps_that_overflow_until_its_scale_fits(comm: Communicator, clip_norm: float | None) -> None:
    """Steps of fp16 whose scaled gradients overflow at first: their norms, and which of them moved the weights."""
    task = replace(SMALL, loss=large_loss)
    engine = with_autocast(comm, task, TILES_1x2, "fp16", clip_norm=clip_norm)
    parameters = list(engine.stages.parameters())
    norms, moved = [], [False]
    while not moved[-1] and len(moved) < 20:
        before = [p.detach().clone() for p in parameters]
        norms.append(step(engine, task, 0)[1])
        moved.append(not all(torch.equal(a, b) for a, b in zip(before, parameters, strict=True)))
    moved, finite = moved[1:], all(bool(p.isfinite().all()) for p in parameters)
    assert moved == [False] * (len(moved) - 1) + [True]
    assert len(moved) > 1
    assert [math.isfinite(norm) for norm in norms] == moved
    assert finite


def with_infinite_gradients(module: nn.Module, values: Any, outputs: Any) -> None:
    first = outputs if isinstance(outputs, Tensor) else outputs[0]
    first.register_hook(lambda gradient: gradient * math.inf)


@pytest.mark.parametrize("plan", STAGES, ids=label)
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.sample(1)
@on_ranks()
def test_an_infinite_gradient_in_one_stage_makes_all_ranks_leave_the_step_out(
    comm: Communicator, plan: Plan, rank: int
) -> None:
    """Three steps of fp16, where gradients in a rank's stage are infinite in the second: norms, moves and scales."""
    task = replace(RESNET, loss=small_loss)
    engine = with_autocast(comm, task, plan, "fp16")
    finite, moved, scales = [], [], []
    for number in range(3):
        parameters = list(engine.stages.parameters())
        stage = next(s for s in range(plan.num_stages) for d in range(plan.num_directions) if rank in plan.ranks(d, s))
        modules = [engine.stages.modules_of[stage]] if number == 1 and stage in engine.stages.modules_of else []
        hooks = [module.register_forward_hook(with_infinite_gradients) for module in modules]
        before = [p.detach().clone() for p in parameters]
        finite.append(math.isfinite(step(engine, task, number)[1]))
        moved.append(not all(torch.equal(a, b) for a, b in zip(before, parameters, strict=True)))
        scales.append(engine.scaler.scale)
        for hook in hooks:
            hook.remove()
    assert finite == moved == [True, False, True]
    assert scales == [scales[0], scales[0] / 2, scales[0] / 2]
