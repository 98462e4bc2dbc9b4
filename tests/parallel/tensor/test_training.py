"""The engine with parameters cut over ranks, alone and with all else, against plain PyTorch after five steps."""

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from mpi4dl import models
from mpi4dl.comm import Communicator, Refusal
from mpi4dl.engine import Engine
from mpi4dl.geometry import Box
from mpi4dl.parallel.pipeline.local_stages import LocalStages, split
from mpi4dl.parallel.plan import Plan
from tests.parallel.tensor.test_cut_parameters import FUSED, GROUPED, HEADS, VOCABULARY, Language, build
from tests.pool.ranks import Ranks
from tests.short_runs import EXACT, assert_close

STEPS, LENGTH, BATCH = 5, 7, 4
ONE = Plan(((1,),))
PLANS = {
    "tensor 2": replace(ONE, tensor=2),
    "tensor 2, context 2": Plan(((2,),), tensor=2),
    "tensor 2, data 2, ZeRO 1": replace(ONE, tensor=2, data=2, zero=1),
    "tensor 2, data 2, ZeRO 3": replace(ONE, tensor=2, data=2, zero=3),
    "tensor 2, ZeRO 2": replace(ONE, tensor=2, zero=2),
    "tensor 3": replace(ONE, tensor=3),
    "tensor 4": replace(ONE, tensor=4),
    "context 2": Plan(((2,),)),
    "context 4": Plan(((4,),)),
    "tensor 2, two stages": Plan(((1,), (1,)), tensor=2, microbatches=2),
    "tensor 2, two stages, data 2, ZeRO 2": Plan(((1,), (1,)), tensor=2, data=2, zero=2),
}
WIDE = (
    "tensor 2",
    "tensor 2, ZeRO 2",
    "tensor 4",
    "context 2",
    "context 4",
    "tensor 2, data 2, ZeRO 1",
    "tensor 2, two stages, data 2, ZeRO 2",
)


def batches(length: int = LENGTH) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(VOCABULARY, (BATCH, length + 1), generator=generator) for _ in range(STEPS)]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, VOCABULARY), targets.reshape(-1))


def plainly(kv_heads: int, tied: bool, length: int) -> tuple[list[float], Language]:
    model = build(kv_heads, tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-2)
    losses = []
    for batch in batches(length):
        optimizer.zero_grad()
        loss = loss_of(model(batch[:, :-1]), batch[:, 1:])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


def read(batch: Tensor, box: Box) -> Tensor:
    return batch[slice(*box.batch), slice(*box.space[0])]


def engine_of(comm: Communicator, plan: Plan, kv_heads: int, tied: bool, length: int = LENGTH) -> Engine:
    styles = None if plan.tensor == 1 else FUSED if kv_heads == HEADS else GROUPED
    if plan.num_stages == 1:
        held = LocalStages.whole(build(kv_heads, tied), plan, comm, styles=styles)
    else:
        image = (BATCH, length)
        held = split(lambda: build(kv_heads, tied), plan, comm, balance=(4, 3), image=image, styles=styles)
    return Engine(held, plan, torch.optim.AdamW(held.parameters(), lr=0.01, eps=1e-2), loss_of, comm=comm)


def step(engine: Engine, batch: Tensor) -> float:
    size = (batch.shape[1] - 1,)
    tiles = [read(batch, each.box) for each in engine.reads(BATCH, size)]
    return engine.step(tiles, batch[:, 1:], size).loss


def train(comm: Communicator, plan: Plan, kv_heads: int, length: int) -> list[int]:
    """Returns how many tokens a norm between layers saw of each microbatch."""
    tied, seen = plan.num_stages == 1, []
    losses, expected = plainly(kv_heads, tied, length)
    engine = engine_of(comm, plan, kv_heads, tied, length)
    for norm in (m for name, m in engine.held.named_modules() if name.endswith("blocks.0.between")):
        norm.register_forward_pre_hook(lambda _, args: seen.append(getattr(args[0], "local", args[0]).shape[1]))
    for batch, loss in zip(batches(length), losses, strict=True):
        assert step(engine, batch) == pytest.approx(loss, rel=EXACT)
    gradients, state = engine.gather_gradients(), engine.gather_state()
    engine.check_replicas()
    if comm.rank == 0:
        assert state is not None
        assert gradients is not None
        for name, p in expected.named_parameters():
            assert_close(state[name], p.detach(), EXACT, name)
            assert gradients[name] is not None
            assert_close(gradients[name], p.grad, EXACT, name)
    return seen


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.exhaustive) if name in WIDE else name for name in PLANS]
)
@pytest.mark.sample(2)
def test_five_steps(ranks: Ranks, name: str) -> None:
    plan, length = PLANS[name], LENGTH
    ranks(plan.num_ranks).run(train, plan, 3 if plan.tensor == 3 else HEADS, length)


