"""Hooks see what they see in plain PyTorch, whole gradients and whole steps, or are refused."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from mpi4dl.comm import Communicator, Refusal
from mpi4dl.engine import Engine
from mpi4dl.parallel.cut import split
from mpi4dl.parallel.pipeline.local_stages import LocalStages
from mpi4dl.parallel.plan import Plan
from tests.pool.ranks import Ranks, on_ranks
from tests.support.short_runs import (
    BOTH,
    DATA_2,
    HOOKED,
    NUM_CLASSES,
    NUM_STEPS,
    SKIPPING,
    UNUSED,
    Task,
    TILES_1x2,
    TILES_2x2,
    batch_of,
    build,
    check,
    model_of,
    tiles_of,
)

STAGES = Plan(((1, 2), (1, 1)), microbatches=2)
GEMS = Plan(((1, 1), (1, 1)), bidirectional=1, microbatches=2)
ZERO = [Plan(data=2, zero=zero) for zero in (1, 2, 3)]


def normalized(name: str, gradient: Tensor) -> Tensor:
    """Of a norm below 1, and in the last layer of limited elements."""
    return gradient.clamp(-0.01, 0.01) if name.startswith("last") else gradient / (gradient.norm() + 0.1)


@pytest.mark.parametrize(
    "plan",
    [TILES_2x2, *ZERO, Plan(((1, 2),), data=2, zero=3), STAGES, GEMS, Plan(((1, 1),) * 2, data=2, zero=2)],
    ids=str,
)
@pytest.mark.sample(3)
def test_a_gradient_hook_sees_and_changes_whole_gradients(ranks: Ranks, plan: Plan) -> None:
    check(ranks, SKIPPING.with_engine(gradient_hook=normalized, bucket_bytes=100, clip_norm=0.5), plan)


def test_a_gradient_hook_is_not_called_for_what_has_no_gradient(ranks: Ranks) -> None:
    check(ranks, UNUSED.with_engine(gradient_hook=normalized), BOTH)


def draw(name: str, gradient: Tensor) -> None:
    gradient.add_(torch.randn_like(gradient))


def step_with(comm: Communicator, hook: Any, options: dict[str, Any]) -> tuple[list[tuple[str, float]], float]:
    """What the hook saw in the step of a scaled loss, and the norm after it, from ranks in other random states."""
    model, optimizer = build(SKIPPING)
    seen: list[tuple[str, float]] = []

    def watch(name: str, gradient: Tensor) -> Any:
        seen.append((name, float(gradient.double().norm())))
        return hook(name, gradient)

    engine = Engine(
        model.float(), Plan(((1, 2),)), optimizer, F.cross_entropy, comm=comm, gradient_hook=watch, **options
    )
    torch.manual_seed(comm.rank)
    images, targets = batch_of(SKIPPING, 0)
    result = engine.step(tiles_of(images.float(), engine), targets, SKIPPING.size)
    engine.check_replicas()
    return seen, result.gradient_norm


def test_a_gradient_hook_draws_alike_on_all_ranks(ranks: Ranks) -> None:
    first, second = ranks(2).run(step_with, draw, {})
    assert first == second


def keep(name: str, gradient: Tensor) -> None:
    pass


def test_a_gradient_hook_sees_gradients_without_the_scale_of_fp16(ranks: Ranks) -> None:
    (full, norm), _ = ranks(2).run(step_with, keep, {})
    assert [name for name, _ in full] == [name for name, _ in build(SKIPPING)[0].named_parameters()]
    for options in ({"precision": "fp16"}, {"precision": "fp16", "low_precision_weights": True}):
        (half, half_norm), _ = ranks(2).run(step_with, keep, options)
        assert [name for name, _ in half] == [name for name, _ in full]
        assert half_norm == pytest.approx(norm, rel=0.05)
        assert [size for _, size in half] == pytest.approx([size for _, size in full], rel=0.1, abs=0.1 * norm)


def seen_and_gathered(comm: Communicator, options: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    seen: dict[str, Tensor] = {}
    model, optimizer = build(SKIPPING)
    hook = lambda name, gradient: seen.__setitem__(name, gradient.clone())  # noqa: E731
    engine = Engine(model.float(), DATA_2, optimizer, F.cross_entropy, comm=comm, gradient_hook=hook, **options)
    images, targets = batch_of(SKIPPING, 0)
    engine.step(tiles_of(images.float(), engine), targets, SKIPPING.size)
    return seen, engine.gather_gradients()


@pytest.mark.parametrize("options", [{"precision": "bf16", "low_precision_weights": True}, {"offload": "cpu"}], ids=str)
def test_gathered_gradients_are_those_that_hooks_see(ranks: Ranks, options: dict[str, Any]) -> None:
    (seen, gathered), _ = ranks(2).run(seen_and_gathered, options)
    assert gathered is not None
    assert seen.keys() == gathered.keys()
    for name, gradient in seen.items():
        assert torch.equal(gathered[name].float(), gradient), name


@pytest.mark.parametrize(("result", "said"), [(torch.ones(2), "(2,)"), (1.0, "float")])
@on_ranks(2)
def test_a_gradient_hook_returns_gradients(comm: Communicator, result: Any, said: str) -> None:
    with pytest.raises(ValueError, match="gradient_hook got") as caught:
        step_with(comm, lambda name, gradient: result, {})
    message = str(caught.value)
    assert f"of shape (4, 3, 3, 3), but returned {said}: return a tensor of the same shape, or None" in message


@pytest.mark.parametrize(
    "plan", [TILES_2x2, DATA_2, BOTH, Plan(((1, 2),), zero=3), STAGES, Plan(((2, 1), (1, 1)), data=2)], ids=str
)
@pytest.mark.sample(3)
def test_hooks_on_activations_see_whole_gradients(ranks: Ranks, plan: Plan) -> None:
    check(ranks, HOOKED, plan)


def center(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.sub_(parameter.grad.mean())


class Hooking(nn.Module):
    """Hooks on the gradients of parameters, of which some come before, and some after, what limits their norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, 2)
        self.last = nn.Linear(4, NUM_CLASSES)
        for layer in (self.first, self.second, self.last):
            layer.weight.register_hook(lambda gradient: gradient / gradient.square().sum().sqrt())
            layer.weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
            layer.weight.register_post_accumulate_grad_hook(center)
        self.last.bias.register_hook(lambda gradient: None)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x).relu())
        return self.last(x.square().mean((2, 3)))


