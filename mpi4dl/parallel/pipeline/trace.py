"""Reads an unmodified model as a list of units, between any two of which it can be cut.

torch.fx runs the model's forward on placeholders and notes what it calls. How deep it looks:

    opened    the model itself; Sequentials, ModuleLists and ModuleDicts with a forward of their own; any module that
              holds two or more blocks in such a container, such as a vision transformer's encoder
    whole     everything else: layers, blocks, cells, heads; and what an opened module turns out not to let through:
              a function that its forward calls, such as one that makes a mask, or else the module

A module that is kept whole runs as it is, without restrictions. An opened module is replaced by the calls that it
makes. It must make the same ones on every input: it may not ask for values, and not for `isinstance(x, Tensor)`,
because a placeholder is none. It may not decide by random numbers, nor write attributes or globals (see `decisions`).
The model itself may ask for sizes (see `facts`). It is traced in training and in evaluation mode. An opened module may
only differ in the arguments; the model itself may also make other calls and return something else, as those with
auxiliary heads do:

    training      conv1 ... inception4a   aux1   inception4b ... fc     -> GoogLeNetOutputs(fc, aux2, aux1)
    evaluation    conv1 ... inception4a          inception4b ... fc     -> fc
"""

import inspect
import operator
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import partial
from itertools import product, zip_longest
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType, TracebackType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx, nn
from torch.fx.proxy import base_types
from torch.utils import checkpoint as checkpoints

from mpi4dl._randomness import forked
from mpi4dl.parallel.pipeline.decisions import (
    HIDDEN,
    QUANTILES,
    Draws,
    ForwardState,
    Reads,
    Watch,
    globals_read,
    opened_paths,
)
from mpi4dl.parallel.pipeline.program import (
    Attribute,
    Call,
    Context,
    Opaque,
    Program,
    Question,
    Unit,
    Value,
    answer,
    expect,
    is_fact,
    leaves,
    map_leaves,
    only_picks,
    references,
)

# Functions that a model's forward calls and torch.fx cannot look through: they stay whole, as layers do.
#
# def forward(self, tokens):
#     x = self.embed(tokens)
#     mask = causal_mask(x)       # asks how large x is, and what it does follows from that: one call, made as it is
#     for block in self.blocks: ...

NESTS = (tuple, list, dict, set, frozenset, slice, range)
INPLACE = [getattr(operator, f"i{name}") for name in "add sub mul truediv floordiv mod pow and or xor".split()]


@dataclass(frozen=True)
class Global:
    """A function by the module of Python that calls it, whose names are in `place`, and its name there."""

    module: str
    name: str
    function: Callable[..., Any] = field(compare=False)
    place: dict[str, Any] = field(compare=False, repr=False)


def culprit(error: BaseException, module: nn.Module) -> Global | None:
    """The function that the forward of `module`, or a method of it, was in when it failed; None if it failed by itself.

    It is found by a name of the caller's module, or of a module there: `rearrange`, or `einops.rearrange`.
    """
    forward = inspect.unwrap(type(module).forward)
    if not isinstance(forward, FunctionType):
        return None
    frames = list(_frames(error.__traceback__))
    codes = [frame.f_code for frame in frames]
    if forward.__code__ not in codes:
        return None
    first = len(codes) - 1 - codes[::-1].index(forward.__code__)
    for number, frame in enumerate(frames[first:], start=first):
        if frame.f_locals.get("self") is not module:
            break
        names = frame.f_code.co_names
        modules = [found for name in names if isinstance(found := frame.f_globals.get(name), ModuleType)]
        for place in (frame.f_globals, *map(vars, modules)):
            own = [(name, found) for name in names if isinstance(found := place.get(name), FunctionType)]
            for code, (name, function) in product(codes[number + 1 :], own):
                if code in _layers(function) and function is not checkpoints.checkpoint:  # the tracer sees it
                    return Global(str(place.get("__name__")), name, function, place)
    return None


def _frames(trace: TracebackType | None) -> Iterator[FrameType]:
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def _layers(function: Callable[..., Any]) -> Iterator[CodeType]:
    """The code of a function, and of those that it decorates."""
    seen: Callable[..., Any] | None = function
    while seen is not None:
        if isinstance(seen, FunctionType):
            yield seen.__code__
        seen = getattr(seen, "__wrapped__", None)


