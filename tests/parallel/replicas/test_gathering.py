"""ZeRO 3's parameters are whole while they are used, come ahead of their use, and are refused at other times."""

import copy
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mpi4dl.comm import Communicator, Pending, Refusal
from mpi4dl.parallel.replicas.gathering import KEPT, Gatherer, there_together
from mpi4dl.parallel.replicas.group import ReplicaGroup
from mpi4dl.parallel.replicas.reducer import plan_layout
from mpi4dl.parallel.replicas.update import Device
from tests.pool.ranks import Ranks, on_ranks

F64 = torch.float64


def chain() -> nn.Sequential:
    """Layers of 20, 30, 42 and 21 weights."""
    return nn.Sequential(*(nn.Linear(a, b, bias=False, dtype=F64) for a, b in ((4, 5), (5, 6), (6, 7), (7, 3))))


def gatherer_of(model: nn.Module, comm: Communicator, bucket_bytes: int = 1) -> Gatherer:
    parameters = list(model.parameters())
    return Gatherer(parameters, plan_layout(parameters, comm, bucket_bytes), comm)


def is_there(p: Tensor) -> bool:
    """Looks without calling for it."""
    with torch._C.DisableTorchFunction():
        return not bool(p.detach().isnan().any())


@on_ranks(2)
def test_what_came_next_the_last_time_comes_ahead_of_its_use(comm: Communicator) -> None:
    """The first layer's input has no gradient, so that backward does not need its weight."""
    first = ["-> 20", "20", "-> 30", "30", "-> 42", "42", "-> 21", "21", "-> 21", "-> 42", "-> 30"]
    second = ["-> 20", "-> 30", "20", "-> 42", "30", "-> 21", "42", "21", "-> 21", "-> 42", "-> 30"]
    model = chain()
    gatherer = gatherer_of(model, comm)
    start, events, most = gatherer.comm.iall_gather_into, [], 0

    def gather(flat: Tensor, cuts: Any = None) -> Pending:
        events.append(f"-> {flat.numel()}")
        return start(flat, cuts)

    def computed(layer: nn.Module, *_: Any) -> None:
        nonlocal most
        assert isinstance(layer.weight, Tensor)
        events.append(str(layer.weight.numel()))
        most = max(most, sum(is_there(p) for p in model.parameters()))

    gatherer.comm.iall_gather_into = gather  # type: ignore[method-assign]
    for layer in model:
        layer.register_forward_hook(computed)
    runs = []
    for _ in range(2):
        with there_together([gatherer]):
            edge = get_gradient_edge(model(torch.ones(2, 4, dtype=F64)).sum())
        assert not any(is_there(p) for p in model.parameters())
        with there_together([gatherer]):
            torch.autograd.backward([edge])
        runs.append(events.copy())
        events.clear()
    assert (runs, most) == ([first, second], KEPT)


def keep_little(comm: Communicator) -> tuple[int, list[tuple[int, ...]], float]:
    model = chain()
    before = [p.detach().clone() for p in model.parameters()]
    gatherer = gatherer_of(model, comm)
    stored = sum(p.untyped_storage().nbytes() for p in model.parameters())
    own = sum(gatherer.part(number).untyped_storage().nbytes() for number in range(len(gatherer.layout.buckets)))
    with there_together([gatherer]):
        for p, was in zip(model.parameters(), before, strict=True):
            torch.testing.assert_close(p + 0, was, rtol=0, atol=0)
    for read in (Tensor.detach, lambda p: p.data, lambda p: p.T, lambda p: p * 2, copy.deepcopy, nn.init.zeros_):
        with pytest.raises(Refusal, match=r"a parameter.* is read or written outside of a step"):
            read(next(model.parameters()))
    return stored // 8, [tuple(p.shape) for p in model.parameters()], own / 8


def test_a_rank_keeps_its_part_and_shapes_alone(ranks: Ranks) -> None:
    """One number stands for all elements of a parameter that is not there."""
    found = ranks(2).run(keep_little)
    assert found[0][:2] == (4, [(5, 4), (6, 5), (7, 6), (3, 7)])
    assert [own for *_, own in found] == [10 + 15 + 21 + 10, 10 + 15 + 21 + 11]


class _KeptAside(torch.autograd.Function):
    """A product that keeps its weight out of autograd's sight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (x,) = ctx.saved_tensors
        return gradient @ ctx.weight.t(), x.t() @ gradient


class Odd(nn.Module):
    """Parameters that are tied, alone, empty, used in a loop, as views, conjugated, in a checkpoint, and in a custom
    function.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.scale, self.one = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(1))
        self.empties = nn.ParameterList([torch.empty(0), torch.ones(9), torch.empty(3, 0), torch.ones(9)])
        self.aside = nn.Parameter(torch.randn(4, 4))
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.waves = nn.Parameter(torch.randn(2, 4, dtype=torch.complex128))
        self.block = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        view = self.first.weight[:3]
        for _ in range(2):
            x = torch.tanh(self.second(self.first(x))) * self.scale + self.frozen
        x = _KeptAside.apply(x, self.aside) + (self.waves[0].conj() * self.waves[1]).abs()
        x = checkpoint(self.block, x, use_reentrant=False)
        return F.linear(x * self.one, view) + sum(p.sum() for p in self.empties)