ONE_MICROBATCH = Plan(((2, 1), (1, 1)))


@pytest.mark.parametrize(
    "plan", [TILES_2x2, BOTH, Plan(((1, 2),), zero=3), Plan(data=2, zero=2), ONE_MICROBATCH], ids=str
)
def test_hooks_on_parameters_see_whole_gradients(ranks: Ranks, plan: Plan) -> None:
    check(ranks, Task(Hooking, (13, 10)), plan)


@pytest.mark.parametrize("zero", [0, 3])
@on_ranks(2)
def test_gradients_that_somebody_keeps_stay_as_they_are(comm: Communicator, zero: int) -> None:
    """Those that a hook got before they were clipped, and those that parameters had after a step."""
    (model, optimizer), (plain, _) = build(SKIPPING), build(SKIPPING)
    seen, kept, copies = list[Tensor](), list[Tensor](), list[Tensor]()
    for p in model.parameters():
        p.register_hook(seen.append)
    plan = Plan(data=2, zero=zero)
    engine = Engine(model, plan, optimizer, F.cross_entropy, comm=comm, clip_norm=1e-3, bucket_bytes=100)
    places = []
    for number in range(3):
        images, targets = batch_of(SKIPPING, number)
        engine.step(tiles_of(images, engine), targets, SKIPPING.size)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        kept += gradients[:1] + [gradient[:1] for gradient in gradients[-1:]]
        copies += [gradient.clone() for gradient in kept[len(copies) :]]
        places.append([gradient.data_ptr() for gradient in gradients[3:5]])
        del gradients
        if number == 0:
            F.cross_entropy(plain(images), targets).backward()
    wanted = [p.grad for p in plain.parameters()]
    torch.testing.assert_close(seen[: len(wanted)], wanted, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(kept, copies, rtol=0, atol=0)
    assert places[0] == places[1] == places[2]  # others are in the same memory


@on_ranks(2)
def test_ranks_must_have_the_same_hooks_on_parameters(comm: Communicator) -> None:
    """What a step says if one rank has a hook that the other has not, and the steps made then without it."""
    plan = Plan(data=2, zero=3)
    model, optimizer = build(SKIPPING)
    engine = Engine(model, plan, optimizer, F.cross_entropy, comm=comm)
    images, targets = batch_of(SKIPPING, 0)
    handle = next(model.parameters()).register_hook(lambda gradient: gradient * 2) if comm.rank else None
    with pytest.raises(Refusal) as refused:
        engine.step(tiles_of(images, engine), targets, SKIPPING.size)
    if handle is not None:
        handle.remove()
    engine.step(tiles_of(images, engine), targets, SKIPPING.size)
    said, steps = str(refused.value), engine.num_steps
    assert said.startswith("the ranks have hooks on the gradients of different parameters")
    assert steps == 1


def hook_tensor(model: nn.Module) -> Any:
    return next(model.parameters()).register_hook(lambda gradient: gradient.clamp(-1, 1))


def hook_module(model: nn.Module) -> Any:
    return model.get_submodule("last").register_full_backward_hook(lambda module, given, made: None)


def hook_late(comm: Communicator, add: Callable[[nn.Module], Any], plan: Plan) -> tuple[str, bool]:
    """What a step says to a hook that came after the engine, and whether there is one without it."""
    model, optimizer = build(SKIPPING)
    engine = Engine(model, plan, optimizer, F.cross_entropy, comm=comm)
    images, targets = batch_of(SKIPPING, 0)

    def step() -> Any:
        return engine.step(tiles_of(images, engine), targets, SKIPPING.size)

    step()
    handle = add(model)
    with pytest.raises(Refusal) as refused:
        step()
    handle.remove()
    step()
    return str(refused.value), engine.num_steps == 2


@pytest.mark.parametrize(
    ("add", "said"),
    [
        (hook_tensor, "convs.0.weight has a hook on its gradient, which would have to see those of 2 microbatches"),
        (hook_module, "last has a backward hook, which would see the part of one rank"),
    ],
)
def test_hooks_that_come_later_are_found_in_the_next_step(
    ranks: Ranks, add: Callable[[nn.Module], Any], said: str
) -> None:
    for plan in (Plan(((1, 2),), microbatches=2), Plan(data=2, zero=2, microbatches=2)):
        for message, went_on in ranks(2).run(hook_late, add, plan):
            assert message.startswith(said)
            assert went_on


def ema_of(model: nn.Module) -> AveragedModel:
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)


