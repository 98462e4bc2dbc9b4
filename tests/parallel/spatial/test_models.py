"""Unmodified models on tiles: loss, every gradient and every buffer of a training step are plain PyTorch's."""

import copy
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mpi4dl import models
from mpi4dl.comm import Communicator
from mpi4dl.parallel import spatial
from tests.parallel.spatial.comparing import difference
from tests.pool.ranks import Ranks

NUM_CLASSES = 10
SIZE = (97, 131)
GRIDS = [(2, 2), (1, 4), (4, 1), (1, 2), (2, 1)]
SLOW = ("resnet50", "densenet121", "convnext_tiny", "fcn_resnet50")
SLOWEST = ("densenet121", "resnet50", "swin_t", "swin_v2_t", "fcn_resnet50", "convnext_tiny")

# Dropout off: elsewhere tests hold what it does. Stochastic depth drops the same samples, for all draw alike.
OPTIONS: dict[str, dict[str, Any]] = {
    "resnet18": {},
    "resnet50": {},
    "densenet121": {},
    "mobilenet_v3_small": {"dropout": 0.0},
    "efficientnet_b0": {"dropout": 0.0, "stochastic_depth_prob": 0.0},
    "convnext_tiny": {"stochastic_depth_prob": 0.0},
    "regnet_y_400mf": {},
    "fcn_resnet50": {},
    "amoebanetd": {"num_layers": 3, "num_filters": 32},
    "resnet_v2": {"depth": 110},
    "unet": {"num_filters": 8},
    "small_resnet": {"pool": "max"},
    "swin_t": {},
    "swin_v2_t": {},
}


class Step(NamedTuple):
    """What a training step leaves: the loss, and by name the gradients and the buffers."""

    loss: Tensor
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


