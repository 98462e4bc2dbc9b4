"""mpi4dl.engine.recompute: blocks run twice, keep less, and change no number."""

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mpi4dl import models
from mpi4dl._torchvision import import_torchvision
from mpi4dl.comm import Communicator, Refusal
from mpi4dl.engine.recompute import recompute_blocks, recompute_stages
from mpi4dl.parallel import spatial
from mpi4dl.parallel.blocks import blocks
from tests.pool.ranks import on_ranks

Make = Callable[[], nn.Module]


def small_densenet() -> nn.Module:
    """Its dense blocks are lists by type, but have a forward of their own."""
    return import_torchvision().models.DenseNet(growth_rate=4, block_config=(2, 2), num_init_features=8, num_classes=3)


class Cells(nn.Module):
    """Modules in a ModuleList and in a ModuleDict, called by hand with two inputs, by name and by place."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList(Cell() for _ in range(2))
        self.named = nn.ModuleDict({"last": Cell()})

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for cell in self.cells:
            x, y = cell(x, skip=y)
        return sum(self.named["last"](x, y))


class Own(nn.BatchNorm2d):
    """Updates its statistics by a factor of its own, and others in its buffers, whose writes PyTorch does not count."""

    def __init__(self) -> None:
        super().__init__(3)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("var", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        self.running_mean.mul_(0.5).add_(x.detach().mean((0, 2, 3)))
        return F.batch_norm(x, self.mean, self.var, training=True)


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3, momentum=None)
        self.instance = nn.InstanceNorm2d(3, track_running_stats=True)
        self.own = Own()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor, skip: Tensor) -> tuple[Tensor, Tensor]:
        return self.drop(self.own(self.norm(self.conv(x)))) + self.instance(skip), x


class Chance(nn.Module):
    """Blocks that decide by numbers that Python and NumPy draw, and hook their layers when they first run."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Drawing(nn.Conv2d(3, 3, 1), nn.Tanh()) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


class Drawing(nn.Sequential):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if not self.calls:
            for layer in self:
                layer.register_forward_hook(lambda layer, inputs, made: 2 * made)
        self.calls += 1
        x = x * self.calls
        return super().forward(x) * random.random() if np.random.rand() < 0.7 else x + random.random() * x


MODELS: dict[str, tuple[Make, int]] = {
    "small_resnet": (lambda: models.build("small_resnet", 3, num_filters=4), 8),
    "chance": (Chance, 3),
    "resnet_v2": (lambda: models.build("resnet_v2", 3, depth=20, num_filters=4), 7),
    "unet": (lambda: models.build("unet", 3, num_filters=4, depth=2), 4),
    "amoebanetd": (lambda: models.build("amoebanetd", 3, num_layers=3, num_filters=32), 9),
    "resnet18": (lambda: models.build("resnet18", 3), 8),
    "densenet": (small_densenet, 5),
    "cells": (Cells, 3),
}


def gradients_and_state(model: nn.Module) -> dict[str, Tensor]:
    """Of two training steps' worth of forward and backward passes, and the outputs' sum."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    found = {}
    for step in range(2):
        x = torch.randn(4, 3, 33, 37, dtype=torch.float64, requires_grad=True)
        outputs = model(x)
        outputs = outputs if isinstance(outputs, Tensor) else outputs[0]
        outputs.square().sum().backward()
        assert x.grad is not None
        found |= {f"outputs {step}": outputs.detach(), f"gradient of input {step}": x.grad}
    found |= {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found | model.state_dict()


@pytest.mark.parametrize(("make", "count"), MODELS.values(), ids=MODELS.keys())
@pytest.mark.sample(3)
def test_every_number_is_what_it_was(make: Make, count: int) -> None:
    torch.manual_seed(0)
    plain = make().double().train()
    model = copy.deepcopy(plain)
    assert recompute_blocks(model) == count
    expected, found = gradients_and_state(plain), gradients_and_state(model)
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def kept_bytes(model: nn.Module, x: Tensor) -> int:
    """What autograd keeps of a forward pass, parameters and the input aside."""
    given = {value.untyped_storage().data_ptr() for value in [x, *model.parameters()]}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in given:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = model(x)
    assert isinstance(outputs, Tensor)
    return sum(kept.values())


@pytest.mark.parametrize("name", ["small_resnet", "resnet_v2", "unet"])
def test_less_than_half_is_kept(name: str) -> None:
    model, x = MODELS[name][0](), torch.randn(2, 3, 64, 64)
    before = kept_bytes(model, x)
    recompute_blocks(model)
    assert kept_bytes(model, x) < 0.5 * before


def counting(model: nn.Module) -> list[str]:
    """The names of leaves, each time that one runs."""
    ran: list[str] = []
    for name, module in model.named_modules():
        if not any(True for _ in module.children()):
            module.register_forward_hook(lambda *_, name=name: ran.append(name))
    return ran


def test_blocks_run_twice_where_there_are_gradients_frozen_or_not_and_once_otherwise() -> None:
    model = models.build("small_resnet", 3, num_filters=4)
    recompute_blocks(model)
    ran = counting(model)
    model(torch.randn(2, 3, 40, 40)).sum().backward()
    assert ran.count("stage1_block1.conv2") == 2
    ran.clear()
    model.eval()(torch.randn(2, 3, 40, 40)).sum().backward()
    assert ran.count("stage1_block1.conv2") == 2
    ran.clear()
    with torch.no_grad():
        model(torch.randn(2, 3, 40, 40))
    assert ran.count("stage1_block1.conv2") == 1


def runs_of_the_whole(stages: bool) -> tuple[int, int]:
    """How often a model runs as a whole, and a convolution in one of its blocks, in a step."""

    class Counting(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            ran.append("whole")
            return super().forward(x)

    model = Counting(*(nn.Sequential(nn.Conv2d(3, 3, 1), nn.Tanh()) for _ in range(2)))
    recompute_stages([model], stages)
    ran = counting(model)
    model(torch.randn(2, 3, 4, 4)).sum().backward()
    return ran.count("whole"), ran.count("0.0")


def test_stages_run_twice_as_a_whole_and_blocks_alone() -> None:
    assert runs_of_the_whole(stages=False) == (1, 2)
    assert runs_of_the_whole(stages=True) == (2, 2)
    with pytest.raises(Refusal, match="no blocks"):
        recompute_stages([nn.Linear(2, 2)], stages=False)


def test_blocks_are_the_outermost_composite_modules_in_a_row() -> None:
    model = models.build("resnet18", 3)
    names = {module: name for name, module in model.named_modules()}
    assert [names[block] for block in blocks(model)] == [f"layer{i}.{j}" for i in (1, 2, 3, 4) for j in (0, 1)]
    assert blocks(nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU())) == []


class Listed(nn.Module):
    """Lists in a list: containers without a forward of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.ModuleList([nn.Conv2d(3, 3, 1), nn.ReLU()]) for _ in range(2))