SEQUENCES: dict[str, tuple[Plan, int, list[int]]] = {  # with how many tokens there are, and each rank has of them
    "tensor 2": (replace(ONE, tensor=2), 7, [3, 4]),
    "tensor 3": (replace(ONE, tensor=3), 7, [2, 2, 3]),
    "tensor 4": (replace(ONE, tensor=4), 7, [1, 2, 2, 2]),
    "tensor 2, context 2": (Plan(((2,),), tensor=2), 8, [2, 2, 2, 2]),
    "tensor 2, context 2 of uneven pieces": (Plan(((2,),), tensor=2), 7, [3, 3, 4, 4]),
    "tensor 2, data 2, ZeRO 1": (replace(ONE, tensor=2, data=2, zero=1), 7, [3, 4, 3, 4]),
    "tensor 2, data 2, ZeRO 3": (replace(ONE, tensor=2, data=2, zero=3), 7, [3, 4, 3, 4]),
    "tensor 2, two stages": (Plan(((1,), (1,)), tensor=2, microbatches=2), 7, [0, 0, 3, 4]),
    "tensor 2, two stages, data 2": (Plan(((1,), (1,)), tensor=2, data=2), 7, [0, 0, 3, 4, 0, 0, 3, 4]),
}


@pytest.mark.parametrize(
    "name", [name if "context" in name else pytest.param(name, marks=pytest.mark.exhaustive) for name in SEQUENCES]
)
@pytest.mark.sample(1)
def test_sequence(ranks: Ranks, name: str) -> None:
    """Ranks that share parameters share the tokens of what is between, and learn the same."""
    plan, length, shares = SEQUENCES[name]
    plan = replace(plan, sequence=True)
    seen = ranks(plan.num_ranks).run(train, plan, 3 if plan.tensor == 3 else HEADS, length)
    assert [max(each, default=0) for each in seen] == shares
    assert all(set(each) <= {share} for each, share in zip(seen, shares, strict=True))