def build(name: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    model = models.build(name, NUM_CLASSES, **OPTIONS[name]).to(dtype).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def image_of(size: tuple[int, int], dtype: torch.dtype, batch: int = 1) -> Tensor:
    return torch.randn(batch, 3, *size, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def loss_of(outputs: Any) -> Tensor:
    """A weighted mean of all that the model says, with every sign: gradients do not cancel, and do not overflow."""
    whole = spatial.gather(outputs["out"] if isinstance(outputs, dict) else outputs)
    weights = torch.randn(whole.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return (whole * weights.to(whole.dtype)).sum() / whole.numel()


def result(model: nn.Module, loss: Tensor) -> Step:
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return Step(loss.detach(), gradients, {name: b.clone() for name, b in model.named_buffers()})


@lru_cache(maxsize=1)
def plain_step(name: str, size: tuple[int, int]) -> Step:
    """The reference: plain PyTorch, plain model, whole image, one process, in float64."""
    model = build(name, torch.float64)
    loss = loss_of(model(image_of(size, torch.float64)))
    loss.backward()
    return result(model, loss)


def tiled_step(comm: Communicator, name: str, size: tuple[int, int], grid: tuple[int, int], **settings: Any) -> Step:
    """The same step on tiles, which all ranks end alike to the last bit."""
    model = build(name, settings.get("dtype", torch.float64))
    if settings.get("checkpointed"):
        checkpoint_residual_blocks(model)
    tiles = spatial.Grid(comm, *grid)
    loss = loss_of(model(spatial.shard(image_of(size, settings.get("dtype", torch.float64)), tiles)))
    (loss / tiles.size).backward()
    spatial.sum_gradients(model, tiles)
    ours = result(model, loss)
    values = [ours.loss, *ours.gradients.values(), *ours.buffers.values()]
    comm.agree(None, results=[float(value.double().sum()) for value in values])
    return ours


def differences(
    comm: Communicator, name: str, size: tuple[int, int], grid: tuple[int, int], settings: Any
) -> list[str]:
    """What rank 0 finds wrong with a step on tiles. Run on the pool."""
    ours = tiled_step(comm, name, size, grid, **settings)
    if comm.rank:
        return []
    return compare(ours, plain_step(name, size), **settings)


def compare(ours: Step, plain: Step, checkpointed: bool = False, dtype: torch.dtype = torch.float64) -> list[str]:
    """Gradients that vanish in exact arithmetic are rounding alone: all are held to the scale of the largest, too."""
    assert ours.gradients.keys() == plain.gradients.keys()
    assert ours.buffers.keys() == plain.buffers.keys()
    scale = max(float(gradient.abs().max()) for gradient in plain.gradients.values())
    if dtype == torch.float32:
        return compare_loosely(ours, plain, scale)
    wrong = difference("loss", ours.loss, plain.loss)
    for name, gradient in plain.gradients.items():
        wrong += difference(f"gradient of {name}", ours.gradients[name], gradient, scale)
    if not checkpointed:  # running statistics are then updated twice, in plain PyTorch too
        for name, buffer in plain.buffers.items():
            wrong += difference(f"buffer {name}", ours.buffers[name], buffer)
    return wrong


def compare_loosely(ours: Step, plain: Step, scale: float) -> list[str]:
    """float32 against the exact step: 1e-4 of each gradient, or of a tenth of the largest."""
    wrong = [] if abs(float(ours.loss) - float(plain.loss)) <= 1e-4 * abs(float(plain.loss)) else ["loss"]
    for name, gradient in plain.gradients.items():
        error = float((ours.gradients[name].double() - gradient).abs().max())
        if error > 1e-4 * max(float(gradient.abs().max()), 0.1 * scale):
            wrong.append(f"gradient of {name}: off by {error:.1e}")
    return wrong


def check(ranks: Ranks, name: str, size: tuple[int, int], grid: tuple[int, int], **settings: Any) -> None:
    found = ranks(grid[0] * grid[1]).run(differences, name, size, grid, settings)
    assert found[0] == []


def everywhere() -> Iterator[Any]:
    """Every model on every grid; all but the slowest always on 2x2, or on one of the others in turn if quick."""
    for number, name in enumerate(OPTIONS):
        for i, (rows, cols) in enumerate(GRIDS):
            always = i == (1 + number % 4 if number % 2 and name not in SLOW else 0)
            marks = [] if always and name not in SLOWEST else [pytest.mark.exhaustive]
            yield pytest.param(name, (rows, cols), marks=marks, id=f"{name}-{rows}x{cols}")


@pytest.mark.parametrize(("name", "grid"), [*everywhere()])
@pytest.mark.sample(4)
def test_a_training_step_on_tiles_is_that_on_the_whole_image(ranks: Ranks, name: str, grid: tuple[int, int]) -> None:
    check(ranks, name, SIZE, grid)


@pytest.mark.parametrize("size", [(64, 64), (33, 70)], ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("name", ["resnet18", "unet", "amoebanetd"])
@pytest.mark.sample(1)
def test_other_sizes(ranks: Ranks, name: str, size: tuple[int, int]) -> None:
    check(ranks, name, size, (2, 2))


# Smooth ones: where a ReLU's input is zero to rounding, plain PyTorch differs from itself as much.
@pytest.mark.parametrize("name", [pytest.param("convnext_tiny", marks=pytest.mark.exhaustive), "efficientnet_b0"])
def test_single_precision(ranks: Ranks, name: str) -> None:
    check(ranks, name, SIZE, (2, 2), dtype=torch.float32)


def checkpoint_residual_blocks(model: nn.Module) -> None:
    """Recompute each residual block of a torchvision ResNet in backward; statistics are then updated twice."""
    for module in model.modules():
        if type(module).__name__ == "BasicBlock":
            forward = module.forward
            module.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)


def test_checkpointed_blocks(ranks: Ranks) -> None:
    check(ranks, "resnet18", SIZE, (2, 2), checkpointed=True)


def test_a_wrong_gradient_would_be_noticed() -> None:
    plain = plain_step("small_resnet", SIZE)
    ours = copy.deepcopy(plain)
    name = next(iter(ours.gradients))
    ours.gradients[name].view(-1)[0] += 1e-9 * float(plain.gradients[name].abs().max())
    assert len(compare(ours, plain)) == 1
