"""An opt-in for what has no rule: it is gathered, computed whole by PyTorch on every rank, and cut again.

with spatial.gathering():
    y = model(x)

  x, spread --gather--> whole --PyTorch's own function--> whole --crop--> y, spread
                                                            |
  backward: each rank's gradient of its own part, zeros around it; the adjoint of the gather adds them up
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from mpi4dl.parallel.spatial.flattening import cut_out
from mpi4dl.parallel.spatial.halo import gather_axes
from mpi4dl.parallel.spatial.tensor import (
    GatheredWarning,
    NoRule,
    Rule,
    SpatialTensor,
    calling_module,
    copied,
    countable,
    function_name,
    refusal,
    same_memory,
    substitutes,
    without_rule,
)

# Functions that report memory, identity or autograd's graph would report those of the gathered copy.
OF_THE_TENSOR_ITSELF = frozenset(
    "data_ptr untyped_storage storage storage_offset _typed_storage stride as_strided set_ resize_ resize_as_ view "
    "__reduce_ex__ __reduce__ __dlpack__ __set__ backward grad share_memory_ is_shared pin_memory is_set_to".split()
)
VALUES_OF_ATTRIBUTES = frozenset("T H mH real imag".split())


class _Whole(NamedTuple):
    """A spread operand, all of it, and how often that had been written to before the operator."""

    spread: SpatialTensor
    tensor: Tensor
    version: int


@contextmanager
def gathering() -> Iterator[None]:
    """Let operators that have no exact rule for tiles be computed whole: exact, at the memory of whole operands.

    Each rank gathers the operands and computes the same. A result is cut like a spread operand if it has the same
    number of dims, and the same sizes along height, width (and a batch that is cut). Other results, such as features of
    the whole image, stay whole on every rank, and so do results of these alone: `shard_like` cuts them. Writes in place
    go into the tiles. Random numbers are those that one process would draw; ranks whose generators differ all raise
    `NoRule`. Calls that a copy cannot answer, such as `data_ptr`, still raise it.

    Each module and operator is named once in a `GatheredWarning`, with its bytes, by rank 0 of the grid. It holds for
    the process, since backward passes that recompute may run in another thread; those must come within it too.
    """
    substitute = _Substitute()
    substitutes.append(substitute)
    try:
        yield
    finally:
        substitutes.remove(substitute)


class _Substitute:
    """Calls rules, and computes whole where one refuses: the function that the model called, not one within a rule."""

    def __init__(self) -> None:
        self.within_rule = False
        self.named: set[tuple[str, str]] = set()

    def __call__(self, function: Any, rule: Rule, /, *args: Any, **kwargs: Any) -> Any:
        if self.within_rule:
            return rule(*args, **kwargs)
        self.within_rule = True
        try:
            return rule(*args, **kwargs)
        except NoRule as refused:
            reason = refused
        finally:
            self.within_rule = False
        return compute_whole(function, args, kwargs, reason, self.warn)

    def warn(self, function: Any, wholes: list[_Whole], result: Any) -> None:
        name, module = function_name(function), calling_module()
        if (name, module) in self.named or wholes[0].spread.layout.grid.rank != 0:
            return
        self.named.add((name, module))
        tensors = [y for y in pytree.tree_leaves(result) if isinstance(y, Tensor)]
        cut = not tensors or any(isinstance(y, SpatialTensor) for y in tensors)
        warnings.warn(
            f"{name}{f' in module {module}' if module else ''} has no exact rule for tiles: "
            f"{sum(whole.tensor.nbytes for whole in wholes):,} bytes were gathered on every rank, computed whole, and "
            f"{'cut again' if cut else 'left whole'}",
            GatheredWarning,
            stacklevel=2,
        )


def compute_whole(
    function: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    reason: NoRule,
    warn: Callable[[Any, list[_Whole], Any], None] = lambda function, wholes, result: None,
) -> Any:
    """The function of whole operands, on every rank; results are cut as an operand is. Collective where one is cut.

    Raises `reason` for what a copy of the operands cannot answer.
    """
    name = getattr(function, "__name__", "")
    attribute = getattr(getattr(function, "__self__", None), "__name__", "")
    if name in OF_THE_TENSOR_ITSELF or (name == "__get__" and attribute not in VALUES_OF_ATTRIBUTES):
        raise reason
    leaves, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
    wholes = {id(x): _gathered(x) for x in leaves if isinstance(x, SpatialTensor)}
    if not wholes:
        raise reason
    plain = [wholes[id(x)].tensor if id(x) in wholes else x for x in leaves]
    given, named = pytree.tree_unflatten(plain, structure)
    generators = _generators(plain)
    states = [generator.get_state() for generator in generators]
    result = function(*given, **named)
    drawn = [i for i, generator in enumerate(generators) if not torch.equal(generator.get_state(), states[i])]
    _check_seeds(function, next(iter(wholes.values())).spread, [states[i] for i in drawn])
    for whole in wholes.values():
        if whole.tensor._version != whole.version:
            _write_back(function, whole)
    placed = pytree.tree_map(lambda y: _place(y, list(wholes.values())), result)
    warn(function, list(wholes.values()), placed)
    return placed


without_rule.append(compute_whole)


def _gathered(x: SpatialTensor) -> _Whole:
    whole = countable(gather_axes(x, x.layout.grid.axes, tell=False))
    return _Whole(x, whole, whole._version)


def _generators(leaves: Sequence[Any]) -> list[torch.Generator]:
    """The generators that a function of these arguments may draw from."""
    devices = {x.device for x in leaves if isinstance(x, Tensor)}
    if any(device.type == "meta" for device in devices):
        return []
    of_gpus = [torch.cuda.default_generators[device.index or 0] for device in devices if device.type == "cuda"]
    return [torch.default_generator, *of_gpus, *(x for x in leaves if isinstance(x, torch.Generator))]


def _check_seeds(function: Any, x: SpatialTensor, states: list[Tensor]) -> None:
    """Refuse, on all ranks, what was drawn from generators in different states."""
    if not states:
        return
    of_all = x.layout.grid.comm.all_gather_object([state.numpy().tobytes() for state in states])
    if any(other != of_all[0] for other in of_all):
        raise refusal(
            function_name(function),
            "it draws random numbers, but the ranks' generators are in different states: seed them alike",
        )


def _write_back(function: Any, whole: _Whole) -> None:
    x = whole.spread
    if problem := x.memory.problem_of_writing():
        raise refusal(function_name(function), problem)
    if whole.tensor.shape != x.shape:
        raise refusal(function_name(function), "it changes the shape in place")
    x.local.copy_(cut_out(whole.tensor, x.layout))


def _place(y: Any, wholes: list[_Whole]) -> Any:
    """A result as the model gets it: the operand itself if that was written, cut as an operand is if it can be."""
    if isinstance(y, np.ndarray):
        y.setflags(write=False)  # it is no view of the tensor, as PyTorch's would be
    if not isinstance(y, Tensor):
        return y
    for whole in wholes:
        if y is whole.tensor:
            return whole.spread
    for whole in wholes:
        x = whole.spread
        if y.dim() == x.dim() and all(dim is None or y.shape[dim] == x.shape[dim] for dim in x.layout.dims):
            cut = SpatialTensor(cut_out(y, x.layout).clone(), x.layout)  # a copy, so that the whole is freed
            return _known_as_copy(cut, y, wholes)
    return _known_as_copy(y, y, wholes)


def _known_as_copy(result: Tensor, y: Tensor, wholes: list[_Whole]) -> Tensor:
    """The result; if y is a view of a whole operand, that operand hears of it."""
    viewed = [whole.spread for whole in wholes if y.layout == torch.strided and same_memory(y, whole.tensor)]
    return copied(result, viewed[0]) if viewed else result
