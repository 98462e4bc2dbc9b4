"""`mpi4dl.parallelize`: users' own loops, against the same loops in plain PyTorch, in float64."""

import copy
import inspect
import io
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import mpi4dl
from mpi4dl.comm import Communicator
from mpi4dl.parallel.own_loop import Tiles, checksum
from mpi4dl.parallel.spatial import NoRule, SpatialTensor
from tests.parallel.own_loops import LOOPS, SHAPE, Dense, Network, Wrap, batches, made, sgd
from tests.pool.ranks import Ranks, on_ranks

PLACES = "Refusal: ranks 0 and 1 are in different calls of models, backward passes of outputs, or uses of maps"
GRIDS = {"1x2": ("1x2", 1), "2x2": ("2x2", 1), "data2": ("1x1", 2), "1x2-data2": ("1x2", 2)}
EXACT = 1e-10


# Others call `torch.autograd.grad`, or leave out `tiles.whole`.
OTHERS = (
    "autograd_grad",
    "compiled",
    "a_chain",
    "kept_tensors",
    "recomputed_outside",
    "kept_by_all_means",
    "kept_maps",
    "other_ways_in",
    "changed_inputs",
)
IN_THREE_CALLS = [name for name in LOOPS if name not in OTHERS]


class ThreeCalls:
    """Makes of `loss.backward()` in a loop, and of calls of a model, those of `mpi4dl.tiles`."""

    def __init__(self, tiles: Tiles) -> None:
        self.tiles, self.models = tiles, nn.ModuleList()

    def wrap(self, model: nn.Module) -> nn.Module:
        if self.models and model is self.models[0]:
            return model
        for value in model.buffers():
            assert not value.requires_grad
        model.register_forward_pre_hook(self.cut)
        model.register_forward_hook(self.whole)
        self.models.append(model)
        return model

    def cut(self, model: nn.Module, images: Any) -> Any:
        return tuple(x if isinstance(x, SpatialTensor) else self.tiles.cut(x) for x in images)

    def whole(self, model: nn.Module, images: Any, outputs: Any) -> Any:
        return pytree.tree_map(self.tiles.whole, outputs)

    @contextmanager
    def instead(self) -> Iterator[None]:
        def backward(loss: Tensor, retain_graph: bool = False) -> None:
            with patch.object(Tensor, "backward", plain):
                self.tiles.backward(loss, self.models, retain_graph)

        plain = Tensor.backward
        with patch.object(Tensor, "backward", backward):
            yield


@cache
def plainly(name: str) -> list[Tensor]:
    """What the loop finds in one process."""
    return LOOPS[name](lambda model: model)


def compare_loops(comm: Communicator, tiles: str, data: int, how: str, names: list[str]) -> dict[str, str]:
    torch.set_default_dtype(torch.float64)
    wrong = {}
    for name in names:
        loop = LOOPS[name]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of the old weight_norm
            warnings.filterwarnings("ignore", "The .grad attribute", UserWarning)  # which the compiler reads
            plain = plainly(name)
            try:
                if how == "three calls":
                    calls = ThreeCalls(mpi4dl.tiles(*map(int, tiles.split("x")), data=data, comm=comm))
                    with calls.instead():
                        ours = loop(calls.wrap)
                else:
                    ours = loop(lambda model: mpi4dl.parallelize(model, tiles, data, outputs=how, comm=comm))
            except NoRule as refused:
                wrong[name] = f"refused: {str(refused).partition(' has no')[0]}"
                continue
        assert len(ours) == len(plain), name
        worst = max(
            float((a - b).abs().max()) / max(1.0, float(b.abs().max())) for a, b in zip(ours, plain, strict=True)
        )
        if not worst <= EXACT:
            wrong[name] = f"off by {worst:.1e}"
    return wrong


# A grid for each of the three ways, and the batch cut by those that call all loops.
ALWAYS = [("1x2", "whole"), ("1x2-data2", "whole"), ("1x2-data2", "three calls"), ("2x2", "spread")]


