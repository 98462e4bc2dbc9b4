"""Random numbers of a user's dataset or transform: they follow from the sample, alike on all ranks.

Before each sample, the generators of Python, NumPy and PyTorch are seeded, and those that the user's code keeps: in
attributes, as albumentations and MONAI do, in lists, closures and globals. Afterwards those of the process return to
their own states. A generator that is hidden elsewhere makes samples that differ, which `map_style` refuses.

Generators belong to the whole process. So the main thread alone seeds them, where the model runs too; a thread that
reads ahead runs the user's code only if it draws nothing.
"""

import inspect
import pickle
import random
import sysconfig
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpi4dl._randomness import forked
from mpi4dl.datasets.augment import DATASET_STREAM

MOST_OBJECTS = 1_000_000  # that are looked at in search of generators
_PLAIN = (str, bytes, int, float, type(None), np.ndarray, torch.Tensor, types.ModuleType)
_LIBRARIES = ("site-packages", "dist-packages", "<frozen", sysconfig.get_path("stdlib"), str(Path(__file__).parents[1]))
_PROCESS: dict[str, Any] = {
    "Python's `random`": random._inst,
    "NumPy's `np.random`": np.random.mtrand._rand,
    "PyTorch's `torch.rand`": torch.default_generator,
}
_KINDS = (random.Random, np.random.Generator, np.random.BitGenerator, np.random.RandomState, torch.Generator)


class DatasetRandomness:
    """The generators that `parts` of a user's program may draw from."""

    def __init__(self, *parts: Any) -> None:
        self._parts = parts
        self.drawn: set[str] = set()  # the names of generators that were drawn from so far
        self.look()

    def look(self) -> None:
        """Find the generators, in a fixed order, such as after a first call, which may make them."""
        seen: dict[int, Any] = {id(each): each for each in _PROCESS.values()}
        todo, own = list(self._parts), []
        while todo and len(seen) < MOST_OBJECTS:
            one = todo.pop()
            if isinstance(one, _PLAIN) or id(one) in seen:
                continue
            seen[id(one)] = one
            if not isinstance(one, _KINDS):
                todo += _within(one)
            elif not isinstance(one, random.SystemRandom):  # which has no state
                own.append((f"a {type(one).__name__} of its own", one))
        self.generators: list[tuple[str, Any]] = [*_PROCESS.items(), *own]

    @contextmanager
    def seeded(self, *key: int) -> Iterator[list[str]]:
        """Generators whose states follow from the key; afterwards the list names those that were drawn from.

        In another thread than the main one nothing is done.
        """
        drawn: list[str] = []
        if threading.current_thread() is not threading.main_thread():
            yield drawn
            return
        with forked():
            for place, (_, each) in enumerate(self.generators):
                words = np.random.SeedSequence((DATASET_STREAM, place, *key)).generate_state(1, np.uint64)
                _seed(each, int(words[0] >> np.uint64(1)))
            seeded = [_state(each) for _, each in self.generators]
            try:
                yield drawn
            finally:
                both = zip(self.generators, seeded, strict=True)
                drawn += [name for (name, each), state in both if _state(each) != state]
                self.drawn.update(drawn)


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, random.Random):
        generator.seed(seed)
    elif isinstance(generator, np.random.RandomState):
        fresh = np.random.RandomState(type(generator._bit_generator)(seed))
        generator.set_state(fresh.get_state(legacy=False))
    else:
        bits = getattr(generator, "bit_generator", generator)
        bits.state = type(bits)(seed).state


def _state(generator: Any) -> bytes:
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    return pickle.dumps(generator.getstate() if isinstance(generator, random.Random) else generator)


def _within(one: Any) -> list[Any]:
    """What an object of the user's holds, and what a function of theirs uses."""
    if isinstance(one, types.MethodType | types.BuiltinMethodType):
        return [one.__self__, getattr(one, "__func__", None)]
    if isinstance(one, types.FunctionType):
        if any(each in one.__code__.co_filename for each in _LIBRARIES) or types.CellType() in (one.__closure__ or ()):
            return []
        used = inspect.getclosurevars(one)
        return [*used.nonlocals.values(), *used.globals.values()]
    if isinstance(one, type):
        return [value for value in vars(one).values() if isinstance(value, (types.FunctionType, *_KINDS))]
    held = one.values() if isinstance(one, dict) else one if isinstance(one, list | tuple) else ()
    return [*held, *type(one).__mro__, *getattr(one, "__dict__", {}).values()]