def follow(optimizer: optim.Optimizer, ema: AveragedModel, model: nn.Module, calls: list[str]) -> Any:
    """Counters, an average of the model's weights, and a schedule, around each step of an optimizer."""
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    optimizer.register_step_post_hook(lambda *_: ema.update_parameters(model))
    return optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)


def follow_plain() -> tuple[dict[str, Tensor], float]:
    model, optimizer = build(SKIPPING)
    ema = ema_of(model)
    schedule = follow(optimizer, ema, model, [])
    for number in range(NUM_STEPS):
        images, targets = batch_of(SKIPPING, number)
        optimizer.zero_grad()
        F.cross_entropy(model(images), targets).backward()
        optimizer.step()
        schedule.step()
    return dict(ema.module.state_dict()), schedule.get_last_lr()[0]


@pytest.mark.parametrize(
    ("plan", "options"),
    [(TILES_1x2, {}), *((plan, {}) for plan in ZERO), (ZERO[0], {"offload": "disk"}), (DATA_2, {"offload": "disk"})],
    ids=str,
)
@on_ranks(2)
def test_step_hooks_run_once_a_step_on_new_weights(comm: Communicator, plan: Plan, options: dict[str, Any]) -> None:
    average, rate = follow_plain()
    model, optimizer = build(SKIPPING)
    ema, calls = ema_of(model), list[str]()
    engine = Engine(model, plan, optimizer, F.cross_entropy, comm=comm, bucket_bytes=100, **options)
    schedule = follow(optimizer, ema, model, calls)
    common = register_optimizer_step_post_hook(lambda *_: calls.append("any"))
    for number in range(NUM_STEPS):
        images, targets = batch_of(SKIPPING, number)
        engine.step(tiles_of(images, engine), targets, SKIPPING.size)
        schedule.step()
    common.remove()
    found, our_rate = dict(ema.module.state_dict()), schedule.get_last_lr()[0]
    assert calls == ["before", "after", "any"] * NUM_STEPS
    assert our_rate == rate
    torch.testing.assert_close(found, average, rtol=1e-10, atol=1e-12)


def stages_of(comm: Communicator) -> tuple[LocalStages, optim.Optimizer]:
    plan, image = Plan(((1, 1), (1, 1)), microbatches=2), (4, 3, *SKIPPING.size)
    held = split(lambda: model_of(SKIPPING), plan, comm, image=image)
    return held, optim.SGD(held.parameters(), lr=0.1)


def step_stages(comm: Communicator, prepare: Callable[..., Any]) -> Any:
    held, optimizer = stages_of(comm)
    engine = Engine(held, held.plan, optimizer, F.cross_entropy, comm=comm)
    prepared = prepare(comm, held, optimizer)
    images, targets = batch_of(SKIPPING, 0)
    engine.step(tiles_of(images, engine), targets, SKIPPING.size)
    return prepared