@contextmanager
def kept_whole(functions: Collection[Global], note: Callable[..., Any]) -> Iterator[None]:
    """Within this context, a call of these functions is `note(function, args, kwargs)`."""

    def instead(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: note(function, args, kwargs)

    with ExitStack() as stack:
        for each in functions:
            stack.enter_context(patch.dict(each.place, {each.name: instead(each.function)}))
        yield


def is_opaque(value: Any) -> bool:
    """Whether this is some object that a function is given, such as a configuration, in which fx need not look.

    One that has layers or tensors is none: whose they are must be known.
    """
    if isinstance(value, (*NESTS, *base_types, fx.Node, fx.Proxy, nn.Module)) or callable(value):
        return False
    return not any(isinstance(each, nn.Module | Tensor) for each in getattr(value, "__dict__", {}).values())


def reason_of(error: Exception) -> str:
    """The error, and its line of the model."""
    return f"{str(error) or type(error).__name__}{line_of(traceback.extract_tb(error.__traceback__))}"


def line_of(frames: Sequence[traceback.FrameSummary]) -> str:
    """The last line of a model's own among these, in words."""
    own = [frame for frame in frames if not set(HIDDEN) & set(Path(frame.filename).parents)]
    return f" (line {own[-1].lineno} of {Path(own[-1].filename).name}: `{own[-1].line}`)" if own else ""


# What torch.utils.checkpoint calls unless it is reentrant: the first since PyTorch 2.15, the other before.
RECOMPUTE = next(
    name
    for name in ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")
    if hasattr(checkpoints, name)
)
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
Shape = tuple[int, ...] | None
Opens = Callable[[nn.Module], bool]  # whether a module is opened
DECIDES = (
    "which would be the same ones forever (put the code that draws into a module of its own, which is kept whole and "
    "draws each time)"
)


def trace(model: nn.Module, whole: Collection[str] = (), image: Shape = None, within_blocks: bool = False) -> Program:
    """Read the forward pass of `model`, which may lie on the meta device. Inputs keep their defaults, see `_inputs`.

    Args:
        model: any module whose own forward torch.fx can trace.
        whole: paths of modules that shall not be opened.
        image: the shape of a batch, such as (N, C, H, W), for which questions about sizes are answered if the model is
            on the meta device; None: a model may not ask any.
        within_blocks: also open blocks, down to layers of PyTorch's.

    Raises:
        ValueError: the model itself cannot be traced; the message says why, where, and what to do.
    """
    paths = dict(model.named_modules())
    for path in whole:
        if not path or path not in paths:
            raise ValueError(f"whole={path!r} is not the path of a module in {type(model).__name__}")
    if model._forward_hooks or model._forward_pre_hooks or "forward" in vars(model):
        raise ValueError(
            f"cannot split {type(model).__name__}: it has forward hooks, or a forward that is no method of its class, "
            "which no stage would call. Register hooks on modules in it, or override the method in a subclass"
        )
    kept = dict.fromkeys(whole, "as asked")
    functions: dict[Global, str] = {}
    reading = _Reading(model, functions, image, _is_composite if within_blocks else _opens)
    while True:
        try:
            with forked():
                return _program(model, kept, functions, reading)
        except _Untraceable as failure:
            if failure.function is not None and failure.function not in functions:
                functions[failure.function] = failure.reason
                continue
            if not failure.path:
                raise ValueError(
                    f"cannot split {type(model).__name__}: its forward cannot be traced, because {failure.reason}. "
                    "Make the model an nn.Sequential of its parts, or move what stands in the way into a module of "
                    "its own, which is then kept whole"
                ) from failure.__cause__
            kept[failure.path] = failure.reason


class _Untraceable(Exception):
    def __init__(self, path: str, reason: str, function: Global | None = None) -> None:
        super().__init__(reason)
        self.path, self.reason, self.function = path, reason, function


class _Proxy(fx.Proxy):
    """Is changed by `x += 1`, as a tensor is; fx would make another value, and leave x and what is an alias of it."""


def _in_place(function: Callable[..., Any]) -> Callable[[fx.Proxy, Any], fx.Proxy]:
    return lambda proxy, other: proxy.tracer.create_proxy("call_function", function, (proxy, other), {})


for _function in INPLACE:
    setattr(_Proxy, f"__{_function.__name__}__", _in_place(_function))


class _Tracer(fx.Tracer):
    """Opens what shall be opened, and remembers in which opened module each call stands, and in which contexts."""

    proxy_buffer_attributes = True

    def __init__(self, whole: Collection[str], opens: Opens, answers: Sequence[bool], draws: Draws) -> None:
        super().__init__()
        self.whole, self.opens = whole, opens
        self.answers = iter(answers)
        self.draws = draws
        self.opened = [""]
        self.scopes: dict[fx.Node, str] = {}
        self.contexts: dict[fx.Node, Context] = {}
        self.within: list[Context] = []  # of autocast and of checkpoints
        self.result: Any = None

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def running(self) -> str:
        """The path of the opened module whose forward runs."""
        return self.opened[-1]

    def is_leaf_module(self, module: nn.Module, path: str) -> bool:
        recomputes = any(kind == "recompute" for kind, *_ in self.within)
        return path in self.whole or recomputes or not self.opens(module)

    def call_module(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        path = self.path_of_module(module)
        if self.is_leaf_module(module, path):
            return super().call_module(module, forward, args, kwargs)
        self.draws.mark(self.opened[-1])
        self.opened.append(path)
        try:
            found = super().call_module(module, forward, args, kwargs)
            self.draws.mark(path)
            return found
        except (_Untraceable, MemoryError):
            raise
        except Exception as error:
            raise _Untraceable(path, reason_of(error), culprit(error, module)) from error
        finally:
            self.opened.pop()

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        self.scopes[node] = self.opened[-1]
        self.contexts[node] = (*(() if torch.is_grad_enabled() else (("grad", False),)), *self.within)
        return node

    @contextmanager
    def noting_contexts(self) -> Iterator[None]:
        """Within this context `torch.no_grad()`, `torch.autocast()` and `torch.utils.checkpoint` are seen when a
        forward enters them; and functions of the user's own, by `torch.autograd.Function` and `torch.jit.script`, when
        it calls them.
        """
        kind = torch.amp.autocast_mode.autocast
        enter, leave = kind.__enter__, kind.__exit__
        script = torch.jit.ScriptFunction.__call__
        apply, recompute = vars(torch.autograd.Function)["apply"], getattr(checkpoints, RECOMPUTE)

        def noted_enter(context: Any) -> Any:
            self.within.append(("autocast", context.device, context.fast_dtype, context._enabled))
            return enter(context)

        def noted_leave(context: Any, *error: Any) -> Any:
            self.within.pop()
            return leave(context, *error)

        def noted_apply(function: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
            if not _has_proxies((args, kwargs)):
                return apply.__get__(None, function)(*args, **kwargs)
            if function is checkpoints.CheckpointFunction:
                self._require_module(args[0])
            return self.create_proxy(
                "call_function", Opaque(apply.__get__(None, function), function.__name__), args, kwargs
            )

        def noted_script(function: Any, *args: Any, **kwargs: Any) -> Any:
            if not _has_proxies((args, kwargs)):
                return script(function, *args, **kwargs)
            return self.create_proxy("call_function", Opaque(function, function.name), args, kwargs)

        def noted_recompute(function: Any, *given: Any, **options: Any) -> Iterator[None]:
            if not _has_proxies((given, options)):
                yield from recompute(function, *given, **options)
                return
            self._require_module(function)
            preserve = options["preserve_rng_state"] if RECOMPUTE.endswith("_impl") else given[0]
            self.within.append(("recompute", preserve))
            yield
            self.within.pop()

        with (
            torch.enable_grad(),
            patch.object(kind, "__enter__", noted_enter),
            patch.object(kind, "__exit__", noted_leave),
            patch.object(torch.autograd.Function, "apply", classmethod(noted_apply)),
            patch.object(torch.jit.ScriptFunction, "__call__", noted_script),
            patch.object(checkpoints, RECOMPUTE, noted_recompute),
        ):
            yield

    def _require_module(self, function: Any) -> None:
        if not isinstance(function, nn.Module):
            raise ValueError(
                "it gives torch.utils.checkpoint a function, of which only the calls within would be left (pass it a "
                "module, or put the call of checkpoint into a module of its own)"
            )

    def create_arg(self, value: Any) -> Any:
        if isinstance(value, Tensor) and not self._is_registered(value):
            raise ValueError(
                f"it makes a tensor of shape {tuple(value.shape)} that does not depend on its input, which would be "
                "the same one forever (register it as a buffer)"
            )
        if isinstance(value, torch.Generator):
            raise ValueError(
                "it draws from a torch.Generator, which stages would copy as it was when the model was cut (put the "
                "code that draws into a module of its own)"
            )
        if isinstance(value, fx.Proxy):
            self._own(value)
        return value if is_opaque(value) else super().create_arg(value)

    def _own(self, value: fx.Proxy) -> fx.Proxy:
        """The value, which must be one of this trace. The model cannot run once it keeps one of another trace."""
        if value.tracer is not self:
            raise _Untraceable(
                "",
                "it uses a tensor that an earlier call kept where tracing cannot take it back, such as in a default "
                f"argument{line_of(traceback.extract_stack())} (keep it in an attribute of its module)",
            )
        return value

    def to_bool(self, asked: fx.Proxy) -> bool:
        if self.opened[-1]:  # kept whole, the module asks again each time
            return super().to_bool(asked)
        for known in self.answers:
            where = line_of(traceback.extract_stack())
            self.create_proxy("call_function", expect, (asked, known, where), {})
            return known
        raise Question(asked.node)

    def note(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A call of a function that is kept whole, if it has anything to do with the input."""
        if not _has_proxies((args, kwargs)):
            return function(*args, **kwargs)
        return self.create_proxy("call_function", function, args, kwargs)

    def _is_registered(self, tensor: Tensor) -> bool:
        registered = tensor in self.tensor_attrs or any(tensor is buffer for buffer in self.root.buffers())
        return registered or isinstance(tensor, nn.Parameter)

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., None], list[Any]]:
        inputs = [self.create_proxy("placeholder", name, (), {}) for name in _inputs(root_fn)]

        def forward(*args: Any) -> None:
            # fx would turn the containers of the result into containers of its own.
            self.result = root_fn(*args)
            # Attributes of a value are recorded when they are read, which is now.
            map_leaves(lambda leaf: self._own(leaf).node if isinstance(leaf, fx.Proxy) else None, self.result)

        return forward, [self.root, *inputs]


def _has_proxies(nested: Any) -> bool:
    return any(isinstance(leaf, fx.Proxy) for leaf in leaves(nested))


def _opens(module: nn.Module) -> bool:
    if isinstance(module, CONTAINERS):
        return True
    if type(module).__module__.startswith("torch.nn."):
        return False
    containers = (m for m in module.modules() if isinstance(m, CONTAINERS))
    return any(sum(_is_block(child) for child in container.children()) >= 2 for container in containers)


def _is_composite(module: nn.Module) -> bool:
    """Whether a module is a container, or calls modules and is none of PyTorch's own."""
    own = not type(module).__module__.startswith("torch.nn.")
    return isinstance(module, CONTAINERS) or (own and next(module.children(), None) is not None)


def _is_block(module: nn.Module) -> bool:
    return not isinstance(module, CONTAINERS) and next(module.children(), None) is not None


def _inputs(forward: Callable[..., Any]) -> list[str]:
    """The inputs of a model: those without a default value, or the first one where all have one."""
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    named: list[inspect.Parameter] = []
    for parameter in parameters:
        if parameter.kind is parameter.VAR_POSITIONAL:
            raise ValueError(f"it takes {parameter}, so that nobody knows how many inputs there are (name each)")
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty:
            raise ValueError(f"its input {parameter.name} can only be passed by keyword (let it be positional)")
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            named.append(parameter)
    required = [parameter.name for parameter in named if parameter.default is parameter.empty]
    return required or [parameter.name for parameter in named[:1]]


@dataclass(frozen=True)
class _Record:
    """The calls of a forward in one mode. `names` say what each value is called."""

    nodes: list[fx.Node]
    scopes: dict[fx.Node, str]
    names: dict[fx.Node, str]
    result: Any
    contexts: dict[fx.Node, Context] = field(default_factory=dict)

    @property
    def everything(self) -> list[Any]:
        """The calls with all their arguments; then the result."""
        calls = [(n.op, n.target, self.names[n], self.arguments(n), self.contexts[n]) for n in self.nodes]
        return [*calls, self.filled(self.result)]

    @property
    def skeleton(self) -> list[Any]:
        """The calls with all that they refer to, but without the numbers among their arguments; then the result."""
        calls = [(self.names[n], self.scopes[n], (n.op, n.target, references(self.arguments(n)))) for n in self.nodes]
        return [*calls, self.filled(self.result)]

    def arguments(self, node: fx.Node) -> Any:
        return self.filled((node.args, node.kwargs))

    def filled(self, nested: Any) -> Any:
        """Arguments, or the result of the model, with Values and Attributes instead of nodes and proxies."""

        def part(leaf: Any) -> Any:
            if isinstance(leaf, fx.Proxy):
                leaf = leaf.node
            if isinstance(leaf, fx.Node):
                return Attribute(str(leaf.target)) if leaf.op == "get_attr" else Value(self.names[leaf])
            # fx makes lists and dicts immutable, but a module may change them.
            if isinstance(leaf, list | dict):
                return map_leaves(part, list(leaf) if isinstance(leaf, list) else dict(leaf))
            return leaf

        return map_leaves(part, nested)


# Of the model and of the modules in it: both in training, the former alone, the latter alone, neither.
Forms = tuple[_Record, _Record, _Record, _Record]


class _Reading:
    """Reads the forward of one model in the modes that are asked for."""

    def __init__(
        self,
        model: nn.Module,
        functions: Collection[Global],
        image: Shape,
        opens: Opens,
    ) -> None:
        self.model, self.functions, self.image, self.opens = model, functions, image, opens
        self.reads = Reads()
        modules = dict(model.named_modules(remove_duplicate=False))
        self.globals = [watch for path in self._opened() for watch in globals_read(modules[path], path)]

    def _opened(self, whole: Collection[str] = ()) -> Collection[str]:
        return opened_paths(self.model, lambda module, path: path in whole or not self.opens(module))

    def watches(self, whole: Collection[str]) -> tuple[Watch, ...]:
        """The globals that the code of opened modules reads, and the attributes that were read."""
        opened = self._opened(whole)
        found = {watch.key: watch for watch in self.globals if watch.path in opened}
        return (*found.values(), *self.reads.watches(self.model))

    def record(self, whole: Collection[str], training: bool, inner: bool) -> _Record:
        """Trace the model in one mode, with all modules in it in the mode `inner`; and leave all as it was.

        `rand` returns chosen numbers: the model may draw, such as to leave out layers with a probability of zero, but
        must do the same for all numbers.
        """
        record, draws = self._drawing(whole, training, inner, {})
        for scope in sorted(draws.uniform, key=len, reverse=True):
            for quantile in QUANTILES:
                other, _ = self._drawing(whole, training, inner, {scope: quantile})
                if repr(other.everything) != repr(record.everything):
                    raise _Untraceable(scope, f"it decides by random numbers that it draws in Python, {DECIDES}")
        return record

    def _drawing(
        self, whole: Collection[str], training: bool, inner: bool, drawn: Mapping[str, float]
    ) -> tuple[_Record, Draws]:
        model = self.model
        draws = Draws(lambda scope: drawn.get(scope, 0.5))
        opened = self._opened(whole)
        state = ForwardState(model, [watch for watch in self.globals if watch.path in opened], traced=True)

        def begin() -> None:
            state.restore()
            for module in model.modules():
                module.training = inner
            model.training = training

        try:
            tracer, graph = self._traced(whole, draws, begin)
            written = _written(state, opened)
        except _Untraceable as failure:
            writer = None if failure.function is not None else _written(state, opened)
            if writer is None or not writer.path:
                raise
            raise writer from failure  # which may have misled what failed behind it
        finally:
            state.restore()
        if draws.others:
            raise _Untraceable(
                max(draws.others, key=len), f"it draws random numbers in Python as it is traced, {DECIDES}"
            )
        if written is not None:
            raise written
        nodes = [node for node in graph.nodes if node.op != "output"]
        names = _names(nodes, tracer.scopes)
        return _Record(nodes, tracer.scopes, names, tracer.result, tracer.contexts), draws

    def _traced(self, whole: Collection[str], draws: Draws, begin: Callable[[], None]) -> tuple[_Tracer, fx.Graph]:
        try:
            return self._answered(whole, draws, begin)
        except (_Untraceable, MemoryError):
            raise
        except Exception as error:
            raise _Untraceable("", reason_of(error), culprit(error, self.model)) from error

    def _answered(self, whole: Collection[str], draws: Draws, begin: Callable[[], None]) -> tuple[_Tracer, fx.Graph]:
        """Trace the model as it is, again and again, until all questions are answered that it asks about sizes.

        `begin` takes back what the last trace wrote: the model would continue with placeholders of that one.
        """
        answers: list[bool] = []
        while True:
            begin()
            tracer = _Tracer(whole, self.opens, answers, draws)
            try:
                with ExitStack() as stack:
                    stack.enter_context(kept_whole(self.functions, tracer.note))
                    stack.enter_context(draws.chosen(tracer.running))
                    stack.enter_context(tracer.noting_contexts())
                    stack.enter_context(self.reads.noted())
                    graph = tracer.trace(self.model)
                    draws.mark("")
                    return tracer, graph
            except Question as error:
                if self.image is None or culprit(error, self.model) is not None:
                    raise
                found = answer(error.node, self.model, self.image)
                if found is None:
                    raise
                answers.append(found)
                draws.mark("")


def _written(state: ForwardState, opened: Collection[str]) -> _Untraceable | None:
    """What to raise if a module has an attribute that was written, or reads a global that was, at its opened module."""

    def at(path: str, reason: str) -> _Untraceable:
        while path not in opened:
            path = path.rpartition(".")[0]
        return _Untraceable(path, reason)

    for watch in state.globals_written():
        return at(watch.path, f"it changes {watch.words} as it runs, which no stage would do")
    for path, name, value in state.written():
        where = f"{path}.{name}" if path else name
        if not (isinstance(value, fx.Proxy) and _is_in_place(value.node, where)):
            advice = "add to a buffer in place" if isinstance(value, fx.Proxy | Tensor) else "count in a buffer"
            return at(
                path,
                f"it changes the attribute {where} as it runs, which no stage would do ({advice}, or move what "
                "does so into a module of its own, which is kept whole)",
            )
    return None


def _is_in_place(node: fx.Node, path: str) -> bool:
    """Whether the value of a node is the buffer of this path, changed in place."""
    while (node.op == "call_function" and node.target in INPLACE) or (
        node.op == "call_method" and str(node.target).endswith("_")
    ):
        first = node.args[0]
        if not isinstance(first, fx.Node):
            return False
        node = first
    return node.op == "get_attr" and str(node.target) == path


def _program(model: nn.Module, kept: Mapping[str, str], functions: Mapping[Global, str], reading: _Reading) -> Program:
    """Read the forward in both modes, and group its calls to units."""
    record = partial(reading.record, kept)
    training, evaluation = (record(mode, mode) for mode in (True, False))
    mixed = (evaluation, training)
    if training.skeleton != evaluation.skeleton:
        # Parts of a model may be frozen by `eval()`: which calls are made may depend on its own mode alone.
        mixed = (record(True, False), record(False, True))
        for pair in ((training, mixed[0]), (mixed[1], evaluation)):
            if pair[0].skeleton != pair[1].skeleton:
                raise _other_path(*pair)
    forms = (training, *mixed, evaluation)
    calls: list[Call] = []
    starts: list[int] = []  # where units start, as numbers of calls
    facts: set[fx.Node] = set()
    for i, j in _aligned(forms):
        nodes = [record.nodes[k] for record, k in ((training, i), (evaluation, j)) if k is not None]
        if nodes[0].op in ("placeholder", "get_attr"):
            continue
        if is_fact(nodes[0], facts):
            facts.update(nodes)
        elif not only_picks(nodes[0]):
            starts.append(len(calls))
        calls.append(_call(forms, i, j))
    if not starts:
        raise _Untraceable("", "it calls no module and computes nothing")
    bounds = [0, *starts[1:], len(calls)]
    units = tuple(
        Unit(calls[start].name, tuple(calls[low:high]))
        for start, low, high in zip(starts, bounds[:-1], bounds[1:], strict=True)
    )
    inputs = tuple(training.names[node] for node in training.nodes if node.op == "placeholder")
    results = (training.filled(training.result), evaluation.filled(evaluation.result))
    named = {f"{each.module}.{each.name}": reason for each, reason in functions.items()}
    return Program(inputs, units, results, {**kept, **named}, reading.watches(kept))


def _aligned(forms: Forms) -> list[tuple[int | None, int | None]]:
    """Which of the nodes in training and in evaluation are the same call; None for what one mode alone makes.

    The same call then has one name: fx numbers functions, and functions behind an auxiliary head have other numbers.
    """
    training, _, frozen, evaluation = forms
    found: list[tuple[int | None, int | None]] = []
    taken = set(training.names.values())
    done, other_done = 0, 0
    # Modules first, since a function is easily taken for another one.
    ends = (len(training.nodes), len(evaluation.nodes))
    for anchor in [*_matched(training, evaluation, range(ends[0]), range(ends[1]), modules=True), ends]:
        gap, other_gap = range(done, anchor[0]), range(other_done, anchor[1])
        for i, j in [*_matched(training, evaluation, gap, other_gap), anchor]:
            found += [(k, None) for k in range(done, i)] + [(None, k) for k in range(other_done, j)]
            found += [(i, j)] if i < ends[0] else []
            done, other_done = i + 1, j + 1
    for mine, other in found:
        if other is None:
            continue
        name = evaluation.names[evaluation.nodes[other]]
        if mine is not None:
            name = training.names[training.nodes[mine]]
        elif name in taken:
            name = f"{name} in evaluation"
        for record in (frozen, evaluation):
            record.names[record.nodes[other]] = name
    return found


def _matched(
    training: _Record, evaluation: _Record, some: range, others: range, modules: bool = False
) -> list[tuple[int, int]]:
    """Pairs of nodes that call the same, in order: of modules, or of any."""
    chosen = [
        [k for k in places if not modules or record.nodes[k].op == "call_module"]
        for record, places in ((training, some), (evaluation, others))
    ]
    kinds, other_kinds = (
        [(record.nodes[k].op, record.nodes[k].target) for k in places]
        for record, places in zip((training, evaluation), chosen, strict=True)
    )
    blocks = SequenceMatcher(None, kinds, other_kinds, autojunk=False).get_matching_blocks()
    return [(chosen[0][b.a + k], chosen[1][b.b + k]) for b in blocks for k in range(b.size)]


def _call(forms: Forms, i: int | None, j: int | None) -> Call:
    """The call that is number `i` in training and `j` in evaluation."""
    modes = [(record, k) for record, k in zip(forms, (i, i, j, j), strict=True) if k is not None]
    args = [record.arguments(record.nodes[k]) for record, k in modes]
    scopes = {record.scopes[record.nodes[k]] for record, k in modes}
    record, k = modes[0]
    node, scope = record.nodes[k], record.scopes[record.nodes[k]]
    if len(args) == 2:  # made in one mode of the model
        if not scope:
            args = [args[0]] * 2 if i is not None else [args[1]] * 2
    elif len(scopes) == 1 and (not scope or (args[0] == args[2] and args[1] == args[3])):
        args = [args[0], args[3]]
    elif args[0] == args[1] and args[2] == args[3]:
        args, scope = [args[0], args[3]], ""
    else:
        raise _Untraceable(
            max(scopes, key=len), f"the modes of several modules decide what {record.names[node]} is given"
        )
    mine, other = args
    made = (i is not None, j is not None)
    within = [each.contexts[each.nodes[k]] for each, k in modes]
    contexts = (within[0], within[-1])
    if contexts[0] != contexts[1] and mine == other:  # the runner must know whose mode it is
        other = map_leaves(lambda leaf: leaf, other)
        return Call(record.names[node], node.op, node.target, mine, other, scope, made, contexts)
    other = mine if mine == other else other
    return Call(record.names[node], node.op, node.target, mine, other, scope, made, contexts)


def _names(nodes: list[fx.Node], scopes: Mapping[fx.Node, str]) -> dict[fx.Node, str]:
    """The name of each value: the module that makes it, or its name by fx inside the opened module."""
    names: dict[fx.Node, str] = {}
    uses: Counter[str] = Counter()
    for node in nodes:
        scope = scopes[node]
        name = str(node.target) if node.op == "call_module" else f"{scope}.{node.name}" if scope else node.name
        uses[name] += 1
        names[node] = name if uses[name] == 1 else f"{name}:{uses[name]}"
    return names


def _other_path(training: _Record, evaluation: _Record) -> _Untraceable:
    """The error about two records that differ, and should not."""
    paired = zip_longest(training.skeleton[:-1], evaluation.skeleton[:-1], fillvalue=("nothing", "", None))
    for (name, scope, call), (other_name, other_scope, other) in paired:
        if (name, call) != (other_name, other):
            # The inner module first: if it was not the culprit, its caller's calls will differ once it is whole.
            return _Untraceable(
                max(scope, other_scope, key=len),
                f"it makes other calls in training than in evaluation (first {name} in training, {other_name} in "
                "evaluation)",
            )
    results = [record.filled(record.result) for record in (training, evaluation)]
    return _Untraceable("", f"it returns {results[0]} in training and {results[1]} in evaluation")
