"""Decisions of a forward in Python that a trace would freeze: random draws, counters, attributes, globals.

    drawn     torch.rand(1).item() < p, random.random(), np.random.rand()
    written   self.calls += 1, self.seen.append(x), a global counter
    read      self.temperature, a module's global: watched, and refused once they change (`Watch`)

A module that draws or writes is kept whole, so that its own Python runs; a model whose own forward does so is refused.
"""

import dis
import itertools
import random
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, fx, nn

from mpi4dl._randomness import RandomStates, forked

INTERNAL = frozenset(dir(nn.Module()))
HIDDEN = (Path(torch.__file__).parent, Path(np.__file__).parent, Path(__file__).parent)
STANDARD = Path(dis.__file__).parent  # Python's own library
LIBRARIES = "site-packages"
CONTAINERS = (list, dict, tuple, set, frozenset, deque, np.ndarray)
ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
DEPTH, LONGEST = 4, 10_000
QUANTILES = (0.0, 0.25, 0.75, 1 - 2.0**-24)  # draws of `rand` at which a decision by a threshold shows


def fingerprint(value: Any, depth: int = DEPTH) -> Any:
    """Something that is equal as long as a value of Python is: by contents where it is data, by identity otherwise."""
    kind = type(value).__name__
    if isinstance(value, (*PLAIN, np.generic, itertools.count)):
        return kind, repr(value)
    if isinstance(value, Tensor):
        with torch._C.DisableTorchFunctionSubclass():  # tensors spread over ranks answer these as plain ones do
            return kind, id(value), 0 if value.is_inference() else value._version
    if isinstance(value, nn.Module | ModuleType | type | FunctionType | MethodType | fx.Proxy):
        return kind, id(value)
    if isinstance(value, random.Random):
        return kind, hash(value.getstate())
    if isinstance(value, torch.Generator):
        return kind, hash(value.get_state().numpy().tobytes())
    if isinstance(value, np.random.Generator):
        return kind, repr(value.bit_generator.state)
    if isinstance(value, np.ndarray):
        return kind, value.shape, hash(value.tobytes()) if value.size <= LONGEST else id(value)
    if depth == 0:
        return kind, id(value)
    if isinstance(value, Mapping):
        return kind, tuple((repr(key), fingerprint(item, depth - 1)) for key, item in list(value.items())[:LONGEST])
    if isinstance(value, set | frozenset):
        return kind, frozenset(fingerprint(item, depth - 1) for item in value)
    if isinstance(value, list | tuple | deque):
        return kind, len(value), tuple(fingerprint(item, depth - 1) for item in itertools.islice(value, LONGEST))
    inner = getattr(value, "__dict__", None)
    return (kind, id(value)) if inner is None else (kind, id(value), fingerprint(inner, depth - 1))


def _find_changeable(value: Any, found: dict[int, Any], depth: int = DEPTH) -> None:
    """Find, by their ids, the containers in a value and the attributes of its objects, as deep as `fingerprint` does.

    Whatever adds to them, or replaces what they hold, changes the value in place.
    """
    if depth == 0 or isinstance(value, (*PLAIN, type)) or not is_data(value):
        return
    within = (
        value if isinstance(value, list | dict | tuple | set | frozenset | deque) else getattr(value, "__dict__", ())
    )
    if id(within) in found:
        return
    if isinstance(within, list | dict | set | deque):
        found[id(within)] = within
    for item in itertools.islice(within.values() if isinstance(within, dict) else within, LONGEST):
        _find_changeable(item, found, depth - 1)


def is_data(value: Any) -> bool:
    """Whether a forward could decide by this value: no function, layer, class, module of Python, or tensors alone."""
    kinds = (Tensor, nn.Module, ModuleType, type, weakref.ref, fx.Proxy)
    if isinstance(value, tuple) and value:
        return any(map(is_data, value))
    return not (isinstance(value, kinds) or callable(value))


