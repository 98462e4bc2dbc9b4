"""Maps of cells are those of plain autograd, for models that write in place, branch, and pool by functions."""

from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl.comm import Communicator
from mpi4dl.engine import Runner
from mpi4dl.geometry import Box
from mpi4dl.inference.cell_maps import CellMaps, CellOptions, side_of_cells
from mpi4dl.parallel.cut import split
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.spatial import Grid, shard
from mpi4dl.parallel.streaming.leading_part import StreamOptions
from mpi4dl.parallel.streaming.stream_tiles import Pixels
from mpi4dl.tasks.formulas import main_output
from tests.pool.ranks import Ranks


@pytest.mark.parametrize(
    ("size", "cells", "side"),
    [
        ((256, 320), (8, 10), 32),
        ((257, 300), (9, 10), 32),  # rounded up
        ((70, 100), (2, 3), 32),  # rounded down
        ((96, 144), (4, 6), 24),
        ((256, 320), (15, 19), 16),  # as of SqueezeNet, whose stem has no padding
    ],
)
def test_the_side_of_cells(size: tuple[int, int], cells: tuple[int, int], side: float) -> None:
    assert side_of_cells(size, cells) == side


class Net(nn.Module):
    """Writes in place, scales channels by a squeezed branch, and ends in functions."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.one, self.two = nn.Conv2d(8, 8, 3, 1, 1), nn.Conv2d(8, 8, 3, 2, 1)
        self.squeeze = nn.Conv2d(8, 8, 1)
        self.head = nn.Linear(8, num_classes)

    def features(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = F.relu_(self.one(x) + x)
        y = y * torch.sigmoid(self.squeeze(F.adaptive_avg_pool2d(y, 1)))
        y = self.two(y)
        y += 0.5
        return F.relu(y, inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.features(x)
        logits: Tensor = self.head(y.mean((2, 3)) + F.adaptive_max_pool2d(y, 1).flatten(1))
        return logits


def build(num_classes: int) -> tuple[Net, Tensor]:
    torch.manual_seed(num_classes)
    return Net(num_classes).double().eval(), torch.randn(2, 3, 41, 64, dtype=torch.float64)


def mapped(comm: Communicator, num_classes: int, options: CellOptions) -> list[tuple[Tensor, float, int]]:
    model, images = build(num_classes)
    grid = Grid(comm, 1, comm.size)
    maps = CellMaps(model, grid, options, requires=True)
    with torch.no_grad(), maps.watching(images.shape[2:]):
        outputs = model(shard(images, grid) if comm.size > 1 else images)
        maps.of(lambda outputs: outputs, outputs)
        assert not torch.is_grad_enabled()
    return [tuple(each) for each in maps.found]


@pytest.mark.parametrize("count", [1, 2])
def test_cells_are_those_of_plain_autograd(ranks: Ranks, count: int) -> None:
    for num_classes, options in (
        (2, CellOptions()),
        (3, CellOptions()),
        (3, CellOptions(number=1)),
        (3, CellOptions(layer="stem")),
        (2, CellOptions("gradient")),
    ):
        model, images = build(num_classes)
        x = images.clone().requires_grad_()
        kept: list[Tensor] = []
        keep = partial(lambda kept, module, inputs, output: kept.append(output), kept)
        model.stem.register_forward_hook(keep)
        features = model.features(x)
        logits = model.head(features.mean((2, 3)) + F.adaptive_max_pool2d(features, 1).flatten(1))
        numbers = [1, 1] if num_classes == 2 or options.number else logits.argmax(1).tolist()
        score = sum(each[n] - (each[0] if num_classes == 2 else 0) for each, n in zip(logits, numbers, strict=True))
        at = kept[0] if options.layer else x if options.kind == "gradient" else features
        (gradient,) = torch.autograd.grad(score, [at])
        if options.kind == "gradient":
            expected = F.avg_pool2d(gradient.abs().sum(1), 32, ceil_mode=True)
        else:
            expected = (gradient * at.detach()).sum(1)
        expected_side = 32 if options.kind == "gradient" else 2 if options.layer else 4
        for found in ranks(count).run(mapped, num_classes, options):
            for (values, side, number), plain, of in zip(found, expected, numbers, strict=True):
                assert torch.allclose(values.double(), plain, rtol=1e-5, atol=1e-6 * float(plain.abs().max()))
                assert (side, number) == (expected_side, of)


class Normed(nn.Module):
    """Running statistics in one norm, those of the whole image in another, and a residual; in the last norm either."""

    def __init__(self, tracks: bool) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1), nn.BatchNorm2d(6), nn.ReLU(inplace=True))
        self.one, self.norm = nn.Conv2d(6, 6, 3, 1, 1), nn.GroupNorm(2, 6)
        self.two, self.free = nn.Conv2d(6, 8, 3, 2, 1), nn.BatchNorm2d(8, track_running_stats=tracks)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + F.gelu(self.norm(self.one(x)))
        x = torch.tanh(self.free(self.two(x)))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


class FromDisk(NamedTuple):
    """Images as a source, of which no rank is given a tensor."""

    pixels: Pixels
    shape: torch.Size
    dtype: torch.dtype
    draws: bool = False

    def read(self, box: Box) -> Tensor:
        return self.pixels.read(box)


SIZE = (70, 97)


def normed(norms: str) -> Normed:
    torch.manual_seed(8)
    model = Normed(norms != "exact").double()
    model.stem[1].running_mean.normal_()
    return model.eval().requires_grad_(False)


def images_of_normed() -> Tensor:
    torch.manual_seed(9)
    return torch.randn(2, 3, *SIZE, dtype=torch.float64)


def streamed(comm: Communicator, options: StreamOptions, lazily: bool) -> list[tuple[Tensor, float, int]]:
    images, plan = images_of_normed(), Plan(((1, comm.size),))
    held = (
        split(partial(normed, options.norms), plan, comm, image=(2, 3, *SIZE), stream=options)
        .eval()
        .requires_grad_(False)
    )
    runner = Runner(held, plan, comm=comm)
    (part,) = held.parts.values()
    maps = CellMaps(part.module, part.grid, CellOptions("gradient"), requires=True)
    tiles: list[Any] = [Pixels(images).read(read.box) for read in runner.reads(2, SIZE, False)]
    if lazily:
        tiles = [FromDisk(Pixels(images), images.shape, images.dtype)]
    with maps.watching(SIZE):
        list(runner.predict([(tiles, 2)], SIZE, partial(maps.of, main_output)))
    return [tuple(each) for each in maps.found]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    ("options", "lazily"),
    [(StreamOptions((2, 2)), True), (StreamOptions((2, 3), norms="frozen", segments=2), False)],
    ids=["lazy", "segments"],
)
def test_streamed_gradients_of_pixels_are_those_of_plain_autograd(
    ranks: Ranks, count: int, options: StreamOptions, lazily: bool
) -> None:
    """Over the margins of tiles, those of other ranks too, and through statistics of the whole image."""
    x = images_of_normed().requires_grad_()
    logits = normed(options.norms)(x)
    numbers = logits.argmax(1).tolist()
    (gradient,) = torch.autograd.grad(logits.amax(1).sum(), [x])
    expected = F.avg_pool2d(gradient.abs().sum(1), 32, ceil_mode=True)
    for found in ranks(count).run(streamed, options, lazily):
        for (values, side, number), plain, of in zip(found, expected, numbers, strict=True):
            assert (side, number) == (32, of)
            assert torch.allclose(values, plain, rtol=1e-10, atol=1e-10 * float(plain.max()))
