"""Batch norm by running statistics: plain PyTorch with these layers in evaluation mode is the reference."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpi4dl.comm import Communicator, world
from mpi4dl.geometry import Split
from mpi4dl.parallel import spatial
from mpi4dl.parallel.spatial.grid import Grid
from mpi4dl.parallel.streaming.margins import CannotStream, StreamPlan
from mpi4dl.parallel.streaming.norms import merged, moments_of
from mpi4dl.parallel.streaming.stream import Streaming
from mpi4dl.parallel.streaming.stream_tiles import StreamTiles
from tests.pool.ranks import on_ranks

SIZE = (37, 29)


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 6, 5, 2, 2),
        nn.BatchNorm2d(6, momentum=0.3),
        nn.MaxPool2d(3, 2, 1),
    ).double()
    for module in model:
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2)
    return model


def images() -> Tensor:
    return torch.randn(3, 3, *SIZE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def streamed(grid: Grid, module: nn.Sequential, x: Tensor, counts: tuple[int, int], norms: str = "exact") -> Streaming:
    """Of whole images, in memory on every rank."""
    return Streaming(Tupled(module), (spatial.shard(x, grid),), plan_of(grid, module, x, counts), grid, norms)


def plan_of(grid: Grid, module: nn.Sequential, x: Tensor, counts: tuple[int, int]) -> StreamPlan:
    tiles = StreamTiles(grid.shape, grid.rank, counts, False)
    return StreamPlan.of(Tupled(module), tiles, (tiles.image_spec(x.shape, x.dtype, Split.at((0, len(x)))),), SIZE)


class Tupled(nn.Module):
    """A part of a model returns all that is alive behind it."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (self.layers(x),)


def by_running_statistics(model: nn.Module, x: Tensor) -> tuple[Tensor, Callable[[], None]]:
    """The output of a plain model by its running statistics, and what merges those of its norms' inputs into them."""
    seen: dict[nn.Module, Tensor] = {}
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval().register_forward_hook(lambda m, given, _: seen.__setitem__(m, given[0].detach().clone()))

    def merge() -> None:
        for module, given in seen.items():
            assert isinstance(module, nn.BatchNorm2d)
            for running, found in (
                (module.running_mean, given.mean((0, 2, 3))),
                (module.running_var, given.transpose(0, 1).flatten(1).var(1)),
            ):
                running.lerp_(found, module.momentum)
            module.num_batches_tracked += 1

    return model(x), merge


@pytest.mark.parametrize("norms", ["running", "frozen"])
@on_ranks(2)
def test_known_statistics(comm: Communicator, norms: str) -> None:
    """How far gradients and buffers are from those of a plain layer whose norms are in evaluation mode."""
    ours, theirs, x = layers(), layers(), images()
    expected, merge = by_running_statistics(theirs, x)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (expected * weight).sum().backward()
    if norms == "running":
        merge()
    grid = Grid(comm, 1, comm.size)
    (y,) = streamed(grid, ours, x, (2, 3), norms).run()
    part = spatial.shard_like(weight, y)
    ((y * part).sum() / grid.size).backward()
    for p in ours.parameters():
        comm.all_reduce(p.grad)
    errors = {"output": float((spatial.gather(y) - expected).detach().abs().max())}
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        errors[name] = float((p.grad - q.grad).abs().max())
    for (name, b), c in zip(ours.named_buffers(), theirs.buffers(), strict=True):
        errors[name] = float((b - c).abs().max())
    assert max(errors.values()) < 1e-10, errors


def test_moments_are_merged_without_loss_of_digits() -> None:
    values = torch.randn(4, 2, 50, dtype=torch.float64) + 1e6
    parts = [moments_of(part) for part in (values[..., :7], values[..., 7:7], values[..., 7:])]
    total = merged(parts)
    expected = values.transpose(0, 1).flatten(1)
    assert total.num_known.tolist() == [200, 200]
    torch.testing.assert_close(total.mean, expected.mean(1), rtol=1e-15, atol=0)
    torch.testing.assert_close(total.squares / 199, expected.var(1), rtol=1e-9, atol=0)


def test_passes_and_margin() -> None:
    """A norm is a statistics pass each way; the margin is what a tile's output looks at, whatever the strides."""
    grid, x, module = Grid(world(), 1, 1), images(), layers()
    streaming = streamed(grid, module, x, (3, 2))
    (y,) = streaming.run()
    assert len(streaming._recorded) == streaming._plan.profile.num_statistics == 2
    y.sum().backward()
    assert len(streaming._recorded) == 4
    bare = nn.Sequential(nn.Conv2d(3, 4, 5, padding=2), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1))
    assert plan_of(grid, bare, x.float(), (2, 2)).profile.margin == 3


@pytest.mark.parametrize(
    "layer",
    [
        nn.GroupNorm(2, 4),
        nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
        nn.Dropout(0.3),
        nn.Dropout2d(0.3),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_other_layers_repeat_themselves(layer: nn.Module) -> None:
    """Norms of samples are exact; what is drawn at random is drawn again alike, and beyond tiles by whoever owns it."""
    module = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), copy.deepcopy(layer), nn.Conv2d(4, 2, 3)).double()
    plain = copy.deepcopy(module)
    x, grid = images(), Grid(world(), 1, 1)
    torch.manual_seed(5)
    (y,) = streamed(grid, module, x, (2, 2)).run()
    y.square().sum().backward()
    state = torch.get_rng_state()
    if isinstance(layer, nn.Dropout):  # PyTorch draws other masks: a finite difference says whether backward has ours
        direction = [torch.randn_like(p) for p in module.parameters()]
        slope = sum(
            float((p.grad * d).sum()) for p, d in zip(module.parameters(), direction, strict=True) if p.grad is not None
        )
        found = []
        for step in (1e-6, -1e-6):
            with torch.no_grad():
                for p, d in zip(module.parameters(), direction, strict=True):
                    p.add_(d, alpha=step)
                torch.manual_seed(5)
                found.append(float(streamed(grid, module, x, (2, 2)).run()[0].square().sum()))
                for p, d in zip(module.parameters(), direction, strict=True):
                    p.add_(d, alpha=-step)
        assert (found[0] - found[1]) / 2e-6 == pytest.approx(slope, rel=1e-5)
        assert float((y != y.detach().roll(1, 0)).double().mean()) > 0.6
        return
    torch.manual_seed(5)
    expected = plain(x)
    expected.square().sum().backward()
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
    pairs: list[tuple[Any, Any]] = [
        (p.grad, q.grad) for p, q in zip(module.parameters(), plain.parameters(), strict=True)
    ]
    pairs += list(zip(module.buffers(), plain.buffers(), strict=True))
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_what_needs_the_whole_image_is_refused() -> None:
    class Turned(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cdist(x, x.transpose(2, 3))

    with pytest.raises((CannotStream, NotImplementedError)):
        streamed(
            Grid(world(), 1, 1),
            nn.Sequential(nn.Conv2d(3, 3, 1), Turned()).double(),
            torch.zeros(1, 3, 8, 8).double(),
            (2, 2),
        )
