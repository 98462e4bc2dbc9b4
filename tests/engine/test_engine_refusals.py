"""mpi4dl.engine: what is not finite, or not alike on all ranks, stops all ranks together with one clear message."""

import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl.comm import Communicator, Refusal
from mpi4dl.engine import Engine
from mpi4dl.engine.precision import INITIAL_SCALE
from mpi4dl.parallel.cut import split
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.spatial import NoRule
from tests.pool.job import mpirun
from tests.pool.ranks import Ranks, on_ranks
from tests.support.short_runs import (
    BOTH,
    NUM_CLASSES,
    SKIPPING,
    SMALL,
    Task,
    TILES_1x2,
    TILES_2x2,
    assert_like,
    batch_of,
    build,
    digest_of,
    engine_of,
    model_of,
    plain,
    step,
    tiles_of,
    train,
)


def everything(engine: Engine) -> dict[str, Any]:
    """Digests of all that a step changes on this rank, and the counters."""
    optimizer, scaler, executor = engine.optimizer, engine.scaler, engine.executor
    slots = {f"{i} {slot}": v for i, one in optimizer.state_dict()["state"].items() for slot, v in one.items()}
    absent = {f"{shard.name} {shard.start}": shard.value for shard in engine.shards()} | dict(engine.buffers())
    return {
        "model": digest_of(absent if engine.plan.zero == 3 else dict(engine.stages.state_dict())),
        "optimizer": digest_of({name: torch.as_tensor(value) for name, value in slots.items()}),
        "random": digest_of({"state": torch.get_rng_state()}),
        "counters": (engine.num_steps, executor.num_runs, scaler.scale, scaler.finite_steps, scaler.num_skipped),
    }


