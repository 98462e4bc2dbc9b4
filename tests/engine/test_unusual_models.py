"""Models and optimizers that are put together in unusual ways train as in plain PyTorch, or are refused."""

import re
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.nn.utils import prune

from mpi4dl.comm import Communicator, Refusal
from mpi4dl.engine import Engine
from mpi4dl.parallel.cut import split
from mpi4dl.parallel.plan import Plan
from tests.parallel.replicas.test_step_units import Clipping
from tests.pool.ranks import Ranks, RanksFailed, on_ranks
from tests.support.short_runs import Task, check, check_going_on

BATCH, SIZE = 3, (5, 4)


class Net(nn.Module):
    """Two convolutions; the second has a parameter of no elements beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3)
        self.empty = nn.Parameter(torch.empty(0, 2))
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x).tanh()).mean((2, 3)).sin()) + self.empty.sum()


def net(channels_last: bool = False) -> nn.Module:
    model = Net().double()
    return model.to(memory_format=torch.channels_last) if channels_last else model


class Freezing(Net):
    """Its first layer is frozen after the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.first.requires_grad_(not int(self.steps))
        self.steps += self.training
        return super().forward(x)


class Alternating(nn.Conv2d):
    """Is trained by every other microbatch alone."""

    def __init__(self) -> None:
        super().__init__(3, 4, 3, padding=1)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.requires_grad_(int(self.calls) % 2 == 0)
        self.calls += self.training
        return super().forward(x)


def alternating() -> nn.Module:
    model = Net()
    model.first = Alternating()
    return model


class Bounded(nn.BatchNorm2d):
    """Changes its statistics behind PyTorch's update."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.running_var.data.clamp_(min=0.9)
        return y


class Branching(Net):
    """Nobody looks at the result of one norm before the next one is reached."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Bounded(4), Bounded(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        left, right = self.left(x), self.right(self.second(x))
        return self.last(left.mean((2, 3)) * right.square().mean((2, 3))) + self.empty.sum()


class Thawing(Net):
    """Its last layer is frozen until its second step."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self.last.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.last.requires_grad_(self.steps > 1)
        return super().forward(x)


def named(model: nn.Module) -> optim.Optimizer:
    return optim.AdamW(model.named_parameters(), lr=0.01, eps=1e-2)


def fused(kind: Any, options: dict[str, Any], model: nn.Module) -> optim.Optimizer:
    return kind(model.parameters(), lr=0.1, fused=True, **options)


NAMED = Task(Net, SIZE, BATCH, named, num_steps=4).with_engine(bucket_bytes=400)
LAST = replace(NAMED, model=partial(net, channels_last=True))
CASES = {
    "named": NAMED,
    "frozen-later": replace(NAMED, model=Freezing),
    "channels-last-SGD": replace(LAST, optimizer=partial(fused, optim.SGD, {"momentum": 0.9})),
    "channels-last-Adam-disk": replace(LAST, optimizer=partial(fused, optim.Adam, {})).with_engine(
        bucket_bytes=400, offload="disk"
    ),
    "channels-last-Adagrad": replace(LAST, optimizer=partial(fused, optim.Adagrad, {})),
}


@pytest.mark.parametrize(
    ("name", "zero"),
    [(name, zero) for name in CASES for zero in ((0, 1, 2, 3) if name == "frozen-later" else (0, 3))],
)
def test_they_train_as_in_plain_pytorch(ranks: Ranks, tmp_path: Path, name: str, zero: int) -> None:
    """Half of it under the next ZeRO stage, after a checkpoint."""
    check_going_on(ranks, CASES[name], tmp_path, (Plan(data=2, zero=zero), 2), (Plan(data=2, zero=(zero + 1) % 4), 4))


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_a_layer_that_is_frozen_for_some_microbatches_is_trained_by_the_others(ranks: Ranks, schedule: str) -> None:
    """Though stages make the backward pass of one after the forward pass of the next."""
    task = Task(alternating, SIZE, batch=4, optimizer="AdamW")
    check(ranks, task, Plan(((1, 1), (1, 1)), microbatches=4, schedule=schedule))


@pytest.mark.parametrize("plan", [Plan(((1, 2),)), Plan(((2, 1),), microbatches=2)], ids=str)
def test_a_norm_that_others_wait_for_has_its_statistics_at_once(ranks: Ranks, plan: Plan) -> None:
    check(ranks, Task(Branching, (9, 8), batch=4), plan)


@on_ranks(2)
def test_a_layer_that_the_model_thaws_as_it_runs_is_refused(comm: Communicator) -> None:
    model = Thawing().double()
    engine = engine_of(comm, model, sgd(model), 0)
    images, targets = batch(0)
    share = slice(*engine.reads(BATCH, SIZE)[0].box[0])
    engine.step([images[share]], targets, SIZE)
    with pytest.raises(Refusal, match="weight is trained now, but was frozen when the engine was made"):
        engine.step([images[share]], targets, SIZE)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(BATCH, 3, *SIZE, generator=generator, dtype=torch.float64)
    return images, torch.randint(3, (BATCH,), generator=generator)


def engine_of(comm: Communicator, model: nn.Module, optimizer: optim.Optimizer, zero: int, **options: Any) -> Engine:
    options = {"loss": F.cross_entropy, "bucket_bytes": 400} | options
    return Engine(model, Plan(data=comm.size, zero=zero), optimizer, comm=comm, **options)


def overlapping() -> nn.Module:
    model = net()
    model.again = nn.Parameter(model.get_parameter("first.weight").data[:2])
    return model


def aliased(buffer: bool) -> nn.Module:
    """With another tensor in the memory of a parameter, which follows its steps in plain PyTorch."""
    model, weight = net(), "first.weight"
    if buffer:
        model.register_buffer("alias", model.get_parameter(weight).data[1:])
    else:
        model.get_submodule("first").alias = [model.get_parameter(weight).detach()]
    return model


class Keeping(Net):
    """Keeps its weight as the first forward pass found it, or as the last one did."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.kept: Tensor | None = None
        self.replaces = last

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is None or self.replaces:
            self.kept = self.first.weight.detach()[1:]
        return super().forward(x) * self.kept.sum()