@dataclass(frozen=True)
class Watch:
    """A value that a forward reads: an attribute of the module at `path`, or what `names` lead to in a namespace."""

    words: str
    path: str
    names: tuple[str, ...]
    place: Any = field(compare=False, repr=False, default=None)
    found: Any = field(compare=False, repr=False, default=None)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Watch":
        """Copies of a stage watch the same place."""
        return self

    def now(self, place: Any = None) -> Any:
        """The fingerprint of the value as it is now; None if it is gone."""
        try:
            return fingerprint(self._at(self.names, self.place if place is None else place))
        except (AttributeError, KeyError, ValueError):
            return None

    def keep(self) -> Callable[[], None]:
        """A function that restores the present value."""
        value, holder = self._at(self.names, self.place), self._at(self.names[:-1], self.place)
        contents = value.copy() if isinstance(value, list | dict | set | deque) else None

        def restore() -> None:
            if isinstance(holder, dict):
                holder[self.names[-1]] = value
            else:
                setattr(holder, self.names[-1], value)
            if contents is not None:
                refill(value, contents)

        return restore

    @staticmethod
    def _at(names: Sequence[str], value: Any) -> Any:
        for name in names:
            value = value[name] if isinstance(value, dict) else getattr(value, name)
        return value


def refill(value: Any, contents: Any) -> None:
    """Give a list, dict, set or deque these contents."""
    value.clear()
    value.extend(contents) if isinstance(value, list | deque) else value.update(contents)


def changed(watch: Watch) -> str:
    """The message about a value that changed since the model was cut."""
    return (
        f"{watch.words} has changed since the model was cut into stages, which read it once and keep what followed: "
        "put the code that reads it into a module of its own and name that module in `whole`, or train in one stage"
    )


class Reads:
    """Which attributes of modules are read within `noted()`, by the id of the module."""

    def __init__(self) -> None:
        self.names: dict[int, dict[str, None]] = {}

    @contextmanager
    def noted(self) -> Iterator[None]:
        found = self.names

        def read(module: nn.Module, name: str) -> Any:
            value = object.__getattribute__(module, name)
            if name not in INTERNAL and name[:2] != "__":
                found.setdefault(id(module), {})[name] = None
            return value

        nn.Module.__getattribute__ = read  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            del nn.Module.__getattribute__

    def watches(self, model: nn.Module) -> Iterator[Watch]:
        """Those that are data, with their values."""
        for path, module in model.named_modules():
            for name in self.names.get(id(module), ()):
                on_class = getattr(type(module), name, None)
                if hasattr(on_class, "__get__") or not is_data(vars(module).get(name, on_class)):
                    continue
                where = f"{path}.{name}" if path else name
                watch = Watch(f"the attribute {where} of {type(model).__name__}", path, (name,))
                yield replace(watch, found=watch.now(module))