def infinite_gradient(outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss is 1, and the slope of the root at 0 is infinite."""
    return (outputs - outputs.detach()).abs().sum().sqrt() + 1.0


def refused_step(comm: Communicator, plan: Plan, bad_rank: int | None, options: dict[str, Any]) -> tuple[str, Any, Any]:
    """A good step; then one where a pixel of one rank's tile, or else the gradient, is not finite."""
    task = replace(SKIPPING, batch=8)
    model = split(lambda: model_of(task), plan, comm, image=(8, 3, *task.size))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    engine = Engine(model, plan, optimizer, F.cross_entropy, comm=comm, **options)
    images, targets = batch_of(task, 0)
    engine.step(tiles_of(images, engine), targets, task.size)
    tiles = tiles_of(images.clone(), engine)
    if bad_rank is None:
        engine.loss = infinite_gradient
    elif comm.rank == bad_rank:
        tiles[0][0, 0, 0, 0] = float("nan")
    before = everything(engine)
    with pytest.raises(Refusal) as caught:
        engine.step(tiles, targets, task.size)
    after = everything(engine)
    engine.loss = F.cross_entropy
    engine.step(tiles_of(images, engine), targets, task.size)
    return str(caught.value), before, after


@pytest.mark.parametrize(
    ("plan", "options"),
    [
        (TILES_2x2, {}),
        (BOTH, {}),
        (Plan(data=4, zero=3), {}),
        (Plan(((1, 2), (1, 2)), microbatches=2), {"recompute": True}),
        (Plan(((1, 1),) * 4, bidirectional=1), {}),
        (Plan(((1, 1),) * 4), {}),
    ],
    ids=str,
)
def test_a_loss_that_is_not_finite_stops_all_ranks_with_everything_as_it_was(
    ranks: Ranks, plan: Plan, options: dict[str, Any]
) -> None:
    results = ranks(4).run(refused_step, plan, 0, options)
    assert len({message for message, _, _ in results}) == 1
    for message, before, after in results:
        assert after == before
        assert re.match(r"step 1: the loss is not finite \(loss nan, gradient norm nan\); the weights are as", message)


def test_a_gradient_that_is_not_finite_stops_all_ranks_with_everything_as_it_was(ranks: Ranks) -> None:
    results = ranks(4).run(refused_step, TILES_2x2, None, {})
    assert len({message for message, _, _ in results}) == 1
    for message, before, after in results:
        assert after == before
        assert re.match(r"step 1: the gradient is not finite \(loss 1.0, gradient norm (nan|inf)\)", message)


@on_ranks(2)
def test_fp16_gives_up_after_20_steps_without_a_finite_gradient(comm: Communicator) -> None:
    """What is skipped changes batch norms alone, as with PyTorch's GradScaler."""
    begun = build(SKIPPING)[0].float().state_dict()
    model, optimizer = build(SKIPPING)
    engine = Engine(model.float(), TILES_1x2, optimizer, infinite_gradient, comm=comm, precision="fp16")
    images, targets = batch_of(SKIPPING, 0)
    tiles = tiles_of(images.float(), engine)
    skipped = [engine.step(tiles, targets, SKIPPING.size).skipped for _ in range(19)]
    with pytest.raises(Refusal) as caught:
        engine.step(tiles, targets, SKIPPING.size)
    message, scale, state = str(caught.value), engine.scaler.scale, dict(model.state_dict())
    assert message == (
        "step 19: the gradient of 20 steps in a row was not finite in fp16, down to a loss scale of 0.125; the "
        "weights are as before them: try `precision` bf16 or fp32"
    )
    assert skipped == [True] * 19
    assert scale == INITIAL_SCALE / 2**19
    for name, value in state.items():
        if name.endswith("num_batches_tracked"):
            assert value == 19
        else:
            assert torch.equal(value, begun[name]) == ("running" not in name), name


def unlike_targets(comm: Communicator, plan: Plan) -> tuple[list[str], list[Any]]:
    """Rank 1 has the labels of another batch: in a step, and in the last batch of an evaluation."""
    model = split(lambda: model_of(SMALL), plan, comm, image=(SMALL.batch, 3, *SMALL.size))
    engine = Engine(model, plan, torch.optim.SGD(model.parameters(), lr=0.05), F.cross_entropy, comm=comm)
    images, targets = batch_of(SMALL, 0)
    others = (targets + comm.rank) % NUM_CLASSES
    before, found = everything(engine), []
    for act in (
        lambda: engine.step(tiles_of(images, engine), others, SMALL.size),
        lambda: engine.evaluate([(tiles_of(images, engine, False), each) for each in (targets, others)], SMALL.size),
    ):
        with pytest.raises(Refusal) as caught:
            act()
        found.append(str(caught.value))
    return found, [before, everything(engine)]


@pytest.mark.parametrize("plan", [TILES_1x2, Plan(data=2), Plan(((1, 1), (1, 1)))], ids=str)
def test_ranks_that_were_given_other_targets_are_refused_together(ranks: Ranks, plan: Plan) -> None:
    for messages, (before, after) in ranks(2).run(unlike_targets, plan):
        assert all(message.startswith("the ranks were given the targets of other batches") for message in messages)
        assert after["model"] == before["model"]


def scheduled(engine: Engine) -> None:
    engine.optimizer.param_groups[0]["lr"] *= 0.5


def reloaded(engine: Engine) -> None:
    engine.stages.load_state_dict({name: value * 0.5 for name, value in engine.stages.state_dict().items()})


def seen(engine: Engine) -> None:
    engine.stages.modules_of[0](batch_of(SMALL, 1)[0])  # for a picture, say, which changes batch norms


def weighted(engine: Engine) -> None:
    engine.loss = partial(F.cross_entropy, weight=1 + torch.arange(NUM_CLASSES, dtype=SMALL.dtype))


def changed_on_rank_1(comm: Communicator, plan: Plan, change: Callable[[Engine], None]) -> str:
    """The error of the step after one rank alone has made this change."""
    engine, (images, targets) = engine_of(comm, SMALL, plan), batch_of(SMALL, 0)
    engine.step(tiles_of(images, engine), targets, SMALL.size)
    if comm.rank == 1:
        change(engine)
    with pytest.raises(Refusal) as caught:
        engine.step(tiles_of(images, engine), targets, SMALL.size)
    return str(caught.value)


@pytest.mark.parametrize(
    ("plan", "change", "words"),
    [
        (TILES_1x2, scheduled, "the ranks have different learning rates"),
        (Plan(data=2, zero=3), scheduled, "the ranks have different learning rates"),
        (TILES_1x2, reloaded, "ranks have different values of the same weights"),
        (Plan(data=2, zero=1), reloaded, "ranks have different values of the same weights"),
        (Plan(((1, 1), (1, 1)), bidirectional=1), reloaded, "ranks have different values of the same weights"),
        (Plan(data=2, zero=2), seen, "ranks have different values of the same weights"),
        (TILES_1x2, weighted, "the ranks computed other losses of the same outputs"),
    ],
    ids=lambda each: getattr(each, "__name__", str(each)),
)
def test_what_one_rank_alone_changes_is_refused_on_all(
    ranks: Ranks, plan: Plan, change: Callable[[Engine], None], words: str
) -> None:
    for message in ranks(2).run(changed_on_rank_1, plan, change):
        assert message.startswith(words)


@pytest.mark.parametrize("plan", [TILES_1x2, Plan(data=2, zero=3)], ids=str)
@on_ranks(2)
def test_a_loop_goes_on_after_an_error_that_all_ranks_had(comm: Communicator, plan: Plan) -> None:
    def failing(outputs: Tensor, targets: Tensor) -> Tensor:
        raise ArithmeticError

    engine = engine_of(comm, SMALL, plan)
    images, targets = batch_of(SMALL, 0)
    engine.loss = failing
    with pytest.raises(ArithmeticError):
        engine.step(tiles_of(images, engine), targets, SMALL.size)
    engine.loss = F.cross_entropy
    engine.step(tiles_of(images, engine), targets, SMALL.size)


AFTER_AN_ERROR = """
import torch
from torch import nn
import mpi4dl
from mpi4dl.comm import watchdog, world
from mpi4dl.engine import Engine
from mpi4dl.parallel.plan import Plan

watchdog.STUCK_SECONDS, watchdog.LOOK_SECONDS, comm, errors = 0.5, 0.2, world(), [MemoryError("the third step")]

class Model(nn.Sequential):
    def forward(self, x):
        if comm.rank and number == 2 and errors:
            raise errors.pop()
        return super().forward(x)

model = Model(nn.Conv2d(3, 2, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
step = {step}
for number in range(9):
    try:
        step()
    except MemoryError:
        pass
"""
STEPS = {
    "an engine": (
        "lambda engine=Engine(model, Plan(((1, 2),)), torch.optim.SGD(model.parameters(), lr=0.1), "
        "nn.functional.cross_entropy, comm=comm): engine.step(torch.randn(2, 3, 8, 4), torch.tensor([0, 1]), (8, 8))"
    ),
    "a loop of one's own": "lambda whole=mpi4dl.parallelize(model): whole(torch.ones(2, 3, 8, 8)).sum().backward()",
}


@pytest.mark.parametrize("how", STEPS)
def test_a_loop_that_goes_on_after_an_error_of_one_rank_ends(how: str) -> None:
    """The others are still in that step: their messages must not meet those of the next one."""
    job = mpirun(2, "-c", AFTER_AN_ERROR.format(step=STEPS[how]))
    assert job.code == 2
    assert "rank 1 goes on after an error that other ranks did not have" in job.stderr
    assert "MemoryError: the third step" in job.stderr


def alike(comm: Communicator) -> tuple[nn.Module, torch.optim.Optimizer]:
    return build(SMALL)


def with_another_width(comm: Communicator) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Conv2d(3, 4 + comm.rank // 2, 3))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def with_another_dtype(comm: Communicator) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Conv2d(3, 4, 3)).to(torch.float64 if comm.rank == 1 else torch.float32)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def with_a_layer_frozen(comm: Communicator) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3).requires_grad_(comm.rank != 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def with_another_learning_rate(comm: Communicator) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    return model, torch.optim.SGD(model.parameters(), lr=0.1 * (1 + comm.rank))


def with_another_optimizer(comm: Communicator) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    kind = torch.optim.AdamW if comm.rank == 3 else torch.optim.Adam
    return model, kind(model.parameters(), lr=0.1)


Make = Callable[[Communicator], tuple[nn.Module, torch.optim.Optimizer]]


def refused_engine(comm: Communicator, make: Make, options: dict[str, list[Any]]) -> str:
    """The message with which an engine is refused whose ranks differ; `options` hold a value for each rank."""
    model, optimizer = make(comm)
    mine: dict[str, Any] = {name: values[comm.rank] for name, values in options.items()}
    with pytest.raises(Refusal) as caught:
        Engine(model, TILES_2x2, optimizer, F.cross_entropy, comm=comm, **mine)
    return str(caught.value)


@pytest.mark.parametrize(
    ("make", "what", "rank"),
    [
        (with_another_width, "model", 2),
        (with_another_dtype, "model", 1),
        (with_a_layer_frozen, "model", 1),
        (with_another_learning_rate, "optimizer", 1),
        (with_another_optimizer, "optimizer", 3),
    ],
)
def test_ranks_that_were_built_differently_are_refused(ranks: Ranks, make: Make, what: str, rank: int) -> None:
    (message,) = set(ranks(4).run(refused_engine, make, {}))
    assert re.match(rf"the ranks were started differently: {what} is .* on rank 0 but .* on rank {rank}: ", message)


@pytest.mark.parametrize(
    ("name", "values", "shown"),
    [
        ("precision", ["bf16", "bf16", "bf16", "fp32"], "'bf16' on rank 0 but 'fp32' on rank 3"),
        ("recompute", [False, True, True, True], "False on rank 0 but True on rank 1"),
        ("clip_norm", [None, None, 1.0, 1.0], "None on rank 0 but 1.0 on rank 2"),
    ],
)
def test_ranks_with_different_settings_are_refused(ranks: Ranks, name: str, values: list[Any], shown: str) -> None:
    (message,) = set(ranks(4).run(refused_engine, alike, {name: values}))
    assert message == f"the ranks were started differently: {name} is {shown}: start all ranks with the same command"


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.rand(2, 3, 16, 16, dtype=torch.float64)).sum().backward()
    optimizer.step()


class Full(list[Any]):
    """There is no room for looking at it."""

    def __iter__(self) -> Iterator[Any]:
        raise MemoryError("no room for a copy")


def without_memory(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups = Full()


def of_another_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def with_an_odd_option(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups = None  # type: ignore[assignment]


ON_ONE_RANK = {
    "the optimizer has made steps already": stepped,
    "no room for a copy": without_memory,
    "the optimizer has parameters that the model does not have": of_another_model,
    "NoneType": with_an_odd_option,
}


def spoilt_on_one_rank(comm: Communicator, bad_rank: int, plan: Plan, message: str) -> tuple[str, str]:
    model = model_of(SMALL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if comm.rank == bad_rank:
        ON_ONE_RANK[message](model, optimizer)
    with pytest.raises((ValueError, RuntimeError, MemoryError, TypeError)) as caught:
        Engine(model, plan, optimizer, F.cross_entropy, comm=comm)
    comm.barrier()  # nobody is left in a call of before
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize("message", ON_ONE_RANK)
@pytest.mark.parametrize(("plan", "bad_rank"), [(Plan(data=2, zero=1), 1), (Plan(data=2, zero=3), 0)], ids=str)
def test_what_one_rank_alone_has_is_told_by_all(ranks: Ranks, message: str, plan: Plan, bad_rank: int) -> None:
    found = ranks(2, timeout=60.0).run(spoilt_on_one_rank, bad_rank, plan, message)
    assert all(message in text for _, text in found)
    assert message in found[1 - bad_rank][1]
    kind = {"no room for a copy": "MemoryError", "NoneType": "TypeError"}.get(message, "Refusal")
    assert found[bad_rank][0] == kind
    assert found[1 - bad_rank][0] == ("Refusal" if kind == "Refusal" else "RankFailed")


class Dropping(nn.Module):
    """Drops a branch for some samples, by numbers that the model draws itself, as stochastic depth does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3, padding=1)
        self.last = nn.Linear(4, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        kept = (torch.rand(len(x), 1, 1, 1, dtype=x.dtype) < 0.5).to(x.dtype)
        return self.last((x + self.second(x) * kept).mean((2, 3)))


@pytest.mark.parametrize(("plan", "drawing"), [(BOTH, True), (BOTH, False), (Plan(data=4), True)], ids=str)
@on_ranks(4)
def test_ranks_that_share_images_draw_alike(comm: Communicator, plan: Plan, drawing: bool) -> None:
    """A step with the same seed on all ranks is plain PyTorch's; one with others is refused where they share images."""
    task = replace(SMALL, batch=7)  # replicas have 4 and 3 of them
    torch.manual_seed(0)
    model = Dropping().double() if drawing else model_of(task)
    plain = copy.deepcopy(model)
    engine = Engine(model, plan, torch.optim.SGD(model.parameters(), lr=0.1), F.cross_entropy, comm=comm)
    images, targets = batch_of(task, 0)
    torch.manual_seed(5)
    loss = engine.step(tiles_of(images, engine), targets, task.size).loss
    torch.manual_seed(5)
    assert abs(loss - F.cross_entropy(plain(images), targets).item()) < 1e-12
    torch.manual_seed(comm.rank)
    before = everything(engine)
    if not (drawing and plan == BOTH):
        engine.step(tiles_of(images, engine), targets, task.size)
        return
    with pytest.raises(Refusal, match=r"^the model drew other random numbers on some ranks than on others"):
        engine.step(tiles_of(images, engine), targets, task.size)
    assert everything(engine) == before


@on_ranks(2)
def test_an_unknown_precision_is_refused(comm: Communicator) -> None:
    model, optimizer = build(SMALL)
    with pytest.raises(ValueError, match="precision is 'fp8', but must be one of fp32, bf16, fp16"):
        Engine(model, TILES_1x2, optimizer, F.cross_entropy, comm=comm, precision="fp8")


def test_the_values_of_rank_0_count(ranks: Ranks) -> None:
    outcomes = ranks(4).run(train, SMALL, BOTH, True)
    assert all(outcome.digests == outcomes[0].digests for outcome in outcomes)
    assert_like(outcomes[0], plain(SMALL))


def steep(outputs: Tensor, labels: Tensor) -> Tensor:
    (slopes,) = torch.autograd.grad(F.cross_entropy(outputs, labels), outputs, retain_graph=True)
    return F.cross_entropy(outputs, labels) + slopes.norm()


@on_ranks(2)
def test_a_loss_takes_no_gradient_of_what_ranks_share(comm: Communicator) -> None:
    task = Task(partial(nn.Conv2d, 3, NUM_CLASSES, 3, padding=1), (8, 8), dense=True, loss=steep)
    with pytest.raises(NoRule, match="each rank has a part: take it outside"):
        step(engine_of(comm, task, Plan(((1, 2),))), task, 0)
