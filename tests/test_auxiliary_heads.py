"""Models with auxiliary heads, cut into stages on tiles: steps and evaluation are those of plain PyTorch."""

from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl import models
from mpi4dl.comm import Communicator
from mpi4dl.engine import Engine
from mpi4dl.parallel.pipeline.local_stages import split
from mpi4dl.parallel.plan import Plan
from tests.pool.ranks import Ranks
from tests.short_runs import NUM_CLASSES, assert_close, tiles_of

PLAN = Plan(((1, 2), (1, 2)))


class Case(NamedTuple):
    """A model, the images and the options that it takes, and whether there is a target for each pixel."""

    name: str
    size: tuple[int, int]
    options: tuple[tuple[str, Any], ...] = ()
    dense: bool = False


CASES = [
    Case("googlenet", (64, 49)),
    Case("deeplabv3_mobilenet_v3_large", (45, 37), (("aux_loss", True),), dense=True),
    Case("lraspp_mobilenet_v3_large", (45, 37), dense=True),
    Case("inception_v3", (299, 299)),
    Case("fcn_resnet50", (45, 37), (("aux_loss", True),), dense=True),
]
SLOW = ("googlenet", "inception_v3", "fcn_resnet50")


def build(case: Case) -> nn.Module:
    model = models.build(case.name, NUM_CLASSES, **dict(case.options)).double()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def batch(case: Case) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(3, 3, *case.size, generator=generator, dtype=torch.float64)
    return images, torch.randint(NUM_CLASSES, (3, *case.size) if case.dense else (3,), generator=generator)


def loss_of(outputs: Any, targets: Tensor) -> Tensor:
    """Cross entropy, of auxiliary heads with the customary weight of 0.4."""
    if isinstance(outputs, Tensor):
        return F.cross_entropy(outputs, targets)
    first, *others = outputs.values() if isinstance(outputs, dict) else outputs
    return F.cross_entropy(first, targets) + 0.4 * sum(F.cross_entropy(other, targets) for other in others)


class Outcome(NamedTuple):
    """The losses: in training, evaluated, and of a step with all modules frozen by `eval()`; what the steps left."""

    losses: list[float]
    state: dict[str, Tensor]
    gradients: dict[str, Tensor | None]


@cache
def plain(case: Case) -> Outcome:
    torch.manual_seed(0)
    model = build(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    images, targets = batch(case)
    losses = []
    for training, steps in ((True, True), (False, False), (False, True)):
        model.train(training)
        loss = loss_of(model(images), targets)
        losses.append(float(loss.detach()))
        if steps:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return Outcome(losses, model.state_dict(), {name: p.grad for name, p in model.named_parameters()})


def in_stages(comm: Communicator, case: Case) -> Outcome | None:
    images, targets = batch(case)
    held = split(lambda: build(case), PLAN, comm, seed=0, image=tuple(images.shape))
    engine = Engine(held, PLAN, torch.optim.SGD(held.parameters(), lr=1e-3), loss_of, comm=comm)
    losses = [engine.step(tiles_of(images, engine), targets, case.size).loss]
    losses.append(engine.evaluate([(tiles_of(images, engine, training=False), targets)], case.size).loss)
    held.eval()
    losses.append(engine.step(tiles_of(images, engine), targets, case.size).loss)
    state, gradients = engine.gather_state(), engine.gather_gradients()
    return Outcome(losses, state or {}, gradients or {}) if comm.rank == 0 else None


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.exhaustive] if c.name in SLOW else [], id=c.name) for c in CASES]
)
@pytest.mark.sample(1)
def test_a_model_with_auxiliary_heads_in_stages(ranks: Ranks, case: Case) -> None:
    found, expected = ranks(4).run(in_stages, case)[0], plain(case)
    assert found.losses == pytest.approx(expected.losses, rel=1e-10)
    assert found.state.keys() == expected.state.keys()
    for name, value in expected.state.items():
        assert_close(found.state[name], value, 1e-9, name)
    scale = max(float(gradient.abs().max()) for gradient in expected.gradients.values() if gradient is not None)
    for name, gradient in expected.gradients.items():
        ours = found.gradients[name]
        assert (ours is None) == (gradient is None), name
        if ours is not None and gradient is not None:
            error = float((ours - gradient).abs().max())
            assert error <= 1e-9 * float(gradient.abs().max()) + 1e-12 * scale, f"gradient of {name}: {error}"
