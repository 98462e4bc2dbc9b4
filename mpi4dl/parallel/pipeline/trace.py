"""Reads an unmodified model as a list of atoms, between any two of which it can be cut.

torch.fx runs the model's forward on placeholders and notes what it calls. How deep it looks:

    opened    the model itself; Sequentials, ModuleLists and ModuleDicts with a forward of their own; any module that
              holds two or more blocks in such a container, such as a vision transformer's encoder
    whole     everything else: layers, blocks, cells, heads; and what an opened module turns out not to let through

A module kept whole runs as it is, so its forward may do what it likes. An opened one is replaced by the calls that it
makes. It must make the same ones on every input: it may not ask for values, and not for `isinstance(x, Tensor)`,
because a placeholder is none. It is traced in training and in evaluation mode, and may only differ in the arguments.
"""

import builtins
import inspect
import math
import operator
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from mpi4dl.parallel.pipeline.handover import map_leaves

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
FACTS = frozenset("shape dtype device ndim layout requires_grad is_cuda itemsize".split())
FACT_METHODS = frozenset("size dim ndimension numel nelement stride element_size is_floating_point".split())
ARITHMETIC = frozenset(
    function for place in (operator, math, builtins) for function in vars(place).values() if callable(function)
)
TORCH_FOLDER = Path(torch.__file__).parent


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
    the opened module whose forward makes the call.
    """

    name: str
    kind: str
    target: Any
    training: tuple[Any, Any]
    evaluation: tuple[Any, Any]
    scope: str

    @property
    def reads(self) -> frozenset[str]:
        return frozenset(leaf.name for leaf in references(self.training) if isinstance(leaf, Value))

    @property
    def attributes(self) -> frozenset[str]:
        paths = {leaf.path for leaf in references(self.training) if isinstance(leaf, Attribute)}
        return frozenset(paths | {self.target} if self.kind == "call_module" else paths)


@dataclass(frozen=True)
class Atom:
    """What is never cut: one call, and what picks members and sizes from results around it."""

    name: str
    calls: tuple[Call, ...]


@dataclass(frozen=True)
class Program:
    """A model's forward pass. `output` is its result with a `Value` for each tensor.

    `kept_whole` says why modules that would have been opened were not.
    """

    inputs: tuple[str, ...]
    atoms: tuple[Atom, ...]
    output: Any
    kept_whole: Mapping[str, str] = field(default_factory=dict)


def references(nested: Any) -> set[Value | Attribute]:
    """The values and attributes that arguments, or the output, refer to."""
    found: set[Value | Attribute] = set()
    map_leaves(lambda leaf: found.add(leaf) if isinstance(leaf, Value | Attribute) else None, nested)
    return found


def trace(model: nn.Module, whole: Collection[str] = ()) -> Program:
    """Read the forward pass of `model`, which may lie on the meta device. Inputs with a default value keep it.

    Args:
        model: any module whose own forward torch.fx can trace.
        whole: paths of modules that shall not be opened.

    Raises:
        ValueError: the model itself cannot be traced; the message says why, where, and what to do.
    """
    paths = dict(model.named_modules())
    for path in whole:
        if not path or path not in paths:
            raise ValueError(f"whole={path!r} is not the path of a module in {type(model).__name__}")
    kept = dict.fromkeys(whole, "as asked")
    while True:
        try:
            training, evaluation = (_record(model, kept.keys(), mode) for mode in (True, False))
            return _program(training, evaluation, kept)
        except _Untraceable as failure:
            if not failure.path:
                raise ValueError(
                    f"cannot split {type(model).__name__}: its forward cannot be traced, because {failure.reason}. "
                    "Make the model an nn.Sequential of its parts, or move what stands in the way into a module of "
                    "its own, which is then kept whole"
                ) from failure.__cause__
            kept[failure.path] = failure.reason


class _Untraceable(Exception):
    def __init__(self, path: str, reason: str) -> None:
        super().__init__(reason)
        self.path = path
        self.reason = reason


class _Tracer(fx.Tracer):
    """Opens what shall be opened, and remembers in which opened module each call stands."""

    proxy_buffer_attributes = True

    def __init__(self, whole: Collection[str]) -> None:
        super().__init__()
        self.whole = whole
        self.opened = [""]
        self.scopes: dict[fx.Node, str] = {}
        self.result: Any = None

    def is_leaf_module(self, module: nn.Module, path: str) -> bool:
        return path in self.whole or not _opens(module)

    def call_module(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        path = self.path_of_module(module)
        if self.is_leaf_module(module, path):
            return super().call_module(module, forward, args, kwargs)
        self.opened.append(path)
        try:
            return super().call_module(module, forward, args, kwargs)
        except _Untraceable:
            raise
        except Exception as error:
            raise _Untraceable(path, _reason(error)) from error
        finally:
            self.opened.pop()

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        self.scopes[node] = self.opened[-1]
        return node

    def create_arg(self, value: Any) -> Any:
        if isinstance(value, Tensor) and not self._is_registered(value):
            raise ValueError(
                f"it makes a tensor of shape {tuple(value.shape)} that does not depend on its input, which would be "
                "the same one forever (register it as a buffer)"
            )
        return super().create_arg(value)

    def _is_registered(self, tensor: Tensor) -> bool:
        registered = tensor in self.tensor_attrs or any(tensor is buffer for buffer in self.root.buffers())
        return registered or isinstance(tensor, nn.Parameter)

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., None], list[Any]]:
        inputs = [self.create_proxy("placeholder", name, (), {}) for name in _required_inputs(root_fn)]

        def forward(*args: Any) -> None:
            # fx would turn the containers of the result into containers of its own.
            self.result = root_fn(*args)

        return forward, [self.root, *inputs]


def _opens(module: nn.Module) -> bool:
    if isinstance(module, CONTAINERS):
        return True
    if type(module).__module__.startswith("torch.nn."):
        return False
    containers = (m for m in module.modules() if isinstance(m, CONTAINERS))
    return any(sum(_is_block(child) for child in container.children()) >= 2 for container in containers)


def _is_block(module: nn.Module) -> bool:
    return not isinstance(module, CONTAINERS) and next(module.children(), None) is not None


def _required_inputs(forward: Callable[..., Any]) -> list[str]:
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ValueError(f"it takes {parameter}, so that nobody knows how many inputs there are (name each)")
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty:
            raise ValueError(f"its input {parameter.name} can only be passed by keyword (let it be positional)")
    return [parameter.name for parameter in parameters if parameter.default is parameter.empty]


@dataclass(frozen=True)
class _Record:
    nodes: list[fx.Node]
    scopes: dict[fx.Node, str]
    result: Any


def _record(model: nn.Module, whole: Collection[str], training: bool) -> _Record:
    """Trace the model in one mode, and leave it in the mode in which it was."""
    modes = {module: module.training for module in model.modules()}
    tracer = _Tracer(whole)
    try:
        for module in modes:
            module.training = training
        graph = tracer.trace(model)
    except _Untraceable:
        raise
    except Exception as error:
        raise _Untraceable("", _reason(error)) from error
    finally:
        for module, mode in modes.items():
            module.training = mode
    return _Record([node for node in graph.nodes if node.op != "output"], tracer.scopes, tracer.result)


def _reason(error: Exception) -> str:
    """What went wrong, and on which line of the model."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if TORCH_FOLDER not in Path(f.filename).parents and f.filename != __file__]
    where = f" (line {own[-1].lineno} of {Path(own[-1].filename).name}: `{own[-1].line}`)" if own else ""
    return f"{str(error) or type(error).__name__}{where}"


