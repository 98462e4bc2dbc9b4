"""A model on tiles in a training loop of the user's own, which is written as for one process.

    outside, the user's lines    every rank has the whole of each tensor, and the whole gradient of it
    ----------- images: cut | gradients: summed over ranks ------ whole | each rank passes on 1/size of the gradient --
    inside, the model            each rank has a tile, and its share of the gradient of whatever all of them have

Parameters enter as images do: see `replicas.parameter_sums`.
"""

import functools
import inspect
import re
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import count
from math import prod
from typing import Any, TypeVar
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction

from mpi4dl._compiler import defer_compiler
from mpi4dl._randomness import RandomStates
from mpi4dl.comm import Communicator, Refusal, world
from mpi4dl.comm.exchange import functions_behind, linear, running_forward
from mpi4dl.geometry import SPACE, GridShape, near_square
from mpi4dl.parallel.inputs import made_by_jit
from mpi4dl.parallel.nests import CopiedNest, EachOnce, mapped, tensors_in
from mpi4dl.parallel.replicas.buckets import FEW, bits_of, digest_of, is_expanded
from mpi4dl.parallel.replicas.optimizer_traits import backward_hook_in, modules_of, set_aside
from mpi4dl.parallel.replicas.parameter_sums import (
    ForwardPass,
    GradientBuckets,
    SummedParameters,
    UsedParameter,
    summed,
)
from mpi4dl.parallel.spatial.comparing import compare_gradients, compare_use, compared
from mpi4dl.parallel.spatial.grid import Grid
from mpi4dl.parallel.spatial.halo import gather, gather_axes
from mpi4dl.parallel.spatial.rules import custom_functions
from mpi4dl.parallel.spatial.rules.hooks import (
    OF_THE_PART,
    OF_THE_WHOLE,
    FunctionOfShares,
    runs_hook,
    whole_gradient,
    whole_gradients,
)
from mpi4dl.parallel.spatial.sharding import from_tile, shard, spread_buffer, spread_evenly
from mpi4dl.parallel.spatial.tensor import (
    TO_VALUES,
    SpatialTensor,
    function_name,
    guards,
    in_arguments,
    local_part,
    refusal,
)

