"""Backward in two parts gives the gradients of plain backward at the same cost, those of weights when asked to."""

import copy
import warnings
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from mpi4dl.comm import Communicator
from mpi4dl.models import build
from mpi4dl.parallel import spatial
from mpi4dl.parallel.pipeline.split_backward import WeightGradients
from tests.parallel.spatial.comparing import sum_gradients
from tests.pool.ranks import Ranks

F64 = torch.float64
TOLERANCE = 1e-12

CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "plain": (lambda: nn.Conv2d(4, 6, 3), (2, 4, 9, 11)),
    "no bias": (lambda: nn.Conv2d(4, 6, 3, bias=False), (2, 4, 9, 11)),
    "strided": (lambda: nn.Conv2d(4, 6, (3, 5), stride=(2, 3), padding=(1, 2)), (2, 4, 9, 11)),
    "dilated": (lambda: nn.Conv2d(4, 6, 3, dilation=(2, 1), padding=2), (2, 4, 9, 11)),
    "grouped": (lambda: nn.Conv2d(4, 8, 3, groups=4), (2, 4, 9, 11)),
    "1x1": (lambda: nn.Conv2d(4, 6, 1), (2, 4, 9, 11)),
    "same": (lambda: nn.Conv2d(4, 6, (3, 5), padding="same", dilation=(2, 1)), (2, 4, 9, 11)),
    "same, even columns": (lambda: nn.Conv2d(4, 6, (3, 4), padding="same"), (2, 4, 9, 11)),
    "same, even rows": (lambda: nn.Conv2d(4, 6, (2, 3), padding="same"), (2, 4, 9, 11)),
    "valid": (lambda: nn.Conv2d(4, 6, 3, padding="valid"), (2, 4, 9, 11)),
    "reflected": (lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), (2, 4, 9, 11)),
    "1d": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding="valid"), (2, 4, 9)),
    "3d": (lambda: nn.Conv3d(4, 6, 3, padding=1), (2, 4, 5, 6, 7)),
    "transposed": (
        lambda: nn.ConvTranspose2d(4, 6, 3, stride=(2, 3), padding=1, output_padding=(1, 2), dilation=(1, 2), groups=2),
        (2, 4, 5, 6),
    ),
    "transposed 1d": (lambda: nn.ConvTranspose1d(4, 6, 4, stride=2, bias=False), (2, 4, 9)),
    "transposed 3d": (lambda: nn.ConvTranspose3d(4, 6, 2, stride=2), (2, 4, 3, 4, 5)),
    "linear": (lambda: nn.Linear(4, 6), (3, 4)),
    "linear without bias": (lambda: nn.Linear(4, 6, bias=False), (3, 4)),
    "linear of images": (lambda: nn.Linear(4, 6), (3, 5, 7, 4)),
    "linear of a vector": (lambda: nn.Linear(4, 6), (4,)),
}