def train(comm: Communicator, make: Callable[[], nn.Module], bucket_bytes: int) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = make().double()
        return model, torch.optim.Adam(model.parameters(), lr=0.1)

    (model, optimizer), (plain, reference) = build(), build()
    group = ReplicaGroup(model.named_parameters(), comm, optimizer, Device(), zero=3, bucket_bytes=bucket_bytes)
    for step in range(3):
        images = torch.randn(comm.size, 2, 4, generator=torch.Generator().manual_seed(step), dtype=F64)
        group.reducer.prepare(accumulate=True)
        with group.there_when_needed():
            edge = get_gradient_edge(model(images[comm.rank]).square().sum())
        with group.there_when_needed(), group.one_pass(last=True):
            torch.autograd.backward([edge])
        group.reducer.finish()
        group.step(1.0)
        reference.zero_grad()
        sum(plain(image).square().sum() for image in images).backward()
        reference.step()
    shards = list(group.shards())
    expected = dict(plain.named_parameters())
    for shard in shards:
        wanted = expected[shard.name].detach().reshape(-1)[shard.start : shard.stop]
        torch.testing.assert_close(shard.value, wanted, rtol=1e-9, atol=1e-12, msg=shard.name)
    names = {name: p.numel() for name, p in expected.items()}
    owned, empty = [], []
    for found in comm.all_gather_object([(shard.name, shard.start, shard.stop) for shard in shards]):
        owned += [(name, i) for name, start, stop in found for i in range(start, stop)]
        empty += [name for name, start, stop in found if start == stop]
    assert sorted(owned) == sorted((name, i) for name, n in names.items() for i in range(n))
    assert empty == [name for name, n in names.items() if not n]


@pytest.mark.parametrize("bucket_bytes", [1, 200, 1 << 20])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_whatever_a_model_does_with_its_parameters_it_finds_them(
    ranks: Ranks, num_ranks: int, bucket_bytes: int
) -> None:
    ranks(num_ranks).run(train, Odd, bucket_bytes)


def recurrent() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (2, 2)), Last(nn.LSTM(2, 3, 2, bidirectional=True, batch_first=True)))


class Last(nn.Module):
    def __init__(self, layer: nn.LSTM) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0][:, -1]


def normalized() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 2))


@pytest.mark.parametrize("make", [recurrent, normalized], ids=lambda make: make.__name__)
def test_modules_whose_weights_are_lists_or_computed(ranks: Ranks, make: Callable[[], nn.Module]) -> None:
    ranks(2).run(train, make, 40)


class Changing(nn.Linear):
    """Changes its weight in forward, in one of the ways in which models do."""

    def __init__(self, way: str) -> None:
        super().__init__(4, 4, bias=False, dtype=F64)
        self.way = way

    @torch.no_grad()
    def change(self) -> None:
        if self.way == "method":
            self.weight.clamp_(-0.01, 0.01)
        elif self.way == "part":
            self.weight[1:, 0].zero_()
        elif self.way == "data":
            self.weight.data.clamp_(-0.01, 0.01)
        elif self.way == "data of one rank":
            self.weight.data[-1].zero_()
        elif self.way == "assigned":
            self.weight.data = self.weight.data / 2

    def forward(self, x: Tensor) -> Tensor:
        self.change()
        return super().forward(x)


@pytest.mark.parametrize("way", ["method", "part", "data", "data of one rank", "assigned"])
@on_ranks(2)
def test_a_change_in_place_which_would_be_lost_is_refused(comm: Communicator, way: str) -> None:
    gatherer = gatherer_of(nn.Sequential(model := Changing(way)), comm)
    words = r"a parameter was changed while the model ran \(one of shape \(4, 4\)\).*ZeRO 2 or less"
    with pytest.raises(Refusal, match=words), there_together([gatherer]):
        model(torch.ones(2, 4, dtype=F64))


@on_ranks(2)
def test_looking_at_the_values_is_no_change(comm: Communicator) -> None:
    look_at_values(comm)


@on_ranks(2)
def test_looking_at_values_where_data_is_replaced_later(comm: Communicator) -> None:
    """As the rules of tensors that are spread do, whenever they are imported."""
    with patch.object(Tensor, "data", property(Tensor.data.__get__, Tensor.data.__set__)):  # type: ignore[attr-defined]
        look_at_values(comm)


def look_at_values(comm: Communicator) -> None:
    torch.manual_seed(0)
    model = chain()
    before = [p.detach().clone() for p in model.parameters()]
    with there_together([gatherer_of(model, comm)]):
        assert [float(p.data.abs().max()) for p in model.parameters()] == [float(p.abs().max()) for p in before]
