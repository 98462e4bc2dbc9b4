"""Decisions of a forward in Python that a trace would freeze: random draws, counters, attributes, globals.

    drawn     torch.rand(1).item() < p, random.random(), np.random.rand()
    written   self.calls += 1, self.seen.append(x), a global counter
    read      self.temperature, a module's global: watched, and refused once they change (`Watch`)

`ForwardState` has all of it that can be put back, for whatever runs a forward again: traces, checks, recomputed blocks,
streamed tiles, and runs on shapes.

A module that draws or writes is kept whole, so that its own Python runs; a model whose own forward does so is refused.
"""

import dis
import itertools
import random
import weakref
from collections import ChainMap, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from operator import is_
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, fx, nn

from mpi4dl._randomness import RandomStates, forked, generator_state
from mpi4dl.parallel.inputs import tensors_within
from mpi4dl.parallel.replicas.buckets import is_expanded
from mpi4dl.parallel.replicas.optimizer_traits import modules_of

INTERNAL = frozenset(dir(nn.Module()))
HOOKS = tuple(name for name in vars(nn.Module()) if "hook" in name and isinstance(getattr(nn.Module(), name), dict))
HIDDEN = (Path(torch.__file__).parent, Path(np.__file__).parent, Path(__file__).parent)
STANDARD = Path(dis.__file__).parent  # Python's own library
LIBRARIES = "site-packages"
CONTAINERS = (list, dict, tuple, set, frozenset, deque, np.ndarray)
OURS = ("mpi4dl.", "torch.")  # whose objects a forward of a user's does not write to itself
ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")
OUTSIDE = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF")
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
    if depth == 0 or isinstance(value, (*PLAIN, type)) or not is_data(value) or type(value).__module__.startswith(OURS):
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

    @property
    def key(self) -> tuple[int, tuple[str, ...]]:
        """The same for watches of one place."""
        return id(self.place), self.names

    def now(self, place: Any = None, depth: int = DEPTH) -> Any:
        """The fingerprint of the value as it is now; None if it is gone."""
        try:
            return fingerprint(self._at(self.names, self.place if place is None else place), depth)
        except (AttributeError, KeyError, ValueError):
            return None

    def keep(self) -> Callable[[], None]:
        """A function that restores the present value, if it is another one then."""
        value, holder = self._at(self.names, self.place), self._at(self.names[:-1], self.place)
        before, put_contents = self.now(), keep_contents([value])

        def restore() -> None:
            if self.now() != before:
                if isinstance(holder, dict):
                    holder[self.names[-1]] = value
                else:
                    setattr(holder, self.names[-1], value)
                put_contents()

        return restore

    @staticmethod
    def _at(names: Sequence[str], value: Any) -> Any:
        for name in names:
            value = value[name] if isinstance(value, dict) else getattr(value, name)
        return value


def _items(container: Any) -> Iterable[Any]:
    return itertools.chain(container, container.values()) if isinstance(container, dict) else container


def keep_contents(values: Iterable[Any]) -> Callable[[], None]:
    """A function that gives the lists, dicts and sets in these values the contents that they have now."""
    found: dict[int, Any] = {}
    for value in values:
        _find_changeable(value, found)
    contents = [(container, container.copy()) for container in found.values()]

    def restore() -> None:
        for container, before in contents:
            if len(container) == len(before) and all(map(is_, _items(container), _items(before))):
                continue  # some forbid changes, such as the configuration of a model of diffusers
            container.clear()
            container.extend(before) if isinstance(container, list | deque) else container.update(before)

    return restore


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