class Network(nn.Module):
    """Convolutions with ReLUs in place, batch norm, a weight used three times, one not at all, and frozen ones."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(inplace=True))
        self.twice = nn.Conv2d(6, 6, 3, padding=1)
        self.other_bias = nn.Parameter(torch.randn(6))
        self.frozen = nn.Conv2d(6, 6, 1).requires_grad_(False)
        self.frozen_weight = nn.Conv2d(6, 6, 1)
        self.frozen_weight.weight.requires_grad_(False)
        self.frozen_bias = nn.Conv2d(6, 6, 1)
        assert self.frozen_bias.bias is not None
        self.frozen_bias.bias.requires_grad_(False)
        self.idle = nn.Conv2d(3, 3, 3)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Conv2d(6, 6, 3))
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = self.twice(x).relu_()
        x = x + self.twice(x)
        x = x + F.conv2d(x, self.twice.weight, self.other_bias, padding=1)
        x = self.frozen_bias(self.frozen_weight(self.frozen(x))).relu_()
        return self.head(self.normed(x).mean((2, 3)))


def network(dtype: torch.dtype = F64) -> Network:
    torch.manual_seed(0)
    return Network().to(dtype)


def randn(*shape: int, seed: int = 1, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def gradients_of(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def assert_close(ours: dict[str, Tensor | None], plain: dict[str, Tensor | None], tolerance: float = TOLERANCE) -> None:
    assert ours.keys() == plain.keys()
    scale = max((float(gradient.abs().max()) for gradient in plain.values() if gradient is not None), default=0.0)
    for name, expected in plain.items():
        gradient = ours[name]
        assert (gradient is None) == (expected is None), name
        if gradient is not None and expected is not None:
            assert gradient.dtype == expected.dtype
            assert float((gradient - expected).abs().max()) <= tolerance * max(1.0, scale), name


Forward = Callable[..., Tensor]


def plain_step(model: nn.Module, x: Tensor, forward: Forward = nn.Module.__call__) -> Tensor:
    """A plain forward and backward; returns the output."""
    y = forward(model, x)
    y.backward(randn(*y.shape, seed=2, dtype=y.dtype))
    return y.detach()


def input_part(model: nn.Module, x: Tensor, forward: Forward = nn.Module.__call__) -> tuple[Tensor, WeightGradients]:
    """The same, but for the weights."""
    weights = WeightGradients()
    with weights.deferred():
        y = forward(model, x)
    y.backward(randn(*y.shape, seed=2, dtype=y.dtype))
    return y.detach(), weights


class Compared(NamedTuple):
    """The parameters that wait for `compute()`, and the FLOPs of plain PyTorch, of the first part and of the second."""

    waiting: set[str]
    flops: tuple[int, int, int]


def compare(
    model: nn.Module, x: Tensor, forward: Forward = nn.Module.__call__, tolerance: float = TOLERANCE
) -> Compared:
    """In two parts the model gives the output and the gradients of plain PyTorch; a second `compute()` adds nothing."""
    plain, plain_x = copy.deepcopy(model), x.detach().clone().requires_grad_(x.requires_grad)
    with FlopCounterMode(display=False) as whole:
        expected = plain_step(plain, plain_x, forward)
    with FlopCounterMode(display=False) as first:
        y, weights = input_part(model, x, forward)
    assert torch.equal(y, expected)
    assert_close({"x": x.grad}, {"x": plain_x.grad}, tolerance)
    early = {name for name, gradient in gradients_of(model).items() if gradient is not None}
    with FlopCounterMode(display=False) as second:
        weights.compute()
    found = gradients_of(model)
    assert_close(found, gradients_of(plain), tolerance)
    weights.compute()
    assert_close(gradients_of(model), found, 0.0)
    flops = tuple(part.get_total_flops() for part in (whole, first, second))
    return Compared({name for name, gradient in found.items() if gradient is not None} - early, flops)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@pytest.mark.parametrize("needs_input_gradient", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_a_layer_waits_with_its_weight_and_bias(case: str, needs_input_gradient: bool) -> None:
    make, shape = CASES[case]
    torch.manual_seed(0)
    model = make().to(F64)
    found = compare(model, randn(*shape).requires_grad_(needs_input_gradient))
    assert found.waiting == {name for name, _ in model.named_parameters()}


def test_a_convolution_is_plain_to_the_bit() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(inplace=True), nn.Conv2d(8, 4, 3, stride=2, bias=False))
    compare(model, randn(2, 3, 16, 16, dtype=torch.float32), tolerance=0.0)


def test_a_network_of_all_that_there_is() -> None:
    model = network()
    found = compare(model, randn(2, 3, 12, 13).requires_grad_())
    of_layers = {f"{name}.{what}" for name in ("twice", "head") for what in ("weight", "bias")}
    assert found.waiting == of_layers | {"stem.0.weight", "other_bias", "frozen_bias.weight"}
    assert {name for name, gradient in gradients_of(model).items() if gradient is None} == {
        *("frozen.weight", "frozen.bias", "frozen_weight.weight", "frozen_bias.bias", "idle.weight", "idle.bias")
    }


def with_penalty(model: nn.Module, x: Tensor) -> Tensor:
    return model(x) + model.get_parameter("twice.weight").square().sum()


def test_hooks_run_once_when_the_weight_has_all_its_gradient() -> None:
    """Also of operators that do not wait."""
    model, plain = network(), network()
    plain_step(plain, randn(2, 3, 12, 13), with_penalty)
    before: list[Tensor] = []
    after: list[Tensor] = []
    weight = model.twice.weight
    weight.register_hook(lambda gradient: before.append(gradient.clone()))
    weight.register_post_accumulate_grad_hook(lambda p: after.append(p.grad.clone()))
    _, weights = input_part(model, randn(2, 3, 12, 13), with_penalty)
    weights.compute()
    assert plain.twice.weight.grad is not None
    for seen in (before, after):
        assert len(seen) == 1
        torch.testing.assert_close(seen[0], plain.twice.weight.grad, rtol=0, atol=1e-10)


def test_microbatches_may_be_alive_together() -> None:
    model, plain = network(), network()
    images = [randn(2, 3, 12, 13, seed=10 + i) for i in range(4)]
    for x in images:
        plain_step(plain, x)
    alive = [WeightGradients() for _ in images]
    outputs = []
    for x, weights in zip(images, alive, strict=True):
        with weights.deferred():
            outputs.append(model(x))
    for i in (2, 0):
        outputs[i].backward(randn(2, 5, seed=2))
    alive[0].compute()
    for i in (3, 1):
        outputs[i].backward(randn(2, 5, seed=2))
    for i in (1, 2, 3):
        alive[i].compute()
    assert_close(gradients_of(model), gradients_of(plain))


MODELS: dict[str, dict[str, Any]] = {
    "amoebanetd": {"num_layers": 3, "num_filters": 16},
    "resnet_v1": {"depth": 14},
    "resnet_v2": {"depth": 20},
    "unet": {"num_filters": 4, "depth": 2},
    "small_resnet": {"num_filters": 4},
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sample(1)
def test_a_model_costs_what_it_costs_in_one_part(name: str) -> None:
    torch.manual_seed(0)
    model = build(name, 10, **MODELS[name]).to(F64)
    found = compare(model, randn(2, 3, 64, 64).requires_grad_())
    assert found.waiting >= {name for name, p in model.named_parameters() if p.dim() > 1}
    whole, first, second = found.flops
    # Forward, and the gradients of inputs and of weights: a third each, as every input wants a gradient.
    assert (first + second, 3 * second) == (whole, whole)


def test_all_is_let_go() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 2)).to(F64)
    held: list[weakref.ref[Tensor]] = []
    for layer in (model[0], model[3]):
        layer.register_forward_pre_hook(lambda module, args: held.append(weakref.ref(args[0].untyped_storage())))
    x = randn(2, 3, 8, 8).requires_grad_()
    _, weights = input_part(model, x * 2)
    assert [ref() is not None for ref in held] == [True, True]
    weights.compute()
    assert [ref() is None for ref in held] == [True, True]


def test_without_backward_nothing_is_kept() -> None:
    model = network()
    weights = WeightGradients()
    with torch.no_grad(), weights.deferred():
        assert not model(randn(2, 3, 12, 13)).requires_grad
    weights.compute()
    with weights.deferred():
        model(randn(2, 3, 12, 13))
    weights.compute()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_under_a_checkpoint_do_not_wait(reentrant: bool) -> None:
    def forward(model: Network, x: Tensor) -> Tensor:
        x = model.stem(x)
        x = checkpoint(lambda x: model.twice(x).relu_(), x, use_reentrant=reentrant)
        return checkpoint(model.head, model.frozen_bias(x).mean((2, 3)), use_reentrant=reentrant)

    found = compare(network(), randn(2, 3, 12, 13), forward)
    assert "stem.0.weight" in found.waiting
    assert not found.waiting & {"twice.weight", "head.weight"}


def test_autocast_reaches_the_parameters_in_their_own_dtype() -> None:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    model, plain = network(torch.float32), network(torch.float32)
    # A sum over three uses is rounded otherwise than in plain PyTorch, which adds in bfloat16.
    found = compare(model, randn(2, 3, 12, 13, dtype=torch.float32), forward, 2**-7)
    assert found.waiting >= {"twice.weight", "head.weight"}
    assert plain_step(plain, randn(2, 3, 12, 13, dtype=torch.float32), forward).dtype == torch.bfloat16
    assert model.stem[0].weight.grad is not None
    assert torch.equal(model.stem[0].weight.grad, plain.stem[0].weight.grad)


def test_weights_that_are_inputs_have_their_gradient_at_once() -> None:
    weight, bias = randn(4, 3, 3, 3, seed=3).requires_grad_(), randn(4, seed=4).requires_grad_()
    weights = WeightGradients()
    with weights.deferred():
        y = F.conv2d(randn(2, 3, 8, 8), weight, bias)
    y.sum().backward()
    assert weight.grad is not None
    assert bias.grad is not None


def test_an_image_without_a_batch_is_not_deferred() -> None:
    assert not compare(nn.Conv2d(3, 4, 3).to(F64), randn(3, 8, 8)).waiting


def test_pytorch_refuses_what_it_refuses() -> None:
    weight = nn.Parameter(randn(4, 3, 3, 3))
    with WeightGradients().deferred(), pytest.raises(RuntimeError, match="strided convolutions"):
        F.conv2d(randn(2, 3, 8, 8), weight, padding="same", stride=2)
    with WeightGradients().deferred(), pytest.raises(RuntimeError, match="padding string"):
        F.conv2d(randn(2, 3, 8, 8), weight, padding="similar")


def test_an_input_that_was_overwritten_before_backward_is_noticed() -> None:
    x = randn(2, 3).requires_grad_()
    layer, entered = nn.Linear(3, 3).to(F64), x * 1
    with WeightGradients().deferred():
        y = layer(entered)
    entered.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation: it is at version 1, expected version 0"):
        y.sum().backward()


def test_what_waits_cannot_be_differentiated_twice() -> None:
    x, layer = randn(2, 3).requires_grad_(), nn.Linear(3, 3).to(F64)
    with WeightGradients().deferred():
        y = layer(x)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice: leave out create_graph"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


@pytest.mark.parametrize("overwritten", ["input", "gradient"])
def test_what_is_overwritten_before_its_time_is_noticed(overwritten: str) -> None:
    model = nn.Conv2d(3, 4, 3).to(F64)
    x, gradient = randn(2, 3, 8, 8), randn(2, 4, 6, 6)
    weights = WeightGradients()
    with weights.deferred():
        y = model(x)
    y.backward(gradient)
    {"input": x, "gradient": gradient}[overwritten].zero_()
    with pytest.raises(RuntimeError, match="overwritten between backward and compute"):
        weights.compute()


class Tiled(nn.Module):
    """What the rules for tiles do with layers: halos, 1x1 kernels, transposed and even ones, linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 5, stride=2, padding=2), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.same = nn.Conv2d(8, 8, (4, 3), padding="same")
        self.point = nn.Conv2d(8, 8, 1, bias=False)
        self.up = nn.ConvTranspose2d(8, 8, 3, stride=2, padding=1, output_padding=1)
        self.mix = nn.Linear(8, 6)
        self.head = nn.Linear(6, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = self.point(self.same(x).relu_() + self.same(x))
        return self.head(self.mix(self.up(x).permute(0, 2, 3, 1)).relu().mean((1, 2)))


def compare_on_tiles(comm: Communicator, name: str, rows: int, cols: int, autocast: bool) -> None:
    torch.manual_seed(0)
    dtype = torch.float32 if autocast else F64
    plain = (Tiled() if name == "tiled" else build(name, 10, **MODELS[name])).to(dtype)
    deferring, at_once = copy.deepcopy(plain), copy.deepcopy(plain)
    grid = spatial.Grid(comm, rows, cols)
    x = randn(2, 3, 64, 80, dtype=dtype)
    leaf = x.clone().requires_grad_()

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return spatial.gather(model(spatial.shard(x, grid)))

    y = forward(at_once, x)
    gradient = randn(*y.shape, seed=2, dtype=y.dtype) / comm.size
    with FlopCounterMode(display=False) as whole:
        y.backward(gradient)
    weights = WeightGradients()
    with weights.deferred():
        outputs = forward(deferring, x)
    with FlopCounterMode(display=False) as first:
        outputs.backward(gradient)
    waiting = {name: p for name, p in deferring.named_parameters() if p.dim() > 1}
    assert [name for name, p in waiting.items() if p.grad is not None] == []
    with FlopCounterMode(display=False) as second:
        weights.compute()
    assert first.get_total_flops() + second.get_total_flops() == whole.get_total_flops()
    assert [name for name, p in waiting.items() if p.grad is None] == []
    assert torch.equal(outputs, y)
    assert_close(gradients_of(deferring), gradients_of(at_once), 2**-7 if autocast else TOLERANCE)
    if autocast:
        return
    sum_gradients(deferring, grid.comm)
    plain_x = x.clone().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's, of what padding="same" costs
        plain_y = plain(plain_x)
    plain_y.backward(gradient * comm.size)
    assert_close(gradients_of(deferring), gradients_of(plain), 1e-11)
    weights = WeightGradients()
    with weights.deferred():
        outputs = forward(deferring, leaf)
    outputs.backward(gradient)
    assert leaf.grad is not None
    assert_close({"x": comm.all_reduce(leaf.grad)}, {"x": plain_x.grad})


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("grid", [(1, 2), (2, 2)])
@pytest.mark.parametrize("name", ["tiled", "small_resnet", "resnet_v2"])
@pytest.mark.exhaustive
def test_tiles(ranks: Ranks, name: str, grid: tuple[int, int], autocast: bool) -> None:
    ranks(grid[0] * grid[1]).run(compare_on_tiles, name, *grid, autocast)