def _program(training: _Record, evaluation: _Record, kept: Mapping[str, str]) -> Program:
    """Group the calls to atoms, once it is clear that both modes make the same ones."""
    names = _names(training)
    other_names = _names(evaluation)
    calls: list[Call] = []
    starts: list[int] = []  # where atoms start, as numbers of calls
    facts: set[fx.Node] = set()
    for i in range(max(len(training.nodes), len(evaluation.nodes))):
        pair = [record.nodes[i] if i < len(record.nodes) else None for record in (training, evaluation)]
        here, there = pair
        if here is None or there is None or _kind_of(here, names) != _kind_of(there, other_names):
            raise _other_path(pair, (training, names), (evaluation, other_names))
        if here.op in ("placeholder", "get_attr"):
            continue
        assert isinstance(here.op, str)
        mine = _arguments((here.args, here.kwargs), names)
        other = _arguments((there.args, there.kwargs), other_names)
        call = Call(names[here], here.op, here.target, mine, mine if mine == other else other, training.scopes[here])
        if references(mine) != references(other):
            raise _other_path(pair, (training, names), (evaluation, other_names))
        if _is_fact(here, facts):
            facts.add(here)
        elif not _only_picks(here):
            starts.append(len(calls))
        calls.append(call)
    output, other_output = _arguments(training.result, names), _arguments(evaluation.result, other_names)
    if output != other_output:
        raise _Untraceable("", f"it returns {output} in training and {other_output} in evaluation")
    if not starts:
        raise _Untraceable("", "it calls no module and computes nothing")
    bounds = [0, *starts[1:], len(calls)]
    atoms = tuple(
        Atom(calls[start].name, tuple(calls[low:high]))
        for start, low, high in zip(starts, bounds[:-1], bounds[1:], strict=True)
    )
    inputs = tuple(names[node] for node in training.nodes if node.op == "placeholder")
    return Program(inputs, atoms, output, dict(kept))


