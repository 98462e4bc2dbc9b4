"""Models and optimizers that are put together in unusual ways train as in plain PyTorch, or are refused."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F

from mpi4dl.checkpoints.checkpoints import Checkpoints
from mpi4dl.comm import Communicator, Refusal
from mpi4dl.engine import Engine
from mpi4dl.parallel.plan import Plan
from tests.parallel.replicas.test_step_units import Clipping
from tests.pool.ranks import Ranks
from tests.short_runs import assert_close

NUM_STEPS, BATCH = 4, 3
SIZE = (5, 4)
ALL, ENDS = (0, 1, 2, 3), (0, 3)  # ZeRO stages


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


def named(model: nn.Module) -> optim.Optimizer:
    return optim.AdamW(model.named_parameters(), lr=0.01)


def fused(kind: Any, **options: Any) -> Callable[[nn.Module], optim.Optimizer]:
    return lambda model: kind(model.parameters(), lr=0.1, fused=True, **options)


def freeze(model: nn.Module, step: int) -> None:
    if step == 1:
        model.get_submodule("first").requires_grad_(False)


def leave(model: nn.Module, step: int) -> None:
    pass


@dataclass(frozen=True)
class Case:
    """Which model is trained by which optimizer under which ZeRO; `between` may change the model before a step."""

    model: Callable[[], nn.Module] = net
    optimizer: Callable[[nn.Module], optim.Optimizer] = named
    between: Callable[[nn.Module, int], None] = leave
    offload: str = "none"
    zeros: tuple[int, ...] = ALL


CASES = {
    "named": Case(zeros=ENDS),
    "frozen-later": Case(between=freeze),
    **{
        f"channels-last-{kind.__name__}-{offload}": Case(
            partial(net, channels_last=True), fused(kind, **options), offload=offload, zeros=ENDS
        )
        for kind, options, offload in (
            (optim.SGD, {"momentum": 0.9}, "none"),
            (optim.Adam, {}, "disk"),
            (optim.Adagrad, {}, "none"),
        )
    },
}


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(BATCH, 3, *SIZE, generator=generator, dtype=torch.float64)
    return images, torch.randint(3, (BATCH,), generator=generator)


def plain(case: Case) -> tuple[dict[str, Tensor], dict[str, Tensor | None]]:
    """The state and the gradients that a plain loop ends with."""
    torch.manual_seed(0)
    model = case.model()
    optimizer = case.optimizer(model)
    for step in range(NUM_STEPS):
        case.between(model, step)
        optimizer.zero_grad()
        images, targets = batch(step)
        F.cross_entropy(model(images), targets).backward()
        optimizer.step()
    return dict(model.state_dict()), {name: p.grad for name, p in model.named_parameters()}


def engine_of(comm: Communicator, model: nn.Module, optimizer: optim.Optimizer, zero: int, **options: Any) -> Engine:
    options = {"loss": F.cross_entropy, "bucket_bytes": 400} | options
    return Engine(model, Plan(data=comm.size, zero=zero), optimizer, comm=comm, **options)


def train(comm: Communicator, folder: Path) -> list[str]:
    """Every case under every ZeRO stage, half of it under the next stage after a checkpoint: what is wrong."""
    problems = []
    for name, case in CASES.items():
        state, gradients = plain(case)
        for zero in case.zeros:
            found = train_case(comm, case, zero, folder / f"{name}-{zero}")
            if found is None:
                continue
            try:
                for key in state:
                    if state[key].numel():
                        assert_close(found[0][key], state[key], 1e-10, key)
                for key, wanted in gradients.items():
                    ours = found[1][key]
                    assert (ours is None) == (wanted is None), key
                    if ours is not None and wanted is not None and wanted.numel():
                        assert_close(ours, wanted, 1e-10, f"{key}.grad")
            except AssertionError as error:
                problems.append(f"{name} under ZeRO {zero}: {error}")
    return problems


def train_case(
    comm: Communicator, case: Case, zero: int, folder: Path
) -> tuple[dict[str, Tensor], dict[str, Tensor | None]] | None:
    engine = None
    for step in range(NUM_STEPS):
        if step in (0, NUM_STEPS // 2):
            torch.manual_seed(step)
            model = case.model()
            going_on = engine is not None
            engine = engine_of(
                comm, model, case.optimizer(model), (zero + 1) % 4 if going_on else zero, offload=case.offload
            )
            if going_on:
                with Checkpoints(folder, comm) as checkpoints:
                    checkpoints.load(engine, checkpoints.newest() or folder)
                for earlier in range(step):
                    case.between(model, earlier)
        assert engine is not None
        case.between(model, step)
        images, targets = batch(step)
        share = engine.reads(BATCH, SIZE)[0].box[0]
        engine.step([images[slice(*share)]], targets, SIZE)
        if step == NUM_STEPS // 2 - 1:
            with Checkpoints(folder, comm) as checkpoints:
                checkpoints.save(engine, {})
    assert engine is not None
    state, found = engine.gather_state(), engine.gather_gradients()
    return None if state is None or found is None else (state, found)


def test_they_train_as_in_plain_pytorch(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2).run(train, tmp_path) == [[], []]


def overlapping() -> nn.Module:
    model = net()
    model.again = nn.Parameter(model.get_parameter("first.weight").data[:2])
    return model


class Remembering(Net):
    """With something in its state that is no tensor."""

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 1}


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
    "_extra_state of the model is no tensor": (Remembering, sgd, 0, "mean"),
    "1.weight of the model has no shape yet": (lazy, sgd, 0, "mean"),
    "Clipping may step by all parameters together, but ZeRO": (net, clipping, 1, "mean"),
    "second.weight is trained now, but was frozen when the engine was made": (frozen_at_first, sgd, 0, "mean"),
    "the loss must be one number, but has shape (3,)": (net, sgd, 2, "none"),
}


def refuse(comm: Communicator) -> list[str]:
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
    return said


def test_what_would_train_otherwise_is_refused(ranks: Ranks) -> None:
    for said in ranks(2).run(refuse):
        for found, wanted in zip(said, REFUSED, strict=True):
            assert found.startswith(wanted)


class Shrinking(Net):
    """Makes a weight of its own smaller each time that it runs."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.last.bias.mul_(0.9)
        return super().forward(x)


