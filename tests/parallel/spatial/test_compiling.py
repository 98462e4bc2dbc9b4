"""A model that went through torch.compile gives on tiles what the plain model gives on the whole image."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl.comm import Communicator
from mpi4dl.parallel import spatial
from tests.parallel.spatial.comparing import difference
from tests.pool.ranks import Ranks


class Classifier(nn.Module):
    """Branches, a loop, a slice and a head: what a compiler unrolls, guards and fuses."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList([nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, 2, 1)])
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        for convolution in self.convolutions:
            x = convolution(x).relu()
        x = self.norm(x) + x.mean((2, 3), keepdim=True) if x.shape[-1] > 2 else x
        return self.head(F.gelu(x[:, :, 1:]).amax((2, 3)))


def compile_a_model(comm: Communicator) -> list[str]:
    torch.set_default_dtype(torch.float64)
    image, plain = torch.randn(2, 3, 10, 9), Classifier()
    ours = copy.deepcopy(plain)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as PyTorch's own of what it deprecates in itself
        model: Any = torch.compile(ours, backend="eager")
        result = spatial.gather(model(spatial.shard(image, spatial.Grid(comm, rows=2))))
        (result.square().sum() / comm.size).backward()
    expected = plain(image)
    expected.square().sum().backward()
    spatial.sum_gradients(ours, spatial.Grid(comm, rows=comm.size))
    wrong = difference("result", result, expected)
    for (name, a), b in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        wrong += difference(name, a.grad, b.grad, 1.0)
    return wrong


@pytest.mark.exhaustive
def test_a_compiled_model_runs_on_tiles(ranks: Ranks) -> None:
    assert ranks(2).run(compile_a_model) == [[], []]
