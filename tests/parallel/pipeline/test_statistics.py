"""Running statistics of two copies of a stage end as those of a plain loop, or what cannot be followed is refused."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpi4dl.comm import Communicator
from mpi4dl.parallel.pipeline.decisions import watches_of
from mpi4dl.parallel.pipeline.executor import RunningStatistics
from mpi4dl.parallel.plan import Plan
from tests.pool.ranks import Ranks, on_ranks

PLAN = Plan(((1, 1), (1, 1)), microbatches=2, bidirectional=2)
CHANNELS = 3


class Own(nn.BatchNorm2d):
    """Another way to say PyTorch's formula."""

    def forward(self, x: Tensor) -> Tensor:
        self.num_batches_tracked += 1
        return nn.functional.batch_norm(x, self.running_mean, self.running_var, training=True, momentum=self.momentum)


class Norms(nn.Module):
    """Norms of all kinds; `sometimes` is used on every other microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.usual = nn.BatchNorm2d(CHANNELS)
        self.average = nn.BatchNorm2d(CHANNELS, momentum=None)
        self.without = nn.BatchNorm2d(CHANNELS, track_running_stats=False)
        self.frozen = nn.BatchNorm2d(CHANNELS)
        self.sometimes = nn.BatchNorm2d(CHANNELS, momentum=0.3)
        self.instance = nn.InstanceNorm2d(CHANNELS, momentum=0.2, track_running_stats=True)
        self.own = Own(CHANNELS)
        self.uncounted = nn.Sequential(nn.BatchNorm2d(CHANNELS, momentum=0.4), nn.BatchNorm2d(CHANNELS, momentum=None))
        for norm in self.uncounted:
            norm.num_batches_tracked = None
        self.register_buffer("constant", torch.tensor([2.0, 3.0, 4.0]).view(3, 1, 1))

    def forward(self, x: Tensor, number: int) -> Tensor:
        x = self.frozen(self.without(self.average(self.usual(x)) * self.constant))
        return self.instance(self.uncounted(self.sometimes(self.own(x)))) if number % 2 else x


def norms() -> Norms:
    model = Norms().double()
    model.frozen.eval()
    return model


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, CHANNELS, 4, 5, generator=generator, dtype=torch.float64) + i for i in range(8)]


def copies(comm: Communicator, num_steps: int) -> list[dict[str, Tensor]]:
    """Rank 0 runs the model, rank 1 its mirrored copy; the state of this rank's copy after each step."""
    model, states = norms(), []
    microbatches = PLAN.divide(8)
    for _ in range(num_steps):
        statistics = RunningStatistics(model, comm, {direction: comm.rank == direction for direction in (0, 1)})
        before = {name: value.clone() for name, value in model.state_dict().items()}
        for x, microbatch in zip(inputs(), microbatches, strict=True):
            if microbatch.direction == comm.rank:
                with statistics.collect(microbatch.direction, microbatch.number):
                    model(x, microbatch.number)
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        statistics.apply(microbatches)
        states.append({name: value.clone() for name, value in model.state_dict().items()})
    return states


def test_both_copies_follow_all_microbatches_in_the_order_of_a_plain_loop(ranks: Ranks) -> None:
    model = norms()
    first, second = ranks(2).run(copies, 2)
    for ours, others in zip(first, second, strict=True):
        for x, microbatch in zip(inputs(), PLAN.divide(8), strict=True):
            model(x, microbatch.number)
        expected = model.state_dict()
        assert ours.keys() == others.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(ours[name], others[name]), name
            torch.testing.assert_close(ours[name], value, rtol=1e-13, atol=1e-15, msg=name)
    assert [int(model.usual.num_batches_tracked), int(model.sometimes.num_batches_tracked)] == [16, 8]


@on_ranks(2)
def test_a_stage_without_running_statistics_sends_nothing(comm: Communicator) -> None:
    statistics = RunningStatistics(nn.BatchNorm2d(CHANNELS, track_running_stats=False), comm, {0: True})
    if comm.rank == 0:
        statistics.apply(PLAN.divide(8))


class Counting(nn.Module):
    """Keeps a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return x


class Remembering(nn.Module):
    """Keeps a number of its own."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return x


class OfItsOwn(nn.BatchNorm2d):
    """Writes to its statistics in place, by a factor of its own."""

    def forward(self, x: Tensor) -> Tensor:
        self.running_mean.lerp_(x.detach().mean((0, 2, 3)), 0.01)
        return x


