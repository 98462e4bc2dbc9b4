"""One stage of a model: a module that runs some of its units, with their parameters under the model's own names.

values alive before the first unit -> stage -> values alive after the last unit
the model's inputs                 -> first stage           last stage -> the model's output
"""

import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mpi4dl.comm.exchange import linear
from mpi4dl.parallel.inputs import copied
from mpi4dl.parallel.pipeline.decisions import Watch, changed
from mpi4dl.parallel.pipeline.program import Attribute, Call, Value, map_leaves, perform
from mpi4dl.parallel.spatial.tensor import SpatialTensor, local_part


@dataclass(frozen=True)
class StageProgram:
    """The calls of a stage, without its modules.

    `inputs` and `outputs` name the values that come and go; `forget[i]` those that are not needed after `calls[i]`;
    `result` is what the last stage returns in training and in evaluation, with a `Value` for each tensor, and None for
    other stages. `holds` are the paths of the model's modules, parameters and buffers that are the stage's. From
    `detached_outputs` nothing comes into the model's result: they have no gradient, as in the model. `looks` are paths
    of tensors of other stages at whose shape or type the stage looks, and `watched` the values of Python on which the
    calls depend.
    """

    index: int
    num_stages: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    calls: tuple[Call, ...]
    forget: tuple[tuple[str, ...], ...]
    result: Any
    holds: frozenset[str]
    detached_outputs: frozenset[str] = frozenset()
    looks: frozenset[str] = frozenset()
    watched: tuple[Watch, ...] = field(default=(), compare=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> "StageProgram":
        """Copies of a stage make the same calls; their arguments, such as a module of Python, may have no copy."""
        return self

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.num_stages - 1


class ShapeProxy:
    """Stands for a tensor of another stage: of its shape, type and device, in the memory of one number."""

    def __init__(self, original: Tensor, follows: bool) -> None:
        self.shape, self.follows = original.shape, follows
        self.one = torch.empty((), dtype=original.dtype, device=original.device)

    @property
    def tensor(self) -> Tensor:
        return self.one.expand(self.shape)

    def lower(self, dtype: torch.dtype) -> None:
        """Be of this type if the original is: float32 parameters of layers that are no norms."""
        if self.follows and self.one.dtype is torch.float32:
            self.one = self.one.to(dtype)


# Makes the first calls of a stage in another way: (stage, *values) -> the number of calls, and the values alive then.
StreamedPrefix = Callable[..., tuple[int, dict[str, Any]]]


class Stage(nn.Module):
    """Some of a model's units: `stage(*values)` takes the values of `stage_program.inputs`, and returns its `outputs`.

    It always returns a tuple, except the last stage, which returns just what the model returns. A value is a tensor, a
    number, or a nest of them (`pack` and `unpack` take them apart for sending), or None if the mode does not make it.
    The stage shares the modules of `model` that it runs. An `opening` makes its first calls instead of it.
    """

    def __init__(self, stage_program: StageProgram, model: nn.Module) -> None:
        super().__init__()
        self.stage_program = stage_program
        self.training = model.training
        self.opening: StreamedPrefix | None = None
        _adopt(self, model, stage_program.holds)
        norms = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
        self.looked: dict[str, ShapeProxy] = {}
        for path in sorted(stage_program.looks):
            owner, original = model.get_submodule(path.rpartition(".")[0]), attrgetter(path)(model)
            self.looked[path] = ShapeProxy(
                original, isinstance(original, nn.Parameter) and not isinstance(owner, norms)
            )
        self._watched = [(watch, *_seen(watch, model, self)) for watch in stage_program.watched if watch.place is None]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Stage":
        super()._apply(fn, recurse)
        for each in self.looked.values():
            each.one = fn(each.one)
        return self

    def changes(self) -> Iterator[str]:
        """Messages about values of Python that changed since the model was cut."""
        for watch in self.stage_program.watched:
            if watch.place is not None and watch.now() != watch.found:
                yield changed(watch)
        for watch, found, *owners in self._watched:
            if any(owner is not None and watch.now(owner) != found for owner in (each() for each in owners)):
                yield changed(watch)
        yield from getattr(self.opening, "changes", tuple)()

    def forward(self, *values: Any) -> Any:
        stage_program = self.stage_program
        if len(values) != len(stage_program.inputs):
            raise ValueError(
                f"stage {stage_program.index} of {stage_program.num_stages} got {len(values)} values, but takes "
                f"{len(stage_program.inputs)}: {', '.join(stage_program.inputs)}"
            )
        if self.opening is not None:
            done, known = self.opening(self, *values)
        else:
            done, known = (
                0,
                dict(zip(stage_program.inputs, values if stage_program.is_first else enter(values), strict=True)),
            )
        del values
        for call, forget in zip(stage_program.calls[done:], stage_program.forget[done:], strict=True):
            known[call.name] = self._result(call, known) if call.made[not self.training] else None
            for name in forget:
                del known[name]
        if stage_program.is_last:
            return self._filled(stage_program.result[not self.training], known)
        for name in stage_program.detached_outputs:
            known[name] = map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, known[name])
        return tuple(known[name] for name in stage_program.outputs)

    def _result(self, call: Call, known: dict[str, Any]) -> Any:
        trains = self._trains(call)
        args, kwargs = self._filled(call.training if trains else call.evaluation, known)
        contexts = call.contexts[not trains]
        if not contexts:
            return perform(call.kind, call.target, self, args, kwargs)
        preserve = None
        with ExitStack() as stack:
            for kind, *how in contexts:
                if kind == "recompute":
                    (preserve,) = how
                else:
                    stack.enter_context(torch.autocast(*how) if kind == "autocast" else torch.set_grad_enabled(*how))
            if preserve is None:
                return perform(call.kind, call.target, self, args, kwargs)
            module = self.get_submodule(call.target)
            return checkpoint(module, *args, use_reentrant=False, preserve_rng_state=preserve, **kwargs)

    def _trains(self, call: Call) -> bool:
        """Whether the module that makes a call is in training mode: parts of a model may be frozen by `eval()`."""
        module: nn.Module = self
        for name in call.scope.split(".") if call.training is not call.evaluation else ():
            child = module._modules.get(name)
            if child is None:  # the stage holds nothing of it, so that nobody can set its mode
                break
            module = child
        return module.training

    def _filled(self, arguments: Any, known: dict[str, Any]) -> Any:
        def part(leaf: Any) -> Any:
            if isinstance(leaf, Value):
                return known[leaf.name]
            if not isinstance(leaf, Attribute):
                return leaf
            return self.looked[leaf.path].tensor if leaf.path in self.looked else attrgetter(leaf.path)(self)

        return map_leaves(part, arguments)

    def extra_repr(self) -> str:
        known = self.stage_program
        return f"{known.index} of {known.num_stages}: {', '.join(known.inputs)} -> {', '.join(known.outputs) or 'out'}"