class ForwardState:
    """What a forward of this model may change beside the values of tensors: attributes and hooks of modules, what their
    lists, dicts and sets hold, generators of random numbers among them, and the globals of `watches`.

    `traced`: also which parameters, buffers and modules there are, and what modules of PyTorch's own hold.
    """

    def __init__(self, model: nn.Module, watches: Iterable[Watch] = (), traced: bool = False) -> None:
        self._traced, self._watches = traced, list(watches)
        self._modules = list(model.named_modules())
        self._attributes = [own_attributes(module) for _, module in self._modules]
        # A model may hook its layers when it first runs, and note in an attribute that it has.
        self._kept = [
            (own[name], own[name].copy()) for _, module in self._modules for own in [vars(module)] for name in HOOKS
        ]
        if traced:
            self._kept += [(found, dict(found)) for _, module in self._modules for found in _registered(module)]
        values = [value for own in self._attributes for value in own.values()]
        within = [
            own.values()
            for (_, module), own in zip(self._modules, self._attributes, strict=True)
            if traced or is_foreign(module)
        ]
        self._put = [keep_contents(itertools.chain(*within)), *(watch.keep() for watch in self._watches)]
        self._put += [put for value in values if (put := generator_state(value)) is not None]
        self._before = [self._fingerprints(module) for _, module in self._modules]
        self._of_watches = [watch.now() for watch in self._watches]

    def restore(self) -> None:
        """Let all be as it was, but for what was changed within tensors, arrays and other values."""
        for (_, module), before in zip(self._modules, self._attributes, strict=True):
            own = vars(module)
            for name in own_attributes(module).keys() - before.keys():
                del own[name]
            own.update(before)
        for found, values in self._kept:
            if found or values:
                found.clear()
                found.update(values)
        for put in self._put:
            put()

    def written(self) -> Iterator[tuple[str, str, Any]]:
        """Path of the module, name and value of each attribute that is another one now."""
        for (path, module), before in zip(self._modules, self._before, strict=True):
            now = self._fingerprints(module)
            values = ChainMap(vars(module), *_registered(module))
            yield from ((path, name, values.get(name)) for name in before | now if before.get(name) != now.get(name))

    def globals_written(self) -> Iterator[Watch]:
        """The globals that are others now."""
        return (watch for watch, before in zip(self._watches, self._of_watches, strict=True) if watch.now() != before)

    def changes(self) -> Iterator[str]:
        """The same in words."""
        for path, name, _ in self.written():
            yield f"its attribute {path}.{name}" if path else f"its attribute {name}"
        yield from (watch.words for watch in self.globals_written())

    def _fingerprints(self, module: nn.Module) -> dict[str, Any]:
        if not (self._traced or is_foreign(module)):
            return {}
        depth = DEPTH if self._traced else 1
        found = {
            name: fingerprint(value, depth) for name, value in own_attributes(module).items() if name != "training"
        }
        if self._traced:
            found |= {name: id(value) for each in _registered(module) for name, value in dict.items(each)}
        return found


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module that are its own: no hooks, and nothing that is registered."""
    return {name: value for name, value in vars(module).items() if name not in INTERNAL or name == "training"}


def _registered(module: nn.Module) -> tuple[dict[str, Any], ...]:
    return module._parameters, module._buffers, module._modules


def is_foreign(module: nn.Module) -> bool:
    """Whether this is a module of other libraries than PyTorch, and no part of a model that was cut."""
    return not type(module).__module__.startswith(("torch.nn.", f"{__package__}.", "mpi4dl.parallel.streaming."))


class Buffers:
    """The buffers of a module, or None, and their places: a forward pass may write to them, or put others there."""

    def __init__(self, module: nn.Module) -> None:
        places = [(each._buffers, name) for each in modules_of(module) for name in each._buffers]
        self._found = [(own, name, own[name]) for own, name in places]

    @torch.no_grad()
    def values(self) -> list[Tensor | None]:
        """Copies, made by one call for all of a kind: a model has many small buffers. Others are copied one by one."""
        found: list[Tensor | None] = [buffer for _, _, buffer in self._found]
        kinds: dict[tuple[torch.device, torch.dtype], dict[int, Tensor]] = {}
        for place, x in enumerate(found):
            if x is not None and x.layout is torch.strided:
                kinds.setdefault((x.device, x.dtype), {})[place] = x
            elif x is not None:
                found[place] = x.clone()
        for alike in kinds.values():
            copies = torch.cat([x.reshape(-1) for x in alike.values()]).split([x.numel() for x in alike.values()])
            for (place, x), copy in zip(alike.items(), copies, strict=True):
                found[place] = copy.view(x.shape)
        return found

    @torch.no_grad()
    def assign(self, values: Sequence[Tensor | None]) -> None:
        for (own, name, buffer), value in zip(self._found, values, strict=True):
            if buffer is None or value is None:
                own[name] = value
            else:  # nothing can write to an expanded one
                own[name] = buffer if is_expanded(buffer) else buffer.copy_(value)

    @contextmanager
    def copied(self) -> Iterator[None]:
        """Within this context the module has copies instead, to which it may write."""
        for own, name, buffer in self._found:
            own[name] = None if buffer is None else buffer.detach().clone()
        try:
            yield
        finally:
            for own, name, buffer in self._found:
                own[name] = buffer


@contextmanager
def trial(model: nn.Module) -> Iterator[None]:
    """Behind this context attributes, modes, globals and generators of random numbers are as before it."""
    state = ForwardState(model, watches_of(model))
    with forked():
        try:
            yield
        finally:
            state.restore()


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


def globals_read(module: nn.Module, path: str = "") -> list[Watch]:
    """The globals that are data, and that the code of a module's forward reads, or that of functions it calls."""
    found: dict[Any, Watch] = {}
    seen: set[CodeType] = set()
    own = ChainMap(vars(module), *map(vars, type(module).__mro__))  # type: ignore[arg-type]
    pending = [own.get("forward")]

    def look(code: CodeType, place: Any, names: tuple[str, ...], words: str, value: Any) -> None:
        kinds = PLAIN if LIBRARIES in code.co_filename else (*PLAIN, np.generic, *CONTAINERS)
        if isinstance(value, kinds):
            where = (
                f"{words}, which {code.co_name} (line {code.co_firstlineno} of {Path(code.co_filename).name}) reads,"
            )
            watch = Watch(where, path, names, place, fingerprint(value))
            found.setdefault(watch.key, watch)
            return
        pending.append(value)
        if isinstance(value, (nn.Module, Tensor)) or _is_library(value) or len(names) > DEPTH:
            return
        inner = getattr(value, "__dict__", {})
        for name in names_read(code)[1] & inner.keys():
            look(code, place, (*names, name), f"{words}.{name}", inner[name])

    while pending:
        function = pending.pop()
        for name in ("fget", "__func__", "__wrapped__"):
            function = getattr(function, name, function)
        code = getattr(function, "__code__", None)
        if not isinstance(function, FunctionType) or code is None or code in seen or _is_hidden(code):
            continue
        seen.add(code)
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        names, attributes = names_read(code)
        pending += [own[name] for name in attributes if name in own]
        for name in names:
            place, first = (cells[name], "cell_contents") if name in cells else (function.__globals__, name)
            try:
                value = place[first] if isinstance(place, dict) else getattr(place, first)
            except (KeyError, ValueError):  # a builtin, or a cell that is empty
                continue
            look(code, place, (first,), name, value)
    return list(found.values())


def watches_of(model: nn.Module) -> list[Watch]:
    """The globals that modules of a model read, each once."""
    return list({watch.key: watch for module in model.modules() for watch in globals_read(module)}.values())


@cache
def names_read(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The names that code reads from outside of it, with the functions within it, and the names of attributes."""
    outside, attributes, pending = set[str](), set[str](), [code]
    while pending:
        code = pending.pop()
        pending += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        for each in dis.get_instructions(code):
            if each.opname in OUTSIDE:
                outside.add(each.argval)
            elif each.opname in ATTRIBUTE:
                attributes.add(each.argval)
    return frozenset(outside), frozenset(attributes)


def _is_hidden(code: CodeType) -> bool:
    parents = set(Path(code.co_filename).parents)
    return bool(set(HIDDEN) & parents) or (STANDARD in parents and LIBRARIES not in code.co_filename)


def _is_library(value: Any) -> bool:
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None) or ""
    return name.partition(".")[0] in ("torch", "numpy", "math")


def hidden_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Tensors that a module or one within it reaches by an attribute which is no parameter, buffer or submodule."""
    seen: set[int] = set()
    for each in module.modules():
        for name, value in vars(each).items():
            if name not in INTERNAL:
                yield from tensors_within(value, seen, module)


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
