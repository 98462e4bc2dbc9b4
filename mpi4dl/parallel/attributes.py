"""What modules keep in Python beside tensors, such as counters: a forward pass that is repeated finds it again."""

import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

PLAIN = (int, float, complex, bool, str, bytes, type(None))
INTERNAL = frozenset(vars(nn.Module()))


class Attributes:
    """The attributes of `modules` that are numbers, text, None or tuples of these, and the states of generators."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._values = [(vars(module), _plain_values(vars(module))) for module in modules]
        self._generators = [
            state for values, _ in self._values for value in values.values() if (state := _state_of(value)) is not None
        ]

    def put(self) -> None:
        """Let modules have these values again."""
        for values, before in self._values:
            now = _plain_values(values)
            for name in now.keys() - before.keys():
                del values[name]
            for name, value in before.items():
                if values.get(name, values) is not value:
                    values[name] = value
        for put in self._generators:
            put()


def _plain_values(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in INTERNAL and _is_plain(value)}


def _is_plain(value: Any) -> bool:
    return isinstance(value, PLAIN) or (isinstance(value, tuple) and all(map(_is_plain, value)))


def _state_of(value: Any) -> Callable[[], Any] | None:
    """What puts a generator back to its state; None if this is no generator."""
    if isinstance(value, torch.Generator):
        drawn = value.get_state()
        return lambda: value.set_state(drawn)
    if isinstance(value, np.random.Generator):
        bits, state = value.bit_generator, value.bit_generator.state
        return lambda: setattr(bits, "state", state)
    if isinstance(value, np.random.RandomState):
        known = value.get_state(legacy=False)
        return lambda: value.set_state(known)
    if isinstance(value, random.Random):
        own = value.getstate()
        return lambda: value.setstate(own)
    return None
