"""Random numbers of a user's dataset or transform: drawn alike on all ranks, and apart from those of the model.

A rank reads its own part of a sample. So whatever the user's code draws for a sample has to be the same wherever and
whenever it runs. `DatasetRandomness.seeded(key)` gives all generators that the code can reach a state that follows from
the key alone, and puts their own states back afterwards. These are the global generators of Python, NumPy and PyTorch,
and those that the code keeps in attributes, closures, defaults and globals.

The global generators belong to the whole process. So this is done in the main thread alone, where the model runs too;
a thread that reads ahead runs the user's code only if it draws nothing.
"""

import random
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from mpi4dl.datasets.augment import DATASET_STREAM

MOST_OBJECTS = 1_000_000  # that are looked at in search of generators
_PLAIN = (str, bytes, bytearray, int, float, complex, bool, type(None), np.ndarray, np.generic, torch.Tensor)
_WORDS = 8  # of 32 bits, from which a generator is seeded


class DatasetRandomness:
    """The generators that `parts` of a user's program may draw from."""

    def __init__(self, *parts: Any) -> None:
        self._parts = parts
        self.drawn: set[str] = set()  # the names of generators that were drawn from so far
        self._global = [_Generator(random.getstate, random.setstate, _python_state, "Python's `random`")]
        self._global.append(_numpys(np.random.mtrand._rand, "NumPy's `np.random`"))
        self._global.append(_torchs(torch.default_generator, "PyTorch's `torch.rand`"))
        self.generators: list[_Generator] = []
        self.look()

    def look(self) -> None:
        """Find the generators of the parts, such as after a first call, which may make them."""
        self.generators = [*self._global, *map(_of, _reachable(self._parts))]

    @contextmanager
    def seeded(self, *key: int) -> Iterator[list[str]]:
        """Generators whose states follow from the key; afterwards the list names those that were drawn from.

        In another thread than the main one nothing is done.
        """
        drawn: list[str] = []
        if threading.current_thread() is not threading.main_thread():
            yield drawn
            return
        words = np.random.SeedSequence((DATASET_STREAM, *key)).generate_state(_WORDS).tolist()
        before = [(each, each.get()) for each in self.generators]
        seeded = [each.seed(words) for each in self.generators]
        try:
            yield drawn
        finally:
            both = zip(self.generators, seeded, strict=True)
            drawn += [each.name for each, state in both if not _alike(each.get(), state)]
            self.drawn.update(drawn)
            for each, state in before:
                each.set(state)


class _Generator:
    """A generator: its state, how it is set, and the state that follows from some words."""

    def __init__(
        self, get: Callable[[], Any], put: Callable[[Any], Any], made: Callable[[Sequence[int]], Any], name: str
    ) -> None:
        self.get, self.set, self._made, self.name = get, put, made, name

    def seed(self, words: Sequence[int]) -> Any:
        """Takes the state that follows from the words, and returns it."""
        self.set(self._made(words))
        return self.get()


def _python_state(words: Sequence[int]) -> Any:
    return random.Random(int.from_bytes(np.asarray(words, "<u4").tobytes(), "little")).getstate()


def _torchs(generator: torch.Generator, name: str) -> _Generator:
    def made(words: Sequence[int]) -> torch.Tensor:
        return torch.Generator().manual_seed(int(words[0]) << 31 | int(words[1]) >> 1).get_state()

    return _Generator(generator.get_state, generator.set_state, made, name)


def _numpys(generator: np.random.RandomState, name: str) -> _Generator:
    def made(words: Sequence[int]) -> Any:
        kind = type(generator._bit_generator)
        return np.random.RandomState(kind(np.random.SeedSequence(words))).get_state(legacy=False)

    return _Generator(partial(generator.get_state, legacy=False), generator.set_state, made, name)