@pytest.mark.parametrize(
    ("grid", "how"),
    [
        pytest.param(grid, how, marks=() if (grid, how) in ALWAYS else pytest.mark.exhaustive)
        for grid in GRIDS
        for how in ("whole", "spread", "three calls")
    ],
)
def test_own_loops_are_those_of_one_process(ranks: Ranks, grid: str, how: str) -> None:
    tiles, data = GRIDS[grid]
    num_ranks = data * math.prod(map(int, tiles.split("x")))
    names = {"whole": list(LOOPS), "spread": ["steps", "a_dense_loss"], "three calls": IN_THREE_CALLS}[how]
    of_data = {"a_recurrent_layer": "refused: torch.lstm in module lstm (LSTM)"}
    expected = of_data if data > 1 else {}
    for wrong in ranks(num_ranks).run(compare_loops, tiles, data, how, names):
        assert wrong == {name: why for name, why in expected.items() if name in names}


def scripted(model: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DeprecationWarning, and FutureWarning since PyTorch 2.14
        return torch.jit.script(model)


def refused(comm: Communicator, loop: Callable[[Wrap], Any], **options: Any) -> str:
    """The error of a loop of a model on a row of tiles."""
    try:
        loop(lambda model: mpi4dl.parallelize(model, (1, comm.size), comm=comm, **options))
    except (RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@on_ranks(2)
def test_spread_outputs_and_plain_gradients_do_not_meet(comm: Communicator) -> None:
    """What may not be done outside with a spread output that has a gradient."""
    model = mpi4dl.parallelize(made(Dense), (1, comm.size), outputs="spread", comm=comm)
    scale = nn.Parameter(torch.ones(()))
    uses: tuple[Callable[[Tensor], Any], ...] = (
        lambda y: y * scale,
        lambda y: y.register_hook(lambda gradient: None),
        lambda y: F.mse_loss(y, y.new_zeros(y.shape).requires_grad_()),
    )
    for use in uses:
        y = model(next(batches(1))[0])
        with pytest.raises(NoRule, match="outside of the model, a spread output meets a hook or a plain tensor"):
            use(y)


@on_ranks(2)
def test_tiles_backward_sums_gradients_of_equal_layers_beside_the_model(comm: Communicator) -> None:
    torch.set_default_dtype(torch.float64)
    tiles, images = mpi4dl.tiles(1, comm.size, comm=comm), next(batches(1))[0]
    elsewhere = [object() for _ in range(1000 * comm.rank)]  # other addresses
    for _ in range(5):
        layers = nn.Sequential(*(nn.Sequential(nn.Conv2d(3, 3, 3), nn.Tanh()) for _ in range(5)))
        expected = torch.autograd.grad(layers(images).square().sum(), list(layers.parameters()))
        tiles.backward(tiles.whole(layers(tiles.cut(images))).square().sum(), nn.Identity())
        for p, gradient in zip(layers.parameters(), expected, strict=True):
            torch.testing.assert_close(p.grad, gradient)
        elsewhere.append(layers)


@on_ranks(2)
def test_tiles_that_require_gradients_have_their_own_parts(comm: Communicator) -> None:
    torch.set_default_dtype(torch.float64)
    tiles, images = mpi4dl.tiles(1, comm.size, comm=comm), next(batches(1))[0]
    (expected,) = torch.autograd.grad(made()(x := images.clone().requires_grad_()).square().sum(), x)
    box = tiles.grid.box(len(images), SHAPE[2:])
    own = slice(*box.batch), slice(None), slice(*box.rows), slice(*box.cols)
    read, cut = images[own].clone().requires_grad_(), tiles.cut(images).requires_grad_()
    for x in (tiles.join(read, SHAPE[2:]), tiles.join(read * 1, SHAPE[2:]), cut):
        read.grad = None
        tiles.backward(tiles.whole(made()(x)).square().sum(), model := made())
        assert model.head.weight.grad is None
        torch.testing.assert_close(cut.grad.local if x is cut else read.grad, expected[own])


class Passing(nn.Module):
    """Sets on the module in it what is set on it, as Fabric's modules do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.add_module("inner", inner)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self).get("_modules", {}).get("inner", super()), name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@on_ranks(2)
def test_models_with_unusual_buffers_and_copies_of_them(comm: Communicator) -> None:
    model = made(Dense)
    model.register_buffer("expanded", torch.ones(1).expand(3))
    model.register_buffer("conjugate", torch.ones(2, dtype=torch.complex128).conj())
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    copied = copy.deepcopy(mpi4dl.parallelize(model, comm=comm))
    images = next(batches(1))[0]
    torch.testing.assert_close(copied(images), made(Dense)(images))
    file = io.BytesIO()
    torch.save(copied, file)
    file.seek(0)
    plain = torch.load(file, weights_only=False)
    assert type(plain) is Dense
    torch.testing.assert_close(plain(images), made(Dense)(images))
    for inner in (nn.Sequential(torch.fx.symbolic_trace(made(Dense))), Passing(made(Dense))):
        torch.testing.assert_close(mpi4dl.parallelize(inner, comm=comm)(images), made(Dense)(images))


@on_ranks(2)
def test_ranks_that_are_not_alike_are_refused_together(comm: Communicator) -> None:
    """What goes wrong on some ranks alone, or cannot be exact: how the error of each loop should begin, and it."""
    images, labels = next(batches(1))
    found: dict[str, tuple[str, str]] = {}

    def refused_with(words: str) -> Callable[[Callable[[Wrap], None]], None]:
        return lambda loop: found.__setitem__(loop.__name__, (words, refused(comm, loop)))

    @refused_with("Refusal: ranks 0 and 1 called the model with other inputs")
    def other_images(wrap: Wrap) -> None:
        wrap(made())(images.flip(3) if comm.rank else images)

    @refused_with("Refusal: the parameters or buffers of ranks 0 and 1 differ")
    def other_weights(wrap: Wrap) -> None:
        model = wrap(made())
        if comm.rank:
            model.head.bias.data.add_(1)
        model(images)

    @refused_with("Refusal: the parameters or buffers of ranks 0 and 1 differ")
    def clipped_on_one_rank(wrap: Wrap) -> None:
        model = wrap(made())
        optimizer = sgd(model)
        for number in range(6):
            model(images).sum().backward()
            if comm.rank and number == 4:
                nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()

    @refused_with("Refusal: the parameters or buffers of ranks 0 and 1 differ")
    def buffers_of_one_rank(wrap: Wrap) -> None:
        model = wrap(made())
        for number in range(12):
            model(images)
            if comm.rank and number == 4:
                model.norm.running_mean.zero_()

    @refused_with("Refusal: the ranks computed other losses of the same outputs")
    def another_head(wrap: Wrap) -> None:
        model = wrap(made())
        torch.manual_seed(comm.rank)
        nn.Linear(3, 1)(model(images)).sum().backward()

    @refused_with("Refusal: the ranks computed other losses of the same outputs")
    def other_targets(wrap: Wrap) -> None:
        model = wrap(made())
        for number in range(5):
            F.cross_entropy(model(images), (labels + (number == 4 and comm.rank)) % 3).backward()

    @refused_with("Refusal: the ranks computed other losses of the same outputs")
    def no_number_on_one_rank(wrap: Wrap) -> None:
        model = wrap(made())
        for number in range(5):
            (model(images).sum() * (math.nan if comm.rank and number == 4 else 1)).backward()

    @refused_with(PLACES)
    def passes_in_another_order(wrap: Wrap) -> None:
        model = wrap(made())
        for step in (1, 1, -1):
            losses = [model(x).square().sum() for x in (images, images + 1)]
            for loss in losses[:: step if comm.rank else 1]:
                loss.backward()

    @refused_with(PLACES)
    def models_in_another_order(wrap: Wrap) -> None:
        models = [wrap(made()) for _ in range(2)]
        for model in [*models, *models[:: -1 if comm.rank else 1]]:
            model(images)

    @refused_with(PLACES)
    def a_map_on_one_rank(wrap: Wrap) -> None:
        model, kept = wrap(made()), list[Tensor]()
        model.again.register_forward_hook(lambda module, inputs, output: kept.append(output))
        logits = model(images)
        if comm.rank:
            kept[0].mean()
        logits.sum().backward()

    def gradient_on_one_rank(wrap: Wrap, use: Callable[[Tensor], Any]) -> None:
        model, kept = wrap(made()), list[Tensor]()
        model.again.register_forward_hook(lambda module, inputs, output: output.register_hook(kept.append) and None)
        model(images).sum().backward()
        if comm.rank:
            use(kept[0])
        model(images)

    @refused_with(PLACES)
    def values_of_a_gradient_on_one_rank(wrap: Wrap) -> None:
        gradient_on_one_rank(wrap, Tensor.numpy)

    @refused_with(PLACES)
    def a_sum_of_a_gradient_on_one_rank(wrap: Wrap) -> None:
        gradient_on_one_rank(wrap, lambda gradient: gradient.abs().mean())

    @refused_with(PLACES)
    def a_hook_on_one_rank(wrap: Wrap) -> None:
        model, kept = wrap(made()), list[Tensor]()
        model.head.register_forward_pre_hook(lambda module, inputs: kept.append(inputs[0]))
        if comm.rank:
            model.head.register_forward_pre_hook(lambda module, inputs: inputs[0].retain_grad())
        model(images).sum().backward()
        model(images)

    @refused_with(PLACES)
    def a_spread_output_on_one_rank(wrap: Wrap) -> None:
        y = mpi4dl.parallelize(made(Dense), (1, comm.size), outputs="spread", comm=comm)(images)
        assert y.detach().shape == y.shape
        if comm.rank:
            y.argmax(1)
        y.square().mean().backward()

    @refused_with("Refusal: unused of the model is cut by fully_shard or as a DTensor")
    def sharded(wrap: Wrap) -> None:
        class FSDPModule:
            """As PyTorch's, which becomes a base of the model."""

        model = wrap(made())
        model.__class__ = type("FSDPNetwork", (FSDPModule, type(model)), {})
        model(images)

    @refused_with("Refusal: the model draws random numbers, as for dropout, and the ranks drew different ones")
    def other_draws(wrap: Wrap) -> None:
        model = wrap(nn.Sequential(nn.Dropout(), made()))
        torch.manual_seed(comm.rank)
        model(images)

    @refused_with("Refusal: again has a backward hook, which would see the part of one rank")
    def a_backward_hook(wrap: Wrap) -> None:
        model = made()
        model.again.register_full_backward_hook(lambda module, inputs, outputs: None)
        wrap(model)(images)

    @refused_with("Refusal: head has a backward hook, which would see the part of one rank")
    def a_backward_hook_in_three_calls(wrap: Wrap) -> None:
        tiles, model = mpi4dl.tiles(1, comm.size, comm=comm), made()
        model.head.register_full_backward_hook(lambda module, inputs, outputs: None)
        tiles.backward(tiles.whole(model(tiles.cut(images))).sum(), model)

    @refused_with("Refusal: the model got tensors of shapes [(4, 3, 18, 1)], none of which can be cut into 1 x 2 tiles")
    def a_small_image(wrap: Wrap) -> None:
        wrap(made())(images[..., : comm.size - 1])

    @refused_with("TypeError: a SimpleNamespace with tensors goes in or out of a model on tiles")
    def an_object(wrap: Wrap) -> None:
        class Returned(nn.Module):
            def forward(self, x: Tensor) -> Any:
                return SimpleNamespace(logits=x.mean())

        wrap(Returned())(images)

    @refused_with("TypeError: a set with tensors goes in or out of a model on tiles")
    def without_order(wrap: Wrap) -> None:
        class Returned(Network):
            def forward(self, x: Tensor) -> Any:
                return {self.first(x), self.again(self.first(x))}

        wrap(made(Returned))(images)

    @refused_with("RuntimeError: second derivatives are not computed through a model on tiles")
    def a_penalty(wrap: Wrap) -> None:
        model, x = wrap(made()), images.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        gradient.square().sum().backward()

    @refused_with("ValueError: the model is parallelized already")
    def twice(wrap: Wrap) -> None:
        wrap(wrap(made()))

    @refused_with("NoRule: torch.autograd.Function in module Network has no exact rule")
    def checkpoints_of_the_old_kind(wrap: Wrap) -> None:
        wrap(made(Network, recompute=True))(images.clone().requires_grad_())

    @refused_with("Refusal: ranks 0 and 1 call the model in other modes")
    def another_mode(wrap: Wrap) -> None:
        model = wrap(made())
        for number in range(5):
            model.train(comm.rank == 0 or number < 4)
            model(images)

    @refused_with("Refusal: ranks 0 and 1 call the model in other modes")
    def other_trained(wrap: Wrap) -> None:
        model = wrap(made())
        for _ in range(4):
            model(images)
        model.first.requires_grad_(comm.rank == 0)
        model(images)

    @refused_with("Refusal: ranks 0 and 1 called the model with other inputs")
    def others_in_evaluation(wrap: Wrap) -> None:
        model = wrap(made().eval())
        with torch.no_grad():
            for number in range(6):
                model(images if comm.rank or number < 5 else images + 1)

    @refused_with("NoRule: grad_fn.register_hook in module Hooked has no exact rule")
    def hooks_of_functions(wrap: Wrap) -> None:
        class Hooked(Network):
            def body(self, x: Tensor) -> Tensor:
                y = super().body(x)
                with pytest.raises(NoRule, match=r"use y\.register_hook"):
                    y.grad_fn.register_hook(lambda *gradients: None)  # type: ignore[union-attr]
                y.mean().grad_fn.register_hook(lambda *gradients: None)  # type: ignore[union-attr]
                return y

        wrap(made(Hooked))(images)

    @refused_with("Refusal: the model takes a gradient within its own forward pass")
    def a_gradient_within(wrap: Wrap) -> None:
        class Weighted(Network):
            def forward(self, x: Tensor) -> Tensor:
                y = super().forward(x)
                (gradient,) = torch.autograd.grad(y.sum(), self.first.weight, retain_graph=True)
                return y * gradient.norm()

        wrap(made(Weighted))(images)

    @refused_with("Refusal: torch.func or forward-mode AD transforms a model on tiles")
    def a_transform(wrap: Wrap) -> None:
        model = wrap(made())
        with torch.autograd.forward_ad.dual_level(), pytest.raises(mpi4dl.Refusal, match="forward-mode AD"):
            model(images)
        torch.func.grad(lambda x: model(x).sum())(images)

    @refused_with("Refusal: a model on tiles is exported, scripted or traced")
    def exported(wrap: Wrap) -> None:
        model = wrap(made(Dense).eval())
        for trace in (scripted, torch.fx.symbolic_trace, lambda model: make_fx(model)(images)):
            with pytest.raises(mpi4dl.Refusal, match="scripted or traced"):
                trace(model)
        torch.export.export(model, (images,))

    @refused_with("Refusal: layers.0 is made by torch.jit")
    def a_scripted_layer(wrap: Wrap) -> None:
        model = wrap(made(Dense))
        model(images)
        model.layers[0] = scripted(nn.Conv2d(3, 5, 3))
        model(images)

    @refused_with("RuntimeError: the gradients of several outputs in one backward pass")
    def batched_gradients(wrap: Wrap) -> None:
        x = images.clone().requires_grad_()
        logits = wrap(made())(x)
        try:
            torch.autograd.grad(logits, x, torch.eye(12).view(12, 4, 3), is_grads_batched=True)
        finally:
            logits.sum().backward()  # nothing that began is left

    @refused_with("Refusal: the model writes in place to a leaf")
    def a_written_leaf(wrap: Wrap) -> None:
        wrap(nn.Sequential(nn.ReLU(inplace=True), made()))(images.clone().requires_grad_())

    @refused_with("TypeError: a Independent with tensors goes in or out")
    def a_hidden_result(wrap: Wrap) -> None:
        class Distributed(Network):
            def forward(self, x: Tensor) -> Any:
                return torch.distributions.Independent(torch.distributions.Normal(super().forward(x), 1.0), 1)

        wrap(made(Distributed))(images)

    @refused_with("ValueError: the model has a forward that is no method of its class")
    def before_compiling(wrap: Wrap) -> None:
        model = made()
        with pytest.raises(ValueError, match="Sequential"):
            wrap(torch.fx.symbolic_trace(made(Dense)))
        model.forward = model.body
        wrap(model)

    @refused_with("RuntimeError: loss.backward() would leave each rank with the gradients of its tile")
    def no_tiles_backward(wrap: Wrap) -> None:
        tiles = mpi4dl.tiles(1, comm.size, comm=comm)
        F.cross_entropy(tiles.whole(made()(tiles.cut(images))), labels).backward()

    @refused_with("Refusal: the ranks computed other losses of the same outputs")
    def other_losses_in_three_calls(wrap: Wrap) -> None:
        tiles, model = mpi4dl.tiles(1, comm.size, comm=comm), made()
        tiles.backward(tiles.whole(model(tiles.cut(images))).sum() * (1 + comm.rank), model)

    @refused_with("NoRule: Tensor.mul has no exact rule")
    def cut_with_a_gradient(wrap: Wrap) -> None:
        tiles = mpi4dl.tiles(1, comm.size, comm=comm)
        mpi4dl.parallelize(made(), tiles)
        cut = tiles.cut(images.clone().requires_grad_())
        (cut * cut).mean().backward()

    assert len(found) == 39
    assert {name: message for name, (words, message) in found.items() if not message.startswith(words)} == {}


@on_ranks(4)
def test_inputs_and_outputs_may_be_nests(comm: Communicator) -> None:
    @dataclass(frozen=True)
    class Result:
        logits: Tensor
        others: tuple[Any, ...]

    class Model(nn.Module):
        def forward(self, x: Tensor, scale: float, *, shift: Tensor) -> Result:
            return Result(x * scale + shift, (x.argmax(1), {"mean": x.mean(), "name": "x"}))

    model = mpi4dl.parallelize(Model(), comm=comm)
    images, shift = torch.randn(2, 3, 9, 8), torch.randn(3, 1, 1)
    found = model(images, 2.0, shift=shift)
    assert torch.equal(found.logits, images * 2 + shift)
    assert torch.equal(found.others[0], images.argmax(1))
    torch.testing.assert_close(found.others[1]["mean"], images.mean())
    assert found.others[1]["name"] == "x"
    assert inspect.signature(type(model).forward) == inspect.signature(Model.forward)  # trainers look at it
    assert (
        inspect.unwrap(type(model).forward).__code__ != Model.forward.__code__
    )  # and accelerate takes what is wrapped
    assert list(mpi4dl.parallelize(made(), comm=comm).state_dict()) == list(made().state_dict())


def test_checksums_see_other_values_flips_and_permutations() -> None:
    x = torch.randn(2, 3, 5, 4)
    others = [x.clone(), x.flip(0), x.flip(2), x.flip(3), x.transpose(0, 0) * (1 + 1e-7), x.double(), x[:1], x.view(-1)]
    sums = [checksum([each]) for each in others]
    assert sums[0] == checksum([x])
    assert len(set(sums)) == len(sums)
    assert checksum([torch.tensor(1)]) != checksum([torch.tensor(2)])
    x = torch.zeros(0)  # as in an observer of fake quantization, which resizes it
    checksum([x])
    x.resize_(3)
