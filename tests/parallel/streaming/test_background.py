"""Tiles of bare background are computed once for all, exactly; whatever might differ is computed."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl.comm import Communicator
from mpi4dl.engine import Engine
from mpi4dl.parallel.cut import split
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.streaming.leading_part import StreamOptions
from tests.parallel.streaming.test_norms import by_running_statistics
from tests.parallel.streaming.test_patches import Slides
from tests.pool.ranks import Ranks
from tests.support.short_runs import EXACT, assert_close

SIZE = (96, 130)


class Plain(nn.Sequential):
    """No statistics of the whole, before the head."""

    def __init__(self, middle: nn.Module | None = None) -> None:
        super().__init__(
            nn.Conv2d(3, 5, 3, 1, 1),
            nn.GELU(),
            nn.Identity() if middle is None else middle,
            nn.Conv2d(5, 6, 3, 2, 1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(24, 3),
        )


class Deep(nn.Sequential):
    """Norms of the whole image, each behind a round of the one before; what is in `middle` comes after the first."""

    def __init__(self, middle: nn.Module | None = None) -> None:
        super().__init__(
            nn.Conv2d(3, 5, 3, 1, 1, bias=False),
            nn.BatchNorm2d(5),
            nn.Identity() if middle is None else middle,
            nn.Conv2d(5, 6, 3, 2, 1, bias=False),
            nn.Sequential(nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 3, 1, 1), nn.GroupNorm(2, 6), nn.GELU()),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(24, 3),
        )


class Placed(nn.Module):
    """What knows where it is: the same everywhere in a tile, if tiles are as high as its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.Parameter(torch.randn(SIZE[0] // 12))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.steps.repeat_interleave(12)[:, None]


class Table(nn.Module):
    """A number for each pixel, none of which tells tiles apart: zeros that are added, or ones that multiply."""

    def __init__(self, begin: float) -> None:
        super().__init__()
        self.table, self.added = nn.Parameter(torch.full((1, 5, *SIZE), begin)), begin == 0

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table if self.added else x * self.table


class Gained(nn.Module):
    """A residual branch that knows places, behind a gain that begins as zero."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.rows = nn.Parameter(torch.zeros(1)), torch.linspace(0, 1, SIZE[0]).double()[:, None]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * (x * self.rows.to(x.device)).tanh()


class Masked(nn.Module):
    """A fixed mask that drops some tiles behind those that are the first of their colour."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        mask = torch.ones(SIZE)
        mask[24:48, 80:117] = 0
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask


class OfRows(nn.Module):
    """What is the same along each row, but not in all of them."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.mean(3, keepdim=True) / 2


MIDDLES: dict[str, Any] = {
    "convolutions": lambda: None,
    "dropout of channels": lambda: nn.Dropout2d(0.4),
    "frozen norm": lambda: nn.BatchNorm2d(5).eval(),
    "running norm": lambda: nn.BatchNorm2d(5),
    "places": Placed,
    "zeros for places": partial(Table, 0.0),
    "ones for places": partial(Table, 1.0),
    "a gain of zero": Gained,
    "a mask": Masked,
}
NORMS: dict[str, Any] = {
    "norms of the whole": lambda: None,
    "a place behind a norm": Placed,
    "dropout behind a norm": lambda: nn.Dropout2d(0.4),
    "rows": lambda: OfRows(),
    "zeros for places behind a norm": partial(Table, 0.0),
}
SPARED = ("convolutions", "frozen norm", "running norm", "norms of the whole")


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return (Plain(MIDDLES[name]()) if name in MIDDLES else Deep(NORMS[name]())).double()


def glass(colours: tuple[float, ...] = (0.7, 0.2)) -> Tensor:
    """A slide of bare glass, with tissue in its middle, whose lower half has another colour."""
    random = torch.Generator().manual_seed(1)
    images = torch.full((1, 3, *SIZE), colours[0], dtype=torch.float64)
    images[:, :, SIZE[0] // 2 :] = colours[1]
    images[:, :, 40:60, 50:70] = torch.rand((1, 3, 20, 20), generator=random, dtype=torch.float64)
    return images


def train(comm: Communicator, name: str, counts: tuple[int, int]) -> Any:
    stream = StreamOptions(counts, "4", "running" if name in MIDDLES else "exact")
    plan = Plan(((1, comm.size),))
    held = split(lambda: build(name), plan, comm, image=(1, 3, *SIZE), stream=stream)
    engine = Engine(held, plan, torch.optim.SGD(held.parameters(), lr=0.1), F.cross_entropy, comm=comm)
    told: list[str] = []
    engine.executor.progress = told.append
    torch.manual_seed(7)
    result = engine.step([Slides(glass())], torch.tensor([1]), SIZE)
    gradients, state = engine.gather_gradients(), engine.gather_state()
    found = (state or {}) | (gradients or {})
    return result.loss, found, [each for each in told if each]


def plain(name: str) -> tuple[float, dict[str, Tensor]]:
    """The loss, gradients, and buffers."""
    model = build(name)
    torch.manual_seed(7)
    y, merge = by_running_statistics(model, glass()) if name in MIDDLES else (model(glass()), None)
    loss = F.cross_entropy(y, torch.tensor([1]))
    loss.backward()
    if merge is not None and name == "running norm":
        merge()
    gradients = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    return loss.item(), gradients | dict(model.named_buffers())


SHORT = {"running norm": 1, "norms of the whole": 2, "zeros for places": 1, "a mask": 2}  # the others: exhaustive


@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [
        pytest.param(name, num, marks=() if SHORT.get(name) == num else pytest.mark.exhaustive)
        for name in (*MIDDLES, *NORMS)
        for num in (1, 2)
    ],
)
def test_bare_tiles_are_exact(ranks: Ranks, name: str, num_ranks: int) -> None:
    loss, found, told = ranks(num_ranks).run(train, name, (8, 10 // num_ranks))[0]
    expected, theirs = plain(name)
    assert loss == pytest.approx(expected, rel=EXACT)
    for key, value in theirs.items():
        assert_close(found[key], value, EXACT, key)
    last = [each.rpartition(" of ")[2] for each in told if each.startswith("backward")][-1]
    spared = 80 // num_ranks - int(last)
    assert spared > (20 if name in MIDDLES else 10) / num_ranks**2 if name in SPARED else spared == 0