def _of(found: Any) -> _Generator:
    """A generator of the user's own."""
    name = f"a {type(found).__name__} of its own"
    if isinstance(found, np.random.Generator | np.random.BitGenerator):
        bits = found if isinstance(found, np.random.BitGenerator) else found.bit_generator

        kind: Any = type(bits)

        def put(state: Any) -> None:
            bits.state = state

        def made(words: Sequence[int]) -> Any:
            return kind(np.random.SeedSequence(words)).state

        return _Generator(lambda: bits.state, put, made, name)
    if isinstance(found, np.random.RandomState):
        return _numpys(found, name)
    if isinstance(found, torch.Generator):
        return _torchs(found, name)
    return _Generator(found.getstate, found.setstate, _python_state, name)


_KINDS = (random.Random, np.random.Generator, np.random.BitGenerator, np.random.RandomState, torch.Generator)


def _seedable(found: Any) -> bool:
    """Whether a generator has a state on the host; those of the system, and of GPUs, have none."""
    if isinstance(found, random.SystemRandom):
        return False
    return not isinstance(found, torch.Generator) or found.device.type == "cpu"


def _alike(state: Any, other: Any) -> bool:
    if isinstance(state, Mapping):
        return all(_alike(value, other[name]) for name, value in state.items())
    if isinstance(state, torch.Tensor):
        return torch.equal(state, other)
    return np.array_equal(state, other) if isinstance(state, np.ndarray) else bool(state == other)


def _reachable(parts: Sequence[Any]) -> list[Any]:
    """The generators that the user's objects and code lead to, beside the global ones."""
    shared = (random._inst, np.random.mtrand._rand, np.random.mtrand._rand._bit_generator, torch.default_generator)
    seen: dict[int, Any] = {id(one): one for one in shared}
    todo, found = list(parts), []
    while todo and len(seen) < MOST_OBJECTS:
        one = todo.pop()
        if isinstance(one, _PLAIN) or id(one) in seen:
            continue
        seen[id(one)] = one
        if not isinstance(one, _KINDS):
            todo += _within(one)
        elif _seedable(one):
            found.append(one)
            if isinstance(one, np.random.Generator):
                seen[id(one.bit_generator)] = one.bit_generator
    return found


def _within(one: Any) -> list[Any]:
    """The parts of an object of the user's, and the names in its code."""
    if isinstance(one, types.ModuleType):
        return []
    if isinstance(one, types.FunctionType):
        return _of_function(one)
    if isinstance(one, types.MethodType | types.BuiltinMethodType | partial | staticmethod | classmethod | property):
        names = ("__self__", "__func__", "func", "args", "keywords", "fget")
        return [getattr(one, name) for name in names if hasattr(one, name)]
    if isinstance(one, type):
        return [] if _of_library(one.__module__) else [*one.__bases__, *vars(one).values()]
    found: list[Any] = [type(one)]
    if isinstance(one, dict):
        found += [*one.keys(), *one.values()]
    if isinstance(one, list | tuple | set | frozenset):
        found += one
    for kind in type(one).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            member = vars(kind).get(name)
            if isinstance(member, types.MemberDescriptorType):
                found += [getattr(one, name)] if hasattr(one, name) else []
    try:
        return [*found, *vars(one).values()]
    except TypeError:  # an object without attributes of its own
        return found


def _of_function(one: types.FunctionType) -> list[Any]:
    found = [*(one.__defaults__ or ()), *(one.__kwdefaults__ or {}).values(), getattr(one, "__wrapped__", None)]
    for cell in one.__closure__ or ():
        found += [cell.cell_contents] if cell != types.CellType() else []
    if _of_library(one.__module__):
        return found
    names, codes = set[str](), [one.__code__]
    while codes:
        code = codes.pop()
        names |= {*code.co_names}
        codes += [inner for inner in code.co_consts if isinstance(inner, types.CodeType)]
    named = [one.__globals__[name] for name in names if name in one.__globals__]
    # Of a module the code takes attributes, whose names are among those of the code.
    of_modules = [vars(each) for each in named if isinstance(each, types.ModuleType)]
    return [*found, *named, *(inside[name] for inside in of_modules for name in names if name in inside)]


def _of_library(module: str | None) -> bool:
    """Whether a module is Python's or was installed: what it draws from is global, or kept by what was made of it."""
    root = (module or "").partition(".")[0]
    if root == "mpi4dl" or (root in sys.stdlib_module_names and root != "__main__"):
        return True
    file = getattr(sys.modules.get(root), "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file
