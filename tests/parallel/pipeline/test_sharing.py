"""Parameters that several stages use, by one name or tied: the training of plain PyTorch, by every plan."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl import models
from mpi4dl.checkpoints.checkpoints import Checkpoints
from mpi4dl.comm import Communicator
from mpi4dl.engine import Engine
from mpi4dl.parallel.pipeline.local_stages import split
from mpi4dl.parallel.plan import Plan
from tests.pool.ranks import Ranks
from tests.short_runs import EXACT, assert_learnt_alike

VOCABULARY, LENGTH, BATCH, STEPS, CLIP = 23, 7, 8, 5, 0.5
SIZES = {"vocabulary": VOCABULARY, "context": LENGTH, "num_layers": 2, "hidden": 24, "num_heads": 4}


class Repeating(nn.Module):
    """One block, three times over; the parameters of a norm are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.block = nn.Embedding(VOCABULARY, 8), nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU())
        self.block[1].requires_grad_(False)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for _ in range(3):
            x = x + self.block(x)
        logits: Tensor = self.head(x)
        return logits


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = Repeating() if name == "repeating" else models.build("gpt", None, **SIZES)
    return model.double()


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator) for _ in range(STEPS)]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, VOCABULARY), targets.reshape(-1))


def halved(name: str, gradient: Tensor) -> Tensor:
    return gradient / 2 if "head" in name or "tokens" in name else gradient


def plainly(name: str, options: dict[str, Any]) -> tuple[list[tuple[float, float]], nn.Module]:
    model, found = build(name), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-2)
    for batch in batches():
        optimizer.zero_grad()
        loss = loss_of(model(batch[:, :-1]), batch[:, 1:])
        loss.backward()
        for key, p in model.named_parameters():
            if p.grad is not None and "gradient_hook" in options:
                p.grad = options["gradient_hook"](key, p.grad)
        norm = nn.utils.clip_grad_norm_(model.parameters(), options.get("clip_norm", CLIP))
        optimizer.step()
        found.append((loss.item(), norm.item()))
    return found, model


def engine_of(comm: Communicator, name: str, plan: Plan, options: dict[str, Any]) -> Engine:
    counts = {"gpt": {1: (5,), 2: (2, 3), 3: (1, 2, 2), 4: (1, 1, 1, 2)}, "repeating": {2: (6, 8)}}[name]
    held = split(partial(build, name), plan, comm, balance=counts[plan.num_stages], image=(BATCH, LENGTH))
    optimizer = torch.optim.AdamW(held.parameters(), lr=0.01, eps=1e-2)
    return Engine(held, plan, optimizer, loss_of, comm=comm, **{"clip_norm": CLIP, **options})


def steps(engine: Engine, some: slice) -> list[tuple[float, float]]:
    found = []
    for batch in batches()[some]:
        reads = engine.reads(BATCH, (LENGTH,))
        tiles = [batch[:, :-1][slice(*each.box.batch), slice(*each.box.space[0])] for each in reads]
        result = engine.step(tiles, batch[:, 1:], (LENGTH,))
        found.append((result.loss, result.gradient_norm))
    return found


def train(comm: Communicator, name: str, plan: Plan, options: dict[str, Any]) -> None:
    losses, expected = plainly(name, options)
    engine = engine_of(comm, name, plan, options)
    for ours, theirs in zip(steps(engine, slice(None)), losses, strict=True):
        assert ours == pytest.approx(theirs, rel=EXACT)
    assert_learnt_alike(engine, expected)


TWO = Plan(((1,), (1,)), microbatches=2)
PLANS = {
    "1f1b": replace(TWO, microbatches=4),
    "zero-bubble": replace(TWO, microbatches=4, schedule="zero-bubble"),
    "interleaved": Plan(((1,), (1,)), microbatches=4, schedule="interleaved", chunks=2),
    "three stages": Plan(((1,), (1,), (1,)), microbatches=2),
    "context": Plan(((2,), (1,)), microbatches=2),
    "tensor 2": replace(TWO, tensor=2),
    "GEMS": replace(TWO, bidirectional=1),
    **{f"data 2, ZeRO {zero}": replace(TWO, data=2, zero=zero) for zero in range(4)},
    "context, ZeRO 3": Plan(((2,), (1,)), microbatches=2, zero=3),
    "tensor 2, data 2, ZeRO 3": replace(TWO, tensor=2, data=2, zero=3),
    "interleaved, data 2, ZeRO 3": Plan(((1,), (1,)), 2 * (1,), 2, 4, "interleaved", chunks=2, zero=3),
    "interleaved, tensor 2": Plan(((1,), (1,)), microbatches=4, schedule="interleaved", chunks=2, tensor=2),
    "GEMS, data 2, ZeRO 3": replace(TWO, data=2, bidirectional=1, zero=3),
    "GEMS, three stages, ZeRO 2": Plan(((1,), (1,), (1,)), bidirectional=1, zero=2),
}
QUICK = ("1f1b", "tensor 2", "data 2, ZeRO 3", "GEMS")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.exhaustive) for name in PLANS]
)
@pytest.mark.sample(3)
def test_tied_words(ranks: Ranks, name: str) -> None:
    ranks(PLANS[name].num_ranks).run(train, "gpt", PLANS[name], {"bucket_bytes": 2000})


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["1f1b", "data 2, ZeRO 2", "data 2, ZeRO 3", "GEMS"])
def test_a_block_that_is_used_again(ranks: Ranks, name: str) -> None:
    ranks(PLANS[name].num_ranks).run(train, "repeating", PLANS[name], {})


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["1f1b", "data 2, ZeRO 1", "data 2, ZeRO 3"])
def test_hooks_see_a_tied_gradient_once(ranks: Ranks, name: str) -> None:
    ranks(PLANS[name].num_ranks).run(train, "gpt", PLANS[name], {"gradient_hook": halved})


def go_on(comm: Communicator, begun: Plan, ended: Plan, folder: Path) -> None:
    losses, expected = plainly("gpt", {})
    with Checkpoints(folder, comm) as checkpoints:
        engine = engine_of(comm, "gpt", begun, {})
        steps(engine, slice(0, 2))
        checkpoints.save(engine, {})
        checkpoints.wait()
        newest = checkpoints.newest()
        assert newest is not None
        engine = engine_of(comm, "gpt", ended, {})
        checkpoints.load(engine, newest)
    for ours, theirs in zip(steps(engine, slice(2, None)), losses[2:], strict=True):
        assert ours == pytest.approx(theirs, rel=EXACT)
    assert_learnt_alike(engine, expected)


HANDED = {
    "tensor to data": (replace(TWO, tensor=2), replace(TWO, data=2, zero=1)),
    "ZeRO 3 to one stage": (replace(TWO, data=2, zero=3), Plan(((2,),), data=2)),
    "one stage to ZeRO 2": (Plan(((2,),), data=2), replace(TWO, data=2, zero=2)),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", HANDED)
def test_a_checkpoint_goes_on_by_another_plan(ranks: Ranks, tmp_path: Path, name: str) -> None:
    ranks(4).run(go_on, *HANDED[name], tmp_path)