def test_a_list_has_no_forward_that_could_be_run_again() -> None:
    assert blocks(Listed()) == []


def test_what_is_saved_under_the_models_names_does_not_change() -> None:
    model = models.build("small_resnet", 3)
    names: list[Any] = list(model.state_dict())
    recompute_blocks(model)
    assert list(model.state_dict()) == names


class Shrinking(nn.Conv2d):
    """Makes its weight smaller each time that it is trained."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.weight.mul_(0.9)
        return super().forward(x)


@pytest.mark.parametrize(
    ("conv", "name"),
    [
        (nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, 3, 1)), "parametrizations.weight.0._u"),
        (Shrinking(3, 3, 1), "0.weight"),
    ],
)
def test_a_block_that_changes_what_it_has_is_refused(conv: nn.Module, name: str) -> None:
    model = nn.Sequential(nn.Sequential(conv, nn.BatchNorm2d(3)), nn.Flatten())
    recompute_blocks(model)
    model.eval()(torch.randn(2, 3, 4, 4))
    with pytest.raises(Refusal, match=f"the model changes {name} as it runs"):
        model.train()(torch.randn(2, 3, 4, 4))


NOTED: list[int] = []


class Noting(nn.Conv2d):
    """Notes its calls in a list of its own and in one of the file's, and scales by a mean that is no buffer."""

    def __init__(self, in_place: bool = False) -> None:
        super().__init__(3, 3, 1, dtype=torch.float64)
        self.seen, self.mean, self.in_place = [0], torch.zeros(1, dtype=torch.float64), in_place

    def forward(self, x: Tensor) -> Tensor:
        NOTED.append(1)
        self.seen.append(len(NOTED))
        if self.in_place:
            self.mean.lerp_(x.detach().mean(), 0.1)
        else:
            self.mean = self.mean.lerp(x.detach().mean(), 0.1)
        return super().forward(x * (len(self.seen) + self.mean))


def noted(in_place: bool = False, recompute: bool = True) -> list[Any]:
    """Gradients of two steps, the mean, and what was noted."""
    NOTED.clear()
    torch.manual_seed(0)
    noting = Noting(in_place)
    model = nn.Sequential(nn.Sequential(noting, nn.BatchNorm2d(3).double(), nn.Tanh()), nn.Flatten())
    if recompute:
        recompute_blocks(model)
    for _ in range(2):
        model(torch.randn(2, 3, 4, 4, dtype=torch.float64)).square().sum().backward()
    return [*(p.grad for p in model.parameters()), noting.mean, noting.seen, [*NOTED]]


def test_a_block_notes_each_call_once() -> None:
    for value, expected in zip(noted(), noted(recompute=False), strict=True):
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(expected))


def test_a_block_that_changes_in_place_what_is_no_buffer_is_refused() -> None:
    with pytest.raises(Refusal, match=r"changes its attribute 0\.mean as it runs"):
        noted(in_place=True)


class Nested(nn.Module):
    """A checkpoint within a checkpoint, as a model of the user's own has them."""

    def __init__(self, frozen: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(2, 2, 3, padding=1) for _ in range(3))
        for number in frozen:
            self.layers[number].requires_grad_(False)

    def inner(self, x: Tensor) -> Tensor:
        return checkpoint(lambda x: F.gelu(self.layers[1](x)), self.layers[0](x), use_reentrant=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[2](checkpoint(self.inner, x, use_reentrant=False)).sigmoid()


@pytest.mark.parametrize("whole", [False, True], ids=["twice", "three times"])
@pytest.mark.parametrize("frozen", [(), (0,), (1,), (0, 1)], ids=str)
@on_ranks(2)
def test_checkpoints_within_checkpoints_on_tiles(comm: Communicator, frozen: tuple[int, ...], whole: bool) -> None:
    """A step on 1x2 tiles is that of plain PyTorch."""
    torch.manual_seed(0)
    plain, image = Nested(frozen).double(), torch.randn(2, 2, 6, 8, dtype=torch.float64)
    model, spread = copy.deepcopy(plain), spatial.shard(image, spatial.Grid(comm, cols=2))
    if whole:
        recompute_stages([model], stages=True)
    plain(image).square().sum().backward()
    model(spread).local.square().sum().backward()
    for (name, p), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (expected.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(comm.all_reduce(p.grad), expected.grad, rtol=1e-12, atol=1e-12, msg=name)