ModelT = TypeVar("ModelT", bound=nn.Module)
FIRST, EVERY = 3, 100  # forward passes of training in which ranks compare what they have


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
    are passed as they are, and so is what `tiles.cut` or `tiles.join` made. In all passes ranks compare inputs,
    modes and their order; in the first ones, and every 100th, also parameters, random states and whole gradients.

    Raises:
        ValueError: the number of tiles is not that of ranks.
        Refusal: on all ranks: they have different models, inputs or weights, or what cannot be exact.
    """
    if outputs not in ("whole", "spread"):
        raise ValueError(f"outputs={outputs!r} must be 'whole' or 'spread'")
    if isinstance(model, _OnTiles):
        raise ValueError("the model is parallelized already: call parallelize once")
    if "forward" in vars(model) or hasattr(model, "_orig_mod") or isinstance(model, torch.fx.GraphModule):
        raise ValueError(
            "the model has a forward that is no method of its class: parallelize before torch.compile, or put it into "
            "an nn.Sequential"
        )
    cut = tiles if isinstance(tiles, Tiles) else tiles_of(tiles, data, world() if comm is None else comm)
    comm, values = cut.grid.comm, [*model.named_parameters(), *model.named_buffers()]
    with comm.together((ValueError,)):
        problem = _not_whole(model)
        if problem is not None:
            raise ValueError(problem)
    comm.agree(None, model=crc32(repr([(name, tuple(x.shape), str(x.dtype)) for name, x in values]).encode()))
    for _, x in values if comm.size > 1 else ():
        if x.layout is torch.strided and not is_expanded(x):  # others are compared in the first forward pass
            comm.broadcast(x.data)
    torch.autograd.Function.apply = classmethod(_apply)  # type: ignore[method-assign, assignment]
    cut.grid.loop = outputs  # type: ignore[assignment]
    object.__setattr__(model, "__class__", _on_tiles(type(model), cut.grid))  # Fabric's modules pass on what is set
    vars(model)["_loop"] = _Loop(cut, outputs == "spread")
    return model


def _not_whole(model: nn.Module) -> str | None:
    """Why a rank does not have all values of `model`; None if it has."""
    if (problem := made_by_jit(model)) is not None:
        return problem
    for path, module in model.named_modules():
        sharded = any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)
        for name, x in [*dict.items(module._parameters), *module._buffers.items()]:
            what = f"{name} of {path or 'the model'}"
            if nn.parameter.is_lazy(x):
                return f"{what} has no shape yet: call the model once before it is parallelized"
            if sharded or hasattr(x, "placements"):
                return (
                    f"{what} is cut by fully_shard or as a DTensor, but on tiles each rank needs all of it: leave that "
                    "out; torch.distributed.optim.ZeroRedundancyOptimizer cuts the optimizer's state"
                )
    return None


TRACED = (
    "a model on tiles is exported, scripted or traced, which is not possible: take the plain model, which is "
    "pickle.loads(pickle.dumps(model))"
)
TRACING = torch._C._TorchDispatchModeKey.PROXY, torch._C._TorchDispatchModeKey.FAKE  # make_fx, and shapes alone


class _OnTiles(nn.Module):
    """What the class of a parallelized model begins with."""

    _loop: "_Loop"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy is on tiles too; what is pickled is the plain model."""
        reduced: Any = super().__reduce_ex__(protocol)
        make, args, *state = reduced
        kind = type(self).__mro__[2]
        return (
            _made_again,
            (vars(self).get("_loop"), kind, make, [kind if x is type(self) else x for x in args]),
            *state,
        )

    def __prepare_scriptable__(self) -> Any:
        """What `torch.jit.script` calls first."""
        raise Refusal(TRACED)

    def _get_name(self) -> str:
        """As `torch.fx` calls it before it traces a model: later it would end in an error of its own."""
        if sys._getframe(1).f_code is inspect.unwrap(torch.fx.Tracer.trace).__code__:  # the compiler wraps it
            raise Refusal(TRACED)
        return super()._get_name()


def _made_again(loop: "_Loop | None", kind: type[nn.Module], make: Callable[..., Any], args: Sequence[Any]) -> Any:
    model = make(*args)
    if loop is not None:
        model.__class__ = _on_tiles(kind, loop.tiles.grid)
    return model


def _on_tiles(kind: type[nn.Module], grid: Grid) -> type[nn.Module]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        loop = vars(self).get("_loop")  # another object of this class has none
        plain = super(_OnTiles, self).forward
        return plain(*args, **kwargs) if loop is None else loop.call(self, plain, args, kwargs)

    forward.__signature__ = inspect.signature(kind.forward)  # type: ignore[attr-defined]  # trainers read it
    if grid.size > 1:
        defer_compiler()
        forward = torch.compiler.disable(forward, reason="a model on tiles runs eagerly: leave out fullgraph=True")
    names = {"__module__": kind.__module__, "forward": forward}
    return type(kind.__name__, (_OnTiles, kind), names)