def change(comm: Communicator, zero: int, offload: str) -> list[str]:
    """What is said of changes that a loop of one's own, or the model, makes between steps and in them."""
    said = []
    for change in ("value", "group", "forward"):
        model = (Shrinking if change == "forward" else Net)().double()
        optimizer = sgd(model)
        engine = engine_of(comm, model, optimizer, zero, offload=offload)
        images, targets = batch(0)
        share = slice(*engine.reads(BATCH, SIZE)[0].box[0])
        try:
            for _ in range(2):
                engine.step([images[share]], targets, SIZE)
                if change == "value":
                    with torch.no_grad():
                        model.last.bias[:1].view(()).mul_(2) if zero < 3 else model.empty.mul_(2)
                if change == "group":
                    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
            said.append("")
        except Refusal as refusal:
            said.append(str(refusal))
    return said


@pytest.mark.parametrize(("zero", "offload"), [(0, "none"), (1, "disk"), (3, "none")])
def test_changes_that_would_be_lost_are_refused(ranks: Ranks, zero: int, offload: str) -> None:
    wanted = {"last.bias": zero == 1, "empty": zero == 3}
    for value, group, forward in ranks(2).run(change, zero, offload):
        for name, refused in wanted.items():
            assert value.startswith(f"{name} was changed outside of the optimizer") == refused
        assert group.startswith("the optimizer has other groups of parameters than") == (zero > 0)
        assert bool(forward) == (zero > 0)
        assert "was changed while the model ran" in forward or not zero
