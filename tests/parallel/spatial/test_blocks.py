"""One exchange at the entry of a block in place of one for each of its layers: how many there are, and exactness."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpi4dl.comm import Communicator
from mpi4dl.comm.exchange import Exchange
from mpi4dl.parallel import spatial
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.spatial.wide import fetch_at_entry
from tests.pool.ranks import Ranks
from tests.training import DENSE, Task, TILES_1x2, TILES_2x2, check

LAYERS = 4


class Residual(nn.Module):
    """3x3 convolutions in a row, and a way around them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1) for _ in range(LAYERS)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).relu() + x


def exchanges(comm: Communicator, whole: bool) -> tuple[int, int, float]:
    """How often pixels are exchanged forward and backward, and how far gradients are from those of one process."""
    torch.manual_seed(0)
    block, image = Residual().double(), torch.randn(1, 3, 40, 44, dtype=torch.float64)
    block(image).square().sum().backward()
    expected = [p.grad.clone() for p in block.parameters() if p.grad is not None]
    block.zero_grad()
    if whole:
        fetch_at_entry(block)
    counts: list[bool] = []
    trade = Exchange.trade

    def counted(self: Exchange, *args: Any) -> Any:
        counts.append(bool(self.plan.sends or self.plan.receives))
        return trade(self, *args)

    grid = spatial.Grid(comm, rows=2, cols=2)
    Exchange.trade = counted  # type: ignore[method-assign]
    try:
        x = spatial.shard(image.requires_grad_(), grid) * 1  # whose gradient the first exchange brings home, too
        block(x)  # rehearses, which asks for pixels in vain
        counts.clear()
        y = block(x)
        forward = sum(counts)
        y.square().sum().backward(torch.tensor(1.0 / grid.size, dtype=torch.float64))
    finally:
        Exchange.trade = trade  # type: ignore[method-assign]
    spatial.sum_gradients(block, grid)
    error = max(
        float((p.grad - e).abs().max()) for p, e in zip(block.parameters(), expected, strict=True) if p.grad is not None
    )
    return forward, sum(counts) - forward, error


@pytest.mark.parametrize(("whole", "count"), [(False, LAYERS), (True, 1)])
def test_a_block_exchanges_once_each_way(ranks: Ranks, whole: bool, count: int) -> None:
    for forward, backward, error in ranks(4).run(exchanges, whole):
        assert (forward, backward) == (count, count)
        assert error < 1e-10


RESNET = Task("resnet_v2", (97, 131), batch=4, model_options=(("depth", 20),))


@pytest.mark.parametrize(
    ("task", "plan"),
    [
        (RESNET, TILES_2x2),
        (RESNET, Plan(((1, 2), (1, 1)), microbatches=2)),
        (DENSE, TILES_1x2),
        *(
            pytest.param(Task(name, (160, 192), batch=2), TILES_2x2, marks=pytest.mark.exhaustive)
            for name in ("resnet18", "densenet121", "convnext_tiny", "amoebanetd", "efficientnet_b0")
        ),
    ],
    ids=str,
)
def test_models(ranks: Ranks, task: Task, plan: Plan) -> None:
    check(ranks, task.with_engine(halo="block"), plan)
