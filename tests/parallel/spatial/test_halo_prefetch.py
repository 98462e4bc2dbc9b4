"""Norms that know what follows them: what they send, when they are computed, and what they leave to others."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mpi4dl.comm import Communicator
from mpi4dl.parallel import spatial
from mpi4dl.parallel.spatial.rules import normalization
from tests.parallel.spatial.comparing import Traffic, compare_models, difference
from tests.pool.ranks import Ranks, on_ranks


def convolution(stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(3, 3, 3, stride, 1, bias=False)


class Block(nn.Module):
    """As in a residual network: two convolutions, and one beside them, with a norm behind each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.beside = convolution(), convolution(), nn.Conv2d(3, 3, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[1](self.second(F.relu(self.norms[0](self.first(x)))))
        y += self.norms[2](self.beside(x))
        return F.relu(y)


class Recomputed(Block):
    def forward(self, x: Tensor) -> Tensor:
        def run(t: Tensor) -> Tensor:
            y = super(Recomputed, self).forward(x.like(t) if isinstance(x, spatial.SpatialTensor) else t)
            return y.local if isinstance(y, spatial.SpatialTensor) else y

        y = checkpoint(run, x.local if isinstance(x, spatial.SpatialTensor) else x, use_reentrant=False)
        return x.like(y) if isinstance(x, spatial.SpatialTensor) else y


class EndsInVain(Block):
    """Its last norm is computed for its running statistics alone."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norms[0](self.first(x)))
        z = self.second(y)
        self.norms[1](z)
        self.norms[2](self.beside(y))
        return z


def train(
    comm: Communicator, make: Callable[[], nn.Module], steps: int, everywhere: bool = True
) -> tuple[list[tuple[int, int]], list[str]]:
    """The rounds of each step, forward and backward, and what differs from plain PyTorch in the end."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = make()
    plain = copy.deepcopy(model)
    grid, traffic = spatial.Grid(comm, cols=2), Traffic(comm)
    grid.halo_prefetch.everywhere = everywhere
    rounds = []
    for _ in range(steps):
        image = torch.randn(2, 3, 12, 16)
        model.zero_grad()
        plain.zero_grad()
        plain_result = plain(image)
        (plain_result.sigmoid() ** 2).sum().backward()
        x = spatial.shard(image, grid)
        traffic.clear()
        y = model(x)
        loss = (y.sigmoid() ** 2).local.sum()
        forward = traffic.rounds
        loss.backward()
        rounds.append((forward, traffic.rounds - forward))
    wrong = difference("the result", spatial.gather(y), plain_result) + compare_models(comm, model, plain)
    return rounds, wrong


def test_norms_bring_halos_and_wait_for_each_other_from_the_second_step_on(ranks: Ranks) -> None:
    """5 rounds: two halos and three norms. Then the image's halo, the first norm with one, and two norms together."""
    for rounds, wrong in ranks(2).run(train, Block, 4):
        assert rounds == [(5, 4), (3, 2), (3, 2), (3, 2)]
        assert not wrong, wrong


@on_ranks(2)
def test_many_ranks_tell_each_other_in_a_collective_beside_the_strips(comm: Communicator) -> None:
    """As if two ranks were many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(normalization, "FEW", 1)
        _, wrong = train(comm, Block, 3)
    assert not wrong, wrong


def test_on_cpus_norms_wait_and_convolutions_fetch_their_halos(ranks: Ranks) -> None:
    """Copies of a tile cost more than a message between ranks that share memory."""
    for rounds, wrong in ranks(2).run(train, Block, 3, False):
        assert rounds == [(5, 4), (4, 3), (4, 3)]
        assert not wrong, wrong


@pytest.mark.parametrize("make", [Recomputed, EndsInVain])
def test_results_stay_those_of_the_whole_image(ranks: Ranks, make: Callable[[], nn.Module]) -> None:
    for _, wrong in ranks(2).run(train, make, 3):
        assert not wrong, wrong


@on_ranks(2)
def test_writing_to_the_input_of_a_norm_that_waits_is_the_error_that_it_is(comm: Communicator) -> None:
    """Autograd's own error, though the norm waits when its input is written to."""
    torch.manual_seed(0)
    norms = [nn.BatchNorm2d(3).requires_grad_(True) for _ in range(2)]
    grid = spatial.Grid(comm, cols=2)
    complaints = []
    for spoil in (False, False, True):
        x = spatial.shard(torch.randn(2, 3, 4, 4), grid) * 1
        first = norms[0](x)
        second = norms[1](x + 1)
        if spoil:
            first = norms[0](x)
            x.mul_(2)
        try:
            (first + second).local.sum().backward()
        except RuntimeError as error:
            complaints.append(str(error))
    assert len(complaints) == 1
    assert "modified by an inplace operation" in complaints[0]


@on_ranks(2)
def test_a_norm_holds_only_what_is_small_beside_the_tile(comm: Communicator) -> None:
    """A far halo is fetched as it was; what is written in place where less is held comes to hold less."""
    torch.manual_seed(0)
    norm, grid = nn.BatchNorm2d(3), spatial.Grid(comm, cols=2)
    grid.halo_prefetch.everywhere = True
    weight, image = torch.randn(3, 3, 3, 3), torch.randn(2, 3, 8, 64)
    held = []
    for dilation in (20, 20, 2, 2):
        x = norm(spatial.shard(image, grid) * 1)
        held.append(x.layout.wide)
        F.conv2d(x, weight, padding=dilation, dilation=dilation).local.sum().backward()
    x += spatial.shard(image, grid)
    assert held == [False, False, False, True]
    assert not x.layout.wide
