"""What stays alive for the backward pass: what plain PyTorch keeps for a tile's pixels, and strips; no padded copy."""

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpi4dl.comm import Communicator
from mpi4dl.parallel import spatial
from mpi4dl.parallel.costs.meter import SavedTensors
from tests.pool.ranks import on_ranks

IMAGE = (2, 4, 64, 48)
TILE = (2, 4, 32, 48)


def recording(saved: list[Tensor]) -> AbstractContextManager[Any]:
    """Notes every tensor that autograd saves."""

    def pack(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)


def alive(rows: int) -> list[tuple[int, ...]]:
    """The shapes of all tensors of numbers that Python can reach and that have this many rows."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) is Tensor]
    return [tuple(x.shape) for x in tensors if x.dim() == 4 and x.shape[2] == rows and x.is_floating_point()]


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "convolution": lambda: nn.Conv2d(4, 4, 3, padding=1, bias=False),
    "transposed convolution": lambda: nn.ConvTranspose2d(4, 4, 3, padding=1, bias=False),
    "max pooling": lambda: nn.MaxPool2d(3, 1, 1),
    "average pooling": lambda: nn.AvgPool2d(3, 1, 1),
    "Lp pooling": lambda: nn.LPPool2d(2, 3, 1),
    "batch norm": lambda: nn.BatchNorm2d(4),
}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("convolution", [(TILE, True), ((2, 4, 1, 48), False)]),
        ("transposed convolution", [(TILE, True), ((2, 4, 1, 48), False)]),
        ("max pooling", [(TILE, False)]),
        ("average pooling", []),
        ("Lp pooling", [(TILE, True), ((2, 4, 1, 48), False)]),
        ("batch norm", [(TILE, True), ((5, 4), False)]),
    ],
)
@pytest.mark.sample(2)
@on_ranks(2)
def test_a_layer_saves_its_input_and_strips(comm: Communicator, name: str, expected: list[Any]) -> None:
    """The shape of each tensor that it saves, and whether that is the input itself."""
    x = spatial.shard(torch.randn(IMAGE, requires_grad=True), spatial.Grid(comm, rows=2)) * 1
    layer = LAYERS[name]()
    saved: list[Tensor] = []
    with recording(saved):
        y = layer(x)
    assert y.requires_grad
    padded = 34
    assert alive(padded) == []
    if name == "max pooling":  # PyTorch keeps 8 for an index
        assert sum(s.nbytes for s in saved) <= 2 * y.local.numel()
    own = {p.data_ptr() for p in layer.parameters()}
    found = [(tuple(s.shape), s.data_ptr() == x.local.data_ptr()) for s in saved if s.data_ptr() not in own]
    assert found == expected


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 5, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(8, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
    )


@on_ranks(2)
def test_a_network_saves_no_more_than_plain_pytorch_for_as_many_pixels(comm: Communicator) -> None:
    model, counts = network(), []
    for x in (
        spatial.from_tile(torch.randn(2, 4, 64, 128), spatial.Grid(comm, rows=2), (128, 128)),
        torch.randn(2, 4, 64, 128),
    ):
        saved = SavedTensors(model.parameters())
        with saved.counting():
            assert model(x).requires_grad
        counts.append(saved.num_bytes)
    ours, plain = counts
    strips = 4 * 2 * 128 * (4 * 1 + 8 * 2 + 8 * 1)
    assert plain > 1 << 20
    assert ours <= plain + strips


@on_ranks(2)
def test_nothing_outlives_the_step_but_the_tile(comm: Communicator) -> None:
    others = len(alive(39)) + len(alive(20))  # of other tests in this process
    model = network()
    x = spatial.shard(torch.randn(2, 4, 78, 50), spatial.Grid(comm, rows=2))
    for _ in range(3):
        spatial.gather(model(x)).sum().backward()
    assert len(alive(39)) + len(alive(20)) - others == 1