class _Loop:
    """How one model runs on `tiles`, and what is known of it between its calls."""

    def __init__(self, tiles: "Tiles", spread: bool) -> None:
        self.tiles, self.spread = tiles, spread
        self._is_running = False
        self._number = 0  # of its first forward pass
        self._num_calls: dict[tuple[bool, bool], int] = {}  # in each mode
        self._trained: tuple[Any, ...] = ()
        self._buckets: GradientBuckets | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Loop":
        return _Loop(self.tiles, self.spread)

    def __reduce__(self) -> Any:
        return type(None), ()

    def call(self, model: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        grid = self.tiles.grid
        if grid.size == 1 or self._is_running or ForwardPass.now() is not None:
            return forward(*args, **kwargs)
        if torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0:
            raise Refusal(
                "torch.func or forward-mode AD transforms a model on tiles, which is not possible: use "
                "torch.autograd.grad"
            )
        if torch.jit.is_tracing() or torch.compiler.is_exporting() or any(map(torch._C._get_dispatch_mode, TRACING)):
            raise Refusal(TRACED)
        with grid.comm.going_on():
            return self._call(model, forward, args, kwargs)

    def _call(self, model: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        grid, records = self.tiles.grid, torch.is_grad_enabled()
        mode = model.training, records
        number = self._num_calls[mode] = self._num_calls.get(mode, 0) + 1
        checks = number <= FIRST or number % EVERY == 0
        parameters, buffers = self._prepare(model)
        self._compare(model, parameters, buffers, (args, kwargs), checks)
        self._number = self._number or grid.comm.num_met
        self._is_running = True
        try:
            buckets = self._buckets_of(parameters) if records else GradientBuckets([], grid.comm)
            running = ForwardPass(buckets, grid.comm.num_met)
            entered, copies = EachOnce(lambda x: self._entered(x, running)), list[CopiedNest]()
            args, kwargs = mapped((args, kwargs), entered, copies=copies)
            if not any(isinstance(x, SpatialTensor) for _, x, _ in entered.found.values()):
                self._refuse_inputs(args, kwargs)
            drawn = RandomStates.now().digests() if checks else ()
            with running.running(), whole_gradients(grid), _Border(grid, running) if records else nullcontext():
                outputs = forward(*args, **kwargs)
            grid.halo_prefetch.flush()
            self._refuse(spread_buffer(model.modules()))
            if checks:
                self._compare_draws(drawn)
                self._refuse_other_leaves(model, outputs)
        finally:
            self._is_running = False
        for x, within, version in entered.found.values():
            self._write_back(x, within, version, running)
        numbers = count(1)
        left = EachOnce(lambda y: self._left(y, running, next(numbers), checks))
        for copied in copies:
            copied.change_back(left)
        return mapped(outputs, left)

    def _prepare(self, model: nn.Module) -> tuple[list[nn.Parameter], list[Tensor]]:
        """Let modules, also new ones, have their parameters by `SummedParameters`. Returns those that are trained, and
        the buffers.
        """
        found: dict[int, nn.Parameter] = {}
        modules = list(modules_of(model))
        if any(type(module._parameters) is not SummedParameters for module in modules):
            self._refuse(_not_whole(model))
        for module in modules:
            if type(module._parameters) is not SummedParameters:
                vars(module)["_parameters"] = SummedParameters(module._parameters)
                if isinstance(module, nn.RNNBase):
                    module.register_forward_pre_hook(_with_summed_weights)
            for p in dict.values(module._parameters):
                if p is not None and p.requires_grad:
                    found[id(p)] = p
        return list(found.values()), [x for module in modules for x in module._buffers.values() if x is not None]

    def _buckets_of(self, parameters: list[nn.Parameter]) -> GradientBuckets:
        trained = tuple((id(p), p.dtype, p.shape, p.device) for p in parameters)
        if self._buckets is None or trained != self._trained:
            self._trained, self._buckets = trained, GradientBuckets(parameters, self.tiles.grid.comm)
        return self._buckets

    def _entered(self, x: Tensor, running: ForwardPass) -> Tensor:
        """An input of the model from outside of it."""
        grid, x = self.tiles.grid, outside(x)
        if isinstance(x, SpatialTensor):
            if not (x.requires_grad and torch.is_grad_enabled()):
                return x
            if grid.loop != "spread":
                raise Refusal("a spread input of the model requires a gradient: pass the whole tensor instead")
            return x.like(_enter(x.local, lambda g: g * grid.size, running))  # the inverse of `_share`
        if x.requires_grad and torch.is_grad_enabled():
            x = _enter(x, functools.partial(_total, grid.comm), running)
        space = len(grid.space)
        if x.dim() < space + 2 or any(n < k for n, k in zip(x.shape[-space:], grid.shape.space, strict=True)):
            return x
        return spread_evenly(x, grid)

    def _write_back(self, x: Tensor, within: Tensor, version: int, running: ForwardPass) -> None:
        """Let x, an input that is `within` the model, be what the model has written to it in place."""
        if isinstance(x, SpatialTensor) or within is x:
            return
        if isinstance(within, SpatialTensor):
            is_written = within._memory is not None and within._memory.is_written
            y = gather_axes(within, within.layout.grid.axes) if is_written else within
        else:
            is_written, y = within._version != version, within
        if not is_written:
            return
        if y.requires_grad:
            if x.is_leaf and x.requires_grad:
                raise Refusal("the model writes in place to a leaf that requires a gradient: pass a clone of it")
            _keep(outside(x), self.tiles.grid, running, _share(y, running))
        else:
            outside(x).data.copy_(y)

    def _left(self, y: Tensor, running: ForwardPass, number: int, checks: bool) -> Tensor:
        """The output of this number for outside of the model. `checks`: ranks compare its gradient."""
        if isinstance(y, KeptTensor):
            return y.outside(number, checks)
        return _output(y, self.tiles.grid, self.spread, running, number, checks)

    def _refuse(self, problem: str | None) -> None:
        if problem is not None:
            raise Refusal(problem)

    def _refuse_inputs(self, args: Any, kwargs: Any) -> None:
        shapes = [tuple(x.shape) for x in tensors_in((args, kwargs))]
        names = self.tiles.grid.names[1 : 1 + len(self.tiles.grid.space)]
        cut = " x ".join(map(str, self.tiles.grid.shape.space))
        raise Refusal(
            f"the model got tensors of shapes {shapes}, none of which can be cut into {cut} tiles: it needs one of "
            f"(batch, channels, {', '.join(names)}) that is at least as large, or what tiles.cut() returns"
        )

    def _refuse_other_leaves(self, model: nn.Module, outputs: Any) -> None:
        """Refuse outputs with gradients that would not be summed over ranks on their way."""
        found = [_plain(local_part(x)) for x in tensors_in(outputs)]
        for node in functions_behind(found, lambda node: isinstance(getattr(node, "running", None), ForwardPass)):
            if getattr(node, "_forward_cls", None) is CheckpointFunction:
                raise Refusal("torch.utils.checkpoint with use_reentrant=True is not exact on tiles: pass False")
            x = getattr(node, "variable", None)
            if x is not None and not hasattr(x, "is_of_one_rank"):  # a tile, made in the model
                name = next((name for name, p in model.named_parameters() if p is x), f"a tensor {tuple(x.shape)}")
                raise Refusal(
                    f"{name} has a gradient and comes into the model by another way than an argument or a parameter of "
                    "one of its modules: register it, make it before the model is called, or pass it as an argument"
                )

    # What ranks compare.

    def _compare(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        buffers: Sequence[Tensor],
        given: Any,
        checks: bool,
    ) -> None:
        comm = self.tiles.grid.comm
        tensors = [x for x in tensors_in(given) if not isinstance(x, SpatialTensor)]
        places = {id(p): number for number, p in enumerate(model.parameters())}
        facts: dict[str, Any] = {
            "places": self._number,
            "modes": (
                model.training,
                torch.is_grad_enabled(),
                crc32(repr([places[id(p)] for p in parameters]).encode()),
            ),
        }
        if checks or not any(x.is_cuda for x in tensors):
            facts["inputs"] = checksum(tensors)
        else:
            facts["inputs"] = crc32(repr([(tuple(x.shape), str(x.dtype)) for x in tensors]).encode())
        if checks:
            problem = _not_whole(model)
            if problem is None and torch.is_grad_enabled():
                problem = backward_hook_in(model, comm.size)
            self._refuse(problem)
            facts["weights"] = checksum([*model.parameters(), *model.buffers()])
        else:
            some = (each[comm.num_met % len(each)] for each in (parameters, buffers) if each)
            facts["weights"] = digest_of(x for x in some if x.device.type == "cpu")
        compared(comm, facts)

    def _compare_draws(self, before: Sequence[int]) -> None:
        drawn = tuple(a if a != b else 0 for a, b in zip(before, RandomStates.now().digests(), strict=True))
        if len(set(self.tiles.grid.comm.all_gather_object(drawn))) > 1:
            raise Refusal(
                "the model draws random numbers, as for dropout, and the ranks drew different ones: seed them alike "
                "(torch.manual_seed, random.seed, numpy.random.seed), and draw on all of them or on none"
            )


class _Border(TorchFunctionMode):
    """A forward pass, and tensors that come into it, or stay outside, by other ways than arguments and results.

    Plain tensors with a gradient that were made outside enter where a function takes them. Those that were made in the
    pass, and that somebody keeps when it ends, are outputs of the model from then on.
    """

    def __init__(self, grid: Grid, running: ForwardPass) -> None:
        super().__init__()
        self._grid, self._running = grid, running
        self._known: set[int] = set()
        self._made: list[weakref.ref[Tensor]] = []
        self._entered: dict[int, tuple[Tensor, Tensor]] = {}

    def __enter__(self) -> Any:
        running_forward.append(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        running_forward.remove(self)
        result = super().__exit__(*error)
        self._note([*self._running.used()])
        self._entered.clear()
        for found in self._made:
            x = found()
            if type(x) is UsedParameter or (type(x) is Tensor and x.requires_grad and x.grad_fn is not None):
                _keep(x, self._grid, self._running)
        return result

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function == GRAD_FN:
            found = function(*args)
            return found if found is None or type(args[0]) is SpatialTensor else FunctionOfShares(found)
        if not torch.is_grad_enabled() or (getattr(function, "__name__", "") == "__get__" and function not in VIEWS):
            return function(*args, **(kwargs or {}))
        args, kwargs = in_arguments(args, kwargs, self._within)
        result = function(*args, **kwargs)
        self._note(result)
        if result is None and args:  # such as __setitem__
            self._note(args[0])
        return result

    def apply(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A `torch.autograd.Function` of the user's within this pass."""
        args, kwargs = in_arguments(args, kwargs, self._within)
        result = custom_functions.apply(function, *args, **kwargs)
        self._note(result)
        return result

    def _note(self, result: Any) -> None:
        if isinstance(result, Tensor):
            is_leaf = type(result) is Tensor and result.grad_fn is None  # which enters as those from outside do
            if type(result) in (Tensor, UsedParameter) and result.requires_grad and not is_leaf:
                self._known.add(id(result))
                self._made.append(weakref.ref(result))
        elif isinstance(result, tuple | list):
            for each in result:
                self._note(each)

    def _within(self, x: Tensor) -> Tensor:
        """A tensor among the arguments of a function in this pass."""
        if isinstance(x, KeptTensor):
            x = x.outside()
        elif isinstance(x, SpatialTensor | UsedParameter) or id(x) in self._known or not x.requires_grad:
            return x
        if id(x) not in self._entered:
            behind = functions_behind([x], lambda node: hasattr(node, "is_left"))
            if any(getattr(node, "running", None) is self._running for node in behind):
                self._known.add(id(x))
                return x
            total = _enter(x, functools.partial(_total, self._grid.comm), self._running)
            self._entered[id(x)] = x, total
        return self._entered[id(x)][1]


class KeptTensor(Tensor):
    """A plain tensor of within a model that somebody keeps: an output of the model, in all that is done with it."""

    grid: Grid
    made_in: ForwardPass
    shared: Tensor | None = None

    def outside(self, number: int = 0, checks: bool = False) -> Tensor:
        """The output of the model that it is, the same each time."""
        if self.shared is None:
            with torch.enable_grad():
                self.shared = _share(_plain(self), self.made_in, number, checks)
        return self.shared

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in OF_GRADIENT:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        if function in (Tensor.register_hook, Tensor.retain_grad):  # of all uses, within and outside
            with whole_gradients(args[0].grid), torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        if function is torch.autograd.grad:
            return _gradients(*args, **(kwargs or {}))
        of_now, options = in_arguments(args, kwargs, _now)
        return function(*of_now, **options)


def _keep(x: Tensor, grid: Grid, made_in: ForwardPass, shared: Tensor | None = None) -> None:
    """Let x be a kept tensor, outside of the model `shared`."""
    x.__class__ = KeptTensor
    x.grid, x.made_in, x.shared = grid, made_in, shared  # type: ignore[attr-defined]


def _gradients(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
    """`torch.autograd.grad`, where kept tensors may be among outputs and inputs."""
    (outputs, *options), named = in_arguments((outputs, *args), kwargs, outside)
    inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    within = [local_part(x) for x in inputs]
    kept = [x for x in within if isinstance(x, KeptTensor)]
    for x in kept:  # what the backward pass calls is asked about all other tensors
        x.__class__ = Tensor  # type: ignore[assignment]
    try:
        found = torch.autograd.grad(outputs, within, *options, **named)
    finally:
        for x in kept:
            x.__class__ = KeptTensor
    return tuple(g if g is None else _whole_gradient(x, g) for x, g in zip(inputs, found, strict=True))


def _whole_gradient(x: Tensor, share: Tensor) -> Tensor:
    if isinstance(x, SpatialTensor):
        return gather_axes(whole_gradient(x.layout, share), x.layout.grid.axes)
    if isinstance(x, KeptTensor):
        return _total(x.grid.comm, share)
    return share


GRAD_FN = Tensor.grad_fn.__get__  # type: ignore[union-attr]
VIEWS = tuple(getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "real", "imag"))
OF_GRADIENT = tuple(getattr(Tensor.grad, name) for name in ("__get__", "__set__", "__delete__"))


def outside(x: Tensor) -> Tensor:
    """What somebody kept of a model as the output that it is; other tensors are what they are."""
    if isinstance(x, SpatialTensor) and x.made_in is not None and x.kept:
        if x.output is None:
            grid = x.layout.grid
            compared(grid.comm, {"places": ("kept", x.made_in.number, x.shape)})
            with torch.enable_grad():
                x.output = _output(x, grid, grid.loop == "spread", x.made_in)
        return x.output
    return x.outside() if isinstance(x, KeptTensor) else x


def _of_spread(x: Tensor) -> Tensor:
    """The same of all spread tensors, which are whole outside of a model whose outputs are."""
    if not isinstance(x, SpatialTensor) or x.kept or x.layout.grid.loop != "whole":
        return outside(x)
    return gather_axes(x, x.layout.grid.axes)


def _now(x: Tensor) -> Tensor:
    """The same for a function that is called now: those that a backward pass calls again see it as it was."""
    return outside(x) if torch._C._current_graph_task_id() < 0 else _plain(x)


def _apply(function: Any, *args: Any, **kwargs: Any) -> Any:
    """`torch.autograd.Function.apply`, which asks no tensor: it would go past kept ones, and a forward pass."""
    if function is custom_functions.SAVING_INPUTS:
        return custom_functions.apply(function, *args, **kwargs)
    if running_forward and running_forward[-1] is not None:
        return running_forward[-1].apply(function, args, kwargs)
    return custom_functions.apply(function, *(_now(x) if isinstance(x, Tensor) else x for x in args), **kwargs)


def _plain(x: Tensor) -> Tensor:
    if not isinstance(x, KeptTensor):
        return x
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(Tensor)


HOOKS = (Tensor.register_hook, Tensor.retain_grad)
READS = {"__get__", "__repr__", "__format__", "dim", "size"}
OF_EACH_RANK = {
    *OF_THE_WHOLE,
    *OF_THE_PART,
    *(getattr(Tensor, name) for name in "detach clone to cpu double float".split()),
}


def _guard(function: Any, args: Sequence[Any], options: dict[str, Any]) -> Callable[[], Any] | None:
    """What is called instead of a function of spread tensors outside of their model, if anything is.

    There whole tensors are whole outputs, of whose gradients each rank has a share, and those that somebody kept are
    outputs. Refuses what would leave a rank with a part of a gradient.
    """
    if ForwardPass.now() is not None:
        if function in TO_VALUES and args[0].layout.grid.loop is not None:
            compare_use(args[0].layout.grid, function)
        return None
    if torch._C._current_graph_task_id() >= 0 and not runs_hook():
        return None
    first = next((x for x in args if type(x) is SpatialTensor), None)
    if (first is not None and first.layout.grid.loop is None) or getattr(function, "__name__", "") in READS:
        return None
    tensors = [x for x in pytree.tree_leaves((tuple(args), options)) if isinstance(x, Tensor)]
    spread = [x for x in tensors if isinstance(x, SpatialTensor)]
    plain = torch.is_grad_enabled() and any(x.requires_grad for x in tensors if not isinstance(x, SpatialTensor))
    if any(x.kept for x in spread):
        if function is torch.autograd.grad:
            return functools.partial(_gradients, *args, **options)
        if function in HOOKS:  # of all uses, within and outside
            return None
    elif spread[0].layout.grid.loop is not None and function not in OF_EACH_RANK:
        compare_use(spread[0].layout.grid, function)
    if not any(x.kept for x in spread) and not (plain and any(x.layout.grid.loop == "whole" for x in spread)):
        trained = (x for x in spread if x._local is not None and x._local.requires_grad and torch.is_grad_enabled())
        loops = {x.layout.grid.loop for x in trained}
        if "whole" in loops and function is not Tensor.detach:
            raise refusal(function_name(function), "outside of the model, it needs a gradient: pass the whole tensor")
        if "spread" in loops and (plain or function in HOOKS):
            raise refusal(
                function_name(function),
                "outside of the model, a spread output meets a hook or a plain tensor that requires a gradient: do "
                "that in the model, or leave out outputs='spread'",
            )
        return None
    args, options = in_arguments(args, options, _of_spread)
    return functools.partial(function, *args, **options)


guards.append(_guard)


def _with_summed_weights(module: nn.Module, inputs: Any) -> None:
    """Recurrent layers have their weights in a list beside `_parameters`."""
    module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]  # type: ignore


def _total(comm: Communicator, gradient: Tensor) -> Tensor:
    return comm.all_reduce(gradient.clone(memory_format=torch.contiguous_format))


def _output(y: Tensor, grid: Grid, spread: bool, running: ForwardPass, number: int = 0, checks: bool = False) -> Tensor:
    """A tensor of within a model for outside of it."""
    if isinstance(y, SpatialTensor):
        if spread:
            return y.like(_share(y.local, running, number, None))
        y = gather_axes(y, grid.axes)
    return _share(y, running, number, checks)


def _share(y: Tensor, running: ForwardPass, number: int = 0, checks: bool | None = False) -> Tensor:
    """y as an output of a forward pass, of whose gradient outside each rank gets a share, as all have the whole of it.

    `number` is which output it is, 0 for tensors that somebody kept. `checks`: ranks compare all of its gradient.
    False: a few numbers, if they are in memory. None: nothing, as each rank has a tile.
    """
    if not (y.requires_grad and torch.is_grad_enabled()):
        return y
    comm = running.buckets.comm

    def share(gradient: Tensor) -> Tensor:
        few = gradient.flatten()[:: gradient.numel() // FEW + 1]
        compared = gradient if checks else few if checks is False and few.device.type == "cpu" else torch.empty(0)
        compare_gradients(comm, compared, ("backward", running.number, number))
        return gradient / comm.size

    shared = linear(y, Tensor.detach, share)
    shared.grad_fn.is_left = True  # type: ignore[union-attr]
    return shared


def _enter(x: Tensor, adjoint: Callable[[Tensor], Tensor], running: ForwardPass) -> Tensor:
    """x as an input of a model, whose gradient outside is `adjoint` of that within."""
    entered = linear(x, Tensor.detach, adjoint)
    entered.grad_fn.running = running  # type: ignore[union-attr]
    return entered


def checksum(tensors: Sequence[Tensor]) -> int:
    """Equal for equal tensors, and almost surely for no others: other values, flipped or permuted ones."""
    found = 0
    for x in tensors:
        found = crc32(f"{tuple(x.shape)} {x.dtype}".encode(), found)
        bits = bits_of(outside(x.detach()))
        for dim in range(-min(2, bits.dim()), 0):  # sums are small, and a GPU takes them
            found = crc32(bits.sum(dim, dtype=torch.int64).cpu().numpy().tobytes(), found)
        if bits.dim() < 2:
            found = crc32(bits.clone().cpu().numpy().tobytes(), found)  # nobody could resize what NumPy has seen
    return found


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
        if self.grid.size == 1 or not found.requires_grad:
            return found
        return linear(found, Tensor.detach, self._require_backward)

    def _require_backward(self, gradient: Tensor) -> Tensor:
        if not self._is_in_backward:
            raise RuntimeError(
                "loss.backward() would leave each rank with the gradients of its tile: call tiles.backward(loss, "
                "model), or let mpi4dl.parallelize(model) make loss.backward() whole"
            )
        return gradient

    def backward(self, loss: Tensor, model: nn.Module, retain_graph: bool = False) -> None:
        """Add to the gradients of the parameters of `model`, and of other tensors that `loss` depends on, what
        `loss.backward()` would add on one device. Collective.

        `loss` is one number, which every rank has computed alike of whole outputs, or of spread ones.

        Hooks on parameters, and optimizers in such hooks, see the whole gradients. A tile that requires a gradient has
        its own part of it.
        """
        if self.grid.size == 1:
            loss.backward(retain_graph=retain_graph)
            return
        problem = backward_hook_in(model, self.grid.size)
        if problem is not None:
            raise Refusal(problem)
        loss = self.whole(loss)
        compare_gradients(self.grid.comm, loss.detach(), "tiles.backward")
        known = [p for p in model.parameters() if p.requires_grad]
        behind = functions_behind([loss], lambda node: hasattr(node, "is_of_one_rank"))
        leaves = (node.variable for node in behind if hasattr(node, "variable"))
        # In the order of the graph, which all ranks have alike; no set has.
        parameters = list(dict.fromkeys([*known, *(x for x in leaves if not hasattr(x, "is_of_one_rank"))]))
        self._is_in_backward = True
        try:
            with set_aside(parameters):
                (loss / self.grid.size).backward(retain_graph=retain_graph)
                parts = [p.grad for p in parameters]
        finally:
            self._is_in_backward = False
        wholes = summed(parameters, parts, self.grid.comm)
        del parts
        there = [(p, whole) for p, whole in zip(parameters, wholes, strict=True) if whole is not None]
        # As if all of backward had ended here: autograd calls hooks and accumulates.
        torch.autograd.backward([p for p, _ in there], [whole for _, whole in there])


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
    shape = tuple(counts or near_square(size))
    if len(shape) not in SPACE or data < 1 or min(shape) < 1 or data * prod(shape) != comm.size:
        asked = f"{' x '.join(map(str, shape))} tiles x data({data}) = {data * prod(shape)} ranks"
        raise ValueError(
            f"{asked}, but there are {comm.size}: start with mpirun -n {data * prod(shape)}, or choose 1 to 3 numbers "
            "of tiles whose product is that of ranks"
        )
    return Tiles(Grid.of(comm, GridShape(data, *shape)))
