"""The engine with parameters cut over ranks, alone and with all else, against plain PyTorch after five steps."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mpi4dl.comm import Communicator
from mpi4dl.engine import Engine
from mpi4dl.geometry import Box
from mpi4dl.parallel.pipeline.held import Held
from mpi4dl.parallel.plan import Plan
from tests.parallel.tensor.test_cut_parameters import FUSED, GROUPED, HEADS, VOCABULARY, Language, build
from tests.pool.ranks import Ranks
from tests.training import EXACT, assert_close

STEPS, LENGTH, BATCH = 5, 7, 4
ONE = Plan(((1,),))
PLANS = {
    "tensor 2": replace(ONE, tensor=2),
    "tensor 2, context 2": Plan(((2,),), tensor=2),
    "tensor 2, data 2, ZeRO 1": replace(ONE, tensor=2, data=2, zero=1),
    "tensor 2, data 2, ZeRO 3": replace(ONE, tensor=2, data=2, zero=3),
    "tensor 3": replace(ONE, tensor=3),
    "tensor 2, microbatches": replace(ONE, tensor=2, microbatches=2),
}


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator) for _ in range(STEPS)]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, VOCABULARY), targets.reshape(-1))


def plainly(kv_heads: int) -> tuple[list[float], Language]:
    model = build(kv_heads)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-2)
    losses = []
    for batch in batches():
        optimizer.zero_grad()
        loss = loss_of(model(batch[:, :-1]), batch[:, 1:])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


def read(batch: Tensor, box: Box) -> Tensor:
    return batch[slice(*box.batch), slice(*box.space[0])]


def train(comm: Communicator, plan: Plan, kv_heads: int) -> None:
    losses, expected = plainly(kv_heads)
    held = Held.whole(build(kv_heads), plan, comm, styles=FUSED if kv_heads == HEADS else GROUPED)
    engine = Engine(held, plan, torch.optim.AdamW(held.parameters(), lr=0.01, eps=1e-2), loss_of, comm=comm)
    for batch, loss in zip(batches(), losses, strict=True):
        tiles = [read(batch, each.box) for each in engine.reads(BATCH, (LENGTH,))]
        found = engine.step(tiles, batch[:, 1:], (LENGTH,))
        assert found.loss == pytest.approx(loss, rel=EXACT)
    gradients, state = engine.gather_gradients(), engine.gather_state()
    engine.check_replicas()
    if comm.rank == 0:
        assert state is not None
        assert gradients is not None
        for name, p in expected.named_parameters():
            assert_close(state[name], p.detach(), EXACT, name)
            assert gradients[name] is not None
            assert_close(gradients[name], p.grad, EXACT, name)


@pytest.mark.parametrize("name", PLANS)
def test_five_steps(ranks: Ranks, name: str) -> None:
    plan = PLANS[name]
    ranks(plan.num_ranks).run(train, plan, 3 if plan.tensor == 3 else HEADS)