def keep(comm: Communicator, last: bool) -> None:
    model = Keeping(last).double()
    engine = engine_of(comm, model, sgd(model), 3)
    images, targets = batch(0)
    for _ in range(3):
        engine.step([images[slice(*engine.reads(BATCH, SIZE)[0].box[0])]], targets, SIZE)


@pytest.mark.parametrize("last", [False, True])
def test_a_view_of_a_weight_that_would_not_follow_the_steps_is_refused(ranks: Ranks, last: bool) -> None:
    words = r"keeps a tensor in the memory of a parameter \(one of shape \(4, 3, 3, 3\)\)"
    with nullcontext() if last else pytest.raises(RanksFailed, match=words):
        ranks(2).run(keep, last)


class Remembering(Net):
    """With something in its state that is no tensor."""

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 1}


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch has deprecated it
        return nn.Sequential(torch.jit.script(net()))


def lazy() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(3))


def frozen_at_first() -> nn.Module:
    model = net()
    model.get_submodule("second").requires_grad_(False)
    return model


def sgd(model: nn.Module) -> optim.Optimizer:
    return optim.SGD(model.parameters(), lr=0.1)


def clipping(model: nn.Module) -> optim.Optimizer:
    return Clipping(model.parameters())


Refused = tuple[Callable[[], nn.Module], Callable[[nn.Module], optim.Optimizer], int, str]
REFUSED: dict[str, Refused] = {
    "again and first.weight are different parameters in the same memory": (overlapping, sgd, 0, "mean"),
    "the buffer alias is in the memory of first.weight": (partial(aliased, True), sgd, 1, "mean"),
    "a tensor (4, 3, 3, 3) that the model has": (partial(aliased, False), sgd, 3, "mean"),
    "_extra_state of the model is no tensor": (Remembering, sgd, 0, "mean"),
    "0 is made by torch.jit": (scripted, sgd, 0, "mean"),
    "1.weight of the model has no shape yet": (lazy, sgd, 0, "mean"),
    "Clipping may step by all parameters together, but ZeRO": (net, clipping, 1, "mean"),
    "second.weight is trained now, but was frozen when the engine was made": (frozen_at_first, sgd, 0, "mean"),
    "the loss must be one number, but has shape (3,)": (net, sgd, 2, "none"),
}


@on_ranks(2)
def test_what_would_train_otherwise_is_refused(comm: Communicator) -> None:
    said = []
    for make, optimizer, zero, reduction in REFUSED.values():
        model = make()
        loss = partial(F.cross_entropy, reduction=reduction)
        try:
            engine = engine_of(comm, model, optimizer(model), zero, loss=loss)
            model.requires_grad_(True)
            images, targets = batch(0)
            engine.step([images[slice(*engine.reads(BATCH, SIZE)[0].box[0])]], targets, SIZE)
            said.append("nothing")
        except (Refusal, ValueError) as error:
            said.append(str(error))
    for found, wanted in zip(said, REFUSED, strict=True):
        assert found.startswith(wanted)


def with_weights(comm: Communicator, plan: Plan, own: bool) -> None:
    """A step with a loss that has a weight of its own, or uses those of the model."""
    held = split(net, plan, comm, image=(BATCH, 3, *SIZE))
    weights = [nn.Parameter(torch.ones((), dtype=torch.float64))] if own else [*held.parameters()]

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets) + sum(weight.square().sum() for weight in weights)

    engine = Engine(held, plan, sgd(held), loss, comm=comm)
    images, targets = batch(0)
    engine.step([images[slice(*read.box.batch)] for read in engine.reads(BATCH, SIZE)], targets, SIZE)


