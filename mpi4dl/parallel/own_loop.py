"""A model on tiles in a training loop of the user's own, which is written as for one process.

    outside, the user's lines    every rank has the whole of each tensor, and the whole gradient of it
    ----------- images: cut | gradients: summed over ranks ------ whole | each rank passes on 1/size of the gradient --
    inside, the model            each rank has a tile, and its share of the gradient of whatever all of them have

Parameters enter as images do: see `replicas.parameter_sums`.
"""

import copy
import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import isqrt, prod
from typing import Any, TypeVar
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mpi4dl._randomness import RandomStates
from mpi4dl.comm import Communicator, Refusal, world
from mpi4dl.comm.exchange import linear, once_differentiable
from mpi4dl.geometry import SPACE, GridShape
from mpi4dl.parallel.replicas.optimizer_traits import backward_hook_in
from mpi4dl.parallel.replicas.parameter_sums import ForwardPass, GradientBuckets, SummedParameters, summed
from mpi4dl.parallel.spatial.grid import Grid
from mpi4dl.parallel.spatial.halo import gather
from mpi4dl.parallel.spatial.rules.hooks import whole_gradients
from mpi4dl.parallel.spatial.sharding import from_tile, shard
from mpi4dl.parallel.spatial.tensor import SpatialTensor

ModelT = TypeVar("ModelT", bound=nn.Module)
FIRST = 3  # forward passes of training in which ranks compare what they have
EVERY = 100  # and of those that follow every one of this number


def parallelize(
    model: ModelT,
    tiles: "str | Sequence[int] | Tiles | None" = None,
    data: int = 1,
    *,
    outputs: str = "whole",
    comm: Communicator | None = None,
) -> ModelT:
    """Let `model` run on tiles of images, one for each rank, in a training loop that is written for one process.

        model = mpi4dl.parallelize(model, tiles="2x2")
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()

    All ranks call the model with the same whole images, and get the same whole outputs. Whatever follows is as in one
    process: several losses and backward passes, accumulation, hooks on gradients, clipping, `torch.autograd.grad`, any
    optimizer. It is the same object as before, with the same parameters and names; the values of rank 0 count.

    Args:
        model: any nn.Module that is not cut into stages.
        tiles: how images are cut: "2x2" or (2, 2), rows and columns; "2x2x1" for volumes, depth first; "4" for
            sequences; or what `mpi4dl.tiles` returns. None: as many tiles as there are ranks.
        data: into how many parts the batch is cut. There are tiles x data ranks.
        outputs: "whole", or "spread" to keep what is cut as it is, such as masks for a dense loss, which then needs no
            gathering; the loss that PyTorch computes of it is the same on all ranks.
        comm: the ranks; all of the MPI job by default.

    Tensors with a batch, channels and the axes of the image, (N, C, H, W), are cut where the model takes them; others
    are passed as they are, and so is what `tiles.cut` or `tiles.join` made. In the first forward passes, and then in
    every 100th, ranks compare their inputs, parameters and random states.

    Raises:
        ValueError: the number of tiles is not that of ranks.
        Refusal: on all ranks: they have different models, inputs or weights, or what cannot be exact.
    """
    if outputs not in ("whole", "spread"):
        raise ValueError(f"outputs={outputs!r} must be 'whole' or 'spread'")
    if isinstance(model, _OnTiles):
        raise ValueError("the model is parallelized already: call parallelize once")
    cut = tiles if isinstance(tiles, Tiles) else tiles_of(tiles, data, world() if comm is None else comm)
    comm = cut.grid.comm
    with comm.together((ValueError,)):
        lazy = next((name for name, p in model.named_parameters() if nn.parameter.is_lazy(p)), None)
        if lazy is not None:
            raise ValueError(f"{lazy} of the model has no shape yet: call the model once before it is parallelized")
        described = [(name, tuple(x.shape), str(x.dtype)) for name, x in model.state_dict().items()]
    comm.agree(None, model=crc32(repr(described).encode()))
    if comm.size > 1:
        for value in [*model.parameters(), *model.buffers()]:
            comm.broadcast(value.data)
    model.__class__ = _on_tiles(type(model))  # type: ignore[assignment]
    vars(model)["_loop"] = _Loop(cut, outputs == "spread")
    return model