class Bounded(nn.BatchNorm2d):
    """Changes its statistics behind PyTorch's update."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.running_var.clamp_(min=0.5)
        return y


class Replacing(nn.BatchNorm2d):
    """Puts other tensors in place of its statistics, by a formula of its own."""

    def forward(self, x: Tensor) -> Tensor:
        self.running_mean = torch.tanh(self.running_mean + x.detach().mean((0, 2, 3)))
        self.num_batches_tracked += 1
        return x


class Unseen(nn.BatchNorm2d):
    """Updates its statistics by a factor of its own, where PyTorch does not count it."""

    def __init__(self, uses_pytorchs: bool) -> None:
        super().__init__(CHANNELS)
        self.uses_pytorchs = uses_pytorchs

    def forward(self, x: Tensor) -> Tensor:
        self.num_batches_tracked += 1
        if self.uses_pytorchs:
            return nn.functional.batch_norm(x, self.running_mean, self.running_var, training=True, momentum=0.01)
        self.running_mean.data.lerp_(x.detach().mean((0, 2, 3)), 0.01)
        return nn.functional.batch_norm(x, None, None, training=True)


def hooked(momentum: bool) -> nn.Module:
    norm = nn.BatchNorm2d(CHANNELS)

    def hook(norm: Any, inputs: Any) -> None:
        if momentum:
            norm.momentum = 0.01
        else:
            norm.running_mean.data.add_(1)

    norm.register_forward_pre_hook(hook)
    return norm


class Averaging(nn.Module):
    """The same in a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(CHANNELS))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = 0.9 * self.seen + 0.1 * x.detach().mean((0, 2, 3))
        return x


calls = 0


class CountingOutside(nn.Module):
    """Counts its calls in a global."""

    def forward(self, x: Tensor) -> Tensor:
        global calls
        calls += 1
        return x * calls


class Functional(nn.Module):
    """Has statistics in buffers of its own, to which PyTorch's batch norm writes without counting."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(CHANNELS))
        self.register_buffer("var", torch.ones(CHANNELS))
        self.register_buffer("unset", torch.full((2,), torch.nan))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.batch_norm(x, self.mean, self.var, training=True)


def twice_uncounted() -> nn.Module:
    model = twice()
    model[0].num_batches_tracked = None
    return model


def twice(kind: Callable[..., nn.Module] = nn.BatchNorm2d) -> nn.Module:
    norm = kind(CHANNELS, track_running_stats=True)
    return nn.Sequential(norm, nn.ReLU(), norm)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            twice,
            "a BatchNorm2d is used 2 times on one image: the copies of a model that runs in both directions cannot "
            "follow its running statistics; leave out `bidirectional`",
        ),
        (
            partial(twice, nn.InstanceNorm2d),
            "a InstanceNorm2d is used 2 times on one image: the copies of a model that runs in both directions cannot "
            "follow its running statistics; leave out `bidirectional`",
        ),
        (
            twice_uncounted,
            "a BatchNorm2d is used 2 times on one image: the copies of a model that runs in both directions cannot "
            "follow its running statistics; leave out `bidirectional`",
        ),
        (
            partial(OfItsOwn, CHANNELS),
            "a OfItsOwn writes to its statistics by itself: the copies of a model that runs in both directions "
            "cannot follow its running statistics; leave out `bidirectional`",
        ),
        (
            partial(Bounded, CHANNELS),
            "a Bounded writes to its statistics by itself: the copies of a model that runs in both directions "
            "cannot follow its running statistics; leave out `bidirectional`",
        ),
        (
            partial(Replacing, CHANNELS),
            "a Replacing writes to its statistics by itself: the copies of a model that runs in both directions "
            "cannot follow its running statistics; leave out `bidirectional`",
        ),
        *(
            (
                partial(hooked, momentum),
                "a BatchNorm2d writes to its statistics by itself: the copies of a model that runs in both directions "
                "cannot follow its running statistics; leave out `bidirectional`",
            )
            for momentum in (False, True)
        ),
        *(
            (
                partial(Unseen, uses_pytorchs),
                "a Unseen writes to its statistics by itself: the copies of a model that runs in both directions "
                "cannot follow its running statistics; leave out `bidirectional`",
            )
            for uses_pytorchs in (False, True)
        ),
        (
            Averaging,
            "the model changes its buffer seen as it runs, which is no batch norm's: its copies in both directions "
            "would differ; leave out `bidirectional`",
        ),
        (
            CountingOutside,
            f"the model changes calls, which forward (line {CountingOutside.forward.__code__.co_firstlineno} of "
            "test_statistics.py) reads, as it runs: its copies in both directions would differ; leave out "
            "`bidirectional`",
        ),
        (
            Functional,
            "the model changes its buffer mean as it runs, which is no batch norm's: its copies in both directions "
            "would differ; leave out `bidirectional`",
        ),
        (
            Counting,
            "the model changes its buffer seen as it runs, which is no batch norm's: its copies in both directions "
            "would differ; leave out `bidirectional`",
        ),
        (
            Remembering,
            "the model changes its attribute calls as it runs: its copies in both directions would differ; leave out "
            "`bidirectional`",
        ),
    ],
)
@on_ranks(1)
def test_what_copies_cannot_follow_is_refused(comm: Communicator, build: Callable[[], nn.Module], message: str) -> None:
    """And the statistics are left as they were."""
    model = build()
    norm_state = {
        name: value.clone()
        for name, value in model.state_dict().items()
        if name not in ("seen", "mean", "var", "unset")
    }
    statistics = RunningStatistics(model, comm, {0: True}, watches=watches_of(model))
    with statistics.collect(0, 0):
        model(torch.randn(2, CHANNELS, 4, 4))
    assert statistics.problem == message
    assert all(torch.equal(model.state_dict()[name], value) for name, value in norm_state.items())
