"""Units are timed where they will run, within a budget, and leave no trace. No test here looks at a clock."""

from collections.abc import Callable
from itertools import count

import pytest
import torch
from torch import Tensor, nn

from mpi4dl.geometry import GridShape
from mpi4dl.models import build
from mpi4dl.parallel.costs.cost_model import Profiler
from mpi4dl.parallel.costs.sites import Site
from mpi4dl.parallel.costs.timing import REPEATS, Seconds, _half, time_units
from mpi4dl.parallel.pipeline.split import Cuttable, outline

CPU = torch.device("cpu")
FIXED, PIXEL, BACKWARD = 1.0, 0.001, 3.0
now = [0.0]
seen: list[int] = []


class _Takes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        pixels = x.shape[0] * x.shape[2] * x.shape[3]
        seen.append(pixels)
        now[0] += FIXED + PIXEL * pixels
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        now[0] += BACKWARD * PIXEL * gradient.shape[0] * gradient.shape[2] * gradient.shape[3]
        return gradient


class Slow(nn.Module):
    """Takes a fixed time and some for each pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return _Takes.apply(x * self.scale)


def slow() -> Cuttable:
    return Cuttable(nn.Sequential(Slow(), Slow()), whole=["0", "1"])


def plain(image: tuple[int, ...]) -> Site:
    return Site(image, GridShape(1, 1, 1), False, True)


@pytest.mark.parametrize(("budget", "largest"), [(1e6, 256), (6000.0, 256), (600.0, 128), (0.0, 128)])
def test_seconds_of_large_images_follow_from_those_of_small_ones(budget: float, largest: int) -> None:
    seen.clear()
    pixels = 2 * 256 * 256
    for forward, backward, weight in time_units(slow(), plain((2, 1, 256, 256)), CPU, budget, clock=lambda: now[0]):
        assert forward == pytest.approx(FIXED + PIXEL * pixels)
        assert backward == pytest.approx(BACKWARD * PIXEL * pixels)
        assert weight == 0.0
    assert max(seen) == 2 * largest**2
    assert 2 * (REPEATS + 1 + 2) <= len(seen) <= 2 * 2 * (REPEATS + 2)


def counting() -> Callable[[], float]:
    ticks = count()
    return lambda: float(next(ticks))


def by_ticks(cuttable: Cuttable, site: Site, device: torch.device, budget_seconds: float) -> Seconds:
    return time_units(cuttable, site, device, 1e6, counting())


@pytest.mark.parametrize("shape", [GridShape(1, 1, 2), GridShape(2, 2, 2), GridShape(1, 1, 1)])
@pytest.mark.sample(1)
def test_a_tile_exchanges_what_others_need_of_it(shape: GridShape) -> None:
    cuttable = Cuttable(outline(lambda: build("resnet_v2", 10, depth=11)))
    state = torch.get_rng_state()
    site = Site((2, 3, 64, 64), shape, shape.batch > 1, plain=False)
    column = Profiler(time=by_ticks).costs(cuttable, site, CPU)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.is_meta for parameter in cuttable.model.parameters())
    assert [(unit.forward_seconds, unit.backward_seconds) for unit in column] == [(1.0, 1.0)] * len(cuttable)
    assert any(unit.there for unit in column) == (shape.size > 1)
    assert column[0].output_bytes * shape.size == 2 * 16 * 64 * 64 * 4


@pytest.mark.parametrize("shape", [GridShape(1, 1), GridShape(2, 2)])
def test_tokens_are_timed(shape: GridShape) -> None:
    """Of all samples, and of half as many each: the work of a token goes by the length of its sample."""
    cuttable = Cuttable(
        outline(
            lambda: build("gpt", vocabulary=9, context=4096, num_layers=1, hidden=8, num_heads=2, positions="rotary")
        )
    )
    site = Site((8, 4096), shape, shape.batch > 1, plain=False)
    assert site.pixels * shape.size == 8 * 4096
    sizes = [site]
    while (half := _half(sizes[-1])) is not None:
        sizes.append(half)
    assert [each.image for each in sizes] == [(n, 4096) for n in (8, 4, 2, 1) if n >= shape.batch]
    column = Profiler(time=by_ticks).costs(cuttable, site._replace(image=(2, 64)), CPU)
    assert [(unit.forward_seconds, unit.backward_seconds) for unit in column] == [(1.0, 1.0)] * len(cuttable)
    assert column[0].output_bytes * shape.size == 2 * 64 * 8 * 4


def test_a_unit_without_gradients_takes_time_too() -> None:
    class Ranked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.argsort(dim=1) * 2

    assert min(time_units(Cuttable(Ranked()), plain((2, 3, 8, 8)), CPU, 1.0, counting())[:, 0]) == 1.0