@pytest.mark.parametrize(
    ("plan", "own", "said"),
    [
        (Plan(data=2), True, "the loss uses a tensor of its own that wants a gradient"),
        (Plan(data=2), False, ""),
        (Plan(((1, 1), (1, 1))), False, "the loss uses a weight of the model"),
    ],
)
def test_a_loss_with_weights_is_exact_or_refused(ranks: Ranks, plan: Plan, own: bool, said: str) -> None:
    with pytest.raises(RanksFailed, match=said) if said else nullcontext():
        ranks(2).run(with_weights, plan, own)


class Counting(nn.Module):
    """A loss that weighs its later calls more, or keeps nothing."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.counts = counts
        self.register_buffer("calls", torch.ones(()))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.counts:
            self.calls += 1
        return F.cross_entropy(outputs, targets) * self.calls


def with_kept(comm: Communicator, plan: Plan, counts: bool) -> None:
    held = split(net, plan, comm, image=(BATCH, 3, *SIZE))
    engine = Engine(held, plan, sgd(held), Counting(counts), comm=comm)
    images, targets = batch(0)
    engine.step([images[slice(*read.box.batch)] for read in engine.reads(BATCH, SIZE)], targets, SIZE)


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("bidirectional", [0, 1])
def test_a_loss_that_counts_its_calls_is_refused_in_both_directions(
    ranks: Ranks, bidirectional: int, counts: bool
) -> None:
    plan = Plan(((1, 1), (1, 1)), bidirectional=bidirectional)
    refused = counts and bidirectional
    with pytest.raises(RanksFailed, match="the loss keeps something for its next call") if refused else nullcontext():
        ranks(2).run(with_kept, plan, counts)


class Shrinking(Net):
    """Makes a weight of its own smaller each time that it runs."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.last.bias.mul_(0.9)
        return super().forward(x)


def change(comm: Communicator, zero: int, offload: str) -> list[str]:
    """What is said of changes that a loop of one's own, or the model, makes between steps and in them."""
    said = []
    for change in ("value", "written", "group", "forward", "data", "assign", "prune"):
        model = (Shrinking if change == "forward" else Net)().double()
        optimizer = sgd(model)
        engine = engine_of(comm, model, optimizer, zero, offload=offload)
        images, targets = batch(0)
        share = slice(*engine.reads(BATCH, SIZE)[0].box[0])
        try:
            for number in range(6 if change == "written" else 2):
                engine.step([images[share]], targets, SIZE)
                if change == "value":
                    with torch.no_grad():
                        model.last.bias[:1].view(()).mul_(2)
                if change == "written" and number == 4:
                    model.last.bias.data.mul_(2)
                if change == "data":
                    model.last.bias.data = model.last.bias.data * 2
                if change == "assign":
                    model.load_state_dict(model.state_dict(), assign=True)
                if change == "prune":
                    prune.identity(model.last, "weight")
                if change == "group":
                    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
            said.append("")
        except Refusal as refusal:
            said.append(str(refusal))
    return said


@on_ranks(2)
def test_a_change_of_one_stage_is_refused_by_all_ranks(comm: Communicator) -> None:
    plan = Plan(tiles=((1, 1), (1, 1)))
    stages = split(net, plan, comm, image=(BATCH, 3, *SIZE))
    engine = Engine(stages, plan, sgd(stages), F.cross_entropy, comm=comm)
    for module in stages.modules():
        if isinstance(module, nn.Linear):  # on the last rank
            prune.identity(module, "weight")
    images, targets = batch(0)
    for _ in range(2):
        with pytest.raises(Refusal, match="weight_orig of Linear is another parameter"):
            engine.step([images for _ in engine.reads(BATCH, SIZE)], targets, SIZE)


@pytest.mark.parametrize(("zero", "offload"), [(0, "none"), (1, "disk"), (3, "none")])
def test_changes_that_would_be_lost_are_refused(ranks: Ranks, zero: int, offload: str) -> None:
    absent = r"a parameter of shape \(.*\) is read or written outside of a step"
    for value, written, group, forward, data, assign, pruned in ranks(2).run(change, zero, offload):
        assert re.match(absent if zero == 3 else "empty of Net is another parameter than when", assign)
        assert re.match(absent if zero == 3 else "weight_orig of Linear is another parameter than when", pruned)
        assert re.match(("$", "last.bias has other memory than", "", absent)[zero], data)
        for each in (value, written):
            assert re.match(("$", "last.bias was changed outside of the optimizer", "", absent)[zero], each)
        assert group.startswith("the optimizer has other groups of parameters than") == (zero > 0)
        assert bool(forward) == (zero > 0)
        assert "was changed while the model ran" in forward or not zero