class Moves(TorchDispatchMode):
    """Which shapes are moved to another device."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._to_copy.default and (kwargs or {}).get("device") == torch.device("meta"):
            self.shapes.add(tuple(args[0].shape))
        return function(*args, **(kwargs or {}))


def move(comm: Communicator, plan: Plan) -> None:
    with Moves() as moves:
        split(lambda: build(HEADS), plan, comm, balance=(5, 2), image=(BATCH, LENGTH), styles=FUSED, device="meta")
    sizes = {tuple(p.shape) for name, p in build(HEADS).named_parameters() if "attention.qkv" in name}
    assert moves.shapes
    assert not sizes & moves.shapes
    assert {(size[0] // 2, *size[1:]) for size in sizes} <= moves.shapes


@pytest.mark.parametrize("name", ["tensor 2", "tensor 2, two stages"])
def test_no_device_has_the_whole_of_what_is_cut(ranks: Ranks, name: str) -> None:
    ranks(PLANS[name].num_ranks).run(move, PLANS[name])


GROUPED_GPT: dict[str, object] = {"num_kv_heads": 2, "activation": "swiglu", "positions": "rotary", "dropout": 0.2}
OF_OURS: dict[str, tuple[str, dict[str, object], Plan]] = {
    "GPT": ("gpt", GROUPED_GPT, PLANS["tensor 2, data 2, ZeRO 3"]),
    "BERT": ("bert", {"dropout": 0.2}, PLANS["tensor 2"]),
    "ViT": ("vit", {"image_size": 8, "in_channels": 1}, Plan(((1, 1),), tensor=2)),
    **{f"GPT on context {n}": ("gpt", GROUPED_GPT, Plan(((n,),))) for n in (2, 4)},
    **{f"BERT on context {n}": ("bert", {}, Plan(((n,),))) for n in (2, 4)},
}
QUICK = ("GPT", "BERT", "ViT", "BERT on context 4")


def compare_tables(comm: Communicator, name: str, sequence: bool) -> None:
    kind, options, plan = OF_OURS[name]
    sizes = {"hidden": 24, "num_heads": 4, "num_layers": 1}
    sizes |= {} if kind == "vit" else {"vocabulary": VOCABULARY, "context": LENGTH}

    def build_it() -> torch.nn.Module:
        torch.manual_seed(0)
        return models.build(kind, **sizes, **options).double()

    generator = torch.Generator().manual_seed(1)
    if kind == "vit":
        size: tuple[int, ...] = (8, 8)
        x = torch.randn(BATCH, 1, *size, generator=generator, dtype=torch.float64)
        targets = torch.randint(10, (BATCH,), generator=generator)
    else:
        size = (LENGTH,)
        x = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
        targets = x.roll(1, 1)

    def loss_of_it(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))

    plan, plain = replace(plan, sequence=sequence), build_it()
    torch.manual_seed(5)  # of what is dropped
    loss = loss_of_it(plain(x), targets)
    loss.backward()
    held = LocalStages.whole(build_it(), plan, comm)
    engine = Engine(held, plan, torch.optim.SGD(held.parameters(), lr=0.1), loss_of_it, comm=comm)
    (mine,) = engine.reads(BATCH, size)
    torch.manual_seed(5)
    tile = read(x, mine.box) if x.dim() == 2 else x
    assert engine.step([tile], targets, size).loss == pytest.approx(loss.item(), rel=EXACT)
    found = engine.gather_gradients()
    for key, p in plain.named_parameters() if found is not None else ():
        assert found is not None
        assert_close(found[key], p.grad, EXACT, key)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.exhaustive) for name in OF_OURS]
)
def test_our_models(ranks: Ranks, name: str) -> None:
    ranks(OF_OURS[name][2].num_ranks).run(compare_tables, name, False)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name in OF_OURS if "context" not in name])
def test_our_models_whose_tokens_are_shared(ranks: Ranks, name: str) -> None:
    ranks(OF_OURS[name][2].num_ranks).run(compare_tables, name, True)


def refuse(comm: Communicator) -> list[str]:
    """What parts of parameters cannot be trained with."""
    plan, found = PLANS["tensor 2"], []
    held = LocalStages.whole(build(HEADS), plan, comm, styles=FUSED)
    with pytest.raises(Refusal) as caught:
        Engine(held, plan, torch.optim.Adafactor(held.parameters(), lr=0.1), loss_of, comm=comm)
    found.append(str(caught.value))
    with pytest.raises(ValueError, match="mirrored copy of GEMS has whole parameters"):
        Plan(((1,), (1,)), tensor=2, bidirectional=1)
    with pytest.raises(ValueError, match="`sequence` shares tokens among the ranks of `tensor`"):
        replace(ONE, sequence=True)
    return found


def draw_unlike(comm: Communicator) -> str:
    """What is said of ranks that share layers, and would drop other values of what each of them has whole."""
    sizes = {"image_size": 8, "in_channels": 1, "hidden": 24, "num_heads": 4, "num_layers": 1, "dropout": 0.2}
    plan = Plan(((1, 1),), tensor=2)
    held = LocalStages.whole(models.build("vit", **sizes), plan, comm)
    engine = Engine(held, plan, torch.optim.SGD(held.parameters(), lr=0.1), F.cross_entropy, comm=comm)
    torch.manual_seed(comm.rank)
    with pytest.raises(Refusal) as caught:
        engine.step([torch.ones(2, 1, 8, 8)], torch.tensor([0, 1]), (8, 8))
    return str(caught.value)


def test_ranks_that_share_layers_draw_alike(ranks: Ranks) -> None:
    first, second = ranks(2).run(draw_unlike)
    assert first == second
    assert "with the same seed on all ranks" in first


def test_what_parts_cannot_be_trained_with(ranks: Ranks) -> None:
    (optimizer,) = ranks(2).run(refuse)[0]
    assert "Adafactor works on whole ones" in optimizer


def tensors_in(objects: list[Any]) -> list[Tensor]:
    """By type alone: `isinstance` asks for `__class__`, at which deprecated objects of PyTorch's raise warnings."""
    return [each for each in objects if issubclass(type(each), Tensor)]


def collect(comm: Communicator, sequence: bool) -> list[tuple[int, ...]]:
    """The shapes of tensors that the steps left to the garbage collector."""
    engine = engine_of(comm, replace(ONE, tensor=2, sequence=sequence), HEADS, True)
    for batch in batches():
        step(engine, batch)
    gc.collect()
    gc.disable()
    before = {id(each) for each in tensors_in(gc.get_objects())}  # of tests that ran here before
    try:
        for batch in batches():
            step(engine, batch)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = [each for each in tensors_in(gc.garbage) if id(each) not in before]
        return [tuple(each.shape) for each in left if each.numel() >= LENGTH * BATCH]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.sample(1)
def test_nothing_waits_for_the_garbage_collector(ranks: Ranks, sequence: bool) -> None:
    """Logits that did, a step's after the other's, made a rank's memory grow by a third."""
    assert ranks(2).run(collect, sequence) == [[], []]
