"""The forward pass of a model, as data: its calls, grouped to units, between any two of which it can be cut."""

import builtins
import copy
import math
import operator
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.proxy import TraceError
from torch.utils import _pytree as pytree

from mpi4dl.parallel.inputs import shape_only
from mpi4dl.parallel.pipeline.decisions import Watch

# Facts of values, which are sizes, types and numbers made of them; and questions about facts that a forward asks.
#
#     h, w = x.shape[-2:]
#     if h % 32 or w % 32:             expect(h % 32, False)    expect(w % 32, False)
#         raise ...
#
# torch.fx does not know the answer. It is found for images of one shape, on the meta device; the program then asks the
# question again of each batch, and goes on only if the answer is the same.

FACTS = frozenset("shape dtype device ndim layout requires_grad is_cuda itemsize".split())
FACT_METHODS = frozenset("size dim ndimension numel nelement stride element_size is_floating_point".split())
ARITHMETIC = frozenset(
    function for place in (operator, math, builtins) for function in vars(place).values() if callable(function)
)


class Question(TraceError):
    """A forward asks whether the value of a node is true."""

    def __init__(self, node: fx.Node) -> None:
        super().__init__("symbolically traced variables cannot be used as inputs to control flow")
        self.node = node


@dataclass(frozen=True)
class Opaque:
    """A function as one call that fx cannot look into, or would see wrongly: the `apply` of a torch.autograd.Function,
    of which it would see the forward pass alone, or a script.
    """

    function: Callable[..., Any]
    name: str

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Opaque":
        return self


class OtherShape(ValueError):
    """A program is given samples of which its model would make other calls."""


def expect(asked: Any, answer: bool, where: str) -> None:
    """Stands in a program where its model asks a question, whose answer decided which calls the program has."""
    if bool(asked) != answer:
        raise OtherShape(
            f"the model does other things with samples of this shape than with those that it was cut into stages for: "
            f"a condition was {answer} there, and is {bool(asked)} here{where}; keep `image_size` and the batch as "
            "they are, or train in one stage"
        )