def _seen(watch: Watch, model: nn.Module, stage: Stage) -> tuple[Any, ...]:
    """The value that is watched, and whose attribute it is: of the model's module, and of its folder in the stage."""
    original = model.get_submodule(watch.path)
    found = watch.now(original)
    owners: list[Any] = [weakref.ref(original)]
    name = watch.names[0]
    if name not in vars(original):  # an attribute of the class, which outlives the module
        owners.append(weakref.ref(type(original)))
    try:
        folder = stage.get_submodule(watch.path)
    except AttributeError:
        return found, *owners
    if folder is not stage and folder is not original and name not in vars(folder) and name in vars(original):
        vars(folder)[name] = vars(original)[name]  # where code of the user may change it
        owners.append(weakref.ref(folder))
    return found, *owners


def _adopt(folder: nn.Module, original: nn.Module, wanted: Collection[str], prefix: str = "") -> None:
    """Give `folder` those of `original`'s modules, parameters and buffers whose paths, behind `prefix`, are wanted."""
    for name, parameter in original._parameters.items():
        if prefix + name in wanted:
            folder.register_parameter(name, parameter)
    for name, buffer in original._buffers.items():
        if prefix + name in wanted:
            folder.register_buffer(name, buffer, persistent=name not in original._non_persistent_buffers_set)
    for name, value in vars(original).items():
        if isinstance(value, Tensor) and prefix + name in wanted:
            setattr(folder, name, value)
    paths = {path[len(prefix) :].partition(".")[0] for path in wanted if path.startswith(prefix)}
    for name, module in original._modules.items():
        if module is not None and name in paths:
            if prefix + name in wanted:
                folder.add_module(name, module)
            else:
                inner = nn.Module().train(module.training)
                folder.add_module(name, inner)
                _adopt(inner, module, wanted, f"{prefix}{name}.")


def enter(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """The values as a stage may use them: tensors that want a gradient become results; no data is copied.

    A model may continue with `relu_` right behind a cut, which autograd allows on a result but not on a leaf.
    """
    seen: dict[int, Tensor] = {}

    def part(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.requires_grad:
            return leaf
        if id(leaf) not in seen:
            result = linear(local_part(leaf), Tensor.detach, lambda gradient: gradient)
            seen[id(leaf)] = leaf.like(result) if isinstance(leaf, SpatialTensor) else result
        return seen[id(leaf)]

    return map_leaves(part, values)


def made_up_stage(stage: nn.Module, device: torch.device) -> nn.Module:
    """A copy of a stage in training mode on this device; with made-up values if it has none."""
    values = [*stage.parameters(), *stage.buffers()]
    if not any(value.is_meta for value in values):
        return copied(stage).to(device).train()
    made = copied(stage).to_empty(device=device).train()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.02)
        for buffer in made.buffers():
            buffer.fill_(1)
    return made