def follow_stages(comm: Communicator, held: LocalStages, optimizer: optim.Optimizer) -> list[str]:
    calls: list[str] = []
    follow(optimizer, ema_of(held), held, calls)
    return calls


def test_step_hooks_of_stages(ranks: Ranks) -> None:
    assert ranks(2).run(step_stages, follow_stages) == [["before", "after"]] * 2


def limit_all(comm: Communicator, model: nn.Module, optimizer: optim.Optimizer) -> None:
    optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(model.parameters(), 1e-3) and None)


def limit_data(comm: Communicator, model: nn.Module, optimizer: optim.Optimizer) -> None:
    def limit(*_: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad.data.clamp_(-1e-3, 1e-3)

    optimizer.register_step_pre_hook(limit)


def replace_step(comm: Communicator, model: nn.Module, optimizer: optim.Optimizer) -> None:
    original = optimizer.step
    optimizer.step = lambda closure=None: original(closure)  # type: ignore[method-assign]


def hook_one_rank(comm: Communicator, model: nn.Module, optimizer: optim.Optimizer) -> None:
    if comm.rank == 1:
        optimizer.register_step_post_hook(lambda *_: None)


def step_as(comm: Communicator, plan: Plan, prepare: Callable[..., Any]) -> dict[str, Tensor]:
    model, optimizer = build(SKIPPING)
    engine = Engine(model, plan, optimizer, F.cross_entropy, comm=comm)
    prepare(comm, model, optimizer)
    images, targets = batch_of(SKIPPING, 0)
    engine.step(tiles_of(images, engine), targets, SKIPPING.size)
    return dict(model.state_dict())


@pytest.mark.parametrize(
    ("prepare", "said"),
    [
        (limit_all, "gradient"),
        (limit_data, "a step pre-hook changes gradients"),
        (replace_step, "step() of the optimizer was replaced by another one"),
        (hook_one_rank, "the ranks have different numbers of step hooks of the optimizer"),
    ],
)
@pytest.mark.parametrize("plan", [ZERO[0], None], ids=str)
@on_ranks(2)
def test_what_would_see_parts_of_a_step_is_refused(
    comm: Communicator, plan: Plan | None, prepare: Callable[..., Any], said: str
) -> None:
    """What is said to what is done to the optimizer after the engine was made; without a plan, with two stages."""
    run = partial(step_stages, comm) if plan is None else partial(step_as, comm, plan)
    with pytest.raises(Refusal) as refused:
        run(prepare)
    message = str(refused.value)
    assert said in message


@pytest.mark.parametrize("options", [{"zero": 1}, {"zero": 3}, {"offload": "disk"}], ids=str)
@pytest.mark.parametrize("several", [False, True])
@on_ranks(2)
def test_steps_by_hand_that_would_do_nothing_are_refused(
    comm: Communicator, several: bool, options: dict[str, Any]
) -> None:
    """Also of one of several optimizers; the engine goes on, and its steps count for schedules."""
    how = dict(options)
    (model, _), plan = build(SKIPPING), Plan(data=2, zero=how.pop("zero", 0))
    first, *rest = model.parameters()
    parts = [[first], rest] if several else [[first, *rest]]
    optimizers = [optim.SGD(part, lr=0.1) for part in parts]
    schedule = optim.lr_scheduler.StepLR(optimizers[0], 1)
    engine = Engine(model, plan, optimizers if several else optimizers[0], F.cross_entropy, comm=comm, **how)
    images, targets = batch_of(SKIPPING, 0)
    for _ in range(2):
        engine.step(tiles_of(images, engine), targets, SKIPPING.size)
        schedule.step()
        for optimizer in optimizers:
            with pytest.raises(Refusal, match=r"step\(\) of SGD was called outside of engine.step\(\)"):
                optimizer.step()


@pytest.mark.parametrize("prepare", [limit_all, limit_data, replace_step, hook_one_rank])
def test_where_a_rank_steps_on_everything_all_that_is_as_in_plain_pytorch(
    ranks: Ranks, prepare: Callable[..., Any]
) -> None:
    model, optimizer = build(SKIPPING)
    if prepare is not hook_one_rank:
        prepare(None, model, optimizer)
    images, targets = batch_of(SKIPPING, 0)
    F.cross_entropy(model(images), targets).backward()
    optimizer.step()
    for found in ranks(2).run(step_as, TILES_1x2, prepare):
        torch.testing.assert_close(found, dict(model.state_dict()), rtol=1e-10, atol=1e-12)