def answer(asked: fx.Node, model: nn.Module, image: Sequence[int]) -> bool | None:
    """Whether the node's value is true for a batch of this shape; None if that takes more than shapes to know.

    `model`, on the meta device, is the one whose forward was read.
    """
    if any(not tensor.is_meta for tensor in [*model.parameters(), *model.buffers()]):
        return None
    needed = {asked}
    for node in reversed(asked.graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    known: dict[fx.Node, Any] = {}
    inputs = iter([shape_only(model, image)])
    try:
        with torch.no_grad():
            for node in asked.graph.nodes:
                if node in needed:
                    args, kwargs = fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
                    of_input = node.op == "placeholder"
                    known[node] = next(inputs) if of_input else perform(node.op, node.target, model, args, kwargs)
            return bool(known[asked])
    except (RuntimeError, StopIteration, TypeError, ValueError):
        return None


def perform(kind: str, target: Any, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Make a call of a forward: of a module or a tensor in `module` by its path, of a method by its name, or else."""
    if kind == "call_module":
        return module.get_submodule(target)(*args, **kwargs)
    if kind == "call_method":
        return getattr(args[0], target)(*args[1:], **kwargs)
    if kind == "get_attr":
        return attrgetter(target)(module)
    return target(*args, **kwargs)


def is_fact(node: fx.Node, facts: set[fx.Node]) -> bool:
    """Whether the node's value is a size, a type, or a number computed from such."""
    if node.op == "call_method":
        return node.target in FACT_METHODS
    if node.op != "call_function":
        return False
    if node.target is getattr:
        return node.args[1] in FACTS
    return node.target in ARITHMETIC and bool(node.all_input_nodes) and facts.issuperset(node.all_input_nodes)


def only_picks(node: fx.Node) -> bool:
    """Whether the node computes nothing, but looks at what was computed before."""
    return node.op == "call_function" and node.target in (operator.getitem, getattr, torch._assert, expect)


# Values between stages: nested values as a list of tensors and a small header with their nesting.
#
# A live value need not be a tensor: AmoebaNet's cells pass on pairs, DenseNet's layers lists, FCN the size of its
# image. Numbers and sizes travel in the header, as they are. To work them out again in a later stage would mean to send
# it the whole tensor whose size is asked for, which is what a pipeline on huge images can least afford.

CONSTANTS = (bool, int, float, complex, str, type(None), type(...), torch.Size, torch.dtype, torch.device)


@dataclass(frozen=True)
class Slot:
    """Where a tensor was: its place in the list of tensors."""

    index: int


@dataclass(frozen=True)
class TensorSpec:
    """The description of a tensor for its receiver. `shape` is that of the whole image, on a SpatialTensor too.

    Nothing requires a gradient where none are recorded; PyTorch says so even there of a view of a parameter.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True)
class Header:
    """How values nest, with a `Slot` for each tensor and the numbers between them; picklable, compared by `==`.

    It is the same for every microbatch of the same shapes in the same mode (train or eval, with or without gradients),
    unless the model computes Python numbers from the data (`x.max().item()`).
    """

    template: Any
    tensors: tuple[TensorSpec, ...]


def pack(values: Sequence[Any], names: Sequence[str] = ()) -> tuple[list[Tensor], Header]:
    """Take values apart: each tensor once, however often it occurs, in order of its first occurrence, and the header.

    `names` are what an error calls the values.

    Raises:
        ValueError: a value holds something that is no tensor, number, text, size, or nest of these.
    """
    tensors: dict[int, Tensor] = {}
    slots: dict[int, Slot] = {}
    template = []
    for i, value in enumerate(values):

        def part(leaf: Any, name: str = names[i] if names else f"number {i}") -> Any:
            if isinstance(leaf, Tensor):
                tensors.setdefault(id(leaf), leaf)
                return slots.setdefault(id(leaf), Slot(len(slots)))
            if isinstance(leaf, CONSTANTS):
                return leaf
            raise ValueError(
                f"value {name} holds a {type(leaf).__name__}, which no stage can hand to the next: tensors, numbers, "
                "text, sizes, and tuples, lists and dicts of them can be; cut the model where it is not alive"
            )

        template.append(map_leaves(part, value))
    recorded = torch.is_grad_enabled()
    specs = (TensorSpec(tuple(t.shape), t.dtype, t.requires_grad and recorded) for t in tensors.values())
    return list(tensors.values()), Header(tuple(template), tuple(specs))


def unpack(tensors: Sequence[Tensor], header: Header) -> tuple[Any, ...]:
    """Put together what `pack` took apart. A device in the header becomes that of the tensors received."""
    if len(tensors) != len(header.tensors):
        raise ValueError(f"{len(tensors)} tensors do not fit a header of {len(header.tensors)}")

    def part(leaf: Any) -> Any:
        if isinstance(leaf, Slot):
            return tensors[leaf.index]
        return tensors[0].device if isinstance(leaf, torch.device) and tensors else leaf

    return map_leaves(part, header.template)


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """`value` with the function's result for everything in it that is no tuple, list, dict or slice.

    Nor a nest that its library has made known to PyTorch, such as the outputs of Hugging Face's models, nor a dataclass
    with tensors.
    """
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_leaves(function, item) for item in value))
    if type(value) is tuple:
        return tuple(map_leaves(function, item) for item in value)
    if type(value) is list:
        return [map_leaves(function, item) for item in value]
    if type(value) in (dict, OrderedDict):
        return type(value)((key, map_leaves(function, item)) for key, item in value.items())
    if isinstance(value, slice):
        return slice(*(map_leaves(function, item) for item in (value.start, value.stop, value.step)))
    if type(value) in pytree.SUPPORTED_NODES and type(value).__module__.partition(".")[0] != "torch":
        kind = pytree.SUPPORTED_NODES[type(value)]
        items, context = kind.flatten_fn(value)
        return kind.unflatten_fn([map_leaves(function, item) for item in items], context)
    if is_dataclass(value) and not isinstance(value, (type, Slot, Value, Attribute)) and _has_tensors(value):
        made = copy.copy(value)
        for each in fields(value):
            object.__setattr__(made, each.name, map_leaves(function, getattr(value, each.name)))
        return made
    return function(value)


def _has_tensors(value: Any) -> bool:
    """Whether a dataclass has tensors, or what stands for them, in its fields."""
    return any(isinstance(leaf, TENSORS) for each in fields(value) for leaf in leaves(getattr(value, each.name)))


def leaves(value: Any) -> list[Any]:
    """Everything in a value to which `map_leaves` would apply its function."""
    found: list[Any] = []
    map_leaves(found.append, value)
    return found


LOOKS = FACTS - {"requires_grad", "layout"}  # what can be told of a tensor by its shape, type and device
LOOK_METHODS = FACT_METHODS - {"stride"}
# ("grad", enabled), ("autocast", device, dtype, enabled) and ("recompute", preserve_rng_state), from the outermost on
Context = tuple[Any, ...]


@dataclass(frozen=True)
class Value:
    """Stands in a call's arguments for an input of the model or for the result of an earlier call."""

    name: str


@dataclass(frozen=True)
class Attribute:
    """Stands in a call's arguments for the model's parameter, buffer or module of that path."""

    path: str


@dataclass(frozen=True)
class Call:
    """One call of the forward pass; `training` and `evaluation` are its (args, kwargs) in the two modes.

    `target` is the path of a module, a function, or the name of a method of the first argument. `scope` is the path of
    the opened module whose mode that is: of the one whose forward makes the call, or of the model. `made` is whether
    the model makes the call at all in training, and in evaluation: an auxiliary head is for training alone. `contexts`
    are those in which it is made in the two modes, such as `torch.no_grad()`.
    """

    name: str
    kind: str
    target: Any
    training: tuple[Any, Any]
    evaluation: tuple[Any, Any]
    scope: str
    made: tuple[bool, bool] = (True, True)
    contexts: tuple[Context, Context] = ((), ())

    @property
    def reads(self) -> frozenset[str]:
        found = references((self.training, self.evaluation))
        return frozenset(leaf.name for leaf in found if isinstance(leaf, Value))

    @property
    def attributes(self) -> frozenset[str]:
        """The paths of what it uses of the model; tensors that it only looks at are none."""
        if self.kind == "call_module":
            return self._paths | {self.target}
        return frozenset() if self.looks else self._paths

    @property
    def looks(self) -> frozenset[str]:
        """The paths of tensors of which it asks but the shape, the type or the device."""
        if self.kind == "call_function" and self.target is getattr:
            asks = all(args[1] in LOOKS for args, _ in (self.training, self.evaluation))
        else:
            asks = self.kind == "call_method" and self.target in LOOK_METHODS
        return self._paths if asks else frozenset()

    @property
    def _paths(self) -> frozenset[str]:
        found = references((self.training, self.evaluation))
        return frozenset(leaf.path for leaf in found if isinstance(leaf, Attribute))


@dataclass(frozen=True)
class Unit:
    """A unit that is never cut: one call, and calls around it that pick members and sizes from results."""

    name: str
    calls: tuple[Call, ...]


@dataclass(frozen=True)
class Program:
    """A model's forward pass. `output` are its results in training and in evaluation, with a `Value` for each tensor.

    `kept_whole` says why modules that would have been opened were not. `watched` are values of Python that the forward
    read as it was traced: the program is right as long as they are as they were.
    """

    inputs: tuple[str, ...]
    units: tuple[Unit, ...]
    output: tuple[Any, Any]
    kept_whole: Mapping[str, str] = field(default_factory=dict)
    watched: tuple[Watch, ...] = ()


TENSORS = (Tensor, fx.Proxy, fx.Node, Slot, Value, Attribute)  # and what stands for tensors


def references(nested: Any) -> set[Value | Attribute]:
    """The values and attributes that arguments, or the output, refer to."""
    return {leaf for leaf in leaves(nested) if isinstance(leaf, Value | Attribute)}