class _OnTiles(nn.Module):
    """What the class of a parallelized model begins with."""

    _loop: "_Loop"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._loop.call(self, super().forward, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        kind = type(self).__mro__[2]
        return _rebuilt, (kind,), vars(self)


def _on_tiles(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (_OnTiles, kind), {"__module__": kind.__module__})


def _rebuilt(kind: type[nn.Module]) -> nn.Module:
    """A new object of the class of a parallelized model, for copy.deepcopy."""
    made = _on_tiles(kind)
    return made.__new__(made)


class _Loop:
    """How one model runs on `tiles`, and what is known of it between its calls."""

    def __init__(self, tiles: "Tiles", spread: bool) -> None:
        self.tiles, self.spread = tiles, spread
        self._is_running = False
        self._num_checked = 0
        self._trained: tuple[int, ...] = ()
        self._buckets: GradientBuckets | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Loop":
        return _Loop(self.tiles, self.spread)

    def call(self, model: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        grid = self.tiles.grid
        if grid.size == 1 or self._is_running or ForwardPass.now() is not None:
            return forward(*args, **kwargs)
        checks = self._is_due(model)
        if checks:
            self._compare(model, (args, kwargs))
        self._is_running = True
        try:
            running = ForwardPass(self._buckets_of(model))
            entered = [0]
            args, kwargs = mapped((args, kwargs), lambda x: self._entered(x, entered))
            if not entered[0]:
                self._refuse_inputs(args, kwargs)
            drawn = RandomStates.now().digests() if checks else ()
            with running.running(), whole_gradients(grid):
                outputs = forward(*args, **kwargs)
            grid.foresight.pay()
            if checks:
                self._compare_draws(drawn)
        finally:
            self._is_running = False
        return mapped(outputs, self._left)

    def _entered(self, x: Tensor, count: list[int]) -> Tensor:
        """An input of the model from outside of it."""
        grid = self.tiles.grid
        if isinstance(x, SpatialTensor):
            count[0] += 1
            return x.like(linear(x.local, _same, lambda g: g * grid.size)) if x.requires_grad else x
        if x.requires_grad and torch.is_grad_enabled():
            x = _Summed.apply(x, grid.comm)
        space = len(grid.space)
        if x.dim() < space + 2 or any(n < k for n, k in zip(x.shape[-space:], grid.shape.space, strict=True)):
            return x
        count[0] += 1
        return shard(x, grid)

    def _left(self, y: Tensor) -> Tensor:
        """An output of the model for outside of it."""
        size = self.tiles.grid.size
        if isinstance(y, SpatialTensor):
            if self.spread:
                return y.like(_share(y.local, size))
            y = gather(y)
        return _share(y, size)

    def _refuse_inputs(self, args: Any, kwargs: Any) -> None:
        shapes = [tuple(x.shape) for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        names = self.tiles.grid.names[1 : 1 + len(self.tiles.grid.space)]
        cut = " x ".join(map(str, self.tiles.grid.shape.space))
        raise Refusal(
            f"the model got tensors of shapes {shapes}, none of which can be cut into {cut} tiles: it needs one of "
            f"(batch, channels, {', '.join(names)}) that is at least as large, or what tiles.cut() returns"
        )

    def _buckets_of(self, model: nn.Module) -> GradientBuckets:
        comm = self.tiles.grid.comm
        for module in model.modules():
            if type(module._parameters) is not SummedParameters:
                vars(module)["_parameters"] = SummedParameters(module._parameters, comm)
                if isinstance(module, nn.RNNBase):
                    module.register_forward_pre_hook(_with_summed_weights)
        if not torch.is_grad_enabled():
            return GradientBuckets([], comm)
        found = [p for p in model.parameters() if p.requires_grad]
        trained = tuple(map(id, found))
        if self._buckets is None or trained != self._trained:
            self._trained, self._buckets = trained, GradientBuckets(found, comm)
        return self._buckets

    # What ranks compare.

    def _is_due(self, model: nn.Module) -> bool:
        if not (torch.is_grad_enabled() and model.training):
            return False
        self._num_checked += 1
        return self._num_checked <= FIRST or self._num_checked % EVERY == 0

    def _compare(self, model: nn.Module, given: Any) -> None:
        comm = self.tiles.grid.comm
        problem = backward_hook_in(model, comm.size)
        tensors = [x for x in pytree.tree_leaves(given) if isinstance(x, Tensor) and not isinstance(x, SpatialTensor)]
        mine = problem, checksum(tensors), checksum([*model.parameters(), *model.buffers()])
        found = comm.all_gather_object(mine)
        for rank, (hooked, inputs, weights) in enumerate(found):
            if hooked is not None:
                raise Refusal(hooked)
            if inputs != found[0][1]:
                raise Refusal(
                    f"rank {rank} called the model with other inputs than rank 0, but tiles are cut of one image that "
                    "all ranks have: seed the shuffle and the augmentations of your data alike on all ranks "
                    "(torch.manual_seed, or a generator for the DataLoader), and give no rank a part of the data alone"
                )
            if weights != found[0][2]:
                raise Refusal(
                    f"the parameters or buffers of rank {rank} are not those of rank 0: change them on all ranks "
                    "alike, and let each parameter be used by its module's attribute, through a call of the model"
                )

    def _compare_draws(self, before: Sequence[int]) -> None:
        drawn = tuple(a if a != b else 0 for a, b in zip(before, RandomStates.now().digests(), strict=True))
        if len(set(self.tiles.grid.comm.all_gather_object(drawn))) > 1:
            raise Refusal(
                "the model draws random numbers, as for dropout, and the ranks drew different ones: seed them alike "
                "(torch.manual_seed, random.seed, numpy.random.seed), and draw on all of them or on none"
            )


def _with_summed_weights(module: nn.Module, inputs: Any) -> None:
    """Recurrent layers have their weights in a list beside `_parameters`."""
    module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]  # type: ignore


def _same(x: Tensor) -> Tensor:
    return x.detach()


def _share(y: Tensor, size: int) -> Tensor:
    """y, whose gradient is shared out over ranks that all have the whole of it."""
    return linear(y, _same, lambda g: g / size) if y.requires_grad else y


class _Summed(torch.autograd.Function):
    """The identity, whose gradient is the sum of the ranks'."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        ctx.comm = comm
        return x.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.comm.all_reduce(gradient.clone(memory_format=torch.contiguous_format)), None


def mapped(value: Any, of: Callable[[Tensor], Tensor]) -> Any:
    """`value` with `of(x)` for each tensor in tuples, lists, dicts, dataclasses, and what PyTorch knows as nests.

    Raises:
        TypeError: some other object has tensors, which nobody would see.
    """

    def leaf(x: Any) -> Any:
        if isinstance(x, Tensor):
            return of(x)
        if dataclasses.is_dataclass(x) and not isinstance(x, type):
            other = copy.copy(x)
            for each in dataclasses.fields(x):
                object.__setattr__(other, each.name, mapped(getattr(x, each.name), of))
            return other
        if any(isinstance(each, Tensor) for each in getattr(x, "__dict__", {}).values()):
            raise TypeError(
                f"a {type(x).__name__} with tensors goes in or out of a model on tiles: use tensors, tuples, lists, "
                "dicts, dataclasses, or make it known by torch.utils._pytree.register_pytree_node"
            )
        return x

    return pytree.tree_map(leaf, value)


def checksum(tensors: Sequence[Tensor]) -> int:
    """Equal for equal tensors, and almost surely for no others: other values, flipped or permuted ones."""
    found = 0
    for x in tensors:
        found = crc32(f"{tuple(x.shape)} {x.dtype}".encode(), found)
        bits = _bits(x.detach())
        for dim in range(-min(2, bits.dim()), 0):  # sums are small, and a GPU takes them
            found = crc32(bits.sum(dim, dtype=torch.int64).cpu().numpy().tobytes(), found)
        if bits.dim() < 2:
            found = crc32(bits.cpu().numpy().tobytes(), found)
    return found


INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(x: Tensor) -> Tensor:
    x = torch.view_as_real(x) if x.is_complex() else x.to_dense() if x.layout is not torch.strided else x
    return x.contiguous().view(INTEGERS[x.itemsize])


# The same in three calls, without a wrapper: gradients are summed after the backward pass.
#
#     outputs = tiles.whole(model(tiles.cut(images)))
#     tiles.backward(loss_of(outputs), model)


class Tiles:
    """A grid of tiles, one for each rank, through which a plain PyTorch model sees the whole image; see `tiles`."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self._is_in_backward = False

    def cut(self, images: Tensor) -> Tensor:
        """This rank's tile of `images` (N, C, H, W), the same on every rank, as a tensor that a model takes as a whole.

        Of volumes (N, C, D, H, W), of sequences (N, C, L). On one rank it is what it was.
        """
        return images if self.grid.size == 1 else shard(images, self.grid)

    def join(self, tile: Tensor, size: Sequence[int]) -> Tensor:
        """The same of a tile (N, C, h, w) that this rank has read itself, of images of `size`, such as (H, W).

        Tiles are as `mpi4dl.geometry.Tiling.even(grid.shape, (N, *size))` cuts them: as even as can be.
        """
        return tile if self.grid.size == 1 else from_tile(tile, self.grid, size=tuple(size))

    def whole(self, outputs: Tensor) -> Tensor:
        """All of a model's outputs, on every rank. Collective.

        Their gradients are for `backward`: `loss.backward()` would leave each rank with its tile's part.
        """
        found = gather(outputs) if isinstance(outputs, SpatialTensor) else outputs
        return found if self.grid.size == 1 or not found.requires_grad else _InBackward.apply(found, self)

    def backward(self, loss: Tensor, model: nn.Module, retain_graph: bool = False) -> None:
        """Add to the gradients of the parameters of `model`, and of others that `loss` depends on, what
        `loss.backward()` would add on one device. Collective.

        `loss` is one number, which every rank has computed alike of whole outputs, or of spread ones.

        Hooks on parameters, and optimizers in such hooks, see the whole gradients.
        """
        if self.grid.size == 1:
            loss.backward(retain_graph=retain_graph)
            return
        loss = self.whole(loss)
        known = [p for p in model.parameters() if p.requires_grad]
        others = {p for p in _leaves(loss) if isinstance(p, nn.Parameter)}.difference(known)
        parameters = [*known, *sorted(others, key=lambda p: tuple(p.shape))]
        self._is_in_backward = True
        try:
            with _set_aside(parameters):
                (loss / self.grid.size).backward(retain_graph=retain_graph)
                parts = [p.grad for p in parameters]
        finally:
            self._is_in_backward = False
        wholes = summed(parameters, parts, self.grid.comm)
        del parts
        there = [(p, whole) for p, whole in zip(parameters, wholes, strict=True) if whole is not None]
        # As if all of backward had ended here: autograd calls hooks and accumulates.
        torch.autograd.backward([p for p, _ in there], [whole for _, whole in there])


class _InBackward(torch.autograd.Function):
    """The identity, of which the gradient is refused outside of `Tiles.backward`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tiles: Tiles) -> Tensor:
        ctx.tiles = tiles
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if not ctx.tiles._is_in_backward:
            raise RuntimeError(
                "loss.backward() would leave each rank with the gradients of its tile: call tiles.backward(loss, "
                "model), or let mpi4dl.parallelize(model) make loss.backward() whole"
            )
        return gradient, None


def _leaves(loss: Tensor) -> Iterator[Tensor]:
    """The leaves of the graph of `loss` that have gradients."""
    pending, seen = [loss.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        pending += [following for following, _ in node.next_functions]


@contextmanager
def _set_aside(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Within this context parameters have no gradients and no hooks on them."""
    gradients = [p.grad for p in parameters]
    hooks = [
        (each, dict(each))
        for p in parameters
        for each in (p._backward_hooks, getattr(p, "_post_accumulate_grad_hooks", None))
        if each
    ]
    for p in parameters:
        p.grad = None
    for each, _ in hooks:
        each.clear()
    try:
        yield
    finally:
        for each, known in hooks:
            each.update(known)
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient


def tiles(*counts: int, data: int = 1, comm: Communicator | None = None) -> Tiles:
    """A grid of as many tiles as `comm` has ranks, of images: rows and columns; of volumes a depth before, or a length.

    Without counts it has as many rows as go, up to as many as columns: 2 x 2 on 4 ranks, 1 x 5 on 5. `data` is into how
    many parts the batch is cut, each of which has as many tiles.

        tiles = mpi4dl.tiles()
        outputs = tiles.whole(model(tiles.cut(images)))
        tiles.backward(F.cross_entropy(outputs, labels), model)

    Raises:
        ValueError: the number of tiles is not that of ranks, or more axes than three.
    """
    return tiles_of(counts or None, data, world() if comm is None else comm)


def tiles_of(counts: str | Sequence[int] | None, data: int, comm: Communicator) -> Tiles:
    """The same by a text such as "2x2", or numbers; None: as many as there are ranks."""
    if isinstance(counts, str):
        if re.fullmatch(r"\d+(x\d+)*", counts) is None:
            raise ValueError(f"tiles {counts!r} must be numbers such as 2x2, or 2x2x1 for volumes, or 4 for sequences")
        counts = [int(number) for number in counts.split("x")]
    size = comm.size // max(data, 1)
    rows = next((n for n in range(isqrt(size), 0, -1) if size % n == 0), 1)
    shape = tuple(counts or (rows, size // rows))
    if len(shape) not in SPACE or data < 1 or min(shape) < 1 or data * prod(shape) != comm.size:
        asked = f"{' x '.join(map(str, shape))} tiles x data({data}) = {data * prod(shape)} ranks"
        raise ValueError(
            f"{asked}, but there are {comm.size}: start with mpirun -n {data * prod(shape)}, or choose 1 to 3 numbers "
            "of tiles whose product is that of ranks"
        )
    return Tiles(Grid.of(comm, GridShape(data, *shape)))
