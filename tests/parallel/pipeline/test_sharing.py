"""Parameters that several stages use, by one name or tied: the training of plain PyTorch, by every plan."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from torch import Tensor, nn

from mpi4dl import models
from mpi4dl.parallel.plan import Plan
from tests.pool.ranks import Ranks
from tests.support.short_runs import Task, check, check_going_on, words_loss

VOCABULARY = 23


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


def halved(name: str, gradient: Tensor) -> Tensor:
    return gradient / 2 if "head" in name or "tokens" in name else gradient


build_gpt = partial(models.build, "gpt", None, vocabulary=VOCABULARY, context=7, num_layers=2, hidden=24, num_heads=4)
GPT = Task(build_gpt, (7,), 8, "smooth AdamW", tokens=VOCABULARY, loss=words_loss)
GPT = GPT.with_engine(clip_norm=0.5, bucket_bytes=2000)
REPEATING = replace(GPT, model=Repeating, balance=(6, 8))
HOOKED = GPT.with_engine(clip_norm=0.5, gradient_hook=halved)

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
    check(ranks, GPT, PLANS[name])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("task", "name"),
    [
        *((REPEATING, name) for name in ("1f1b", "data 2, ZeRO 2", "data 2, ZeRO 3", "GEMS")),
        *((HOOKED, name) for name in ("1f1b", "data 2, ZeRO 1", "data 2, ZeRO 3")),
    ],
    ids=str,
)
def test_blocks_that_are_used_again_and_hooks_on_tied_gradients(ranks: Ranks, task: Task, name: str) -> None:
    check(ranks, task, PLANS[name])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("begun", "ended"),
    [
        (replace(TWO, tensor=2), replace(TWO, data=2, zero=1)),
        (replace(TWO, data=2, zero=3), Plan(((2,),), data=2)),
        (Plan(((2,),), data=2), replace(TWO, data=2, zero=2)),
    ],
    ids=str,
)
def test_a_checkpoint_goes_on_by_another_plan(ranks: Ranks, tmp_path: Path, begun: Plan, ended: Plan) -> None:
    check_going_on(ranks, GPT, tmp_path, (begun, 1), (ended, 3))