class WrittenAttributes:
    """The attributes of all modules as they are now, to see what a forward writes, and to take it back."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.before = {
            path: ({**vars(module)}, {key: {**vars(module)[key]} for key in ("_parameters", "_buffers", "_modules")})
            for path, module in model.named_modules()
        }
        self.prints = {path: self._prints(own, inner) for path, (own, inner) in self.before.items()}
        found: dict[int, Any] = {}
        for own, _ in self.before.values():
            for name, value in own.items():
                if name not in INTERNAL:
                    _find_changeable(value, found)
        self.contents = [(value, value.copy()) for value in found.values()]

    @staticmethod
    def _prints(own: dict[str, Any], inner: dict[str, dict[str, Any]]) -> dict[str, Any]:
        data = {name: fingerprint(value) for name, value in own.items() if name not in INTERNAL}
        return data | {name: id(value) for each in inner.values() for name, value in each.items()}

    def written(self) -> list[tuple[str, str, Any]]:
        """Path, name and value of each attribute that is another one now."""
        found = []
        modules = dict(self.model.named_modules())
        for path, before in self.prints.items():
            if path not in modules:
                continue
            own = modules[path].__dict__
            inner = {key: own[key] for key in ("_parameters", "_buffers", "_modules")}
            now = self._prints(own, inner)
            values = {**own, **inner["_parameters"], **inner["_buffers"], **inner["_modules"]}
            names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
            found += [(path, name, values.get(name)) for name in names]
        return found

    def restore(self) -> None:
        modules = dict(self.model.named_modules())
        for path, (own, inner) in self.before.items():
            if path in modules:
                module = modules[path]
                module.__dict__.clear()
                module.__dict__.update(own)
                for key, values in inner.items():
                    module.__dict__[key].clear()
                    module.__dict__[key].update(values)
        for value, was in self.contents:
            refill(value, was)


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """Fingerprints of what modules of other libraries than PyTorch have as attributes: of counters, say."""
    return {
        f"{path}.{name}" if path else name: fingerprint(value, 1)
        for path, each in module.named_modules()
        if not type(each).__module__.startswith(("torch.nn.", f"{__package__}."))
        for name, value in vars(each).items()
        if name not in INTERNAL and is_data(value)
    }


class Draws:
    """Which opened modules draw random numbers in Python: `uniform` by `rand`, whose value is chosen, `others` as ever.

    `value(scope)` is what `torch.rand` and the like give to the module of that path.
    """

    def __init__(self, value: Callable[[str], float]) -> None:
        self.value = value
        self.uniform: set[str] = set()
        self.others: set[str] = set()
        self._last = RandomStates.now().digests()

    def mark(self, scope: str) -> None:
        """Whoever has drawn since the last mark is the module of this path."""
        now = RandomStates.now().digests()
        if now != self._last:
            self.others.add(scope)
            self._last = now

    @contextmanager
    def chosen(self, scope: Callable[[], str]) -> Iterator[None]:
        def instead(function: Callable[..., Any]) -> Callable[..., Any]:
            def rand(*args: Any, **kwargs: Any) -> Any:
                if any(isinstance(each, fx.Proxy) for each in (*args, *kwargs.values())):
                    return function(*args, **kwargs)
                self.mark(scope())
                with forked():
                    found = function(*args, **kwargs)
                self.uniform.add(scope())
                value = self.value(scope())
                return found.fill_(value) if isinstance(found, Tensor) else found * 0 + value

            return rand

        def uniform(low: float, high: float) -> float:
            self.uniform.add(scope())
            return low + (high - low) * self.value(scope())

        with ExitStack() as stack:
            stack.enter_context(patch.object(random, "uniform", uniform))
            for place, name in ((torch, "rand"), (random, "random"), (np.random, "rand"), (np.random, "random")):
                stack.enter_context(patch.object(place, name, instead(getattr(place, name))))
            yield


@dataclass
class CodeAccess:
    """The reads and writes of a forward's code outside of its arguments."""

    reads: dict[tuple[int, tuple[str, ...]], Watch] = field(default_factory=dict)
    globals_written: dict[str, None] = field(default_factory=dict)
    attributes_written: dict[str, None] = field(default_factory=dict)


def scan(module: nn.Module, path: str = "") -> CodeAccess:
    """Look through the code of a module's forward, and of the functions and methods of its own that it calls."""
    found = CodeAccess()
    forward = vars(module).get("forward", getattr(type(module), "forward", None))
    pending: list[Any] = [forward]
    seen: set[int] = set()
    while pending:
        function = pending.pop()
        for name in ("fget", "__func__", "__wrapped__"):
            function = getattr(function, name, function)
        if not isinstance(function, FunctionType) or id(function.__code__) in seen or _is_hidden(function.__code__):
            continue
        seen.add(id(function.__code__))
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        for code in _codes(function.__code__):
            pending += _look(code, function.__globals__, cells, module, path, found)
    return found


def _is_hidden(code: CodeType) -> bool:
    parents = set(Path(code.co_filename).parents)
    return bool(set(HIDDEN) & parents) or (STANDARD in parents and LIBRARIES not in code.co_filename)