def _names(record: _Record) -> dict[fx.Node, str]:
    """What each value is called: as the module that makes it, or as fx calls it inside the opened module."""
    names: dict[fx.Node, str] = {}
    uses: Counter[str] = Counter()
    for node in record.nodes:
        scope = record.scopes[node]
        name = str(node.target) if node.op == "call_module" else f"{scope}.{node.name}" if scope else node.name
        uses[name] += 1
        names[node] = name if uses[name] == 1 else f"{name}:{uses[name]}"
    return names


def _kind_of(node: fx.Node, names: Mapping[fx.Node, str]) -> tuple[str, Any, str]:
    return node.op, node.target, names[node]


def _other_path(pair: Iterable[fx.Node | None], *records: tuple[_Record, Mapping[fx.Node, str]]) -> _Untraceable:
    found = [
        ("nothing", "") if node is None else (names[node], record.scopes[node])
        for node, (record, names) in zip(pair, records, strict=True)
    ]
    (in_training, _), (in_evaluation, _) = found
    # The inner module first: if it was not the culprit, its caller's calls will differ once it is whole.
    return _Untraceable(
        max((scope for _, scope in found), key=len),
        f"it makes other calls in training than in evaluation (first {in_training} in training, {in_evaluation} in "
        "evaluation)",
    )


def _arguments(nested: Any, names: Mapping[fx.Node, str]) -> Any:
    """The arguments of a node, or the result of the model, with Values and Attributes instead of nodes and proxies."""

    def part(leaf: Any) -> Any:
        if isinstance(leaf, fx.Proxy):
            leaf = leaf.node
        if isinstance(leaf, fx.Node):
            return Attribute(str(leaf.target)) if leaf.op == "get_attr" else Value(names[leaf])
        # What fx makes of lists and dicts cannot be changed, which a module may want to.
        if isinstance(leaf, list | dict):
            return map_leaves(part, list(leaf) if isinstance(leaf, list) else dict(leaf))
        return leaf

    return map_leaves(part, nested)


def _is_fact(node: fx.Node, facts: set[fx.Node]) -> bool:
    """Whether the node's value is a size, a type, or a number computed from such."""
    if node.op == "call_method":
        return node.target in FACT_METHODS
    if node.op != "call_function":
        return False
    if node.target is getattr:
        return node.args[1] in FACTS
    return node.target in ARITHMETIC and bool(node.all_input_nodes) and facts.issuperset(node.all_input_nodes)


def _only_picks(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in (operator.getitem, getattr, torch._assert)