def _is_library(module: ModuleType) -> bool:
    return module.__name__.partition(".")[0] in ("torch", "numpy", "math")


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _look(
    code: CodeType, names: dict[str, Any], cells: Mapping[str, Any], module: nn.Module, path: str, found: CodeAccess
) -> Iterable[Any]:
    """Note what one piece of code reads and writes; functions that it may call."""
    calls: list[Any] = []
    instructions = list(dis.get_instructions(code))
    for i, each in enumerate(instructions):
        name = each.argval
        if each.opname in ("STORE_GLOBAL", "DELETE_GLOBAL") or (each.opname == "STORE_DEREF" and name in cells):
            found.globals_written[name] = None
        elif each.opname == "STORE_ATTR":
            found.attributes_written[name] = None
        elif each.opname in ATTRIBUTE:
            calls += [vars(each)[name] for each in (module, *type(module).__mro__) if name in vars(each)]
        elif each.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF"):
            place = names if "DEREF" not in each.opname else {name: cells.get(name)}
            first = name if place is names else "cell_contents"
            behind = itertools.takewhile(lambda one: one.opname in ATTRIBUTE, instructions[i + 1 :])
            chain, value = _follow(cells.get(name) if place is not names else names, first, [b.argval for b in behind])
            calls.append(value)
            kinds = PLAIN if LIBRARIES in code.co_filename else (*PLAIN, np.generic, *CONTAINERS)
            if chain and isinstance(value, kinds):
                words = ".".join([name, *chain[1:]])
                where = f"{code.co_name} (line {code.co_firstlineno} of {Path(code.co_filename).name})"
                start = names if place is names else cells[name]
                watch = Watch(f"{words}, which {where} reads,", path, chain, start, fingerprint(value))
                found.reads.setdefault((id(start), chain), watch)
    return calls


def _follow(place: Any, first: str, names: Sequence[str]) -> tuple[tuple[str, ...], Any]:
    """The object behind a name and attributes, as far as a look without calls finds it."""
    try:
        value = place[first] if isinstance(place, dict) else getattr(place, first)
    except (AttributeError, KeyError, ValueError):
        return (), None
    chain = [first]
    for name in names:
        if isinstance(value, (nn.Module, Tensor, *PLAIN, *CONTAINERS)):
            break
        inner = getattr(value, "__dict__", {})
        if name not in inner or (isinstance(value, ModuleType) and _is_library(value)):
            break
        chain.append(name)
        value = inner[name]
    return tuple(chain), value


def written_by_all(modules: Sequence[nn.Module], within: bool = True) -> CodeAccess:
    """Reads and writes of the code of these modules, and of all `within` them."""
    found = CodeAccess()
    every = {id(each): each for outer in modules for each in (outer.modules() if within else (outer,))}
    for module in every.values():
        if type(module).__module__.startswith("torch.nn."):
            continue
        one = scan(module)
        found.reads |= one.reads
        found.globals_written |= one.globals_written
        found.attributes_written |= one.attributes_written
    return found


def hidden_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Tensors that a module or one within it reaches by an attribute which is no parameter, buffer or submodule."""
    seen: set[int] = set()

    def look(value: Any, depth: int) -> Iterator[Tensor]:
        if id(value) in seen or isinstance(value, PLAIN):
            return
        seen.add(id(value))
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, nn.Module):
            if not any(each is module for each in value.modules()):  # else it is a way back to what it is part of
                yield from [*value.parameters(), *value.buffers()]
        elif depth and isinstance(value, Mapping):
            for item in list(value.values())[:LONGEST]:
                yield from look(item, depth - 1)
        elif depth and isinstance(value, list | tuple | set | frozenset | deque):
            for item in itertools.islice(value, LONGEST):
                yield from look(item, depth - 1)
        elif depth and isinstance(value, MethodType):
            yield from look(value.__self__, depth - 1)
        elif depth and isinstance(value, FunctionType):
            for cell in value.__closure__ or ():
                try:
                    yield from look(cell.cell_contents, depth - 1)
                except ValueError:
                    continue
        elif depth and not isinstance(value, ModuleType | type):
            for item in list(getattr(value, "__dict__", {}).values()):
                yield from look(item, depth - 1)

    for each in module.modules():
        for name, value in vars(each).items():
            if name not in INTERNAL:
                yield from look(value, DEPTH)


def opened_paths(model: nn.Module, is_whole: Callable[[nn.Module, str], bool]) -> Collection[str]:
    """The paths of modules whose forward is read, the model's own ('') among them."""
    found = [""]

    def visit(module: nn.Module, path: str) -> None:
        for name, child in module.named_children():
            inner = f"{path}.{name}" if path else name
            if not is_whole(child, inner):
                found.append(inner)
                visit(child, inner)

    visit(model, "")
    return found
